"""The CSV form of DynaPipe's published A100 measurements (arXiv 2311.10418)."""

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


def read_rows(path: Path, tp: int) -> list[dict[str, str]]:
    """Read the rows of a file that were measured at a tensor-parallel degree."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        chosen = [row for row in rows if int(row["tp"]) == tp]
        if not chosen:
            raise ConfigError(f"{path} was measured at tp {sorted({int(row['tp']) for row in rows})}, not at {tp}")
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"cost file {path} cannot be read: {type(error).__name__} {error}") from error
    return chosen


def read_layers(
    directory: Path, model: str, tp: int, hidden_size: int
) -> tuple[Mapping[tuple[Recompute, LayerKind], Grid], Mapping[str, float]]:
    """Read grids and parameter bytes of a model's layers as measured, and derive those of halves by their share."""
    grids, parameter_bytes = read_grids(directory, model, tp), read_parameter_bytes(directory, model, tp)
    if any(kind == "decoder" for _, kind in grids):  # layers of pairs stay whole
        return grids, parameter_bytes
    # Of 12 h^2 weights 4 are attention's.
    sizes = {"attention": parameter_bytes["encoder"] / 3, "mlp": parameter_bytes["encoder"] * 2 / 3}
    return grids | halve_grids(grids, hidden_size), parameter_bytes | sizes


def read_grids(directory: Path, model: str, tp: int) -> dict[tuple[Recompute, LayerKind], Grid]:
    """Read the grids of a model, by recomputation mode and kind of layer."""
    points: dict[tuple[Recompute, LayerKind], dict[str, dict[tuple[int, ...], float]]] = {}
    for suffix, column, value, unit in (("time_ms", "pass", "ms", "_ms"), ("activation_mb", "kind", "mb", "_mb")):
        for row in read_rows(directory / f"{model}_{suffix}.csv", tp):
            recompute, layer, name = row["recompute"], row["layer"], row[column] + unit
            if recompute not in RECOMPUTES or layer not in KINDS or name not in COLUMNS:
                raise DataError(f"{model}_{suffix}.csv has recompute {recompute!r}, layer {layer!r}, column {name!r}")
            axes = ["micro_batch_size", "encoder_len", *(["decoder_len"] if layer == "decoder" else [])]
            table = points.setdefault((recompute, layer), {}).setdefault(name, {})
            table[tuple(int(row[axis]) for axis in axes)] = float(row[value])
    return {key: Grid.from_points(columns) for key, columns in points.items()}


def read_parameter_bytes(directory: Path, model: str, tp: int) -> dict[str, float]:
    """Read the largest measured parameter bytes of a layer, by kind."""
    largest: dict[str, float] = {}
    for row in read_rows(directory / f"{model}_parameters_mb.csv", tp):
        largest[row["layer"]] = max(largest.get(row["layer"], 0.0), float(row["mb"]) * 1e6)
    return largest


def halve_grids(grids: Grids, hidden_size: int) -> dict[tuple[Recompute, LayerKind], Grid]:
    """Derive the grids of attention and MLP from those of full decoder-only layers, by FLOPs and bytes.

    In layers of width h over rows of L positions, attention takes 8 h^2 + 4 h L FLOPs of 24 h^2 + 4 h L. With n heads
    it stores 11 h + 5 n L of 34 h + 5 n L bytes and its norm 2 h more (Korthikanti et al. 2022, sec. 4.1). Selective
    recomputation leaves out scores (5 n L). Recomputed in full, each half stores what the layer does, its input.
    """
    halves: dict[tuple[Recompute, LayerKind], Grid] = {}
    for (recompute, kind), grid in grids.items():
        if kind != "encoder":
            continue
        length = np.array([point[1] for point in itertools.product(*grid.axes)])
        attention = (8 * hidden_size + 4 * length) / (24 * hidden_size + 4 * length)
        scores = 5 / _HEAD_SIZE if recompute == "none" else 0.0
        of_halves = (attention, (13.0, scores)), (1 - attention, (21.0, 0.0))
        for name, (work, stored) in zip(HALVES, of_halves, strict=True):
            shares = np.stack([work if column.endswith("_ms") else np.ones_like(work) for column in grid.columns])
            of_bytes = None if recompute == "full" else (*stored, 34.0, scores)
            halves[recompute, name] = replace(grid, values=shares * grid.values, share_of_bytes=of_bytes)
    return halves
