"""The head of a model of transformers, left to the loss: hidden states in the place of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.chunk_runner import HeadSlices
from dynapipe_ext.executor.stages.sliced_head import Head, HiddenStates

_CLOSE = 1e-2  # of the largest logit: what bfloat16 makes of the same arithmetic in another order


class LeftHead:
    """Runs forwards of a model without its head, once it has been seen that nothing unknown follows the head.

    Between head and loss a family may scale logits or cap them, as its configuration says. The first forward computes
    the logits of one position of each row by the model's own code, and by ours.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._is_proven, self._is_unknown = model, False, False

    def run(self, forward: Callable[[], Any], slices: HeadSlices) -> HiddenStates | torch.Tensor:
        """The hidden states that `forward` gave the head; logits of a head that slices do not know, where no plan
        relies on them. Errors: ConfigError where one does."""
        if not self._is_unknown:
            try:
                return self._without_head(forward, slices.take())
            except ConfigError:
                if slices.is_planned:
                    raise
                self._is_unknown = True
        logits: torch.Tensor = forward().logits
        return logits

    def _without_head(self, forward: Callable[[], Any], slice_len: int) -> HiddenStates:
        layer = self._model.get_output_embeddings()
        if type(layer) is not torch.nn.Linear:
            raise ConfigError(
                f"the head of {type(self._model).__name__} is a {type(layer).__name__}, which slices do not know: plan"
                ' with whole logits (recompute "none", "full" or "stage")'
            )
        before, seen = vars(layer).get("forward"), list[torch.Tensor]()

        def first_alone(x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            with torch.no_grad():
                logits: torch.Tensor = (before or type(layer).forward.__get__(layer))(x[:, :1])
            return logits

        layer.__dict__["forward"] = first_alone
        try:
            output = forward()
        finally:
            del layer.__dict__["forward"]
            if before is not None:
                layer.__dict__["forward"] = before
        (x,) = seen
        scale, softcap = _rules(self._model.config.get_text_config())
        head = Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap)
        if not self._is_proven:
            self._prove(head, x, output.logits)
        return HiddenStates(x, head, slice_len)

    def _prove(self, head: Head, x: torch.Tensor, logits: torch.Tensor) -> None:
        with torch.no_grad():
            ours = head.logits(x[:, 0]).to(torch.float64)
        theirs = logits[:, 0].to(torch.float64)
        if not float((ours - theirs).abs().max()) <= _CLOSE * float(theirs.abs().max()):
            raise ConfigError(
                f"{type(self._model).__name__} changes its logits in a way that slices of its head do not know: plan"
                ' with whole logits (recompute "none", "full" or "stage")'
            )
        self._is_proven = True


def _rules(config: Any) -> tuple[float, float]:
    """What families do to logits, by the names in their configurations: scale and cap them."""
    scale = getattr(config, "logit_scale", None) or 1.0
    if divisor := getattr(config, "logits_scaling", None):
        scale = scale / divisor
    return scale, getattr(config, "final_logit_softcapping", None) or 0.0
