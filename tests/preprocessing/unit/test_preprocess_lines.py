"""What `dynapipe preprocess` says while it works, and what it refuses before workers start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dynapipe_ext.data.preprocessing.encoder_loading import load_encoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import Progress, preprocess
from dynapipe_ext.errors import DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands.preprocess import _progress


def command(*arguments: Any) -> int:
    return cli.main(["preprocess", *map(str, arguments)])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [f"Text {i} ends. It goes on! Does it?" for i in range(30)]
    path.write_text("".join(json.dumps({"content": text, "other": "x"}) + "\n" for text in texts))
    return path


def test_an_interval_of_the_log_is_at_least_1_and_removed_flags_say_what_takes_their_place(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--input", corpus, "--tokenizer", "bytes", "--json-keys", "content", "--output-prefix", tmp_path / "none")
    assert command(*line, "--log-interval", 0) == 2
    assert "--log-interval is 0 but must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        command(*line, "--partitions", 2)
    assert "--partitions was removed: leave it out" in capsys.readouterr().err


def test_documents_that_are_done_are_said_at_each_interval(capsys: pytest.CaptureFixture[str]) -> None:

    with _progress(Console(stderr=True), 100) as show:
        for done in (40, 99, 130, 199, 250, 470):
            show(Progress(done, 1000, done, 3 * done, 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if "documents" in line] == ["130", "250", "470"]


class NoWorkers:
    """A cluster that must not start."""

    def __enter__(self) -> Any:
        raise AssertionError("the cluster was started")

    def __exit__(self, *_: object) -> None: ...

    def run(self, blocks: Any) -> Iterator[Any]:
        raise AssertionError(blocks)


@pytest.mark.parametrize("key", ["content", "contents"])
def test_records_are_looked_at_before_workers_start(tmp_path: Path, corpus: Path, key: str) -> None:
    """--ray starts a cluster when its workers are entered."""

    settings = EncodeSettings(target="megatron", keys=(key,))
    kind: Sequence[type[BaseException]] = (AssertionError,) if key == "content" else (DataError,)
    with pytest.raises(tuple(kind), match="cluster was started" if key == "content" else "line 1"):
        preprocess(
            find_inputs([corpus]), tmp_path / "o", settings=settings, encoder=_bytes_encoder(), workers=NoWorkers()
        )


def _bytes_encoder() -> Any:

    return load_encoder("bytes")
