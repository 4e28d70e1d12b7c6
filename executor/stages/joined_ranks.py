"""Data parallel ranks that a plan joins into one replica: each has an even slice of the positions of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.errors import named_collectives
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.transport.torch_p2p import make_group

# Runs a collective that is named so over these ranks of the job, once it is its turn on this rank.
InTurn = Callable[[str, Any, Callable[[], None]], None]
JOINED_KEY = "joined"  # of a batch whose rows are shared by several ranks: those
# Arrays of a batch that have a number for each position.
SLICED = ("tokens", "labels", "loss_weights", "loss_mask", "position_ids", "encoder_tokens", "decoder_tokens")


def at_once(_what: str, _group: Any, run: Callable[[], None]) -> None:
    run()


class JoinedRanks:
    """The `width` ranks of one replica that hold the same stages and the same part of their weights.

    This one has slice `number` of all positions. Its collectives are issued by all of them alike: within forwards and
    input gradients, in the order of these. `in_turn` says when one may begin.
    """

    def __init__(self, group: Any, width: int, number: int, *, in_turn: InTurn = at_once) -> None:
        self.group, self.width, self.number, self._in_turn = group, width, number, in_turn
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        self._action = "their first meeting"

    def taking_turns(self, in_turn: InTurn) -> JoinedRanks:
        """The same ranks and communicator, whose collectives begin when `in_turn` says."""
        return JoinedRanks(self.group, self.width, self.number, in_turn=in_turn)

    @contextmanager
    def acting(self, action: str) -> Iterator[None]:
        """Within: collectives, also over other ranks, are of this action of a step, which errors name."""
        before, self._action = self._action, action
        try:
            with named_collectives(action):
                yield
        finally:
            self._action = before

    def span(self, num_positions: int) -> range:
        """This rank's positions of a row of so many, a multiple of `width`."""
        length, rest = divmod(num_positions, self.width)
        assert not rest, f"rows of {num_positions} positions for {self.width} ranks: plans pad to a multiple"
        return range(self.number * length, (self.number + 1) * length)

    def parts_of(self, document_lengths: Sequence[int], *, num_rows: int) -> list[int]:
        """How many positions of each document are this rank's, of documents end to end in rows of equal length."""
        row_len, rest = divmod(sum(document_lengths), num_rows)
        assert not rest
        own, parts, begin = self.span(row_len), [], 0
        for length in document_lengths:
            row, first = divmod(begin, row_len)
            assert first + length <= row_len, f"document at {begin} of {length} crosses row {row}"
            parts.append(max(0, min(first + length, own.stop) - max(first, own.start)))
            begin += length
        return parts

    def slice_of(self, batch: Batch) -> dict[str, Any]:
        """A collated batch with this rank's positions; what describes whole rows stays."""
        sliced = {}
        for name in SLICED:
            if (x_RS := batch.get(name)) is not None:
                own = self.span(x_RS.shape[1])
                sliced[name] = x_RS[:, own.start : own.stop].contiguous()
        return {**batch, **sliced}

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """The first `sent[0]` rows to the first rank, and so on; what comes from each, `received[i]` rows, in order.

        Gradients go back as they came. Errors: as `run`.
        """
        exchanged: torch.Tensor = _Exchanged.apply(rows, self, tuple(sent), tuple(received))  # type: ignore[no-untyped-call]
        return exchanged

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over slices, which each rank then uses alike: its gradient is that of all uses."""
        total: torch.Tensor = _Summed.apply(own, self)  # type: ignore[no-untyped-call]
        return total

    def run(self, what: str, collective: Callable[[], None]) -> None:
        """Errors: ExecutionError naming the action and the ranks, where one of them is late or gone."""
        named = f"{what} ({self._action})"
        with named_collectives(f"slice {self.number} of {self.width} waited for {_ranks(self._others)} in the {named}"):
            self._in_turn(named, self.group, collective)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, joined: JoinedRanks, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.joined, ctx.sent, ctx.received = joined, sent, received
        return _all_to_all(rows, joined, sent, received, "exchange of positions for heads")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        what = "exchange of gradients of positions for heads"
        return _all_to_all(grads[0], ctx.joined, ctx.received, ctx.sent, what), None, None, None


def _all_to_all(
    rows: torch.Tensor, joined: JoinedRanks, sent: tuple[int, ...], received: tuple[int, ...], what: str
) -> torch.Tensor:
    rows = rows.contiguous()
    taken = rows.new_empty((sum(received), *rows.shape[1:]))

    def move() -> None:
        dist.all_to_all_single(taken, rows, list(received), list(sent), group=joined.group)

    joined.run(what, move)
    return taken


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, joined: JoinedRanks) -> torch.Tensor:
        ctx.joined = joined
        return _summed(own, joined, "sum over slices")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grads[0], ctx.joined, "sum of gradients over slices"), None


def _summed(own: torch.Tensor, joined: JoinedRanks, what: str) -> torch.Tensor:
    total = own.clone(memory_format=torch.contiguous_format)

    def add() -> None:
        dist.all_reduce(total, group=joined.group)

    joined.run(what, add)
    return total


Joined = Mapping[int, JoinedRanks]  # by width, those above 1 that plans of a run may have
ALONE: Joined = MappingProxyType({})


def join_ranks(
    topology: Topology,
    rank: int,
    widths: Iterable[int],
    device: torch.device,
    *,
    timeout_s: float,
) -> dict[int, JoinedRanks]:
    """This rank's block of every width above 1, connected. Every rank of the job must call this at the same point.

    There is one communicator for each width. All are warmed up here, one after the other, so that none is created while
    another one is in use.
    """
    me = topology.coordinates(rank)
    joined = {}
    for width in sorted({width for width in widths if width > 1}):
        block = partial(_place_in_block, width)
        group = make_group(topology, rank, block, timeout_s=timeout_s)
        own = JoinedRanks(group, width, me.dp_rank % width)
        own.exchange(torch.ones(width, device=device), [1] * width, [1] * width)
        joined[width] = own
    return joined


def _place_in_block(width: int, place: Coordinates) -> tuple[int, int, int]:
    return place.tp_rank, place.pp_rank, place.dp_rank // width
