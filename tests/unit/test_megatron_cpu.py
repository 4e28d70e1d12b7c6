"""What the redirection of CUDA calls to the CPU leaves alone: other libraries in the same process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

_PROGRAM = """
import importlib.util
import tempfile
import torch
from dynapipe_ext.executor.stages import megatron_cpu
has_triton = importlib.util.find_spec("triton") is not None
with megatron_cpu.triton_named():
    import triton
    import triton.language as tl
    assert has_triton or (triton.jit(len), triton.autotune([triton.Config({})])(len)) == (len, len)
    assert tl is triton.language and tl.constexpr
installed = megatron_cpu.install()
import transformers
with torch.device("meta"):
    assert torch.arange(3).device.type == "meta", "a device context leads no factory any more"
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=11)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
ids = torch.arange(7)[None]
assert has_triton or importlib.util.find_spec("triton") is None, "what stands for triton is left behind"
assert torch.equal(model(ids).logits, again(ids).logits), "a model is not what was saved"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
if installed:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 1)
    with tracker.fork("dropout"):
        torch.rand(1)
print("ran", installed)
"""


def test_transformers_and_the_compiler_work_after_it_and_dropout_warns_of_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout
    assert "CPU RNG state changed" not in done.stderr  # once a layer and micro-batch with dropout
