"""Measured peaks of inference batches, one a line: what `dynapipe collect-memory` writes and training reads.

The first line says what was measured on what; each later one is a batch. Lines are on the disk before the next batch
runs, so that a crash, or the kernel's own way out of a lack of memory, keeps all but the batch it fell in.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import ConfigError, DataError, short, writing_move

RECORDS_FORMAT = "dynapipe-memory-records/1"
_MOST = 1 << 62
_MOST_FILE_BYTES = 1 << 28  # a million batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What peaks were measured with. `max_new_tokens` 0 means one forward pass; `date` is ISO 8601."""

    model: str
    fingerprint: str
    dtype: str
    attention: str
    device: str
    device_name: str
    max_new_tokens: int
    num_beams: int
    torch: str
    transformers: str
    date: str

    def check(self, now: MeasuredOn) -> None:
        """Pass if peaks measured on this hold for `now`; warns where only a version or a device of one kind differs.

        Fewer new tokens than were measured are fine: short texts then cost less, beside the first batch. Errors:
        ConfigError naming what differs.
        """
        differing = [
            f"{name} {getattr(now, name)} (measured: {getattr(self, name)})"
            for name in ("device", "dtype", "attention", "num_beams")
            if getattr(now, name) != getattr(self, name)
        ]
        if now.fingerprint != self.fingerprint:
            differing.insert(0, f"model {now.model} {now.fingerprint[:12]} (measured: {self.model})")
        if now.max_new_tokens > self.max_new_tokens:
            differing.append(f"max_new_tokens {now.max_new_tokens} (measured: {self.max_new_tokens})")
        if differing:
            raise ConfigError(
                f"the memory model does not hold for {', '.join(differing)}: collect and train one for these settings,"
                " or leave memory_model out"
            )
        others = [
            f"{name} {getattr(now, name)} (measured: {getattr(self, name)})"
            for name in ("device_name", "torch", "transformers")
            if getattr(now, name) != getattr(self, name)
        ]
        if others:
            warnings.warn(f"the memory model was measured elsewhere: {', '.join(others)}", UserWarning, stacklevel=3)

    def same_series(self, other: MeasuredOn) -> list[str]:
        """Names of what differs, the date aside: peaks of one file must have none."""
        return [f.name for f in fields(self) if f.name != "date" and getattr(self, f.name) != getattr(other, f.name)]

    @classmethod
    def from_json(cls, data: Any, where: str) -> MeasuredOn:
        """Errors: DataError naming the field."""
        types = {f.name: int if f.type == "int" else str for f in fields(cls)}
        values = {name: field(data, name, kind, where) for name, kind in types.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """A batch of `rows` texts, the longest of `longest` tokens and `tokens` in all, and its peak above the weights.

    `peak_bytes` None: it ran out of memory, with `limit_bytes` to be had.
    """

    rows: int
    longest: int
    tokens: int
    peak_bytes: int | None
    limit_bytes: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.longest

    @classmethod
    def from_json(cls, data: Any, where: str) -> MemoryRecord:
        """Errors: DataError naming the field."""
        rows, longest, tokens = (int(field(data, name, int, where)) for name in ("rows", "longest", "tokens"))
        peak, limit = (_count_or_none(data, name, where) for name in ("peak_bytes", "limit_bytes"))
        if min(rows, longest) < 1 or not rows + longest - 1 <= tokens <= rows * longest:
            raise DataError(
                f"{where}: {rows} texts of up to {longest} tokens cannot have {tokens} tokens: take the line out"
            )
        if (peak is None and limit is None) or (peak is not None and peak < 1) or (limit is not None and limit < 1):
            raise DataError(
                f"{where}: a peak of {peak} B and a limit of {limit} B: a batch has a peak above 0, or ran out of a"
                " limit; take the line out"
            )
        return cls(rows=rows, longest=longest, tokens=tokens, peak_bytes=peak, limit_bytes=limit)


def _count_or_none(data: Any, name: str, where: str) -> int | None:
    if isinstance(data, dict) and name in data and data[name] is None:
        return None
    return int(field(data, name, int, where))


def field(data: Any, name: str, kind: type, where: str) -> Any:
    """`data[name]` of the kind asked for. Errors: DataError naming the file, the field and what it holds."""
    if not isinstance(data, dict):
        raise DataError(f"{where} is {short(data)}: an object is needed")
    if name not in data:
        raise DataError(f"{where} has no {name!r}: it was cut, or written by another version; write it again")
    value = data[name]
    if kind is float and type(value) is int and abs(value) < _MOST:
        value = float(value)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < _MOST):
        raise DataError(f"{where}: {name} is {short(value)}, not {kind.__name__}: write it again")
    return value


def parse(text: str, where: str) -> Any:
    """A JSON value without NaN and infinities. Errors: DataError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): write it again") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


@dataclass(frozen=True, slots=True)
class MemoryRecords:
    """A file of records. `cut` says that its last line had no end and was left out: a run was cut short there."""

    measured_on: MeasuredOn
    records: tuple[MemoryRecord, ...]
    cut: bool = False


def read_records(path: str | Path) -> MemoryRecords:
    """The records of a file. Errors: DataError naming file, line and field."""
    try:
        size = os.stat(path).st_size
        if size > _MOST_FILE_BYTES:
            raise DataError(f"{path} has {size:,} B, more than records can have: name a file of collect-memory")
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): name a file that collect-memory wrote") from error
    parsed = _records(raw, str(path))
    if parsed is None:
        raise DataError(f"{path} has no records: run collect-memory first")
    return parsed


def _records(raw: bytes, where: str) -> MemoryRecords | None:
    """None where not even the first line is whole."""
    *whole, rest = raw.split(b"\n")
    if not whole:
        if rest and not rest.startswith(b'{"format"'[: len(rest)]):
            raise DataError(f"{where} is no file of memory records: name another")
        return None
    lines = []
    for number, line in enumerate(whole, 1):
        try:
            lines.append((parse(line.decode("utf-8"), f"{where}, line {number}"), f"{where}, line {number}"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}, line {number} is not UTF-8: name a file that collect-memory wrote") from error
    head, head_where = lines[0]
    if not isinstance(head, dict) or head.get("format") != RECORDS_FORMAT:
        file_format = short(head.get("format") if isinstance(head, dict) else head)
        raise DataError(
            f"{where} has format {file_format} but {RECORDS_FORMAT!r} is needed: name a file of collect-memory"
        )
    measured_on = MeasuredOn.from_json(head.get("measured_on"), head_where)
    records = tuple(MemoryRecord.from_json(data, at) for data, at in lines[1:])
    return MemoryRecords(measured_on, records, cut=bool(rest))


class RecordFile:
    """A file of records that grows: a context manager. What it held of the same settings is in `records` on entry.

    A line that a crash cut short is taken out. One process at a time. Errors: ConfigError where the file is of other
    settings or in use; DataError where it cannot be read or written.
    """

    def __init__(self, path: str | Path, measured_on: MeasuredOn) -> None:
        self._path, self._measured_on = Path(path), measured_on
        self._file: IO[bytes] | None = None
        self.records: list[MemoryRecord] = []

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(open_kept(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise ConfigError(f"{self._path} is being written by another process: wait, or choose another") from error
        except OSError as error:
            self._close()
            raise DataError(f"{self._path} cannot be written ({error.strerror}): choose another place") from error
        try:
            self._resume(self._file)
        except BaseException:
            self._close()
            raise
        return self

    def _resume(self, file: IO[bytes]) -> None:
        file.seek(0)
        raw = file.read()
        parsed = _records(raw, str(self._path))
        if parsed is None:
            file.truncate(0)
            self._append([{"format": RECORDS_FORMAT, "measured_on": asdict(self._measured_on)}])
            return
        if differing := parsed.measured_on.same_series(self._measured_on):
            then, now = (
                ", ".join(f"{name} {short(getattr(on, name))}" for name in differing)
                for on in (parsed.measured_on, self._measured_on)
            )
            raise ConfigError(f"{self._path} was measured with {then}, not {now}: choose another file")
        file.truncate(raw.rfind(b"\n") + 1)
        self.records = list(parsed.records)

    def append(self, record: MemoryRecord) -> None:
        """Put a record behind the others, on the disk before this returns."""
        self._append([asdict(record)])
        self.records.append(record)

    def _append(self, values: Iterable[Any]) -> None:
        if self._file is None:
            raise ConfigError(f"{self._path} is not open: use RecordFile in a with statement")
        try:
            self._file.write("".join(json.dumps(value) + "\n" for value in values).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            move = writing_move(error.errno, "make room")
            raise DataError(f"{self._path} cannot be written ({error.strerror}): {move}, and run again") from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()
