"""verl's Megatron engine on given rollouts: log probabilities and actor updates through its `TrainingWorker`.

Put out of the way, outside of the step: Transformer Engine (layers are Megatron's local ones with this package's
attention to documents, by mbridge's spec), mbridge's reading of weights (its names are Transformer Engine's), Ray and
the controller (rollouts and old log probabilities are handed over here), and the check that precision is of 16 bits.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from contextlib import ExitStack, contextmanager

import mbridge.core.llm_bridge
from mbridge.core.bridge import Bridge
from megatron.core import parallel_state
from safetensors.torch import load_file
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops import verl
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.tools.checkpoint import load_hf_weights
from tests.bench.real_loops.stand_ins import LOCAL, local_block_spec, pretend_device
from tests.bench.real_loops.tiny_model import write_tiny_qwen2

STEPS, ROLLOUTS, MINI_BATCH, CAP = 20, 32, 16, 512  # rollouts of a step and of an update; tokens of a micro-batch
VOCAB, PROMPT, LONGEST = 320, 8, 400
PP = 2


def write_data(folder: Path) -> None:
    write_tiny_qwen2(folder, VOCAB)


def _load_weights(_bridge: Any, models: list[Any], path: str, *_: Any, **__: Any) -> None:
    content = json.loads((Path(path) / "config.json").read_text())
    load_hf_weights(models, read_config(content, path), load_file(Path(path) / "model.safetensors").items())


def rollouts(step: int, dp_rank: int, dp: int) -> Any:
    """Prompts and responses of one replica, padded left and right as a sampler leaves them, with advantages."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    count = ROLLOUTS // dp
    lengths = torch.empty(count).log_normal_(4.2, 0.9, generator=generator).clamp(4, LONGEST - PROMPT).long()
    width = int(lengths.max())
    mask = torch.arange(width) < lengths[:, None]
    responses = torch.randint(4, VOCAB, (count, width), generator=generator) * mask
    prompts = torch.randint(4, VOCAB, (count, PROMPT), generator=generator)
    attention = torch.cat([torch.ones(count, PROMPT, dtype=torch.long), mask.long()], dim=1)
    advantages = torch.randn(count, 1, generator=generator) * mask
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask.long(),
        "advantages": advantages,
    }


def as_batch(tensors: dict[str, Any], **others: Any) -> Any:
    return left_right_2_no_padding(tu.get_tensordict(dict(tensors), {"temperature": 1.0, **others}))


def worker(model: str) -> TrainingWorker:
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=PP,
        sequence_parallel=False,
        vanilla_mbridge=True,
        use_distributed_optimizer=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=CAP,
        infer_max_token_len_per_gpu=CAP,
        override_transformer_config=LOCAL,
    )
    object.__setattr__(engine, "dtype", "float32")
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=model, override_config={"attn_implementation": "eager"}),
        engine_config=engine,
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=STEPS, lr_decay_style="constant"),
        checkpoint_config=CheckpointConfig(),
    )
    found = TrainingWorker(config)
    found.reset()
    return found


def main(folder: Path, kind: str) -> dict[str, Any]:
    pretend_device()
    with ExitStack() as stack:
        stack.enter_context(replaced(mbridge.core.llm_bridge, get_gpt_decoder_block_spec=local_block_spec))
        stack.enter_context(replaced(Bridge, load_weights=_load_weights))
        cuts: list[list[list[int]]] = []
        stack.enter_context(_recorded_cuts(cuts))
        if kind == "installed":
            stack.enter_context(dynapipe.installed())
        elif kind == "planned":
            dp = int(os.environ["WORLD_SIZE"]) // PP
            stack.enter_context(verl.planned_loop(mini_batch=MINI_BATCH // dp))
        return trained(worker(str(folder / "model")), cuts)


@contextmanager
def _recorded_cuts(cuts: list[list[list[int]]]) -> Iterator[None]:
    """Within: the rollouts' lengths in every micro-batch, as the engine hands them to the schedule."""
    own = transformer_impl.make_batch_generator

    def recorded(batches: Any, vpp_size: int) -> Any:
        cuts.append([batch["input_ids"].offsets().diff().tolist() for batch in batches])
        return own(batches, vpp_size)

    with replaced(transformer_impl, make_batch_generator=recorded):
        yield


def trained(actor: TrainingWorker, cuts: list[list[list[int]]]) -> dict[str, Any]:
    settings = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True)
    steps: list[dict[str, Any]] = []
    ratios: list[float] = []

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        new = no_padding_2_padding(model_output["log_probs"], data).detach()
        ratio = torch.exp(new - data["old_log_probs"])
        ratios.append(float(((ratio - 1) * data["response_mask"]).abs().max()))
        return ppo_loss(settings, model_output, data, dp_group)

    actor.set_loss_fn(loss)
    dp_rank, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for step in range(STEPS):
        tensors = rollouts(step, dp_rank, dp)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        old = log_probabilities(actor, tensors)
        ratios.clear()
        update = {"global_batch_size": MINI_BATCH, "mini_batch_size": MINI_BATCH, "epochs": 1, "seed": 1}
        batch = as_batch({**tensors, "old_log_probs": old}, **update, compute_loss=True, calculate_entropy=False)
        output = actor.train_mini_batch(batch)
        metrics = {} if output is None else tu.get(output, "metrics")
        found = [float(one) for one in metrics.get("actor/pg_loss", ())]
        steps.append(
            {
                "loss": [*found, float(old.sum() / tensors["response_mask"].sum())],
                "grad_norm": [float(one) for one in metrics.get("grad_norm", ())],
                "first_ratio": max(ratios[: len(cuts[1])], default=0.0),  # off 1, in the first update
                "seconds": time.perf_counter() - started_s,
                "cpu_seconds": time.process_time() - cpu_s,
                "micro_batches": cuts[1:],  # of the updates
                "padding": 0,
            }
        )
        cuts.clear()
        print(steps[-1], flush=True)
    return {"steps": steps}


def log_probabilities(actor: TrainingWorker, tensors: dict[str, Any]) -> Any:
    batch = as_batch(tensors, calculate_entropy=True, compute_loss=False)
    output = actor.infer_batch(batch)
    old = torch.zeros(tensors["response_mask"].shape)
    if output is not None:
        old = no_padding_2_padding(tu.get(output, "log_probs"), batch).float()
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(old, last, group=parallel_state.get_pipeline_model_parallel_group())
    return old
