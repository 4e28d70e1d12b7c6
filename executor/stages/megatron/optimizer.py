"""Megatron's optimizer over chunks, and the guard that refuses steps which are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError, NotFiniteError, named_collectives
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.executor.stages.accumulator import describe_norm_fault, gradient_fault
from dynapipe_ext.executor.stages.megatron.exact import ExactNorm
from dynapipe_ext.executor.stages.megatron.model import global_names, take_unrounded
from dynapipe_ext.executor.stages.megatron.stage import Chunks
from dynapipe_ext.executor.stages.weight_decay import weight_decays
from dynapipe_ext.executor.training_loop import ExecutedStep, NanPolicy, Refused, SkipPolicy, joined_faults
from dynapipe_ext.settings.tables import LrSchedule, OptimizerSettings


class StepGuard:
    """Refuses steps whose loss or gradients are not finite (see `SkipPolicy`), or that have no target token; one per
    rank."""

    def __init__(
        self, chunks: Chunks, policy: NanPolicy = "stop", max_skips: int = 0, *, is_exact: bool = False
    ) -> None:
        self._chunks, self._policy, self._is_exact = chunks, SkipPolicy(policy, max_skips), is_exact
        self._device = next(chunks[0].parameters()).device

    def check(self, executed: ExecutedStep) -> Refused | None:
        """The same answer, or error, on every rank: one sum of three numbers, and more only where it is bad."""
        plan = executed.plan
        own = _targets(plan) if dist.get_rank() == _first_rank_of_replica() else 0
        bad = float(not math.isfinite(executed.loss))
        agreed = torch.tensor([bad, own, self._squares()], dtype=torch.float64, device=self._device)
        with named_collectives(f"step {plan.step}, check of loss and gradients"):
            dist.all_reduce(agreed)
        num_not_finite, num_targets, squares = agreed.tolist()
        norm_fault = describe_norm_fault(math.sqrt(squares))
        if num_not_finite or norm_fault:
            return self._refuse(executed, norm_fault)
        self._policy.passed()
        if num_targets == 0:
            return Refused(f"step {plan.step + 1} has no target tokens: it has nothing to learn from")
        return None

    def _squares(self) -> float:
        """The squared norm of this rank's gradient buffers, not finite where float32 does not hold it. Summed over all
        ranks it is at least that of the model's gradients, which replicas have copies of."""
        grouped = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in grouped if buffer.grad_data.numel()]
        return math.fsum(float(norm) ** 2 for norm in norms)

    def _refuse(self, executed: ExecutedStep, norm_fault: str) -> Refused:
        step = executed.plan.step + 1
        of_ranks = [fault for rank in gather_json(list(self._faults(executed)), self._device) for fault in rank]
        reasons = joined_faults([[fault for _, fault in sorted(map(tuple, of_ranks))]]) or norm_fault
        reason = f"step {step} is not finite (loss {executed.loss:g}): {reasons}"
        return self._policy.refused(reason)

    def _faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        """What this rank sees, each with its order of worth: losses, then weights, then the gradient that the backward
        came to first (the last layer's)."""
        plan, me = executed.plan, dist.get_rank()
        if _counts_losses():
            yield from ((0, fault) for fault in executed.loss_faults())
        named = list(self._named_parameters(plan.stages))
        for _, name, parameter in named:
            if not torch.isfinite(parameter).all():
                yield 1, f"the weight {name} already was not finite on rank {me}"
                return
        for stage, name, parameter in reversed(named):
            gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            if fault := gradient_fault(name, gradient, is_exact=self._is_exact):
                yield 2 + plan.num_stages - stage, f"{fault} on rank {me}"
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


# How Megatron cuts and names what it saves: the same for any number of replicas, and for any order of its groups. It is
# given copies, as it keeps groups of ranks in them.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_LR_STYLES: dict[LrSchedule, str] = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
_WSD_DECAY = 0.1  # of all steps


def update_in_one_pass(adam: torch.optim.Optimizer) -> None:
    """Have torch's Adam update the weights of a GPU by one kernel, in a third of the time and without copies of its
    states; other optimizers as they are."""
    weights = [weight for group in adam.param_groups for weight in group["params"]]
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW) and weights and all(one.is_cuda for one in weights):
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False


def step_count(adam: torch.optim.Optimizer, weight: torch.Tensor, num_updates: int) -> torch.Tensor:
    """A weight's number of updates as the state of torch's Adam has it: beside the weight where one kernel updates."""
    is_one_pass = any(group.get("fused") for group in adam.param_groups)
    return torch.tensor(float(num_updates), device=weight.device if is_one_pass else None)


class MegatronOptimizer:
    """Megatron's optimizer and learning-rate schedule of a rank's chunks behind two calls, `step` and `restore`."""

    def __init__(self, chunks: Chunks, config: Any, settings: OptimizerSettings, *, num_steps: int) -> None:
        from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
        from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

        keeps = ParamWithNamePredicate(name="keeps", fn=lambda weight, name: not weight_decays(name))
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                clip_grad=0.0 if settings.deterministic else settings.clip_grad,  # else `_exact_norm` clips
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=settings.distributed,
            ),
            list(chunks),
            config_overrides={ParamKey(with_name_predicate=keeps): {"wd_mult": 0.0}},
        )
        self._exact_norm = ExactNorm(chunks) if settings.deterministic else None
        self._clip_grad = settings.clip_grad
        self._has_masters = bool(config.bf16)
        self._is_distributed = settings.distributed
        self._fill_masters(chunks)
        for optimizer in self._optimizer.chained_optimizers:
            update_in_one_pass(optimizer.optimizer)
        self._guard = StepGuard(chunks, settings.nan_policy, settings.max_skips, is_exact=settings.deterministic)
        self._num_updates = 0
        self._scheduler = learning_rates(self._optimizer, settings, num_steps=num_steps)

    def _fill_masters(self, chunks: Chunks) -> None:
        """Masters begin as the checkpoint's own weights, where those are wider than the model's."""
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            if (unrounded := take_unrounded(parameter)) is None or (master := parameter.main_param) is None:
                continue  # another replica's rank has the master
            if self._is_distributed:
                own = (o for o in self._optimizer.chained_optimizers if parameter in o.model_param_gbuf_map)
                part = next(own)._get_model_param_range_map(parameter)["param"]
                unrounded = unrounded.view(-1)[part.start : part.end]
            with torch.no_grad():
                master.copy_(unrounded)

    def step(self, executed: ExecutedStep) -> float | Refused:
        """Update, if the step may be taken; the gradient norm before clipping, or why nothing was changed.

        Errors: NotFiniteError, on all ranks alike and before anything is changed, for a loss or gradient that is not
        finite, where the policy does not skip the step.
        """
        if refused := self._guard.check(executed):
            return refused
        with named_collectives(f"step {executed.plan.step}, update"):
            return self.update()

    def update(self) -> float:
        """Clip, change the weights, advance the schedule, unguarded; returns the gradient norm before clipping."""
        exact_norm = self._exact_norm.clip(self._clip_grad) if self._exact_norm else None
        updated, grad_norm, _ = self._optimizer.step()
        if not updated:
            raise NotFiniteError("Megatron's optimizer refused the step: a gradient is not finite; lower lr")
        self._scheduler.step(1)
        self._num_updates += 1
        return exact_norm if exact_norm is not None else float(grad_norm or 0.0)

    @property
    def place(self) -> OptimizerPlace:
        """What it holds besides tensors."""
        return OptimizerPlace(self._num_updates, self._scheduler.state_dict())

    def sharded_state(self, model_state: Mapping[str, Any]) -> Any:
        """Megatron's description of its tensors, to be saved. Errors: ExecutionError before the first update."""
        if not self._num_updates:
            raise ExecutionError("no weight has been updated yet: there is nothing to save, start the run anew")
        return self._optimizer.sharded_state_dict(model_state, False, metadata={**SHARDING})

    def restore(self, model_state: Mapping[str, Any], place: OptimizerPlace, fill: Callable[[Any], None]) -> None:
        """Take on the state of `place`: `fill` fills the tensors of a sharded state in place, those of the model too.

        Learning rates follow the settings of now from where the schedule stood.
        """
        chained = self._optimizer.chained_optimizers
        if self._is_distributed:  # with torch's Adam it cannot say what it holds before it holds something
            with torch.no_grad():
                for optimizer in chained:
                    optimizer._init_optimizer_states_with_dummy_values()
        state = self._optimizer.sharded_state_dict(model_state, True, metadata={**SHARDING})
        fill({**model_state, "optimizer": state})
        states = [state] if len(chained) == 1 else [state[i] for i in range(len(chained))]
        for optimizer, own in zip(chained, states, strict=True):
            inner = optimizer.optimizer
            for tensors in inner.state.values():
                tensors.pop("step", None)
            if self._is_distributed:
                whole = {i: {kind: t.data for kind, t in tensors.items()} for i, tensors in own["param_state"].items()}
                with torch.no_grad():
                    optimizer.load_parameter_state_from_fully_reshardable(whole)
            # torch's Adam counts for each weight, Apex's for each group.
            for weight, tensors in inner.state.items():
                tensors["step"] = step_count(inner, weight, place.num_updates)
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = place.num_updates
        self._num_updates = place.num_updates
        self._scheduler.num_steps = int(place.schedule["num_steps"])
        self._scheduler.step(0)

    def state_bytes(self) -> int:
        """Adam's moments and the master weights that the optimizer holds on this rank."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        num_parameters = sum(int(p.numel()) for p in parameters)
        return num_parameters * (12 if self._has_masters else 8)

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def learning_rates(optimizer: Any, settings: OptimizerSettings, *, num_steps: int) -> Any:
    """Megatron's schedule of an optimizer's learning rates over a run, at its first step."""
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
