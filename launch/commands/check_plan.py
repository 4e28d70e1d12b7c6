"""`dynapipe check-plan`: whether a plan's file is valid and as good as it claims, by code that did not make it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, ReplicaPlan
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, VerificationError
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.launch.command_parser import add_json, cut_at, ending
from dynapipe_ext.launch.commands.plan_inputs import (
    add_cost_arguments,
    add_length_arguments,
    fitted,
    memory_limit_bytes,
    read_batch,
    read_lengths,
    settled_planning,
)
from dynapipe_ext.launch.job.settled import SettledPlanning
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan, price_replicas
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.check.buffers import with_buffers
from dynapipe_ext.tools.check.check_plan import Lengths, check, micro_batch_of
from dynapipe_ext.tools.check.plan_file import PlanFile, read_plan_file
from dynapipe_ext.tools.check.verdict_view import verdict_json, verdict_table
from dynapipe_ext.tools.console import delivering, output
from dynapipe_ext.tools.show.plan import schedule_of_file

_NOT_VALID_STATUS = 1
_MOST_FAULTS = 20  # one mistake can make thousands
_PIPE_COLUMNS = 140

_EPILOG = """examples:
  dynapipe check-plan plan.json --costs DIR --model gpt_6.7b --layers 32 --memory-limit-gb 36 \\
      --batch batches.json --index 0 --extra -1 0
  dynapipe check-plan plan.json --config mine.toml --lengths lengths.npy

Give the costs, the memory limit and the lengths that the plan was made with: the plan's file has none of them. Without
lengths the rows and the bound of the batch go unchecked, and packed plans cannot be checked at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG, {1: "the plan is not valid", 2: "nothing could be checked"})
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that `dynapipe plan --json` wrote")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--batch", metavar="FILE", help="the plan holds all samples of one object in this JSON list")
    source.add_argument("--lengths", metavar="FILE", help="the plan holds some samples of these (.npy or text)")
    add_length_arguments(parser)
    add_cost_arguments(parser)
    add_json(parser, "the verdict")


def run(args: argparse.Namespace) -> int:
    plan = read_plan_file(args.plan)
    packs_rows = any(m.layout == "packed" for replica in plan.replicas for m in replica.micro_batches)
    priced = settled_planning(args, _config(args, plan, packs_rows), plan.topology, layout_is_named=packs_rows)
    planning = priced.planning
    config = planning.config
    limit_bytes, message_format, costs = (
        memory_limit_bytes(args, config),
        planning.message_format,
        planning.trained_costs,
    )
    lengths = _lengths(args, planning)
    verdict = check(plan, costs, memory_limit_bytes=limit_bytes, lengths=lengths, whole_batch=args.batch is not None)
    if verdict.peak_bytes:  # it runs to its end, so it can be lowered
        step_plan = _step_plan(plan, verdict.peak_bytes, costs, lengths)
        try:
            proven = prove(step_plan, message_format, planning.collectives)
        except VerificationError as error:
            verdict = replace(verdict, faults=(*verdict.faults, str(error)))
        else:
            verdict = with_buffers(verdict, plan, proven.in_flight_bytes, memory_limit_bytes=limit_bytes)
    console = output(_PIPE_COLUMNS, json_to=args.json)
    with delivering(args.json, verdict_json(verdict)):
        console.print(f"costs: {priced.provenance}")
        console.print(f"limit: {limit_bytes / 1e9:g} GB a rank")
        console.print(verdict_table(verdict))
        for fault in verdict.faults[:_MOST_FAULTS]:
            console.print(Text(f"fault: {fault}"), soft_wrap=True)
        if len(verdict.faults) > _MOST_FAULTS:
            console.print(f"and {len(verdict.faults) - _MOST_FAULTS:,} more: --json has them all")
    return _NOT_VALID_STATUS if verdict.faults else 0


def _step_plan(
    plan: PlanFile, peak_bytes: Sequence[tuple[int, ...]], costs: CostModel, lengths: Lengths | None
) -> StepPlan:
    """The file's plan, to be lowered: of its predictions the peaks, as found."""
    replicas, schedules = [], []
    for dp_rank, file in enumerate(plan.replicas):
        replicas.append(ReplicaPlan(dp_rank, tuple(micro_batch_of(m, lengths) for m in file.micro_batches)))
        schedules.append(schedule_of_file(file, forward_only=plan.forward_only))
    predictions = tuple(
        Prediction(makespan_ns=0, lower_bound_ns=0, peak_bytes=peaks, bubble_ratio=0.0) for peaks in peak_bytes
    )
    costs = adjust(costs, forward_only=True) if plan.forward_only else costs
    priced = price_replicas(costs, [replica.micro_batches for replica in replicas])
    batch = GlobalBatchPlan(step=0, replicas=tuple(replicas), width=plan.topology.width)
    return StepPlan(batch, tuple(schedules), predictions, priced)


def _config(args: argparse.Namespace, plan: PlanFile, packs_rows: bool) -> TrainConfig:
    """The file's settings, or the defaults, for the plan's topology and rows, with the limit of the flags."""
    config = TrainConfig.read(args.config) if args.config else TrainConfig()
    t = gather_vocabulary(plan.topology)
    tables: dict[str, dict[str, Any]] = {
        "topology": {
            "tp": t.tp,
            "pp": t.pp,
            "dp": t.dp,
            "context_parallel": t.width,
            "layers_per_stage": t.layers_per_stage,
        }
    }
    name = t.placement_name.partition(",")[0]
    if name != "custom":
        tables["topology"]["placement"] = name
    tables["topology"]["vocabulary_parallel"] = plan.topology.vocabulary
    tables["plan"] = {"layout": "packed"} if packs_rows else {}
    if args.memory_limit_gb is not None:
        tables["plan"]["memory_limit_gb"] = args.memory_limit_gb
    return config.with_values(**tables)


def _lengths(args: argparse.Namespace, planning: SettledPlanning) -> Lengths | None:
    """(encoder, decoder) positions of samples by index, as the model takes them; None where no file is given.

    Errors: ConfigError for flags that change or pick lengths, where there are none.
    """
    if args.index is not None and not args.batch:
        raise ConfigError(f"--index {args.index} picks a global batch of --batch FILE: give it, or leave --index out")
    if args.batch:
        table = read_batch(args.batch, args.index or 0)
    elif args.lengths:
        table = read_lengths(args.lengths)
    else:
        for flag, is_given in (("--extra", any(args.extra)), ("--truncate", args.truncate is not None)):
            if is_given:
                raise ConfigError(
                    f"{flag} changes lengths, but there are none: give --lengths FILE, or leave {flag} out"
                )
        return None
    cut = cut_at(args.truncate, planning.config.model.max_seq_len)
    table, _ = fitted(table, args.extra, cut, planning.costs.facts.has_decoder)
    return {index: (encoder, decoder) for index, (encoder, decoder, _) in enumerate(table.tolist())}
