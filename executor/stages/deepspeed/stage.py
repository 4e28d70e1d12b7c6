"""Plans run through a DeepSpeed engine, which sums gradients over micro-batches and replicas as its ZeRO stage does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from dynapipe_ext.batch.micro_batches import recompute_of_layers, slices_head
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, ExecutionPlan, Forward
from dynapipe_ext.executor.protocols import Reductions
from dynapipe_ext.executor.stages.chunk_runner import NO_COPIES, Copies, GradientAccumulator, Sum
from dynapipe_ext.executor.stages.deepspeed.engine import clear_gradients, is_other_stages, leave_to_other_stage
from dynapipe_ext.executor.stages.torch_stage import LossFunction, TorchStage, with_batch
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage, token_loss_sum
from dynapipe_ext.executor.stages.transformers.t5 import T5Part
from dynapipe_ext.executor.transport.parallel_context import ParallelContext

_SCATTERS = 2  # the first ZeRO stage that scatters the gradients of each backward


class DeepSpeedStage(TorchStage):
    """A TorchStage of the module that an engine of `deepspeed.initialize` wraps; `engine.step()` follows each step.

    ZeRO 0 to 3. The plan says what a step accumulates and its loss divisor what it divides by; the engine's own batch
    sizes and accumulation steps count for nothing. `engine_stage` is the like for models of transformers.
    """

    def __init__(
        self, engine: Any, loss: LossFunction, *, parallel: Reductions | None = None, restarts_attention: bool = False
    ) -> None:
        module = engine.module
        super().__init__(
            {0: with_batch(engine, module)} if _scatters_gradients(engine) else module,
            loss,
            parameters=module.parameters(),
            accumulator=partial(EngineGradients, engine),
            parallel=parallel,
            restarts_attention=restarts_attention,
        )


def engine_model(parts: Sequence[TransformersPart]) -> torch.nn.Module:
    """What an engine is made of: the model of a rank's only part, or the weights of several by their names in the
    whole model."""
    if len(parts) == 1:
        model: torch.nn.Module = parts[0].model
        return model
    joined = torch.nn.Module()
    for part in parts:
        for name, weight in part.model.named_parameters(remove_duplicate=False):
            *path, own = name.split(".")
            place = joined
            for step in path:
                if step not in place._modules:
                    place.add_module(step, torch.nn.Module())
                place = place.get_submodule(step)
            place.register_parameter(own, weight)
    return joined


def engine_stage(
    engine: Any,
    parts: Sequence[TransformersPart],
    *,
    parallel: ParallelContext,
    loss: LossFunction = token_loss_sum,
    measure_bytes: bool = False,
) -> TransformersStage:
    """The stages of a rank of whose parts an engine was made, by their `engine_model`. `measure_bytes` is TorchStage's;
    at ZeRO 3 the weights that are gathered would count.

    Errors: ConfigError for ZeRO 2 and 3 where ranks have parts of a model, and for an encoder-decoder.
    """
    if any(isinstance(part, T5Part) for part in parts):
        raise ConfigError(
            "engines train causal models of transformers, in which head and embedding alone may be one weight: give"
            " TransformersStage the parts of a T5"
        )
    if _scatters_gradients(engine):
        if parallel.topology.num_stages > 1:
            raise ConfigError(
                f"ZeRO {engine.zero_optimization_stage()} has collectives with each micro-batch, but the model is in"
                f" {parallel.topology.num_stages} stages: take one, or ZeRO 0 or 1"
            )
        parts[0].run_by(engine)
    for part in parts:
        for name, weight in part.shared.items():
            ranks = {parallel.topology.stage_ranks[stage] for stage in part.holders[name]}
            if parallel.coordinates.pp_rank != min(ranks):  # which may be 0, whose norms stage 0 takes whole
                leave_to_other_stage(weight)
    accumulator = partial(EngineGradients, engine)
    return TransformersStage(parts, loss=loss, accumulator=accumulator, parallel=parallel, measure_bytes=measure_bytes)


def _scatters_gradients(engine: Any) -> bool:
    """Whether each backward ends in collectives over replicas, and is thus to be run by the engine."""
    stage: int = engine.zero_optimization_stage()
    return stage >= _SCATTERS


class EngineGradients(GradientAccumulator):
    """Sums where a DeepSpeed engine's step looks for them, whose mean over replicas and accumulation is undone.

    ZeRO 0 and 1 reduce once, after a step's last backward: any schedule will do, and counts of micro-batches may differ
    or be 0. From stage 2 on the engine runs each backward, told by the plan which one is the last: replicas then have
    equal counts, one micro-batch is in flight, and backwards are whole.
    """

    def __init__(
        self,
        engine: Any,
        parameters: Sequence[torch.nn.Parameter],
        _sum_over_replicas: Sum | None = None,
        *,
        copies: Copies = NO_COPIES,
    ) -> None:
        _refuse_engine(engine)
        self._engine, self._parameters, self._scatters = engine, list(parameters), _scatters_gradients(engine)
        self._copies = copies
        self._num_left = 0

    def begin(self, plan: ExecutionPlan) -> None:
        num_replicas = len(plan.num_micro_batches)
        if self._engine.dp_world_size != num_replicas:
            raise ConfigError(
                f"the plan is for {num_replicas} replicas but the engine for {self._engine.dp_world_size}: make both of"
                " one topology"
            )
        if self._scatters:
            refuse_plan(plan, self._engine.zero_optimization_stage())
        self._num_left = sum(isinstance(instruction, Backward) for instruction in plan.instructions)
        clear_gradients(self._engine)

    def backward(self, outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor] | None) -> None:
        num_replicas = self._engine.dp_world_size
        if not self._scatters:
            grads = output_grads or [torch.full_like(loss, num_replicas) for loss in outputs]
            torch.autograd.backward(outputs, grads)
            return
        self._num_left -= 1
        self._engine.set_gradient_accumulation_boundary(self._num_left == 0)
        (loss,) = outputs
        self._engine.backward(loss * num_replicas, scale_wrt_gas=False)

    def add(self) -> None:
        """Bfloat16 gradients go into the float32 sums of an engine that has some."""
        if self._scatters:
            return
        if hasattr(self._engine.optimizer, "update_hp_grads"):
            self._engine.optimizer.update_hp_grads(clear_lp_grads=True)
        elif getattr(self._engine.optimizer, "use_grad_accum_attribute", False):
            self._engine.optimizer.fill_grad_accum_attribute()

    def _sum_of(self, weight: Any) -> torch.Tensor:
        """What `add` has summed up, where the engine looks for it."""
        for name in ("_hp_grad", "grad_accum"):
            if (value := getattr(weight, name, None)) is not None:
                return cast(torch.Tensor, value)
        return cast(torch.Tensor, weight.grad)

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        torch.autograd.backward([weight], [gradient])  # what hooks see

    def reduce(self) -> None:
        if self._scatters:
            return
        # Each rank must bring a gradient of every weight, also one whose replica had no micro-batch that used it.
        idle = [parameter for parameter in self._parameters if parameter.grad is None]
        if idle:
            torch.autograd.backward([(parameter * 0).sum() for parameter in idle])
            self.add()
        for weight, sum_over_copies in self._copies.items():
            summed = self._sum_of(weight)
            sum_over_copies(summed)
            if is_other_stages(weight):  # ZeRO 0 of bfloat16 takes the norm of gradients, and looks at these
                summed.ds_pipe_replicated = True  # type: ignore[attr-defined]
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()


def _refuse_engine(engine: Any) -> None:
    """Errors: ConfigError for an engine whose steps would not be those of plans."""
    unsupported = {
        "fp16: its loss scale leaves steps out": engine.fp16_enabled(),
        "sequence parallelism": getattr(engine, "sequence_parallel_size", 1) > 1,
        "overlap_comm with ZeRO 1, which reduces once a step": engine.zero_optimization_stage() == 1
        and bool(engine.zero_overlap_comm()),
        "managed_gradient_accumulation false": not getattr(engine, "managed_gradient_accumulation", lambda: True)(),
    }
    if names := [name for name, is_asked in unsupported.items() if is_asked]:
        raise ConfigError(f"plans do not run through an engine with {'; '.join(names)}: leave it out of its config")


def refuse_plan(plan: ExecutionPlan, zero_stage: int) -> None:
    """Errors: ConfigError for what the collectives of each micro-batch forbid."""
    conflict = f"ZeRO {zero_stage} has collectives with each micro-batch, but step {plan.step}"
    if plan.num_stages > 1:
        raise ConfigError(f"{conflict} has {plan.num_stages} stages: take pp 1, or ZeRO 0 or 1")
    if len(set(plan.num_micro_batches)) > 1:
        raise ConfigError(
            f"{conflict} has {plan.num_micro_batches} micro-batches: plan with replica_counts='equal' and"
            f" collectives=ReplicaCollectives.of_zero({zero_stage})"
        )
    if zero_stage > 2 and (sliced := [m.recompute for m in plan.micro_batches if slices_head(m.recompute)]):
        raise ConfigError(
            f"{conflict} has heads in slices ({sliced[0]!r}), whose weight an engine gathers for the head's own forward"
            f" alone: take recompute {recompute_of_layers(sliced[0])!r}, or ZeRO 0 to 2"
        )
    if any(m.layer_recompute == "stage" for m in plan.micro_batches):
        raise ConfigError(
            f"{conflict} recomputes whole stages, so an engine would run forwards without a backward: recompute layers"
            ' ("full")'
        )
    actions = [i for i in plan.instructions if isinstance(i, Forward | Backward | BackwardInput | BackwardWeight)]
    pairs = [(Forward(0, m), Backward(0, m)) for m in (action.micro_batch for action in actions[::2])]
    if actions != [action for pair in pairs for action in pair]:
        raise ConfigError(
            f"{conflict} runs {' '.join(map(str, actions[:6]))} …: take a schedule of whole backwards that has one"
            " micro-batch in flight, such as 1f1b"
        )
