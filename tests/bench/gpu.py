"""What training on one GPU comes to: real tokens a second beside padding and whole rows, and how true plans are.

    dynapipe profile --config tests/bench/gpu.toml --max-tokens 32768 --out costs.json
    PYTHONPATH=. python -P tests/bench/gpu.py [--lengths LENGTHS.npy] [--costs costs.json] [--kernels FILE]

A GPT of 1.16B parameters in bfloat16 takes the same global batches, whole training steps with the optimizer's, in
turns: by our plans; padded rows grouped by length; rows of the longest sample's length that documents are packed into
and attend across. All by one executor under one memory limit; the last two in the best of several sizes of
micro-batches. Our plans run once more with torch's operations in the place of Triton's kernels. A second part runs
single micro-batches: bytes and seconds beside those that the cost table says, or those of the quick measurement that a
run without a table makes. `--kernels` writes what one step's time goes into.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, Recompute, ReplicaPlan, SampleLength, round_up
from dynapipe_ext.batch.packed_attention import list_attention_kernels
from dynapipe_ext.batch.topology import ActivationFormat
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import sliced_head
from dynapipe_ext.executor.stages.megatron import head, layers
from dynapipe_ext.executor.stages.megatron.model import build_model, transformer_config
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, wrap_ddp
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.job.configured import architecture_of
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.models.flops import step_flops, work_of
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.settings.tables import OptimizerSettings
from dynapipe_ext.settings.train_config import TrainConfig
from tests.bench.contenders import provenance
from tests.gpu.steps import ALONE, alone

RESULTS = Path(__file__).parent / "results"
CONFIG = Path(__file__).parent / "gpu.toml"
PEAK_FLOPS_PER_S = 989e12  # H100 SXM, dense bfloat16, NVIDIA's data sheet
FORMAT = ActivationFormat(2048, "bfloat16")
OURS, GROUPED, ROWS = "ours", "padding, grouped by length", "packing, whole rows"
BY_TORCH = "ours, without kernels"
SHAPES: list[tuple[str, tuple[int, ...], Recompute]] = [
    ("padded", (512,) * 8, "none"),
    ("padded", (4096,) * 2, "none"),
    ("padded", (128,) * 64, "none"),
    ("packed", (4096, 2048, 1024, 512, 256, 128, 128), "none"),
    ("packed", (128,) * 64, "none"),
    ("packed", (4096,) * 3, "none"),
    ("packed", (4096,) * 2, "selective"),
    ("packed", (4096, 2048, 1024, 512, 256, 128, 128), "full"),
    ("packed", (4096,) * 4, "full"),
]


class Job:
    """A model on the GPU with its optimizer, and what it makes of plans."""

    def __init__(self, model: Any, device: torch.device) -> None:
        config = transformer_config(model, ALONE, dtype="bfloat16")
        self.model, self.device = model, device
        ddp = wrap_ddp(build_model(model, ALONE, 0, config, seed=0, device=device), config)
        self.stage = MegatronStage([ddp], measure_bytes=False)
        self.optimizer = MegatronOptimizer([ddp], config, OptimizerSettings(lr=1e-4, min_lr=1e-5), num_steps=1000)
        self.executor = PipelineExecutor(self.stage, InlineHub().transport(0))

    def step(self, plan: ExecutionPlan) -> dict[str, float]:
        """Seconds of execution and of the whole step, and the most bytes that were allocated in it."""
        batches = [self._tensors(m) for m in plan.micro_batches]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        loss = self.executor.execute(plan, batches)
        torch.cuda.synchronize()
        executed_s = time.perf_counter()
        self.optimizer.step(ExecutedStep(plan, loss))
        torch.cuda.synchronize()
        end_s = time.perf_counter()
        return {
            "executed_s": executed_s - start_s,
            "step_s": end_s - start_s,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "loss": loss,
        }

    def _tensors(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        samples = [
            TokenSample(s.index, np.random.default_rng(s.index).integers(1, 32000, s.start + s.encoder + 1), 1)
            for s in micro_batch.samples
        ]
        arrays = collate(micro_batch, samples)
        return {name: torch.from_numpy(array).pin_memory() for name, array in arrays.items()}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Models compute by torch's operations alone."""
    with ExitStack() as patches:
        for module in (head, layers, sliced_head):
            patches.enter_context(patch.object(module, "runs_kernels", _never))
        yield


def _never(_: torch.Tensor) -> bool:
    return False


def drawn_lengths() -> np.ndarray:
    """(4000, 2) tokens of inputs and targets: log-normal sums from 16 to 4090, a quarter of each its target."""
    whole = np.clip(np.random.default_rng(1).lognormal(5.6, 1.3, 4000), 16, 4090).astype(np.int64)
    return np.stack([whole - whole // 4, whole // 4], axis=1)


def sample(index: int, length: int) -> SampleLength:
    return SampleLength(index, length, 0, length)


def by_hand(micro_batches: Sequence[MicroBatch], costs: Any, step: int = 0) -> ExecutionPlan:
    """One micro-batch after the other, as 1F1B does on one stage."""
    priced, schedule = costs.evaluate(list(micro_batches)), one_f_one_b(1, len(micro_batches))
    prediction = Prediction(
        makespan_ns=compute_makespan_ns(schedule, priced),
        lower_bound_ns=0,
        peak_bytes=tuple(compute_peak_bytes(schedule, priced)),
        bubble_ratio=0.0,
    )
    batch = GlobalBatchPlan(step=step, replicas=(ReplicaPlan(0, tuple(micro_batches)),))
    return lower(StepPlan(batch, (schedule,), (prediction,), (priced,)), FORMAT)[0][0]


def grouped(samples: Sequence[SampleLength], max_tokens: int) -> list[MicroBatch]:
    """Sorted by length; as many rows as stay within `max_tokens` once padded to the longest."""
    cuts: list[list[SampleLength]] = [[]]
    for one in sorted(samples, key=lambda s: -s.encoder):
        longest = round_up((cuts[-1] or [one])[0].encoder, 8)
        if (len(cuts[-1]) + 1) * longest > max_tokens:
            cuts.append([])
        cuts[-1].append(one)
    return [MicroBatch(tuple(cut), pad_multiple=8) for cut in cuts]


def best(make: Any, costs: Any, limit_bytes: float, sizes: Sequence[int]) -> ExecutionPlan:
    """The plan of the size of micro-batches, within the limit and the table, that is predicted to take least time."""
    found: list[ExecutionPlan] = []
    for size in sizes:
        with suppress(PlanError):
            found.append(by_hand(make(size), costs))
    return min((p for p in found if max(p.prediction.peak_bytes) <= limit_bytes), key=lambda p: p.makespan_s)


def plans(samples: list[SampleLength], costs: Any, limit_bytes: float, row_len: int, step: int) -> dict[str, Any]:
    planner = Planner(ALONE, costs, limit_bytes, format=FORMAT, layout="packed")
    sizes = [row_len * n for n in range(1, 9)]

    def rows(max_tokens: int) -> list[MicroBatch]:
        """Documents end to end, cut where a row ends: to the model, samples of a row's length each."""
        positions = sum(s.encoder for s in samples)
        whole = [sample(i, min(row_len, positions - start)) for i, start in enumerate(range(0, positions, row_len))]
        return grouped(whole, max_tokens)

    return {
        OURS: prove_step(planner, samples, step=step).plans[0][0],
        GROUPED: best(lambda size: grouped(samples, size), costs, limit_bytes, sizes),
        ROWS: best(rows, costs, limit_bytes, sizes),
    }


def batches(lengths: np.ndarray, tokens: int, row_len: int, count: int) -> Iterator[list[SampleLength]]:
    """Global batches of the shuffled lengths, each of at least so many tokens."""
    order = np.random.default_rng(0).permutation(lengths)
    index = 0
    for _ in range(count):
        found: list[SampleLength] = []
        while sum(s.encoder for s in found) < tokens:
            found.append(sample(index, int(min(order[index], row_len))))
            index += 1
        yield found


def compared(job: Job, costs: Any, args: argparse.Namespace) -> dict[str, Any]:
    drawn = np.load(args.lengths) if args.lengths else drawn_lengths()
    lengths = drawn.reshape(-1, 2).sum(axis=1)
    steps = [
        plans(samples, costs, args.memory_limit_gb * 1e9, args.row_len, number)
        for number, samples in enumerate(batches(lengths, args.tokens, args.row_len, args.batches))
    ]
    for own in steps[:1]:  # kernels are chosen and memory is taken
        for plan in own.values():
            job.step(plan)
        with without_kernels():
            job.step(own[OURS])
        if args.kernels:
            args.kernels.write_text(kernels_of_step(job, own[OURS]))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in [*steps[0], BY_TORCH]}
    for _ in range(args.repeats):
        for own in steps:
            flops = step_flops(job.model, work_of(own[OURS].micro_batches), causal=True).model
            for name, plan in [*own.items(), (BY_TORCH, own[OURS])]:
                with without_kernels() if name == BY_TORCH else nullcontext():
                    done = job.step(plan)
                found[name].append(
                    done
                    | {
                        "real_tokens": plan.real_tokens,
                        "padded_tokens": plan.padded_tokens,
                        "micro_batches": len(plan.micro_batches),
                        "model_flops": flops,
                        "predicted_s": plan.makespan_s,
                        "predicted_peak_bytes": plan.prediction.peak_bytes[0],
                    }
                )
    return {name: summed(steps) for name, steps in found.items()}


def summed(steps: list[dict[str, float]]) -> dict[str, Any]:
    seconds = sum(step["step_s"] for step in steps)
    return {
        "real_tokens_per_s": sum(step["real_tokens"] for step in steps) / seconds,
        "mfu": sum(step["model_flops"] for step in steps) / seconds / PEAK_FLOPS_PER_S,
        "padding_efficiency": sum(s["real_tokens"] for s in steps) / sum(s["padded_tokens"] for s in steps),
        "predicted_over_measured_s": sum(s["predicted_s"] for s in steps) / sum(s["executed_s"] for s in steps),
        "predicted_over_measured_peak": statistics.median(s["predicted_peak_bytes"] / s["peak_bytes"] for s in steps),
        "most_bytes": max(step["peak_bytes"] for step in steps),
        "steps": steps,
    }


def kernels_of_step(job: Job, plan: ExecutionPlan) -> str:
    """What a step asks of the device: its kernels by their time, and how long it was busy."""
    from torch.profiler import ProfilerActivity, profile

    job.step(plan)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        job.step(plan)
    ran = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy_us, end = 0.0, 0.0
    for begin, finish in sorted((e.time_range.start, e.time_range.end) for e in ran):
        busy_us, end = busy_us + max(0.0, finish - max(begin, end)), max(end, finish)
    span_us = end - min(e.time_range.start for e in ran)
    by_name: dict[str, list[float]] = {}
    for one in ran:
        by_name.setdefault(one.name, []).append((one.time_range.end - one.time_range.start) / 1e3)
    rows = sorted(by_name.items(), key=lambda row: -sum(row[1]))
    lines = [f"{sum(ms):9.2f} ms {len(ms):6d} {name[:140]}" for name, ms in rows]
    return "\n".join([f"{len(ran)} kernels, busy {busy_us / 1e3:.1f} ms of {span_us / 1e3:.1f} ms", *lines]) + "\n"


def single(job: Job, costs: Any, quick: Any) -> Iterator[dict[str, Any]]:
    """Of one micro-batch alone: bytes and seconds, and what they were predicted to be, by the table and by the quick
    measurement that a run without a table makes."""
    for layout, lengths, kind in SHAPES:
        row = MicroBatch(tuple(map(sample, range(len(lengths)), lengths)), layout, kind, pad_multiple=8)
        plan = by_hand([row], costs)
        runs = [job.step(plan) for _ in range(4)][1:]
        guess = by_hand([row], quick)
        measured_s = statistics.median(run["executed_s"] for run in runs)
        yield {
            "layout": layout,
            "lengths": lengths,
            "recompute": kind,
            "peak_bytes": runs[-1]["peak_bytes"],
            "predicted_peak": plan.prediction.peak_bytes[0] / runs[-1]["peak_bytes"],
            "quick_predicted_peak": guess.prediction.peak_bytes[0] / runs[-1]["peak_bytes"],
            "executed_s": measured_s,
            "predicted_s": plan.makespan_s / measured_s,
            "quick_predicted_s": guess.makespan_s / measured_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="a table of `dynapipe profile` for the same model")
    parser.add_argument("--kernels", type=Path, help="write the kernels of one step there")
    parser.add_argument("--lengths", type=Path, help="(N, 2) tokens of inputs and targets (default: drawn)")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="of a global batch")
    parser.add_argument("--row-len", type=int, default=4096, help="longest sample")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--memory-limit-gb", type=float, default=70.0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--output", type=Path, default=RESULTS / "h100.json")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    config = TrainConfig.read(CONFIG)
    model = architecture_of(config, config.data.vocab_size)
    quick: Any = settle_costs(config, config.data.vocab_size)
    costs = quick
    if args.costs:
        costs = settle_costs(config.with_values(plan={"costs": str(args.costs)}), config.data.vocab_size)
    found: dict[str, Any] = {
        **provenance(args.machine),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "has_table": args.costs is not None,
        "attention": list_attention_kernels()[0],
        "lengths": args.lengths.name if args.lengths else "drawn",
        "quick": {
            name: getattr(quick, name)
            for name in ("flops_per_s", "layer_overhead_ns", "layer_bytes_factor", "head_bytes_factor")
        },
    }
    with alone(device):
        job = Job(model, device)
        found["parameters"] = sum(p.numel() for p in job.stage._chunks[0].parameters())
        found["steps"] = compared(job, costs, args)
        for name, one in found["steps"].items():
            print(name, {key: round(value, 4) for key, value in one.items() if key != "steps"}, flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
        found["single"] = []
        for one in single(job, costs, quick):
            found["single"].append(one)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in one.items()}, flush=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
