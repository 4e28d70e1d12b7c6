"""Pickles of torch.save in both layouts: what they say of tensors is a place, and nothing they say changes a thing."""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.deepspeed.file import read_deepspeed_tree as read_split_tree
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord, read_pickle, read_torch_file, read_tree
from tests.support.limits import LIMIT_S

MEMO_BOMB = b"\x80\x02Nr\xff\xff\xff\x7f."
BYTES_BOMB = b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00."


def saved(value: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def archive(path: Path, body: bytes, **others: bytes) -> Path:
    """An archive as torch.save makes it, but for other records, which are compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", body, zipfile.ZIP_STORED)
        for name, data in others.items():
            file.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
def test_a_tensor_is_found_wherever_its_record_lies_in_a_file(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(24).view(4, 6)
    first, second = saved({"a": base.t(), "b": base[1:3]}, zipped), saved([base.half()], zipped)
    (tmp_path / "both").write_bytes(b"PK" + first + second + b"beyond")
    found = read_tree(ArchiveRecord(tmp_path / "both", 2, len(first)))
    assert torch.equal(found["a"].read(), base.t())
    assert torch.equal(found["b"].read(), base[1:3])
    assert torch.equal(read_tree(ArchiveRecord(tmp_path / "both", 2 + len(first), len(second)))[0].read(), base.half())
    with pytest.raises(DataError, match="a record of 10 bytes at 1,000,000"):
        read_tree(ArchiveRecord(tmp_path / "both", 1_000_000, 10))


def test_deepspeeds_reader_takes_files_older_than_torch_1_6(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(saved({"w": torch.arange(5.0), "step": 3}, zipped=False))
    found = read_split_tree(tmp_path / "old.pt")
    assert torch.equal(found["w"].read(), torch.arange(5.0))
    assert found["step"] == 3


@pytest.mark.parametrize("bomb", [MEMO_BOMB, BYTES_BOMB], ids=["memo", "bytes"])
def test_no_kind_of_file_takes_more_memory_than_its_size_explains(bomb: bytes, tmp_path: Path) -> None:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
    (tmp_path / "old.bin").write_bytes(magic + bomb)
    (tmp_path / ".metadata").write_bytes(bomb)
    for read in (
        lambda: read_torch_file(archive(tmp_path / "a.bin", bomb)),
        lambda: read_torch_file(tmp_path / "old.bin"),
        lambda: read_pickle(tmp_path / ".metadata"),
    ):
        with pytest.raises(DataError, match=r"damaged \(ValueError"):
            read()


TWICE = {
    "lists": pickle.dumps(functools.reduce(lambda inner, _: [inner, inner], range(50), [1])),
    "dictionaries": pickle.dumps(functools.reduce(lambda inner, _: {1: inner, 2: inner}, range(50), {})),
    "objects": pickle.dumps(functools.reduce(lambda inner, _: Namespace(a=inner, b=inner), range(50), Namespace())),
    "a key": b"\x80\x02}K\x01\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(50)) + b"K\x01s.",
    "sizes": b"\x80\x02}ctorch\nSize\nqcK\x01\x85q\x00"
    + b"".join(b"hch%ch%c\x86\x85Rq%c" % (i, i, i + 1) for i in range(50))
    + b"K\x01s.",
    "a deep key": b"\x80\x02}K\x01" + b"\x85" * 300_000 + b"K\x01s.",
    "a deep list": b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("body", TWICE.values(), ids=list(TWICE))
def test_values_that_unfold_to_more_than_the_file_explains_are_refused(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(body)
    with pytest.raises(DataError, match=r"damaged \(ValueError: it"):
        read_pickle(tmp_path / "x.pkl")


def test_a_pickle_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (1 << 20) + b"N.")
    with pytest.raises(DataError, match=r"its data\.pkl is compressed: save it again with torch\.save"):
        read_tree(ArchiveRecord(tmp_path / "a.pt"))


def test_a_byte_order_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="endian numbers"):
        read_tree(ArchiveRecord(archive(tmp_path / "a.pt", b"N.", byteorder=b"x" * (1 << 24))))


@pytest.mark.parametrize("read", [read_split_tree, read_torch_file, lambda path: read_tree(ArchiveRecord(path))])
def test_a_pickle_cannot_move_its_tensor_to_another_file(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.save(torch.ones(3), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        records = {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as file:
        for name, data in records.items():
            # BUILD with the fields of a place: the path, the type, the shape, the offset and the strides.
            moved = b"](X\x0b\x00\x00\x00/etc/passwdctorch\nuint8\nK\x03\x85K\x00)eb."
            file.writestr(f"archive/{name}", data[:-1] + moved if name == "data.pkl" else data)
    with pytest.raises(DataError, match="changes what it made"):
        read(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "name",
    ["torch._utils\n_rebuild_parameter", "torch._utils\n_rebuild_tensor_v2", "_codecs\nencode", "x\ny",
     "collections\nOrderedDict", "torch\nSize", "torch\nfloat32"],
)  # fmt: skip
@pytest.mark.parametrize("state", [b"}U\x01xK\x01s", b"N}U\x01xK\x01s\x86"], ids=["dict", "slots"])
def test_a_pickle_cannot_change_what_its_names_stand_for(name: str, state: bytes, tmp_path: Path) -> None:
    body = b"\x80\x02c" + name.encode() + b"\n" + state + b"b."
    with pytest.raises(DataError, match="damaged"):
        read_tree(ArchiveRecord(archive(tmp_path / "a.pt", body)))


def test_a_name_in_torch_is_not_imported(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", b"\x80\x02ctorch\n_dynamo\n.")
    code = (
        "import pathlib, sys; from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord, read_tree;"
        "found = read_tree(ArchiveRecord(pathlib.Path(sys.argv[1])));"
        "print(found.qualified, 'torch._dynamo' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert run.stdout.split() == ["torch._dynamo", "False"]


def test_texts_of_python_2_are_read(tmp_path: Path) -> None:
    body = b"\x80\x02}(U\x03\xc3\xbfwK\x01U\x01\xffK\x02u."
    assert read_tree(ArchiveRecord(archive(tmp_path / "a.pt", body))) == {"ÿw": 1, "\\xff": 2}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"X\x0b\x00\x00\x00ComplexHalfX\x01\x00\x00\x000NK\x03tQ.", "a storage of type 'ComplexHalf' is not known"),
        (b"ctorch\nFloatStorage\nX\x01\x00\x00\x000NK\x03tQ.", "the bytes of tensor '0' are absent"),
    ],
)
def test_storages_that_are_not_there_are_named(said: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        read_tree(ArchiveRecord(archive(tmp_path / "a.pt", b"\x80\x02(X\x07\x00\x00\x00storage" + said)))


def test_a_storage_in_a_pickle_without_any_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x03tQ."
    )
    with pytest.raises(DataError, match="names the storage '0' but has none"):
        read_pickle(tmp_path / ".metadata")
