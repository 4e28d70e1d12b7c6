"""V-shaped schedules: two stages per rank, 0..p-1 down the ranks and p..2p-1 back up. So each rank has an early stage,
whose activations live long, and a late one, whose activations live shortly: memory is the same on every rank.

`zb_v` after Qi et al. 2023 (arXiv 2401.10241, sec. 6); `v_half` after Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory" (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.published.full_backward import check_counts

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def make_v_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: down the ranks, then back up.

    >>> make_v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def zb_v(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """Keep every rank busy from its first to its last action with F = I = W, in the memory of 1F1B (ZB-V).

    A rank holds at most 2p activations of its stages (p = `num_ranks`), as much as p micro-batches. No rank waits if M
    >= 2p - 1; fewer keep the order that they have among 2p - 1. Raises PlanError for less than one rank or micro-batch.

    >>> for line in zb_v(2, 3).to_lines(): print(*line)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_counts(ranks=num_ranks, micro_batches=num_micro_batches)
    among = max(num_micro_batches, 2 * num_ranks - 1)
    ranks = [
        tuple(action for action in _list_zb_v_actions(rank, num_ranks, among) if action.micro_batch < num_micro_batches)
        for rank in range(num_ranks)
    ]
    return PipelineSchedule("zb-v", tuple(ranks), make_v_placement(num_ranks))


def _list_zb_v_actions(rank: int, num_ranks: int, num: int) -> list[Action]:
    """Return six passes in turn while the pipeline is full, after a warm-up; then the delayed W fill the waits."""
    down, up = rank, 2 * num_ranks - 1 - rank  # its two stages
    up_passes = [(up, _F), (up, _I), (up, _W)]
    first = 2 * (num_ranks - rank) - 1
    passes = [(down, _F)] * first + [(up, _F), (down, _F)] * rank + up_passes * (num_ranks - rank)
    # `up` is p - 1 - rank forwards behind `down`, and continues when those of `down` have run out.
    for m in range(first + rank, num + num_ranks - 1 - rank):
        passes += [(down, _F)] * (m < num) + [(down, _I), (down, _W)] + up_passes
    passes += [(down, _I), (up, _I)] * rank + [(down, _I), (down, _W)] * (num_ranks - rank)
    done: Counter[tuple[int, Kind]] = Counter()
    actions = []
    for stage, kind in passes:
        actions.append(Action(stage, kind, done[stage, kind]))
        done[stage, kind] += 1
    return actions + [Action(stage, _W, m) for stage in (up, down) for m in range(done[stage, _W], num)]


def v_half(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """Use about half the memory of 1F1B (V-Half).

    A rank holds at most 2 floor((p + 2) / 2) activations of its stages (p = `num_ranks`), that is floor((p + 2) / 2)
    micro-batches. If F = I = W and M >= p the bubble is at most 3p passes of half a rank, half of 1F1B's.

    The building block (six passes of one micro-batch on each rank, repeated every six slots) is the paper's, as are
    these figures. The slots that it leaves free in warm-up and cool-down are filled by the paper's means, squeezing and
    reordering under the block's own peak memory. Each pass moves to the earliest free slot after its input at which no
    peak grows, then W goes where a rank waits. Raises PlanError for less than one rank or micro-batch.

    >>> for line in v_half(2, 3).to_lines(): print(*line)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    check_counts(ranks=num_ranks, micro_batches=num_micro_batches)
    most = 2 * ((num_ranks + 2) // 2)
    slots = _squeeze(_repeat_block(num_ranks, num_micro_batches), num_ranks, most)
    return PipelineSchedule("v-half", _fill_waits(slots, num_ranks, most), make_v_placement(num_ranks))


def _repeat_block(num_ranks: int, num: int) -> dict[Action, int]:
    """Return V-Half's building block (offsets of 2 down and 1 up from rank to rank) every six slots: no two collide."""
    shift = 0 if num_ranks % 2 else 3
    slots = {}
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        backward = 6 * num_ranks - 2 + shift - rank  # of `down`; six slots hold F, F or I, I, W, I or F, W
        block = {
            (down, _F): 2 * rank,
            (up, _F): 3 * num_ranks - 2 - rank,
            (up, _I): 3 * num_ranks - 1 + shift + 2 * rank,
            (up, _W): 3 * num_ranks + shift + 2 * rank,
            (down, _I): backward,
            (down, _W): backward + (1 if (backward - 2 * rank) % 6 == 4 else 4),
        }
        slots.update(
            {Action(stage, kind, m): slot + 6 * m for (stage, kind), slot in block.items() for m in range(num)}
        )
    return slots


def _squeeze(slots: dict[Action, int], num_ranks: int, most: int) -> dict[Action, int]:
    """Move each action, in order of time, to the earliest free slot after its input with at most `most` held."""
    rank_of, squeezed = make_v_placement(num_ranks), dict(slots)
    taken: list[set[int]] = [set() for _ in range(num_ranks)]
    held = np.zeros((num_ranks, max(slots.values()) + 2), np.int64)
    for action, slot in slots.items():
        if action.kind is _F:
            weight = Action(action.stage, _W, action.micro_batch)
            held[rank_of[action.stage], slot : slots[weight] + 1] += 1
    for action, slot in sorted(slots.items(), key=lambda item: item[1]):
        stage, kind, m = action.stage, action.kind, action.micro_batch
        rank = rank_of[stage]
        before = [_find_input(action, 2 * num_ranks), Action(stage, kind, m - 1) if m else None]
        first = 1 + max((squeezed[other] for other in before if other), default=-1)
        if kind is _F:
            first = max([first, *(at + 1 for at in range(first, slot) if held[rank, at] >= most)])
        free_slot = next(at for at in range(first, slot + 1) if at not in taken[rank])
        if kind is _F:
            held[rank, free_slot:slot] += 1
        elif kind is _W:
            held[rank, free_slot + 1 : slot + 1] -= 1
        squeezed[action] = free_slot
        taken[rank].add(free_slot)
    return squeezed


def _fill_waits(slots: dict[Action, int], num_ranks: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Return F and I in order of their slots, and the oldest W wherever a rank would wait for an input or memory."""
    rank_of = make_v_placement(num_ranks)
    orders: list[deque[Action]] = [deque() for _ in range(num_ranks)]
    for action in sorted((a for a in slots if a.kind is not _W), key=slots.__getitem__):
        orders[rank_of[action.stage]].append(action)
    delayed: list[deque[Action]] = [deque() for _ in range(num_ranks)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    done: set[Action | None] = {None}
    while any(orders) or any(delayed):
        ran = []
        for order, weights, num_held in zip(orders, delayed, held, strict=True):
            fits = order and (order[0].kind is _I or num_held < most)
            if fits and _find_input(order[0], 2 * num_ranks) in done:
                ran.append(order.popleft())
            elif weights:
                ran.append(weights.popleft())
        assert ran, "an order of V-Half waits for itself"
        for action in ran:
            rank = rank_of[action.stage]
            ranks[rank].append(action)
            held[rank] += {_F: 1, _I: 0, _W: -1}[action.kind]
            if action.kind is _I:
                delayed[rank].append(Action(action.stage, _W, action.micro_batch))
        done.update(ran)
    return tuple(map(tuple, ranks))


def _find_input(action: Action, num_stages: int) -> Action | None:
    """Return the action that must have ended; None for the first stage's forwards."""
    stage, m = action.stage, action.micro_batch
    if action.kind is _F:
        return Action(stage - 1, _F, m) if stage else None
    if action.kind is _W:
        return Action(stage, _I, m)
    return Action(stage + 1, _I, m) if stage < num_stages - 1 else Action(stage, _F, m)
