"""Which weights decay: those that transformers' Trainer lets decay, by the names of each backend."""

from __future__ import annotations

import pytest
import torch
import transformers

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.stages.transformers.optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.weight_decay import decaying_weights, weight_decays
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.settings.tables import OptimizerSettings
from dynapipe_ext.tools.checkpoint.megatron.names import megatron_tensors
from tests.support.checkpoints import VARIANTS, tiny

COHERE = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "use_qk_norm": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS = {
    "cohere": lambda: transformers.CohereConfig(**COHERE),  # norms of heads have two dimensions
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    ),
    "mamba": lambda: transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2),
}


def trainers_names(model: torch.nn.Module) -> set[str]:
    own = {name for name, _ in model.named_parameters()}  # of a tied weight one name
    return own & set(transformers.Trainer.get_decay_parameter_names(None, model))


@pytest.mark.parametrize("family", [*dict.fromkeys(family for family, _ in VARIANTS.values()), *OTHERS])
def test_what_decays_is_what_trainer_lets_decay_whatever_computes_the_model(family):
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[family]()) if family in OTHERS else tiny(family)
    wanted, decaying = trainers_names(model), decaying_weights(model)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, weight in model.named_parameters() if weight in decaying} == wanted
    if family in OTHERS:
        return
    architecture = read_config(model.config.to_dict())
    for group in tensor_groups(architecture):
        published = [info.name for info in group.tensors]
        # transformers joins tensors of experts, and calls a router otherwise than its files do
        assert all(name in names or ".experts." in name or "gate." in name for name in published)
        expected = {name in wanted if name in names else not name.endswith("bias") for name in published}
        tensors = [one for one in megatron_tensors(architecture, group) if not (one.is_buffer or one.is_added)]
        assert {weight_decays(one.name) for one in tensors} <= expected


def test_groups_of_an_optimizer_follow_the_rule():
    """Rows of norms of heads, and the biases of experts, whose shapes are those of matrices."""
    for family, kept in (("cohere", "q_norm.weight"), ("gpt_oss", "gate_up_proj_bias")):
        model = transformers.AutoModelForCausalLM.from_config(OTHERS[family]()) if family in OTHERS else tiny(family)
        parts = parts_of_model(model, Topology())
        optimizer = TransformersOptimizer(parts, OptimizerSettings(weight_decay=0.5), num_steps=5)
        rates = {
            id(weight): group["weight_decay"] for group in optimizer._adam.param_groups for weight in group["params"]
        }
        named = dict(parts[0].model.named_parameters())
        assert {rates[id(weight)] for name, weight in named.items() if name.endswith(kept)} == {0.0}
        assert {name for name, weight in named.items() if rates[id(weight)] == 0.5} == trainers_names(model)
