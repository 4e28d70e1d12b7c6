"""Lines for Megatron-LM's preprocess_data.py, and Fast-LLM's, run by `dynapipe preprocess`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from dynapipe_ext.data.indexed_dataset import IndexedTokens
from dynapipe_ext.data.preprocessing import encoding as module
from dynapipe_ext.data.preprocessing.encoder_loading import load_encoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings, sentence_splitter
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import Progress, preprocess
from dynapipe_ext.errors import ConfigError, DataError
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


@pytest.fixture
def nltk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NLTK's names, whose Punkt ends sentences at full stops; English alone is there."""

    class LanguageVars:
        _period_context_fmt = r"%(SentEndChars)s(?=(?P<after_tok>%(NonWord)s|\s+(?P<next_tok>\S+)))"

    class Sentences:
        def __init__(self, _params: Any, lang_vars: Any) -> None:
            blanks = r"\s*(?=" in lang_vars._period_context_fmt and r"\s+(?P<next" not in lang_vars._period_context_fmt
            self.expression = r"[^.!?]+[.!?]\s*" if blanks else r"[^.!?\s][^.!?]*[.!?]"

        def tokenize(self, text: str) -> list[str]:
            return re.findall(self.expression, text)

    class Punkt(Sentences):
        _params = None

        def __init__(self, language: str) -> None:
            if language != "english":
                raise LookupError(language)
            super().__init__(None, LanguageVars())

    punkt = ModuleType("nltk.tokenize.punkt")
    vars(punkt).update(PunktTokenizer=Punkt, PunktLanguageVars=LanguageVars, PunktSentenceTokenizer=Sentences)
    tokenize, whole = ModuleType("nltk.tokenize"), ModuleType("nltk")
    vars(tokenize)["punkt"] = punkt
    for name, one in (("nltk", whole), ("nltk.tokenize", tokenize), ("nltk.tokenize.punkt", punkt)):
        monkeypatch.setitem(sys.modules, name, one)
    sentence_splitter.cache_clear()
    yield
    sentence_splitter.cache_clear()


def test_megatrons_and_fast_llms_flags_are_taken(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--input", corpus, "--tokenizer", "bytes", "--append-eod", "--workers", 1)
    stock = ("--json-keys", "content", "--partitions", 2, "--log-interval", 10)
    assert command(*common, *stock, "--output-prefix", tmp_path / "stock") == 0
    said = capsys.readouterr().err
    assert "documents keep the order of the input, as with --keep-sequential-samples" in said
    assert "tokenizing: 30 documents" in said
    fast_llm = ("--json-key", "content", "--partitions", 2, "--keep-sequential-samples")
    assert command(*common, *fast_llm, "--output-prefix", tmp_path / "fast") == 0
    assert "documents keep the order" not in capsys.readouterr().err
    one, other = (IndexedTokens(tmp_path / f"{name}_content_document") for name in ("stock", "fast"))
    assert [sample.tokens.tolist() for sample in one] == [sample.tokens.tolist() for sample in other]
    assert len(one) == 30
    for flag in ("--partitions", "--log-interval"):
        assert command(*common, "--json-keys", "content", flag, 0, "--output-prefix", tmp_path / "none") == 2
        assert f"{flag} is 0 but must be at least 1" in capsys.readouterr().err


def test_documents_that_are_done_are_said_at_each_interval(capsys: pytest.CaptureFixture[str]) -> None:

    with _progress(Console(stderr=True), 100) as show:
        for done in (40, 99, 130, 199, 250, 470):
            show(Progress(done, 1000, done, 3 * done, 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if "documents" in line] == ["130", "250", "470"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("nltk")
def test_sentences_are_sequences_of_their_documents(tmp_path: Path, corpus: Path, keep: bool) -> None:
    encoder = _bytes_encoder()
    settings = EncodeSettings(
        target="megatron", keys=("content",), append_eod=False, sentences="english", keep_newlines=keep
    )

    outcome = preprocess(find_inputs([corpus]), tmp_path / "out", settings=settings, encoder=encoder)
    assert (tmp_path / "out_content_sentence.idx") in outcome.outputs
    data = IndexedTokens(tmp_path / "out_content_sentence")
    assert len(data) == 90
    assert data.index.documents.tolist() == list(range(0, 91, 3))
    blank = " " if keep else ""
    expected = [f"Text 0 ends.{blank}", f"It goes on!{blank}", "Does it?"]
    assert [bytes(data[i].tokens.tolist()).decode() for i in range(3)] == expected


@pytest.mark.usefixtures("nltk")
def test_long_texts_are_split_a_part_at_a_time_and_languages_without_data_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_CHARACTERS", 8)
    assert sentence_splitter("english")("A b. C. D e f.") == ["A b.", "C.", "D e f."]
    with pytest.raises(ConfigError, match=r"no Punkt data of 'klingon': python -m nltk.downloader punkt_tab"):
        sentence_splitter("klingon")


def test_sentences_without_nltk_and_flags_that_do_not_go_together_are_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    sentence_splitter.cache_clear()
    common = ("--input", corpus, "--tokenizer", "bytes")
    for flags, says in (
        (("--output-prefix", tmp_path / "a", "--json-keys", "content", "--split-sentences"), "pip install 'nltk>=3.9'"),
        (("--output-prefix", tmp_path / "a", "--json-keys", "content", "--keep-newlines"), "of --split-sentences"),
        (("--output", tmp_path / "a", "--json-keys", "content", "--split-sentences"), "is for --output-prefix"),
    ):
        assert command(*common, *flags) == 2
        assert says in capsys.readouterr().err.replace("\n", " ")


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
