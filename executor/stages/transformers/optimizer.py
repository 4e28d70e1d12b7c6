"""AdamW over what trains of a rank's parts: one norm over all ranks, float32 masters of 16-bit weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, named_collectives
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import OptimizerPlace, Reductions
from dynapipe_ext.executor.stages.accumulator import describe_norm_fault, gradient_fault
from dynapipe_ext.executor.stages.chunk_runner import gradient_of
from dynapipe_ext.executor.stages.megatron.optimizer import learning_rates, step_count, update_in_one_pass
from dynapipe_ext.executor.stages.transformers.part import TransformersPart, copied_weights
from dynapipe_ext.executor.stages.weight_decay import decaying_weights
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused, SkipPolicy, joined_faults
from dynapipe_ext.settings.tables import OptimizerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TransformersOptimizer:
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
        self._names, self._parallel, self._clip_grad = named, parallel, settings.clip_grad
        self._deterministic = settings.deterministic
        self._device = next(parts[0].parameters()).device
        self._speaks = parts[0].place.is_first  # one rank of each replica
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
        self._rates = learning_rates(self._adam, settings, num_steps=num_steps)
        self._num_updates = 0
        self._policy = SkipPolicy(settings.nan_policy, settings.max_skips)

    def step(self, executed: ExecutedStep) -> float | Refused:
        """Update, if the step may be taken; the gradient norm before clipping, or why nothing was changed.

        Errors: ExecutionError, on all ranks alike and before anything is changed, for a loss or gradient that is not
        finite, where the policy does not skip the step.
        """
        plan = executed.plan
        gradients = {p: gradient_of(p) for p in self._names}
        squares = [float(g.double().square().sum()) for p, g in gradients.items() if p not in self._copies]
        targets = sum(sample.target for m in plan.micro_batches for sample in m.samples)
        is_finite = math.isfinite(sum(squares) + executed.loss)
        own = [sum(squares), float(not is_finite), float(self._speaks) * targets]
        summed = torch.tensor(own, dtype=torch.float64, device=self._device)
        if self._parallel is not None:
            with named_collectives(f"step {plan.step}, check of loss and gradients"):
                self._parallel.sum_over_job(summed)
        total, num_not_finite, num_targets = summed.tolist()
        total /= 1 if self._parallel is None else self._parallel.topology.dp
        norm_fault = describe_norm_fault(math.sqrt(total))
        if num_not_finite or norm_fault:
            reasons = self._said(executed) or norm_fault
            return self._policy.refused(f"step {plan.step + 1} is not finite (loss {executed.loss:g}): {reasons}")
        self._policy.passed()
        if not num_targets:
            return Refused(f"step {plan.step + 1} has no target tokens: it has nothing to learn from")
        norm = math.sqrt(self._exact_total(squares, plan) if self._deterministic else total)
        scale = self._clip_grad / (norm + 1e-6) if 0 < self._clip_grad < norm else 1.0
        self._update(gradients, scale)
        return norm

    def _exact_total(self, squares: list[float], plan: ExecutionPlan) -> float:
        """The sum over all weights of the model, as real numbers rounded once: no matter on which ranks they lie."""
        own = [] if plan.dp_rank else squares
        with named_collectives(f"step {plan.step}, norm of all gradients"):
            of_ranks = [own] if self._parallel is None else gather_json(own, self._device)
        # Joined ranks have the same: a sum of so many, a power of two, is rounded as one of them.
        return math.fsum(square for rank in of_ranks for square in rank) / plan.width

    def _update(self, gradients: dict[torch.nn.Parameter, torch.Tensor], scale: float) -> None:
        for parameter, gradient in gradients.items():
            self._masters[parameter].grad = gradient.float() * scale
        self._adam.step()
        self._rates.step(1)
        self._num_updates += 1
        with torch.no_grad():
            for parameter, master in self._masters.items():
                master.grad = None
                if master is not parameter:
                    parameter.copy_(master)

    def _said(self, executed: ExecutedStep) -> str:
        """What all ranks see of a step that is not finite."""
        own = list(self._faults(executed))
        return joined_faults([own] if self._parallel is None else gather_json(own, self._device))

    def _faults(self, executed: ExecutedStep) -> Iterator[str]:
        yield from executed.loss_faults()
        for parameter, name in self._names.items():
            if fault := gradient_fault(name, gradient_of(parameter), is_exact=self._deterministic):
                yield fault
                return

    @property
    def place(self) -> OptimizerPlace:
        """What it holds besides tensors."""
        return OptimizerPlace(self._num_updates, {"num_steps": self._rates.num_steps})

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

        Learning rates follow the settings of now from where the schedule stood.
        """
        for parameter, name in self._names.items():
            master = self._masters[parameter]
            if master is not parameter:
                with torch.no_grad():
                    master.copy_(read(f"master.{name}", master))
            if place.num_updates:
                moments = {kind: read(f"{kind}.{name}", master) for kind in _MOMENTS}
                self._adam.state[master] = {"step": step_count(self._adam, master, place.num_updates), **moments}
        self._num_updates = place.num_updates
        self._rates.num_steps = int(place.schedule["num_steps"])
        self._rates.step(0)

    def state_bytes(self) -> int:
        """Adam's moments and the masters of 16-bit weights on this rank."""
        return sum(p.numel() * (8 if master is p else 12) for p, master in self._masters.items())

    @property
    def lr(self) -> float:
        return float(self._adam.param_groups[0]["lr"])


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().float().clone())
