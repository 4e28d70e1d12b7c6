"""An option of an estimate as the settings of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from dynapipe_ext.batch.micro_batches import round_up
from dynapipe_ext.data.mixture import data_settings
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.estimate.options import Question, pad_multiple
from dynapipe_ext.tools.estimate.ranking import Option
from dynapipe_ext.tools.json_file import toml_of
from dynapipe_ext.tools.wording import figure, percent

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def train_fault(question: Question, option: Option) -> str:
    """Why `dynapipe train` cannot run it; empty where it can."""
    a, s = question.architecture, option.strategy
    if s.cp > 1:
        return "it has no context parallelism"
    if s.ep > 1:
        return f"experts are spread over {s.ep} ranks: it keeps all of them on each replica"
    if a.num_experts and s.topology.tp > 1 and not s.sequence_parallel:
        return f"{a.family} has experts, which need sequence parallelism at tp {s.topology.tp}"
    if question.precision not in _DTYPES:
        return f"precision {question.precision} needs loss scaling"
    if s.zero_stage > 1 or s.offload != "none":
        return (
            f"ZeRO stage {s.zero_stage} with offload {s.offload}: it has stages 0 and 1, on the device (others at tp 1,"
            " by --deepspeed)"
        )
    if question.states_recipe not in ("megatron", "fp32"):
        return f"states are those of {question.recipe}, not Megatron's"
    if VOCAB_MULTIPLE % s.topology.tp:
        return f"tp {s.topology.tp} is no power of two up to {VOCAB_MULTIPLE}"
    return ""


def settings(
    question: Question, option: Option, *, data: Sequence[str] = (), total_tokens: float = 0.0
) -> dict[str, Any]:
    """Tables of `TrainConfig` with what the option decides; the rest keeps its defaults."""
    a, s, t = question.architecture, option.strategy, option.strategy.topology
    multiple = pad_multiple(s)
    named, longest = Path(question.name), question.data.longest
    most = longest.tokens if a.num_decoder_layers else min(a.max_seq_len, round_up(longest.encoder, multiple))
    tables: dict[str, Any] = {
        "run": {"steps": max(1, ceil(total_tokens / option.real_tokens))} if total_tokens else {},
        "topology": {
            "tp": t.tp,
            "pp": t.pp,
            "dp": t.dp,
            "layers_per_stage": list(t.layers_per_stage),
            **({} if s.placement == "linear" else {"placement": s.placement, "stages_per_rank": s.stages_per_rank}),
            "sequence_parallel": s.sequence_parallel,
        },
        "model": {
            "architecture": str(named.resolve()) if named.is_file() else question.name,
            "max_seq_len": most,
            "dtype": _DTYPES[question.precision],
        },
        "data": {
            **(data_settings(data) if data else {}),
            "vocab_size": a.vocab_size,
            "truncate": not data,  # the built-in generator knows nothing of these lengths
            "tokens_per_batch": option.tokens_per_batch,
            "batch_size": 0,
        },
        "plan": {
            "layout": option.candidate.layout,
            "memory_limit_gb": question.cluster.limit_bytes / 1e9,
            "pad_multiple": multiple,
            "recompute": option.candidate.recompute,
            "pieces": option.candidate.pieces(question.limits.pieces),
        },
        "optimizer": {"distributed": s.zero_stage == 1},
    }
    return {name: table for name, table in tables.items() if table}


def toml_text(
    question: Question, option: Option, place: int, *, data: Sequence[str] = (), total_tokens: float = 0.0
) -> str:
    """The settings as TOML, checked as `dynapipe train --config` checks them. Errors: ConfigError."""
    tables = settings(question, option, data=data, total_tokens=total_tokens)
    TrainConfig.from_json(tables, "the estimate")
    cluster, t = question.cluster, option.time
    return toml_of(
        tables,
        f"Option {place} of dynapipe estimate for {question.name} on {cluster.nodes} x {cluster.gpus_per_node}"
        f" {cluster.device.name} of {cluster.gpu_memory_gb:g} GB.",
        f"Predicted: {figure(t.total_s)} s a step, {option.tokens_per_s:,.0f} tokens/s, bubble"
        f" {percent(option.bubble_ratio)}, {option.peak_bytes / 1e9:.2f} GB on the fullest rank.",
        f"Lengths: {question.data.description}. What is not said here keeps its default.",
    )
