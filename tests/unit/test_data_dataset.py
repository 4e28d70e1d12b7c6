import itertools
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.data import dataset as dataset_module
from dynapipe_ext.data.dataset import TokenDataset, fingerprint_of_source, prepare
from dynapipe_ext.data.examples import Example, generate_examples
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.limits import LIMIT_S

BYTES = {"tokenizer": "bytes", "max_seq_len": 4096, "truncate": False}
BPE = {"tokenizer": "bpe", "vocab_size": 400, "max_seq_len": 4096, "truncate": False}
EOS, SEPARATOR = 256, 257


def made_up(num_samples=60):
    return generate_examples(num_samples=num_samples, seed=2)


def given(*pairs):
    return lambda: iter([Example("given", prompt, target) for prompt, target in pairs])


def test_a_sample_is_input_separator_target_eos(tmp_path):
    data = prepare(given(("ab", "cd"), ("", "xyz"), ("q", "")), tmp_path / "d", **BYTES)
    assert [data[i].tokens.tolist() for i in range(3)] == [
        [97, 98, SEPARATOR, 99, 100, EOS],
        [SEPARATOR, 120, 121, 122, EOS],
        [113, SEPARATOR, EOS],
    ]
    assert [data[i].first_target for i in range(3)] == [3, 1, 2]
    assert data.lengths.tolist() == [[5, 0, 3], [4, 0, 4], [2, 0, 1]]
    assert data[0].tokens.dtype == np.int64


@pytest.mark.parametrize("settings", [BYTES, BPE])
def test_every_text_comes_back_and_lengths_agree_with_samples(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(dataset_module, "_BATCH_EXAMPLES", 7)
    data = prepare(made_up, tmp_path / "d", **settings)
    tokenizer = data.tokenizer()
    assert len(data) == 60
    assert data.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(as_length_array(data.lengths), data.lengths)
    for i, example in enumerate(made_up()):
        sample = data[i]
        assert tokenizer.decode(sample.tokens[: sample.first_target - 1].tolist()) == example.input
        assert tokenizer.decode(sample.tokens[sample.first_target :].tolist()) == example.target
        assert sample.tokens[sample.first_target - 1] == tokenizer.separator
        assert sample.tokens[-1] == tokenizer.eos
        assert data.lengths[i].tolist() == [sample.positions, 0, sample.target]
        assert data.tasks[data.task_ids[i]] == example.task


def test_the_bounds_of_memory_do_not_change_what_is_written(tmp_path, monkeypatch):
    first = prepare(made_up, tmp_path / "a", **BPE)
    monkeypatch.setattr(dataset_module, "_BATCH_CHARACTERS", 50)
    second = prepare(made_up, tmp_path / "b", **BPE)
    assert first.fingerprint == second.fingerprint
    for name in ("tokens.bin", "offsets.npy", "first_target.npy", "lengths.npy", "task_ids.npy", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_fingerprint_sees_a_change_of_one_token_border_or_tokenizer(tmp_path):
    variants = [given(("ab", "c")), given(("a", "bc")), given(("ab", "d")), given(("ab", "c"), ("ab", "c"))]
    prints = [prepare(v, tmp_path / str(i), **BYTES).fingerprint for i, v in enumerate(variants)]
    prints.append(prepare(variants[0], tmp_path / "bpe", **(BPE | {"vocab_size": 258})).fingerprint)
    assert len(set(prints)) == 5


def test_the_fingerprint_sees_borders_that_truncation_hides_from_the_tokens(tmp_path):
    settings = BYTES | {"truncate": True}
    first = prepare(given(("", "abcX"), ("d", "e")), tmp_path / "a", **(settings | {"max_seq_len": 3}))
    second = prepare(given(("", "abcdX"), ("", "e")), tmp_path / "c", **(settings | {"max_seq_len": 4}))
    assert first.tokens.tolist() == [SEPARATOR, *b"abc", *b"d", SEPARATOR, *b"e", EOS]
    assert second.tokens.tolist() == [SEPARATOR, *b"abcd", SEPARATOR, *b"e", EOS]
    assert first.fingerprint != second.fingerprint


def test_the_fingerprint_sees_the_tokenizer(tmp_path, monkeypatch):
    first = prepare(given(("a", "b")), tmp_path / "a", **BYTES)
    monkeypatch.setattr(dataset_module.BytesTokenizer, "as_json", lambda self: '{"kind": "other"}')
    assert prepare(given(("a", "b")), tmp_path / "b", **BYTES).fingerprint != first.fingerprint


def test_large_vocabularies_take_four_bytes_a_token(tmp_path, monkeypatch):
    class Wide(dataset_module.BytesTokenizer):
        vocab_size = 70_002
        separator = 70_001
        eos = 70_000

    monkeypatch.setattr(dataset_module, "BytesTokenizer", Wide)
    data = prepare(given(("a", "b")), tmp_path / "d", **BYTES)
    assert data[0].tokens.tolist() == [97, 70_001, 98, 70_000]
    assert (tmp_path / "d" / "tokens.bin").stat().st_size == 16
    monkeypatch.undo()
    prepare(given(("a", "b")), tmp_path / "small", **BYTES)
    assert (tmp_path / "small" / "tokens.bin").stat().st_size == 8


def test_a_sample_over_the_bound_is_refused_by_name(tmp_path):
    with pytest.raises(DataError) as error:
        prepare(given(("a", "b"), ("abcd", "ef")), tmp_path / "d", **(BYTES | {"max_seq_len": 6}))
    assert str(error.value) == (
        "sample 1 (task 'given') has 7 tokens but max_seq_len is 6: pass --truncate or raise max_seq_len to at least 7"
    )
    assert list(tmp_path.iterdir()) == []
    assert len(prepare(given(("a", "b"), ("abcd", "ef")), tmp_path / "d", **(BYTES | {"max_seq_len": 7}))) == 2


def test_truncation_cuts_the_input_from_its_left_and_then_the_target_from_its_end(tmp_path):
    pairs = [("a", "b"), ("abcd", "ef"), ("abcd", "efghi"), ("abcd", "efghijkl"), ("", "efghijkl")]
    data = prepare(given(*pairs), tmp_path / "d", **(BYTES | {"max_seq_len": 6, "truncate": True}))
    as_text = [
        "".join({EOS: "$", SEPARATOR: "|"}.get(t, chr(t)) for t in data[i].tokens.tolist()) for i in range(len(data))
    ]
    assert as_text == ["a|b$", "bcd|ef$", "|efghi$", "|efghij", "|efghij"]
    assert [data[i].first_target for i in range(5)] == [2, 4, 1, 1, 1]
    assert data.lengths[:, 0].tolist() == [3, 6, 6, 6, 6]
    assert data.num_truncated == 4


def test_the_same_source_and_settings_are_reused_and_others_are_not(tmp_path):
    calls = itertools.count()

    def source():
        next(calls)
        return made_up()

    folder = tmp_path / "d"
    first = prepare(source, folder, source_fingerprint="one", **BYTES)
    assert prepare(source, folder, source_fingerprint="one", vocab_size=900, **BYTES).fingerprint == first.fingerprint
    assert next(calls) == 1  # a bytes tokenizer has no use for a vocabulary size
    prepare(source, folder, source_fingerprint="two", **BYTES)
    assert next(calls) == 3
    prepare(source, folder, source_fingerprint="two", **(BYTES | {"max_seq_len": 5000}))
    assert next(calls) == 5
    prepare(source, folder, **(BYTES | {"max_seq_len": 5000}))
    assert next(calls) == 7  # an unknown source is never taken for the same
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_damaged_data_is_refused_when_opened_and_prepared_again(tmp_path):
    folder = tmp_path / "d"
    data = prepare(made_up, folder, source_fingerprint="one", **BYTES)
    for name, damage in [
        ("tokens.bin", lambda b: b[:-2]),
        ("offsets.npy", lambda b: b[:-8]),
        ("lengths.npy", lambda b: b""),
        ("meta.json", lambda b: b[:20]),
        ("meta.json", lambda b: b.replace(b"dynapipe-tokens/1", b"dynapipe-tokens/0")),
        ("meta.json", lambda b: b.replace(b'"num_samples": 60', b'"num_samples": 61')),
    ]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(content))
        with pytest.raises(DataError, match="prepare"):
            TokenDataset.open(folder)
        assert prepare(made_up, folder, source_fingerprint="one", **BYTES).fingerprint == data.fingerprint


def test_a_failed_prepare_leaves_the_older_data_and_nothing_else(tmp_path):
    folder = tmp_path / "d"
    before = prepare(made_up, folder, **BYTES).fingerprint

    def broken():
        yield from made_up()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(broken, folder, **BYTES)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert TokenDataset.open(folder).fingerprint == before


def test_a_killed_prepare_leaves_nothing_that_looks_whole(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from dynapipe_ext.data.dataset import prepare\n"
        "from dynapipe_ext.data.examples import generate_examples\n"
        "def source():\n"
        "    yield from generate_examples(num_samples=3000, seed=0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(source, sys.argv[1], tokenizer='bytes', max_seq_len=4096, truncate=True, source_fingerprint='x')\n"
    )
    folder = tmp_path / "d"
    killed = subprocess.run([sys.executable, "-c", program, folder], timeout=LIMIT_S, env={"PATH": ""}, check=False)
    assert killed.returncode == -9
    assert not folder.exists()
    assert not list(tmp_path.rglob("meta.json"))
    assert len(prepare(made_up, folder, source_fingerprint="x", **BYTES)) == 60


def test_an_open_dataset_survives_its_replacement(tmp_path):
    old = prepare(given(("a", "old")), tmp_path / "d", **BYTES)
    prepare(given(("a", "new one")), tmp_path / "d", **BYTES)
    assert old.tokenizer().decode(old[0].tokens.tolist()) == "aold"
    assert old.lengths.tolist() == [[5, 0, 4]]


def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="exists and is not prepared data"):
        prepare(made_up, tmp_path, **BYTES)
    with pytest.raises(DataError, match="exists and is not prepared data"):
        prepare(made_up, tmp_path / "notes.txt", **BYTES)
    (tmp_path / "empty").mkdir()
    assert len(prepare(made_up, tmp_path / "empty", **BYTES)) == 60
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_progress_counts_the_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "_BATCH_EXAMPLES", 25)
    seen = []
    prepare(made_up, tmp_path / "d", progress=seen.append, **BYTES)
    assert seen == [25, 50, 60]


def test_a_pickled_dataset_carries_its_place_and_not_its_tokens(tmp_path):
    data = prepare(lambda: made_up(500), tmp_path / "d", **BYTES)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[3].tokens.tolist() == data[3].tokens.tolist()


def test_an_index_outside_is_an_index_error_so_that_iteration_ends(tmp_path):
    data = prepare(made_up, tmp_path / "d", **BYTES)
    assert len(list(data)) == 60
    for index in (-1, 60):
        with pytest.raises(IndexError, match=f"sample {index} is outside of the 60 samples"):
            data[index]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ConfigError, {"tokenizer": "words"}, "tokenizer is 'words': choose"),
        (ConfigError, {"tokenizer": "bpe"}, "needs a vocab_size"),
        (ConfigError, {"max_seq_len": 0}, "max_seq_len is 0 but must be at least 1"),
        (ConfigError, {"tokenizer": "bpe", "vocab_size": 10}, "vocab_size is 10 but"),
        (DataError, {"examples": given()}, "no samples"),
        (DataError, {"examples": given(("a", "b"), ("", ""))}, r"sample 1 \(task 'given'\) is empty"),
    ],
)
def test_settings_and_examples_that_cannot_work_are_refused(tmp_path, error, changes, message):
    with pytest.raises(error, match=message):
        prepare(directory=tmp_path / "d", **({"examples": made_up} | BYTES | changes))
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_refused_when_opened(tmp_path):
    with pytest.raises(DataError, match="holds no prepared data"):
        TokenDataset.open(tmp_path / "none")


def test_tokens_that_are_not_what_was_prepared_are_noticed_byte_by_byte(tmp_path):
    folder = tmp_path / "d"
    prepare(lambda: list(made_up())[:2], folder, **BYTES).verify()
    for name in ("tokens.bin", "offsets.npy", "first_target.npy", "task_ids.npy", "lengths.npy"):
        content = (folder / name).read_bytes()
        for place in range(128 if name.endswith(".npy") else 0, len(content)):
            (folder / name).write_bytes(content[:place] + bytes([255 - content[place]]) + content[place + 1 :])
            with pytest.raises(DataError, match=r"damaged|should hold"):
                TokenDataset.open(folder).verify()
        (folder / name).write_bytes(content)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["samples_fingerprint"]  # as older versions wrote it
    (folder / "meta.json").write_text(json.dumps(meta))
    TokenDataset.open(folder).verify()
    (folder / "meta.json").write_text(json.dumps(meta | {"fingerprint": "0" * 64}))
    with pytest.raises(DataError, match="its tokens are not those that were prepared"):
        TokenDataset.open(folder).verify()


def test_a_file_of_other_content_has_another_fingerprint_though_its_size_and_time_are_kept(tmp_path):
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    first = fingerprint_of_source(path)
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    second = fingerprint_of_source(path)
    other.write_text("six")
    os.utime(other, ns=(1, 1))
    other.rename(path)
    assert len({first, second, fingerprint_of_source(path)}) == 3


def test_the_fingerprint_of_a_file_changes_with_its_size_time_and_path(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    prints = [fingerprint_of_source(path)]
    assert fingerprint_of_source(str(path)) == prints[0]
    os.utime(path, ns=(1, 2))
    prints.append(fingerprint_of_source(path))
    path.write_text("three")
    os.utime(path, ns=(1, 2))
    prints.append(fingerprint_of_source(path))
    path.rename(tmp_path / "b.jsonl")
    prints.append(fingerprint_of_source(tmp_path / "b.jsonl"))
    assert len(set(prints)) == 4
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint_of_source(path)
    assert fingerprint_of_source({"a": 1, "b": 2}) == fingerprint_of_source({"b": 2, "a": 1})
    assert fingerprint_of_source({"a": 1}) != fingerprint_of_source({"a": 2})


def test_meta_says_what_was_done(tmp_path):
    prepare(
        given(("abcd", "e")), tmp_path / "d", source_fingerprint="s", **(BYTES | {"max_seq_len": 4, "truncate": True})
    )
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    assert meta["format"] == "dynapipe-tokens/1"
    assert (meta["num_samples"], meta["num_tokens"], meta["num_truncated"]) == (1, 5, 1)
    assert meta["source"] == "s"
    assert meta["settings"] == {"tokenizer": "bytes", "vocab_size": None, "max_seq_len": 4, "truncate": True}
