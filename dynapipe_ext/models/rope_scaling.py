"""How rotary frequencies are stretched beyond the trained length, in each published way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length: "linear", Llama 3.1's "llama3", or "dynamic",
    which leaves rows up to the trained length as they are (NTK)."""

    kind: Literal["linear", "llama3", "dynamic"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): frequencies are divided by `short_factors` in rows up to the trained length, else by
    `long_factors`; turned queries and keys are multiplied by `attention_factor`."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    factor: float
    attention_factor: float
    original_max_seq_len: int
    kind: Literal["longrope"] = "longrope"


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023). Frequencies that turn less than `beta_slow` times in the trained length are divided by
    `factor`. Those that turn more than `beta_fast` times stay. Between the two limits both are blended; `truncate`
    rounds these to whole dimensions.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    kind: Literal["yarn"] = "yarn"
    truncate: bool = True

    @property
    def concentration(self) -> float:
        """What multiplies turned queries and keys where attention is plain (sec. 3.4, with DeepSeek's two factors)."""
        if self.factor <= 1:
            return 1.0
        of_all, of_turned = (0.1 * scale * math.log(self.factor) + 1 for scale in (self.mscale_all_dim, self.mscale))
        return of_turned / of_all
