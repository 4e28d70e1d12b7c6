"""A DeepSpeed engine over a rank's parts, and the ranks as it asks for them."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint

from dynapipe_ext.errors import ConfigError, DataError, in_one_line, short
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Reductions
from dynapipe_ext.executor.stages.accumulator import describe_norm_fault
from dynapipe_ext.executor.stages.guarded_optimizer import GuardedOptimizer
from dynapipe_ext.executor.stages.megatron_cpu import uncompiled
from dynapipe_ext.executor.stages.split_linear import pass_hooks_by
from dynapipe_ext.executor.stages.weight_decay import decaying_weights
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.settings.tables import OptimizerSettings


class ModelParallelUnit:
    """Made on every rank of the job at the same point.

    To DeepSpeed (0.19) the ranks of one replica are model parallel: norms, overflows and the names of files go by them.
    What it asks of slices is tensor parallelism, which torch modules do not have.
    """

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel
        self._stages = parallel.group(lambda coordinates: coordinates.dp_rank)

    def get_data_parallel_group(self) -> Any:
        return self._parallel.replicas

    def get_data_parallel_rank(self) -> int:
        return self._parallel.coordinates.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._parallel.topology.dp

    def get_model_parallel_group(self) -> Any:
        return self._stages

    def get_model_parallel_rank(self) -> int:
        return self._parallel.coordinates.pp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._parallel.topology.pp

    def get_pipe_parallel_world_size(self) -> int:
        return self._parallel.topology.pp

    def get_slice_parallel_rank(self) -> int:
        return 0

    def get_slice_parallel_world_size(self) -> int:
        return 1


@contextmanager
def _no_warnings_logged() -> Iterator[None]:
    """Within: this process logs errors only; on exit what it logged before, also if the block fails."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def make_engine(model: torch.nn.Module, config: Mapping[str, Any], parallel: ParallelContext) -> Any:
    """`deepspeed.initialize` on all ranks at the same point; norms and biases do not decay.

    `model` is what this rank has of one: each pipeline rank has an engine, and all clip by the norm of the whole. On a
    CPU nothing is compiled: DeepSpeed would build an extension as it starts, and wait for ever for a build that was
    killed. Errors: ConfigError for what DeepSpeed does not take.
    """
    with _no_warnings_logged():  # that there is no accelerator, from every rank
        import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what DeepSpeed calls
    deepspeed.utils.logger.setLevel(logging.WARNING if dist.get_rank() == 0 else logging.ERROR)
    if parallel.device.type == "cpu":
        compile_nothing()
        ask_for_devices_once()
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("no weight of the model trains: give adapters, or weights that require gradients")
    decaying = decaying_weights(model)
    groups = [
        {"params": [p for p in trained if p in decaying]},
        {"params": [p for p in trained if p not in decaying], "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    for parameter in trained:  # no other stage has it, so that norms of all stages add up
        parameter.model_parallel = True  # type: ignore[attr-defined]
    mpu = ModelParallelUnit(parallel)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=dict(config), mpu=mpu)
    except (ValueError, AssertionError, TypeError, KeyError) as error:  # as it has them for fields, names and values
        raise ConfigError(f"DeepSpeed refuses its configuration, so correct the file: {in_one_line(error)}") from error
    keep_steps_apart(engine)
    return engine


def keep_steps_apart(engine: Any) -> None:
    """Have `engine.load_checkpoint` give every group of weights a count of steps of its own.

    ZeRO 3 (0.19) gives all of them the one tensor that a universal checkpoint has. torch's Adam adds to it once for
    each group, so bias corrections would run ahead.
    """
    load: Any = engine.load_checkpoint

    def load_checkpoint(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return loaded

    engine.load_checkpoint = load_checkpoint


def compile_nothing() -> None:
    """Let DeepSpeed's engines on a CPU start without compiling. They would build an extension for sums over the ranks
    of a machine. They would also load torch's compiler (3 s a rank), since they import the Muon optimizer."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with uncompiled(), suppress(ImportError):  # older ones do not have it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def ask_for_devices_once() -> None:
    """DeepSpeed's accelerator of a CPU runs numactl whenever it is asked for their number: by ZeRO 3, in a backward."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.device_count = functools.cache(accelerator.device_count)


def leave_to_other_stage(weight: torch.nn.Parameter) -> None:
    """Mark a weight's copy, in DeepSpeed's words for tied layers: in norms another stage's counts."""
    weight.ds_pipe_replicated = True  # type: ignore[attr-defined]
    weight.model_parallel = False  # type: ignore[attr-defined]


def is_other_stages(weight: torch.Tensor) -> bool:
    return getattr(weight, "ds_pipe_replicated", False)


def gathered(engine: Any, *, trained_alone: bool = False) -> AbstractContextManager[Any]:
    """In it every rank has all weights (that train) whole, which ZeRO 3 divides over them; all ranks enter it."""
    from deepspeed.runtime.zero import GatheredParameters

    weights = [p for p in engine.module.parameters() if p.requires_grad or not trained_alone]
    return GatheredParameters(weights) if engine.zero_optimization_stage() == 3 else nullcontext()


def reports_norm(engine: Any) -> bool:
    """Whether DeepSpeed's own optimizer takes the engine's steps: it checks and reports their norms. Otherwise torch's
    does, which checks nothing (float32 without ZeRO)."""
    return hasattr(engine.optimizer, "overflow")


def clear_gradients(engine: Any) -> None:
    """Drop all gradients of a step that may not have been taken.

    `zero_grad` of DeepSpeed's optimizer for ZeRO 1 and 2 (0.19) leaves what its `step` would have used up: the next
    step would add to it.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if (averaged := getattr(optimizer, "averaged_gradients", None)) is not None:
        averaged.update(dict.fromkeys(averaged))
    if (held := getattr(optimizer, "all_grad_tensors", None)) is not None:
        held.update(dict.fromkeys(held))
        optimizer.micro_step_id = -1  # as before the first backward
    if getattr(optimizer, "cpu_offload", False):
        optimizer.reset_cpu_buffers()


class DeepSpeedOptimizer(GuardedOptimizer):
    """An engine's step, unless loss or gradients are not finite. Learning rates are those of the file's scheduler, else
    of Megatron's schedule by the run's settings."""

    def __init__(
        self, engine: Any, settings: OptimizerSettings, *, num_steps: int, parallel: Reductions, device: torch.device
    ) -> None:
        super().__init__(
            engine.optimizer,
            settings,
            num_steps=num_steps,
            device=device,
            sum_over_job=parallel.sum_over_job,
            has_rates=not engine.lr_scheduler,
        )
        self._engine, self._parallel = engine, parallel
        self._largest = torch.zeros((), device=device)
        self._fault = ""
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._see)
                pass_hooks_by(parameter)

    def _see(self, gradient: torch.Tensor | None) -> None:
        """Of a micro-batch, before the engine scatters it (None: it is put off); what is not a number stays one in the
        maximum."""
        if gradient is not None and gradient.numel():
            self._largest = torch.maximum(self._largest, gradient.detach().abs().max().float())

    def sum_squares(self) -> float:
        """Return infinity if the largest entry cannot be taken, else 0: the engine has the norm."""
        self._fault = describe_norm_fault(float(self._largest))
        self._largest.zero_()
        return math.inf if self._fault else 0.0

    def list_faults(self, executed: ExecutedStep) -> Iterator[tuple[int, str]]:
        losses = [*executed.loss_faults()]
        yield from ((0, fault) for fault in losses)
        if self._fault and not losses:
            yield 1, self._fault

    def change_weights(self, norm: float, plan: ExecutionPlan) -> float | str:
        if not reports_norm(self._engine) and (fault := describe_norm_fault(norm := self._held_norm())):
            return fault
        self._engine.step()
        if not reports_norm(self._engine):
            return norm
        if not self._engine.was_step_applied():
            return describe_norm_fault(math.inf)
        return float(self._engine.get_global_grad_norm())

    def _held_norm(self) -> float:
        """Return the gradient norm of an engine that reports none: each rank holds all gradients of its stages."""
        own = [p.grad for p in self._engine.module.parameters() if p.grad is not None and not is_other_stages(p)]
        squares = torch.stack([gradient.double().square().sum() for gradient in own]).sum()
        self._parallel.sum_over_job(squares)
        return math.sqrt(float(squares) / self._parallel.topology.dp)


# Of the classes that DeepSpeed's own checkpoints name, those that torch does not count as plain data.
_OWN_CLASSES = frozenset(
    (
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)


def refuse_foreign_pickles(folder: Path) -> None:
    """Errors: DataError for a file that names anything beside tensors, plain data and DeepSpeed's own classes: what a
    pickle names, unpickling may call. The files are taken apart for it, and nothing of them is run."""
    for path in sorted(folder.glob("*.pt")):
        try:
            names = get_unsafe_globals_in_checkpoint(path)
        except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, struct.error) as error:
            raise DataError(f"{path} cannot be read ({in_one_line(error)}): resume from another checkpoint") from error
        if foreign := sorted({*names} - _OWN_CLASSES):
            raise DataError(
                f"{path} names {', '.join(map(short, foreign[:3]))}, which no checkpoint of DeepSpeed's does, and which"
                " loading it could run: copy the checkpoint again from where it was saved, or resume from another"
            )
