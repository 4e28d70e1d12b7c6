"""How well a measured cost table predicts shapes that were not measured for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
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


@dataclass(slots=True)
class HeldOutErrors:
    """|predicted - measured| / measured, by quantity, over micro-batches that the table does not contain."""

    by_quantity: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _LABELS})
    num_unpriced: int = 0  # micro-batches that need shapes which ran out of memory

    def add(self, name: str, predicted: npt.ArrayLike, measured: npt.ArrayLike) -> None:
        self.by_quantity[name] += np.ravel(np.abs(np.subtract(predicted, measured)) / measured).tolist()

    @property
    def mean(self) -> dict[str, float]:
        return {name: float(np.mean(errors)) for name, errors in self.by_quantity.items() if errors}

    @property
    def worst(self) -> dict[str, float]:
        return {name: max(errors) for name, errors in self.by_quantity.items() if errors}

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "worst": self.worst, "unpriced": self.num_unpriced}


def held_out_errors(
    table: CostTable, measure: TimedDevice, groups: Mapping[str, Sequence[MicroBatch]]
) -> dict[str, HeldOutErrors]:
    """Errors for the micro-batches of each group in turn, on one layer of each side with the head: measured, and
    predicted by the table. Nothing of those for which there is no time."""
    one_layer = replace(table, num_layers=1, num_decoder_layers=0, once_bytes={})
    parts: tuple[ModelPart, ...] = ("encoder", "decoder") if table.has_decoder else ("layer",)
    errors = {group: HeldOutErrors() for group in groups}
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    for m, of_group in zip(in_turn, itertools.cycle(errors.values()), strict=False):
        if m is None:
            continue
        try:
            costs = one_layer.evaluate([m])
        except PlanError:
            of_group.num_unpriced += 1
            continue
        if not measure.has_time(sum(measure.expect_s(part, m) for part in (*parts, "head"))):
            continue
        measured_parts = [*(measure(part, m) for part in parts), measure("head", _plain(m))]
        fitting = [one for one in measured_parts if one]
        if len(fitting) < len(measured_parts):
            of_group.num_unpriced += 1
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
                of_group.add(name, predicted[name], value)
    return errors


def errors_of_pieces(
    table: CostTable, measure: TimedDevice, samples: Sequence[Sequence[MicroBatch]], share: float = 1.0
) -> HeldOutErrors:
    """Errors for samples in pieces on one layer without the head: times of every piece, bytes of each sample. Nothing
    of those for which there is no time within a `share` of the limit."""
    assert table.pieces is not None
    alone = replace(table, num_layers=2, topology=Topology(tp=table.topology.tp, pp=2))  # the first of two stages
    errors = HeldOutErrors()
    for pieces in samples:
        if not measure.has_time(measure.expect_s("layer", *pieces), share):
            continue
        try:
            costs, measured = alone.evaluate(pieces), measure("layer", *pieces)
        except PlanError:
            measured = None
        if measured is None:
            errors.num_unpriced += 1
            continue
        held = int(costs.stored_bytes[0].sum())
        sums = SUM_BYTES * table.pieces.kept_values * pieces[-1].samples[0].start  # none before the first backward
        forward_s, backward_s = np.reshape(measured.each_s, (2, -1))
        errors.add("forward_s", costs.forward_ns[0] / 1e9, forward_s)
        errors.add("backward_s", costs.backward_ns[0] / 1e9, backward_s)
        errors.add("stored_bytes", held - sums, measured.stored_bytes)
        errors.add("peak_bytes", held + int(costs.working_bytes[0, -1]), measured.peak_bytes)
    return errors


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
