"""Rows of documents two in one, and in two: other rows of the same samples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.partitioning.packing import join_rows, list_finer_splits

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), max_size=40)


def rows_of(lengths: list[list[int]], piece_lengths: list[int]) -> list[MicroBatch]:
    numbers = iter(range(10**6))
    pieces = [
        MicroBatch((SampleLength(10**6, n, start=100 * i),), "packed", attention="carried")
        for i, n in enumerate(piece_lengths)
    ]
    return [MicroBatch(tuple(SampleLength(next(numbers), n) for n in own), "packed") for own in lengths] + pieces


def samples_of(rows: list[MicroBatch]) -> Counter[tuple[int, int]]:
    return Counter((s.index, s.start) for m in rows for s in m.samples)


@given(LENGTHS, st.lists(st.integers(1, 400), max_size=3), st.sampled_from([0, 100, 250]))
def test_rows_two_in_one_hold_the_same_samples_within_the_longest_piece(
    lengths: list[list[int]], pieces: list[int], max_tokens: int
) -> None:
    rows = rows_of(lengths, pieces)
    joined = join_rows(rows, max_tokens)
    assert samples_of(joined) == samples_of(rows)
    assert [m for m in joined if m.attention == "carried"] == [m for m in rows if m.attention == "carried"]
    before = max((m.encoder_len for m in rows if m.attention != "carried"), default=0)
    most = min(max(pieces, default=0), max_tokens or 10**9)
    assert all(m.encoder_len <= max(before, most) for m in joined if m.attention != "carried")
    if not pieces or len(lengths) < 16:
        assert joined == rows
    elif 2 * before <= most:
        assert len(joined) == len(rows) - (len(lengths) - 6) // 2
        shortest = sorted((m for m in rows if m.attention != "carried"), key=lambda m: m.encoder_len)[:6]
        assert all(m in joined for m in shortest)


@given(st.lists(LENGTHS, min_size=1, max_size=3), st.booleans())
def test_other_splits_of_replicas_have_the_same_samples_and_equal_counts_where_these_are_asked_for(
    replicas: list[list[list[int]]], equal: bool
) -> None:
    rows = [rows_of(own, [300]) for own in replicas]
    for split in list_finer_splits(rows, equal_counts=equal, max_tokens=0):
        assert [samples_of(own) for own in split] == [samples_of(own) for own in rows]
        assert not equal or len({*map(len, split)}) == 1
