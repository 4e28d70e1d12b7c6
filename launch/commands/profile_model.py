"""`dynapipe profile`: measure the user's model on this device, and write the cost table for planning."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    LAYER_RECOMPUTES,
    MicroBatch,
    Recompute,
    SampleLength,
    round_up,
    with_sliced_head,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.codec import to_json
from dynapipe_ext.costs.measured_blocks import describe_blocks
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.model import fingerprint, no_width
from dynapipe_ext.costs.profiled import (
    PIECES_END,
    SHAPES_END,
    Profile,
    ProfileRange,
    choose_and_measure,
    make_cost_table,
    make_padded,
)
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.launch.job.configured import architecture_of, refuse_undivided
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.env import RankEnv, limit_threads, own_device
from dynapipe_ext.launch.run.outcome import versions
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.reproducible import exp, log
from dynapipe_ext.settings.train_config import DEGREES, TrainConfig, add_flag, read_flags
from dynapipe_ext.tools.account.profile_errors import HeldOutErrors, errors_of_pieces, errors_table, held_out_errors
from dynapipe_ext.tools.console import counted, deliver, say_loading
from dynapipe_ext.tools.files import Fields, read_json, write_atomic, write_output
from dynapipe_ext.tools.progress import WorkProgress

_FORMAT = "dynapipe-profile-part/1"
_MOST_LEN = 4096  # unless asked for more: longer rows take minutes each on a CPU
_MOST = 1 << 32
_MOST_WIDTH = 1024
_LEAST_EXCHANGED, _MOST_EXCHANGED = 1 << 22, 1 << 28  # bytes: enough to tell a rate; larger ones take as long a byte
_BLOCKS_END = 0.15  # of the time, after which later measurements have the rest
_EPILOG = """examples:
  dynapipe profile --config mine.toml --out costs.json
  dynapipe profile --model config.json --dtype bfloat16 --max-tokens 32768 --out costs.json
  dynapipe plan --costs costs.json --memory-limit-gb 72 --pp 4 --dp 2 --lengths lengths.npy

Give the table to `dynapipe plan --costs`, or as `costs` under [plan] to `dynapipe train --config`. Measurements are
kept in OUT.part as they are made: the same command goes on after an interruption.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE", help="settings of a training run in TOML; here its model counts")
    model.add_argument("--model", metavar="MODEL", help="config.json, Megatron's arguments as JSON, or a preset's name")
    parser.add_argument("--out", metavar="FILE", required=True, help="the cost table to write (JSON)")
    add_flag(parser, "topology.tp", "tensor parallel ranks (default: the settings', or 1)")
    add_flag(parser, "model.dtype", "of weights (default: the model's)")
    parser.add_argument("--min-len", type=int, metavar="N", help="shortest row (default: 16)")
    parser.add_argument("--max-len", type=int, metavar="N", help=f"longest row (default: its model's, to {_MOST_LEN})")
    parser.add_argument(
        "--max-decoder-len", type=int, metavar="N", help="of an encoder-decoder's targets (default: the longest row)"
    )
    add_flag(parser, "plan.max_tokens", "most rows x length, of both sides (default: 4 x the longest row)")
    parser.add_argument("--recompute", default=LAYER_RECOMPUTES, type=_kinds, metavar="KIND,…", help="kinds to measure")
    parser.add_argument("--error-target", type=float, default=0.05, metavar="E", help="mean error of times")
    parser.add_argument("--max-shapes", type=int, default=24, metavar="N", help="most shapes to measure")
    parser.add_argument("--max-seconds", type=float, default=600.0, metavar="SECONDS", help="to have ended by then")
    parser.add_argument(
        "--widths", type=_widths, metavar="N,…", help="of joined ranks to measure (default: those of the settings)"
    )
    parser.add_argument("--held-out", type=int, default=6, metavar="N", help="shapes that tell the error")
    parser.add_argument("--distributed-optimizer", action="store_true", help="optimizer states divided over replicas")
    add_flag(parser, "run.seed", "of the held-out shapes", default=0)
    add_json(parser, "the errors")


def _kinds(text: str) -> tuple[Recompute, ...]:
    """Kinds of recomputation with commas, in their usual order."""
    if unknown := sorted(set(text.split(",")) - set(LAYER_RECOMPUTES)):
        near = did_you_mean(unknown[0], LAYER_RECOMPUTES)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown: choose from {', '.join(LAYER_RECOMPUTES)}{near}")
    return tuple(kind for kind in LAYER_RECOMPUTES if kind in text.split(","))


def _widths(text: str) -> tuple[int, ...]:
    """Powers of two with commas, ascending; 1 is not measured."""
    widths = sorted({int(number) if number.isdecimal() else 0 for number in text.split(",")} - {1})
    if not all(2 <= width <= _MOST_WIDTH and width.bit_count() == 1 for width in widths):
        raise argparse.ArgumentTypeError(f"{text!r} are no widths: give powers of two up to {_MOST_WIDTH}, like 2,4")
    return tuple(widths)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is measured, and where it goes."""

    args: argparse.Namespace
    config: TrainConfig
    model: Architecture
    within: ProfileRange
    widths: tuple[int, ...]
    start_s: float  # by time.monotonic

    @property
    def dtype(self) -> str:
        return self.config.model.dtype

    @property
    def tp(self) -> int:
        return self.config.topology.tp

    @property
    def sequence_parallel(self) -> bool:
        return self.config.topology.sequence_parallel and self.tp > 1

    @property
    def value_bytes(self) -> Literal[2, 4]:
        return 4 if self.dtype == "float32" else 2

    @property
    def widths_missing(self) -> tuple[int, ...]:
        """The widths that have no measurements on disk yet."""
        path = part_path(self.args.out)
        written = read_json(path, _FORMAT, "measurements").get("blocks", {}) if path.exists() else {}
        return tuple(width for width in self.widths if str(width) not in written)

    def exchanged_bytes(self, width: int) -> int:
        """Bytes that a rank of a block receives in a layer's forward, for the largest micro-batch."""
        block = BlockAttention.from_architecture(self.model, Topology(tp=self.tp, dp=width, width=width))
        num_bytes = round(self.value_bytes * block.exchanged_values * self.within.max_tokens)
        return min(max(_LEAST_EXCHANGED, num_bytes), _MOST_EXCHANGED)

    def made_of(self, device_name: str) -> dict[str, Any]:
        """What all measurements in one table must have in common."""
        shared = {"model": asdict(self.model), "dtype": self.dtype, "device": device_name, "tp": self.tp}
        return shared | {"recomputes": list(self.within.recomputes), "sequence_parallel": self.sequence_parallel}

    def provenance(self, device_name: str) -> dict[str, Any]:
        """The origin of a table, as the table records it beside the measurements."""
        return {
            "device": device_name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "dtype": self.dtype,
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "versions": versions(),
            "model": asdict(self.model),
        }


def run(args: argparse.Namespace) -> int:
    job, out = _job(args, time.monotonic()), Path(args.out)
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out is {out}, but must name a file in a folder that exists")
    warnings.filterwarnings("ignore", module="megatron")
    say_loading("torch", "megatron-core")
    import torch

    import dynapipe_ext.executor.measuring.profiling  # noqa: F401  # once, before ranks are forked
    from dynapipe_ext.executor.stages import megatron_cpu

    megatron_cpu.install()  # imports megatron, once too
    torch.set_num_threads(limit_threads())  # more would count as CPU seconds of one
    with _alone(out):
        if job.widths_missing:
            run_local(partial(_measure_blocks, job), job.tp * max(job.widths))
        run_local(partial(_measure, job), job.tp)
    return 0


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Errors: ConfigError where another process measures for the same file: both would spoil the other's times."""
    try:
        lock = os.fdopen(open_kept(out.with_name(f".{out.name}.lock"), os.O_RDWR | os.O_CREAT), "w")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{out} is being measured by another process: wait for it, or end it") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                out.with_name(f".{out.name}.lock").unlink()


def _measure_blocks(job: _Job, env: RankEnv) -> int:
    """Measure blocks of each width, on one of as many ranks as the widest block has. The first rank writes the
    times."""
    from dynapipe_ext.executor.measuring.exchanges import BlockProfiler
    from dynapipe_ext.executor.measuring.profiling import Ranks

    device, width = own_device(env.local_rank), max(job.widths)
    part = _PartFile(Path(job.args.out), job.made_of(_device_name(device)))
    profile, missing = part.read(), job.widths_missing
    sequence_parallel = job.sequence_parallel
    ranks = Ranks(rank=env.rank, tp=job.tp, init_method=env.init_method, sequence_parallel=sequence_parallel, dp=width)
    with (
        BlockProfiler(job.model, missing, dtype=job.dtype, device=device, ranks=ranks) as blocks,
        WorkProgress("measuring widths", len(missing), enabled=env.rank == 0) as progress,
    ):
        end_s = job.start_s + _BLOCKS_END * job.args.max_seconds
        num_positions = blocks.row_in_time(job.within.multiple * width, job.within.max_len)
        for one in missing:
            profile.blocks[one] = blocks.measure(
                one, num_positions, most_bytes=job.exchanged_bytes(one), go_on=lambda: time.monotonic() < end_s
            )
            if env.rank == 0:
                part.write(profile)
            progress.advance()
    return 0


def _measure(job: _Job, env: RankEnv) -> int:
    """Measure layers, on one of the ranks that share them. The first rank prints and writes the table."""
    from dynapipe_ext.executor.measuring.profiling import LayerProfiler, Ranks

    args, is_first = job.args, env.rank == 0
    device = own_device(env.local_rank)
    device_name = _device_name(device)
    part = _PartFile(Path(args.out), job.made_of(device_name))
    profile = part.read()
    ranks = Ranks(rank=env.rank, tp=job.tp, init_method=env.init_method, sequence_parallel=job.sequence_parallel)
    with LayerProfiler(job.model, dtype=job.dtype, device=device, ranks=ranks) as profiler:
        size, agree = job.model.hidden_size, profiler.agree
        timed = TimedDevice(profiler.measure, size, job.start_s, args.max_seconds, agree, time.monotonic)
        _fill(profile, timed, job, part if is_first else None)
        clock = "CPU seconds" if device.type == "cpu" else "seconds"
        provenance = job.provenance(device_name) | {"clock": clock, "measured": profile.to_json()}
        provenance |= {"exchanges": to_json(profile.blocks)} if profile.blocks else {}
        table = make_cost_table(
            profile,
            job.within,
            job.model.padded(),
            value_bytes=job.value_bytes,
            tp=job.tp,
            distributed_optimizer=args.distributed_optimizer or job.config.optimizer.distributed,
            provenance=provenance,
        )
        errors = _errors(table, timed, job)
    if not is_first:
        return 0
    provenance["held_out_error"] = {group: one.mean for group, one in errors.items()}
    write_output(args.out, json.dumps(table.to_json() | {"provenance": provenance}, separators=(",", ":")) + "\n")
    part.remove()
    took_s, num_shapes = time.monotonic() - job.start_s, len(profile.list_shapes())
    summary = {"out": str(args.out), "shapes": num_shapes, "seconds": took_s, "device": device_name}
    summary["held_out_error"] = {group: one.to_json() for group, one in errors.items()}
    summary |= {"blocks": to_json(table.blocks)} if table.blocks else {}
    line = f"{args.out}: {counted(num_shapes, 'shape')} measured in {took_s:.0f} s on {device_name}"
    deliver(args.json, summary, errors_table(errors), *describe_blocks(profile.blocks), line)
    return 0


def _fill(profile: Profile, measure: TimedDevice, job: _Job, part: _PartFile | None) -> None:
    """Measure until the profile prices well enough, or the time is over. The rank that has the `part` file shows how
    far it is, and writes what is measured there."""
    args, within, is_first = job.args, job.within, part is not None
    most_shapes = max(args.max_shapes, len(within.list_first()))
    with WorkProgress("measuring shapes", most_shapes, enabled=is_first) as progress:
        progress.advance(done := len(profile.list_shapes()))

        def go_on(profile: Profile) -> bool:
            nonlocal done
            progress.advance(len(profile.list_shapes()) - done)
            done = len(profile.list_shapes())
            if part:
                part.write(profile)
            return measure.has_time(0.0, SHAPES_END)

        choose_and_measure(
            profile, measure, within, error_target=args.error_target, most_shapes=most_shapes, go_on=go_on
        )
    if not job.model.pieces_fault:
        with WorkProgress("measuring samples in pieces", len(within.cut_samples), enabled=is_first) as progress:
            profile.cut(measure, within, progress.advance)
        if is_first and not profile.pieces:
            print("no sample fits in pieces, or in time: the table will have no price for them", file=sys.stderr)


def _errors(table: CostTable, measure: TimedDevice, job: _Job) -> dict[str, HeldOutErrors]:
    """How far the table is off shapes, and samples in pieces, that it was not made of, as many as there is time for."""
    within = job.within
    errors: dict[str, HeldOutErrors] = {}
    if table.facts.prices_pieces:
        between = within.piece_sizes[len(within.piece_sizes) // 2]
        samples = [within.sample_in_pieces(between, kind) for kind in within.recomputes]
        errors["pieces"] = errors_of_pieces(table, measure, samples, (1 + PIECES_END) / 2)
    groups = _held_out(within, job.args.held_out, job.config.run.seed)
    if table.facts.slices_head:
        kind = with_sliced_head(within.recomputes)[0]
        groups["head in slices"] = [make_padded(shape, kind) for shape in within.list_sliced(job.args.held_out)]
    return held_out_errors(table, measure, groups) | errors


def _job(args: argparse.Namespace, start_s: float) -> _Job:
    for name, number, limit in (("--error-target", args.error_target, 1), ("--max-seconds", args.max_seconds, 1e7)):
        if not 0 < number <= limit:
            raise ConfigError(f"{name} is {number} but must be above 0, and at most {limit:g}")
    counts = {"--max-shapes": 1, "--held-out": 1, "--seed": 0, "--tp": 1, "--min-len": 1, "--max-len": 1}
    for name, least in (counts | {"--max-decoder-len": 1, "--max-tokens": 1}).items():
        count = getattr(args, name[2:].replace("-", "_"))
        if count is not None and not least <= count <= _MOST:
            raise ConfigError(f"{name} is {short(count)} but must be at least {least}, and at most {_MOST:,}")
    config = _config(args)
    model, tp = architecture_of(config, config.data.vocab_size), config.topology.tp
    refuse_undivided(config.model, tp)
    if model.dense_ffn_hidden_size:
        raise ConfigError(
            f"{model.family} has dense layers beside those of experts, and a cost table knows"
            " one kind of layer: train without it, counted costs at a measured rate tell them apart"
        )
    within = _range(args, model, tp if config.topology.sequence_parallel else 1)
    if args.max_shapes < (fewest := len(within.list_first())):
        print(
            f"--max-shapes is {args.max_shapes} but a table needs {fewest} at least: as many are measured",
            file=sys.stderr,
        )
    return _Job(args, config, model, within, _widths_to_measure(args, config, model), start_s)


def _widths_to_measure(args: argparse.Namespace, config: TrainConfig, model: Architecture) -> tuple[int, ...]:
    """Those that are named, or that steps of the settings may have, as far as this machine has devices for them."""
    if args.widths and model.num_decoder_layers:
        raise no_width("measured costs of an encoder-decoder", args.widths[0])
    widths = [width for width in config.topology.widths if width > 1]
    if args.widths is not None or model.num_decoder_layers or not widths:
        return args.widths or ()
    import torch

    num_devices = torch.cuda.device_count()
    fitting = tuple(width for width in widths if not num_devices or width * config.topology.tp <= num_devices)
    if len(fitting) < len(widths):
        print(
            f"widths above {max(fitting, default=1)} are not measured: tp {config.topology.tp} x width needs more than"
            f" the {num_devices} devices of this machine",
            file=sys.stderr,
        )
    return fitting


def _config(args: argparse.Namespace) -> TrainConfig:
    """Settings of a run of the model: those of the file, or of the named model alone, with the flags on top."""
    config = TrainConfig.read(args.config) if args.config else _config_of_model(args.model, args.dtype)
    return config.with_values(**read_flags(args, config, {}, of_file=True))


def _config_of_model(name: str, dtype: str | None) -> TrainConfig:
    dtype = dtype or read_model(name)[0].dtype
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"the model's weights are {dtype}: give --dtype float32 or bfloat16")
    settings = {"architecture": name, "backend": "megatron", "dtype": dtype}
    return TrainConfig().with_values(model=settings, topology=dict.fromkeys(DEGREES, 1))


def _range(args: argparse.Namespace, model: Architecture, multiple: int) -> ProfileRange:
    longest = args.max_len or min(model.max_seq_len, _MOST_LEN)
    if longest > model.max_seq_len and model.position == "learned":
        raise ConfigError(f"--max-len is {longest} but the model has {model.max_seq_len} positions")
    if args.max_decoder_len and not model.num_decoder_layers:
        raise ConfigError(
            f"--max-decoder-len is {args.max_decoder_len} but the model has no decoder side: leave it out"
        )
    longest_decoder = (args.max_decoder_len or longest) if model.num_decoder_layers else 0
    return ProfileRange(
        min_len=args.min_len or round_up(min(16, longest, longest_decoder or longest), multiple),
        max_len=longest,
        max_decoder_len=longest_decoder,
        max_tokens=args.max_tokens or 4 * (longest + longest_decoder),
        multiple=multiple,
        recomputes=args.recompute,
    )


def _held_out(within: ProfileRange, count: int, seed: int) -> dict[str, Sequence[MicroBatch]]:
    """Padded shapes, and packed rows of documents or pairs of very different lengths, within what the table knows."""
    shapes = within.draw_held_out(count, seed)
    kinds: list[Recompute] = [within.recomputes[i % len(within.recomputes)] for i in range(count)]
    padded = [make_padded(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    random, packed = np.random.default_rng(seed + 1), []
    for kind in kinds:
        documents, room = [], within.max_tokens - within.multiple * len(within.sides)
        least, most = log(within.sides).T
        for exponents in random.uniform(least, most, size=(16, len(within.sides))):
            lengths = [round(float(n)) for n in exp(exponents)]
            if sum(lengths) <= room:
                documents.append(lengths)
                room -= sum(lengths)
        samples = tuple(SampleLength(i, *lengths) for i, lengths in enumerate(documents))
        packed.append(MicroBatch(samples, "packed", kind, pad_multiple=within.multiple))
    return {"padded": padded, "packed": packed}


def _device_name(device: Any) -> str:
    if device.type == "cpu":
        return f"cpu ({platform.machine()})"
    import torch

    return torch.cuda.get_device_name(device)


def part_path(out: str | Path) -> Path:
    return Path(out).with_name(f"{Path(out).name}.part")


class _PartFile:
    """Measurements on disk while they are made, beside the table that they will be in."""

    def __init__(self, out: Path, made_of: dict[str, Any]) -> None:
        self._path, self._key, self._out = part_path(out), fingerprint(made_of), out

    def read(self) -> Profile:
        if not self._path.exists():
            return Profile()
        fields = Fields(read_json(self._path, _FORMAT, "measurements"), str(self._path))
        if fields.one("key", str) != self._key:
            raise ConfigError(
                f"{self._path} holds measurements of another model, device or precision: remove it, or write to another"
                f" file than {self._out}"
            )
        blocks = fields.one("blocks", dict, {})
        return Profile.from_json(fields.one("points", list), str(self._path), blocks)

    def write(self, profile: Profile) -> None:
        measured = {"points": profile.to_json(), "blocks": to_json(profile.blocks)}
        write_atomic(self._path, json.dumps({"format": _FORMAT, "key": self._key, **measured}))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
