"""Evaluation: the loss of a model over a loader whose planner plans forwards alone (`Planner.for_forwards`), once, or
after steps of a training run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from dynapipe_ext.config_data import EvalSettings
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.events import EvalDone
from dynapipe_ext.executor.loader import DynaPipeDataLoader, LoadedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`loss`: over all steps as over one batch, the sum of losses by what they are divided by (target tokens, or
    samples). `real_tokens` of all replicas; `seconds` of this rank, planning that was waited for included."""

    loss: float
    real_tokens: int
    num_steps: int
    seconds: float


def evaluate(
    executor: PipelineExecutor,
    loader: Iterable[LoadedStep],
    num_steps: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> EvalResult:
    """Run up to `num_steps` steps of the loader (None: one whole epoch) and add up their losses.

    All ranks call it alike, with models in evaluation mode. Whatever the plans, the loss is that of one sample at a
    time, up to floating-point reordering. Errors: ConfigError for a plan with backwards, which would train, and for no
    steps; DataError for a loader without any.
    """
    if num_steps is not None and num_steps < 1:
        raise ConfigError(f"num_steps is {num_steps} but must be at least 1, or None for the whole epoch")
    start_s = clock()
    losses, divisors, real_tokens = [], [], 0
    for micro_batches, plan in islice(loader, num_steps):
        if not plan.forward_only:
            raise ConfigError(
                f"the plan of step {plan.step} has backwards, which would change gradients: give the loader"
                " of evaluation planner.for_forwards()"
            )
        losses.append(executor.execute(plan, micro_batches))
        divisors.append(plan.loss_divisor)
        real_tokens += plan.real_tokens
    if not losses:
        raise DataError("the evaluation's loader has no steps: give it more samples, or smaller global batches")
    loss = sum(loss * divisor for loss, divisor in zip(losses, divisors, strict=True)) / sum(divisors)
    return EvalResult(loss=loss, real_tokens=real_tokens, num_steps=len(losses), seconds=clock() - start_s)


class ModuleWithModes(Protocol):
    """What evaluation needs of a torch module."""

    def train(self, mode: bool = True) -> Any: ...


class PeriodicEvaluation:
    """Called after each step of a run, by all ranks alike; evaluates when `settings` have it so, else gives None.

    Every evaluation takes the same global batches by the same plans: the loader, its own, starts from its first place
    each time. `modules` are in evaluation mode (no dropout) meanwhile, and in training mode afterwards.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        loader: DynaPipeDataLoader,
        modules: Sequence[ModuleWithModes],
        settings: EvalSettings,
        *,
        num_steps: int,
    ) -> None:
        self._executor, self._loader, self._modules = executor, loader, modules
        self._settings, self._num_steps = settings, num_steps
        self._start = loader.state_dict()

    def __call__(self, step: int) -> EvalDone | None:
        """`step` is the number from 0 of the step that the weights come from."""
        number = step + 1
        if not self._settings.every or (number % self._settings.every and number < self._num_steps):
            return None
        self._loader.load_state_dict(self._start)
        for module in self._modules:
            module.train(False)
        try:
            result = evaluate(self._executor, self._loader, self._settings.steps or None)
        finally:
            for module in self._modules:
                module.train(True)
        epoch = self._start["epoch"]
        return EvalDone(
            step=step,
            loss=result.loss,
            real_tokens=result.real_tokens,
            num_samples=sum(self._loader.num_samples(epoch, batch) for batch in range(result.num_steps)),
            seconds=result.seconds,
        )
