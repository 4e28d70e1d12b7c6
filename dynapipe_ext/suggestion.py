"""Which of the known words somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALIKE = 0.6  # share of letters in common, as difflib counts


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that refuses `word`; empty where none that is known is like it.

    >>> did_you_mean("zbv", ["zb-h1", "zb-v"]), did_you_mean("--stpes", ["--steps"]), did_you_mean("x", ["tp"])
    ("; did you mean 'zb-v'?", "; did you mean '--steps'?", '')
    """
    alike = difflib.get_close_matches(word.lower(), words := {one.lower(): one for one in known}, n=1, cutoff=_ALIKE)
    return f"; did you mean {words[alike[0]]!r}?" if alike else ""
