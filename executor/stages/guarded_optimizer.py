"""What the optimizers of all backends share: the guard against steps that are not finite, and learning rates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from dynapipe_ext.errors import named_collectives
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.executor.stages.accumulator import describe_norm_fault
from dynapipe_ext.executor.stages.chunk_runner import Sum
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused, SkipPolicy, joined_faults
from dynapipe_ext.settings.tables import LrSchedule, OptimizerSettings

_LR_STYLES: dict[LrSchedule, str] = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
_WSD_DECAY = 0.1  # of all steps


class GuardedOptimizer(ABC):
    """A rank's optimizer. It refuses steps whose loss or gradients are not finite (see `SkipPolicy`), or that have no
    target token. Every rank of the job has one and calls `step` alike.

    `optimizer` has `param_groups` as torch's. `sum_over_job` adds up a tensor of all ranks in place; None: this rank is
    all of the job. `num_copies`: on how many ranks each gradient counts in `sum_squares`. `counts_targets`: one rank of
    each replica does. `has_rates`: learning rates follow the schedule of `settings`, else one of the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Any,
        settings: OptimizerSettings,
        *,
        num_steps: int,
        device: torch.device,
        sum_over_job: Sum | None,
        num_copies: int = 1,
        counts_targets: bool = True,
        has_rates: bool = True,
    ) -> None:
        self._inner, self._device = optimizer, device
        self._sum_over_job, self._num_copies, self._counts_targets = sum_over_job, num_copies, counts_targets
        self._policy = SkipPolicy(settings.nan_policy, settings.max_skips)
        self._rates = make_learning_rates(optimizer, settings, num_steps=num_steps) if has_rates else None
        self._num_updates = 0

    @abstractmethod
    def sum_squares(self) -> float:
        """Return the squared norm of this rank's gradients; not finite, or too large, if they cannot be taken."""

    @abstractmethod
    def list_faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        """Yield what this rank sees of a step that is not finite, each with its rank among reasons, the best first."""

    @abstractmethod
    def change_weights(self, norm: float, plan: ExecutionPlan) -> float | str:
        """Clip and change the weights; return the gradient norm before, or why nothing was changed. `norm` is made of
        `sum_squares` over all ranks."""

    def step(self, executed: ExecutedStep) -> float | Refused:
        """Update, if the step may be taken; return the gradient norm before clipping, or why nothing was changed.

        Raises NotFiniteError, on all ranks alike and before anything is changed, for a loss or gradient that is not
        finite, if the policy does not skip the step.
        """
        plan = executed.plan
        num_targets = sum(sample.target for m in plan.micro_batches for sample in m.samples) * self._counts_targets
        agreed = [float(not math.isfinite(executed.loss)), float(num_targets), self.sum_squares()]
        if self._sum_over_job is not None:
            summed = torch.tensor(agreed, dtype=torch.float64, device=self._device)
            with named_collectives(f"step {plan.step}, check of loss and gradients"):
                self._sum_over_job(summed)
            agreed = summed.tolist()
        num_not_finite, all_targets, squares = agreed
        norm = math.sqrt(squares / self._num_copies)
        norm_fault = describe_norm_fault(norm)
        if num_not_finite or norm_fault:
            return self._refuse(executed, self._gather_faults(executed) or norm_fault)
        if not all_targets:
            self._policy.passed()
            return Refused(f"step {plan.step + 1} has no target tokens: it has nothing to learn from")
        with named_collectives(f"step {plan.step}, update"):
            changed = self.change_weights(norm, plan)
        if isinstance(changed, str):
            return self._refuse(executed, changed)
        self._policy.passed()
        self._count_update()
        return changed

    def _refuse(self, executed: ExecutedStep, reasons: str) -> Refused:
        return self._policy.refused(f"step {executed.plan.step + 1} is not finite (loss {executed.loss:g}): {reasons}")

    def _gather_faults(self, executed: ExecutedStep) -> str:
        own = list(self.list_faults(executed))
        of_ranks = [own] if self._sum_over_job is None else gather_json(own, self._device)
        return joined_faults([[fault for _, fault in sorted(chain.from_iterable(of_ranks), key=itemgetter(0))]])

    def _count_update(self) -> None:
        self._num_updates += 1
        if self._rates is not None:
            self._rates.step(1)

    @property
    def place(self) -> OptimizerPlace:
        """What it holds in addition to tensors."""
        return OptimizerPlace(self._num_updates, {"num_steps": self._rates.num_steps} if self._rates else {})

    def restore_place(self, place: OptimizerPlace) -> None:
        """Continue from `place`: learning rates follow the settings of now from there."""
        self._num_updates = place.num_updates
        if self._rates is not None:
            self._rates.num_steps = int(place.schedule["num_steps"])
            self._rates.step(0)

    @property
    def lr(self) -> float:
        return float(self._inner.param_groups[0]["lr"])


def update_in_one_pass(adam: torch.optim.Optimizer) -> None:
    """Have torch's Adam update the weights of a GPU by one kernel, in a third of the time and without copies of its
    states; other optimizers stay as they are."""
    weights = [weight for group in adam.param_groups for weight in group["params"]]
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW) and weights and all(one.is_cuda for one in weights):
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False


def make_step_count(adam: torch.optim.Optimizer, weight: torch.Tensor, num_updates: int) -> torch.Tensor:
    """Return a weight's number of updates as torch's Adam holds it: next to the weight if one kernel updates."""
    is_one_pass = any(group.get("fused") for group in adam.param_groups)
    return torch.tensor(float(num_updates), device=weight.device if is_one_pass else None)


def make_learning_rates(optimizer: Any, settings: OptimizerSettings, *, num_steps: int) -> Any:
    """Return Megatron's schedule of an optimizer's learning rates over a run, at its first step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    fraction = settings.warmup_fraction
    warmup_steps = round(fraction * num_steps) if fraction else settings.warmup_steps
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(num_steps, warmup_steps + 1),  # a run may end before its warm-up
        lr_decay_style=_LR_STYLES[settings.lr_schedule],
        wsd_decay_steps=max(1, round(_WSD_DECAY * num_steps)),
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
    )
    schedule.step(1)  # at step 0 Megatron's warm-up has a learning rate of zero
    return schedule
