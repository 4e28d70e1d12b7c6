"""ms-swift's `megatron sft` of a tiny Qwen2 on rows without padding, through its own `MegatronSft`.

Put out of the way, outside of the step: Transformer Engine, which its models are made of (layers are Megatron's local
ones with this package's attention to documents), the reading of weights by Transformer Engine's names, and TorchScript
of a ring attention that it does not run.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # before Triton is put out of the way

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
import megatron.core.extensions.transformer_engine as engine

import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops import ms_swift
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.tools.checkpoint import load_hf_weights
from tests.bench.real_loops.stand_ins import local_block_spec, name_absent, pretend_device
from tests.bench.real_loops.tiny_model import write_tiny_qwen2

name_absent("transformer_engine", "flash_attn", "triton", "deep_ep")
for absent in [name for name in dir(engine) if getattr(engine, name) is None]:
    setattr(engine, absent, type(absent, (torch.nn.Module,), {}))
pretend_device()
with replaced(torch.jit, script=lambda function, **_: function):
    from swift.megatron.pipelines.train.sft import MegatronSft
from mcore_bridge.bridge.gpt_bridge import GPTBridge
from mcore_bridge.model import register
from safetensors.torch import load_file
from swift.megatron.trainers.trainer import MegatronTrainer

STEPS, PP, SAMPLES, ROWS = 20, 2, 16, 2  # samples of a step, and of a row as the loop makes them
VOCAB, LONGEST = 320, 512


def write_data(folder: Path) -> None:
    """A tiny Qwen2 with random weights, a tokenizer, and chats of lognormal lengths."""
    write_tiny_qwen2(folder, VOCAB)
    draw = random.Random(0)

    def say(count: float) -> str:
        return " ".join(draw.choice(("red", "stone", "river", "cloud")) for _ in range(int(count)))

    chats = [
        {
            "messages": [
                {"role": "user", "content": say(draw.randint(1, 6))},
                {"role": "assistant", "content": say(min(60, max(1, draw.lognormvariate(2.5, 0.9))))},
            ]
        }
        for _ in range(SAMPLES * STEPS)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def arguments(folder: Path, kind: str) -> list[str]:
    given = {
        "model": folder / "model", "model_type": "qwen2", "template": "qwen2_5", "dataset": folder / "chats.jsonl",
        "tuner_type": "full", "torch_dtype": "float32", "fp16": "false", "bf16": "false",
        "pipeline_model_parallel_size": PP, "micro_batch_size": ROWS,
        "global_batch_size": SAMPLES, "train_iters": STEPS, "max_length": LONGEST, "padding_free": "true", "lr": 1e-3,
        "output_dir": folder / kind, "save_steps": 10 * STEPS, "eval_iters": 0, "split_dataset_ratio": 0,
        "logging_steps": 1, "ddp_backend": "gloo", "attention_backend": "local", "recompute_granularity": "none",
        "dataloader_num_workers": 0, "dataset_num_proc": 1, "check_model": "false", "no_save_optim": "true",
        "no_save_rng": "true", "masked_softmax_fusion": "false", "bias_dropout_fusion": "false",
        "bias_activation_fusion": "false", "apply_rope_fusion": "false", "add_version": "false",
        "gradient_accumulation_fusion": "false", "attention_softmax_in_fp32": "true", "overlap_p2p_comm": "false",
        "megatron_extra_kwargs": json.dumps({"persist_layer_norm": False}),
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _load_weights(_bridge: Any, models: list[Any], path: str, *_: Any, **__: Any) -> None:
    content = json.loads((Path(path) / "config.json").read_text())
    load_hf_weights(models, read_config(content, path), load_file(Path(path) / "model.safetensors").items())


def main(folder: Path, kind: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(replaced(register, get_gpt_decoder_block_spec=local_block_spec))
        stack.enter_context(replaced(GPTBridge, load_weights=_load_weights))
        stack.enter_context(replaced(MegatronTrainer, save_checkpoint=lambda _: None))
        stack.enter_context(recorded(steps))
        if kind == "installed":
            stack.enter_context(dynapipe.installed())
        elif kind == "planned":
            stack.enter_context(ms_swift.planned_loop(max_tokens=LONGEST))
        MegatronSft(arguments(folder, kind)).main()
    return {"steps": steps}


def recorded(steps: list[dict[str, Any]]) -> Any:
    """Within: what each step of the trainer did, by what it hands to its own loss and its model."""
    own_step, own_forward = MegatronTrainer.run_train_step, MegatronTrainer.get_batch
    cuts: list[list[int]] = []

    def get_batch(trainer: Any, *given: Any) -> Any:
        batch = own_forward(trainer, *given)
        cuts.append(batch["packed_seq_params"].cu_seqlens_q.diff().tolist())
        return batch

    def run_train_step(trainer: Any, *iterators: Any) -> Any:
        cuts.clear()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        metrics: list[Any] = []
        with replaced(trainer, on_log=lambda logs: metrics.append(dict(logs))):
            going_on = own_step(trainer, *iterators)
        half = len(cuts) // 2  # the first stage reads a step's batches ahead, too
        own = cuts[half:] if cuts[:half] == cuts[half:] else cuts
        found = {name: value.tolist() for name, value in metrics[0].items() if isinstance(value, torch.Tensor)}
        steps.append(
            {
                "loss": [found["loss"][0] / found["loss"][1]] if "loss" in found else [],
                "grad_norm": [metrics[0]["grad_norm"]],
                "seconds": time.perf_counter() - started_s,
                "cpu_seconds": time.process_time() - cpu_s,
                "micro_batches": [[*own]],
                "padding": 0,
            }
        )
        print(steps[-1], flush=True)
        return going_on

    return replaced(MegatronTrainer, run_train_step=run_train_step, get_batch=get_batch)
