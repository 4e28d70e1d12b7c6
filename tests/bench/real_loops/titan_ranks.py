"""torchtitan's Llama 3, cut into model parts by its own `pipeline_llm`, on micro-batches of unequal token counts.

The measure is the same model in one process, as its trainer's step without a pipeline runs it: torchtitan's schedules
freeze the shape of the first micro-batch. Triton, which its imports name, is put out of the way; so is FSDP (which its
`parallelize_llama` wraps parts in, for one replica too).
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._inductor.runtime.hints
import torch.distributed as dist

from tests.bench.real_loops.stand_ins import name_absent

name_absent("triton")
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops import torchtitan

STEPS, PP, VOCAB = 20, 2, 2048
SHAPES = [(2, 40), (1, 96), (4, 16), (1, 33), (3, 57), (2, 8)]  # rows and positions of a step's micro-batches


def write_data(_: Path) -> None: ...


def micro_batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for rows, length in SHAPES[step % len(SHAPES) :] + SHAPES[: step % len(SHAPES)]:
        tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(rows, length, generator=generator) < 0.3] = -100  # unequal numbers of targets
        positions = torch.arange(length).expand(rows, length)
        found.append({"input": tokens[:, :-1].contiguous(), "labels": labels, "positions": positions.contiguous()})
    return found


def build(pp: int) -> tuple[Any, list[Any]]:
    """The schedule and this rank's parts; for one process, None and the model."""
    with replaced(llama3, get_attention_config=lambda *_: ScaledDotProductAttention.Config()):
        config = llama3.llama3_configs["debugmodel"](attn_backend="sdpa")
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=None)
    if pp == 1:
        return None, [model]
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=pp, pipeline_parallel_schedule="1F1B", data_parallel_shard_degree=1
    )
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=pp, ep=1, world_size=pp, spmd_backend="partial_dtensor"
    )
    with torchtitan.planned_loop(split_backward=True), replaced(parallel_dims, device_type="cpu"):
        schedule, parts, _, _ = llama3.pipeline_llm(
            model,
            parallel_dims=dims,
            training=TrainingConfig(local_batch_size=len(SHAPES)),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=lambda part, **_: part,
            loss_fn=CrossEntropyLoss.Config().build(compile_config=CompileConfig(enable=False)),
        )
    return schedule, parts


def main(_folder: Path, kind: str) -> dict[str, Any]:
    pp = int(os.environ["WORLD_SIZE"])
    schedule, parts = build(pp)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    steps = []
    for step in range(STEPS):
        batches = micro_batches(step)
        valid = torch.tensor(sum(int((b["labels"] != -100).sum()) for b in batches))
        started_s, cpu_s = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = whole_step(parts[0], batches, valid) if schedule is None else pipeline_step(schedule, batches, valid)
        optimizer.step()
        steps.append(
            {
                "loss": loss,
                "seconds": time.perf_counter() - started_s,
                "cpu_seconds": time.process_time() - cpu_s,
                "micro_batches": [[[length] * rows for rows, length in SHAPES]],
                "padding": 0,
            }
        )
        print(steps[-1], flush=True)
    return {"steps": steps}


def whole_step(model: Any, batches: list[dict[str, torch.Tensor]], valid: torch.Tensor) -> list[float]:
    """As the trainer's `_forward_backward_body`, micro-batch after micro-batch."""
    loss_fn, total = CrossEntropyLoss.Config().build(compile_config=CompileConfig(enable=False)), 0.0
    for batch in batches:
        loss, _ = loss_fn(model(batch["input"], positions=batch["positions"]), batch["labels"], valid)
        loss.backward()
        total += float(loss.detach())
    return [total]


def pipeline_step(schedule: Any, batches: list[dict[str, torch.Tensor]], valid: torch.Tensor) -> list[float]:
    """As the trainer's `pp_forward_backward_step`."""
    rank = dist.get_rank()
    is_first, is_last = rank == 0, rank == dist.get_world_size() - 1
    losses: list[torch.Tensor] | None = [] if is_last else None
    schedule.step(
        arg_mbs=[(b["input"],) for b in batches] if is_first else None,
        kwarg_mbs=[{"positions": b["positions"]} for b in batches],
        target_mbs=[b["labels"] for b in batches] if is_last else None,
        losses=losses,
        loss_kwargs={"global_valid_tokens": valid},
        return_outputs=False,
    )
    return [] if losses is None else [float(torch.stack(losses).sum())]
