"""Every way to put items into groups, for brute force."""

from __future__ import annotations

from collections.abc import Iterator


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]
