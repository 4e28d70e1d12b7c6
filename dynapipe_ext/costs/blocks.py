"""What the ranks of a block exchange in attention, where each has a slice of all positions of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.links import Links
from dynapipe_ext.costs.measured_blocks import MeasuredBlock
from dynapipe_ext.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """How one layer's attention runs on the tensor parallel rank of a block of `width` data parallel ranks.

    The ranks divide its query heads over `head_ranks` of them: by an all-to-all each gets all positions of its heads
    (Jacobs et al. 2023, "DeepSpeed Ulysses"). Key heads fewer than these are copied. Where heads are fewer than ranks,
    `gather_ranks` share a part of the heads: each has a part of the queries, and all keys and values, by the same
    exchange. Values are counted for each position, on one tensor parallel rank: `query_values` of queries and of what
    they attend to, `key_values` of keys and values.

    >>> eight_heads = BlockAttention(width=16, num_heads=8, num_key_heads=2, query_values=2048, key_values=512)
    >>> eight_heads.head_ranks, eight_heads.gather_ranks, eight_heads.kept_values
    (8, 2, 256)
    """

    width: int
    num_heads: int
    num_key_heads: int
    query_values: int
    key_values: int

    @classmethod
    def of(cls, a: Architecture, topology: Topology) -> BlockAttention:
        tp = topology.tp
        keys = a.kv_size_on(tp)
        return cls(
            width=topology.width,
            num_heads=max(1, a.num_heads // tp),
            num_key_heads=-(-a.num_query_groups // tp),
            query_values=(a.query_size + a.attended_size) // tp,
            key_values=keys + (a.value_size // tp if a.latent else keys),
        )

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, Any], topology: Topology) -> BlockAttention | None:
        """Of sizes by the names of `Architecture`; None where they say no heads, or those of latent attention."""
        names = ("num_heads", "num_query_groups", "head_dim")
        if sizes.get("latent") or not all(isinstance(sizes.get(name), int) for name in names):
            return None
        heads, groups, head_size = (int(sizes[name]) for name in names)
        groups_here = -(-groups // topology.tp)
        return cls(
            width=topology.width,
            num_heads=max(1, heads // topology.tp),
            num_key_heads=groups_here,
            query_values=2 * heads * head_size // topology.tp,
            key_values=2 * groups_here * head_size,
        )

    @property
    def head_ranks(self) -> int:
        """The largest power of two that divides both the width and the query heads."""
        return math.gcd(self.width, self.num_heads)

    @property
    def gather_ranks(self) -> int:
        return self.width // self.head_ranks

    @property
    def kept_values(self) -> int:
        """Of keys and values, those of the heads that one rank of the block attends with, of every position."""
        return self.key_values // math.gcd(self.num_key_heads, self.head_ranks)

    @property
    def copied_values(self) -> float:
        """Kept for each position of a row beyond a slice's keys and values: copies of key heads, gathered positions."""
        return max(0.0, self.kept_values - self.key_values / self.width)

    @property
    def exchanged_values(self) -> float:
        """Received from other ranks, for each position of a row, in a forward; their gradients return in a backward."""
        others = (self.width - 1) / self.width
        return others * (self.query_values / self.width + self.kept_values)

    def exchange_time(self, topology: Topology, links: Links, value_bytes: int) -> LinearTime:
        """Of a forward or a backward of one layer, over the slowest link of the block."""
        link = links.of_group(topology.tp, self.width)
        count = (
            2 if self.gather_ranks == 1 else 3
        )  # of queries, keys and values, or these apart; of what they attend to
        return LinearTime(float(count * link.latency_ns), value_bytes * self.exchanged_values * 1e9 / link.bytes_per_s)

    def measured_time(self, measured: MeasuredBlock, value_bytes: int) -> LinearTime:
        """The same where blocks of this width were measured. Keys and values go with the queries, or are gathered."""
        even, gathered = measured.even, measured.gathered
        others, is_gathered = (self.width - 1) / self.width, self.gather_ranks > 1
        with_keys = gathered if is_gathered else even
        position_ns = 1e9 * (
            self.query_values / self.width / even.bytes_per_s + self.kept_values / with_keys.bytes_per_s
        )
        fixed_ns = 2 * even.latency_ns + is_gathered * gathered.latency_ns
        return LinearTime(float(fixed_ns), value_bytes * others * position_ns)


@dataclass(frozen=True, slots=True)
class LinearTime:
    """ns of `positions` of a row: a fixed time and one a position."""

    fixed_ns: float = 0.0
    position_ns: float = 0.0

    def __call__(self, positions: Any) -> Any:
        return self.fixed_ns + self.position_ns * np.asarray(positions, np.float64)
