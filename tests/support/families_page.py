"""Writes the guides' page of families from their declaration: `python -m tests.support.families_page`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import FORMS
from dynapipe_ext.models.forms import PublishedForm
from dynapipe_ext.models.huggingface import read_config

PAGE = Path(__file__).parents[2] / ".github" / "docs" / "families.md"
_TEXT = (
    "# Families",
    "What megatron-core trains here of published models, and what [convert](tools.md#convert) reads and writes, by the"
    " `model_type` of a config.json. Columns name what differs from Llama at each family's defaults; a config.json may"
    " turn more on, and values that are not computed are refused by name.",
    "Any other causal model of transformers trains with `--backend transformers`. `estimate` and `flops` count it by"
    " its modules.",
    "`python -m tests.support.families_page` makes this page of the declaration in `dynapipe_ext/models/families.py`.",
    "| model_type | class | attention | MLP | norms | stretched RoPE |\n|---|---|---|---|---|---|\n",
)
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64, "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def page() -> str:
    return "\n\n".join(_TEXT) + "".join(_line(family, form) for family, form in FORMS.items())


def _line(family: str, form: PublishedForm) -> str:
    by_type = {"full_attention": _SIZES["rope_parameters"], "sliding_attention": _SIZES["rope_parameters"]}
    sizes: dict[str, Any] = {**_SIZES, **({"rope_parameters": by_type} if form.window_rope else {})}
    sizes |= {"num_experts_per_tok": 1} if family == "llama4_text" else {}
    a = read_config({"model_type": family, **sizes})
    ropes = ", ".join(kind for kind in form.ropes if kind != "default")
    cells = (_attention(a, form), _mlp(a), _norms(a), ropes)
    return f"| `{family}` | {form.model_class} | {' | '.join(cells)} |\n"


def _attention(a: Architecture, form: PublishedForm) -> str:
    windows = {"all": "windows", "by_layer": "windows in some layers"}
    parts = {
        f"{a.position} positions": a.position != "rope",
        "biases": a.qkv_bias,
        "latent": a.latent is not None,
        windows.get(form.windows, ""): form.windows in windows,
        "sinks": a.attention_sinks,
        "a part of a head turns": bool(a.rotary_dim),
        "neighbours turn": a.rotary_interleaved,
        "some layers turn nothing": bool(a.no_rope_every),
        "capped scores": bool(a.attention_softcap),
        "chunks": bool(a.attention_chunk),
        "queries scaled by position": bool(a.temperature_floor),
    }
    return _listed(parts)


def _mlp(a: Architecture) -> str:
    parts = {
        "no gate": not a.gated_mlp,
        a.activation: a.activation != "silu",
        "clamped": bool(a.gate_clamp),
        "experts": bool(a.num_experts),
        "with biases": bool(a.num_experts) and a.mlp_bias,
        "shared ones": bool(a.shared_ffn_hidden_size),
        "after dense layers": bool(a.num_dense_layers),
        "between dense layers": bool(a.dense_layers),
        "chosen by sigmoid": a.router_score == "sigmoid",
        "scaled at their inputs": a.router_on_inputs,
    }
    return _listed(parts)


def _norms(a: Architecture) -> str:
    parts = {
        "LayerNorm": a.norm == "layernorm",
        "after attention and MLP": a.norm_placement == "post",
        "before and after": a.norm_placement == "both",
        "weights from 1 on": a.zero_centered_norm,
        "of queries and keys": a.qk_norm or a.qk_unit_norm,
    }
    return _listed(parts)


def _listed(parts: dict[str, bool]) -> str:
    return ", ".join(name for name, is_so in parts.items() if is_so)


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
