"""By how much positions turn queries and keys, and layers that turn theirs by angles of their own."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.rope_scaling import LongRope, Yarn

YARN_FACTOR = "yarn_rotary_scaling_factor"  # an attribute of TransformerConfig that makes attention concentrate


def rotary_frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians a position, float32, shape (values that turn / 2,): of transformers, in the same order of operations.

    "llama3": wavelengths above `original / low_freq_factor` are stretched by `factor`, those below `original /
    high_freq_factor` stay, and in between the two are blended (Llama 3.1's release code).
    """
    a, scaling = architecture, architecture.rope_scaling
    assert not a.latent, "latent attention has frequencies of its own"
    width = a.rotary_dim or a.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if isinstance(scaling, Yarn):
        return _yarn_frequencies(scaling, a.rope_theta, exponents)
    if isinstance(scaling, LongRope):  # samples are no longer than was trained (most_exact_tokens)
        return 1.0 / (torch.tensor(scaling.short_factors) * a.rope_theta**exponents)
    frequencies = 1.0 / (a.rope_theta**exponents)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    share = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = frequencies / scaling.factor
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    return torch.where(wavelengths < shortest, frequencies, torch.where(wavelengths > longest, stretched, blended))


def concentrate(config: Any, architecture: Architecture) -> None:
    """Have attention multiply turned queries and keys as the model's stretched frequencies ask for, through
    megatron-core's own names, which its TransformerConfig does not declare."""
    match architecture.rope_scaling:
        case Yarn() as yarn:
            factor, config.yarn_mscale, config.yarn_mscale_all_dim = yarn.factor, yarn.mscale, yarn.mscale_all_dim
        case LongRope() as stretched:  # megatron-core: 0.1 x mscale x log(factor) + 1
            factor, config.yarn_mscale, config.yarn_mscale_all_dim = math.e, 10 * (stretched.attention_factor - 1), 0.0
        case _:
            return
    setattr(config, YARN_FACTOR, factor)


def _yarn_frequencies(yarn: Yarn, theta: float, exponents: torch.Tensor) -> torch.Tensor:
    """Blended between the (whole) numbers of dimensions that turn `beta_fast` and `beta_slow` times (Peng et al. 2023,
    sec. 3.2)."""
    width = 2 * len(exponents)

    def dimension_of(turns: float) -> float:
        return width * math.log(yarn.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2).float() - low) / (high - low if high != low else 0.001)
    unstretched = 1 - torch.clamp(ramp, 0, 1)
    powers = theta**exponents
    return 1.0 / (yarn.factor * powers) * (1 - unstretched) + 1.0 / powers * unstretched


def turned_by(attention: type, frequencies: torch.Tensor) -> type:
    """A class of Megatron's self attention that turns queries and keys by its own frequencies, not the model's, and
    does not stretch them as the model does."""

    class Turned(attention):  # type: ignore[misc]
        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(config, *arguments, **keywords)
            if hasattr(config, YARN_FACTOR):
                self.config = copy.copy(config)
                delattr(self.config, YARN_FACTOR)

        def forward(self, *arguments: Any, rotary_pos_emb: torch.Tensor, **keywords: Any) -> Any:
            joined, length = self.core_attention.joined, rotary_pos_emb.shape[0]
            # A packed row's angles are of the whole row, or of a document, of which the turning takes a slice.
            first = 0 if joined is None or keywords.get("packed_seq_params") is not None else joined.number * length
            positions = torch.arange(first, first + length, dtype=torch.float32, device=rotary_pos_emb.device)
            angles = torch.outer(positions, frequencies.to(rotary_pos_emb.device)).repeat(1, 2)
            return super().forward(*arguments, rotary_pos_emb=angles[:, None, None], **keywords)

    return Turned
