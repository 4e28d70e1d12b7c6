"""`dynapipe train-memory-model`: a learned memory model from measured peaks, with what held-out batches say of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dynapipe_ext.batching.inference.memory_records import read_records
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.console import counted, deliver, say_loading
from dynapipe_ext.tools.files import write_output
from dynapipe_ext.tools.progress import WorkProgress

if TYPE_CHECKING:
    say_loading("scipy", "sklearn")
    from dynapipe_ext.batching.inference.memory_training import Training


_EPILOG = """examples:
  dynapipe train-memory-model records.jsonl --out model.json
  dynapipe train-memory-model records.jsonl --out model.json --json

Then build_dynamic_batch_dataloader(..., memory_model="model.json"). The file holds numbers only, nothing of it is
executed, and it says what it was measured on: generate() refuses it for another model, device or dtype.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("records", metavar="RECORDS.jsonl", help="what collect-memory wrote")
    parser.add_argument("--out", required=True, metavar="FILE", help="the memory model, as JSON")
    add_flag(parser, "run.seed", "of the folds", default=0)
    add_json(parser, "the held-out errors")


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}: 0 or more is needed")
    records = read_records(args.records)
    say_loading("scipy", "sklearn")
    from dynapipe_ext.batching.inference.memory_training import NUM_FITS, train

    with WorkProgress("fits", NUM_FITS) as progress:
        if records.cut:
            progress.log(f"the last line of {args.records} was cut short and is left out")
        training = train(records.measured_on, records.records, seed=args.seed, on_fit=progress.advance)
    write_output(args.out, json.dumps(training.model.to_json(), allow_nan=False) + "\n")
    on = training.model.measured_on
    rows, longest, tokens = training.model.ceiling()
    deliver(
        args.json,
        _summary(training),
        f"{counted(training.num_records, 'batch')}, {training.num_out_of_memory} of them out of memory: {on.model},"
        f" {on.dtype}, on {on.device} ({on.device_name}), {on.max_new_tokens} new tokens, {on.num_beams} beams",
        _error_table(training),
        _coverage_table(training),
        f"{args.out} holds up to {counted(rows, 'text')}, {counted(longest, 'token')} a text and {tokens:,} padded"
        " ones a batch",
    )
    return 0


def _summary(training: Training) -> dict[str, Any]:
    """All but the model."""
    names = ("num_records", "num_out_of_memory", "num_phases", "num_pairs", "median_error", "largest_error")
    summary: dict[str, Any] = {name: getattr(training, name) for name in names}
    summary["phases_only_error"] = training.phases_only_error
    summary["out_of_memory_foreseen"] = training.out_of_memory_foreseen
    summary["coverage"] = [asdict(one) for one in training.coverage]
    summary["measured_on"] = asdict(training.model.measured_on)
    return summary


def _error_table(training: Training) -> Table:
    table = Table(title="held-out errors of a batch's peak beside the first one's")
    for name in ("", "held out"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("median error", f"{100 * training.median_error:.2f} %")
    table.add_row("largest error", f"{100 * training.largest_error:.2f} %")
    table.add_row("median error without the trees", f"{100 * training.phases_only_error:.2f} %")
    if training.out_of_memory_foreseen is not None:
        table.add_row("pairs with a batch out of memory foreseen", f"{100 * training.out_of_memory_foreseen:.1f} %")
    table.add_row("pairs of batches", f"{training.num_pairs:,}")
    table.add_row("phases", str(training.num_phases))
    return table


def _coverage_table(training: Training) -> Table:
    table = Table(title="what a threshold keeps, on batches held out with their first ones")
    for name in ("threshold", "margin", "peaks above it", "chosen batches above 90 %", "chosen batches"):
        table.add_column(name, justify="right")
    for one in training.coverage:
        table.add_row(
            f"{100 * one.threshold:g} %",
            f"{one.margin:.4f}",
            f"{100 * one.above_margin:.2f} %",
            f"{100 * one.above_limit:.2f} %",
            str(one.num_batches),
        )
    return table
