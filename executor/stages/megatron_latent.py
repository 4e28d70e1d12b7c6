"""Multi-head latent attention of a megatron-core GPT: its configuration, and what of Megatron's own is not exact.

Its local layers divide the projection to the latent vector over tensor parallel ranks and gather what it gives; of the
turned part, one for all heads, each rank then has the gradient of its own heads alone. Here it is summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from dynapipe_ext.executor.stages.megatron_layers import CoreAttention, MarkedNorm
from dynapipe_ext.models.deepseek_config import LATENT_NORM_EPS


def make_latent(layer: Any) -> None:
    """Put what is exact here into Megatron's spec of a layer with latent attention."""
    if not isinstance(multi_latent_attention.TELinear, type):  # absent, but 0.16.1 asks who is of that class
        multi_latent_attention.HAVE_TE = False
    attention = layer.submodules.self_attention
    attention.module = SummedLatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
    attention.submodules.core_attention = LatentCoreAttention


class LatentNorm:
    """A marked norm with the epsilon of latent vectors."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 0.0, **_: Any) -> Any:
        return MarkedNorm(config, hidden_size, LATENT_NORM_EPS)


class LatentCoreAttention(CoreAttention):
    """Values are narrower than keys: kernels of flash-attn, which want them alike, are given zeros besides."""

    carries = False

    def _by_kernel(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, **options: Any) -> torch.Tensor:
        width = v_THD.shape[-1]
        widened = F.pad(v_THD, (0, q_THD.shape[-1] - width))
        return super()._by_kernel(q_THD, k_THD, widened, **options)[..., :width]


class SummedLatentAttention(MLASelfAttention):  # type: ignore[misc] # megatron has no types
    """Megatron's own, with the gradient of the turned key summed over tensor parallel ranks."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(
        self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Whole, as Megatron's forward takes it from a projection that is not divided: under sequence parallelism this
        rank's positions, of which it gathers the turned part and scatters its gradient, summed."""
        whole = gather_from_tensor_model_parallel_region(output[0])
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), output[1]
        latent, turned = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, copy_to_tensor_model_parallel_region(turned)], dim=-1), output[1]
