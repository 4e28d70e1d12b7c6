"""All samples of an epoch once: in no more steps than multipack, no costlier than the default, alike in length."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batching.sampling.composition import FURTHEST, length_variation
from dynapipe_ext.batching.sampling.fill import Steps, fill_steps, place_rest
from dynapipe_ext.batching.sampling.packed_runs import fewest_steps, packed_runs, run_ends
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import PlanError

_ROOM = (128, 2048)  # one part in so many of the cap, least and most, is room to balance in
_ROOM_BY_SAMPLE = 12  # times the samples that fill a bin, between these: the fewer a bin has, the more room they need
_MORE = 100  # where it was not, one more step in so many is tried, or what is left would need
_ABOVE_MULTIPACK = 1.1  # mean lengths may vary so much more than multipack's where those vary more than `FURTHEST`


def spread(tokens: IntArray, costs: IntArray, *, num_ranks: int, cap: int) -> Steps:
    """All places in steps of `num_ranks` bins of at most `cap` tokens, costs even; tokens and costs are by place.

    The steps are no more than multipack's of the same order, or one more where multipack drops samples and they find no
    room. Steps' mean lengths vary (standard deviation over mean) by no more than `FURTHEST`, or than `_ABOVE_MULTIPACK`
    times multipack's. Dearest ranks cost no more, in sum and beside their steps' means, than if the squares of lengths
    had been evened out: the default is a proposal, too.

    Raises PlanError where some rank would get no sample in a step.
    """
    steps = _few_alike(tokens, costs, num_ranks=num_ranks, cap=cap)
    squares = tokens * tokens
    if num_ranks == 1 or np.array_equal(costs * squares[0], squares * costs[0]):
        return steps
    default = _few_alike(tokens, squares, num_ranks=num_ranks, cap=cap)
    own, other = (_dearest(each, costs, num_ranks) for each in (steps, default))
    return steps if own[0] <= other[0] and own[1] <= other[1] else default


def _dearest(steps: Steps, costs: IntArray, num_ranks: int) -> tuple[int, float]:
    """What the dearest ranks of all steps cost in sum, and the mean of that over the mean rank of their step."""
    load = np.add.reduceat(costs[steps.places], steps.starts[:-1]).reshape(-1, num_ranks)
    dearest = load.max(axis=1)
    return int(dearest.sum()), float((dearest / np.maximum(load.mean(axis=1), 1e-9)).mean())


def _few_alike(tokens: IntArray, costs: IntArray, *, num_ranks: int, cap: int) -> Steps:
    """Few steps, alike in length, that even out these costs."""
    least = fewest_steps(tokens, num_ranks=num_ranks, cap=cap)
    if least * num_ranks > len(tokens):
        raise unfed(len(tokens), least, num_ranks)
    roomy = min(max(_roomy_steps(tokens, num_ranks, cap), least), len(tokens) // num_ranks)
    ends = run_ends(tokens, num_ranks=num_ranks, cap=cap, most=roomy) if roomy > least else None
    num_steps = roomy if ends is None else max(len(ends), least)
    steps = _in_steps(tokens, costs, num_steps, num_ranks, cap)
    if len(steps.left) or length_variation(steps.places, steps.starts, tokens, num_ranks=num_ranks) > FURTHEST:
        ends = ends or run_ends(tokens, num_ranks=num_ranks, cap=cap, most=len(tokens) + 1)
        assert ends is not None
        most = max(len(ends), least)
        while len(steps.left) and num_steps < most:
            left_steps = int(tokens[steps.left].sum()) // (num_ranks * cap)
            num_steps = min(most, num_steps + max(1, num_steps // _MORE, left_steps))
            steps = _in_steps(tokens, costs, num_steps, num_ranks, cap)
        firsts = np.array([0, *ends], np.int64)
        runs_vary = length_variation(np.arange(ends[-1], dtype=np.int64), firsts, tokens, num_ranks=1)
        varied = length_variation(steps.places, steps.starts, tokens, num_ranks=num_ranks)
        if len(steps.left) or varied > max(FURTHEST, _ABOVE_MULTIPACK * runs_vary):
            steps = packed_runs(tokens, costs, ends, num_ranks=num_ranks, cap=cap)
        if len(steps.left) and (most + 1) * num_ranks <= len(tokens):  # what multipack drops needs a step of its own
            steps = _in_steps(tokens, costs, most + 1, num_ranks, cap)
        if len(steps.left):
            raise unfed(len(tokens), most + 1, num_ranks)
    return steps


def _roomy_steps(tokens: IntArray, num_ranks: int, cap: int) -> int:
    """As few steps as leave a little room to balance in."""
    total = int(tokens.sum())
    room = min(max(_ROOM[0], _ROOM_BY_SAMPLE * cap * len(tokens) // total), _ROOM[1])
    return -(-total * room // ((room - 1) * num_ranks * cap))


def _in_steps(tokens: IntArray, costs: IntArray, num_steps: int, num_ranks: int, cap: int) -> Steps:
    """So many steps; what finds no room in a draft of them is left without more work."""
    target = -(-int(tokens.sum()) // num_steps)
    for draft in (True, False):
        steps = fill_steps(tokens, costs, num_steps=num_steps, num_ranks=num_ranks, cap=cap, target=target, draft=draft)
        steps = place_rest(steps, tokens, cap=cap)
        if len(steps.left):
            break
    return steps


def unfed(num_samples: int, num_steps: int, num_ranks: int) -> PlanError:
    """The error that says that there are fewer samples than ranks in so many steps."""
    return PlanError(
        f"{num_samples} samples do not feed {num_steps} steps of {num_ranks} ranks, which their lengths need: choose"
        " last='pad' (some are repeated) or last='carry' (some wait for the next epoch), or raise max_tokens"
    )
