"""Injection orders to begin a search with, and its random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.pieces import Chain


def start_orders(costs: MicroBatchCosts, chains: Sequence[Chain] = ()) -> list[list[int]]:
    """Natural, ascending, descending, alternating between the two halves, and cheap at both ends (a short fill and
    drain, and neighbours alike). Micro-batches of a chain stand one behind the other, and count as one."""
    times = (costs.forward_ns + costs.backward_ns).sum(axis=0).tolist()
    later = {m for chain in chains for m in chain[1:]}
    units = {m: (m,) for m in range(len(times)) if m not in later} | {chain[0]: chain for chain in chains}
    work = {m: sum(times[k] for k in unit) for m, unit in units.items()}
    ascending = sorted(units, key=lambda m: (work[m], m))
    half = len(ascending) // 2
    alternating = [m for pair in zip(ascending[half:], ascending[:half], strict=False) for m in pair]
    alternating += [ascending[-1]] if len(ascending) % 2 else []
    hill = ascending[::2] + ascending[1::2][::-1]
    orders = [sorted(units), ascending, ascending[::-1], alternating, hill]
    return [[k for m in order for k in units[m]] for i, order in enumerate(orders) if order not in orders[:i]]


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
