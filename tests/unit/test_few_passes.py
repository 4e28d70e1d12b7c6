"""Which modules of transformers are known by their code."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from dynapipe_ext.executor.stages.transformers import few_passes
from dynapipe_ext.executor.stages.transformers.few_passes import code_digest, compute_in_few_passes
from tests.support.checkpoints import tiny


@pytest.mark.parametrize("library", [modeling_llama, modeling_qwen2])
def test_the_usual_modules_are_known(library: object) -> None:
    """Where it fails, transformers writes them otherwise now: look at what it computes, then add the digest."""
    name = "Llama" if library is modeling_llama else "Qwen2"
    assert code_digest(getattr(library, f"{name}RMSNorm").forward) in few_passes._NORMS
    assert code_digest(getattr(library, f"{name}MLP").forward) in few_passes._GATED_MLPS
    assert few_passes._with_turns(getattr(library, f"{name}Attention").forward) is not None


def test_code_that_differs_by_a_sign_or_has_no_source_is_not_known() -> None:
    assert few_passes._with_turns(modeling_glm.GlmAttention.forward) is None  # turns neighbours, not halves
    source: dict[str, object] = {}
    exec("def forward(self, x):\n    return x", source)
    assert code_digest(source["forward"]) == code_digest(len) == ""


def test_a_turn_whose_halves_are_exchanged_otherwise_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((second, -first), dim=-1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    assert few_passes._with_turns.__wrapped__(modeling_llama.LlamaAttention.forward) is None


def test_known_modules_keep_their_own_code_on_a_device_without_kernels() -> None:
    model = tiny("llama").train()
    ids = torch.arange(12)[None]
    expected = model(input_ids=ids).logits
    compute_in_few_passes(model)
    changed = [module for module in model.modules() if "forward" in vars(module)]
    assert len(changed) == 17
    assert torch.equal(model(input_ids=ids).logits, expected)
