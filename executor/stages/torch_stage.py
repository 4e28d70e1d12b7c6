"""A Stage made of plain torch modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages.accumulator import GradientAccumulator, PlainAccumulator
from dynapipe_ext.executor.stages.split_linear import (
    DeferredGradients,
    Work,
    deferred_bytes,
    make_linears_splittable,
)

LossFunction = Callable[[torch.Tensor, Batch], torch.Tensor]


class TorchStage:
    """Split backwards put off the weight gradients of torch.nn.Linear layers of `modules` that are torch modules.

    `modules[stage]` maps (hidden states, or the batch's "tokens" on stage 0; batch) to hidden states or outputs.

    `loss(output, batch)` returns the weighted sum over the micro-batch's positions (weights in "loss_weights"); the
    stage divides it by the plan's loss divisor. `parameters` default to those of the modules. `group` is the
    data-parallel process group of this stage's replicas; `world` says that torch.distributed spans the job, so that
    every rank returns the loss of the global batch.
    """

    def __init__(
        self,
        modules: Mapping[int, Callable[[torch.Tensor, Batch], torch.Tensor]],
        loss: LossFunction,
        *,
        parameters: Iterable[torch.nn.Parameter] | None = None,
        accumulator: GradientAccumulator | None = None,
        group: Any = None,
        world: bool = False,
    ) -> None:
        self._modules, self._loss, self._world = dict(modules), loss, world
        if parameters is None:
            modules_with_weights = [m for m in self._modules.values() if isinstance(m, torch.nn.Module)]
            parameters = [p for module in modules_with_weights for p in module.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        self._accumulator = accumulator or PlainAccumulator(trained, group)
        linears = [
            w for m in self._modules.values() if isinstance(m, torch.nn.Module) for w in make_linears_splittable(m)
        ]
        self._deferred = DeferredGradients(linears, _add_to_grad)
        self._device = trained[0].device if trained else torch.device("cpu")

    def start_step(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._batches: dict[int, Batch] = {}
        self._live: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._put_off: dict[tuple[int, int], Work] = {}
        self._accumulator.begin()

    def load(self, micro_batch: int, batch: Batch) -> None:
        self._batches[micro_batch] = batch

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        batch = self._batches[micro_batch]
        x = inputs[0].detach().requires_grad_() if inputs else None
        output = self._modules[stage](batch["tokens"] if x is None else x, batch)
        if stage == self._plan.num_stages - 1:
            output = self._loss(output, batch) / self._plan.loss_divisor
            self._loss_sum += output.detach().double()
            self._live[stage, micro_batch] = (x, output)
            return ()
        self._live[stage, micro_batch] = (x, output)
        return (output.detach(),)

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        x, output = self._live.pop((stage, micro_batch))
        torch.autograd.backward(output, output_grads[0] if output_grads else None)
        self._accumulator.add()
        if x is None:
            return ()
        assert x.grad is not None
        return (x.grad,)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        with self._deferred.deferring() as work:
            input_grads = self.backward(stage, micro_batch, output_grads)
        self._put_off[stage, micro_batch] = work
        return input_grads

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._deferred.run(self._put_off.pop((stage, micro_batch)))
        self._accumulator.add()

    def finish_step(self) -> float:
        self._accumulator.reduce()
        self._batches.clear()
        if self._world:
            dist.all_reduce(self._loss_sum)
        return float(self._loss_sum)

    def held_bytes(self) -> int:
        tensors = [tensor for pair in self._live.values() for tensor in pair if tensor is not None]
        put_off = sum(deferred_bytes(work) for work in self._put_off.values())
        return put_off + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
