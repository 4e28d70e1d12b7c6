"""The data of a run: prepared before, or files of text, several of them with weights."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.data.dataset import prepare
from dynapipe_ext.data.generation import generate_examples
from dynapipe_ext.data.mixture import samples_of_epoch
from dynapipe_ext.data.tokenizer import train_tokenizer
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.run_data import data_folder, data_lines, prepare_data, run_data
from dynapipe_ext.tools.toml_file import toml_of


def test_a_prepared_folder_is_trained_on_as_it_is(tmp_path: Path) -> None:
    written = prepare(
        lambda: generate_examples(num_samples=40, seed=0, families=["copy"]),
        tmp_path / "prepared",
        tokenizer="bytes",
        max_seq_len=1024,
        truncate=True,
    )
    config = TrainConfig.from_json({"data": {"path": str(tmp_path / "prepared")}, "run": {"run_dir": str(tmp_path)}})
    assert data_folder(config) == tmp_path / "prepared"
    opened = prepare_data(config)
    assert opened.lengths.tolist() == written.lengths.tolist()
    assert not (tmp_path / "data").exists()
    longest = int(written.lengths[:, 0].max())
    short = config.with_values(model={"max_seq_len": longest - 1})
    with pytest.raises(DataError, match=f"has {longest} tokens but max_seq_len is {longest - 1}"):
        prepare_data(short)


def test_runs_beside_each_other_share_what_was_tokenized_from_the_same_text_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.jsonl"
    path.write_text('{"input": "a", "target": "b"}\n')
    config = TrainConfig.from_json({"data": {"path": str(path), "tokenizer": "bytes"}})
    folder = data_folder(config)
    assert folder.parent == Path("runs/tokenized")
    written = prepare_data(config)
    again = prepare_data(config.with_values(run={"run_dir": "runs/mine"}), lambda _: pytest.fail("tokenized again"))
    assert again.directory == written.directory == folder
    assert data_folder(config.with_values(run={"run_dir": "elsewhere/mine"})).parent == Path("elsewhere/tokenized")
    others = [{"data": {"truncate": True}}, {"model": {"max_seq_len": 64}}, {"data": {"tokenizer": "bpe"}}]
    assert len({data_folder(config.with_values(**tables)) for tables in others} | {folder}) == 4
    path.write_text('{"input": "a", "target": "c"}\n{"input": "a", "target": "b"}\n')
    assert data_folder(config) != folder


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
)
def test_an_epoch_of_a_mixture_has_its_shares_and_leaves_no_sample_out(parts: list[tuple[int, int]], seed: int) -> None:
    sizes, weights = zip(*parts, strict=True)
    ends = list(accumulate(sizes))
    indices = np.split(np.arange(ends[-1]), ends[:-1])
    epoch = samples_of_epoch(indices, [Fraction(weight, 10) for weight in weights], names="abcd", seed=seed)
    times = Counter(epoch.tolist())
    assert sorted(times) == list(range(ends[-1]))
    per_weight = max(size / weight for size, weight in parts)
    for part, weight in zip(indices, weights, strict=True):
        of_part = [times[int(index)] for index in part]
        assert abs(sum(of_part) - per_weight * weight) <= 0.5 + 1e-6 or sum(of_part) == len(part)
        assert max(of_part) - min(of_part) <= 1
    assert min(sum(times[int(i)] for i in part) / len(part) for part in indices) == 1  # no longer than it must be


def mixed(tmp_path: Path, tokenizer: str, **data: object) -> TrainConfig:
    (tmp_path / "a.jsonl").write_text("".join('{"text": "%s"}\n' % ("a" * (i + 1)) for i in range(10)))
    (tmp_path / "b.jsonl").write_text("\n" + "".join('{"input": "b", "target": "%s"}\n' % ("b" * i) for i in range(30)))
    files = [f"{tmp_path}/a.jsonl=0.75", f"{tmp_path}/b.jsonl=0.25"]
    run = {"run_dir": str(tmp_path / "run")}
    return TrainConfig.from_json({"data": {"mixture": files, "tokenizer": tokenizer} | data, "run": run})


@pytest.mark.parametrize("of_a_folder", [False, True])
def test_files_with_weights_are_recorded_and_come_to_the_same_samples_again(tmp_path: Path, of_a_folder: bool) -> None:
    tokenizer = "bytes"
    if of_a_folder:
        tokenizer = str(tmp_path / "own")
        Path(tokenizer).mkdir()
        texts = [example.target for example in generate_examples(num_samples=40, seed=0, families=["copy"])]
        (tmp_path / "own" / "tokenizer.json").write_text(train_tokenizer([*texts, "ab"], 300).as_json())
    config = mixed(tmp_path, tokenizer)
    whole = prepare_data(config)
    assert whole.file_sizes == (10, 30)
    data = run_data(config, whole)
    indices = data.train.indices
    assert [int((indices < 10).sum()), int((indices >= 10).sum())] == [90, 30]
    assert [data.train[i].tokens.tolist() for i in (0, 9, 119)] == [whole[i].tokens.tolist() for i in (0, 1, 39)]
    (tmp_path / "config.toml").write_text(toml_of(config.to_json()))
    again = TrainConfig.read(tmp_path / "config.toml")
    assert again == config
    assert run_data(again, prepare_data(again)).train.indices.tolist() == indices.tolist()
    other = config.with_values(data={"mixture": (f"{tmp_path}/a.jsonl=1", f"{tmp_path}/b.jsonl=1")})
    assert data_folder(other) == data_folder(config)  # weights tokenize nothing again
    assert data_lines(config, data)[1].strip() == f"{tmp_path}/a.jsonl: 75.0 % of the samples, 9 times its 10 an epoch"
    held = run_data(config.with_values(eval={"every": 1, "fraction": 0.25}), whole)
    assert held.held_out is not None
    assert not {*held.train.indices.tolist()} & {*held.held_out.indices.tolist()}


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        (["a.jsonl=0.7", "b.jsonl"], "b.jsonl has no weight but other files have"),
        (["a.jsonl=0", "b.jsonl=1"], "gives the weight 0 but it must be above 0"),
        (["a.jsonl=1", "a.jsonl=2"], "a.jsonl is given twice"),
        (["a.jsonl=1", "prepared=2"], "prepared, which is tokenized already"),
        (["a.jsonl=1", "none.jsonl=2"], "none.jsonl cannot be read"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(
    mixture: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mixed(tmp_path, "bytes")
    Path("prepared").mkdir()
    Path("prepared", "meta.json").write_text("{}")
    with pytest.raises((ConfigError, DataError), match=says):
        prepare_data(TrainConfig.from_json({"data": {"mixture": mixture, "tokenizer": "bytes"}}))


@pytest.mark.parametrize("of_a_folder", [False, True])
def test_a_sample_that_is_too_long_is_named_by_file_and_line(tmp_path: Path, of_a_folder: bool) -> None:
    tokenizer = "bytes"
    if of_a_folder:
        tokenizer = str(tmp_path / "own")
        Path(tokenizer).mkdir()
        (tmp_path / "own" / "tokenizer.json").write_text(train_tokenizer(["c"], 258).as_json())
    config = mixed(tmp_path, tokenizer, num_workers=0).with_values(model={"max_seq_len": 20})
    with pytest.raises(DataError, match=r"b\.jsonl, line 21: .*sample.* has 21 tokens but .*max.seq.len is 20"):
        prepare_data(config)
