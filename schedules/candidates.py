"""The ways to plan a step: whole samples or pieces, at each context-parallel degree. The plan that ends first wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from dynapipe_ext.batch.micro_batches import (
    RECOMPUTES,
    GlobalBatchPlan,
    MicroBatch,
    Recompute,
    ReplicaPlan,
    SampleLength,
    slices_head,
    with_sliced_head,
)
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.packing import list_finer_splits
from dynapipe_ext.partitioning.pieces import PieceChoice, list_piece_sizes, pick_promising
from dynapipe_ext.partitioning.rules import check_enough
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor
from dynapipe_ext.schedules.evaluation.simulate import compute_mean_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.published.by_name import make_schedule_of_costs
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b
from dynapipe_ext.schedules.search.flow_shop import order_forwards
from dynapipe_ext.schedules.search.optimizer import SearchSettings, optimize_best
from dynapipe_ext.schedules.search.proposals import Proposal, Replicas, StepProblem, make_possible
from dynapipe_ext.schedules.step_plan import StepPlan, predict, price_replicas

Schedules = tuple[PipelineSchedule, ...]

_FORWARD_SHARE = 4  # forward-only steps leave less to choose: cuts and replicas get one part in this many of the effort
_NEAR_SHARE = 4  # a search near a plan gets one part in this many of the effort
_FINER_ROUNDS = 3  # in which rows of documents are halved, if that makes a step shorter
# Searches have ended up to 1.2 % before the hoped time, if rows of several lengths filled and drained the pipeline.
_MAY_BE_OFF = 1 / 64


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A way to plan a step: `plan` does it, at one context-parallel degree, with whole samples or `in_pieces`.
    `expected_ns`: about the step's time. If another plan takes at most `least_ns`, this one is not tried. For whole
    samples that is the work of the busiest replica, for pieces a little less than the hoped-for time."""

    cp_degree: int
    in_pieces: bool
    expected_ns: float
    least_ns: float
    plan: Callable[[], StepPlan]


def plan_fastest(problems: Sequence[StepProblem], samples: list[SampleLength], step: int) -> StepPlan:
    """Return the plan that ends first; of equals, that of the smaller degree, then that of whole samples.

    The most promising candidate is planned first, and each other one only if it may still be faster. Raises PlanError
    if there is no plan: that of the smallest degree, of whole samples if they were tried.
    """
    candidates: list[PlanCandidate] = []
    refusals: dict[tuple[int, bool], PlanError] = {}
    for problem in problems:
        try:
            candidates += list_candidates(problem, samples, step, are_several=len(problems) > 1)
        except PlanError as error:
            refusals[problem.topology.width, False] = error
    best: StepPlan | None = None
    value = math.inf, 0, False
    for one in sorted(candidates, key=lambda one: (one.expected_ns, one.cp_degree)):
        if one.least_ns >= value[0]:
            continue
        try:
            plan = one.plan()
        except PlanError as error:
            refusals.setdefault((one.cp_degree, one.in_pieces), error)
            continue
        if (plan.makespan_ns, one.cp_degree, one.in_pieces) < value:
            best, value = plan, (plan.makespan_ns, one.cp_degree, one.in_pieces)
    if best is None:
        raise refusals[min(refusals)]
    return best


def list_candidates(
    problem: StepProblem, samples: list[SampleLength], step: int, *, are_several: bool
) -> list[PlanCandidate]:
    """List the ways to plan a step at one degree: whole samples or, if rules allow, pieces (of other sizes if degrees
    `are_several`). Raises PlanError if pieces of a given size have no price."""
    rules, cp_degree = problem.rules, problem.topology.width
    plan_whole = partial(_plan_whole, problem, samples, step)
    longest = max(s.encoder for s in samples)
    if not are_several and not list_piece_sizes(rules.pieces, longest, rules.max_tokens):
        return [PlanCandidate(cp_degree, False, 0, 0, plan_whole)]
    candidates = []
    for is_finer in (False, True) if are_several and cp_degree == 1 else (are_several,):
        sizes = list_piece_sizes(
            "finer" if is_finer and rules.pieces == "auto" else rules.pieces, longest, rules.max_tokens
        )
        if not sizes:
            continue
        try:
            choices = problem.list_piece_choices(samples, sizes)
        except PlanError:
            if rules.pieces != "auto":
                raise
            continue
        plan = partial(_plan_in_finer_pieces if is_finer else _plan_in_pieces, problem, samples, step, choices)
        hoped_ns = min(choice.hoped_ns for choice in choices)
        expected_ns = hoped_ns if is_finer else min(choice.makespan_ns for choice in choices)
        candidates.append(PlanCandidate(cp_degree, True, expected_ns, hoped_ns * (1 - _MAY_BE_OFF), plan))
    if rules.pieces == "auto" or not candidates:
        candidates.append(PlanCandidate(cp_degree, False, *_expect_whole(problem, samples), plan_whole))
    return candidates


def _expect_whole(problem: StepProblem, samples: Sequence[SampleLength]) -> tuple[float, float]:
    """Return the expected time of a step of whole samples, and the work of the busiest replica, which is a lower bound.
    The expected time has the work, an overhead for each row, and the time in which the ranks fill and drain with the
    longest sample, or with a mean row. It is the least over the number of rows."""
    topology, rules = problem.topology, problem.rules

    def price_alone(sample: SampleLength) -> int:
        row = MicroBatch((sample,), rules.layout, problem.kinds[0], pad_multiple=rules.pad_multiple)
        try:
            return int(problem.find_bottleneck(problem.costs.evaluate([row]))[0][0])
        except PlanError:
            return 0  # it has no price whole

    floor = find_batch_floor(
        problem.costs,
        samples,
        topology.stage_ranks,
        split=rules.is_split,
        packed=rules.layout == "packed",
        memory_limit_bytes=problem.limit_bytes,
    )
    work_ns = 0 if floor is None else floor.bound_ns(topology.num_replicas)
    longest_ns, overhead_ns = price_alone(max(samples, key=lambda s: s.tokens)), price_alone(SampleLength(0, 1))
    expected_ns = []
    for count in (1 << i for i in range(max(1, len(samples) // topology.num_replicas).bit_length())):
        fill_ns = (problem.depth - 1) * max(longest_ns, work_ns // count)
        expected_ns.append(work_ns + (count - 1) * overhead_ns + fill_ns)
    return min(expected_ns), work_ns


def _plan_whole(problem: StepProblem, samples: list[SampleLength], step: int) -> StepPlan:
    """Return the best plan of whole samples, also with heads in slices if it would recompute otherwise."""
    if problem.rules.equal_counts:
        check_enough(len(samples), problem.topology.num_replicas)
    first = partial(_plan_whole_under, problem, samples, step)
    kinds = _add_sliced_heads(problem, problem.kinds)
    if problem.rules.recompute != "auto" or problem.forward_only or kinds == problem.kinds:
        return first()
    return _plan_with_more(problem, first, partial(_plan_whole_under, replace(problem, kinds=kinds), samples, step))


def _plan_whole_under(problem: StepProblem, samples: list[SampleLength], step: int) -> StepPlan:
    rules = problem.rules
    if rules.schedule != "adaptive":
        return _plan_published(problem, problem.list_splits(samples, step), step)
    is_cut = rules.split_policy == "dynapipe-ext" and rules.layout == "padded"
    proposals = (
        problem.propose_cuts(samples, step) if is_cut else problem.propose_fixed(problem.list_splits(samples, step))
    )
    return _reorder_in_rounds(problem, search_step(problem, proposals, step))


def _plan_in_pieces(
    problem: StepProblem, samples: list[SampleLength], step: int, choices: Sequence[PieceChoice]
) -> StepPlan:
    """Return the best plan with long samples in pieces. All pieces of a sample are held at once. So if memory forces
    some micro-batch to be recomputed, a second search may recompute full stages, too, and tries the smallest pieces."""

    def plan_under(problem: StepProblem, choices: Sequence[PieceChoice]) -> StepPlan:
        return search_step(problem, problem.propose_fixed(problem.list_piece_splits(samples, step, choices)), step)

    more = replace(problem, kinds=_list_kinds(problem))
    of_least_memory = partial(plan_under, more, pick_promising(choices, with_smallest=True))
    return _plan_with_more(problem, partial(plan_under, problem, pick_promising(choices)), of_least_memory)


def _plan_with_more(problem: StepProblem, first: Callable[[], StepPlan], more: Callable[[], StepPlan]) -> StepPlan:
    """Return the first plan. If there is none, or some micro-batch of it has to be recomputed, `more` may be faster."""
    try:
        plan = first()
    except PlanError as error:
        try:
            return more()
        except PlanError:
            raise error from None
    if problem.rules.recompute != "auto" or all(m.recompute == "none" for m in plan.batch.micro_batches):
        return plan
    with suppress(PlanError):
        plan = _pick_sooner(problem, (plan, more()))
    return plan


def _plan_in_finer_pieces(
    problem: StepProblem, samples: list[SampleLength], step: int, choices: Sequence[PieceChoice]
) -> StepPlan:
    """Return the best plan of the most promising cut into pieces, with some short rows of documents in two each, or two
    in one, if it then ends earlier."""
    best = _plan_in_pieces(problem, samples, step, [min(choices, key=attrgetter("hoped_ns"))])
    rules, near = problem.rules, _with_less_effort(replace(problem, kinds=_list_kinds(problem)))
    for _ in range(_FINER_ROUNDS):
        before, rows = best, [replica.micro_batches for replica in best.batch.replicas]
        for replicas in list_finer_splits(rows, equal_counts=rules.equal_counts, max_tokens=rules.max_tokens):
            with suppress(PlanError):
                best = _pick_sooner(problem, (best, search_step(near, near.propose_fixed([replicas]), step)))
        if best is before:
            break
    return best


def _with_less_effort(problem: StepProblem) -> StepProblem:
    """Return the problem of a search near a plan that is known."""
    return replace(problem, rules=replace(problem.rules, effort=problem.rules.effort // _NEAR_SHARE))


def _pick_sooner(problem: StepProblem, plans: Iterable[StepPlan]) -> StepPlan:
    return min(plans, key=lambda plan: plan.mean_makespan_ns(problem.rules.noise))


def _list_kinds(problem: StepProblem) -> tuple[Recompute, ...]:
    return _add_sliced_heads(problem, RECOMPUTES) if problem.rules.recompute == "auto" else problem.kinds


def _add_sliced_heads(problem: StepProblem, kinds: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
    """Return these kinds, and with the head in slices, if costs have prices for it."""
    return (*kinds, *with_sliced_head(kinds)) if problem.costs.facts.slices_head else kinds


def refit(problem: StepProblem, before: StepPlan) -> StepPlan:
    """Search again for those replicas of a plan that exceed the memory limit, with the same micro-batches. Raises
    PlanError if these do not fit."""
    problem = _with_less_effort(problem)
    over = [d for d, one in enumerate(before.predictions) if max(one.peak_bytes) > problem.limit_bytes]
    replicas = [list(replica.micro_batches) for replica in before.batch.replicas]
    schedules, priced = list(before.schedules), list(before.costs)
    if over:
        if any(slices_head(m.recompute) for m in before.batch.micro_batches):
            problem = replace(problem, kinds=_add_sliced_heads(problem, problem.kinds))
        fitting, new_schedules, _ = _search(problem, problem.propose_fixed([[replicas[d] for d in over]]))
        changed = zip(over, fitting, new_schedules, price_replicas(problem.costs, fitting), strict=True)
        for d, micro_batches, schedule, costs in changed:
            replicas[d], schedules[d], priced[d] = micro_batches, schedule, costs
    return predict_step(problem, replicas, schedules, priced, step=before.batch.step)


def plan_forwards(problem: StepProblem, replicas: Replicas, step: int) -> StepPlan:
    """Return the forward-only step of these replicas, each with its micro-batches in a good order."""
    ordered = order_forwards(replicas, problem.costs, problem.topology.stage_ranks)
    return predict_step(problem, *ordered, step=step)


def search_step(problem: StepProblem, proposals: Sequence[Proposal], step: int) -> StepPlan:
    """Return the best plan of a search that begins with each of these proposals."""
    replicas, schedules, priced = _search(problem, proposals)
    if problem.forward_only:
        # Searched with backwards that take no time: good cuts and replicas, in another order.
        return plan_forwards(problem, replicas, step)
    return predict_step(problem, replicas, schedules, priced, step=step)


def _search(
    problem: StepProblem, proposals: Sequence[Proposal]
) -> tuple[Replicas, Schedules, tuple[MicroBatchCosts, ...] | None]:
    """Return the replicas and schedules of the best search result, with their costs if these are already known."""
    topology, rules = problem.topology, problem.rules
    settings = SearchSettings(
        memory_limit_bytes=problem.limit_bytes,
        split=rules.split_backward,
        effort=rules.effort // _FORWARD_SHARE if problem.forward_only else rules.effort,
        seed=problem.seed,
        stage_ranks=topology.stage_ranks,
        short_stages=topology.head_stages[1:],
        equal_counts=rules.equal_counts,
        cores=problem.cores,
        noise=rules.noise,
    )
    index, best = optimize_best([proposal.start for proposal in proposals], settings)
    proposal = proposals[index]
    return proposal.make_replicas(best.replicas), best.schedules, proposal.pick_costs(best.replicas)


def _reorder_in_rounds(problem: StepProblem, plan: StepPlan) -> StepPlan:
    """Return the plan with replicas in the rounds of interleaved 1F1B if they end earlier so and fit.

    The search's dispatcher admits micro-batches one by one. If many are alike, rounds of as many as ranks fill an
    interleaved pipeline faster. Rounds have full backwards, and a core for each rank.
    """
    topology, rules = problem.topology, problem.rules
    if not topology.is_interleaved or plan.forward_only or plan.cores is not None or rules.is_split:
        return plan
    pairs = zip(plan.schedules, plan.costs, strict=True)
    schedules = tuple(reorder_in_rounds(*pair, problem.limit_bytes, rules.noise) for pair in pairs)
    if schedules == plan.schedules:
        return plan
    replicas = [list(replica.micro_batches) for replica in plan.batch.replicas]
    return predict_step(problem, replicas, schedules, plan.costs, step=plan.batch.step)


def reorder_in_rounds(
    schedule: PipelineSchedule, costs: MicroBatchCosts, limit_bytes: int, noise: float
) -> PipelineSchedule:
    """Return the schedule, or its micro-batches in rounds of interleaved 1F1B if these fit and end earlier. With
    `noise`, mean makespans are compared."""
    if not costs.num_micro_batches:
        return schedule
    order = [a.micro_batch for a in schedule.ranks[0] if a.stage == 0 and a.kind is Kind.FORWARD]
    num_ranks = len(schedule.ranks)
    table = interleaved_1f1b(num_ranks, len(order), schedule.num_stages // num_ranks)
    ranks = tuple(tuple(Action(a.stage, a.kind, order[a.micro_batch]) for a in rank) for rank in table.ranks)
    rounds = PipelineSchedule(schedule.name, ranks, schedule.stage_ranks)
    if max(compute_peak_bytes(rounds, costs)) > limit_bytes:
        return schedule
    return min(schedule, rounds, key=lambda order: compute_mean_makespan_ns(order, costs, noise))


def _plan_published(problem: StepProblem, splits: Sequence[Replicas], step: int) -> StepPlan:
    """Return the plan that ends first of several splits under a published schedule."""
    make = partial(make_schedule_of_costs, problem.rules.schedule, problem.topology.stage_ranks, problem.limit_bytes)

    def plan(replicas: Replicas) -> StepPlan:
        priced = price_replicas(problem.costs, replicas)
        return predict_step(problem, replicas, list(map(make, priced)), priced, step=step)

    # A split that has no price, or holds too much at once, leaves others that may fit.
    return min(make_possible(partial(plan, one) for one in splits), key=lambda plan: plan.makespan_ns)


def predict_step(
    problem: StepProblem,
    replicas: Replicas,
    schedules: Sequence[PipelineSchedule],
    priced: Sequence[MicroBatchCosts] | None = None,
    *,
    step: int,
) -> StepPlan:
    """Return the plan of these replicas and schedules with its predictions, without bounds."""
    priced = tuple(priced or price_replicas(problem.costs, replicas))
    limit, cores, rules = problem.limit_bytes, problem.cores, problem.rules
    predictions = predict(replicas, schedules, priced, cores=cores, memory_limit_bytes=limit)
    plans = tuple(ReplicaPlan(d, tuple(micro_batches)) for d, micro_batches in enumerate(replicas))
    width = problem.topology.width
    batch = GlobalBatchPlan(step=step, replicas=plans, loss_norm=rules.loss_norm, seed=problem.seed, width=width)
    return StepPlan(batch, tuple(schedules), predictions, priced, cores)
