"""What configurations of the newer families say, and what of them is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import RopeScaling
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.megatron_arguments import read_arguments, unsayable, write_arguments

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2: only 1 is supported"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]: only \[\] is supported"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, "windows in some layers only"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope_type is 'longrope'.* of the row"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "only every n-th layer without a window"),
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "layer_types is .* must be 2 of sliding_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope of windows: rope_type is 'linear'",
        ),
        (
            "deepseek_v3",
            {},
            r"model_type is 'deepseek_v3': multi-head latent attention, .* more than is described here",
        ),
        (
            "gemma3",
            {},
            "model_type is 'gemma3': it has a vision tower; give its text_config, of model_type gemma3_text",
        ),
    ],
)
def test_what_a_newer_familys_config_says_in_vain_is_refused(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config({"model_type": family} | _SMALL | change)


def test_gemma_is_read_as_it_was_published_before_layers_had_types() -> None:
    old = {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6}
    old |= {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = read_config(_SMALL | old)
    assert [layer for layer in range(26) if not gemma.has_window(layer)] == [5, 11, 17, 23]
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.rope_scaling) == (2e6, 2e4, RopeScaling("linear", 8.0))
    assert "capped scores" in "; ".join(unsayable(gemma))
    gemma = read_config({"model_type": "gemma2"} | _SMALL)
    assert (gemma.full_attention_every, gemma.attention_softcap, gemma.logit_softcap) == (2, 50.0, 30.0)


def test_an_olmo_is_not_said_by_megatrons_arguments() -> None:
    architecture = read_config({"model_type": "olmo2"} | _SMALL)
    assert [reason.split(" (")[0] for reason in unsayable(architecture)] == [
        "norms of what attention and MLP give",
        "norms of the queries and of the keys of all heads together",
    ]
    with pytest.raises(ConfigError, match="lost 'norms of what attention and MLP give"):
        read_arguments(write_arguments(architecture))
