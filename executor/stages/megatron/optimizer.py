"""Megatron's optimizer over chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError, NotFiniteError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.executor.stages.accumulator import gradient_fault
from dynapipe_ext.executor.stages.guarded_optimizer import GuardedOptimizer, make_step_count, update_in_one_pass
from dynapipe_ext.executor.stages.megatron.exact import ExactNorm
from dynapipe_ext.executor.stages.megatron.model import global_names, take_unrounded
from dynapipe_ext.executor.stages.megatron.stage import Chunks
from dynapipe_ext.executor.stages.weight_decay import weight_decays
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.settings.tables import OptimizerSettings

# How Megatron cuts and names what it saves: the same for any number of replicas, and for any order of its groups. It is
# given copies, as it keeps groups of ranks in them.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class MegatronOptimizer(GuardedOptimizer):
    """Megatron's optimizer and learning-rate schedule of a rank's chunks behind two calls, `step` and `restore`."""

    def __init__(self, chunks: Chunks, config: Any, settings: OptimizerSettings, *, num_steps: int) -> None:
        from megatron.core import parallel_state
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
        super().__init__(
            self._optimizer,
            settings,
            num_steps=num_steps,
            device=next(chunks[0].parameters()).device,
            sum_over_job=dist.all_reduce,
            counts_targets=dist.get_rank()
            == min(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())),
        )
        self._chunks = chunks
        self._exact_norm = ExactNorm(chunks) if settings.deterministic else None
        self._clip_grad = settings.clip_grad
        self._has_masters = bool(config.bf16)
        self._is_distributed = settings.distributed
        self._fill_masters(chunks)
        for optimizer in self._optimizer.chained_optimizers:
            update_in_one_pass(optimizer.optimizer)

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

    def sum_squares(self) -> float:
        """Return the squared norm of this rank's gradient buffers, not finite if float32 does not hold it. Summed over
        all ranks it is at least that of the model's gradients, which replicas have copies of."""
        grouped = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in grouped if buffer.grad_data.numel()]
        return math.fsum(float(norm) ** 2 for norm in norms)

    def list_faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        """Yield losses, then weights, then the gradient that the backward came to first (the last layer's)."""
        from megatron.core import parallel_state

        plan, me, named = executed.plan, dist.get_rank(), list[tuple[int, str, torch.nn.Parameter]]()
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            yield from ((0, fault) for fault in executed.loss_faults())
        for stage, chunk in zip(plan.stages, self._chunks, strict=True):
            named += [(stage, name, one) for name, one in global_names(chunk.module) if one.requires_grad]
        for _, name, parameter in named:
            if not torch.isfinite(parameter).all():
                yield 1, f"the weight {name} already was not finite on rank {me}"
                return
        for stage, name, parameter in reversed(named):
            gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            if fault := gradient_fault(name, gradient, is_exact=self._exact_norm is not None):
                yield 2 + plan.num_stages - stage, f"{fault} on rank {me}"
                return

    def change_weights(self, norm: float, plan: ExecutionPlan) -> float:
        return self._clip_and_step()

    def _clip_and_step(self) -> float:
        exact_norm = self._exact_norm.clip(self._clip_grad) if self._exact_norm else None
        updated, grad_norm, _ = self._optimizer.step()
        if not updated:
            raise NotFiniteError("Megatron's optimizer refused the step: a gradient is not finite; lower lr")
        return exact_norm if exact_norm is not None else float(grad_norm or 0.0)

    def update(self) -> float:
        """Change the weights and advance the schedule, unguarded; return the gradient norm before clipping."""
        norm = self._clip_and_step()
        self._count_update()
        return norm

    def sharded_state(self, model_state: Mapping[str, Any]) -> Any:
        """Megatron's description of its tensors, to be saved. Errors: ExecutionError before the first update."""
        if not self._num_updates:
            raise ExecutionError("no weight has been updated yet: there is nothing to save, start the run anew")
        return self._optimizer.sharded_state_dict(model_state, False, metadata={**SHARDING})

    def restore(self, model_state: Mapping[str, Any], place: OptimizerPlace, fill: Callable[[Any], None]) -> None:
        """Take on the state of `place`: `fill` fills the tensors of a sharded state in place, those of the model too.

        Learning rates follow the settings of now.
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
                tensors["step"] = make_step_count(inner, weight, place.num_updates)
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = place.num_updates
        self.restore_place(place)

    def state_bytes(self) -> int:
        """Adam's moments and the master weights that the optimizer holds on this rank."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        num_parameters = sum(int(p.numel()) for p in parameters)
        return num_parameters * (12 if self._has_masters else 8)
