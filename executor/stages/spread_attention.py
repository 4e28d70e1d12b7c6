"""Attention of rows whose positions lie on several ranks: each attends with some heads over whole rows instead.

positions of all heads ─► exchange ─► all positions of some heads ─► attention ─► exchange ─► positions of all heads

Where heads are fewer than ranks, ranks that have the same heads share the queries, and each has all keys and values.
(Jacobs et al. 2023, "DeepSpeed Ulysses"; with one part of the heads it is the gathering of keys in Dubey et al. 2024,
sec. 3.3.2, but that queries are even in work.)

Shapes: P positions of this rank of T; N queries that it attends with; B rows; H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import gcd
from typing import Any

import torch

from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Queries `begin` to `end` of a row, of a document that begins at `first`: causal, they see the keys from there."""

    first: int
    begin: int
    end: int


@lru_cache(maxsize=256)
def query_sets(document_lengths: tuple[int, ...], num_sets: int) -> tuple[tuple[QuerySpan, ...], ...]:
    """Every query of a row in one of so many sets, whose causal work is even: of 2n parts of a document, set i has the
    i-th and the i-th from the end.

    >>> [[(span.begin, span.end) for span in spans] for spans in query_sets((8, 2), 2)]
    [[(0, 2), (6, 8), (9, 10)], [(2, 4), (4, 6), (8, 9)]]
    """
    sets: list[list[QuerySpan]] = [[] for _ in range(num_sets)]
    first = 0
    for length in document_lengths:
        ends = [first + length * part // (2 * num_sets) for part in range(2 * num_sets + 1)]
        for i, spans in enumerate(sets):
            for part in (i, 2 * num_sets - 1 - i):
                if ends[part] < ends[part + 1]:
                    spans.append(QuerySpan(first, ends[part], ends[part + 1]))
        first += length
    return tuple(map(tuple, sets))


@dataclass(frozen=True, slots=True, eq=False)
class _Routes:
    """How a rank's positions go to sets of queries: `order` sorts them by set, `back` undoes it; `sent[set]` are of
    this rank, `received[rank]` those of its own set that each rank has."""

    order: torch.Tensor
    back: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@lru_cache(maxsize=256)
def _routes(document_lengths: tuple[int, ...], width: int, num_sets: int, number: int) -> _Routes:
    set_of = torch.zeros(sum(document_lengths), dtype=torch.int64)
    for i, spans in enumerate(query_sets(document_lengths, num_sets)):
        for span in spans:
            set_of[span.begin : span.end] = i
    of_ranks = set_of.view(width, -1)
    order = torch.argsort(of_ranks[number], stable=True)
    own_set = number // (width // num_sets)
    return _Routes(
        order,
        torch.argsort(order),
        tuple(torch.bincount(of_ranks[number], minlength=num_sets).tolist()),
        tuple((of_ranks == own_set).sum(dim=1).tolist()),
    )


Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values


class SpreadRows:
    """The exchanges of a micro-batch's rows in one layer with `num_heads` on each rank, and what this one attends with.

    The first `num_parts` ranks have a part of the heads each, and so have those behind them: rank i has part
    i % num_parts, and set i // num_parts of the queries.
    """

    def __init__(self, joined: JoinedRanks, num_heads: int, document_lengths: Sequence[int]) -> None:
        self._joined = joined
        self.num_parts = gcd(joined.width, num_heads)
        self.num_sets = joined.width // self.num_parts
        self._lengths = tuple(document_lengths)
        self.spans: tuple[QuerySpan, ...] | None = None  # of this rank's queries, where it has not all of them
        if self.num_sets > 1:
            self.spans = query_sets(self._lengths, self.num_sets)[joined.number // self.num_parts]

    def attended(self, q_PBHD: torch.Tensor, k_PBHD: torch.Tensor, v_PBHD: torch.Tensor) -> Attended:
        """Queries (N, B, H / parts, D) in their order, keys and values (T, B, H / parts, D) of their heads.

        Queries may be of other rows than the keys, where heads are not fewer than ranks.
        """
        width, num_own = self._joined.width, len(q_PBHD)
        keys = [self._by_part(self._even(x)) for x in (k_PBHD, v_PBHD)]
        even = [len(k_PBHD)] * width
        if self.num_sets == 1 and len(k_PBHD) == num_own:
            q_NBHD, k_TBHD, v_TBHD = self._exchanged([self._by_part(q_PBHD), *keys], even, even)
            return q_NBHD, k_TBHD, v_TBHD
        if self.num_sets == 1:
            (q_NBHD,) = self._exchanged([self._by_part(q_PBHD)], [num_own] * width, [num_own] * width)
            k_TBHD, v_TBHD = self._exchanged(keys, even, even)
            return q_NBHD, k_TBHD, v_TBHD
        routes = self._routes(q_PBHD.device)
        queries = [self._by_part(x).flatten(0, 1) for x in torch.split(q_PBHD[routes.order], list(routes.sent))]
        sent = [count for count in routes.sent for _ in range(self.num_parts)]
        (q_NBHD,) = self._exchanged([torch.cat(queries)[None]], sent, routes.received)
        k_TBHD, v_TBHD = self._exchanged([x.repeat(self.num_sets, *[1] * (x.dim() - 1)) for x in keys], even, even)
        return q_NBHD, k_TBHD, v_TBHD

    def returned(self, out_NBHD: torch.Tensor) -> torch.Tensor:
        """(P, B, H, D) of what was attended."""
        shape, rows, width = out_NBHD.shape[1:], out_NBHD.flatten(1), self._joined.width
        if self.num_sets == 1:
            num_own = len(rows) // width
            even = [num_own] * width
            return _heads_last(self._joined.exchange(rows, even, even).view(self.num_parts, num_own, *shape))
        routes = self._routes(out_NBHD.device)
        sent = [count for count in routes.sent for _ in range(self.num_parts)]
        taken = self._joined.exchange(rows, routes.received, sent)
        of_sets = torch.split(taken, [count * self.num_parts for count in routes.sent])
        pairs = zip(of_sets, routes.sent, strict=True)
        by_set = torch.cat([_heads_last(x.view(self.num_parts, count, *shape)) for x, count in pairs])
        return by_set[routes.back]

    def _routes(self, device: torch.device) -> _Routes:
        routes = _routes(self._lengths, self._joined.width, self.num_sets, self._joined.number)
        return _Routes(routes.order.to(device), routes.back.to(device), routes.sent, routes.received)

    def _even(self, x_PBHD: torch.Tensor) -> torch.Tensor:
        """Key heads, repeated where parts of the queries share one."""
        times = self.num_parts // gcd(self.num_parts, x_PBHD.shape[2])
        return x_PBHD if times == 1 else x_PBHD.repeat_interleave(times, dim=2)

    def _by_part(self, x_PBHD: torch.Tensor) -> torch.Tensor:
        """(parts, P, B, heads of a part, D)."""
        num_own, num_rows, num_heads, width = x_PBHD.shape
        parts = x_PBHD.reshape(num_own, num_rows, self.num_parts, num_heads // self.num_parts, width)
        return parts.permute(2, 0, 1, 3, 4)

    def _exchanged(
        self, by_rank: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int]
    ) -> list[torch.Tensor]:
        """Tensors (…, P, B, heads, D) whose first two dimensions are rows for ranks, in one message each."""
        flat = [x.flatten(0, 1).flatten(1) for x in by_rank]
        taken = self._joined.exchange(torch.cat(flat, dim=1) if len(flat) > 1 else flat[0], sent, received)
        parts = torch.split(taken, [x.shape[1] for x in flat], dim=1)
        return [part.reshape(len(part), *x.shape[2:]) for part, x in zip(parts, by_rank, strict=True)]


# Of documents, each with its queries, which are the last of its keys, (positions, H, D): (all queries, H, D).
AttentionOfDocuments = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


def attend_spans(
    q_NBHD: torch.Tensor,
    k_TBHD: torch.Tensor,
    v_TBHD: torch.Tensor,
    spans: Sequence[QuerySpan],
    attention: AttentionOfDocuments,
) -> torch.Tensor:
    """Of some queries alone, in the order of their spans, with the keys of whole rows: (N, B, H, D)."""
    if not spans:  # no queries, but still a part of the ranks' exchanges, in backwards too
        return q_NBHD[..., : v_TBHD.shape[-1]] + 0.0 * (k_TBHD.sum() + v_TBHD.sum())
    queries = torch.split(q_NBHD, [span.end - span.begin for span in spans])
    keys, values = ([x[span.first : span.end] for span in spans] for x in (k_TBHD, v_TBHD))
    of_rows = [attention(*([x[:, b] for x in of] for of in (queries, keys, values))) for b in range(q_NBHD.shape[1])]
    return torch.stack(of_rows, dim=1)


def attend_piece_and_spans(
    q_NBHD: torch.Tensor,
    k_TBHD: torch.Tensor,
    v_TBHD: torch.Tensor,
    spans: Sequence[QuerySpan],
    attention: AttentionOfDocuments,
    *,
    piece: CarriedPiece,
    layer: object,
    recompute: bool,
) -> torch.Tensor:
    """The same of rows whose first document is a piece of a cut sample, which attends to the earlier ones, too."""
    length = piece.length
    own = [span for span in spans if span.end <= length]
    others = [QuerySpan(span.first - length, span.begin - length, span.end - length) for span in spans[len(own) :]]
    num_own = sum(span.end - span.begin for span in own)
    from_start = [QuerySpan(0, piece.start + span.begin, piece.start + span.end) for span in own]
    out_NBHD = piece.attend(
        layer,
        q_NBHD[:num_own].contiguous(),
        k_TBHD[:length],
        v_TBHD[:length],
        partial(attend_spans, spans=from_start, attention=attention),
        recompute=recompute,
    )
    if not others:
        return out_NBHD
    # Copies, so that the piece's keys and values, which are in the buffers of its sample, are not kept.
    rest = q_NBHD[num_own:].contiguous(), k_TBHD[length:].clone(), v_TBHD[length:].clone()
    return torch.cat([out_NBHD, attend_spans(*rest, others, attention)])


class RowsOverRanks:
    """What `dynapipe_documents`, an attention of transformers, is told of joined ranks: how to attend over rows of
    which this rank has a slice."""

    def __init__(self, joined: JoinedRanks) -> None:
        self._joined = joined

    def attend(
        self,
        layer: object,
        tensors: Sequence[torch.Tensor],
        document_lengths: Sequence[int],
        attention: AttentionOfDocuments,
        *,
        carried: Any = None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """(P, B, H, D) of queries, keys and values (P, B, heads, D); `document_lengths` are those of each row."""
        rows = SpreadRows(self._joined, tensors[0].shape[2], document_lengths)
        q_NBHD, k_TBHD, v_TBHD = rows.attended(*tensors)
        spans = rows.spans if rows.spans is not None else _whole_documents(document_lengths)
        if carried is None:
            return rows.returned(attend_spans(q_NBHD, k_TBHD, v_TBHD, spans, attention))
        return rows.returned(
            attend_piece_and_spans(
                q_NBHD, k_TBHD, v_TBHD, spans, attention, piece=carried, layer=layer, recompute=recompute
            )
        )

    @property
    def width(self) -> int:
        return self._joined.width


def _whole_documents(lengths: Sequence[int]) -> list[QuerySpan]:
    return [
        QuerySpan(end - length, end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]


def heads_of(joined: JoinedRanks, of_heads: torch.Tensor) -> torch.Tensor:
    """Of what has a value for each query head, a rank's part, as `SpreadRows` parts heads."""
    num_parts = gcd(joined.width, len(of_heads))
    return of_heads.chunk(num_parts)[joined.number % num_parts]


def _heads_last(x_parts_PBHD: torch.Tensor) -> torch.Tensor:
    return x_parts_PBHD.permute(1, 2, 0, 3, 4).flatten(2, 3)
