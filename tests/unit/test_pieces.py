"""Which micro-batches carry one sample between them."""

from __future__ import annotations

import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, pieces_by_position, sample_pieces
from dynapipe_ext.errors import PlanError


def _piece(index: int, start: int, length: int, *others: SampleLength) -> MicroBatch:
    return MicroBatch((SampleLength(index, length, start=start), *others), "packed", attention="carried")


def test_chains_are_found_in_any_injection_order_beside_whole_samples() -> None:
    whole = MicroBatch((SampleLength(7, 3),))
    plan = [_piece(1, 4, 2, SampleLength(5, 2)), whole, _piece(0, 0, 8), _piece(1, 0, 4), _piece(0, 8, 8)]
    assert sample_pieces(plan) == ((2, 4), (3, 0))
    assert sample_pieces([whole]) == ()
    assert {position: str(piece) for position, piece in pieces_by_position(plan).items()} == {
        2: "sample 0, piece 1 of 2, tokens 0-7",
        4: "sample 0, piece 2 of 2, tokens 8-15",
        3: "sample 1, piece 1 of 2, tokens 0-3",
        0: "sample 1, piece 2 of 2, tokens 4-5",
    }
    assert pieces_by_position([whole, _piece(0, 0, 8)]) == {}  # all of its sample: not cut


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([_piece(0, 4, 4)], "from position 4 but the pieces before it on this replica end at 0"),
        ([_piece(0, 0, 4), _piece(0, 8, 4)], "end at 4"),
        ([_piece(0, 0, 4), _piece(0, 0, 4)], "from position 0"),
        ([_piece(0, 0, 4, SampleLength(1, 4, start=4))], "a second piece"),
        ([MicroBatch((SampleLength(0, 4),), "padded", attention="carried")], "is padded"),
    ],
)
def test_pieces_that_do_not_make_up_a_sample_are_refused(plan: list[MicroBatch], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sample_pieces(plan)
