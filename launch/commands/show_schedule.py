"""`dynapipe show-schedule`: a published schedule, one made for given costs, or one from a file, with its figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dynapipe_ext.batch.micro_batches import Piece
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError, did_you_mean
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes
from dynapipe_ext.schedules.notation import to_csv
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.settings.plan_rules import own_placement
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.console import delivering, output
from dynapipe_ext.tools.files import write_output
from dynapipe_ext.tools.show.schedule import (
    FILE_KINDS,
    FOR_COSTS,
    MEAN_BYTES,
    rank_costs,
    read_schedule,
    rendered_schedule,
    schedule_json,
    uneven_factors,
    view_of,
    write_html,
)

DEFAULT_RANKS = 4
DEFAULT_MICRO_BATCHES = 8
DEFAULT_EFFORT = 1000
_MOST_STAGES = 2048  # a rank each; the work grows with their square
_MOST_CELLS = 40_000  # ranks x micro-batches x stages a rank: nobody can read larger pictures
_MOST_SEARCHED = 50_000_000  # cells x moves, which take longer the more stages there are: at most about ten seconds
_STAGES_OF_TWICE_THE_TIME = 64
_PIPE_COLUMNS = 140  # in a pipe: wide enough for the timeline's labels

_NAMES = (*PUBLISHED, *FOR_COSTS)
_EPILOG = f"""schedules: {", ".join(PUBLISHED)};
made for the costs and the limit: cyclic (DynaPipe's), adaptive (the search that `dynapipe plan` uses)

examples:
  dynapipe show-schedule zb-h1 --pp 4 --micro-batches 8
  dynapipe show-schedule interleaved-1f1b --stages-per-rank 3 --times 1,1.2,0.8
  dynapipe show-schedule 1f1b --pp 8 --micro-batches 32 --costs-cv 0.6 --seed 1 --html 1f1b.html
  dynapipe show-schedule adaptive --split-backward --costs-cv 0.6 --seed 1 --memory-limit-gb 0.003
  dynapipe show-schedule zb-v --csv zb_v.csv
  dynapipe show-schedule plan.json --replica 1

A .csv is torch.distributed.pipelining's (compute only), a .txt has lines such as "0: 0F0 0B0", a .json is what
`dynapipe plan --json` wrote. Files have orders without durations, so --times sets the times for them as well.
Activations are in proportion to times: a micro-batch of mean size holds {MEAN_BYTES / 1e6:g} MB on a rank.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("schedule", metavar="NAME|FILE", help="a schedule's name, or a file .csv, .txt or .json")
    add_flag(parser, "topology.pp", f"pipeline ranks (default: {DEFAULT_RANKS})")
    parser.add_argument("--micro-batches", type=int, metavar="N", help=f"of a step (default: {DEFAULT_MICRO_BATCHES})")
    parser.add_argument(
        "--stages-per-rank", type=int, metavar="N", help="of interleaved-1f1b, adaptive (default: 2, 1)"
    )
    parser.add_argument("--times", default="1,1,1", metavar="F,I,W", help="ms of a micro-batch on a rank, B = I + W")
    parser.add_argument(
        "--costs-cv", type=float, metavar="CV", help="uneven micro-batches: lognormal factors of mean 1"
    )
    add_flag(parser, "run.seed", "of --costs-cv (default: 0)")
    add_flag(
        parser, "plan.memory_limit_gb", "of a rank, 10^9 bytes (default: none; cyclic, adaptive: the peak of 1f1b)"
    )
    add_flag(parser, "plan.effort", f"of adaptive's search (default: {DEFAULT_EFFORT})")
    add_flag(parser, "plan.split_backward", "run B as I and W (adaptive)", default=False)
    parser.add_argument("--replica", type=int, metavar="N", help="which replica of a plan (default: 0)")
    parser.add_argument("--html", metavar="FILE", help="also write a page that needs no network")
    parser.add_argument("--csv", metavar="FILE", help="also write the schedule as torch.distributed.pipelining's CSV")
    add_json(parser, "orders and figures")


def run(args: argparse.Namespace) -> int:
    console = output(_PIPE_COLUMNS, json_to=args.json)
    _check_flags(args)
    fixed, pieces = (None, {}) if args.schedule in FOR_COSTS else _schedule(args)
    stage_ranks, num_micro_batches = _shape(args) if fixed is None else (fixed.stage_ranks, fixed.num_micro_batches)
    times = _times(args.times)
    provenance = f"F {times[0]:g}, I {times[1]:g}, W {times[2]:g} ms of a micro-batch on a rank, transfers free"
    factors = None
    if args.costs_cv is not None:
        seed = 0 if args.seed is None else args.seed
        factors = uneven_factors(num_micro_batches, cv=args.costs_cv, seed=seed)
        provenance += f"; times lognormal factors of variation {args.costs_cv:g} (seed {seed})"
    costs = rank_costs(stage_ranks, num_micro_batches, times, factors)
    limit_bytes = None if args.memory_limit_gb is None else round(args.memory_limit_gb * 1e9)
    if fixed is None:
        if limit_bytes is None:
            ranks = range(max(stage_ranks) + 1)
            natural = one_f_one_b(len(ranks), num_micro_batches)
            limit_bytes = max(compute_peak_bytes(natural, rank_costs(ranks, num_micro_batches, times, factors)))
        schedule = _for_costs(args, costs, stage_ranks, limit_bytes)
        provenance += f"; at most {limit_bytes / 1e6:.4g} MB a rank"
    else:
        schedule = fixed
    view = view_of(schedule, costs, provenance, pieces=pieces)
    if limit_bytes is not None and max(view.peak_bytes) > limit_bytes:
        raise PlanError(
            f"{args.schedule} holds {max(view.peak_bytes)} B on rank {view.peak_bytes.index(max(view.peak_bytes))} but"
            f" --memory-limit-gb allows {limit_bytes} B: raise it, or choose cyclic or adaptive, which keep to it"
        )
    if args.html:
        write_html(args.html, view)
    if args.csv:
        write_output(args.csv, to_csv(schedule))
    with delivering(args.json, schedule_json(view)):
        console.print(rendered_schedule(view, width=console.width))
        if args.html:
            console.print(f"the page is {args.html}")
        if args.csv:
            console.print(f"the schedule is in {args.csv}")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Errors: ConfigError for flags that the chosen schedule does not use, which are never ignored."""
    if args.seed is not None and args.costs_cv is None:
        raise ConfigError("--seed makes uneven micro-batches: say how uneven with --costs-cv CV")
    if args.memory_limit_gb is not None and not 0 < args.memory_limit_gb < 1e6:
        raise ConfigError(f"--memory-limit-gb is {args.memory_limit_gb:g} but must lie above 0 and below 10^6")
    if args.schedule != "adaptive" and (args.effort is not None or args.split_backward):
        flag = "--split-backward" if args.split_backward else "--effort"
        raise ConfigError(f"{flag} is for the search: {args.schedule} is not searched, choose adaptive or leave it out")
    if args.schedule in _NAMES:
        if args.replica is not None:
            raise ConfigError(f"--replica picks a replica of a plan's .json: {args.schedule} has none")
        return
    if Path(args.schedule).suffix not in FILE_KINDS:
        raise ConfigError(
            f"schedule {args.schedule!r} is not known: choose one of"
            f" {', '.join(_NAMES)}, or a file"
            f" {', '.join(FILE_KINDS)}{did_you_mean(args.schedule, _NAMES)}"
        )
    for flag, value in (
        ("--pp", args.pp),
        ("--micro-batches", args.micro_batches),
        ("--stages-per-rank", args.stages_per_rank),
    ):
        if value is not None:
            raise ConfigError(f"{flag} is what {args.schedule} says itself: leave it out for a file")


def _schedule(args: argparse.Namespace) -> tuple[PipelineSchedule, dict[int, Piece]]:
    if args.schedule not in PUBLISHED:
        return read_schedule(args.schedule, replica=args.replica)
    num_ranks, num_micro_batches = _counts(args)
    return make_published_schedule(
        args.schedule, num_ranks, num_micro_batches, stages_per_rank=args.stages_per_rank
    ), {}


def _shape(args: argparse.Namespace) -> tuple[tuple[int, ...], int]:
    """The rank of each stage, in rounds over the ranks, and the number of micro-batches."""
    num_ranks, num_micro_batches = _counts(args)
    stages_per_rank = 1 if args.stages_per_rank is None else args.stages_per_rank
    if min(num_ranks, num_micro_batches, stages_per_rank) < 1:
        raise ConfigError(
            f"{args.schedule} with {num_ranks} ranks, {num_micro_batches} micro-batches and {stages_per_rank} stages a"
            " rank: give at least 1 of each"
        )
    if args.schedule == "cyclic" and stages_per_rank != 1:
        raise ConfigError(f"cyclic has 1 stage a rank, not {stages_per_rank}: leave that out, or choose adaptive")
    return tuple(range(num_ranks)) * stages_per_rank, num_micro_batches


def _counts(args: argparse.Namespace) -> tuple[int, int]:
    num_ranks = DEFAULT_RANKS if args.pp is None else args.pp
    num_micro_batches = DEFAULT_MICRO_BATCHES if args.micro_batches is None else args.micro_batches
    of_rank = 1 if own_placement(args.schedule) == "linear" else 2
    num_stages = num_ranks * max(1, args.stages_per_rank or of_rank)
    if num_stages > _MOST_STAGES:
        raise ConfigError(
            f"{num_stages} stages cannot be drawn: a picture takes at most {_MOST_STAGES} of them (--pp times"
            " --stages-per-rank), so lower these"
        )
    if num_stages * num_micro_batches > _MOST_CELLS:
        raise ConfigError(
            f"{num_micro_batches} micro-batches on {num_ranks} ranks cannot be drawn: a picture takes at most"
            f" {_MOST_CELLS} of both multiplied (and by --stages-per-rank), so lower them"
        )
    return num_ranks, num_micro_batches


def _for_costs(
    args: argparse.Namespace, costs: MicroBatchCosts, stage_ranks: tuple[int, ...], limit_bytes: int
) -> PipelineSchedule:
    effort = DEFAULT_EFFORT if args.effort is None else args.effort
    cells = costs.num_stages * costs.num_micro_batches
    most_effort = _MOST_SEARCHED * _STAGES_OF_TWICE_THE_TIME // (cells * (costs.num_stages + _STAGES_OF_TWICE_THE_TIME))
    if args.schedule == "adaptive" and effort > most_effort:
        raise ConfigError(
            f"{effort} moves over {cells} stages x micro-batches take too long for a picture: lower --effort to"
            f" {most_effort} or less"
        )
    return schedule_for(
        args.schedule, costs, stage_ranks, memory_limit_bytes=limit_bytes, effort=effort, split=args.split_backward
    )


def schedule_for(
    name: str,
    costs: MicroBatchCosts,
    stage_ranks: Sequence[int],
    *,
    memory_limit_bytes: int,
    effort: int,
    split: bool = False,
) -> PipelineSchedule:
    """Return the schedule of a name in FOR_COSTS: DynaPipe's cyclic one, or this package's after `effort` search moves.

    `split` runs backwards as I and W. Raises PlanError for a micro-batch that does not fit by itself, ConfigError for a
    negative effort.
    """
    if name == "cyclic":
        return clustered_cyclic(costs, memory_limit_bytes=memory_limit_bytes)
    return optimize(costs, memory_limit_bytes=memory_limit_bytes, split=split, effort=effort, stage_ranks=stage_ranks)


def _times(text: str) -> tuple[float, float, float]:
    try:
        forward, gradient, weight = map(float, text.split(","))
    except ValueError as error:
        raise ConfigError(f"--times is {text!r} but must be three numbers F,I,W such as 1,1,1") from error
    return forward, gradient, weight
