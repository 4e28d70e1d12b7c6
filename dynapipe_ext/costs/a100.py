"""Reader of DynaPipe's published A100 measurements in CSV files (arXiv 2311.10418)."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from dynapipe_ext.batch.micro_batches import RECOMPUTES, Recompute
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import COLUMNS, HALVES, KINDS, LayerKind
from dynapipe_ext.errors import ConfigError, DataError

_HEAD_SIZE = 128
Grids = Mapping[tuple[Recompute, LayerKind], Grid]
A100_HIDDEN_SIZE = {"gpt_6.7b": 4096, "t5_11b": 1024}


def find_hidden_size(model: str) -> int:
    """Return the hidden size of a published model. Raises ConfigError for an unknown one."""
    if model not in A100_HIDDEN_SIZE:
        raise ConfigError(f"hidden size of model {model!r} is not known ({', '.join(A100_HIDDEN_SIZE)} are): give it")
    return A100_HIDDEN_SIZE[model]


def read_layers(directory: Path, model: str, tp: int, hidden_size: int) -> tuple[Grids, Mapping[str, float]]:
    """Read the grids of a model's layers at degree `tp`, and their largest parameter bytes. Those of half layers are
    derived. Raises DataError for a file that cannot be read, ConfigError if `tp` was not measured."""
    points: dict[tuple[Recompute, LayerKind], dict[str, dict[tuple[int, ...], float]]] = {}
    for suffix, column, value, unit in (("time_ms", "pass", "ms", "_ms"), ("activation_mb", "kind", "mb", "_mb")):
        for row in _read_rows(directory / f"{model}_{suffix}.csv", tp):
            recompute, layer, name = row["recompute"], row["layer"], row[column] + unit
            if recompute not in RECOMPUTES or layer not in KINDS or name not in COLUMNS:
                raise DataError(f"{model}_{suffix}.csv has recompute {recompute!r}, layer {layer!r}, column {name!r}")
            axes = ["micro_batch_size", "encoder_len", *(["decoder_len"] if layer == "decoder" else [])]
            table = points.setdefault((recompute, layer), {}).setdefault(name, {})
            table[tuple(int(row[axis]) for axis in axes)] = float(row[value])
    grids = {key: Grid.from_points(columns) for key, columns in points.items()}
    parameter_bytes: dict[str, float] = {}
    for row in _read_rows(directory / f"{model}_parameters_mb.csv", tp):
        parameter_bytes[row["layer"]] = max(parameter_bytes.get(row["layer"], 0.0), float(row["mb"]) * 1e6)
    if any(kind == "decoder" for _, kind in grids):  # layers of pairs stay whole
        return grids, parameter_bytes
    # Of 12 h^2 weights 4 are attention's.
    sizes = {"attention": parameter_bytes["encoder"] / 3, "mlp": parameter_bytes["encoder"] * 2 / 3}
    return grids | halve_grids(grids, hidden_size), parameter_bytes | sizes


def _read_rows(path: Path, tp: int) -> list[dict[str, str]]:
    """Read the rows of a file that were measured at a tensor-parallel degree."""
    try:
        with path.open(newline="") as file:
            rows = [(int(row["tp"]), row) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"cost file {path} cannot be read: {type(error).__name__} {error}") from error
    if chosen := [row for degree, row in rows if degree == tp]:
        return chosen
    raise ConfigError(f"{path} was measured at tp {sorted({degree for degree, _ in rows})}, not at {tp}")


def halve_grids(grids: Grids, hidden_size: int) -> dict[tuple[Recompute, LayerKind], Grid]:
    """Derive the grids of attention and MLP from those of full decoder-only layers, by FLOPs and bytes.

    In layers of width h over rows of L positions, attention takes 8 h^2 + 4 h L FLOPs of 24 h^2 + 4 h L. With n heads
    it stores 11 h + 5 n L of 34 h + 5 n L bytes and its norm 2 h more (Korthikanti et al. 2022, sec. 4.1). Selective
    recomputation leaves out scores (5 n L). Recomputed in full, each half stores what the layer does, its input.
    """
    halves: dict[tuple[Recompute, LayerKind], Grid] = {}
    for (recompute, _), grid in [item for item in grids.items() if item[0][1] == "encoder"]:
        length = np.array([point[1] for point in itertools.product(*grid.axes)])
        attention = (8 * hidden_size + 4 * length) / (24 * hidden_size + 4 * length)
        scores = 5 / _HEAD_SIZE if recompute == "none" else 0.0
        for name, work, stored in zip(HALVES, (attention, 1 - attention), ((13.0, scores), (21.0, 0.0)), strict=True):
            shares = np.stack([work if column.endswith("_ms") else np.ones_like(work) for column in grid.columns])
            of_bytes = None if recompute == "full" else (*stored, 34.0, scores)
            halves[recompute, name] = replace(grid, values=shares * grid.values, share_of_bytes=of_bytes)
    return halves
