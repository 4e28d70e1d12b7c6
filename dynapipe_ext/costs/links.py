"""Times of messages between stages: latency + bytes / bandwidth of the link between two stages."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import ConfigError, check_integer

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks, in one direction. Its bandwidth is rounded to 1 B/s, from 1 GB/s on to 1 kB/s."""

    latency_ns: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_integer("latency_ns of a link", self.latency_ns, least=0, most=INFEASIBLE)
        if not 1 <= self.bytes_per_s <= 1e15:
            raise ConfigError(f"bytes_per_s of a link is {self.bytes_per_s:g}: give 1 to 1e15")

    def transfer_ns(self, num_bytes: npt.ArrayLike) -> IntArray:
        """Return latency + bytes / bandwidth, rounded up to nanoseconds; a message of 0 bytes takes the latency.

        >>> Link(100, 3e9).transfer_ns([0, 3, 4]).tolist()
        [100, 101, 102]
        """
        unit = 1 if self.bytes_per_s < _NS else 1000
        bandwidth = round(self.bytes_per_s / unit) * unit
        common = math.gcd(_NS, bandwidth)
        ns, per_bytes = _NS // common, bandwidth // common
        # In whole numbers, so that no machine rounds otherwise; the remainder times ns stays below 2^63.
        whole, rest = np.divmod(np.asarray(num_bytes, np.int64), per_bytes)
        time_ns: IntArray = self.latency_ns + whole * ns - (-rest * ns // per_bytes)
        return time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links within a node (`intra`) and between nodes (`inter`). Consecutive `ranks_per_node` ranks are a node."""

    intra: Link
    inter: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        check_integer("ranks_per_node", self.ranks_per_node, least=1)

    def find_group_link(self, stride: int, size: int) -> Link:
        """Return the slowest link of a ring over `size` ranks, each `stride` ranks after the one before.

        >>> links = Links(intra=Link(0, 3e11), inter=Link(0, 5e10), ranks_per_node=8)
        >>> [links.find_group_link(s, n) is links.intra for s, n in ((1, 8), (4, 2), (8, 2), (1, 3), (8, 1))]
        [True, True, False, False, True]
        """
        span = stride * size
        within = size == 1 or (span <= self.ranks_per_node and self.ranks_per_node % span == 0)
        return self.intra if within else self.inter

    def crosses_nodes(self, topology: Topology, from_pp_rank: int, to_pp_rank: int) -> bool:
        """Return whether any rank's peer at the other pipeline rank is on another node: the slowest link sets the pace.

        >>> links = Links(intra=Link(0, 3e11), inter=Link(0, 5e10), ranks_per_node=4)
        >>> [links.crosses_nodes(Topology(tp=2, pp=4), s, s + 1) for s in range(3)]
        [False, True, False]
        """
        return any(
            topology.rank(tp_rank=tp_rank, pp_rank=from_pp_rank, dp_rank=dp_rank) // self.ranks_per_node
            != topology.rank(tp_rank=tp_rank, pp_rank=to_pp_rank, dp_rank=dp_rank) // self.ranks_per_node
            for dp_rank in range(topology.dp)
            for tp_rank in range(topology.tp)
        )

    def list_boundaries(self, topology: Topology) -> tuple[Link | None, ...]:
        """List the link between each stage and the next one, S - 1 in all; None if both are on one rank."""
        return tuple(
            None if a == b else self.inter if self.crosses_nodes(topology, a, b) else self.intra
            for a, b in itertools.pairwise(topology.stage_ranks)
        )

    def transfer_ns(self, topology: Topology, num_bytes: IntArray) -> IntArray:
        """Return ns of messages of `num_bytes`, (S - 1, M), over each stage boundary; 0 between stages on one rank."""
        rows = [
            np.zeros_like(row) if link is None else link.transfer_ns(row)
            for link, row in zip(self.list_boundaries(topology), num_bytes, strict=True)
        ]
        return np.array(rows, np.int64).reshape(num_bytes.shape)
