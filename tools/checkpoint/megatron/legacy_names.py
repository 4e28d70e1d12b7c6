"""Names and order of weights in Megatron's legacy files: one for a rank, layers counted within its stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.checkpoint.megatron.names import transformer_engine_name

Implementation = Literal["local", "transformer_engine"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("local", "transformer_engine")

_LAYER = re.compile(r"((?:en|de)coder)\.layers\.(\d+)\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc\d)\.(weight|bias)(\d+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_OUTSIDE = (
    "embedding.word_embeddings", "embedding.position_embeddings", "encoder_relative_pos_emb",
    "decoder_relative_pos_emb", "encoder.layers", "encoder.final_layernorm", "decoder.layers",
    "decoder.final_layernorm",
)  # fmt: skip
_INSIDE = (
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "pre_cross_attn_layernorm",
    "cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv", "pre_mlp_layernorm",
    "mlp.router", "mlp.experts", "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
_HAS_EXTRA_STATE = re.compile(r".*(linear_\w+|output_layer)\.(weight|bias)\d*$")
StagePlace = tuple[int, int, int, int, int, int, str]


def whole_name(name: str, first_layers: Mapping[str, int], first_expert: int = 0) -> str:
    """The name in the whole model under the local layer specs; `first_layers` of the stage by side, and the first of
    the experts that its rank holds.

    >>> whole_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", {"decoder": 4})
    'decoder.layers.4.pre_mlp_layernorm.weight'
    >>> whole_name("decoder.layers.0.mlp.experts.linear_fc2.weight1", {"decoder": 4}, first_expert=8)
    'decoder.layers.4.mlp.experts.local_experts.9.linear_fc2.weight'
    >>> whole_name("decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight", {})
    'decoder.layers.3.self_attention.kv_layernorm.weight'
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    side, layer, rest = match.groups()
    for fused, apart in _FUSED.items():
        if rest.startswith(fused):
            rest = apart + rest.removeprefix(fused)
    if grouped := _GROUPED.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    if expert := _EXPERT.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{int(expert[1]) + first_expert}.{expert[2]}"
    return f"{side}.layers.{int(layer) + first_layers.get(side, 0)}.{rest}"


def local_name(architecture: Architecture, name: str, first_layer: int, implementation: Implementation) -> str:
    """The inverse of `whole_name`: of a weight of the whole model, in the file of a stage."""
    if implementation == "transformer_engine":
        name = transformer_engine_name(architecture, name)
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}.layers.{int(match[2]) - first_layer}.{match[3]}"


def in_order(names: Iterable[str], implementation: Implementation) -> list[str]:
    """Names of the local layer specs in the order in which a model of `implementation` registers its parameters.

    That is the order in which its optimizer counts them.
    """
    return sorted(names, key=lambda name: _place(name, implementation))


def _place(name: str, implementation: Implementation) -> StagePlace:
    top = next((i for i, stem in enumerate(_OUTSIDE) if name.startswith(stem)), len(_OUTSIDE))
    match = _LAYER.fullmatch(name)
    if match is None:
        return (top, 0, 0, 0, 0, name.endswith("bias"), "")
    rest = match[3]
    module = next(i for i, stem in enumerate(_INSIDE) if rest.startswith(stem))
    is_fused = implementation == "transformer_engine" and rest.startswith("input_layernorm")
    if is_fused:  # held by the linear layer behind it, before that layer's own parameters
        module = _INSIDE.index("self_attention.linear_qkv")
    expert, part = 0, 0
    if expert_match := re.match(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc(\d)", rest):
        expert, part = int(expert_match[1]), int(expert_match[2])
        if implementation == "transformer_engine":
            expert, part = part, expert
    return (top, int(match[2]), module, expert, part, (not is_fused) * 2 + rest.endswith("bias"), "")


def has_decay(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Megatron's default decays a weight: no biases and no vectors."""
    return not name.endswith(".bias") and len(shape) > 1


def extra_states(names: Iterable[str]) -> list[str]:
    """State that linear modules keep beside their weights, None here, which loading asks for."""
    modules = {name.rpartition(".")[0]: None for name in names if _HAS_EXTRA_STATE.match(name)}
    return [f"{module}._extra_state" for module in modules]
