"""Files that appear whole, and places that are no files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import DataError, DynaPipeError
from dynapipe_ext.launch.job.data_form import is_encoder_decoder
from dynapipe_ext.models.named_models import model_type, read_model
from dynapipe_ext.settings.deepspeed_settings import read_deepspeed_config
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.files import read_json, write_atomic, write_output


def test_a_device_is_written_to_and_never_replaced() -> None:
    """Here a pipe; as root, a rename would put a file in the place of /dev/null."""
    read, write = os.pipe()
    try:
        write_output(f"/dev/fd/{write}", "text")
        assert os.read(read, 100) == b"text"
    finally:
        os.close(read)
        os.close(write)


def test_a_file_is_replaced_in_one_step_and_its_folder_made(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.json"
    with pytest.raises(DataError, match="- is standard output, which --json alone writes to"):
        write_output("-", "text")
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


@pytest.mark.parametrize(
    "read",
    [
        TrainConfig.read,
        read_cost_file,
        read_deepspeed_config,
        model_type,
        read_model,
        lambda path: TokenDataset.open(Path(path).parent),
        lambda path: read_json(path, "plan", "a plan"),
    ],
    ids=["settings", "costs", "DeepSpeed", "transformers", "a model", "prepared data", "a plan"],
)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_what_python_cannot_read_is_refused_by_its_path(
    read: Callable[[str], object], text: str, tmp_path: Path
) -> None:
    (tmp_path / "meta.json").write_text(text)
    (tmp_path / "config.json").write_text(text)
    path = str(tmp_path / "config.json")
    if read == TrainConfig.read:
        Path(path).write_text(f"a = {text}")
    with pytest.raises(DynaPipeError, match=re.escape(str(tmp_path))):
        read(path)
    assert not is_encoder_decoder(str(tmp_path))
