"""A loop's function under its own name, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within: attributes of a module or class have these values; on exit their own again."""
    # Not by getattr, which shows a static or class method as something else, and what a class inherits as its own.
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
