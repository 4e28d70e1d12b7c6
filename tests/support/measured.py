"""Measured cost tables for tests of what reads them."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path


def measured_csv(folder: Path, model: str, *, decoder: bool) -> None:
    """A small grid in the measured tables' form: time and bytes in proportion to positions."""
    time: list[list[object]] = [
        ["tp", "recompute", "layer", "pass", "micro_batch_size", "encoder_len", "decoder_len", "ms"]
    ]
    memory: list[list[object]] = [[*time[0][:3], "kind", *time[0][4:7], "mb"]]
    for layer in ("encoder", *(["decoder"] if decoder else []), "postprocess"):
        for rows, enc, dec in itertools.product((1, 16), (16, 512), (16, 512) if layer == "decoder" else (0,)):
            tokens = rows * (enc + dec)
            for name, factor in (("forward", 1e-3), ("backward", 2e-3)):
                time.append([1, "none", layer, name, rows, enc, dec, 0.1 + factor * tokens])
            if layer != "postprocess":
                memory += [[1, "none", layer, name, rows, enc, dec, 1e-3 * tokens] for name in ("stored", "peak")]
    sizes = [
        ["tp", "recompute", "layer", "mb"],
        *([1, "none", name, 1] for name in ("embedding", "encoder", "decoder")),
    ]
    for suffix, table in (("time_ms", time), ("activation_mb", memory), ("parameters_mb", sizes)):
        with (folder / f"{model}_{suffix}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table)
