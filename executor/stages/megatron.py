"""A Stage of megatron-core: its DDP buffers, its gradient reduction, its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages import megatron_split
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.stages.split_linear import DeferredGradients, Work, deferred_bytes
from dynapipe_ext.executor.stages.stored_bytes import StoredBytes


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

    With `dropout`, random numbers are keyed by (seed, step, samples of the micro-batch, layer); the tensor parallel
    rank is added by Megatron's tracker, and recomputation replays them. `measure_bytes` counts stored
    activations with saved-tensor hooks.
    """

    def __init__(
        self, ddp: Any, *, gradients: MegatronGradients | None = None, dropout: bool = False, measure_bytes: bool = True
    ) -> None:
        from megatron.core import parallel_state

        self._ddp, self._config = ddp, ddp.config
        self._gradients = gradients or PlainMegatronGradients(ddp)
        megatron_split.install()
        self._deferred = DeferredGradients(ddp.parameters(), self._gradients.add_weight)
        self._dropout, self.measure_bytes = dropout, measure_bytes
        self._counts_loss = parallel_state.get_tensor_model_parallel_rank() == 0
        self._parameter_storages = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
        self._device = next(ddp.parameters()).device
        self._layers = list(ddp.module.decoder.layers)
        if dropout:
            self._key_dropout(ddp.module)

    def start_step(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._losses: dict[int, torch.Tensor] = {}
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
        if "cu_seqlens" in batch:
            loaded["packed"] = packed_parameters(batch["cu_seqlens"].diff().tolist(), self._device)
        self._batches[micro_batch] = loaded

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        batch, plan = self._batches[micro_batch], self._plan
        last = stage == plan.num_stages - 1
        x_SBH = inputs[0].detach().requires_grad_() if inputs else None
        self._ddp.module.set_input_tensor(x_SBH)
        self._set_recompute(plan.micro_batches[micro_batch].recompute)
        self._running = micro_batch
        stored = StoredBytes(self._parameter_storages)
        name = f"step {plan.step}, {stage}F{micro_batch}"
        with named_collectives(name), stored.counting() if self.measure_bytes else nullcontext():
            output = self._ddp(
                input_ids=batch.get("tokens"),
                position_ids=batch.get("position_ids"),
                attention_mask=None,
                labels=batch["labels"] if last else None,
                packed_seq_params=batch.get("packed"),
            )
            if last:
                output = (output.float() * batch["loss_weights"]).sum() / plan.loss_divisor
        self._ddp.module.set_input_tensor(None)
        self._live[stage, micro_batch] = _Live(x_SBH, output, stored.num_bytes)
        if last:
            self._losses[micro_batch] = output.detach()
            self._loss_sum += output.detach().double()
            return ()
        return (output.detach(),)

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        live = self._live.pop((stage, micro_batch))
        self._running = micro_batch  # recomputation draws the same random numbers again
        with named_collectives(f"step {self._plan.step}, backward of micro-batch {micro_batch} on stage {stage}"):
            torch.autograd.backward(live.output, output_grads[0] if output_grads else None)
        self._gradients.add()
        del self._batches[micro_batch]
        if live.input is None:
            return ()
        assert live.input.grad is not None
        return (live.input.grad,)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        """Under full recomputation I does the work of W: all layers' inputs would come back and stay until W."""
        if self._plan.micro_batches[micro_batch].recompute == "full":
            self._put_off[stage, micro_batch] = []
            return self.backward(stage, micro_batch, output_grads)
        with self._deferred.deferring() as work:
            input_grads = self.backward(stage, micro_batch, output_grads)
        self._put_off[stage, micro_batch] = work
        return input_grads

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._deferred.run(self._put_off.pop((stage, micro_batch)))

    def finish_step(self) -> float:
        with named_collectives(f"step {self._plan.step}, reduction of gradients and loss"):
            return self._reduced()

    def _reduced(self) -> float:
        self._gradients.reduce()
        if not self._counts_loss:
            self._loss_sum.zero_()  # tensor parallel ranks all hold the same loss: count it once
        dist.all_reduce(self._loss_sum)
        return float(self._loss_sum)

    def losses(self) -> dict[int, float]:
        """Micro-batch -> its share of the step's loss; empty where the last stage does not run."""
        return {micro_batch: float(loss) for micro_batch, loss in self._losses.items()}

    def held_bytes(self) -> int:
        put_off = sum(deferred_bytes(work) for work in self._put_off.values())
        return put_off + sum(live.stored_bytes for live in self._live.values())

    def weight_bytes(self) -> int:
        """Weights and their float32 gradient buffers on this rank."""
        return sum(p.numel() * (p.element_size() + 4) for p in self._ddp.parameters())

    def _set_recompute(self, recompute: str) -> None:
        """Megatron reads these at run time: "full" in its block's forward, "selective" in each attention layer's."""
        full = recompute == "full"
        self._config.recompute_granularity = "full" if full else None
        self._config.recompute_method = "uniform" if full else None
        self._config.recompute_num_layers = 1 if full else None
        for layer in self._layers:
            layer.self_attention.checkpoint_core_attention = recompute == "selective"

    def _key_dropout(self, model: torch.nn.Module) -> None:
        """Before each layer, seed by what it works on: masks depend neither on schedule, placement nor replica."""
        first = self._layers[0].layer_number - 1 if self._layers else 0
        keyed = [(f"layer {first + i}", layer) for i, layer in enumerate(self._layers)]
        if hasattr(model, "embedding"):
            keyed.append(("embedding", model.embedding))
        for name, module in keyed:
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: self._seed(name))

    def _seed(self, layer: str) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        plan = self._plan
        samples = [(s.index, s.start) for s in plan.micro_batches[self._running].samples]
        key = hashlib.sha256(f"{plan.seed}/{plan.step}/{samples}/{layer}".encode()).digest()
        model_parallel_cuda_manual_seed(int.from_bytes(key[:4], "little") >> 1, force_reset_rng=True)


def packed_parameters(document_lengths: Sequence[int], device: torch.device) -> Any:
    """Megatron's description of a packed row; `document_lengths` stays on the host, so that no kernel waits for it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    borders = torch.tensor([0, *accumulate(document_lengths)], dtype=torch.int32, device=device)
    longest = max(document_lengths)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    packed.document_lengths = tuple(document_lengths)
    return packed


def wrap_ddp(model: torch.nn.Module, config: Any, *, distributed_optimizer: bool = False) -> Any:
    """Megatron's DDP with float32 gradient buffers; gradients are summed, never averaged, over replicas."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(config, ddp_config, model)


def main_grads(ddp: Any) -> dict[str, torch.Tensor]:
    """Name -> float32 gradient sums of this rank, after `finish_step`."""
    return {name: parameter.main_grad for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
