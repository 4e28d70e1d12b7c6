"""Settings written as TOML, as `dynapipe train --config` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_of(tables: Mapping[str, Mapping[str, Any]], *comments: str) -> str:
    """One table after the other below the comments.

    >>> print(toml_of({"run": {"steps": 2, "run_dir": ""}, "job": {"strict": True}}, "made by hand"))
    # made by hand
    <BLANKLINE>
    [run]
    steps = 2
    run_dir = ""
    <BLANKLINE>
    [job]
    strict = true
    <BLANKLINE>
    """
    lines = [f"# {comment}" for comment in comments]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)  # a basic string of TOML escapes as JSON does
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return repr(value)
