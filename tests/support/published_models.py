"""Published models as transformers computes them, and megatron-core's models of the same weights on forked ranks.

Import this at the top of a test module: forked ranks then find megatron imported.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.stages.megatron.model import build_model, transformer_config
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import FORMS
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.names import (
    EMBEDDING,
    MegatronTensor,
    megatron_tensors,
    tied_head_name,
    to_megatron,
)
from tests.support import rank_results
from tests.support.checkpoints import VARIANTS, saved, tensors_in, tiny
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import CPU, join

_ROPE = {"rope_theta": 1e4, "factor": 8.0}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_ROPE, "rope_type": "yarn", "original_max_position_embeddings": 16, "beta_fast": 8.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **VARIANTS,
    "llama-3.1": ("llama", {"rope_parameters": {**_ROPE, **_LLAMA3, "original_max_position_embeddings": 100}}),
    "llama-linear": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear"}}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 16, "num_key_value_heads": 2}),
    "mixtral-window": ("mixtral", {"sliding_window": 23}),
    "qwen2-moe-sums-to-one": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True}),
    "qwen3-moe-bias": ("qwen3_moe", {"attention_bias": True, "num_experts_per_tok": 1}),
    "phi3-window": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True}),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True, "attn_logit_softcapping": None}),
    "gemma3-stretched": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {**_ROPE, "rope_type": "linear"},
                "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
            }
        },
    ),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {**_YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
            "tie_word_embeddings": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v2-yarn": (
        "deepseek_v2",
        {
            "q_lora_rank": 24,
            "first_k_dense_replace": 0,
            "rope_parameters": {**_YARN, "mscale": 0.707},
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 3,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-yarn": ("llama", {"rope_parameters": {**_YARN, "factor": 4.0}}),
    "smollm3-bias": ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmoe-bias": ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**_YARN, "factor": 4.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }
        },
    ),
    "starcoder2-window": ("starcoder2", {"sliding_window": 9, "tie_word_embeddings": False}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False}),
    "glm": ("glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4-moe-groups": (
        "glm4_moe",
        {"attention_bias": True, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 2},
    ),
    "nemotron-bias": ("nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}, "head_dim": 16}),
    "llama-dynamic": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "dynamic"}}),
    "phi3-long": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.3, 2.5],
                "long_factor": [1.0, 4.0, 9.5],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gpt-oss-plain": ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True, "num_experts_per_tok": 3}),
    "scout": (  # experts in every layer, all of which turn
        "llama4_text",
        {
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 9,
            "tie_word_embeddings": True,
            "use_qk_norm": False,
        },
    ),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "gelu"}),
    "t5-few-buckets": (
        "t5",
        {"num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
    ),
}
# Rotation, norms, activation and attention are the same operations on the same numbers. GPT-2 adds its biases later,
# mixtures sum experts in another order, T5 has no such attention in transformers, windows are computed in blocks. A
# joined product with the 16 rows of one key head rounds otherwise than products of each alone.
SAME_ARITHMETIC = [
    name
    for name in CASES
    if (name.startswith(("llama", "qwen")) and "moe" not in name and name != "llama-one-key") or name == "mistral"
]
ROWS, LENGTH, STEPS = 2, 24, 2


@dataclass(frozen=True)
class Published:
    """A model of transformers, as it is on disk and as it computes."""

    model: Any
    folder: Path
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    logits: torch.Tensor  # of `tokens`, with eager attention
    masked_logits: torch.Tensor | None  # of T5, with the first row's end hidden
    one_row: torch.Tensor  # of the first row, with scaled_dot_product_attention
    losses: list[float]  # of steps of Adam
    gradients: Mapping[str, torch.Tensor]  # of the first, by the names of `tensors`, where asked for


def tokens() -> torch.Tensor:
    return torch.randint(131, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def hidden() -> torch.Tensor:
    """The positions of the encoder that are padding."""
    return torch.arange(LENGTH).expand(ROWS, LENGTH) >= torch.tensor([[17], [LENGTH]])


def published(name: str, folder: Path, *, with_gradients: bool = False) -> Published:
    family, changes = CASES[name]
    # A large epsilon shows in the logits; a default in its place would not.
    eps = next(field.name for field in FORMS[family].fields if field.part == "norm_eps")
    model = tiny(family, **changes, **{eps: 0.03})
    saved(model, folder)
    architecture = read_config(json.loads((folder / "config.json").read_text()))
    inputs: dict[str, Any] = {"input_ids": tokens(), "use_cache": False}
    masked = None
    with torch.no_grad():
        if family in ("t5", "mt5"):
            inputs["decoder_input_ids"] = tokens().flip(1)
            masked = model(**inputs, attention_mask=(~hidden()).long()).logits
        logits = model(**inputs).logits
        if name in SAME_ARITHMETIC:
            model.set_attn_implementation("sdpa")
        one_row = model(**{k: v[:1] if k != "use_cache" else v for k, v in inputs.items()}).logits
        model.set_attn_implementation("eager")
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(
            model(**inputs).logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        if with_gradients and not losses:
            gradients = gradients_of(model, folder / "gradients")
        optimizer.step()
        losses.append(loss.item())
    return Published(model, folder, architecture, tensors_in(folder), logits, masked, one_row, losses, gradients)


def gradients_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """As `save_pretrained` would name and cut them."""
    gradients = copy.deepcopy(model)
    for parameter, given in zip(gradients.parameters(), model.parameters(), strict=True):
        parameter.data = torch.zeros_like(given) if given.grad is None else given.grad
    return tensors_in(saved(gradients, folder))


def whole_tensors(one: Published) -> Iterator[tuple[MegatronTensor, torch.Tensor]]:
    """Megatron's tensors of the whole model, with the vocabulary unpadded."""
    for group in tensor_groups(one.architecture):
        given = to_megatron(one.architecture, group, {info.name: one.tensors[info.name] for info in group.tensors})
        yield from ((tensor, given[tensor.name]) for tensor in megatron_tensors(one.architecture, group))


def part_of_rank(one: Published, topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """A rank's state_dict, cut as MegatronTensor says."""
    me, a = topology.coordinates(rank), one.architecture
    layers = topology.with_layers(a.num_layers).layers_per_stage if topology.pp > 1 else ()
    first = sum(layers[: me.pp_rank])
    last_stage = me.pp_rank == topology.pp - 1
    state = {}
    for tensor, value in whole_tensors(one):
        if tensor.vocabulary:
            missing = a.padded_vocab_size() - a.vocab_size
            value = torch.nn.functional.pad(value, (0, 0) * (value.ndim - 1) + (0, missing))
        if tensor.tp_dim is not None:
            parts = value.chunk(tensor.tp_parts, tensor.tp_dim)
            value = torch.cat([part.chunk(topology.tp, tensor.tp_dim)[me.tp_rank] for part in parts], tensor.tp_dim)
        name = tensor.name
        if layers and tensor.layer >= 0:
            if not first <= tensor.layer < first + layers[me.pp_rank]:
                continue
            name = name.replace(f"layers.{tensor.layer}.", f"layers.{tensor.layer - first}.")
        elif layers and name.startswith("embedding."):
            if name == EMBEDDING and a.tied_embeddings and last_stage:
                state[tied_head_name(a)] = value
            if me.pp_rank:
                continue
        elif layers and not last_stage:
            continue
        state |= dict.fromkeys((name, *tensor.aliases), value)
    return state


def empty(one: Published, topology: Topology, rank: int, **options: Any) -> Any:
    config = transformer_config(one.architecture, topology, dtype="float32", **options)
    stage = topology.coordinates(rank).pp_rank
    return build_model(one.architecture, topology, stage, config, seed=None, device=CPU)


def built(one: Published, topology: Topology, rank: int, **options: Any) -> Any:
    model = empty(one, topology, rank, **options)
    state = part_of_rank(one, topology, rank)
    wanted = {name for name in model.state_dict() if not name.endswith("_extra_state")}
    assert state.keys() == wanted, sorted(state.keys() ^ wanted)
    model.load_state_dict(state, strict=False)
    return model.eval()


def said(model: Any, ids: torch.Tensor, *, is_hidden: torch.Tensor | None = None, labels: Any = None) -> torch.Tensor:
    """Logits, or the loss of each position."""
    if hasattr(model, "encoder"):
        mask = None if is_hidden is None else is_hidden[:, None, None]
        return model(ids, ids.flip(1), mask, None, mask, lm_labels=labels)
    return model(input_ids=ids, position_ids=torch.arange(LENGTH).expand_as(ids), attention_mask=None, labels=labels)


def ranks(world_size: int, folder: Path, function: Any) -> list[Any]:
    """`function(rank)` in forked ranks that share a process group."""

    def main(env: Any) -> int:
        join(env)
        rank_results.write(function(env.rank), folder / str(env.rank))
        dist.destroy_process_group()
        return 0

    run_local(main, world_size, timeout_s=LIMIT_S)
    return [rank_results.read(folder / str(rank)) for rank in range(world_size)]


def difference(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest; NaN counts as infinite."""
    return float((given[..., : wanted.shape[-1]] - wanted).abs().nan_to_num(math.inf).max())
