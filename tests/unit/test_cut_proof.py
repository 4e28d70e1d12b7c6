"""Models of families that no list names are cut by what their modules and one forward show, and that is proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.transformers.cut_proof import proven_cut
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.executor.stages.transformers.twin import built_twin, twin_config
from dynapipe_ext.launch.job.model_folder import layout_line, refuse_unsupported, with_bounded_rows, with_cut
from dynapipe_ext.models.layer_pattern import MASKED_ROW, LayerPattern, ProvenCut, read_pattern
from dynapipe_ext.models.module_tree import causal_class
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.checkpoints import differences, tensors_in
from tests.support.tiny_models import SIZES, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, assert_same, learned, plans_of

_NO_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_NO_HEAD_DIM | {"num_key_value_heads": 2}),
    "olmo2": lambda: transformers.Olmo2Config(**_NO_HEAD_DIM),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(
        vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=4, pad_token_id=0
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "llama4": lambda: transformers.Llama4Config(
        text_config=SIZES | {
            "num_local_experts": 2, "intermediate_size_mlp": 24, "attn_temperature_tuning": False, "use_qk_norm": False,
        },
        vision_config=_VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(
        **_NO_HEAD_DIM | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 8}
    ),
    "doge": lambda: transformers.DogeConfig(**_NO_HEAD_DIM),  # scores of its own in the mask, zero at first
    "gemma3": lambda: transformers.Gemma3Config(
        text_config=SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 8},
        vision_config=_VISION, mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7,
    ),
}  # fmt: skip


def cut_of(config: Any, **options: Any) -> ProvenCut:
    return proven_cut(causal_class(config), config, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_any_family_learn_what_the_whole_model_learns(family: str) -> None:
    config = FAMILIES[family]()
    model = tiny_model(config)
    if family == "falcon_mamba":
        model.double()  # rounding alone parts its gradients in float32 by more than 1e-5, on some processors
    loss, gradients = one_by_one(model, SAMPLES)
    cut = cut_of(config, attentions=["sdpa"])
    packs, has_halves = not cut.packed_fault, bool(cut.pattern.halves)
    assert packs == (family not in ("falcon_mamba", "gpt_oss"))
    assert has_halves == (family not in ("gpt_neox", "falcon_mamba", "doge"))  # both at once, no MLP, a weight between
    topology = Topology(pp=4, layers_per_stage=(0.5, 1.5, 1.5, 0.5) if has_halves else ())
    losses, learned_gradients = learned(
        model, topology, plans_of(topology, "packed" if packs else "padded", split=False)
    )
    assert losses == pytest.approx([loss] * 4, rel=1e-5)
    assert_same(learned_gradients, gradients)


def test_modules_of_a_layer_are_those_of_the_half_that_runs_them() -> None:
    names = {
        "olmo2": ["self_attn", "post_attention_layernorm", "mlp", "post_feedforward_layernorm"],  # norms behind
        "gpt_oss": ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"],
    }
    for family, wanted in names.items():
        halves = cut_of(FAMILIES[family]()).pattern.halves
        assert [module.name for module in halves] == wanted
        assert [module.half for module in halves] == ["attention"] * 2 + ["mlp"] * 2


def test_a_family_without_halves_refuses_a_stage_that_ends_within_a_layer() -> None:
    for family in ("gpt_neox", "doge"):
        with pytest.raises(ConfigError, match=r"\(1\.5, 2\.5\) cuts a layer .* this model of transformers"):
            parts_of_config(FAMILIES[family](), Topology(pp=2, layers_per_stage=(1.5, 2.5)), seed=0)


def test_a_small_model_keeps_the_widths_of_latent_attention() -> None:
    config = transformers.LongcatFlashConfig(n_routed_experts=8)  # as published but for its 512 experts
    whole = causal_class(config)
    twin = built_twin(whole, twin_config(whole, config))
    assert twin.config.hidden_size < config.hidden_size
    assert (twin.config.head_dim, twin.config.qk_rope_head_dim) == (config.head_dim, config.qk_rope_head_dim)


def test_a_small_model_of_states_is_narrow() -> None:
    config = transformers.Mamba2Config()  # 128 heads, each of whose steps plain torch computes for minutes
    whole = causal_class(config)
    twin = built_twin(whole, twin_config(whole, config))
    assert {twin.config.hidden_size, twin.config.num_heads * twin.config.head_dim // twin.config.expand} == {64}


def test_a_configuration_of_images_and_text_makes_the_whole_model() -> None:
    """transformers names the text's half as the causal model of some: saved, the tower would be lost."""
    for config in (transformers.Llama4Config(), transformers.Qwen3_5Config()):
        whole = causal_class(config)
        assert whole.config_class is type(config)


def test_a_configuration_of_any_size_is_proven_in_a_small_model_with_all_kinds_of_its_layers() -> None:
    config = transformers.DeepseekV3Config()  # 671 billion weights
    whole = causal_class(config)
    twin = built_twin(whole, twin_config(whole, config))
    assert {type(layer.mlp).__name__ for layer in twin.model.layers} == {"DeepseekV3MLP", "DeepseekV3MoE"}
    assert sum(weight.numel() for weight in twin.parameters()) < 30e6
    assert cut_of(config).pattern.last == ("model.norm", "lm_head")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: transformers.Gemma3nTextConfig(
                **SIZES, num_kv_shared_layers=2, vocab_size_per_layer_input=61, hidden_size_per_layer_input=4,
                laurel_rank=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5,
            ),
            "Gemma3nForCausalLM cannot be cut into stages",
        ),
        (lambda: transformers.BertConfig(**_NO_HEAD_DIM), "BertLMHeadModel ties weights other than"),
        (
            lambda: transformers.BartConfig(
                vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=3, encoder_ffn_dim=16, decoder_ffn_dim=16,
                encoder_attention_heads=2, decoder_attention_heads=2,
            ),
            "has no list of 1 layers that run one after the other .its lists: model.decoder.layers of 3",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cut_of(make())


def test_a_pattern_that_is_named_is_proven_like_a_derived_one() -> None:
    config = FAMILIES["olmo2"]()
    own = cut_of(config).pattern
    assert cut_of(config, pattern=replace(own, packs=False)) == cut_of(config)
    for wrong, says in (
        (replace(own, last=("lm_head",)), r"several stages would need \(model.norm.weight\)"),
        (replace(own, layers="model.blocks"), "has no module 'model.blocks'"),
        (replace(own, returns_tuple=True), "returns Tensor: give its LayerPattern returns_tuple=False"),
    ):
        with pytest.raises(ConfigError, match=says):
            cut_of(config, pattern=wrong)


def test_a_pattern_is_read_from_toml_and_json(tmp_path: Path) -> None:
    toml, other = tmp_path / "pattern.toml", tmp_path / "pattern.json"
    toml.write_text('layers = "model.layers"\nfirst = ["model.embed_tokens"]\nlast = ["model.norm", "lm_head"]\n')
    other.write_text('{"layers": "model.layers", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}')
    wanted = LayerPattern(layers="model.layers", first=("model.embed_tokens",), last=("model.norm", "lm_head"))
    assert read_pattern(toml) == read_pattern(other) == wanted
    for text, says in (
        ('layer = "model.layers"', "unknown .'layer'.*did you mean .?layers"),
        ('layers = "model.layers"', "lacks first, last: name the modules"),
        ('layers = "a"\nfirst = "b"\nlast = []', "first is 'b' but must be a list"),
        ("layers = 3\nfirst = []\nlast = []", "layers is 3 but must be of type str"),
        ('layers = "a"\nfirst = []\nlast = []\npacks = true', "packs is proven when a run starts"),
        ('layers = "a"\nfirst = []\nlast = []\nhalves = []', "halves is proven when a run starts"),
        ("layers =", "cannot be read as a layer pattern"),
    ):
        toml.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_pattern(toml)


@pytest.mark.parametrize("family", ["olmo2", "gemma3", "gpt_oss"])
def test_a_model_that_was_published_in_16_bits_is_cut_like_one_of_32(family: str) -> None:
    wide, narrow = FAMILIES[family](), FAMILIES[family]()
    for part in (narrow, *(part for part in vars(narrow).values() if hasattr(part, "to_dict"))):
        part.dtype = torch.bfloat16
    assert cut_of(narrow) == cut_of(wide)


def test_a_pattern_is_refused_where_transformers_computes_no_decoder() -> None:
    sizes = preset("llama-3.2-1b")
    for model in ({}, {"architecture": "m", "described": sizes}, {"architecture": "m", "described": preset("t5-3b")}):
        config = TrainConfig()
        config = replace(config, model=replace(config.model, layer_pattern="p.toml", **model))
        with pytest.raises(ConfigError, match=r"layer_pattern is p\.toml, which names modules of a decoder"):
            refuse_unsupported(config)
    computed = replace(config.model, described=sizes, backend="transformers")
    refuse_unsupported(replace(config, model=computed).with_values(topology={"tp": 1}))


def test_rows_are_padded_where_packing_is_not_exact_unless_packed_ones_are_asked_for() -> None:
    pattern = LayerPattern(layers="a", first=(), last=())
    cut = ProvenCut(pattern=pattern, packed_fault="states go on")
    settled = with_cut(TrainConfig(), cut, layout_is_named=False)
    assert settled.plan.layout == "padded"
    assert "rows are padded: packing is not exact" in layout_line(settled)
    for options, changes, says in (
        ({"layout_is_named": True}, {}, "layout is packed, but .* not exact in .*states go on.*--layout padded"),
        ({"layout_is_named": False, "compare": True}, {}, "--compare packs rows, but .* leave --compare out"),
        ({"layout_is_named": False}, {"split_policy": "packed-balanced"}, "packed-balanced packs rows"),
        ({"layout_is_named": False}, {"pieces": "auto"}, "pieces of a sample need dynapipe_documents"),
    ):
        config = TrainConfig()
        config = replace(config, plan=replace(config.plan, **changes))
        with pytest.raises(ConfigError, match=says):
            with_cut(config, cut, **options)
    packs = ProvenCut(pattern=pattern, attention="sdpa")
    assert with_cut(TrainConfig(), packs, layout_is_named=False).plan.layout == "packed"
    for one in (cut, cut_of(FAMILIES["qwen3_moe"]())):
        assert ProvenCut.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_tower_of_images_stays_bit_for_bit_in_what_its_trained_text_is_saved_with(tmp_path: Path) -> None:
    config = FAMILIES["gemma3"]()
    torch.manual_seed(0)
    causal_class(config)(config).save_pretrained(tmp_path / "model")
    topology = Topology(pp=2)
    parts = [part for rank in range(2) for part in parts_of_folder(tmp_path / "model", topology, rank)]
    assert parts[0].pattern
    assert parts[0].pattern.idle == ("model.vision_tower", "model.multi_modal_projector")
    trained = {name for part in parts for name, weight in part.model.named_parameters() if weight.requires_grad}
    assert not any("vision" in name or "projector" in name for name in trained)
    assert not any("vision" in name for name, _ in parts[1].model.named_parameters())
    with torch.no_grad():
        for part in parts:
            for name, weight in part.model.named_parameters():
                if weight.requires_grad:
                    weight.copy_(torch.cos(weight) + len(name))
    save_parts(parts, tmp_path / "saved")
    before, after = tensors_in(tmp_path / "model"), tensors_in(tmp_path / "saved")
    changed = differences(before, after)
    assert before.keys() == after.keys()
    assert changed
    assert not [name for name in changed if "vision" in name or "projector" in name]
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(8, 20)[None]
    batch: dict[str, Any] = {"model_inputs": {}}
    with torch.no_grad():
        x = parts[1](parts[0](tokens, batch=batch), batch=batch)
        torch.testing.assert_close(whole(input_ids=tokens, use_cache=False).logits, x)


def test_a_part_is_read_where_its_family_draws_weights_of_a_head_that_another_stage_has(tmp_path: Path) -> None:
    config = FAMILIES["modernbert-decoder"]()
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    topology, tokens, batch = Topology(pp=2), torch.arange(8, 20)[None], {"model_inputs": {}}
    parts = [part for rank in range(2) for part in parts_of_folder(tmp_path, topology, rank)]
    with torch.no_grad():
        logits = parts[1](parts[0](tokens, batch=batch), batch=batch)
        torch.testing.assert_close(logits, model(input_ids=tokens, use_cache=False).logits)


def test_packed_rows_that_are_masked_as_a_whole_are_bounded_by_what_is_measured_or_the_longest_sample() -> None:
    pattern = LayerPattern(layers="model.layers", first=(), last=())
    config = TrainConfig()
    masked = replace(config, model=replace(config.model, cut=ProvenCut(pattern=pattern)))
    assert with_bounded_rows(masked, 100).plan.max_tokens == MASKED_ROW
    assert with_bounded_rows(masked, 3001).plan.max_tokens == 3008
    line = layout_line(with_bounded_rows(masked, 100))
    assert line.startswith("rows have at most 2048 positions")
    assert "by masks, which take the square of a row" in line
    named = masked.with_values(plan={"max_tokens": 640})
    apart = replace(config, model=replace(config.model, cut=ProvenCut(pattern=pattern, attention="flash")))
    padded = masked.with_values(plan={"layout": "padded"})
    for own in (named, apart, padded, config):
        assert with_bounded_rows(own, 3001) == own
    assert not layout_line(apart)
