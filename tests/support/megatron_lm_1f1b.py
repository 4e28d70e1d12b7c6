"""Megatron's own 1F1B on planned micro-batches: what a planned step is to be compared with, schedule against schedule.

Its stages tell one another the shapes of hidden states before each transfer (`variable_seq_lengths`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from dynapipe_ext.executor.drop_in import drop_in
from dynapipe_ext.executor.drop_in.forward_step import LoopStep
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps


def run_by_1f1b(
    function: drop_in.ForwardBackward, step: LoopStep, model: Any, steps: PlannedSteps, iterator: Any
) -> list[Any]:
    """In the place of `ForwardBackward._run_planned`: its micro-batches by their numbers, in Megatron's order."""
    settings = function.settings
    if model.around is None:
        restarts_attention = settings.layout == "packed"
        model.around = drop_in._as_planned(step.chunks, model.pipeline, restarts_attention=restarts_attention)
    steps.bind(model.pipeline, settings)
    micro_batches, plan = next(iterator)
    calls = iter(zip(plan.micro_batches, micro_batches, strict=True))

    def forward_step(_: Any, chunk: Any) -> Any:
        micro_batch, batch = next(calls)
        with model.around(micro_batch, None, None):
            return step.forward_step_func(iter([batch]), chunk)

    run: Callable[..., list[Any]] = (
        schedules.forward_backward_pipelining_without_interleaving
        if model.pipeline.topology.pp > 1
        else schedules.forward_backward_no_pipelining
    )
    config = step.config
    config.variable_seq_lengths, config.moe_token_dispatcher_type = True, "alltoall"
    if config.timers is not None:
        config.timers("forward-backward").stop()  # it starts and stops the timer itself
    reports = run(
        forward_step_func=forward_step,
        data_iterator=None,
        model=list(step.chunks),
        num_microbatches=len(micro_batches),
        seq_length=max(micro_batch.encoder_len for micro_batch in plan.micro_batches),
        micro_batch_size=1,
        forward_only=step.forward_only,
    )
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    return reports
