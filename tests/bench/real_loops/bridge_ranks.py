"""Megatron-Bridge's `pretrain` on packed conversations: its own set-up, data, training loop and step.

Put out of the way, outside of the step: Transformer Engine and ModelOpt (layers are Megatron's local ones, by the
provider's own `transformer_layer_spec`), the assertion that CUDA exists, and the compilation of dataset helpers.
"""

# ruff: noqa: E402
from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from tests.bench.real_loops.stand_ins import LOCAL, local_block_spec, name_absent, pretend_device

name_absent(
    "transformer_engine",
    "modelopt",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "timm",
    "open_clip",
    "mlflow",
    "wandb",
    "qwen_vl_utils",
)
with megatron_cpu.triton_named():
    from megatron.bridge.data import finetuning
    from megatron.bridge.data.datasets.packed_sequence import PackedSequenceSpecs
    from megatron.bridge.models.llama.llama_provider import LlamaModelProvider
    from megatron.bridge.models.qwen.qwen_provider import Qwen3MoEModelProvider
    from megatron.bridge.training import initialize, setup, train
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        FinetuningDatasetConfig,
        LoggerConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainingConfig,
    )
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops import megatron_bridge
from tests.support.model_folders import write_model_tokenizer

STEPS, ROWS, PACK = 20, 16, 256  # rows of a global batch, positions of one
VOCAB, PP = 320, 2


def write_data(folder: Path) -> None:
    write_packs(folder / "packs.npy")
    write_model_tokenizer(folder / "model")


def write_packs(path: Path) -> None:
    """Rows of conversations packed first come first served, as long as they come: of unequal lengths."""
    generator = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    while len(rows) < STEPS * ROWS:
        row: dict[str, Any] = {"input_ids": [], "seq_start_id": [], "loss_mask": []}
        target = int(generator.integers(PACK // 4, PACK + 1))
        while len(row["input_ids"]) < target - 4:
            length = int(np.clip(generator.lognormal(3.2, 0.8), 4, target - len(row["input_ids"])))
            row["seq_start_id"].append(len(row["input_ids"]))
            row["input_ids"] += generator.integers(4, 300, length).tolist()
            row["loss_mask"] += [i >= length // 3 for i in range(length)]
        rows.append(row)
    np.save(path, rows, allow_pickle=True)
    path.with_suffix(".json").write_text("[]")


def provider(kind: str) -> Any:
    shape: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "vocab_size": VOCAB,
        "seq_length": PACK,
        "pipeline_model_parallel_size": PP,
        "kv_channels": 16,
        "transformer_layer_spec": lambda config, vp_stage=None: local_block_spec(config, vp_stage=vp_stage),
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "bf16": False,
        "autocast_dtype": torch.float32,
        "calculate_per_token_loss": True,
        "cross_entropy_loss_fusion": False,
        "persist_layer_norm": False,
        "make_vocab_size_divisible_by": 64,
        **LOCAL,
    }
    if kind == "llama":
        return LlamaModelProvider(**shape)
    experts = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "expert_model_parallel_size": 2,
        "moe_router_load_balancing_type": "none",
    }
    return Qwen3MoEModelProvider(**shape | experts)


def configuration(folder: Path, kind: str) -> ConfigContainer:
    return ConfigContainer(
        model=provider(kind),
        train=TrainingConfig(
            micro_batch_size=1, global_batch_size=ROWS, train_iters=STEPS, eval_iters=0, eval_interval=1000
        ),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=1, start_weight_decay=0.01, end_weight_decay=0.01
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            average_in_collective=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            grad_reduce_in_fp32=True,
        ),
        dataset=FinetuningDatasetConfig(
            dataset_root=folder,
            seq_length=PACK,
            do_validation=False,
            do_test=False,
            num_workers=0,
            pin_memory=False,
            packed_sequence_specs=PackedSequenceSpecs(
                packed_sequence_size=PACK,
                packed_train_data_path=str(folder / "packs.npy"),
                packed_metadata_path=str(folder / "packs.json"),
            ),
            dataset_kwargs={"answer_only_loss": True},
        ),
        logger=LoggerConfig(log_interval=100),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "model")),
        checkpoint=CheckpointConfig(save=None, save_interval=0),
        dist=DistributedInitConfig(distributed_backend="gloo", disable_jit_fuser=True),
    )


def main(folder: Path, kind: str, model: str = "llama") -> dict[str, Any]:
    pretend_device()
    steps: list[dict[str, Any]] = []
    cuts: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(
            replaced(setup, initialize_megatron=partial(initialize.initialize_megatron, allow_no_cuda=True))
        )
        stack.enter_context(replaced(initialize, compile_helpers=lambda: None, _warmup_jit_function=lambda *_: None))
        # ModelOpt's, which for models that distil nothing returns None.
        stack.enter_context(replaced(train, get_tensor_shapes_adjust_fn_for_distillation=lambda *_, **__: None))
        if kind == "installed":
            stack.enter_context(dynapipe.installed())
        elif kind == "planned":
            stack.enter_context(megatron_bridge.planned_loop())
        own = train.train_step

        def recorded(*arguments: Any) -> Any:
            started_s, cpu_s = time.perf_counter(), time.process_time()
            found = own(*arguments)
            steps.append(
                {
                    "loss": [float(x) for x in found[0].values()],
                    "grad_norm": [float(found[5])],
                    "seconds": time.perf_counter() - started_s,
                    "cpu_seconds": time.process_time() - cpu_s,
                    **cuts.pop(),
                }
            )
            print(steps[-1], flush=True)
            return found

        own_split = finetuning.prepare_finetuning_batch

        def recorded_split(*arguments: Any, **keywords: Any) -> Any:
            batches, length = own_split(*arguments, **keywords)
            batches = list(batches)
            cuts.append(_told(batches))
            return iter(batches), length

        stack.enter_context(replaced(finetuning, prepare_finetuning_batch=recorded_split))
        stack.enter_context(replaced(train, train_step=recorded))
        pretrain(configuration(folder, model), forward_step)
    return {"steps": steps}


def _told(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The lengths of each row's segments, padding among them, and how many positions are padding."""
    ends = [b["cu_seqlens"][0, : int(b["cu_seqlens_argmin"][0])].diff().tolist() for b in batches]
    padding = sum(b["tokens"].numel() - sum(b["token_count"]) for b in batches)
    return {"micro_batches": [ends], "padding": padding}
