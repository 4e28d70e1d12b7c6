"""`dynapipe plan`: the plan of one global batch, from nothing but lengths and costs, without training."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.errors import ConfigError, DataError, PlanError, VerificationError
from dynapipe_ext.executor.proven_step import PROVEN_RULE, ProvenStep, prove_step
from dynapipe_ext.launch.command_parser import add_json, ending, flag_of, given_flags
from dynapipe_ext.launch.commands.plan_inputs import (
    add_cost_arguments,
    add_length_arguments,
    batch_to_plan,
    memory_limit_bytes,
    settled_planning,
)
from dynapipe_ext.launch.job.configured import followed_placement, trials_table
from dynapipe_ext.launch.job.model_folder import layout_line, with_bounded_rows
from dynapipe_ext.launch.job.settled import placed_planning
from dynapipe_ext.schedules.evaluation.bounds import Certificate
from dynapipe_ext.schedules.notation import PLAN_FORMAT, plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan, certify, free_batch_ns, predict
from dynapipe_ext.settings.train_config import TrainConfig, add_flag, add_flags, read_flags
from dynapipe_ext.tools.check.plan_file import PlanFile, read_plan_file
from dynapipe_ext.tools.console import counted, delivering, output
from dynapipe_ext.tools.files import read_json
from dynapipe_ext.tools.show.plan import (
    certificate_of_file,
    certificate_table,
    of_proven_step,
    rendered_plan,
    view_of_file,
)

_MOST_LIMIT_S = 1e6
_PIPE_COLUMNS = 140  # no terminal to fit into: room for the timeline's labels

_DEGREES = {
    "tp": "tensor parallel ranks (default: that of --config or of a cost file, else 1 beside --pp or --dp, else 2)",
    "pp": "pipeline ranks (default: that of --config, else 1 beside --tp or --dp, else that of a cost file, or 2)",
    "dp": "data parallel replicas (default: that of --config, else 1 beside --tp or --pp, else of a cost file, or 2)",
}
_EPILOG = """examples:
  dynapipe plan --lengths lengths.npy --tokens-per-batch 65536 --tp 1 --pp 4 --dp 2
  dynapipe plan --lengths runs/latest/data/lengths.npy --step 3 --layout packed --json plan.json
  dynapipe plan --lengths lengths.npy --pp 4 --time-limit 60 --json best.json
  dynapipe plan --lengths lengths.npy --pp 4 --forward-only --json evaluation.json
  dynapipe plan --show plan.json

A lengths file is .npy of shape (N,), (N, 2) = encoder, decoder or (N, 3) = encoder, decoder, targets; or text with one
length, or "encoder decoder", a line. For a decoder-only model a sample's two lengths are joined to one row.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="FILE", help="the lengths of all samples (.npy or text)")
    source.add_argument("--batch", metavar="FILE", help='JSON list of {"lengths": [[encoder, decoder], ...]}')
    source.add_argument("--show", metavar="FILE", help="show a plan that --json wrote")
    parser.add_argument("--step", type=int, metavar="N", help="which global batch of the lengths file (default: 0)")
    add_flags(parser.add_mutually_exclusive_group(), "data.tokens_per_batch", "data.batch_size")
    add_length_arguments(parser)
    add_cost_arguments(parser)
    for name, what in _DEGREES.items():
        add_flag(parser, f"topology.{name}", what)
    add_flags(parser, "topology.context_parallel", "topology.placement", "topology.layers_per_stage")
    add_flags(parser, "topology.vocabulary_parallel")
    add_flags(parser, "plan.layout", "plan.schedule")
    add_flag(parser, "plan.pad_multiple", "rows are rounded up to it (default: that of --config, else 8; CSV: 1)")
    add_flags(parser, "plan.max_tokens", "plan.effort")
    add_flag(parser, "run.seed", "of the data order and the search (default: 0)")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="search again with the next seeds until the time is over and keep the best: not reproducible",
    )
    add_flags(parser, "plan.pieces", "plan.split_backward", "plan.noise")
    parser.add_argument("--forward-only", action="store_true", help="a step of evaluation: forwards alone")
    add_json(parser, "the plan (dynapipe-plan/1)")


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan with what made it; `num_tried` seeds where time is the limit, else 0."""

    planner: Planner
    samples: Sequence[SampleLength]
    proven: ProvenStep
    certificate: Certificate
    planning_s: float
    num_tried: int


def run(args: argparse.Namespace) -> int:
    console = output(_PIPE_COLUMNS, json_to=args.json)
    if args.show:
        _refuse_beside_show(args)
        with delivering(args.json, read_json(args.show, PLAN_FORMAT, "a plan") if args.json else None):
            _show_file(args.show, console)
        return 0
    config = _config(args)
    layout_is_named = args.layout is not None or ("plan", "layout") in config.named
    priced = settled_planning(args, config, layout_is_named=layout_is_named)
    planning = priced.planning
    config = planning.config
    memory_limit_bytes(args, config)
    batch = batch_to_plan(args, config, planning.costs.facts.has_decoder)
    samples = batch.samples
    is_named = args.pad_multiple is not None or ("plan", "pad_multiple") in config.named
    if priced.is_measured_grid and not is_named:
        config = replace(config, plan=replace(config.plan, pad_multiple=1))
    config = with_bounded_rows(config, batch.longest)
    planning = replace(planning, config=config)
    planning, trials = placed_planning(planning, lambda: [samples])
    planner = planning.planner
    if args.forward_only:
        _refuse_backwards(args)
        planner = planner.for_forwards()
    made = _made(planner, samples, args)
    with delivering(args.json, _json(made, args) if args.json else None):  # some plans have no file
        num_tokens = counted(sum(sample.tokens for sample in samples), "token")
        console.print(f"batch: {batch.name}, {counted(len(samples), 'sample')}, {num_tokens}")
        for note in batch.notes:
            console.print(f"lengths: {note}", markup=False)
        console.print(f"costs: {priced.provenance}")
        if trials:
            console.print(trials_table(trials))
        for line in filter(None, (followed_placement(config), layout_line(config))):
            console.print(line, markup=False, soft_wrap=True)
        _show(made, args, console)
    return 0


def _show_file(path: str, console: Console) -> None:
    file = read_plan_file(path)
    _refuse_no_numbers(file, path)
    console.print(rendered_plan(view_of_file(file), width=console.width))
    if claimed := certificate_of_file(file):
        console.print(certificate_table(claimed))


def _made(planner: Planner, samples: Sequence[SampleLength], args: argparse.Namespace) -> _Made:
    start_s = time.perf_counter()
    if args.time_limit is None:
        proven, num_tried = prove_step(planner, samples, step=args.step or 0), 0
    else:
        proven, num_tried = best_in_time(planner, samples, args.step or 0, args.time_limit)
    planning_s = time.perf_counter() - start_s
    plan = proven.step_plan
    assert plan.certificate is not None  # a Planner's plans have one
    certificate = replace(
        plan.certificate, free_batch_ns=free_batch_ns(plan, planner.costs.at_width(plan.width), samples)
    )
    return _Made(planner, samples, proven, certificate, planning_s, num_tried)


def _show(made: _Made, args: argparse.Namespace, console: Console) -> None:
    """The limits, the proof, the plan itself, and how good it is."""
    planner, plan = made.planner, made.proven.step_plan
    console.print(
        f"limits: {planner.memory_limit_bytes / 1e9:g} GB a rank, rows rounded up to a multiple of"
        f" {planner.pad_multiple * plan.width}"
    )
    if plan.width > 1 or planner.widths:
        tried = f", of {', '.join(map(str, planner.widths))}" if planner.widths else ""
        console.print(
            f"width: {plan.width} of {planner.topology.dp} data parallel ranks are one replica, each with a slice of"
            f" every row{tried}"
        )
    if (cores := planner.shared_cores) is not None:
        console.print(
            f"cores: {planner.topology.world_size} ranks share {cores.num_cores}, as those of the run whose costs these"
            " are; --json has the figures of ranks with a core each",
            soft_wrap=True,
        )
    if planner.topology.dp > 1:
        console.print(f"over replicas: {planner.replica_collectives}")
    console.print(f"proven: {PROVEN_RULE}", soft_wrap=True)
    if not planner.forward_only:
        console.print(f"search: {planner.effort:,} moves")
    if made.num_tried:
        tried = f"{counted(made.num_tried, 'search')} from seed {planner.seed} on"
        console.print(f"tried: {tried} in {args.time_limit:g} s; how many fit is not reproducible")
    view = of_proven_step(made.proven, planner.topology, planning_s=made.planning_s)
    console.print(rendered_plan(view, width=console.width))
    console.print(certificate_table(made.certificate))


def _json(made: _Made, args: argparse.Namespace) -> dict[str, Any]:
    planner, plan, certificate = made.planner, made.proven.step_plan, made.certificate
    if plan.cores is not None:
        plan, certificate = with_a_core_each(plan, planner, made.samples)
    in_flight_bytes = made.proven.in_flight_bytes
    raw = plan_json(plan, planner.topology, in_flight_bytes=in_flight_bytes, certificate=certificate)
    if made.num_tried:
        raw |= {"reproducible": False, "time_limit_s": args.time_limit}
    return raw


def with_a_core_each(plan: StepPlan, planner: Planner, samples: Sequence[SampleLength]) -> tuple[StepPlan, Certificate]:
    """A plan of ranks that share cores, the same in all but its figures: those of ranks with a core each, which a
    plan's file has and `check-plan` proves."""
    limit_bytes = int(planner.memory_limit_bytes)
    predictions = predict(
        [replica.micro_batches for replica in plan.batch.replicas],
        plan.schedules,
        plan.costs,
        cores=None,
        memory_limit_bytes=limit_bytes,
    )
    plan = replace(plan, predictions=predictions, cores=None, certificate=None)
    costs = planner.costs.at_width(plan.width)
    certificate = certify(plan, costs, samples, memory_limit_bytes=limit_bytes)
    pairs = zip(predictions, certificate.replicas, strict=True)
    predictions = tuple(replace(one, lower_bound_ns=bounds.best_ns) for one, bounds in pairs)
    certificate = replace(certificate, free_batch_ns=free_batch_ns(plan, costs, samples))
    return replace(plan, predictions=predictions, certificate=certificate), certificate


def _refuse_backwards(args: argparse.Namespace) -> None:
    """Errors: ConfigError for flags that say how backwards run."""
    for flag in ("schedule", "split_backward", "pieces", "noise"):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"{flag_of(flag)} has nothing to change in forwards alone: leave it or --forward-only out"
            )


def _refuse_beside_show(args: argparse.Namespace) -> None:
    """Errors: ConfigError for flags that say how to plan."""
    if others := [flag for flag in given_flags(args) if flag not in ("--show", "--json")]:
        raise ConfigError(
            f"--show {args.show} shows a plan as it is, and {', '.join(others)} would change one: leave out either"
        )


def _refuse_no_numbers(file: PlanFile, path: str) -> None:
    """Errors: DataError where a second or a bound is not a number."""
    for replica in file.replicas:
        claimed = {"makespan_s": replica.makespan_s, "lower_bound_s": replica.lower_bound_s, **replica.bounds_s}
        claimed |= {"batch_bound_s": file.batch_bound_s or 0.0, "free_batch_bound_s": file.free_batch_bound_s or 0.0}
        for name, value in claimed.items():
            if math.isnan(value):
                raise DataError(f"{path}: {name} is not a number: write the plan again, or ask check-plan what it is")


def best_in_time(
    planner: Planner,
    samples: Sequence[SampleLength],
    step: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ProvenStep, int]:
    """The step that ends first (of equals the first found) and how many were tried: one a seed, from the planner's on.

    The first search always ends, and the one that runs when the time is over; so the plan is never worse than without
    a limit. Errors: ConfigError for a limit of no use; PlanError where the first search finds no plan.
    """
    if not 0 < limit_s <= _MOST_LIMIT_S:
        raise ConfigError(
            f"--time-limit is {limit_s:g} s but must be above 0, and at most {_MOST_LIMIT_S:g}: leave it out for one"
            " search"
        )
    if planner.schedule != "adaptive" or not planner.effort:
        rules = f"schedule {planner.schedule!r} and effort {planner.effort}"
        raise ConfigError(
            f"--time-limit searches again with other seeds, but {rules} search nothing: leave it out, or take the"
            " adaptive schedule with effort above 0"
        )
    end_s = clock() + limit_s
    best, num_tried = prove_step(planner, samples, step=step), 1
    while clock() < end_s:
        again = replace(planner, seed=planner.seed + num_tried)
        num_tried += 1
        try:
            proven = prove_step(again, samples, step=step)
        except (PlanError, VerificationError):  # another seed found nothing that fits; there is a plan already
            continue
        if proven.step_plan.makespan_s < best.step_plan.makespan_s:
            best = proven
    return best, num_tried


def _config(args: argparse.Namespace) -> TrainConfig:
    """The file's settings, or the defaults, with the flags on top."""
    config = TrainConfig.read(args.config) if args.config else TrainConfig()
    return config.with_values(**read_flags(args, config, {}, of_file=bool(args.config)))
