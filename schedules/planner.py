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
from dynapipe_ext.planning.equal import check_enough
from dynapipe_ext.planning.packing import micro_batch_evaluate, split_packed
from dynapipe_ext.planning.padded import (
    Caps,
    Order,
    ShapeCosts,
    ShapeEvaluate,
    bottleneck,
    ordered,
    shape_evaluate,
)
from dynapipe_ext.planning.rules import dynapipe_rule, fixed_rows, packed_documents, pad_to_batch_max
from dynapipe_ext.planning.runs import Cut, Runs, price_runs
from dynapipe_ext.schedules.actions import PipelineSchedule, linear_schedule
from dynapipe_ext.schedules.bounds import replica_bounds
from dynapipe_ext.schedules.certificate import certify
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.optimizer import Settings, Start, optimize_best
from dynapipe_ext.schedules.published import published_schedule
from dynapipe_ext.schedules.simulate import simulate
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.schedules.validate import validate
from dynapipe_ext.topology import Topology

Replicas = list[list[MicroBatch]]
Schedules = tuple[PipelineSchedule, ...]


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
        if self.equal_counts:
            check_enough(len(samples), self.topology.dp)
        own = self.rule == "dynapipe-ext"
        if own and self.layout == "padded" and self.schedule == "adaptive":
            replicas, schedules = self._from_runs(samples, step)
        else:
            candidates = self._split(samples, step) if own else _possible(self._peer_rules(samples))
            replicas, schedules = self._best_of(candidates)
        limit = int(self.memory_limit_bytes)
        priced = [self.costs.evaluate(micro_batches) for micro_batches in replicas]
        plan = self._predicted(replicas, schedules, priced, step)
        check_cover(plan.batch, samples)
        bounds = [
            replica_bounds(schedule, one, split=schedule.is_split, memory_limit_bytes=limit)
            for schedule, one in zip(schedules, priced, strict=True)
        ]
        predictions = tuple(replace(p, lower_bound_ns=b.best_ns) for p, b in zip(plan.predictions, bounds, strict=True))
        certificate = certify(plan, self.costs, samples, memory_limit_bytes=limit, bounds=bounds)
        return replace(plan, predictions=predictions, certificate=certificate)

    @property
    def _settings(self) -> Settings:
        return Settings(
            memory_limit_bytes=int(self.memory_limit_bytes),
            split=self.split_backward,
            effort=self.effort,
            seed=self.seed,
            stage_ranks=self.topology.stage_ranks,
            equal_counts=self.equal_counts,
        )

    def _from_runs(self, samples: list[SampleLength], step: int) -> tuple[Replicas, Schedules]:
        """Split, replicas and schedule searched together: cuts of the ordered batch move as well."""
        priced = [self._runs(samples, "sorted")]
        if any(s.decoder for s in samples):
            priced.append(self._runs(samples, "classes"))
        starts: list[tuple[Runs, Start]] = []
        refusal: PlanError | None = None
        for runs in priced:
            for cuts in self._first_cuts(runs):
                if isinstance(cuts, PlanError):
                    refusal = refusal or cuts
                    continue
                busy, idle = self._busy(samples)
                groups = assign_replicas(runs.times(cuts), busy, equal_counts=self.equal_counts, seed=step) + idle
                start = Start(
                    kind_costs=runs.kind_costs,
                    shapes=runs.shapes,
                    runs=tuple(cuts),
                    groups=tuple(map(tuple, groups)),
                )
                starts.append((runs, start))
        if not starts:
            assert refusal is not None
            raise refusal
        index, found = optimize_best([start for _, start in starts], self._settings)
        runs = starts[index][0]
        return [[runs.micro_batch(cut) for cut in replica] for replica in found.replicas], found.schedules

    def _runs(self, samples: list[SampleLength], order: Order) -> Runs:
        caps = Caps(
            max_bytes=int(self.memory_limit_bytes), max_tokens=self.max_tokens or None, pad_multiple=self.pad_multiple
        )
        weight = self.topology.dp * (self.topology.num_stages - 1)
        return price_runs(ordered(samples, order), self._shape_costs, self._kinds, caps, weight=weight)

    def _first_cuts(self, runs: Runs) -> Iterator[list[Cut] | PlanError]:
        """Where to begin: cuts for pipelines that hold many micro-batches in flight, and few; or why there are none."""
        stages, dp = self.topology.num_stages, min(self.topology.dp, len(runs.order))
        before: list[Cut] = []
        for min_in_flight in dict.fromkeys((stages, (stages + 1) // 2, 1)):
            if min_in_flight == 1 and before:
                return  # what fits only by itself is for batches that fit no other way
            try:
                cuts = runs.cuts(pp=stages, dp=dp, min_in_flight=min_in_flight, equal_counts=self.equal_counts)
            except PlanError as error:
                yield error
            else:
                if cuts != before:
                    yield cuts
                before = cuts

    def _busy(self, samples: Sequence[SampleLength]) -> tuple[int, list[list[int]]]:
        """How many replicas have work, and nothing for each of the others."""
        busy = min(self.topology.dp, len(samples))
        return busy, [[] for _ in range(self.topology.dp - busy)]

    def _split(self, samples: list[SampleLength], step: int) -> list[Replicas]:
        """Splits of the batch for what the search cannot cut: packed rows, and published schedules."""
        stages = self.topology.num_stages
        busy, idle = self._busy(samples)

        def assigned(micro_batches: list[MicroBatch]) -> Replicas:
            parts = _at_least(micro_batches, busy)
            time_ns, _ = bottleneck(self.costs.evaluate(parts))
            groups = assign_replicas(time_ns.tolist(), busy, equal_counts=self.equal_counts, seed=step) + idle
            return [[parts[i] for i in group] for group in groups]

        def packed(min_in_flight: int) -> Replicas:
            return assigned(self._packed(samples, min_in_flight, busy))

        if self.layout == "packed":
            return _possible(partial(packed, held) for held in dict.fromkeys((1, (stages + 1) // 2, stages)))
        priced = [self._runs(samples, "sorted")]
        made: list[Replicas] = []
        refusal: PlanError | None = None
        for runs in priced:
            for cuts in self._first_cuts(runs):
                if isinstance(cuts, PlanError):
                    refusal = refusal or cuts
                else:
                    made.append(assigned([runs.micro_batch(cut) for cut in cuts]))
        if not made:
            assert refusal is not None
            raise refusal
        return made

    def _best_of(self, candidates: Sequence[Replicas]) -> tuple[Replicas, Schedules]:
        """Of micro-batches that stay what they are, the replicas and schedules that end first."""
        if self.schedule == "adaptive":
            starts = [self._start(replicas) for replicas in candidates]
            index, found = optimize_best([start for start, _ in starts], self._settings)
            micro_batches, kinds = [m for replica in candidates[index] for m in replica], starts[index][1]
            chosen = [
                [replace(micro_batches[first], recompute=kinds[kind]) for first, _, kind in replica]
                for replica in found.replicas
            ]
            return chosen, found.schedules
        best: tuple[int, Replicas, Schedules] | None = None
        refusal: PlanError | None = None
        for replicas in candidates:
            schedules = tuple(self._natural(len(replica)) for replica in replicas)
            try:
                plan = self._predicted(replicas, schedules, [self.costs.evaluate(r) for r in replicas], 0)
            except PlanError as error:  # this split holds too much at once; others may fit
                refusal = refusal or error
                continue
            makespan_ns = max(prediction.makespan_ns for prediction in plan.predictions)
            if best is None or makespan_ns < best[0]:
                best = (makespan_ns, replicas, schedules)
        if best is None:
            assert refusal is not None
            raise refusal
        return best[1:]

    def _start(self, replicas: Replicas) -> tuple[Start, tuple[Recompute, ...]]:
        """Micro-batches for the search, and the kinds of recomputation it may choose from."""
        micro_batches = [m for replica in replicas for m in replica]
        ends = np.cumsum([0] + [len(replica) for replica in replicas]).tolist()
        own = self.rule == "dynapipe-ext"
        kinds = self._kinds if own else tuple(dict.fromkeys(m.recompute for m in micro_batches))
        like = self.costs.evaluate(micro_batches)
        start = Start.of_micro_batches(
            [self._under(kind, micro_batches, like) for kind in kinds],
            [range(a, b) for a, b in itertools.pairwise(ends)],
            [kinds.index(m.recompute) for m in micro_batches],
        )
        return start, kinds

    @property
    def _kinds(self) -> tuple[Recompute, ...]:
        return RECOMPUTES if self.recompute is None else (self.recompute,)

    def _shapes(self, priced: ShapeCosts, min_in_flight: int) -> dict[Recompute, ShapeEvaluate]:
        return {kind: shape_evaluate(priced, recompute=kind, min_in_flight=min_in_flight) for kind in self._kinds}

    def _packed(self, samples: list[SampleLength], min_in_flight: int, dp: int) -> list[MicroBatch]:
        pp, limit = self.topology.num_stages, int(self.memory_limit_bytes)
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

    def _predicted(
        self, replicas: Replicas, schedules: Schedules, priced: Sequence[MicroBatchCosts], step: int
    ) -> StepPlan:
        """The plan, validated and simulated apart from what made it; its lower bounds are to come."""
        limit = int(self.memory_limit_bytes)
        plans, predictions = [], []
        for dp_rank, (micro_batches, schedule, costs) in enumerate(zip(replicas, schedules, priced, strict=True)):
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
            predictions.append(
                Prediction(
                    makespan_ns=round(trace.makespan_s * 1e9),
                    lower_bound_ns=0,
                    peak_bytes=peaks,
                    bubble_ratio=trace.bubble_ratio,
                    trace=trace,
                )
            )
        batch = GlobalBatchPlan(step=step, replicas=tuple(plans), loss_norm=self.loss_norm, seed=self.seed)
        return StepPlan(batch, tuple(schedules), tuple(predictions))

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
