"""What an engine of stage 3 would pass over, and keep its own weights: it is told to stop instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from tests.support.checkpoints import saved
from tests.support.deepspeed_ranks import Run, load_runs, tied


def test_an_engine_of_stage_3_refuses_a_universal_checkpoint_without_load_universal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = saved(tied(), tmp_path / "hf")
    convert(prepare_conversion(source, tmp_path / "ours", "deepspeed", WriterOptions()))
    with pytest.raises(JobError):
        load_runs([(tmp_path / "ours", Run(tied, 3), {"load_module_only": True})], tmp_path, num_ranks=1)
    assert "Error(s) in loading state_dict" in capfd.readouterr().err


def test_ranks_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --tp, --pp"):
        prepare_conversion(saved(tied(), tmp_path / "hf"), tmp_path / "ours", "deepspeed", WriterOptions(tp=2))
