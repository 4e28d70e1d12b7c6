"""megatron-core's optimizer and learning-rate schedule behind two calls."""

from __future__ import annotations

from typing import Any

from dynapipe_ext.config import OptimizerSettings
from dynapipe_ext.errors import ExecutionError


class MegatronOptimizer:
    """Megatron's optimizer and learning-rate schedule behind two calls."""

    def __init__(self, ddp: Any, config: Any, settings: OptimizerSettings, *, num_steps: int) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=settings.distributed,
            ),
            [ddp],
        )
        self._has_masters = bool(config.bf16)
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=min(settings.warmup_steps, num_steps - 1),
            lr_decay_steps=num_steps,
            lr_decay_style="cosine",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=num_steps,
            wd_incr_style="constant",
        )
        self._scheduler.step(1)  # at step 0 Megatron's warm-up has a learning rate of zero

    def step(self) -> float:
        """Clip, update, advance the schedule; returns the gradient norm before clipping."""
        updated, grad_norm, _ = self._optimizer.step()
        if not updated:
            raise ExecutionError("the optimizer refused the step: a gradient is not finite; lower the learning rate")
        self._scheduler.step(1)
        return float(grad_norm) if grad_norm is not None else 0.0

    def state_bytes(self) -> int:
        """Adam's moments and the master weights that the optimizer holds on this rank."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        num_parameters = sum(int(p.numel()) for p in parameters)
        return num_parameters * (12 if self._has_masters else 8)

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])
