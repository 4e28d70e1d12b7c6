import bz2
import csv
import gzip
import io
import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing.inputs import BlockStream, find_inputs
from dynapipe_ext.data.preprocessing.record_forms import RecordFields, template_of
from dynapipe_ext.data.preprocessing.records import all_records, records
from dynapipe_ext.data.preprocessing.table_files import array_items
from dynapipe_ext.errors import ConfigError, DataError

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
ROWS = [{"text": f"number {i} ünï"} for i in range(40)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def blocks_of(path, form=None, **choices):
    return list(BlockStream(find_inputs([path], form), **choices))


def read(path, form=None, columns=("text",), **choices):
    return [
        found
        for block in blocks_of(path, form, columns=columns, **choices)
        for found in records(block, text_key="text")
    ]


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def write_parquet(folder, columns, name="d.parquet", **choices):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name, **choices)
    return folder / name


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_lines_come_whole_with_their_numbers_however_the_file_is_cut(tmp_path, monkeypatch, suffix, block_bytes):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 64)
    path = write(tmp_path, f"d.jsonl{suffix}", COMPRESS[suffix](b"\n" + JSONL[:-1]))
    plain = write(tmp_path, "plain.jsonl", b"\n" + JSONL[:-1])
    assert read(path) == [(f"{path}, line {i + 2}", row) for i, row in enumerate(ROWS)]
    blocks = blocks_of(path)
    assert b"".join(block.payload for block in blocks) == b"\n" + JSONL[:-1]
    assert [block.payload for block in blocks] == [block.payload for block in blocks_of(plain)]
    assert block_bytes == 1 << 20 or len(blocks) > 10
    upto = [block.upto_bytes for block in blocks]
    assert upto == sorted(upto)
    assert upto[-1] == path.stat().st_size


def test_a_text_file_has_a_sample_a_line(tmp_path):
    path = write(tmp_path, "d.txt", b"\xef\xbb\xbfone\r\n\r\n  two\nthree")
    assert read(path) == [
        (f"{path}, line 1", {"text": "one"}),
        (f"{path}, line 3", {"text": "  two"}),
        (f"{path}, line 4", {"text": "three"}),
    ]


@pytest.mark.parametrize("block_bytes", [1, 10, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_paragraphs_are_parted_by_blank_lines(tmp_path, monkeypatch, block_bytes, end):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 3)
    path = write(tmp_path, "d.txt", b"a b\nc\n\n \nd\n\n\ne\nf".replace(b"\n", end))
    assert read(path, unit="paragraph") == [
        (f"{path}, line 1", {"text": "a b\nc"}),
        (f"{path}, line 5", {"text": "d"}),
        (f"{path}, line 8", {"text": "e\nf"}),
    ]
    if block_bytes == 1:
        assert len(blocks_of(path, unit="paragraph")) > 2


def test_a_document_is_a_whole_file(tmp_path):
    path = write(tmp_path, "d.txt.gz", gzip.compress(b"\xef\xbb\xbfa\n\nb\n"))
    assert read(path, unit="document") == [(str(path), {"text": "a\n\nb\n"})]


def test_rows_of_parquet_come_with_their_numbers_and_only_the_columns_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 200)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.table_files._ROWS", 4)
    table = {"text": [row["text"] for row in ROWS], "other": list(range(40))}
    path = write_parquet(tmp_path, table, row_group_size=9, compression="zstd")
    assert read(path) == [(f"{path}, row {i + 1}", row) for i, row in enumerate(ROWS)]
    blocks = blocks_of(path, columns=("text",))
    assert len(blocks) > 3
    assert blocks[-1].upto_bytes == path.stat().st_size


def test_parquet_without_the_column_or_rows_is_refused(tmp_path):
    path = write_parquet(tmp_path, {"body": ["a"], "id": [1]})
    with pytest.raises(DataError, match=r"has the columns 'body', 'id' but none of 'text'"):
        read(path)
    with pytest.raises(DataError, match="has no rows"):
        read(write_parquet(tmp_path, {"text": pyarrow.array([], pyarrow.string())}))
    for prompts in ({}, {"prompt": ["a"]}):
        pairs = write_parquet(tmp_path, prompts | {"chosen": ["b"], "rejected": ["c"]}, name="pairs.parquet")
        ((where, record),) = read(pairs, columns=("prompt", "response", "text"))
        with pytest.raises(DataError, match=r"pairs\.parquet, row 1: preference data: the record has"):
            template_of(record, RecordFields(), where)


def test_text_in_parquet_that_is_not_utf8_is_named_by_rows(tmp_path):
    bad = pyarrow.array([b"good", b"\xff bad"], pyarrow.binary()).view(pyarrow.string())
    with pytest.raises(DataError, match=r"d\.parquet, rows 1 to 2: a text is not UTF-8"):
        read(write_parquet(tmp_path, {"text": bad}))


def test_the_form_follows_from_the_name_unless_it_is_given(tmp_path):
    forms = {"a.jsonl": "jsonl", "b.json.gz": "jsonl", "c.TXT": "text", "d.md.xz": "text", "e.pq": "parquet"}
    forms |= {"f.records": "jsonl", "g.csv.gz": "csv", "h.tsv": "tsv", "i.arrow": "arrow"}
    for name, form in forms.items():
        assert find_inputs([write(tmp_path, name, b"x")])[0].form == form
    for name in ("j.json", "k.jsonl", "l.records"):  # an array begins with a bracket
        assert find_inputs([write(tmp_path, name, b"\xef\xbb\xbf\n [1")])[0].form == "json"
    assert find_inputs([write(tmp_path, "m.json.gz", gzip.compress(b"[]"))])[0].form == "json"
    assert find_inputs([tmp_path / "a.jsonl"], "text")[0].form == "text"
    with pytest.raises(ConfigError, match="the input format is 'xml'"):
        find_inputs([tmp_path / "a.jsonl"], "xml")


def test_globs_give_files_by_name_and_reach_into_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "no.txt", "odd[1].jsonl"):
        write(tmp_path, name, b"{}")
    names = [file.path.name for file in find_inputs([str(tmp_path / "?.jsonl"), str(tmp_path / "odd[1].jsonl")])]
    assert names == ["a.jsonl", "b.jsonl", "odd[1].jsonl"]
    assert [file.path.name for file in find_inputs([str(tmp_path / "**/[ac].jsonl")])] == ["a.jsonl", "c.jsonl"]


def test_paths_that_cannot_be_read_are_refused(tmp_path):
    path = write(tmp_path, "a.jsonl", b"{}")
    for patterns, says in (
        ([tmp_path / "none.jsonl"], "none.jsonl does not exist"),
        ([tmp_path], r"is a folder without Parquet files.*: name files, for example '.*\*\.jsonl'"),
        ([str(tmp_path / "*.parquet")], "no file fits"),
        ([path, str(tmp_path / "*.jsonl")], "is given twice"),
    ):
        with pytest.raises(DataError, match=says):
            find_inputs(patterns)
    with pytest.raises(ConfigError, match="no input"):
        find_inputs([])


@pytest.mark.parametrize(
    ("names", "example"),
    [
        (["a.txt", "b.txt", "c.csv"], "*.txt"),
        (["x/a.txt", "y/b.txt", "c.csv"], "**/*.txt"),
        (["a.md", "b.md", "x.png", ".hidden.csv", "c.jsonl", "d.jsonl"], "*.jsonl"),
        ([], "*.jsonl"),
    ],
)
def test_a_folder_of_files_is_told_how_to_name_them(tmp_path, names, example):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, b"words\n")
    with pytest.raises(DataError, match=re.escape(f"name files, for example '{tmp_path / example}'")):
        find_inputs([tmp_path])
    assert not names or len(find_inputs([str(tmp_path / example)])) == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.jsonl", b'{"text": "a"}\n\n{"text": \n', r"d\.jsonl, line 3, column 10: not JSON"),
        ("d.jsonl", b'{"text": "a"}\n[1]\n', r"line 2: the record is a list, not an object"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: byte 11 \(0xff\) is not UTF-8"),
        ("d.txt", b"good\n\nb\xe9d\n", r"d\.txt, line 3: byte 2 \(0xe9\) is not UTF-8"),
        ("d.jsonl", b"", r"d\.jsonl is empty"),
        ("d.jsonl.gz", gzip.compress(JSONL)[:-20], r"d\.jsonl\.gz ends too early: "),
        ("d.jsonl.bz2", bz2.compress(JSONL)[:-20], r"d\.jsonl\.bz2 ends too early: "),
        ("d.jsonl.bz2", b"BZx" + bz2.compress(JSONL), r"d\.jsonl\.bz2 cannot be read"),
        ("d.jsonl.xz", lzma.compress(JSONL)[:-20], r"d\.jsonl\.xz ends too early"),
        ("d.jsonl.xz", lzma.compress(JSONL) + b"more than a magic number", r"d\.jsonl\.xz cannot be read"),
        ("d.jsonl.bz2", bz2.compress(JSONL) + b"more than a magic number", r"d\.jsonl\.bz2 cannot be read"),
        ("d.jsonl", b'[{"text": "a"}]\n{"text": "b"}\n', r"line 1: the record is a list, not an object"),
        ("d.jsonl.zst", zstandard.ZstdCompressor().compress(JSONL)[:-9], r"d\.jsonl\.zst ends too early"),
        ("d.parquet", b"PAR1 not really", "cannot be read as Parquet"),
        ("d.parquet.gz", b"x", r"Parquet file inside \.gz: decompress it"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, name, content, says):
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=says):
        read(path)


def test_streams_follow_one_another_in_a_file_with_padding_between_those_of_xz(tmp_path):
    for suffix, compress in COMPRESS.items():
        between = bytes(8) if suffix == ".xz" else b""
        path = write(tmp_path, f"d.jsonl{suffix}", compress(JSONL[:9]) + between + compress(JSONL[9:]) + between)
        assert [row for _, row in read(path)] == ROWS


def test_nulls_in_rows_are_fields_of_other_rows_and_nulls_in_json_are_values(tmp_path):
    row = {"messages": [{"a": 1, "b": None}], "c": None}
    path = write_parquet(tmp_path, {"messages": [row["messages"], [{"a": 1, "b": "c"}]], "c": [None, "d"]})
    assert read(path, columns=("messages", "c"))[0][1] == {"messages": [{"a": 1}], "c": None}
    assert read(write(tmp_path, "d.jsonl", json.dumps(row).encode() + b"\n{}"))[0][1] == row


def test_a_block_has_the_digest_of_its_records_wherever_the_file_lies(tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write(tmp_path, "d.jsonl", JSONL), write(tmp_path / "other", "e.jsonl", JSONL)
    assert blocks_of(first)[0].digest() == blocks_of(second)[0].digest()
    assert blocks_of(first)[0].digest() != blocks_of(write(tmp_path, "f.jsonl", JSONL + b"\n"))[0].digest()
    assert blocks_of(first, "text")[0].digest() != blocks_of(first)[0].digest()


def test_a_line_longer_than_a_block_comes_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 10)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 4)
    stream = io.BytesIO()
    for size in (500, 1, 300):
        stream.write(json.dumps({"text": "x" * size}).encode() + b"\n")
    path = write(tmp_path, "d.jsonl", stream.getvalue())
    assert [len(record["text"]) for _, record in read(path)] == [500, 1, 300]


@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), min_size=1, max_size=30),
    block_bytes=st.integers(1, 60),
    read_bytes=st.integers(1, 40),
    unit=st.sampled_from(["line", "paragraph"]),
)
def test_blocks_put_together_are_the_file_and_do_not_depend_on_how_it_is_read(
    tmp_path_factory, lines, block_bytes, read_bytes, unit
):
    content = b"x" + b"\n".join(lines)
    path = write(tmp_path_factory.mktemp("blocks"), "d.txt", content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inputs, "BLOCK_BYTES", block_bytes)
        patched.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", read_bytes)
        blocks = blocks_of(path, unit=unit)
        patched.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 1 << 20)
        assert [block.payload for block in blocks_of(path, unit=unit)] == [block.payload for block in blocks]
    assert b"".join(block.payload for block in blocks) == content
    before = b""
    for block in blocks:
        assert block.first == before.count(b"\n") + 1
        assert before == b"" or before.endswith(b"\n")
        before += block.payload


TABLE = [{"text": 'a "b", c\n\nd', "n": "1"}, {"text": "", "n": "é"}, {"text": "x" * 200_000, "n": " 2 "}]


def as_table(rows, delimiter, **form):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, **form)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_arrow(rows, *, stream=True):
    sink, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


WRITERS = {
    "d.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows, indent=3, ensure_ascii=False).encode() + b"\n",
    "wrapped.json": lambda rows: json.dumps({"version": "1, {", "data": rows, "n": 3}).encode(),
    "pretty-wrapped.json": lambda rows: json.dumps({"é": rows}, indent=1, ensure_ascii=False).encode(),
    "d.csv": lambda rows: as_table(rows, ","),
    "semicolons.csv": lambda rows: as_table([{"n": "1", **row} for row in rows], ";"),
    "told.csv": lambda rows: b"sep=;\r\n" + as_table([{"n": "1", **row} for row in rows], ";"),
    "bars.tsv": lambda rows: as_table([{"n": "1", **row} for row in rows], "|"),
    "quoted.csv": lambda rows: b"\xef\xbb\xbf" + as_table(rows, ",", quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "d.tsv": lambda rows: as_table(rows, "\t"),
    "stream.arrow": as_arrow,
    "file.arrow": lambda rows: as_arrow(rows, stream=False),
}


@pytest.mark.parametrize(("block_bytes", "read_bytes"), [(1, 5), (100, 64), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("name", WRITERS)
def test_every_form_of_a_table_gives_its_rows(tmp_path, monkeypatch, name, block_bytes, read_bytes):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", read_bytes)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.table_files._ROWS", 4)
    path = write(tmp_path, name, WRITERS[name](ROWS))
    unit = "item" if name.endswith("json") else "row"
    found = [(where, {key: text for key, text in row.items() if key != "n"}) for where, row in read(path)]
    assert found == [(f"{path}, {unit} {number}", row) for number, row in enumerate(ROWS, 1)]
    blocks = blocks_of(path, columns=("text",))
    assert (len(blocks) > 5) == (block_bytes < 1000)
    upto = [block.upto_bytes for block in blocks]
    assert upto == sorted(upto)
    behind = len(', "n": 3}') if name == "wrapped.json" else 0
    assert path.stat().st_size - 8 - behind <= upto[-1] <= path.stat().st_size


@pytest.mark.parametrize("name", WRITERS)
def test_values_of_tables_come_whole_however_long_or_odd(tmp_path, monkeypatch, name):
    path = write(tmp_path, name, WRITERS[name](TABLE))
    assert [row for _, row in read(path, columns=("text", "n"))] == TABLE
    if not name.endswith("arrow"):
        packed = write(tmp_path, f"{name}.gz", gzip.compress(WRITERS[name](TABLE)))
        assert [row for _, row in read(packed)] == TABLE


@given(st.data())
def test_items_of_an_array_do_not_depend_on_how_it_is_read(data):
    values = st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
    rows = data.draw(st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5))
    indent, ascii_only = data.draw(st.sampled_from([None, 1])), data.draw(st.booleans())
    content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    size = data.draw(st.integers(1, 40))
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    items = [json.loads(item) for item, _ in array_items(Path("d.json"), io.BytesIO(), lambda _: iter(pieces))]
    assert items == rows


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.json", b'[{"text": "a"}, {"text": "b"', "item 2: the file ends within it"),
        ("d.json", b'[{"text": "a"},', "item 2: the file ends within it"),
        ("d.json", b'[{"text": "a"},]', "item 2: the array ends after a comma"),
        ("d.json", b'[{"text": "a"}, {"text": "b"} , \n ]', "item 3: the array ends after a comma"),
        ("d.json", b"[", "item 1: the file ends within it"),
        ("d.json", b'[{"text": "a"} {"text": "b"}]', "item 2: a comma is missing before it"),
        ("d.json", b'[{"text": "a"}] {"text": "b"}', "item 2: text follows the array"),
        ("d.json", b'[{"text": "a"}, {"text": \xff"b", "and": "much more"}]', "near byte 26: not UTF-8"),
        ("d.json", b'[{"text": "a"}, {text: "b", "and": "much more text"}]', "item 2: not JSON"),
        ("d.json", b'[{"text": "a"}, 3]', "item 2: the record is a number, not an object: make each item an object"),
        ("d.json", b"[]", "is empty"),
        ("d.json", b'{"data": [{"text": "a"}, {"te', "item 2: the file ends within it"),
        ("d.json", b'{"data": [{"text": "a"}], "n":', "item 2: the object does not end behind the records in 'data'"),
        ("d.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "'test' behind the records holds records"),
        ("d.json", b'{"data": [%s{}], "text": "b"}' % (b'{"text": "a"}, ' * 30_000), "'text' behind the records is a"),
        ("d.json", b'[["a", "b"]]', "item 1: the record is a list, not an object: make each item an object"),
        ("d.json", '{"text": "a"}'.encode("utf-16"), "is no UTF-8 but UTF-16 or UTF-32: convert it, for example iconv"),
        ("d.csv", "text,n\na,1\n".encode("utf-16-le"), "is no UTF-8 but UTF-16 or UTF-32: convert it"),
        ("d.txt", "text".encode("utf-32"), "is no UTF-8 but UTF-16 or UTF-32: convert it"),
        ("d.jsonl", gzip.compress(JSONL), "is no text but compressed by gzip: rename it to .gz"),
        ("d.jsonl.gz", gzip.compress(gzip.compress(JSONL)), "is no text but compressed by gzip"),
        ("d.xlsx", b"PK\x03\x04 and more", "is no text but a zip archive or a workbook of Excel: unpack it, or save"),
        ("d.json", b"PAR1 and more", "is no text but Parquet: rename it to .parquet"),
        ("d.csv", b"text,n\na,1,2\n", r"row 1 \(up to line 2\): it has 3 values for the 2 columns 'text', 'n': quote"),
        (
            "d.csv",
            b"text,n\n\na\n",
            r"row 1 \(up to line 3\): it has 1 values for the 2 columns 'text', 'n': write the missing",
        ),
        ("d.csv", b'text,n\na,1\n"b,2\n', "row 2: not read as a table"),
        ("d.csv", b"text,n\ra,1\r", "row 1: not read as a table .*: end lines by LF, not by CR alone"),
        ("d.csv", b"text,text\na,1\n", "its first row must name each column once, but is 'text', 'text'"),
        ("d.csv", b"text,\na,1\n", "its first row must name each column once"),
        ("d.csv", b"text,n\n", "has no rows below the names of its columns"),
        ("d.arrow", b"ARROW not really", "cannot be read as Arrow"),
        ("d.arrow", as_arrow([{"body": "a"}]), "has the columns 'body' but none of 'text'"),
        ("d.arrow", as_arrow([{"text": "a"}] * 99)[:-600], "cannot be read as Arrow"),
    ],
)
def test_damaged_tables_are_refused_by_place(tmp_path, name, content, says):
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=re.escape(str(path)) + r".*" + says):
        list(all_records(find_inputs([path]), text_key="text", columns=("text",)))


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    "content",
    [
        json.dumps([CHAT, CHAT]),
        json.dumps([CHAT, CHAT], indent=1),
        f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}\n",
        json.dumps({"conversations": [CHAT, CHAT]}),
        json.dumps({"examples": [{"messages": CHAT}, {"messages": CHAT}]}),
        json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT}),
        '{"messages": ' + json.dumps(CHAT) + "}" + " " * 300_000 + '\n{"messages": ' + json.dumps(CHAT) + "}",
    ],
)
def test_chats_are_read_however_a_file_of_json_holds_them(tmp_path, content, suffix):
    path = write(tmp_path, f"d.json{suffix}", COMPRESS[suffix](content.encode()))
    assert [record for _, record in read(path)] == [{"messages": CHAT}] * 2


@pytest.mark.parametrize(
    ("record", "wrapper"),
    [
        ({"messages": CHAT}, ""),
        ({"conversations": [{"from": "human", "value": "a"}]}, ""),
        ({"tools": [{"name": "a"}], "messages": CHAT}, ""),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, ""),
        ({"chosen": CHAT, "rejected": CHAT}, ""),
        ({"history": [["a", "b"]], "instruction": "a", "output": "b"}, ""),
        ({"data": [{"a": 1}], "text": "b"}, ""),
        ({"meta": [{"a": 1}], "body": "b"}, ""),
        ({"data": [1, 2]}, ""),
        ({"data": {"train": [{"text": "a"}]}}, ""),
        ({"meta": {"a": [{}]}, "rows": [{"text": "a"}]}, "rows"),
        ({"mine": [{"text": "a"}]}, "mine"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_is_a_record_unless_one_member_holds_records(tmp_path, record, wrapper, indent):
    path = write(tmp_path, "d.json", json.dumps(record, indent=indent).encode())
    (file,) = find_inputs([path])
    assert (file.wrapper, file.form) == (wrapper, "json" if wrapper else "jsonl")


def save_to_disk(folder, shards, **state):
    """What `save_to_disk` of datasets 4 writes; a shard is a list of rows."""
    names = [f"data-{place:05}-of-{len(shards):05}.arrow" for place in range(len(shards))]
    folder.mkdir(parents=True)
    for name, rows in zip(names, shards, strict=True):
        write(folder, name, as_arrow(rows))
    described = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    write(folder, "state.json", json.dumps(described).encode())
    write(folder, "dataset_info.json", b"{}")


def test_a_folder_that_save_to_disk_wrote_is_its_arrow_files(tmp_path):
    save_to_disk(tmp_path / "one", [ROWS[:20], ROWS[20:30], ROWS[30:]])
    write(tmp_path / "one", "cache-0.arrow", b"of another time")
    assert [row for file in find_inputs([tmp_path / "one"]) for _, row in read(file.path)] == ROWS
    save_to_disk(tmp_path / "dict" / "train", [ROWS])
    write(tmp_path / "dict", "dataset_dict.json", b'{"splits": ["train"]}')
    assert [file.path.parent.name for file in find_inputs([tmp_path / "dict"])] == ["train"]
    write(tmp_path / "dict", "dataset_dict.json", b'{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"holds the splits train, test: name the one to train on: .*dict/train, "):
        find_inputs([tmp_path / "dict"])
    save_to_disk(tmp_path / "selected", [ROWS], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match=r"save it again after flatten_indices\(\)"):
        find_inputs([tmp_path / "selected"])


def test_a_folder_is_its_parquet_files_of_one_split(tmp_path):
    for name in ("b/train-00001.parquet", "b/train-00000.parquet", ".cache/x.parquet", "a/0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path, {"text": ["x"]}, name)
    write(tmp_path, "README.md", b"words")
    names = [str(file.path.relative_to(tmp_path)) for file in find_inputs([tmp_path])]
    assert names == ["a/0.parquet", "b/train-00000.parquet", "b/train-00001.parquet"]
    write_parquet(tmp_path, {"text": ["x"]}, "b/test-00000.parquet")
    with pytest.raises(DataError, match=r"holds the splits test, train: name the files of one: .*test\*\.parquet', "):
        find_inputs([tmp_path])
    write(tmp_path, "state.json", b'{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(DataError, match=r"lists '\.\./other\.arrow', which lies outside"):
        find_inputs([tmp_path])
