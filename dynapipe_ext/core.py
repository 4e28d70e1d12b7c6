"""The compiled core, `dynapipe_ext/_native`: it prices, searches, times and proves plans."""

from __future__ import annotations

try:
    import dynapipe_ext._core as native  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError(
        "dynapipe-ext was installed without its compiled core: install a C++ compiler (g++ or clang++) and install"
        f" dynapipe-ext again ({error})"
    ) from error

__all__ = ["native"]
