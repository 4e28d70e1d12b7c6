"""Learned memory models and their records on disk: read defensively, refused by what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batching.inference.batches import (
    FirstBatch,
)
from dynapipe_ext.batching.inference.memory_model import LearnedMemory, Trees
from dynapipe_ext.batching.inference.memory_records import RecordFile, read_records
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.memory_law import ON, records, sizes_of


@pytest.fixture(scope="module")
def model() -> LearnedMemory:
    """As training writes it: the two phases of the law with padding and without, a tree, and errors."""
    phases = [[1e5, 0, 0, 4e4, 900, 0, 0, 0, 0], [0, 0, 0, 0, 1100, 0.2, 0, 0, 0.6]]
    tree = {"feature": [0, 0, 1, 0, 0], "threshold": [2.0, 0.0, 0.5, 0.0, 0.0], "value": [0.0, 0.01, 0.0, -0.01, 0.02]}
    tree |= {"left": [1, -1, 3, -1, -1], "right": [2, -1, 4, -1, -1]}
    errors = tuple(np.linspace(0.98, 1.02, 400).tolist())
    return LearnedMemory(ON, tuple(records(110)), np.array(phases), Trees.from_lists(0.0, [tree], "a tree"), errors)


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
