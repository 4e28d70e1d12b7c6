"""A planned step for people: tables of micro-batches, what the plan promises, and the timeline as text.

ProvenStep ─► of_proven_step ─┐
read_plan_file ─► view_of_file┴► PlanView ─► summary_table, micro_batch_table, timeline
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, Piece, SampleLength, find_pieces, sample_pieces
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import DataError, PlanError, format_bytes
from dynapipe_ext.schedules.actions import Action, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import Certificate, ReplicaBounds
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.notation import draw, format_lines
from dynapipe_ext.timeline import Trace
from dynapipe_ext.tools.check.plan_file import PlanFile, ReplicaFile, ShapeFile
from dynapipe_ext.tools.console import percent

if TYPE_CHECKING:  # show-schedule lowers and proves nothing
    from dynapipe_ext.executor.proven_step import ProvenStep


@dataclass(frozen=True, slots=True)
class MicroBatchView:
    """One micro-batch, with its piece of a cut sample, if any. `real_tokens` is None for a plan read from a file, which
    has shapes but no lengths."""

    num_samples: int
    rows: int
    encoder_len: int
    decoder_len: int
    recompute: str
    real_tokens: int | None = None
    piece: Piece | None = None

    @property
    def padded_tokens(self) -> int:
        return self.rows * (self.encoder_len + self.decoder_len)

    @property
    def shape(self) -> str:
        """
        >>> MicroBatchView(num_samples=2, rows=2, encoder_len=64, decoder_len=8, recompute="none").shape
        '2 x (64 + 8)'
        """
        if self.decoder_len:
            return f"{self.rows} x ({self.encoder_len} + {self.decoder_len})"
        return f"{self.rows} x {self.encoder_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica, with bytes per pipeline rank. `peak_bytes` leaves out buffers in flight; `in_flight_bytes` has them
    (empty where a file does not record them). A plan's file stores no durations, so it has no trace.
    """

    dp_rank: int
    layout: str
    micro_batches: tuple[MicroBatchView, ...]
    schedule: PipelineSchedule
    makespan_s: float
    lower_bound_s: float
    peak_bytes: tuple[int, ...]
    in_flight_bytes: tuple[int, ...] = ()
    bubble_ratio: float | None = None
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan as it is shown. Its lower bound is the largest of all replicas, as in StepPlan."""

    topology: Topology
    replicas: tuple[ReplicaView, ...]
    planning_s: float | None = None
    bubble_ratio: float | None = None

    @property
    def micro_batches(self) -> tuple[MicroBatchView, ...]:
        return tuple(micro_batch for replica in self.replicas for micro_batch in replica.micro_batches)

    @property
    def makespan_s(self) -> float:
        return max(replica.makespan_s for replica in self.replicas)

    @property
    def lower_bound_s(self) -> float:
        return max(replica.lower_bound_s for replica in self.replicas)

    @property
    def padded_tokens(self) -> int:
        return sum(m.padded_tokens for m in self.micro_batches)

    @property
    def real_tokens(self) -> int | None:
        counts = [m.real_tokens for m in self.micro_batches]
        return None if None in counts else sum(tokens for tokens in counts if tokens is not None)


def of_proven_step(proven: ProvenStep, topology: Topology, *, planning_s: float | None = None) -> PlanView:
    plan, replicas = proven.step_plan, []
    for replica, schedule, prediction, in_flight_bytes, trace in zip(
        plan.batch.replicas, plan.schedules, plan.predictions, proven.in_flight_bytes, plan.traces, strict=True
    ):
        pieces = find_pieces(replica.micro_batches)
        replicas.append(
            ReplicaView(
                dp_rank=replica.dp_rank,
                layout=_layout(replica.micro_batches),
                micro_batches=tuple(
                    _view_micro_batch(m, pieces.get(position), m.real_tokens)
                    for position, m in enumerate(replica.micro_batches)
                ),
                schedule=schedule,
                makespan_s=prediction.makespan_ns / 1e9,
                lower_bound_s=prediction.lower_bound_ns / 1e9,
                peak_bytes=prediction.peak_bytes,
                in_flight_bytes=in_flight_bytes,
                bubble_ratio=prediction.bubble_ratio,
                trace=trace,
            )
        )
    return PlanView(topology=topology, replicas=tuple(replicas), planning_s=planning_s, bubble_ratio=plan.bubble_ratio)


def view_of_file(plan: PlanFile) -> PlanView:
    """Return the plan of a file. Raises DataError for claims of another number of ranks, PlanError naming an action."""
    replicas = []
    for dp_rank, (file, (schedule, pieces)) in enumerate(zip(plan.replicas, list_orders(plan), strict=True)):
        for name, each in (("peak_bytes", file.peak_bytes), ("in_flight_bytes", file.in_flight_bytes)):
            if len(each) != plan.topology.pp and (each or name == "peak_bytes"):
                raise DataError(
                    f"{plan.path}: replica {dp_rank} has {name} of {len(each)} ranks but pp is {plan.topology.pp}: give"
                    " one per rank"
                )
        replicas.append(
            ReplicaView(
                dp_rank=dp_rank,
                layout=_layout(file.micro_batches),
                micro_batches=tuple(
                    _view_micro_batch(shape, pieces.get(m)) for m, shape in enumerate(file.micro_batches)
                ),
                schedule=schedule,
                makespan_s=file.makespan_s,
                lower_bound_s=file.lower_bound_s,
                peak_bytes=file.peak_bytes,
                in_flight_bytes=file.in_flight_bytes,
            )
        )
    return PlanView(topology=plan.topology, replicas=tuple(replicas))


def _view_micro_batch(m: MicroBatch | ShapeFile, piece: Piece | None, real_tokens: int | None = None) -> MicroBatchView:
    return MicroBatchView(len(m.samples), m.rows, m.encoder_len, m.decoder_len, m.recompute, real_tokens, piece)


def list_orders(plan: PlanFile) -> list[tuple[PipelineSchedule, dict[int, Piece]]]:
    """Return each replica's schedule, checked to run, with the pieces of cut samples in its micro-batches by position.

    Raises PlanError naming the file, the replica and what is at fault.
    """
    orders = []
    for dp_rank, file in enumerate(plan.replicas):
        micro_batches = [_take_piece(shape) for shape in file.micro_batches]
        try:
            schedule = schedule_of_file(file, forward_only=plan.forward_only)
            validate(schedule, len(micro_batches), sample_pieces(micro_batches))
        except PlanError as error:
            raise PlanError(f"{plan.path}: replica {dp_rank}: {error}") from error
        orders.append((schedule, find_pieces(micro_batches)))
    return orders


def _take_piece(shape: ShapeFile) -> MicroBatch:
    """Return a micro-batch of nothing but the piece that the file says it has, if any."""
    if not shape.piece or not shape.samples:
        return MicroBatch(())
    start, end = shape.piece
    piece = SampleLength(shape.samples[0], end - start, start=start)
    return MicroBatch((piece,), cast(Layout, shape.layout), attention="carried")


def schedule_of_file(replica: ReplicaFile, *, forward_only: bool) -> PipelineSchedule:
    """Return a replica's actions as a schedule, which may not run. Raises PlanError for text that is not an action."""
    ranks = tuple(tuple(map(Action.parse, texts)) for texts in replica.ranks)
    return PipelineSchedule(replica.name, ranks, replica.placement, forward_only=forward_only)


def _layout(micro_batches: Sequence[MicroBatch | ShapeFile]) -> str:
    return " and ".join(sorted({m.layout for m in micro_batches})) or "empty"


def rendered_plan(view: PlanView, *, width: int) -> RenderableType:
    """All tables and timelines of a plan, for a console of `width` columns."""
    parts: list[RenderableType] = []
    for replica in view.replicas:
        parts += [micro_batch_table(replica), timeline(replica, width=width)]
    return Group(*parts, plan_summary_table(view))


def plan_summary_table(view: PlanView) -> Table:
    t = view.topology
    what = "Plan of forwards alone" if view.replicas[0].schedule.forward_only else "Plan"
    table = Table(title=f"{what} for TP{t.tp} × PP{t.pp} × DP{t.dp}", title_justify="left", title_style="bold")
    table.add_column("")
    for replica in view.replicas:
        table.add_column(f"replica {replica.dp_rank}", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)

    def row(name: str, each: Sequence[str], whole: str) -> None:
        table.add_row(name, *each, whole)

    replicas = view.replicas
    row("micro-batches", [str(len(r.micro_batches)) for r in replicas], str(len(view.micro_batches)))
    row("makespan", [_seconds(r.makespan_s) for r in replicas], _seconds(view.makespan_s))
    row("lower bound", [_seconds(r.lower_bound_s) for r in replicas], _seconds(view.lower_bound_s))
    row(
        "gap to the bound",
        [_gap(r.makespan_s, r.lower_bound_s) for r in replicas],
        _gap(view.makespan_s, view.lower_bound_s),
    )
    row("bubble", [percent(r.bubble_ratio) for r in replicas], percent(view.bubble_ratio))
    row("padding efficiency", [_efficiency(r.micro_batches) for r in replicas], _efficiency(view.micro_batches))
    for rank in range(max(len(r.peak_bytes) for r in replicas)):
        peaks = [r.peak_bytes[rank] for r in replicas]
        row(f"peak bytes of pipeline rank {rank}", [format_bytes(peak) for peak in peaks], format_bytes(max(peaks)))
        if all(r.in_flight_bytes for r in replicas):
            buffers = [r.in_flight_bytes[rank] for r in replicas]
            row("  and in flight at most", [format_bytes(size) for size in buffers], format_bytes(max(buffers)))
    if view.planning_s is not None:
        row("planning took", ["" for _ in replicas], _seconds(view.planning_s))
    return table


def micro_batch_table(replica: ReplicaView) -> Table:
    table = Table(
        title=f"Replica {replica.dp_rank}: {replica.layout} micro-batches in injection order",
        title_justify="left",
        title_style="bold",
    )
    for heading in ("#", "samples", "rows x length", "tokens", "padded"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    in_pieces = any(m.piece for m in replica.micro_batches)
    if in_pieces:
        table.add_column("carries", no_wrap=True)
    for number, m in enumerate(replica.micro_batches):
        real = "-" if m.real_tokens is None else f"{m.real_tokens:,}"
        carries = [str(m.piece or "")] if in_pieces else []
        table.add_row(str(number), str(m.num_samples), m.shape, real, f"{m.padded_tokens:,}", m.recompute, *carries)
    return table


def timeline(replica: ReplicaView, *, width: int) -> Text:
    """The simulated schedule, a row for each pipeline rank; without a trace only the order of actions."""
    if not replica.micro_batches:
        return Text(f"replica {replica.dp_rank} has nothing to do in this step\n", style="yellow")
    if replica.trace is None:
        return Text(f"{replica.schedule.name}, order of the actions:\n{format_lines(replica.schedule)}")
    margin = len(str(len(replica.schedule.ranks) - 1)) + len(" ||")
    legend = "forward 3--- idle ..." if replica.schedule.forward_only else "forward 3--- backward 3'== idle ..."
    picture = draw(replica.schedule, replica.trace, width=max(1, width - margin))
    return Text(f"{replica.schedule.name}, {_seconds(replica.makespan_s)} from left to right; {legend}\n{picture}")


def _efficiency(micro_batches: Sequence[MicroBatchView]) -> str:
    padded = sum(m.padded_tokens for m in micro_batches)
    real = [m.real_tokens for m in micro_batches if m.real_tokens is not None]
    if not padded or len(real) < len(micro_batches):
        return "-"
    return percent(sum(real) / padded)


def _gap(makespan_s: float, lower_bound_s: float) -> str:
    """
    >>> _gap(1.05, 1.0), _gap(0.0, 0.0)
    ('5.0 %', '-')
    """
    return percent(makespan_s / lower_bound_s - 1) if lower_bound_s > 0 else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def certificate_of_file(plan: PlanFile) -> Certificate | None:
    """The certificate that a plan's file claims; None where it lacks a bound."""
    if any({"stage", "chain", "heads_tails"} - replica.bounds_s.keys() for replica in plan.replicas):
        return None
    replicas = []
    for replica in plan.replicas:
        bounds_ns = {f"{name}_ns": round(seconds * 1e9) for name, seconds in replica.bounds_s.items()}
        replicas.append(ReplicaBounds(**bounds_ns))
    return Certificate(
        makespan_ns=round(max(replica.makespan_s for replica in plan.replicas) * 1e9),
        replicas=tuple(replicas),
        batch_ns=None if plan.batch_bound_s is None else round(plan.batch_bound_s * 1e9),
        free_batch_ns=None if plan.free_batch_bound_s is None else round(plan.free_batch_bound_s * 1e9),
    )


def certificate_table(certificate: Certificate) -> Table:
    table = Table(title="Certificate: nothing ends before", title_justify="left", title_style="bold")
    table.add_column("")
    for dp_rank in range(len(certificate.replicas)):
        table.add_column(f"replica {dp_rank}", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)

    def row(name: str, each: list[int | None]) -> None:
        bounds_ns = [ns for ns in each if ns is not None]
        table.add_row(name, *map(_time, each), _time(max(bounds_ns, default=None)))

    replicas = certificate.replicas
    row("busiest rank's work, with the least before and after", [r.stage_ns for r in replicas])
    row("longest chain of one micro-batch", [r.chain_ns for r in replicas])
    row("one rank at a time, preemptive", [r.heads_tails_ns for r in replicas])
    row("bytes x time under the limit", [r.byte_time_ns for r in replicas])
    row("any order of these micro-batches", [r.best_ns for r in replicas])
    idle = [""] * len(replicas)
    table.add_row("  the plan is above that by", *idle, percent(certificate.gap))
    table.add_row("any plan of this batch", *idle, _time(certificate.batch_ns))
    table.add_row("  the plan is above that by", *idle, percent(certificate.batch_gap))
    table.add_row("any plan, wherever layers live, with any memory", *idle, _time(certificate.free_batch_ns))
    return table


def _time(ns: int | None) -> str:
    """
    >>> _time(1_234_000_000), _time(50_000), _time(None)
    ('1.234 s', '0.05 ms', '-')
    """
    if ns is None:
        return "-"
    return f"{ns / 1e9:.3f} s" if ns >= 1_000_000_000 else f"{ns / 1e6:.2f} ms"
