"""`dynapipe convert`: a checkpoint of one format to another, exactly, in little memory, from where it was stopped."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from dynapipe_ext.batch.topology import require_whole_layers
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import add_json, ending, flag_of, refuse_below
from dynapipe_ext.models.tensors import num_parameters
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.checkpoint import FORMATS, TARGETS, WriterOptions
from dynapipe_ext.tools.console import deliver, error_console
from dynapipe_ext.tools.progress import WorkProgress

_INTERRUPTED_STATUS = 130
_MB = 1_000_000
_MALLOC_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_OF_RANKS = ("tp", "pp", "layers_per_stage", "vocab_divisible_by", "ep", "vpp")
_NOT_OF_MERGING = (
    *_OF_RANKS, "source_format", "verify", "drop_mtp", "transformer_impl",
)  # fmt: skip
_SOURCES = tuple(one.name for one in FORMATS)

_EPILOG = """examples:
  dynapipe convert llama-3-8b-hf megatron-8b --to megatron --tp 2 --pp 4 --verify
  dynapipe convert runs/iter_0001000 exported --to hf
  dynapipe convert Llama-2-70b llama-2-70b-hf --to hf --max-shard-gb 10
  dynapipe convert llama-hf uneven --to megatron-legacy --tp 4 --pp 4 --layers-per-stage 9,8,8,7
  dynapipe convert my-adapter my-model --merge llama-3-8b-hf

The source is a folder of Hugging Face, Megatron (dist_checkpointing, or mp_rank_XX), DeepSpeed or Meta (Llama): which
of them is recognised. Tensors keep their type and every bit. DST must not exist: until it is whole it is called
DST.partial, and the same command goes on with it after an interruption. Memory: the largest group of tensors that
belong together.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of the checkpoint")
    parser.add_argument("destination", nargs="?", metavar="DST", type=Path, help="folder to make")
    add_flag(parser, "checkpoint.output", "DST by a flag")
    parser.add_argument("--to", choices=TARGETS, help="the format to write (with --merge: hf)")
    parser.add_argument(
        "--merge", metavar="BASE", type=Path, help="SRC holds adapters of peft: write BASE with these merged in"
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=_SOURCES,
        help="that of SRC, where it could be several",
    )
    add_flag(parser, "topology.tp", "tensor parallel ranks (default: 1)")
    add_flag(parser, "topology.pp", "pipeline ranks (default: 1)")
    add_flag(parser, "topology.layers_per_stage", "layers of each stage, whole ones")
    parser.add_argument("--ep", type=int, metavar="N", help="expert parallel ranks, with --to megatron (default: 1)")
    parser.add_argument("--vpp", type=int, metavar="N", help="stages of a pipeline rank, likewise (default: 1)")
    parser.add_argument(
        "--vocab-divisible-by",
        type=int,
        metavar="N",
        help="Megatron's --make-vocab-size-divisible-by: pads the vocabulary to multiples of N x TP (default: 128)",
    )
    parser.add_argument("--max-shard-gb", type=float, metavar="GB", help="largest file of --to hf (default: 5)")
    parser.add_argument(
        "--verify", action="store_true", help="read DST back and compare every tensor with SRC, bit for bit"
    )
    parser.add_argument(
        "--drop-mtp", action="store_true", help="leave out DeepSeek-V3's layers of multi-token prediction"
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="whose layers will load megatron-legacy files: their names differ (default: local)",
    )
    add_json(parser, "the outcome")


def run(args: argparse.Namespace) -> int:
    args.destination = _destination(args)
    if args.merge is not None:
        return _merge(args)
    if args.to is None:
        raise ConfigError(f"give the format to write by --to {' or '.join(TARGETS)}, or --merge BASE for adapters")
    from dynapipe_ext.tools.checkpoint import convert, prepare_conversion

    started_s = time.perf_counter()
    _return_freed_tensors()
    errors = error_console()
    try:
        conversion = prepare_conversion(
            args.source,
            args.destination,
            args.to,
            _options(args),
            source_format=args.source_format or "",
            verify=args.verify,
            drop_mtp=args.drop_mtp,
            **_own(args),
        )
        for notice in conversion.notices:
            errors.print(f"note: {notice}", soft_wrap=True, markup=False)
        total_mb = -(-conversion.total_bytes // _MB)
        with WorkProgress(f"{conversion.source_format.name} to {args.to}, MB", total_mb, console=errors) as progress:
            outcome = convert(conversion, _in_mb(progress))
    except KeyboardInterrupt:
        errors.print(
            f"dynapipe: interrupted: run the same command again to go on with {args.destination}.partial",
            soft_wrap=True,
            markup=False,
        )
        return _INTERRUPTED_STATUS
    report = _report(conversion, outcome, time.perf_counter() - started_s)
    deliver(args.json, report, _table(report), *outcome.usage)
    return 0


def _return_freed_tensors() -> None:
    """The system takes the memory of a tensor back as soon as it is freed. By its defaults glibc comes to keep up to
    32 MB blocks in its heap, where small ones pin them: several groups' worth, by chance."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's alone
        mallopt(_MALLOC_MMAP_THRESHOLD, _MB)


def _report(conversion: Any, outcome: Any, seconds: float) -> dict[str, Any]:
    return {
        "source": str(conversion.source),
        "source_format": conversion.source_format.name,
        "destination": str(conversion.destination),
        "format": conversion.target_format.name,
        "family": conversion.reader.architecture.family,
        "parameters": num_parameters(conversion.reader.architecture),
        "tensors": outcome.num_tensors,
        "bytes": outcome.num_bytes,
        "pieces": outcome.num_pieces,
        "pieces_kept_from_before": outcome.num_resumed,
        "verified": outcome.verified,
        "seconds": round(seconds, 3),
        "notes": list(outcome.notices),
        "usage": list(outcome.usage),
    }


def _destination(args: argparse.Namespace) -> Path:
    """Errors: ConfigError where it is said twice, or not at all."""
    if (args.destination is None) == (args.output is None):
        raise ConfigError("give the folder to make once, as DST or by --output DST")
    return Path(args.destination or args.output)


def _merge(args: argparse.Namespace) -> int:
    """Errors: ConfigError for flags that a merged folder cannot heed."""
    if flags := [flag_of(name) for name in _NOT_OF_MERGING if getattr(args, name)]:
        raise ConfigError(f"--merge writes one Hugging Face folder: leave out {', '.join(flags)}, convert that next")
    if args.to not in (None, "hf"):
        raise ConfigError(f"--to {args.to}: --merge writes a Hugging Face folder, convert that next")
    from dynapipe_ext.tools.checkpoint import merge_adapters

    started_s = time.perf_counter()
    args.to = "hf"
    outcome = merge_adapters(args.source, args.merge, args.destination, **_own(args))
    errors = error_console()
    for notice in outcome.notices:
        errors.print(f"note: {notice}", soft_wrap=True, markup=False)
    report = {
        "source": str(args.source),
        "base": str(args.merge),
        "destination": str(args.destination),
        "format": args.to,
        "adapters": outcome.num_adapters,
        "modules_replaced": outcome.num_replaced,
        "tensors": outcome.num_tensors,
        "bytes": outcome.num_bytes,
        "seconds": round(time.perf_counter() - started_s, 3),
        "notes": list(outcome.notices),
    }
    deliver(args.json, report, _merged_table(report))
    return 0


def _options(args: argparse.Namespace) -> WriterOptions:
    """Errors: ConfigError where the stages are counted in two ways."""
    refuse_below(args, 1, "tp", "pp", "vocab_divisible_by", "ep", "vpp")
    stages = require_whole_layers(args.layers_per_stage or (), "a checkpoint with a file a stage")
    if stages and args.pp and len(stages) != args.pp:
        raise ConfigError(
            f"--layers-per-stage has {len(stages)} stages but --pp is {args.pp}: give one number of layers a stage"
        )
    if args.to in ("hf", "deepspeed") and (refused := [flag_of(name) for name in _OF_RANKS if getattr(args, name)]):
        raise ConfigError(f"--to {args.to} has no ranks of tensors or stages: leave out {', '.join(refused)}")
    return WriterOptions(
        tp=args.tp or 1,
        pp=args.pp or len(stages) or 1,
        layers_per_stage=stages,
        vocab_divisible_by=args.vocab_divisible_by or 128,
        ep=args.ep or 1,
        vpp=args.vpp or 1,
    )


def _own(args: argparse.Namespace) -> dict[str, Any]:
    """What the target's writer alone takes. Errors: ConfigError."""
    if args.transformer_impl is not None:
        if args.to != "megatron-legacy":
            raise ConfigError(f"--transformer-impl is for --to megatron-legacy: leave it out with --to {args.to}")
        return {"transformer_impl": args.transformer_impl}
    if args.max_shard_gb is None:
        return {}
    if args.to != "hf":
        raise ConfigError(f"--max-shard-gb is for --to hf: leave it out with --to {args.to}")
    if not 0 < args.max_shard_gb < float("inf"):
        raise ConfigError(f"--max-shard-gb is {args.max_shard_gb:g} but must be above 0")
    return {"shard_bytes": max(1, round(args.max_shard_gb * 1e9))}


def _in_mb(progress: WorkProgress) -> Callable[[int], None]:
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        before, done = done, done + num_bytes
        progress.advance(-(-done // _MB) - -(-before // _MB))

    return advance


def _merged_table(report: dict[str, Any]) -> Table:
    replaced = report["modules_replaced"]
    whole = f", {replaced:,} tensors taken whole" if replaced else ""
    return _rows(
        report,
        {
            "from": f"{report['source']} beside {report['base']}",
            "merged": f"adapters of {report['adapters']:,} weights{whole}",
            "tensors": f"{report['tensors']:,}, {report['bytes'] / 1e9:,.3f} GB",
            "time": f"{report['seconds']:,.1f} s",
        },
    )


def _table(report: dict[str, Any]) -> Table:
    num_from_before = report["pieces_kept_from_before"]
    rows = {
        "from": f"{report['source']} ({report['source_format']}, {report['family']})",
        "parameters": f"{report['parameters']:,}",
        "tensors": f"{report['tensors']:,}, {report['bytes'] / 1e9:,.3f} GB",
        "pieces": f"{report['pieces']:,}" + (f", {num_from_before:,} of them from before" if num_from_before else ""),
        "compared bit for bit": "yes, all equal" if report["verified"] else "no (--verify)",
        "time": f"{report['seconds']:,.1f} s",
    }
    return _rows(report, rows)


def _rows(report: dict[str, Any], rows: dict[str, str]) -> Table:
    table = Table(title=f"{report['destination']} ({report['format']})", show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
