"""How well a measured cost table predicts shapes that were not measured for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, slices_head
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.features import SUM_BYTES
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.surface import ModelPart
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import PlanError
from dynapipe_ext.tools.console import percent

_LABELS = {
    "forward_s": "F seconds",
    "backward_s": "B seconds",
    "input_s": "I seconds",
    "weight_s": "W seconds",
    "stored_bytes": "stored bytes",
    "peak_bytes": "peak bytes",
}
_SMALL = 0.02  # of a forward: shorter actions, such as a W without work, have no meaningful ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutErrors:
    """|predicted - measured| / measured, by quantity, over micro-batches that the table does not contain."""

    by_quantity: Mapping[str, Sequence[float]]
    num_unpriced: int = 0  # micro-batches that need shapes which ran out of memory

    @classmethod
    def joined(cls, parts: Sequence[HeldOutErrors]) -> HeldOutErrors:
        by_quantity = {name: [error for one in parts for error in one.by_quantity[name]] for name in _LABELS}
        return cls(by_quantity=by_quantity, num_unpriced=sum(one.num_unpriced for one in parts))

    @property
    def mean(self) -> dict[str, float]:
        return {name: float(np.mean(errors)) for name, errors in self.by_quantity.items() if errors}

    @property
    def worst(self) -> dict[str, float]:
        return {name: max(errors) for name, errors in self.by_quantity.items() if errors}

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "worst": self.worst, "unpriced": self.num_unpriced}


def held_out_errors(table: CostTable, measure: TimedDevice, micro_batches: Sequence[MicroBatch]) -> HeldOutErrors:
    """Errors for every micro-batch on one layer of each side with the head: measured, and predicted by the table.
    Nothing of those for which there is no time."""
    one_layer = replace(table, num_layers=1, num_decoder_layers=0, once_bytes={})
    parts: tuple[ModelPart, ...] = ("encoder", "decoder") if table.has_decoder else ("layer",)
    errors: dict[str, list[float]] = {name: [] for name in _LABELS}
    unpriced = 0
    for m in micro_batches:
        try:
            costs = one_layer.evaluate([m])
        except PlanError:
            unpriced += 1
            continue
        if not measure.has_time(sum(measure.expect_s(part, m) for part in (*parts, "head"))):
            continue
        measured_parts = [*(measure(part, m) for part in parts), measure("head", _plain(m))]
        fitting = [one for one in measured_parts if one]
        if len(fitting) < len(measured_parts):
            unpriced += 1
            continue
        forward, backward, weight, stored = (
            int(values[0, 0]) for values in (costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.stored_bytes)
        )
        measured = {name: sum(getattr(part, name) for part in fitting) for name in _LABELS}
        before = itertools.accumulate((part.stored_bytes for part in fitting), initial=0)
        measured["peak_bytes"] = max(n + part.peak_bytes for n, part in zip(before, fitting, strict=False))
        predicted = {
            "forward_s": forward / 1e9,
            "backward_s": backward / 1e9,
            "input_s": (backward - weight) / 1e9,
            "weight_s": weight / 1e9,
            "stored_bytes": stored,
            "peak_bytes": stored + int(costs.working_bytes[0, 0]),
        }
        for name, value in measured.items():
            if name.endswith("bytes") or value > _SMALL * measured["forward_s"]:
                errors[name].append(abs(predicted[name] - value) / value)
    return HeldOutErrors(by_quantity=errors, num_unpriced=unpriced)


def errors_of_pieces(
    table: CostTable, measure: TimedDevice, samples: Sequence[Sequence[MicroBatch]], share: float = 1.0
) -> HeldOutErrors:
    """Errors for samples in pieces on one layer without the head: times of every piece, bytes of each sample. Nothing
    of those for which there is no time within a `share` of the limit."""
    assert table.pieces is not None
    alone = replace(table, num_layers=2, topology=Topology(tp=table.topology.tp, pp=2))  # the first of two stages
    errors: dict[str, list[float]] = {name: [] for name in _LABELS}
    unpriced = 0
    for pieces in samples:
        if not measure.has_time(measure.expect_s("layer", *pieces), share):
            continue
        try:
            costs, measured = alone.evaluate(pieces), measure("layer", *pieces)
        except PlanError:
            measured = None
        if measured is None:
            unpriced += 1
            continue
        held = int(costs.stored_bytes[0].sum())
        sums = SUM_BYTES * table.pieces.kept_values * pieces[-1].samples[0].start  # none before the first backward
        promised = {"stored_bytes": held - sums, "peak_bytes": held + int(costs.working_bytes[0, -1])}
        true_s = np.reshape(measured.each_s, (2, -1))
        off = np.abs(np.stack([costs.forward_ns[0], costs.backward_ns[0]]) / 1e9 - true_s) / true_s
        errors["forward_s"] += off[0].tolist()
        errors["backward_s"] += off[1].tolist()
        for name, num_bytes in promised.items():
            true = getattr(measured, name)
            errors[name].append(abs(num_bytes - true) / true)
    return HeldOutErrors(by_quantity=errors, num_unpriced=unpriced)


def _plain(m: MicroBatch) -> MicroBatch:
    """As the head sees it: computed whole or in slices."""
    kind: Recompute = "head" if slices_head(m.recompute) else "none"
    return MicroBatch(m.samples, m.layout, kind, pad_multiple=m.pad_multiple)


def errors_table(errors: Mapping[str, HeldOutErrors]) -> Table:
    """A table with a row for each quantity: mean and worst error of every group of micro-batches."""
    table = Table(title="held-out error")
    table.add_column("")
    for group, held_out in errors.items():
        count = max((len(values) for values in held_out.by_quantity.values()), default=0)
        count_text = f"{count} of {count + held_out.num_unpriced}" if held_out.num_unpriced else str(count)
        table.add_column(f"{group} ({count_text}), mean", justify="right")
        table.add_column("worst", justify="right")
    for name, label in _LABELS.items():
        figures = (figures for held_out in errors.values() for figures in (held_out.mean, held_out.worst))
        cells = [percent(by_quantity.get(name)) for by_quantity in figures]
        table.add_row(label, *cells)
    return table
