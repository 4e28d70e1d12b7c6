"""Small files that hold records of gigabytes: a bound for each, before memory is taken."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, normalizers

from dynapipe_ext.data.preprocessing import inputs, table_files
from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json
from dynapipe_ext.data.preprocessing.encoders import FORMAT, LibraryEncoder
from dynapipe_ext.data.preprocessing.inputs import BlockStream, TextUnit, find_inputs
from dynapipe_ext.data.preprocessing.records import records
from dynapipe_ext.errors import DataError

BOUND = 1 << 20


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed.MOST_RECORD_BYTES", BOUND)
    monkeypatch.setattr(inputs, "MOST_RECORD_BYTES", BOUND)
    monkeypatch.setattr(table_files, "MOST_RECORD_BYTES", BOUND)
    monkeypatch.setattr(table_files, "_MOST_ROW_CHARACTERS", BOUND)
    monkeypatch.setattr(table_files, "_MOST_PART_BYTES", BOUND // 4)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 1 << 16)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 16)


def read(path: Path, unit: TextUnit = "line") -> list[Any]:
    blocks = BlockStream(find_inputs([path]), unit=unit, columns=("text", "messages"))
    return [record for block in blocks for _, record in records(block, text_key="text")]


LONG = b"a" * (24 * BOUND)
FILES: dict[str, tuple[bytes, str]] = {
    "d.jsonl.gz": (b'{"text": "b"}\n{"text": "' + LONG, "line 2: longer than 1.05 MB: split it into several records"),
    "d.json.gz": (b'[{"text": "' + LONG, "item 1: longer than 1.05 MB"),
    "w.json.gz": (b'{"data": [{"text": "' + LONG, "item 1: longer than 1.05 MB"),
    "d.txt.gz": (LONG, "line 1: longer than 1.05 MB"),
    "quote.csv.gz": (b'text\n"a\n' + b"b\n" * (12 * BOUND), "row 1: longer than 1 Mi characters: close its quotes"),
    "line.csv.gz": (b"text\n" + LONG, "row 1: longer than 1 Mi characters"),
    "quotes.csv.gz": (b"text\n" + b'"a\n",' * (5 * BOUND), "row 1: longer than 1 Mi characters"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_record_that_goes_on_and_on_is_refused_in_bounded_memory(name: str, tmp_path: Path) -> None:
    content, says = FILES[name]
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=says):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * BOUND
    finally:
        tracemalloc.stop()
    if name == "d.txt.gz":
        with pytest.raises(DataError, match="a document: longer than"):
            read(path, "document")


def repeated(text: str, lists: list[int]) -> Any:
    """A column of lists of one text, as indices into a dictionary."""
    offsets = [sum(lists[:place]) for place in range(len(lists) + 1)]
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * sum(lists), pyarrow.int32()), pyarrow.array([text]))
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), texts)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_one_long_text_in_every_row_is_read_in_bounded_parts(form: str, tmp_path: Path) -> None:
    text = "a" * (BOUND // 2)
    table = pyarrow.table({"text": repeated(text, [60]).flatten(), "messages": repeated("b", [1] * 60)})
    assert max(batch.nbytes for batch, _ in table_files.row_batches(written(tmp_path, form, table), form, {"text"})) < (
        2 * BOUND
    )
    rows = [row["text"] for row in read(tmp_path / f"d.{form}")]
    assert rows == [text] * 60
    path = written(tmp_path, form, pyarrow.table({"messages": repeated(text, [1, 200, 1])}))
    assert path.stat().st_size < 2 * BOUND
    with pytest.raises(DataError, match=r"longer than 1\.05 MB"):
        read(path)
    path = written(tmp_path, form, pyarrow.table({"text": ["a" * (2 * BOUND)]}))
    if form == "parquet":
        with pytest.raises(DataError, match=r"a row of group 1: longer than 1\.05 MB"):
            read(path)


def written(folder: Path, form: str, table: Any) -> Path:
    path = folder / f"d.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, dictionary_pagesize_limit=64 * BOUND)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace("a", "b" * 500),
        normalizers.Prepend("b" * 500),
        normalizers.Sequence([normalizers.Replace("a", "aa")] * 9),
        normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("b"), normalizers.Replace("b", "c" * 400)]),
    ],
)
def test_a_tokenizer_that_lengthens_texts_is_refused(normalizer: Any) -> None:
    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    LibraryEncoder(library, eos=0)
    library.normalizer = normalizer
    with pytest.raises(
        DataError, match=r"the tokenizer's normalizer writes up to \d+ characters for one, more than 256"
    ):
        LibraryEncoder(library, eos=0)


def test_a_kept_tokenizer_whose_regular_expression_is_none_is_refused() -> None:
    library = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    library["normalizer"] = {"type": "Replace", "pattern": {"Regex": "("}, "content": "b"}
    rest = {"eos": 0, "separator": None, "specials": "parse", "add_special_tokens": False}
    for kind in ("tokenizers", "bpe"):
        with pytest.raises(DataError, match=r"a tokenizer cannot be read \(Oniguruma error: .*prepare the data again"):
            encoder_from_json(json.dumps({"format": FORMAT, "kind": kind, "model": library, **rest}))
