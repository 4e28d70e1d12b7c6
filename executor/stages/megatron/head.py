"""The head of Megatron's models: what is done to its logits, and its loss in slices of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.chunk_runner import HeadSlices
from dynapipe_ext.executor.stages.megatron.vocabulary_parts import block_of_rows, part_of
from dynapipe_ext.executor.stages.sliced_head import Head, losses_in_slices
from dynapipe_ext.executor.stages.spread_head import Message, head_part

_RULES = "dynapipe_rules"  # attribute of a head with hooks of ours: what they do to logits


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
        return product if product.dtype == torch.float64 else product.float()

    slice_len = None if slices is None else slices.take()
    return head_part(x_SBH, before, labels_SB, head, slice_len=slice_len, logits=logits)


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
