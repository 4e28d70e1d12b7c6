"""T5 of transformers in stages: the encoder's layers first, then the decoder's.

Between stages the encoder's hidden states travel, from the first decoder stage on both sides', as of Megatron's
(`megatron_t5.py`). Both sides read the embedding, and the last stage has it where its head is tied; every stage with
layers of a side has that side's relative biases, under their name in its first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.data.pairs import pair_borders
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.transformers.layers import (
    AbsentModule,
    PartPlace,
    StageEntry,
    StageExit,
    places_of,
    remove,
    with_own_modules,
)
from dynapipe_ext.executor.stages.transformers.part import TransformersPart

EMBEDDING = "shared.weight"
_ATTENTIONS = ("sdpa", "eager")
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
_SIDES = ("encoder", "decoder")


class T5Part(TransformersPart):
    """One stage of T5: (input ids, batch), or what the stage before sent, -> hidden states or logits.

    They are (rows, length, width), the encoder's before the decoder's. `tied`: the head's weight is the embedding's.
    """

    def __init__(self, model: Any, place: PartPlace, *, tied: bool) -> None:
        encoder, decoder = self._own = _own_layers(model.config, place)
        layers = dict(zip(place.layers, [*_of(model.encoder, encoder), *_of(model.decoder, decoder)], strict=True))
        super().__init__(model, place, layers, _holders(model.config, place.layers_per_stage, tied=tied))
        self._call = model.__call__
        for side, stack in zip(_SIDES, (model.encoder, model.decoder), strict=True):
            self._seed_before(stack, f"{side} embedding")

    def _run(self, inputs: Sequence[torch.Tensor], batch: Batch) -> Any:
        encoder, decoder = self._own
        arguments = dict(batch["model_inputs"])
        if encoder and encoder.start == 0:
            arguments["input_ids"] = inputs[0]
        elif encoder:
            arguments["inputs_embeds"] = self.model.encoder.block[0].received = inputs[0]
        else:
            arguments["encoder_outputs"] = (inputs[0],)
        if not decoder:
            output = self.model.encoder(**arguments)
            end = self.model.encoder.block[-1]
            return end.take() if isinstance(end, StageExit) else output.last_hidden_state
        if decoder.start == 0:
            arguments["decoder_input_ids"] = batch["decoder_tokens"]
        else:
            arguments["decoder_inputs_embeds"] = self.model.decoder.block[0].received = inputs[1]
        run = partial(self._call, use_cache=False, **arguments)
        if self.place.is_last:
            return self._logits(run, batch)
        output = run()
        return output.encoder_last_hidden_state, self.model.decoder.block[-1].take()

    def fault(self, micro_batch: MicroBatch) -> str:
        name, attention = type(self.model).__name__, self.model.config._attn_implementation
        if attention not in _ATTENTIONS:
            return (
                f"{name} is not known to add its relative biases under {attention}: build it with attn_implementation="
                f"{' or '.join(_ATTENTIONS)}"
            )
        if micro_batch.layout == "packed":
            return (
                f"{name} has relative positions of whole rows, which know no borders of packed pairs: plan with"
                ' layout="padded"'
            )
        return ""

    def check_slices(self) -> None:
        raise ConfigError(
            f"{type(self.model).__name__} adds relative biases of whole rows, of which joined ranks have slices: plan"
            " with width 1, or train a T5 by megatron-core"
        )

    def model_inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Which positions of the encoder are no padding; what pads a decoder's rows lies behind causal attention."""
        padding = pair_borders(micro_batch).get("encoder_padding")
        return {} if padding is None else {"attention_mask": torch.from_numpy(~padding)}

    def checked(self, batch: Batch, micro_batch: MicroBatch, name: str) -> Batch:
        planned = pair_borders(micro_batch).get("encoder_padding")
        padding = batch.get("encoder_padding")
        if padding is not None and (planned is None or not torch.equal(padding.cpu(), torch.from_numpy(planned))):
            raise DataError(f"encoder_padding of {name} is not that of its plan: pad rows on the right")
        read = ["encoder_tokens"] * self.place.is_first + ["decoder_tokens"] * (0 in self._own[1])
        if lacking := [key for key in read if key not in batch]:
            raise DataError(
                f"stage {self.place.stage} reads {lacking[0]} of {name}, but the collate function gave {sorted(batch)}"
            )
        return {**batch, "tokens": batch["encoder_tokens"]} if self.place.is_first else batch


@dataclass(frozen=True, slots=True)
class T5Cut:
    """Cuts a T5; `tied` is whether its head's weight is the embedding's, which its files tell, not its config."""

    tied: bool

    @property
    def changed(self) -> set[str]:
        stacks = (f"{side}.{name}" for side in _SIDES for name in ("block.*", "embed_tokens", "final_layer_norm"))
        return {*stacks, "shared", "lm_head"}

    def check(self, model: Any) -> None:
        if model.get_output_embeddings() is None or model.config.model_type != "t5":
            raise ConfigError(
                f"{type(model).__name__} cannot be cut as a T5 with its head: give a T5ForConditionalGeneration"
            )

    def places(self, config: Any, topology: Topology, pp_rank: int) -> list[PartPlace]:
        return places_of(topology, config.num_layers + config.num_decoder_layers, pp_rank)

    def in_place(self, model: Any, place: PartPlace) -> None:
        for stack, own in zip((model.encoder, model.decoder), _own_layers(model.config, place), strict=True):
            _cut_stack(stack, own)
            stack._init_weights = _draw_nothing
        model._init_weights = _draw_nothing
        holders = _holders(model.config, place.layers_per_stage, tied=self.tied)
        remove(model, ["lm_head"] * (not place.is_last) + ["shared"] * (place.stage not in holders[EMBEDDING]))
        there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        there -= set() if self.tied else {"lm_head.weight"}
        ties = model.all_tied_weights_keys.items()
        model.all_tied_weights_keys = {copy: source for copy, source in ties if {copy, source} <= there}

    def part(self, model: Any, place: PartPlace) -> T5Part:
        return T5Part(model, place, tied=self.tied)


class _PassingBlock(AbsentModule):
    """In the place of a block: hidden states and both biases, of its own and of cross attention, pass unchanged."""

    def forward(self, *args: Any, **_: Any) -> Any:
        return self._passed(args[0]), args[2], args[5]


class _BlockExit(_PassingBlock, StageExit):
    """In the place of a side's last block, where a later stage has it."""


class _BlockEntry(_PassingBlock, StageEntry):
    """In the place of a side's first block: it has the relative biases that the side's other layers here add."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        first = with_own_modules(like.layer[0])
        attention = with_own_modules(first.SelfAttention)
        attention._modules = {"relative_attention_bias": attention.relative_attention_bias}
        first._modules = {"SelfAttention": attention}
        self.layer = torch.nn.ModuleList([first])

    def forward(self, *args: Any, **_: Any) -> Any:
        x = self._passed(args[0])
        layer: Any = self.layer[0]
        return x, layer.SelfAttention.compute_bias(x.shape[1], x.shape[1], device=x.device), args[5]


def _draw_nothing(_: torch.nn.Module) -> None:
    """In the place of transformers' drawing of weights, which looks for those that other stages have."""


def _cut_stack(stack: Any, own: range) -> None:
    blocks, last = stack.block, len(stack.block) - 1
    for number, block in enumerate(blocks):
        if number not in own:
            ends = own and {0: _BlockEntry, last: _BlockExit}.get(number)
            blocks[number] = (ends or _PassingBlock)(block)
    remove(stack, ["embed_tokens"] * (0 not in own) + ["final_layer_norm"] * (last not in own))


def _own_layers(config: Any, place: PartPlace) -> tuple[range, range]:
    """Of the encoder and of the decoder, each by its number within."""
    first, end, border = place.layers.start, place.layers.stop, config.num_layers
    return range(first, min(end, border)), range(max(first - border, 0), end - border)


def _of(stack: Any, own: range) -> Iterator[Any]:
    return (stack.block[number] for number in own)


def _holders(config: Any, layers_per_stage: tuple[float, ...], *, tied: bool) -> dict[str, tuple[int, ...]]:
    """The stages that hold each weight that several hold."""
    last = len(layers_per_stage) - 1
    own = [_own_layers(config, PartPlace(stage, layers_per_stage)) for stage in range(last + 1)]
    at = {side: {stage for stage, ranges in enumerate(own) if ranges[i]} for i, side in enumerate(_SIDES)}
    holders = {EMBEDDING: {0, min(at["decoder"])} | ({last} if tied else set())}
    holders |= {f"{side}.{_BIAS}.weight": stages for side, stages in at.items()}
    return {name: tuple(sorted(stages)) for name, stages in holders.items()}
