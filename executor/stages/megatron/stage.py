"""The stage of Megatron's model chunks: where their layers are, steps, split backwards, pieces, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from dynapipe_ext.batch.micro_batches import Recompute
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import on_device
from dynapipe_ext.executor.events import PreferenceFigures
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.chunk_runner import (
    HEAD_SLICE_KEY,
    ChunkRunner,
    GradientAccumulator,
    Replay,
    deferred_of,
    random_key,
    replay_torch,
    seed_of,
)
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined
from dynapipe_ext.executor.stages.megatron.core_attention import CarriedRow
from dynapipe_ext.executor.stages.megatron.embedding_part import EmbeddingPart, receive
from dynapipe_ext.executor.stages.megatron.head import HeadPart, head_in_slices, part_behind_layers, part_of
from dynapipe_ext.executor.stages.megatron.layers import rotate_without_waiting, with_lengths
from dynapipe_ext.executor.stages.megatron.placed_rows import take_pieces, take_slices
from dynapipe_ext.executor.stages.position_losses import LossOfPairs, PositionLoss, weighted_sum
from dynapipe_ext.executor.stages.spread_head import Message, spread_losses


class RecomputeSwitch:
    """Of one model chunk's layers. Megatron reads these settings at run time: "full" in its block's forward,
    "selective" in each attention layer's."""

    def __init__(self, chunk: Any) -> None:
        from megatron.core.transformer.attention import Attention
        from megatron.core.transformer.transformer_block import TransformerBlock

        modules = list(chunk.modules())
        self._blocks = [module for module in modules if isinstance(module, TransformerBlock)]
        self._attentions = [module for module in modules if isinstance(module, Attention)]

    def set(self, recompute: Recompute) -> None:
        """For the forwards to come."""
        full = recompute == "full"
        for block in self._blocks:
            block.config.recompute_granularity = "full" if full else None
            block.config.recompute_method = "uniform" if full else None
            block.config.recompute_num_layers = 1 if full else None
        for attention in self._attentions:
            attention.checkpoint_core_attention = recompute == "selective"


def replay_megatron(device: torch.device) -> Replay:
    """As `replay_torch`, with the generators that Megatron keeps for its tensor parallel ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    replayed, tracker = replay_torch(device), get_cuda_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def replay() -> Iterator[None]:
        before = tracker.get_states()
        tracker.set_states(states)
        try:
            with replayed():
                yield
        finally:
            tracker.set_states(before)

    return replay


_NAME = "LinearWithGradAccumulationAndAsyncCommunication"
LINEAR = "megatron.core.tensor_parallel.layers", _NAME  # what `split_megatron_linears` replaces


def split_megatron_linears() -> None:
    """Put a function of the same arithmetic in the place of Megatron's; idempotent.

    Without a stage that defers, it calls Megatron's own backward: nothing changes for other users in this process.
    """
    from megatron.core.tensor_parallel import layers
    from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

    original = getattr(layers, _NAME)
    if getattr(original, "is_splittable", False):
        return

    class SplittableLinear(torch.autograd.Function):
        """I: input gradient and its collective. W, later: output_grad^T x input, over the gathered sequence."""

        is_splittable = True

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            # Under saved-tensor hooks the weight that comes back from the saved tensors is another object, without the
            # attribute that says where its gradient goes.
            ctx.weight = arguments[1]
            ctx.num_others = len(arguments) - 3  # 6, and one more from megatron-core 0.19 on
            return original.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors[0], ctx.weight
            queue = deferred_of(weight)
            if queue is None or ctx.grad_output_buffer is not None:
                return original.backward(ctx, *grads)
            (y_grad,) = grads
            gathered = _gathered(x, ctx.tp_group) if ctx.sequence_parallel else x
            x_grad = y_grad.matmul(weight)
            flat_grad, flat_x = prepare_input_tensors_for_wgrad_compute(y_grad, gathered)
            if ctx.allreduce_dgrad:
                dist.all_reduce(x_grad, group=ctx.tp_group)
            elif ctx.sequence_parallel:
                shard = torch.empty_like(x)
                dist.reduce_scatter_tensor(shard, x_grad, group=ctx.tp_group)
                x_grad = shard
            queue.take(weight, flat_x, flat_grad)
            bias_grad = flat_grad.sum(dim=0) if ctx.use_bias else None
            return x_grad, None, bias_grad, *[None] * ctx.num_others

    setattr(layers, _NAME, SplittableLinear)


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole sequence. It is kept until W, so it cannot live in the buffer that Megatron shares between layers."""
    whole = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole


Chunks = Sequence[Any]  # a rank's model chunks, one a stage and in their order, each in megatron-core's DDP


def gpt_call(
    chunk: Any,
    batch: Batch,
    x_SBH: torch.Tensor | None = None,
    *before: torch.Tensor,
    of_positions: PositionLoss = weighted_sum,
) -> torch.Tensor | Message | LossOfPairs:
    """Runs a chunk of a GPTModel: hidden states, or, where it ends in the head, the sum that `of_positions` makes.

    A part of the head is given the numbers of the parts `before` it, and gives a message to the next. A part of the
    embedding adds its rows to those it is given.
    """
    model, slices = unwrapped(chunk), batch.get(HEAD_SLICE_KEY)
    if isinstance(model, HeadPart):
        labels_SB = batch["labels"].transpose(0, 1).contiguous()
        message: Message = chunk(labels_SB, slices, x_SBH, *before)
        if not model.is_last:
            return message
        return of_positions(spread_losses(message, labels_SB).transpose(0, 1).contiguous(), batch)
    if isinstance(model, EmbeddingPart):
        embedded: torch.Tensor = chunk(batch["tokens"], x_SBH)
        return embedded
    if model.pre_process and x_SBH is not None:
        receive(model, x_SBH)
    is_part = model.post_process and part_of(model.output_layer.weight) is not None
    model.set_input_tensor(x_SBH)
    with part_behind_layers(model, slices) if is_part else head_in_slices(model, slices):
        output: Any = chunk(
            input_ids=batch.get("tokens"),
            position_ids=batch.get("position_ids"),
            attention_mask=None,
            labels=batch["labels"] if model.post_process else None,
            packed_seq_params=batch.get("packed"),
        )
    model.set_input_tensor(None)
    return of_positions(output.float(), batch) if model.post_process and not is_part else output


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


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc] # megatron has no types
    """Megatron's pipeline layout with stage s on rank `placement[s]`, of which it is the next virtual stage.

    Megatron's own puts stage s on rank s mod pp. Layer numbers are global; ranks may hold unequal numbers of stages. A
    layer that is cut between attention and MLP is one of both stages.
    """

    def __init__(self, topology: Topology, num_layers: int) -> None:
        layers = topology.with_layers(num_layers).stage_layers
        stages = [[LayerType.decoder] * len(stage.held) for stage in layers]
        stages[0].insert(0, LayerType.embedding)  # of a spread vocabulary the ends of its chains stand for it
        stages[-1].append(LayerType.loss)
        self._topology, self._layers = topology, layers
        self.input_data: Any = stages
        self.pipeline_model_parallel_size = topology.pp
        self.virtual_pipeline_model_parallel_size = max(len(topology.stages_of(rank)) for rank in range(topology.pp))
        self.layout = [[list(stages[stage]) for stage in topology.stages_of(rank)] for rank in range(topology.pp)]
        for held in self.layout:  # Megatron reads as many virtual stages of every rank
            held += [[]] * (self.virtual_pipeline_model_parallel_size - len(held))
        # Of a layer on two stages, Megatron counts the half with the attention.
        self.flatten_layout = [LayerType.embedding, *[LayerType.decoder] * num_layers, LayerType.loss]

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Decoder layers before the first that a virtual stage of a rank (default: this one) has a half of."""
        assert layer_type == LayerType.decoder
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return self._layers[self._topology.stages_of(rank)[vp_stage or 0]].held.start


def virtual_stage(topology: Topology, stage: int, config: Any) -> int | None:
    """Which of its rank's chunks a stage is, as Megatron wants it: None where ranks hold one."""
    if config.virtual_pipeline_model_parallel_size is None:
        return None
    return topology.stages_of(topology.stage_ranks[stage]).index(stage)


def is_tied_by_megatron(topology: Topology) -> bool:
    """Whether Megatron keeps a tied embedding and head equal: in one stage, or as copies on the first and last rank.

    Else one rank holds both ends, or parts of both, and `build_chunks` makes them one weight. Errors: ConfigError where
    neither is so.
    """
    if topology.vocabulary == "both":
        return False
    first, last = topology.stage_ranks[0], topology.stage_ranks[-1]
    num_chunks = {len(topology.stages_of(rank)) for rank in range(topology.pp)}
    if topology.num_stages == 1 or ((first, last) == (0, topology.pp - 1) and len(num_chunks) == 1):
        return True
    if first == last:
        return False
    raise ConfigError(
        f"tied embeddings under placement {topology.stage_ranks}: Megatron sums the gradients of two copies between the"
        " first stage of rank 0 and the last stage of the last rank, of as many stages each: place them so, or both on"
        " one rank, or untie them (tied_embeddings false)"
    )


class MegatronStage:
    """The model chunks of one pipeline rank, each wrapped in megatron-core's DistributedDataParallel.

    `call(chunk, batch, *inputs)` runs one chunk on one micro-batch, `inputs` being what the stage before returned
    (nothing on the first): it returns what crosses to the next stage, a tensor or a tuple of them, or on the last
    stage the weighted sum of the micro-batch's losses, which the step divides by the plan's `loss_divisor`. `batch` has
    the collate function's tensors on the device, and for a packed row "packed", Megatron's PackedSeqParams.

    With `dropout`, random numbers are keyed by (seed, step, samples of the micro-batch, layer); the tensor parallel
    rank is added by Megatron's tracker, and recomputation replays them. `measure_bytes` counts stored activations with
    saved-tensor hooks. Whether chunks train or evaluate is theirs (`train()`, `eval()`). `joined` (`join_ranks`) are
    the ranks with which plans may join this one, by width.
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
        joined: Joined = ALONE,
    ) -> None:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        self._chunks, self._call = _checked(chunks), call
        split_megatron_linears()
        rotate_without_waiting()
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        self._device = parameters[0].device
        self._runner = ChunkRunner(
            [any(parameter.requires_grad for parameter in chunk.parameters()) for chunk in self._chunks],
            gradients or MegatronGradients(self._chunks),
            parameters=parameters,
            make_splittable=lambda: parameters,
            device=self._device,
            measure_bytes=measure_bytes,
            replay=replay_megatron,
            joined=joined,
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
        """Errors: ConfigError for pieces of cut samples where the chunks do not attend to earlier ones, and for joined
        ranks where they do not share rows."""
        if not self._takes_pieces and any(m.attention == "carried" for m in plan.micro_batches):
            for chunk in self._chunks:
                take_pieces(unwrapped(chunk))
            self._takes_pieces = True
        self._runner.start_step(plan)
        self._plan = plan
        for chunk in self._chunks:
            take_slices(unwrapped(chunk), self._runner.joined_now)

    def load(self, micro_batch: int, batch: Batch) -> None:
        if "cu_seqlens" in batch:
            batch = {**batch, "packed": self._packed(batch["cu_seqlens"].diff().tolist())}
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

    def preferences(self) -> PreferenceFigures | None:
        """Of the last step, over all ranks, where its loss is of pairs of answers."""
        return self._runner.preferences

    def held_bytes(self) -> int:
        return self._runner.held_bytes()

    def weight_bytes(self) -> int:
        """Weights and their float32 gradient buffers on this rank."""
        return self._num_weight_bytes

    def _call_chunk(self, number: int, micro_batch: int, batch: Batch, *inputs: torch.Tensor) -> Any:
        planned = self._plan.micro_batches[micro_batch]
        self._recompute[number].set("none" if self._plan.forward_only else planned.layer_recompute)
        if "carried" in batch:
            batch = {**batch, "packed": self._packed(batch["packed"].document_lengths, batch["carried"])}
        return self._call(self._chunks[number], batch, *inputs)

    def _packed(self, document_lengths: Sequence[int], carried: CarriedPiece | None = None) -> Any:
        joined = self._runner.joined_now
        span = None if joined is None else joined.span(sum(document_lengths))
        return packed_parameters(document_lengths, self._device, carried, span=span)

    def _sum_over_job(self, loss: torch.Tensor) -> None:
        if not self._counts_loss:
            loss.zero_()  # tensor parallel ranks all hold the same loss: count it once
        dist.all_reduce(loss)

    def _key_dropout(self) -> None:
        """Before each layer and its MLP, seed by what it works on: masks depend neither on schedule, placement nor
        replica, nor on whether a layer is cut between the two."""
        for chunk, layers in zip(self._chunks, self._layers, strict=True):
            model = unwrapped(chunk)
            encoder = set(getattr(getattr(model, "encoder", None), "layers", ()))
            keyed = [("encoder " * (x in encoder) + f"layer {x.layer_number - 1}", x) for x in layers]
            for name, module in keyed:
                module.register_forward_pre_hook(lambda _module, _inputs, name=name: self._seed(name))
                norm = module.pre_mlp_layernorm
                norm.register_forward_pre_hook(lambda _module, _inputs, name=name: self._seed(f"{name} mlp"))
            if hasattr(model, "embedding"):  # of an encoder-decoder it says which side it reads just now
                model.embedding.register_forward_pre_hook(
                    lambda module, _inputs: self._seed(f"{getattr(module, 'side', '')} embedding".strip())
                )

    def _seed(self, layer: str) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        seed = seed_of(random_key(self._plan, self._working_on, self._runner.joined_now), layer)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def unwrapped(chunk: Any) -> Any:
    """The model itself, within DDP and whatever else has a `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def first_layers(model: Any) -> dict[str, int]:
    """The number in the whole model of a part's first layer, by side; 0 of a side without layers."""
    sides = {side: getattr(getattr(model, side, None), "layers", ()) for side in ("decoder", "encoder")}
    return {side: layers[0].layer_number - 1 if layers else 0 for side, layers in sides.items()}


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
        if next(chunk.parameters(), None) is None and not isinstance(unwrapped(chunk), HeadPart):
            raise ConfigError(
                f"model chunk {number} owns no parameters: give its stage at least one layer (layers_per_stage)"
            )
    return list(chunks)


def packed_parameters(
    document_lengths: Sequence[int],
    device: torch.device,
    carried: CarriedPiece | None = None,
    *,
    span: range | None = None,
) -> Any:
    """Megatron's description of a packed row; `document_lengths` stays on the host, so that no kernel waits for it.

    Where the row's first document is a piece of a cut sample, its attribute `carried` is a CarriedRow, else None.
    `span`: the positions of the row that this rank has, where it has not all.
    """
    packed = _borders(document_lengths, document_lengths, device, span)
    packed.document_lengths = tuple(document_lengths)
    packed.carried = None
    if carried is not None:
        length, *others = document_lengths
        to_prefix = _borders([length], [carried.end], device)
        packed.carried = CarriedRow(carried, to_prefix, packed_parameters(others, device) if others else None)
    return packed


def _borders(queries: Sequence[int], keys: Sequence[int], device: torch.device, span: range | None = None) -> Any:
    """Megatron's description of documents of so many queries and keys each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    q_borders, k_borders = (
        with_lengths(on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), lengths, span)
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


def own_parameters(chunks: Chunks) -> list[Any]:
    """Of those that train, the ones of which this rank's copy counts among all of its replica's."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    trained = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    return [p for p in trained if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)]
