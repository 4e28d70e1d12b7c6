"""Measurements of context-parallel groups: seconds of exchanges by bytes, and a layer's overhead on position shards."""

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
    """Exchanges and overhead of context-parallel groups of one degree. Two links give times of exchanges by the bytes
    that a rank receives from the other ranks. `even`: all ranks receive different data (all-to-all, queries by heads);
    `gathered`: all receive the same data (all-gather, keys and values). `tax`: a layer's time on position shards,
    without exchanges, / its share of the time on full rows - 1. It comes from smaller kernels, copies, and work that is
    not divided."""

    even: Link
    gathered: Link
    tax: float

    def __post_init__(self) -> None:
        if not isinstance(self.tax, int | float) or not 0 <= self.tax <= _MOST_TAX:
            raise ConfigError(f"tax of a measured block is {short(self.tax)} but must be 0 to {_MOST_TAX:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Measured seconds of a context-parallel group. `even_s` and `gathered_s`: (bytes that a rank receives, seconds) of
    exchanges as in `MeasuredBlock`. `whole_s`: one layer's F + B on a long row on one rank. `slice_s`: the same F + B
    on position shards of that row on all ranks, without exchanges."""

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
        """Return the fitted links, and the tax, of this group; it has `width` ranks."""
        tax = min(max(0.0, self.slice_s / (self.whole_s / width) - 1), _MOST_TAX)
        return MeasuredBlock(even=fit_link(self.even_s), gathered=fit_link(self.gathered_s), tax=round(tax, 4))

    def find_errors(self, width: int) -> FloatArray:
        """Return |fitted - measured| / measured of every exchange, first of all in `even_s`, then in `gathered_s`."""
        block = self.block(width)
        pairs = ((block.even, self.even_s), (block.gathered, self.gathered_s))
        return np.array(
            [abs(link.latency_ns / 1e9 + n / link.bytes_per_s - s) / s for link, times in pairs for n, s in times]
        )


def fit_link(seconds: Seconds) -> Link:
    """Fit latency and bytes/s to (bytes, seconds) of exchanges, with least relative errors.

    >>> fit_link(((1000, 2e-6), (10**6, 1.001e-3)))
    Link(latency_ns=1000, bytes_per_s=1000000000)
    """
    sizes, times_s = np.array(seconds, np.float64).T
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    latency_ns, ns_per_byte = non_negative_least_squares(columns, 1e9 * times_s).tolist()
    return Link(round(latency_ns), max(1, min(_FASTEST, round(1e9 / ns_per_byte) if ns_per_byte else _FASTEST)))


def describe_blocks(blocks: Mapping[int, BlockTimes]) -> list[str]:
    """Return a line of text per context-parallel degree: latencies, bandwidths, their mean error, and the tax."""
    lines = []
    for width, times in sorted(blocks.items()):
        one, error = times.block(width), 100 * float(times.find_errors(width).mean())
        links = (("exchange", one.even), ("gathering", one.gathered))
        words = [f"{name} {link.latency_ns / 1e3:.0f} us + {link.bytes_per_s / 1e9:.2f} GB/s" for name, link in links]
        lines.append(f"width {width}: {', '.join(words)} (fits off by {error:.0f} %), tax {100 * one.tax:.0f} %")
    return lines
