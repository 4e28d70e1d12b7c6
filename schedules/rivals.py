"""The strongest ways to train the same samples without this planner: the list for all comparisons, and the choice of
the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynapipe_ext.settings.plan_rules import ScheduleName

_EVEN = 0.0005  # a difference below this share would be written as 0.0 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Packed rows under a published schedule, on the placement of that schedule. Layers are even unless the job itself
    has that placement. `detail` says in words how it trains."""

    name: str
    detail: str
    schedule: ScheduleName

    @property
    def rules(self) -> dict[str, Any]:
        """Keywords of `PlanRules`. Row length, row order and recomputation stay open: each step takes the best."""
        return {"split_policy": "packed-balanced", "layout": "packed", "schedule": self.schedule, "max_tokens": 0}


_ROWS = "rows of whole documents by best fit, attention within each document; the best of several row lengths"
_RIVALS = (
    Rival(name="packed 1F1B", detail=f"{_ROWS}; one forward and one backward in turn", schedule="1f1b"),
    Rival(
        name="packed interleaved 1F1B",
        detail=f"{_ROWS}; two stages per rank, one round of ranks after the other",
        schedule="interleaved-1f1b",
    ),
    Rival(
        name="packed ZB-V",
        detail=f"{_ROWS}; two stages per rank in a V, weight gradients in the waits (Qi et al. 2023)",
        schedule="zb-v",
    ),
)


def list_rivals(pp: int) -> tuple[Rival, ...]:
    """Return the rivals on `pp` pipeline ranks; on one rank all schedules are alike.

    >>> [rival.name for rival in list_rivals(4)]
    ['packed 1F1B', 'packed interleaved 1F1B', 'packed ZB-V']
    >>> [rival.name for rival in list_rivals(1)]
    ['packed 1F1B']
    """
    return _RIVALS if pp > 1 else _RIVALS[:1]


def pick_best_rival(step_s: Mapping[str, float]) -> str:
    """Return the name of the rival with the shortest step, the first of equals; `step_s` must not be empty.

    >>> pick_best_rival({"packed 1F1B": 2.4, "packed ZB-V": 2.1})
    'packed ZB-V'
    """
    return min(step_s, key=step_s.__getitem__)


def describe_gain(ours_s: float, step_s: Mapping[str, float]) -> str:
    """Return a phrase: how much less time, or more, a step of ours takes than one of the best rival.

    >>> describe_gain(1.9, {"packed 1F1B": 2.5, "packed ZB-V": 2.0})
    '5.0 % less time than the best rival, packed ZB-V'
    >>> describe_gain(2.1, {"packed ZB-V": 2.0})
    '5.0 % MORE time than the best rival, packed ZB-V'
    >>> describe_gain(2.0, {"packed ZB-V": 2.0})
    'as much time as the best rival, packed ZB-V'
    >>> describe_gain(2.0, {})
    'no rival fits, so there is none to compare with'
    """
    if not step_s:
        return "no rival fits, so there is none to compare with"
    best = pick_best_rival(step_s)
    less = 1 - ours_s / step_s[best]
    if abs(less) < _EVEN:
        return f"as much time as the best rival, {best}"
    return f"{100 * abs(less):.1f} % {'less' if less > 0 else 'MORE'} time than the best rival, {best}"
