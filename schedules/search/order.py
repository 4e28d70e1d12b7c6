"""Injection orders to begin a search with, and its random numbers."""

from __future__ import annotations

from dynapipe_ext.costs.model import MicroBatchCosts


def start_orders(costs: MicroBatchCosts) -> list[list[int]]:
    """Natural, ascending, descending, alternating between the two halves, and cheap at both ends (a short fill and
    drain, and neighbours alike)."""
    work = (costs.forward_ns + costs.backward_ns).sum(axis=0).tolist()
    ascending = sorted(range(len(work)), key=lambda m: (work[m], m))
    half = len(work) // 2
    alternating = [m for pair in zip(ascending[half:], ascending[:half], strict=False) for m in pair]
    alternating += [ascending[-1]] if len(work) % 2 else []
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [list(range(len(work))), ascending, ascending[::-1], alternating, hill]
    return [order for i, order in enumerate(orders) if order not in orders[:i]]


def splitmix64(state: int) -> tuple[int, int]:
    """Next state and a random number of 64 bits (Steele, Lea and Flood 2014): the same on every machine.

    >>> splitmix64(0)[1], splitmix64(splitmix64(0)[0])[1]
    (16294208416658607535, 7960286522194355700)
    """
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)
