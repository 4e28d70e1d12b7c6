"""The page "What works with what", made of the table of limits.

python -m tests.support.capabilities_page    writes .github/docs/what-works.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from dynapipe_ext.capabilities import LIMITS, RunFeature, RunKind

PAGE = Path(__file__).resolve().parents[2] / ".github" / "docs" / "what-works.md"
_OPENING = """# What works with what

Made of `dynapipe_ext/capabilities.py` by `python -m tests.support.capabilities_page`. The same table rejects settings.

A number stands for a reason below. An empty cell: this table has no limit, but a single model may have one (attention
windows and pieces, for example), and then the error names it. A + marks a limit of several kinds together, such as an
encoder-decoder that transformers computes.
"""


def page() -> str:
    """Return a table, features by kinds of runs, and the numbered reasons."""
    return "\n".join([_OPENING, *_table(), "", *_reasons(), ""])


def _table() -> Iterator[str]:
    every, kinds = [limit for limits in LIMITS.values() for limit in limits], get_args(RunKind)
    yield f"| | {' | '.join(kinds)} |"
    yield "|---|" + "---|" * len(kinds)
    for feature in get_args(RunFeature):
        cells = []
        for kind in kinds:
            own = ((i, one) for i, one in enumerate(every, 1) if one.feature == feature and kind in one.kinds)
            cells.append(", ".join(f"{i}{'+' * (len(one.kinds) > 1)}" for i, one in own))
        yield f"| {feature} | {' | '.join(cells)} |"


def _reasons() -> Iterator[str]:
    for number, limit in enumerate((one for limits in LIMITS.values() for one in limits), 1):
        yield f"{number}. {limit.feature}, {' with '.join(limit.kinds)}: {limit.reason}. To do: {limit.move}."


if __name__ == "__main__":
    PAGE.write_text(page())
