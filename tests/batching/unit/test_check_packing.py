"""What `check_packing` lets pass keeps documents apart at every length; what does not is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.batching.packing import PackingCollator, check_packing, register_document_attention
from dynapipe_ext.errors import ConfigError, ExecutionError

pytest.importorskip("transformers")
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GROUPED = SMALL | IDS | {"num_key_value_heads": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
LLAMA4 = GROUPED | {
    "num_hidden_layers": 4,  # the fourth has no rotary positions
    "head_dim": 8,
    "attention_chunk_size": 64,
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 32, "head_dim": 8}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        GROUPED | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GROUPED | {"head_dim": 8, "sliding_window": 32, "num_hidden_layers": 6},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED | {"sliding_window": 32}),
    "phi3 longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        GROUPED | {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "llama dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED
        | {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4 | {"attn_temperature_tuning": False}),
    "llama4 scaled": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "bloom": ("BloomConfig", "BloomForCausalLM", IDS | {"vocab_size": 97, "hidden_size": 32, "n_head": 4}),
    "mamba": ("MambaConfig", "MambaForCausalLM", IDS | {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
}
COLLATED = {"sdpa": "positions", "eager": "positions", "mask": "block-mask", "documents": "cu_seqlens"}


def model(name: str, attention: str) -> Any:
    import torch
    import transformers

    config, kind, settings = MODELS[name]
    kernel = {"mask": "sdpa", "documents": register_document_attention()}.get(attention, attention)
    torch.manual_seed(0)
    made = getattr(transformers, config)(**settings)
    return getattr(transformers, kind)._from_config(made, attn_implementation=kernel)


def check(name: str, attention: str, max_tokens: int | None = None, **settings: Any) -> float:
    collator = PackingCollator(attention=COLLATED[attention], max_tokens=max_tokens)  # type: ignore[arg-type]
    return check_packing(model(name, attention), collator, **settings)


@pytest.mark.parametrize("attention", ["sdpa", "documents"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma3", "phi3", "llama4"])
def test_windows_and_chunks_are_exact_where_transformers_or_our_kernel_keeps_them(name: str, attention: str) -> None:
    assert check(name, attention) <= 1e-5


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("mistral", "sliding_window of 32"),
        ("qwen2", "sliding_window of 32"),
        ("gemma3", "sliding_window of 32"),
        ("phi3", "sliding_window of 32"),
        ("llama4", "attention_chunk_size of 64"),
    ],
)
def test_a_block_mask_that_drops_windows_or_chunks_is_refused(name: str, limit: str) -> None:
    with pytest.raises(ExecutionError, match=limit):
        check(name, "mask")
    assert check(name, "mask", longest=32) <= 1e-5  # shorter documents never meet them


@pytest.mark.parametrize("attention", COLLATED)
@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope"])
def test_frequencies_that_follow_the_longest_document_of_a_row_are_refused(name: str, attention: str) -> None:
    with pytest.raises(ExecutionError, match="original_max_position_embeddings of 64"):
        check(name, attention)
    assert check(name, attention, longest=64) <= 1e-5


def test_a_scale_by_position_in_the_row_is_refused_for_rows_that_reach_it() -> None:
    with pytest.raises(ExecutionError, match="floor_scale of 8192"):
        check("llama4 scaled", "sdpa")
    assert check("llama4 scaled", "sdpa", max_tokens=4096) <= 1e-5


def test_a_mask_that_eager_attention_adds_to_its_scores_is_refused() -> None:
    assert check("llama", "mask") <= 1e-5
    with pytest.raises(ExecutionError, match='attention="positions"'):
        check_packing(model("llama", "eager"), PackingCollator(attention="block-mask"))


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_models_that_know_no_positions_of_documents_are_refused_by_name(name: str) -> None:
    refused = ExecutionError if name == "bloom" else (ConfigError, ExecutionError)
    with pytest.raises(refused, match=MODELS[name][1]):
        check_packing(model(name, "eager"), PackingCollator())
    with pytest.raises((ConfigError, ExecutionError), match=MODELS[name][1]):
        check_packing(model(name, "eager"), PackingCollator(attention="block-mask"))


def test_a_check_leaves_the_model_its_mode_and_the_generator_its_state() -> None:
    import torch

    ours = model("mistral", "sdpa").train()
    frozen = ours.model.layers[0].eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_packing(ours, PackingCollator())
    assert torch.equal(torch.rand(3), expected)
    assert ours.training
    assert not frozen.training
    with pytest.raises(ConfigError, match="longest is -1 but must be an integer of at least 1"):
        check_packing(ours, PackingCollator(), longest=-1)
    assert ours.config.sliding_window == 32
