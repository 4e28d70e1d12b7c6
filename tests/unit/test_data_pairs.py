"""Pairs of input and target: what a micro-batch of them holds, and how prepared tokens become them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenDataset, TokenSample, prepare
from dynapipe_ext.data.examples import Example
from dynapipe_ext.data.pairs import PairDataset, PairSample, collate_pairs, pair_borders
from dynapipe_ext.data.sample_selection import hold_out
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.schedules.planner import Planner

A = PairSample(7, np.array([11, 12, 13]), np.array([21, 22]))
B = PairSample(9, np.array([31]), np.array([41, 42, 43, 44]))
LENGTHS = SampleLength(7, 3, 2, 2), SampleLength(9, 1, 4, 4)


def test_the_decoder_reads_each_label_a_position_late_behind_the_start_token() -> None:
    padded = collate_pairs(MicroBatch(LENGTHS, pad_multiple=4), [A, B])
    assert padded["encoder_tokens"].tolist() == [[11, 12, 13, 0], [31, 0, 0, 0]]
    assert padded["encoder_padding"].tolist() == [[False, False, False, True], [False, True, True, True]]
    assert padded["decoder_tokens"].tolist() == [[0, 21, 0, 0], [0, 41, 42, 43]]
    assert padded["labels"].tolist() == [[21, 22, 0, 0], [41, 42, 43, 44]]
    assert padded["loss_weights"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]

    packed = collate_pairs(MicroBatch(LENGTHS, "packed", pad_multiple=4), [A, B], loss_norm="samples")
    assert packed["encoder_tokens"].tolist() == [[11, 12, 13, 31]]
    assert packed["decoder_tokens"].tolist() == [[0, 21, 0, 41, 42, 43, 0, 0]]
    assert packed["loss_weights"].tolist() == [[0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0, 0]]
    assert packed["documents"] == ((3, 1, 0), (2, 4, 2))  # padding behind the decoder's has no key of the encoder's


def test_rows_without_padding_need_no_mask_and_packed_ones_no_document_of_it() -> None:
    alike = SampleLength(0, 4, 2, 2), SampleLength(1, 4, 2, 2)
    assert pair_borders(MicroBatch(alike)) == {}
    assert pair_borders(MicroBatch(alike, "packed")) == {"documents": ((4, 4), (2, 2))}


@pytest.mark.parametrize(
    ("planned", "samples", "says"),
    [
        (MicroBatch(LENGTHS), [B, A], r"the plan has samples \[7, 9\] where \[9, 7\] were given"),
        (
            MicroBatch((SampleLength(7, 3, 3, 3),)),
            [A],
            r"has \(encoder, decoder, target\) \(3, 2, 2\) but its",
        ),
        (MicroBatch(LENGTHS), [TokenSample(7, np.arange(5), 2)] * 2, "the dataset gives TokenSample: give PairSamples"),
        (MicroBatch((SampleLength(7, 3, 0, 2),)), [A], "planned with 0 decoder positions|but its plan has"),
        (
            MicroBatch(LENGTHS, "packed", attention="row"),
            [A, B],
            "would mix their inputs: plan with document",
        ),
    ],
)
def test_what_is_no_pair_of_the_plan_is_refused_by_name(planned, samples, says) -> None:
    with pytest.raises(DataError, match=says):
        collate_pairs(planned, samples)


def prepared(folder: Path, *texts: tuple[str, str]) -> TokenDataset:
    examples = [Example("task", *text) for text in texts]
    return prepare(lambda: iter(examples), folder, tokenizer="bytes", max_seq_len=64, truncate=False)


def test_prepared_tokens_become_pairs_whole_or_in_part(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "data", ("abc", "xy"), ("", "z"), ("d", ""), ("efg", "uvw"))
    pairs, tokenizer = PairDataset.of(dataset), dataset.tokenizer()
    assert pairs.lengths.tolist() == [[4, 3, 3], [1, 2, 2], [2, 1, 1], [4, 4, 4]]
    assert pairs[0].source.tolist() == [*b"abc", tokenizer.separator]
    assert pairs[0].labels.tolist() == [*b"xy", tokenizer.eos]
    kept, _ = hold_out(dataset, 0.25, seed=3)
    part = PairDataset.of(kept)
    for i in range(len(part)):
        assert (len(part[i].source), len(part[i].labels)) == tuple(part.lengths[i, :2])
        assert part[i].index == i


def test_plain_text_is_no_data_for_an_encoder_decoder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds plain text, without inputs, but an encoder-decoder trains on pairs"):
        PairDataset.of(prepared(tmp_path / "data", ("", "abc"), ("", "de")))


def test_the_loader_gives_stages_that_read_no_tokens_the_borders_alone(tmp_path: Path) -> None:
    pairs = PairDataset.of(prepared(tmp_path / "data", ("abc", "xy"), ("d", "z")))
    form, alone = ActivationFormat(8, first_decoder_stage=0), Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
    planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, layout="packed", format=form)
    for needs_data, names in ((True, 5), (False, 1)):
        loader = DynaPipeDataLoader(pairs, planner, batch_size=2, coordinates=alone, needs_data=needs_data)
        for batch in next(iter(loader))[0]:
            assert "documents" in batch
            assert len(batch) == names
