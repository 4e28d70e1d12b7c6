"""The keys under which Megatron's torch_dist checkpoints keep a weight.

decoder.layers.mlp.linear_fc1.weight                   (layers, rows, columns): layers of one kind are stacked
decoder.layers.3.mlp.linear_fc1.weight                 a layer of its own
decoder.layers.mlp.experts.experts.linear_fc1.weight   (layers, experts, rows, columns)
…experts.experts.7.linear_fc1.weight_w, …weight_v      singleton shards: experts, gate and up apart
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.checkpoint.megatron.names import MegatronTensor

_LAYER = re.compile(r"(?P<stem>(?:en|de)coder\.layers)\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
_EXPERT_APART = re.compile(r"\.experts\.experts\.\d")
_FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
_FUSED_LATENT_NORMS = {
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm",
}
_EXTRA_STATE = re.compile(r"(?:.*\.)?_extra_state(?:/.*)?")
_HAS_STATE = re.compile(r"(?:.*\.)?(?:linear_\w+|output_layer|\w*layernorm)")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key, the place of the tensor along its stacked axes and their lengths, and the part that it holds.

    The part is of `shape` and begins at `first_row` of the whole tensor.
    """

    name: str
    index: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    first_row: int = 0


def keys_of(architecture: Architecture, tensor: MegatronTensor) -> tuple[tuple[StoredKey, ...], ...]:
    """Ways in which a checkpoint may hold a tensor, each a set of keys that make it up; the usual way first."""
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        names = (tensor.name, *tensor.aliases)
        return tuple(way for name in names for way in _ways(tensor, name, (), ()))
    layer, count = int(match["layer"]), _num_layers(architecture, match["stem"])
    ways: list[tuple[StoredKey, ...]] = []
    for rest in _rests(match["rest"], _FUSED_LATENT_NORMS if architecture.latent else _FUSED_NORMS):
        expert = _EXPERT.fullmatch(rest)
        if expert is None:
            ways += _ways(tensor, f"{match['stem']}.{rest}", (layer,), (count,))
            ways += _ways(tensor, f"{match['stem']}.{layer}.{rest}", (), ())
            continue
        e, num_experts = int(expert["expert"]), architecture.num_experts
        fused, apart = f"mlp.experts.experts.{expert['rest']}", f"mlp.experts.experts.{e}.{expert['rest']}"
        ways += _ways(tensor, f"{match['stem']}.{fused}", (layer, e), (count, num_experts))
        ways += _ways(tensor, f"{match['stem']}.{layer}.{fused}", (e,), (num_experts,))
        ways += _ways(tensor, f"{match['stem']}.{layer}.{apart}", (), ())
    return tuple(ways)


def written_keys(architecture: Architecture, tensor: MegatronTensor) -> tuple[StoredKey, ...]:
    """The keys to write a tensor under: stacked layers, or each by itself where not all are alike, and each name that
    a model of Megatron may ask for."""
    ways = [way[0] for way in keys_of(architecture, tensor) if len(way) == 1]
    apart = tensor.layer >= 0 and architecture.dense_ffn_hidden_size > 0
    keys = [key for key in ways if (_LAYER.fullmatch(key.name) is not None) == apart]
    return tuple(key for key in keys if not _EXPERT_APART.search(key.name))


def extra_state_keys(architecture: Architecture, tensor: MegatronTensor) -> tuple[str, ...]:
    """Keys of the state, empty here, that modules keep beside a weight and that loading asks for."""
    keys = []
    for key in written_keys(architecture, tensor):
        module = key.name.rpartition(".")[0]
        if not _HAS_STATE.fullmatch(module):
            continue
        index, counts = key.index or (0,), key.counts or (1,)
        shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
        keys.append(f"{module}._extra_state/{shard}")
        if module.endswith("linear_proj"):
            keys.append(f"{module.removesuffix('linear_proj')}core_attention._extra_state/{shard}")
    return tuple(keys)


def extra_state(name: str) -> bool:
    """Whether a key is of such state."""
    return _EXTRA_STATE.fullmatch(name) is not None


def _rests(rest: str, fused_norms: Mapping[str, str]) -> Iterator[str]:
    """The name within a layer, and what it is where a linear layer holds the norm before it."""
    module, _, kind = rest.rpartition(".")
    fused = fused_norms.get(module)
    if fused is not None:
        yield f"{fused}_{kind}"
    yield rest


def _ways(
    tensor: MegatronTensor, name: str, index: tuple[int, ...], counts: tuple[int, ...]
) -> Iterator[tuple[StoredKey, ...]]:
    yield (StoredKey(name, index, counts, tensor.shape),)
    if tensor.tp_parts == 2:
        half = (tensor.shape[0] // 2, *tensor.shape[1:])
        yield (StoredKey(f"{name}_w", index, counts, half), StoredKey(f"{name}_v", index, counts, half, half[0]))


def _num_layers(architecture: Architecture, stem: str) -> int:
    if architecture.num_decoder_layers and stem.startswith("decoder"):
        return architecture.num_decoder_layers
    return architecture.num_layers
