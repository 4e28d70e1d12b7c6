"""Measurements of context-parallel groups: seconds of exchanges by bytes, and how much slower a layer is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.links import Link
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares

_FASTEST = 1e15  # bytes/s: of exchanges whose time does not grow with their bytes
_MOST_TAX = 100.0
Seconds = tuple[tuple[int, float], ...]  # of exchanges, after the bytes that a rank received


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlock:
    """Exchanges and overhead of context-parallel groups of one degree. A rank receives bytes from the others in two
    ways: `even`, another part of each rank's data (queries by heads), and `gathered`, the same data as all ranks (keys
    and values). `tax`: the time of a layer on position shards, without exchanges, over its share of the time on full
    rows, minus 1. It comes from smaller kernels, copies, and work that is not divided.
    """

    even: Link
    gathered: Link
    tax: float

    def __post_init__(self) -> None:
        if not isinstance(self.tax, int | float) or not 0 <= self.tax <= _MOST_TAX:
            raise ConfigError(f"tax of a measured block is {short(self.tax)} but must be 0 to {_MOST_TAX:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Measured seconds of a context-parallel group: of exchanges; `whole_s` of a layer's forward and backward on a long
    row, on one rank; `slice_s` of the same on the position shards of a group's ranks, without exchanges.
    """

    even_s: Seconds
    gathered_s: Seconds
    whole_s: float
    slice_s: float

    def __post_init__(self) -> None:
        for times in (self.even_s, self.gathered_s):
            if len(times) < 2 or not all(num_bytes > 0 and 0 < s < 1e6 for num_bytes, s in times):
                raise DataError(f"seconds by bytes are {short(times)} but an exchange needs two sizes: measure again")
        if not (0 < self.whole_s < 1e6 and 0 < self.slice_s < 1e6):
            raise DataError(f"a layer took {self.whole_s} s, on slices {self.slice_s} s: measure again")

    def block(self, width: int) -> MeasuredBlock:
        """Return the fitted exchanges and overhead of a group of `width` ranks."""
        tax = min(max(0.0, self.slice_s / (self.whole_s / width) - 1), _MOST_TAX)
        return MeasuredBlock(even=fit_link(self.even_s), gathered=fit_link(self.gathered_s), tax=round(tax, 4))

    def find_errors(self, width: int) -> FloatArray:
        """Return |fitted - measured| / measured of every exchange."""
        block = self.block(width)
        pairs = ((block.even, self.even_s), (block.gathered, self.gathered_s))
        return np.array(
            [abs(link.latency_ns / 1e9 + n / link.bytes_per_s - s) / s for link, times in pairs for n, s in times]
        )


def fit_link(seconds: Seconds) -> Link:
    """Fit latency and bytes/s with least relative errors to the seconds of exchanges by their bytes.

    >>> fit_link(((1000, 2e-6), (10**6, 1.001e-3)))
    Link(latency_ns=1000, bytes_per_s=1000000000)
    """
    sizes, times_s = np.array(seconds, np.float64).T
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    latency_ns, ns_per_byte = non_negative_least_squares(columns, 1e9 * times_s).tolist()
    return Link(round(latency_ns), max(1, min(_FASTEST, round(1e9 / ns_per_byte) if ns_per_byte else _FASTEST)))


def describe_blocks(blocks: Mapping[int, BlockTimes]) -> list[str]:
    """Return a line per context-parallel degree."""
    lines = []
    for width, times in sorted(blocks.items()):
        one, error = times.block(width), 100 * float(times.find_errors(width).mean())
        links = (("exchange", one.even), ("gathering", one.gathered))
        words = [f"{name} {link.latency_ns / 1e3:.0f} us + {link.bytes_per_s / 1e9:.2f} GB/s" for name, link in links]
        lines.append(f"width {width}: {', '.join(words)} (fits off by {error:.0f} %), tax {100 * one.tax:.0f} %")
    return lines
