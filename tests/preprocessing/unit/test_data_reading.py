import gzip
import json
import lzma
import os
import random
import re
import tracemalloc

import pytest
import zstandard

from dynapipe_ext.data.examples import Example
from dynapipe_ext.data.preprocessing import compressed, inputs
from dynapipe_ext.data.preprocessing import encoding as reading
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.record_forms import RecordFields, chat_of
from dynapipe_ext.errors import DataError

LINES = b'{"input": "2 + 3", "target": "5", "task": "sum"}\n{"text": "h\xc3\xa9llo"}\n'
EXAMPLES = [Example("sum", "2 + 3", "5"), Example("unnamed", "", "héllo")]
COMPRESS = {
    "": lambda b: b,
    ".gz": gzip.compress,
    ".xz": lambda b: lzma.compress(b, preset=0),
    ".zst": lambda b: zstandard.ZstdCompressor().compress(b),
}


def written(tmp_path, content, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def read_examples(path):
    return reading.read_examples(find_inputs([path]), RecordFields())


def refusal(path):
    with pytest.raises(DataError) as error:
        list(read_examples(path))
    return str(error.value)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_plain_and_compressed_files_give_the_same_examples(tmp_path, suffix):
    assert list(read_examples(written(tmp_path, COMPRESS[suffix](LINES), f"d.jsonl{suffix}"))) == EXAMPLES


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_files_of_several_compressed_parts_are_read_to_the_end(tmp_path, suffix):
    content = COMPRESS[suffix](LINES) + COMPRESS[suffix](LINES)
    assert list(read_examples(written(tmp_path, content, f"d.jsonl{suffix}"))) == EXAMPLES * 2


def test_an_unknown_extension_is_read_as_plain_text(tmp_path):
    assert list(read_examples(written(tmp_path, LINES, "data.records"))) == EXAMPLES


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lines_do_not_depend_on_the_size_of_a_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr(compressed, "_READ_BYTES", block)
    path = written(tmp_path, b"\n" + LINES.replace(b"\n", b"\r\n") + b"\n \n" + LINES.rstrip())
    assert list(read_examples(path)) == EXAMPLES * 2


def test_a_byte_order_mark_is_skipped(tmp_path):
    assert list(read_examples(written(tmp_path, b"\xef\xbb\xbf" + LINES))) == EXAMPLES


def test_extra_fields_are_ignored_and_input_and_target_win_over_text(tmp_path):
    record = {"id": 3, "text": "all", "input": "a", "target": ""}
    assert list(read_examples(written(tmp_path, json.dumps(record).encode()))) == [Example("unnamed", "a", "")]


GOOD = '{"text": "x"}\n\n'  # a bad record after these is on line 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", ', "line 3, column 16: not JSON"),
        ("[1, 2]", "line 3: the record is a list, not an object"),
        ("null", "line 3: the record is a null, not an object"),
        ('{"input": "a"}', "line 3: the record lacks 'target' (it has 'input')"),
        ('{"output": "a"}', "line 3: the record lacks 'input' and 'target' (it has 'output')"),
        ('{"chosen": "a", "rejected": "b"}', "line 3: preference data: the record has a 'chosen'"),
        ("{}", "line 3: the record lacks 'input' and 'target' (it has no fields)"),
        ('{"input": "a", "target": 5}', "line 3: field 'target' is a number but must be a string"),
        ('{"input": null, "target": "b"}', "line 3: field 'input' is a null but must be a string"),
        ('{"text": ["b"]}', "line 3: field 'text' is a list but must be a string"),
        ('{"text": "b", "task": true}', "line 3: field 'task' is a boolean but must be a string"),
        (r'{"text": "a\ud83d"}', r"line 3: field 'text' holds half of a surrogate pair (\ud83d)"),
        ("[" * 100_000, "line 3: JSON that cannot be read"),
        ('{"text": ' + "9" * 5000 + "}", "line 3: JSON that cannot be read"),
    ],
)
def test_a_bad_record_is_refused_with_file_and_line(tmp_path, line, message):
    path = written(tmp_path, (GOOD + line + "\n" + GOOD).encode())
    assert refusal(path).startswith(f"{path}, {message}")


def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(tmp_path):
    path = written(tmp_path, GOOD.encode() + b'{"text": "h\xe9llo"}')
    assert refusal(path).startswith(f"{path}, line 3: byte 12 (0xe9) is not UTF-8")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path, suffix, content):
    path = written(tmp_path, COMPRESS[suffix](content), f"d.jsonl{suffix}")
    assert refusal(path).startswith(f"{path} is empty")


def test_a_file_of_no_bytes_is_refused_whatever_its_name(tmp_path):
    for suffix in COMPRESS:
        assert "is empty" in refusal(written(tmp_path, b"", f"d.jsonl{suffix}"))


def test_a_missing_file_and_a_folder_are_refused_at_the_call(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        read_examples(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="is a folder without Parquet files"):
        read_examples(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe or a device, but data are read several times"):
        read_examples(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe or a device"):
        find_inputs([tmp_path / "pipe"])


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_truncated_compressed_file_is_refused(tmp_path, suffix):
    content = b"".join(json.dumps({"text": f"record {i * i}"}).encode() + b"\n" for i in range(5000))
    whole = COMPRESS[suffix](content)
    for size in (len(whole) // 2, len(whole) - 1):
        path = written(tmp_path, whole[:size], f"d.jsonl{suffix}")
        assert re.search(r"ends too early( after line [1-9]\d*)?: copy", refusal(path)), refusal(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path, suffix):
    assert "cannot be read (" in refusal(written(tmp_path, LINES, f"d.jsonl{suffix}"))


def test_examples_before_a_bad_line_are_given_first(tmp_path):
    examples = read_examples(written(tmp_path, LINES + b"{"))
    assert [next(examples), next(examples)] == EXAMPLES
    with pytest.raises(DataError, match="line 3"):
        next(examples)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(compressed, "_READ_BYTES", 1 << 16)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 16)

    def peak_bytes(num_records):
        draw = random.Random(0)
        content = b"".join(b'{"text": "%s"}\n' % draw.randbytes(500).hex().encode() for _ in range(num_records))
        path = written(tmp_path, COMPRESS[suffix](content), f"d.jsonl{suffix}")
        tracemalloc.start()
        assert sum(1 for _ in read_examples(path)) == num_records
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(2_500) < peak_bytes(500) + (1 << 20)


def test_a_key_that_text_of_json_within_a_record_has_twice_is_refused_by_name():
    record = {"tools": '[{"a": 1, "a": 2}]', "messages": [{"role": "assistant", "content": "a"}]}
    with pytest.raises(DataError, match="field 'tools': an object has the key 'a' twice: keep one of the two"):
        chat_of(record, RecordFields(), "line 1")


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("d.jsonl", LINES + b'{"input": "a", "target": "b", "input": "c"}\n', "line 3: an object has the key 'input'"),
        ("d.json", b'[{"text": "a"},\n {"text": "b", "text": "c"}]', "item 2: an object has the key 'text'"),
        (
            "chat.jsonl",
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "x", "content": "b", "role": "assistant"}]}\n',
            "line 1: an object has the key 'role'",
        ),
    ],
)
def test_a_key_that_an_object_has_twice_is_refused_by_name(tmp_path, name, content, place):
    assert refusal(written(tmp_path, content, name)).endswith(f"{name}, {place} twice: keep one of the two")


def test_a_chat_whose_messages_are_text_of_json_is_that_chat():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat, text = (chat_of({"messages": one}, RecordFields(), "line 1") for one in (messages, json.dumps(messages)))
    assert chat == text
    with pytest.raises(DataError, match="line 1: field 'messages' is not JSON"):
        chat_of({"messages": "hello"}, RecordFields(), "line 1")
