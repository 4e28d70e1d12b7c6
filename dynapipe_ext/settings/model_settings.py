"""The sizes of the model that a run's settings name, which what else they say may not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.transformers_sizes import carried_fault, read_trainable

if TYPE_CHECKING:
    from dynapipe_ext.settings.train_config import ModelSettings, TrainConfig


def with_described(model: ModelSettings, said: Mapping[str, Any], where: str, *, adapts: bool = False) -> ModelSettings:
    """The settings with the sizes of the model that `architecture` names; one that is adapted is of transformers unless
    `backend` says else. Errors: ConfigError for a size in `said` that contradicts them."""
    if not model.architecture:
        own: dict[str, Any] = {}
        if model.num_decoder_layers:
            own = {"position": "relative", "norm": "rmsnorm", "bias": False, "num_query_groups": model.num_heads}
        _refuse_contradiction(model, own, said, f"{where}: [model] num_decoder_layers makes a T5, which")
        return replace(model, described=None, **own)
    a = read_trainable(model.architecture, "transformers" if adapts and model.backend == "auto" else model.backend)
    place = f"{where}: [model] architecture {model.architecture}"
    own = {
        "num_layers": a.num_layers,
        "num_decoder_layers": a.num_decoder_layers,
        "hidden_size": a.hidden_size,
        "num_heads": a.num_heads,
        "num_query_groups": a.num_query_groups,
        "ffn_hidden_size": a.ffn_hidden_size,
        "gated_mlp": a.gated_mlp,
        "max_seq_len": a.max_seq_len,
        "tied_embeddings": a.tied_embeddings,
        "position": a.position,
        "norm": a.norm,
        "bias": a.mlp_bias,
    }
    again = model.described is not None and "architecture" not in said  # then it may be shorter already
    if (again or "max_seq_len" in said) and (model.max_seq_len <= a.max_seq_len or a.position == "relative"):
        own["max_seq_len"] = model.max_seq_len
    _refuse_contradiction(model, own, said, place)
    return replace(model, described=a, **own)


def check_heads(config: TrainConfig, where: str) -> None:
    """Refuse sizes of heads, positions and experts that no model has. Errors: ConfigError."""
    model, topology = config.model, config.topology
    if model.described is not None:
        if model.described.num_experts and topology.tp > 1 and not topology.sequence_parallel:
            raise ConfigError(
                f"{where}: [model] architecture {model.architecture} has {model.described.num_experts} experts,"
                f" which Megatron trains with tp {topology.tp} under sequence parallelism alone: set [topology]"
                " sequence_parallel = true, or tp 1"
            )
        return
    if (model.position == "relative") != (model.num_decoder_layers > 0):
        raise ConfigError(
            f"{where}: [model] position is {model.position!r} and num_decoder_layers is {model.num_decoder_layers}:"
            " relative positions are those of an encoder-decoder, which has a decoder's layers, and no others"
        )
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"{where}: [model] hidden_size is {model.hidden_size} but must be a multiple of num_heads, which is"
            f" {model.num_heads}"
        )
    if model.num_heads % model.num_query_groups:
        raise ConfigError(
            f"{where}: [model] num_heads is {model.num_heads} but must be a multiple of num_query_groups, which is"
            f" {model.num_query_groups}"
        )
    head_size = model.hidden_size // model.num_heads
    if model.position == "rope" and head_size % 2:
        raise ConfigError(
            f"{where}: [model] hidden_size / num_heads is {model.hidden_size} / {model.num_heads} = {head_size} but"
            ' must be even with position = "rope", which turns pairs of numbers'
        )


def check_pieces_of_model(config: TrainConfig, where: str) -> None:
    """Refuse pieces of long samples where attention does not go on from piece to piece. Errors: ConfigError."""
    model = config.model
    if config.plan.pieces == "off":
        return
    if model.uses_transformers:
        fault = carried_fault(model.architecture)
    elif model.described is not None:
        fault = model.described.pieces_fault
    else:
        later = "inputs of an encoder-decoder attend to what comes later: plan whole samples"
        fault = later if model.num_decoder_layers else ""
    if fault:
        raise ConfigError(f'{where}: [plan] pieces is {config.plan.pieces!r} but {fault} (pieces = "off")')


def refuse_order_in_bits(config: TrainConfig, where: str) -> None:
    """Refuse what deterministic mode cannot keep the plan out of. Errors: ConfigError."""
    model, said = config.model, f"{where}: [optimizer] deterministic is on but"
    if config.plan.adapt_costs:
        raise ConfigError(
            f"{said} [plan] adapt_costs makes plans by what actions have taken, which is never the same: leave one out"
        )
    if config.deepspeed.config:
        raise ConfigError(f"{said} a DeepSpeed engine sums gradients in an order of its own: leave one of both out")
    if model.described is not None and model.described.num_experts:
        raise ConfigError(
            f"{said} [model] architecture {model.architecture} has {model.described.num_experts} experts, which it does"
            " not cover: leave it out, or take a model without experts"
        )
    # Under full recomputation Megatron adds a layer's gradient of the encoder's output to that of the layers above in
    # its own chain, and the sum that comes from the next stage after them.
    if model.num_decoder_layers and config.topology.pp > 1 and config.plan.recompute in ("auto", "full"):
        raise ConfigError(
            f"{said} [plan] recompute is {config.plan.recompute!r}: layers of a decoder that are recomputed whole add"
            " up gradients of the encoder's output in an order that depends on pp, so set recompute to 'none' or"
            " 'selective', or pp to 1"
        )


def _refuse_contradiction(model: ModelSettings, own: Mapping[str, Any], said: Mapping[str, Any], place: str) -> None:
    for name in said:
        if name in own and getattr(model, name) != own[name]:
            raise ConfigError(f"{place} has {name} {own[name]}, but {name} is {getattr(model, name)}: leave it out")
