"""A schedule for people: its simulated timeline on a terminal or as a page, with its figures.

published_schedule, optimize, … ─┐
.csv .txt .json ─► read_schedule ┴► view_of(schedule, costs) ─► rendered, write_html
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynapipe_ext.batch.micro_batches import Piece
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes, simulate, simulate_ns, validate
from dynapipe_ext.schedules.notation import draw_cells, from_csv, parse_lines
from dynapipe_ext.timeline import Trace
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.console import counted, percent
from dynapipe_ext.tools.show.plan import list_orders
from dynapipe_ext.tools.show.timeline import write_trace_html

FILE_KINDS = (".csv", ".txt", ".json")
FOR_COSTS = ("cyclic", "adaptive")  # schedules made for given costs and a memory limit
MEAN_BYTES = 1_000_000  # bytes of a micro-batch of mean size on a rank
_LONGEST_MS = 1e9
_STYLES = {
    Kind.FORWARD: "black on bright_blue",
    Kind.BACKWARD: "black on bright_green",
    Kind.BACKWARD_INPUT: "black on bright_cyan",
    Kind.BACKWARD_WEIGHT: "black on bright_yellow",
}
_LEGEND = {
    Kind.FORWARD: ("3---", "forward"),
    Kind.BACKWARD: ("3'==", "backward"),
    Kind.BACKWARD_INPUT: ("3i==", "input gradient"),
    Kind.BACKWARD_WEIGHT: ("3w~~", "weight gradient"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule with its figures. `in_flight` is the largest number of micro-batches on each rank at once; an
    activation on one of a rank's v stages counts 1/v. `peak_bytes` counts MEAN_BYTES for a micro-batch of mean size.
    `inner_bubble_ratio` leaves out the time before a rank's first and after its last action."""

    schedule: PipelineSchedule
    trace: Trace
    makespan_ns: int
    lower_bound_ns: int
    bubble_ratio: float
    inner_bubble_ratio: float
    in_flight: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    times: str

    @property
    def title(self) -> str:
        ranks, stages = len(self.schedule.ranks), self.schedule.num_stages
        on = counted(ranks, "rank") if stages == ranks else f"{counted(stages, 'stage')} on {counted(ranks, 'rank')}"
        return f"{self.schedule.name}: {on}, {counted(self.schedule.num_micro_batches, 'micro-batch')}"


def read_schedule(path: str | Path, *, replica: int | None = None) -> tuple[PipelineSchedule, dict[int, Piece]]:
    """Return the schedule in a file, checked to run: torch's CSV, lines of actions (.txt), or a plan's replica (.json).

    With it come the pieces of cut samples in its micro-batches, which only a plan has. Raises DataError for a file that
    cannot be read, PlanError naming a mistake in it, ConfigError for a replica that it does not have.
    """
    source = Path(path)
    if source.suffix == ".json":
        orders = list_orders(read_plan_file(source))
        chosen = 0 if replica is None else replica
        if not 0 <= chosen < len(orders):
            raise ConfigError(f"--replica is {chosen} but {path} has replicas 0..{len(orders) - 1}: choose of these")
        if not any(orders[chosen][0].ranks):
            raise PlanError(f"replica {chosen} of {path} has nothing to do in this step: choose another with --replica")
        return orders[chosen]
    if replica is not None:
        raise ConfigError(f"--replica picks a replica of a plan's .json: {path} holds one schedule")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give a schedule's .csv, .txt or .json") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): give a schedule's .csv or .txt") from error
    try:
        read = from_csv if source.suffix == ".csv" else parse_lines
        schedule = read(text, source.stem)
        if not any(schedule.ranks):
            raise PlanError("no rank has an action: give each rank's actions, such as 0F0 and 0B0")
        validate(schedule, schedule.num_micro_batches)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return schedule, {}


def uneven_factors(num_micro_batches: int, *, cv: float, seed: int) -> npt.NDArray[np.float64]:
    """Lognormal factors of mean 1 and coefficient of variation `cv`, one for each micro-batch.

    Errors: ConfigError for a `cv` outside 0..10 or a negative seed.
    """
    if not 0 <= cv <= 10:
        raise ConfigError(f"the costs' coefficient of variation is {cv} but must lie between 0 and 10")
    if seed < 0:
        raise ConfigError(f"seed is {seed} but must be at least 0")
    sigma = math.sqrt(math.log1p(cv**2))
    return np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, num_micro_batches)


def rank_costs(
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    times_ms: Sequence[float],
    factors: npt.NDArray[np.float64] | None = None,
) -> MicroBatchCosts:
    """Costs where F, I and W of a micro-batch take `times_ms` on every rank, and its activations MEAN_BYTES.

    Both are spread evenly over the rank's stages, so that schedules with different numbers of stages compare.
    `factors`, one for each micro-batch, multiply them. Transfers are free.

    Errors: ConfigError for times that are not three of 0 to 10^9 ms, F and I above 0.
    """
    if len(times_ms) != 3 or not all(0 <= time <= _LONGEST_MS for time in times_ms) or not min(times_ms[:2]) > 0:
        shown = ",".join(f"{time:g}" for time in times_ms)
        raise ConfigError(f"times are {shown} ms but must be F,I,W: above 0, above 0, at least 0, none above 10^9")
    on_rank = Counter(stage_ranks)
    shares = np.array([1 / on_rank[rank] for rank in stage_ranks])
    sizes = np.outer(shares, np.ones(num_micro_batches) if factors is None else factors)
    forward, gradient, weight = (np.rint(1e6 * time * sizes).astype(np.int64) for time in times_ms)
    if min(forward.min(), gradient.min()) < 1:
        raise ConfigError("times must be F,I,W of at least a nanosecond on every stage: raise those of F and I")
    none = np.zeros_like(forward)
    return MicroBatchCosts(
        forward_ns=forward,
        backward_ns=gradient + weight,
        weight_ns=weight,
        stored_bytes=np.rint(MEAN_BYTES * sizes).astype(np.int64),
        working_bytes=none,
        transfer_ns=none[1:],
        transfer_bytes=none[1:],
        static_bytes=none[:, 0],
    )


def view_of(
    schedule: PipelineSchedule, costs: MicroBatchCosts, times: str, *, pieces: Mapping[int, Piece] | None = None
) -> ScheduleView:
    """The schedule simulated with these costs. `times` describes the costs in words, `pieces` are by micro-batch."""
    held_once = replace(costs, stored_bytes=np.ones_like(costs.stored_bytes))
    if schedule.forward_only:
        costs, held_once = costs.drop_backwards(), held_once.drop_backwards()
    spans = [rank for rank in simulate_ns(schedule, costs) if rank]
    makespan_ns = max(rank[-1][1] for rank in spans)
    busy_ns = sum(end - start for rank in spans for start, end in rank)
    inner_ns = sum(rank[-1][1] - rank[0][0] for rank in spans)
    activations = compute_peak_bytes(schedule, held_once)
    on_rank = Counter(schedule.stage_ranks)
    return ScheduleView(
        schedule=schedule,
        trace=simulate(schedule, costs).with_pieces(pieces or {}),
        makespan_ns=makespan_ns,
        lower_bound_ns=bound_replica(schedule, costs, split=schedule.is_split).best_ns,
        bubble_ratio=1 - busy_ns / (len(schedule.ranks) * makespan_ns),
        inner_bubble_ratio=1 - busy_ns / inner_ns,
        in_flight=tuple(held / on_rank[rank] for rank, held in enumerate(activations)),
        peak_bytes=compute_peak_bytes(schedule, costs),
        times=times,
    )


def schedule_json(view: ScheduleView) -> dict[str, Any]:
    """Orders and figures of a schedule; `ranks` has each rank's actions, such as "0F3"."""
    return {
        "schedule": view.schedule.name,
        "times": view.times,
        "stage_ranks": list(view.schedule.stage_ranks),
        "micro_batches": view.schedule.num_micro_batches,
        "makespan_s": view.makespan_ns / 1e9,
        "lower_bound_s": view.lower_bound_ns / 1e9,
        "bubble_ratio": view.bubble_ratio,
        "inner_bubble_ratio": view.inner_bubble_ratio,
        "in_flight": list(view.in_flight),
        "peak_bytes": list(view.peak_bytes),
        "ranks": [list(map(str, actions)) for actions in view.schedule.ranks],
    }


def rendered_schedule(view: ScheduleView, *, width: int) -> RenderableType:
    """The timeline with a row for each rank in at most `width` columns, its legend and the figures."""
    margin = len(str(len(view.schedule.ranks) - 1))
    rows = draw_cells(view.schedule, view.trace, width=max(1, width - margin - len(" ||")))
    text = Text(no_wrap=True, overflow="crop", end="")
    for rank, row in enumerate(rows):
        text.append(f"{rank:>{margin}} |")
        for piece, kind in row:
            text.append(piece, _STYLES[kind] if kind else "dim")
        text.append("|\n")
    legend = Text(f"{_ms(view.makespan_ns)} from left to right; ")
    kinds = {action.kind for rank in view.schedule.ranks for action in rank}
    for kind, (sample, meaning) in _LEGEND.items():
        if kind in kinds:
            legend.append(f"{meaning} ").append(sample, _STYLES[kind]).append("  ")
    legend.append("idle ...")
    if len(view.schedule.ranks) < view.schedule.num_stages:
        drawn = any("." in piece for row in rows for piece, kind in row if kind)
        legend.append("  stage 1: 1.3" if drawn else "  (too narrow for stages)")
    table = Table.grid(padding=(0, 2))
    for name, value in _figures(view):
        table.add_row(name, value)
    return Group(Text(view.title, style="bold"), text, legend, table)


def write_html(path: str | Path, view: ScheduleView) -> None:
    """Write one page without external resources: a timeline with zoom, and the figures of the action under the
    pointer."""
    write_trace_html(
        path,
        measured=(),
        simulated=(view.trace,),
        title=view.title,
        subtitle="; ".join(f"{name}: {value}" for name, value in _figures(view)),
        rank_names={rank: f"pp{rank}" for rank in range(len(view.schedule.ranks))},
    )


def _figures(view: ScheduleView) -> list[tuple[str, str]]:
    gap = view.makespan_ns / view.lower_bound_ns - 1
    return [
        ("times", view.times),
        ("makespan", _ms(view.makespan_ns)),
        (
            "lower bound",
            f"{_ms(view.lower_bound_ns)} for any order on this placement; the makespan is {percent(gap)} above",
        ),
        (
            "bubble ratio",
            f"{percent(view.bubble_ratio)}, {percent(view.inner_bubble_ratio)} between each rank's first and"
            " last action",
        ),
        ("peak in flight", _most(view.in_flight, "micro-batch" if max(view.in_flight) == 1 else "micro-batches")),
        (
            "peak memory",
            _most([num_bytes / 1e6 for num_bytes in view.peak_bytes], "MB")
            + f"; a micro-batch of mean size holds {MEAN_BYTES / 1e6:g} MB",
        ),
    ]


def _most(by_rank: Sequence[float], unit: str) -> str:
    """
    >>> _most([3.999998, 2.5], "MB")
    '4 MB (by rank: 4 2.5)'
    """
    return f"{max(by_rank):.4g} {unit} (by rank: {' '.join(f'{held:.4g}' for held in by_rank)})"


def _ms(ns: int) -> str:
    """
    >>> _ms(27_000_000), _ms(1_234_567)
    ('27 ms', '1.235 ms')
    """
    return f"{round(ns / 1e6, 3):,.10g} ms"
