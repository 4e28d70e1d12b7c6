"""What one rank does: build its part of the model, then step by step take its plan, execute it, update."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import Batch, DynaPipeDataLoader
from dynapipe_ext.executor.protocols import Store, Transport
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.stages.megatron import MegatronStage, wrap_ddp
from dynapipe_ext.executor.stages.megatron_model import build_model, transformer_config
from dynapipe_ext.executor.stages.megatron_optimizer import MegatronOptimizer
from dynapipe_ext.executor.transport.groups import Groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport
from dynapipe_ext.executor.transport.watched import WatchedTransport
from dynapipe_ext.launch.initial_weights import load_initial_weights
from dynapipe_ext.launch.job import Variant, architecture_of, make_planner, topology_of
from dynapipe_ext.models.flops import Work, work_of
from dynapipe_ext.timeline import Span
from dynapipe_ext.tools.progress import StepProgress


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank shares between the runs of a job."""

    rank: int
    config: TrainConfig
    dataset: TokenDataset
    costs: CostModel
    store: Store
    plan_key: bytes
    namespace: str
    groups: Groups
    device: torch.device
    clock_offset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step as all ranks saw it. `epoch_step` is its place within the epoch."""

    step: int
    epoch: int
    epoch_step: int
    loss: float
    step_s: float
    makespan_s: float
    bubble_ratio: float
    cpu_s: float
    predicted_makespan_s: float
    predicted_bubble_ratio: float
    real_tokens: int
    padded_tokens: int
    work: Work
    num_micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank over the whole run; spans are those of the traced steps, seconds from the start of their step."""

    rank: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    exposed_planning_s: float
    spans: dict[int, list[Span]]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankFigures:
        raw = json.loads(data)
        spans = {
            int(step): [Span(**{**span, "shape": tuple(span["shape"])}) for span in spans]
            for step, spans in raw.pop("spans").items()
        }
        return cls(**raw, spans=spans)


class _SpanRecorder:
    """Keeps the spans of the current step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)


def train(context: RankContext, variant: Variant, index: int) -> tuple[list[StepFigures], RankFigures]:
    """Run one variant from fresh weights; every rank of the job calls this with the same arguments but its rank."""
    config, device = context.config, context.device
    topology = topology_of(config)
    me = topology.coordinates(context.rank)
    architecture = architecture_of(config, context.dataset.vocab_size)
    settings = transformer_config(
        architecture,
        topology,
        dtype=config.model.dtype,
        sequence_parallel=config.topology.sequence_parallel,
        dropout=config.model.dropout,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seed = None if config.model.init_from else config.run.seed
    model = build_model(architecture, topology, me.pp_rank, settings, seed=seed, device=device)
    if config.model.init_from:
        load_initial_weights(model, config.model.init_from, architecture, topology, me.pp_rank)
    ddp = wrap_ddp(model, settings, distributed_optimizer=config.optimizer.distributed)
    optimizer = MegatronOptimizer(ddp, settings, config.optimizer, num_steps=config.run.steps)
    stage = MegatronStage([ddp], dropout=config.model.dropout > 0, measure_bytes=device.type == "cpu")
    recorder = _SpanRecorder()
    with ExitStack() as stack:
        transport = _transport(context, variant)
        stack.callback(transport.close)
        arrived = transport.arrived if isinstance(transport, WatchedTransport) else None
        recording = PipelineExecutor(
            stage, transport, recorder=recorder, rank=context.rank, clock=_clock(device), arrived=arrived
        )
        # Spans on an accelerator need synchronisation, which takes overlap away: there only traced steps record them.
        plain = recording if device.type == "cpu" else PipelineExecutor(stage, transport, arrived=arrived)
        loader = stack.enter_context(
            DynaPipeDataLoader(
                context.dataset,
                make_planner(config, context.costs, variant),
                batch_size=config.data.batch_size or None,
                tokens_per_batch=config.data.tokens_per_batch or None,
                shuffle=True,
                seed=config.run.seed,
                drop_last=config.data.drop_last,
                num_workers=config.data.num_workers,
                prefetch_steps=config.data.prefetch_steps,
                store=context.store,
                namespace=f"{context.namespace}/{index}",
                plan_key=context.plan_key,
                coordinates=me,
                pin_memory=device.type == "cuda",
                needs_data=me.pp_rank in (0, topology.pp - 1),
                timeout_s=config.job.timeout_s,
            )
        )
        progress = stack.enter_context(StepProgress(config.run.steps, enabled=context.rank == 0))
        if context.rank == 0 and index:
            progress.log(f"comparing: {variant.name}")
        return _steps(context, stage, (plain, recording), optimizer, loader, recorder, progress)


def _steps(
    context: RankContext,
    stage: MegatronStage,
    executors: tuple[PipelineExecutor, PipelineExecutor],
    optimizer: MegatronOptimizer,
    loader: DynaPipeDataLoader,
    recorder: _SpanRecorder,
    progress: StepProgress,
) -> tuple[list[StepFigures], RankFigures]:
    config, figures, traced = context.config, [], {}
    me = topology_of(config).coordinates(context.rank)
    first_of_replica = me.pp_rank == me.tp_rank == 0
    predicted_peak = activation_peak = 0
    step_start_s, cpu_start_s = time.perf_counter(), time.process_time()
    for step, (epoch, epoch_step, micro_batches, plan) in enumerate(_endless(loader)):
        if step == config.run.steps:
            break
        recorder.spans.clear()
        is_traced = step >= config.run.steps - config.run.traced_steps
        start_s = time.perf_counter()
        loss = executors[is_traced].execute(plan, micro_batches)
        executed_s = time.perf_counter()
        optimizer.step()
        spans = [_moved(span, context.clock_offset_s) for span in recorder.spans]
        predicted_peak = max(predicted_peak, plan.prediction.peak_bytes[plan.pp_rank])
        activation_peak = max([activation_peak, *(span.num_bytes for span in spans)])
        end_s, cpu_end_s = time.perf_counter(), time.process_time()
        worked = (start_s - context.clock_offset_s, executed_s - context.clock_offset_s)
        shared = _share(spans, worked, cpu_end_s - cpu_start_s, plan, context.device, counts_work=first_of_replica)
        if is_traced:
            origin_s = min(rank[1] for rank in shared)
            traced[step] = [_moved(span, origin_s) for span in spans]
        figures.append(_figures(step, epoch, epoch_step, loss, end_s - step_start_s, shared, plan))
        step_start_s, cpu_start_s = end_s, cpu_end_s
        last = figures[-1]
        bubble_ratio = last.bubble_ratio if math.isfinite(last.bubble_ratio) else None
        progress.update(step + 1, loss, last.real_tokens / last.step_s, plan.padding_efficiency, bubble_ratio)
    return figures, RankFigures(
        rank=context.rank,
        predicted_peak_bytes=predicted_peak,
        measured_peak_bytes=optimizer.state_bytes() + stage.weight_bytes() + activation_peak
        if context.device.type == "cpu"
        else torch.cuda.max_memory_allocated(context.device),
        exposed_planning_s=loader.exposed_planning_s,
        spans=traced,
    )


def _endless(loader: DynaPipeDataLoader) -> Iterator[tuple[int, int, list[Batch], ExecutionPlan]]:
    """(epoch, step within it, micro-batches, plan) for ever."""
    while True:
        epoch = loader.epoch
        for epoch_step, (micro_batches, plan) in enumerate(loader):
            yield epoch, epoch_step, micro_batches, plan


def _moved(span: Span, origin_s: float) -> Span:
    return replace(span, start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)


def clock_offset_s(one_machine: bool, device: torch.device) -> float:
    """What to take from this rank's clock to read rank 0's: nothing on one machine, else as of a common barrier."""
    if one_machine:
        return 0.0
    dist.barrier()
    mine = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    return float(mine - first)


def _share(
    spans: list[Span],
    worked: tuple[float, float],
    cpu_s: float,
    plan: ExecutionPlan,
    device: torch.device,
    *,
    counts_work: bool,
) -> list[list[float]]:
    """Every rank's (busy, first start, last end, CPU seconds, predicted makespan, predicted bubble, its replica's work
    as `Work.numbers`, once a replica) of this step.

    Times are on rank 0's clock. A step without spans counts as `worked` says; how much of that was work is then unknown
    (not a number). A rank whose replica has nothing to do has neither start nor end (infinities).
    """
    busy_s = sum(span.duration_s for span in spans) if spans or not plan.micro_batches else math.nan
    first_s, last_s = worked if plan.micro_batches else (math.inf, -math.inf)
    first_s = min((s.start_s for s in spans), default=first_s)
    last_s = max((s.end_s for s in spans), default=last_s)
    work = work_of(plan.micro_batches) if counts_work else Work()
    mine = torch.tensor(
        [busy_s, first_s, last_s, cpu_s, plan.makespan_s, plan.prediction.bubble_ratio, *work.numbers()],
        dtype=torch.float64,
        device=device,
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with named_collectives(f"step {plan.step}, figures of all ranks"):
        dist.all_gather(everyone, mine)
    return [rank.tolist() for rank in everyone]


def _figures(
    step: int, epoch: int, epoch_step: int, loss: float, step_s: float, ranks: list[list[float]], plan: ExecutionPlan
) -> StepFigures:
    makespan_s = max(r[2] for r in ranks) - min(r[1] for r in ranks)
    predicted_s = max(r[4] for r in ranks)
    predicted_busy_s = sum(r[4] * (1 - r[5]) for r in ranks)
    return StepFigures(
        step=step,
        epoch=epoch,
        epoch_step=epoch_step,
        loss=loss,
        step_s=step_s,
        makespan_s=makespan_s,
        bubble_ratio=1 - sum(r[0] for r in ranks) / (len(ranks) * makespan_s) if makespan_s > 0 else 0.0,
        cpu_s=sum(r[3] for r in ranks),
        predicted_makespan_s=predicted_s,
        predicted_bubble_ratio=1 - predicted_busy_s / (len(ranks) * predicted_s) if predicted_s > 0 else 0.0,
        real_tokens=plan.real_tokens,
        padded_tokens=plan.padded_tokens,
        work=sum((Work.from_numbers([int(n) for n in r[6:]]) for r in ranks), Work()),
        num_micro_batches=plan.num_micro_batches,
    )


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds; on an accelerator once its work is done, so that a span ends when its action does."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def _transport(context: RankContext, variant: Variant) -> Transport:
    topology, job, device = topology_of(context.config), context.config.job, context.device
    inner: Transport
    if job.strict:
        inner = StrictTransport(topology, context.rank, context.groups, timeout_s=job.timeout_s)
    else:
        inner = TorchP2PTransport(topology, context.rank, context.groups, device=device, timeout_s=job.timeout_s)
    if not variant.fill_waits:
        return inner
    if device.type == "cpu":
        return WatchedTransport(inner)
    return WatchedTransport(inner, drain=lambda: torch.cuda.current_stream(device).synchronize())


def broadcast_bytes(data: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank, over the job's own process group: what the store must not hold."""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    length = int(size)
    payload = torch.zeros(length, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0 and length:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(payload, src=0)
    return struct.pack(f"{length}B", *payload.tolist())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
