"""`dynapipe show-schedule`: a published schedule, or one from a file, as a picture with its figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.csv_notation import to_csv
from dynapipe_ext.schedules.published import PUBLISHED, published_schedule
from dynapipe_ext.tools.json_file import write_atomic
from dynapipe_ext.tools.show_schedule import (
    FILE_KINDS,
    rank_costs,
    read_schedule,
    rendered,
    uneven_factors,
    view_of,
    write_html,
)

DEFAULT_RANKS = 4
DEFAULT_MICRO_BATCHES = 8
_MOST_ACTIONS = 500_000  # pages and pictures of more are of no use, and take minutes
_PIPE_COLUMNS = 140  # no terminal to fit into: room for the timeline's labels

_EPILOG = f"""schedules: {", ".join(PUBLISHED)}

examples:
  dynapipe show-schedule zb-h1 --pp 4 --micro-batches 8
  dynapipe show-schedule interleaved-1f1b --stages-per-rank 3 --times 1,1.2,0.8
  dynapipe show-schedule 1f1b --pp 8 --micro-batches 32 --costs-cv 0.6 --seed 1 --html 1f1b.html
  dynapipe show-schedule zb-v --csv zb_v.csv
  dynapipe show-schedule plan.json --replica 1

A .csv is torch.distributed.pipelining's (compute only), a .txt has lines such as "0: 0F0 0B0", a .json is what
`dynapipe plan --json` wrote. Files hold orders, no durations: times are those of --times for them, too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("schedule", metavar="NAME|FILE", help="a schedule's name, or a file .csv, .txt or .json")
    parser.add_argument("--pp", type=int, metavar="N", help=f"pipeline ranks ({DEFAULT_RANKS})")
    parser.add_argument("--micro-batches", type=int, metavar="M", help=f"({DEFAULT_MICRO_BATCHES})")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="of interleaved-1f1b (2)")
    parser.add_argument(
        "--times", default="1,1,1", metavar="F,I,W", help="ms of a micro-batch on a rank, B = I + W (1,1,1)"
    )
    parser.add_argument(
        "--costs-cv", type=float, metavar="CV", help="uneven micro-batches: lognormal factors of mean 1"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of --costs-cv (0)")
    parser.add_argument("--replica", type=int, metavar="D", help="which replica of a plan (0)")
    parser.add_argument("--html", metavar="FILE", help="also write a page that needs no network")
    parser.add_argument("--csv", metavar="FILE", help="also write the schedule as torch.distributed.pipelining's CSV")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    schedule = _schedule(args)
    times = _times(args.times)
    provenance = f"F {times[0]:g}, I {times[1]:g}, W {times[2]:g} ms of a micro-batch on a rank, transfers free"
    factors = None
    if args.costs_cv is not None:
        seed = 0 if args.seed is None else args.seed
        factors = uneven_factors(schedule.num_micro_batches, cv=args.costs_cv, seed=seed)
        provenance += f"; times lognormal factors of variation {args.costs_cv:g} (seed {seed})"
    elif args.seed is not None:
        raise ConfigError("--seed makes uneven micro-batches: say how uneven with --costs-cv CV")
    view = view_of(schedule, rank_costs(schedule, times, factors), provenance)
    console.print(rendered(view, width=console.width))
    if args.html:
        write_html(args.html, view)
        console.print(f"the page is {args.html}")
    if args.csv:
        write_atomic(args.csv, to_csv(schedule))
        console.print(f"the schedule is in {args.csv}")
    return 0


def _schedule(args: argparse.Namespace) -> PipelineSchedule:
    named = args.schedule in PUBLISHED
    if not named and Path(args.schedule).suffix not in FILE_KINDS:
        raise ConfigError(
            f"schedule {args.schedule!r} is not known: choose one of {', '.join(PUBLISHED)}, or a file"
            f" {', '.join(FILE_KINDS)}"
        )
    if named:
        if args.replica is not None:
            raise ConfigError(f"--replica picks a replica of a plan's .json: {args.schedule} has none")
        num_ranks = DEFAULT_RANKS if args.pp is None else args.pp
        num_micro_batches = DEFAULT_MICRO_BATCHES if args.micro_batches is None else args.micro_batches
        if num_ranks * num_micro_batches * max(1, args.stages_per_rank or 1) > _MOST_ACTIONS // 6:
            raise ConfigError(
                f"{num_micro_batches} micro-batches on {num_ranks} ranks cannot be drawn: a picture takes at most"
                f" {_MOST_ACTIONS // 6} of both multiplied (and by --stages-per-rank), so lower them"
            )
        return published_schedule(
            args.schedule,
            num_ranks,
            num_micro_batches,
            stages_per_rank=args.stages_per_rank,
        )
    for flag, value in (
        ("--pp", args.pp),
        ("--micro-batches", args.micro_batches),
        ("--stages-per-rank", args.stages_per_rank),
    ):
        if value is not None:
            raise ConfigError(f"{flag} is what {args.schedule} says itself: leave it out for a file")
    return read_schedule(args.schedule, replica=args.replica)


def _times(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--times is {text!r} but must be three numbers F,I,W such as 1,1,1") from error
