"""The bytes of files, plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dynapipe_ext.errors import ConfigError, DataError, format_bytes, install_advice

_READ_BYTES = 1 << 20
_ZSTANDARD_READ_BYTES = 1 << 10  # its decoder returns everything these bytes expand to, up to 10,000 times as much
MOST_RECORD_BYTES = 256 << 20  # of a line, an item or a row: a few kB, compressed, may hold gigabytes
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)  # what `decompressed` raises
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_FOREIGN = {  # how such files begin: what they are, and what to do with them
    b"PK\x03\x04": ("a zip archive or a workbook of Excel", "unpack it, or save its table as CSV in UTF-8"),
    b"PAR1": ("Parquet", "rename it to .parquet"),
    b"ARROW1": ("Arrow", "rename it to .arrow"),
    b"\x1f\x8b": ("compressed by gzip", "rename it to .gz, or decompress it"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "rename it to .zst, or decompress it"),
    b"\xfd7zXZ": ("compressed by xz", "rename it to .xz, or decompress it"),
    b"BZh91AY": ("compressed by bzip2", "rename it to .bz2, or decompress it"),
    b"SQLite format 3": ("a database of SQLite", "write its rows as JSON, one object a line"),
    b"%PDF-": ("a PDF", "extract its text"),
}


def check_readable(file: Path) -> None:
    """Errors: DataError for a path that is missing or that this user may not read."""
    if not file.exists():
        raise DataError(f"{file} does not exist: check the path given for the data")
    if not (file.is_file() or file.is_dir()):
        raise DataError(f"{file} is a pipe or a device, but data are read several times: write them to a file first")
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} may not be read by this user: check its permissions")


def damaged(file: Path, error: BaseException, *, line: int) -> DataError:
    """The error for a file whose stream raised one of `DAMAGE` after `line` whole lines."""
    reason = "ends too early" if isinstance(error, EOFError) else f"cannot be read ({error})"
    place = f" after line {line}" if line else ""
    return DataError(f"{file} {reason}{place}: copy or compress it again")


def too_long(file: Path, place: str) -> DataError:
    """The error for a record at a place of a file that goes on for more than `MOST_RECORD_BYTES`."""
    return DataError(f"{file}, {place}: longer than {format_bytes(MOST_RECORD_BYTES)}: split it into several records")


def refuse_foreign(file: Path, start: bytes) -> None:
    """Errors: DataError for a file that begins with `start`, which no text in UTF-8 does: in another encoding, or of
    another kind than its name says."""
    for magic, (kind, move) in _FOREIGN.items():
        if start.startswith(magic):
            raise DataError(f"{file} is no text but {kind}: {move}")
    if start[:2] in _UTF_16_MARKS or b"\0" in start[:4]:
        raise DataError(
            f"{file} is no UTF-8 but UTF-16 or UTF-32: convert it, for example iconv -f UTF-16 -t UTF-8 OLD > NEW"
        )


def decompressed(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """The decompressed blocks of a file with this suffix. A truncated or damaged one raises one of `DAMAGE`."""
    match suffix.lower():
        case ".gz":
            with gzip.open(raw, "rb") as stream:
                yield from iter(lambda: stream.read(_READ_BYTES), b"")
        case ".xz":
            yield from _streams(raw, lzma.LZMADecompressor, padding=b"\0")
        case ".bz2":
            yield from _streams(raw, bz2.BZ2Decompressor, padding=b"")
        case ".zst":
            yield from _zstandard_blocks(raw)
        case _:
            yield from iter(lambda: raw.read(_READ_BYTES), b"")


def _streams(
    raw: IO[bytes], new: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor], *, padding: bytes
) -> Iterator[bytes]:
    """Decompress one stream after the other, with `padding` between them, to the end of the file. The readers of
    Python's library end at the first byte behind a stream that begins no other, without a word."""
    stream, compressed = new(), b""
    while compressed := compressed or raw.read(_READ_BYTES):
        if stream.eof:
            if not (compressed := compressed.lstrip(padding)):
                continue
            stream = new()
        while compressed or not (stream.eof or stream.needs_input):
            if block := stream.decompress(compressed, _READ_BYTES):
                yield block
            compressed = b""
        compressed = stream.unused_data if stream.eof else b""
    if not stream.eof:
        raise EOFError


def _zstandard_blocks(raw: IO[bytes]) -> Iterator[bytes]:
    """Decompress frame by frame, since zstandard's own stream reader does not notice a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"reading .zst needs the package zstandard: {install_advice('train')}") from None

    frame = None
    while compressed := raw.read(_ZSTANDARD_READ_BYTES):
        while compressed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                if block := frame.decompress(compressed):
                    yield block
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            compressed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError
