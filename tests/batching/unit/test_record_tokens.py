"""Tokenization of records in several processes: in order, the same for any number, and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from dynapipe_ext.batching.packing.dynamicat import INFERENCE, PRETRAINING, SUPERVISED, Field, make_record
from dynapipe_ext.batching.packing.record_tokens import tokenize_records
from dynapipe_ext.errors import ConfigError, DataError, ExecutionError
from tests.support.limits import LIMIT_S

ROWS = [{"prompt": f"ask {i} " * (i % 7), "response": "x" * (i % 11 + 1)} for i in range(103)]
FIELDS = (Field("prompt", loss=False, max_length=9, cut="left"), Field("response", max_length=5))


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def children() -> list[Any]:
    return multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("chunk_records", [1, 10, 1000])
def test_features_are_those_of_each_record_in_order_for_any_number_of_workers(
    num_workers: int, chunk_records: int
) -> None:
    expected = [make_record({k: letters([v])[0] for k, v in row.items()}, FIELDS, start=[1], end=[2]) for row in ROWS]
    found = tokenize_records(
        iter(ROWS), letters, FIELDS, start=[1], end=[2], num_workers=num_workers, chunk_records=chunk_records
    )
    assert list(found) == expected
    assert not children()


def test_the_three_schemas_mask_what_carries_no_loss() -> None:
    rows = [{"prompt": "ab", "response": "c", "content": "def"}]
    masks = [next(iter(tokenize_records(rows, letters, fields)))["loss_mask"] for fields in (SUPERVISED, PRETRAINING)]
    assert masks == [[0, 0, 1], [1, 1, 1]]
    assert next(iter(tokenize_records(rows, letters, INFERENCE))) == {"input_ids": [97, 98], "loss_mask": [0, 0]}


def test_texts_are_encoded_in_other_processes() -> None:
    def who(texts: list[str]) -> list[list[int]]:
        return [[os.getpid()] for _ in texts]

    found = list(tokenize_records(ROWS, who, PRETRAINING_PROMPT, num_workers=2, chunk_records=5))
    pids = {feature["input_ids"][0] for feature in found}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


PRETRAINING_PROMPT = (Field("prompt"),)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"response": "a"}, r"record 57 cannot be tokenized \(it has response but no 'prompt'\): mend it or leave"),
        ({"prompt": None, "response": "a"}, r"record 57 .*its 'prompt' is of type NoneType, not a text"),
        ({"prompt": "bad", "response": "a"}, r"record 57 .*ValueError: no such word"),
    ],
)
def test_the_first_record_that_cannot_be_tokenized_is_named_after_all_before_it_were_given(
    num_workers: int, row: Any, says: str
) -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        if "bad" in texts:
            raise ValueError("no such word")
        return letters(texts)

    rows = [*ROWS[:57], row, *ROWS[58:80], row]
    features = tokenize_records(rows, encode, FIELDS, num_workers=num_workers, chunk_records=1)
    assert len(list(islice(features, 57))) == 57
    with pytest.raises(DataError, match=says):
        next(features)
    assert not children()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: tokenize_records(ROWS, letters, FIELDS, num_workers=-1), ConfigError, "num_workers is -1"),
        (lambda: tokenize_records(ROWS, letters, FIELDS, chunk_records=0), ConfigError, "chunk_records 0"),
        (lambda: tokenize_records(ROWS, letters, ()), ConfigError, "without fields"),
        (lambda: list(tokenize_records(ROWS, lambda t: [], FIELDS)), DataError, "record 0 .*0 lists of ids for 2"),
        (
            lambda: list(tokenize_records(ROWS, lambda t: {"input_ids": []}, FIELDS)),  # type: ignore[arg-type,return-value]
            DataError,
            "encode gave input_ids: have it return",
        ),
    ],
)
def test_what_cannot_work_is_refused(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_a_chunk_that_fails_only_together_is_named_by_its_records() -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        if len(texts) > 2:
            raise MemoryError("too many")
        return letters(texts)

    with pytest.raises(DataError, match=r"records 0 to 9 cannot be tokenized together \(MemoryError: too many\)"):
        list(tokenize_records(ROWS, encode, FIELDS, chunk_records=10))


def test_a_worker_that_dies_is_an_error_and_the_others_end() -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        if any("ask 40" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return letters(texts)

    says = r"a tokenizing process ended \(exit code -9\) at the chunk from record 40 on"
    with pytest.raises(ExecutionError, match=says):
        list(tokenize_records(ROWS, encode, FIELDS, num_workers=2, chunk_records=5))
    assert not children()


def test_records_are_read_as_they_are_needed_and_an_iterator_left_alone_ends_its_workers() -> None:
    read = []

    def rows() -> Iterator[dict[str, str]]:
        for number in range(10**9):
            read.append(number)
            yield {"prompt": "a", "response": "b"}

    found = tokenize_records(rows(), letters, FIELDS, num_workers=2, chunk_records=3)
    next(found)
    assert len(read) <= 3 * (4 * 2 + 1)
    assert len(children()) == 2
    del found
    gc.collect()
    assert not children()


def test_workers_of_a_killed_process_end_too(wait_until_gone: Callable[[int], None]) -> None:
    script = (
        "import os, itertools\n"
        "from dynapipe_ext.batching.packing.dynamicat import Field\n"
        "from dynapipe_ext.batching.packing.record_tokens import tokenize_records\n"
        "rows = ({'text': 'a'} for _ in itertools.count())\n"
        "who = lambda texts: [[os.getpid()] for _ in texts]\n"
        "found = tokenize_records(rows, who, [Field('text')], num_workers=2, chunk_records=1)\n"
        "pids = set()\n"
        "while len(pids) < 2: pids |= set(next(found)['input_ids'])\n"
        "print(*pids, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
        process.wait(LIMIT_S)
    assert len(pids) == 2
    for pid in pids:
        wait_until_gone(pid)


def test_a_real_tokenizer_gives_the_same_in_several_processes() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator([row["prompt"] for row in ROWS], trainer)

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    alone = list(tokenize_records(ROWS, encode, FIELDS))
    assert list(tokenize_records(ROWS, encode, FIELDS, num_workers=2, chunk_records=7)) == alone
