"""`dynapipe collect-memory`: peaks of real batches on this device, for a learned memory model."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter

from rich.table import Table

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.inference.memory_records import MemoryRecord, RecordFile
from dynapipe_ext.inference.memory_shapes import CHOICES, ShapeLimits
from dynapipe_ext.tools.console import show
from dynapipe_ext.tools.progress import WorkProgress

DTYPES = ("float32", "bfloat16", "float16")

_MAX_LENGTH = 512
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

_EPILOG = """examples:
  dynapipe collect-memory --model my-model/ --device cuda --generate 128 --out records.jsonl
  dynapipe collect-memory --model config.json --device cpu --generate 16 --max-length 128 --out records.jsonl
  dynapipe train-memory-model records.jsonl --out model.json

Measure with the most new tokens, the dtype and the beams that you will generate with, and up to batches as large as
your first one: the memory model holds inside what was measured. Ctrl-C keeps what is measured; the same command goes
on from there. On a GPU, leave --memory-limit out: batches that run out of memory are found, recorded and stayed under.
On a CPU a real lack of memory may end the process, so bound batches by --max-tokens and --max-rows there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--model", required=True, metavar="DIR|FILE", help="a transformers model's folder, or its config.json alone"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="records, one a line; appended to if they exist")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (the model's own)")
    parser.add_argument(
        "--generate", type=int, default=32, metavar="N", help="new tokens of each text; 0: one forward pass (32)"
    )
    parser.add_argument("--beams", type=int, metavar="N", help="(those of the model's generation config)")
    parser.add_argument(
        "--shapes", choices=CHOICES, default="adaptive", help="climb to the limits first, or only draw (adaptive)"
    )
    parser.add_argument("--batches", type=int, default=160, metavar="N", help="batches in all, earlier runs' too (160)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help=f"tokens of a text ({_MAX_LENGTH}, or what the model has room for)"
    )
    parser.add_argument("--max-rows", type=int, default=1024, metavar="N", help="texts of a batch (1024)")
    parser.add_argument("--max-tokens", type=int, default=16384, metavar="N", help="padded tokens of a batch (16384)")
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        help="count a batch whose measured peak above the weights is higher as out of memory; 300MB and 2GiB are taken",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of lengths, tokens and drawn shapes (0)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    if args.beams is not None and args.beams < 1:
        raise ConfigError(f"--beams is {args.beams}: 1 or more is needed")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}: 0 or more is needed")
    limit_bytes = None if args.memory_limit is None else parse_bytes(args.memory_limit)
    from dynapipe_ext.inference.memory_profiling import (
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
            summary = f"{len(file.records)} batches of {args.batches} are in {args.out}, {earlier} of them from before"
            if args.json:
                numbers = {
                    "out": args.out,
                    "batches": len(file.records),
                    "wanted": args.batches,
                    "from_before": earlier,
                }
                print(json.dumps(numbers | {"out_of_memory": sum(r.peak_bytes is None for r in file.records)}))
            else:
                show(_table(file.records), summary)
    return 0


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("300MB"), parse_bytes("2 GiB"), parse_bytes("4096")
    (300000000, 2147483648, 4096)
    """
    number = text.strip().rstrip("".join(sorted("KMGIBkmgib")))
    unit = text.strip()[len(number) :].upper()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if unit not in _UNITS or not 1 <= value * _UNITS[unit] < 1e18:
        raise ConfigError(f"--memory-limit is {text!r}: give bytes, as 3000000, 300MB or 2GiB")
    return int(value * _UNITS[unit])


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
