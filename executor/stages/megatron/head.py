"""The head of Megatron's models: which rows of the vocabulary a rank has, rules for logits, the loss in slices of
positions, and parts of the head on several pipeline ranks.

Part k of n is on pipeline rank k of those that have one, and is cut once more over tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.module import MegatronModule

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.stages.chunk_runner import HeadSlices
from dynapipe_ext.executor.stages.sliced_head import Head, losses_in_slices, losses_of_logits
from dynapipe_ext.executor.stages.spread_head import Message, head_part

_PART = "dynapipe_vocabulary_part"  # attribute of a weight
_RULES = "dynapipe_rules"  # attribute of a head with hooks of ours: what they do to logits


def mark_part(weight: torch.Tensor, part: int, num_parts: int) -> None:
    setattr(weight, _PART, (part, num_parts))


def part_of(weight: torch.Tensor) -> tuple[int, int] | None:
    """Its number, and how many there are; None of a weight that one pipeline rank has whole."""
    part: tuple[int, int] | None = getattr(weight, _PART, None)
    return part


def block_of_rows(weight: torch.Tensor, tp_rank: int, tp: int) -> tuple[int, int]:
    """Which of how many equal blocks of a vocabulary's rows a rank has.

    >>> weight = torch.zeros(4, 2)
    >>> mark_part(weight, part=2, num_parts=4)
    >>> block_of_rows(weight, tp_rank=1, tp=2), block_of_rows(torch.zeros(4, 2), tp_rank=1, tp=2)
    ((5, 8), (1, 2))
    """
    part, num_parts = part_of(weight) or (0, 1)
    return part * tp + tp_rank, num_parts * tp


def save_by_rows(model: Any, key: str, weight: torch.Tensor, part: int, num_parts: int) -> None:
    """Mark a weight of a stage as a part, and have it saved as rows of the whole: any cut takes what another saved.

    `key` is the weight's among the stage's. Megatron knows tensor parallel ranks' rows alone.
    """
    mark_part(weight, part, num_parts)
    model.__dict__["sharded_state_dict"] = partial(_state_of_part, model, key, model.sharded_state_dict)


def _state_of_part(
    model: Any, key: str, state_of: Callable[..., Any], prefix: str = "", *arguments: Any, **options: Any
) -> Any:
    state = state_of(prefix, *arguments, **options)
    shard, weight = state[prefix + key], model.get_parameter(key)
    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    rows = (0, *block_of_rows(weight, tp_rank, tp))
    state[prefix + key] = ShardedTensor.from_rank_offsets(shard.key, shard.data, rows, replica_id=shard.replica_id)
    return state


def cap_logits(model: Any, cap: float) -> None:
    def capped(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return cap * torch.tanh(output[0] / cap), output[1]

    _add_rule(model.output_layer, capped, softcap=cap)


def divide_logits(model: Any, divisor: float) -> None:
    """Before `cap_logits`, which caps what is divided."""

    def divided(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return output[0] / divisor, output[1]

    _add_rule(model.output_layer, divided, scale=1 / divisor)


def hide_padding(model: Any, vocab_size: int) -> None:
    """Logits of padding, which no model learned, become the lowest number: nothing in a softmax, and no gradient."""
    if not model.post_process:
        return
    columns: int = model.output_layer.output_size_per_partition
    num_real = vocab_size - _first_id(model.output_layer)
    if num_real >= columns:
        return

    def hide(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        logits[..., max(num_real, 0) :] = torch.finfo(logits.dtype).min
        return logits, bias

    _add_rule(model.output_layer, hide, num_ids=num_real)


def _first_id(layer: Any) -> int:
    """The id of the first row that this rank has of a head, or of a part of one."""
    number, _ = block_of_rows(layer.weight, layer.tp_group.rank(), layer.tp_group.size())
    return int(number * layer.output_size_per_partition)


def _add_rule(layer: Any, hook: Any, **rule: Any) -> None:
    layer.register_forward_hook(hook)
    setattr(layer, _RULES, {**getattr(layer, _RULES, {}), **rule})


class _PassedThrough(torch.nn.Module):
    """Stands in the place of a head: hidden states come out as they went in."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.__dict__["weight"] = layer.weight  # asked for by the model, used and not owned

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None, **_options: Any) -> tuple[Any, None]:
        if weight is not None:
            self.__dict__["weight"] = weight
        return x, None


class OnePassLoss:
    """A base of Megatron's language models: losses of whole logits by our kernels where the device runs them, which use
    up the logits' place; else Megatron's own."""

    def compute_language_model_loss(self, labels_BS: torch.Tensor, logits_SBV: torch.Tensor) -> torch.Tensor:
        model: Any = self
        layer = getattr(model, "lm_head", model).output_layer
        if not runs_kernels(logits_SBV) or layer.gather_output:
            losses_BS: torch.Tensor = super().compute_language_model_loss(labels_BS, logits_SBV)  # type: ignore[misc]
            return losses_BS
        head = _head_of(layer, layer.weight if layer.weight is not None else model.shared_embedding_or_output_weight())
        labels_SB = labels_BS.transpose(0, 1).contiguous()
        losses_N = losses_of_logits(logits_SBV.flatten(0, 1), labels_SB.flatten(), head)
        return losses_N.view_as(labels_SB).transpose(0, 1).contiguous()


@contextmanager
def head_in_slices(model: Any, slices: HeadSlices | None) -> Iterator[None]:
    """Within, a GPTModel or an encoder-decoder that ends in the head computes its loss in slices; where they are None,
    as usual. Errors: ConfigError for a head whose logits are changed in a way that slices do not know."""
    if slices is None or not model.post_process:
        yield
        return
    holder = getattr(model, "lm_head", model)
    layer = holder.output_layer
    rules: dict[str, Any] = getattr(layer, _RULES, {})
    if fault := _fault_of(model, layer, rules):
        if not slices.is_planned:
            yield
            return
        raise ConfigError(
            f"the head of this {type(model).__name__} has {fault}, which slices of it do not know: plan with whole"
            ' logits (recompute "none", "selective", "full" or "stage")'
        )
    stand_in, slice_len = _PassedThrough(layer), slices.take()

    def losses(labels_BS: torch.Tensor, x_SBH: torch.Tensor) -> torch.Tensor:
        head = _head_of(layer, stand_in.__dict__["weight"])
        labels_SB = labels_BS.transpose(0, 1).contiguous()
        return losses_in_slices(x_SBH, labels_SB, head, slice_len=slice_len).transpose(0, 1).contiguous()

    with _ending_in(model, holder, stand_in, losses):
        yield


@contextmanager
def _ending_in(model: Any, holder: Any, stand_in: _PassedThrough, losses: Callable[..., Any]) -> Iterator[None]:
    """Within, the head of `holder` passes hidden states through, and the model makes its losses of them."""
    layer = holder.output_layer
    holder._modules["output_layer"] = stand_in
    model.__dict__["compute_language_model_loss"] = losses
    try:
        yield
    finally:
        holder._modules["output_layer"] = layer
        del model.__dict__["compute_language_model_loss"]


def _head_of(layer: Any, weight: torch.Tensor) -> Head:
    group = layer.tp_group if layer.tp_group.size() > 1 else None
    return Head(
        weight=weight,
        bias=None if layer.skip_bias_add else layer.bias,
        first_id=_first_id(layer),
        group=group,
        divides_sequence=group is not None and layer.sequence_parallel,
        is_part=part_of(layer.weight) is not None,
        **getattr(layer, _RULES, {}),
    )


def part_message(
    layer: Any,
    x_SBH: torch.Tensor,
    before: tuple[torch.Tensor, ...],
    labels_SB: torch.Tensor,
    slices: HeadSlices | None,
) -> Message:
    """What a part of a head, a linear layer of Megatron's, sends on."""
    head = _head_of(layer, layer.weight)

    def logits(x_SBH: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = layer(x_SBH)[0]  # hooks of ours have scaled and capped it
        return product

    slice_len = None if slices is None else slices.take()
    return head_part(x_SBH, before, labels_SB, head, slice_len=slice_len, logits=logits)


class HeadPart(MegatronModule):  # type: ignore[misc] # megatron has no types
    """`num_rows` rows of the head, over all tensor parallel ranks; with what else Megatron asks of a GPTModel."""

    pre_process, post_process, share_embeddings_and_output_weights = False, True, False

    def __init__(self, config: Any, num_rows: int, *, is_last: bool) -> None:
        super().__init__(config=config)
        self.is_last = is_last
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            num_rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
        )

    def forward(
        self, labels_SB: torch.Tensor, slices: HeadSlices | None, x_SBH: torch.Tensor, *before: torch.Tensor
    ) -> Message:
        return part_message(self.output_layer, x_SBH, before, labels_SB, slices)

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **options: Any) -> Any:
        state = super().sharded_state_dict(prefix, *arguments, **options)
        state.pop(f"{prefix}output_layer._extra_state", None)  # as of a GPTModel: it holds nothing
        return state


@contextmanager
def part_behind_layers(model: Any, slices: HeadSlices | None) -> Iterator[None]:
    """Within, a GPTModel that ends in a part of the head gives what the part sends on, in the place of losses."""
    layer = model.output_layer

    def message(labels_BS: torch.Tensor, x_SBH: torch.Tensor) -> Message:
        return part_message(layer, x_SBH, (), labels_BS.transpose(0, 1).contiguous(), slices)

    with _ending_in(model, model, _PassedThrough(layer), message):
        yield


def _fault_of(model: Any, layer: Any, rules: dict[str, Any]) -> str:
    """What a head has that slices do not know; nothing if they know all of it."""
    faults = {
        "hooks that change its logits": len(layer._forward_hooks) != len(rules),
        "gathered logits (parallel_output false)": layer.gather_output,
        "multi-token prediction (mtp_num_layers)": bool(getattr(model.config, "mtp_num_layers", None)),
        "label smoothing": bool(getattr(model.config, "label_smoothing", None)),
    }
    return next((name for name, is_so in faults.items() if is_so), "")
