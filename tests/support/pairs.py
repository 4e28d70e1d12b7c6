"""Few cases that hold every pair of values of any two parameters: what two of them do together is tested."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise_cases(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of the product, by turns the one with the most pairs that are still missing, the earliest of equals.

    >>> pairwise_cases("ab", "xy", (1, 2))
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    rest = {case: set(itertools.combinations(enumerate(case), 2)) for case in itertools.product(*values)}
    chosen = []
    while rest:
        case = max(rest, key=lambda case: len(rest[case]))
        done = rest.pop(case)
        chosen.append(case)
        rest = {case: left for case, pairs in rest.items() if (left := pairs - done)}
    return chosen
