"""Mixtures as transformers 5 saves its own modules: the experts of a layer in two tensors."""

from __future__ import annotations

import pytest
import torch

from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.huggingface.folder import open_checkpoint
from tests.support.checkpoints import tiny


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"]
)
def test_experts_in_two_tensors_are_read_like_experts_by_themselves(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    single, joined = (open_checkpoint(tmp_path / name) for name in ("single", "joined"))
    joined.check()
    assert joined.architecture == single.architecture
    for group in tensor_groups(single.architecture):
        own, other = single.read(group, "weight"), joined.read(group, "weight")
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in own)
