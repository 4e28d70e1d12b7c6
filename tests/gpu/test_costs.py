"""Costs that a run measures before its first step, beside the steps of its plans: bytes and seconds, by either backend;
and how a rank's memory is allocated."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.job.configured import architecture_of, make_planner
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.launch.rank.megatron_run import build_megatron
from dynapipe_ext.launch.rank.transformers_run import build_transformers
from dynapipe_ext.settings.train_config import TrainConfig
from tests.gpu.steps import alone
from tests.support.limits import LIMIT_S

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="runs on a GPU alone")

LONGEST = 4096 if DEVICE.type == "cuda" else 256
SIZES: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
SIZES |= {"num_key_value_heads": 8, "num_hidden_layers": 6, "vocab_size": 32000}
if DEVICE.type == "cpu":
    SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 320}
STEPS = 4


def measured(backend: str, folder: Path) -> tuple[float, float, float, float]:
    """Predicted bytes and seconds of the last of a few steps, and those that it took."""
    gc.collect()  # models of the test before are in cycles
    bytes_before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    transformers.LlamaConfig(**SIZES, max_position_embeddings=LONGEST, tie_word_embeddings=True).save_pretrained(folder)
    config = TrainConfig().with_values(
        model={"architecture": str(folder), "backend": backend, "dtype": "bfloat16", "max_seq_len": LONGEST},
        topology={"tp": 1, "pp": 1, "dp": 1},
        plan={"layout": "packed", "memory_limit_gb": 30.0},
    )
    vocabulary = int(SIZES["vocab_size"])
    costs = settle_costs(config, vocabulary)
    planner, architecture = make_planner(config, costs), architecture_of(config, vocabulary)
    lengths = [LONGEST >> shift for shift in range(6) for _ in range(1 << shift)]
    samples = [SampleLength(index, length, 0, length) for index, length in enumerate(lengths)]
    with alone(DEVICE):
        if backend == "transformers":
            built = build_transformers(config, architecture, DEVICE)
        else:
            built = build_megatron(config, architecture, 0, DEVICE)
        executor = PipelineExecutor(built.stage, InlineHub().transport(0))
        for step in range(STEPS):
            plan = prove_step(planner, samples, step=step).plans[0][0]
            batches = [batch_of(micro_batch) for micro_batch in plan.micro_batches]
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            loss = executor.execute(plan, batches)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            executed_s = time.perf_counter() - begun
            built.optimizer.step(ExecutedStep(plan, loss))
        peak_bytes = torch.cuda.max_memory_allocated() - bytes_before if DEVICE.type == "cuda" else 0
    return plan.prediction.peak_bytes[0], plan.makespan_s, peak_bytes, executed_s


def batch_of(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    samples = [
        TokenSample(s.index, np.random.default_rng(s.index).integers(1, SIZES["vocab_size"], s.encoder + 1), 1)
        for s in micro_batch.samples
    ]
    return {name: torch.from_numpy(array) for name, array in collate(micro_batch, samples).items()}


@pytest.mark.parametrize("backend", ["transformers", "megatron"])
def test_a_run_without_a_cost_file_knows_the_bytes_and_seconds_of_its_backend(backend: str, tmp_path: Path) -> None:
    predicted_bytes, predicted_s, peak_bytes, executed_s = measured(backend, tmp_path)
    print(f"{backend}: bytes {predicted_bytes / peak_bytes:.3f}, seconds {predicted_s / executed_s:.3f} of measured")
    assert 1.0 <= predicted_bytes / peak_bytes < 1.1
    assert 0.8 < predicted_s / executed_s < 1.25


@pytest.mark.parametrize("own", ["", "expandable_segments:False"])
def test_a_ranks_memory_comes_in_segments_that_grow_unless_the_environment_says_otherwise(own: str) -> None:
    program = (
        "import torch; from dynapipe_ext.launch.processes.env import own_device;"
        " x = torch.zeros(8, device=own_device(0));"
        " print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'],"
        " torch.cuda.memory._snapshot()['segments'][0]['is_expandable'])"
    )
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": own, "PYTORCH_CUDA_ALLOC_CONF": own}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(not own)] * 2
