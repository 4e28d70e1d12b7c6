"""The planner: from the lengths of a global batch to micro-batches, replicas and schedules, chosen together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    LAYER_RECOMPUTES,
    LengthArray,
    SampleLength,
    as_samples,
    check_cover,
    slices_head,
)
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, list_cp_degrees
from dynapipe_ext.costs.adjustments import AdjustedCosts, adjust
from dynapipe_ext.costs.codec import from_json, to_json
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel, MicroBatchPricer, UserCosts, as_cost_model
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.partitioning.pieces import list_piece_sizes
from dynapipe_ext.schedules.candidates import plan_fastest, plan_forwards, refit
from dynapipe_ext.schedules.evaluation.simulate import SharedCores
from dynapipe_ext.schedules.search.optimizer import NO_LIMIT_BYTES
from dynapipe_ext.schedules.search.proposals import StepProblem, make_possible
from dynapipe_ext.schedules.step_plan import StepPlan, bound_batch_ns, certify
from dynapipe_ext.settings.plan_rules import PlanRules, check_placed, check_rules


@dataclass(frozen=True, slots=True)
class Planner(PlanRules):
    """Plans steps. A plan is a pure function of the planner, the samples' lengths and the step.

    The fields of `PlanRules` are keywords, too: `Planner(topology, costs, 64e9, layout="packed")`. `costs` price
    micro-batches on every stage of `topology`. A cost model of one's own needs `num_stages`, `evaluate` and
    `fingerprint`, and is held as `UserCosts`. No pipeline rank exceeds `memory_limit_bytes`. `seed` is for the search.

    `format` and `collectives` describe the messages between ranks, and what replicas issue together. Plans are made
    without them, but they are needed to lower plans to instructions and to prove these. `collectives` may be left out
    for one replica, or if the costs have them. `num_cores`: CPU cores of all ranks together, if ranks share cores
    (None: each has a core or a device of its own). A step then takes at least its work divided by the cores, so the
    search looks for the least work first. Predictions are those of shared cores.

    A replica is a context-parallel group of `topology.width` data parallel ranks. Given `widths`, each step has the
    degree whose plan ends first. Costs are those of one rank at that degree (`CostModel.at_width`). Equal counts hold
    between the replicas of a step, but not if one replica has all ranks, or if only the ranks of a group share experts.
    """

    topology: Topology
    costs: CostModel
    memory_limit_bytes: float
    seed: int = 0
    format: ActivationFormat | None = field(default=None, kw_only=True)
    collectives: ReplicaCollectives | None = field(default=None, kw_only=True)
    num_cores: int | None = field(default=None, kw_only=True)
    widths: tuple[int, ...] = field(default=(), kw_only=True)
    _problems: Mapping[int, StepProblem] = field(init=False, repr=False, compare=False)  # by context-parallel degree

    def __post_init__(self) -> None:
        _check_types(self)
        costs = as_cost_model(self.costs)
        if costs.num_stages != self.topology.num_stages:
            raise ConfigError(
                f"the cost model has {costs.num_stages} stages but the topology has {self.topology.num_stages}:"
                " make both from the same topology"
            )
        if costs.facts.width != self.topology.width:
            costs = costs.at_width(self.topology.width)
        object.__setattr__(self, "costs", costs)
        if fault := next(_list_faults(self), None):
            raise ConfigError(fault)
        check_rules(self, counts_may_be_free=any(map(self._frees_counts, self.allowed_widths)))
        check_placed(self.schedule, self.topology)
        object.__setattr__(self, "_problems", {width: self._make_problem(width) for width in self.allowed_widths})
        _check_pieces(self._problems.values())

    @property
    def allowed_widths(self) -> tuple[int, ...]:
        """The context-parallel degrees that a step may have: data parallel ranks per replica, ascending."""
        return self.widths or (self.topology.width,)

    def _frees_counts(self, width: int) -> bool:
        """Return whether steps at this degree may have any counts, if those at degree 1 need equal ones."""
        if width == 1 or width == self.topology.dp:
            return width > 1
        collectives = self.collectives or self.costs.facts.replica_collectives or ReplicaCollectives()
        return any(collectives.of_micro_batches) and not any(collectives.at_width(width).of_micro_batches)

    def _make_problem(self, cp_degree: int) -> StepProblem:
        """Make the problem of a step at one context-parallel degree.

        Its rules are for full rows, of which each rank of a group has a slice; `pad_multiple` and `max_tokens` are of a
        slice's positions. Samples stay whole if replicas need equal counts.
        """
        rules = self.as_keywords()
        if self.equal_counts and self._frees_counts(cp_degree):
            rules["replica_counts"] = "free"
        elif self.equal_counts:
            rules["pieces"] = "off"
        rules["pad_multiple"] *= cp_degree
        rules["max_tokens"] *= cp_degree
        if not isinstance(rules["pieces"], str):  # no piece is shorter than what rows are rounded up to
            rules["pieces"] = max(rules["pieces"], rules["pad_multiple"])
        kinds = LAYER_RECOMPUTES if self.recompute == "auto" else (self.recompute,)
        return StepProblem(
            topology=self.topology.at_width(cp_degree),
            costs=self.costs.at_width(cp_degree),
            limit_bytes=int(self.memory_limit_bytes),
            rules=PlanRules(**rules),
            kinds=("none",) if self.forward_only else kinds,
            seed=self.seed,
            cores=self.shared_cores and replace(self.shared_cores, tp=self.topology.tp * cp_degree),
        )

    def _problem_at(self, cp_degree: int, reserve_bytes: int = 0) -> StepProblem:
        limit_bytes = int(self.memory_limit_bytes) - reserve_bytes
        if limit_bytes <= 0:
            raise PlanError(f"{limit_bytes} B are left for a rank: raise memory_limit_bytes")
        return replace(self._problems[cp_degree], limit_bytes=limit_bytes)

    @property
    def activation_format(self) -> ActivationFormat:
        if self.format is None:
            raise ConfigError("this planner has no activation format: pass format=ActivationFormat(hidden_size, dtype)")
        return self.format

    @property
    def shared_cores(self) -> SharedCores | None:
        """The CPU cores that ranks share; None if each rank has one of its own."""
        if self.num_cores is None or self.num_cores >= self.topology.world_size:
            return None
        return SharedCores(self.num_cores, self.topology.tp * self.topology.width)

    @property
    def forward_only(self) -> bool:
        return self.costs.facts.forwards_alone

    def for_forwards(self) -> Planner:
        """Return the planner of forward-only steps (evaluation) on the same ranks, for loaders of their own.

        Micro-batches are cut again, as nothing is held between F and B. Rules of backwards take their defaults.
        """
        if self.forward_only:
            return self
        return replace(
            self,
            costs=adjust(self.costs, forward_only=True),
            schedule="adaptive",
            split_backward=False,
            recompute="auto",
            pieces="off",
            noise=0.0,
        )

    @property
    def replica_collectives(self) -> ReplicaCollectives:
        """The collectives that the run issues over replicas: `collectives`, or those of the costs. Raises ConfigError
        if neither is known: with several replicas, a plan cannot be proven without them."""
        if collectives := self.collectives or self.costs.facts.replica_collectives:
            return collectives
        if self.topology.dp == 1:
            return ReplicaCollectives()  # of a group of one, whatever they are
        raise ConfigError(
            f"{_name_costs(self.costs)} do not say what dp {self.topology.dp} replicas issue together: pass"
            " collectives=ReplicaCollectives() if gradients are reduced once at the end of a step, else"
            " ReplicaCollectives.of_zero(stage)"
        )

    def plan(self, lengths: Sequence[SampleLength] | Sequence[int] | LengthArray, *, step: int = 0) -> StepPlan:
        """Return the best plan found for global batch number `step`, which is also a seed.

        Raises PlanError if a sample or micro-batch does not fit, naming it; DataError for bad lengths.
        """
        samples = as_samples(lengths)
        _check_count("step", step)
        if not samples:
            raise PlanError(f"step {step} has 0 samples but a plan needs at least 1: leave the step out")
        return self._certify(self._plan(samples, step, self.allowed_widths), samples)

    def replan(
        self, plan: StepPlan, lengths: Sequence[SampleLength] | Sequence[int] | LengthArray, *, reserve_bytes: int
    ) -> StepPlan:
        """Return a plan of the same samples and step that leaves `reserve_bytes` of every rank free, for message
        buffers that turn out to need memory.

        Under the adaptive schedule the micro-batches stay. Only those replicas that no longer fit are searched again,
        over recomputation, order and dispatch, with a part of the effort. If that fails, the batch is planned again, as
        it is for published schedules, samples in pieces and forward-only steps; at other degrees if none fits at the
        plan's. The certificate's bounds hold for the full memory limit. Raises PlanError if nothing fits.
        """
        samples = as_samples(lengths)
        _check_count("reserve_bytes", reserve_bytes)
        problem = self._problem_at(plan.width, reserve_bytes)
        pieces = list_piece_sizes(problem.rules.pieces, max(s.encoder for s in samples), problem.rules.max_tokens)
        refitted: StepPlan | None = None
        if self.schedule == "adaptive" and not pieces and not self.forward_only:
            with suppress(PlanError):  # these micro-batches do not fit; others may
                refitted = refit(problem, plan)
        again = (
            partial(self._plan, samples, plan.batch.step, widths, reserve_bytes)
            for widths in dict.fromkeys(((plan.width,), self.allowed_widths))
        )
        return self._certify(refitted or next(make_possible(again)), samples)

    def forwards_like(self, plan: StepPlan) -> StepPlan:
        """Return a forward-only step of a training step's micro-batches, each on its replica, in another order.

        So a pass before the step (old or reference log probabilities) computes every position in the same row as the
        step's forward does, with bitwise identical results. `for_forwards` cuts again, for evaluation.

        Raises PlanError for pieces of long samples, for heads in slices, and if the micro-batches do not fit.
        """
        forwards = self.for_forwards()
        for m in plan.batch.micro_batches:
            if m.attention == "carried" or slices_head(m.recompute):
                what = "carries a piece of a long sample" if m.attention == "carried" else "has its head in slices"
                raise PlanError(
                    f"a micro-batch of sample {m.samples[0].index} {what} (recompute {m.recompute!r}), which a"
                    " forward-only step cannot: plan the step with pieces off and recompute none, selective or full"
                )
        replicas = [[m.with_recompute("none") for m in replica.micro_batches] for replica in plan.batch.replicas]
        samples = {s.index: s for m in plan.batch.micro_batches for s in m.samples}
        step_plan = plan_forwards(forwards._problem_at(plan.width), replicas, plan.batch.step)
        return forwards._certify(step_plan, list(samples.values()))

    def _plan(self, samples: list[SampleLength], step: int, widths: Sequence[int], reserve_bytes: int = 0) -> StepPlan:
        return plan_fastest([self._problem_at(width, reserve_bytes) for width in widths], samples, step)

    def _certify(self, plan: StepPlan, samples: Sequence[SampleLength]) -> StepPlan:
        """Return the plan with the bounds of these samples; that of the whole batch holds for all widths."""
        check_cover(plan.batch, samples)
        limit, ranks = int(self.memory_limit_bytes), self.topology.stage_ranks
        certificate = certify(plan, self._problems[plan.width].costs, samples, memory_limit_bytes=limit)
        if self.widths:
            bounds = [
                bound_batch_ns(plan, one.costs, samples, ranks, one.topology.num_replicas, limit)
                for one in self._problems.values()
            ]
            least_ns = None if None in bounds else min(bound for bound in bounds if bound is not None)
            certificate = replace(certificate, batch_ns=least_ns)
        predictions = tuple(
            replace(prediction, lower_bound_ns=bounds.best_ns)
            for prediction, bounds in zip(plan.predictions, certificate.replicas, strict=True)
        )
        return replace(plan, predictions=predictions, certificate=certificate)

    def to_json(self) -> dict[str, Any]:
        """Return everything that changes a plan; `from_json` makes an equal planner in another process."""
        return {
            **self.as_keywords(),
            "memory_limit_bytes": self.memory_limit_bytes,
            "seed": self.seed,
            "num_cores": self.num_cores,
            "topology": to_json(self.topology),
            "costs": cost_model_to_json(self.costs),
            "format": to_json(self.format),
            "collectives": to_json(self.collectives),
            **({"widths": list(self.widths)} if self.widths else {}),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Planner:
        """Return the planner that `to_json` of this version or of an earlier one described."""
        rules = {"noise": 0.0, "split_policy": raw.get("rule"), **raw, "recompute": raw["recompute"] or "auto"}
        if "equal_counts" in raw:
            rules["replica_counts"] = "equal" if raw["equal_counts"] else "free"
        return cls(
            from_json(Topology, raw["topology"]),
            cost_model_from_json(raw["costs"]),
            raw["memory_limit_bytes"],
            raw["seed"],
            format=raw["format"] and from_json(ActivationFormat, raw["format"]),
            collectives=raw["collectives"] and from_json(ReplicaCollectives, raw["collectives"]),
            num_cores=raw["num_cores"],
            widths=tuple(raw.get("widths", ())),
            **{f.name: rules[f.name] for f in fields(PlanRules)},
        )


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ConfigError(f"{name} is {short(value)} but must be an integer from 0 on: leave it out for 0")


def _name_costs(costs: CostModel) -> str:
    """Return the name of the class that prices, without adjustments."""
    return type(costs.prices if isinstance(costs, UserCosts | AdjustedCosts) else costs).__name__


def _check_types(planner: Planner) -> None:
    """Check the classes of a planner's values. Raises ConfigError naming field, value and class."""
    kinds = {"topology": Topology, "format": ActivationFormat, "collectives": ReplicaCollectives}
    for name, kind in kinds.items():
        value = getattr(planner, name)
        if not isinstance(value, kind) and (value is not None or name == "topology"):
            raise ConfigError(f"{name} is {short(value)} but must be of type {kind.__name__}: give such a value")
    if not isinstance(planner.costs, MicroBatchPricer):
        raise ConfigError(f"costs are {short(planner.costs)}, which price nothing: give a cost model (TokenCosts)")


def _check_pieces(problems: Iterable[StepProblem]) -> None:
    """Raise ConfigError if the rules of a degree have pieces and the costs have no prices for them."""
    for rules, costs in ((problem.rules, problem.costs) for problem in problems):
        if rules.pieces != "off" and not costs.facts.prices_pieces:
            raise ConfigError(
                f"pieces is {rules.pieces!r} but these {_name_costs(costs)} have no price for pieces of long samples:"
                " give a table in which `dynapipe profile` has measured some, counted costs (AnalyticCosts), or pieces"
                " off"
            )


def _list_faults(planner: Planner) -> Iterator[str]:
    """Yield what is wrong with limits, degrees and collectives, each by itself, together and with these costs."""
    limit, seed, cores = planner.memory_limit_bytes, planner.seed, planner.num_cores
    widths, topology = planner.widths, planner.topology
    if not isinstance(limit, int | float | np.integer) or isinstance(limit, bool) or not 1 <= limit <= NO_LIMIT_BYTES:
        yield f"memory_limit_bytes is {short(limit)} but must be a number of 1 to 2^60: give the bytes of one device"
    if type(seed) is not int:
        yield f"seed is {short(seed)} but must be an integer: give one such as 0"
    if cores is not None and (type(cores) is not int or cores < 1):
        yield f"num_cores is {short(cores)} but must be a number of at least 1, or None: give the cores of all ranks"
    allowed = list_cp_degrees(topology.dp)
    if not isinstance(widths, tuple) or not set(widths) <= set(allowed) or sorted(set(widths)) != [*widths]:
        yield f"widths {short(widths)} of dp {topology.dp}: give some of {', '.join(map(str, allowed))}, ascending"
    elif widths and topology.width != 1:
        yield f"widths are {short(widths)} but the topology has width {topology.width} already: leave one of both out"
    collectives, priced = planner.collectives, planner.costs.facts.replica_collectives
    if collectives and priced and collectives.of_micro_batches != priced.of_micro_batches:
        yield (
            f"collectives {collectives.of_micro_batches} inside micro-batches and with their gradients were given, but"
            f" the costs are those of a run with {priced.of_micro_batches}: leave collectives out, or give the costs of"
            " this run (zero_stage, ep)"
        )
    if planner.forward_only:
        concerns_backwards = {
            "schedule": planner.schedule != "adaptive",
            "split_backward": planner.split_backward,
            "recompute": planner.recompute not in ("auto", "none"),
            "noise": planner.noise > 0,
        }
        for name in (name for name, is_set in concerns_backwards.items() if is_set):
            yield (
                f"{name} is {getattr(planner, name)!r} but forward-only steps have no backward: leave it out, or use"
                " Planner.for_forwards(), which does"
            )
