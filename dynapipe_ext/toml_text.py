"""TOML with bounds: its parser takes memory with the square of the names that one dotted key has."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_NAMES = 32  # of a key: settings have two
_MOST_CHARACTERS = 1 << 20
_NAME = r"(?:[\w-]++|\"(?:[^\"\\\n]|\\.){0,256}+\"|'[^'\n]*+')"
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_NAME}[ \t]*+\.[ \t]*+){{{_MOST_NAMES}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises ValueError if it is none, has a key of more than 32 names, or is longer than a million characters, and
    RecursionError if it nests too deep.

    >>> parse_toml("[run]\\nsteps = 5")
    {'run': {'steps': 5}}
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than {_MOST_CHARACTERS:,}")
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.start()) + 1
        raise ValueError(f"a key has more than {_MOST_NAMES} names (line {line})")
    return tomllib.loads(text)
