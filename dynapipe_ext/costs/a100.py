"""The CSV form of DynaPipe's published A100 measurements (arXiv 2311.10418)."""

from __future__ import annotations

import csv
from pathlib import Path

from dynapipe_ext.batch.micro_batches import RECOMPUTES, Recompute
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import COLUMNS, KINDS, LayerKind
from dynapipe_ext.errors import ConfigError, DataError

A100_HIDDEN_SIZE = {"gpt_6.7b": 4096, "t5_11b": 1024}


def hidden_size_of(model: str) -> int:
    """Of a published model. Errors: ConfigError for one that is not known."""
    if model not in A100_HIDDEN_SIZE:
        raise ConfigError(f"hidden size of model {model!r} is not known ({', '.join(A100_HIDDEN_SIZE)} are): give it")
    return A100_HIDDEN_SIZE[model]


def read_rows(path: Path, tp: int) -> list[dict[str, str]]:
    """Rows of a file that were measured at that tensor-parallel degree."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        chosen = [row for row in rows if int(row["tp"]) == tp]
        if not chosen:
            raise ConfigError(f"{path} was measured at tp {sorted({int(row['tp']) for row in rows})}, not at {tp}")
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"cost file {path} cannot be read: {type(error).__name__} {error}") from error
    return chosen


def read_grids(directory: Path, model: str, tp: int) -> dict[tuple[Recompute, LayerKind], Grid]:
    """The grids of a model, by recomputation and kind of layer."""
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
    """Bytes of the parameters of one layer of each kind, the largest of what was measured."""
    largest: dict[str, float] = {}
    for row in read_rows(directory / f"{model}_parameters_mb.csv", tp):
        largest[row["layer"]] = max(largest.get(row["layer"], 0.0), float(row["mb"]) * 1e6)
    return largest
