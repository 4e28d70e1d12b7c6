"""Records of text fields as features with loss masks, tokenized in several processes, in order.

def encode(texts):  # a tokenizer of transformers; any function from texts to lists of ids will do
    return tokenizer(texts, add_special_tokens=False)["input_ids"]

features = list(tokenize_records(rows, encode, SUPERVISED, end=[tokenizer.eos_token_id], num_workers=8))
batches = limited([len(feature["input_ids"]) for feature in features], 12_000)
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from dynapipe_ext.batching.packing.dynamicat import Field, make_record
from dynapipe_ext.errors import ConfigError, DataError, ExecutionError

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
Feature = dict[str, list[int]]

_AHEAD = 4  # chunks a worker may be ahead of what was taken
_GRACE_S = 5.0  # for a worker to end by itself


def tokenize_records(
    records: Iterable[Mapping[str, str]],
    encode: Encode,
    fields: Sequence[Field],
    *,
    start: Sequence[int] = (),
    end: Sequence[int] = (),
    num_workers: int = 0,
    chunk_records: int = 256,
) -> Iterator[Feature]:
    """`dynamicat.record` of each record, its texts turned into ids by `encode`; the same for any `num_workers`.

    Records are read as they are needed, some chunks ahead. Workers are forks of this process, so that `encode` may be
    any function; 0 of them means none. They end with the iterator (exhausted, closed or collected) and with this
    process, however it ends.

    Raises DataError for the first record that cannot be tokenized, by its number; ExecutionError where a worker died.

    >>> fields = (Field("prompt", loss=False), Field("response"))
    >>> encode = lambda texts: [[ord(letter) for letter in text] for text in texts]
    >>> list(tokenize_records([{"prompt": "a", "response": "b"}], encode, fields, end=[0]))
    [{'input_ids': [97, 98, 0], 'loss_mask': [0, 1, 1]}]
    """
    if num_workers < 0 or chunk_records < 1:
        raise ConfigError(
            f"num_workers is {num_workers} and chunk_records {chunk_records}: at least 0 and 1 are possible"
        )
    if not fields:
        raise ConfigError("records without fields are empty: give SUPERVISED, PRETRAINING, INFERENCE or your own")
    return _tokenized(records, _Task(encode, tuple(fields), list(start), list(end)), num_workers, chunk_records)


def _tokenized(
    records: Iterable[Mapping[str, str]], task: _Task, num_workers: int, chunk_records: int
) -> Iterator[Feature]:
    chunks = _chunks(records, chunk_records)
    if not num_workers:
        for first, chunk in chunks:
            yield from _features(task.run(first, chunk) if chunk else [])
        return
    with _Workers(task, num_workers) as workers:
        done: dict[int, list[Feature] | str] = {}
        next_number = 0
        for number, (first, chunk) in enumerate(chunks):
            while workers.busy and (not chunk or not workers.idle or number - next_number >= _AHEAD * num_workers):
                done |= workers.collect()
                while next_number in done:
                    yield from _features(done.pop(next_number))
                    next_number += 1
            if chunk:
                workers.give(number, first, chunk)


def _chunks(records: Iterable[Mapping[str, str]], size: int) -> Iterator[tuple[int, list[Mapping[str, str]]]]:
    """(number of the first record, records); none at all, at last."""
    source, first = iter(records), 0
    while chunk := list(islice(source, size)):
        yield first, chunk
        first += len(chunk)
    yield first, []


def _features(result: list[Feature] | str) -> list[Feature]:
    if isinstance(result, str):
        raise DataError(result)
    return result


class _Task:
    """What every worker does with a chunk."""

    def __init__(self, encode: Encode, fields: tuple[Field, ...], start: list[int], end: list[int]) -> None:
        self.encode, self.fields, self.start, self.end = encode, fields, start, end

    def run(self, first: int, chunk: Sequence[Mapping[str, str]]) -> list[Feature] | str:
        """Features, or a message about the first record that has none."""
        try:
            return self._run(chunk)
        except Exception as error:  # noqa: BLE001  whatever `encode` raises is found again below, record by record
            whole = error
        for number, one in enumerate(chunk, first):
            try:
                self._run([one])
            except Exception as error:  # noqa: BLE001  the same
                reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
                return f"record {number} cannot be tokenized ({reason}): mend it or leave it out"
        last = first + len(chunk) - 1
        return f"records {first} to {last} cannot be tokenized together ({type(whole).__name__}: {whole})"

    def _run(self, chunk: Sequence[Mapping[str, str]]) -> list[Feature]:
        names = [field.name for field in self.fields]
        texts = []
        for one in chunk:
            for name in names:
                if name not in one:
                    raise DataError(f"it has {', '.join(sorted(one)) or 'no fields'} but no {name!r}")
                if not isinstance(one[name], str):
                    raise DataError(f"its {name!r} is of type {type(one[name]).__name__}, not a text")
                texts.append(one[name])
        ids_of_texts = self.encode(texts)
        if isinstance(ids_of_texts, Mapping):
            raise DataError(f"encode gave {', '.join(map(str, ids_of_texts))}: have it return the input_ids of these")
        encoded = [[int(token) for token in tokens] for tokens in ids_of_texts]
        if len(encoded) != len(texts):
            raise DataError(f"encode gave {len(encoded)} lists of ids for {len(texts)} texts")
        groups = (encoded[i : i + len(names)] for i in range(0, len(encoded), len(names)))
        return [
            make_record(dict(zip(names, group, strict=True)), self.fields, start=self.start, end=self.end)
            for group in groups
        ]


class _Workers:
    """Forked processes, each with a pipe of its own and at most one chunk at a time."""

    def __init__(self, task: _Task, num_workers: int) -> None:
        self._task, self._num_workers = task, num_workers
        self._processes: dict[Connection, Any] = {}
        self._at_work: dict[Connection, tuple[int, int]] = {}  # the chunk and its first record
        self._stack = ExitStack()

    def __enter__(self) -> _Workers:
        context = multiprocessing.get_context("fork")
        self._stack.callback(self._end)
        for _ in range(self._num_workers):
            ours, theirs = context.Pipe()
            # A fork holds copies of our ends: it closes them, so that all see the end of file when this process ends.
            process = context.Process(target=_work, args=(self._task, theirs, [*self._processes, ours]), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def idle(self) -> bool:
        return len(self._at_work) < len(self._processes)

    @property
    def busy(self) -> bool:
        return bool(self._at_work)

    def give(self, number: int, first: int, chunk: Sequence[Mapping[str, str]]) -> None:
        """A chunk for an idle worker, which is waiting for one: so neither side can block the other's pipe."""
        worker = next(worker for worker in self._processes if worker not in self._at_work)
        self._at_work[worker] = (number, first)
        try:
            worker.send((first, list(chunk)))
        except OSError:
            raise self._died(worker) from None

    def collect(self) -> dict[int, list[Feature] | str]:
        """Results of the workers that are done, of one at least."""
        results: dict[int, list[Feature] | str] = {}
        for worker in wait(list(self._at_work)):
            assert isinstance(worker, Connection)
            try:
                result = worker.recv()
            except (EOFError, OSError):
                raise self._died(worker) from None
            results[self._at_work.pop(worker)[0]] = result
        return results

    def _died(self, worker: Connection) -> ExecutionError:
        process, (_, first) = self._processes[worker], self._at_work[worker]
        process.join(_GRACE_S)
        return ExecutionError(
            f"a tokenizing process ended (exit code {process.exitcode}) at the chunk from record {first} on: look for"
            " its message above, or give fewer workers or smaller chunks if memory ran out"
        )

    def _end(self) -> None:
        for worker in self._processes:
            worker.close()
        for process in self._processes.values():
            process.terminate()  # they hold nothing worth waiting for
        for process in self._processes.values():
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _work(task: _Task, pipe: Connection, others: Sequence[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    try:
        while True:
            first, chunk = pipe.recv()
            pipe.send(task.run(first, chunk))
    except (EOFError, OSError):
        return
