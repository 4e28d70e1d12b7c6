"""`dynapipe flops`: FLOPs, MFU and HFU of a run, of a log, or of a step whose seconds are known."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.plan_inputs import read_lengths
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.flops import Positions, Work
from dynapipe_ext.models.sources import read_model
from dynapipe_ext.plan import RECOMPUTES
from dynapipe_ext.tools.flops import Account, account, accounts_of_report, flops_table, read_log

_EPILOG = """examples:
  dynapipe flops runs/latest
  dynapipe flops --model llama-2-7b --seq-len 4096 --batch-size 512 --seconds-per-step 21.3 --gpus 64 --peak-tflops 989
  dynapipe flops --model config.json --lengths lengths.npy --seconds-per-step 2.1 --gpus 8
  dynapipe flops --log train.log --model config.json

Model FLOPs count real tokens, attention document by document, forward and backward; what padding and recomputation add
is counted apart. MFU is model FLOPs over the devices' peak, HFU all that was executed over it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("report", nargs="?", metavar="REPORT", help="report.json of a run, or the run's folder")
    parser.add_argument("--log", metavar="FILE", help="a training log of Megatron-LM")
    parser.add_argument(
        "--model", metavar="MODEL", help="config.json, Megatron's arguments as JSON, or a preset's name"
    )
    parser.add_argument("--lengths", metavar="FILE", help="lengths of one step's samples (.npy or text), unpadded")
    parser.add_argument("--seq-len", type=int, metavar="S", help="positions of every sample instead")
    parser.add_argument("--decoder-len", type=int, default=0, metavar="S", help="decoder positions of every sample")
    parser.add_argument("--batch-size", type=int, metavar="B", help="samples of one step, with --seq-len")
    parser.add_argument("--padded-tokens", type=int, metavar="N", help="rows x length that a step really executed")
    parser.add_argument("--recompute", choices=RECOMPUTES, default="none", help="what every micro-batch recomputed")
    parser.add_argument("--seconds-per-step", type=float, metavar="S")
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument("--peak-tflops", type=float, metavar="T", help="of one device in the run's precision")
    parser.add_argument("--causal", action="store_true", help="count half of the attention that a causal mask hides")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")


def run(args: argparse.Namespace) -> int:
    peak = 0.0 if args.peak_tflops is None else args.peak_tflops * 1e12
    if args.peak_tflops is not None and not 0 < peak < float("inf"):
        raise ConfigError(f"--peak-tflops is {args.peak_tflops} but must be above 0")
    accounts = _of_report(args, peak) if args.report else [_of_step(args, peak)]
    if args.json:
        print(json.dumps([one.to_json() for one in accounts], indent=1))
        return 0
    console = Console()
    console.print(flops_table(accounts))
    if not peak:
        console.print("Give --peak-tflops for MFU and HFU.", highlight=False)
    return 0


def _of_report(args: argparse.Namespace, peak: float) -> list[Account]:
    given = ("log", "model", "lengths", "seq_len", "batch_size", "seconds_per_step", "gpus", "padded_tokens")
    if also := [f"--{name.replace('_', '-')}" for name in given if getattr(args, name) is not None]:
        raise ConfigError(f"a report says what was run: give it, or {', '.join(also)}")
    path = Path(args.report)
    path = path / "report.json" if path.is_dir() else path
    return accounts_of_report(path, peak_flops_per_s=peak, causal=args.causal)


def _of_step(args: argparse.Namespace, peak: float) -> Account:
    if not args.model:
        raise ConfigError("give a run's report, or --model with the step's samples, --seconds-per-step and --gpus")
    architecture = read_model(args.model)
    seconds, gpus, batch_size, seq_len = args.seconds_per_step, args.gpus, args.batch_size, args.seq_len
    if args.log:
        logged = read_log(Path(args.log))
        seconds = logged.seconds_per_step if seconds is None else seconds
        gpus, batch_size, seq_len = gpus or logged.gpus, batch_size or logged.batch_size, seq_len or logged.seq_len
    missing = [name for name, value in (("--seconds-per-step", seconds), ("--gpus", gpus)) if not value]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be given{' (the log does not say)' if args.log else ''}")
    real = _positions(args, architecture, batch_size, seq_len)
    executed = real
    if args.padded_tokens is not None:
        if args.padded_tokens < real.total:
            raise ConfigError(f"--padded-tokens is {args.padded_tokens} but the step has {real.total} real tokens")
        executed = real + Positions.of_rows(1, rows=args.padded_tokens - real.total)  # attends to itself alone
    return account(
        Path(args.log or args.model).name,
        architecture,
        Work(real, {args.recompute: executed}),
        seconds=seconds,
        gpus=gpus,
        peak_flops_per_s=peak,
        causal=args.causal,
    )


def _positions(args: argparse.Namespace, architecture: Architecture, batch_size: int, seq_len: int) -> Positions:
    if (args.lengths is not None) == bool(seq_len):
        raise ConfigError("give the step's samples as --lengths FILE, or as --seq-len with --batch-size: one of them")
    if args.lengths is not None:
        lengths = read_lengths(args.lengths)
        pairs = lengths[:, :2].tolist()
        if architecture.family == "t5" and not any(pair[1] for pair in pairs):
            raise ConfigError(f"--lengths {args.lengths} has no decoder lengths, but t5 models have a decoder")
        return Positions.of_samples((pair[0], pair[1]) for pair in pairs)
    if not batch_size or min(batch_size, seq_len) < 1 or args.decoder_len < 0:
        raise ConfigError(
            f"--seq-len {seq_len}, --batch-size {batch_size} and --decoder-len {args.decoder_len}: give at least 1"
            " (0 for no decoder)"
        )
    if (architecture.family == "t5") != bool(args.decoder_len):
        raise ConfigError(f"--decoder-len is {args.decoder_len}: above 0 for t5 models, and for them alone")
    return Positions.of_rows(seq_len, args.decoder_len, batch_size)
