"""Which weights decay, whatever computes the model: all but biases and the weights of norms."""

from __future__ import annotations

import re

import torch

_KEPT = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def weight_decays(name: str) -> bool:
    """Return whether a weight of that name decays, in transformers' names or Megatron's.

    The rule is that of transformers' `Trainer.get_decay_parameter_names` (5.23). The number of dimensions does not
    count: biases of experts and of relative positions have two, scales of norms of heads too.

    >>> [weight_decays(name) for name in ("experts.down_proj_bias", "self_attn.q_norm.weight", "attn.sinks")]
    [False, False, True]
    """
    return _KEPT.search(name.lower()) is None


def decaying_weights(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the weights of a model that decay, by their names and without those of `torch.nn.LayerNorm` modules."""
    of_norms = {weight for module in model.modules() if isinstance(module, torch.nn.LayerNorm)
                for weight in module.parameters()}  # fmt: skip
    return {weight for name, weight in model.named_parameters() if weight_decays(name)} - of_norms
