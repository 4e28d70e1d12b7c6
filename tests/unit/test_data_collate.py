import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.data.batches import collate, document_lengths
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError

A = TokenSample(7, np.array([11, 12, 13, 14, 15]), 3)  # 4 positions, targets 14 15
B = TokenSample(9, np.array([21, 22, 23]), 1)  # 2 positions, targets 22 23
PLANNED = (SampleLength(7, 4, 0, 2), SampleLength(9, 2, 0, 2))


def as_lists(arrays):
    return {name: array.tolist() for name, array in arrays.items()}


def test_padded_rows():
    arrays = collate(MicroBatch(PLANNED, pad_multiple=5), [A, B])
    assert as_lists(arrays) == {
        "tokens": [[11, 12, 13, 14, 0], [21, 22, 0, 0, 0]],
        "labels": [[12, 13, 14, 15, 0], [22, 23, 0, 0, 0]],
        "loss_weights": [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    }
    assert {n: str(a.dtype) for n, a in arrays.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_weights": "float32",
        "position_ids": "int64",
    }


def test_packed_documents():
    arrays = collate(MicroBatch(PLANNED, layout="packed", pad_multiple=8), [A, B])
    assert as_lists(arrays) == {
        "tokens": [[11, 12, 13, 14, 21, 22, 0, 0]],
        "labels": [[12, 13, 14, 15, 22, 23, 0, 0]],
        "loss_weights": [[0, 0, 1, 1, 1, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1]],
        "cu_seqlens": [0, 4, 6, 8],
    }
    assert arrays["cu_seqlens"].dtype == np.int32


def test_packed_rows_without_borders_of_attention():
    arrays = collate(MicroBatch(PLANNED, layout="packed", attention="row", min_len=8), [A, B])
    assert arrays["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert arrays["cu_seqlens"].tolist() == [0, 8]
    assert arrays["tokens"].tolist() == [[11, 12, 13, 14, 21, 22, 0, 0]]


def test_a_packed_row_without_padding_has_no_extra_document():
    assert collate(MicroBatch(PLANNED, layout="packed"), [A, B])["cu_seqlens"].tolist() == [0, 4, 6]


def test_weights_by_samples_sum_to_one_for_each_sample():
    weights = collate(MicroBatch(PLANNED), [A, B], loss_norm="samples")["loss_weights"]
    assert weights.tolist() == [[0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0]]


def test_a_piece_takes_its_positions_and_the_weight_of_the_whole_sample():
    micro_batch = MicroBatch((SampleLength(7, 2, 0, 1, start=1), SampleLength(9, 1, 0, 1, start=1)), layout="packed")
    assert as_lists(collate(micro_batch, [A, B], loss_norm="samples")) == {
        "tokens": [[12, 13, 22]],
        "labels": [[13, 14, 23]],
        "loss_weights": [[0, 0.5, 0.5]],
        "position_ids": [[0, 1, 0]],
        "cu_seqlens": [0, 2, 3],
    }


@pytest.mark.parametrize(
    ("planned", "samples", "message"),
    [
        (PLANNED, [A], "the micro-batch has 2 samples but 1 were given"),
        (PLANNED, [B, A], "the plan has sample 7 where sample 9 was given"),
        ([SampleLength(7, 5, 0, 2)], [A], "sample 7 has 4 positions but its plan takes 0 to 5"),
        ([SampleLength(7, 3, 0, 2, start=2)], [A], "its plan takes 2 to 5"),
        ([SampleLength(7, 4, 0, 4)], [A], "sample 7 has 2 target tokens in positions 0 to 4 but its plan has 4"),
        ([SampleLength(7, 3, 0, 2)], [A], "sample 7 has 1 target tokens in positions 0 to 3 but its plan has 2"),
        ([SampleLength(7, 4, 3, 2)], [A], "3 decoder positions"),
        ([SampleLength(7, 0)], [A], "no positions"),
        ([SampleLength(7, 2, start=-1)], [A], "negative start"),
        ([], [], "without samples"),
        ([PLANNED[0]], [TokenSample(7, np.array([11, 12, -1, 14, 15]), 3)], "the least of them -1"),
        ([PLANNED[0]], [TokenSample(7, np.array([11, 12, np.nan, 14, 15]), 3)], "of shape .* and type float64"),
        ([PLANNED[0]], [TokenSample(7, np.ones((5, 1), int), 3)], r"of shape \(5, 1\)"),
    ],
)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_samples_that_do_not_fit_the_plan_are_refused(planned, samples, message, layout):
    with pytest.raises(DataError, match=message):
        collate(MicroBatch(tuple(planned), layout=layout), samples)


def test_an_unknown_loss_norm_is_refused():
    with pytest.raises(ConfigError, match="loss_norm is 'batch': choose from 'tokens', 'samples'"):
        collate(MicroBatch(PLANNED), [A, B], loss_norm="batch")


def test_document_lengths_of_padded_rows():
    assert document_lengths(MicroBatch(PLANNED, pad_multiple=8)) == (8, 8)
