"""`dynapipe plan`: the plan of one global batch, from nothing but lengths and costs, without training."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console

from dynapipe_ext.config import ScheduleName, TrainConfig
from dynapipe_ext.core import active_core
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table import A100_HIDDEN_SIZE, CostTable
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.job import analytic_costs, model_shape, read_costs, topology_of
from dynapipe_ext.lengths import LengthArray, SampleLength, as_length_array, sample_lengths
from dynapipe_ext.plan import Layout
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.tools.show_plan import of_step_plan, read_plan, rendered, write_plan
from dynapipe_ext.topology import Topology

# Of one CPU core, where nothing was measured: orders of magnitude, so that shapes of plans make sense.
DEFAULT_FLOPS_PER_S = 50e9
DEFAULT_LAYER_OVERHEAD_NS = 500_000
_PIPE_COLUMNS = 140  # no terminal to fit into: room for the timeline's labels

_EPILOG = """examples:
  dynapipe plan --lengths lengths.npy --tokens-per-batch 65536 --tp 1 --pp 4 --dp 2
  dynapipe plan --lengths runs/latest/data/lengths.npy --step 3 --layout packed --json plan.json
  dynapipe plan --show plan.json

A lengths file is .npy of shape (N,), (N, 2) = encoder, decoder or (N, 3) = encoder, decoder, targets; or text with one
length, or "encoder decoder", a line. For a decoder-only model a sample's two lengths are joined to one row.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="FILE", help="the lengths of all samples (.npy or text)")
    source.add_argument("--batch", metavar="FILE", help='JSON list of {"lengths": [[encoder, decoder], ...]}')
    source.add_argument("--show", metavar="FILE", help="show a plan that --json wrote")
    parser.add_argument("--step", type=int, metavar="K", help="which global batch of the lengths file (0)")
    parser.add_argument("--index", type=int, metavar="K", help="which object of the --batch file (0)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tokens-per-batch", type=int, metavar="N", help="real tokens of a global batch")
    size.add_argument("--batch-size", type=int, metavar="N", help="samples of a global batch")
    parser.add_argument("--extra", type=int, nargs=2, default=(0, 0), metavar=("ENC", "DEC"), help="added to lengths")
    parser.add_argument("--truncate", type=int, metavar="N", help="cut lengths at N before anything else")
    parser.add_argument("--config", metavar="FILE", help="settings of a training run in TOML; flags override them")
    parser.add_argument("--costs", metavar="PATH", help="cost model (JSON), or folder of measured CSV with --model")
    parser.add_argument("--model", metavar="NAME", help=f"model of the CSV folder ({', '.join(A100_HIDDEN_SIZE)})")
    parser.add_argument("--layers", type=int, metavar="N", help="layers (of each kind) for the CSV folder's model")
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, metavar="N")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--memory-limit-gb", type=float, metavar="GB", help="per rank, 10^9 bytes")
    memory.add_argument("--memory-mb", type=float, metavar="MB", help="per rank, 10^6 bytes")
    parser.add_argument("--layout", choices=get_args(Layout), help="of micro-batches")
    parser.add_argument("--schedule", choices=get_args(ScheduleName), help="of the pipeline")
    parser.add_argument("--pad-multiple", type=int, metavar="N", help="rows are rounded up to it (CSV folder: 1)")
    parser.add_argument("--effort", type=int, metavar="N", help="moves tried by the search")
    parser.add_argument("--seed", type=int, metavar="N", help="of the data order and the search")
    parser.add_argument("--split-backward", action="store_true", default=None, help="run B as I and W")
    parser.add_argument("--json", metavar="FILE", help="write the plan as dynapipe-plan/1")


@dataclass(frozen=True, slots=True)
class _Priced:
    """A cost model with the sentence that says where it comes from."""

    costs: CostModel
    topology: Topology
    provenance: str
    measured_grid: bool = False  # lengths between its points are priced exactly: rows need no rounding up

    @property
    def has_decoder(self) -> bool | None:
        """None for costs that price tokens of any kind."""
        match self.costs:
            case CostTable():
                return self.costs.has_decoder
            case AnalyticCosts():
                return False
            case _:
                return None


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    if args.show:
        console.print(rendered(read_plan(args.show), width=console.width))
        return 0
    config = _config(args)
    priced = _priced(args, config)
    limit_bytes = _memory_limit_bytes(args, config)
    samples, chosen, notes = _samples(args, config, priced.has_decoder)
    multiple = args.pad_multiple or (1 if priced.measured_grid else config.plan.pad_multiple)
    planner = Planner(
        priced.topology,
        priced.costs,
        limit_bytes,
        config.run.seed,
        layout=config.plan.layout,
        schedule=config.plan.schedule,
        rule=config.plan.rule,
        pad_multiple=multiple,
        max_tokens=config.plan.max_tokens,
        effort=config.plan.effort,
        loss_norm=config.plan.loss_norm,
        recompute=None if config.plan.recompute == "auto" else config.plan.recompute,
        equal_counts=config.plan.replica_counts == "equal",
        split_backward=config.plan.split_backward,
    )
    start_s = time.perf_counter()
    plan = planner.plan(samples, step=args.step or 0)
    planning_s = time.perf_counter() - start_s
    console.print(f"batch: {chosen}, {len(samples):,} samples, {sum(s.tokens for s in samples):,} tokens")
    for note in notes:
        console.print(f"lengths: {note}")
    console.print(f"costs: {priced.provenance}")
    console.print(f"limits: {limit_bytes / 1e9:g} GB a rank, rows rounded up to a multiple of {multiple}")
    console.print(f"search: {planner.effort:,} moves on the {active_core()} core")
    console.print(rendered(of_step_plan(plan, planner.topology, planning_s=planning_s), width=console.width))
    if args.json:
        write_plan(args.json, plan, planner.topology)
        console.print(f"the plan is in {args.json}")
    return 0


def _config(args: argparse.Namespace) -> TrainConfig:
    """The file's settings, or the defaults, with the flags on top."""
    config = TrainConfig.read(args.config) if args.config else TrainConfig()
    names = {
        "topology": ("tp", "pp", "dp"),
        "plan": ("layout", "schedule", "effort", "pad_multiple", "memory_limit_gb", "split_backward"),
        "data": ("tokens_per_batch", "batch_size"),
        "run": ("seed",),
    }
    tables: dict[str, dict[str, Any]] = {
        table: {name: getattr(args, name) for name in fields if getattr(args, name) is not None}
        for table, fields in names.items()
    }
    if args.batch_size is not None:
        tables["data"]["tokens_per_batch"] = 0
    if args.tokens_per_batch is not None:
        tables["data"]["batch_size"] = 0
    if args.memory_mb is not None:
        tables["plan"]["memory_limit_gb"] = args.memory_mb / 1e3
    if config.topology.layers_per_stage and args.pp not in (None, config.topology.pp):
        tables["topology"]["layers_per_stage"] = ()
    return config.with_values(**tables)


def _priced(args: argparse.Namespace, config: TrainConfig) -> _Priced:
    path = args.costs or config.plan.costs
    t = config.topology
    if (args.model or args.layers) and not (path and Path(path).is_dir()):
        raise ConfigError("--model and --layers go with a folder of measured CSV files: name it with --costs DIR")
    if path and Path(path).is_dir():
        if not (args.model and args.layers):
            raise ConfigError(
                f"--costs {path} is a folder of CSV files: say which --model NAME and how many --layers N"
            )
        topology = Topology(tp=t.tp, pp=t.pp, dp=t.dp, layers_per_stage=t.layers_per_stage)
        table = CostTable.read_a100(path, args.model, topology=topology, num_layers=args.layers)
        return _Priced(table, topology, f"measured table of {args.model}, {args.layers} layers, from {path}", True)
    if path:
        return _read_costs(path, Topology(tp=t.tp, pp=t.pp, dp=t.dp), args)
    topology = topology_of(config)
    layers = -(-config.model.num_layers // topology.num_stages)
    costs = analytic_costs(
        config,
        model_shape(config, config.data.vocab_size),
        flops_per_s=DEFAULT_FLOPS_PER_S,
        overhead_ns=DEFAULT_LAYER_OVERHEAD_NS * layers,
    )
    provenance = (
        f"counted for the configured model of {config.model.num_layers} layers at default rates"
        f" ({DEFAULT_FLOPS_PER_S / 1e9:g} GFLOP/s, {DEFAULT_LAYER_OVERHEAD_NS / 1e6:g} ms a layer):"
        " name measured ones with --costs"
    )
    return _Priced(costs, topology, provenance)


def _read_costs(path: str, topology: Topology, args: argparse.Namespace) -> _Priced:
    """A cost model's file, laid out over the topology of the flags, or over its own where none is given."""
    asked = args.config is not None or any(getattr(args, name) is not None for name in ("tp", "pp", "dp"))
    costs, topology = read_costs(path, topology if asked else None)
    return _Priced(costs, topology, f"{type(costs).__name__} from {path}")


def _memory_limit_bytes(args: argparse.Namespace, config: TrainConfig) -> int:
    if args.costs and not args.config and args.memory_limit_gb is None and args.memory_mb is None:
        raise ConfigError("costs do not say how much memory a rank has: give --memory-limit-gb or --memory-mb")
    return round(config.plan.memory_limit_gb * 1e9)


def _samples(
    args: argparse.Namespace, config: TrainConfig, has_decoder: bool | None
) -> tuple[list[SampleLength], str, list[str]]:
    """One global batch, what to call it, and what was done to its lengths."""
    if args.batch:
        if args.step is not None or args.tokens_per_batch is not None or args.batch_size is not None:
            raise ConfigError("--batch FILE holds whole global batches: pick one with --index, not by step or size")
        table, index = _read_batch(args.batch, args.index or 0), None
        chosen = f"object {args.index or 0} of {args.batch}"
    else:
        if args.index is not None:
            raise ConfigError("--index picks a global batch of --batch FILE: use --step with --lengths")
        table, index = read_lengths(args.lengths), args.step or 0
        chosen = f"step {index} of {args.lengths}"
    table, notes = _fitted(table, args.extra, args.truncate, has_decoder)
    indices: Sequence[int] | None = None
    if index is not None:
        batches = GlobalBatches(
            table,
            batch_size=config.data.batch_size or None,
            tokens_per_batch=config.data.tokens_per_batch or None,
            seed=config.run.seed,
            drop_last=config.data.drop_last,
        )
        if not 0 <= index < len(batches):
            raise ConfigError(f"--step is {index} but {args.lengths} makes {len(batches)} global batches: lower it")
        indices = batches[index]
    return sample_lengths(table, indices), chosen, notes


def read_lengths(path: str | Path) -> LengthArray:
    """The lengths in a .npy file, or in a text of one length or "encoder decoder" a line, as (N, 3).

    Errors: DataError naming the file, and the line or the shape at fault.
    """
    try:
        if Path(path).suffix == ".npy":
            return as_length_array(np.load(path, allow_pickle=False))
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as lengths ({error}): give .npy or one length a line") from error
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
    if len(words) > 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise DataError(f"{where} is {line.strip()[:80]!r} but must be one length, or encoder and decoder")
    return [int(word) for word in words]


def _read_batch(path: str, index: int) -> LengthArray:
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): give a JSON list of batches") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON (line {error.lineno}: {error.msg}): give a list of batches") from error
    if not isinstance(raw, list) or not 0 <= index < len(raw):
        held = f"{len(raw)} batches" if isinstance(raw, list) else type(raw).__name__
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


def _fitted(
    table: LengthArray, extra: tuple[int, int], truncate: int | None, has_decoder: bool | None
) -> tuple[LengthArray, list[str]]:
    """Lengths as the model takes them: cut, joined where it is decoder-only, and with `extra` added (at least 1)."""
    encoder, decoder, target = table.T.copy()
    notes = []
    if has_decoder is False and decoder.any():
        encoder, decoder = encoder + decoder, np.zeros_like(decoder)
        notes.append("encoder and decoder side joined to one row, as the model is decoder-only")
    if truncate is not None:
        if truncate < 1:
            raise ConfigError(f"--truncate is {truncate} but must be at least 1")
        cut = int(((encoder > truncate) | (decoder > truncate)).sum())
        encoder, decoder = np.minimum(encoder, truncate), np.minimum(decoder, truncate)
        notes.append(f"{cut:,} of {len(table):,} cut at {truncate:,}")
    encoder = np.maximum(1, encoder + extra[0])
    if has_decoder or (has_decoder is None and decoder.any()):
        decoder = np.maximum(1, decoder + extra[1])
    if any(extra):
        notes.append(f"{extra[0]:+d} encoder and {extra[1]:+d} decoder positions added, at least 1 left")
    return np.stack([encoder, decoder, np.minimum(target, encoder + decoder)], axis=1), notes
