"""Causal models of transformers in stages, wherever a pattern says that a family keeps what a pipeline cuts.

Masks, windows, rotary angles and scales are computed by the model's own forward, on every stage alike: what other
stages have leaves a place in which hidden states pass through, so every layer keeps its number and its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from dynapipe_ext.batch.document_attention import DOCUMENT_ATTENTION
from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.data.batches import document_lengths, document_positions
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.transformers.layers import (
    AbsentModule,
    PartPlace,
    StageEntry,
    StageExit,
    as_entry,
    as_exit,
    half_layer,
    key_of,
    places_of,
    remove,
)
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.models.layer_pattern import LayerPattern
from dynapipe_ext.models.named_models import rotary_settings

_CLOSE = {2: 2e-2, 4: 1e-4, 8: 1e-9}  # by bytes of a value: of the largest, the same arithmetic in other shapes
FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")
_KEEPS_DOCUMENTS_APART = ("sdpa", "eager", DOCUMENT_ATTENTION, *FLASH_ATTENTION)


class CausalPart(TransformersPart):
    """One stage of a causal model: (ids or hidden states, batch) -> hidden states or logits, (rows, length, width)."""

    pattern: LayerPattern

    def __init__(self, model: Any, place: PartPlace, pattern: LayerPattern) -> None:
        places = model.get_submodule(pattern.layers)
        embedding = key_of(model, model.get_input_embeddings())
        holders = {embedding: (0, place.num_stages - 1)} if place.num_stages > 1 and has_tied_ends(model) else {}
        super().__init__(model, place, {number: places[number] for number in place.layers}, holders)
        self.pattern = pattern
        self._entry: Any = places[0]  # of all but the first stage
        self._exit: Any = places[len(places) - 1]  # of all but the last
        self._call = model.__call__ if place.is_last else model.get_submodule(pattern.body).__call__
        for number, layer in self.own_layers.items():
            layer.register_forward_hook(self._check_output)
            mlp = [module.name for module in pattern.halves if module.half == "mlp" and hasattr(layer, module.name)]
            if mlp:
                self._seed_before(layer.get_submodule(mlp[0]), f"mlp of layer {number}")
        for name in pattern.idle if place.is_first else ():
            model.get_submodule(name).requires_grad_(False)

    def _run(self, inputs: Sequence[torch.Tensor], batch: Batch) -> Any:
        (x,) = inputs
        arguments = batch["model_inputs"] | {name: batch[name] for name in ("carried",) if name in batch}
        if self.place.is_first:
            arguments["input_ids"] = x
        else:
            arguments["inputs_embeds"] = self._entry.received = x
        self._seed("embedding")
        run = partial(self._call, use_cache=False, **arguments)
        if self.place.is_last:
            return self._logits(run, batch)
        run()
        return self._exit.take()

    def _check_output(self, layer: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) != self.pattern.returns_tuple:
            raise ConfigError(
                f"{type(layer).__name__} returns {type(output).__name__}: give its LayerPattern"
                f" returns_tuple={not self.pattern.returns_tuple}"
            )

    @property
    def _attention(self) -> str:
        return str(self.model.config.get_text_config()._attn_implementation)

    def fault(self, micro_batch: MicroBatch) -> str:
        documents = document_lengths(micro_batch)
        config, name = self.model.config.get_text_config(), type(self.model).__name__
        if micro_batch.layout == "packed" and len(documents) > 1:
            if not self.pattern.packs:
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

    def check_slices(self) -> None:
        """By a short row, whole and in two halves, whose attention sees each position alone: what then differs sees
        other positions by something else, which joined ranks do not exchange (a convolution, a state)."""
        name = type(self.model).__name__
        if self._attention != DOCUMENT_ATTENTION:
            raise ConfigError(
                f"{name} attends by {self._attention}, which does not exchange positions for heads: build it with"
                f" attn_implementation=register_document_attention() ({DOCUMENT_ATTENTION}), or plan with width 1"
            )
        was_training, length = self.model.training, 8
        self.model.train(False)
        try:
            with torch.no_grad():
                x = self._example(length)
                whole = self._run([x], {"model_inputs": _inputs_of(range(length), length, x.device)})
                halves = [
                    self._run([x[:, own.start : own.stop]], {"model_inputs": _inputs_of(own, length, x.device)})
                    for own in (range(length // 2), range(length // 2, length))
                ]
        finally:
            self.model.train(was_training)
        error = float((torch.cat(halves, dim=1) - whole).abs().max())
        if not error <= _CLOSE[whole.element_size()] * float(whole.abs().max()):
            raise ConfigError(
                f"{name} sees other positions by more than attention, so joined ranks cannot share its rows: plan with"
                " width 1"
            )

    def _example(self, length: int) -> torch.Tensor:
        """A row for the first of this stage's layers."""
        weight = next(self.parameters())
        if self.place.is_first:
            return torch.arange(length, device=weight.device)[None]
        shape = 1, length, self.model.config.get_text_config().hidden_size
        return torch.linspace(-1, 1, math.prod(shape), device=weight.device).sin().view(shape).to(weight.dtype)

    def model_inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """position_ids restart in each document (a piece's go on from the one before), by which transformers' masks
        keep documents apart; kernels without masks take the borders."""
        documents = document_lengths(micro_batch)
        inputs: dict[str, Any] = {"position_ids": torch.from_numpy(document_positions(micro_batch))}
        if self._attention == DOCUMENT_ATTENTION or (
            self._attention in FLASH_ATTENTION and micro_batch.layout == "packed"
        ):
            borders = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
            inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            inputs |= {"max_length_q": max(documents), "max_length_k": max(documents)}
        return inputs

    def checked(self, batch: Batch, micro_batch: MicroBatch, name: str) -> Batch:
        planned = torch.from_numpy(document_positions(micro_batch))
        if "position_ids" in batch and not torch.equal(batch["position_ids"].cpu(), planned):
            raise DataError(
                f"position_ids of {name} are not those of its plan: pad rows on the right, and count from 0 in each"
                " document"
            )
        return batch


class _EachPositionAlone:
    """Rows of `width` slices, of which attention sees no position but its own: it gives that one's values."""

    def __init__(self, width: int) -> None:
        self.width = width

    def attend(self, _layer: object, tensors: Sequence[torch.Tensor], *_: Any, **_options: Any) -> torch.Tensor:
        queries, _keys, values = tensors
        return values.repeat_interleave(queries.shape[2] // values.shape[2], dim=2)


def _inputs_of(own: range, length: int, device: torch.device) -> dict[str, Any]:
    """`model_inputs` of some positions of a row of one document."""
    borders = torch.tensor([0, length], dtype=torch.int32, device=device)
    return {
        "position_ids": torch.tensor([list(own)], device=device),
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": length,
        "max_length_k": length,
        "joined": _EachPositionAlone(length // len(own)),
    }


@dataclass(frozen=True, slots=True)
class CausalCut:
    """Cuts a causal model by the pattern of its family."""

    pattern: LayerPattern

    @property
    def changed(self) -> set[str]:
        return {*self.pattern.first, *self.pattern.last, *self.pattern.idle, f"{self.pattern.layers}.*"}

    def check(self, model: Any) -> None:
        """Errors: ConfigError where the model is no causal model of the pattern, or cannot be cut without a change."""
        pattern, config, name = self.pattern, model.config, type(model).__name__
        for path in (pattern.layers, *pattern.first, *pattern.last, *pattern.idle):
            if path not in dict(model.named_modules()):
                raise ConfigError(f"{name} has no module {path!r}: give the LayerPattern that names its own")
        if not isinstance(model.get_submodule(pattern.layers), torch.nn.ModuleList):
            raise ConfigError(f"{pattern.layers!r} of {name} is no list of layers: give the LayerPattern that names it")
        refuse_headless(model)
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                f"output_router_logits of {name} adds a loss of all routers together, which no stage sees: set it to"
                " False"
            )
        if getattr(config, "use_bidirectional_attention", None):
            raise ConfigError(
                f"{name} attends in both directions, so that padding would be seen: a causal model is needed"
            )
        ends = {key_of(model, end()) for end in (model.get_input_embeddings, model.get_output_embeddings)}
        if others := {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()} - ends:
            raise ConfigError(
                f"{name} ties weights other than head and embedding ({', '.join(sorted(others))}): it cannot be cut"
            )

    def places(self, config: Any, topology: Topology, pp_rank: int) -> list[PartPlace]:
        num_layers = int(config.get_text_config().num_hidden_layers)
        return places_of(topology, num_layers, pp_rank, halves=bool(self.pattern.halves))

    def in_place(self, model: Any, place: PartPlace) -> None:
        """Leave a model what its stage needs. The last stage keeps a tied embedding for its head."""
        pattern = self.pattern
        layers = model.get_submodule(pattern.layers)
        tied = has_tied_ends(model)
        embedding = key_of(model, model.get_input_embeddings()).removesuffix(".weight")
        for number, layer in enumerate(layers):
            if number not in place.layers:
                layers[number] = AbsentModule(layer, pattern.num_tupled)
            elif half := place.half_of(number):
                layers[number] = half_layer(layer, half, pattern.halves)
        if not place.is_first:
            begins_in_it = 0 in place.layers
            layers[0] = as_entry(layers[0]) if begins_in_it else StageEntry(layers[0], pattern.num_tupled)
            remove(model, pattern.idle)
            remove(model, [path for path in pattern.first if not (tied and place.is_last and path == embedding)])
        if not place.is_last:
            last = len(layers) - 1
            ends_in_it = last in place.layers
            layers[last] = as_exit(layers[last]) if ends_in_it else StageExit(layers[last], pattern.num_tupled)
            remove(model, pattern.last)
            model.all_tied_weights_keys = {}

    def part(self, model: Any, place: PartPlace) -> CausalPart:
        return CausalPart(model, place, self.pattern)


def refuse_headless(model: Any) -> None:
    """Errors: ConfigError for a model that has no logits."""
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"{type(model).__name__} has no language model head: give a causal model (AutoModelForCausalLM)"
        )


def has_tied_ends(model: Any) -> bool:
    """Whether the head's weight is that of the embedding, in the whole model and so in its parts: transformers ties by
    the outermost configuration, which need not say what that of the text does, nor anything."""
    return bool(model._tied_weights_keys and getattr(model.config, "tie_word_embeddings", False))


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
