"""Exchanges in attention between the ranks of a context-parallel group, each with a position shard of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import FloatArray, IntArray
from dynapipe_ext.costs.links import Link
from dynapipe_ext.costs.measured_blocks import MeasuredBlock
from dynapipe_ext.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """One layer's attention on a tensor parallel rank, in a context-parallel group of `width` data parallel ranks.

    Query heads are divided into `head_ranks` shares. By an all-to-all a rank gets all positions of its share (Jacobs et
    al. 2023, "DeepSpeed Ulysses"); key heads fewer than shares are copied. `gather_ranks` ranks have the same share:
    each takes some of its queries, and all keys and values. Sizes are per position. On one tensor parallel rank:
    `query_values` of queries and attention outputs, `key_values` of keys and values. On one rank of the group:
    `kept_values`, the keys and values it attends with.

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
    def from_architecture(cls, a: Architecture, topology: Topology) -> BlockAttention:
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
    def from_sizes(cls, sizes: Mapping[str, Any], topology: Topology) -> BlockAttention | None:
        """Read sizes by names of `Architecture`. Return None if they have no heads, or those of latent attention."""
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
        """The parts into which query heads are divided: the greatest common divisor of heads and `width`."""
        return math.gcd(self.width, self.num_heads)

    @property
    def gather_ranks(self) -> int:
        return self.width // self.head_ranks

    @property
    def kept_values(self) -> int:
        """Keys and values, per position, of the heads that one rank of the group attends with."""
        return self.key_values // math.gcd(self.num_key_heads, self.head_ranks)

    @property
    def copied_values(self) -> float:
        """The keys and values (numbers, not bytes) per position that a rank holds beyond 1 / `width` of them."""
        return max(0.0, self.kept_values - self.key_values / self.width)

    @property
    def exchanged_values(self) -> float:
        """Values that a rank receives in F, per position of the full row. B returns their gradients."""
        others = (self.width - 1) / self.width
        return others * (self.query_values / self.width + self.kept_values)

    def exchange_ns(
        self, positions: IntArray | FloatArray, value_bytes: int, link: Link, measured: MeasuredBlock | None = None
    ) -> FloatArray:
        """Return ns of the exchanges in one layer's F, or B, for rows of `positions`: by `measured`, else by `link`,
        the slowest of the group. Keys and values go with the queries, or are gathered in a third exchange."""
        gathers = self.gather_ranks > 1
        if measured is None:
            fixed_ns = (2 + gathers) * link.latency_ns
            position_ns = value_bytes * self.exchanged_values * 1e9 / link.bytes_per_s
        else:
            even, gathered = measured.even, measured.gathered
            fixed_ns = 2 * even.latency_ns + gathers * gathered.latency_ns
            queries_s = self.query_values / self.width / even.bytes_per_s
            keys_s = self.kept_values / (gathered if gathers else even).bytes_per_s
            position_ns = value_bytes * ((self.width - 1) / self.width) * (1e9 * (queries_s + keys_s))
        times_ns: FloatArray = fixed_ns + position_ns * np.asarray(positions, np.float64)
        return times_ns
