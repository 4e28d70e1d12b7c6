"""Megatron's model chunks as a rank builds them, and the weights that they start with."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.costs.states import refuse_undivided_vocabulary
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.megatron.embedding_part import EmbeddingPart, add_received, look_up_own_rows
from dynapipe_ext.executor.stages.megatron.head import (
    HeadPart,
    OnePassLoss,
    block_of_rows,
    cap_logits,
    divide_logits,
    hide_padding,
    part_of,
    save_by_rows,
)
from dynapipe_ext.executor.stages.megatron.layers import (
    IN_ONE_PASS,
    MarkedNorm,
    concentrate,
    gate_in_one_pass,
    gpt_layers,
    rotary_frequencies,
    rotate_without_waiting,
)
from dynapipe_ext.executor.stages.megatron.stage import PlacedLayout, first_layers, is_tied_by_megatron, virtual_stage
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE, Activation, Architecture
from dynapipe_ext.models.written_arguments import latent_arguments, router_arguments, router_fault

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_HEADS = (_HEAD, f"lm_head.{_HEAD}")  # of GPTModel and of T5Model
_VOCABULARY = (_EMBEDDING, *_HEADS, "lm_head.output_layer.bias")  # rows of them are ids
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)")
_EXPERT = re.compile(r"\blocal_experts\.(\d+)\.")


def global_name(name: str, first_layer: int, first_encoder_layer: int = 0) -> str:
    """
    >>> global_name("decoder.layers.1.mlp.linear_fc1.weight", 4)
    'decoder.layers.5.mlp.linear_fc1.weight'
    """
    before = {"decoder": first_layer, "encoder": first_encoder_layer}
    return _LAYER.sub(lambda match: f"{match[1]}.layers.{int(match[2]) + before[match[1]]}", name)


def global_expert_name(name: str, num_experts: int, ep_rank: int, ep: int) -> str:
    """Name a weight of a local expert by the expert's number in the whole model.

    >>> global_expert_name("decoder.layers.5.mlp.experts.local_experts.1.linear_fc1.weight", 8, 3, 4)
    'decoder.layers.5.mlp.experts.local_experts.7.linear_fc1.weight'
    """
    first = ep_rank * (num_experts // ep)
    return _EXPERT.sub(lambda match: f"local_experts.{int(match[1]) + first}.", name)


def global_names(model: Any, named: Iterable[tuple[str, Any]] | None = None) -> Iterator[tuple[str, Any]]:
    """A part's parameters, or what else is `named`, by their names in the whole model: layers number themselves."""
    first = first_layers(model)
    own = model.named_parameters() if named is None else named
    return ((global_name(name, first["decoder"], first["encoder"]), parameter) for name, parameter in own)


def held_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with the last stage's copy of a tied embedding by the embedding's name; and biases of routers, which
    checkpoints hold and nothing trains."""
    for name, parameter in global_names(model):
        yield _EMBEDDING if name in _HEADS and model.share_embeddings_and_output_weights else name, parameter
    yield from (named for named in global_names(model, model.named_buffers()) if named[0].endswith(".expert_bias"))


def initialize_weights(model: Any, config: Any, *, seed: int) -> None:
    """Fill every weight from a generator keyed by (seed, its name in the whole model), then take this rank's slice.

    The same seed gives the same model on every topology. Normal with deviation 0.02, divided by sqrt(2 x layers) for
    the two projections that write into the residual stream (Radford et al. 2019, sec. 2.3); norms one, biases zero.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    num_experts = config.num_moe_experts or 0
    ep_rank, ep = (
        (parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size())
        if num_experts
        else (0, 1)
    )
    for own_name, parameter in held_weights(model):
        name = global_expert_name(own_name, num_experts, ep_rank, ep)
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "layernorm" in name:
                parameter.fill_(0.0 if config.layernorm_zero_centered_gamma else 1.0)
            else:
                deviation = 0.02
                if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    deviation /= math.sqrt(2 * config.num_layers)
                shape = full_shape(parameter, tp)
                key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
                whole = torch.empty(shape).normal_(0.0, deviation, generator=generator)
                parameter.copy_(tensor_slice(whole, parameter, tp_rank, tp))


def fill_weights(model: Any, whole: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a part's weights, every one, from whole tensors by name; rows of a padded vocabulary are zero.

    Where rounding to the weight's precision changes a tensor, its unrounded values stay beside the weight until
    `take_unrounded` removes them. Errors: DataError for a tensor that is missing or misshapen.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    weights = dict(held_weights(model))
    for name, tensor in whole:
        if (parameter := weights.pop(name, None)) is None:
            continue
        shape = full_shape(parameter, tp)
        if name in _VOCABULARY and tensor.shape[0] < shape[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - tensor.shape[0], *tensor.shape[1:])])
        if list(tensor.shape) != shape:
            raise DataError(f"{name} is {list(tensor.shape)} but the model's is {shape}: give the model's own weights")
        own_slice = tensor_slice(tensor, parameter, tp_rank, tp)
        rounded = own_slice.to(parameter.dtype)
        if own_slice.dtype != parameter.dtype and not torch.equal(rounded.to(own_slice.dtype), own_slice):
            parameter.unrounded = own_slice.float().clone()  # type: ignore[attr-defined]
        with torch.no_grad():
            parameter.copy_(own_slice)
    if weights:
        raise DataError(f"the checkpoint has no {', '.join(sorted(weights))}: give the model's own weights")


def take_unrounded(parameter: torch.Tensor) -> torch.Tensor | None:
    """The unrounded float32 values that `fill_weights` kept beside a weight, or None. The first call removes them."""
    unrounded: torch.Tensor | None = parameter.__dict__.pop("unrounded", None)
    return unrounded


def full_shape(parameter: torch.Tensor, tp: int) -> list[int]:
    """The shape of a tensor-parallel parameter, or of a part of the head, before it was cut."""
    shape = list(parameter.shape)
    if (part := part_of(parameter)) is not None:
        shape[0] *= part[1]
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp  # type: ignore[attr-defined]
    return shape


def tensor_slice(whole: torch.Tensor, parameter: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """This rank's part of a whole weight; a partition stride of 2 is a gated MLP's [gate; up], cut one by one."""
    if part_of(parameter) is not None:
        number, blocks = block_of_rows(parameter, tp_rank, tp)
        return whole.chunk(blocks)[number]
    if not getattr(parameter, "tensor_model_parallel", False) or tp == 1:
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    return torch.cat([part.chunk(tp, dim)[tp_rank] for part in whole.chunk(stride, dim)], dim)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x))


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _squared_relu,
    "quick_gelu": _quick_gelu,
}


def initialize_parallel(
    topology: Topology, seed: int, *, timeout_s: float = 120.0, architecture: Architecture | None = None
) -> None:
    """Create Megatron's process groups (tp-dp-pp order) over an initialised torch.distributed.

    A collective that waits longer than `timeout_s`, rounded up to minutes, ends its rank. An encoder-decoder must be
    named by its `architecture`: its embedding is on other ranks than the first and the last.
    """
    megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        get_embedding_ranks=_embedding_ranks(architecture, topology),
    )
    model_parallel_cuda_manual_seed(1 + seed % 2**31)


def _embedding_ranks(architecture: Architecture | None, topology: Topology) -> Callable[..., list[int]] | None:
    """Of the ranks of a pipeline those that hold an encoder-decoder's embedding; None: as Megatron has it."""
    if architecture is None or not architecture.num_decoder_layers:
        return None
    from dynapipe_ext.executor.stages.megatron.t5 import embedding_ranks

    holders = embedding_ranks(architecture, topology)
    return lambda ranks, *_: [ranks[pp_rank] for pp_rank in holders]


def destroy_parallel() -> None:
    """Forget Megatron's process groups, so that others can be made."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def transformer_config(
    architecture: Architecture,
    topology: Topology,
    *,
    dtype: str,
    sequence_parallel: bool = False,
    dropout: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Megatron's TransformerConfig of a model (of an encoder-decoder's decoder); losses and gradients are sums, to be
    divided by global counts. `deterministic`: kernels that give the same bits in every run.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    a = architecture
    num_layers = a.num_decoder_layers or a.num_layers
    if a.num_decoder_layers:
        from dynapipe_ext.executor.stages.megatron.t5 import decoder_layers

        topology = decoder_layers(a, topology)
    arguments = _parallel_arguments(
        num_layers, topology, dtype=dtype, sequence_parallel=sequence_parallel, dropout=dropout
    )
    arguments["deterministic_mode"] = deterministic
    if a.num_experts:
        arguments |= _expert_arguments(a)
    if a.latent:
        arguments |= {"rotary_base": a.rope_theta} | latent_arguments(a, a.latent)
    config = (MLATransformerConfig if a.latent else TransformerConfig)(
        **arguments,
        **_layer_arguments(a),
        num_layers=num_layers,
        no_rope_freq=[int(not a.turns(layer)) for layer in range(num_layers)] if a.no_rope_every else None,
    )
    setattr(config, IN_ONE_PASS, True)
    config.add_bias_linear = a.mlp_bias  # not before: Megatron refuses experts' biases, whose ranks share one here
    if not a.latent:
        concentrate(config, a)
    return config


def _layer_arguments(a: Architecture) -> dict[str, Any]:
    """What every layer of the model has alike."""
    return {
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.dense_ffn_hidden_size or a.ffn_hidden_size,
        "gated_linear_unit": a.gated_mlp,
        "activation_func": _ACTIVATIONS[a.activation],
        "activation_func_clamp_value": a.gate_clamp or None,
        "glu_linear_offset": a.up_offset,
        "normalization": "RMSNorm" if a.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": a.norm_eps,
        "add_bias_linear": a.mlp_bias and not a.num_experts,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm and not a.qk_norm_whole,  # it would sum the divided weights' gradients over ranks
        "softmax_scale": _softmax_scale(a),
        "layernorm_zero_centered_gamma": a.zero_centered_norm,
        "window_size": (a.sliding_window - 1, 0) if a.sliding_window else None,
        "rotary_interleaved": a.rotary_interleaved,
    }


def _expert_arguments(a: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": a.num_experts,
        "moe_router_topk": a.top_k,
        "moe_ffn_hidden_size": a.ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": not a.norm_topk_prob,
        "moe_shared_expert_intermediate_size": a.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": a.shared_expert_gate,
        "moe_apply_probs_on_input": a.router_on_inputs,
        "moe_router_bias_update_rate": 0.0,  # a bias stays what it is: the loss says nothing of it
    } | router_arguments(a)


def _softmax_scale(a: Architecture) -> float | None:
    """None: one over the root of the heads' width."""
    if a.num_decoder_layers:
        return 1.0
    if a.score_scale:
        return a.score_scale
    return float(a.query_pre_attn_scalar**-0.5) if a.query_pre_attn_scalar else None


def _parallel_arguments(
    num_layers: int, topology: Topology, *, dtype: str, sequence_parallel: bool, dropout: float
) -> dict[str, Any]:
    """TransformerConfig's arguments that do not depend on the model's sizes: ranks, precision, sums, no fusion.

    Errors: ConfigError for several stages on the only pipeline rank.
    """
    layout = None
    if topology.pp > 1:
        layout = PlacedLayout(topology, num_layers)
    elif topology.num_stages > 1:
        raise ConfigError(f"{topology.num_stages} stages on one pipeline rank: give pp of at least 2, or one stage")
    torch_dtype = getattr(torch, dtype)
    return {
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "pipeline_model_parallel_layout": layout,
        "sequence_parallel": sequence_parallel and topology.tp > 1,
        "pipeline_dtype": torch_dtype,
        "params_dtype": torch_dtype,
        "bf16": dtype == "bfloat16",
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }


def build_chunks(
    architecture: Architecture, topology: Topology, pp_rank: int, build: Callable[[int], torch.nn.Module]
) -> list[torch.nn.Module]:
    """What `build(stage)` gives for each stage of a pipeline rank, in their order.

    Where a rank holds both ends of a tied model (a V), or parts of both, the head uses the embedding's weight and has
    none of its own: one parameter, one gradient, one optimizer state, saved once. Stages of an encoder-decoder likewise
    (`lend_copies`).
    """
    stages = topology.stages_of(pp_rank)
    chunks: list[Any] = [build(stage) for stage in stages]
    if architecture.num_decoder_layers:
        from dynapipe_ext.executor.stages.megatron.t5 import lend_copies

        lend_copies(chunks)
    elif architecture.tied_embeddings and not is_tied_by_megatron(topology) and stages[0] in topology.embedding_stages:
        head, embedding = chunks[-1].output_layer, chunks[0].embedding
        del head.weight
        head.__dict__["weight"] = embedding.word_embeddings.weight  # used, not owned: parameters() leaves it out
        chunks[-1].__dict__["sharded_state_dict"] = partial(_state_without_head, chunks[-1])
    return chunks


def _state_without_head(model: Any, *arguments: Any, **options: Any) -> Any:
    """Megatron's sharded state of a model whose head has no weight of its own; Megatron would look for one."""
    model.post_process = False
    try:
        return type(model).sharded_state_dict(model, *arguments, **options)
    finally:
        model.post_process = True


def build_model(
    architecture: Architecture,
    topology: Topology,
    stage: int,
    config: Any,
    *,
    seed: int | None,
    device: torch.device,
) -> torch.nn.Module:
    """A stage of a model over the groups of `initialize_parallel`; `config` as `transformer_config` makes it.

    The vocabulary is padded to a multiple of VOCAB_MULTIPLE, whatever tp is. With `seed`, weights are initialised by
    name (`initialize_weights`); with None they are NaN, to be loaded: one that was forgotten shows. Errors: ConfigError
    for what cannot be cut over `topology`.
    """
    a = architecture
    _check(a, topology)
    model: torch.nn.Module
    if a.num_decoder_layers:
        from dynapipe_ext.executor.stages.megatron.t5 import EncoderDecoderPart

        model = EncoderDecoderPart(a, topology, stage, config)
    elif stage not in topology.layer_stages:
        model = _vocabulary_part(a, topology, stage, config)
    else:
        model = _build_gpt(a, topology, stage, config)
    gate_in_one_pass(model, a)
    model.to(device=device, dtype=config.params_dtype)
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "_maintain_float32_expert_bias")]
    for router in routers:
        router._maintain_float32_expert_bias()
    if seed is not None:
        initialize_weights(model, config, seed=seed)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
    hide_padding(model, a.vocab_size)
    return model


def _check(a: Architecture, topology: Topology) -> None:
    if topology.layers_per_stage and sum(topology.layers_per_stage) != a.total_layers:
        raise ConfigError(
            f"layers_per_stage {topology.layers_per_stage} must sum to the model's {a.total_layers} layers"
        )
    if VOCAB_MULTIPLE % topology.tp:
        raise ConfigError(f"tp is {topology.tp} but must divide {VOCAB_MULTIPLE}: choose a power of two up to that")
    _check_spread(a, topology)
    for name, size in a.divided_sizes.items():
        if size % topology.tp:
            raise ConfigError(f"{name} {size} must be a multiple of tp {topology.tp}")
    if fault := a.groups_fault(topology.tp):
        raise ConfigError(fault)
    if fault := router_fault(a):
        raise ConfigError(fault)
    if a.top_k == 1 and a.norm_topk_prob:
        raise ConfigError(
            "top_k is 1 with norm_topk_prob: an expert's weight is then always 1 and its router learns nothing, which"
            " megatron-core refuses; take a model of two experts a token, or without norm_topk_prob"
        )


def _check_spread(a: Architecture, topology: Topology) -> None:
    if a.num_decoder_layers:
        require_whole_vocabulary(topology, "a model with a decoder side")
    refuse_undivided_vocabulary(a.padded(), topology)
    if topology.vocabulary != "whole" and len(topology.layer_stages) < topology.pp:
        raise ConfigError(
            f"vocabulary {topology.vocabulary!r} lies over {topology.pp} pipeline ranks, but there are"
            f" {len(topology.layer_stages)} stages of layers: give each rank one, or leave the vocabulary whole"
        )


def _build_gpt(a: Architecture, topology: Topology, stage: int, config: Any) -> torch.nn.Module:
    from megatron.core.models import gpt
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class GPTModel(OnePassLoss, gpt.GPTModel):  # type: ignore[misc] # megatron has no types
        pass

    has_embedding, has_head = stage == topology.layer_stages.start, stage == topology.head_stages.start
    parts = topology.embedding_stages if has_embedding else topology.head_stages if has_head else range(1)
    rotate_without_waiting()
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            gpt_layers(a, config, topology.with_layers(a.num_layers).stage_layers[stage]), layer_norm=MarkedNorm
        ),
        vocab_size=a.padded_vocab_size() // len(parts),
        max_sequence_length=a.max_seq_len,
        pre_process=has_embedding,
        post_process=has_head,
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied_embeddings and is_tied_by_megatron(topology),
        vp_stage=virtual_stage(topology, stage, config),
        position_embedding_type="rope" if a.position == "rope" else "learned_absolute",
    )
    if a.position == "rope" and not a.latent:
        rotary: Any = model.rotary_pos_emb
        rotary.inv_freq = rotary_frequencies(a).to(rotary.inv_freq.device)
    if has_embedding:
        _finish_embedding(topology, stage, model)
    if a.scaled_embedding and has_embedding:
        scale = torch.tensor(a.hidden_size**0.5).to(config.params_dtype)  # rounded, as published
        embedding: Any = model.embedding
        embedding.register_forward_hook(lambda _module, _inputs, output: output * scale.to(output.device))
    if a.embedding_scale != 1 and has_embedding:
        own_embedding: Any = model.embedding
        own_embedding.register_forward_hook(lambda _module, _inputs, output: output * a.embedding_scale)
    if has_head:
        _finish_head(a, topology, stage, model)
    return model


def _vocabulary_part(a: Architecture, topology: Topology, stage: int, config: Any) -> torch.nn.Module:
    """A stage without layers."""
    num_rows, model = a.padded_vocab_size() // topology.pp, torch.nn.Module()
    if stage in topology.embedding_stages:
        model = EmbeddingPart(config, num_rows)
        _finish_embedding(topology, stage, model)
    else:
        model = HeadPart(config, num_rows, is_last=stage == topology.num_stages - 1)
        _finish_head(a, topology, stage, model)
    return model


def _finish_embedding(topology: Topology, stage: int, model: Any) -> None:
    """Make a stage's embedding a part, where there are several."""
    if len(topology.embedding_stages) > 1:
        layer = model.embedding.word_embeddings
        save_by_rows(model, _EMBEDDING, layer.weight, topology.vocabulary_part(stage), topology.pp)
        look_up_own_rows(layer)
        if stage in topology.layer_stages:
            add_received(model)


def _finish_head(a: Architecture, topology: Topology, stage: int, model: Any) -> None:
    if len(topology.head_stages) > 1:
        part = topology.vocabulary_part(stage)
        save_by_rows(model, _HEAD, model.output_layer.weight, part, len(topology.head_stages))
    if a.logit_divisor != 1:
        divide_logits(model, a.logit_divisor)
    if a.logit_softcap:
        cap_logits(model, a.logit_softcap)
