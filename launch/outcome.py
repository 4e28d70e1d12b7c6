"""What a run leaves in RUN_DIR: report.json, loss.png, trace.html, trace.json and the Chrome trace."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from rich.console import Console

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch.job import Variant, make_planner, topology_of
from dynapipe_ext.launch.training_loop import RankFigures, StepFigures
from dynapipe_ext.lengths import sample_lengths
from dynapipe_ext.models.flops import Work
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.judge.filling import simulate_filling, with_room_to_fill
from dynapipe_ext.schedules.judge.memory import held_bytes
from dynapipe_ext.schedules.judge.simulate import simulate
from dynapipe_ext.timeline import Span, Trace, merge
from dynapipe_ext.tools.account.report import (
    RunReport,
    RunResult,
    StoreInfo,
    compare_table,
    shared_cores_note,
    summary_table,
)
from dynapipe_ext.tools.show.loss_curve import write_loss_png
from dynapipe_ext.tools.show.timeline import TraceRecord, write_chrome_trace, write_trace_file, write_trace_html
from dynapipe_ext.topology import Topology

_STRICT_NOTE = (
    "Ranks filled their waits with weight gradients (fill_waits). The simulated timeline does not: of ranks that share"
    " cores it has the schedule's own order."
)


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """All ranks' figures of one variant."""

    variant: Variant
    steps: list[StepFigures]
    ranks: list[RankFigures]


def write_outcome(
    config: TrainConfig,
    costs: CostModel,
    dataset: TokenDataset,
    runs: list[VariantFigures],
    *,
    store: StoreInfo,
    device: str,
    num_cores: int,
) -> None:
    """Write the files and print the tables; `runs[0]` is the job itself, the others its baselines."""
    topology, run_dir = topology_of(config), Path(config.run.run_dir)
    results = [_result(run) for run in runs]
    oversubscribed = device == "cpu" and topology.world_size > num_cores
    report = RunReport(
        result=results[0],
        topology=topology,
        device=device if device != "cpu" else f"cpu ({platform.machine()}, {num_cores} cores)",
        num_cores=num_cores,
        seed=config.run.seed,
        loss_norm=config.plan.loss_norm,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        oversubscribed=oversubscribed,
        store=store,
        versions=versions(),
        model=asdict(config.model) | {"vocab_size": dataset.vocab_size},
        compare=tuple(results[1:]) or None,
    )
    report.write(run_dir / "report.json")
    curves = {
        result.name: list(
            zip(range(1, len(result.losses) + 1), accumulate(result.real_tokens_per_step), result.losses, strict=True)
        )
        for result in results
    }
    write_loss_png(run_dir / "loss.png", curves, f"Training loss, TP{topology.tp} x PP{topology.pp} x DP{topology.dp}")
    _write_traces(config, costs, dataset, runs[0], num_cores if oversubscribed else None)
    console = Console()
    console.print(summary_table(report))
    if report.compare:
        console.print(compare_table(report))
    console.print(f"report.json, loss.png and trace.html are in {run_dir}", highlight=False)


def _result(run: VariantFigures) -> RunResult:
    steps, bubbles = run.steps, tuple(s.bubble_ratio for s in run.steps)
    return RunResult(
        name=run.variant.name,
        layout=run.variant.layout,
        schedule=run.variant.schedule,
        losses=tuple(s.loss for s in steps),
        real_tokens_per_step=tuple(s.real_tokens for s in steps),
        padded_tokens=sum(s.padded_tokens for s in steps),
        work=sum((s.work for s in steps), Work()),
        step_s=tuple(s.step_s for s in steps),
        cpu_s=sum(s.cpu_s for s in steps),
        num_micro_batches=tuple(s.num_micro_batches for s in steps),
        measured_makespan_s=tuple(s.makespan_s for s in steps),
        predicted_makespan_s=tuple(s.predicted_makespan_s for s in steps),
        measured_bubble_ratio=bubbles if all(math.isfinite(ratio) for ratio in bubbles) else (),
        predicted_bubble_ratio=tuple(s.predicted_bubble_ratio for s in steps),
        exposed_planning_s=max(r.exposed_planning_s for r in run.ranks),
        predicted_peak_bytes=tuple(r.predicted_peak_bytes for r in run.ranks),
        measured_peak_bytes=tuple(r.measured_peak_bytes for r in run.ranks),
    )


def _write_traces(
    config: TrainConfig, costs: CostModel, dataset: TokenDataset, run: VariantFigures, shared_cores: int | None
) -> None:
    topology, run_dir = topology_of(config), Path(config.run.run_dir)
    traced = sorted({step for rank in run.ranks for step in rank.spans})
    measured = tuple(
        merge((Trace(tuple(rank.spans.get(step, ()))) for rank in run.ranks), f"step {step + 1}") for step in traced
    )
    simulated = tuple(_simulated(config, costs, dataset, run.variant, run.steps[step], shared_cores) for step in traced)
    names = {}
    for rank in range(topology.world_size):
        me = topology.coordinates(rank)
        names[rank] = f"dp{me.dp_rank} pp{me.pp_rank} tp{me.tp_rank}"
    notes = page_notes(topology.world_size, shared_cores, fill_waits=run.variant.fill_waits)
    record = TraceRecord(
        measured=measured,
        simulated=simulated,
        title=f"Pipeline timeline, TP{topology.tp} x PP{topology.pp} x DP{topology.dp}",
        subtitle=f"{run.variant.layout} layout, {run.variant.schedule} schedule; measured above simulated",
        notes=notes,
        rank_names=names,
    )
    write_trace_file(run_dir / "trace.json", record)
    write_trace_html(
        run_dir / "trace.html",
        measured=measured,
        simulated=simulated,
        title=record.title,
        subtitle=record.subtitle,
        notes=notes,
        rank_names=names,
    )
    write_chrome_trace(run_dir / "trace.chrome.json", [*measured, *simulated])


def page_notes(world_size: int, shared_cores: int | None, *, fill_waits: bool) -> tuple[str, ...]:
    """What readers of the timeline must know; `shared_cores` is None where every rank has a core of its own."""
    if shared_cores is None:
        return ()
    return (shared_cores_note(world_size, shared_cores), *([_STRICT_NOTE] if fill_waits else []))


def _simulated(
    config: TrainConfig,
    costs: CostModel,
    dataset: TokenDataset,
    variant: Variant,
    step: StepFigures,
    shared_cores: int | None,
) -> Trace:
    """The step proven again (it is a pure function of lengths and settings) and simulated on all ranks.

    Where ranks share cores the simulation shares them too, each replica getting its part.
    """
    topology, data = topology_of(config), config.data
    batches = GlobalBatches(
        dataset.lengths,
        batch_size=data.batch_size or None,
        tokens_per_batch=data.tokens_per_batch or None,
        seed=config.run.seed,
        epoch=step.epoch,
        drop_last=data.drop_last,
    )
    samples = sample_lengths(dataset.lengths, batches[step.epoch_step])
    plan = prove_step(make_planner(config, costs, variant), samples, step=step.step).step_plan
    traces = []
    for replica, schedule, priced in zip(plan.batch.replicas, plan.schedules, plan.costs, strict=True):
        if variant.fill_waits and shared_cores is None:
            trace = filled_trace(schedule, priced)
        else:
            trace = _shared_simulation(schedule, priced, topology, shared_cores)
        shapes = [(m.rows, m.encoder_len, m.decoder_len) for m in replica.micro_batches]
        for tp_rank in range(topology.tp):
            ranks = [topology.rank(tp_rank=tp_rank, pp_rank=p, dp_rank=replica.dp_rank) for p in range(topology.pp)]
            traces.append(trace.with_shapes(shapes).shifted(ranks))
    return merge(traces, f"step {step.step + 1}")


def filled_trace(schedule: PipelineSchedule, costs: MicroBatchCosts) -> Trace:
    """The step on ranks that fill their waits, from the order they are given; bytes as `simulate` has them."""
    order = with_room_to_fill(schedule, costs)
    ran = simulate_filling(order, costs)
    held = held_bytes(replace(order, ranks=tuple(tuple(action for action, _, _ in rank) for rank in ran)), costs)
    spans = [
        Span(
            rank=rank,
            label=str(action),
            start_s=start / 1e9,
            end_s=end / 1e9,
            cpu_s=(end - start) / 1e9,
            num_bytes=num_bytes,
        )
        for rank, (actions, sizes) in enumerate(zip(ran, held, strict=True))
        for (action, start, end), num_bytes in zip(actions, sizes, strict=True)
    ]
    return Trace(tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s, span.rank))), schedule.name)


def _shared_simulation(
    schedule: PipelineSchedule, costs: MicroBatchCosts, topology: Topology, shared_cores: int | None
) -> Trace:
    """A replica's share is cores / (tp x dp) of its pipeline ranks' worth; below one, everything takes longer."""
    if shared_cores is None:
        return simulate(schedule, costs)
    share = shared_cores / (topology.tp * topology.dp)
    slower = max(1.0, 1.0 / share)
    return simulate(schedule, costs, num_cores=max(1, int(share))).stretched(slower)


def versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in ("dynapipe-ext", "torch", "megatron-core", "numpy", "redis"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
