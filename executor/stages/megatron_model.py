"""A megatron-core GPTModel whose weights depend on the seed and their names, not on how it is spread over ranks."""

from __future__ import annotations

import hashlib
import math
import re
from contextlib import AbstractContextManager
from typing import Any

import torch

from dynapipe_ext.costs.analytic import ModelShape
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.attention import DocumentAttention
from dynapipe_ext.topology import Topology

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def initialize_parallel(topology: Topology, seed: int, *, timeout_s: float = 120.0) -> None:
    """Create Megatron's process groups (tp-dp-pp order) over an initialised torch.distributed.

    A collective that waits longer than `timeout_s`, rounded up to minutes, ends its rank.
    """
    megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(1 + seed % 2**31)


def destroy_parallel() -> None:
    """Forget Megatron's process groups, so that others can be made."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def transformer_config(
    shape: ModelShape, topology: Topology, *, dtype: str, sequence_parallel: bool, dropout: float = 0.0
) -> Any:
    """Megatron's TransformerConfig; losses and gradients are sums, to be divided by global counts.

    Errors: ConfigError for a shape with experts.
    """
    _refuse_experts(shape)
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **parallel_arguments(
            shape.num_layers, topology, dtype=dtype, sequence_parallel=sequence_parallel, dropout=dropout
        ),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        ffn_hidden_size=shape.ffn_hidden_size,
        gated_linear_unit=shape.gated_mlp,
        activation_func=torch.nn.functional.silu if shape.gated_mlp else torch.nn.functional.gelu,
        normalization="RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        add_bias_linear=shape.bias,
    )


def parallel_arguments(
    num_layers: int, topology: Topology, *, dtype: str, sequence_parallel: bool, dropout: float
) -> dict[str, Any]:
    """TransformerConfig's arguments that do not depend on the model's sizes: ranks, precision, sums, no fusion.

    Errors: ConfigError for several stages on the only pipeline rank.
    """
    layout = None
    if topology.pp > 1:
        from dynapipe_ext.executor.stages.megatron_placement import PlacedLayout

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


def _refuse_experts(shape: ModelShape) -> None:
    if shape.num_experts:
        raise ConfigError(
            f"num_experts is {shape.num_experts} but this stage builds dense layers alone: give a shape with"
            " num_experts 0, or train experts on a Stage of your own; plans and costs know them"
        )


class Norm:
    """torch's norm, marked for the reduction that sequence parallelism needs, which Megatron's wrapper refuses."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class CoreAttention(DocumentAttention):
    """Draws dropout from Megatron's generator of this tensor parallel rank: heads on two ranks must not share masks."""

    def dropout_generator(self) -> AbstractContextManager[Any]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker: AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
        return tracker


def build_model(
    shape: ModelShape, topology: Topology, stage: int, config: Any, *, seed: int, device: torch.device
) -> torch.nn.Module:
    """The GPTModel slice of one stage, initialised by name (see `initialize_weights`).

    Errors: ConfigError for a shape with experts.
    """
    _refuse_experts(shape)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dynapipe_ext.executor.stages.megatron_placement import is_tied_by_megatron, virtual_stage

    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = topology.with_layers(shape.num_layers).layers_per_stage
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * layers[stage], layer_norm=Norm),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_seq_len,
        pre_process=stage == 0,
        post_process=stage == topology.num_stages - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings and is_tied_by_megatron(topology),
        vp_stage=virtual_stage(topology, stage, config),
        position_embedding_type="rope" if shape.position == "rope" else "learned_absolute",
    )
    model.to(device=device, dtype=config.params_dtype)
    initialize_weights(model, config, first_layer=sum(layers[:stage]), seed=seed)
    return model


def global_name(name: str, first_layer: int) -> str:
    """
    >>> global_name("decoder.layers.1.mlp.linear_fc1.weight", 4)
    'decoder.layers.5.mlp.linear_fc1.weight'
    """
    return _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)


def initialize_weights(model: torch.nn.Module, config: Any, *, first_layer: int, seed: int) -> None:
    """Fill every weight from a generator keyed by (seed, its name in the whole model), then take this rank's slice.

    The same seed gives the same model on every topology. Normal with deviation 0.02, divided by sqrt(2 x layers) for
    the two projections that write into the residual stream (Radford et al. 2019, sec. 2.3); norms one, biases zero.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, first_layer)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"  # the last stage's copy of a tied embedding
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "layernorm" in name:
                parameter.fill_(1.0)
            else:
                deviation = 0.02
                if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    deviation /= math.sqrt(2 * config.num_layers)
                shape = full_shape(parameter, tp)
                key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
                whole = torch.empty(shape).normal_(0.0, deviation, generator=generator)
                parameter.copy_(tensor_slice(whole, parameter, tp_rank, tp))


def full_shape(parameter: torch.Tensor, tp: int) -> list[int]:
    """The shape of a tensor-parallel parameter before it was cut."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp  # type: ignore[attr-defined]
    return shape


def tensor_slice(whole: torch.Tensor, parameter: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """This rank's part of a whole weight; a partition stride of 2 is a gated MLP's [gate; up], cut one by one."""
    if not getattr(parameter, "tensor_model_parallel", False) or tp == 1:
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    return torch.cat([part.chunk(tp, dim)[tp_rank] for part in whole.chunk(stride, dim)], dim)
