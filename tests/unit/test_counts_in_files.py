"""Small files that name huge counts: commands refuse them in little memory and time."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_S

_MOST_BYTES, _MOST_CPU_S = 512 << 20, 10


def npy(shape: tuple[int, ...]) -> bytes:
    """An array file whose header promises more than there is."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)


def idx(num_sequences: int, num_documents: int) -> bytes:
    return b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, num_sequences, num_documents) + bytes(64)


SHOW, PLAN, INDEX = ("show-schedule", "{file}"), ("plan", "--lengths", "{file}"), ("preprocess", "--input", "{file}")


@pytest.mark.parametrize(
    ("name", "content", "command", "says"),
    [
        ("a.csv", b"0F999999999,0B999999999", SHOW, "micro-batch 0 on stage 0 runs nothing"),
        ("a.txt", b"0: 0F999999999 0B999999999", SHOW, "micro-batch 0 on stage 0 runs nothing"),
        ("b.csv", b"0F0,0B0\n999999999F0,999999999B0", SHOW, "there is no action of stage 1"),
        ("a.npy", npy((2 * 10**9, 3)), PLAN, "cannot be read as lengths"),
        ("b.npy", npy((10**25, 3)), PLAN, "cannot be read as lengths"),
        ("a.idx", idx(10**9, 10**9), (*INDEX, "--lengths-only"), "a.idx"),
        ("b.idx", idx(2**62, 2), (*INDEX, "--lengths-only"), "b.idx"),
    ],
)
def test_a_count_that_no_file_of_its_size_can_hold_takes_neither_memory_nor_time(
    name: str, content: bytes, command: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / name).with_suffix(".bin").write_bytes(bytes(64))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))

    done = subprocess.run(
        [sys.executable, "-m", "dynapipe_ext.launch.cli", *(word.format(file=tmp_path / name) for word in command)],
        preexec_fn=limit, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
