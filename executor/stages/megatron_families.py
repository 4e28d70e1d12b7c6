"""megatron-core models of the published families: the arithmetic of transformers, spread over Megatron's ranks.

What Megatron's own flags cannot say is set on its modules: rotary frequencies, windows of attention, biases in some
projections only. Columns of a padded vocabulary are kept out of the softmax, so a loss does not depend on padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.megatron_model import CoreAttention, Norm, initialize_weights, parallel_arguments
from dynapipe_ext.models.architecture import Activation, Architecture
from dynapipe_ext.topology import Topology

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def build_family(
    architecture: Architecture,
    topology: Topology,
    pp_rank: int,
    *,
    dtype: str,
    device: torch.device,
    seed: int | None = None,
    vocab_divisible_by: int = 128,
    sequence_parallel: bool = False,
    dropout: float = 0.0,
    config: Any = None,
) -> torch.nn.Module:
    """This rank's part of a GPTModel, or a whole T5Model, over the groups of `initialize_parallel`.

    The vocabulary is padded to a multiple of `vocab_divisible_by` x tp. With `seed`, weights are initialised by name;
    without, they are NaN, to be loaded: one that was forgotten shows. `config` replaces that of `family_config`.
    Errors: ConfigError for what cannot be cut over `topology`.
    """
    a = architecture
    _check(a, topology)
    if vocab_divisible_by < 1:
        raise ConfigError(f"vocab_divisible_by is {vocab_divisible_by} but must be at least 1")
    vocab_size = a.padded_vocab_size(vocab_divisible_by, topology.tp)
    if config is None:
        config = family_config(a, topology, dtype=dtype, sequence_parallel=sequence_parallel, dropout=dropout)
    if a.family == "t5":
        from dynapipe_ext.executor.stages.megatron_t5 import build_t5

        model, first_layer = build_t5(a, config, vocab_size), 0
    else:
        layers = topology.with_layers(a.num_layers).layers_per_stage
        model, first_layer = _build_gpt(a, topology, pp_rank, config, vocab_size), sum(layers[:pp_rank])
    model.to(device=device, dtype=config.params_dtype)
    if seed is not None:
        initialize_weights(model, config, first_layer=first_layer, seed=seed)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
    _hide_padding(model, a, vocab_size // topology.tp)
    return model


def family_config(
    architecture: Architecture,
    topology: Topology,
    *,
    dtype: str,
    sequence_parallel: bool = False,
    dropout: float = 0.0,
) -> Any:
    """Megatron's TransformerConfig of a model of a family (T5: of its decoder, and of its encoder but for layers)."""
    from megatron.core.transformer import TransformerConfig

    a = architecture
    num_layers = a.num_decoder_layers or a.num_layers
    arguments = parallel_arguments(
        num_layers, topology, dtype=dtype, sequence_parallel=sequence_parallel, dropout=dropout
    )
    if a.num_experts:
        arguments |= {
            "num_moe_experts": a.num_experts,
            "moe_router_topk": a.top_k,
            "moe_ffn_hidden_size": a.ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(
        **arguments,
        num_layers=num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_heads,
        num_query_groups=a.num_query_groups,
        kv_channels=a.head_dim,
        ffn_hidden_size=a.ffn_hidden_size,
        gated_linear_unit=a.gated_mlp,
        activation_func=_ACTIVATIONS[a.activation],
        normalization="RMSNorm" if a.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=a.norm_eps,
        add_bias_linear=a.mlp_bias,
        add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm,
        softmax_scale=1.0 if a.family == "t5" else None,
        window_size=(a.sliding_window - 1, 0) if a.sliding_window else None,
    )


def _check(a: Architecture, topology: Topology) -> None:
    if topology.num_stages != topology.pp:
        raise ConfigError(f"{topology.num_stages} stages on {topology.pp} pipeline ranks: families need one a rank")
    if a.family == "t5" and topology.pp > 1:
        raise ConfigError(f"pp is {topology.pp} but Megatron's T5Model runs on one pipeline rank: give pp 1")
    if topology.layers_per_stage and sum(topology.layers_per_stage) != a.num_layers:
        raise ConfigError(f"layers_per_stage {topology.layers_per_stage} must sum to the model's {a.num_layers} layers")
    for name in ("num_heads", "ffn_hidden_size"):
        if getattr(a, name) % topology.tp:
            raise ConfigError(f"{name} {getattr(a, name)} must be a multiple of tp {topology.tp}")
    if a.num_query_groups % topology.tp and topology.tp % a.num_query_groups:
        raise ConfigError(f"num_query_groups {a.num_query_groups} must divide tp {topology.tp} or be a multiple of it")


class WindowAttention(CoreAttention):
    """Causal attention to the last `window` positions, each its own included, computed in blocks of queries.

    Memory is that of a block by two windows, not of a square. On one window or less it is CoreAttention's.
    """

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        self.window = config.window_size[0] + 1
        self.backend = "sdpa"

    def _sdpa(self, q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor) -> torch.Tensor:
        length = q_BHSD.shape[2]
        if length <= self.window:
            return super()._sdpa(q_BHSD, k_BHSD, v_BHSD)
        blocks = []
        for start in range(0, length, self.window):
            end, first = min(start + self.window, length), max(0, start - self.window + 1)
            queries = torch.arange(start, end, device=q_BHSD.device)
            back = queries[:, None] - torch.arange(first, end, device=q_BHSD.device)
            seen = (back >= 0) & (back < self.window)
            k_block, v_block = k_BHSD[:, :, first:end], v_BHSD[:, :, first:end]
            blocks.append(self._attend(q_BHSD[:, :, start:end], k_block, v_block, mask=seen))
        return torch.cat(blocks, dim=2)


def _build_gpt(a: Architecture, topology: Topology, pp_rank: int, config: Any, vocab_size: int) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if a.num_experts:
        _name_absent_kernels()
    layer = get_gpt_layer_local_spec(
        num_experts=a.num_experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=a.qk_norm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = WindowAttention if a.sliding_window else CoreAttention
    if a.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if a.qkv_bias != config.add_bias_linear:
        attention.linear_qkv = _with_bias(attention.linear_qkv, a.qkv_bias)
    if a.attention_output_bias != config.add_bias_linear:
        attention.linear_proj = _with_bias(attention.linear_proj, a.attention_output_bias)
    layers = topology.with_layers(a.num_layers).layers_per_stage
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * layers[pp_rank], layer_norm=Norm),
        vocab_size=vocab_size,
        max_sequence_length=a.max_seq_len,
        pre_process=pp_rank == 0,
        post_process=pp_rank == topology.pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied_embeddings,
        position_embedding_type="rope" if a.position == "rope" else "learned_absolute",
    )
    if a.position == "rope":
        rotary: Any = model.rotary_pos_emb
        rotary.inv_freq = rotary_frequencies(a).to(rotary.inv_freq.device)
    return model


def _name_absent_kernels() -> None:
    """megatron-core 0.16.1's router asks for Transformer Engine's kernel by a name that is undefined without it."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _with_bias(linear: type, bias: bool) -> type:
    """A class of Megatron's linear layers whose bias is not what the configuration says of all."""

    class Linear(linear):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **(keywords | {"bias": bias}))

    return Linear


def rotary_frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians a position, float32, shape (head_dim / 2,): of transformers, in the same order of operations.

    "llama3": wavelengths above `original / low_freq_factor` are stretched by `factor`, those below `original /
    high_freq_factor` stay, and in between the two are blended (Llama 3.1's release code).
    """
    a, scaling = architecture, architecture.rope_scaling
    exponents = torch.arange(0, a.head_dim, 2, dtype=torch.int64).float() / a.head_dim
    frequencies = 1.0 / (a.rope_theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    share = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = frequencies / scaling.factor
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    return torch.where(wavelengths < shortest, frequencies, torch.where(wavelengths > longest, stretched, blended))


def _hide_padding(model: Any, a: Architecture, columns: int) -> None:
    """Logits of padding, which no model learned, become the lowest number: nothing in a softmax, and no gradient."""
    from megatron.core import parallel_state

    if not model.post_process:
        return
    kept = a.vocab_size - parallel_state.get_tensor_model_parallel_rank() * columns
    if kept >= columns:
        return

    def hide(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        logits[..., max(kept, 0) :] = torch.finfo(logits.dtype).min
        return logits, bias

    model.output_layer.register_forward_hook(hide)
