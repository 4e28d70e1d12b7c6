"""What the ranks of a block exchange in attention, where each has a slice of all positions of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

_EXCHANGES = 2  # queries, keys and values together; what was attended to
UNCOUNTED_TAX = 0.1  # of computing, where no links are known: see AnalyticCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """How one layer's attention runs on the tensor parallel rank of a block of `width` data parallel ranks.

    `head_ranks` of them, neighbours, divide the rank's query heads: by an all-to-all each gets all positions of its
    heads from the others (Jacobs et al. 2023, "DeepSpeed Ulysses"). Key heads fewer than these are copied. The other
    `width` / `head_ranks` groups gather keys and values of whole rows. Values are counted for each position, on one
    tensor parallel rank: `query_values` of queries and of what they attend to, `key_values` of keys and values.

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

    @property
    def head_ranks(self) -> int:
        """The largest power of two that divides both the width and the query heads."""
        return math.gcd(self.width, self.num_heads)

    @property
    def gather_ranks(self) -> int:
        return self.width // self.head_ranks

    @property
    def kept_values(self) -> int:
        """Of keys and values, those of the heads that one rank of the block attends with: at least one."""
        return self.key_values // self.num_key_heads * -(-self.num_key_heads // self.head_ranks)

    @property
    def copied_values(self) -> float:
        """Kept for each position of a row beyond a slice's keys and values, where ranks hold copies of key heads."""
        return max(0.0, self.kept_values / self.gather_ranks - self.key_values / self.width)

    @property
    def exchanged_values(self) -> float:
        """Sent to the other ranks that divide heads, for each position of a row, in a forward or a backward."""
        others = self.head_ranks - 1
        return (self.query_values * others / self.head_ranks + self.kept_values * others) / self.width

    @property
    def gathered_values(self) -> float:
        """Received of keys and values in a gather, for each position of a row; sums of gradients as many."""
        return self.kept_values * (self.gather_ranks - 1) / self.gather_ranks

    def seconds(self, topology: Topology, links: Links, value_bytes: int) -> ExchangeTimes:
        """Ranks that divide heads are neighbours in the block, ranks that gather are those so many apart."""
        exchange = links.of_group(topology.tp, self.head_ranks)
        gather = links.of_group(topology.tp * self.head_ranks, self.gather_ranks)
        exchanged = _collectives(exchange, value_bytes * self.exchanged_values, _EXCHANGES * (self.head_ranks > 1))
        gathered = _collectives(gather, value_bytes * self.gathered_values, int(self.gather_ranks > 1))
        twice = gathered + gathered  # keys and values again, and their gradients
        return ExchangeTimes(forward=exchanged + gathered, backward=exchanged + twice)


@dataclass(frozen=True, slots=True)
class LinearTime:
    """ns of `positions` of a row: a fixed time and one a position."""

    fixed_ns: float = 0.0
    position_ns: float = 0.0

    def __add__(self, other: LinearTime) -> LinearTime:
        return LinearTime(self.fixed_ns + other.fixed_ns, self.position_ns + other.position_ns)

    def __call__(self, positions: Any) -> Any:
        return self.fixed_ns + self.position_ns * np.asarray(positions, np.float64)


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Of one layer's attention. Backwards exchange gradients, and gather again what forwards did not keep."""

    forward: LinearTime = LinearTime()
    backward: LinearTime = LinearTime()


def _collectives(link: Link, position_bytes: float, count: int) -> LinearTime:
    return LinearTime(float(count * link.latency_ns), position_bytes * 1e9 / link.bytes_per_s)


def check_tax(tax: float) -> None:
    """Errors: ConfigError for a share of computing that cannot be."""
    if not isinstance(tax, int | float) or not 0 <= tax <= 100:
        raise ConfigError(
            f"width_tax is {tax!r} but is what a block's exchanges take over its computing: give 0 to 100"
        )
