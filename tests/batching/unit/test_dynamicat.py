"""Simple rules for batches of padded records: complete, within limits, and the fewest batches where that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batching.packing.collator import IGNORED, PackingCollator
from dynapipe_ext.batching.packing.dynamicat import (
    INFERENCE,
    PRETRAINING,
    SUPERVISED,
    Field,
    RecordBatches,
    arranged,
    fixed_size,
    length_difference,
    limited,
    loss_weight,
    make_record,
    padded,
    padding_tokens,
    pieces,
    scaled_learning_rate,
)
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.partitions import partitions

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def fewest(lengths: list[int], allowed: Callable[[list[int]], bool]) -> int:
    return min(len(groups) for groups in partitions(lengths) if all(map(allowed, groups)))


def complete(batches: RecordBatches, lengths: list[int]) -> bool:
    return sorted(i for batch in batches for i in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_fixed_size_fills_every_batch_but_the_last(lengths: list[int], batch_size: int, smart: bool) -> None:
    batches = fixed_size(lengths, batch_size, smart=smart)
    assert complete(batches, lengths)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    order = [i for batch in batches for i in batch]
    assert order == (sorted(order, key=lambda i: (-lengths[i], i)) if smart else sorted(order))


@given(LENGTHS, st.integers(30, 120), st.integers(0, 5), st.sampled_from([None, 1, 4]), st.booleans())
def test_a_limit_is_kept_by_every_batch(
    lengths: list[int], limit: int, per_record: int, max_records: int | None, smart: bool
) -> None:
    limit += per_record
    batches = limited(lengths, limit, per_record=per_record, max_records=max_records, smart=smart)
    assert complete(batches, lengths)
    assert all(len(batch) * (per_record + max(lengths[i] for i in batch)) <= limit for batch in batches)
    assert max_records is None or all(len(batch) <= max_records for batch in batches)


def test_lengths_of_narrow_types_do_not_overflow() -> None:
    wide, narrow = [20_000] * 6, np.array([20_000] * 6, np.int32)
    assert limited(narrow, 10**10, per_token=131_072) == limited(wide, 10**10, per_token=131_072)
    assert padding_tokens([0, 1], np.array([200, 100], np.uint8)) == 100
    assert loss_weight(np.uint8(100), np.uint8(200), num_ranks=4) == 2.0


def test_a_limit_may_be_in_bytes() -> None:
    lengths = [100, 60, 60, 10]
    batches = limited(lengths, 2_000_000, per_token=12_000, per_record=100_000)
    assert batches == [[0], [1, 2], [3]]
    assert all(len(b) * (100_000 + 12_000 * max(lengths[i] for i in b)) <= 2_000_000 for b in batches)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(12, 40), st.integers(0, 4))
def test_no_grouping_under_the_limit_has_fewer_batches(lengths: list[int], limit: int, per_record: int) -> None:
    limit += per_record
    best = fewest(lengths, lambda group: len(group) * (per_record + max(group)) <= limit)
    assert len(limited(lengths, limit, per_record=per_record)) == best


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(1, 4),
    st.none() | st.integers(12, 40),
)
def test_no_grouping_under_the_length_difference_and_a_token_limit_has_fewer_batches(
    lengths: list[int], max_difference: int, batch_size: int, max_tokens: int | None
) -> None:
    def allowed(group: list[int]) -> bool:
        within = max_tokens is None or len(group) * max(group) <= max_tokens
        return within and len(group) <= batch_size and max(group) - min(group) <= max_difference

    batches = length_difference(lengths, max_difference, batch_size, max_tokens=max_tokens)
    assert complete(batches, lengths)
    assert all(allowed([lengths[i] for i in batch]) for batch in batches)
    assert len(batches) == fewest(lengths, allowed)


@given(LENGTHS, st.integers(1, 12))
def test_long_records_are_cut_and_every_token_is_in_one_piece(lengths: list[int], max_length: int) -> None:
    cut = pieces(lengths, max_length)
    assert [(p.record, t) for p in cut for t in range(p.start, p.end)] == [
        (i, t) for i, length in enumerate(lengths) for t in range(length)
    ]
    assert all(0 < p.length <= max_length for p in cut)


def test_sorting_by_length_saves_padding_and_batches() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 3000).astype(int).clip(1, 1024).tolist()
    for plan in (lambda smart: fixed_size(lengths, 16, smart=smart), lambda smart: limited(lengths, 4096, smart=smart)):
        sorted_padding, plain_padding = (
            sum(padding_tokens(b, lengths) for b in plan(smart)) for smart in (True, False)
        )
        assert sorted_padding < plain_padding / 10
    assert len(limited(lengths, 4096)) < len(limited(lengths, 4096, smart=False))


@pytest.mark.parametrize("descending", [False, True])
def test_an_arrangement_orders_batches_and_changes_none(descending: bool) -> None:
    lengths = [9, 1, 4, 4, 7, 2, 8, 3]
    batches = limited(lengths, 12)
    by_records = arranged(batches, lengths, by="records", descending=descending)
    by_padding = arranged(batches, lengths, by="padding", descending=descending)
    assert [len(b) for b in by_records] == sorted(map(len, batches), reverse=descending)
    paddings = [padding_tokens(b, lengths) for b in by_padding]
    assert paddings == sorted(paddings, reverse=descending)
    shuffled = arranged(batches, lengths, by="random", seed=3)
    assert shuffled == arranged(batches, lengths, by="random", seed=3) != batches
    assert sorted(by_records) == sorted(by_padding) == sorted(shuffled) == sorted(batches)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 4))
def test_padding_is_on_the_side_asked_for_and_masked(rows: list[list[int]], multiple: int) -> None:
    for side in ("left", "right"):
        array, mask = padded(rows, side=side, value=-1, pad_multiple=multiple)  # type: ignore[arg-type]
        assert array.shape[1] % multiple == 0
        assert array.shape[1] - max(map(len, rows)) < multiple
        assert [values[real == 1].tolist() for values, real in zip(array, mask, strict=True)] == rows
        assert (array[mask == 0] == -1).all()
        assert mask[:, -1 if side == "left" else 0].all()


def test_fields_are_cut_at_their_side_and_masked_by_their_loss() -> None:
    fields = (Field("prompt", loss=False, max_length=2, cut="left"), Field("response", max_length=2, cut="right"))
    made = make_record({"prompt": [5, 6, 7], "response": [8, 9, 10]}, fields, start=[1], end=[2])
    assert made == {"input_ids": [1, 6, 7, 8, 9, 2], "loss_mask": [0, 0, 0, 1, 1, 1]}
    assert make_record({"content": [5, 6]}, PRETRAINING)["loss_mask"] == [1, 1]
    assert make_record({"prompt": [5, 6]}, INFERENCE, end=[2])["loss_mask"] == [0, 0, 0]


def test_a_record_is_a_feature_that_packs() -> None:
    features = [make_record({"prompt": [5, 6], "response": [7, 8]}, SUPERVISED, end=[2]) for _ in range(2)]
    assert PackingCollator().pack(features).labels.tolist() == [[IGNORED, IGNORED, 7, 8, 2] * 2]


def test_weighted_means_of_batches_over_ranks_are_the_mean_over_all_target_tokens() -> None:
    generator = np.random.default_rng(0)
    losses = [
        [generator.random(count) for count in (3, 8)],
        [generator.random(count) for count in (1, 20)],
    ]  # rank, batch
    total = sum(batch.size for rank in losses for batch in rank)
    ranks = [sum(b.mean() * loss_weight(b.size, total, num_ranks=2) for b in rank) for rank in losses]
    assert sum(ranks) / 2 == pytest.approx(np.concatenate([b for rank in losses for b in rank]).mean())


def test_learning_rates_scale_with_the_tokens_of_a_step() -> None:
    rates = [scaled_learning_rate(0.1, 400, 100, scaling=scaling) for scaling in ("linear", "sqrt", "none")]
    assert rates == pytest.approx([0.4, 0.2, 0.1])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fixed_size([1], 0), ConfigError, "batch_size is 0"),
        (lambda: fixed_size([3, 0], 2), DataError, "record 1 has 0 tokens"),
        (lambda: limited([3, 20, 4], 10), DataError, "record 1 of 20 tokens costs 20 but the limit of a batch is 10"),
        (lambda: limited([3], 10, per_token=0), ConfigError, "costs nothing"),
        (lambda: limited([3], 10, max_records=0), ConfigError, "max_records is 0"),
        (lambda: length_difference([1], -1, 2), ConfigError, "max_difference is -1"),
        (lambda: length_difference([1, 9], 1, 2, max_tokens=8), DataError, "record 1 has 9 tokens"),
        (lambda: pieces([1], 0), ConfigError, "max_length is 0"),
        (lambda: arranged([[0]], [1], by="size"), ConfigError, "by is 'size'"),  # type: ignore[arg-type]
        (lambda: padded([]), DataError, "no rows"),
        (lambda: padded([[1]], side="top"), ConfigError, "side is 'top'"),  # type: ignore[arg-type]
        (lambda: make_record({"text": [1]}, SUPERVISED), DataError, "a record has text but no 'prompt'"),
        (lambda: make_record({}, ()), ConfigError, "without fields"),
        (lambda: Field("prompt", cut="end"), ConfigError, "cut at 'end'"),  # type: ignore[arg-type]
        (lambda: loss_weight(5, 4), ConfigError, "5 targets in a step of 4"),
        (lambda: scaled_learning_rate(0.1, 1, 0), ConfigError, "0 usual"),
    ],
)
def test_what_cannot_work_is_refused(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
