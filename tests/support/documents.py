"""Attention of packed documents by its definition, and tensors to try kernels on."""

from __future__ import annotations

import math

import torch

LENGTHS = (5, 1, 17, 9)


def packed_tensors(
    heads: int, groups: int, size: int = 8, *, lengths: tuple[int, ...] = LENGTHS, **options: object
) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, (T, heads or groups, size)."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(sum(lengths), n, size, generator=generator) for n in (heads, groups, groups, heads)]
    return [x.to(**options).requires_grad_(i < 3) for i, x in enumerate(made)]  # type: ignore[call-overload]


def by_definition(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    borders: list[int],
    *,
    scale: float | None = None,
    back: float = math.inf,
    ahead: float = 0.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """(T, heads, D): each position over those of its document at most `back` before and `ahead` behind it."""
    document = torch.bucketize(torch.arange(len(q_THD)), torch.tensor(borders[1:]), right=True).to(q_THD.device)
    place = torch.arange(len(q_THD), device=q_THD.device)
    distance = place[:, None] - place[None]
    seen = (document[:, None] == document[None]) & (distance <= back) & (-distance <= ahead)
    k_THD, v_THD = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], dim=1) for x in (k_THD, v_THD))
    scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * (q_THD.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", shares, v_THD)
