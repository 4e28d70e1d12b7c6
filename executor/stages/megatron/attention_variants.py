"""What some families add to core attention: sinks, capped scores.

Each function takes a class of core attention (`layers.py`) and gives one of the same protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dynapipe_ext.batch.packed_attention import DocumentRule

_SINK_WIDTH = 8  # by which queries and keys widen: kernels want widths of whole vectors


def capped(attention: Any, cap: float) -> type:
    """With capped scores, which no kernel of flash-attn is asked for."""

    class Capped(attention):  # type: ignore[misc]
        softcap = cap

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.backend = "sdpa"

    return Capped


def with_sinks(attention: Any) -> type:
    """With a learned score for each head, `softmax_offset`, that takes its share of the softmax and gives nothing.

    It stands as one more key before all others, of value 0, whose product with a query is the head's score.
    """

    class Sinks(attention):  # type: ignore[misc]
        carries = False
        scale: float | None

        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

            super().__init__(config, *arguments, **keywords)
            if self.scale is None:  # not of the widths below
                self.scale = config.kv_channels**-0.5
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

        @property
        def _rule(self) -> DocumentRule:
            rule: DocumentRule = super()._rule
            return replace(rule, has_sinks=True)

        def _attend(
            self,
            q_BHSD: torch.Tensor,
            k_BHTD: torch.Tensor,
            v_BHTD: torch.Tensor,
            *,
            mask: torch.Tensor | None = None,
            is_causal: bool = False,
        ) -> torch.Tensor:
            assert self.scale is not None
            width = q_BHSD.shape[-1]
            scores = (self.own_heads(self.softmax_offset) / self.scale)[:, None, None].to(q_BHSD.dtype)
            q_BHSD = torch.cat(
                [q_BHSD, F.pad(scores, (0, _SINK_WIDTH - 1)).expand(*q_BHSD.shape[:-1], _SINK_WIDTH)], dim=-1
            )
            sink = F.pad(k_BHTD.new_ones(()).expand(*k_BHTD.shape[:2], 1, 1), (width, _SINK_WIDTH - 1))
            k_BHTD = torch.cat([sink, F.pad(k_BHTD, (0, _SINK_WIDTH))], dim=2)
            v_BHTD = F.pad(v_BHTD, (0, _SINK_WIDTH, 1, 0))
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
            out_BHSD: torch.Tensor = super()._attend(q_BHSD, k_BHTD, v_BHTD, mask=mask, is_causal=is_causal)
            return out_BHSD[..., :width]

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> Any:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            own = {"softmax_offset": self.softmax_offset}
            return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)

    return Sinks
