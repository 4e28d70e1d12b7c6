"""Text as a terminal may show it: what it would obey instead is written as an escape."""

from __future__ import annotations

import re

# Control characters but newline and tab, and those that change the direction of what follows.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return `text` with characters that a terminal would obey as Python writes them in a string. Paths, templates and
    messages of other machines may hold such characters, and so move the cursor, hide lines or name the window.

    >>> print(visible("model\\x1b]0;mine\\x07\\n"), end="")
    model\\x1b]0;mine\\x07
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
