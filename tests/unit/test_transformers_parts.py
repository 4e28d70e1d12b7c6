"""What is cut by a pattern, and what TransformersStage refuses by name instead of training wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batching.packing import PackingCollator, check_packing
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages.chunk_runner import DeferredGradients
from dynapipe_ext.executor.stages.split_linear import make_linears_splittable
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder, parts_of_model
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineReductions
from dynapipe_ext.models.layer_pattern import LayerPattern
from dynapipe_ext.models.module_tree import nested_configs
from dynapipe_ext.models.named_models import drops_values, is_rate
from tests.support.tiny_models import SIZES, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, assert_same, batches_of, learned, plans_of

LLAMA = LayerPattern(layers="model.layers", first=("model.embed_tokens",), last=("model.norm", "lm_head"), packs=True)

# Families without a pattern of their own: scaled embeddings, layers that return tuples.
DECLARED = {
    "granite": (
        lambda: transformers.GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=2.0),
        LLAMA,
    ),
    "gptj": (
        lambda: transformers.GPTJConfig(
            vocab_size=61, n_embd=16, n_layer=4, n_head=2, n_positions=64, rotary_dim=4,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=False,
        ),
        LayerPattern(
            layers="transformer.h", first=("transformer.wte", "transformer.drop"),
            last=("transformer.ln_f", "lm_head"), returns_tuple=True,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", DECLARED)
def test_a_family_that_is_declared_learns_what_the_whole_model_learns(family):
    make, pattern = DECLARED[family]
    model = tiny_model(make())
    loss, gradients = one_by_one(model, SAMPLES)
    topology = Topology(pp=4)
    losses, found = learned(model, topology, plans_of(topology, "padded", split=True), pattern=pattern)
    assert losses == pytest.approx([loss] * 4, rel=1e-5)
    assert_same(found, gradients)


def test_a_model_that_sets_buffers_of_its_layers_sets_those_of_each_stage(tmp_path):
    """Falcon H1's, which the loops over all layers of a model that has some alone would not reach."""
    config = transformers.FalconH1Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
        ssm_multipliers=[0.5, 2.0, 3.0, 0.25, 1.5],
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).named_buffers())
    names = {name for name in whole if name.endswith("mup_vector")}
    assert len(names) == 4
    pattern = replace(LLAMA, last=("model.final_layernorm", "lm_head"), packs=False)
    for rank in range(2):
        (part,) = parts_of_folder(tmp_path, Topology(pp=2), rank, pattern=pattern)
        own = {name: value for name, value in part.model.named_buffers() if name in names}
        assert len(own) == 2
        assert all(torch.equal(value, whole[name]) for name, value in own.items())


def stage_of(model, topology=None, pattern=None) -> TransformersStage:
    topology = topology or Topology()
    return TransformersStage(parts_of_model(model, topology, pattern=pattern), parallel=InlineReductions(topology))


def start(model, layout="padded", *, pattern=None, **changes):
    """The first micro-batch of a plan, changed so, is loaded."""
    (plan,) = plans_of(Topology(), layout, split=False)
    plan = replace(plan, micro_batches=tuple(replace(m, **changes) for m in plan.micro_batches))
    stage = stage_of(model, pattern=pattern)
    stage.start_step(plan)
    return stage, plan


def loaded(model, *, pattern=None, **changed):
    stage, plan = start(model, pattern=pattern)
    batch = batches_of(plan)[0]
    stage.load(0, batch | {name: change(batch[name]) for name, change in changed.items()})
    return stage


def tiny(config, **settings):
    for name, value in settings.items():
        setattr(config, name, value)
    return tiny_model(config)


def bert():
    return transformers.BertConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )


def llama(**settings):
    return transformers.LlamaConfig(**SIZES | settings)


UNPROVEN = replace(LLAMA, packs=False)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        (
            ConfigError,
            lambda: parts_of_model(tiny_model(bert())),
            "BertLMHeadModel ties weights other than head and embedding",
        ),
        (ConfigError, lambda: parts_of_config(transformers.ViTConfig(), seed=0), "no causal model for a ViTConfig"),
        (
            ConfigError,
            lambda: parts_of_model(tiny_model("llama"), pattern=replace(LLAMA, layers="transformer.h")),
            "LlamaForCausalLM has no module 'transformer.h'",
        ),
        (ConfigError, lambda: parts_of_model(tiny_model("llama"), Topology(tp=2)), "tp is 2 .* give tp 1"),
        (
            ConfigError,
            lambda: parts_of_model(tiny_model("llama"), Topology(pp=2, layers_per_stage=(4, 0))),
            r"layers_per_stage is \(4, 0\) but each stage",
        ),
        (
            ConfigError,
            lambda: parts_of_model(tiny_model("llama"), Topology(pp=8)),
            "4 layers cannot fill 8 stages",
        ),
        (ConfigError, lambda: TransformersStage([tiny_model("llama")]), "takes a list of parts"),
        (ConfigError, lambda: parts_of_model(tiny_model("llama").model), "LlamaModel has no language model head"),
        (
            ConfigError,
            lambda: stage_of(tiny_model("llama"), Topology(pp=2)).start_step(
                plans_of(Topology(), "padded", split=False)[0]
            ),
            r"runs stages \(0,\) of 1 but has parts of stages \(0,\) of 2",
        ),
        (
            ConfigError,
            lambda: start(tiny_model("llama"), "packed", pattern=UNPROVEN),
            r"keeps them apart is not proven.*LayerPattern\(packs=True\)",
        ),
        (
            ConfigError,
            lambda: start(tiny(llama(rope_parameters=DYNAMIC, max_position_embeddings=16))),
            "rows of 24 positions change the rotary frequencies of LlamaForCausalLM .dynamic above 16",
        ),
        (
            ConfigError,
            lambda: start(tiny(transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=4, n_head=2, n_positions=20))),
            "rows of 24 positions exceed the 20 that GPT2LMHeadModel has learned",
        ),
        (DataError, lambda: loaded(tiny_model("llama"), tokens=lambda x: x[:, 1:]), "tokens of micro-batch 0 has"),
        (DataError, lambda: loaded(tiny_model("llama"), position_ids=lambda x: x.flip(-1)), "pad rows on the right"),
        (
            ConfigError,
            lambda: loaded(tiny_model("llama"), pattern=replace(LLAMA, returns_tuple=True)).forward(0, 0, ()),
            r"LlamaDecoderLayer returns Tensor.*returns_tuple=False",
        ),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_is_refused_by_name(error, make, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gemma3", "phi3", "gpt2"])
def test_packing_is_proven_for_families_whose_pattern_says_that_it_is(family):
    assert check_packing(tiny_model(family), PackingCollator()) < 1e-4


def test_a_split_backward_puts_nothing_off_for_frozen_weights():
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4).requires_grad_(False), torch.nn.Linear(4, 2))
    deferred = DeferredGradients(make_linears_splittable(layers), lambda weight, gradient: None)
    deferred.take_over()
    x = torch.ones(5, 3, requires_grad=True)
    with deferred.deferring() as work:
        layers(x).sum().backward()
    assert [weight is layers[1].weight for weight, *_ in work] == [True]
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in layers[0].parameters())


def test_what_a_class_does_not_train_is_not_trained_of_a_folder_either(tmp_path):
    """As the bias with which Ernie's router chooses experts: from_pretrained would let it train, and so decay."""
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, moe_intermediate_size=8, moe_num_experts=4, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    model = transformers.Ernie4_5_MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    wanted = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    for parts in (
        [parts_of_folder(tmp_path, Topology(pp=2), rank) for rank in range(2)],
        [parts_of_config(config, Topology(pp=2), rank, seed=0) for rank in range(2)],
    ):
        weights = [named for (part,) in parts for named in part.model.named_parameters()]
        assert {name for name, weight in weights if not weight.requires_grad} == wanted
    assert len(wanted) == 2


_BLOCKS = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
DROPPING = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "opt": lambda: transformers.OPTConfig(**_BLOCKS, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=64),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_BLOCKS, intermediate_size=24),
    "bloom": lambda: transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=2, n_head=2),
    "falcon": lambda: transformers.FalconConfig(**_BLOCKS),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES | {"num_local_experts": 2}),
}


@pytest.mark.parametrize("family", DROPPING)
def test_a_stage_drops_values_only_at_the_rate_that_is_asked_for(family, tmp_path):
    """Whatever the configuration says, which a saved model still says. A rate is for all dropout, not for layers."""
    config = DROPPING[family]()
    rates = [name for part in nested_configs(config) for name, value in vars(part).items() if is_rate(name, value)]
    for name in rates:
        setattr(config, name, 0.5)
    tokens = torch.arange(40).reshape(1, -1) % 61

    def logits(dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        (part,) = parts_of_config(config, seed=0, dropout=dropout)
        torch.manual_seed(1)
        trained = part.model.train()(tokens).logits
        if not dropout:
            save_parts([part], tmp_path / "saved")
        assert {getattr(part.model.config, name) for name in rates if drops_values(name)} == {dropout}
        assert not any(getattr(part.model.config, name) for name in rates if not drops_values(name))
        return trained, part.model.eval()(tokens).logits

    trained, evaluated = logits(0.0)
    assert torch.equal(trained, evaluated)
    assert not torch.allclose(*logits(0.3), atol=1e-3)
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert [getattr(saved, name) for name in rates] == [0.5] * len(rates)


def test_dropout_of_a_family_that_has_none_is_refused():
    with pytest.raises(ConfigError, match=r"dropout is 0\.1 but a mamba2? of transformers has none: leave it out"):
        parts_of_config(transformers.MambaConfig(vocab_size=61, hidden_size=16), seed=0, pattern=LLAMA, dropout=0.1)
