"""One call that plans for any training loop: from lengths to each replica's samples, micro-batches and a plan.

It is a pure function over `Planner`, for loops that keep their own data, model and schedule. It starts no process and
imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, as_samples
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import MicroBatchPricer
from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.search.optimizer import NO_LIMIT_BYTES
from dynapipe_ext.schedules.step_plan import StepPlan

_EFFORT = 500  # moves of the search: more than a tenth of a percent is seldom left to those of a Planner's default
_RULES: dict[str, Any] = {
    "layout": "packed", "pad_multiple": 1, "recompute": "none", "effort": _EFFORT
}  # fmt: skip
_RATE: dict[str, Any] = {"flops_per_s": 350e12, "overhead_ns": 100_000, "layer_overhead_ns": 60_000}  # about an H100's

SampleGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PlannedMicroBatches:
    """The result of `plan_micro_batches`. Entry d of each tuple belongs to replica d; samples are given by index.

    `plan` has the same micro-batches as values (`plan.batch`), their order of actions on every pipeline rank, the
    prediction and the bounds. `planner` made it.
    """

    plan: StepPlan
    planner: Planner
    indices: tuple[int, ...]  # of the samples, in the order of the lengths

    @property
    def micro_batches(self) -> tuple[SampleGroups, ...]:
        """The sample indices of each replica's micro-batches, in injection order: [replica][micro-batch][sample]."""
        return tuple(
            tuple(tuple(s.index for s in m.samples) for m in replica.micro_batches)
            for replica in self.plan.batch.replicas
        )

    @property
    def partitions(self) -> SampleGroups:
        """The sample indices of each replica, micro-batch after micro-batch; a sample in pieces is listed once."""
        return tuple(tuple(dict.fromkeys(i for group in groups for i in group)) for groups in self.micro_batches)

    @property
    def local_micro_batches(self) -> tuple[SampleGroups, ...]:
        """`micro_batches` with each sample's position in its replica's partition in place of its index."""
        places = [dict(zip(partition, count(), strict=False)) for partition in self.partitions]
        return tuple(
            tuple(tuple(place[i] for i in group) for group in groups)
            for place, groups in zip(places, self.micro_batches, strict=True)
        )

    @property
    def num_micro_batches(self) -> tuple[int, ...]:
        return tuple(len(replica.micro_batches) for replica in self.plan.batch.replicas)

    def forwards(self) -> StepPlan:
        """Return a forward-only plan of the same micro-batches, in a good order of their own (`Planner.forwards_like`).

        Old and reference log probabilities from it are bitwise those of the step's own forward, so the first ratio of
        new to old probabilities is exactly 1.
        """
        return self.planner.forwards_like(self.plan)

    def shares(self, counts: Any = None) -> tuple[tuple[float, ...], ...]:
        """Return the share of each micro-batch's own mean in the step's loss, [replica][micro-batch]; their sum is 1.

        `counts`, a list or array with a number for each sample in the order of the lengths, are what the loss is
        divided by. None: target tokens (a mean over tokens); 1 for each: a mean over sequences; or the tokens that a
        filter leaves, or a group's weight. A micro-batch's own mean is over the same counts; if these are 0, so is its
        share. The sum of share x mean is then the loss, whatever the plan. A loop that averages over its micro-batches
        and over replicas multiplies each share by their numbers, `num_micro_batches[d]` x `len(partitions)`.

        Raises ConfigError for counts that are not one number from 0 on per sample, or are all 0, and for pieces.
        """
        replicas = self.plan.batch.replicas
        if counts is None:
            groups = [[float(m.target_tokens) for m in replica.micro_batches] for replica in replicas]
        else:
            by_index = self._index_counts(counts)
            groups = [[sum(by_index[i] for i in group) for group in groups] for groups in self.micro_batches]
        whole = sum(map(sum, groups))
        if not whole:
            raise ConfigError("the counts of all samples are 0, which a loss cannot be divided by: leave the step out")
        return tuple(tuple(own / whole for own in of_replica) for of_replica in groups)

    def _index_counts(self, counts: Any) -> dict[int, float]:
        counts = counts.tolist() if hasattr(counts, "tolist") else counts  # of narrow types sums overflow
        if not isinstance(counts, Sequence) or isinstance(counts, str):
            raise ConfigError(f"counts are {short(counts)}: give a number for each sample, in a list or an array")
        if len(counts) != len(self.indices):
            raise ConfigError(f"{len(counts)} counts for {len(self.indices)} samples: give one for each")
        if any(m.attention == "carried" for m in self.plan.batch.micro_batches):
            raise ConfigError("counts are of whole samples but the plan has pieces: plan with pieces off")
        for index, number in zip(self.indices, counts, strict=True):
            if not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ConfigError(f"the count of sample {index} is {short(number)}: give numbers from 0 on")
        return dict(zip(self.indices, counts, strict=True))


def plan_micro_batches(
    lengths: Sequence[int] | Sequence[SampleLength] | LengthArray,
    topology: Topology,
    costs: MicroBatchPricer | Architecture | Mapping[str, Any],
    *,
    max_tokens: int = 0,
    memory_limit_bytes: float | None = None,
    **rules: Any,
) -> PlannedMicroBatches:
    """Plan the micro-batches of one step over the replicas of `topology`: packed rows unless `layout` is "padded".

    `costs` are a cost model, or describe the model: an `Architecture`, or the content of a config.json. A described
    model is counted in 16 bits, with sequence parallelism and a distributed optimizer, at 350 TFLOP/s per device, 0.1
    ms per action and 0.06 ms per layer. No micro-batch has more than `max_tokens` positions, and no rank more than
    `memory_limit_bytes`: give either or both.

    The `rules` are those of `PlanRules`. Four defaults differ: layout "packed"; `pad_multiple` 1, as the loop pads and
    counts that in its lengths; recompute "none", the one mode of the loop's model; `effort` 500. With replica_counts
    "equal" all replicas have equally many micro-batches: for collectives of replicas inside these (experts, or ZeRO 2
    and 3), or because the loop asks for it. Otherwise counts differ freely, and may be 0.

    Raises PlanError for no samples, for a sample above a limit, which it names, and for fewer samples than replicas of
    equal counts; DataError for bad lengths; ConfigError for settings.
    """
    if memory_limit_bytes is None and not max_tokens:
        raise ConfigError(
            "max_tokens is 0 and memory_limit_bytes is None, so nothing limits micro-batches: give the positions of"
            " one, the bytes of a rank, or both"
        )
    if not isinstance(topology, Topology):
        raise ConfigError(f"topology is {short(topology)} but must be a Topology: give such as Topology(tp=2, pp=4)")
    names = {field.name for field in fields(Planner)}
    if unknown := next((name for name in rules if name not in names), None):
        raise ConfigError(f"{unknown} is not a rule of plans{did_you_mean(unknown, names)} (PlanRules has all)")
    planner = Planner(
        topology,
        _make_costs(costs, topology),
        NO_LIMIT_BYTES if memory_limit_bytes is None else _to_python(memory_limit_bytes),
        max_tokens=_to_python(max_tokens),
        **{name: _to_python(rule) for name, rule in {**_RULES, **rules}.items()},
    )
    samples = as_samples(lengths)
    return PlannedMicroBatches(planner.plan(samples), planner, tuple(s.index for s in samples))


def _to_python(number: Any) -> Any:
    """Convert a number that numpy made, as loops take their limits from arrays of lengths."""
    return number.item() if isinstance(number, np.generic) else number


def _make_costs(costs: MicroBatchPricer | Architecture | Mapping[str, Any], topology: Topology) -> Any:
    if isinstance(costs, Mapping):
        from dynapipe_ext.models.huggingface import read_config

        costs = read_config(costs, "costs")
    if isinstance(costs, Architecture):
        return AnalyticCosts(
            costs.padded(topology.tp), topology, **_RATE, sequence_parallel=topology.tp > 1, distributed_optimizer=True
        )
    return costs
