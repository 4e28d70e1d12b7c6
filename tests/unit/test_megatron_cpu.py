"""What the redirection of CUDA calls to the CPU leaves alone: other libraries in the same process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from dynapipe_ext.executor.stages import megatron_cpu

pytest.importorskip("megatron.core")
INSTALLED = megatron_cpu.install()  # before transformers is imported
transformers = pytest.importorskip("transformers")


def test_transformers_and_the_compiler_work_after_it_and_dropout_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    has_triton = importlib.util.find_spec("triton") is not None
    with megatron_cpu.triton_named():
        import triton
        import triton.language as tl

        assert has_triton or (triton.jit(len), triton.autotune([triton.Config({})])(len)) == (len, len)
        assert tl is triton.language
        assert tl.constexpr
    assert has_triton or importlib.util.find_spec("triton") is None, "what stands for triton is left behind"
    with torch.device("meta"):
        assert torch.arange(3).device.type == "meta", "a device context leads no factory any more"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=11))
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(model(ids).logits, again(ids).logits), "a model is not what was saved"
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    if INSTALLED:
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        tracker.add("dropout", 1)
        with tracker.fork("dropout"):
            torch.rand(1)
    assert "CPU RNG state changed" not in caplog.text  # once a layer and micro-batch with dropout
