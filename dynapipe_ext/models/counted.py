"""A model of which only counts are known: parameters and FLOPs by its modules, whatever its family is.

`executor/stages/transformers/counting.py` makes one of any config.json that transformers can build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynapipe_ext.models.flops import Sight, StepFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAttention:
    """Attention of `layers` layers: widths of all heads' queries and values; `window` positions are seen (0: all)."""

    layers: int
    query_size: int
    value_size: int
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModel:
    """Parameters, and the weights that one token is multiplied with. A tied head has no parameters but its weights.

    `active` parameters leave out the experts that a token does not take. `layer_weights` are those of linear layers,
    routers and the share `top_k` of experts. `uncounted` names what computes and is in no FLOPs.
    """

    model_type: str
    parameters: int
    embedding: int
    layers: tuple[int, ...]
    head: int
    active: int
    layer_weights: int
    head_weights: int
    attention: tuple[CountedAttention, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def others(self) -> int:
        """Parameters outside embedding, layers and head: norms, towers."""
        return self.parameters - self.embedding - sum(self.layers) - self.head

    def step_flops(self, lengths: Sequence[int], *, causal: bool = False) -> StepFlops:
        """Of forward and backward of samples by their lengths, each attending to itself alone, as `flops.step_flops`
        counts them."""
        tokens, half = sum(lengths), 2 if causal else 1
        pairs = {own.window: sum(map(Sight(window=own.window).pairs, lengths)) for own in self.attention}
        products = sum(
            own.layers * (2 * (own.query_size + own.value_size) * pairs[own.window] // half) for own in self.attention
        )
        head = 2 * self.head_weights * tokens
        layers = 2 * self.layer_weights * tokens
        return StepFlops(3 * (layers + products + head), 0, 0, 3 * products, 3 * head)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "others": self.others}
