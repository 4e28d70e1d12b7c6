"""An estimate as text, as JSON and as settings of a training run, with advice where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynapipe_ext.batch.micro_batches import round_up
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary
from dynapipe_ext.costs.estimated import LAYER_OVERHEAD_NS
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, RECIPES
from dynapipe_ext.costs.unfused import counts_plain_layers
from dynapipe_ext.data.sample_selection import data_settings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import counted, figure, percent
from dynapipe_ext.tools.estimate.memory import EstimatedMemory
from dynapipe_ext.tools.estimate.modules import ModuleEstimate, modules_of, positions_of
from dynapipe_ext.tools.estimate.options import TRAINED_DTYPES, Question, train_fault
from dynapipe_ext.tools.estimate.ranking import HOST_UPDATE_BYTES_PER_S, Estimate, Option, tokens_bounds
from dynapipe_ext.tools.files import toml_of

FORMAT = "dynapipe-estimate/1"
_GB = 1e9
_PARTS: tuple[str, ...] = tuple(EstimatedMemory.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Figures of a whole run: real tokens to train on, and the price of a device's hour; 0 means unknown."""

    total_tokens: float = 0.0
    per_gpu_hour: float = 0.0

    def days(self, option: Option) -> float | None:
        return self.total_tokens / option.tokens_per_s / 86_400 if self.total_tokens else None

    def cost(self, option: Option, world_size: int) -> float | None:
        days = self.days(option)
        return days * 24 * world_size * self.per_gpu_hour if days is not None and self.per_gpu_hour else None


def assumptions(question: Question) -> list[str]:
    """All assumptions behind the figures, besides the model, the cluster's size and the data."""
    cluster, device = question.cluster, question.cluster.device
    peak = device.peak_flops_per_s[question.precision]
    lines = [
        f"rate: {peak / 1e12:g} TFLOP/s {question.precision} x efficiency {cluster.efficiency:g} of --cluster, and"
        f" {LAYER_OVERHEAD_NS / 1e3:g} us a layer ({device.source})",
        f"links: {cluster.intra_bytes_per_s / _GB:g} GB/s in a node, {cluster.inter_bytes_per_s / _GB:g} between nodes,"
        f" {cluster.host_bytes_per_s / _GB:g} to the host, per device and direction; hosts update"
        f" {HOST_UPDATE_BYTES_PER_S / _GB:g} GB/s a node",
        f"memory: {cluster.reserved_gb:g} of {cluster.gpu_memory_gb:g} GB are left to the framework;"
        f" states as {question.states_recipe} keeps them",
    ]
    if not cluster.host_memory_gb:
        lines.append(
            f"hosts: {cluster.usual_host_bytes / _GB:,.0f} GB a node, the usual amount; options that"
            " need more come last"
        )
    if question.architecture.num_decoder_layers:
        lines.append("attention: scores are kept, as relative position biases rule out flash kernels")
    if not device.is_fused and counts_plain_layers(question.architecture):
        lines.append("layers: plain operators, as dynapipe train runs on a CPU, which keep more than fused kernels")
    elif not device.is_fused:
        lines.append("layers: counted with fused kernels, although this model's layers keep more on this device")
    if max(question.limits.cp) > 1:
        lines.append(
            "context parallelism: rows are divided evenly; attention exchanges heads, or gathers keys and values, in"
            " every layer, without overlap"
        )
    if question.architecture.num_experts:
        lines.append("experts: tokens are spread evenly over them")
    return lines


def show_estimate(estimate: Estimate, prices: Prices, console: Console, *, most: int) -> None:
    """Print the model, assumptions, ranked options, the best option's memory by stage, and what was dropped."""
    question, cluster = estimate.question, estimate.question.cluster
    a = question.architecture
    console.print(
        f"model: {question.name} ({a.family}), {estimate.num_parameters:,} parameters,"
        f" {counted(a.total_layers, 'layer')} of {a.hidden_size:,}"
    )
    console.print(
        f"cluster: {cluster.nodes} x {cluster.gpus_per_node} {cluster.device.name} of {cluster.gpu_memory_gb:g} GB"
    )
    console.print(f"data: {question.data.description}, {question.data.mean_tokens:,.0f} tokens a sample on average")
    for line in assumptions(question):
        console.print(line)
    console.print(modules_table(question))
    states = ", ".join(f"ZeRO {z}: {_gb(n)}" for z, n in enumerate(estimate.states_if_replicated))
    console.print(f"states of a device, if each held a replica, in GB: {states}")
    if not estimate.options:
        console.print("no option fits")
    else:
        console.print(options_table(estimate, prices, most=most))
        for fault in _faults(estimate, most):
            console.print(f"* dynapipe train does not run it: {fault}")
        _show_best(estimate, console)
    if lines := list(advice(estimate)):
        console.print("nothing fits into devices and hosts of usual memory; what would help:")
        for line in lines:
            console.print(f"  {line}")
    planned = len(estimate.options)
    others = "; the others:" if estimate.dropped.counts else ""
    console.print(f"{counted(estimate.num_fitting, 'option')} fit, {planned:,} planned{others}")
    for line in estimate.dropped.lines():
        console.print(f"  {line}")


def options_table(estimate: Estimate, prices: Prices, *, most: int) -> Table:
    question = estimate.question
    title = (
        f"{min(most, len(estimate.options))} fastest options, those that dynapipe train runs first; the first is the"
        " simplest within 5 % of the fastest of them"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "tp x pp x dp", "ZeRO", "recompute", "layout"):
        table.add_column(name, no_wrap=True)
    numbers = ["batch tokens", "micro-batches", "largest", "step s", "tokens/s", "MFU %", "bubble %", "GB"]
    offloads = any(option.host_bytes_per_node for option in estimate.options[:most])
    numbers += (
        ["host GB"] * offloads
        + ["days"] * bool(prices.total_tokens)
        + ["cost"] * bool(prices.total_tokens and prices.per_gpu_hour)
    )
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for place, option in enumerate(estimate.options[:most], 1):
        mark = "*" if train_fault(question, option.strategy) else ""
        table.add_row(f"{place}{mark}", *_row(question, option, prices, offloads=offloads))
    return table


def _faults(estimate: Estimate, most: int) -> list[str]:
    """The reasons why `dynapipe train` does not run some options of the table, each once."""
    faults = (train_fault(estimate.question, option.strategy) for option in estimate.options[:most])
    return [fault for fault in dict.fromkeys(faults) if fault]


def _row(question: Question, option: Option, prices: Prices, *, offloads: bool) -> list[str]:
    t, s = option.strategy.topology, option.strategy
    least, most = option.num_micro_batches
    zero = str(s.zero_stage) + {"none": "", "optimizer": " + host", "all": " + host all"}[s.offload]
    largest = f"{option.largest.rows} x {option.largest.encoder_len:,}"
    if option.largest.decoder_len:
        largest += f" + {option.largest.decoder_len:,}"
    row = [
        f"{t.tp} x {t.pp} x {t.dp}"
        + (f", cp {s.cp}" if s.cp > 1 else "")
        + (f", {s.placement} {s.stages_per_rank}" if t.placement else "")
        + ("" if t.vocabulary == "whole" else f", {t.vocabulary} spread")
        + (f", ep {s.ep}" if s.ep > 1 else ""),
        zero,
        _recompute(option),
        option.candidate.layout,
        f"{option.real_tokens:,.0f}",
        f"{least:,}" if least == most else f"{least:,}-{most:,}",
        largest,
        figure(option.time.total_s, 3),
        f"{option.tokens_per_s:,.0f}",
        f"{100 * option.mfu:.1f}",
        f"{100 * max(0.0, option.bubble_ratio):.1f}",
        _gb(option.peak_bytes),
        *([_gb(option.host_bytes_per_node)] * offloads),
    ]
    if (days := prices.days(option)) is not None:
        row.append(f"{days:,.1f}")
    if (cost := prices.cost(option, question.cluster.world_size)) is not None:
        row.append(f"{cost:,.0f}")
    return row


def _gb(num_bytes: int) -> str:
    """
    >>> _gb(79_030_000_000), _gb(43_889_664)
    ('79.0', '0.044')
    """
    return f"{num_bytes / _GB:,.1f}" if num_bytes >= _GB or not num_bytes else f"{num_bytes / _GB:.3f}"


def _recompute(option: Option) -> str:
    if len(option.recomputes) == 1:
        return next(iter(option.recomputes))
    ((kind, count), *_) = option.recomputes.most_common()
    return f"{kind} {100 * count / sum(option.recomputes.values()):.0f} %, mixed"


def _show_best(estimate: Estimate, console: Console) -> None:
    best = estimate.options[0]
    console.print(memory_table(best))
    time = best.time
    console.print(
        f"step: pipeline {figure(time.pipeline_s)} s (no order of it under {figure(best.lower_bound_s)}), gradients and"
        f" weights between replicas {figure(time.exchange_s, 3)}, optimizer {figure(time.optimizer_s, 3)}, host link"
        f" {figure(time.offload_s, 3)}"
    )
    evaluation = best.evaluation
    console.print(
        f"evaluation of one such batch: {figure(evaluation.seconds)} s; fullest rank {_gb(evaluation.beside_bytes)} GB"
        f" beside training, {_gb(evaluation.alone_bytes)} GB alone"
    )
    if best.host_bytes_per_node:
        console.print(f"host: {_gb(best.host_bytes_per_node)} GB of the fullest node")
    curve = ", ".join(f"{tokens:,}: {rate:,.0f}" for tokens, rate in best.batch_curve)
    console.print(f"tokens/s by tokens of a global batch: {curve}")
    least, most = tokens_bounds(estimate.question, estimate.search)
    if least < most < 2 * best.tokens_per_batch:
        console.print(f"no batch above {most:,} tokens was tried: raise --tokens-per-batch or --max-samples")
    console.print(f"padding efficiency: {100 * best.padding_efficiency:.1f} %")


def modules_table(question: Question) -> Table:
    """Parameters, bytes and work of each kind of module."""
    table = Table(title="by module, on one rank and of a mean sample", title_justify="left", box=SIMPLE_HEAD)
    for name in ("module", "parameters", "GB in inference", "GB in training", "TFLOPs forward", "TFLOPs in training"):
        table.add_column(name, justify="left" if name == "module" else "right", no_wrap=True)
    for module in modules(question):
        work = (figure(flops / 1e12) for flops in (module.forward_flops, module.training_flops))
        bytes_held = (f"{num_bytes / _GB:.3f}" for num_bytes in (module.inference_bytes, module.training_bytes))
        table.add_row(module.name, f"{module.parameters:,}", *bytes_held, *work)
    return table


def modules(question: Question) -> tuple[ModuleEstimate, ...]:
    """The modules of the question's model, with its data."""
    table = question.data.table
    return modules_of(question.architecture, question.states_recipe, positions_of(table), len(table))


def memory_table(option: Option) -> Table:
    """GB of every pipeline rank at its fullest moment."""
    table = Table(title="memory of option 1, GB a rank", title_justify="left", box=SIMPLE_HEAD)
    first = "rank" if option.strategy.topology.placement else "stage"
    for name in (first, "layers", *_PARTS, "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, (memory, layers) in enumerate(zip(option.memory, _layers(option), strict=True)):
        digits = 2 if option.peak_bytes >= _GB else 4
        parts = [f"{getattr(memory, name) / _GB:.{digits}f}" for name in (*_PARTS, "total")]
        table.add_row(str(stage), layers, *parts)
    return table


def _layers(option: Option) -> list[str]:
    """The numbers of layers of each pipeline rank's stages."""
    topology, layers = option.strategy.topology, option.costs.layers_per_stage.tolist()
    of_ranks = ([s for s in topology.stages_of(rank) if s in topology.layer_stages] for rank in range(topology.pp))
    return ["+".join(str(layers[stage]) for stage in stages) for stages in of_ranks]


def estimate_json(estimate: Estimate, prices: Prices) -> dict[str, Any]:
    """The whole estimate as JSON, in bytes and seconds; options are in its order."""
    question, cluster = estimate.question, estimate.question.cluster
    a, excess = question.architecture, estimate.dropped.least_excess
    return {
        "format": FORMAT,
        "model": {
            "name": question.name,
            "family": a.family,
            "parameters": estimate.num_parameters,
            "num_layers": a.total_layers,
            "hidden_size": a.hidden_size,
        },
        "cluster": {
            "device": cluster.device.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu_memory_gb": cluster.gpu_memory_gb,
            "reserved_gb": cluster.reserved_gb,
            "efficiency": cluster.efficiency,
            "peak_flops_per_s": cluster.device.peak_flops_per_s[question.precision],
        },
        "data": {
            "description": question.data.description,
            "mean_tokens": question.data.mean_tokens,
            "most_tokens": question.data.most_tokens,
        },
        "precision": question.precision,
        "states": question.states_recipe,
        "assumptions": assumptions(question),
        "states_if_replicated_bytes": list(estimate.states_if_replicated),
        "modules": [asdict(m) | {"training_flops": m.training_flops} for m in modules(question)],
        "num_fitting": estimate.num_fitting,
        "options": [_option_json(option, prices, question) for option in estimate.options],
        "dropped": [
            {
                "reason": reason,
                "count": count,
                "least_excess_bytes": excess.get(reason, (0, ""))[0],
            }
            for reason, count in estimate.dropped.counts.most_common()
        ],
    }


def _option_json(option: Option, prices: Prices, question: Question) -> dict[str, Any]:
    t, s, largest = option.strategy.topology, option.strategy, option.largest
    return {
        "tp": t.tp,
        "pp": t.pp,
        "dp": t.dp,
        "ep": s.ep,
        "cp": s.cp,
        "placement": s.placement,
        "stages_per_rank": s.stages_per_rank,
        **({} if t.vocabulary == "whole" else {"vocabulary": t.vocabulary}),
        "layers_per_stage": option.costs.layers_per_stage.tolist(),
        "sequence_parallel": s.sequence_parallel,
        "zero_stage": s.zero_stage,
        "offload": s.offload,
        "recompute": option.candidate.recompute,
        "recomputes": dict(sorted(option.recomputes.items())),
        "layout": option.candidate.layout,
        "tokens_per_batch": option.tokens_per_batch,
        "real_tokens": option.real_tokens,
        "samples": option.num_samples,
        "micro_batches": list(option.num_micro_batches),
        "largest_micro_batch": [largest.rows, largest.encoder_len, largest.decoder_len],
        "padding_efficiency": option.padding_efficiency,
        "bubble_ratio": option.bubble_ratio,
        "step_s": option.time.total_s,
        "pipeline_s": option.time.pipeline_s,
        "pipeline_lower_bound_s": option.lower_bound_s,
        "exchange_s": option.time.exchange_s,
        "optimizer_s": option.time.optimizer_s,
        "offload_s": option.time.offload_s,
        "tokens_per_s": option.tokens_per_s,
        "mfu": option.mfu,
        "days": prices.days(option),
        "cost": prices.cost(option, question.cluster.world_size),
        "peak_bytes": option.peak_bytes,
        "stages": [{name: getattr(m, f"{name}") for name in _PARTS} | {"total": m.total} for m in option.memory],
        "evaluation": {
            "beside_training_bytes": option.evaluation.beside_bytes,
            "alone_bytes": option.evaluation.alone_bytes,
            "seconds": option.evaluation.seconds,
        },
        "host_bytes_per_node": option.host_bytes_per_node,
        "effort": option.effort,
        "tokens_per_s_by_batch": [{"tokens": tokens, "tokens_per_s": rate} for tokens, rate in option.batch_curve],
        "why_not_trained_here": train_fault(question, option.strategy),
    }


def trainable(estimate: Estimate) -> tuple[int, Option] | None:
    """The place of the first option that `dynapipe train` can run, and the option."""
    ranked: Sequence[Option] = estimate.options
    return next(((i, o) for i, o in enumerate(ranked, 1) if not train_fault(estimate.question, o.strategy)), None)


_DECIDED_RULES = ("layout", "pad_multiple", "recompute", "pieces")


def settings(
    question: Question, option: Option, *, data: Sequence[str] = (), total_tokens: float = 0.0
) -> dict[str, Any]:
    """The settings that the option decides, as tables of `TrainConfig`; the others keep their defaults."""
    a, s, t = question.architecture, option.strategy, option.strategy.topology
    rules = option.candidate.rules(question.limits.pieces)
    named, longest = Path(question.name), question.data.longest
    most = longest.tokens if a.num_decoder_layers else min(a.max_seq_len, round_up(longest.encoder, rules.pad_multiple))
    tables: dict[str, Any] = {
        "run": {"steps": max(1, ceil(total_tokens / option.real_tokens))} if total_tokens else {},
        "topology": {
            "tp": t.tp,
            "pp": t.pp,
            "dp": s.cp * t.dp,
            **({} if s.cp == 1 else {"context_parallel": s.cp}),
            "layers_per_stage": list(gather_vocabulary(t).layers_per_stage),
            **({} if t.vocabulary == "whole" else {"vocabulary_parallel": t.vocabulary}),
            **({} if s.placement == "linear" else {"placement": s.placement}),
            "sequence_parallel": s.sequence_parallel,
        },
        "model": {
            "architecture": str(named.resolve()) if named.is_file() else question.name,
            "max_seq_len": most,
            "dtype": TRAINED_DTYPES[question.precision],
        },
        "data": {
            **(data_settings(data) if data else {}),
            "vocab_size": a.vocab_size,
            "truncate": not data,  # the built-in generator does not follow these lengths
            "tokens_per_batch": option.tokens_per_batch,
            "batch_size": 0,
        },
        "plan": {
            "memory_limit_gb": question.cluster.limit_bytes / 1e9,
            **{name: getattr(rules, name) for name in _DECIDED_RULES},
            "pad_multiple": rules.pad_multiple // s.cp,
        },
        "optimizer": {"distributed": s.zero_stage == 1},
    }
    return {name: table for name, table in tables.items() if table}


def toml_text(
    question: Question, option: Option, place: int, *, data: Sequence[str] = (), total_tokens: float = 0.0
) -> str:
    """The settings as TOML, checked as `dynapipe train --config` does. Errors: ConfigError."""
    tables = settings(question, option, data=data, total_tokens=total_tokens)
    TrainConfig.from_json(tables, "the estimate")
    cluster, t = question.cluster, option.time
    return toml_of(
        tables,
        f"Option {place} of dynapipe estimate for {question.name} on {cluster.nodes} x {cluster.gpus_per_node}"
        f" {cluster.device.name} of {cluster.gpu_memory_gb:g} GB.",
        f"Predicted: {figure(t.total_s)} s a step, {option.tokens_per_s:,.0f} tokens/s, bubble"
        f" {percent(option.bubble_ratio)}, {option.peak_bytes / 1e9:.2f} GB on the fullest rank.",
        f"Lengths: {question.data.description}. Other settings keep their defaults.",
    )


_STATES_SHARE = 0.8  # of a device's memory, so that activations have some


def advice(estimate: Estimate) -> Iterator[str]:
    """Ways to fit, with figures: more devices, smaller states, fewer trained parameters. None if an option is
    realistic."""
    cluster, question = estimate.question.cluster, estimate.question
    if estimate.options and estimate.options[0].host_bytes_per_node <= cluster.usual_host_bytes:
        return
    room = _STATES_SHARE * cluster.limit_bytes
    of_states = sum(BYTES_PER_PARAMETER[question.states_recipe])
    nodes = _nodes(estimate, of_states, room)
    if nodes > cluster.nodes:
        yield f"{nodes:,} nodes would hold the states of ZeRO 3 without offload in {_STATES_SHARE:.0%} of their devices"
    for recipe in RECIPES if question.precision != "fp32" else ():
        num_bytes = sum(BYTES_PER_PARAMETER[recipe])
        if (
            "fp32" not in (recipe, question.precision)
            and num_bytes < of_states
            and (fewer := _nodes(estimate, num_bytes, room)) < nodes
        ):
            yield f"--states {recipe} keeps {num_bytes} bytes a parameter instead of {of_states}: {fewer:,} nodes"
    too_long = not estimate.options and "the longest sample does not fit even alone" in estimate.dropped.counts
    if too_long and max(question.limits.cp) == 1:
        yield "--cp 2,4,8 divides every sample over data parallel ranks (`dynapipe train --cp`)"
    weights = BYTES_PER_PARAMETER[question.states_recipe][0]
    share = weights * estimate.num_parameters / cluster.world_size
    if share <= room:
        yield (
            f"LoRA (dynapipe train --lora) keeps little but the weights, {share / _GB:,.1f} GB of a device"
            + " under --pp or ZeRO 3" * (cluster.world_size > 1)
        )
    else:
        yield f"the weights alone are {share / _GB:,.1f} GB of a device: LoRA would not help, more devices would"


def _nodes(estimate: Estimate, bytes_per_parameter: int, room: float) -> int:
    """Nodes whose devices hold so many bytes of every parameter in `room` bytes each."""
    of_a_node = room * estimate.question.cluster.gpus_per_node
    return -(-bytes_per_parameter * estimate.num_parameters // int(of_a_node))
