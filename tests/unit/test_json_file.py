"""Files that appear whole, and places that are no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.json_file import write_atomic


def test_a_device_is_written_to_and_never_replaced() -> None:
    """Here a pipe; as root, a rename would put a file in the place of /dev/null."""
    read, write = os.pipe()
    try:
        write_atomic(f"/dev/fd/{write}", "text")
        assert os.read(read, 100) == b"text"
    finally:
        os.close(read)
        os.close(write)


def test_a_file_is_replaced_in_one_step_and_its_folder_made(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.json"
    write_atomic(target, "one")
    write_atomic(target, "two")
    assert target.read_text() == "two"
    assert [entry.name for entry in target.parent.iterdir()] == ["file.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_atomic(tmp_path / "file" / "inside.json", "text")
    for folder in (tmp_path / "new", ".", "/"):
        with pytest.raises(DataError, match="is a folder: name another file, or move it away"):
            write_atomic(folder, "text")
