"""The drop-in: what `megatron.core.pipeline_parallel.get_forward_backward_func()` returns, by proven plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.forward_step import (
    Around,
    BatchIterator,
    ForwardStepStage,
    LoopStep,
    MicroBatchShapes,
)
from dynapipe_ext.executor.drop_in.gradient_sync import StepGradients, check_sync
from dynapipe_ext.executor.drop_in.megatron_lm import (
    check_collects,
    check_collects_planned,
    of_global_batch,
    parsed_arguments,
    rescale_router_losses,
    sent_to_last_rank,
)
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline, megatron_pipeline
from dynapipe_ext.executor.drop_in.planned_data import (
    PlannedSteps,
    apart_from_replicas,
    batch_once,
    planned_steps_in,
)
from dynapipe_ext.executor.drop_in.refusals import check_call, check_config, check_planned_experts, check_shapes
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.drop_in.uniform import UniformPlanner, UniformShape, check_same_on_all_ranks, uniform_plan
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.megatron.stage import RecomputeSwitch, split_megatron_linears


@dataclass(slots=True)
class _PlannedModel:
    """A model's pipeline and the plans that were made for it."""

    pipeline: MegatronPipeline
    plans: dict[UniformShape, ExecutionPlan] = field(default_factory=dict)
    around: Around | None = None  # of planned data's micro-batches


class ForwardBackward:
    """A forward-backward function with Megatron's keywords and return value; all ranks call it alike.

    It keeps, for each model it has seen, its process groups and plans.
    """

    def __init__(self, settings: DropInSettings | None = None) -> None:
        self.settings = settings or DropInSettings()
        self._models: WeakKeyDictionary[Any, _PlannedModel] = WeakKeyDictionary()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run the forwards and backwards of one step: on ranks of the last stage, what the loss functions reported.

        With `PlannedSteps` as data iterator each call runs the next of its steps, and numbers and lengths of
        micro-batches are the plan's; else they are those given, for rows of one length.

        Errors: ConfigError for what is not supported, PlanError where micro-batches do not fit the memory limit,
        ExecutionError for a neighbour that is late.
        """
        from megatron.core.utils import get_model_config

        chunks = list(model) if isinstance(model, Sequence) else [model]
        config = get_model_config(chunks[0])
        check_call(
            num_microbatches=num_microbatches,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
        )
        planned_model = self._planned(chunks, config)
        check_collects(planned_model.pipeline.topology, collect_non_loss_data)
        if not forward_only:
            check_sync(chunks, config)
        step = LoopStep(
            forward_step_func=forward_step_func,
            chunks=chunks,
            iterators=data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks),
            config=config,
            num_micro_batches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=bool(force_all_reduce),
            in_v=planned_model.pipeline.in_v,
        )
        with _timed(config):
            if (planned := planned_steps_in(data_iterator)) is not None:
                return self._run_planned(step, planned_model, *planned)
            return self._run_uniform(step, planned_model, rows=micro_batch_size, seq_len=seq_length)

    def _run_uniform(self, step: LoopStep, model: _PlannedModel, *, rows: int, seq_len: int) -> list[Any]:
        """A step of micro-batches of one shape."""
        if model.pipeline.topology.pp > 1:
            check_shapes(step.config)
        shape = UniformShape(
            num_micro_batches=step.num_micro_batches, rows=rows, seq_len=seq_len, forward_only=step.forward_only
        )
        plan = self._uniform_plan(model, shape, compare=not step.collect_non_loss_data)
        empty: list[Batch] = [{} for _ in plan.micro_batches]
        return _run(step, model.pipeline, plan, empty, lambda number, _: step.iterators[number])

    def _run_planned(self, step: LoopStep, model: _PlannedModel, steps: PlannedSteps, iterator: Any) -> list[Any]:
        """Errors: ConfigError for data that were planned for training where none is, or the other way round."""
        if steps.forward_only != step.forward_only:
            raise ConfigError(
                f"forward_only is {step.forward_only} but these data are planned with {steps.forward_only}:"
                " evaluate on validation data, train on training data"
            )
        check_collects_planned(step.collect_non_loss_data)
        settings, args = self.settings, parsed_arguments()
        if model.around is None:
            check_planned_experts(step.config)
            model.around = _as_planned(step.chunks, model.pipeline, settings.layout)
            _say_planned(step.config, settings.layout)
        if (must_agree := steps.bind(model.pipeline, settings)) is not None:
            check_same_on_all_ranks(must_agree, model.pipeline.device, what="steps of these data")
        if model.pipeline.topology.dp > 1 and not any(model.pipeline.replica_collectives.of_micro_batches):
            step = replace(step, forward_step_func=apart_from_replicas(step.forward_step_func))
        micro_batches, plan = next(iterator)
        reports = _run(
            step, model.pipeline, plan, micro_batches, lambda _, batch: batch_once(batch), around=model.around
        )
        if step.config.num_moe_experts and not step.forward_only and micro_batches:
            rescale_router_losses(step.num_micro_batches / len(micro_batches))
        if step.forward_only and getattr(args, "sft", False):
            return of_global_batch(reports)
        return reports

    def _planned(self, chunks: list[Any], config: Any) -> _PlannedModel:
        if chunks[0] not in self._models:
            check_config(config, chunks)
            settings = self.settings
            if settings.split_backward:
                split_megatron_linears()
            pipeline = megatron_pipeline(
                chunks, config, costs=settings.costs, placement=settings.placement, timeout_s=settings.timeout_s
            )
            self._models[chunks[0]] = _PlannedModel(pipeline)
        return self._models[chunks[0]]

    def _uniform_plan(self, planned: _PlannedModel, shape: UniformShape, *, compare: bool) -> ExecutionPlan:
        """`compare` unless one rank may call alone, as Megatron-LM's evaluation does to collect what is no loss."""
        if shape not in planned.plans:
            planned.plans[shape] = uniform_plan(
                UniformPlanner(
                    pipeline=planned.pipeline,
                    shape=shape,
                    split_backward=self.settings.split_backward,
                    limit_bytes=self.settings.limit_bytes,
                ),
                compare=compare,
            )
            _say(planned.plans[shape], shape)
        return planned.plans[shape]


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """By Megatron's own timer, where the configuration has timers."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()


def _say(plan: ExecutionPlan, shape: UniformShape) -> None:
    """On the first rank, once a shape: nobody should have to guess whose schedule runs."""
    if dist.get_rank() == 0:
        what = "forwards" if shape.forward_only else "forwards and backwards"
        print(
            f"dynapipe: {what} of {shape.num_micro_batches} micro-batches of {shape.rows} x {shape.seq_len} tokens on"
            f" {plan.num_stages} stages by a proven plan, predicted bubble"
            f" {max(0.0, plan.prediction.bubble_ratio):.1%}",
            flush=True,
        )


def _say_planned(config: Any, layout: Layout) -> None:
    """On the first rank: that data are planned, and what a loss of the older kinds then comes to."""
    if dist.get_rank() != 0:
        return
    print(f"dynapipe: samples are cut into planned micro-batches, rows {layout}", flush=True)
    if not config.calculate_per_token_loss:
        print(
            "dynapipe: without --calculate-per-token-loss every micro-batch weighs the same, however few tokens it has,"
            " so the loss depends on the plan: give it, and a loss function that returns (sum, tokens, report)",
            flush=True,
        )


def _as_planned(chunks: Sequence[Any], pipeline: MegatronPipeline, layout: Layout) -> Around:
    """Around each micro-batch: its own shape, and its own recomputation where the model's configuration fixes none."""
    shapes = MicroBatchShapes(chunks, parsed_arguments(), pipeline.device, layout)
    switches = [RecomputeSwitch(chunk) for chunk in chunks] if pipeline.recompute is None else []

    @contextmanager
    def around(micro_batch: MicroBatch, carried: CarriedPiece | None) -> Iterator[None]:
        try:
            for switch in switches:
                switch.set(micro_batch.recompute)
            with shapes.of(micro_batch, carried):
                yield
        finally:
            for switch in switches:
                switch.set("none")

    return around


def _run(
    step: LoopStep,
    pipeline: MegatronPipeline,
    plan: ExecutionPlan,
    micro_batches: Sequence[Batch],
    data: BatchIterator,
    *,
    around: Around = lambda *_: nullcontext(),
) -> list[Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group() if pipeline.in_v else None
    with StepGradients(
        step.chunks, step.config, force_all_reduce=step.force_all_reduce, pipeline_group=group
    ) as gradients:
        stage = ForwardStepStage(step, gradients, data, around)
        PipelineExecutor(stage, pipeline.transport).execute(plan, micro_batches)
    return sent_to_last_rank(stage.reports, pipeline.topology, pipeline.coordinates, pipeline.device)


# What it keeps is keyed by model, weakly: two models, or two trainings in one process, do not meet.
_UNCONFIGURED = ForwardBackward()


def forward_backward_func(**keywords: Any) -> list[Any]:
    """What `get_forward_backward_func()` returns, by plans under default settings: see `ForwardBackward.__call__`."""
    return _UNCONFIGURED(**keywords)
