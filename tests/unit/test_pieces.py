"""Which micro-batches carry one sample between them."""

from __future__ import annotations

import pytest

from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.pieces import chains
from dynapipe_ext.plan import MicroBatch


def _piece(index: int, start: int, length: int, *others: SampleLength) -> MicroBatch:
    return MicroBatch((SampleLength(index, length, start=start), *others), "packed", attention="carried")


def test_chains_are_found_in_any_injection_order_beside_whole_samples() -> None:
    whole = MicroBatch((SampleLength(7, 3),))
    plan = [_piece(1, 4, 2, SampleLength(5, 2)), whole, _piece(0, 0, 8), _piece(1, 0, 4), _piece(0, 8, 8)]
    assert chains(plan) == ((2, 4), (3, 0))
    assert chains([whole]) == ()


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
        chains(plan)
