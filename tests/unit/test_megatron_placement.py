"""Where Megatron finds layers and tied weights under a placement, and which chunks no stage can be made of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_weights, transformer_config
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.models.architecture import Architecture

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: E402

from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients  # noqa: E402
from dynapipe_ext.executor.stages.megatron.stage import PlacedLayout, is_tied_by_megatron  # noqa: E402

SHAPE = Architecture.gpt(
    num_layers=8,
    hidden_size=32,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    gated_mlp=True,
    vocab_size=256,
    max_seq_len=64,
    tied_embeddings=True,
    position="rope",
    norm="rmsnorm",
    bias=False,
)


@pytest.mark.parametrize(
    ("topology", "offsets"),
    [
        (Topology(pp=2), [[0], [4]]),
        (Topology(pp=2, placement=(0, 1, 0, 1)), [[0, 4], [2, 6]]),
        (Topology(pp=2, placement=(0, 1, 1, 0)), [[0, 6], [2, 4]]),
        (Topology(pp=2, placement=(0, 1, 1, 0), layers_per_stage=(1, 2, 4, 1)), [[0, 7], [1, 3]]),
        (Topology(pp=2, placement=(1, 0, 1)), [[3], [0, 6]]),
    ],
)
def test_layer_numbers_are_global_under_every_placement(topology, offsets):
    config = transformer_config(SHAPE, topology, dtype="float32", sequence_parallel=False)
    layout = config.pipeline_model_parallel_layout
    found = [
        [layout.get_layer_offset(vp_stage=chunk, pp_rank=rank) for chunk in range(len(topology.stages_of(rank)))]
        for rank in range(topology.pp)
    ]
    assert found == offsets


@pytest.mark.parametrize("placement", [(), (0, 1, 0, 1)])
def test_the_layout_of_an_interleaved_placement_is_megatrons_own(placement):
    topology = Topology(pp=2, placement=placement)
    ours = PlacedLayout(topology, 8)
    rows = [["decoder"] * (8 // topology.num_stages) for _ in range(topology.num_stages)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    megatrons = PipelineParallelLayerLayout(rows, 2)
    for name in ("layout", "flatten_layout", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"):
        assert getattr(ours, name) == getattr(megatrons, name)
    assert ours.pretty_repr() == megatrons.pretty_repr()


@pytest.mark.parametrize(
    ("topology", "answer"),
    [
        (Topology(), True),
        (Topology(pp=4), True),
        (Topology(pp=2, placement=(0, 1, 0, 1)), True),
        (Topology(pp=2, placement=(0, 1, 1, 0)), False),
        (Topology(pp=2, placement=(1, 0, 1)), False),
    ],
)
def test_megatron_ties_ends_on_the_first_and_last_rank_and_we_those_on_one(topology, answer):
    assert is_tied_by_megatron(topology) is answer


@pytest.mark.parametrize("placement", [(1, 0), (0, 0, 1), (0, 1, 2, 1)])
def test_tied_ends_that_megatron_would_not_find_are_refused(placement):
    with pytest.raises(ConfigError, match=r"tied embeddings under placement .*untie them"):
        is_tied_by_megatron(Topology(pp=max(placement) + 1, placement=placement))


@pytest.mark.parametrize(
    ("shape", "topology", "says"),
    [
        ({"tied_embeddings": True}, Topology(pp=2), "'head' leaves the embedding whole, but this model ties its head"),
        ({"vocab_size": 200}, Topology(pp=3), "vocab_size 256 does not divide over tp 1 x pp 3"),
        ({}, Topology(pp=2, placement=(0, 1), layers_per_stage=(8, 0)), "there are 1 stages of layers"),
    ],
)
def test_heads_that_parts_cannot_make_are_refused_by_name(shape, topology, says):
    spread = replace(topology, vocabulary="head") if topology.placement else split_vocabulary(topology, "head")
    architecture = replace(SHAPE, **{"tied_embeddings": False} | shape)
    with pytest.raises(ConfigError, match=says):
        build_model(architecture, spread, 0, None, seed=None, device=torch.device("cpu"))


def test_parts_of_a_model_with_a_decoder_side_are_refused_by_name():
    sizes = {"hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": 256, "max_seq_len": 64}
    t5 = Architecture.t5(num_layers=2, num_decoder_layers=2, gated_mlp=True, tied_embeddings=False, **sizes)
    with pytest.raises(ConfigError, match="'head' is split over pipeline ranks, which a model with a decoder side"):
        build_model(t5, split_vocabulary(Topology(pp=2), "head"), 0, None, seed=None, device=torch.device("cpu"))


def test_several_stages_on_the_only_rank_are_refused():
    with pytest.raises(ConfigError, match="2 stages on one pipeline rank"):
        transformer_config(SHAPE, Topology(placement=(0, 0)), dtype="float32", sequence_parallel=False)


def test_exact_sums_take_the_gradients_of_steps_and_no_others():
    chunk: Any = torch.nn.Linear(3, 2)
    chunk.config = SimpleNamespace(num_moe_experts=None)
    gradients = ExactMegatronGradients([chunk])
    gradients.backward([chunk(torch.ones(1, 3)).sum()], None)
    assert [p.grad for p in chunk.parameters()] == [None, None]
    chunk(torch.ones(1, 3)).sum().backward()
    assert all(p.grad is not None for p in chunk.parameters())


def test_expert_parallel_ranks_begin_with_experts_of_their_own(monkeypatch):
    """Those of the same numbers on one rank: equal ones on all ranks would hide that ranks were swapped."""
    config = SimpleNamespace(num_moe_experts=4, num_layers=1)

    def experts(ep_rank: int, ep: int) -> list[torch.Tensor]:
        for name, value in {"rank": ep_rank, "world_size": ep}.items():
            monkeypatch.setattr(parallel_state, f"get_expert_model_parallel_{name}", lambda value=value: value)
            monkeypatch.setattr(parallel_state, f"get_tensor_model_parallel_{name}", lambda name=name: name != "rank")
        own = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(4 // ep))
        initialize_weights(torch.nn.ModuleDict({"local_experts": own}), config, seed=1)
        return [expert.weight.detach() for expert in own]

    whole = experts(0, 1)
    assert not torch.equal(whole[0], whole[2])
    for found, expected in zip([*experts(0, 2), *experts(1, 2)], whole, strict=True):
        assert torch.equal(found, expected)


class WithoutWeights(torch.nn.Module):
    def zero_grad_buffer(self) -> None: ...


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        (torch.nn.Linear(2, 2), "Linear but takes the list"),
        ([], "list but takes the list"),
        ([torch.nn.Linear(2, 2)], "model chunk 0 is a Linear.*wrap it in megatron-core's DistributedDataParallel"),
        ([WithoutWeights()], "model chunk 0 owns no parameters"),
    ],
)
def test_what_cannot_be_a_stage_is_refused_by_name(chunks, says):
    with pytest.raises(ConfigError, match=says):
        MegatronStage(chunks)
