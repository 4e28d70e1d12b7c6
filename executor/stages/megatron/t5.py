"""T5 in stages, of Megatron's blocks: what a stage holds of encoder and decoder, and how it runs a micro-batch.

megatron-core's T5Model runs on one pipeline rank; this has its parts under its names. Between stages the encoder's
hidden states travel, from the first decoder stage on both sides': a decoder stage passes the encoder's output on, and
its gradient comes back as the sum of all that used it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.T5.t5_model import T5LMHead
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.layers import KINDS, lay_out
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.accumulator import ExactSums
from dynapipe_ext.executor.stages.chunk_runner import HEAD_SLICE_KEY, GradientAccumulator
from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients, over
from dynapipe_ext.executor.stages.megatron.head import OnePassLoss, head_in_slices
from dynapipe_ext.executor.stages.megatron.layers import MarkedNorm
from dynapipe_ext.executor.stages.megatron.stage import (
    Chunks,
    MegatronGradients,
    MegatronStage,
    PlacedLayout,
    finalize_grads,
    unwrapped,
    virtual_stage,
)
from dynapipe_ext.executor.stages.megatron.t5_attention import PairAttention, RelativePositions
from dynapipe_ext.executor.stages.split_linear import hand_over_each_use
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import ModelSide

EMBEDDING = "embedding.word_embeddings.weight"
_POSITIONS = "relative_pos_emb.relative_attention_bias.weight"


def copy_holders(architecture: Architecture, topology: Topology) -> dict[str, tuple[int, ...]]:
    """The stages that hold a copy of each weight that several may hold, in order, by its name in the whole model.

    Both sides read the embedding, and the last stage has it as a tied head; every stage with layers of a side has that
    side's relative biases.
    """
    layout, last = lay_out(architecture.num_layers, architecture.total_layers, topology), topology.num_stages - 1
    embedding = layout.find_holders()[0] | ({last} if architecture.tied_embeddings else set())
    sides = {
        side: {end} | {stage for stage, layers in enumerate(layout.layers[side]) if layers}
        for side, end in zip(KINDS[:2], (0, last), strict=True)
    }
    holders = {EMBEDDING: embedding} | {f"{side}_{_POSITIONS}": stages for side, stages in sides.items()}
    return {name: tuple(sorted(stages)) for name, stages in holders.items()}


def embedding_ranks(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """The pipeline ranks that hold the embedding, in order: what `initialize_parallel` makes a group of."""
    return tuple(sorted({topology.stage_ranks[stage] for stage in copy_holders(architecture, topology)[EMBEDDING]}))


class EncoderDecoderPart(OnePassLoss, LanguageModule):  # type: ignore[misc] # megatron has no types
    """A stage of T5: some layers of the encoder, of the decoder, or the border between them.

    Of the weights in `copy_holders` it holds those of its stage: the head's copy of the embedding, where tied and not
    beside it, is `lm_head.output_layer.weight`. The decoder's output is divided by sqrt(hidden_size) before the head
    where the model says so. Megatron's tied head has a bias that published models lack: it is there, under its name,
    and stays zero.
    """

    def __init__(self, architecture: Architecture, topology: Topology, stage: int, config: Any) -> None:
        super().__init__(config=config)
        a, layout = architecture, lay_out(architecture.num_layers, architecture.total_layers, topology)
        (num_encoder, num_decoder), holders = layout.pairs[stage], copy_holders(a, topology)
        self.pre_process, self.post_process = stage == 0, stage == topology.num_stages - 1
        self.starts_decoder = stage == layout.first_decoder_stage
        self.share_embeddings_and_output_weights = a.tied_embeddings
        self.num_embedding_ranks = len(embedding_ranks(a, topology))
        self.vp_stage = virtual_stage(topology, stage, config)
        self._head_scale = a.hidden_size**-0.5 if a.scaled_output else None
        if self.pre_process or self.starts_decoder:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=a.padded_vocab_size(),
                max_sequence_length=a.max_seq_len,
                position_embedding_type="relative",
            )
        self.encoder = self.decoder = None
        if num_encoder or self.pre_process:
            self.encoder_relative_pos_emb = _positions(a, config, bidirectional=True)
            own = _encoder_config(config, topology, [count for count, _ in layout.pairs])
            self.encoder = self._block(_encoder_layer(), num_encoder, own, is_end=stage == layout.encoder_end)
        if num_decoder or self.post_process:
            self.decoder_relative_pos_emb = _positions(a, config, bidirectional=False)
            self.decoder = self._block(_decoder_layer(), num_decoder, config, is_end=self.post_process)
        if self.post_process:
            self.lm_head = T5LMHead(
                config,
                parallel_output=True,
                vocab_size=a.padded_vocab_size(),
                pre_process=hasattr(self, "embedding"),
                share_embeddings_and_output_weights=a.tied_embeddings,
            )
            self.output_layer = self.lm_head.output_layer
            if a.tied_embeddings:
                self.output_layer.bias.requires_grad_(False)
        self._copy_number = {name: stages.index(stage) for name, stages in holders.items() if stage in stages}
        for name, module in self.copies().items():
            module.weight.shared = self._copy_number[name] > 0  # of which the gradient's norm counts one
            module.weight.shared_embedding = len(holders[name]) > 1  # in a bucket alone replicas cut all copies alike

    def _block(self, layer: Any, count: int, config: Any, *, is_end: bool) -> TransformerBlock:
        spec = TransformerBlockSubmodules([layer] * count, layer_norm=MarkedNorm)
        return TransformerBlock(config=config, spec=spec, post_process=is_end, vp_stage=self.vp_stage)

    def copies(self) -> dict[str, Any]:
        """The modules of this stage whose `weight` other stages may hold too, by its name in the whole model."""
        copies: dict[str, Any] = {}
        if hasattr(self, "embedding"):
            copies[EMBEDDING] = self.embedding.word_embeddings
        elif self.post_process and self.share_embeddings_and_output_weights:
            copies[EMBEDDING] = self.output_layer
        for side in ("encoder", "decoder"):
            if getattr(self, side) is not None:
                embedding = self.get_submodule(f"{side}_relative_pos_emb")
                copies[f"{side}_{_POSITIONS}"] = embedding.relative_attention_bias
        return copies

    def forward(
        self,
        encoder_input_ids: torch.Tensor | None,
        decoder_input_ids: torch.Tensor | None,
        encoder_attn_mask: torch.Tensor | None,
        decoder_attn_mask: torch.Tensor | None,
        encoder_decoder_attn_mask: torch.Tensor | None,
        lm_labels: torch.Tensor | None = None,
        *,
        context: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
    ) -> Any:
        """What the next stage takes: the encoder's hidden states, once the decoder has begun with the decoder's behind
        them. The last stage gives the loss of each position (rows, length), or logits where there are no labels.

        Ids and masks are T5Model's, masks as `PairAttention` takes them; `context` (the encoder's) and `x` (the
        decoder's), both (length, rows, hidden), are what the stage before gave.
        """
        if self.encoder is not None:
            context = self.encoder(
                self._embedded("encoder", encoder_input_ids) if self.pre_process else context,
                encoder_attn_mask,
                attention_bias=self.encoder_relative_pos_emb,
            )
        if self.decoder is None:
            return context
        x = self.decoder(
            self._embedded("decoder", decoder_input_ids) if self.starts_decoder else x,
            decoder_attn_mask,
            context=context,
            context_mask=encoder_decoder_attn_mask,
            attention_bias=self.decoder_relative_pos_emb,
        )
        if not self.post_process:
            return context, x
        tied = self.copies()[EMBEDDING].weight if self.share_embeddings_and_output_weights else None
        logits = self.lm_head(x if self._head_scale is None else x * self._head_scale, word_embeddings_weight=tied)
        if lm_labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(lm_labels, logits)

    def shared_embedding_or_output_weight(self) -> None:
        """Nothing for Megatron to sum, which looks on the first and the last rank alone: `sum_copies` does."""

    def _embedded(self, side: ModelSide, ids: torch.Tensor | None) -> torch.Tensor:
        self.embedding.side = side
        embedded: torch.Tensor = self.embedding(ids, None)
        return embedded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's description of the weights that are this stage's own: of several copies the first stage's is the
        one that is saved."""
        with _owning_lent_weights(self) as lent:
            state = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        head = f"{prefix}lm_head.output_layer.weight"
        if head in state and self.share_embeddings_and_output_weights:
            del state[f"{prefix}output_layer.weight"]
            state[head].key = prefix + EMBEDDING
        for name, number in self._copy_number.items():
            place = prefix + name if prefix + name in state else head
            state[place].replica_id = (number, *state[place].replica_id[1:])
            if name in lent:
                del state[place]
        return state


def lend_copies(parts: Sequence[EncoderDecoderPart]) -> None:
    """Make the copies of a weight that stages of one rank hold one: the first stage's, which the others use.

    One parameter, one gradient, one optimizer state, saved once.
    """
    owned: dict[str, Any] = {}
    for part in parts:
        for name, module in part.copies().items():
            if name in owned:
                del module.weight
                module.__dict__["weight"] = owned[name].weight  # used, not owned: parameters() leaves it out
            else:
                owned[name] = module


@contextmanager
def _owning_lent_weights(part: EncoderDecoderPart) -> Iterator[set[str]]:
    """Within, the part owns what another stage of its rank lends it: Megatron describes owned weights alone."""
    lent = {name: module for name, module in part.copies().items() if "weight" in module.__dict__}
    for module in lent.values():
        module.weight = module.__dict__.pop("weight")
    try:
        yield set(lent)
    finally:
        for module in lent.values():
            weight = module.weight
            del module.weight
            module.__dict__["weight"] = weight


def sum_copies(chunks: Sequence[Any]) -> None:
    """Add up the gradients of the weights that several stages hold, so that all of them take the same step.

    Errors: ConfigError where Megatron's groups were made for another model.
    """
    weights = {name: module.weight for chunk in chunks for name, module in unwrapped(chunk).copies().items()}
    group = _embedding_group(chunks, weights)
    grads = {name: weight.main_grad for name, weight in weights.items() if weight.requires_grad}
    if EMBEDDING in grads and group is not None:
        dist.all_reduce(grads[EMBEDDING], group=group)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        names = [f"{side}_{_POSITIONS}" for side in ("encoder", "decoder")]
        like = next(weights[name] for name in names if name in weights).float()
        whole = torch.stack([grads.get(name, torch.zeros_like(like)) for name in names])
        dist.all_reduce(whole, group=pipeline)
        for name, total in zip(names, whole, strict=True):
            if name in grads:
                grads[name].copy_(total)


def _embedding_group(chunks: Chunks, weights: Mapping[str, torch.Tensor]) -> Any:
    """The ranks that hold the embedding, if this is one of several. Errors: ConfigError as `sum_copies` has it."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    num_grouped, num_wanted = (1 if group is None else group.size()), unwrapped(chunks[0]).num_embedding_ranks
    if EMBEDDING in weights and num_grouped != num_wanted:
        raise ConfigError(
            f"Megatron's embedding group has {num_grouped} ranks but this encoder-decoder's embedding lies on"
            f" {num_wanted}: give initialize_parallel its architecture"
        )
    return group if EMBEDDING in weights and num_grouped > 1 else None


def finalize_t5_grads(chunks: Chunks) -> None:
    """Megatron's own reductions, then the sums over the stages that hold copies of a weight."""
    finalize_grads(chunks)
    sum_copies(chunks)


def sum_exact_copies(chunks: Chunks, sums: ExactSums) -> None:
    """The same of exact sums, before they are rounded."""
    weights = {name: module.weight for chunk in chunks for name, module in unwrapped(chunk).copies().items()}
    group = _embedding_group(chunks, weights)
    if group is not None:
        sums.sum_over(over(group), [weights[EMBEDDING]])
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        names = [f"{side}_{_POSITIONS}" for side in ("encoder", "decoder")]
        like = next(weights[name] for name in names if name in weights)
        sums.sum_over(over(pipeline), [weights[name] if name in weights else like.detach().clone() for name in names])


def t5_stage(chunks: Chunks, *, deterministic: bool = False, **options: Any) -> MegatronStage:
    """The stage of a rank's parts of an encoder-decoder; `options` are MegatronStage's.

    `deterministic`: exact sums. Where decoder layers on several stages are recomputed whole, those of the gradients of
    the encoder's output are not.
    """
    gradients: GradientAccumulator = MegatronGradients(chunks, finalize=finalize_t5_grads)
    if deterministic:
        gradients = ExactMegatronGradients(chunks, sum_copies=sum_exact_copies)
        for module in (module for chunk in chunks for module in unwrapped(chunk).copies().values()):
            if isinstance(module, torch.nn.Embedding | VocabParallelEmbedding):  # a head is a linear layer
                hand_over_each_use(module)
    return MegatronStage(chunks, call=t5_call, gradients=gradients, **options)


def t5_call(chunk: Any, batch: Batch, context: torch.Tensor | None = None, x: torch.Tensor | None = None) -> Any:
    """Runs a chunk of an encoder-decoder: what crosses to the next stage, or, at the head, the weighted loss sum."""
    model = unwrapped(chunk)
    with head_in_slices(model, batch.get(HEAD_SLICE_KEY)):
        output: Any = chunk(
            batch.get("encoder_tokens"),
            batch.get("decoder_tokens"),
            *_masks(batch),
            lm_labels=batch["labels"] if model.post_process else None,
            context=context,
            x=x,
        )
    return (output.float() * batch["loss_weights"]).sum() if model.post_process else output


def _masks(batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of the encoder, of the decoder, and of the decoder to the encoder, as `PairAttention` takes them.

    Those of documents stay on the host, which cuts the rows by them.
    """
    if "documents" in batch:
        encoder, decoder = batch["documents"]
        return torch.tensor([encoder, encoder]), torch.tensor([decoder, decoder]), torch.tensor([decoder, encoder])
    padding = batch.get("encoder_padding")
    hidden_B11T = None if padding is None else padding[:, None, None]
    return hidden_B11T, None, hidden_B11T


def decoder_layers(architecture: Architecture, topology: Topology) -> Topology:
    """The topology with the decoder's layers alone on its stages, of which some have none."""
    layout = lay_out(architecture.num_layers, architecture.total_layers, topology)
    return replace(topology, layers_per_stage=tuple(n for _, n in layout.pairs))


def _encoder_config(config: Any, topology: Topology, layers_per_stage: Sequence[int]) -> Any:
    """The decoder's configuration with the encoder's layers."""
    own = copy(config)
    own.num_layers = sum(layers_per_stage)
    if config.pipeline_model_parallel_layout is not None:
        placed = replace(topology, layers_per_stage=tuple(layers_per_stage))
        own.pipeline_model_parallel_layout = PlacedLayout(placed, own.num_layers)
    return own


def _positions(a: Architecture, config: Any, *, bidirectional: bool) -> RelativePositions:
    return RelativePositions(
        bidirectional=bidirectional,
        init_method=config.init_method,
        num_attention_heads=a.num_heads,
        relative_attention_num_buckets=a.relative_buckets,
        relative_attention_max_distance=a.relative_max_distance,
    )


def _encoder_layer() -> Any:
    return _with_own_parts(encoder_model_with_local_spec())


def _decoder_layer() -> Any:
    layer = _with_own_parts(decoder_model_with_local_spec())
    layer.submodules.pre_cross_attn_layernorm = MarkedNorm
    layer.submodules.cross_attention.submodules.core_attention = PairAttention
    return layer


def _with_own_parts(layer: Any) -> Any:
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MarkedNorm
    layer.submodules.self_attention.submodules.core_attention = PairAttention
    return layer
