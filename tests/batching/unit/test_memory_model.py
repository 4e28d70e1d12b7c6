"""A learned memory model: sklearn's numbers without it, monotone, as careful as its threshold, read defensively."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batching.inference.batches import (
    FirstBatch,
    GenerationMemory,
    InferenceBatchRule,
    plan_batches,
    with_a_padded_first,
)
from dynapipe_ext.batching.inference.loader import DynamicBatchSampler, build_dynamic_batch_dataloader
from dynapipe_ext.batching.inference.memory_model import FEATURES, LearnedMemory, Trees, features, shapes_of, terms
from dynapipe_ext.batching.inference.memory_records import MemoryRecord
from dynapipe_ext.batching.inference.memory_shapes import CHOICES, Choice, Shape, ShapeLimits, next_memory_shape
from dynapipe_ext.errors import ConfigError, DataError

pytest.importorskip("sklearn")

from dynapipe_ext.batching.inference.memory_training import FEWEST_RECORDS, Training, exported, train
from tests.support.limits import LIMIT_S
from tests.support.memory_law import LONGEST, ON, law, record, records, sizes_of


@pytest.fixture(scope="module")
def training() -> Training:
    return train(ON, records(110, spread=0.01))


@pytest.fixture(scope="module")
def model(training: Training) -> LearnedMemory:
    return training.model


@pytest.mark.parametrize("seed", range(3))
def test_exported_trees_give_the_bits_of_sklearns_predictions(seed: int) -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    generator = np.random.default_rng(seed)
    x = generator.lognormal(size=(600, len(FEATURES))).round(seed + 1)  # ties, too
    y = np.log(x[:, 0] * x[:, 1] + 1) + generator.normal(size=600)
    regressor = HistGradientBoostingRegressor(max_iter=40 + 30 * seed, max_leaf_nodes=7 + 8 * seed).fit(x, y)
    trees = exported(regressor)
    asked = np.concatenate([x, generator.lognormal(size=(500, len(FEATURES)), sigma=3.0), -x[:50]])
    assert trees.predict(asked).tobytes() == regressor.predict(asked).tobytes()
    again = Trees.from_lists(trees.baseline, json.loads(json.dumps(trees.to_lists())), "trees")
    assert again.predict(asked).tobytes() == regressor.predict(asked).tobytes()


def test_a_model_read_from_its_file_predicts_the_same_bits_with_numpy_alone(
    model: LearnedMemory, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model.to_json(), allow_nan=False))
    shapes = shapes_of(records(300, seed=5))
    first = shapes[:1].repeat(len(shapes), axis=0)
    script = (
        "import sys, json, numpy as np\n"
        "from dynapipe_ext.batching.inference.memory_model import LearnedMemory\n"
        f"shapes = np.array({shapes.tolist()!r})\n"
        f"found = LearnedMemory.read({str(path)!r}).ratio(shapes, shapes[:1].repeat(len(shapes), axis=0))\n"
        "loaded = [name for name in ('sklearn', 'scipy', 'torch', 'joblib') if name in sys.modules]\n"
        "print(json.dumps([found.tobytes().hex(), loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found, loaded = json.loads(done.stdout)
    assert found == model.ratio(shapes, first).tobytes().hex()
    assert loaded == []


@settings(max_examples=60)
@given(
    st.integers(1, 32), st.integers(2, LONGEST), st.integers(1, 2000), st.integers(1, LONGEST), st.integers(0, 500),
    st.integers(0, 100), st.booleans(),
)  # fmt: skip
def test_a_prediction_never_falls_with_more_or_longer_texts(
    model: LearnedMemory,
    first_rows: int,
    first_longest: int,
    rows: int,
    longest: int,
    more: int,
    longer: int,
    pad: bool,
) -> None:
    first = np.array([[first_rows, first_longest, first_rows * first_longest, 0]]).repeat(3, axis=0)
    shapes = np.array(
        [
            [rows, longest, rows * longest, int(pad)],
            [rows + more, longest, (rows + more) * longest, int(pad)],
            [rows + more, longest + longer, (rows + more) * (longest + longer), 1],
        ]
    )
    small, wide, large = model.ratio(shapes, first).tolist()
    assert small <= wide <= large


def test_sizes_keep_real_peaks_under_the_limit_and_come_near_it(model: LearnedMemory) -> None:
    for first in (FirstBatch(16, 512, 16 * 400), FirstBatch(24, 300, 24 * 300), FirstBatch(4, 512, 4 * 500)):
        peak = law(first.num_texts, first.longest, first.tokens < first.num_texts * first.longest)
        size, last = sizes_of(model, first), first.num_texts
        for longest in range(first.longest, 0, -1):
            assert size(longest) >= last  # shorter texts, no fewer of them
            last = size(longest)
            if last > first.num_texts:
                assert law(last, longest, longest > 1) <= 0.93 * peak
        used = [law(size(n), n, n > 1) / peak for n in range(1, first.longest) if first.num_texts < size(n) < 1500]
        assert np.mean(used) > 0.8


def test_the_share_of_peaks_above_the_margin_is_the_threshold_on_batches_never_seen() -> None:
    spread = 0.05
    noisy = train(ON, records(130, seed=1, spread=spread))
    fresh = records(240, seed=9, spread=spread)
    shapes, peaks = shapes_of(fresh), np.array([r.peak_bytes for r in fresh], np.float64)
    i, j = (x.ravel() for x in np.meshgrid(np.arange(240), np.arange(240), indexing="ij"))
    chosen = (shapes[j, 1] <= shapes[i, 1]) & (shapes[j, 0] >= shapes[i, 0]) & (i != j)
    predicted = noisy.model.ratio(shapes[j[chosen]], shapes[i[chosen]])
    errors = (peaks[j] / peaks[i])[chosen] / predicted
    near = errors[(predicted > 0.5) & (predicted < 1.3)]
    for threshold in (0.025, 0.05, 0.2):
        assert (near > noisy.model.margin(threshold)).mean() <= 1.6 * threshold
    assert noisy.model.margin(0.025) > 1.05  # twice the spread, of two batches
    for one in noisy.coverage:
        assert one.above_margin <= 2.5 * one.threshold + 0.02
        assert one.above_limit <= 2.5 * one.threshold + 0.02


def test_a_larger_threshold_allows_larger_batches_and_one_that_nothing_vouches_for_warns(model: LearnedMemory) -> None:
    first = FirstBatch(16, 512, 16 * 400)
    strict, usual, loose = (sizes_of(model, first, threshold) for threshold in (0.01, 0.025, 0.5))
    assert strict(40) <= usual(40) <= loose(40)
    assert strict(40) < loose(40)
    with pytest.warns(UserWarning, match="threshold 0.0 is less than"):
        assert model.margin(0.0) == model.errors[-1]


def test_batches_out_of_memory_count() -> None:
    def steep(one: MemoryRecord) -> MemoryRecord:
        """Short texts by the thousand are far dearer than any batch that fitted shows."""
        if one.longest <= 16 and one.rows > 300:
            return dataclasses.replace(one, peak_bytes=None, limit_bytes=int(4e8))
        return one

    seen = [steep(one) for one in records(110, seed=2)] + [record(400, 64, 400 * 64), record(2048, 17, 2048 * 17)]
    fitted = [one for one in seen if one.peak_bytes is not None]
    with_lost, without = train(ON, seen), train(ON, fitted)
    assert with_lost.num_out_of_memory == len(seen) - len(fitted) > 5
    assert without.num_out_of_memory == 0
    assert with_lost.out_of_memory_foreseen is not None
    first = FirstBatch(32, 400, 32 * 300)
    assert sizes_of(with_lost.model, first)(8) < 0.7 * sizes_of(without.model, first)(8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (records(FEWEST_RECORDS - 8), "8 more"),
        ([record(rows, 64, rows * 64) for rows in range(1, 80)], "1 different lengths are too few: 6 are needed"),
        ([record(1, longest, longest) for longest in range(1, 80)], "1 different numbers of texts are too few"),
        ([record(2 + k % 5, 8, 16, limit=1.0) for k in range(60)], "0 batches that fitted are too few: 50 are needed"),
    ],
)  # fmt: skip
def test_too_few_records_are_refused_with_the_number_needed(given: list[MemoryRecord], says: str) -> None:
    with pytest.raises(DataError, match=says):
        train(ON, given)


def walked(limits: ShapeLimits, choice: Choice, fails: Callable[[Shape], bool], seed: int = 0) -> dict[Shape, bool]:
    done: dict[Shape, bool] = {}
    while (shape := next_memory_shape(done, limits, choice, seed)) is not None:
        assert shape not in done
        done[shape] = fails(shape)
    return done


@settings(max_examples=25)
@given(
    st.builds(
        lambda rows, length, times, count: ShapeLimits(
            max_rows=rows, max_length=length, max_tokens=length * times, num_batches=count
        ),
        st.integers(1, 300), st.integers(1, 200), st.integers(1, 40), st.integers(1, 60),
    ),
    st.sampled_from(CHOICES),
    st.integers(1, 5000),
    st.integers(0, 3),
)  # fmt: skip
def test_shapes_stay_in_their_limits_and_hold_none_that_ran_out_of_memory(
    limits: ShapeLimits, choice: Choice, room: int, seed: int
) -> None:
    done = walked(limits, choice, lambda shape: shape[0] * (shape[1] + 3) > room, seed)
    assert len(done) <= limits.num_batches
    lost: list[Shape] = []
    for (rows, longest), failed in done.items():
        assert rows <= limits.max_rows
        assert longest <= limits.max_length
        assert rows * longest <= limits.max_tokens
        assert not any(rows >= r and longest >= n for r, n in lost)
        lost += [(rows, longest)] if failed else []


def test_an_adaptive_series_reaches_the_limits_and_brackets_where_memory_ends() -> None:
    limits = ShapeLimits(max_rows=1024, max_length=512, max_tokens=16384, num_batches=160)
    free = walked(limits, "adaptive", lambda shape: False)
    assert {(32, 512), (1, 512), (1024, 1)} <= set(free)
    assert len({longest for _, longest in free}) >= 20
    room = 4000
    tight = walked(limits, "adaptive", lambda shape: shape[0] * (shape[1] + 8) > room)
    fits = max(rows for (rows, longest), failed in tight.items() if longest == 512 and not failed)
    fails = min(rows for (rows, longest), failed in tight.items() if longest == 512 and failed)
    assert fits <= room // 520 < fails <= 1.5 * fits
    assert sum(tight.values()) < len(tight) / 3  # most are of use


def test_a_hundred_thousand_texts_need_few_more_batches_than_the_optimum_under_the_same_bound(
    model: LearnedMemory,
) -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, 100_000).astype(int).clip(1, 512)
    order = np.sort(lengths)[::-1].tolist()
    batches = plan_batches(lengths, InferenceBatchRule(batch_size=16), model)
    assert sum(map(len, batches)) == 100_000
    limit, optimum, start = 0.9 * law(16, 512, False), 1, 16
    while start < len(order):
        size = 16
        while law(size + 1, order[start], order[start] > 1) <= limit:
            size += 1
        start += size
        optimum += 1
    assert len(batches) <= 1.05 * optimum


def test_the_range_is_dynabatchs_and_bounds_batches_where_it_is_given(model: LearnedMemory) -> None:
    parameters = inspect.signature(build_dynamic_batch_dataloader).parameters
    names = ("threshold", "batch_start_range", "batch_end_range", "steps")
    assert [parameters[name].default for name in names] == [0.025, 1.0, 6.0, 50]

    def sizes(**given: Any) -> list[int]:
        texts, lengths = ["x"] * 602, [500, 500, *[2] * 600]
        loader = build_dynamic_batch_dataloader(texts, len, 2, 512, num_workers=0, lengths=lengths, **given)
        return [len(batch) for batch in loader.batch_sampler]  # type: ignore[union-attr]

    assert 2 < max(sizes()) <= 6 * 2  # nothing was measured
    assert max(sizes(batch_end_range=6.0)) == max(sizes(batch_end_range=6)) == 12
    assert max(sizes(batch_end_range=6.0, memory_model=model)) == 12
    assert max(sizes(memory_model=model)) > 12
    with pytest.raises(ConfigError, match="memory and memory_model are both given"):
        sizes(memory_model=model, memory=GenerationMemory(0, 1))


@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 6))
def test_the_first_batch_has_padding_wherever_it_can(lengths: list[int], batch_size: int) -> None:
    table = np.array(lengths, np.int64)
    order = np.argsort(-table, kind="stable")
    found = with_a_padded_first(table, order, batch_size)
    assert sorted(found.tolist()) == list(range(len(lengths)))
    first, rest = table[found[:batch_size]], table[found[batch_size:]]
    assert (np.diff(rest) <= 0).all()
    if len(lengths):
        assert first[0] == max(lengths)
    if batch_size > 1 and len(rest) and len(set(lengths)) > 1:
        assert len(set(first.tolist())) > 1


def test_a_sampler_under_a_learned_model_starts_with_a_padded_batch(model: LearnedMemory) -> None:
    lengths = [100] * 9 + [40] * 50
    first, *_ = DynamicBatchSampler(lengths, InferenceBatchRule(batch_size=4), memory=model)
    assert sorted(lengths[i] for i in first) == [40, 100, 100, 100]
    plain, *_ = DynamicBatchSampler(lengths, InferenceBatchRule(batch_size=4))
    assert [lengths[i] for i in plain] == [100] * 4


def test_counted_bytes_are_refined_by_later_peaks_under_the_first_ones_limit() -> None:
    def cost(prompt_len: int) -> int:
        return 1000 + 50 * prompt_len + prompt_len**2

    first = FirstBatch(8, 200, 8 * 180)
    start = GenerationMemory(1000, 1).calibrated(8, 200, 8 * cost(200))
    later = start.refined(20, 100, 20 * cost(100), first_bytes=8 * cost(200))
    old, new = (m.sizes(first, peak_fraction=0.9, threshold=0.025, most_texts=math.inf) for m in (start, later))
    for prompt_len in range(1, 101):
        assert new(prompt_len) >= old(prompt_len)
        assert new(prompt_len) * cost(prompt_len) <= 0.9 * 8 * cost(200)
    assert new(80) > 1.3 * old(80)


def test_counted_bytes_that_fell_short_make_later_batches_smaller_by_the_threshold() -> None:
    memory, first = GenerationMemory(0, 100), FirstBatch(8, 200, 8 * 200)
    for place in range(100):
        memory = memory.observing(10, 100, 100_000 + 1000 * place)  # up to twice what was counted
    assert memory.margin(0.1) == pytest.approx(1.9)
    sizes = [memory.sizes(first, peak_fraction=0.9, threshold=t, most_texts=math.inf)(10) for t in (0.01, 0.1, 0.5)]
    assert sizes == [int(0.9 * 160 / factor) for factor in (1.99, 1.9, 1.5)]
    for _ in range(1000):
        memory = memory.observing(10, 100, 100_000)
    assert memory.margin(0.1) == 1.0  # the latest thousand


def test_features_and_terms_tell_a_padded_batch_from_one_of_equal_texts() -> None:
    equal, padded = shapes_of([record(4, 10, 40), record(4, 10, 39)])
    assert terms(equal[None])[0, 6:].tolist() == [0.0] * 3
    assert terms(padded[None])[0, 6:].tolist() == [4.0, 40.0, 400.0]
    table = features(np.stack([equal, padded]), np.stack([padded, equal]))
    assert table[:, FEATURES.index("any_padding")].tolist() == [0.0, 1.0]
    assert table[:, FEATURES.index("first_any_padding")].tolist() == [1.0, 0.0]
