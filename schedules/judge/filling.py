"""Weight gradients in waits: how a rank may leave its order when times are not as predicted.

Forwards and input gradients (F, B, I) keep the order of the schedule. A rank whose next one still waits for its input
runs the first W that is left, if the I of that W has run. `latest_weights` makes room for this: every W stands as late
as the rank's own peak allows. So a W is put off while something more urgent is ready, and fills a wait.

What was proven of the schedule stays true, as long as a W joins no collective over replicas. (Where gradients are
scattered as they come, as in ZeRO-2, it does: such runs cannot fill waits.)

- No deadlock. A W neither sends nor receives, so the transfers of every rank, their order on every communicator and
  the waits between them are those of the instructions that were verified; a W only adds finite time to a gap.
- No more bytes. A rank's stored bytes follow from the F, B and I that have run, which are a prefix of its order, less
  the W that have run, of which there are never fewer than the order has up to the same place.
- The same gradients, bit for bit: whatever the times, W run in the order of the schedule, and none passes a backward
  that adds to the same weights (the executor sees to that), so every sum is the same.

A gain is not proven: a W that was started in a short wait is finished first. With GPT 6.7B on A100 costs, 64k
tokens, PP4, 20 % noise and a stage 1.3 times as slow, searched split schedules end 0 to 2.4 % earlier than in their own
order (tests/bench/slack.py). Zero-bubble schedules gain nothing, and lose some percent on very uneven micro-batches.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import peak_bytes, simulate_ns, static_bytes

Ran = tuple[Action, int, int]  # action, start_ns, end_ns


def latest_weights(schedule: PipelineSchedule, costs: MicroBatchCosts) -> PipelineSchedule:
    """The same schedule with each W as late as it can stand without a higher peak on its rank.

    F, B and I keep their order, and so do the W. Run strictly in this order a rank is slower; it is meant for one that
    fills its waits. Errors: PlanError if the costs do not match the schedule.
    """
    stored, working = costs.stored_bytes.tolist(), costs.working_bytes.tolist()
    ranks = []
    for actions, held, room in zip(
        schedule.ranks, static_bytes(schedule, costs), peak_bytes(schedule, costs), strict=True
    ):
        weights = [action for action in actions if action.kind is Kind.BACKWARD_WEIGHT]
        late: list[Action] = []
        num_late = 0
        for action in actions:
            stage, m = action.stage, action.micro_batch
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            if action.kind is Kind.FORWARD:
                held += stored[stage][m]
            during = working[stage][m] if action.kind.value in costs.working_in else 0
            while held + during > room:
                weight = weights[num_late]  # the schedule itself fits, with at least as many W before this action
                late.append(weight)
                held -= stored[weight.stage][weight.micro_batch]
                num_late += 1
            late.append(action)
            if action.kind is Kind.BACKWARD:
                held -= stored[stage][m]
        ranks.append((*late, *weights[num_late:]))
    return replace(schedule, ranks=tuple(ranks))


def with_room_to_fill(schedule: PipelineSchedule, costs: MicroBatchCosts) -> PipelineSchedule:
    """The order for ranks that fill their waits: with late W, or as it is where that is faster on these costs.

    Errors: PlanError if the costs do not match the schedule.
    """
    if not schedule.is_split:
        return schedule
    return min((latest_weights(schedule, costs), schedule), key=lambda order: filling_makespan_ns(order, costs))


def filling_makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts) -> int:
    """First start to last end where ranks fill their waits. Errors: as simulate_ns."""
    return max((rank[-1][2] for rank in simulate_filling(schedule, costs) if rank), default=0)


def simulate_filling(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[list[Ran]]:
    """What each rank runs, in the order in which it runs it, if it fills its waits with weight gradients.

    As `simulate_ns` otherwise; a rank that has started a W finishes it. Errors: PlanError as simulate_ns.
    """
    simulate_ns(schedule, costs)  # what cannot run in order cannot run this way either, and is named there
    return _Filling(schedule, costs).run()


class _Filling:
    """One run; lists are per rank."""

    def __init__(self, schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
        self._schedule, self._last = schedule, schedule.num_stages - 1
        self._transfer = costs.transfer_ns.tolist()
        self._duration = {
            Kind.FORWARD: costs.forward_ns.tolist(),
            Kind.BACKWARD: costs.backward_ns.tolist(),
            Kind.BACKWARD_INPUT: costs.input_ns.tolist(),
            Kind.BACKWARD_WEIGHT: costs.weight_ns.tolist(),
        }
        self._arrival: dict[tuple[str, int, int], int] = {}  # input of F, or of B and I, of a stage and micro-batch
        ranks = schedule.ranks
        self._weights = [[a for a in rank if a.kind is Kind.BACKWARD_WEIGHT] for rank in ranks]
        self._num_weights = [0] * len(ranks)  # that have run: a prefix of the rank's W
        self._place = [0] * len(ranks)
        self._passed = [0] * len(ranks)  # W that the place in the order has gone past
        self._ready: list[set[tuple[int, int]]] = [set() for _ in ranks]  # I has run
        self._free_at = [0] * len(ranks)
        self._events: list[tuple[int, int]] = [(0, rank) for rank in range(len(ranks))]

    def run(self) -> list[list[Ran]]:
        ran: list[list[Ran]] = [[] for _ in self._schedule.ranks]
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now < self._free_at[rank]:
                continue
            action = self._choose(rank, now)
            if action is None:
                continue
            end = now + self._duration[action.kind][action.stage][action.micro_batch]
            ran[rank].append((action, now, end))
            self._finish(rank, action, end)
        return ran

    def _choose(self, rank: int, now: int) -> Action | None:
        actions = self._schedule.ranks[rank]
        while self._place[rank] < len(actions):
            action = actions[self._place[rank]]
            if action.kind is Kind.BACKWARD_WEIGHT:
                self._place[rank] += 1
                self._passed[rank] += 1
                if self._passed[rank] > self._num_weights[rank]:
                    self._num_weights[rank] += 1
                    return action
            elif self._input_at(action) <= now:
                self._place[rank] += 1
                return action
            else:
                break
        done = self._num_weights[rank]
        if self._place[rank] < len(actions) and done < len(self._weights[rank]):
            weight = self._weights[rank][done]
            if (weight.stage, weight.micro_batch) in self._ready[rank]:
                self._num_weights[rank] += 1
                return weight
        return None

    def _input_at(self, action: Action) -> float:
        if action.kind is Kind.FORWARD and action.stage == 0:
            return 0
        letter = "F" if action.kind is Kind.FORWARD else "B"
        return self._arrival.get((letter, action.stage, action.micro_batch), float("inf"))

    def _finish(self, rank: int, action: Action, end: int) -> None:
        self._free_at[rank] = end
        heapq.heappush(self._events, (end, rank))
        stage, m = action.stage, action.micro_batch
        match action.kind:
            case Kind.FORWARD if stage == self._last:
                self._arrival["B", stage, m] = end
            case Kind.FORWARD:
                self._arrive("F", stage + 1, m, end, stage)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._ready[rank].add((stage, m))
                if stage:
                    self._arrive("B", stage - 1, m, end, stage - 1)
            case Kind.BACKWARD_WEIGHT:
                pass

    def _arrive(self, letter: str, stage: int, m: int, sent_at: int, boundary: int) -> None:
        ranks = self._schedule.stage_ranks
        at = sent_at + (self._transfer[boundary][m] if ranks[boundary] != ranks[boundary + 1] else 0)
        self._arrival[letter, stage, m] = at
        heapq.heappush(self._events, (at, ranks[stage]))
