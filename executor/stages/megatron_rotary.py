"""Megatron's rotary positions of packed rows, by lengths that the host knows.

Megatron reads them back from the device in every layer, for queries and for keys, and each time waits for all work that
is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LENGTHS = "dynapipe_lengths"  # attribute of a tensor of borders: the documents' lengths, on the host
_NAME = "_apply_rotary_pos_emb_thd"


def with_lengths(borders: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Borders that know on the host what they are of."""
    setattr(borders, _LENGTHS, tuple(lengths))
    return borders


def rotate_without_waiting() -> None:
    """Put a function of the same arithmetic in the place of Megatron's; idempotent.

    For borders without lengths, it calls Megatron's own: nothing changes for other users in this process.
    """
    from megatron.core.models.common.embeddings import rope_utils

    original = getattr(rope_utils, _NAME)
    if getattr(original, "knows_lengths", False):
        return

    def rotate(x_THD: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **options: Any) -> Any:
        """`freqs` are of every position of the row, or of those of a document from 0 on."""
        lengths: tuple[int, ...] | None = getattr(cu_seqlens, _LENGTHS, None)
        group = options.pop("cp_group", None)
        if lengths is None or (group is not None and group.size() > 1):
            return original(x_THD, cu_seqlens, freqs, cp_group=group, **options)
        if len(freqs) != sum(lengths):
            freqs = torch.cat([freqs[:length] for length in lengths])
        rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(x_THD.unsqueeze(1), freqs, **options)
        return rotated.squeeze(1)

    rotate.knows_lengths = True  # type: ignore[attr-defined]
    setattr(rope_utils, _NAME, rotate)
