"""`dynapipe collect-memory`: peaks of real batches on this device, for a learned memory model."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.table import Table

from dynapipe_ext.batching.inference.memory_records import MemoryRecord, RecordFile
from dynapipe_ext.batching.inference.memory_shapes import CHOICES, ShapeLimits
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.console import counted, deliver, output, say_loading, show
from dynapipe_ext.tools.progress import WorkProgress

DTYPES = ("float32", "bfloat16", "float16")

_MAX_LENGTH = 512

_EPILOG = """examples:
  dynapipe collect-memory --model my-model/ --device cuda --generate 128 --out records.jsonl
  dynapipe collect-memory --model config.json --device cpu --generate 16 --max-length 128 --out records.jsonl
  dynapipe train-memory-model records.jsonl --out model.json

Measure with the dtype, the beams and the largest number of new tokens that you will generate with, and up to batches
as large as your first one: the memory model is valid only within its measurements. Ctrl-C keeps them; the same command
goes on from there. On a GPU leave --memory-limit-gb out: batches that run out of memory are recorded, and larger ones
avoided. On a CPU a real lack of memory may end the process, so bound batches by --max-tokens and --max-rows there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a transformers model's folder, or its config.json alone"
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="file of records, one a line; an existing file is extended"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="to measure on (default: cuda where there is one)")
    add_flag(parser, "model.dtype", "of weights (default: the model's own)", choices=DTYPES)
    parser.add_argument(
        "--generate", type=int, default=32, metavar="N", help="new tokens of each text; 0: one forward pass"
    )
    parser.add_argument("--beams", type=int, metavar="N", help="of beam search (default: the generation config's)")
    parser.add_argument(
        "--shapes", choices=CHOICES, default="adaptive", help="grow batches to the limits first, or draw all of them"
    )
    parser.add_argument(
        "--batches", type=int, default=160, metavar="N", help="batches in all, with those of earlier runs"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of a text (default: {_MAX_LENGTH}, or the model's room)",
    )
    parser.add_argument("--max-rows", type=int, default=1024, metavar="N", help="texts of a batch")
    add_flag(parser, "plan.max_tokens", "padded tokens of a batch", default=16384)
    of_memory = "of 10^9 bytes; a batch whose measured peak above the weights is higher counts as out of memory"
    add_flag(parser, "plan.memory_limit_gb", of_memory)
    add_flag(parser, "run.seed", "of lengths, tokens and drawn shapes", default=0)
    add_json(parser, "the outcome")


def _checked_limit(args: argparse.Namespace) -> int | None:
    """The memory limit in bytes. Errors: ConfigError and DataError for what is refused before torch is loaded."""
    if args.beams is not None and args.beams < 1:
        raise ConfigError(f"--beams is {args.beams}: 1 or more is needed")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}: 0 or more is needed")
    limit_gb = args.memory_limit_gb
    if limit_gb is not None and not 1e-9 <= limit_gb < 1e9:
        raise ConfigError(f"--memory-limit-gb is {limit_gb:g} but must make 1 B to 10^18 B: give GB, such as 2.5")
    if not Path(args.model).exists():
        raise DataError(f"{args.model} does not exist: give a model's folder, or its config.json")
    return None if limit_gb is None else round(limit_gb * 1e9)


def run(args: argparse.Namespace) -> int:
    limit_bytes = _checked_limit(args)
    say_loading("torch", "transformers")
    from dynapipe_ext.batching.inference.memory_profiling import (
        beams_of,
        check_lengths,
        collect,
        load_model,
        longest_prompt,
        measured_on,
    )

    model = load_model(args.model, device=args.device, dtype=args.dtype)
    room = longest_prompt(model, args.generate)
    max_length = args.max_length
    if max_length is None:
        max_length = min(_MAX_LENGTH, args.max_tokens, _MAX_LENGTH if room is None else max(room, 1))
    limits = ShapeLimits(
        max_rows=args.max_rows, max_length=max_length, max_tokens=args.max_tokens, num_batches=args.batches
    )
    check_lengths(model, limits, args.generate)
    num_beams = args.beams or beams_of(model, {})
    with RecordFile(args.out, measured_on(model, max_new_tokens=args.generate, num_beams=num_beams)) as file:
        earlier = len(file.records)
        try:
            with WorkProgress("batches", max(0, args.batches - earlier)) as progress:
                collect(
                    model,
                    file,
                    limits,
                    choice=args.shapes,
                    max_new_tokens=args.generate,
                    num_beams=num_beams,
                    seed=args.seed,
                    memory_limit_bytes=limit_bytes,
                    on_record=lambda record: progress.advance(),
                )
        finally:
            held = counted(len(file.records), "batch")
            summary = f"{held} of {args.batches} are in {args.out}, {earlier} of them from before"
            show(_table(file.records), summary, console=output(json_to=args.json))
        numbers = {
            "out": args.out,
            "batches": len(file.records),
            "wanted": args.batches,
            "from_before": earlier,
            "out_of_memory": sum(record.peak_bytes is None for record in file.records),
        }
        deliver(args.json, numbers)
    return 0


def _table(records: list[MemoryRecord]) -> Table:
    """Peaks by length: a power of 2 a line."""
    table = Table(title="measured peaks above the weights")
    for name in ("longest text", "batches", "texts", "peak, MB", "out of memory"):
        table.add_column(name, justify="right")
    classes = Counter(record.longest.bit_length() for record in records)
    for bits in sorted(classes):
        members = [record for record in records if record.longest.bit_length() == bits]
        peaks = [record.peak_bytes / 1e6 for record in members if record.peak_bytes is not None]
        rows = [record.rows for record in members]
        table.add_row(
            f"{min(r.longest for r in members)} to {max(r.longest for r in members)}",
            str(len(members)),
            f"{min(rows)} to {max(rows)}",
            f"{min(peaks):.3g} to {max(peaks):.3g}" if peaks else "-",
            str(len(members) - len(peaks)),
        )
    return table
