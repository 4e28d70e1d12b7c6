"""What real megatron-core ranks allocate on this machine, beside what an estimate predicts for them.

Import this at the top of a test module: forked ranks then find megatron imported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import EstimatedCosts, Strategy, estimate_costs
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.chunk_runner import StoredBytes
from dynapipe_ext.executor.stages.megatron.model import (
    build_model,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import packed_parameters, wrap_ddp
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.settings.tables import OptimizerSettings

megatron_cpu.install()
from tests.support.rank_jobs import forget_models  # noqa: E402 (it imports megatron)

CPU = torch.device("cpu")
PARTS = ("weights", "gradients", "optimizer")
ONE = Topology()


@dataclass(frozen=True)
class Case:
    """A model, a micro-batch of `rows` alike of `length` positions, and how they run."""

    architecture: Architecture
    rows: int
    length: int
    dtype: str = "float32"
    layout: Layout = "padded"
    recompute: Recompute = "none"
    topology: Topology = ONE
    sequence_parallel: bool = False
    zero_stage: int = 0

    def __str__(self) -> str:
        a, t = self.architecture, self.topology
        words = [a.family, f"{a.total_layers}x{a.hidden_size}", f"v{a.vocab_size}", f"{self.rows}x{self.length}"]
        words += [self.dtype, self.layout, self.recompute, f"tp{t.tp}pp{t.pp}dp{t.dp}"]
        return "-".join(words + ["sp"] * self.sequence_parallel + ["zero1"] * self.zero_stage)

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(tuple(SampleLength(i, self.length) for i in range(self.rows)), self.layout, self.recompute)

    @property
    def costs(self) -> EstimatedCosts:
        strategy = Strategy(
            topology=self.topology, zero_stage=self.zero_stage, sequence_parallel=self.sequence_parallel
        )
        precision = "fp32" if self.dtype == "float32" else "bf16"
        return estimate_costs(
            self.architecture,
            Cluster.from_device(DEVICES["cpu"], gpus_per_node=self.topology.world_size),
            strategy,
            precision=precision,
            recipe="fp32" if precision == "fp32" else "megatron",
            layout=self.layout,
        )

    def predicted(self) -> list[dict[str, int]]:
        """By stage: weights, gradients, optimizer; `stored` from forward to backward; `peak` beside states."""
        costs = self.costs
        priced, device = costs.evaluate([self.micro_batch]), costs.states.device
        messages = costs.count_message_bytes(priced)
        return [
            {name: int(getattr(device, name)[stage]) for name in PARTS}
            | {
                "stored": int(priced.stored_bytes[stage, 0]),
                "peak": int((priced.stored_bytes + priced.working_bytes - messages)[stage, 0]),
            }
            for stage in range(costs.num_stages)
        ]


def on_ranks(jobs: Mapping[str, tuple[Topology, Callable[[int], Any]]], timeout_s: float = 120.0) -> dict[str, Any]:
    """What each job returns on the first rank of every stage, by name; a job gets its pipeline rank.

    Jobs of one number of ranks share their processes. Results cross as JSON.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for world_size in sorted({topology.world_size for topology, _ in jobs.values()}):
            mine = {name: job for name, job in jobs.items() if job[0].world_size == world_size}

            def rank_main(env: Any, mine: Mapping[str, tuple[Topology, Callable[[int], Any]]] = mine) -> int:
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo",
                    env.init_method,
                    rank=env.rank,
                    world_size=env.world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
                done = {}
                for name, (topology, job) in mine.items():
                    initialize_parallel(topology, 0)
                    done[name] = job(topology.coordinates(env.rank).pp_rank)
                    forget_models()
                (Path(scratch) / f"{env.world_size}-{env.rank}.json").write_text(json.dumps(done))
                dist.barrier()
                dist.destroy_process_group()
                return 0

            run_local(rank_main, world_size, timeout_s=timeout_s)
            ranks = [json.loads((Path(scratch) / f"{world_size}-{r}.json").read_text()) for r in range(world_size)]
            for name, (t, _) in mine.items():
                found[name] = [ranks[t.rank(tp_rank=0, pp_rank=s, dp_rank=0)][name] for s in range(t.pp)]
    return found


def measure(cases: Sequence[Case]) -> dict[str, list[dict[str, int]]]:
    """What `predicted` says, of real ranks, by case and stage."""
    return on_ranks({str(case): (case.topology, partial(_of_rank, case)) for case in cases})


def _of_rank(case: Case, pp_rank: int) -> dict[str, int]:
    padded = case.architecture.padded(case.topology.tp)
    config = transformer_config(
        padded, case.topology, dtype=case.dtype, sequence_parallel=case.sequence_parallel, dropout=0.0
    )
    if case.recompute == "full":
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    model = build_model(padded, case.topology, pp_rank, config, seed=7, device=CPU)
    ddp = wrap_ddp(model, config, distributed_optimizer=case.zero_stage == 1)
    optimizer = MegatronOptimizer([ddp], config, OptimizerSettings(distributed=case.zero_stage == 1), num_steps=10)
    stage = _Stage(case, ddp, pp_rank)
    stored, _ = stage.forward()
    peaks = []
    for _ in range(1 if case.topology.tp == 1 else 3):  # gloo's threads give messages back late on a busy machine
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            stage.backward(stage.forward()[1])
        peaks.append(_peak_bytes(recorded))
    optimizer.update()
    parts = {
        "weights": sum(p.numel() * p.element_size() for p in ddp.parameters()),
        "gradients": sum(
            buffer.grad_data.numel() * buffer.grad_data.element_size()
            for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]
        ),
        "optimizer": _optimizer_bytes(optimizer, masters=case.dtype != "float32"),
    }
    return {**parts, "stored": stored, "peak": min(peaks)}


def random_case(seed: int) -> Case:
    """A model and a micro-batch drawn from all that `dynapipe train` builds on one rank."""
    draw = np.random.default_rng(seed)
    heads, head_dim = int(draw.choice([2, 3, 4, 6, 8])), int(draw.choice([16, 24, 32, 48]))
    hidden, length = heads * head_dim, int(draw.integers(6, 33)) * 8
    sizes = {
        "layers": int(draw.integers(1, 6)),
        "hidden": hidden,
        "heads": heads,
        "vocab": int(draw.integers(3, 60)) * 32,
    }
    if draw.random() < 0.4:
        architecture = gpt2(**sizes)
    else:
        groups = int(draw.choice([n for n in range(1, heads + 1) if heads % n == 0]))
        ffn = int(draw.integers(2, 5)) * hidden
        architecture = llama(**sizes, groups=groups, ffn=ffn, tied=bool(draw.random() < 0.5))
    return Case(
        architecture,
        rows=int(draw.integers(1, 5)),
        length=length,
        dtype=str(draw.choice(["float32", "bfloat16"])),
        layout="packed" if draw.random() < 0.5 else "padded",
        recompute="full" if draw.random() < 0.35 else "none",
    )


def llama(
    *, layers: int, hidden: int, heads: int, vocab: int, groups: int = 0, ffn: int = 0, tied: bool = False
) -> Architecture:
    return read_config(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups or heads,
            "intermediate_size": ffn or 5 * hidden // 2,
            "vocab_size": vocab,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
        }
    )


def gpt2(*, layers: int, hidden: int, heads: int, vocab: int) -> Architecture:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_positions": 512}
    return read_config({"model_type": "gpt2", **sizes})


class _Stage:
    """Forward and backward of one micro-batch on one stage, its input and output gradient made up."""

    def __init__(self, case: Case, ddp: Any, pp_rank: int) -> None:
        self._ddp, self._case, t = ddp, case, case.topology
        self._first, self._last = pp_rank == 0, pp_rank == t.pp - 1
        self._known = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
        packed = case.layout == "packed"
        shape = (1, case.rows * case.length) if packed else (case.rows, case.length)
        self._tokens = torch.zeros(shape, dtype=torch.long)
        self._positions = torch.arange(case.length).repeat(case.rows).reshape(shape)
        self._packed = packed_parameters([case.length] * case.rows, CPU) if packed else None
        sequence = shape[1] // (t.tp if case.sequence_parallel else 1)
        self._hidden_shape = (sequence, shape[0], case.architecture.hidden_size)

    def forward(self) -> tuple[int, torch.Tensor]:
        """Bytes that autograd keeps after it, and the output, or the loss."""
        stored = StoredBytes(self._known)
        if not self._first:
            dtype = getattr(torch, self._case.dtype)
            self._ddp.module.set_input_tensor(torch.zeros(self._hidden_shape, dtype=dtype).requires_grad_())
        with stored.counting():
            output = self._ddp(
                input_ids=self._tokens,
                position_ids=self._positions,
                attention_mask=None,
                labels=self._tokens if self._last else None,
                packed_seq_params=self._packed,
            )
            if self._last:
                output = (output.float() * torch.ones(self._tokens.shape)).sum()
        return stored.num_bytes, output

    def backward(self, output: torch.Tensor) -> None:
        torch.autograd.backward(output, None if self._last else torch.ones_like(output))


def _peak_bytes(recorded: Any) -> int:
    """Most bytes that were allocated at once since the recording began."""
    events = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        held += num_bytes
        peak = max(peak, held)
    return peak


def _optimizer_bytes(optimizer: MegatronOptimizer, *, masters: bool) -> int:
    """Moments, and fp32 copies of 16-bit weights."""
    inner = optimizer._optimizer
    total = 0
    for one in getattr(inner, "chained_optimizers", [inner]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                state = one.optimizer.state[parameter]
                moments = [value for name, value in state.items() if name != "step"]
                total += sum(value.numel() * value.element_size() for value in moments)
                total += parameter.numel() * 4 if masters else 0
    return total
