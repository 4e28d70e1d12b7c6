"""From the lengths of a global batch to a planned step: split, replicas and schedule, judged together by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.config import Rule, ScheduleName
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
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
from dynapipe_ext.planning.packing import micro_batch_evaluate, split_packed
from dynapipe_ext.planning.padded import ShapeCosts, bottleneck, shape_evaluate, split_padded
from dynapipe_ext.planning.rules import dynapipe_rule, fixed_rows, packed_documents, pad_to_batch_max
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.adaptive import best_order
from dynapipe_ext.schedules.bounds import lower_bound_ns
from dynapipe_ext.schedules.gpipe import gpipe
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.simulate import simulate
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.schedules.validate import validate
from dynapipe_ext.topology import Topology

Replicas = list[list[MicroBatch]]


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans steps. A plan is a pure function of these settings, the samples' lengths and the step.

    `costs` price micro-batches on every stage of `topology`; no pipeline rank exceeds `memory_limit_bytes`. `effort`
    counts the injection orders tried per candidate split. `max_tokens` caps the positions of one micro-batch (0: memory
    alone does). `rule` other than "dynapipe-ext" splits as a peer does, for comparisons. `recompute` None lets the
    planner choose per micro-batch. `activation_format` is needed to lower plans to instructions, not to make them.
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
    effort: int = field(default=32, kw_only=True)
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
        best: StepPlan | None = None
        refusal: PlanError | None = None
        for replicas in self._candidates(samples, step):
            try:
                found = self._schedule(replicas, step)
            except PlanError as error:  # this split holds too much at once; others may fit
                refusal = refusal or error
                continue
            if best is None or found.makespan_s < best.makespan_s:
                best = found
        if best is None:
            assert refusal is not None
            raise refusal
        check_cover(best.batch, samples)
        return best

    def _candidates(self, samples: list[SampleLength], step: int) -> list[Replicas]:
        """Splits to judge, each as the micro-batches of every replica."""
        topology, limit = self.topology, int(self.memory_limit_bytes)
        if self.rule != "dynapipe-ext":
            return self._peer_rule(samples)
        kinds = RECOMPUTES if self.recompute is None else (self.recompute,)
        if len(samples) < topology.dp:
            # A last, small batch: some replicas have nothing to do.
            idle: Replicas = [[] for _ in range(topology.dp - len(samples))]
            one_each = [
                [[MicroBatch((sample,), self.layout, kind, pad_multiple=self.pad_multiple)] for sample in samples]
                for kind in kinds
            ]
            return [singles + idle for singles in one_each]
        candidates: list[Replicas] = []
        refusal: PlanError | None = None
        for min_in_flight in dict.fromkeys((1, (topology.num_stages + 1) // 2, topology.num_stages)):
            for dp in dict.fromkeys((topology.dp, 1)):
                try:
                    micro_batches = self._split(samples, kinds, min_in_flight, limit, dp)
                except PlanError as error:
                    refusal = refusal or error
                    continue
                candidates.append(self._assign(micro_batches, step))
        if not candidates:
            assert refusal is not None
            raise refusal
        return candidates

    def _split(
        self, samples: list[SampleLength], kinds: Sequence[Recompute], min_in_flight: int, limit: int, dp: int
    ) -> list[MicroBatch]:
        pp = self.topology.num_stages
        if self.layout == "padded":
            evaluate = {
                kind: shape_evaluate(self._shape_costs, recompute=kind, min_in_flight=min_in_flight) for kind in kinds
            }
            micro_batches = split_padded(
                samples,
                evaluate,
                pp=pp,
                dp=dp,
                max_bytes=limit,
                max_tokens=self.max_tokens or None,
                pad_multiple=self.pad_multiple,
            )
            return self._at_least(micro_batches)
        longest = max(max(s.encoder, s.decoder) for s in samples)
        room = self.max_tokens or max(4096, round_up(longest, self.pad_multiple))
        refusal: PlanError | None = None
        for kind in kinds:
            try:
                return split_packed(
                    samples,
                    micro_batch_evaluate(self.costs, min_in_flight=min_in_flight),
                    max_tokens=room,
                    pp=pp,
                    dp=dp if len(samples) >= self.topology.dp else 1,
                    max_bytes=limit,
                    pad_multiple=self.pad_multiple,
                    recompute=kind,
                )
            except PlanError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _at_least(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Cut the largest micro-batches in two until every replica has one (and counts divide, where they must)."""
        dp, parts = self.topology.dp, list(micro_batches)
        while len(parts) < dp or (self.equal_counts and len(parts) % dp):
            i = max(range(len(parts)), key=lambda k: (parts[k].rows, parts[k].padded_tokens, -k))
            if len(parts[i].samples) < 2:
                raise PlanError(
                    f"{len(parts)} samples do not divide over {dp} replicas of equal counts: enlarge the batch"
                )
            half = len(parts[i].samples) // 2
            parts[i : i + 1] = [
                replace(parts[i], samples=parts[i].samples[:half]),
                replace(parts[i], samples=parts[i].samples[half:]),
            ]
        return parts

    def _assign(self, micro_batches: list[MicroBatch], step: int) -> Replicas:
        dp = self.topology.dp
        if len(micro_batches) < dp or (self.equal_counts and len(micro_batches) % dp):
            micro_batches = self._at_least(micro_batches)
        time_ns, _ = bottleneck(self.costs.evaluate(micro_batches))
        groups = assign_replicas(time_ns.tolist(), dp, equal_counts=self.equal_counts, seed=step)
        return [[micro_batches[i] for i in group] for group in groups]

    def _peer_rule(self, samples: list[SampleLength]) -> list[Replicas]:
        """A peer's split; where its rule leaves a size open, several are judged, so that the peer is at its best."""
        dp, multiple, limit = self.topology.dp, self.pad_multiple, int(self.memory_limit_bytes)
        longest = round_up(max(s.encoder for s in samples), multiple)
        room = max(round_up(self.max_tokens, multiple), longest)
        kinds = RECOMPUTES if self.recompute is None else (self.recompute,)
        match self.rule:
            case "batch-max":
                most = (self.max_tokens or limit) // longest
                rows = [rows for rows in (1, 2, 4, 8, 16, 32) if rows == 1 or rows <= most]
                return [
                    pad_to_batch_max(samples, dp=dp, rows_per_micro_batch=n, pad_multiple=multiple, recompute=kind)
                    for n in rows
                    for kind in kinds
                ]
            case "fixed-rows":
                return [
                    fixed_rows(samples, row_len=room, dp=dp, pad_multiple=multiple, recompute=kind) for kind in kinds
                ]
            case "packed-balanced":
                evaluate = micro_batch_evaluate(self.costs)
                return [
                    packed_documents(samples, evaluate, max_tokens=room, dp=dp, pad_multiple=multiple, recompute=kind)
                    for kind in kinds
                ]
            case _:
                in_flight = self.topology.num_stages
                shapes = {
                    kind: shape_evaluate(self._shape_costs, recompute=kind, min_in_flight=in_flight) for kind in kinds
                }
                return [dynapipe_rule(samples, shapes, pp=in_flight, dp=dp, max_bytes=limit, pad_multiple=multiple)]

    def _schedule(self, replicas: Replicas, step: int) -> StepPlan:
        limit = int(self.memory_limit_bytes)
        plans, schedules, predictions = [], [], []
        for dp_rank, micro_batches in enumerate(replicas):
            costs = self.costs.evaluate(micro_batches)
            order, schedule = list(range(len(micro_batches))), self._natural(len(micro_batches))
            if self.schedule == "adaptive" and micro_batches:
                order, schedule = best_order(costs, memory_limit_bytes=limit, effort=self.effort, seed=self.seed)
            # Micro-batches are numbered in the order in which they enter stage 0.
            micro_batches, costs = [micro_batches[i] for i in order], costs.take(order)
            schedule = _renumbered(schedule, order)
            validate(schedule, len(micro_batches))
            peaks = peak_bytes(schedule, costs)
            if max(peaks) > limit:
                rank = int(np.argmax(peaks))
                raise PlanError(
                    f"replica {dp_rank}: {schedule.name} needs {max(peaks)} B on pipeline rank {rank} but the limit is"
                    f" {limit} B: use the adaptive schedule, smaller micro-batches, recomputation or more tp"
                )
            trace = simulate(schedule, costs)
            makespan_ns = round(trace.makespan_s * 1e9)
            plans.append(ReplicaPlan(dp_rank, tuple(micro_batches)))
            schedules.append(schedule)
            predictions.append(
                Prediction(
                    makespan_ns=makespan_ns,
                    lower_bound_ns=lower_bound_ns(schedule.stage_ranks, costs, split=False) if micro_batches else 0,
                    peak_bytes=peaks,
                    bubble_ratio=trace.bubble_ratio,
                    trace=trace,
                )
            )
        batch = GlobalBatchPlan(step=step, replicas=tuple(plans), loss_norm=self.loss_norm, seed=self.seed)
        return StepPlan(batch, tuple(schedules), tuple(predictions))

    def _natural(self, num_micro_batches: int) -> PipelineSchedule:
        make = gpipe if self.schedule == "gpipe" else one_f_one_b
        return make(self.topology.num_stages, num_micro_batches)

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
)


def _as_samples(lengths: Sequence[SampleLength] | Sequence[int] | LengthArray) -> list[SampleLength]:
    if len(lengths) and isinstance(lengths[0], SampleLength):
        return list(lengths)
    return sample_lengths(lengths)  # type: ignore[arg-type]


def _renumbered(schedule: PipelineSchedule, order: Sequence[int]) -> PipelineSchedule:
    place = {micro_batch: i for i, micro_batch in enumerate(order)}
    ranks = tuple(
        tuple(replace(action, micro_batch=place[action.micro_batch]) for action in rank) for rank in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
