"""Re-layouts between Hugging Face's weights and Megatron's are exact inverses, and every weight has its place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import TensorGroup, num_parameters, tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.names import (
    from_megatron,
    megatron_tensors,
    tied_head_name,
    to_megatron,
    transformer_engine_name,
)

LLAMA = Architecture(
    family="llama", num_layers=2, hidden_size=8, num_heads=4, num_query_groups=2, head_dim=2, ffn_hidden_size=6,
    vocab_size=11, max_seq_len=16, tied_embeddings=False,
)  # fmt: skip
GPT2 = replace(
    LLAMA, family="gpt2", num_query_groups=4, tied_embeddings=True, gated_mlp=False, activation="gelu_tanh",
    position="learned", norm="layernorm", qkv_bias=True, attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
T5 = replace(
    LLAMA, family="t5", num_query_groups=4, head_dim=3, num_decoder_layers=3, tied_embeddings=True, gated_mlp=False,
    activation="relu", position="relative",
)  # fmt: skip
MIXTRAL = replace(LLAMA, family="mixtral", num_experts=3, top_k=2)
FEED_FORWARD = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")  # gate, up, down
ARCHITECTURES = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied_embeddings=True),
    "llama with biases": replace(LLAMA, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "mistral": replace(LLAMA, family="mistral", num_query_groups=1, sliding_window=4),
    "mixtral": MIXTRAL,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=5),
    "internlm2": replace(LLAMA, family="internlm2", qkv_bias=True, attention_output_bias=True),
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied_embeddings=False),
    "t5 v1.0": T5,
    "t5 v1.1": replace(T5, tied_embeddings=False, gated_mlp=True, activation="gelu_tanh"),
}


@pytest.fixture(params=ARCHITECTURES.values(), ids=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return request.param


def published(architecture: Architecture) -> Iterator[tuple[TensorGroup, dict[str, torch.Tensor]]]:
    """Every group with values of which no two in the model are equal."""
    first = count(1, num_parameters(architecture))
    for group in tensor_groups(architecture):
        tensors = {}
        for info in group.tensors:
            start = next(first)
            tensors[info.name] = torch.arange(start, start + info.size).view(info.shape)
        yield group, tensors


def group_of(architecture: Architecture, name: str) -> tuple[TensorGroup, dict[str, torch.Tensor]]:
    return next(both for both in published(architecture) if both[0].name == name)


def test_the_way_there_and_back_gives_every_tensor_bit_for_bit(architecture: Architecture) -> None:
    for group, tensors in published(architecture):
        back = from_megatron(architecture, group, to_megatron(architecture, group, tensors))
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor), name
            assert back[name].is_contiguous()


def test_megatron_gets_every_value_once_in_the_shapes_that_were_promised(architecture: Architecture) -> None:
    names: list[str] = []
    for group, tensors in published(architecture):
        given = to_megatron(architecture, group, tensors)
        promised = megatron_tensors(architecture, group)
        assert {name: tuple(tensor.shape) for name, tensor in given.items()} == {t.name: t.shape for t in promised}
        assert all(tensor.is_contiguous() for tensor in given.values())
        names += given
        values = torch.cat([given[t.name].flatten() for t in promised if not t.is_added])
        assert torch.equal(values.sort().values, torch.cat([t.flatten() for t in tensors.values()]).sort().values)
        assert {(t.layer, t.side) for t in promised} == {(group.layer, group.side)}
    assert len(names) == len(set(names))


def test_rows_of_queries_keys_and_values_alternate_by_query_group() -> None:
    group, _ = group_of(LLAMA, "layers.1.attention_in")
    rows = {"q": [0, 1, 2, 3, 4, 5, 6, 7], "k": [10, 11, 12, 13], "v": [20, 21, 22, 23]}  # 2 a head; 4 and 2 heads
    tensors = {t.name: torch.tensor(rows[t.name.split(".")[4][0]])[:, None].expand(t.shape) for t in group.tensors}
    whole = to_megatron(LLAMA, group, tensors)["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert whole[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_gpt2s_joined_projection_is_transposed_and_alternates_by_head() -> None:
    group, _ = group_of(GPT2, "layers.0.attention_in")
    columns = torch.arange(24).expand(8, 24)  # (inputs, outputs): 8 of queries, 8 of keys, 8 of values, 2 a head
    whole = to_megatron(GPT2, group, {group.tensors[0].name: columns})
    (rows,) = (tensor[:, 0].tolist() for tensor in whole.values())
    assert rows == [0, 1, 8, 9, 16, 17, 2, 3, 10, 11, 18, 19, 4, 5, 12, 13, 20, 21, 6, 7, 14, 15, 22, 23]


def test_keys_and_values_of_cross_attention_alternate_by_head() -> None:
    group, _ = group_of(T5, "decoder.layers.0.cross_kv")
    tensors = {t.name: torch.arange(12)[:, None].expand(12, 8) + 100 * i for i, t in enumerate(group.tensors)}
    whole = to_megatron(T5, group, tensors)["decoder.layers.0.cross_attention.linear_kv.weight"]
    assert whole[:9, 0].tolist() == [0, 1, 2, 100, 101, 102, 3, 4, 5]


def test_a_gated_mlp_is_the_gate_above_the_input_and_cut_in_both() -> None:
    group, tensors = group_of(MIXTRAL, "layers.1.experts.2.mlp_in")
    (promised,) = megatron_tensors(MIXTRAL, group)
    assert promised.name == "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert (promised.tp_dim, promised.tp_parts) == (0, 2)
    whole = to_megatron(MIXTRAL, group, tensors)[promised.name]
    gate, up = tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"], whole[6:]
    assert torch.equal(whole[:6], gate)
    assert torch.equal(up, tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"])


def test_a_part_is_let_go_before_the_next_is_read() -> None:
    group, tensors = group_of(LLAMA, "layers.0.mlp_in")

    class Reader(Mapping[str, torch.Tensor]):
        def __init__(self) -> None:
            self.read: list[weakref.ref[torch.Tensor]] = []

        def __getitem__(self, name: str) -> torch.Tensor:
            assert all(tensor() is None for tensor in self.read)
            tensor = tensors[name].clone()
            self.read.append(weakref.ref(tensor))
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter(tensors)

        def __len__(self) -> int:
            return len(tensors)

    reader = Reader()
    to_megatron(LLAMA, group, reader)
    assert len(reader.read) == 2


def test_the_bias_of_a_tied_t5_head_is_zero_and_a_trained_one_is_refused() -> None:
    group, tensors = group_of(T5, "decoder.final_norm")
    given = to_megatron(T5, group, tensors)
    bias = given["lm_head.output_layer.bias"]
    assert bias.shape == (11,)
    assert not bias.any()
    assert from_megatron(T5, group, given).keys() == tensors.keys()
    bias[3] = 1
    with pytest.raises(DataError, match=r"lm_head\.output_layer\.bias is not zero: a published t5 model has no such"):
        from_megatron(T5, group, given)


def test_missing_extra_and_misshapen_tensors_are_named() -> None:
    group, tensors = group_of(LLAMA, "layers.0.attention_in")
    query = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(DataError, match=r"missing model\.layers\.0\.self_attn\.q_proj\.weight, unknown extra"):
        to_megatron(LLAMA, group, {**tensors, "extra": query})
    with pytest.raises(DataError, match=r"q_proj\.weight has shape \(8, 7\).* but .* says \(8, 8\)"):
        to_megatron(LLAMA, group, {**tensors, "model.layers.0.self_attn.q_proj.weight": query[:, :7]})
    with pytest.raises(DataError, match=r"q_proj\.weight: give one dtype"):
        to_megatron(LLAMA, group, {**tensors, "model.layers.0.self_attn.q_proj.weight": query.float()})
    whole = to_megatron(LLAMA, group, {**tensors, "model.layers.0.self_attn.q_proj.weight": query})
    with pytest.raises(DataError, match=r"missing decoder\.layers\.0\.self_attention\.linear_qkv\.weight"):
        from_megatron(LLAMA, group, {})
    with pytest.raises(DataError, match=r"linear_qkv\.weight has shape \(15, 8\)"):
        from_megatron(LLAMA, group, {name: tensor[1:] for name, tensor in whole.items()})


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        (LLAMA, "decoder.layers.3.input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (GPT2, "decoder.layers.3.pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"),
        (MIXTRAL, "decoder.layers.3.pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        (MIXTRAL, "decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"),
        (LLAMA, "decoder.layers.3.self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
    ],
)
def test_transformer_engines_names_are_known(architecture: Architecture, name: str, expected: str) -> None:
    assert transformer_engine_name(architecture, name) == f"decoder.layers.3.{expected}"


def test_the_last_stages_copy_of_a_tied_embedding_is_named() -> None:
    assert tied_head_name(GPT2) == "output_layer.weight"
    assert tied_head_name(T5) == "lm_head.output_layer.weight"


def test_an_internlm2_is_a_llama_whose_queries_keys_and_values_lie_together_by_group() -> None:
    """Its file, laid out as its published code reads it ("b q (h gs d) -> b q h gs d", the last two of a group being
    its key and its value), becomes what a Llama of the same weights becomes."""
    a = replace(LLAMA, family="internlm2")
    q_rows = a.num_heads // a.num_query_groups * a.head_dim

    def renamed(group: TensorGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = list(tensors.values())
        if group.kind == "attention_in":
            rows = (q_rows, a.head_dim, a.head_dim)
            by_group = [p.view(a.num_query_groups, n, a.hidden_size) for p, n in zip(parts, rows, strict=True)]
            parts = [torch.cat(by_group, dim=1).flatten(0, 1)]
        own = next(other for other in tensor_groups(a) if other.name == group.name)
        return {info.name: part for info, part in zip(own.tensors, parts, strict=True)}

    names = []
    for group, tensors in published(LLAMA):
        own = next(other for other in tensor_groups(a) if other.name == group.name)
        found, wanted = to_megatron(a, own, renamed(group, tensors)), to_megatron(LLAMA, group, tensors)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        names += [info.name for info in own.tensors]
    assert names[:4] == [
        "model.tok_embeddings.weight", "model.layers.0.attention_norm.weight", "model.layers.0.attention.wqkv.weight",
        "model.layers.0.attention.wo.weight",
    ]  # fmt: skip
    assert names[4:8] == [f"model.layers.0.{part}.weight" for part in ("ffn_norm", *FEED_FORWARD)]
    assert names[-1] == "output.weight"
