"""From the lengths of a global batch to a planned step: split, replicas and schedule, judged together by simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.config import Rule, ScheduleName
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.lengths import LengthArray, SampleLength, sample_lengths
from dynapipe_ext.plan import (
    RECOMPUTES,
    GlobalBatchPlan,
    Layout,
    LossNorm,
    MicroBatch,
    Recompute,
    ReplicaPlan,
    check_cover,
    round_up,
)
from dynapipe_ext.planning.balance import assign_replicas
from dynapipe_ext.planning.equal import check_enough, split_padded_equal
from dynapipe_ext.planning.packing import micro_batch_evaluate, split_packed
from dynapipe_ext.planning.padded import (
    RememberedShapes,
    ShapeCosts,
    ShapeEvaluate,
    bottleneck,
    shape_evaluate,
    split_padded,
)
from dynapipe_ext.planning.rules import dynapipe_rule, fixed_rows, packed_documents, pad_to_batch_max
from dynapipe_ext.schedules.actions import PipelineSchedule, linear_schedule
from dynapipe_ext.schedules.bounds import lower_bound_ns
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.optimizer import optimize_replicas, renumbered
from dynapipe_ext.schedules.published import published_schedule
from dynapipe_ext.schedules.simulate import simulate
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.schedules.validate import validate
from dynapipe_ext.topology import Topology

Replicas = list[list[MicroBatch]]


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans steps. A plan is a pure function of these settings, the samples' lengths and the step.

    `costs` price micro-batches on every stage of `topology`; no pipeline rank exceeds `memory_limit_bytes`. `effort`
    counts the moves tried (order, replica, recomputation, dispatch rule), half of them on the best of the candidate
    splits. `split_backward` runs backwards as I and W under the adaptive schedule. `max_tokens` caps the positions of
    one micro-batch (0: memory alone does). `rule` other than "dynapipe-ext" splits as a peer does, for comparisons.
    `recompute` None lets the planner choose per micro-batch. `activation_format` is needed to lower plans to
    instructions, not to make them.
    """

    topology: Topology
    costs: CostModel
    memory_limit_bytes: float
    seed: int = 0
    layout: Layout = field(default="padded", kw_only=True)
    schedule: ScheduleName = field(default="adaptive", kw_only=True)
    rule: Rule = field(default="dynapipe-ext", kw_only=True)
    pad_multiple: int = field(default=8, kw_only=True)
    max_tokens: int = field(default=0, kw_only=True)
    effort: int = field(default=6000, kw_only=True)
    split_backward: bool = field(default=False, kw_only=True)
    loss_norm: LossNorm = field(default="tokens", kw_only=True)
    recompute: Recompute | None = field(default=None, kw_only=True)
    equal_counts: bool = field(default=False, kw_only=True)
    format: ActivationFormat | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.costs.num_stages != self.topology.num_stages:
            raise ConfigError(
                f"the cost model has {self.costs.num_stages} stages but the topology has {self.topology.num_stages}:"
                " make both from the same topology"
            )
        if self.memory_limit_bytes <= 0 or self.pad_multiple < 1 or self.max_tokens < 0 or self.effort < 0:
            raise ConfigError(
                f"memory_limit_bytes {self.memory_limit_bytes}, pad_multiple {self.pad_multiple}, max_tokens"
                f" {self.max_tokens} and effort {self.effort} must be positive (the last two may be 0)"
            )
        if self.split_backward and self.schedule != "adaptive":
            raise ConfigError(
                f"split_backward goes with the adaptive schedule, not with {self.schedule!r}: choose one of them"
            )
        if self.max_tokens and self.max_tokens < self.pad_multiple:
            raise ConfigError(f"max_tokens {self.max_tokens} is below pad_multiple {self.pad_multiple}")

    @property
    def activation_format(self) -> ActivationFormat:
        if self.format is None:
            raise ConfigError("this planner has no activation format: pass format=ActivationFormat(hidden_size, dtype)")
        return self.format

    @property
    def _shape_costs(self) -> ShapeCosts:
        if not hasattr(self.costs, "evaluate_shapes"):
            raise ConfigError(f"{type(self.costs).__name__} cannot price padded shapes: it lacks evaluate_shapes")
        return cast(ShapeCosts, self.costs)

    def plan(self, lengths: Sequence[SampleLength] | Sequence[int] | LengthArray, *, step: int = 0) -> StepPlan:
        """The best plan found for one global batch.

        Raises PlanError, naming the sample or micro-batch, where nothing fits the limits.
        """
        samples = _as_samples(lengths)
        if not samples:
            raise PlanError(f"step {step} has no samples to plan")
        candidates = self._candidates(samples, step)
        tried: list[tuple[StepPlan, int]] = []
        refusal: PlanError | None = None
        for index, replicas in enumerate(candidates):
            try:
                tried.append((self._schedule(replicas, step, self.effort // (2 * len(candidates))), index))
            except PlanError as error:  # this split holds too much at once; others may fit
                refusal = refusal or error
        if not tried:
            assert refusal is not None
            raise refusal
        best, index = min(tried, key=lambda found: (found[0].makespan_s, found[1]))
        if self.schedule == "adaptive" and self.effort:
            longer = self._schedule(candidates[index], step, self.effort - self.effort // 2)
            best = min(best, longer, key=lambda plan: plan.makespan_s)
        check_cover(best.batch, samples)
        return best

    def _candidates(self, samples: list[SampleLength], step: int) -> list[Replicas]:
        """Splits to judge, each as the micro-batches of every replica.

        A batch of fewer samples than replicas leaves the last of them empty, unless counts must be equal.
        """
        if self.equal_counts:
            check_enough(len(samples), self.topology.dp)
        if self.rule != "dynapipe-ext":
            return _possible(self._peer_rules(samples))
        limit, stages = int(self.memory_limit_bytes), self.topology.num_stages
        busy = min(self.topology.dp, len(samples))
        priced = RememberedShapes(self._shape_costs) if self.layout == "padded" else None

        def split(min_in_flight: int, dp: int) -> Replicas:
            return self._assign(self._split(samples, priced, min_in_flight, limit, dp), busy, step)

        return _possible(
            partial(split, min_in_flight, dp)
            for min_in_flight in dict.fromkeys((1, (stages + 1) // 2, stages))
            for dp in ((busy,) if self.equal_counts else dict.fromkeys((busy, 1)))
        )

    @property
    def _kinds(self) -> tuple[Recompute, ...]:
        return RECOMPUTES if self.recompute is None else (self.recompute,)

    def _shapes(self, priced: ShapeCosts, min_in_flight: int) -> dict[Recompute, ShapeEvaluate]:
        return {kind: shape_evaluate(priced, recompute=kind, min_in_flight=min_in_flight) for kind in self._kinds}

    def _split(
        self, samples: list[SampleLength], priced: ShapeCosts | None, min_in_flight: int, limit: int, dp: int
    ) -> list[MicroBatch]:
        pp = self.topology.num_stages
        if priced is not None:
            split = split_padded_equal if self.equal_counts else split_padded
            return split(
                samples,
                self._shapes(priced, min_in_flight),
                pp=pp,
                dp=dp,
                max_bytes=limit,
                max_tokens=self.max_tokens or None,
                pad_multiple=self.pad_multiple,
            )
        longest = max(max(s.encoder, s.decoder) for s in samples)
        room = self.max_tokens or max(4096, round_up(longest, self.pad_multiple))
        refusal: PlanError | None = None
        for kind in self._kinds:
            try:
                return split_packed(
                    samples,
                    micro_batch_evaluate(self.costs, min_in_flight=min_in_flight),
                    max_tokens=room,
                    pp=pp,
                    dp=dp,
                    max_bytes=limit,
                    pad_multiple=self.pad_multiple,
                    recompute=kind,
                    equal_counts=self.equal_counts,
                )
            except PlanError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _assign(self, micro_batches: list[MicroBatch], busy: int, step: int) -> Replicas:
        """Micro-batches over the first `busy` replicas, none of them empty."""
        micro_batches = _at_least(micro_batches, busy)
        time_ns, _ = bottleneck(self.costs.evaluate(micro_batches))
        groups = assign_replicas(time_ns.tolist(), busy, equal_counts=self.equal_counts, seed=step)
        idle: Replicas = [[] for _ in range(self.topology.dp - busy)]
        return [[micro_batches[i] for i in group] for group in groups] + idle

    def _peer_rules(self, samples: list[SampleLength]) -> Iterator[Callable[[], Replicas]]:
        """A peer's splits; where its rule leaves a size open, several are judged, so that the peer is at its best."""
        dp, multiple, limit = self.topology.dp, self.pad_multiple, int(self.memory_limit_bytes)
        longest = round_up(max(s.encoder for s in samples), multiple)
        room = max(round_up(self.max_tokens, multiple), round_up(max(s.decoder for s in samples), multiple), longest)
        match self.rule:
            case "batch-max":
                most = (self.max_tokens or limit) // longest
                make = partial(pad_to_batch_max, samples, dp=dp, pad_multiple=multiple, equal_counts=self.equal_counts)
                for rows in (1, 2, 4, 8, 16, 32):
                    for kind in self._kinds if rows == 1 or rows <= most else ():
                        yield partial(make, rows_per_micro_batch=rows, recompute=kind)
            case "fixed-rows":
                cut = partial(fixed_rows, samples, dp=dp, pad_multiple=multiple, equal_counts=self.equal_counts)
                for kind in self._kinds:
                    yield partial(cut, row_len=room, recompute=kind)
            case "packed-balanced":
                pack = partial(packed_documents, samples, micro_batch_evaluate(self.costs), max_tokens=room, dp=dp)
                for kind in self._kinds:
                    yield partial(pack, pad_multiple=multiple, recompute=kind, equal_counts=self.equal_counts)
            case _:
                stages = self.topology.num_stages
                rule = partial(
                    dynapipe_rule, samples, self._shapes(self._shape_costs, stages), pp=stages, dp=dp, max_bytes=limit
                )
                yield partial(rule, pad_multiple=multiple, equal_counts=self.equal_counts)

    def _schedule(self, replicas: Replicas, step: int, effort: int) -> StepPlan:
        limit = int(self.memory_limit_bytes)
        plans, predictions = [], []
        replicas, schedules = self._ordered(replicas, effort)
        for dp_rank, (micro_batches, schedule) in enumerate(zip(replicas, schedules, strict=True)):
            costs = self.costs.evaluate(micro_batches)
            validate(schedule, len(micro_batches))
            peaks = peak_bytes(schedule, costs)
            if max(peaks) > limit:
                rank = int(np.argmax(peaks))
                raise PlanError(
                    f"replica {dp_rank}: {schedule.name} needs {max(peaks)} B on pipeline rank {rank} but the limit is"
                    f" {limit} B: use the adaptive schedule, smaller micro-batches, recomputation or more tp"
                )
            trace = simulate(schedule, costs)
            plans.append(ReplicaPlan(dp_rank, tuple(micro_batches)))
            bound = 0
            if micro_batches:
                bound = lower_bound_ns(schedule.stage_ranks, costs, split=schedule.is_split)
            predictions.append(
                Prediction(
                    makespan_ns=round(trace.makespan_s * 1e9),
                    lower_bound_ns=bound,
                    peak_bytes=peaks,
                    bubble_ratio=trace.bubble_ratio,
                    trace=trace,
                )
            )
        batch = GlobalBatchPlan(step=step, replicas=tuple(plans), loss_norm=self.loss_norm, seed=self.seed)
        return StepPlan(batch, tuple(schedules), tuple(predictions))

    def _ordered(self, replicas: Replicas, effort: int) -> tuple[Replicas, tuple[PipelineSchedule, ...]]:
        """Micro-batches of each replica in the order in which they enter stage 0, numbered so in its schedule."""
        if self.schedule != "adaptive":
            return replicas, tuple(self._natural(len(replica)) for replica in replicas)
        micro_batches = [m for replica in replicas for m in replica]
        ends = np.cumsum([0] + [len(replica) for replica in replicas]).tolist()
        allowed = (
            self._kinds if self.rule == "dynapipe-ext" else tuple(dict.fromkeys(m.recompute for m in micro_batches))
        )
        start = self.costs.evaluate(micro_batches)
        found = optimize_replicas(
            [self._under(kind, micro_batches, start) for kind in allowed],
            [list(range(a, b)) for a, b in itertools.pairwise(ends)],
            [allowed.index(m.recompute) for m in micro_batches],
            memory_limit_bytes=int(self.memory_limit_bytes),
            split=self.split_backward,
            effort=effort,
            seed=self.seed,
            stage_ranks=self.topology.stage_ranks,
            equal_counts=self.equal_counts,
        )
        chosen = [replace(m, recompute=allowed[kind]) for m, kind in zip(micro_batches, found.kinds, strict=True)]
        return (
            [[chosen[m] for m in group] for group in found.groups],
            tuple(
                renumbered(schedule, {m: i for i, m in enumerate(group)})
                for schedule, group in zip(found.schedules, found.groups, strict=True)
            ),
        )

    def _under(self, kind: Recompute, micro_batches: list[MicroBatch], like: MicroBatchCosts) -> MicroBatchCosts:
        """Costs of all micro-batches under one kind of recomputation; INFEASIBLE where one cannot be priced."""
        asked = [replace(m, recompute=kind) for m in micro_batches]
        try:
            return self.costs.evaluate(asked)
        except PlanError:
            return MicroBatchCosts.join([self._alone(m, like) for m in asked], like=like)

    def _alone(self, micro_batch: MicroBatch, like: MicroBatchCosts) -> MicroBatchCosts:
        try:
            return self.costs.evaluate([micro_batch])
        except PlanError:
            column = like.take([0])
            never = np.full_like(column.forward_ns, INFEASIBLE)
            return replace(column, forward_ns=never, backward_ns=never)

    def _natural(self, num_micro_batches: int) -> PipelineSchedule:
        if not num_micro_batches:
            return linear_schedule(self.schedule, [()] * self.topology.num_stages)
        return published_schedule(self.schedule, self.topology.num_stages, num_micro_batches)

    def with_memory_limit(self, limit_bytes: int) -> Planner:
        """The same planner under another limit. Raises PlanError for a limit that leaves nothing."""
        if limit_bytes <= 0:
            raise PlanError(f"{limit_bytes} B are left for a rank: raise memory_limit_bytes")
        return replace(self, memory_limit_bytes=limit_bytes)

    def to_json(self) -> dict[str, Any]:
        """Everything that changes a plan; `from_json` makes an equal planner in another process."""
        raw = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        return {
            **raw,
            "topology": asdict(self.topology),
            "costs": cost_model_to_json(self.costs),  # type: ignore[arg-type]
            "format": None if self.format is None else asdict(self.format),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Planner:
        topology: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in raw["topology"].items()
        }
        return cls(
            Topology(**topology),
            cost_model_from_json(raw["costs"]),
            format=None if raw["format"] is None else ActivationFormat(**raw["format"]),
            **{name: raw[name] for name in _PLAIN_FIELDS},
        )


def _possible(makers: Iterable[Callable[[], Replicas]]) -> list[Replicas]:
    """What the makers make; where all refuse, the first refusal is raised."""
    made: list[Replicas] = []
    refusal: PlanError | None = None
    for make in makers:
        try:
            made.append(make())
        except PlanError as error:
            refusal = refusal or error
    if not made:
        assert refusal is not None
        raise refusal
    return made


def _at_least(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Cut the largest micro-batch of several samples in two until there are `count`; there are as many samples."""
    parts = list(micro_batches)
    while len(parts) < count:
        several = [k for k, part in enumerate(parts) if len(part.samples) > 1]
        i = max(several, key=lambda k: (parts[k].rows, parts[k].padded_tokens, -k))
        half = len(parts[i].samples) // 2
        parts[i : i + 1] = [
            replace(parts[i], samples=parts[i].samples[:half]),
            replace(parts[i], samples=parts[i].samples[half:]),
        ]
    return parts


_PLAIN_FIELDS = (
    "memory_limit_bytes",
    "seed",
    "layout",
    "schedule",
    "rule",
    "pad_multiple",
    "max_tokens",
    "effort",
    "loss_norm",
    "recompute",
    "equal_counts",
    "split_backward",
)


def _as_samples(lengths: Sequence[SampleLength] | Sequence[int] | LengthArray) -> list[SampleLength]:
    if len(lengths) and isinstance(lengths[0], SampleLength):
        return list(lengths)
    return sample_lengths(lengths)  # type: ignore[arg-type]
