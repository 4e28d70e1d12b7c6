"""Streams that grow block by block beside a journal, so that work cut off anywhere goes on where it was whole.

A line of journal.jsonl names a block's input by its digest, and the bytes that it added to each stream by theirs. What
lies behind the last line that holds is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dynapipe_ext.errors import DataError

_NAME, _LOCK = "journal.jsonl", "lock"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that is done: the digest of its input, what it added (bytes and their digest), and facts about it."""

    block: str
    added: dict[str, tuple[int, str]]
    facts: dict[str, Any]


class StreamJournal:
    """A folder of streams and their journal; a context manager that holds the folder's lock.

    `key` stands for all settings: work under another one is thrown away. `entries` are the blocks that are whole.

    Errors: DataError where another process works in the folder, or the disk refuses.
    """

    def __init__(self, folder: Path, key: str, streams: Sequence[str]) -> None:
        self.folder, self.key, self.streams = folder, key, tuple(streams)
        self.entries: list[Entry] = []
        self._ends: list[int] = []  # of journal.jsonl, before each entry and at its end
        self._files: dict[str, IO[bytes]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        """Release the folder, which stays if there is work in it."""
        if self._lock >= 0 and not self.entries:
            shutil.rmtree(self.folder, ignore_errors=True)
        for file in self._files.values():
            with suppress(OSError):  # a full disk was told of already, by `append`
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
        """One more block is whole: its bytes first, then the line that says so."""
        described = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in added.items()}
        line = json.dumps({"block": block, "added": described, "facts": facts}).encode() + b"\n"
        try:
            for name in self.streams:
                self._files[name].write(added[name])
                self._files[name].flush()
            self._files[_NAME].write(line)
            self._files[_NAME].flush()
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be written ({error.strerror}): make room and start again, what is done is kept"
            ) from None
        self._ends.append(self._ends[-1] + len(line))
        self.entries.append(Entry(block, described, facts))

    def keep(self, num_entries: int) -> None:
        """Forget all entries but the first so many, and what they added."""
        for entry in self.entries[num_entries:]:
            for name, (size, _) in entry.added.items():
                self._files[name].seek(-size, os.SEEK_END)
                self._files[name].truncate()
        del self.entries[num_entries:], self._ends[num_entries + 1 :]
        self._files[_NAME].seek(self._ends[-1])
        self._files[_NAME].truncate()

    def finished(self) -> None:
        """All streams are on disk: they may be moved."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _open(self) -> None:
        if not unfinished(self.folder, self.key):
            for left in self.folder.iterdir():
                if left.name != _LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            header = json.dumps({"key": self.key}) + "\n"
            (self.folder / _NAME).write_text(header, encoding="utf-8")
        for name in (*self.streams, _NAME):
            path = self.folder / _NAME if name == _NAME else self.path(name)
            path.touch()
            if path.stat().st_nlink > 1:  # an output has this file already: it must not change with ours
                copy = self.folder / "copy"
                shutil.copyfile(path, copy)
                copy.replace(path)
            self._files[name] = path.open("r+b")
        self._read()

    def _read(self) -> None:
        """Take the entries that hold, in order up to the first that does not, and cut off the rest."""
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
    """Whether a folder holds work under `key` that was not finished."""
    try:
        with (folder / _NAME).open("rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("key") == key


def _parsed(line: bytes, streams: Sequence[str]) -> Entry | None:
    """None for a line that was cut or damaged."""
    try:
        raw = json.loads(line)
        added = {name: (int(size), str(digest)) for name, (size, digest) in raw["added"].items()}
        entry = Entry(str(raw["block"]), added, dict(raw["facts"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if line.endswith(b"\n") and set(entry.added) == set(streams) else None


def _holds(file: IO[bytes], size: int, digest: str) -> bool:
    """Whether the next `size` bytes are those of the digest."""
    found = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, _READ_BYTES))
        if not block:
            return False
        found.update(block)
        size -= len(block)
    return found.hexdigest() == digest
