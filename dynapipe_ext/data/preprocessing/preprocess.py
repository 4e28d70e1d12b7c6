"""Records to a data set on disk. A journal keeps finished blocks, so that a killed run can go on."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.dataset import (
    TARGETS_FILE,
    TOKENS_FILE,
    TokenDataset,
    is_prepared,
    move_into_place,
    refuse_other_content,
    seal,
)
from dynapipe_ext.data.indexed_dataset import bin_path, idx_path, lengths_path, write_index, write_lengths
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.encoding import (
    FIRST_TARGET,
    IS_TARGET,
    NUM_FIRST,
    SENTENCES,
    SIZES,
    TASKS,
    TOKENS,
    EncodedBlock,
    EncodeSettings,
    look_at,
    stream_names,
    texts_of,
)
from dynapipe_ext.data.preprocessing.inputs import Block, BlockStream, InputFile
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.data.preprocessing.workers import InlineWorkers, Workers
from dynapipe_ext.data.tokenizer import BpeTokenizer, train_tokenizer
from dynapipe_ext.durable_files import file_stamp, open_kept, replace_file
from dynapipe_ext.errors import ConfigError, DataError, writing_move

_NAME, _LOCK = "journal.jsonl", "lock"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished block: the digest of its input, the bytes it added to each stream (size, digest), and facts about
    it."""

    block: str
    added: dict[str, tuple[int, str]]
    facts: dict[str, Any]


class StreamJournal:
    """A folder of streams and their journal; a context manager that holds the folder's lock.

    `key` stands for all settings; work under another key is thrown away. `entries` are the finished blocks.

    Errors: DataError where another process works in the folder, or the disk refuses to write.
    """

    def __init__(self, folder: Path, key: str, streams: Sequence[str], template_date: str = "") -> None:
        self.folder, self.key, self.streams, self._template_date = folder, key, tuple(streams), template_date
        self.entries: list[Entry] = []
        self._ends: list[int] = []  # of journal.jsonl, before each entry and at its end
        self._files: dict[str, IO[bytes]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_kept(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DataError(
                f"{folder} cannot be made ({error.strerror}): choose another place for the output"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DataError(f"{folder} is in use: another process prepares the same output; wait for it") from None
        try:
            self._open()
        except OSError as error:
            self.close()
            raise DataError(f"{folder} cannot be used ({error.strerror}): remove it and start again") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StreamJournal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder. It stays if it holds work."""
        if self._lock >= 0 and not self.entries:
            shutil.rmtree(self.folder, ignore_errors=True)
        for file in self._files.values():
            with suppress(OSError):  # `append` has already reported a full disk
                file.close()
        self._files = {}
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove the folder with all work in it."""
        self.entries = []
        self.close()

    def path(self, stream: str) -> Path:
        return self.folder / f"{stream}.bin"

    def append(self, block: str, added: Mapping[str, bytes], facts: dict[str, Any]) -> None:
        """Add a finished block: first its bytes, then its line in the journal."""
        described = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in added.items()}
        line = json.dumps({"block": block, "added": described, "facts": facts}).encode() + b"\n"
        try:
            for name in self.streams:
                self._files[name].write(added[name])
                self._files[name].flush()
            self._files[_NAME].write(line)
            self._files[_NAME].flush()
        except OSError as error:
            move = writing_move(error.errno, "make room")
            raise DataError(
                f"{self.folder} cannot be written ({error.strerror}): {move} and start again, what is done is kept"
            ) from None
        self._ends.append(self._ends[-1] + len(line))
        self.entries.append(Entry(block, described, facts))

    def keep(self, num_entries: int) -> None:
        """Forget all entries but the first `num_entries`, and remove the bytes they added."""
        for entry in self.entries[num_entries:]:
            for name, (size, _) in entry.added.items():
                self._files[name].seek(-size, os.SEEK_END)
                self._files[name].truncate()
        del self.entries[num_entries:], self._ends[num_entries + 1 :]
        self._files[_NAME].seek(self._ends[-1])
        self._files[_NAME].truncate()

    def finished(self) -> None:
        """Write all streams to disk, so that they may be moved."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _open(self) -> None:
        if not unfinished(self.folder, self.key):
            for left in self.folder.iterdir():
                if left.name != _LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            header = json.dumps({"key": self.key, "template_date": self._template_date}) + "\n"
            replace_file(self.folder / _NAME, header.encode())
        for name in (*self.streams, _NAME):
            path = self.folder / _NAME if name == _NAME else self.path(name)
            # Where an output shares this file, it must not change with it: then this is a copy.
            self._files[name] = os.fdopen(open_kept(path, os.O_RDWR | os.O_CREAT), "r+b")
        self._read()

    def _read(self) -> None:
        """Take the valid entries up to the first damaged one, and cut off the rest."""
        journal = self._files[_NAME]
        self._ends = [len(journal.readline())]
        for line in journal:
            entry = _parsed(line, self.streams)
            if entry is None or not all(
                _holds(self._files[name], size, digest) for name, (size, digest) in entry.added.items()
            ):
                break
            self.entries.append(entry)
            self._ends.append(self._ends[-1] + len(line))
        journal.seek(self._ends[-1])
        journal.truncate()
        for name in self.streams:
            end = sum(entry.added[name][0] for entry in self.entries)
            self._files[name].seek(end)
            self._files[name].truncate()


def unfinished(folder: Path, key: str) -> bool:
    """Whether a folder holds unfinished work under `key`."""
    try:
        with (folder / _NAME).open("rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("key") == key


def _parsed(line: bytes, streams: Sequence[str]) -> Entry | None:
    """The entry in a line of the journal; None if the line is incomplete or damaged."""
    try:
        raw = json.loads(line)
        added = {name: (int(size), str(digest)) for name, (size, digest) in raw["added"].items()}
        entry = Entry(str(raw["block"]), added, dict(raw["facts"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if line.endswith(b"\n") and set(entry.added) == set(streams) else None


def _holds(file: IO[bytes], size: int, digest: str) -> bool:
    """Whether the next `size` bytes have this digest."""
    sha = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, _READ_BYTES))
        if not block:
            return False
        sha.update(block)
        size -= len(block)
    return sha.hexdigest() == digest


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: input bytes read and in all; samples and tokens written, those kept from before included."""

    done_bytes: int
    total_bytes: int
    num_samples: int
    num_tokens: int
    num_kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOutcome:
    """The result of a run. `num_kept_samples` come from an interrupted run before; `reused`: there was nothing to
    do."""

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

    The output appears whole or not at all. `workers` encode, by default the calling process; they must have the same
    settings and encoder, and are entered here. An output of the same files (by path, size and time) and settings is
    reused.

    Errors: ConfigError for settings that cannot work, and for an existing output without `overwrite`; DataError naming
    file and line of unusable input (finished blocks are kept), and for a folder that holds anything but data, which is
    never replaced.
    """
    check_settings(settings, encoder)
    place = Path(output)
    place = place.resolve() if place.is_symlink() else place  # replaces its target, not the link
    if settings.target == "dataset":
        refuse_other_content(place)
    elif place.name in ("", ".."):
        raise ConfigError(f"{str(output)!r} is no prefix of file names: give one, for example my-gpt2")
    key = settings.digest(encoder)
    source = source_digest(files)
    work = _work_of(place)
    if settings.target == "dataset" and (outcome := _reusable(place, key, source)):
        if unfinished(work, key):  # interrupted after its very last step
            with StreamJournal(work, key, stream_names(settings)) as journal:
                journal.remove()
        return outcome
    _refuse_other(place, work, settings, key, overwrite)
    template_date = encoder.template_date if isinstance(encoder, FolderEncoder) else ""
    with StreamJournal(work, key, stream_names(settings), template_date) as journal:
        encoding = _Pass(files, settings, journal, progress)
        encoding.encode(workers or InlineWorkers(settings, encoder), lambda block: look_at(block, settings, encoder))
        journal.finished()
        if settings.target == "dataset":
            outputs = _finish_dataset(place, journal, settings, encoder, encoding, source)
        else:
            outputs = _finish_megatron(place, journal, settings, encoder)
        journal.remove()
    return encoding.outcome(outputs)


def with_fixed_date(encoder: Encoder, place: Path, wanted: str = "") -> Encoder:
    """The encoder, whose chat template prints one date, if any: `wanted`, or else its own, or that of earlier work on
    the output `place`, or today's."""
    if not isinstance(encoder, FolderEncoder) or not encoder.prints_date:
        return encoder
    known = wanted or encoder.template_date or template_date_of(place)
    return encoder.with_template_date(known or date.today().isoformat())


def template_date_of(place: Path) -> str:
    """The date in the chats of a dataset, finished or not; empty without one."""
    place = place.resolve() if place.is_symlink() else place
    try:
        with (_work_of(place) / _NAME).open("rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        header = TokenDataset.open(place).meta if is_prepared(place) else {}
    return str(header.get("template_date", "")) if isinstance(header, Mapping) else ""


def _work_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.preparing")


def check_settings(settings: EncodeSettings, encoder: Encoder) -> None:
    """Errors: ConfigError for settings that contradict each other."""
    if settings.target == "megatron":
        if settings.max_seq_len is not None or settings.truncate or settings.tasks.bind:
            raise ConfigError(".bin/.idx holds whole documents: leave out --max-seq-len, --truncate and other bounds")
        if not settings.keys or len(set(settings.keys)) < len(settings.keys):
            raise ConfigError(f"the keys are {list(settings.keys)}: give one or more, each once")
        for name in settings.keys:
            if "/" in name or name in ("", ".", ".."):
                raise ConfigError(f"the key {name!r} cannot be part of a file's name: rename the field")
    elif len(settings.keys) != 1:
        raise ConfigError(
            f"a dataset folder has one text a record but {len(settings.keys)} keys are named: give one, or write a data"
            " set for each with --output-prefix"
        )
    if settings.append_eod and encoder.eos is None:
        raise ConfigError("the tokenizer does not say which token ends a text: name it with --eod-token")
    if settings.truncate and settings.max_seq_len is None and not settings.tasks.bind:
        raise ConfigError("--truncate cuts at --max-seq-len: give it as well")
    if settings.max_seq_len is not None and settings.max_seq_len < 1:
        raise ConfigError(f"--max-seq-len is {settings.max_seq_len} but must be at least 1")


def train_bpe(files: Sequence[InputFile], settings: EncodeSettings, vocab_size: int) -> BpeTokenizer:
    """This project's byte-level BPE, trained on all texts of the files."""
    blocks = BlockStream(files, unit=settings.unit, columns=settings.columns)
    return train_tokenizer((text for block in blocks for text in texts_of(block, settings)), vocab_size)


def source_digest(files: Sequence[InputFile]) -> str:
    """sha256 of the paths of the files and of their `file_stamp`."""
    described = [[str(file.path.resolve()), file.form, *file_stamp(file.path)] for file in files]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def megatron_prefix(output: str | Path, key: str) -> Path:
    """Return `OUTPUT_KEY_document`, the name that Megatron's own tool gives its output."""
    return Path(f"{output}_{key}_document")


class _Pass:
    """One pass over the blocks: those in the journal are kept, the others are encoded and appended."""

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

    def outcome(self, outputs: tuple[Path, ...]) -> PreprocessOutcome:
        return PreprocessOutcome(
            outputs=outputs,
            num_samples=self.totals["samples"],
            num_tokens=self.totals["tokens"],
            num_truncated=self.totals["truncated"],
            num_skipped=self.totals["skipped"],
            num_kept_samples=self.num_kept_samples,
        )

    def encode(self, workers: Workers, look: Callable[[Block], None]) -> None:
        """Bring the journal to the end of the input. `look` may refuse its next block before workers start, which may
        be a cluster."""
        if self._keep():
            if (block := next(self._blocks, None)) is not None:
                look(block)
                self._blocks.put_back(block)
            with workers:
                for encoded in workers.run(self._blocks):
                    self._append(encoded)
        self._end_file()
        if self.totals["samples"] == 0:
            skipped = f": all {self.totals['skipped']} records are empty" if self.totals["skipped"] else ""
            raise DataError(f"the input has no samples{skipped}: give files with at least one record that has words")

    def _keep(self) -> bool:
        """Keep the entries whose blocks the input still has; returns whether blocks are left."""
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
    """Errors: ConfigError for an existing output, unless `overwrite` is set or the work on it is unfinished."""
    if overwrite or unfinished(work, key):
        return
    if settings.target == "dataset":
        existing = [place] if is_prepared(place) else []
    else:
        prefixes = [megatron_prefix(place, name) for name in settings.keys]
        existing = [path for prefix in prefixes for path in (idx_path(prefix), bin_path(prefix)) if path.exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists, made from other files or settings: pass --overwrite or name another")


def _reusable(place: Path, key: str, source: str) -> PreprocessOutcome | None:
    """The outcome of an earlier run with the same files and settings, if its dataset is there."""
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
    place: Path, journal: StreamJournal, settings: EncodeSettings, encoder: Encoder, encoding: _Pass, source: str
) -> tuple[Path, ...]:
    whole = journal.folder / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    _same_file(journal.path(TOKENS), whole / TOKENS_FILE)
    if IS_TARGET in journal.streams:
        _same_file(journal.path(IS_TARGET), whole / TARGETS_FILE)
    seal(
        whole,
        dtype=settings.dtype(encoder),
        sizes=_stream(journal, SIZES, "<i8"),
        first_target=_stream(journal, FIRST_TARGET, "<i4"),
        task_ids=_stream(journal, TASKS, "<i4"),
        num_first=_stream(journal, NUM_FIRST, "<i4") if NUM_FIRST in journal.streams else None,
        tasks=encoding.tasks,
        tokenizer_json=encoder.as_json(),
        vocab_size=encoder.vocab_size,
        facts={
            "num_truncated": encoding.totals["truncated"],
            "num_skipped": encoding.totals["skipped"],
            "file_sizes": list(encoding.file_sizes.values()),
            "source": source,
            "records": {
                "template": settings.template,
                "pair": list(settings.pair or ()),
                "text": settings.keys[0],
                "loss_on": settings.loss_on,
            },
            "settings": {"preprocess": journal.key},
            "unread_fields": list(settings.unread),
            **({"template_date": encoder.template_date} if isinstance(encoder, FolderEncoder) else {}),
        },
    )
    move_into_place(whole, place)
    return (place,)


def _finish_megatron(
    place: Path, journal: StreamJournal, settings: EncodeSettings, encoder: Encoder
) -> tuple[Path, ...]:
    """Put all files in place, the index files last: without its index a data set does not count."""
    prefixes = [megatron_prefix(place, key) for key in settings.keys]
    made: list[dict[Path, Path]] = []  # for each key the finished files and their places, the index last
    for number, prefix in enumerate(prefixes):
        sizes = _stream(journal, f"{SIZES}-{number}", "<i8")
        if not len(sizes):
            raise DataError(f"field {settings.keys[number]!r} is empty in all records: fill it, or name another")
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
    """Give `new` the content of `old`, which stays, so that an interruption after this loses nothing."""
    try:
        os.link(old, new)
    except OSError:  # a file system without links
        shutil.copyfile(old, new)
