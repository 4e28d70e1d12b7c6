"""How long an order of actions takes on average if times are not as predicted.

Ranks run their actions in the planned order, whatever the times turn out to be. So an order is judged by its mean
makespan over a few fixed draws of times (those of the search's `disturbed.hpp`), which are the same for all orders.
Draws come in pairs: what makes an action longer in one makes it as much shorter in the other. A makespan is convex in
its times, so the mean of a pair is never below the makespan of the predicted times, nor below a bound on it.
"""

from __future__ import annotations

import numpy as np

from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import last_end_ns, makespan_ns, run_in_times

SCALE = 1024  # shares of times are counted in parts of one in so many
_PAIRS = 8
_KINDS = 3  # F, the gradient (B or I) and W


def spread_of(noise: float) -> int:
    """Return the largest share of an action's time by which it is perturbed, in parts of `SCALE`.

    >>> spread_of(0.25)
    256
    """
    return round(noise * SCALE)


def mean_makespan_ns(schedule: PipelineSchedule, costs: MicroBatchCosts, spread: int) -> int:
    """Return the mean makespan of the schedule over all draws; that of the predicted times if `spread` is 0.

    An action's share of its time is drawn evenly from -`spread` to `spread`, by its place in the injection order (the
    number of its micro-batch), its stage and its kind; bytes and transfers stay. Raises PlanError as `simulate_ns`.
    """
    if not spread:
        return makespan_ns(schedule, costs)
    weight_ns = costs.weight_ns if schedule.is_split else np.zeros_like(costs.weight_ns)
    predicted = np.stack([costs.forward_ns, costs.backward_ns - weight_ns, weight_ns])
    total_ns = 0
    for shares in _draw_shares(costs.num_micro_batches, costs.num_stages, spread):
        more = predicted * shares // SCALE
        for forward, gradient, weight in (predicted + more, predicted - more):
            spans = run_in_times(schedule, forward, gradient + weight, gradient, weight, costs.transfer_ns)
            total_ns += last_end_ns(spans)
    return total_ns // (2 * _PAIRS)


def _draw_shares(count: int, stages: int, spread: int) -> IntArray:
    """Return shares (pair, kind, stage, position), each drawn by its own number (splitmix64)."""
    z = np.arange(count * stages * _KINDS * _PAIRS, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    shares = (z % np.uint64(2 * spread + 1)).astype(np.int64) - spread
    return shares.reshape(count, stages, _KINDS, _PAIRS).transpose(3, 2, 1, 0)
