"""The drop-in: what `megatron.core.pipeline_parallel.get_forward_backward_func()` returns, by proven plans."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch
from dynapipe_ext.batch.topology import list_cp_degrees
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.executor.device import check_same_plans
from dynapipe_ext.executor.drop_in.entry_shapes import (
    EntryShape,
    in_any_order,
    in_order_of_entry,
    shapes_of_entries,
    with_adjusted_shapes,
)
from dynapipe_ext.executor.drop_in.forward_step import (
    Around,
    BatchIterator,
    ForwardStepStage,
    LoopStep,
    MicroBatchShapes,
)
from dynapipe_ext.executor.drop_in.gains import GainLog
from dynapipe_ext.executor.drop_in.given_micro_batches import (
    GivenPlanner,
    GivenShapes,
    given_plan,
)
from dynapipe_ext.executor.drop_in.gradient_sync import StepGradients, check_sync
from dynapipe_ext.executor.drop_in.groups import groups_of_call, ranks_in_groups
from dynapipe_ext.executor.drop_in.measured_costs import STEPS_BEFORE, StepMeasurement, with_measured_costs
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
    replicas_meet,
)
from dynapipe_ext.executor.drop_in.refusals import check_config, check_planned_experts
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.joined_ranks import Joined, JoinedRanks, join_ranks
from dynapipe_ext.executor.stages.megatron.stage import RecomputeSwitch, split_megatron_linears

_MOST_PLANS = 64  # kept of a model: lengths may differ from step to step


@dataclass(slots=True)
class _PlannedModel:
    """A model's pipeline and the plans that were made for it."""

    pipeline: MegatronPipeline
    groups: Any  # a ProcessGroupCollection
    plans: dict[GivenShapes, ExecutionPlan] = field(default_factory=dict)  # the latest
    around: Around | None = None  # of planned data's micro-batches
    joined: Joined = field(default_factory=dict)  # the ranks that planned data may join, by width
    num_uncounted_steps: int = 0  # of planned data, before its costs were measured


class ForwardBackward:
    """A forward-backward function with Megatron's keywords and return value; all ranks call it alike.

    It keeps, for each model it has seen, its process groups and plans.
    """

    def __init__(self, settings: DropInSettings | None = None, gains: GainLog | None = None) -> None:
        self.settings, self._gains = settings or DropInSettings(), gains
        self._models: WeakKeyDictionary[Any, _PlannedModel] = WeakKeyDictionary()
        self._loop_sizes: tuple[int | None, int | None] | None = None

    def of_sizes(self, pp_size: int | None, vp_size: int | None) -> ForwardBackward:
        """The same for a loop that names the sizes of its pipeline, as `get_forward_backward_func` takes them."""
        of_these_sizes = copy.copy(self)
        of_these_sizes._loop_sizes = (pp_size, vp_size)
        return of_these_sizes

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
        """Run the forwards and backwards of one step: on ranks of the last stage, what the loss functions reported, in
        the order in which micro-batches entered.

        With `PlannedSteps` as data iterator each call runs the next of its steps, and numbers and lengths of
        micro-batches are the plan's. Else there are `num_microbatches`, of one shape, or with
        `config.variable_seq_lengths` each of its own, and in Megatron's order unless the settings ask for a V, split
        backwards or a limit.

        Errors: ConfigError for what is not supported, PlanError where micro-batches do not fit the memory limit,
        ExecutionError for a neighbour that is late.
        """
        from megatron.core.utils import get_model_config

        chunks = list(model) if isinstance(model, Sequence) else [model]
        config = get_model_config(chunks[0])
        num_microbatches, iterators = _checked(num_microbatches, data_iterator, chunks)
        groups = groups_of_call(pg_collection, p2p_communicator)
        planned_model = self._planned(chunks, config, groups)
        check_collects(planned_model.pipeline.topology, collect_non_loss_data)
        if not forward_only:
            check_sync(chunks, config)
        step = LoopStep(
            forward_step_func=forward_step_func,
            chunks=chunks,
            iterators=iterators,
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
            if len(chunks) == 1 and decoder_seq_length is not None:  # as Megatron's schedule, for stages that send
                seq_length = decoder_seq_length
            shape = (micro_batch_size, seq_length)
            return self._run_given(step, planned_model, shape, adjust_tensor_shapes_fn)

    def _run_given(
        self, step: LoopStep, model: _PlannedModel, shape: EntryShape, adjust: Callable[..., Any] | None
    ) -> list[Any]:
        """A step of micro-batches that the loop has cut."""
        topology = model.pipeline.topology
        is_any_shape = topology.pp > 1 and bool(step.config.variable_seq_lengths)
        if adjust is not None and (is_any_shape or topology.num_stages == 1 or topology.placement):
            raise ConfigError(
                "adjust_tensor_shapes_fn was given, which is for messages of one shape between ranks of one stage each:"
                " leave it out, or variable_seq_lengths and virtual stages"
            )
        if topology.pp == 1:  # stock then reads neither, and loops give what they have, or None
            shape = max(1, shape[0] or 1), max(1, shape[1] or 1)
        shapes = (shape,) * step.num_micro_batches
        if is_any_shape:
            shapes, step = shapes_of_entries(step, model.pipeline, model.groups.pp, self.settings.shape_of)
        given_shapes = GivenShapes(shapes=shapes, forward_only=step.forward_only, as_given=is_any_shape)
        plan = self._given_plan(model, given_shapes, compare=not step.collect_non_loss_data)
        if adjust is not None:
            (spec,) = model.pipeline.activation_format.specs(plan.micro_batches[0])
            plan = with_adjusted_shapes(plan, spec, adjust)
        empty: list[Batch] = [{} for _ in plan.micro_batches]
        if in_order_of_entry(plan):
            return _run(step, model, plan, empty, lambda number, *_: step.iterators[number])
        entries = in_any_order(step)
        return _run(step, model, plan, empty, lambda number, micro_batch, _: entries[number](micro_batch))

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
            widths = (settings.width,) if settings.width != "auto" else list_cp_degrees(model.pipeline.topology.dp)
            topology, device = model.pipeline.topology, model.pipeline.device
            model.joined = join_ranks(topology, dist.get_rank(), widths, device, timeout_s=settings.timeout_s)
            joins = settings.layout == "packed" or bool(model.joined)
            model.around = _as_planned(step.chunks, model.pipeline, restarts_attention=joins)
            _say_planned(step.config, settings.layout)
        if (must_agree := steps.bind(model.pipeline, settings)) is not None:
            check_same_plans(must_agree, model.pipeline.device, what="steps of these data")
        if model.pipeline.topology.dp > 1 and not replicas_meet(model.pipeline, settings):
            step = replace(step, forward_step_func=apart_from_replicas(step.forward_step_func))
        micro_batches, plan = next(iterator)
        timed = None
        if self._gains is not None and args is not None and not step.forward_only:
            timed = self._gains.timed(plan, model.pipeline)
            self._gains.count(steps.last_lengths, model.pipeline, args)
        measured = _measurement(step, model, plan)
        observers = _Observers(timed=timed, measured=measured)
        reports = _run(
            step,
            model,
            plan,
            micro_batches,
            lambda _, __, batch: batch_once(batch),
            around=model.around,
            observers=observers,
        )
        if measured is not None:
            num_parameters = sum(p.numel() for chunk in step.chunks for p in chunk.parameters())
            model.pipeline = with_measured_costs(
                model.pipeline, measured, longest=steps.longest, num_parameters=num_parameters
            )
            steps.plan_with(model.pipeline, settings)
        if step.config.num_moe_experts and not step.forward_only and micro_batches:
            rescale_router_losses(step.num_micro_batches / len(micro_batches))
        if step.forward_only and getattr(args, "sft", False):
            return of_global_batch(reports)
        return reports

    def _planned(self, chunks: list[Any], config: Any, groups: Any) -> _PlannedModel:
        from megatron.core import parallel_state

        pp_size, vp_size = self._loop_sizes or (
            None,
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        )
        if pp_size not in (None, groups.pp.size()):
            raise ConfigError(
                f"get_forward_backward_func was asked for pp_size {pp_size}, but the pipeline's process group has"
                f" {groups.pp.size()} ranks: give that, or leave it out"
            )
        if chunks[0] not in self._models:
            check_config(config, chunks)
            settings = self.settings
            if settings.split_backward:
                split_megatron_linears()
            pipeline = megatron_pipeline(
                chunks,
                config,
                groups,
                vp_size=vp_size,
                costs=settings.costs,
                placement=settings.placement,
                timeout_s=settings.timeout_s,
            )
            self._models[chunks[0]] = _PlannedModel(pipeline, groups)
        model = self._models[chunks[0]]
        now, before = ranks_in_groups(groups), ranks_in_groups(model.groups)
        if now != before:
            raise ConfigError(
                f"the process groups of this call hold ranks {now} but those of the model's first step {before}: give"
                " the same in every call"
            )
        model.groups = groups
        return model

    def _given_plan(self, model: _PlannedModel, given_shapes: GivenShapes, *, compare: bool) -> ExecutionPlan:
        """This rank's plan of micro-batches of these shapes, made once. Ranks `compare` their plans, unless one rank
        may call alone (Megatron-LM's evaluation does so to collect other outputs than losses). Shapes `as_given` come
        from one rank, so their plans are compared only the first time."""
        plans, settings = model.plans, self.settings
        if given_shapes not in plans:
            is_new_kind = all(
                (given_shapes.as_given, given_shapes.forward_only) != (one.as_given, one.forward_only) for one in plans
            )
            planner = GivenPlanner(
                pipeline=model.pipeline,
                given=given_shapes,
                split_backward=settings.split_backward,
                limit_bytes=settings.limit_bytes,
                effort=settings.effort,
            )
            compare = compare and (is_new_kind or not given_shapes.as_given)
            plan = given_plan(planner, model.groups.pp, compare=compare)
            if is_new_kind or not given_shapes.as_given:
                _say(plan, given_shapes)
            while len(plans) >= _MOST_PLANS:
                del plans[next(iter(plans))]
            plans[given_shapes] = plan
        return plans[given_shapes]


def _checked(num_microbatches: Any, data_iterator: Any, chunks: list[Any]) -> tuple[int, list[Any]]:
    """The number of micro-batches and an iterator for each chunk. Errors: ConfigError for others."""
    try:
        number = operator.index(num_microbatches)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"num_microbatches is {short(num_microbatches)} but must be an integer of at least 1")
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    if len(iterators) != len(chunks):
        raise ConfigError(
            f"data_iterator is a list of {len(iterators)} for {len(chunks)} model chunks: give one iterator a chunk"
        )
    return number, iterators


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """By Megatron's own timer, where the configuration has timers."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()


def _say(plan: ExecutionPlan, shapes: GivenShapes) -> None:
    """Print, on the first rank and once for each shape, which schedule runs."""
    if dist.get_rank() == 0:
        what = "forwards" if shapes.forward_only else "forwards and backwards"
        print(
            f"dynapipe: {what} of {shapes} on {plan.num_stages} stages by a proven plan, predicted bubble"
            f" {max(0.0, plan.prediction.bubble_ratio):.1%}",
            flush=True,
        )


def _say_planned(config: Any, layout: Layout) -> None:
    """Print, on the first rank, that data are planned, and a warning about losses that are no token sums."""
    if dist.get_rank() != 0:
        return
    print(f"dynapipe: samples are cut into planned micro-batches, rows {layout}", flush=True)
    if not config.calculate_per_token_loss:
        print(
            "dynapipe: without --calculate-per-token-loss every micro-batch weighs the same, however few tokens it has,"
            " so the loss depends on the plan: give it, and a loss function that returns (sum, tokens, report)",
            flush=True,
        )


def _as_planned(chunks: Sequence[Any], pipeline: MegatronPipeline, *, restarts_attention: bool) -> Around:
    """Around each micro-batch: its own shape, and its own recomputation where the model's configuration fixes none."""
    shapes = MicroBatchShapes(chunks, parsed_arguments(), pipeline.device, restarts_attention=restarts_attention)
    switches = [RecomputeSwitch(chunk) for chunk in chunks] if pipeline.recompute is None else []

    @contextmanager
    def around(micro_batch: MicroBatch, carried: CarriedPiece | None, joined: JoinedRanks | None) -> Iterator[None]:
        try:
            for switch in switches:
                switch.set(micro_batch.recompute)
            with shapes.of(micro_batch, carried, joined):
                yield
        finally:
            for switch in switches:
                switch.set("none")

    return around


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observers:
    """The observers of a step's actions: the log's clock, and the measurement of costs."""

    timed: Callable[[str], Any] | None = None
    measured: StepMeasurement | None = None

    def executor(self, stage: ForwardStepStage, pipeline: MegatronPipeline) -> PipelineExecutor:
        if self.measured is None:
            return PipelineExecutor(stage, pipeline.transport, ranges=self.timed)
        stage.measure_bytes()
        return PipelineExecutor(
            stage, pipeline.transport, ranges=self.timed, recorder=self.measured, clock=self.measured.clock
        )


def _measurement(step: LoopStep, model: _PlannedModel, plan: ExecutionPlan) -> StepMeasurement | None:
    """The measurement of this step, if it is to be measured: the first step after the warm-up steps, of a model whose
    costs are not counted."""
    if model.pipeline.counts_memory or step.forward_only:
        return None
    model.num_uncounted_steps += 1
    if model.num_uncounted_steps == 1 and dist.get_rank() == 0:
        print(
            f"dynapipe: this model's costs are not counted: {STEPS_BEFORE + 1} steps run under 1F1B in micro-batches"
            " of no more tokens than the longest sample has, and costs are measured in the last of them",
            flush=True,
        )
    if model.num_uncounted_steps <= STEPS_BEFORE:
        return None
    return StepMeasurement(plan, model.pipeline.device)


def _run(
    step: LoopStep,
    model: _PlannedModel,
    plan: ExecutionPlan,
    micro_batches: Sequence[Batch],
    data: BatchIterator,
    *,
    around: Around = lambda *_: nullcontext(),
    observers: _Observers | None = None,
) -> list[Any]:
    pipeline = model.pipeline
    with StepGradients(
        step.chunks, step.config, model.groups, force_all_reduce=step.force_all_reduce, in_v=pipeline.in_v
    ) as gradients:
        stage = ForwardStepStage(step, gradients, data, around, model.joined)
        executor = (observers or _Observers()).executor(stage, pipeline)
        executor.execute(plan, micro_batches)
    return sent_to_last_rank(stage.reports, pipeline.topology, pipeline.coordinates, pipeline.device)


# What it keeps is keyed by model, weakly: two models, or two trainings in one process, do not meet.
_UNCONFIGURED = ForwardBackward()


def forward_backward_func(**keywords: Any) -> list[Any]:
    """What `get_forward_backward_func()` returns, by plans under default settings: see `ForwardBackward.__call__`."""
    return _UNCONFIGURED(**keywords)
