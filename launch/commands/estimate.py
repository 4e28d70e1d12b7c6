"""`dynapipe estimate`: what a model needs and how to train it on a cluster, planned without touching either."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any, get_args

from dynapipe_ext.batch.micro_batches import Layout, Pieces
from dynapipe_ext.costs.cluster import DEVICES, PRECISIONS, Cluster
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, RECIPES, StateRecipe
from dynapipe_ext.errors import ConfigError, did_you_mean, refuse_unknown, short
from dynapipe_ext.launch.command_parser import add_json, add_truncate, cut_at, ending, given_flags, refuse_below
from dynapipe_ext.launch.commands.counted_models import counted_json, counted_model, counted_notes, counted_table
from dynapipe_ext.launch.commands.plan_inputs import read_lengths
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.launch.job.model_folder import prediction_line
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.counted import CountedModel
from dynapipe_ext.models.named_models import PRESETS, read_model
from dynapipe_ext.settings.train_config import TrainConfig, add_flag, add_flags, read_toml
from dynapipe_ext.tools.console import deliver, delivering, error_console, output
from dynapipe_ext.tools.estimate.answer import (
    Prices,
    estimate_json,
    settings,
    show_estimate,
    toml_text,
    trainable,
)
from dynapipe_ext.tools.estimate.lengths import LengthData, distribution_data, file_data
from dynapipe_ext.tools.estimate.options import OFFLOADS_TRIED, Limits, Question, RecomputeChoice, train_fault
from dynapipe_ext.tools.estimate.ranking import Estimate, Search, estimate
from dynapipe_ext.tools.files import write_output
from dynapipe_ext.tools.progress import WorkProgress

_PIPE_COLUMNS = 190  # no terminal to fit into
_MOST_TOKENS_PER_BATCH = 4 << 20  # what large models were trained with
_MOST_SAMPLES = 1024  # of a global batch
_STATES: tuple[StateRecipe, ...] = tuple(recipe for recipe in RECIPES if recipe != "fp32")
_NOTHING_FITS = 1
_CLUSTER_FIGURES = (
    "reserved_gb", "host_memory_gb", "efficiency", "intra_gb_per_s", "inter_gb_per_s", "host_gb_per_s",
)  # fmt: skip

_EPILOG = f"""examples:
  dynapipe estimate --model llama-2-70b --nodes 6 --gpus-per-node 4 --device a100 --gpu-memory-gb 80
  dynapipe estimate --model config.json --nodes 2 --lengths lengths.npy --tokens 0.7e9 --price-per-gpu-hour 2.5
  dynapipe estimate --model gpt2 --gpus-per-node 2 --device cpu --precision fp32 --write best.toml
  dynapipe train --config best.toml

presets: {", ".join(PRESETS)}

A lengths file is .npy of shape (N,), (N, 2) = encoder, decoder or (N, 3) = encoder, decoder, targets; or text. Without
one every sample is as long as the model was made for, up to 8,192 tokens.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG, {_NOTHING_FITS: "nothing fits"})
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="config.json, Megatron's arguments as JSON, or a preset"
    )
    _add_cluster(parser)
    _add_data(parser)
    _add_ways(parser)
    search = parser.add_argument_group("search and output")
    search.add_argument("--plans", type=int, default=24, metavar="N", help="options that are planned")
    add_flag(search, "plan.effort", "moves tried in the last plans", default=2000)
    add_flag(search, "run.seed", "of the data order and the search", default=0)
    search.add_argument("--top", type=int, default=12, metavar="N", help="options in the table")
    search.add_argument("--price-per-gpu-hour", type=float, default=0.0, metavar="X", help="with --tokens: the cost")
    add_json(search, "everything")
    search.add_argument("--write", metavar="FILE", help="the best that dynapipe train can run, for its --config")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    cluster.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="devices of one")
    cluster.add_argument("--device", choices=tuple(DEVICES), default="h100", help="whose published figures count")
    cluster.add_argument("--gpu-memory-gb", type=float, metavar="X", help="of one device, 10^9 bytes")
    names = ", ".join(_CLUSTER_FIGURES)
    cluster.add_argument("--cluster", metavar="FILE", help=f"other figures as TOML: {names} (default: published)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    lengths = data.add_mutually_exclusive_group()
    lengths.add_argument("--lengths", metavar="FILE", help="lengths of the samples (.npy or text)")
    lengths.add_argument("--length-distribution", metavar="D", help="uniform:N or lognormal:mean,sigma,max")
    add_truncate(data, "what the model was made for")
    data.add_argument("--tokens", type=float, metavar="N", help="real tokens of the whole run, for days and cost")
    data.add_argument("--tokens-per-batch", metavar="N|LOW:HIGH", help="real tokens of a step; searched within a range")
    data.add_argument("--max-samples", type=int, metavar="N", help=f"of a global batch (default: {_MOST_SAMPLES})")
    add_flag(data, "data.path", "training data that --write names", default=[])


def _add_ways(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_argument_group("ways to train, to keep the search to some: one, or several with commas")
    ways.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the matrix products")
    ways.add_argument("--states", choices=_STATES, default="megatron", help="who keeps what for a 16-bit parameter")
    for flag, metavar, what in (
        ("--tp", "N,…", "tensor parallel ranks"),
        ("--pp", "N,…", "pipeline ranks"),
        ("--zero", "N,…", "stages 0 to 3"),
        ("--offload", "KIND,…", ", ".join(OFFLOADS_TRIED)),
        ("--recompute", "KIND,…", ", ".join(get_args(RecomputeChoice))),
        ("--layout", "KIND,…", ", ".join(get_args(Layout))),
    ):
        ways.add_argument(flag, metavar=metavar, help=f"{what} (default: all that fit)")
    add_flags(ways, "plan.pieces")
    ways.add_argument(
        "--cp", metavar="N,…", help="context parallel ranks: data parallel ones that share rows (default: 1)"
    )
    add_flag(ways, "topology.placement", "of stages on ranks; auto tries all (default: auto)")
    add_flag(ways, "topology.vocabulary_parallel", "split of the vocabulary; auto tries it (default: whole)")


def run(args: argparse.Namespace) -> int:
    if args.data and not args.write:
        raise ConfigError(
            f"--data {' '.join(args.data)} is what --write names as training data, and nothing is read from it: add"
            " --write FILE, or give --lengths (a prepared folder has lengths.npy)"
        )
    if (unknown := counted_model(args.model)) is not None:
        return _counted(args, *unknown)
    question, search, prices = question_of(args), search_of(args), prices_of(args)
    console = output(_PIPE_COLUMNS, json_to=args.json)
    with WorkProgress("planning", search.most_plans, console=error_console(), enabled=sys.stderr.isatty()) as bar:
        answer = estimate(question, search, bar.advance)
    with delivering(args.json, estimate_json(answer, prices)):
        if left_out := prediction_line(args.model):
            console.print(left_out, markup=False, soft_wrap=True)
        show_estimate(answer, prices, console, most=args.top)
        if args.write:
            console.print(write_best(answer, args.write, data=args.data, total_tokens=prices.total_tokens))
    return 0 if answer.options else _NOTHING_FITS


def _counted(args: argparse.Namespace, counted: CountedModel, why: str) -> int:
    """Print the parameters and the bytes of states of a model of an unknown family; no ways to train it."""
    if args.write:
        raise ConfigError(f"--write {args.write} names a way to train, but none is known for {args.model}: {why}")
    _refuse_flags_of_ways(args)
    training_bytes = counted.parameters * sum(BYTES_PER_PARAMETER[args.states])
    notes = [
        f"Weights, gradients and optimizer take {training_bytes / 1e9:,.1f} GB ({args.states}), without activations.",
        *counted_notes(counted, why),
    ]
    report = {**counted_json(counted, notes), "training_bytes": training_bytes}
    deliver(args.json, report, counted_table(counted), *notes)
    return 0


def _refuse_flags_of_ways(args: argparse.Namespace) -> None:
    """Errors: ConfigError for a flag that counts do not heed."""
    for flag in given_flags(args):
        if flag not in ("--model", "--states", "--json"):
            raise ConfigError(f"{flag} plans ways to train, and none is known for {args.model}: leave it out")


def question_of(args: argparse.Namespace) -> Question:
    """Errors: ConfigError, DataError for what cannot be asked."""
    architecture, name = read_model(args.model)
    cluster = Cluster.from_device(
        DEVICES[args.device],
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        gpu_memory_gb=args.gpu_memory_gb,
        **_cluster_figures(args.cluster),
    )
    if args.precision == "fp32" and args.states != "megatron":
        raise ConfigError(f"--states {args.states} is about 16-bit weights: leave it out with --precision fp32")
    layouts: tuple[Layout, ...] = _words(args.layout, "--layout", get_args(Layout))
    pieces: Pieces = args.pieces or "off"
    packed_fault = "" if not layouts or "packed" in layouts else "pieces share packed rows: add packed to --layout"
    if pieces != "off" and (fault := architecture.pieces_fault or packed_fault):
        raise ConfigError(f"--pieces is {pieces} but {fault} (--pieces off)")
    return Question(
        architecture=architecture,
        name=name,
        cluster=cluster,
        data=_data(args, architecture),
        precision=args.precision,
        recipe=args.states,
        limits=Limits(
            tp=_numbers(args.tp, "--tp"),
            cp=_numbers(args.cp, "--cp") or (1,),
            pp=_numbers(args.pp, "--pp"),
            placement=args.placement or "auto",
            vocabulary=args.vocabulary_parallel or "whole",
            zero_stages=_numbers(args.zero, "--zero", most=3, least=0),
            offloads=_words(args.offload, "--offload", OFFLOADS_TRIED),
            recomputes=_words(args.recompute, "--recompute", get_args(RecomputeChoice)),
            layouts=layouts,
            pieces=pieces,
        ),
        seed=args.seed,
    )


def _cluster_figures(path: str | None) -> dict[str, float]:
    """Read the figures of a cluster's file, by the names of `Cluster`. Raises ConfigError."""
    if path is None:
        return {}
    figures = read_toml(path, "figures")
    refuse_unknown(figures, _CLUSTER_FIGURES, path)
    if faults := [name for name, value in figures.items() if type(value) not in (int, float)]:
        raise ConfigError(f"{path}: {faults[0]} is {short(figures[faults[0]])} but must be a number")
    rates = {name for name in figures if name.endswith("_gb_per_s")}
    return {name.replace("_gb_", "_bytes_"): value * 1e9 if name in rates else value for name, value in figures.items()}


def _data(args: argparse.Namespace, architecture: Architecture) -> LengthData:
    cut = cut_at(args.truncate, architecture.max_seq_len)
    if cut is not None and not args.lengths:
        raise ConfigError(f"--truncate cuts at {cut}, but nothing is given to cut: give --lengths, or leave it out")
    refuse_below(args, 0, "seed")
    if args.lengths:
        return file_data(read_lengths(args.lengths), args.lengths, architecture, cut or 0)
    return distribution_data(args.length_distribution or "", architecture, args.seed)


def search_of(args: argparse.Namespace) -> Search:
    refuse_below(args, 1, "plans", "top", "max_samples")
    refuse_below(args, 0, "effort")
    bounds, size = (1, _MOST_TOKENS_PER_BATCH), args.tokens_per_batch
    samples = _MOST_SAMPLES if args.max_samples is None else args.max_samples
    if size:
        least, colon, most = size.partition(":")
        if "," in size:
            raise ConfigError(f"--tokens-per-batch is {short(size)} but must be one number, or two as LOW:HIGH")
        if args.max_samples is not None and not colon:
            raise ConfigError(
                f"--max-samples is {args.max_samples} but --tokens-per-batch {short(size)} alone says how large a batch"
                " is: leave it out, or give a range LOW:HIGH"
            )
        numbers = _numbers(f"{least},{most}" if colon else least, "--tokens-per-batch", most=1 << 32)
        bounds = (numbers[0], numbers[-1])
        samples = samples if colon else 1 << 20  # a size that is asked for is kept
    return Search(tokens_per_batch=bounds, most_samples=samples, most_plans=args.plans, effort=args.effort)


def prices_of(args: argparse.Namespace) -> Prices:
    tokens, price = args.tokens or 0.0, args.price_per_gpu_hour
    for flag, value in (("--tokens", tokens), ("--price-per-gpu-hour", price)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{flag} is {value:g} but must be at least 0 and finite")
    if price and not tokens:
        raise ConfigError(f"--price-per-gpu-hour {price:g} makes a cost of a whole run: give its --tokens too")
    return Prices(total_tokens=tokens, per_gpu_hour=price)


def write_best(answer: Estimate, path: str, *, data: Sequence[str], total_tokens: float) -> str:
    """Write the fastest option that `dynapipe train` can run; says which. Errors: ConfigError where there is none."""
    first = trainable(answer)
    if first is None:
        if not answer.options:
            raise ConfigError(f"nothing fits, so there is nothing to write to {path}: raise the memory or the devices")
        fault = train_fault(answer.question, answer.options[0].strategy)
        raise ConfigError(
            f"dynapipe train can run none of the {len(answer.options)} planned options ({fault}), so nothing is written"
            f" to {path}: plan more with --plans, or keep to --zero 0,1 --offload none --cp 1"
        )
    place, option = first
    text = toml_text(answer.question, option, place, data=data, total_tokens=total_tokens)
    topology_of(TrainConfig.from_json(settings(answer.question, option), "the estimate"))
    write_output(path, text)
    passed = "" if place == 1 else f"; dynapipe train does not run what is before it: {_fault_before(answer)}"
    return f"option {place} is in {path}, for dynapipe train --config{passed}"


def _fault_before(answer: Estimate) -> str:
    return train_fault(answer.question, answer.options[0].strategy)


def _numbers(text: str | None, flag: str, *, least: int = 1, most: int = 1 << 20) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) <= 12 and least <= int(word) <= most for word in words):
        raise ConfigError(f"{flag} is {short(text)} but must be numbers of {least} to {most:,}, like 1,2,4")
    return tuple(int(word) for word in words)


def _words(text: str | None, flag: str, choices: tuple[Any, ...]) -> tuple[Any, ...]:
    words = [] if text is None else text.split(",")
    if unknown := [word for word in words if word not in choices]:
        near = did_you_mean(unknown[0], choices)
        raise ConfigError(f"{flag} is {short(unknown[0])}: choose from {', '.join(choices)}{near}")
    return tuple(words)
