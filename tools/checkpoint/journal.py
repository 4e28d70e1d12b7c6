"""What an unfinished conversion has done so far, so that the same command goes on where it was stopped.

The journal lies in the unfinished folder, which `partial_folder` names: one JSON line that says what is converted and
how, then one for each piece that is whole on the disk, with the digest of each of its files. A line that was cut by a
kill does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dynapipe_ext.durable_files import file_stamp, open_kept, sync
from dynapipe_ext.errors import ConfigError, DataError, short

NAME = ".dynapipe-convert.jsonl"
_FORMAT = "dynapipe-conversion/1"
_WORDS = {"source": "the source", "fingerprint": "the source's files", "version": "dynapipe's version"}


@dataclass(frozen=True, slots=True)
class Finished:
    """A piece that is whole: what the writer said of it, and its files: size in bytes and SHA-256 by relative name."""

    record: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]


class ConversionJournal:
    """The journal of `directory`, made with the directory if need be, and held by one process; a context manager.

    Errors: DataError where another conversion was begun there or holds it, or the directory is none of ours.
    """

    def __init__(self, directory: Path, conversion: Mapping[str, Any]) -> None:
        self.directory = directory
        self.finished: dict[str, Finished] = {}
        conversion = {"format": _FORMAT, **conversion}
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / NAME
        if not path.exists() and any(directory.iterdir()):
            raise DataError(f"{directory} exists and is no unfinished conversion: remove it, or choose another DST")
        self._file = open_kept(path, os.O_RDWR | os.O_CREAT)
        try:
            self._hold(path)
            self._read(path, conversion)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ConversionJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._file)

    def add(self, piece: str, finished: Finished) -> None:
        """The piece's files are on the disk, and after this line they count."""
        self.finished[piece] = finished
        self._append({"piece": piece, "record": finished.record, "files": finished.files})

    def forget(self, piece: str) -> None:
        """A piece whose files are no longer what they were."""
        del self.finished[piece]
        self._append({"piece": piece, "record": None, "files": {}})

    def rename(self, destination: Path) -> None:
        """The folder is whole: it takes its place, without the journal. Errors: DataError where something is there."""
        if os.path.lexists(destination):
            raise DataError(f"{destination} has come to exist meanwhile: move it, and run this again")
        for folder, _, _ in os.walk(self.directory):
            sync(Path(folder))
        self.directory.rename(destination)
        sync(destination.parent)
        (destination / NAME).unlink(missing_ok=True)

    def _hold(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.directory} is being written by another conversion: wait for it, or end it"
            ) from error
        except OSError:
            pass  # a file system without locks, as some clusters share
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file), path.stat()):
                return
        raise DataError(f"{self.directory} was finished by another conversion just now: nothing is left to do")

    def _read(self, path: Path, conversion: Mapping[str, Any]) -> None:
        with open(self._file, "rb", closefd=False) as file:
            content = file.read()
        lines = content.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        os.ftruncate(self._file, sum(map(len, whole)))
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            self._append(conversion)
            return
        try:
            begun, *pieces = [json.loads(line) for line in whole]
            self._refuse_another(begun, conversion)
            for line in pieces:
                self.finished.pop(line["piece"], None)
                if line["record"] is not None:
                    files = {name: (int(size), str(digest)) for name, (size, digest) in line["files"].items()}
                    self.finished[line["piece"]] = Finished(line["record"], files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is broken ({error}): remove {self.directory} and convert again") from error

    def _refuse_another(self, begun: Mapping[str, Any], conversion: Mapping[str, Any]) -> None:
        if begun.get("format") != _FORMAT:
            raise DataError(f"{self.directory} is of another version: remove it and convert again")
        for name, expected in conversion.items():
            if (was := begun.get(name)) != expected:
                word = _WORDS.get(name, name)
                change = "changed since" if name == "fingerprint" else f"was {short(was)}, now it is {short(expected)}"
                raise DataError(
                    f"{self.directory} holds an unfinished conversion: {word} {change}. Give the same command to go on"
                    " with it, or remove the folder to begin anew"
                )

    def _append(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)


def absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def partial_folder(destination: Path) -> Path:
    """Where a destination is written before it is whole."""
    return destination.with_name(f"{destination.name}.partial")


def refuse_places(destination: Path, *sources: Path) -> None:
    """All of them absolute. Errors: ConfigError for a destination that is there, or would lie in what is read, and for
    what is read and lies where the destination is written."""
    if os.path.lexists(destination):
        raise ConfigError(f"{destination} exists: choose another DST, or remove it")
    partial = partial_folder(destination)
    for source in sources:
        if destination.resolve().is_relative_to(source.resolve()):
            raise ConfigError(f"{destination} lies inside {source}: choose a DST outside the source")
        if source.resolve().is_relative_to(partial.resolve()):
            raise ConfigError(f"{source} lies inside the unfinished {partial}: choose another DST")


def files_below(directory: Path) -> set[str]:
    """Relative names of all files below `directory`, but the journal."""
    top = os.path.join(directory, "")
    files = {os.path.join(folder, name).removeprefix(top) for folder, _, names in os.walk(directory) for name in names}
    return files - {NAME}


def settled(directory: Path, name: str) -> tuple[int, str]:
    """Size and SHA-256 of a file that is on the disk when this returns."""
    with open(directory / name, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def is_whole(directory: Path, finished: Finished) -> bool:
    """Whether every file of a finished piece is still what it was."""
    for name, (num_bytes, digest) in finished.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != num_bytes or settled(directory, name)[1] != digest:
            return False
    return True


def source_fingerprint(source: Path) -> str:
    """Changes when any file below `source` does: of names and what `file_stamp` gives."""
    digest = hashlib.sha256()
    for name in sorted(files_below(source)):
        with contextlib.suppress(OSError):  # gone meanwhile, or a link to nowhere
            digest.update(f"{name}\0{file_stamp(source / name)}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
