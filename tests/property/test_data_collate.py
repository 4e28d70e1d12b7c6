from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.data.batches import collate, document_lengths
from dynapipe_ext.data.dataset import TokenSample

SEVERAL = settings(max_examples=50)  # of many micro-batches each


@st.composite
def token_samples(draw):
    """Samples whose tokens name their sample and place, so that every label is unlike every other."""
    samples = []
    for index in range(draw(st.integers(1, 8))):
        length = draw(st.integers(2, 20))
        samples.append(TokenSample(index, np.arange(length) + 1000 * (index + 1), draw(st.integers(1, length - 1))))
    return samples


@st.composite
def plans(draw, cut=True):
    """Micro-batches that together hold every sample once, some in pieces where `cut` is on."""
    samples = draw(token_samples())
    parts = []
    for sample in samples:
        inner = draw(st.sets(st.integers(1, sample.positions - 1))) if cut and sample.positions > 1 else set()
        bounds = [0, *sorted(inner), sample.positions]
        for start, end in pairwise(bounds):
            target = sum(start < place <= end for place in range(sample.first_target, len(sample.tokens)))
            parts.append(SampleLength(sample.index, end - start, 0, target, start))
    parts = draw(st.permutations(parts))
    micro_batches = []
    while parts:
        count = draw(st.integers(1, len(parts)))
        micro_batches.append(
            MicroBatch(
                tuple(parts[:count]),
                layout=draw(st.sampled_from(["padded", "packed"])),
                attention=draw(st.sampled_from(["document", "row"])),
                pad_multiple=draw(st.integers(1, 16)),
                min_len=draw(st.integers(0, 40)),
            )
        )
        parts = parts[count:]
    return samples, micro_batches


def collated(micro_batch, samples, loss_norm="tokens"):
    return collate(micro_batch, [samples[s.index] for s in micro_batch.samples], loss_norm=loss_norm)


def terms(arrays):
    """(context token, label, weight) of every position that carries loss."""
    here = arrays["loss_weights"] > 0
    return Counter(zip(*(arrays[n][here].tolist() for n in ("tokens", "labels", "loss_weights")), strict=True))


@pytest.mark.parametrize("loss_norm", ["tokens", "samples"])
@SEVERAL
@given(plans())
def test_every_target_label_appears_exactly_once_with_its_weight(loss_norm, plan):
    samples, micro_batches = plan
    wanted = Counter()
    for s in samples:
        weight = 1.0 if loss_norm == "tokens" else float(np.float32(1 / (len(s.tokens) - s.first_target)))
        tokens = s.tokens.tolist()
        wanted.update((tokens[p - 1], tokens[p], weight) for p in range(s.first_target, len(tokens)))
    got = Counter()
    for m in micro_batches:
        got += terms(collated(m, samples, loss_norm))
    assert got == wanted


@SEVERAL
@given(plans())
def test_arrays_have_the_shape_and_the_number_of_targets_of_the_plan(plan):
    samples, micro_batches = plan
    for m in micro_batches:
        arrays = collated(m, samples)
        for name in ("tokens", "labels", "loss_weights", "position_ids"):
            assert arrays[name].shape == (m.rows, m.encoder_len)
        assert np.count_nonzero(arrays["loss_weights"]) == m.target_tokens
        assert np.count_nonzero(arrays["tokens"]) == m.real_tokens


@pytest.mark.parametrize("attention", ["document", "row"])
@given(token_samples(), st.integers(1, 16))
def test_padded_and_packed_hold_the_same_terms_of_the_loss(attention, samples, pad_multiple):
    planned = tuple(SampleLength(s.index, s.positions, 0, s.target) for s in samples)
    padded = collated(MicroBatch(planned, pad_multiple=pad_multiple), samples)
    packed = collated(MicroBatch(planned, layout="packed", attention=attention), samples)
    assert terms(padded) == terms(packed)


@SEVERAL
@given(plans())
def test_documents_from_the_plan_alone_are_those_of_the_arrays(plan):
    samples, micro_batches = plan
    for m in micro_batches:
        arrays = collated(m, samples)
        documents = document_lengths(m)
        assert sum(documents) == m.rows * m.encoder_len
        assert all(length > 0 for length in documents)
        starts = np.cumsum((0, *documents))[:-1]
        np.testing.assert_array_equal(np.flatnonzero(arrays["position_ids"] == 0), starts)
        if m.layout == "packed":
            assert tuple(np.diff(arrays["cu_seqlens"]).tolist()) == documents
        else:
            assert "cu_seqlens" not in arrays


@SEVERAL
@given(plans())
def test_no_packed_document_holds_tokens_of_two_samples(plan):
    samples, micro_batches = plan
    for m in micro_batches:
        if m.layout == "packed" and m.attention == "document":
            arrays = collated(m, samples)
            for document in np.split(arrays["tokens"][0], arrays["cu_seqlens"][1:-1]):
                assert len({token // 1000 for token in document.tolist()}) == 1


@given(token_samples(), st.data())
def test_a_cut_sample_has_the_rows_of_the_whole_one_with_positions_that_go_on(samples, data):
    """Behind each piece stands a whole document, with its own positions; a piece's last label is the next's token."""
    sample = samples[0]
    inner = data.draw(st.sets(st.integers(1, sample.positions - 1))) if sample.positions > 1 else set()
    whole = collated(MicroBatch((SampleLength(0, sample.positions, 0, sample.target),)), samples)
    found = {name: [] for name in ("tokens", "labels", "position_ids", "loss_weights")}
    for start, end in pairwise([0, *sorted(inner), sample.positions]):
        target = sum(start < place <= end for place in range(sample.first_target, len(sample.tokens)))
        others = tuple(SampleLength(s.index, s.positions, 0, s.target) for s in samples[1:2])
        row = (SampleLength(0, end - start, 0, target, start), *others)
        m = MicroBatch(row, "packed", attention="carried", pad_multiple=4)
        arrays = collated(m, samples)
        for name, parts in found.items():
            parts.append(arrays[name][0, : end - start])
        borders = arrays["cu_seqlens"][1:]
        for first, last in pairwise(borders):
            np.testing.assert_array_equal(arrays["position_ids"][0, first:last], np.arange(last - first))
        assert tuple(np.diff(arrays["cu_seqlens"]).tolist()) == document_lengths(m)
    for name, parts in found.items():
        np.testing.assert_array_equal(np.concatenate(parts), whole[name][0])
