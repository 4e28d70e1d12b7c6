"""Sleeping ranks: forked processes, a real store with a planner process, no arithmetic.

A transfer takes its link's time and carries a few bytes over gloo, or, with `real_messages`, the whole message.

RedisServer ◄── plans ── planner process        each rank: DynaPipeDataLoader ─► PipelineExecutor(EmulatedStage)

`run_steps` takes plans as they are instead, and actions may then last longer or shorter than the plans expect.
"""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from dynapipe_ext.launch.processes.env import RankEnv, limit_threads

limit_threads(1)  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dynapipe_ext.batch.topology import (  # noqa: E402
    ActivationFormat,
    TensorSpec,
    Topology,
)
from dynapipe_ext.costs.model import MicroBatchCosts  # noqa: E402
from dynapipe_ext.executor.engine import PipelineExecutor  # noqa: E402
from dynapipe_ext.executor.instructions import ExecutionPlan  # noqa: E402
from dynapipe_ext.executor.loader import DynaPipeDataLoader  # noqa: E402
from dynapipe_ext.executor.plans.channel import PlanDelivery  # noqa: E402
from dynapipe_ext.executor.protocols import Transport  # noqa: E402
from dynapipe_ext.executor.stages.emulated import EmulatedStage  # noqa: E402
from dynapipe_ext.executor.stages.joined_ranks import join_ranks  # noqa: E402
from dynapipe_ext.executor.store.address import StoreAddress  # noqa: E402
from dynapipe_ext.executor.transport.emulated import EmulatedLinks  # noqa: E402
from dynapipe_ext.executor.transport.strict import StrictTransport  # noqa: E402
from dynapipe_ext.executor.transport.torch_p2p import (  # noqa: E402
    TorchP2PTransport,
    make_pipeline_groups,
)
from dynapipe_ext.launch.processes.cluster import run_local  # noqa: E402
from dynapipe_ext.schedules.planner import Planner  # noqa: E402
from dynapipe_ext.timeline import Span, Trace  # noqa: E402

TransportName = Literal["strict", "torch"]
_TIMEOUT_S = 60.0
_EXCHANGED = 1024  # values that joined ranks send one another in an action, of which the costs know the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`batches`: the samples' lengths of each step, the same number a step. `scale` stretches the plan's seconds."""

    planner: Planner
    batches: tuple[tuple[int, ...], ...]
    transport: TransportName = "torch"
    scale: float = 1.0
    real_messages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step over all ranks. Spans are by global rank, on the machine's one monotonic clock."""

    predicted_s: float
    trace: Trace
    losses: tuple[float, ...]
    num_micro_batches: tuple[int, ...]

    @property
    def measured_s(self) -> float:
        return self.trace.makespan_s

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStep:
    """Plans by [dp_rank][pp_rank], and by dp_rank the costs as they turn out."""

    plans: tuple[tuple[ExecutionPlan, ...], ...]
    costs: tuple[MicroBatchCosts, ...]


class LengthsOnly:
    """A dataset whose samples nobody reads: sleeping ranks need no tokens."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        sizes = np.array([n for batch in batches for n in batch], np.int64)
        self.lengths = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was read by a rank that needs no data")


class _Spans:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)


def run_emulated(case: Case, address: StoreAddress, *, timeout_s: float = 300.0) -> list[Step]:
    """Every step of the case as it ran on pp x dp forked ranks. Raises JobError where a rank fails or hangs."""
    if len({len(batch) for batch in case.batches}) != 1:
        raise ValueError(f"steps of {[len(b) for b in case.batches]} samples: one batch size serves all steps")
    namespace = f"emulated-{uuid.uuid4().hex}"
    world_size = case.planner.topology.world_size
    with TemporaryDirectory() as folder:
        run_local(partial(_rank_main, case, address, namespace, Path(folder)), world_size, timeout_s=timeout_s)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]
    steps = []
    for parts in zip(*ranks, strict=True):
        spans = [Span(**{**span, "shape": tuple(span["shape"])}) for part in parts for span in part["spans"]]
        steps.append(
            Step(
                predicted_s=max(part["predicted_s"] for part in parts),
                trace=Trace(tuple(spans)),
                losses=tuple(part["loss"] for part in parts),
                num_micro_batches=tuple(parts[0]["num_micro_batches"]),
            )
        )
    return steps


def run_steps(
    topology: Topology,
    steps: Sequence[GivenStep],
    activation_format: ActivationFormat,
    *,
    transport: TransportName = "torch",
    scale: float = 1.0,
    timeout_s: float = 300.0,
) -> list[Trace]:
    """What all ranks did in each step, in unscaled seconds. Raises JobError where a rank fails or hangs."""
    with TemporaryDirectory() as folder:
        main = partial(_given_main, topology, steps, activation_format, transport, scale, Path(folder))
        run_local(main, topology.world_size, timeout_s=timeout_s)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(topology.world_size)]
    return [
        Trace(tuple(_unscaled(span, scale) for spans in of_step for span in spans))
        for of_step in zip(*ranks, strict=True)
    ]


def _unscaled(span: dict[str, Any], scale: float) -> Span:
    times = {name: span[name] * (1 / scale) for name in ("start_s", "end_s")}
    return Span(**{**span, **times, "shape": tuple(span["shape"])})


def median_ratio(steps: Sequence[Step]) -> float:
    """Measured over predicted makespan, the median of the steps."""
    return statistics.median(step.ratio for step in steps)


def _rank_main(case: Case, address: StoreAddress, namespace: str, folder: Path, env: RankEnv) -> int:
    planner, topology = case.planner, case.planner.topology
    transport: Transport = _join(env, topology, case.transport)
    joined = join_ranks(topology, env.rank, planner.allowed_widths, torch.device("cpu"), timeout_s=_TIMEOUT_S)

    def exchange(plan: ExecutionPlan) -> None:
        if plan.width > 1:
            rows = torch.zeros(plan.width, _EXCHANGED)
            joined[plan.width].exchange(rows, [1] * plan.width, [1] * plan.width)

    stage = EmulatedStage(
        lambda plan: planner.costs.at_width(plan.width).evaluate(plan.micro_batches),
        planner.activation_format,
        _tensor if case.real_messages else _nothing,
        scale=case.scale,
        exchange=exchange,
    )
    if not case.real_messages:
        transport = EmulatedLinks(transport, stage.link_s, _stamp)
    recorder = _Spans()
    executor = PipelineExecutor(stage, transport, recorder=recorder, rank=env.rank)
    loader = DynaPipeDataLoader(
        LengthsOnly(case.batches),
        planner,
        batch_size=len(case.batches[0]),
        num_workers=1,
        store=address,
        delivery=PlanDelivery(namespace=namespace, timeout_s=_TIMEOUT_S),
        coordinates=topology.coordinates(env.rank),
        needs_data=False,
    )
    with loader:
        taken = list(loader)  # planning is over before the first step: it would take a core from the sleepers' wake-ups
        steps = [_step(executor, recorder, case, plan, micro_batches) for micro_batches, plan in taken]
    transport.close()
    (folder / f"{env.rank}.json").write_text(json.dumps(steps))
    dist.destroy_process_group()
    return 0


def _given_main(
    topology: Topology,
    steps: Sequence[GivenStep],
    activation_format: ActivationFormat,
    transport_name: TransportName,
    scale: float,
    folder: Path,
    env: RankEnv,
) -> int:
    me, recorder = topology.coordinates(env.rank), _Spans()
    turned_out = iter([step.costs[me.dp_rank] for step in steps])
    stage = EmulatedStage(lambda _: next(turned_out), activation_format, _nothing, scale=scale)
    plain = EmulatedLinks(_join(env, topology, transport_name), stage.link_s, _stamp)
    executor = PipelineExecutor(stage, plain, recorder=recorder, rank=env.rank)
    spans = []
    for step in steps:
        plan = step.plans[me.dp_rank][me.pp_rank]
        recorder.spans = []
        dist.barrier()
        executor.execute(plan, [{}] * len(plan.micro_batches))
        spans.append([asdict(span) for span in recorder.spans])
    plain.close()
    (folder / f"{env.rank}.json").write_text(json.dumps(spans))
    dist.destroy_process_group()
    return 0


def _join(env: RankEnv, topology: Topology, name: TransportName) -> StrictTransport | TorchP2PTransport:
    """Enter the job's process group; the rank's transport."""
    dist.init_process_group(
        "gloo",
        init_method=env.init_method,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    groups = make_pipeline_groups(topology, env.rank, timeout_s=_TIMEOUT_S)
    if name == "strict":
        return StrictTransport(topology, env.rank, groups, timeout_s=_TIMEOUT_S)
    return TorchP2PTransport(topology, env.rank, groups, device=torch.device("cpu"), timeout_s=_TIMEOUT_S)


def _step(
    executor: PipelineExecutor, recorder: _Spans, case: Case, plan: ExecutionPlan, micro_batches: Sequence[Any]
) -> dict[str, Any]:
    recorder.spans = []
    dist.barrier()  # the makespan is that of a step whose ranks all start at once
    loss = executor.execute(plan, micro_batches)
    return {
        "predicted_s": plan.makespan_s * case.scale,
        "loss": loss,
        "num_micro_batches": plan.num_micro_batches,
        "spans": [asdict(span) for span in recorder.spans],
    }


def _tensor(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def _nothing(spec: TensorSpec) -> None:
    """What stands for a message whose content nobody carries."""


def _stamp(arrival_s: float) -> torch.Tensor:
    return torch.tensor([arrival_s], dtype=torch.float64)
