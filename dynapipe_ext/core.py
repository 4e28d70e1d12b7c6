"""The native core, where the installation has one; its twins in Python give the same numbers."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

native: ModuleType | None
try:
    import dynapipe_ext._core as compiled  # type: ignore[import-not-found, import-untyped, unused-ignore]

    native = compiled
except ImportError:
    native = None


def active_core() -> Literal["native", "python"]:
    """Which core plans: "native" (C++), or "python" where the package was built without a compiler."""
    return "python" if native is None else "native"
