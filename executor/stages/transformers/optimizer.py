"""AdamW over what trains of a rank's parts: one norm over all ranks, float32 masters of 16-bit weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import OptimizerPlace, Reductions
from dynapipe_ext.executor.stages.accumulator import gradient_fault
from dynapipe_ext.executor.stages.chunk_runner import gradient_of
from dynapipe_ext.executor.stages.guarded_optimizer import GuardedOptimizer, make_step_count, update_in_one_pass
from dynapipe_ext.executor.stages.transformers.part import TransformersPart, copied_weights
from dynapipe_ext.executor.stages.weight_decay import decaying_weights
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.settings.tables import OptimizerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TransformersOptimizer(GuardedOptimizer):
    """AdamW, its learning rates those of Megatron's schedule by the same settings; frozen weights have no state.

    Every rank of the job has one and calls `step` alike. Gradients are those of a `TransformersStage` over the same
    `parallel`. Norms and biases do not decay.
    """

    def __init__(
        self,
        parts: Sequence[TransformersPart],
        settings: OptimizerSettings,
        *,
        num_steps: int,
        parallel: Reductions | None = None,
    ) -> None:
        named = {p: name for part in parts for name, p in part.model.named_parameters() if p.requires_grad}
        if not named and parallel is None:
            raise ConfigError("no weight of the model trains: give adapters, or weights that require gradients")
        self._names, self._clip_grad, self._deterministic = named, settings.clip_grad, settings.deterministic
        self._squares: list[float] = []
        self._copies = copied_weights(parts)
        self._masters = {p: p if p.dtype == torch.float32 else _master(p) for p in named}
        decaying = set[torch.nn.Parameter]().union(*(decaying_weights(part.model) for part in parts))
        groups: list[dict[str, Any]] = [
            {"params": [master for p, master in self._masters.items() if p in decaying]},
            {"params": [master for p, master in self._masters.items() if p not in decaying], "wd_mult": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
        )
        update_in_one_pass(self._adam)
        super().__init__(
            self._adam,
            settings,
            num_steps=num_steps,
            device=next(parts[0].parameters()).device,
            sum_over_job=parallel.sum_over_job if parallel else None,
            num_copies=parallel.topology.dp if parallel else 1,
            counts_targets=parts[0].place.is_first,
        )

    def sum_squares(self) -> float:
        """Return the sum over the weights that this rank counts: copies count on another one."""
        squares = [gradient_of(p).double().square().sum() for p in self._names if p not in self._copies]
        self._squares = torch.stack(squares).tolist() if squares else []
        return sum(self._squares)

    def list_faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        """Yield losses, then the first gradient."""
        yield from ((0, fault) for fault in executed.loss_faults())
        faults = (gradient_fault(n, gradient_of(p), is_exact=self._deterministic) for p, n in self._names.items())
        yield from ((1, fault) for fault in islice(filter(None, faults), 1))

    def change_weights(self, norm: float, plan: ExecutionPlan) -> float:
        norm = math.sqrt(self._sum_exactly(plan)) if self._deterministic else norm
        scale = self._clip_grad / (norm + 1e-6) if 0 < self._clip_grad < norm else 1.0
        for parameter, master in self._masters.items():
            master.grad = gradient_of(parameter).float() * scale
        self._adam.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                master.grad = None
                if master is not parameter:
                    parameter.copy_(master)
        return norm

    def _sum_exactly(self, plan: ExecutionPlan) -> float:
        """Return the squared norm of all weights of the model, summed as real numbers and rounded once: no matter on
        which ranks they lie."""
        own = [] if plan.dp_rank else self._squares
        of_ranks = [own] if self._sum_over_job is None else gather_json(own, self._device)
        # Joined ranks have the same: a sum of so many, a power of two, is rounded as one of them.
        return math.fsum(square for rank in of_ranks for square in rank) / plan.width

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments, once there are any, and masters of 16-bit weights, by kind and the weight's name in the whole model.
        A copy's are left to the rank that has the weight itself."""
        tensors = {}
        for parameter, name in self._names.items():
            master = self._masters[parameter]
            if parameter in self._copies:
                continue
            if master is not parameter:
                tensors[f"master.{name}"] = master.detach()
            tensors |= {f"{kind}.{name}": self._adam.state[master][kind] for kind in _MOMENTS if self._num_updates}
        return tensors

    def restore(self, place: OptimizerPlace, read: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Take on the state of `place`; `read(key, like)` gives the tensors that `tensors` gave.

        Learning rates follow the settings of now.
        """
        for parameter, name in self._names.items():
            master = self._masters[parameter]
            if master is not parameter:
                with torch.no_grad():
                    master.copy_(read(f"master.{name}", master))
            if place.num_updates:
                moments = {kind: read(f"{kind}.{name}", master) for kind in _MOMENTS}
                self._adam.state[master] = {"step": make_step_count(self._adam, master, place.num_updates), **moments}
        self.restore_place(place)

    def state_bytes(self) -> int:
        """Adam's moments and the masters of 16-bit weights on this rank."""
        return sum(p.numel() * (8 if master is p else 12) for p, master in self._masters.items())


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().float().clone())
