"""slime's `build_dp_schedule` and its trainer's `train_one_step` on given rollouts, with its `sft_loss`, or with its
`policy_loss` after its own passes of forwards for old and reference log probabilities: GRPO with a mean over rollouts,
GSPO with a mean over tokens. Reference weights are the first ones, old ones those before the step.

Put out of the way, outside of the step: Ray, SGLang and the rollouts themselves; Megatron-LM's arguments and set-up,
whose place a plain namespace and megatron-core take; Transformer Engine (layers are Megatron's local ones).
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._inductor.compile_fx  # before Triton is put out of the way

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.loops import slime as adapter
from dynapipe_ext.executor.stages.megatron.model import initialize_weights
from tests.bench.real_loops.stand_ins import LOCAL, local_block_spec, name_absent, pretend_device

STEPS, ROLLOUTS, CAP, PP, VOCAB, PROMPT, LONGEST = 20, 16, 512, 2, 320, 8, 400
ARGS = Namespace(
    use_dynamic_batch_size=True, max_tokens_per_gpu=CAP, balance_data=False, balance_by_flops=False, seq_length=1,
    micro_batch_size=1, decoder_seq_length=None, data_pad_size_multiplier=1, allgather_cp=False, loss_type="sft_loss",
    calculate_per_token_loss=True, recompute_loss_function=False, custom_megatron_before_train_step_hook_path=None,
    save_debug_train_data=None, enable_mtp_training=False, ci_test=False, tensor_model_parallel_size=1,
    pipeline_model_parallel_size=PP, rollout_temperature=1.0, log_probs_chunk_size=-1, true_on_policy_mode=False,
    use_rollout_top_p=False, rollout_top_p=1.0, qkv_format="thd", entropy_coef=0.0, use_rollout_logprobs=False,
    use_rollout_entropy=False, custom_megatron_before_log_prob_hook_path=None, use_opsm=False, eps_clip=0.2,
    eps_clip_high=0.28, eps_clip_c=None, get_mismatch_metrics=False, use_tis=False, use_kl_loss=True,
    use_unbiased_kl=False, kl_loss_type="low_var_kl", kl_loss_coef=0.05, advantage_estimator="grpo",
)  # fmt: skip
LOSSES = {
    "sft": {},
    "grpo": {"loss_type": "policy_loss", "calculate_per_token_loss": False},
    "gspo": {"loss_type": "policy_loss", "advantage_estimator": "gspo"},
}

name_absent(
    "transformer_engine",
    "triton",
    "flash_attn",
    "ray",
    "sglang",
    "sglang_router",
    "apex",
    "torch_memory_saver",
    "httpx",
    "pybase64",
    "blobfile",
)
for name, given in {"global_vars": {"get_args": lambda: ARGS}, "training": {"get_model": None}}.items():
    module = ModuleType(f"megatron.training.{name}")
    vars(module).update(given)
    sys.modules[module.__name__] = module
for name in ("megatron.training", "wandb"):
    sys.modules[name] = ModuleType(name)
for name in ("checkpoint", "model_provider"):
    module = ModuleType(f"slime.backends.megatron_utils.{name}")
    vars(module).update(load_checkpoint=None, save_checkpoint=None, get_model_provider_func=None)
    sys.modules[module.__name__] = module
pretend_device()
torch.compile = lambda *_, **__: lambda function: function  # of three formulas, for whose code a CPU has no time
from slime.backends.megatron_utils import loss as losses
from slime.backends.megatron_utils import model as trainer
from slime.backends.megatron_utils.data import get_data_iterator
from slime.utils import accelerator, dp_schedule

for name in [name for name in sys.modules if name.startswith("megatron.training")]:
    del sys.modules[name]  # what is not here is not looked into


accelerator.device = accelerator.current_device = lambda *_: torch.device("cpu")


def write_data(_: Path) -> None: ...


def build() -> tuple[list[Any], Any]:
    """The rank's chunk and its optimizer."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PP)
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=PP,
        pipeline_dtype=torch.float32, calculate_per_token_loss=ARGS.calculate_per_token_loss,
        attention_dropout=0.0, hidden_dropout=0.0,
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", finalize_model_grads_func=finalize_model_grads,
        normalization="RMSNorm", **LOCAL,
    )  # fmt: skip
    model = GPTModel(
        config, local_block_spec(config), VOCAB, 1024, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    initialize_weights(model, config, seed=7)
    model.model_type = ModelType.encoder_or_decoder
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, params_dtype=torch.float32), [chunk]
    )
    config.grad_scale_func = optimizer.scale_loss
    return [chunk], optimizer


def rollouts(step: int) -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(step)
    lengths = (
        torch.empty(ROLLOUTS).log_normal_(4.2, 0.9, generator=generator).clamp(4, LONGEST - PROMPT).long().tolist()
    )
    masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in lengths]
    return {
        "tokens": [torch.randint(4, VOCAB, (PROMPT + n,), generator=generator) for n in lengths],
        "response_lengths": lengths,
        "total_lengths": [PROMPT + n for n in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": [torch.randn((), generator=generator).expand(n) for n in lengths],
    }


def log_probabilities(
    chunks: list[Any], weights: list[torch.Tensor] | None, iterators: Any, counts: list[int], prefix: str
) -> dict[str, list[Any]]:
    """Of the step's rollouts by slime's own pass of forwards, under other `weights` where given."""
    parameters = [*chunks[0].parameters()]
    own = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, weights or own, strict=True):
            parameter.copy_(value)
        found: dict[str, list[Any]] = trainer.forward_only(
            losses.get_log_probs_and_entropy, ARGS, chunks, iterators, counts, store_prefix=prefix
        )
        for parameter, value in zip(parameters, own, strict=True):
            parameter.copy_(value)
    for iterator in iterators:
        iterator.reset()
    return found


def record_ratios(ratios: list[float]) -> None:
    """Of every micro-batch, by how much the largest log ratio of old to new probabilities is off 0."""
    own = losses.compute_policy_loss

    def compute_policy_loss(ppo_kl: torch.Tensor, *given: Any, **named: Any) -> Any:
        ratios.append(float(((-ppo_kl.detach()).exp() - 1).abs().max()) if ppo_kl.numel() else 0.0)
        return own(ppo_kl, *given, **named)

    losses.compute_policy_loss = compute_policy_loss


def main(_folder: Path, kind: str, loss: str = "sft") -> dict[str, Any]:
    vars(ARGS).update(LOSSES[loss])
    chunks, optimizer = build()
    first_weights = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    ratios: list[float] = []
    record_ratios(ratios)
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    parallel = {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": PP}
    scheduler, steps = Namespace(step=lambda increment: None), []
    with ExitStack() as stack:
        if kind != "stock":
            stack.enter_context(dynapipe.installed())
        if kind == "planned":
            costs = TokenCosts(PP, overhead_ns=20_000)
            stack.enter_context(adapter.planned_schedules(costs=costs))
        for step in range(STEPS):
            data = rollouts(step)
            started_s, cpu_s = time.perf_counter(), time.process_time()
            partitions, places, counts, sizes = dp_schedule.build_dp_schedule(
                ARGS, parallel, data["total_lengths"], global_batch_size=ROLLOUTS, rollout_indices=[*range(ROLLOUTS)]
            )
            own = {name: [values[i] for i in partitions[dp_rank]] for name, values in data.items()}
            own["micro_batch_indices"] = places[dp_rank]
            iterators = get_data_iterator(own)
            if loss != "sft":
                own |= log_probabilities(chunks, first_weights, iterators, counts, "ref_")
                own |= log_probabilities(chunks, None, iterators, counts, "")
                iterators = get_data_iterator(own)
            ratios.clear()
            found, norm = trainer.train_one_step(
                ARGS, step, 0, iterators, chunks, optimizer, scheduler, counts[0], sizes[0]
            )
            steps.append(
                {
                    "loss": [float(value) for name, value in found.items() if name.endswith("loss")],
                    "grad_norm": [float(norm)],
                    "seconds": time.perf_counter() - started_s,
                    "cpu_seconds": time.process_time() - cpu_s,
                    "micro_batches": [[[own["total_lengths"][i] for i in group] for group in places[dp_rank]]],
                    "padding": 0,
                    **({"first_ratio": max(ratios)} if ratios else {}),
                }
            )
            print(json.dumps(steps[-1]), flush=True)
    return {"steps": steps}
