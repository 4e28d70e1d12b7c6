"""A complete training script to copy from, on megatron.core alone: its model, data parallelism and optimizer, with
steps of uneven samples by proven plans.

    dynapipe preprocess --input corpus.jsonl --tokenizer bytes --output prepared
    torchrun --nproc-per-node 4 -m dynapipe_ext.launch.megatron_core --data prepared --tp 2 --pp 2

Only two things come from this package: `PlannedSteps` for the data, and `ForwardBackward` in the place of Megatron's
schedule. Everything else follows megatron-core's examples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.batch.micro_batches import round_up
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.launch.processes.env import own_device, rank_env
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE

_SEED = 1234


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train on a rank of torchrun. Ranks of the last stage return the loss of every step, in nats a token."""
    args = _parser().parse_args(argv)
    env = rank_env()
    device = own_device(env.local_rank)
    if device.type == "cpu":
        megatron_cpu.install()
    dist.init_process_group(process_group_backend(device))
    try:
        return _train(args, device)
    finally:
        dist.destroy_process_group()


def _train(args: argparse.Namespace, device: torch.device) -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model_parallel_cuda_manual_seed(_SEED)
    torch.manual_seed(_SEED)
    dataset = TokenDataset.open(args.data)
    model, config = _model(args, dataset, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss

    limit_gb = args.memory_limit_gb
    settings = dynapipe.DropInSettings(memory_limit_gb=limit_gb, layout=args.layout, split_backward=args.split_backward)
    forward_backward_func = dynapipe.ForwardBackward(settings)
    steps = dynapipe.PlannedSteps(dataset, batch_size=args.batch_size, seed=_SEED)
    losses = []
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=steps,
            model=model,
            num_microbatches=1,  # ignored: the plan sets numbers and shapes
            seq_length=int(dataset.lengths[:, 0].max()),
            micro_batch_size=1,
        )
        optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses.append(float(total[0] / total[1]))
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"step {step}: loss {losses[-1]:.6f}, {len(reports)} micro-batches", flush=True)
    return losses


def _model(args: argparse.Namespace, dataset: TokenDataset, device: torch.device) -> tuple[Any, Any]:
    """A rank's stage of a GPT, wrapped for data parallelism, and its configuration."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # every target token weighs the same in any micro-batch
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=round_up(dataset.vocab_size, VOCAB_MULTIPLE),
        max_sequence_length=int(dataset.lengths[:, 0].max()),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(device, dtype)  # torch creates its norms, which Megatron uses without Apex, in float32
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(config, ddp_config, model)
    wrapped.broadcast_params()
    return wrapped, config


def forward_step(data_iterator: Iterator[Mapping[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """A micro-batch on this rank's stage. Stages in the middle get no tensors and need none."""
    device = next(model.parameters()).device
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(data_iterator).items()}
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    mask: Any = batch.get("loss_mask")  # only the last stage computes a loss
    return output, partial(loss_func, mask)


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum over target tokens, their number, and both for the log."""
    loss, num_tokens = (output.float() * loss_mask).sum(), loss_mask.sum()
    return loss, num_tokens.to(torch.int), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynapipe_ext.launch.megatron_core", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", required=True, metavar="DIR", help="a folder that `dynapipe preprocess` wrote")
    for name, default in {"tp": 1, "pp": 1, "layers": 4, "hidden-size": 64, "heads": 4, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a global batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--memory-limit-gb", type=float, help="of a rank (default: that of the device)")
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    parser.add_argument("--split-backward", action="store_true")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
