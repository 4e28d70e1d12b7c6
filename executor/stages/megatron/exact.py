"""Megatron's gradients, and their norm, with the same bits whatever the plan: the step of deterministic mode.

What differs between plans is the order of micro-batches, the replica that runs one, the stage and rank that hold a
layer, and on how many ranks a tied embedding lies. None of it changes an exact sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.stages.accumulator import ExactSums
from dynapipe_ext.executor.stages.chunk_runner import GradientAccumulator, Sum
from dynapipe_ext.executor.stages.megatron.stage import Chunks, own_parameters, unwrapped
from dynapipe_ext.executor.stages.split_linear import pass_hooks_by

_EPSILON = 1e-6  # of Megatron's clipping


def sum_tied_copies(chunks: Chunks, sums: ExactSums) -> None:
    """Add up the sums of a tied embedding's two copies, on the first and on the last rank of a pipeline."""
    from megatron.core import parallel_state

    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() < 2 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    holder = unwrapped(chunks[0 if parallel_state.get_pipeline_model_parallel_rank() == 0 else -1])
    if holder.share_embeddings_and_output_weights:
        sums.sum_over(over(group), [holder.shared_embedding_or_output_weight()])


class ExactMegatronGradients(GradientAccumulator):
    """Exact sums, each use of a weight by itself, rounded once into DDP's float32 `main_grad` buffers.

    `sum_copies(chunks, sums)` adds up the sums of weights that several ranks of a pipeline hold. With Megatron's
    distributed optimizer every rank has all sums of its weights, of which the optimizer takes its part.
    Errors: ConfigError for experts, whose tokens come from whichever micro-batches run beside one another.
    """

    by_use = True

    def __init__(self, chunks: Chunks, *, sum_copies: Callable[[Chunks, ExactSums], None] = sum_tied_copies) -> None:
        if chunks[0].config.num_moe_experts:
            raise ConfigError(
                f"a model of {chunks[0].config.num_moe_experts} experts has no deterministic mode: leave deterministic"
                " out, or take a model without experts"
            )
        self._chunks, self._sum_copies, self._is_acting = chunks, sum_copies, False
        self._sums = ExactSums(p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        for parameter in self._sums.parameters:
            # It comes before DDP's own hook, which then finds nothing.
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            pass_hooks_by(parameter)

    def begin(self, plan: ExecutionPlan) -> None:
        self._sums.clear()
        for parameter in self._sums.parameters:
            parameter.grad = None  # Megatron's float32 optimizer leaves it aliased to `main_grad`

    def backward(self, outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor] | None) -> None:
        self._is_acting = True
        try:
            super().backward(outputs, output_grads)
        finally:
            self._is_acting = False

    def _take(self, parameter: torch.Tensor) -> None:
        if self._is_acting and parameter.grad is not None:  # a backward that is not a stage's is DDP's
            self._sums.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self) -> None: ...

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        self._sums.add(weight, gradient)

    def reduce(self) -> None:
        from megatron.core import parallel_state

        sums = self._sums
        sums.sum_all(over(parallel_state.get_data_parallel_group(with_context_parallel=True)))
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        if tensor_parallel.size() > 1 and (partial_sums := list(_partial_over_tensor_parallel(self._chunks))):
            sums.sum_over(over(tensor_parallel), partial_sums)
        self._sum_copies(self._chunks, sums)
        for parameter in sums.parameters:
            parameter.main_grad.copy_(sums.value(parameter))  # type: ignore[attr-defined]


def over(group: Any) -> Sum:
    """The sum over a process group."""
    return partial(dist.all_reduce, group=group)


def _partial_over_tensor_parallel(chunks: Chunks) -> Iterator[torch.Tensor]:
    """Weights that tensor parallel ranks hold alike but have parts of the gradient of: norms of rows that sequence
    parallelism cuts, and of heads (as `finalize_model_grads`)."""
    for chunk in chunks:
        config = chunk.config
        for name, parameter in chunk.named_parameters():
            of_rows = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
            of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
            if parameter.requires_grad and (of_rows or of_heads):
                yield parameter


class ExactNorm:
    """The norm of all gradients of a model whose `main_grad` holds them, and their clipping by it.

    A float64 sum of squares for each weight, or for each tensor parallel rank's part of one; these are added up as real
    numbers and rounded once, so it does not show on which ranks they lie. Every rank makes and calls it alike.
    """

    def __init__(self, chunks: Chunks) -> None:
        from megatron.core import parallel_state

        self._parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        self._counted = own_parameters(chunks)
        self._group: Any = parallel_state.get_model_parallel_group()
        self._device = next(chunks[0].parameters()).device
        most = torch.tensor(len(self._counted), device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        self._most = int(most)

    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to a norm of `max_norm` (0: leave them); their norm before."""
        norm = self._norm()
        if 0 < max_norm < norm + _EPSILON:
            for parameter in self._parameters:
                parameter.main_grad.mul_(max_norm / (norm + _EPSILON))
        return norm

    def _norm(self) -> float:
        squares = torch.zeros(self._most, dtype=torch.float64, device=self._device)
        for number, parameter in enumerate(self._counted):
            squares[number] = parameter.main_grad.double().square().sum()
        of_ranks = [torch.empty_like(squares) for _ in range(self._group.size())]
        dist.all_gather(of_ranks, squares, group=self._group)
        return math.sqrt(math.fsum(torch.cat(of_ranks).tolist()))
