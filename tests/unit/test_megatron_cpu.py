"""What the redirection of CUDA calls to the CPU leaves alone: other libraries in the same process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.launch.processes.env import RankEnv
from tests.conftest import RunRanks

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


@pytest.mark.skipif(not INSTALLED, reason="CUDA exists: nothing is redirected")
def test_all_groups_share_the_threads_that_watch_connections(run_ranks: RunRanks) -> None:
    """And what groups do with them; a group made after the first of all ranks has ended begins anew."""

    def rank(env: RankEnv) -> list[tuple[int, float]]:
        found = []
        for again in range(2):
            dist.init_process_group("gloo", f"{env.init_method}-{again}", rank=env.rank, world_size=2)
            groups = [dist.new_group([0, 1]) for _ in range(5)]
            total = torch.ones(1)
            for group in groups:
                dist.all_reduce(total, group=group)
            names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
            found.append((names.count("gloo_tcp_loop"), total.item()))
            del groups, group
            dist.destroy_process_group()
        return found

    assert run_ranks(2, rank) == [[(1, 32.0), (1, 32.0)]] * 2
