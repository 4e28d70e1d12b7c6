"""An option of an estimate as the settings of a training run."""

from __future__ import annotations

from math import ceil
from typing import Any

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.plan import round_up
from dynapipe_ext.tools.estimate.options import Question, pad_multiple
from dynapipe_ext.tools.estimate.ranking import Option
from dynapipe_ext.tools.toml_file import toml_of

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_VOCAB_MULTIPLE = 128  # train pads vocabularies to it on every topology


def train_fault(question: Question, option: Option) -> str:
    """Why `dynapipe train` cannot run it; empty where it can."""
    a, s = question.architecture, option.strategy
    if a.num_decoder_layers:
        return f"{a.family} has an encoder and a decoder"
    if a.num_experts:
        return f"{a.family} has experts"
    if a.head_dim * a.num_heads != a.hidden_size:
        return f"its {a.num_heads} heads of {a.head_dim} do not fill the hidden size {a.hidden_size}"
    if a.qk_norm or len({a.qkv_bias, a.attention_output_bias, a.mlp_bias}) > 1:
        return "it has norms or biases in some projections only"
    if question.precision not in _DTYPES:
        return f"precision {question.precision} needs loss scaling"
    if s.zero_stage > 1 or s.offload != "none":
        return f"ZeRO stage {s.zero_stage} with offload {s.offload}: it has stages 0 and 1, on the device"
    if question.states_recipe not in ("megatron", "fp32"):
        return f"states are those of {question.recipe}, not Megatron's"
    if _VOCAB_MULTIPLE % s.topology.tp:
        return f"tp {s.topology.tp} is no power of two up to {_VOCAB_MULTIPLE}"
    return ""


def settings(question: Question, option: Option, *, data_path: str = "", total_tokens: float = 0.0) -> dict[str, Any]:
    """Tables of `TrainConfig` with what the option decides; the rest keeps its defaults."""
    a, s, t = question.architecture, option.strategy, option.strategy.topology
    multiple = pad_multiple(t.tp)
    longest = question.data.longest.encoder
    tables: dict[str, Any] = {
        "run": {"steps": max(1, ceil(total_tokens / option.real_tokens))} if total_tokens else {},
        "topology": {
            "tp": t.tp,
            "pp": t.pp,
            "dp": t.dp,
            "layers_per_stage": list(t.layers_per_stage),
            "sequence_parallel": s.sequence_parallel,
        },
        "model": {
            "num_layers": a.num_layers,
            "hidden_size": a.hidden_size,
            "num_heads": a.num_heads,
            "num_query_groups": a.num_query_groups,
            "ffn_hidden_size": a.ffn_hidden_size,
            "gated_mlp": a.gated_mlp,
            # Learned positions are weights; otherwise the longest sample says how long rows get.
            "max_seq_len": a.max_seq_len if a.position == "learned" else round_up(longest, multiple),
            "tied_embeddings": a.tied_embeddings,
            "position": "learned" if a.position == "learned" else "rope",
            "norm": a.norm,
            "bias": a.mlp_bias,
            "dtype": _DTYPES[question.precision],
        },
        "data": {
            "path": data_path,
            "vocab_size": a.vocab_size,
            "truncate": not data_path,  # the built-in generator knows nothing of these lengths
            "tokens_per_batch": option.tokens_per_batch,
            "batch_size": 0,
        },
        "plan": {
            "layout": option.candidate.layout,
            "memory_limit_gb": question.cluster.limit_bytes / 1e9,
            "pad_multiple": multiple,
            "recompute": option.candidate.recompute,
        },
        "optimizer": {"distributed": s.zero_stage == 1},
    }
    return {name: table for name, table in tables.items() if table}


def toml_text(question: Question, option: Option, place: int, *, data_path: str = "", total_tokens: float = 0.0) -> str:
    """The settings as TOML, checked as `dynapipe train --config` checks them. Errors: ConfigError."""
    tables = settings(question, option, data_path=data_path, total_tokens=total_tokens)
    TrainConfig.from_json(tables, "the estimate")
    cluster, t = question.cluster, option.time
    return toml_of(
        tables,
        f"Option {place} of dynapipe estimate for {question.name} on {cluster.nodes} x {cluster.gpus_per_node}"
        f" {cluster.device.name} of {cluster.gpu_memory_gb:g} GB.",
        f"Predicted: {t.total_s:.4g} s a step, {option.tokens_per_s:,.0f} tokens/s, bubble"
        f" {100 * option.bubble_ratio:.1f} %, {option.peak_bytes / 1e9:.2f} GB on the fullest rank.",
        f"Lengths: {question.data.description}. What is not said here keeps its default.",
    )
