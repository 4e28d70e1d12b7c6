"""A converted model says what transformers' model says: logits on one rank and on several, and losses while it trains.

Every family, and what its configurations can change, is converted from the files that `save_pretrained` writes.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages.megatron_layers import rotary_frequencies
from dynapipe_ext.executor.stages.megatron_model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.launch.cluster import run_local
from dynapipe_ext.launch.initial_weights import load_initial_weights
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import num_parameters, tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.names import (
    EMBEDDING,
    MegatronTensor,
    megatron_tensors,
    tied_head_name,
    to_megatron,
)
from dynapipe_ext.topology import Topology
from tests.support.checkpoints import VARIANTS, saved, tensors_in, tiny
from tests.support.megatron_ranks import CPU, join

_ROPE = {"rope_theta": 1e4, "factor": 8.0}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **VARIANTS,
    "llama-3.1": ("llama", {"rope_parameters": {**_ROPE, **_LLAMA3, "original_max_position_embeddings": 100}}),
    "llama-linear": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear"}}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 16, "num_key_value_heads": 2}),
    "mixtral-window": ("mixtral", {"sliding_window": 23}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "gelu"}),
    "t5-few-buckets": (
        "t5",
        {"num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
    ),
}
# Rotation, norms, activation and attention are the same operations on the same numbers. GPT-2 adds its biases later,
# mixtures sum experts in another order, T5 has no such attention in transformers, windows are computed in blocks.
SAME_ARITHMETIC = [name for name in CASES if name.startswith(("llama", "qwen")) or name == "mistral"]
LIMIT = 1e-5
ROWS, LENGTH, STEPS = 2, 24, 3
# (ranks, sequence parallel) -> cases; mistral-window has 2 query groups for 4 ranks.
SPREAD = {
    (Topology(2, 2, 1, (1, 3)), False): ("llama", "llama-tied", "gpt2", "mixtral", "mistral-window"),
    (Topology(1, 4, 1), False): ("llama-tied", "gpt2"),
    (Topology(2, 1, 2), False): ("t5", "t5-v1.1"),
    (Topology(4, 1, 1), True): ("qwen3-tied-bias", "mistral-window", "mixtral", "gpt2", "t5"),
}


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


@dataclass(frozen=True)
class Converted:
    """What Megatron's model of the same weights says."""

    state: dict[str, tuple[int, ...]]  # shapes in the built model's state_dict
    promised: dict[str, tuple[int, ...]]  # shapes of megatron_tensors, vocabulary padded
    logits: torch.Tensor
    masked_logits: torch.Tensor | None
    one_row: torch.Tensor
    losses: list[float]


def tokens() -> torch.Tensor:
    return torch.randint(131, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def hidden() -> torch.Tensor:
    """The positions of the encoder that are padding."""
    return torch.arange(LENGTH).expand(ROWS, LENGTH) >= torch.tensor([[17], [LENGTH]])


def published(name: str, folder: Path) -> Published:
    family, changes = CASES[name]
    # A large epsilon shows in the logits; a default in its place would not.
    eps = "layer_norm_epsilon" if family in ("gpt2", "t5") else "rms_norm_eps"
    model = tiny(family, **changes, **{eps: 0.03})
    saved(model, folder)
    architecture = read_config(json.loads((folder / "config.json").read_text()))
    inputs: dict[str, Any] = {"input_ids": tokens(), "use_cache": False}
    masked = None
    with torch.no_grad():
        if family == "t5":
            inputs["decoder_input_ids"] = tokens().flip(1)
            masked = model(**inputs, attention_mask=(~hidden()).long()).logits
        logits = model(**inputs).logits
        if name in SAME_ARITHMETIC:
            model.set_attn_implementation("sdpa")
        one_row = model(**{k: v[:1] if k != "use_cache" else v for k, v in inputs.items()}).logits
        model.set_attn_implementation("eager")
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(
            model(**inputs).logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Published(model, folder, architecture, tensors_in(folder), logits, masked, one_row, losses)


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


def converted(one: Published) -> Converted:
    a = one.architecture
    model = built(one, Topology(), 0)
    state = {k: tuple(v.shape) for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    promised = {}
    for tensor, _ in whole_tensors(one):
        shape = (a.padded_vocab_size(), *tensor.shape[1:]) if tensor.vocabulary else tensor.shape
        promised |= dict.fromkeys((tensor.name, *tensor.aliases), shape)
    with torch.no_grad():
        logits, one_row = said(model, tokens()), said(model, tokens()[:1])
        masked = said(model, tokens(), is_hidden=hidden()) if one.masked_logits is not None else None
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = said(model, tokens(), labels=tokens().roll(-1, 1))[:, :-1].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Converted(state, promised, logits, masked, one_row, losses)


def spread(
    one: Published, topology: Topology, rank: int, *, sequence_parallel: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """On the last pipeline rank: this rank's columns of the logits, and the loss of each position."""
    me = topology.coordinates(rank)
    model = built(one, topology, rank, sequence_parallel=sequence_parallel)
    if one.architecture.family != "t5":  # which the pipeline does not train
        started = empty(one, topology, rank)
        load_initial_weights(started, str(one.folder), one.architecture, topology, me.pp_rank)
        assert all(torch.equal(p, q) for p, q in zip(started.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        if me.pp_rank:
            received = torch.empty(LENGTH, ROWS, one.architecture.hidden_size)
            dist.recv(received, topology.rank(tp_rank=me.tp_rank, pp_rank=me.pp_rank - 1, dp_rank=me.dp_rank))
            model.set_input_tensor(received)
        output = said(model, tokens())
        if me.pp_rank < topology.pp - 1:
            dist.send(output, topology.rank(tp_rank=me.tp_rank, pp_rank=me.pp_rank + 1, dp_rank=me.dp_rank))
            return None
        return output, said(model, tokens(), labels=tokens().roll(-1, 1))


def ranks(world_size: int, folder: Path, function: Any) -> list[Any]:
    """`function(rank)` in forked ranks that share a process group."""

    def main(env: Any) -> int:
        join(env)
        (folder / str(env.rank)).write_bytes(pickle.dumps(function(env.rank)))
        dist.destroy_process_group()
        return 0

    run_local(main, world_size, timeout_s=90)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    return {name: published(name, tmp_path_factory.mktemp("model")) for name in CASES}


@pytest.fixture(scope="module")
def alone(models: dict[str, Published], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    def all_cases(_rank: int) -> dict[str, Converted]:
        initialize_parallel(Topology(), 0)
        return {name: converted(one) for name, one in models.items()}

    (results,) = ranks(1, tmp_path_factory.mktemp("alone"), all_cases)
    return results


@pytest.fixture(scope="module")
def together(models: dict[str, Published], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(topology, sequence parallel, name) -> logits of the whole vocabulary, losses; the first replica's last stage."""

    def all_cases(rank: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for (topology, parallel), names in SPREAD.items():
            initialize_parallel(topology, 0)
            for name in names:
                found[topology, parallel, name] = spread(models[name], topology, rank, sequence_parallel=parallel)
            destroy_parallel()
        return found

    results = ranks(4, tmp_path_factory.mktemp("together"), all_cases)
    said_together = {}
    for key in results[0]:
        topology = key[0]
        last = [topology.rank(tp_rank=t, pp_rank=topology.pp - 1, dp_rank=0) for t in range(topology.tp)]
        columns, losses = zip(*(results[rank][key] for rank in last), strict=True)
        assert all(torch.equal(losses[0], other) for other in losses)
        said_together[key] = torch.cat(columns, dim=-1), losses[0]
    return said_together


def difference(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest; NaN counts as infinite."""
    return float((given[..., : wanted.shape[-1]] - wanted).abs().nan_to_num(math.inf).max())


@pytest.mark.parametrize("name", CASES)
def test_the_mapping_covers_the_state_dict_of_megatrons_model(name: str, alone: dict[str, Converted]) -> None:
    assert alone[name].state == alone[name].promised


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_on_disk_is_one_of_a_group(name: str, models: dict[str, Published]) -> None:
    one = models[name]
    known = {info.name: info.shape for group in tensor_groups(one.architecture) for info in group.tensors}
    assert {key: tuple(tensor.shape) for key, tensor in one.tensors.items()} == known
    assert num_parameters(one.architecture) == sum(p.numel() for p in one.model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(
    name: str, models: dict[str, Published], alone: dict[str, Converted], record_property: Any
) -> None:
    worst = difference(alone[name].logits, models[name].logits)
    record_property("largest_difference", worst)
    assert worst <= LIMIT


def joined_projections_have_the_bits_of_separate_ones() -> bool:
    """Whether this machine's matrix product gives each row of a weight the same sum whatever rows stand beside it."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(rows, 64, generator=generator) for rows in (LENGTH, 96, 96, 64, 32, 32))
    return all(
        torch.equal(x @ torch.cat(parts).T, torch.cat([x @ part.T for part in parts], dim=1))
        for parts in (weights[:2], weights[2:])
    )


@pytest.mark.skipif(not joined_projections_have_the_bits_of_separate_ones(), reason="sums differ on this machine")
@pytest.mark.parametrize("name", SAME_ARITHMETIC)
def test_logits_have_no_bit_that_differs_where_the_arithmetic_is_the_same(
    name: str, models: dict[str, Published], alone: dict[str, Converted]
) -> None:
    assert difference(alone[name].one_row, models[name].one_row) == 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("t5")])
def test_padding_of_the_encoder_is_not_attended_to(
    name: str, models: dict[str, Published], alone: dict[str, Converted]
) -> None:
    given, wanted = alone[name].masked_logits, models[name].masked_logits
    assert given is not None
    assert wanted is not None
    assert difference(given, wanted) <= LIMIT
    assert difference(wanted, models[name].logits) > 100 * LIMIT


def key_id(key: tuple[Topology, bool, str]) -> str:
    return f"{key[2]}-tp{key[0].tp}pp{key[0].pp}{'-sp' * key[1]}"


@pytest.mark.parametrize("key", [(*ranks, name) for ranks, names in SPREAD.items() for name in names], ids=key_id)
def test_several_ranks_say_what_transformers_says(
    key: tuple[Topology, bool, str], models: dict[str, Published], together: dict[Any, Any]
) -> None:
    (logits, losses), wanted = together[key], models[key[2]].logits
    assert difference(logits, wanted) <= LIMIT
    expected = torch.nn.functional.cross_entropy(wanted.transpose(1, 2), tokens().roll(-1, 1), reduction="none")
    assert difference(losses, expected) <= LIMIT


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_the_losses_of_transformers(
    name: str, models: dict[str, Published], alone: dict[str, Converted]
) -> None:
    assert alone[name].losses == pytest.approx(models[name].losses, abs=1e-5)
    assert alone[name].losses[0] - alone[name].losses[-1] > 1e-2  # it learns


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("llama")])
def test_rotary_frequencies_are_those_of_transformers(name: str, models: dict[str, Published]) -> None:
    assert torch.equal(rotary_frequencies(models[name].architecture), models[name].model.model.rotary_emb.inv_freq)


def test_a_weight_that_was_not_loaded_shows_and_a_seed_gives_the_same_model_again(
    models: dict[str, Published], tmp_path: Path
) -> None:
    one = models["mixtral"].architecture

    def main(_rank: int) -> tuple[bool, bool, bool]:
        initialize_parallel(Topology(), 0)

        def build(seed: int | None) -> Any:
            config = transformer_config(one, Topology(), dtype="bfloat16")
            return build_model(one, Topology(), 0, config, seed=seed, device=CPU).eval()

        unloaded, first, second = (list(build(seed).parameters()) for seed in (None, 3, 3))
        with torch.no_grad():
            is_finite = bool(said(build(3), tokens()).isfinite().all())
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return all(bool(p.isnan().all()) for p in unloaded), same, is_finite

    assert ranks(1, tmp_path, main) == [(True, True, True)]
