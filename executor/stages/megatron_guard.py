"""Decides on all ranks together, before the weights change, whether a step may be taken.

Megatron's optimizer without a loss scaler looks at no gradient and reports success.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.stages.collectives import gather_json, named_collectives
from dynapipe_ext.executor.stages.megatron import Chunks
from dynapipe_ext.executor.stages.megatron_weights import global_names
from dynapipe_ext.executor.update import ExecutedStep, NanPolicy, Refused, SkipPolicy

_MOST_SAMPLES = 8


class StepGuard:
    """Refuses steps whose loss or gradients are not finite (see `SkipPolicy`), or that have no target token; one per
    rank."""

    def __init__(self, chunks: Chunks, policy: NanPolicy = "stop", max_skips: int = 0) -> None:
        self._chunks, self._policy = chunks, SkipPolicy(policy, max_skips)
        self._device = next(chunks[0].parameters()).device

    def check(self, executed: ExecutedStep) -> Refused | None:
        """The same answer, or error, on every rank: one sum of two numbers, and more only where it is bad."""
        plan = executed.plan
        own = _targets(plan) if dist.get_rank() == _first_rank_of_replica() else 0
        agreed = torch.tensor([not self._is_finite(executed.loss), own], dtype=torch.int64, device=self._device)
        with named_collectives(f"step {plan.step}, check of loss and gradients"):
            dist.all_reduce(agreed)
        num_not_finite, num_targets = agreed.tolist()
        if num_not_finite:
            return self._refuse(executed)
        self._policy.passed()
        if num_targets == 0:
            return Refused(f"step {plan.step} has no target tokens: it has nothing to learn from")
        return None

    def _is_finite(self, loss: float) -> bool:
        """Of the loss, and of the gradient buffers by their largest magnitudes, which no sum can overflow."""
        held = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        buffers = [buffer.grad_data for buffer in held]
        largest = [torch.linalg.vector_norm(buffer, torch.inf) for buffer in buffers if buffer.numel()]
        return math.isfinite(loss) and all(math.isfinite(value) for value in map(float, largest))

    def _refuse(self, executed: ExecutedStep) -> Refused:
        step = executed.plan.step
        found = [fault for rank in gather_json(list(self._faults(executed)), self._device) for fault in rank]
        faults = list(dict.fromkeys(fault for _, fault in sorted(map(tuple, found))))
        said = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        reason = f"step {step} is not finite (loss {executed.loss:g}): {said}"
        return self._policy.refused(reason)

    def _faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        """What this rank sees, each with its order of worth: losses, then weights, then the gradient that the backward
        came to first (the last layer's)."""
        plan, me = executed.plan, dist.get_rank()
        if _counts_losses():
            for micro_batch, loss in executed.losses.items():
                if not math.isfinite(loss):
                    samples = [sample.index for sample in plan.micro_batches[micro_batch].samples]
                    shown = ", ".join(map(str, samples[:_MOST_SAMPLES])) + (", …" * (len(samples) > _MOST_SAMPLES))
                    where = f"micro-batch {micro_batch} of replica {plan.dp_rank}"
                    yield 0, f"the loss of {where} (samples {shown}) is {loss:g}"
        named = list(self._named_parameters(plan.stages))
        for _, name, parameter in named:
            if not torch.isfinite(parameter).all():
                yield 1, f"the weight {name} already was not finite on rank {me}"
                return
        for stage, name, parameter in reversed(named):
            if not torch.isfinite(parameter.main_grad).all():  # type: ignore[attr-defined]
                yield 2 + plan.num_stages - stage, f"the gradient of {name} is not finite on rank {me}"
                return

    def _named_parameters(self, stages: Sequence[int]) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
        """With their stages and their names in the whole model, in forward order."""
        for stage, chunk in zip(stages, self._chunks, strict=True):
            for name, parameter in global_names(chunk.module):
                if parameter.requires_grad:
                    yield stage, name, parameter


def _targets(plan: ExecutionPlan) -> int:
    return sum(sample.target for micro_batch in plan.micro_batches for sample in micro_batch.samples)


def _first_rank_of_replica() -> int:
    """The global rank that speaks for this rank's replica: the first of its tensor and pipeline parallel ranks."""
    from megatron.core import parallel_state

    ranks: list[int] = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    return min(ranks)


def _counts_losses() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)
