"""Linear layers whose weight gradient can be put off: the W half of a split backward (B = I + W).

I computes the input gradient, with its collectives, and keeps (input, output gradient) of each linear layer; W turns
those into weight gradients, with no collective. What is not a matrix product (norms, biases, embeddings) stays in I.
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2.)
"""

from __future__ import annotations

from typing import Any

import torch

from dynapipe_ext.executor.stages.chunk_runner import DeferredGradients, deferred_of
from dynapipe_ext.executor.stages.replaced_forward import forward_of, has_other_forward, replace_forward

_PASSES_HOOKS_BY = "dynapipe_passes_hooks_by"  # attribute of a weight


def pass_hooks_by(weight: torch.Tensor) -> None:
    """Have a weight's queue take gradients though it has hooks: they are ours, and need not see these."""
    setattr(weight, _PASSES_HOOKS_BY, True)


def _queue_of(weight: torch.Tensor) -> DeferredGradients | None:
    """Where a gradient goes just now. Autograd alone calls the hooks of a weight."""
    is_hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return None if is_hooked and not hasattr(weight, _PASSES_HOOKS_BY) else deferred_of(weight)


class _Use(torch.autograd.Function):
    """A weight, for one of its uses: the gradient goes where those of linear layers go."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor | None:
        if (queue := _queue_of(ctx.weight)) is None:
            return grads[0]
        queue.take_whole(ctx.weight, grads[0])
        return None


def hand_over_each_use(module: Any) -> None:
    """Have a module that one forward calls several times (an embedding of both sides, biases of all layers) hand over
    the gradient of its weight call by call, where linear layers do; autograd would add them up."""
    own = forward_of(module)

    def once(module: Any, *arguments: Any, **options: Any) -> Any:
        weight, is_lent = module.weight, "weight" in module.__dict__
        module.__dict__["weight"] = _Use.apply(weight)  # type: ignore[no-untyped-call]
        try:
            return own(module, *arguments, **options)
        finally:
            del module.__dict__["weight"]
            if is_lent:
                module.__dict__["weight"] = weight

    replace_forward(module, once)


class _SplitLinear(torch.autograd.Function):
    """y = x W^T (+ b), as torch.nn.functional.linear, or y = x W where the weight is `transposed`.

    A frozen weight has no gradient, and no input is kept for one. Under autocast x and b come in the dtype that it
    computes in, and so does y.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.transposed = transposed
        # Under saved-tensor hooks the weight that comes back from the saved tensors is another object, without the
        # attribute that says where its gradient goes.
        ctx.weight = weight
        output = torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)
        # Where rows were flattened for the bias it is a view, which no operation in its place may follow.
        return torch.ops.aten._unsafe_view(output, output.shape) if x.dim() > 2 and bias is not None else output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y_grad,) = grads
        x, weight = ctx.saved_tensors
        weight = weight.to(y_grad.dtype)
        flat_grad = y_grad.reshape(-1, y_grad.shape[-1])
        x_grad = y_grad.matmul(weight.t() if ctx.transposed else weight) if ctx.needs_input_grad[0] else None
        bias_grad = flat_grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, bias_grad, None
        pair = x.reshape(-1, x.shape[-1]), flat_grad
        inputs, output_grads = pair[::-1] if ctx.transposed else pair  # the gradient of W^T, transposed
        if (queue := _queue_of(ctx.weight)) is not None:
            queue.take(ctx.weight, inputs, output_grads)
            return x_grad, None, bias_grad, None
        return x_grad, output_grads.t().matmul(inputs).to(ctx.weight.dtype), bias_grad, None


def make_linears_splittable(module: torch.nn.Module) -> list[torch.Tensor]:
    """Route every torch.nn.Linear of a module through a function that can put weight gradients off; its weights.

    So are the linear layers of GPT-2 in transformers, which keep their weight transposed and are called Conv1D.
    Results are those of the layer's own; the change is to this module's instances, not to torch. Layers whose forward
    someone else has replaced stay as they are.
    """
    weights: list[torch.Tensor] = []
    for layer in module.modules():
        transposed = _is_conv1d(layer)
        if (transposed or type(layer) is torch.nn.Linear) and not has_other_forward(layer):
            replace_forward(layer, _transposed_linear if transposed else _linear)
            weights.append(layer.weight)  # type: ignore[arg-type]
    return weights


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return _applied(layer, x, transposed=False)


def _transposed_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return _applied(layer, x, transposed=True)


def _applied(layer: Any, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    bias = layer.bias if layer.bias is None else _as_computed(layer.bias)
    output: torch.Tensor = _SplitLinear.apply(_as_computed(x), layer.weight, bias, transposed)  # type: ignore[no-untyped-call]
    return output


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that autocast, where it is on, computes linear layers in; it leaves float64 alone."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x


def _is_conv1d(layer: torch.nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
