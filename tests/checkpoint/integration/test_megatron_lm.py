"""A converted checkpoint in the unchanged Megatron-LM: its loss, and the way back. All formats: tests/bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from tests.support.megatron_lm import MEGATRON_LM, NEEDS, checkout, train_converted


@pytest.mark.skipif(not MEGATRON_LM.is_file(), reason="no copy of Megatron-LM beside this checkout")
def test_megatron_lm_starts_from_a_converted_checkpoint_and_its_own_converts_back(tmp_path: Path) -> None:
    for module in NEEDS:
        pytest.importorskip(module)
    losses = train_converted("qwen3", tmp_path, checkout(tmp_path / "megatron-lm"))
    assert max(losses.errors) < 1e-5
    assert losses.trained[0] < losses.converted[0] - 0.1
    again = prepare_conversion(tmp_path / "saved", tmp_path / "again", "megatron", WriterOptions(), verify=True)
    assert set(again.reader.kinds) >= {"weight", "exp_avg", "exp_avg_sq"}
    outcome = convert(again)
    assert outcome.verified
    assert not any("stay behind" in notice for notice in outcome.notices)
