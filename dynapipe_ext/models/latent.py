"""Attention by latent vectors, and YaRN, with which the models that have it stretch their rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies of less than `beta_slow` turns in the trained length are divided by
    `factor`, those of more than `beta_fast` stay, and in between the two are blended.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, sec. 2.1): keys and values of all heads come out of one latent vector,
    queries out of another, or out of the hidden state where `q_rank` is 0. Of a head's query and key `plain_dim` values
    are not turned and `rotary_dim` are; these, of keys, are the same for all heads.
    """

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def kept_values(self) -> int:
        """Of a token, on every tensor parallel rank: latent vectors, what their norms make of them, the turned key."""
        return 2 * self.q_rank + 2 * self.kv_rank + self.rotary_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights of the projections."""
        queries = num_heads * (self.plain_dim + self.rotary_dim)
        to_queries = self.q_rank * (hidden_size + queries) if self.q_rank else hidden_size * queries
        to_latent = hidden_size * (self.kv_rank + self.rotary_dim)
        from_latent = self.kv_rank * num_heads * (self.plain_dim + self.value_dim)
        return to_queries + to_latent + from_latent + hidden_size * num_heads * self.value_dim
