"""A Stage made of parts of a causal model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from dynapipe_ext.data.collate import document_lengths, document_positions
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.device import on_device
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Reductions
from dynapipe_ext.executor.stages.accumulator import PlainAccumulator
from dynapipe_ext.executor.stages.keyed_random import random_key
from dynapipe_ext.executor.stages.torch_stage import LossFunction, MakeAccumulator, TorchStage
from dynapipe_ext.executor.stages.transformers_layers import has_tied_ends
from dynapipe_ext.executor.stages.transformers_parts import TransformersPart
from dynapipe_ext.packing.attention import DOCUMENT_ATTENTION
from dynapipe_ext.packing.check import rotary_settings
from dynapipe_ext.plan import MicroBatch

_FLASH = ("flash_attention_2", "flash_attention_3")
_KEEPS_DOCUMENTS_APART = ("sdpa", "eager", DOCUMENT_ATTENTION, *_FLASH)


def token_loss_sum(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross-entropy of every position in float32, times "loss_weights", summed."""
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none"
    )
    total: torch.Tensor = (losses * batch["loss_weights"].flatten()).sum()
    return total


class TransformersStage(TorchStage):
    """The parts of one pipeline rank, one a stage in their order, as `parts_of_model` and its neighbours give them.

    Rows are padded behind their samples, or packed with attention within each document; positions, borders, random
    numbers and recomputation follow from the plan: where it recomputes, be it core attention alone ("selective"), whole
    layers are recomputed, which keeps less than promised. Where head and embedding are one weight on two ranks, each
    has a copy, and both get the sum of its gradients. Frozen weights get none, and a split backward puts none off.

    Errors: ConfigError and DataError for what would be trained wrongly, such as rows longer than the positions that
    the model has learned.
    """

    takes_pieces = True

    def __init__(
        self,
        parts: Sequence[TransformersPart],
        *,
        loss: LossFunction = token_loss_sum,
        accumulator: MakeAccumulator = PlainAccumulator,
        parallel: Reductions | None = None,
    ) -> None:
        self._parts = list(parts)
        if not self._parts or not all(isinstance(part, TransformersPart) for part in self._parts):
            raise ConfigError("TransformersStage takes a list of parts: give parts_of_model(model, topology, pp_rank)")
        weight = copied_weight(self._parts)
        if weight is not None and weight.requires_grad and parallel is not None:  # on both ranks, or on none
            accumulator = partial(accumulator, copies={weight: parallel.sum_over_ends})
        super().__init__(self._parts, loss, accumulator=accumulator, parallel=parallel, restarts_attention=True)
        self._doubts_loss = loss is not token_loss_sum
        self._device = next(self._parts[0].parameters()).device

    def start_step(self, plan: ExecutionPlan) -> None:
        places = tuple(part.place.stage for part in self._parts), self._parts[0].place.num_stages
        if places != (plan.stages, plan.num_stages):
            raise ConfigError(
                f"pipeline rank {plan.pp_rank} runs stages {plan.stages} of {plan.num_stages} but has parts of stages"
                f" {places[0]} of {places[1]}: cut the model with the planner's topology"
            )
        for number, micro_batch in enumerate(plan.micro_batches):
            if fault := self._fault(micro_batch):
                raise ConfigError(f"micro-batch {number} of step {plan.step}: {fault}")
        super().start_step(plan)

    def load(self, micro_batch: int, batch: Batch) -> None:
        """Errors: DataError for tensors of another shape than planned, or padded on the left."""
        planned = self._plan.micro_batches[micro_batch]
        inputs = model_inputs(planned, self._attention)
        shape = inputs["position_ids"].shape
        for name in ("tokens", "labels", "loss_weights", "position_ids"):
            if name in batch and batch[name].shape != shape:
                raise DataError(
                    f"{name} of micro-batch {micro_batch} has shape {tuple(batch[name].shape)}, not {tuple(shape)} as"
                    " planned: give collate functions that keep to the plan"
                )
        if "position_ids" in batch and not torch.equal(batch["position_ids"].cpu(), inputs["position_ids"]):
            raise DataError(
                f"position_ids of micro-batch {micro_batch} are not those of its plan: pad rows on the right, and count"
                " from 0 in each document"
            )
        moved = {k: on_device(v, self._device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        super().load(micro_batch, {**batch, "model_inputs": moved, "random_key": random_key(self._plan, micro_batch)})

    def _call(self, stage: int, micro_batch: int, batch: Batch, *inputs: torch.Tensor) -> Any:
        recompute = "none" if self._plan.forward_only else self._plan.micro_batches[micro_batch].recompute
        self._parts[self._plan.stages.index(stage)].recompute_layers(recompute in ("selective", "full"))
        return super()._call(stage, micro_batch, batch, *inputs)

    @property
    def _attention(self) -> str:
        return str(self._parts[0].model.config._attn_implementation)

    def _fault(self, micro_batch: MicroBatch) -> str:
        """Why a micro-batch cannot be trained exactly; nothing if it can."""
        part, documents = self._parts[0], document_lengths(micro_batch)
        config, name = part.model.config.get_text_config(), type(part.model).__name__
        if micro_batch.layout == "packed" and len(documents) > 1:
            if not part.pattern.packs:
                return (
                    f"{len(documents)} documents are packed into a row, but that {name} keeps them apart is not proven:"
                    ' say LayerPattern(packs=True) where check_packing proves it, or plan with layout="padded"'
                )
            if self._attention not in _KEEPS_DOCUMENTS_APART:
                return (
                    f"{name} is not known to keep packed documents apart under {self._attention}: build it with"
                    f' attn_implementation={" or ".join(_KEEPS_DOCUMENTS_APART)}, or plan with layout="padded"'
                )
        if micro_batch.attention == "carried":
            if self._attention != DOCUMENT_ATTENTION:
                return (
                    f"{name} attends by {self._attention}, which knows no keys of earlier pieces of a cut sample: build"
                    f" it with attn_implementation=register_document_attention() ({DOCUMENT_ATTENTION}), or plan whole"
                    " samples"
                )
            piece = micro_batch.samples[0]
            documents = (*documents, piece.start + piece.encoder)
        return _too_long(config, name, max(documents))


def _too_long(config: Any, name: str, longest: int) -> str:
    """Why rows of so many positions cannot be trained exactly; nothing if they can."""
    ropes, learned = rotary_settings(config), getattr(config, "max_position_embeddings", None)
    for rope in ropes:
        trained = rope.get("original_max_position_embeddings") or learned
        if rope.get("rope_type") in ("dynamic", "longrope") and trained is not None and longest > trained:
            return (
                f"rows of {longest} positions change the rotary frequencies of {name} ({rope['rope_type']} above"
                f" {trained}) for all their samples: keep samples, rounded up to pad_multiple, within that"
            )
    if not ropes and learned is not None and longest > learned:
        return (
            f"rows of {longest} positions exceed the {learned} that {name} has learned: truncate samples to that, a"
            " multiple of pad_multiple"
        )
    return ""


def model_inputs(micro_batch: MicroBatch, attention: str) -> dict[str, Any]:
    """What a model's forward needs beside ids or hidden states; it follows from the plan alone, on every stage.

    position_ids restart in each document (a piece's go on from the one before), by which transformers' masks keep
    documents apart; kernels without masks take the borders.
    """
    documents = document_lengths(micro_batch)
    inputs: dict[str, Any] = {"position_ids": torch.from_numpy(document_positions(micro_batch))}
    if attention == DOCUMENT_ATTENTION or (attention in _FLASH and micro_batch.layout == "packed"):
        borders = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        inputs |= {"max_length_q": max(documents), "max_length_k": max(documents)}
    return inputs


def copied_weight(parts: Sequence[TransformersPart]) -> Any:
    """This rank's copy of a tied weight that another rank has, too; None where there is none."""
    first, last = parts[0], parts[-1]
    if first.place.is_first and last.place.is_last:
        return None  # both ends are here: one parameter
    if first.place.is_first and has_tied_ends(first.model):
        return first.model.get_input_embeddings().weight
    if last.place.is_last and has_tied_ends(last.model):
        return last.model.get_output_embeddings().weight
    return None
