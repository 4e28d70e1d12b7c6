"""Megatron's models on pieces of cut samples: positions that go on, and what has no earlier keys to attend to."""

from __future__ import annotations

from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.attention import CarriedRow

_TAKES = "dynapipe_takes_pieces"  # attribute of a model that is ready for them


def take_pieces(model: Any) -> None:
    """Make a GPTModel turn by the positions of `packed_seq_params.carried`; once is enough.

    Learned positions come with the batch. Errors: ConfigError for a model that would train wrongly.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import Attention

    if getattr(model, _TAKES, False):
        return
    rotary = getattr(model, "rotary_pos_emb", None)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if fault := next(filter(None, map(_fault_of_layer, layers)), "") or _fault_of_config(model.config):
        raise ConfigError(f"{type(model).__name__} {fault}, so cut samples cannot be trained: plan whole ones")
    if rotary is not None:
        if type(rotary) is not RotaryEmbedding:
            raise ConfigError(
                f"positions of {type(model).__name__} are turned by {type(rotary).__name__}, which is not known to give"
                " those of pieces of cut samples: plan whole ones"
            )
        placed = _PlacedAngles(rotary)
        model.register_forward_pre_hook(placed.see_row, with_kwargs=True)
        rotary.register_forward_hook(placed.instead)
    setattr(model, _TAKES, True)


def _fault_of_layer(attention: Any) -> str:
    core = attention.core_attention
    if getattr(core, "carries", False):
        return ""
    return f"attends by {type(core).__name__}, which does not attend to keys of earlier pieces"


def _fault_of_config(config: Any) -> str:
    if config.multi_latent_attention:
        return "compresses keys and values (multi_latent_attention), which are not kept from piece to piece"
    if config.window_size is not None:
        return f"has windows of attention (window_size {config.window_size}), which do not go on from piece to piece"
    if config.moe_expert_capacity_factor is not None:
        return (
            f"has experts of limited capacity (moe_expert_capacity_factor {config.moe_expert_capacity_factor}), which"
            " drop tokens by what else is in their piece"
        )
    return ""


class _PlacedAngles:
    """Megatron's rotary angles, one for each position of a row with a piece: it takes a table of that length so."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._spans: list[tuple[int, int]] = []  # length and first position of each document, of rows with a piece

    def see_row(self, _model: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
        packed = keywords.get("packed_seq_params")
        row: CarriedRow | None = getattr(packed, "carried", None)
        if row is None:
            self._spans = []
        else:
            self._spans = [(length, 0) for length in packed.document_lengths]  # type: ignore[union-attr]
            self._spans[0] = row.piece.length, row.piece.start

    def instead(self, _rotary: Any, _inputs: Any, angles: torch.Tensor) -> torch.Tensor:
        if not self._spans:
            return angles
        return torch.cat([self._rotary.get_emb(length, start) for length, start in self._spans])
