"""Bytes of a schedule: what each pipeline rank holds after every action, and its peak.

Stored activations are held from F to B, or to W where the backward is split. While an action of a kind in `kinds`
runs, the micro-batch's working bytes come on top: as a rule all of F, B and I, which is safer (recomputation
and the temporary gradients of a layer need them in the backward as well); "F" counts them in forwards alone.
"""

from __future__ import annotations

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule


def check_sizes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
    """Refuse costs that are not those of the schedule: other stages, too few micro-batches, backwards or none."""
    if schedule.num_stages != costs.num_stages:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages but the costs have {costs.num_stages}:"
            " price the micro-batches for the same topology"
        )
    if schedule.forward_only and costs.stored_bytes.any():
        raise PlanError(
            f"schedule {schedule.name!r} runs forwards alone but its costs store activations for backwards: price the"
            " micro-batches with ForwardCosts"
        )
    stages, micro_batches = range(costs.num_stages), range(costs.num_micro_batches)
    for rank in schedule.ranks:
        for action in rank:
            if action.stage not in stages or action.micro_batch not in micro_batches:
                raise PlanError(
                    f"action {action} is outside the costs, which have {len(stages)} stages and"
                    f" {len(micro_batches)} micro-batches: price every micro-batch of the schedule"
                )


def static_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Static bytes of all stages of each pipeline rank."""
    totals = [0] * len(schedule.ranks)
    for rank, num_bytes in zip(schedule.stage_ranks, costs.static_bytes.tolist(), strict=True):
        totals[rank] += num_bytes
    return tuple(totals)


def held_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank, static plus stored bytes right after each action.

    Errors: PlanError if the costs do not match the schedule.
    """
    check_sizes(schedule, costs)
    stored = costs.stored_bytes.tolist()
    ranks = []
    for rank, held in zip(schedule.ranks, static_bytes(schedule, costs), strict=True):
        after = []
        for action in rank:
            if action.kind is Kind.FORWARD:
                held += stored[action.stage][action.micro_batch]
            elif action.kind is not Kind.BACKWARD_INPUT:
                held -= stored[action.stage][action.micro_batch]
            after.append(held)
        ranks.append(tuple(after))
    return tuple(ranks)


def peak_bytes(schedule: PipelineSchedule, costs: MicroBatchCosts) -> tuple[int, ...]:
    """Largest memory of each pipeline rank at any time, working bytes among it in the actions of `costs.working_in`.

    During F: held before + stored + working of the micro-batch. During B and I: held (its own stored bytes are part of
    that) + working. W runs on what is held.

    Errors: PlanError if the costs do not match the schedule.
    """
    counted = {kind for kind in Kind if kind.value in costs.working_in}
    working = costs.working_bytes.tolist()
    peaks = []
    for rank, static, after in zip(
        schedule.ranks, static_bytes(schedule, costs), held_bytes(schedule, costs), strict=True
    ):
        peak = before = static
        for action, held in zip(rank, after, strict=True):
            during = max(before, held)
            if action.kind in counted:
                during += working[action.stage][action.micro_batch]
            if during > peak:
                peak = during
            before = held
        peaks.append(peak)
    return tuple(peaks)


class StageMemory:
    """What one stage holds while an order is made for it: a micro-batch enters with its F and leaves with its B or W.

    Errors: PlanError for a micro-batch of the costs that does not fit alone.
    """

    __slots__ = ("_free", "_held", "_inside", "_stored", "_working", "_working_later")

    def __init__(self, costs: MicroBatchCosts, stage: int, limit_bytes: int) -> None:
        static = int(costs.static_bytes[stage])
        self._stored, self._working = costs.stored_bytes[stage].tolist(), costs.working_bytes[stage].tolist()
        self._working_later = costs.working_in != "F"
        self._free, self._held = limit_bytes - static, 0
        self._inside: set[int] = set()
        for m, (stored, working) in enumerate(zip(self._stored, self._working, strict=True)):
            if stored + working > self._free:
                raise PlanError(
                    f"micro-batch {m} alone needs {static + stored + working} B on stage {stage} but the limit is"
                    f" {limit_bytes} B: make the micro-batch smaller, recompute more of it, or raise tp or pp"
                )

    def admit(self, micro_batch: int) -> bool:
        """Whether it entered: its F fits, and so will the backward of everything that is then inside."""
        held = self._held + self._stored[micro_batch]
        needing = (*self._inside, micro_batch) if self._working_later else (micro_batch,)
        if held + max(self._working[m] for m in needing) > self._free:
            return False
        self._held = held
        self._inside.add(micro_batch)
        return True

    def release(self, micro_batch: int) -> None:
        self._held -= self._stored[micro_batch]
        self._inside.remove(micro_batch)
