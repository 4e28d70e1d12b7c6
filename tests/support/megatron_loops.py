"""A small GPT of megatron-core with a training script's `forward_step`, and steps of it under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from dynapipe_ext.executor.stages.megatron.model import global_name, initialize_weights
from tests.support.rank_jobs import forget_models

VOCAB, LENGTH, ROWS = 128, 16, 2
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}
vars(moe_utils).setdefault("te_general_gemm", None)  # for which routers ask where there is no Transformer Engine, too


@dataclass(frozen=True, slots=True)
class Loop:
    """A training on tp x pp x (what is left of the ranks), with `chunks` model chunks a rank."""

    tp: int = 1
    pp: int = 1
    ep: int = 0  # replicas that share four experts a layer; 0 for none
    chunks: int = 1
    tied: bool = False
    overlap: bool = False
    distributed: bool = False  # the distributed optimizer's buffers
    per_token: bool = True
    loss_scale: float = 1.0
    num_micro_batches: int = 4


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step left on a rank."""

    reports: list[list[float]]
    gradients: dict[str, torch.Tensor]  # by names in the whole model


def start(loop: Loop) -> tuple[list[Any], Any]:
    """The rank's chunks, wrapped for data parallelism, and their configuration."""
    forget_models()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=loop.tp,
        pipeline_model_parallel_size=loop.pp,
        virtual_pipeline_model_parallel_size=loop.chunks if loop.chunks > 1 else None,
        expert_model_parallel_size=max(loop.ep, 1),
    )
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=loop.tp,
        pipeline_model_parallel_size=loop.pp,
        virtual_pipeline_model_parallel_size=loop.chunks if loop.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=loop.per_token,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        grad_scale_func=None if loop.loss_scale == 1 else lambda loss: loss * loop.loss_scale,
        **(_EXPERTS | {"expert_model_parallel_size": loop.ep} if loop.ep else {}),
    )
    chunks = []
    for number in range(loop.chunks):
        vp_stage = number if loop.chunks > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=_EXPERTS["num_moe_experts"] if loop.ep else None),
            VOCAB,
            LENGTH,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=loop.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        initialize_weights(model, config, seed=7)
        model.model_type = ModelType.encoder_or_decoder
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=loop.overlap,
            use_distributed_optimizer=loop.distributed,
            bucket_size=5000,
        )
        chunks.append(DistributedDataParallel(config, ddp_config, model))
    if loop.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        if loop.chunks == 1:
            config.no_sync_func = config.no_sync_func[0]
    return chunks, config


def first_layer(model: Any) -> int:
    return int(model.decoder.layers[0].layer_number) - 1


def batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro-batches of this replica, whose rows have uneven numbers of targets."""
    generator = torch.Generator().manual_seed(100 * seed + parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).float()
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


def loss_func(mask: torch.Tensor, output: torch.Tensor, *, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return output
    loss = (output.float().view(-1) * mask.view(-1)).sum()
    num_tokens = mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    rows, length = batch["tokens"].shape
    positions = torch.arange(length).expand(rows, length)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def run_step(function: Callable[..., Any], loop: Loop, chunks: list[Any], *, seed: int = 0, **keywords: Any) -> Stepped:
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None
    iterators = [batches(seed) for _ in chunks]
    collects = keywords.get("collect_non_loss_data", False)
    reports = function(
        forward_step_func=forward_step,
        data_iterator=iterators if loop.chunks > 1 else iterators[0],
        model=chunks if loop.chunks > 1 else chunks[0],
        num_microbatches=loop.num_micro_batches,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        **keywords,
    )
    gradients = {
        global_name(name, first_layer(chunk.module)): parameter.main_grad.clone()
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
    }
    return Stepped([[] if collects else report["lm loss"].tolist() for report in reports], gradients)


def told_chunks(function: Any, loop: Loop) -> list[list[Any]]:
    """What the chunks of a rank are told before their forwards, in the order of the calls: whether the micro-batch is
    the first, its number, and that their parameters are to be there; of a step, and of several of forwards alone."""
    chunks, config = start(loop)
    told: list[Any] = []
    config.param_sync_func = [
        lambda _, number=number: told.append(("parameters", number)) for number in range(loop.chunks)
    ]
    for number, chunk in enumerate(chunks):
        chunk.set_is_first_microbatch = lambda number=number: told.append(("first", number))
        chunk.module.decoder.layers[0].register_forward_pre_hook(
            lambda layer, _, number=number: told.append((number, layer.current_microbatch))
        )
    found = []
    for keywords in ({}, *({"forward_only": True, "first_val_step": first} for first in (None, True, False))):
        told.clear()
        run_step(function, loop, chunks, **keywords)
        found.append(sorted(told, key=repr))  # plans have an order of their own
    return found
