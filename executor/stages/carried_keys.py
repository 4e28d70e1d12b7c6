"""Keys and values of a long sample's pieces, and the order in which its pieces run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dynapipe_ext.batch.micro_batches import MicroBatch, SamplePieces, sample_pieces
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import ExecutionPlan

Pass = Literal["forward", "input gradient"]


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """A piece, `number` of the `pieces` of a cut sample: it has the `length` positions from `start` on, of `total`."""

    pieces: SamplePieces
    number: int
    start: int
    length: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == len(self.pieces) - 1


class PieceOrder:
    """What has run of a replica's cut samples, stage by stage; a sample in one piece is not cut."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._places: dict[int, PiecePlace] = {}
        self._num_run: Counter[tuple[int, SamplePieces]] = Counter()
        for pieces in sample_pieces(micro_batches):
            lengths = [micro_batches[m].samples[0] for m in pieces]
            total = sum(piece.encoder for piece in lengths)
            for number, (m, piece) in enumerate(zip(pieces, lengths, strict=True)):
                if len(pieces) > 1:
                    self._places[m] = PiecePlace(pieces, number, piece.start, piece.encoder, total)

    def run(self, what: Pass, stage: int, micro_batch: int) -> PiecePlace | None:
        """The piece of a micro-batch that now runs, None where it has none.

        Errors: ExecutionError where another piece of its sample is due on that stage.
        """
        place = self._places.get(micro_batch)
        if place is None:
            return None
        pieces, num_run = place.pieces, self._num_run[stage, place.pieces]
        turns: list[tuple[Pass, int]] = [("forward", m) for m in pieces]
        turns += [("input gradient", m) for m in reversed(pieces)]
        due = turns[num_run] if num_run < len(turns) else None
        if due != (what, micro_batch):
            sample = self._micro_batches[micro_batch].samples[0].index
            due_text = (
                f"the {due[0]} of piece {pieces.index(due[1]) + 1} (micro-batch {due[1]})" if due else "none of them"
            )
            raise ExecutionError(
                f"stage {stage} was to run the {what} of piece {place.number + 1} of sample {sample} (micro-batch"
                f" {micro_batch}), but {due_text} is due: forwards go from the first piece to the last and input"
                " gradients from the last to the first, so this plan was not verified; `dynapipe check-plan` says where"
            )
        self._num_run[stage, pieces] += 1
        return place


AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CarriedKeys:
    """Of one pipeline rank in one step, by stage, sample and layer: from the forward of a sample's first piece to the
    end of its backward, or, where no backward follows, of its last forward.

    `storages`: data pointers of what `num_bytes` counts, so that nobody counts it twice.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self._forward_only = plan.forward_only
        self._order = PieceOrder(plan.micro_batches)
        self._samples: dict[tuple[int, SamplePieces], dict[object, _LayerKeys]] = {}
        self.storages: set[int] = set()

    @contextmanager
    def forward(self, stage: int, micro_batch: int) -> Iterator[CarriedPiece | None]:
        """Within: the forward of a micro-batch, whose piece attends by what this yields; None where it has none.

        Errors: ExecutionError where another piece of its sample is due.
        """
        place = self._order.run("forward", stage, micro_batch)
        if place is None:
            yield None
            return
        yield self._piece(stage, place)
        if place.is_last and self._forward_only:
            self._free(stage, place.pieces)

    @contextmanager
    def backward(self, stage: int, micro_batch: int) -> Iterator[CarriedPiece | None]:
        """Within: the input gradient of a micro-batch, after its forward again where that yields what its piece attends
        by. Errors: as `forward`."""
        place = self._order.run("input gradient", stage, micro_batch)
        yield None if place is None else self._piece(stage, place)
        if place is not None and place.is_first:
            self._free(stage, place.pieces)

    def _piece(self, stage: int, place: PiecePlace) -> CarriedPiece:
        return CarriedPiece(place, self._samples.setdefault((stage, place.pieces), {}), self.storages)

    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layers in self._samples.values() for layer in layers.values())

    def _free(self, stage: int, pieces: SamplePieces) -> None:
        for layer in self._samples.pop((stage, pieces)).values():
            self.storages.difference_update(layer.storages)


class CarriedPiece:
    """A piece in a forward of one stage, and in its recomputation: `length` positions from `start` on."""

    def __init__(self, place: PiecePlace, layers: dict[object, _LayerKeys], storages: set[int]) -> None:
        self.start, self.length = place.start, place.length
        self._total, self._layers, self._storages = place.total, layers, storages

    @property
    def end(self) -> int:
        return self.start + self.length

    def join(self, layer: object, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (length, ...), behind those of the earlier pieces: (end, ...), for a causal attention whose
        queries are the last of the keys. `layer` is whatever stands for the layer within its stage.
        """
        layer_keys = self._layers.get(layer)
        if layer_keys is None:
            layer_keys = self._layers[layer] = _LayerKeys(keys, values, self._total)
            self._storages.update(layer_keys.storages)
        joined: tuple[torch.Tensor, torch.Tensor] = _Joined.apply(keys, values, layer_keys, self.start)  # type: ignore[no-untyped-call]
        return joined

    def attend(
        self,
        layer: object,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention: AttentionKernel,
        *,
        recompute: bool,
    ) -> torch.Tensor:
        """`attention(queries, *joined)`; `recompute` in the backward what keeps masks and repeated heads as long as all
        earlier pieces, and draws no random numbers.
        """
        joined = self.join(layer, keys, values)
        if not recompute:
            return attention(queries, *joined)
        output: torch.Tensor = _Recomputed.apply(attention, queries, *joined)  # type: ignore[no-untyped-call]
        return output


class _LayerKeys:
    """Keys and values of one sample in one layer, (positions, ...), and sums of their gradients in float32.

    The sums are of what pieces whose backward has run gave to the positions before them.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_positions: int) -> None:
        self._buffers = tuple(x.new_empty((num_positions, *x.shape[1:])) for x in (keys, values))
        self._sums: tuple[torch.Tensor, ...] = ()
        self._num_filled = 0

    @property
    def storages(self) -> set[int]:
        return {buffer.untyped_storage().data_ptr() for buffer in self._buffers}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._buffers, *self._sums))

    def put(self, start: int, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All up to the end of a piece, its own written first, if this is its first forward."""
        end = start + len(own[0])
        if self._num_filled < end:
            for buffer, x in zip(self._buffers, own, strict=True):
                buffer[start:end] = x
            self._num_filled = end
        # `data` has a version of its own: autograd need not mind that later pieces write behind what it keeps.
        return tuple(buffer.data[:end] for buffer in self._buffers)

    def take_gradients(self, start: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A piece's gradients, of which its own attention gave `given` to all up to its end; the rest is summed."""
        if not self._sums:  # the last piece
            self._sums = tuple(_wide(x[:start]) for x in gradients)
            return [x[start:] for x in gradients]
        own = []
        for summed, x in zip(self._sums, gradients, strict=True):
            own.append((summed[start : len(x)] + x[start:]).to(x.dtype))
            summed[:start] += x[:start]
        return own


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, layer_keys: _LayerKeys, start: int) -> Any:
        ctx.kept, ctx.start = layer_keys, start
        return layer_keys.put(start, (keys, values))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (*ctx.kept.take_gradients(ctx.start, grads), None, None)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: AttentionKernel, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.attention = attention
        ctx.save_for_backward(*tensors)
        return attention(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.attention(*tensors)
        return None, *torch.autograd.grad(output, tensors, grads)
