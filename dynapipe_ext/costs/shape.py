"""The sizes of a decoder-only transformer: all that counting its parameters, FLOPs and bytes needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer as Megatron builds it. `vocab_size` is the padded one; `max_seq_len` counts
    position embeddings when they are learned. Weights of gated MLPs hold gate and value (2 ffn_hidden_size rows).

    With `num_experts` every layer is a mixture: a router without bias sends each token to `top_k` experts, MLPs of
    `ffn_hidden_size` each. `capacity_factor` 0 is dropless; above 0 every expert computes its capacity,
    ceil(capacity_factor x top_k x tokens / num_experts) rows, padded up to it or dropping what is above.

    `head_dim` 0: the heads fill the hidden size. `qkv_bias`: qkv alone has biases, where `bias` gives them to all.
    `qk_norm`: queries and keys are normalised head by head, with one RMSNorm weight of `head_dim` for each.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    gated_mlp: bool
    vocab_size: int
    max_seq_len: int
    tied_embeddings: bool
    position: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    num_experts: int = 0
    top_k: int = 0
    capacity_factor: float = 0.0
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        names = ("num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
        for name in (*names, "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)} but must be at least 1")
        if self.head_dim < 0:
            raise ConfigError(f"head_dim is {self.head_dim} but must be at least 1, or 0 for hidden_size / num_heads")
        if (not self.head_dim and self.hidden_size % self.num_heads) or self.num_heads % self.num_query_groups:
            raise ConfigError(
                f"hidden_size {self.hidden_size}, num_heads {self.num_heads} and num_query_groups"
                f" {self.num_query_groups} must divide one another in this order"
            )
        if self.position not in ("learned", "rope") or self.norm not in ("layernorm", "rmsnorm"):
            raise ConfigError(f"position {self.position!r} (learned, rope) or norm {self.norm!r} (layernorm, rmsnorm)")
        if self.num_experts < 0 or not (0 <= self.capacity_factor < math.inf):
            numbers = f"num_experts {self.num_experts} and capacity_factor {self.capacity_factor}"
            raise ConfigError(f"{numbers} must be finite and at least 0")
        if not self.num_experts and (self.top_k or self.capacity_factor):
            raise ConfigError(
                f"top_k {self.top_k} and capacity_factor {self.capacity_factor} are of experts but num_experts is 0:"
                " give num_experts, or neither"
            )
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k is {self.top_k} but must be 1 to num_experts {self.num_experts}")

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all heads together."""
        return self.head_size * self.num_heads

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.head_size * self.num_query_groups

    @property
    def fc1_size(self) -> int:
        return self.ffn_hidden_size * (2 if self.gated_mlp else 1)

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's qkv and proj."""
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size)

    @property
    def mlp_parameters(self) -> int:
        """Weights of fc1 and fc2: of the MLP, or of one expert."""
        return self.hidden_size * (self.fc1_size + self.ffn_hidden_size)

    @property
    def matmul_parameters(self) -> int:
        """Weights of one layer's four matrix products with one MLP: qkv, proj, fc1, fc2."""
        return self.attention_parameters + self.mlp_parameters

    def routed(self, tokens: IntArray) -> IntArray:
        """Rows that the MLPs of a layer compute: each token once, or as often as experts take it."""
        if not self.num_experts:
            return tokens
        rows = self.top_k * tokens
        if not self.capacity_factor:
            return rows
        return self.num_experts * np.ceil(self.capacity_factor * rows / self.num_experts).astype(np.int64)
