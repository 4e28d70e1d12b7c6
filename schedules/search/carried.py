"""Micro-batches that carry one sample between them, for the search: what returns when, and orders that keep to it.

A chain lists its pieces, first piece first, by whatever numbers its micro-batches have where it is used: positions in
an injection order, or runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.pieces import Chain


@dataclass(frozen=True, slots=True)
class Returns:
    """The order in which the gradients of positions run on every stage, and each position's place in it.

    `first_of` and `last_of`: of each position's chain (of itself, where it is whole). `longest`: pieces of a chain.
    """

    order: tuple[int, ...]
    place: tuple[int, ...]
    first_of: tuple[int, ...]
    last_of: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, count: int, chains: Sequence[Chain]) -> Returns:
        """A piece returns before the pieces before it, and none before its sample's last: all have that one's place.

        >>> Returns.of(5, [(0, 2, 3)]).order
        (1, 3, 2, 0, 4)
        """
        first_of, last_of = list(range(count)), list(range(count))
        for chain in chains:
            for position in chain:
                first_of[position], last_of[position] = chain[0], chain[-1]
        order = sorted(range(count), key=lambda m: (last_of[m], -m))
        place = [0] * count
        for k, m in enumerate(order):
            place[m] = k
        return cls(tuple(order), tuple(place), tuple(first_of), tuple(last_of), max(map(len, chains), default=1))


def chain_positions(group: Sequence[int], chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """The chains of an order of runs, as positions in it."""
    place = {m: i for i, m in enumerate(group)}
    return tuple(tuple(place[m] for m in chain) for chain in chains if chain[0] in place)


def in_piece_order(group: list[int], chains: Sequence[Chain]) -> None:
    """Put the pieces of each chain, where they stand, in their order.

    >>> group = [3, 9, 1, 2]
    >>> in_piece_order(group, [(1, 2, 3)])
    >>> group
    [1, 9, 2, 3]
    """
    for positions, chain in zip(chain_positions(group, chains), (c for c in chains if c[0] in group), strict=True):
        for position, m in zip(sorted(positions), chain, strict=True):
            group[position] = m


def put_in_place(group: list[int], i: int, old: Sequence[int], new: Sequence[int]) -> None:
    """In place of the run at i and of all others of `old`, `new`, one behind the other.

    >>> group = [3, 9, 4, 8]
    >>> put_in_place(group, 2, (3, 4), (5, 6))
    >>> group
    [9, 5, 6, 8]
    """
    at = sum(m not in old for m in group[:i])
    group[:] = [m for m in group if m not in old]
    group[at:at] = new


def place_apart(group: list[int], chain: Chain, at: int, between: int) -> None:
    """Put a chain of the group at the `at`-th place among the others (counted round), with `between` of them after each
    piece.

    >>> group = [3, 9, 4, 8, 7]
    >>> place_apart(group, (3, 4), 1, 1)
    >>> group
    [9, 3, 8, 4, 7]
    """
    group[:] = [m for m in group if m not in chain]
    at %= len(group) + 1
    for k, m in enumerate(chain):
        group.insert(min(at + k * (1 + between), len(group)), m)
