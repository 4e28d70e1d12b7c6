"""From the lengths of a global batch to a planned step: split, replicas and schedule, judged together by simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from dynapipe_ext.batch.micro_batches import (
    LAYER_RECOMPUTES,
    RECOMPUTES,
    GlobalBatchPlan,
    LengthArray,
    MicroBatch,
    Recompute,
    ReplicaPlan,
    SampleLength,
    as_samples,
    check_cover,
    slices_head,
    with_sliced_head,
)
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel, as_cost_model, bottleneck
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.partitioning.halving import finer_splits
from dynapipe_ext.partitioning.pieces import PieceChoice, PieceChoices, piece_sizes
from dynapipe_ext.partitioning.rules import check_enough
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor
from dynapipe_ext.schedules.evaluation.simulate import SharedCores
from dynapipe_ext.schedules.planner_checks import (
    check_bounds,
    check_collectives,
    check_forward_only,
    check_priced_pieces,
    check_types,
    check_widths,
    class_of_costs,
    room_of,
)
from dynapipe_ext.schedules.published.by_name import make_schedule_of_costs
from dynapipe_ext.schedules.rounds import in_rounds, takes_rounds
from dynapipe_ext.schedules.search.flow_shop import order_forwards
from dynapipe_ext.schedules.search.optimizer import SearchSettings, optimize_best
from dynapipe_ext.schedules.search.proposals import Proposal, Proposals, Replicas
from dynapipe_ext.schedules.step_plan import (
    ReplicaCosts,
    StepPlan,
    certify,
    least_ns,
    predicted,
    replica_costs,
    shared_by_twins,
)
from dynapipe_ext.schedules.trials import StepTrial, soonest, times_of_whole_ns, whole_or_pieces
from dynapipe_ext.settings.plan_rules import PlanRules, check_placed, check_rules

Schedules = tuple[PipelineSchedule, ...]

_LESS = 4  # forwards alone leave less to choose: their cuts and replicas get one part in so many of the effort
_AGAIN = 4  # making replicas fit in less memory gets one part in so many of the effort
_ROUNDS_OF_HALVES = 3  # in which rows of documents are cut in two, if that makes a step shorter


@dataclass(frozen=True, slots=True)
class Planner(PlanRules):
    """Plans steps. A plan is a pure function of the planner, the samples' lengths and the step.

    The rules of its plans are those of `PlanRules`, each a keyword: `Planner(topology, costs, 64e9, layout="packed")`.
    `costs` price micro-batches on every stage of `topology`. A cost model of one's own needs `num_stages`, `evaluate`
    and `fingerprint`, and is held as `UserCosts`. No pipeline rank exceeds `memory_limit_bytes`.

    `format` and `collectives` describe what ranks send and what replicas issue together. Plans are made without them;
    they are needed to lower plans to instructions and to prove these. `collectives` may stay out for one replica, and
    where the costs know them. `num_cores` is for ranks that share CPU cores: how many all ranks have together. A step
    then takes at least its work over the cores, so the search looks for the least work first, and predictions are
    those of shared cores. None: each rank has a core or a device of its own. `for_forwards` gives the planner of
    evaluation.

    A replica is a block of as many data parallel ranks as the width of `topology` says. Given `widths`, each step takes
    the one of them whose plan ends first. Costs are of one rank at that width (`CostModel.at_width`). Equal counts hold
    between the replicas of a step: not for one replica of all ranks, nor where only the ranks of a block share experts.
    """

    topology: Topology
    costs: CostModel
    memory_limit_bytes: float
    seed: int = 0
    format: ActivationFormat | None = field(default=None, kw_only=True)
    collectives: ReplicaCollectives | None = field(default=None, kw_only=True)
    num_cores: int | None = field(default=None, kw_only=True)
    widths: tuple[int, ...] = field(default=(), kw_only=True)
    _by_width: Mapping[int, Planner] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self.topology, self.costs, self.format, self.collectives)
        object.__setattr__(self, "costs", as_cost_model(self.costs))
        if self.costs.num_stages != self.topology.num_stages:
            raise ConfigError(
                f"the cost model has {self.costs.num_stages} stages but the topology has {self.topology.num_stages}:"
                " make both from the same topology"
            )
        if self.costs.facts.width != self.topology.width:
            object.__setattr__(self, "costs", self.costs.at_width(self.topology.width))
        check_bounds(self.memory_limit_bytes, self.seed, self.num_cores)
        check_widths(self.widths, self.topology)
        check_rules(self, counts_may_be_free=any(map(self._frees_counts, self.allowed_widths)))
        check_collectives(self.collectives, self.costs)
        check_placed(self.schedule, self.topology)
        if self.forward_only:
            check_forward_only(self)
        check_priced_pieces(self.pieces, self.costs)
        object.__setattr__(self, "_by_width", {width: self._of_width(width) for width in self.widths})

    @property
    def allowed_widths(self) -> tuple[int, ...]:
        """Data parallel ranks that a replica of a step may have."""
        return self.widths or (self.topology.width,)

    def at_width(self, width: int) -> Planner:
        """The planner of steps of one of the allowed widths. Errors: ConfigError for another one."""
        if width not in self.allowed_widths:
            allowed = ", ".join(map(str, self.allowed_widths))
            raise ConfigError(f"width {width} is not planned for here: give one of {allowed}")
        return self._by_width[width] if self.widths else self

    def _of_width(self, width: int) -> Planner:
        """Where replicas need equal counts, their samples stay whole."""
        pieces = "off" if self.equal_counts and not self._frees_counts(width) else self.pieces
        topology = self.topology.at_width(width)
        return replace(self, topology=topology, costs=self.costs.at_width(width), widths=(), pieces=pieces)

    def _frees_counts(self, width: int) -> bool:
        """Whether steps of this width may have any counts, where those of width 1 need equal ones."""
        if width == 1 or width == self.topology.dp:
            return width > 1
        collectives = self.collectives or self.costs.facts.replica_collectives or ReplicaCollectives()
        return any(collectives.of_micro_batches) and not any(collectives.at_width(width).of_micro_batches)

    @property
    def activation_format(self) -> ActivationFormat:
        if self.format is None:
            raise ConfigError("this planner has no activation format: pass format=ActivationFormat(hidden_size, dtype)")
        return self.format

    @property
    def shared_cores(self) -> SharedCores | None:
        """The cores that ranks share; None where each has one of its own."""
        if self.num_cores is None or self.num_cores >= self.topology.world_size:
            return None
        return SharedCores(self.num_cores, self.topology.tp * self.topology.width)

    @property
    def forward_only(self) -> bool:
        """Whether steps are forwards alone: the costs then say so."""
        return self.costs.facts.forwards_alone

    def for_forwards(self) -> Planner:
        """The planner of evaluation on the same ranks, for loaders of their own: steps of forwards alone.

        Micro-batches are cut anew, as nothing is held between F and B; so recomputation, schedule and all that concerns
        backwards falls away.
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
        """What the run issues over replicas, as given or as the costs say.

        Raises ConfigError where neither does: with several replicas, what is unknown cannot be proven.
        """
        if collectives := self.collectives or self.costs.facts.replica_collectives:
            return collectives
        if self.topology.dp == 1:
            return ReplicaCollectives()  # of a group of one, whatever they are
        raise ConfigError(
            f"{class_of_costs(self.costs)} do not say what dp {self.topology.dp} replicas issue together, and a plan"
            " cannot be proven without: pass collectives=ReplicaCollectives() (dynapipe_ext.batch.topology) where"
            " gradients are reduced once at the end of a step (DDP, ZeRO 0 or 1), else its of_zero(stage)"
        )

    def plan(
        self,
        lengths: Sequence[SampleLength] | Sequence[int] | LengthArray,
        *,
        step: int = 0,
        reserve_bytes: int = 0,
        unreserved: StepPlan | None = None,
    ) -> StepPlan:
        """The best plan found for one global batch; it leaves `reserve_bytes` of every rank free.

        Reserve bytes where buffers of messages turn out to need room beside a plan. The adaptive planner then keeps
        the micro-batches of the plan without a reserve. It searches only those replicas again that no longer fit,
        over recomputation, order and dispatch, with a part of the effort. It plans the batch anew where that fails,
        and for published schedules, samples in pieces and forwards alone. `unreserved` is the plan without a reserve:
        give it where it exists already, which saves time and changes nothing.

        The certificate's bounds hold for the whole memory limit. Errors: PlanError with the sample or micro-batch that
        does not fit; DataError for lengths that are none.
        """
        samples = as_samples(lengths)
        for name, value in (("step", step), ("reserve_bytes", reserve_bytes)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {short(value)} but must be an integer from 0 on: leave it out for 0")
        if not samples:
            raise PlanError(f"step {step} has 0 samples but a plan needs at least 1: leave the step out")
        if self.widths:
            return self._at_best_width(samples, step, reserve_bytes, unreserved)
        if self._rules.equal_counts:
            check_enough(len(samples), self.topology.num_replicas)
        plan = (
            self._best_leaving(reserve_bytes, samples, step, unreserved) if reserve_bytes else self._best(samples, step)
        )
        return self._certified(plan, samples, like=unreserved)

    def _at_best_width(
        self, samples: list[SampleLength], step: int, reserve_bytes: int, unreserved: StepPlan | None
    ) -> StepPlan:
        """The best plan over all widths, with bounds that hold for every width. With bytes to reserve, the width that
        is best without a reserve is planned first, and the others only where it has no plan."""
        if reserve_bytes:
            before = unreserved or self._at_best_width(samples, step, 0, None)
            options: dict[str, Any] = {"step": step, "reserve_bytes": reserve_bytes, "unreserved": before}
            with suppress(PlanError):
                return self._bounded(self.at_width(before.width).plan(samples, **options), samples)
        room = room_of(self.memory_limit_bytes, reserve_bytes)
        trials = [trial for one in self._by_width.values() for trial in one._trials(samples, step, room)]
        best = soonest(trials)
        planner = self.at_width(best.width)
        return self._bounded(planner._certified(best, samples), samples)

    def _trials(self, samples: list[SampleLength], step: int, room_bytes: int) -> Iterator[StepTrial]:
        """The plans that may be made at this width: with pieces, and of whole samples. Width 1 also tries what a
        planner of that width alone would make, unless it cannot be faster. So a choice of widths is never worse than
        width 1."""
        planner = self if room_bytes == self.memory_limit_bytes else replace(self, memory_limit_bytes=room_bytes)
        width, sizes = self.topology.width, self._piece_sizes(samples)
        trial, choices = partial(StepTrial, width=width), None
        least_ns = self._least_ns(samples, pieces=bool(sizes))
        if sizes:
            more = self.pieces if self.pieces != "auto" else "finer"
            sizes = piece_sizes(more, max(s.encoder for s in samples), self._rules.max_tokens)
            with suppress(PlanError):  # they have no price
                choices = self._proposals.piece_choices(samples, sizes)
        if choices is not None:
            hopeful = min(choices.choices, key=attrgetter("hoped_ns"))
            in_pieces = partial(planner._in_finer_pieces, samples, step, hopeful)
            yield trial(hoped_ns=hopeful.hoped_ns, expected_ns=hopeful.hoped_ns, plan=in_pieces)
        if width == 1:
            expected_ns = math.inf if choices is None else choices.makespan_ns
            alone = partial(planner._best, samples, step)
            yield trial(hoped_ns=least_ns, expected_ns=min(expected_ns, self._whole_ns(samples)[1]), plan=alone)
        elif choices is None or self.pieces == "auto":
            hoped_ns, expected_ns = self._whole_ns(samples)
            whole = partial(planner._best_whole, samples, step)
            yield trial(hoped_ns=hoped_ns, expected_ns=expected_ns, plan=whole)

    def _whole_ns(self, samples: Sequence[SampleLength]) -> tuple[float, float]:
        return times_of_whole_ns(
            self._least_ns(samples, pieces=False),
            longest_ns=self._alone_ns(max(samples, key=lambda s: s.tokens)),
            overhead_ns=self._alone_ns(SampleLength(0, 1)),
            depth=self._proposals.depth,
            most_rows=max(1, len(samples) // self.topology.num_replicas),
        )

    def _alone_ns(self, sample: SampleLength) -> int:
        """What a sample takes by itself on its busiest rank; 0 where it has no price whole."""
        alone = MicroBatch((sample,), self.layout, self._recomputes[0], pad_multiple=self._rules.pad_multiple)
        try:
            return int(bottleneck(self.costs.evaluate([alone]), 1, self.topology.stage_ranks)[0][0])
        except PlanError:
            return 0

    def _in_finer_pieces(self, samples: list[SampleLength], step: int, choice: PieceChoice) -> StepPlan:
        """The best plan of one cut into pieces, with short rows of documents for a short fill and drain."""
        return self._finer(self._best_in_pieces(samples, step, PieceChoices((choice,))))

    def _finer(self, plan: StepPlan) -> StepPlan:
        """The plan, or one that ends earlier as some of its short rows of documents are in two each, or two in one."""
        planner = replace(self, effort=self.effort // _AGAIN)
        kinds = self._and_sliced(RECOMPUTES) if self.recompute == "auto" else self._recomputes
        proposals, best, rules = replace(planner._proposals, kinds=kinds), plan, self._rules
        for _ in range(_ROUNDS_OF_HALVES):
            before, rows = best, [replica.micro_batches for replica in best.batch.replicas]
            for replicas in finer_splits(rows, equal_counts=rules.equal_counts, max_tokens=rules.max_tokens):
                with suppress(PlanError):
                    finer = planner._predicted(*planner._searched(proposals.fixed([replicas])), step=plan.batch.step)
                    best = self._sooner(best, finer)
            if best is before:
                break
        return best

    def _bounded(self, plan: StepPlan, samples: list[SampleLength]) -> StepPlan:
        """The plan of a width, whose bound of the whole batch holds for all widths."""
        assert plan.certificate is not None
        limit = int(self.memory_limit_bytes)
        bounds = [
            least_ns(plan, one.costs, samples, one.topology.stage_ranks, one.topology.num_replicas, limit)
            for one in self._by_width.values()
        ]
        bounds_ns = [bound for bound in bounds if bound is not None]
        batch_ns = min(bounds_ns) if len(bounds_ns) == len(bounds) else None
        return replace(plan, certificate=replace(plan.certificate, batch_ns=batch_ns))

    def forwards_like(self, plan: StepPlan) -> StepPlan:
        """Forwards alone of the very micro-batches of a training step, each on its replica, in an order of their own.

        So a pass before the step (old or reference log probabilities) computes every position in the same row as the
        step's forward does, and gives the same bits. `for_forwards` cuts anew, for evaluation.

        Errors: PlanError for pieces of long samples, for heads in slices, and for micro-batches that do not fit so.
        """
        forwards = self.at_width(plan.width).for_forwards()
        for m in plan.batch.micro_batches:
            if m.attention == "carried" or slices_head(m.recompute):
                what = "carries a piece of a long sample" if m.attention == "carried" else "has its head in slices"
                raise PlanError(
                    f"a micro-batch of sample {m.samples[0].index} {what} (recompute {m.recompute!r}), which forwards"
                    " alone do not: plan the step with pieces off and recompute none, selective or full"
                )
        replicas = [[m.recomputing("none") for m in replica.micro_batches] for replica in plan.batch.replicas]
        ordered = order_forwards(replicas, forwards.costs, forwards.topology.stage_ranks)
        step_plan = forwards._predicted(*ordered, step=plan.batch.step)
        whole = {s.index: s for m in plan.batch.micro_batches for s in m.samples}
        return forwards._certified(step_plan, list(whole.values()))

    def _certified(self, plan: StepPlan, samples: list[SampleLength], like: StepPlan | None = None) -> StepPlan:
        """The plan with the bounds of these samples."""
        check_cover(plan.batch, samples)
        limit = int(self.memory_limit_bytes)
        certificate = certify(plan, self.costs, samples, memory_limit_bytes=limit, like=like)
        predictions = tuple(
            replace(prediction, lower_bound_ns=bounds.best_ns)
            for prediction, bounds in zip(plan.predictions, certificate.replicas, strict=True)
        )
        return replace(plan, predictions=predictions, certificate=certificate)

    def _best_leaving(
        self, reserve_bytes: int, samples: list[SampleLength], step: int, unreserved: StepPlan | None
    ) -> StepPlan:
        """The best plan with that much less memory, without its bounds; see `plan`."""
        less = replace(self, memory_limit_bytes=room_of(self.memory_limit_bytes, reserve_bytes))
        if self.schedule == "adaptive" and not self._piece_sizes(samples) and not self.forward_only:
            before = unreserved or self._best(samples, step)
            with suppress(PlanError):  # these micro-batches do not fit; others may
                return replace(less, effort=self.effort // _AGAIN)._made_to_fit(before)
        return less._best(samples, step)

    def _made_to_fit(self, before: StepPlan) -> StepPlan:
        """The plan, once the replicas that exceed the limit are searched again over their own micro-batches."""
        over = [d for d, one in enumerate(before.predictions) if max(one.peak_bytes) > self.memory_limit_bytes]
        replicas = [list(replica.micro_batches) for replica in before.batch.replicas]
        schedules, priced = list(before.schedules), list(before.costs)
        if over:
            proposals = self._proposals
            if any(slices_head(m.recompute) for m in before.batch.micro_batches):
                proposals = replace(proposals, kinds=self._and_sliced(proposals.kinds))
            fitting, new_schedules, _ = self._searched(proposals.fixed([[replicas[d] for d in over]]))
            changed = zip(over, fitting, new_schedules, replica_costs(self.costs, fitting), strict=True)
            for d, micro_batches, schedule, costs in changed:
                replicas[d], schedules[d], priced[d] = micro_batches, schedule, costs
        return self._predicted(replicas, tuple(schedules), tuple(priced), step=before.batch.step, like=before)

    def _best(self, samples: list[SampleLength], step: int) -> StepPlan:
        """The best plan, without its bounds: with long samples in pieces where the settings say so, or where it ends
        earlier."""
        sizes = self._piece_sizes(samples)
        if not sizes:
            return self._best_whole(samples, step)
        try:
            choices = self._proposals.piece_choices(samples, sizes)
        except PlanError:
            if self.pieces != "auto":
                raise
            return self._best_whole(samples, step)  # which has a price, or says what has none
        in_pieces = partial(self._best_in_pieces, samples, step, choices)
        if self.pieces != "auto":
            return in_pieces()
        whole = partial(self._best_whole, samples, step)
        return whole_or_pieces(choices, self._least_ns(samples, pieces=False), whole, in_pieces)

    def _piece_sizes(self, samples: Sequence[SampleLength]) -> Sequence[int]:
        """Sizes of pieces to try; none where samples stay whole."""
        if self.pieces == "off":
            return ()
        return piece_sizes(self._rules.pieces, max(s.encoder for s in samples), self._rules.max_tokens)

    def _best_in_pieces(self, samples: list[SampleLength], step: int, choices: PieceChoices) -> StepPlan:
        """The best plan with long samples in pieces. All pieces of a sample are held at once. So where memory forces
        some micro-batch to be recomputed, a second search may also recompute whole stages, and tries the smallest
        pieces as well."""

        def best(kinds: tuple[Recompute, ...], choices: Sequence[PieceChoice]) -> StepPlan:
            proposals = replace(self._proposals, kinds=kinds)
            starts = proposals.fixed(proposals.pieces(samples, step, choices))
            return self._predicted(*self._searched(starts), step=step)

        def best_of_least_memory() -> StepPlan:
            kinds = self._and_sliced(RECOMPUTES) if self.recompute == "auto" else self._recomputes
            return best(kinds, list(dict.fromkeys([*choices.promising, *choices.smallest])))

        try:
            plan = best(self._recomputes, choices.promising)
        except PlanError:
            return best_of_least_memory()
        if self.recompute == "auto" and any(m.recompute != "none" for m in plan.batch.micro_batches):
            with suppress(PlanError):
                return self._sooner(plan, best_of_least_memory())
        return plan

    def _best_whole(self, samples: list[SampleLength], step: int) -> StepPlan:
        """The best plan of whole samples. Where memory forces some micro-batch to be recomputed, or nothing fits, a
        second search may also compute heads in slices."""
        kinds = self._and_sliced(self._recomputes)
        if self.recompute != "auto" or self.forward_only or kinds == self._recomputes:
            return self._best_under(self._recomputes, samples, step)
        try:
            plan = self._best_under(self._recomputes, samples, step)
        except PlanError as error:
            try:
                return self._best_under(kinds, samples, step)
            except PlanError:
                raise error from None
        if all(m.recompute == "none" for m in plan.batch.micro_batches):
            return plan
        with suppress(PlanError):
            plan = self._sooner(plan, self._best_under(kinds, samples, step))
        return plan

    def _sooner(self, *plans: StepPlan) -> StepPlan:
        return min(plans, key=lambda plan: plan.mean_makespan_ns(self.noise))

    def _and_sliced(self, kinds: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
        """These kinds, and with the head in slices, where costs have prices for it."""
        return (*kinds, *with_sliced_head(kinds)) if self.costs.facts.slices_head else kinds

    def _best_under(self, kinds: tuple[Recompute, ...], samples: list[SampleLength], step: int) -> StepPlan:
        """The best plan of whole samples under these kinds of recomputation."""
        proposals = replace(self._proposals, kinds=kinds)
        if self.schedule != "adaptive":
            return self._best_published(proposals.splits(samples, step), step)
        is_cut = self.split_policy == "dynapipe-ext" and self.layout == "padded"
        starts = proposals.cuts(samples, step) if is_cut else proposals.fixed(proposals.splits(samples, step))
        plan = self._predicted(*self._searched(starts), step=step)
        if not self.topology.is_interleaved or not takes_rounds(plan):
            return plan
        schedules = in_rounds(plan, int(self.memory_limit_bytes), self.noise)
        if schedules == plan.schedules:
            return plan
        replicas = [list(replica.micro_batches) for replica in plan.batch.replicas]
        return self._predicted(replicas, schedules, plan.costs, step=step, like=plan)

    def _least_ns(self, samples: Sequence[SampleLength], *, pieces: bool) -> int:
        """No plan of these samples ends earlier, whole or also in pieces; 0 where no such bound is known."""
        ranks, dp, limit = self.topology.stage_ranks, self.topology.num_replicas, int(self.memory_limit_bytes)
        options = {"split": self.split_backward, "packed": self.layout == "packed", "pieces": pieces}
        floor = find_batch_floor(self.costs, samples, ranks, memory_limit_bytes=limit, **options)
        return 0 if floor is None else floor.bound_ns(dp)

    @property
    def _rules(self) -> PlanRules:
        """The rules for whole rows, of which each rank of a block has a slice: `pad_multiple` and `max_tokens` are of a
        slice's positions."""
        width = self.topology.width
        if width == 1:
            return self
        of_rows: dict[str, Any] = {"pad_multiple": width * self.pad_multiple, "max_tokens": width * self.max_tokens}
        if not isinstance(self.pieces, str):  # no piece is shorter than what rows are rounded up to
            of_rows["pieces"] = max(self.pieces, of_rows["pad_multiple"])
        if self._frees_counts(width):
            of_rows["replica_counts"] = "free"
        return PlanRules(**{**self.as_keywords(), **of_rows})

    @property
    def _proposals(self) -> Proposals:
        return Proposals(
            topology=self.topology,
            costs=self.costs,
            limit_bytes=int(self.memory_limit_bytes),
            rules=self._rules,
            kinds=self._recomputes,
            forward_only=self.forward_only,
            cores_are_shared=self.shared_cores is not None,
        )

    @property
    def _recomputes(self) -> tuple[Recompute, ...]:
        if self.forward_only:
            return ("none",)
        return LAYER_RECOMPUTES if self.recompute == "auto" else (self.recompute,)

    def _searched(self, proposed: Sequence[Proposal]) -> tuple[Replicas, Schedules, ReplicaCosts | None]:
        """Replicas and schedules of the best search result, with their costs where these are already worked out."""
        settings = SearchSettings(
            memory_limit_bytes=int(self.memory_limit_bytes),
            split=self.split_backward,
            effort=self.effort // _LESS if self.forward_only else self.effort,
            seed=self.seed,
            stage_ranks=self.topology.stage_ranks,
            short_stages=self.topology.head_stages[1:],
            equal_counts=self._rules.equal_counts,
            cores=self.shared_cores,
            noise=self.noise,
        )
        index, optimized = optimize_best([proposal.start for proposal in proposed], settings)
        replicas = proposed[index].replicas(optimized.replicas)
        if self.forward_only:  # searched with backwards that take no time: good cuts and replicas, in another order
            return order_forwards(replicas, self.costs, self.topology.stage_ranks)
        return replicas, optimized.schedules, proposed[index].costs(optimized.replicas)

    def _best_published(self, splits: Sequence[Replicas], step: int) -> StepPlan:
        """Of several splits under a published schedule, the one that ends first."""
        plans: list[StepPlan] = []
        refusal: PlanError | None = None
        named = partial(make_schedule_of_costs, self.schedule, self.topology.stage_ranks, int(self.memory_limit_bytes))
        for replicas in splits:
            try:
                priced = replica_costs(self.costs, replicas)
                plans.append(self._predicted(replicas, tuple(map(named, priced)), priced, step=step))
            except PlanError as error:  # this split cannot be priced, or holds too much at once; others may fit
                refusal = refusal or error
        if not plans:
            assert refusal is not None
            raise refusal
        return min(plans, key=lambda plan: plan.makespan_ns)

    def _predicted(
        self,
        replicas: Replicas,
        schedules: Schedules,
        priced: ReplicaCosts | None = None,
        *,
        step: int,
        like: StepPlan | None = None,
    ) -> StepPlan:
        """The plan with its predictions; `plan` adds the lower bounds."""
        priced = priced or replica_costs(self.costs, replicas)
        schedules, priced = shared_by_twins(replicas, schedules, priced)
        limit, cores = int(self.memory_limit_bytes), self.shared_cores
        predictions = predicted(replicas, schedules, priced, cores=cores, memory_limit_bytes=limit, like=like)
        plans = tuple(ReplicaPlan(d, tuple(micro_batches)) for d, micro_batches in enumerate(replicas))
        batch = GlobalBatchPlan(
            step=step, replicas=plans, loss_norm=self.loss_norm, seed=self.seed, width=self.topology.width
        )
        return StepPlan(batch, schedules, predictions, priced, cores)

    def to_json(self) -> dict[str, Any]:
        """Everything that changes a plan; `from_json` makes an equal planner in another process."""
        return {
            **self.as_keywords(),
            "memory_limit_bytes": self.memory_limit_bytes,
            "seed": self.seed,
            "num_cores": self.num_cores,
            "topology": self.topology.to_json(),
            "costs": cost_model_to_json(self.costs),
            "format": None if self.format is None else self.format.to_json(),
            "collectives": None if self.collectives is None else self.collectives.to_json(),
            **({"widths": list(self.widths)} if self.widths else {}),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Planner:
        known = {"noise": 0.0, "split_policy": raw.get("rule"), **raw}  # of earlier versions
        topology: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["topology"].items()}
        return cls(
            Topology(**topology),
            cost_model_from_json(raw["costs"]),
            raw["memory_limit_bytes"],
            raw["seed"],
            format=None if raw["format"] is None else ActivationFormat(**raw["format"]),
            collectives=None if raw["collectives"] is None else ReplicaCollectives.from_json(raw["collectives"]),
            num_cores=raw["num_cores"],
            widths=tuple(raw.get("widths", ())),
            **{f.name: known[f.name] for f in fields(PlanRules)},
        )
