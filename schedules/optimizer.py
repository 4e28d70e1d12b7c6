"""The own schedule optimizer: order, warm-up depth, place of I and W, replica and recomputation, under a byte limit.

A search over injection orders and dispatch rules (`search`, `dispatch`) whose only judge is the simulated makespan, for
any placement of stages on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.dispatch import NEVER, Chosen, rules
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.order import start_orders
from dynapipe_ext.schedules.search import Problem, search
from dynapipe_ext.schedules.validate import validate


@dataclass(frozen=True, slots=True)
class Optimized:
    """Replicas' micro-batches in injection order, their kinds of recomputation, and schedules that carry their numbers.

    `kinds` has an entry for every micro-batch of the costs.
    """

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    schedules: tuple[PipelineSchedule, ...]
    makespan_ns: tuple[int, ...]


def optimize(
    costs: MicroBatchCosts,
    *,
    memory_limit_bytes: int,
    split: bool,
    effort: int,
    seed: int = 0,
    stage_ranks: Sequence[int] | None = None,
) -> PipelineSchedule:
    """The best schedule found for one replica's micro-batches in `effort` random moves; a function of its arguments.

    `split` runs every backward as I and W. `stage_ranks` places stages on ranks (default: stage s on rank s). No rank
    exceeds the limit at any time.

    Errors: PlanError for a micro-batch that does not fit alone; ConfigError for a negative effort or a bad placement.
    """
    return optimize_replicas(
        [costs],
        [list(range(costs.num_micro_batches))],
        [0] * costs.num_micro_batches,
        memory_limit_bytes=memory_limit_bytes,
        split=split,
        effort=effort,
        seed=seed,
        stage_ranks=stage_ranks,
    ).schedules[0]


def optimize_replicas(
    kind_costs: Sequence[MicroBatchCosts],
    groups: Sequence[Sequence[int]],
    kinds: Sequence[int],
    *,
    memory_limit_bytes: int,
    split: bool,
    effort: int,
    seed: int = 0,
    stage_ranks: Sequence[int] | None = None,
    equal_counts: bool = False,
    use_native: bool = True,
) -> Optimized:
    """The best found from a start: micro-batches grouped by replica, each with its index into `kind_costs`.

    `kind_costs` price all micro-batches once for each kind of recomputation (INFEASIBLE forwards: cannot run so). Moves
    change the order, the rule, a micro-batch's kind or its replica; `equal_counts` keeps counts as they are.

    Errors: as optimize.
    """
    first = kind_costs[0]
    ranks = tuple(range(first.num_stages)) if stage_ranks is None else tuple(stage_ranks)
    if effort < 0:
        raise ConfigError(f"effort is {effort} but must be a count of at least 0")
    if len(ranks) != first.num_stages or set(ranks) != set(range(max(ranks) + 1)):
        raise ConfigError(f"placement {ranks} must put each of {first.num_stages} stages on a rank, with none left out")
    static = [0] * (max(ranks) + 1)
    for rank, num_bytes in zip(ranks, first.static_bytes.tolist(), strict=True):
        static[rank] += num_bytes
    free = [memory_limit_bytes - num_bytes for num_bytes in static]
    gradient = [costs.input_ns if split else costs.backward_ns for costs in kind_costs]
    problem = Problem(
        stage_ranks=ranks,
        free_bytes=tuple(free),
        split=split,
        working_in_backward=first.working_in != "F",
        forward=np.stack([costs.forward_ns for costs in kind_costs]),
        gradient=np.stack(gradient),
        weight=np.stack([costs.weight_ns for costs in kind_costs]),
        stored=np.stack([costs.stored_bytes for costs in kind_costs]),
        working=np.stack([costs.working_bytes for costs in kind_costs]),
        transfer=first.transfer_ns,
        rules=tuple(rules(split=split)),
    )
    kinds = _fitting(problem, kinds, memory_limit_bytes)
    starts = [
        [[group[i] for i in order] for order in start_orders(_chosen(kind_costs, group, kinds))] for group in groups
    ]
    found = search(
        problem,
        starts,
        kinds,
        effort=effort,
        seed=seed,
        equal_counts=equal_counts,
        use_native=use_native,
    )
    if max(found.makespan_ns) >= NEVER:
        raise PlanError(f"no order of these micro-batches fits in {memory_limit_bytes} B: raise the limit, tp or pp")
    name = "adaptive-split" if split else "adaptive"
    schedules = tuple(_schedule(name, actions, ranks, split) for actions in found.actions)
    for schedule, group in zip(schedules, found.groups, strict=True):
        _prove(schedule, _chosen(kind_costs, group, found.kinds), group, memory_limit_bytes)
    return Optimized(tuple(map(tuple, found.groups)), tuple(found.kinds), schedules, tuple(found.makespan_ns))


def _fitting(problem: Problem, kinds: Sequence[int], limit_bytes: int) -> list[int]:
    """Each micro-batch's kind, or the first that lets it run alone; PlanError where none does."""
    ranks = np.array(problem.stage_ranks)
    free = np.array(problem.free_bytes, np.int64)
    needed = np.zeros((len(problem.forward), len(free), problem.forward.shape[2]), np.int64)
    for rank in range(len(free)):
        mine = ranks == rank
        needed[:, rank] = problem.stored[:, mine].sum(axis=1) + problem.working[:, mine].max(axis=1)
    runs = ((needed <= free[:, None]) & (problem.forward.max(axis=1) < INFEASIBLE)[:, None]).all(axis=1)
    chosen = list(kinds)
    for m in range(len(chosen)):
        if runs[chosen[m], m]:
            continue
        if not runs[:, m].any():
            over = (needed[:, :, m] - free).min(axis=0)
            rank = int(over.argmax())
            most = limit_bytes - int(free[rank])
            raise PlanError(
                f"micro-batch {m} alone needs {int(needed[:, rank, m].min()) + most} B on rank {rank} but the limit is"
                f" {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
            )
        chosen[m] = int(runs[:, m].argmax())
    return chosen


def _chosen(kind_costs: Sequence[MicroBatchCosts], group: Sequence[int], kinds: Sequence[int]) -> MicroBatchCosts:
    """Costs of some micro-batches, each under its own kind."""
    if len(kind_costs) == 1:
        return kind_costs[0].take(group)
    return MicroBatchCosts.join([kind_costs[kinds[m]].take([m]) for m in group], like=kind_costs[0])


def _schedule(name: str, actions: list[list[Chosen]], stage_ranks: tuple[int, ...], split: bool) -> PipelineSchedule:
    letters = (Kind.FORWARD, Kind.BACKWARD_INPUT if split else Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    ranks = tuple(tuple(Action(s, letters[letter], m) for letter, s, m in rank) for rank in actions)
    return PipelineSchedule(name, ranks or tuple(() for _ in set(stage_ranks)), stage_ranks)


def _prove(schedule: PipelineSchedule, costs: MicroBatchCosts, group: Sequence[int], limit_bytes: int) -> None:
    """Check order and peak apart from what made them."""
    place = {m: i for i, m in enumerate(group)}
    local = renumbered(schedule, place)
    validate(local, len(group))
    peaks = peak_bytes(local, costs)
    if max(peaks) > limit_bytes:
        raise PlanError(
            f"the {schedule.name} schedule needs {max(peaks)} B on rank {peaks.index(max(peaks))} but the limit is"
            f" {limit_bytes} B: raise the limit, tp or pp"
        )


def renumbered(schedule: PipelineSchedule, place: dict[int, int]) -> PipelineSchedule:
    """The schedule with micro-batch m called place[m]."""
    return PipelineSchedule(
        schedule.name,
        tuple(tuple(Action(a.stage, a.kind, place[a.micro_batch]) for a in rank) for rank in schedule.ranks),
        schedule.stage_ranks,
    )
