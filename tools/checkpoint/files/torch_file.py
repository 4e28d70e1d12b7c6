"""Files of `torch.save`: trees of plain values, in which a tensor is the place where its bytes lie.

Both layouts: the zip archive of torch 1.6 and later, and the plain one before it (GPT-2's and T5's first files). No
tensor is read until asked for, and then only its own bytes.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.files.pickle_scan import refuse_size
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.files.torch_pickle import Classes, load, next_pickle

_PLAIN_MAGIC = 0x1950A86A20F9469CFC6C
_HEAD_BYTES = 32  # the magic number's pickle, in any protocol, is shorter
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes of a file that are one `torch.save`: the whole file, or one chunk of a .distcp."""

    path: Path
    offset: int = 0
    num_bytes: int = -1  # -1: to the end


def read_tree(
    record: ArchiveRecord,
    classes: Classes = lambda *_: None,
    tensor: Callable[[StoredTensor], Any] = lambda it: it,
) -> Any:
    """What `torch.save` wrote; each tensor is what `tensor` makes of its place, other classes are Inert.

    `classes` gives what stands for a class by its module and name. Errors: DataError naming the file.
    """

    def read(file: _View) -> Any:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        if head.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                _check_sums(record, archive)
                zipped = _Zip(record.path, file, archive)
                return load(zipped.pickle(), record.path, zipped.locate, classes, tensor)
        if _PLAIN_MAGIC.to_bytes(10, "little") not in head:
            raise ValueError("it does not begin as files of torch.save do, be they newer or older than torch 1.6")
        return _read_plain(record.path, file, classes, tensor)

    return _guarded(record, "file of torch.save", read)


_SUMS_CHECKED: ContextVar[set[ArchiveRecord] | None] = ContextVar("records whose sums are right", default=None)


@contextmanager
def checking_sums() -> Iterator[None]:
    """Within: each archive that is read is first read whole, and has the check sums that it was saved with, or is
    refused. Files from before torch 1.6 have none."""
    token = _SUMS_CHECKED.set(set())
    try:
        yield
    finally:
        _SUMS_CHECKED.reset(token)


def _check_sums(record: ArchiveRecord, archive: zipfile.ZipFile) -> None:
    checked = _SUMS_CHECKED.get()
    if checked is None or record in checked:
        return
    if (damaged := archive.testzip()) is not None:
        raise DataError(
            f"{record.path}: the bytes of {damaged} are not those that were saved (CRC-32): copy"
            " it again, and convert anew, without what was written so far"
        )
    checked.add(record)


def read_pickle(path: Path) -> Any:
    """A pickle that holds no tensors. Errors: DataError naming the file."""

    def no_place(key: str, _dtype: torch.dtype) -> NoReturn:
        raise DataError(f"{path} names the storage {short(key)} but has none: give the file that the program wrote")

    def read(file: _View) -> Any:
        refuse_size(file.seek(0, io.SEEK_END))
        file.seek(0)
        return load(next_pickle(io.BytesIO(file.read())), path, no_place, lambda *_: None)

    return _guarded(ArchiveRecord(path), "pickle", read)


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a saved state dict by name. Errors: DataError naming the file and what it holds besides."""

    def refuse(module: str, name: str) -> NoReturn:
        raise DataError(f"{path} names {module}.{name}, which is no plain tensor: save the state dict alone")

    tensors = read_tree(ArchiveRecord(path), refuse)
    if not isinstance(tensors, Mapping):
        raise DataError(f"{path} holds {type(tensors).__name__} where a state dict is needed: save model.state_dict()")
    others = [
        name for name, value in tensors.items() if not isinstance(name, str) or not isinstance(value, StoredTensor)
    ]
    if others:
        shown = ", ".join(map(short, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise DataError(f"{path} holds {shown} besides tensors: save the model's state dict alone")
    return dict(tensors)


def _guarded(record: ArchiveRecord, what: str, read: Callable[[_View], Any]) -> Any:
    path = record.path
    try:
        with path.open("rb") as file:
            return read(_View(file, record))
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its rights") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{path} is not a whole {what}, it is cut short or damaged ({type(error).__name__}: {error}): copy it"
            " again, or save it anew"
        ) from error


class _Zip:
    """The records of an archive, in which each tensor's bytes lie as they are."""

    def __init__(self, path: Path, file: _View, archive: zipfile.ZipFile) -> None:
        self._path, self._file, self._archive = path, file, archive
        self._records = {info.filename: info for info in archive.infolist()}
        heads = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(heads) != 1:
            raise DataError(f"{path} has no data.pkl of torch.save: give a checkpoint that torch.save wrote")
        self._root = heads[0].removesuffix("data.pkl")

    def pickle(self) -> bytes:
        if (order := self._records.get(f"{self._root}byteorder")) is not None:
            with self._archive.open(order) as file:
                _refuse_order(self._path, file.read(16).strip())
        info = self._records[f"{self._root}data.pkl"]
        if info.compress_type != zipfile.ZIP_STORED:  # a megabyte may become a gigabyte
            raise DataError(f"{self._path}: its data.pkl is compressed: save it again with torch.save")
        refuse_size(info.file_size)
        return next_pickle(io.BytesIO(self._archive.read(info)))

    def locate(self, key: str, _dtype: torch.dtype) -> tuple[int, int]:
        subject = f"{self._path}: tensor {short(key)}"
        info = self._records.get(f"{self._root}data/{key}")
        if info is None:
            raise DataError(f"{self._path}: the bytes of tensor {short(key)} are absent: the file is not whole")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise DataError(f"{subject} is compressed or encrypted: save it again with torch.save")
        # The data follow the local header, the name and an extra field, whose length is its own.
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER_BYTES)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
        offset = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        end = self._file.seek(0, io.SEEK_END)
        if offset + info.file_size > end:
            raise DataError(f"{subject} reaches beyond the end of the file: it is cut short; copy it again")
        return self._file.start + offset, info.file_size


def _read_plain(path: Path, file: _View, classes: Classes, tensor: Callable[[StoredTensor], Any]) -> Any:
    """Four pickles (magic, version, system, the object), the storages' keys, and each storage after its count."""
    dtypes: dict[str, torch.dtype] = {}

    def note(key: str, dtype: torch.dtype) -> tuple[int, int]:
        dtypes[key] = dtype
        return 0, 1 << 63

    def values() -> Any:
        return load(next_pickle(file), path, note, classes)

    if values() != _PLAIN_MAGIC:
        raise ValueError("it does not begin as files of torch.save do")
    values()
    system = values()
    if isinstance(system, Mapping) and system.get("little_endian") is False:
        _refuse_order(path, b"big")
    tree = next_pickle(file)
    load(tree, path, note, classes)  # the storages' places depend on their types
    places = {}
    for key in map(str, values()):
        start = file.tell() + 8
        num_bytes = struct.unpack("<q", file.read(8))[0] * dtypes[key].itemsize
        end = file.seek(0, io.SEEK_END)
        if not 0 <= num_bytes <= end - start:
            raise DataError(f"{path} is not a whole file of torch.save: storage {short(key)} is cut; copy it again")
        file.seek(start + num_bytes)
        places[key] = file.start + start, num_bytes
    return load(tree, path, lambda key, _: places[key], classes, tensor)


def _refuse_order(path: Path, order: bytes) -> None:
    if order != b"little":
        raise DataError(f"{path} was written with {short(order)} endian numbers: save it on a little endian machine")


class _View(io.RawIOBase):
    """A record's bytes as a file of their own. No more is asked of memory than there is to read."""

    def __init__(self, file: BinaryIO, record: ArchiveRecord) -> None:
        super().__init__()
        end = file.seek(0, io.SEEK_END)
        self._file, self.start, self._at = file, record.offset, 0
        self._length = end - record.offset if record.num_bytes < 0 else record.num_bytes
        if record.offset < 0 or record.offset + self._length > end:
            raise EOFError(f"a record of {self._length:,} bytes at {record.offset:,} in a file of {end:,} bytes")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError(f"byte {at:,} of a record is asked for")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self.start + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data
