"""A Llama as Meta's files hold it: tiny weights, cut over ranks, and the model's arithmetic by its formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

DIM, HEADS, GROUPS, LAYERS, VOCAB, FFN = 64, 8, 4, 2, 136, 96
PARAMS: dict[str, Any] = {
    "dim": DIM,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "vocab_size": -1,
    "multiple_of": 32,
    "norm_eps": 1e-5,
}


def weights(*, kv_heads: int = GROUPS) -> dict[str, torch.Tensor]:
    """The whole model by Meta's names, in float32."""
    generator = torch.Generator().manual_seed(3)
    kv = kv_heads * DIM // HEADS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    found = {"tok_embeddings.weight": random(VOCAB, DIM), "norm.weight": 1 + random(DIM)}
    found["output.weight"] = random(VOCAB, DIM)
    for i in range(LAYERS):
        shapes = {"wq": (DIM, DIM), "wk": (kv, DIM), "wv": (kv, DIM), "wo": (DIM, DIM)}
        found |= {f"layers.{i}.attention.{name}.weight": random(*shape) for name, shape in shapes.items()}
        shapes = {"w1": (FFN, DIM), "w2": (DIM, FFN), "w3": (FFN, DIM)}
        found |= {f"layers.{i}.feed_forward.{name}.weight": random(*shape) for name, shape in shapes.items()}
        found |= {f"layers.{i}.{name}.weight": 1 + random(DIM) for name in ("attention_norm", "ffn_norm")}
    return found


def write(folder: Path, whole: dict[str, torch.Tensor], ranks: int, *, llama3: bool = True, **params: Any) -> Path:
    """Meta's folder: each rank has its part of every matrix, all norms, and the rotation's frequencies."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}))
    (folder / "tokenizer.model").write_bytes(b"words")
    for rank in range(ranks):
        part = {name: _part(name, tensor, rank, ranks, llama3) for name, tensor in whole.items()}
        part["rope.freqs"] = torch.arange(DIM // HEADS // 2)
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    return folder


def reference_logits(whole: dict[str, torch.Tensor], tokens: torch.Tensor, theta: float = 10_000.0) -> torch.Tensor:
    """Logits of `tokens` (rows, length): pairs of neighbouring values are rotated as complex numbers."""
    x_BSH = whole["tok_embeddings.weight"][tokens]
    length, head = tokens.shape[1], DIM // HEADS
    angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, head, 2).float() / head))
    turn = torch.polar(torch.ones_like(angles), angles)
    mask = torch.full((length, length), -math.inf).triu(1)
    for i in range(LAYERS):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in whole.items() if name.startswith(f"layers.{i}.")}
        y_BSH = _norm(x_BSH, layer["attention_norm.weight"])
        q, k, v = ((y_BSH @ layer[f"attention.w{n}.weight"].T).unflatten(-1, (-1, head)) for n in "qkv")
        q, k = _rotated(q, turn), _rotated(k, turn)
        k, v = (t.repeat_interleave(HEADS // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(head) + mask
        mixed = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).flatten(2)
        x_BSH = x_BSH + mixed @ layer["attention.wo.weight"].T
        y_BSH = _norm(x_BSH, layer["ffn_norm.weight"])
        gate, up = (y_BSH @ layer[f"feed_forward.{n}.weight"].T for n in ("w1", "w3"))
        x_BSH = x_BSH + (F.silu(gate) * up) @ layer["feed_forward.w2.weight"].T
    return _norm(x_BSH, whole["norm.weight"]) @ whole["output.weight"].T


def _part(name: str, tensor: torch.Tensor, rank: int, ranks: int, llama3: bool) -> torch.Tensor:
    if tensor.ndim == 1:
        return tensor.clone()
    columns = name.endswith(("wo.weight", "w2.weight")) or (name.startswith("tok_emb") and not llama3)
    num_parts = ranks
    if name.endswith(("wk.weight", "wv.weight")):  # more ranks than heads: each head on several
        num_parts = min(ranks, tensor.shape[0] // (DIM // HEADS))
    return tensor.chunk(num_parts, dim=1 if columns else 0)[rank * num_parts // ranks].clone()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _rotated(x_BSND: torch.Tensor, turn_SD: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_BSND.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn_SD[None, :, None]).flatten(-2)
