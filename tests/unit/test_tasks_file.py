"""Tasks with lengths and weights of their own: what the file says, and that all who make samples keep to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.length_bounds import LengthBounds, SideBounds, TaskBounds
from dynapipe_ext.data.sample_selection import Tasks, read_tasks
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job import run_data as run_data_module
from dynapipe_ext.launch.job.run_data import data_lines, run_data
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.samples import sample_text
from tests.support.model_folders import write_model_tokenizer
from tests.support.preprocessing import jsonl

RECORDS = [
    {"task": "copy", "input": "one two", "target": "one two"},
    {"task": "sum", "input": "two three", "target": "two"},
    {"task": "copy", "input": "three", "target": "three"},
]
TASKS = "[copy]\nmax_target_len = 4\nweight = 1\n[sum]\nmax_input_len = 6\nweight = 3\n"


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 20), st.integers(0, 2), st.integers(0, 9), st.integers(1, 9)
)
def test_what_is_kept_of_a_sample_is_all_that_its_bounds_leave(
    most_input: int, most_target: int, longest: int, num_beside: int, num_input: int, num_target: int
) -> None:
    bounds = LengthBounds(longest, True, TaskBounds(SideBounds(), {"t": SideBounds(most_input, most_target)}))
    sizes = {"num_beside": num_beside, "num_input": num_input, "num_target": num_target, "where": "x"}
    if 0 < most_input < num_beside:
        with pytest.raises(ConfigError, match="max_input_len is 1: raise it"):
            bounds.kept_lengths("t", **sizes)
        return
    by_input = min(num_input, most_input - num_beside) if most_input else num_input
    by_target = min(num_target, most_target) if most_target else num_target
    room = longest + 1 - num_beside
    kept = bounds.kept_lengths("t", **sizes)
    assert kept[1] == max(0, min(by_target, room))  # a target is cut last
    assert kept[0] == max(0, min(by_input, room - kept[1]))
    refusing = LengthBounds(longest, False, bounds.tasks)
    if kept == (num_input, num_target):
        assert refusing.kept_lengths("t", **sizes) == kept
    else:
        with pytest.raises(DataError, match=r"x has \d+ (input |target )?tokens but max_\w+_len is \d+: pass --trunc"):
            refusing.kept_lengths("t", **sizes)
    assert LengthBounds(truncate=True, tasks=bounds.tasks).kept_lengths("another task", **sizes) == (
        num_input,
        num_target,
    )


def test_a_bound_that_a_task_does_not_have_is_that_of_all_tasks_in_toml_and_json_alike(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("\ufeff" + TASKS)
    (tmp_path / "t.json").write_text(
        '{"copy": {"max_target_len": 4, "weight": 1.0}, "sum": {"max_input_len": 6, "weight": 3}}'
    )
    tasks = read_tasks(str(tmp_path / "t.toml"), SideBounds(9, 8))
    assert tasks == read_tasks(str(tmp_path / "t.json"), SideBounds(9, 8))
    assert [tasks.bounds.of(task) for task in ("copy", "sum", "other")] == [
        SideBounds(9, 4),
        SideBounds(6, 8),
        SideBounds(9, 8),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[copy]\nmax_inputs_len = 3", r"task 'copy': unknown .*did you mean 'max_input_len'\?"),
        ("[copy]\nmax_input_len = -1", "task 'copy': max_input_len is -1 but must be an integer of at least 0"),
        ("[copy]\nmax_input_len = true", "max_input_len is True but must be an integer of at least 0"),
        ("[copy]\nmax_input_len = 1.5", r"max_input_len is 1\.5 but must be an integer of at least 0"),
        ("[copy]\nweight = nan", "weight is nan but must be a number above 0"),
        ("[copy]\nweight = 0", "weight is 0 but must be a number above 0"),
        ("[copy]\nweight = 1\n[sum]", "task 'sum' has no weight but other tasks have"),
        ("copy = 3", "task 'copy' is 3 but must be a table"),
        ("", "names no task"),
        ("[copy", "cannot be read as a file of tasks"),
    ],
)
def test_a_tasks_file_with_a_mistake_is_refused_by_task_and_value(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_tasks(str(tmp_path / "t.toml"), SideBounds())


def config(tmp_path: Path, **data: object) -> TrainConfig:
    (tmp_path / "tasks.toml").write_text(TASKS)
    path = str(jsonl(tmp_path / "data.jsonl", RECORDS))
    given = {"path": path, "tokenizer": "bytes", "tasks": str(tmp_path / "tasks.toml"), "truncate": True} | data
    return TrainConfig.from_json({"data": given, "run": {"run_dir": str(tmp_path / "run")}})


def shown(data: TokenDataset) -> list[str]:
    return [sample_text(data[place], data.tokenizer()).plain for place in range(len(data))]


def test_train_and_preprocess_cut_the_sides_of_each_task_alike(tmp_path: Path) -> None:
    settings = config(tmp_path)
    expected = ["one two⟨separator⟩⟦one ⟧", "three⟨separator⟩⟦two⟨eos⟩⟧", "three⟨separator⟩⟦thre⟧"]
    data = run_data(settings).whole
    assert shown(data) == expected
    words = ["preprocess", "--input", str(tmp_path / "data.jsonl"), "--tokenizer", "bytes", "--workers", "1"]
    bounds = ["--tasks", str(tmp_path / "tasks.toml"), "--truncate"]
    assert cli.main([*words, "--output", str(tmp_path / "out"), *bounds]) == 0
    assert shown(TokenDataset.open(tmp_path / "out")) == expected
    assert cli.main([*words, "--output", str(tmp_path / "two"), "--max-input-len", "3", "--truncate"]) == 0
    assert shown(TokenDataset.open(tmp_path / "two"))[0] == "wo⟨separator⟩⟦one two⟨eos⟩⟧"
    write_model_tokenizer(tmp_path / "model")
    own = run_data(settings.with_values(data={"tokenizer": str(tmp_path / "model"), "max_input_len": 2})).whole
    assert own.first_target.tolist() == [2, 4, 2]
    assert own.lengths[:, 2].max() == 4
    unbound = settings.with_values(data={"tasks": ""})
    assert shown(run_data(unbound).whole)[0] == "one two⟨separator⟩⟦one two⟨eos⟩⟧", "tokens of other bounds were taken"


def test_weights_of_tasks_are_their_shares_of_the_samples_as_the_file_says_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path)
    reads: list[str] = []

    def read_once(path: str, others: SideBounds) -> Tasks:
        assert not reads
        reads.append(path)
        return read_tasks(path, others)

    monkeypatch.setattr(run_data_module, "read_tasks", read_once)
    data = run_data(settings)
    assert sorted(data.train.indices.tolist()) == [0, 1, 1, 1, 1, 1, 1, 2]
    assert data_lines(data)[1:] == [
        "  task copy: 25.0 % of the samples, 1 times its 2 an epoch",
        "  task sum: 75.0 % of the samples, 6 times its 1 an epoch",
    ]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("[copi]\nmax_input_len = 99", r"names 'copi' but the data have the tasks 'copy', 'sum': .*mean 'copy'\?"),
        ("[copy]\nweight = 1", "the data have the task 'sum', but the tasks file gives it no weight"),
        ("[copy]\nmax_target_len = 7", r"sample 0 \(task 'copy'\) has 8 target tokens but max_target_len is 7: raise"),
    ],
)
def test_prepared_data_that_do_not_fit_the_tasks_are_refused(tmp_path: Path, tasks: str, said: str) -> None:
    settings = config(tmp_path, tasks="", truncate=False)
    prepared = run_data(settings).whole
    (tmp_path / "tasks.toml").write_text(tasks)
    with pytest.raises(DynaPipeError, match=said):
        run_data(config_of(settings, prepared.directory, tmp_path / "tasks.toml"))


def config_of(settings: TrainConfig, folder: Path, tasks: Path) -> TrainConfig:
    return settings.with_values(data={"path": str(folder), "tasks": str(tasks)})


TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("record", "bound", "said"),
    [
        ({"messages": TURNS}, "max_target_len", "chats, which have no input and target sides: leave out max_input_len"),
        ({"text": "one two"}, "max_input_len", "plain texts, which have no input: leave out max_input_len"),
    ],
)
def test_a_side_that_records_do_not_have_is_not_bounded(
    tmp_path: Path, record: dict[str, Any], bound: str, said: str
) -> None:
    write_model_tokenizer(tmp_path / "model")
    records = jsonl(tmp_path / "records.jsonl", [record])
    data = {"path": str(records), "tasks": "", "tokenizer": str(tmp_path / "model"), bound: 9}
    with pytest.raises(ConfigError, match=said):
        run_data(config(tmp_path, **data))


def test_tasks_that_no_record_has_are_told_by_preprocess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps({"summ": {"max_input_len": 99}}))
    words = ["preprocess", "--input", str(jsonl(tmp_path / "a.jsonl", RECORDS)), "--tokenizer", "bytes"]
    output = ["--output", str(tmp_path / "out"), "--workers", "1"]
    assert cli.main([*words, *output, "--tasks", str(tmp_path / "tasks.json")]) == 0
    assert "names 'summ' but the data have the tasks 'copy', 'sum'" in " ".join(capsys.readouterr().err.split())
