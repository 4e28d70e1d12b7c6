"""Models of megatron-core made ready for rows that begin or lie within a sample: pieces, and slices of joined ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks
from dynapipe_ext.executor.stages.megatron.core_attention import CarriedRow, DocumentAttention, packed_lengths
from dynapipe_ext.executor.stages.megatron.layers import angles_of

_TAKES_PIECES, _TAKES_SLICES = "dynapipe_takes_pieces", "dynapipe_takes_slices"  # attributes of models that are ready
_PLACED = "dynapipe_placed_angles"


def take_pieces(model: Any) -> None:
    """Make a GPTModel turn by the positions of `packed_seq_params.carried`; once is enough.

    Learned positions come with the batch. Errors: ConfigError for a model that would train wrongly.
    """
    if getattr(model, _TAKES_PIECES, False):
        return
    if fault := _fault(model, _fault_of_pieces) or _fault_of_config(model.config):
        raise ConfigError(f"{type(model).__name__} {fault}, so cut samples cannot be trained: plan whole ones")
    _placed_angles(model, "pieces of cut samples: plan whole ones")
    setattr(model, _TAKES_PIECES, True)


def take_slices(model: Any, joined: JoinedRanks | None) -> None:
    """Have a GPTModel attend with other ranks over rows of which it has a slice; with None over its own, as ever.

    Errors: ConfigError for a model that would train wrongly.
    """
    if not getattr(model, _TAKES_SLICES, False):
        if joined is None:
            return
        if fault := _fault(model, _fault_of_slices) or _fault_of_router(model.config):
            raise ConfigError(
                f"{type(model).__name__} {fault}, so joined ranks cannot share its rows: take width 1 (--cp 1)"
            )
        _placed_angles(model, "slices of rows: take width 1 (--cp 1)")
        for attention in _latent_attentions(model):
            _LatentAngles(attention)
        setattr(model, _TAKES_SLICES, True)
    if joined is not None and (fault := _fault(model, partial(_fault_of_heads, joined.width))):
        raise ConfigError(f"{type(model).__name__} {fault}")
    for module in model.modules():
        if isinstance(module, DocumentAttention):
            module.joined = joined
    placed: _PlacedAngles | None = getattr(model, _PLACED, None)
    if placed is not None:
        placed.joined = joined


def _fault(model: Any, fault_of: Callable[[Any], str]) -> str:
    from megatron.core.transformer.attention import Attention

    return next(filter(None, (fault_of(module) for module in model.modules() if isinstance(module, Attention))), "")


def _fault_of_pieces(attention: Any) -> str:
    core = attention.core_attention
    if getattr(core, "carries", False):
        return ""
    return f"attends by {type(core).__name__}, which does not attend to keys of earlier pieces"


def _fault_of_slices(attention: Any) -> str:
    core = attention.core_attention
    if attention.config.apply_rope_fusion:
        return "turns by a fused kernel (apply_rope_fusion), which does not know slices"
    if isinstance(core, DocumentAttention):
        return ""
    return f"attends by {type(core).__name__}, which does not exchange positions for heads"


def _fault_of_heads(width: int, attention: Any) -> str:
    core, num_heads = attention.core_attention, attention.num_attention_heads_per_partition
    if core.gathers_keys or num_heads % width == 0:
        return ""
    return (
        f"has {num_heads} heads on each tensor parallel rank, which {width} joined ranks cannot divide, and two sides,"
        f" whose keys are not gathered: take a width up to {gcd(num_heads, width)}"
    )


def _fault_of_config(config: Any) -> str:
    if config.multi_latent_attention:
        return "compresses keys and values (multi_latent_attention), which are not kept from piece to piece"
    if config.window_size is not None:
        return f"has windows of attention (window_size {config.window_size}), which do not go on from piece to piece"
    return _fault_of_capacity(config, "piece")


def _fault_of_router(config: Any) -> str:
    if config.num_moe_experts and config.moe_router_load_balancing_type != "none":
        return (
            f"has experts balanced by a loss over each row (moe_router_load_balancing_type"
            f" {config.moe_router_load_balancing_type}), of which a slice sees a part"
        )
    return _fault_of_capacity(config, "slice")


def _fault_of_capacity(config: Any, part: str) -> str:
    if config.moe_expert_capacity_factor is None:
        return ""
    return (
        f"has experts of limited capacity (moe_expert_capacity_factor {config.moe_expert_capacity_factor}), which"
        f" drop tokens by what else is in their {part}"
    )


def _placed_angles(model: Any, of_what: str) -> None:
    """Have the model's rotary angles follow the row; one with learned positions has none."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None or hasattr(model, _PLACED):
        return
    if type(rotary) is not RotaryEmbedding:
        raise ConfigError(
            f"positions of {type(model).__name__} are turned by {type(rotary).__name__}, which is not known to give"
            f" those of {of_what}"
        )
    placed = _PlacedAngles(rotary)
    model.register_forward_pre_hook(placed.see_row, with_kwargs=True)
    rotary.register_forward_hook(placed.instead)
    setattr(model, _PLACED, placed)


def _latent_attentions(model: Any) -> list[Any]:
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    return [module for module in model.modules() if isinstance(module, MultiLatentAttention)]


class _LatentAngles:
    """Rotary angles of latent attention, which has its own: on joined ranks one for each position of the slice.

    Queries, keys and values are exchanged as other attention's are, after they were brought up from latent vectors.
    """

    def __init__(self, attention: Any) -> None:
        self._core, self._packed = attention.core_attention, None
        attention.register_forward_pre_hook(self.see_row, with_kwargs=True)
        attention.rotary_pos_emb.register_forward_hook(self.instead)

    def see_row(self, _attention: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
        self._packed = keywords.get("packed_seq_params")

    def instead(self, rotary: Any, _inputs: Any, output: Any) -> Any:
        """Of stretched positions (yarn) the angles come with a factor."""
        joined: JoinedRanks | None = self._core.joined
        if joined is None:
            return output
        angles, *factor = output if isinstance(output, tuple) else (output,)
        if self._packed is not None:
            lengths = packed_lengths(self._packed)
            own = angles_of(angles, lengths, joined.span(sum(lengths)))
        else:
            placed = type(rotary).forward(rotary, len(angles), joined.number * len(angles))
            own = placed[0] if isinstance(placed, tuple) else placed
        return (own, *factor) if factor else own


class _PlacedAngles:
    """Megatron's rotary angles for rows that do not begin at position 0. A packed row with a piece gets one angle for
    each position, which Megatron takes for a table of that length. A padded row gets the angles of its rank's slice."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self.joined: JoinedRanks | None = None
        self._is_packed = False
        self._spans: list[tuple[int, int]] = []  # length and first position of each document, of rows with a piece

    def see_row(self, _model: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
        packed = keywords.get("packed_seq_params")
        row: CarriedRow | None = getattr(packed, "carried", None)
        self._is_packed = packed is not None
        if row is None:
            self._spans = []
        else:
            self._spans = [(length, 0) for length in packed.document_lengths]  # type: ignore[union-attr]
            self._spans[0] = row.piece.length, row.piece.start

    def instead(self, _rotary: Any, _inputs: Any, angles: torch.Tensor) -> torch.Tensor:
        if self._spans:
            return torch.cat([self._rotary.get_emb(length, start) for length, start in self._spans])
        if self.joined is None or self._is_packed:
            return angles
        own: torch.Tensor = self._rotary.get_emb(len(angles), self.joined.number * len(angles))
        return own
