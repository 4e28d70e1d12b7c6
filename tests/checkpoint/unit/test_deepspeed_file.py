"""Files of torch.save: read by place without running them, and written one tensor at a time."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.deepspeed import file as deepspeed_file
from dynapipe_ext.tools.checkpoint.deepspeed import output as deepspeed_output
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, joined_pieces, read_deepspeed_tree, same_bytes
from dynapipe_ext.tools.checkpoint.deepspeed.output import Promised, TorchFileWriter
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.files.torch_pickle import Inert

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


class Stage(enum.IntEnum):
    GRADIENTS = 2


class Config:
    """Something of another program that is pickled with a checkpoint."""

    def __init__(self) -> None:
        self.lr = 1.0


def test_a_saved_tree_reads_as_its_plain_values(tmp_path: Path) -> None:
    tree = {"a": 1, "b": [1.5, None, ("x", True)], "c": OrderedDict(d={3: "e"}), "f": torch.Size([2, 3]), "g": {1, 2}}
    torch.save(tree, tmp_path / "file.pt")
    assert read_deepspeed_tree(tmp_path / "file.pt") == tree | {"f": (2, 3)}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_tensors_of_every_type_are_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    torch.save({"t": tensor}, tmp_path / "file.pt")
    found = read_deepspeed_tree(tmp_path / "file.pt")["t"]
    assert (found.shape, found.dtype) == ((3, 5), dtype)
    assert torch.equal(found.read().view(torch.uint8), tensor.view(torch.uint8))


def test_views_parameters_scalars_and_odd_strides_are_read(tmp_path: Path) -> None:
    whole = torch.arange(24.0)
    tree = {
        "view": whole[4:16].view(3, 4),
        "transposed": whole.view(4, 6).t(),
        "expanded": whole[:1].expand(3, 2),
        "parameter": torch.nn.Parameter(whole.view(2, 12)),
        "subclass": whole.view(6, 4).as_subclass(torch.nn.Buffer),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "column": whole.view(24, 1)[::2],
    }
    torch.save(tree, tmp_path / "file.pt")
    found = read_deepspeed_tree(tmp_path / "file.pt")
    for name, tensor in tree.items():
        assert torch.equal(found[name].read(), tensor.detach()), name
        assert found[name].read().is_contiguous()


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_a_cast_in_chunks_is_the_cast_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(deepspeed_file, "_CHUNK_VALUES", chunk)
    tensor = torch.randn(4, 7)
    torch.save([tensor, tensor.t()], tmp_path / "file.pt")
    for found, expected in zip(read_deepspeed_tree(tmp_path / "file.pt"), [tensor, tensor.t()], strict=True):
        assert torch.equal(found.read_as(torch.bfloat16), expected.bfloat16())
        assert torch.equal(found.read_as(torch.float32), expected)


def test_a_part_is_the_values_from_its_start(tmp_path: Path) -> None:
    tensor = torch.arange(30).view(5, 6)
    torch.save([tensor[:2], tensor[2:].clone()], tmp_path / "file.pt")
    whole = joined_pieces(read_deepspeed_tree(tmp_path / "file.pt"), (30,))
    for start, shape in [(0, (30,)), (3, (4, 5)), (11, (2,)), (12, (18,)), (30, (0,)), (7, ())]:
        size = int(np.prod(shape))
        assert torch.equal(whole.part(start, shape).read(), torch.arange(start, start + size).view(shape))
    with pytest.raises(DataError, match="values 25 to 31 of 30 are asked for"):
        whole.part(25, (6,))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_a_part_of_a_part_is_a_part(sizes: list[int], data: Any) -> None:
    parts = [SplitTensor((n,), torch.int64, (runs(i, n),) if n else ()) for i, n in enumerate(sizes)]
    whole = joined_pieces(parts, (sum(sizes),))
    start = data.draw(st.integers(0, whole.size))
    middle = whole.part(start, (data.draw(st.integers(0, whole.size - start)),))
    again = data.draw(st.integers(0, middle.size))
    length = data.draw(st.integers(0, middle.size - again))
    assert middle.part(again, (length,)) == whole.part(start + again, (length,))


def runs(file: int, num_values: int) -> Any:
    return StoredTensor(Path(f"file-{file}"), torch.int64, (num_values,), 100 * file)


def test_equal_bytes_are_equal_whatever_files_hold_them(tmp_path: Path) -> None:
    tensor = torch.tensor([0.0, float("nan"), 1.0, -1.0])
    torch.save(
        {"a": tensor, "b": tensor.clone(), "c": torch.tensor([-0.0, float("nan"), 1.0, -1.0])}, tmp_path / "f.pt"
    )
    found = read_deepspeed_tree(tmp_path / "f.pt")
    assert same_bytes(found["a"], found["b"], chunk=3)
    assert not same_bytes(found["a"], found["c"], chunk=3)
    assert not same_bytes(found["a"], found["a"].part(0, (2, 2)))


def test_objects_that_are_not_plain_are_not_made(tmp_path: Path) -> None:
    tree = {
        "stage": Stage.GRADIENTS,
        "args": argparse.Namespace(a=1),
        "config": Config(),
        "random": np.zeros(3),
        "x": 1,
    }
    torch.save(tree, tmp_path / "file.pt")
    found = read_deepspeed_tree(tmp_path / "file.pt")
    assert all(isinstance(found[name], Inert) for name in ("stage", "args", "config", "random"))
    assert found["x"] == 1


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_file_says_is_run(tmp_path: Path) -> None:
    torch.save({"evil": Attack(tmp_path / "made"), "w": torch.ones(2)}, tmp_path / "file.pt")
    found = read_deepspeed_tree(tmp_path / "file.pt")
    assert not (tmp_path / "made").exists()
    assert torch.equal(found["w"].read(), torch.ones(2))


def test_a_pickle_cannot_set_anything_on_a_class(tmp_path: Path) -> None:
    # GLOBAL x.y; (None, {"__setstate__": 1}); BUILD would set an attribute on whatever the name stands for.
    body = b"\x80\x02cx\ny\nN}X\x0c\x00\x00\x00__setstate__K\x01s\x86b."
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("archive/data.pkl", body)
    with pytest.raises(DataError, match="damaged"):
        read_deepspeed_tree(tmp_path / "file.pt")
    assert callable(Inert.__setstate__)


@pytest.mark.parametrize(
    "body", [b"\x80\x02Nr\xff\xff\xff\x7f.", b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00."], ids=["memo", "bytes"]
)
def test_a_pickle_cannot_take_more_memory_than_its_size_explains(tmp_path: Path, body: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("archive/data.pkl", body)
    with pytest.raises(DataError, match=r"damaged \(ValueError"):
        read_deepspeed_tree(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[: len(data) // 2], "not a whole file of torch.save"),
        (lambda _: b"", "not a whole file of torch.save"),
        (lambda _: pickle.dumps({"a": 1}), "older than torch 1.6"),
    ],
)
def test_what_is_no_whole_file_is_said(tmp_path: Path, change: Any, says: str) -> None:
    path = tmp_path / "file.pt"
    torch.save({"t": torch.arange(1000)}, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=says):
        read_deepspeed_tree(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_deepspeed_tree(tmp_path / "absent.pt")


def test_a_file_that_is_cut_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    torch.save({"t": torch.arange(1000)}, tmp_path / "file.pt")
    found = read_deepspeed_tree(tmp_path / "file.pt")["t"]
    with (tmp_path / "file.pt").open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(DataError, match="bytes early: it was changed or cut short"):
        found.read()


def rewritten(path: Path, change: Any) -> Path:
    """The archive with its records changed: `change(name, bytes)` gives (bytes, compression)."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            found = change(name, data)
            if found is not None:
                archive.writestr(name, found[0], found[1])
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda name, data: (b"big" if "byteorder" in name else data, 0), "b'big' endian"),
        (lambda name, data: (data, 8 if name.endswith("data/0") else 0), "compressed or encrypted"),
        (lambda name, data: None if name.endswith("data/0") else (data, 0), "the bytes of tensor '0' are absent"),
        (lambda name, data: (data[:8] if name.endswith("data/0") else data, 0), "needs more than its 8 bytes"),
        (lambda name, data: None if "data.pkl" in name else (data, 0), "no data.pkl"),
        (lambda name, data: (data[:20] if "data.pkl" in name else data, 0), "damaged"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, change: Any, says: str) -> None:
    torch.save({"t": torch.arange(10)}, tmp_path / "file.pt")
    with pytest.raises(DataError, match=says):
        read_deepspeed_tree(rewritten(tmp_path / "file.pt", change))


def promised(tensors: list[torch.Tensor]) -> dict[str, Promised]:
    return {f"t{i}": Promised(i, tuple(tensor.shape), tensor.dtype) for i, tensor in enumerate(tensors)}


@pytest.mark.parametrize("zip64_limit", [zipfile.ZIP64_LIMIT, 8])
def test_what_is_written_in_parts_is_what_torch_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zip64_limit: int
) -> None:
    """Also with the headers of tensors beyond 2 GiB."""
    monkeypatch.setattr(deepspeed_output.zipfile, "ZIP64_LIMIT", zip64_limit)
    tensors = [(torch.randn(3, n) * 100).to(dtype) for n, dtype in enumerate(DTYPES)] + [torch.tensor(5.0)]
    tree = {"module": promised(tensors), "again": Promised(1, (3, 1), torch.bfloat16), "step": 3, "none": None}
    with TorchFileWriter(tmp_path / "file.pt", tree) as file:
        for tensor in tensors:
            for row in tensor if tensor.ndim else [tensor]:
                file.write(row)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.pt"]
    for mmap in (False, True):
        found = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mmap)
        assert all(torch.equal(found["module"][f"t{i}"], tensor) for i, tensor in enumerate(tensors))
        assert found["again"].untyped_storage().data_ptr() == found["module"]["t1"].untyped_storage().data_ptr()
        assert (found["step"], found["none"]) == (3, None)
    ours = read_deepspeed_tree(tmp_path / "file.pt")
    assert all(torch.equal(ours["module"][f"t{i}"].read(), tensor) for i, tensor in enumerate(tensors))


def test_tensors_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    tensors = [torch.ones(n) for n in (1, 5, 17)]
    with TorchFileWriter(tmp_path / "file.pt", promised(tensors)) as file:
        for tensor in tensors:
            file.write(tensor)
    data = (tmp_path / "file.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            name_bytes, extra_bytes = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])
            assert (info.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0


@pytest.mark.parametrize(
    "parts", [[torch.ones(3)], [torch.ones(4), torch.ones(1)], [torch.ones(5)], [torch.ones(4, dtype=torch.float64)]]
)
def test_a_file_that_is_not_what_was_promised_does_not_appear(tmp_path: Path, parts: list[torch.Tensor]) -> None:
    with pytest.raises(DataError, match="this is a defect"):
        write(tmp_path / "file.pt", {"t": Promised(0, (4,), torch.float32)}, parts)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Any:
        yield torch.ones(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file.pt", {"t": Promised(0, (4,), torch.float32)}, parts())
    assert list(tmp_path.iterdir()) == []


def write(path: Path, tree: Any, parts: Any) -> None:
    with TorchFileWriter(path, tree) as file:
        for part in parts:
            file.write(part)
