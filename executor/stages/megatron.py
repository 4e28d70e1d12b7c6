"""A Stage of megatron-core: its model chunks, its DDP buffers, its gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import on_device
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages import megatron_split
from dynapipe_ext.executor.stages.accumulator import GradientAccumulator
from dynapipe_ext.executor.stages.attention import CarriedRow
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.chunk_runner import ChunkRunner
from dynapipe_ext.executor.stages.keyed_random import random_key, seed_of
from dynapipe_ext.executor.stages.megatron_pieces import take_pieces
from dynapipe_ext.executor.stages.megatron_recompute import RecomputeSwitch, replay_megatron
from dynapipe_ext.executor.stages.megatron_rotary import rotate_without_waiting, with_lengths

Chunks = Sequence[Any]  # a rank's model chunks, one a stage and in their order, each in megatron-core's DDP


def gpt_call(chunk: Any, batch: Batch, x_SBH: torch.Tensor | None = None) -> torch.Tensor:
    """Runs a chunk of a GPTModel: hidden states, or, where it ends in the head, the weighted loss sum."""
    model = unwrapped(chunk)
    model.set_input_tensor(x_SBH)
    output: torch.Tensor = chunk(
        input_ids=batch.get("tokens"),
        position_ids=batch.get("position_ids"),
        attention_mask=None,
        labels=batch["labels"] if model.post_process else None,
        packed_seq_params=batch.get("packed"),
    )
    model.set_input_tensor(None)
    return (output.float() * batch["loss_weights"]).sum() if model.post_process else output


def finalize_grads(chunks: Chunks) -> None:
    """Megatron's own: one reduction over replicas, then the sums over tensor parallel ranks (norms under sequence
    parallelism) and over the two copies of a tied embedding."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(list(chunks))


class MegatronGradients(GradientAccumulator):
    """Sums in DDP's float32 `main_grad` buffers, into which backward hooks add; `finalize` reduces them.

    With None the caller does so, after the step: the sums are then this rank's own.
    """

    def __init__(self, chunks: Chunks, *, finalize: Callable[[Chunks], object] | None = finalize_grads) -> None:
        self._chunks, self._finalize = chunks, finalize

    def begin(self, plan: ExecutionPlan) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # Megatron's float32 optimizer leaves `grad` aliased to `main_grad`: the first backward would count
                # twice.
                parameter.grad = None

    def add(self) -> None: ...

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.main_grad.add_(gradient)  # type: ignore[attr-defined]

    def reduce(self) -> None:
        if self._finalize is not None:
            self._finalize(self._chunks)


class MegatronStage:
    """The model chunks of one pipeline rank, each wrapped in megatron-core's DistributedDataParallel.

    `call(chunk, batch, *inputs)` runs one chunk on one micro-batch, `inputs` being what the stage before returned
    (nothing on the first): it returns what crosses to the next stage, a tensor or a tuple of them, or on the last
    stage the weighted sum of the micro-batch's losses, which the step divides by the plan's `loss_divisor`. `batch` has
    the collate function's tensors on the device, and for a packed row "packed", Megatron's PackedSeqParams.

    With `dropout`, random numbers are keyed by (seed, step, samples of the micro-batch, layer); the tensor parallel
    rank is added by Megatron's tracker, and recomputation replays them. `measure_bytes` counts stored activations with
    saved-tensor hooks. Whether chunks train or evaluate is theirs (`train()`, `eval()`).
    Errors: ConfigError for chunks that cannot be a stage each.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        call: Callable[..., Any] = gpt_call,
        gradients: GradientAccumulator | None = None,
        dropout: bool = False,
        measure_bytes: bool = True,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_layer import TransformerLayer

        self._chunks, self._call = _checked(chunks), call
        megatron_split.split_megatron_linears()
        rotate_without_waiting()
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        self._device = parameters[0].device
        self._runner = ChunkRunner(
            len(self._chunks),
            gradients or MegatronGradients(self._chunks),
            parameters=parameters,
            splittable=parameters,
            device=self._device,
            measure_bytes=measure_bytes,
            replay=replay_megatron,
        )
        self._counts_loss = parallel_state.get_tensor_model_parallel_rank() == 0
        self._num_weight_bytes: int = sum(p.numel() * (p.element_size() + 4) for p in parameters)
        self._recompute = [RecomputeSwitch(chunk) for chunk in self._chunks]
        self._layers = [[m for m in chunk.modules() if isinstance(m, TransformerLayer)] for chunk in self._chunks]
        self._takes_pieces = False
        if dropout:
            self._key_dropout()

    def count_bytes(self, enabled: bool) -> None:
        """Whether stored activations are counted from here on."""
        self._runner.measure_bytes = enabled

    def start_step(self, plan: ExecutionPlan) -> None:
        """Errors: ConfigError for pieces of cut samples where the chunks do not attend to earlier ones."""
        if not self._takes_pieces and any(m.attention == "carried" for m in plan.micro_batches):
            for chunk in self._chunks:
                take_pieces(unwrapped(chunk))
            self._takes_pieces = True
        self._runner.start_step(plan)
        self._plan = plan

    def load(self, micro_batch: int, batch: Batch) -> None:
        if "cu_seqlens" in batch:
            batch = {**batch, "packed": packed_parameters(batch["cu_seqlens"].diff().tolist(), self._device)}
        self._runner.load(micro_batch, batch)

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        number = self._plan.stages.index(stage)
        self._working_on = micro_batch
        return self._runner.forward(stage, micro_batch, inputs, partial(self._call_chunk, number, micro_batch))

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        self._working_on = micro_batch  # recomputation draws the same random numbers again
        return self._runner.backward(stage, micro_batch, output_grads)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        self._working_on = micro_batch
        return self._runner.backward_input(stage, micro_batch, output_grads)

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._runner.backward_weight(stage, micro_batch)

    def finish_step(self) -> float:
        return self._runner.finish_step(self._sum_over_job)

    def losses(self) -> dict[int, float]:
        """Micro-batch -> its share of the step's loss; empty where the last stage does not run."""
        return self._runner.losses()

    def held_bytes(self) -> int:
        return self._runner.held_bytes()

    def weight_bytes(self) -> int:
        """Weights and their float32 gradient buffers on this rank."""
        return self._num_weight_bytes

    def _call_chunk(self, number: int, micro_batch: int, batch: Batch, *inputs: torch.Tensor) -> Any:
        planned = self._plan.micro_batches[micro_batch]
        self._recompute[number].set("none" if self._plan.forward_only else planned.recompute)
        if "carried" in batch:
            packed = packed_parameters(batch["packed"].document_lengths, self._device, batch["carried"])
            batch = {**batch, "packed": packed}
        return self._call(self._chunks[number], batch, *inputs)

    def _sum_over_job(self, loss: torch.Tensor) -> None:
        if not self._counts_loss:
            loss.zero_()  # tensor parallel ranks all hold the same loss: count it once
        dist.all_reduce(loss)

    def _key_dropout(self) -> None:
        """Before each layer, seed by what it works on: masks depend neither on schedule, placement nor replica."""
        for chunk, layers in zip(self._chunks, self._layers, strict=True):
            model = unwrapped(chunk)
            encoder = set(getattr(getattr(model, "encoder", None), "layers", ()))
            keyed = [("encoder " * (x in encoder) + f"layer {x.layer_number - 1}", x) for x in layers]
            for name, module in keyed:
                module.register_forward_pre_hook(lambda _module, _inputs, name=name: self._seed(name))
            if hasattr(model, "embedding"):  # of an encoder-decoder it says which side it reads just now
                model.embedding.register_forward_pre_hook(
                    lambda module, _inputs: self._seed(f"{getattr(module, 'side', '')} embedding".strip())
                )

    def _seed(self, layer: str) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        seed = seed_of(random_key(self._plan, self._working_on), layer)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def unwrapped(chunk: Any) -> Any:
    """The model itself, within DDP and whatever else has a `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _checked(chunks: Chunks) -> list[Any]:
    if isinstance(chunks, torch.nn.Module) or not chunks:
        raise ConfigError(
            f"MegatronStage was given {type(chunks).__name__} but takes the list of this rank's model chunks:"
            " give [chunk] where the rank has one stage"
        )
    for number, chunk in enumerate(chunks):
        if not hasattr(chunk, "zero_grad_buffer"):
            raise ConfigError(
                f"model chunk {number} is a {type(chunk).__name__}, without gradient buffers: wrap it in"
                " megatron-core's DistributedDataParallel (wrap_ddp)"
            )
        if next(chunk.parameters(), None) is None:
            raise ConfigError(
                f"model chunk {number} owns no parameters: give its stage at least one layer (layers_per_stage)"
            )
    return list(chunks)


def packed_parameters(
    document_lengths: Sequence[int], device: torch.device, carried: CarriedPiece | None = None
) -> Any:
    """Megatron's description of a packed row; `document_lengths` stays on the host, so that no kernel waits for it.

    Where the row's first document is a piece of a cut sample, its attribute `carried` is a CarriedRow, else None.
    """
    packed = _borders(document_lengths, document_lengths, device)
    packed.document_lengths = tuple(document_lengths)
    packed.carried = None
    if carried is not None:
        length, *others = document_lengths
        to_prefix = _borders([length], [carried.end], device)
        packed.carried = CarriedRow(carried, to_prefix, packed_parameters(others, device) if others else None)
    return packed


def _borders(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Any:
    """Megatron's description of documents of so many queries and keys each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    q_borders, k_borders = (
        with_lengths(on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), lengths)
        for lengths in (queries, keys)
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=q_borders,
        cu_seqlens_kv=k_borders,
        max_seqlen_q=max(queries),
        max_seqlen_kv=max(keys),
    )


def wrap_ddp(model: torch.nn.Module, config: Any, *, distributed_optimizer: bool = False) -> Any:
    """Megatron's DDP with float32 gradient buffers; gradients are summed, never averaged, over replicas."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(config, ddp_config, model)
