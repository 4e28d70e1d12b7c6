"""Megatron's tensor-parallel linear layers with a weight gradient that can be put off (see split_linear.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages.split_linear import deferred_of

_NAME = "LinearWithGradAccumulationAndAsyncCommunication"


def split_megatron_linears() -> None:
    """Put a function of the same arithmetic in the place of Megatron's; idempotent.

    Without a stage that defers, it calls Megatron's own backward: nothing changes for other users in this process.
    """
    from megatron.core.tensor_parallel import layers
    from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

    original = getattr(layers, _NAME)
    if getattr(original, "is_splittable", False):
        return

    class SplittableLinear(torch.autograd.Function):
        """I: input gradient and its collective. W, later: output_grad^T x input, over the gathered sequence."""

        is_splittable = True

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            # Under saved-tensor hooks the weight that comes back from the saved tensors is another object, without the
            # attribute that says where its gradient goes.
            ctx.weight = arguments[1]
            ctx.num_others = len(arguments) - 3  # 6, and one more from megatron-core 0.19 on
            return original.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors[0], ctx.weight
            queue = deferred_of(weight)
            if queue is None or ctx.grad_output_buffer is not None:
                return original.backward(ctx, *grads)
            (y_grad,) = grads
            gathered = _gathered(x, ctx.tp_group) if ctx.sequence_parallel else x
            x_grad = y_grad.matmul(weight)
            flat_grad, flat_x = prepare_input_tensors_for_wgrad_compute(y_grad, gathered)
            if ctx.allreduce_dgrad:
                dist.all_reduce(x_grad, group=ctx.tp_group)
            elif ctx.sequence_parallel:
                shard = torch.empty_like(x)
                dist.reduce_scatter_tensor(shard, x_grad, group=ctx.tp_group)
                x_grad = shard
            queue.take(weight, flat_x, flat_grad)
            bias_grad = flat_grad.sum(dim=0) if ctx.use_bias else None
            return x_grad, None, bias_grad, *[None] * ctx.num_others

    setattr(layers, _NAME, SplittableLinear)


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole sequence. It is kept until W, so it cannot live in the buffer that Megatron shares between layers."""
    whole = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole
