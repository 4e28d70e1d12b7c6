"""`dynapipe flops`: FLOPs, MFU and HFU of a run, of a log, or of a step whose seconds are known."""

from __future__ import annotations

import argparse
from dataclasses import astuple, dataclass
from pathlib import Path

from dynapipe_ext.batch.micro_batches import RECOMPUTES
from dynapipe_ext.costs.cluster import DEVICES, PRECISIONS
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.launch.command_parser import add_json, ending, flag_of
from dynapipe_ext.launch.commands.counted_models import (
    counted_json,
    counted_model,
    counted_notes,
    counted_table,
)
from dynapipe_ext.launch.commands.plan_inputs import read_lengths
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.counted import CountedModel
from dynapipe_ext.models.flops import Positions, Sight, StepFlops, Work
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.account.flops import (
    Account,
    account,
    accounts_of_report,
    flops_account,
    flops_table,
    read_log,
)
from dynapipe_ext.tools.console import deliver

_EPILOG = """examples:
  dynapipe flops runs/latest
  dynapipe flops --model llama-2-7b --seq-len 4096 --batch-size 512 --seconds-per-step 21.3 --gpus 64 --device h100
  dynapipe flops --model llama-3-8b --seq-len 8192 --batch-size 1
  dynapipe flops --model config.json --lengths lengths.npy --seconds-per-step 2.1 --gpus 8
  dynapipe flops --log train.log --model config.json

Model FLOPs count forward and backward of the real tokens, with attention document by document. Padding and
recomputation are counted apart. MFU is model FLOPs over the devices' peak, HFU executed FLOPs over it.
"""

_MOST_TFLOPS = 1e9  # of a device
_BOUNDS = {  # of the figures of a step
    "seq_len": (1, 10**12),
    "decoder_len": (0, 10**12),
    "batch_size": (1, 10**12),
    "padded_tokens": (1, 10**15),
    "gpus": (1, 10**9),
    "seconds_per_step": (1e-9, 1e9),
}
_OF_STEP = (  # flags that describe a step; a report has all of that
    "log", "model", "lengths", "seq_len", "decoder_len", "batch_size", "seconds_per_step", "gpus", "padded_tokens",
    "recompute",
)  # fmt: skip
_COUNT_OF_LOG_CAUSAL = (
    "TFLOP/s/GPU in the log of Megatron-LM (core_v0.16) also counts half of the attention, every position of a row as a"
    " token, the vocabulary with its padding, and nothing recomputed."
)
_COUNT_OF_LOG = (
    "TFLOP/s/GPU in the log of Megatron-LM (core_v0.16) counts half of the attention, as --causal does, every"
    " position of a row as a token, the vocabulary with its padding, and nothing recomputed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("report", nargs="?", metavar="REPORT", help="report.json of a run, or the run's folder")
    parser.add_argument("--log", metavar="FILE", help="a training log of Megatron-LM")
    parser.add_argument(
        "--model", metavar="MODEL", help="config.json, Megatron's arguments as JSON, or a preset's name"
    )
    parser.add_argument("--lengths", metavar="FILE", help="lengths of one step's samples (.npy or text), unpadded")
    parser.add_argument("--seq-len", type=int, metavar="N", help="positions of every sample instead")
    parser.add_argument("--decoder-len", type=int, metavar="N", help="decoder positions of every sample")
    add_flag(parser, "data.batch_size", "samples of a step, with --seq-len")
    parser.add_argument("--padded-tokens", type=int, metavar="N", help="rows x length that a step executed")
    parser.add_argument("--recompute", choices=RECOMPUTES, help="what every micro-batch recomputed")
    parser.add_argument("--seconds-per-step", type=float, metavar="SECONDS", help="what one step took")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices of the step")
    peak = parser.add_mutually_exclusive_group()
    peak.add_argument("--device", choices=tuple(DEVICES), help="whose published peak counts")
    peak.add_argument("--peak-tflops", type=float, metavar="T", help="of one device in the run's precision")
    parser.add_argument("--precision", choices=PRECISIONS, help="of the matrix products (default: bf16)")
    parser.add_argument("--causal", action="store_true", help="count half of the attention that a causal mask hides")
    add_json(parser, "the account")


def run(args: argparse.Namespace) -> int:
    peak = _peak(args)
    if not args.report:
        _refuse_out_of_bounds(args)
    unknown = None if args.report or not args.model else counted_model(args.model)
    if unknown is not None:
        counted, why = unknown
        one, notes = _of_counted(args, peak, counted), counted_notes(counted, why)
        report = {"accounts": [one.to_json()], **counted_json(counted, notes)}
        deliver(args.json, report, flops_table([one]), counted_table(counted), *notes)
        return 0
    accounts = _of_report(args, peak) if args.report else [_of_step(args, peak)]
    hints = [] if peak or accounts[0].seconds is None else ["Give --device or --peak-tflops for MFU and HFU."]
    if args.log:
        hints.append(_COUNT_OF_LOG_CAUSAL if args.causal else _COUNT_OF_LOG)
    deliver(args.json, {"accounts": [entry.to_json() for entry in accounts]}, flops_table(accounts), *hints)
    return 0


def _peak(args: argparse.Namespace) -> float:
    """Peak FLOP/s of one device; 0 where no flag names it."""
    if args.device:
        return DEVICES[args.device].peak_flops_per_s[args.precision or "bf16"]
    if args.precision:
        raise ConfigError(
            f"--precision {args.precision} is of a device's published peak: give --device too, or leave it out"
        )
    if args.peak_tflops is None:
        return 0.0
    if not 0 < args.peak_tflops <= _MOST_TFLOPS:
        raise ConfigError(f"--peak-tflops is {args.peak_tflops} but must be above 0, and at most {_MOST_TFLOPS:g}")
    peak: float = args.peak_tflops * 1e12
    return peak


def _of_report(args: argparse.Namespace, peak: float) -> list[Account]:
    if flags := [flag_of(name) for name in _OF_STEP if getattr(args, name) is not None]:
        raise ConfigError(f"a report says what was run: give it, or {', '.join(flags)}")
    path = Path(args.report)
    path = path / "report.json" if path.is_dir() else path
    return accounts_of_report(path, peak_flops_per_s=peak, causal=args.causal)


def _refuse_out_of_bounds(args: argparse.Namespace) -> None:
    for name, (least, most) in _BOUNDS.items():
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            raise ConfigError(f"{flag_of(name)} is {short(value)} but must lie in {least:,} to {most:,}")


def _refuse_no_rate(args: argparse.Namespace, seconds: float | None, gpus: int | None, peak: float) -> None:
    """Errors: ConfigError for some of what a rate needs."""
    if seconds is None and gpus:
        raise ConfigError("--gpus are for FLOPs a second: give --seconds-per-step too, or leave --gpus out")
    if seconds is not None and not gpus:
        raise ConfigError(f"--gpus must be given{' (the log does not say)' if args.log else ''}")
    if seconds is None and peak:
        raise ConfigError("a device's peak is for MFU and HFU: give --seconds-per-step and --gpus too")


def _of_counted(args: argparse.Namespace, peak: float, counted: CountedModel) -> Account:
    """FLOPs of the step that the flags describe. Errors: ConfigError for flags that need a known family."""
    if counted.uncounted and any("encoder" in what or "decoder" in what for what in counted.uncounted):
        raise ConfigError(f"{args.model} has an encoder and a decoder: FLOPs of these are counted for t5 alone")
    for name in ("log", "decoder_len", "padded_tokens", "recompute"):
        if getattr(args, name):
            raise ConfigError(
                f"{flag_of(name)} is for families that are known here, not {counted.model_type}: leave it out"
            )
    _refuse_no_rate(args, args.seconds_per_step, args.gpus, peak)
    shape = _Shape(args.batch_size, args.seq_len, args.decoder_len)
    pairs, rows = _samples(args, counted.model_type, shape, t5=False)
    lengths = [length for length, _ in pairs]
    flops = StepFlops(*(rows * part for part in astuple(counted.step_flops(lengths, causal=args.causal))))
    return flops_account(
        Path(args.model).name,
        flops,
        rows * sum(lengths),
        seconds=args.seconds_per_step,
        gpus=args.gpus or 1,
        peak_flops_per_s=peak,
    )


def _of_step(args: argparse.Namespace, peak: float) -> Account:
    if not args.model:
        raise ConfigError("give a run's report, or --model with the step's samples, --seconds-per-step and --gpus")
    architecture, _ = read_model(args.model)
    seconds, gpus, recompute = args.seconds_per_step, args.gpus, args.recompute
    shape = _Shape(args.batch_size, args.seq_len, args.decoder_len)
    if args.log:
        logged = read_log(Path(args.log))
        seconds = logged.seconds_per_step if seconds is None else seconds
        gpus, recompute = gpus or logged.gpus, recompute or logged.recompute
        if args.lengths is None:
            decoder_len = logged.decoder_len if architecture.num_decoder_layers else 0
            shape = _Shape(
                shape.batch_size or logged.batch_size,
                shape.seq_len or logged.seq_len,
                shape.decoder_len or decoder_len,
            )
    _refuse_no_rate(args, seconds, gpus, peak)
    real, longest = _positions(args, architecture, shape)
    executed = real
    if args.padded_tokens is not None:
        if args.padded_tokens < real.total or architecture.num_decoder_layers:
            raise ConfigError(
                f"--padded-tokens is {args.padded_tokens} for {real.total} real tokens of {architecture.family}:"
                " give as many at least, of a decoder-only model"
            )
        a = architecture
        row = Positions.of_rows(longest, sight=Sight.of(a))
        squares = args.padded_tokens * row.encoder_squares // longest
        executed = Positions(args.padded_tokens, 0, max(squares, real.encoder_squares))
    return account(
        Path(args.log or args.model).name,
        architecture,
        Work(real, {recompute or "none": executed}),
        seconds=seconds,
        gpus=gpus or 1,
        peak_flops_per_s=peak,
        causal=args.causal,
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    batch_size: int | None
    seq_len: int | None
    decoder_len: int | None


def _positions(args: argparse.Namespace, architecture: Architecture, shape: _Shape) -> tuple[Positions, int]:
    """(positions of the step's samples, length of the longest one)."""
    sight = Sight.of(architecture)
    pairs, rows = _samples(args, architecture.family, shape, t5=bool(architecture.num_decoder_layers))
    if args.lengths is not None:
        return Positions.of_samples(pairs, sight=sight), max(e for e, _ in pairs)
    ((seq_len, decoder_len),) = pairs
    return Positions.of_rows(seq_len, decoder_len, rows, sight=sight), seq_len


def _samples(args: argparse.Namespace, family: str, shape: _Shape, *, t5: bool) -> tuple[list[tuple[int, int]], int]:
    """((encoder, decoder) lengths of the step's samples, how many of each there are)."""
    if (args.lengths is None) == (shape.seq_len is None):
        raise ConfigError("give the step's samples as --lengths FILE, or as --seq-len with --batch-size: one of them")
    if args.lengths is not None:
        if shape.batch_size is not None or shape.decoder_len is not None:
            raise ConfigError("--lengths has all samples: leave --batch-size and --decoder-len out")
        pairs = [(e, d) for e, d in read_lengths(args.lengths)[:, :2].tolist()]
        if not pairs:
            raise ConfigError(f"--lengths {args.lengths} has no samples: give those of one step")
        if any(bool(decoder) != t5 for _, decoder in pairs):
            raise ConfigError(
                f"--lengths {args.lengths}: samples of a {family} model have"
                f" {'a decoder length' if t5 else 'one length'} each"
            )
        return pairs, 1
    batch_size, seq_len, decoder_len = shape.batch_size or 0, shape.seq_len or 0, shape.decoder_len or 0
    if min(batch_size, seq_len) < 1 or decoder_len < 0:
        raise ConfigError(f"--seq-len {seq_len} and --batch-size {batch_size}: give both, at least 1")
    if t5 != bool(decoder_len):
        raise ConfigError(f"--decoder-len is {decoder_len}: above 0 for t5 models, and for them alone")
    return [(seq_len, decoder_len)], batch_size
