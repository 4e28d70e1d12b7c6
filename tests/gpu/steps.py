"""Steps of small models, the same on a GPU and on the CPU: `python -m tests.gpu.steps FILE` keeps what a process that
sees no GPU makes of them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, Recompute, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.device import process_group_backend, rank_device
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients
from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_parallel, transformer_config
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, wrap_ddp
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from tests.support.pieces import hand_made, pieced_replicas, random_legal_schedule

ALONE = Topology()
SHAPE = Architecture.gpt(
    num_layers=3,
    hidden_size=256,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=512,
    gated_mlp=True,
    vocab_size=512,
    max_seq_len=512,
    tied_embeddings=True,
    position="rope",
    norm="rmsnorm",
    bias=False,
)
EXPERTS = replace(SHAPE, num_experts=4, top_k=2, ffn_hidden_size=128)
LENGTHS = (7, 300, 64, 129, 33, 2, 511, 90, 17)

chunk_runner.HEAD_SLICE = 100  # type: ignore[attr-defined] # of rows of up to 1024 positions


@dataclass(frozen=True)
class Case:
    layout: Layout = "packed"
    recompute: Recompute = "none"
    split: bool = False
    pieces: bool = False

    def __str__(self) -> str:
        return "-".join([self.layout, self.recompute] + ["split"] * self.split + ["pieces"] * self.pieces)


CASES = [
    Case("padded"),
    Case("padded", "selective", split=True),
    Case("padded", "full"),
    Case("packed"),
    Case("packed", split=True),
    Case("packed", "selective"),
    Case("packed", "full", split=True),
    Case(pieces=True),
    Case(recompute="selective", pieces=True),
    Case(recompute="full", pieces=True),
    Case("padded", "stage"),
    Case(recompute="stage", split=True, pieces=True),
    Case("padded", "head"),
    Case("packed", "head+full", split=True),
]
EXPERT_CASES = [Case("padded", "full"), Case("packed", split=True)]


def samples() -> list[TokenSample]:
    """Of lengths that differ by a factor of 250; a third of each is a prompt."""
    random = np.random.default_rng(5)
    return [TokenSample(i, random.integers(1, 512, n + 1), max(1, n // 3)) for i, n in enumerate(LENGTHS)]


def plan_of(case: Case) -> ExecutionPlan:
    if case.pieces:
        random = Random(3)
        (rows,) = replicas = pieced_replicas(samples(), 1, case.recompute, random, cut_from=100)
        schedule = random_legal_schedule(ALONE, rows, random, split=case.split)
        ((plan,),) = lower(hand_made(ALONE, replicas, [schedule]), ActivationFormat(SHAPE.hidden_size))
        return plan
    lengths = [SampleLength(s.index, s.positions, 0, s.target) for s in samples()]
    planner = Planner(
        ALONE,
        TokenCosts(1),
        1e12,
        format=ActivationFormat(SHAPE.hidden_size),
        layout=case.layout,
        recompute=case.recompute,
        split_backward=case.split,
        max_tokens=1024,
    )
    return prove_step(planner, lengths, step=0).plans[0][0]


def batches_of(plan: ExecutionPlan, *, pinned: bool = False) -> list[dict[str, torch.Tensor]]:
    found = samples()
    made = [collate(m, [found[s.index] for s in m.samples]) for m in plan.micro_batches]
    tensors = [{name: torch.from_numpy(array) for name, array in one.items()} for one in made]
    return [{name: x.pin_memory() for name, x in one.items()} for one in tensors] if pinned else tensors


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """In a job of this process alone, with Megatron's groups."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            process_group_backend(device), init_method=f"file://{folder}/alone", rank=0, world_size=1
        )
        initialize_parallel(ALONE, 0)
        try:
            yield
        finally:
            from dynapipe_ext.executor.stages.megatron.model import destroy_parallel

            destroy_parallel()
            dist.destroy_process_group()


def megatron_stage(
    dtype: str, device: torch.device, *, deterministic: bool = False, shape: Architecture = SHAPE
) -> tuple[Any, Any]:
    """The stage of the model, and its DDP."""
    config = transformer_config(shape, ALONE, dtype=dtype, deterministic=deterministic)
    ddp = wrap_ddp(build_model(shape, ALONE, 0, config, seed=7, device=device), config)
    exact = ExactMegatronGradients([ddp]) if deterministic else None
    return MegatronStage([ddp], gradients=exact, measure_bytes=False), ddp


def learned(stage: Any, ddp: Any, case: Case) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step, on the host."""
    plan = plan_of(case)
    loss = PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))
    gradients = {name: p.main_grad.float().cpu().clone() for name, p in ddp.module.named_parameters()}
    return {"loss": torch.tensor(loss), **gradients}


def main(file: str) -> None:
    device = rank_device(0)
    assert device.type == "cpu", "hide the devices: CUDA_VISIBLE_DEVICES=''"
    with alone(device):
        stage, ddp = megatron_stage("float32", device)
        found = {str(case): learned(stage, ddp, case) for case in CASES}
        stage, ddp = megatron_stage("float32", device, shape=EXPERTS)
        found |= {f"experts, {case}": learned(stage, ddp, case) for case in EXPERT_CASES}
        torch.save(found, Path(file))


if __name__ == "__main__":
    main(sys.argv[1])
