"""Our safetensors files and the library's are the same, and files of torch.save give their tensors without running."""

from __future__ import annotations

import gc
import json
import os
import pickle
import struct
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.files.safetensors_file import SafetensorsSpec, read_header, write_safetensors
from dynapipe_ext.tools.checkpoint.files.torch_file import read_torch_file

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    base[0, 0], base[0, 1] = float("nan"), -0.0
    found = {str(dtype): base.to(dtype) for dtype in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "one row": base[:1].clone()}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
    )


def specs(values: dict[str, torch.Tensor]) -> list[SafetensorsSpec]:
    return [SafetensorsSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in values.items()]


def test_the_library_reads_every_bit_that_was_written(tmp_path: Path) -> None:
    path, values = tmp_path / "a.safetensors", tensors()
    write_safetensors(path, specs(values), values.items())
    found = load_file(path)
    assert found.keys() == values.keys()
    assert all(same(found[name], values[name]) for name in values)


def test_every_bit_that_the_library_wrote_is_read(tmp_path: Path) -> None:
    path, values = tmp_path / "a.safetensors", tensors()
    save_file(values, path)
    found = read_header(path)
    assert found.keys() == values.keys()
    assert all(same(found[name].read(), values[name]) for name in values)
    assert torch.equal(found["torch.float32"].read_rows(2, 4), values["torch.float32"][2:4])


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=5),
    kinds=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shapes_survive(shapes: list[list[int]], kinds: list[torch.dtype], tmp_path: Path) -> None:
    values = {f"é{i}": torch.ones(shape, dtype=kinds[i]) for i, shape in enumerate(shapes)}
    write_safetensors(tmp_path / "a", specs(values), values.items())
    ours, library = read_header(tmp_path / "a"), load_file(tmp_path / "a")
    assert all(same(ours[name].read(), values[name]) and same(library[name], values[name]) for name in values)


def test_each_tensor_is_gone_before_the_next_one_is_made(tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []

    def one() -> torch.Tensor:
        values = numpy.ones(10, dtype=numpy.float32)
        alive.append(weakref.ref(values))
        return torch.from_numpy(values)

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            gc.collect()
            assert not any(before() is not None for before in alive)
            yield f"{i}", one()

    write_safetensors(tmp_path / "a", [SafetensorsSpec(f"{i}", torch.float32, (10,)) for i in range(5)], made())
    assert len(alive) == 5


def test_a_tensor_that_is_not_as_announced_leaves_no_file(tmp_path: Path) -> None:
    wanted = [SafetensorsSpec("a", torch.float32, (2,))]
    for given_ in ([("a", torch.ones(3))], [("b", torch.ones(2))], [("a", torch.ones(2).half())], []):
        with pytest.raises(DataError, match="was to be written, but came as"):
            write_safetensors(tmp_path / "x.safetensors", wanted, given_)
        assert not (tmp_path / "x.safetensors").exists()


ENTRY = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TWICE = b"{" + ENTRY + b"," + ENTRY + b"}"


def broken(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    text = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 8


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no header"),
        (b"1234", "no header"),
        (struct.pack("<Q", 1 << 40) + b"{}", "claims a header"),
        (struct.pack("<Q", 2) + b"[]", "no object"),
        (struct.pack("<Q", 2) + b"{x", "not JSON"),
        (broken()[:-1], "its header says"),
        (broken() + b"more", "its header says"),
        (broken(shape=[3]), "whose shape needs 12"),
        (broken(shape=[-2]), "no count"),
        (broken(data_offsets=[8, 16]), "gap or an overlap"),
        (broken(data_offsets=[0]), "no dtype, shape and data_offsets"),
        (broken(dtype="F3"), "known are"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (struct.pack("<Q", len(TWICE)) + TWICE + b"\0", "twice"),
    ],
)
def test_a_broken_file_is_refused_by_name(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        read_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
def test_a_torch_file_is_read_by_place(zipped: bool, tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    values = tensors() | {
        "turned": base.t(),
        "rows": base[2:4],
        "columns": base[:, 1:3],
        "repeated": torch.randn(1, 4).expand(3, 4),
        "parameter": torch.nn.Parameter(base),
    }
    path = tmp_path / "a.bin"
    torch.save(values, path, _use_new_zipfile_serialization=zipped)
    found = read_torch_file(path)
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert found[name].shape == tensor.shape
        assert same(found[name].read(), tensor.detach()), name
    assert torch.equal(found["turned"].read_rows(1, 3), base.t()[1:3])
    state = torch.nn.Linear(3, 2).state_dict()  # an OrderedDict with metadata
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    assert all(torch.equal(tensor.read(), state[name]) for name, tensor in read_torch_file(path).items())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
def test_what_a_torch_file_says_is_never_run(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "a.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match=r"names posix\.mkdir, which is no plain tensor"):
        read_torch_file(tmp_path / "a.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
def test_a_torch_file_that_was_cut_is_refused(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"a": torch.randn(100)}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    for kept in (0, 3, 100, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:kept])
        with pytest.raises(DataError, match=r"not a whole file of torch\.save"):
            read_torch_file(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "a.bin", tmp_path / "b.bin"
    torch.save({"a": torch.randn(4)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, content[:4] if info.filename.endswith("data/0") else content)
    with pytest.raises(DataError, match="needs more than its 4 bytes"):
        read_torch_file(made)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([torch.ones(2)], "holds list where a state dict is needed"),
        ({"a": torch.ones(2), "step": 3}, "holds 'step' besides tensors"),
        ({"model": {"a": torch.ones(2)}}, "holds 'model' besides tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused(value: Any, says: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.bin")
    with pytest.raises(DataError, match=says):
        read_torch_file(tmp_path / "a.bin")


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataError, match="does not begin as files of"):
        read_torch_file(tmp_path / "a.bin")
