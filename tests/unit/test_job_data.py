"""The data of a run: prepared before, or files of text, several of them with weights."""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenDataset, prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.sample_selection import samples_of_epoch
from dynapipe_ext.data.tokenizer import train_tokenizer
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.checkpoints.folder import Manifest, RunState
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.job.run_data import (
    data_lines,
    refuse_missing_file,
    refuse_other_data,
    run_data,
    shown_forms,
    validated_on,
)
from dynapipe_ext.launch.job.settled import _settled_data
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.files import toml_of
from dynapipe_ext.tools.show.samples import sample_text
from tests.support.model_folders import CHATML, write_chats, write_model_tokenizer

PLANNER = Planner(Topology(), TokenCosts(1), 1e9)


def test_a_prepared_folder_is_trained_on_as_it_is(tmp_path: Path) -> None:
    written = prepare(
        lambda: generate_examples(num_samples=40, seed=0, families=["copy"]),
        tmp_path / "prepared",
        tokenizer="bytes",
        max_seq_len=1024,
        truncate=True,
    )
    config = TrainConfig.from_json({"data": {"path": str(tmp_path / "prepared")}, "run": {"run_dir": str(tmp_path)}})
    opened = run_data(config).whole
    assert opened.directory == tmp_path / "prepared"
    assert opened.lengths.tolist() == written.lengths.tolist()
    assert not (tmp_path / "data").exists()
    longest = int(written.lengths[:, 0].max())
    short = config.with_values(model={"max_seq_len": longest - 1})
    with pytest.raises(DataError, match=f"has {longest} tokens but max_seq_len is {longest - 1}"):
        run_data(short)


def test_damaged_tokens_are_made_again_of_their_text_and_refused_where_they_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of training and of evaluation, by the project's own tokenizers and by preprocessing."""
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n' * 4)
    tables = {
        "data": {"path": str(tmp_path / "train.jsonl"), "tokenizer": "bytes"},
        "eval": {"path": str(tmp_path / "held_out.jsonl"), "every": 1},
        "run": {"run_dir": str(tmp_path / "run")},
    }
    config = TrainConfig.from_json(tables)
    data = run_data(config)
    assert data.held_out is not None
    folders = [data.whole.directory, data.held_out.whole.directory]
    saved = [(folder / "tokens.bin").read_bytes() for folder in folders]
    for folder, content in zip(folders, saved, strict=True):
        (folder / "tokens.bin").write_bytes(bytes(255 - byte for byte in content))
    again = run_data(config)
    assert again.fingerprint == data.fingerprint
    assert [(folder / "tokens.bin").read_bytes() for folder in folders] == saved
    notes = [f"note: the tokens in {folder} are damaged: they are prepared again" for folder in folders]
    assert capsys.readouterr().err.splitlines() == notes
    for table, folder in zip(("data", "eval"), folders, strict=True):
        given = config.with_values(**{table: {"path": str(folder)}})
        run_data(given)
        (folder / "tokens.bin").write_bytes(bytes(255 - byte for byte in (folder / "tokens.bin").read_bytes()))
        with pytest.raises(DataError, match="its tokens are not those that were prepared"):
            run_data(given)


def test_what_is_held_out_for_evaluation_is_told_as_training_data_are(tmp_path: Path) -> None:
    for name, length in ("train", 9), ("held_out", 90):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{"a" * length}"}}\n' for _ in range(8)))
    config = TrainConfig.from_json(
        {
            "data": {"path": str(tmp_path / "train.jsonl"), "tokenizer": "bytes", "truncate": True},
            "eval": {"path": str(tmp_path / "held_out.jsonl"), "every": 1},
            "model": {"max_seq_len": 40},
            "run": {"run_dir": str(tmp_path)},
        }
    )
    first, second = data_lines(run_data(config))
    assert "truncated" not in first
    assert second == "held out for evaluation: 8 samples, 320 tokens, 8 truncated"


def test_runs_beside_each_other_share_what_was_tokenized_from_the_same_text_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.jsonl"
    path.write_text('{"input": "a", "target": "b"}\n')
    config = TrainConfig.from_json({"data": {"path": str(path), "tokenizer": "bytes"}})

    def folder(progress: Callable[[int], None] | None = None, **tables: dict[str, object]) -> Path:
        return run_data(config.with_values(**tables), progress).whole.directory

    first = folder()
    assert first.parent == Path("runs/tokenized")
    assert folder(lambda _: pytest.fail("tokenized again"), run={"run_dir": "runs/mine"}) == first
    assert folder(run={"run_dir": "elsewhere/mine"}).parent == Path("elsewhere/tokenized")
    bpe = {"tokenizer": "bpe", "vocab_size": 258}
    others: list[dict[str, dict[str, object]]] = [{"data": {"truncate": True}}, {"model": {"max_seq_len": 64}}]
    assert len({folder(**tables) for tables in (*others, {"data": bpe})} | {first}) == 4
    path.write_text('{"input": "a", "target": "c"}\n{"input": "a", "target": "b"}\n')
    assert folder() != first


def test_a_run_goes_on_with_the_samples_it_was_trained_on_alone_though_their_file_was_touched(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"input": "a", "target": "b"}\n' * 4)
    tables = {"data": {"path": str(path), "tokenizer": "bytes"}, "run": {"run_dir": str(tmp_path / "run")}}
    config = TrainConfig.from_json(tables)
    split = config.with_values(eval={"every": 1, "fraction": 0.25}, run={"seed": 4})
    for trained, others in (
        (config, split.with_values(eval={"fraction": 0.5})),
        (split, split.with_values(run={"seed": 5})),
    ):
        data = run_data(trained)
        run = RunState(
            step=1, num_samples=4, model={}, settings={}, costs={}, costs_fingerprint="", recent_losses=(1.0,),
            loader=DynaPipeDataLoader(
                data.train, PLANNER, tokens_per_batch=8192, shuffle=True, seed=trained.run.seed
            ).state_dict(),
        )  # fmt: skip
        manifest = Manifest(run=run, optimizer=OptimizerPlace(1, {}), versions={}, files={}, checksums={}, tensors={})
        (tmp_path / "dynapipe.json").write_bytes(manifest.encode())
        path.touch()
        refuse_other_data(tmp_path, trained, run_data(trained))
        for changes, says in (
            ({"run": {"seed": 11}}, f"was trained with seed {trained.run.seed} but this run has seed 11"),
            (
                {"data": {"tokens_per_batch": 64}},
                "was trained with tokens_per_batch 8192 but this run has tokens_per_batch 64",
            ),
            ({"data": {"drop_last": True}}, "was trained with drop_last False but this run has drop_last True"),
        ):
            with pytest.raises(DataError, match=says):
                refuse_other_data(tmp_path, trained.with_values(**changes), data)
        with pytest.raises(DataError, match=r"was trained on other data .* differ"):
            refuse_other_data(tmp_path, others, run_data(others))
    path.write_text('{"input": "a", "target": "c"}\n' * 4)
    with pytest.raises(DataError, match=r"was trained on other data .*\(their tokens, of the same lengths, differ\)"):
        refuse_other_data(tmp_path, split, run_data(split))


def test_a_template_that_prints_the_date_prints_that_of_the_first_preparation_on_every_day_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on(day: str) -> None:
        monkeypatch.setattr(
            "dynapipe_ext.data.preprocessing.preprocess.date", SimpleNamespace(today=lambda: date.fromisoformat(day))
        )

    write_model_tokenizer(tmp_path / "tokenizer", template="{{ strftime_now('%d %b %Y') }}" + CHATML)
    path = write_chats(tmp_path / "chats.jsonl", 4)
    text = toml_of({"data": {"path": str(path), "tokenizer": str(tmp_path / "tokenizer"), "batch_size": 2}}, "")
    (tmp_path / "job.toml").write_text(text)
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    request = requested.requested_job(parser.parse_args(["--config", str(tmp_path / "job.toml")]), None)
    here = request.config.with_values(run={"run_dir": str(tmp_path / "here" / "run")})
    on("2026-11-28")
    console = Console(file=io.StringIO(), width=200)
    settled, first = _settled_data(replace(request, config=here), console)
    assert sample_text(first.whole[0], first.whole.tokenizer()).plain.startswith("28 Nov 2026<|im_start|>")
    assert "note: the chat template prints the date, which is 2026-11-28 in all samples" in console.file.getvalue()
    on("2026-11-29")
    assert run_data(here).whole.directory == first.whole.directory
    there = {"run": {"run_dir": str(tmp_path / "there" / "run")}}
    other = run_data(here.with_values(**there))
    assert other.whole.template_date == "2026-11-29"
    resumed = run_data(settled.with_values(**there))  # a run keeps its date among its settings
    assert resumed.whole.directory != other.whole.directory
    assert resumed.fingerprint == first.fingerprint
    with pytest.raises(
        DataError, match=r"date 2026-11-29 into .*, but this run began with 2026-11-28: put back the data"
    ):
        run_data(settled.with_values(data={"path": str(other.whole.directory)}))
    with pytest.raises(
        ConfigError, match="template_date is 2026-11-28, but no chat template prints the date: leave it out"
    ):
        run_data(settled.with_values(data={"tokenizer": "bytes"}))
    command = ["preprocess", "--input", str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]
    for day in ("2026-11-30", "2026-12-01"):
        on(day)
        assert cli.main([*command, "--output", str(tmp_path / "ahead")]) == 0
    assert TokenDataset.open(tmp_path / "ahead").template_date == "2026-11-30"
    assert "already there" in capsys.readouterr().out


def test_validation_losses_are_named_by_their_samples_and_their_kind(tmp_path: Path) -> None:
    path, run = tmp_path / "my.jsonl", {"run_dir": str(tmp_path / "run")}
    path.write_text("".join(f'{{"input": "a", "target": "{letter}"}}\n' for letter in "bcdefghi"))
    tables: dict[str, dict[str, object]] = {"data": {"path": str(path), "tokenizer": "bytes"}, "run": run}
    config = TrainConfig.from_json(tables).with_values(eval={"every": 1, "fraction": 0.25})

    def name(**changes: dict[str, object]) -> str:
        changed = config.with_values(**changes)
        return validated_on(changed, run_data(changed).held_out)

    same = {name(), name(optimizer={"lr": 1.0}), name(data={"tokens_per_batch": 64}), name(eval={"every": 3})}
    others = [
        name(run={"seed": 3}),
        name(eval={"steps": 1}),
        name(eval={"steps": 2}),
        name(plan={"loss_norm": "samples"}),
    ]
    held_out = run_data(config).held_out
    for beta in (0.1, 0.2):
        others.append(validated_on(config.with_values(preferences={"loss": "dpo", "beta": beta}), held_out))
    assert len({*same, *others}) == 1 + len(others)
    usual = validated_on(config.with_values(preferences={"loss": "dpo"}), held_out)
    assert usual == others[-2]  # whose beta is the usual one
    never = TrainConfig.from_json(tables)
    assert validated_on(config, None) == validated_on(never, run_data(never).train) == ""


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
    data = run_data(config)
    whole = data.whole
    assert whole.file_sizes == (10, 30)
    indices = data.train.indices
    assert [int((indices < 10).sum()), int((indices >= 10).sum())] == [90, 30]
    assert [data.train[i].tokens.tolist() for i in (0, 9, 119)] == [whole[i].tokens.tolist() for i in (0, 1, 39)]
    (tmp_path / "config.toml").write_text(toml_of(config.to_json()))
    again = TrainConfig.read(tmp_path / "config.toml")
    assert again == config
    assert run_data(again).train.indices.tolist() == indices.tolist()
    other = config.with_values(data={"mixture": (f"{tmp_path}/a.jsonl=1", f"{tmp_path}/b.jsonl=1")})
    assert run_data(other).whole.directory == whole.directory  # weights tokenize nothing again
    assert data_lines(data)[1].strip() == f"{tmp_path}/a.jsonl: 75.0 % of the samples, 9 times its 10 an epoch"
    held = run_data(config.with_values(eval={"every": 1, "fraction": 0.25}))
    assert held.held_out is not None
    assert not {*held.train.indices.tolist()} & {*held.held_out.indices.tolist()}


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        (["a.jsonl=0.7", "b.jsonl"], "b.jsonl has no weight but other files have"),
        (["a.jsonl=0", "b.jsonl=1"], "gives the weight 0 but it must be above 0"),
        (["a.jsonl=1", "a.jsonl=2"], "a.jsonl is given twice"),
        (["a.jsonl=1", "prepared=2"], "prepared, which is tokenized already"),
        (["a.jsonl=1", "none.jsonl=2"], "none.jsonl does not exist"),
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
        run_data(TrainConfig.from_json({"data": {"mixture": mixture, "tokenizer": "bytes"}}))


@pytest.mark.parametrize("of_a_folder", [False, True])
def test_a_sample_that_is_too_long_is_named_by_file_and_line(tmp_path: Path, of_a_folder: bool) -> None:
    tokenizer = "bytes"
    if of_a_folder:
        tokenizer = str(tmp_path / "own")
        Path(tokenizer).mkdir()
        (tmp_path / "own" / "tokenizer.json").write_text(train_tokenizer(["c"], 258).as_json())
    config = mixed(tmp_path, tokenizer, num_workers=0).with_values(model={"max_seq_len": 20})
    with pytest.raises(DataError, match=r"b\.jsonl, line 21: .*sample.* has 21 tokens but .*max.seq.len is 20"):
        run_data(config)


def test_the_form_of_each_file_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = [{"input": "a", "target": "b"}, {"input": "c", "target": "d"}]
    Path("one.json").write_text(json.dumps(pairs))
    Path("two.csv").write_text("input,target\na,b\n")
    Path("three.jsonl").write_text('{"instruction": "a", "output": "b"}')

    def lines(**data: object) -> list[str]:
        return shown_forms(TrainConfig.from_json({"data": {"tokenizer": "bytes", **data}}))

    described = "prompts and answers: 'input' and 'target', else texts: 'text'"
    assert lines(mixture=["one.json", "two.csv"]) == [f"one.json: json, {described}", f"two.csv: csv, {described}"]
    (instructions,) = lines(path="three.jsonl")
    assert instructions.startswith("three.jsonl: jsonl, prompts and answers: 'instruction' and 'output' (with input")
    assert lines() == []
    held_out = TrainConfig.from_json(
        {"data": {"tokenizer": "bytes", "path": "one.json"}, "eval": {"path": "three.jsonl", "every": 1}}
    )
    assert shown_forms(held_out)[1].startswith("held out, three.jsonl: jsonl, prompts and answers: 'instruction'")
    assert shown_forms(held_out)[1].endswith("; note: the training data are of another form")
    assert lines(path="one.json") == shown_forms(held_out)[:1]


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_name_of_the_hub_is_said_to_need_a_download(key: str) -> None:
    config = TrainConfig.from_json({"data": {"path": __file__, key: "some-org/alpaca_52k"}})
    kind = " --repo-type dataset" if key == "path" else ""
    with pytest.raises(
        ConfigError, match=rf"\[data\] {key} is .*`hf download{kind} some-org/alpaca_52k --local-dir DI"
    ):
        refuse_missing_file(config)


def test_patterns_name_data_and_a_flag_given_twice_has_the_files_of_both(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    refuse_missing_file(TrainConfig().with_values(data={"path": f"{tmp_path}/a*.txt"}))
    with pytest.raises(ConfigError, match=r"\[data\] path is .*c\*\.txt, which is not on this machine"):
        refuse_missing_file(TrainConfig().with_values(data={"path": f"{tmp_path}/c*.txt"}))
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    words = ["--data", f"{tmp_path}/a?.txt=2", "--data", f"{tmp_path}/b.txt=1", "--tokenizer", "bytes"]
    config = requested.config_from(parser.parse_args(words))
    assert config.data.mixture == (f"{tmp_path}/a?.txt=2", f"{tmp_path}/b.txt=1")


def test_a_mixture_may_have_folders_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    for number, texts in enumerate((["aa", "bb", "cc"], ["dd"])):
        parquet.write_table(pyarrow.table({"text": texts}), f"parts/{number}.parquet")
    Path("b.jsonl").write_text("\n".join(json.dumps({"text": "ee"}) for _ in range(4)))
    for tokenizer in ("bytes", "bpe"):
        data = {"mixture": ["parts=0.5", "b.jsonl=0.5"], "tokenizer": tokenizer, "vocab_size": 300}
        shares = run_data(TrainConfig.from_json({"data": data})).shares
        assert shares is not None
        assert shares.counts().tolist() == [4, 4]
