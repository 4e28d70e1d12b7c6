"""Proof that a schedule can run: every action once, in place, and no circular wait. No costs needed."""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.errors import PlanError
from dynapipe_ext.pieces import Chain, PieceNeighbours
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule


def validate(schedule: PipelineSchedule, num_micro_batches: int, chains: Sequence[Chain] = ()) -> None:
    """Nothing if every micro-batch runs F then B, or F then I then W, on each stage, and the order has no cycle.

    In a schedule of forwards alone (`forward_only`) it runs F, and nothing else. Of `chains`, micro-batches that carry
    one sample, forwards must run from the first piece to the last on each stage, and B or I from the last to the first.

    Errors: PlanError naming the action, stage or micro-batch at fault.
    """
    _check_placement(schedule)
    num_stages, stage_ranks = schedule.num_stages, schedule.stage_ranks
    letters = {id(kind): kind.value for kind in Kind}  # an Enum's own lookups take most of the time here
    done = [[""] * num_micro_batches for _ in stage_ranks]
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, micro_batch = action.stage, action.micro_batch
            if not 0 <= stage < num_stages:
                raise PlanError(f"action {action} names a stage outside 0..{num_stages - 1}")
            if stage_ranks[stage] != rank:
                raise PlanError(
                    f"action {action} is on rank {rank} but stage {stage} is placed on rank {stage_ranks[stage]}"
                )
            if not 0 <= micro_batch < num_micro_batches:
                raise PlanError(f"action {action} names a micro-batch outside 0..{num_micro_batches - 1}")
            done[stage][micro_batch] += letters[id(action.kind)]
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, of_stage in enumerate(done):
        for micro_batch, kinds in enumerate(of_stage):
            if kinds not in allowed:
                raise PlanError(
                    f"micro-batch {micro_batch} on stage {stage} runs {kinds or 'nothing'} but must run"
                    f" {' or '.join(allowed)}"
                    + (": only a schedule of forwards alone may lack backwards" if kinds == "F" else "")
                )
    _check_pieces(schedule, PieceNeighbours.of(chains))
    _check_progress(schedule, num_micro_batches)


def _check_pieces(schedule: PipelineSchedule, order: PieceNeighbours) -> None:
    if not order.before:
        return
    for actions in schedule.ranks:
        done: set[tuple[bool, int, int]] = set()  # whether it is a forward, stage, micro-batch
        for action in actions:
            stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = kind is Kind.FORWARD
            first = (order.before if forward else order.behind).get(micro_batch)
            if first is not None and (forward, stage, first) not in done:
                raise PlanError(
                    f"action {action} runs before {Action(stage, kind if forward else Kind.BACKWARD, first)}: pieces of"
                    " one sample run forwards from the first to the last on every stage, and backwards from the last to"
                    " the first"
                )
            done.add((forward, stage, micro_batch))


def _check_placement(schedule: PipelineSchedule) -> None:
    if not schedule.stage_ranks or set(schedule.stage_ranks) != set(range(len(schedule.ranks))):
        raise PlanError(
            f"stage_ranks {schedule.stage_ranks} must place at least one stage on each of the"
            f" {len(schedule.ranks)} ranks and on no other"
        )


def _check_progress(schedule: PipelineSchedule, num_micro_batches: int) -> None:
    """Run the order without times; a rank that can never go on is part of, or behind, a circular wait."""
    last, count = schedule.num_stages - 1, num_micro_batches
    gradients, always = schedule.num_stages * count, 2 * schedule.num_stages * count
    done = bytearray(always + 1)  # forwards of every stage and micro-batch, gradients, and what nothing waits for
    done[always] = True

    moves: list[list[tuple[int, int]]] = []  # of each action: what it needs and what it brings
    for actions in schedule.ranks:
        steps = []
        for action in actions:
            stage, kind = action.stage, action.kind
            place = stage * count + action.micro_batch
            if kind is Kind.FORWARD:
                steps.append((place - count if stage else always, place))
            elif kind is Kind.BACKWARD_WEIGHT:
                steps.append((gradients + place, always))
            else:  # its F stands before it in the same list
                steps.append((gradients + place + count if stage < last else always, gradients + place))
        moves.append(steps)
    position = [0] * len(moves)
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(moves):
            at = position[rank]
            while at < len(steps) and done[steps[at][0]]:
                done[steps[at][1]] = True
                at += 1
            progress |= at > position[rank]
            position[rank] = at
    stuck = [
        f"rank {rank} at {actions[position[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise PlanError(f"schedule {schedule.name!r} has a circular wait: {', '.join(stuck)} can never start")
