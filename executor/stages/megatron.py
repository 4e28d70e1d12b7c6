"""A Stage of megatron-core: its DDP buffers, its gradient reduction, its optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages import megatron_split
from dynapipe_ext.executor.stages.split_linear import DeferredGradients, Work, deferred_bytes


class MegatronGradients(Protocol):
    """The GradientAccumulator of Megatron's parameters: sums live in DDP's float32 `main_grad` buffers."""

    def begin(self) -> None: ...

    def add(self) -> None: ...

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take in a gradient that a split backward had put off."""

    def reduce(self) -> None: ...


class PlainMegatronGradients:
    """Megatron's own way: backward hooks add into `main_grad`; one reduction over replicas a step, then the sums over
    tensor parallel ranks (norms under sequence parallelism) and over the two copies of a tied embedding."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def begin(self) -> None:
        self._ddp.zero_grad_buffer()
        for parameter in self._ddp.parameters():
            # Megatron's float32 optimizer leaves `grad` aliased to `main_grad`: the first backward would count twice.
            parameter.grad = None

    def add(self) -> None: ...

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.main_grad.add_(gradient)  # type: ignore[attr-defined]

    def reduce(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._ddp])


@dataclass(slots=True)
class _Live:
    """One micro-batch between its forward and its backward."""

    input: torch.Tensor | None
    output: torch.Tensor
    stored_bytes: int


class MegatronStage:
    """One pipeline rank of a GPTModel wrapped in megatron-core's DistributedDataParallel.

    `dropout_seed` keys random numbers by (seed, step, replica, micro-batch, stage); the tensor parallel rank is added
    by Megatron's tracker, and recomputation replays them. `measure_bytes` counts stored activations with saved-tensor
    hooks (slower: for traced steps).
    """

    def __init__(
        self, ddp: Any, *, gradients: MegatronGradients | None = None, dropout: bool = False, measure_bytes: bool = True
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.packed_seq_params import PackedSeqParams

        self._ddp, self._config = ddp, ddp.config
        self._gradients = gradients or PlainMegatronGradients(ddp)
        megatron_split.install()
        self._deferred = DeferredGradients(ddp.parameters(), self._gradients.add_weight)
        self._dropout, self.measure_bytes = dropout, measure_bytes
        self._packed_seq_params = PackedSeqParams
        self._counts_loss = parallel_state.get_tensor_model_parallel_rank() == 0
        self._parameter_storages = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
        self._device = next(ddp.parameters()).device
        self._layers = list(ddp.module.decoder.layers)

    def start_step(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._batches: dict[int, Batch] = {}
        self._live: dict[tuple[int, int], _Live] = {}
        self._put_off: dict[tuple[int, int], Work] = {}
        self._gradients.begin()

    def load(self, micro_batch: int, batch: Batch) -> None:
        loaded = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        if "cu_seqlens" in batch:  # read off before it goes to the device: no synchronisation later
            loaded["max_seqlen"] = int(batch["cu_seqlens"].diff().max())
        self._batches[micro_batch] = loaded

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        batch, plan = self._batches[micro_batch], self._plan
        last = stage == plan.num_stages - 1
        x_SBH = inputs[0].detach().requires_grad_() if inputs else None
        self._ddp.module.set_input_tensor(x_SBH)
        self._set_recompute(plan.micro_batches[micro_batch].recompute)
        if self._dropout:
            self._seed(stage, micro_batch)
        stored = _StoredBytes(self._parameter_storages)
        hooks: AbstractContextManager[Any] = (
            torch.autograd.graph.saved_tensors_hooks(stored.pack, _unpack) if self.measure_bytes else nullcontext()
        )
        with hooks:
            output = self._ddp(
                input_ids=batch.get("tokens"),
                position_ids=batch.get("position_ids"),
                attention_mask=None,
                labels=batch["labels"] if last else None,
                packed_seq_params=self._packed(micro_batch, batch),
            )
            if last:
                output = (output.float() * batch["loss_weights"]).sum() / plan.loss_divisor
        self._ddp.module.set_input_tensor(None)
        self._live[stage, micro_batch] = _Live(x_SBH, output, stored.num_bytes)
        if last:
            self._loss_sum += output.detach().double()
            return ()
        return (output.detach(),)

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        live = self._live.pop((stage, micro_batch))
        torch.autograd.backward(live.output, output_grads[0] if output_grads else None)
        self._gradients.add()
        del self._batches[micro_batch]
        if live.input is None:
            return ()
        assert live.input.grad is not None
        return (live.input.grad,)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        with self._deferred.deferring() as work:
            input_grads = self.backward(stage, micro_batch, output_grads)
        self._put_off[stage, micro_batch] = work
        return input_grads

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._deferred.run(self._put_off.pop((stage, micro_batch)))

    def finish_step(self) -> float:
        self._gradients.reduce()
        if not self._counts_loss:
            self._loss_sum.zero_()  # tensor parallel ranks all hold the same loss: count it once
        dist.all_reduce(self._loss_sum)
        return float(self._loss_sum)

    def held_bytes(self) -> int:
        put_off = sum(deferred_bytes(work) for work in self._put_off.values())
        return put_off + sum(live.stored_bytes for live in self._live.values())

    def weight_bytes(self) -> int:
        """Weights and their float32 gradient buffers on this rank."""
        return sum(p.numel() * (p.element_size() + 4) for p in self._ddp.parameters())

    def _packed(self, micro_batch: int, batch: Batch) -> Any:
        if self._plan.micro_batches[micro_batch].layout != "packed":
            return None
        cu_seqlens = batch["cu_seqlens"]
        longest = batch["max_seqlen"]
        return self._packed_seq_params(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def _set_recompute(self, recompute: str) -> None:
        """Megatron reads these at run time: "full" in its block's forward, "selective" in each attention layer's."""
        full = recompute == "full"
        self._config.recompute_granularity = "full" if full else None
        self._config.recompute_method = "uniform" if full else None
        self._config.recompute_num_layers = 1 if full else None
        for layer in self._layers:
            layer.self_attention.checkpoint_core_attention = recompute == "selective"

    def _seed(self, stage: int, micro_batch: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        plan = self._plan
        key = hash((plan.seed, plan.step, plan.dp_rank, micro_batch, stage)) % 2**31
        model_parallel_cuda_manual_seed(key, force_reset_rng=True)


class _StoredBytes:
    """Counts what autograd saves, each storage once, weights left out."""

    def __init__(self, known: set[int]) -> None:
        self._seen, self._known = set[int](), known
        self.num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self._seen and pointer not in self._known:
            self._seen.add(pointer)
            self.num_bytes += storage.nbytes()
        return tensor


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def wrap_ddp(model: torch.nn.Module, config: Any, *, distributed_optimizer: bool = False) -> Any:
    """Megatron's DDP with float32 gradient buffers; gradients are summed, never averaged, over replicas."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(config, ddp_config, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Adam with linear warm-up and cosine decay over `num_steps`; `clip_grad` is the global norm (0: off)."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 5
    num_steps: int = 100
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    distributed: bool = False


class MegatronOptimizer:
    """Megatron's optimizer and learning-rate schedule behind two calls."""

    def __init__(self, ddp: Any, config: Any, settings: OptimizerSettings) -> None:
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
            lr_warmup_steps=min(settings.warmup_steps, settings.num_steps - 1),
            lr_decay_steps=settings.num_steps,
            lr_decay_style="cosine",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=settings.num_steps,
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


def main_grads(ddp: Any) -> dict[str, torch.Tensor]:
    """Name -> float32 gradient sums of this rank, after `finish_step`."""
    return {name: parameter.main_grad for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
