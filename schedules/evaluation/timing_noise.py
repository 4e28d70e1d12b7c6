"""How long an order of actions takes in the mean of times that are not as predicted.

Twin of the native core's `disturbed.hpp`. Ranks run their actions in the planned order, whatever the times turn out to
be. So an order is judged by its mean makespan over a few fixed draws of times, which are the same for all orders. Draws
come in pairs: what makes an action longer in one makes it as much shorter in the other. A makespan is convex in its
times, so the mean of a pair is never below the makespan of the predicted times, nor below a bound on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.reproducible import splitmix64
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import makespan_ns

SCALE = 1024  # shares of times are counted in parts of one in so many
PAIRS = 8
_LETTERS = 3  # F, the gradient (B or I) and W


def spread_of(noise: float) -> int:
    """The largest share of an action's time by which it is disturbed, in parts of `SCALE`.

    >>> spread_of(0.25)
    256
    """
    return round(noise * SCALE)


def disturbed(costs: MicroBatchCosts, spread: int, *, split: bool) -> Iterator[MicroBatchCosts]:
    """The costs of micro-batches, in their order of injection, under each draw. Bytes and transfers stay.

    An action's share of its time is drawn evenly from -`spread` to `spread`, by its place in that order, its stage and
    its letter: whichever micro-batch is there has it.
    """
    shares = _shares(costs.num_micro_batches, costs.num_stages, spread)
    weight_ns = costs.weight_ns if split else np.zeros_like(costs.weight_ns)
    predicted = np.stack([costs.forward_ns, costs.backward_ns - weight_ns, weight_ns])
    for pair in shares:
        more = predicted * pair // SCALE
        for forward, gradient, weight in (predicted + more, predicted - more):
            yield replace(costs, forward_ns=forward, backward_ns=gradient + weight, weight_ns=weight)


def mean_makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts, spread: int) -> int:
    """The mean makespan of the schedule over all draws; that of the predicted times where `spread` is 0.

    Micro-batches are numbered in their order of injection, as in plans. Errors: PlanError as `simulate_ns`.
    """
    if not spread or not costs.num_micro_batches:
        return makespan_ns(schedule, costs)
    times = [makespan_ns(schedule, one) for one in disturbed(costs, spread, split=schedule.is_split)]
    return sum(times) // len(times)


@lru_cache(maxsize=64)
def _shares(count: int, stages: int, spread: int) -> IntArray:
    """(pair, letter, stage, position), each drawn by its own number; the same for all orders that are compared."""
    places = range(count * stages * _LETTERS * PAIRS)
    drawn = [splitmix64(place)[1] % (2 * spread + 1) - spread for place in places]
    return np.array(drawn, np.int64).reshape(count, stages, _LETTERS, PAIRS).transpose(3, 2, 1, 0)
