"""Which piece of a cut sample is due: on a stage forwards go from the first piece to the last, and gradients back.

A piece out of turn attends to keys that are not there yet, or leaves gradients behind: nothing else would show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.pieces import Chain, chains
from dynapipe_ext.plan import MicroBatch

Pass = Literal["forward", "input gradient"]


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """A piece, `number` of the `chain` of a cut sample: it has the `length` positions from `start` on, of `total`."""

    chain: Chain
    number: int
    start: int
    length: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == len(self.chain) - 1


class PieceOrder:
    """What has run of a replica's cut samples, stage by stage; a sample in one piece is not cut."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._places: dict[int, PiecePlace] = {}
        self._num_run: Counter[tuple[int, Chain]] = Counter()
        for chain in chains(micro_batches):
            pieces = [micro_batches[m].samples[0] for m in chain]
            total = sum(piece.encoder for piece in pieces)
            for number, (m, piece) in enumerate(zip(chain, pieces, strict=True)):
                if len(chain) > 1:
                    self._places[m] = PiecePlace(chain, number, piece.start, piece.encoder, total)

    def run(self, what: Pass, stage: int, micro_batch: int) -> PiecePlace | None:
        """The piece of a micro-batch that now runs, None where it has none.

        Errors: ExecutionError where another piece of its sample is due on that stage.
        """
        place = self._places.get(micro_batch)
        if place is None:
            return None
        chain, num_run = place.chain, self._num_run[stage, place.chain]
        turns: list[tuple[Pass, int]] = [("forward", m) for m in chain]
        turns += [("input gradient", m) for m in reversed(chain)]
        due = turns[num_run] if num_run < len(turns) else None
        if due != (what, micro_batch):
            sample = self._micro_batches[micro_batch].samples[0].index
            wanted = (
                f"the {due[0]} of piece {chain.index(due[1]) + 1} (micro-batch {due[1]})" if due else "none of them"
            )
            raise ExecutionError(
                f"stage {stage} was to run the {what} of piece {place.number + 1} of sample {sample} (micro-batch"
                f" {micro_batch}), but {wanted} is due: forwards go from the first piece to the last and input"
                " gradients from the last to the first, so this plan was not verified; `dynapipe check-plan` says where"
            )
        self._num_run[stage, chain] += 1
        return place
