"""The inputs of `dynapipe plan` and `check-plan`: a cost model, a memory limit, and the lengths of a global batch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dynapipe_ext.batch.micro_batches import MOST_POSITIONS, LengthArray, SampleLength, as_length_array, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.a100 import A100_HIDDEN_SIZE
from dynapipe_ext.costs.interchange import read_run_costs
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import NO_ARRAY, ConfigError, DataError, reason, short
from dynapipe_ext.launch.command_parser import add_truncate, cut_at
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    global_batches,
    placed_stages,
    topology_of,
)
from dynapipe_ext.launch.job.model_folder import settled_cut
from dynapipe_ext.launch.job.requested import refuse_settings
from dynapipe_ext.launch.job.run_costs import costs_of_settings, refuse_table_of_other_model
from dynapipe_ext.launch.job.settled import SettledPlanning
from dynapipe_ext.settings.train_config import DEGREES, TrainConfig, add_flag
from dynapipe_ext.tools.console import counted
from dynapipe_ext.tools.files import parse_json

MOST_HIDDEN_SIZE = 1 << 20
_MOST_DIGITS = 18
_MOST_COLUMNS = 3

# Of one CPU core, where nothing was measured: orders of magnitude, so that shapes of plans make sense.
DEFAULT_FLOPS_PER_S = 50e9
DEFAULT_LAYER_OVERHEAD_NS = 500_000


@dataclass(frozen=True, slots=True)
class Priced:
    """The inputs of a plan, with a sentence about the origin of its costs."""

    planning: SettledPlanning
    provenance: str
    is_measured_grid: bool = False  # lengths between its points are priced exactly: rows need no rounding up


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cost model, and how much memory a rank has."""
    parser.add_argument("--config", metavar="FILE", help="settings of a training run in TOML; flags override them")
    add_flag(parser, "plan.costs", "cost model as JSON, or folder of measured CSV with --model (default: counted)")
    parser.add_argument("--model", metavar="MODEL", help=f"model of the CSV folder ({', '.join(A100_HIDDEN_SIZE)})")
    parser.add_argument("--layers", type=int, metavar="N", help="layers (of each kind) for the CSV folder's model")
    parser.add_argument("--hidden-size", type=int, metavar="N", help="of messages, where config and costs do not say")
    add_flag(parser, "plan.memory_limit_gb", "of a rank, 10^9 bytes (default: the settings')")


def add_length_arguments(parser: argparse.ArgumentParser) -> None:
    """What is done to lengths before they are planned."""
    parser.add_argument("--index", type=int, metavar="N", help="which object of the --batch file (default: 0)")
    parser.add_argument(
        "--extra", type=int, nargs=2, default=(0, 0), metavar=("ENC", "DEC"), help="added to both (default: 0 0)"
    )
    add_truncate(parser, "the settings' max_seq_len")


def settled_planning(
    args: argparse.Namespace, config: TrainConfig, topology: Topology | None = None, *, layout_is_named: bool
) -> Priced:
    """The inputs of a plan by flags and settings, over `topology` (None: the one that flags and settings name).

    A file of settings describes the model, unless it has no other table than [plan]: then the costs describe it. A
    model that the file describes is refused, cut and laid out as in `train`. `layout_is_named`: the user named padded
    or packed rows. Errors: ConfigError of such a run, and for flags that do not go together; those of a cost file and
    of the CSV folder.
    """
    if _describes_model(config):
        refuse_settings(config, compare=False)
        config = settled_cut(config, layout_is_named=layout_is_named)
    path = args.costs or config.plan.costs
    if (args.model or args.layers is not None) and not (path and Path(path).is_dir()):
        raise ConfigError("--model and --layers go with a folder of measured CSV files: name it with --costs DIR")
    if args.hidden_size is not None and not 1 <= args.hidden_size <= MOST_HIDDEN_SIZE:
        raise ConfigError(f"--hidden-size is {short(args.hidden_size)} but must be 1 to {MOST_HIDDEN_SIZE:,}")
    if path and Path(path).is_dir():
        return _of_csv_folder(args, config, topology, path)
    return _of_cost_file(args, config, topology, path) if path else _of_counted(args, config)


def _describes_model(config: TrainConfig) -> bool:
    return any(table != "plan" for table, _ in config.named)


def _of_csv_folder(args: argparse.Namespace, config: TrainConfig, topology: Topology | None, path: str) -> Priced:
    if not (args.model and args.layers):
        raise ConfigError(f"--costs {path} is a folder of CSV files: say which --model NAME and how many --layers N")
    topology = topology or placed_stages(config)
    table = CostTable.read_a100(path, args.model, topology=topology, num_layers=args.layers)
    planning = SettledPlanning(
        config=config,
        costs=table,
        topology=topology,
        is_of_config=False,
        hidden_size=args.hidden_size,
    )
    layers = counted(args.layers, "layer")
    return Priced(planning, f"measured table of {args.model}, {layers}, from {path}", True)


def _of_cost_file(args: argparse.Namespace, config: TrainConfig, topology: Topology | None, path: str) -> Priced:
    costs, num_cores = read_run_costs(path)
    if _describes_model(config):
        refuse_table_of_other_model(costs, config, architecture_of(config, config.data.vocab_size), path)
        topology = topology or topology_of(config)
        costs = costs_of_settings(config, costs, path, vocab_size=None, on_host=num_cores is not None)
        costs, topology = costs.with_topology(topology)
        is_of_config = True
    else:
        layers = vars(args).get("layers_per_stage") or ()  # a file's are for its model
        t, own = config.topology, costs.with_topology(None)[1]
        is_named = config.placement != "linear" or layers or t.vocabulary_parallel != "whole" or t.context_parallel != 1
        has_degree = any(vars(args).get(name) for name in DEGREES)
        if topology is None and (is_named or has_degree):
            tp = t.tp if args.tp is not None else own.tp
            degrees = {"tp": tp, "pp": t.pp, "dp": t.dp} if has_degree else {"tp": tp, "pp": own.pp, "dp": own.dp}
            config = config.with_values(topology={**degrees, "layers_per_stage": layers})
            topology = placed_stages(config)
        costs, topology = costs.with_topology(topology)  # over its own, where none is named
        is_of_config = False
    planning = SettledPlanning(
        config=config,
        costs=costs,
        topology=topology,
        num_cores=num_cores,
        is_of_config=is_of_config,
        hidden_size=args.hidden_size,
    )
    return Priced(planning, f"{type(costs).__name__} from {path}")


def _of_counted(args: argparse.Namespace, config: TrainConfig) -> Priced:
    architecture = architecture_of(config, config.data.vocab_size)
    estimated = analytic_costs(config, architecture, flops_per_s=DEFAULT_FLOPS_PER_S, overhead_ns=0)
    planning = SettledPlanning(
        config=config,
        costs=replace(estimated, layer_overhead_ns=DEFAULT_LAYER_OVERHEAD_NS),
        topology=topology_of(config),
        hidden_size=args.hidden_size,
    )
    provenance = (
        f"counted for the configured model of {counted(config.model.num_layers, 'layer')} at default rates"
        f" ({DEFAULT_FLOPS_PER_S / 1e9:g} GFLOP/s, {DEFAULT_LAYER_OVERHEAD_NS / 1e6:g} ms a layer):"
        " name measured ones with --costs"
    )
    return Priced(planning, provenance)


def memory_limit_bytes(args: argparse.Namespace, config: TrainConfig) -> int:
    """Of a rank. Errors: ConfigError where costs are given without it."""
    if args.costs and not args.config and args.memory_limit_gb is None:
        raise ConfigError("costs do not say how much memory a rank has: give --memory-limit-gb")
    return config.plan.memory_limit_bytes


@dataclass(frozen=True, slots=True)
class BatchToPlan:
    """One global batch, its name in messages, and notes on changes of its lengths; `longest`: of all samples that the
    lengths are of, on the encoder side."""

    samples: list[SampleLength]
    name: str
    notes: list[str]
    longest: int


def batch_to_plan(args: argparse.Namespace, config: TrainConfig, has_decoder: bool | None) -> BatchToPlan:
    """The global batch that flags name."""
    if args.batch:
        if args.step is not None or args.tokens_per_batch is not None or args.batch_size is not None:
            raise ConfigError("--batch FILE holds whole global batches: pick one with --index, not by step or size")
        table, index = read_batch(args.batch, args.index or 0), None
        chosen = f"object {args.index or 0} of {args.batch}"
    else:
        if args.index is not None:
            raise ConfigError("--index picks a global batch of --batch FILE: use --step with --lengths")
        table, index = read_lengths(args.lengths), args.step or 0
        chosen = f"step {index} of {args.lengths}"
    cut = cut_at(args.truncate, config.model.max_seq_len)
    table, notes = fitted(table, args.extra, cut, has_decoder)
    if _describes_model(config):
        _refuse_untrained(table, config.model.max_seq_len, args.config)
    indices: Sequence[int] | None = None
    if index is not None:
        batches = global_batches(config, table, 0, drop_last=config.data.drop_last)
        if not 0 <= index < len(batches):
            made = counted(len(batches), "global batch")
            raise ConfigError(f"--step is {index} but {args.lengths} makes {made}: give 0 to {len(batches) - 1}")
        indices = batches[index]
        if fraction := config.eval.fraction:
            notes.append(f"a run holds out [eval] fraction {fraction:g} of them, so its steps have other samples")
    return BatchToPlan(sample_lengths(table, indices), chosen, notes, int(table[:, 0].max(initial=0)))


def read_lengths(path: str | Path) -> LengthArray:
    """The lengths in a .npy file, or in a text of one length or "encoder decoder" a line, as (N, 3).

    Errors: DataError naming the file, and the line or the shape at fault.
    """
    try:
        if Path(path).suffix == ".npy":
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)  # a map is no larger than its file
            table = as_length_array(mapped)
            if table.shape[1] > _MOST_COLUMNS:
                raise DataError(
                    "these are lengths of pairs of answers, which a run alone plans (`dynapipe train --preferences`):"
                    " give encoder, decoder and target tokens"
                )
            return table
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except NO_ARRAY as error:
        raise DataError(
            f"{path} cannot be read as lengths ({reason(error)}): give .npy or one length a line"
        ) from error
    rows = [_parse_line(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{path} has no lengths: give one a line")
    if len({len(row) for row in rows}) > 1:
        raise DataError(f"{path} has lines of one and of two lengths: give every sample as many")
    try:
        return as_length_array(rows if len(rows[0]) == 2 else [row[0] for row in rows])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _parse_line(line: str, where: str) -> list[int]:
    words = line.split()
    if len(words) > 2 or not all(word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS for word in words):
        raise DataError(f"{where} is {short(line.strip())} but must be one length, or encoder and decoder")
    return [int(word) for word in words]


def read_batch(path: str, index: int) -> LengthArray:
    """The lengths of object `index` in a JSON list of batches. Errors: DataError naming the file and what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({reason(error)}): give a JSON list of batches") from error
    raw = parse_json(text, path, "a list of batches")
    if not isinstance(raw, list) or not 0 <= index < len(raw):
        held = counted(len(raw), "batch") if isinstance(raw, list) else type(raw).__name__
        raise DataError(f"{path} holds {held} but --index is {index}: it must be a list with that many objects")
    lengths = raw[index].get("lengths") if isinstance(raw[index], dict) else None
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(isinstance(p, list) and len(p) == 2 and all(type(n) is int and n >= 0 for n in p) for p in lengths)
    ):
        raise DataError(f'{path}: object {index} needs "lengths": [[encoder, decoder], ...] of whole numbers')
    try:
        return as_length_array(lengths)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def fitted(
    table: LengthArray, extra: tuple[int, int], truncate: int | None, has_decoder: bool | None
) -> tuple[LengthArray, list[str]]:
    """Lengths as the model takes them: cut, joined where it is decoder-only, and with `extra` added (at least 1).

    Errors: ConfigError for a `truncate` or an `extra` out of bounds; DataError for lengths that are above 2^31, before
    or after.
    """
    for name, added in zip(("ENC", "DEC"), extra, strict=True):
        if abs(added) > MOST_POSITIONS:
            raise ConfigError(f"--extra {name} is {short(added)} but must lie within -2^31 to 2^31: give a smaller one")
    _refuse_too_long(table[:, 0], table[:, 1], "correct the file")
    encoder, decoder, target = table.T.copy()
    notes = []
    if has_decoder is False and decoder.any():
        encoder, decoder = encoder + decoder, np.zeros_like(decoder)
        notes.append("encoder and decoder side joined to one row, as the model is decoder-only")
    if truncate is not None:
        if truncate > MOST_POSITIONS:
            raise ConfigError(f"--truncate is {short(truncate)} but must be at most 2^31: leave it out to cut nothing")
        cut = int(((encoder > truncate) | (decoder > truncate)).sum())
        encoder, decoder = np.minimum(encoder, truncate), np.minimum(decoder, truncate)
        notes.append(f"{cut:,} of {len(table):,} cut at {truncate:,}")
    encoder = np.maximum(1, encoder + extra[0])
    if has_decoder or (has_decoder is None and decoder.any()):
        decoder = np.maximum(1, decoder + extra[1])
    elif extra[1]:
        raise ConfigError(
            f"--extra DEC is {extra[1]} but there is no decoder side to add it to: give 0, or add it to ENC"
        )
    _refuse_too_long(encoder, decoder, "lower --extra, or cut with --truncate")
    if any(extra):
        notes.append(f"{extra[0]:+d} encoder and {extra[1]:+d} decoder positions added, at least 1 left")
    return np.stack([encoder, decoder, np.minimum(target, encoder + decoder)], axis=1), notes


def _refuse_untrained(table: LengthArray, most: int, path: str) -> None:
    """Errors: DataError for a sample that a run by the settings would refuse."""
    longest = int(table[:, :2].max(axis=1).argmax())
    if (positions := int(table[longest, :2].max())) > most:
        raise DataError(
            f"sample {longest} has {positions} positions but max_seq_len is {most} in {path}, by which no run would"
            " train it: cut with --truncate, or raise max_seq_len"
        )


def _refuse_too_long(encoder: IntArray, decoder: IntArray, next_move: str) -> None:
    over = np.flatnonzero(np.maximum(encoder, decoder) > MOST_POSITIONS)
    if over.size:
        i = int(over[0])
        raise DataError(
            f"sample {i} has {encoder[i]} and {decoder[i]} positions but a side has at most 2^31: {next_move}"
        )
