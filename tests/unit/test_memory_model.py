"""A learned memory model: sklearn's numbers without it, monotone, as careful as its threshold, read defensively."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.data.inference import DynamicBatchSampler, build_dynamic_batch_dataloader
from dynapipe_ext.data.inference_batches import (
    BatchRule,
    FirstBatch,
    GenerationMemory,
    plan_batches,
    with_a_padded_first,
)
from dynapipe_ext.data.memory_model import FEATURES, LearnedMemory, Trees, features, shapes_of, terms
from dynapipe_ext.data.memory_records import MeasuredOn, MemoryRecord, RecordFile, read_records
from dynapipe_ext.data.memory_shapes import CHOICES, Choice, Shape, ShapeLimits, next_shape
from dynapipe_ext.errors import ConfigError, DataError

pytest.importorskip("sklearn")

from dynapipe_ext.data.memory_training import FEWEST_RECORDS, Training, exported, train

ON = MeasuredOn(
    model="llama, 1000 parameters",
    fingerprint="ab" * 32,
    dtype="float32",
    attention="sdpa",
    device="cpu",
    device_name="x86_64",
    max_new_tokens=16,
    num_beams=1,
    torch="2.13.0",
    transformers="5.1.0",
    date="2026-01-01T00:00:00+00:00",
)
LONGEST, MOST_TOKENS = 512, 16384


def law(rows: int, longest: int, padded: bool) -> float:
    """Bytes of two phases, one of them dearer with padding."""
    return max(1e5 + rows * (4e4 + 900 * longest), rows * longest * (1100 + (0.8 if padded else 0.2) * longest))


def record(rows: int, longest: int, tokens: int, noise: float = 1.0, limit: float = math.inf) -> MemoryRecord:
    peak = int(law(rows, longest, tokens < rows * longest) * noise)
    if peak > limit:
        return MemoryRecord(rows=rows, longest=longest, tokens=tokens, peak_bytes=None, limit_bytes=int(limit))
    return MemoryRecord(rows=rows, longest=longest, tokens=tokens, peak_bytes=peak)


def records(count: int, seed: int = 0, spread: float = 0.0, limit: float = math.inf) -> list[MemoryRecord]:
    generator = np.random.default_rng(seed)
    shapes = [(MOST_TOKENS // LONGEST, LONGEST), (1, LONGEST), (2048, 1)]
    while len(shapes) < count:
        longest = int(np.exp(generator.uniform(0, np.log(LONGEST))))
        shapes.append((int(np.exp(generator.uniform(0, np.log(min(2048, MOST_TOKENS // longest))))), longest))
    found = []
    for rows, longest in shapes:
        tokens = (
            rows * longest
            if generator.random() < 0.3
            else int(generator.integers(rows + longest - 1, rows * longest + 1))
        )
        found.append(record(rows, longest, tokens, float(np.exp(generator.normal(0, spread))), limit))
    return found


@pytest.fixture(scope="module")
def training() -> Training:
    return train(ON, records(110, spread=0.01))


@pytest.fixture(scope="module")
def model(training: Training) -> LearnedMemory:
    return training.model


def sizes_of(
    model: LearnedMemory, first: FirstBatch, threshold: float = 0.025, fraction: float = 0.9
) -> Callable[[int], int]:
    return model.sizes(first, peak_fraction=fraction, threshold=threshold, most_texts=math.inf)


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
        "from dynapipe_ext.data.memory_model import LearnedMemory\n"
        f"shapes = np.array({shapes.tolist()!r})\n"
        f"found = LearnedMemory.read({str(path)!r}).ratio(shapes, shapes[:1].repeat(len(shapes), axis=0))\n"
        "loaded = [name for name in ('sklearn', 'scipy', 'torch', 'joblib') if name in sys.modules]\n"
        "print(json.dumps([found.tobytes().hex(), loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found, loaded = json.loads(done.stdout)
    assert found == model.ratio(shapes, first).tobytes().hex()
    assert loaded == []


@settings(max_examples=60, deadline=None)
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
    fresh = records(400, seed=9, spread=spread)
    shapes, peaks = shapes_of(fresh), np.array([r.peak_bytes for r in fresh], np.float64)
    i, j = (x.ravel() for x in np.meshgrid(np.arange(400), np.arange(400), indexing="ij"))
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

    seen = [steep(one) for one in records(150, seed=2)] + [record(400, 64, 400 * 64), record(2048, 17, 2048 * 17)]
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


def changed(model: LearnedMemory, change: Callable[[dict[str, Any]], Any]) -> str:
    data = copy.deepcopy(model.to_json())
    change(data)
    return json.dumps(data)


def tree(node: int, **values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(data: dict[str, Any]) -> None:
        for name, value in values.items():
            data["trees"][0][name][node] = value

    return change


BROKEN: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("format 'x'", lambda d: d.update(format="x")),
    ("no 'trees'", lambda d: d.pop("trees")),
    ("other features", lambda d: d["features"].reverse()),
    ("NaN is no number", lambda d: d.update(baseline=math.nan)),
    ("baseline is 1000.0", lambda d: d.update(baseline=1000.0)),
    ("baseline is 'x'", lambda d: d.update(baseline="x")),
    ("children 0 and 0", tree(0, left=0, right=0)),
    ("lie behind", tree(0, left=10**6)),
    ("asks for feature 99", tree(0, feature=99)),
    ("must be integers", tree(0, left=True)),
    ("Infinity is no number", tree(0, threshold=math.inf)),
    ("must be finite numbers", tree(0, threshold="1")),
    ("is no tree", lambda d: (d["trees"][0]["left"].__setitem__(0, 1), d["trees"][0]["right"].__setitem__(0, 3))),
    ("unequal length", lambda d: d["trees"][0]["value"].pop()),
    ("more than the 5000", lambda d: d.update(trees=[d["trees"][0]] * 5001)),
    ("tree 0 is 5", lambda d: d.update(trees=[5])),
    ("phases must be", lambda d: d.update(phases=[])),
    ("not a number from 0", lambda d: d["phases"][0].__setitem__(0, -1.0)),
    ("phases must be", lambda d: d["phases"][0].pop()),
    ("errors must be", lambda d: d.update(errors=[])),
    ("ascending", lambda d: d.update(errors=[2.0, 1.0])),
    ("no list of 5", lambda d: d["measured"].append([1, 2])),
    ("cannot have", lambda d: d["measured"].append([2, 10, 50, 100, None])),
    ("that fitted", lambda d: d.update(measured=[[1, 1, 1, None, 5]])),
    ("is None: an object is needed", lambda d: d.update(measured_on=None)),
    ("device is 3", lambda d: d["measured_on"].update(device=3)),
    ("max_new_tokens is True", lambda d: d["measured_on"].update(max_new_tokens=True)),
]


@pytest.mark.parametrize(("says", "change"), BROKEN, ids=[f"{i} {says}" for i, (says, _) in enumerate(BROKEN)])
def test_a_file_that_is_no_memory_model_is_refused_by_what_is_wrong(
    says: str, change: Callable[[dict[str, Any]], Any], model: LearnedMemory, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(changed(model, change))
    with pytest.raises(DataError, match=says) as refused:
        LearnedMemory.read(path)
    assert str(path) in str(refused.value)


def test_a_file_cut_anywhere_is_refused(model: LearnedMemory, tmp_path: Path) -> None:
    path, text = tmp_path / "model.json", json.dumps(model.to_json())
    for end in (0, 1, 50, len(text) // 2, len(text) - 1):
        path.write_text(text[:end])
        with pytest.raises(DataError, match=r"model\.json"):
            LearnedMemory.read(path)
    path.write_bytes(b"\x80\x04\x95pickled")
    with pytest.raises(DataError, match="not UTF-8"):
        LearnedMemory.read(path)
    with pytest.raises(DataError, match="cannot be read"):
        LearnedMemory.read(tmp_path / "absent.json")


def test_a_first_batch_larger_than_any_measured_is_refused_with_what_to_collect(model: LearnedMemory) -> None:
    for first, says in (
        (FirstBatch(4, 600, 2400), "600 tokens in its longest text, .* up to 512: collect with --max-length 600"),
        (FirstBatch(40, 512, 40 * 512), "20480 padded tokens.*--max-tokens 20480"),
        (FirstBatch(3000, 2, 6000), "3000 texts.*--max-rows 3000"),
    ):
        with pytest.raises(ConfigError, match=says):
            sizes_of(model, first)


def test_no_batch_is_planned_beyond_what_was_measured(model: LearnedMemory) -> None:
    most_rows, _, most_tokens = model.ceiling()
    size = sizes_of(model, FirstBatch(32, 512, 32 * 512), threshold=0.5, fraction=1.0)
    assert all(size(n) <= most_rows and size(n) * n <= most_tokens for n in range(1, 513))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"fingerprint": "cd" * 32, "model": "t5, 5 parameters"},
            "model t5, 5 parameters cdcdcdcdcdcd .measured: llama",
        ),
        ({"device": "cuda"}, r"device cuda \(measured: cpu\)"),
        ({"dtype": "bfloat16"}, "dtype bfloat16"),
        ({"attention": "eager"}, "attention eager"),
        ({"num_beams": 4}, "num_beams 4"),
        ({"max_new_tokens": 17}, r"max_new_tokens 17 \(measured: 16\)"),
    ],
)
def test_a_memory_model_of_other_settings_is_refused_by_their_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ON.check(dataclasses.replace(ON, **change))


def test_other_versions_and_devices_of_a_kind_are_warned_of_and_fewer_new_tokens_are_fine() -> None:
    for change in ({"torch": "2.14.0"}, {"transformers": "6.0"}, {"device_name": "arm64"}):
        with pytest.warns(UserWarning, match=f"{next(iter(change))} .* \\(measured"):
            ON.check(dataclasses.replace(ON, **change))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ON.check(dataclasses.replace(ON, max_new_tokens=3, date="2027-01-01"))


def test_records_are_resumed_and_a_line_cut_short_is_taken_out(tmp_path: Path) -> None:
    path, some = tmp_path / "deep" / "records.jsonl", records(6)
    with RecordFile(path, ON) as file:
        for one in some[:4]:
            file.append(one)
            assert read_records(path).records[-1] == one  # on the disk already
    with path.open("a") as cut:
        cut.write('{"rows": 1, "longest": 2, "tok')
    assert read_records(path).cut
    with RecordFile(path, dataclasses.replace(ON, date="later")) as file:
        assert file.records == some[:4]
        file.append(some[4])
    found = read_records(path)
    assert (found.measured_on, found.records, found.cut) == (ON, tuple(some[:5]), False)


def test_records_of_other_settings_and_files_in_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordFile(path, ON), pytest.raises(ConfigError, match="another process"), RecordFile(path, ON):
        pass
    other = dataclasses.replace(ON, dtype="bfloat16", max_new_tokens=3)
    with (
        pytest.raises(ConfigError, match="dtype 'float32', max_new_tokens 16, not dtype 'bfloat16'"),
        RecordFile(path, other),
    ):
        pass
    text = tmp_path / "text"
    text.write_text("some text of the user's own")
    with pytest.raises(DataError, match="no file of memory records"), RecordFile(text, ON):
        pass
    assert text.read_text() == "some text of the user's own"
    with pytest.raises(DataError, match="cannot be written"), RecordFile(tmp_path, ON):
        pass


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"rows": 2}', "line 2 has no 'longest'"),
        ('{"rows": 2, "longest": 3, "tokens": 9, "peak_bytes": 5, "limit_bytes": null}', "cannot have 9 tokens"),
        ('{"rows": 2, "longest": 3, "tokens": 5, "peak_bytes": null, "limit_bytes": null}', "ran out of a limit"),
        ('{"rows": 2, "longest": 3, "tokens": 5, "peak_bytes": 0, "limit_bytes": null}', "a peak of 0 B"),
        ('{"rows": 2.5, "longest": 3, "tokens": 5, "peak_bytes": 7, "limit_bytes": null}', "rows is 2.5, not int"),
        ("[1]", "is .1.: an object"),
        ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_broken_record_is_named_with_its_line(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordFile(path, ON):
        pass
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=says):
        read_records(path)


def walked(limits: ShapeLimits, choice: Choice, fails: Callable[[Shape], bool], seed: int = 0) -> dict[Shape, bool]:
    done: dict[Shape, bool] = {}
    while (shape := next_shape(done, limits, choice, seed)) is not None:
        assert shape not in done
        done[shape] = fails(shape)
    return done


@settings(max_examples=25, deadline=None)
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
    batches = plan_batches(lengths, BatchRule(batch_size=16), model)
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

    assert max(sizes()) == 600 - 150
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
    first, *_ = DynamicBatchSampler(lengths, BatchRule(batch_size=4), memory=model)
    assert sorted(lengths[i] for i in first) == [40, 100, 100, 100]
    plain, *_ = DynamicBatchSampler(lengths, BatchRule(batch_size=4))
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
