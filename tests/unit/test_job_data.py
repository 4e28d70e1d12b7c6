"""A run on data that was prepared before."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.data.dataset import prepare
from dynapipe_ext.data.generation import generate_examples
from dynapipe_ext.errors import DataError
from dynapipe_ext.launch.run_data import data_folder, prepare_data


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
