"""What nodes of a job must have alike, and what may differ: the first difference is named, with who has which."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job import terms
from dynapipe_ext.launch.job.job_keys import tag_of_secret
from dynapipe_ext.launch.job.run_data import run_data
from dynapipe_ext.launch.job.terms import SECRET, difference, terms_of, terms_of_data
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.model_folders import model_folder

WHO = ("rank 0 (a)", "rank 2 (b)")
BY_ONE_COMMAND = "start every node by the same command, with the same files"


def said(mine: dict[str, Any], others: dict[str, Any], *, compare: tuple[bool, bool] = (False, False)) -> str:
    both = (terms_of(TrainConfig.from_json(raw), compare=one) for raw, one in zip((mine, others), compare, strict=True))
    return difference(*both, WHO)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"optimizer": {"lr": 0.5}}, f"[optimizer] lr is 0.01 for rank 0 (a) and 0.5 for rank 2 (b): {BY_ONE_COMMAND}"),
        (
            {"optimizer": {"lr": 0.5, "clip_grad": 0.0}},
            f"[optimizer] lr is 0.01 for rank 0 (a) and 0.5 for rank 2 (b) (1 more differ): {BY_ONE_COMMAND}",
        ),
        (
            {"plan": {"split_policy": "fixed-rows"}},
            '[plan] split_policy is "dynapipe-ext" for rank 0 (a) and "fixed-rows" for',
        ),
        ({"data": {"num_workers": 2}}, "[data] num_workers is 1 for rank 0 (a) and 2 for rank 2 (b)"),
        ({"topology": {"tp": 1, "pp": 4}}, "[topology] tp is 2 for rank 0 (a) and 1 for rank 2 (b) (1 more"),
        ({"data": {"mixture": ("x=1", "y=2")}}, "weights of [data] mixture is [] for rank 0 (a) and ['1', '2'] for"),
        ({"model": {"architecture": "llama-2-7b"}}, "[model] num_layers is 4 for rank 0 (a) and 32 for rank 2 (b)"),
        ({"data": {"tokenizer": "bytes"}}, '[data] tokenizer is "bpe" for rank 0 (a) and "bytes" for'),
    ],
)
def test_the_first_setting_that_differs_is_named_with_who_has_which_value(others: dict[str, Any], says: str) -> None:
    mine = {"optimizer": {"lr": 0.01}}
    message = said(mine, {table: {**mine.get(table, {}), **others.get(table, {})} for table in {**mine, **others}})
    assert message.startswith(says)
    assert said(mine, mine) == ""


def test_what_a_flag_alone_says_is_compared() -> None:
    assert said({}, {}, compare=(False, True)).startswith("--compare is false for rank 0 (a) and true for rank 2 (b)")


def test_places_and_memory_of_a_node_may_differ(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
        (place / "text.jsonl").write_text('{"text": "the same"}\n')
        (place / "notes.md").write_text(str(place))
        model_folder("llama", place / "model")
    mine, others = (
        {
            "run": {
                "run_dir": str(place / "run"),
                "log_dir": str(place / "logs"),
                "log_level": ("info", "debug")[number],
            },
            "checkpoint": {"output": str(place / "tuned")},
            "job": {"redis_server": str(place / "server")},
            "plan": {"memory_limit_gb": 3.0 + number},
            "data": {"path": str(place / "text.jsonl"), "tokenizer": str(place / "model")},
            "model": {"architecture": str(place / "model"), "init_from": str(place / "model")},
        }
        for number, place in enumerate(places)
    )
    assert said(mine, others) == ""


@pytest.mark.parametrize("num_bytes", [100, 5_000_000])
def test_files_are_compared_by_their_content_at_whatever_path(num_bytes: int, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    files[0].write_bytes(b"a" * num_bytes)
    for text, equal in (
        (b"a" * num_bytes, True),
        (b"a" * (num_bytes - 1) + b"b", False),
        (b"b" + b"a" * (num_bytes - 1), False),
        (b"a" * (num_bytes + 1), False),
    ):
        files[1].write_bytes(text)
        os.utime(files[1], (1, 1))
        message = said({"data": {"path": str(files[0])}}, {"data": {"path": str(files[1])}})
        assert (message == "") == equal
        assert equal or message.startswith(f"the file of [data] path is {num_bytes:,} B with digest ")
        assert equal or message.endswith(" for rank 2 (b): have the same files on every node")


def test_the_file_of_a_folder_that_differs_is_named(tmp_path: Path) -> None:
    config: list[dict[str, Any]] = []
    for name in "ab":
        model_folder("llama", tmp_path / name)
        config.append({"model": {"architecture": str(tmp_path / name)}})
    tokenizer = tmp_path / "b" / "tokenizer.json"
    tokenizer.write_text((tmp_path / "a" / "tokenizer.json").read_text() + " ")
    assert said(*config).startswith("the file tokenizer.json of [model] architecture is")
    tokenizer.unlink()
    assert "digest" in said(*config)
    assert " and nothing for rank 2 (b): have" in said(*config)


def test_prepared_data_are_those_of_their_tokens(tmp_path: Path) -> None:
    def prepared(name: str, num_samples: int) -> tuple[terms.Terms, terms.Terms]:
        made = {"num_samples": num_samples, "tokenizer": "bytes", "truncate": True}
        config = TrainConfig.from_json({"run": {"run_dir": str(tmp_path / name / "run")}, "data": made})
        folder = run_data(config).whole.directory
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"source_fingerprint": name}))  # of a path and a time
        again = TrainConfig.from_json({"data": {"path": str(folder)}})
        return terms_of(again, compare=False), terms_of_data(run_data(again))

    (files, samples), others, fewer = prepared("a", 30), prepared("b", 30), prepared("c", 29)
    assert difference(files, others[0], WHO) == difference(samples, others[1], WHO) == ""
    assert difference(files, fewer[0], WHO).startswith("the file ")
    assert difference(samples, fewer[1], WHO).startswith("the number of samples is 30 for rank 0 (a) and 29 for rank 2")


def test_older_prepared_data_are_compared_too(tmp_path: Path) -> None:
    digests = []
    for seed in (0, 1):
        config = TrainConfig.from_json(
            {
                "run": {"run_dir": str(tmp_path / "run"), "seed": seed},
                "data": {"num_samples": 9, "tokenizer": "bytes", "truncate": True},
            }
        )
        folder = run_data(config).whole.directory
        meta = json.loads((folder / "meta.json").read_text())
        del meta["samples_fingerprint"]
        (folder / "meta.json").write_text(json.dumps(meta))
        digests.append(terms_of_data(run_data(TrainConfig.from_json({"data": {"path": str(folder)}}))))
    assert difference(*digests, WHO).startswith("the digest of all samples is ")


def test_secrets_of_an_engines_file_are_not_shown(tmp_path: Path) -> None:
    configs = []
    model_folder("llama", tmp_path / "model")
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"comet": {"api_key": f"{name} sesame"}}))
        engine = {"deepspeed": {"config": str(tmp_path / f"{name}.json")}}
        configs.append({**engine, "model": {"architecture": str(tmp_path / "model")}})
    assert said(*configs).startswith("the file of [deepspeed] config is 38 B with digest")
    assert "sesame" not in str(terms_of(TrainConfig.from_json(configs[0]), compare=False))


@pytest.mark.parametrize(
    ("tables", "package"),
    [
        ({}, "torch"),
        ({}, "numpy"),
        ({}, "megatron-core"),
        ({"model": {"architecture": "MODEL", "backend": "transformers"}}, "transformers"),
        ({"model": {"architecture": "MODEL"}, "lora": {"enabled": True}}, "peft"),
        ({"model": {"architecture": "MODEL"}, "deepspeed": {"config": "ENGINE"}}, "deepspeed"),
    ],
)
def test_packages_that_compute_something_are_compared(
    tables: dict[str, Any], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder("llama", tmp_path / "model")
    (tmp_path / "engine.json").write_text("{}")
    text = json.dumps(tables).replace("MODEL", str(tmp_path / "model")).replace("ENGINE", str(tmp_path / "engine.json"))
    installed, own = terms_of(TrainConfig.from_json(json.loads(text)), compare=False), terms._version
    monkeypatch.setattr(terms, "_version", lambda name: "0.1" if name == package else own(name))
    other = terms_of(TrainConfig.from_json(json.loads(text)), compare=False)
    says = f"the package {package} is {own(package)} for rank 0 (a) and 0.1 for rank 2 (b): install the same on every"
    assert difference(installed, other, WHO).startswith(says)


def test_packages_that_compute_nothing_of_the_job_are_not_compared() -> None:
    names = terms_of(TrainConfig(), compare=False)
    assert not [name for name in names if name.endswith(("transformers", "peft", "deepspeed"))]


def test_one_version_of_several_sources_is_told_apart_and_a_wheel_is_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(layout: str, text: str) -> str:
        places = {"dynapipe_ext": tmp_path / layout / "dynapipe_ext"}
        for room in terms._ROOMS:
            parent = tmp_path / layout if layout == "checkout" else places["dynapipe_ext"]
            places[f"dynapipe_ext.{room}"] = parent / room
        for name, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").write_text(f"{name} {text}")
        origins = {name: SimpleNamespace(origin=str(place / "__init__.py")) for name, place in places.items()}
        monkeypatch.setattr("importlib.util.find_spec", origins.__getitem__)
        return terms._digest_of_sources()

    assert digest("checkout", "one") == digest("wheel", "one") != digest("checkout", "two")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text("{}")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    config = TrainConfig.from_json({"data": {"path": str(tmp_path / "data.jsonl")}})
    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr(terms, "_digest_of_sources", lambda: "")
    with pytest.raises(ConfigError, match=r"data\.jsonl cannot be read \(Permission denied\): check its place"):
        terms_of(config, compare=False)


def test_secrets_that_differ_are_said_by_who_has_them_and_not_shown() -> None:
    long, other = "a line of a secret file", "another line of the kind"
    who = ("rank 0 (a)", "rank 4 (b)")

    def said(mine: str, others: str) -> str:
        return difference({SECRET: tag_of_secret(mine), "lr": "1"}, {SECRET: tag_of_secret(others), "lr": "2"}, who)

    move = ": name a file with the same line by --secret-file on every node"
    assert said(long, other) == f"the secret files of rank 0 (a) and rank 4 (b) differ{move}"
    assert said(long, "") == f"rank 4 (b) has no secret of the job, and rank 0 (a) has one{move}"
    assert said("", long) == f"rank 0 (a) has no secret of the job, and rank 4 (b) has one{move}"
    assert tag_of_secret("guessable") == ""  # a tag would help to guess
    assert said(long, long).startswith("lr is 1")


def test_of_a_machines_ranks_one_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    config = TrainConfig.from_json({"data": {"path": str(tmp_path / "data.jsonl")}})
    whole, part = terms_of(config, compare=False), terms_of(config, compare=False, reads_files=False)
    assert {name: whole[name] for name in part} == part
    assert [name for name in whole if name not in part] == ["the file of [data] path", "[data] tokenizer"]
