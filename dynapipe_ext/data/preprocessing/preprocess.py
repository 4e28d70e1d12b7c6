"""Corpora to a dataset folder, or to Megatron's `.bin/.idx`: the same bytes for every number and kind of workers.

    files -> blocks -> workers (any order) -> results in order -> journal and streams -> arrays and names, all at once

Work in progress lies in `.NAME.preparing` beside the output. A run that was cut off goes on there: blocks whose input
and settings have the digests of the journal are kept, all after the first that has not are done again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.dataset import TokenDataset, is_prepared, move_into_place, refuse_other_content
from dynapipe_ext.data.indexed_dataset import bin_path, idx_path, lengths_path, write_index, write_lengths
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.encoding import (
    FIRST_TARGET,
    IS_TARGET,
    SENTENCES,
    SIZES,
    TASKS,
    TOKENS,
    EncodedBlock,
    EncodeSettings,
    stream_names,
    texts_of,
)
from dynapipe_ext.data.preprocessing.inputs import BlockStream, InputFile
from dynapipe_ext.data.preprocessing.journal import StreamJournal, unfinished
from dynapipe_ext.data.preprocessing.workers import InlineWorkers, Workers
from dynapipe_ext.data.token_file import TARGETS_FILE, TOKENS_FILE, seal
from dynapipe_ext.data.tokenizer import BpeTokenizer, train_tokenizer
from dynapipe_ext.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of the input files read and in all; samples and tokens written, kept ones included."""

    done_bytes: int
    total_bytes: int
    num_samples: int
    num_tokens: int
    num_kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOutcome:
    """What there is now. `num_kept_samples` were there from a run that was cut off; `reused`: nothing was to do."""

    outputs: tuple[Path, ...]
    num_samples: int
    num_tokens: int
    num_truncated: int
    num_skipped: int
    num_kept_samples: int = 0
    reused: bool = False


def preprocess(
    files: Sequence[InputFile],
    output: str | Path,
    *,
    settings: EncodeSettings,
    encoder: Encoder,
    workers: Workers | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> PreprocessOutcome:
    """Tokenize `files` into the folder `output`, or for Megatron into `OUTPUT_KEY_document.bin`, `.idx` and lengths.

    The output appears whole or not at all. `workers` encode (the calling process by default); they must have been made
    with the same settings and encoder, and are entered here. A folder that the same files (by path, size and time) and
    settings made is left as it is.

    Errors: ConfigError for settings that cannot work, or for an output that exists, without `overwrite`; DataError for
    input that cannot be used, naming file and line: what comes before it is kept; and for a folder that holds something
    else than data, which is never replaced.
    """
    check_settings(settings, encoder)
    place = Path(output)
    place = place.resolve() if place.is_symlink() else place  # what it points to is replaced, not the link
    if settings.target == "dataset":
        refuse_other_content(place)
    elif place.name in ("", ".."):
        raise ConfigError(f"{str(output)!r} is no prefix of file names: give one, for example my-gpt2")
    key = settings.digest(encoder)
    source = source_digest(files)
    work = place.with_name(f".{place.name}.preparing")
    if settings.target == "dataset" and (found := _reusable(place, key, source)):
        if unfinished(work, key):  # cut off after its very last step
            with StreamJournal(work, key, stream_names(settings)) as journal:
                journal.remove()
        return found
    _refuse_other(place, work, settings, key, overwrite)
    with StreamJournal(work, key, stream_names(settings)) as journal:
        done = _Pass(files, settings, journal, progress)
        done.encode(workers or InlineWorkers(settings, encoder))
        journal.finished()
        if settings.target == "dataset":
            outputs = _finish_dataset(place, journal, settings, encoder, done, source)
        else:
            outputs = _finish_megatron(place, journal, settings, encoder)
        journal.remove()
    return PreprocessOutcome(
        outputs=outputs,
        num_samples=done.totals["samples"],
        num_tokens=done.totals["tokens"],
        num_truncated=done.totals["truncated"],
        num_skipped=done.totals["skipped"],
        num_kept_samples=done.num_kept_samples,
    )


def check_settings(settings: EncodeSettings, encoder: Encoder) -> None:
    """Errors: ConfigError for settings that do not go together."""
    if settings.target == "megatron":
        if settings.max_seq_len is not None or settings.truncate or settings.tasks.bind:
            raise ConfigError(".bin/.idx holds whole documents: leave out --max-seq-len, --truncate and others' bounds")
        if not settings.keys or len(set(settings.keys)) < len(settings.keys):
            raise ConfigError(f"the keys are {list(settings.keys)}: give one or more, each once")
        for name in settings.keys:
            if "/" in name or name in ("", ".", ".."):
                raise ConfigError(f"the key {name!r} cannot be part of a file's name: rename the field")
    elif len(settings.keys) != 1:
        raise ConfigError(
            f"a dataset folder has one text a record but {len(settings.keys)} keys are given: give one, or a data set"
            " for each with --output-prefix"
        )
    if settings.append_eod and encoder.eos is None:
        raise ConfigError("the tokenizer does not say which token ends a text: name it with --eod-token")
    if settings.truncate and settings.max_seq_len is None and not settings.tasks.bind:
        raise ConfigError("--truncate cuts at --max-seq-len: give it, too")
    if settings.max_seq_len is not None and settings.max_seq_len < 1:
        raise ConfigError(f"--max-seq-len is {settings.max_seq_len} but must be at least 1")


def train_bpe(files: Sequence[InputFile], settings: EncodeSettings, vocab_size: int) -> BpeTokenizer:
    """This project's own byte-level BPE, trained on all texts of the files."""
    blocks = BlockStream(files, unit=settings.unit, columns=settings.columns)
    return train_tokenizer((text for block in blocks for text in texts_of(block, settings)), vocab_size)


def source_digest(files: Sequence[InputFile]) -> str:
    """sha256 that changes with the files: their paths, sizes and modification times."""
    described = [[str(file.path.resolve()), file.form, *_stamp(file.path)] for file in files]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def megatron_prefix(output: str | Path, key: str) -> Path:
    """`OUTPUT_KEY_document`, as Megatron's own tool names what it writes."""
    return Path(f"{output}_{key}_document")


class _Pass:
    """One pass over the blocks: those that the journal holds are kept, the others encoded and appended."""

    def __init__(
        self,
        files: Sequence[InputFile],
        settings: EncodeSettings,
        journal: StreamJournal,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._journal, self._progress = journal, progress
        self._blocks = BlockStream(files, unit=settings.unit, columns=settings.columns)
        sizes = [0, *itertools.accumulate(file.stored_bytes for file in files)]
        self._before_bytes = {str(file.path): before for file, before in zip(files, sizes, strict=False)}
        self._total_bytes = sizes[-1]
        self._tasks: dict[str, int] = {}
        self._file: str | None = None
        self._num_records = 0  # of that file
        self.file_sizes: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.num_kept_samples = self._num_kept_tokens = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def encode(self, workers: Workers) -> None:
        """Bring the journal to the end of the input."""
        if self._keep():
            with workers:
                for encoded in workers.run(self._blocks):
                    self._append(encoded)
        self._end_file()
        if self.totals["samples"] == 0:
            raise DataError("the input has no samples: give files with at least one record that is not empty")

    def _keep(self) -> bool:
        """Keep the entries whose blocks are still those of the input; whether blocks are left."""
        for place, entry in enumerate(self._journal.entries):
            block = next(self._blocks, None)
            if block is None or block.digest() != entry.block:
                self._journal.keep(place)
                break
            for task in entry.facts["tasks"]:
                self._tasks.setdefault(task, len(self._tasks))
            self.num_kept_samples += entry.facts["samples"]
            self._num_kept_tokens += entry.facts["tokens"]
            self._count(block.file, block.upto_bytes, entry.facts)
        else:
            block = next(self._blocks, None)
        if block is not None:
            self._blocks.put_back(block)
        return block is not None

    def _append(self, encoded: EncodedBlock) -> None:
        streams = encoded.streams
        new = [task for task in encoded.tasks if task not in self._tasks]
        for task in new:
            self._tasks[task] = len(self._tasks)
        if TASKS in streams and encoded.tasks:
            numbers = np.array([self._tasks[task] for task in encoded.tasks], "<i4")
            streams = streams | {TASKS: numbers[np.frombuffer(streams[TASKS], "<i4")].tobytes()}
        facts = {
            "samples": encoded.num_samples,
            "tokens": encoded.num_tokens,
            "truncated": encoded.num_truncated,
            "skipped": encoded.num_skipped,
            "tasks": new,
        }
        self._journal.append(encoded.digest, streams, facts)
        self._count(encoded.file, encoded.upto_bytes, facts)

    def _count(self, file: str, upto_bytes: int, facts: Mapping[str, Any]) -> None:
        if file != self._file:
            self._end_file()
            self._file, self._num_records = file, 0
        self._num_records += facts["samples"] + facts["skipped"]
        self.file_sizes[file] += facts["samples"]
        self.totals.update({name: facts[name] for name in ("samples", "tokens", "truncated", "skipped")})
        if self._progress is not None:
            self._progress(
                Progress(
                    self._before_bytes[file] + upto_bytes,
                    self._total_bytes,
                    self.totals["samples"],
                    self.totals["tokens"],
                    self._num_kept_tokens,
                )
            )

    def _end_file(self) -> None:
        if self._file is not None and self._num_records == 0:
            raise DataError(f"{self._file} is empty (it has no records): leave it out")


def _refuse_other(place: Path, work: Path, settings: EncodeSettings, key: str, overwrite: bool) -> None:
    """Errors: ConfigError for an output that is there, and that neither `overwrite` nor unfinished work claims."""
    if overwrite or unfinished(work, key):
        return
    if settings.target == "dataset":
        there = [place] if is_prepared(place) else []
    else:
        prefixes = [megatron_prefix(place, name) for name in settings.keys]
        there = [path for prefix in prefixes for path in (idx_path(prefix), bin_path(prefix)) if path.exists()]
    if there:
        raise ConfigError(f"{there[0]} exists, made from other files or settings: pass --overwrite or name another")


def _reusable(place: Path, key: str, source: str) -> PreprocessOutcome | None:
    """What is there, where the same files and settings made it."""
    try:
        dataset = TokenDataset.open(place)
    except DataError:
        return None
    meta = dataset.meta
    if meta.get("source") != source or meta.get("settings") != {"preprocess": key}:
        return None
    return PreprocessOutcome(
        outputs=(place,),
        num_samples=len(dataset),
        num_tokens=int(dataset.offsets[-1]),
        num_truncated=dataset.num_truncated,
        num_skipped=int(str(meta["num_skipped"])),
        reused=True,
    )


def _finish_dataset(
    place: Path, journal: StreamJournal, settings: EncodeSettings, encoder: Encoder, done: _Pass, source: str
) -> tuple[Path, ...]:
    whole = journal.folder / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    _same_file(journal.path(TOKENS), whole / TOKENS_FILE)
    if settings.template == "chat":
        _same_file(journal.path(IS_TARGET), whole / TARGETS_FILE)
    seal(
        whole,
        dtype=settings.dtype(encoder),
        sizes=_stream(journal, SIZES, "<i8"),
        first_target=_stream(journal, FIRST_TARGET, "<i4"),
        task_ids=_stream(journal, TASKS, "<i4"),
        tasks=done.tasks,
        tokenizer_json=encoder.as_json(),
        vocab_size=encoder.vocab_size,
        facts={
            "num_truncated": done.totals["truncated"],
            "num_skipped": done.totals["skipped"],
            "file_sizes": list(done.file_sizes.values()),
            "source": source,
            "records": {"template": settings.template, "pair": list(settings.pair or ()), "text": settings.keys[0]},
            "settings": {"preprocess": journal.key},
        },
    )
    move_into_place(whole, place)
    return (place,)


def _finish_megatron(
    place: Path, journal: StreamJournal, settings: EncodeSettings, encoder: Encoder
) -> tuple[Path, ...]:
    """The index files are put in place last: a data set without its index is not one."""
    prefixes = [megatron_prefix(place, key) for key in settings.keys]
    made: list[dict[Path, Path]] = []  # for each key what is ready, and where it goes: the index last
    for number, prefix in enumerate(prefixes):
        sizes = _stream(journal, f"{SIZES}-{number}", "<i8")
        index, lengths = journal.folder / f"{number}.idx", journal.folder / f"{number}.lengths.npy"
        tokens = journal.folder / f"{number}.tokens"
        documents = np.concatenate([[0], np.cumsum(_stream(journal, f"{SENTENCES}-{number}", "<i8"))])
        write_index(index, settings.dtype(encoder), sizes, documents)
        write_lengths(lengths, sizes)
        tokens.unlink(missing_ok=True)
        _same_file(journal.path(f"{TOKENS}-{number}"), tokens)
        made.append({tokens: bin_path(prefix), lengths: lengths_path(prefix), index: idx_path(prefix)})
    for prefix in prefixes:
        idx_path(prefix).unlink(missing_ok=True)
    for step in range(3):
        for ready in made:
            source, destination = list(ready.items())[step]
            source.replace(destination)
    return tuple(path(prefix) for prefix in prefixes for path in (bin_path, idx_path, lengths_path))


def _stream(journal: StreamJournal, name: str, dtype: str) -> npt.NDArray[Any]:
    path = journal.path(name)
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _same_file(old: Path, new: Path) -> None:
    """`new` has the content of `old`, which stays: work that is cut off after this has lost nothing."""
    try:
        os.link(old, new)
    except OSError:  # a file system without links
        shutil.copyfile(old, new)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
