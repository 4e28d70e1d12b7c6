"""A converted model says what transformers' model says: logits on one rank and on several, and losses while it trains.

Every family, and what its configurations can change, is converted from the files that `save_pretrained` writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages.megatron.layers import rotary_frequencies
from dynapipe_ext.executor.stages.megatron.model import (
    build_chunks,
    build_model,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import finalize_grads, wrap_ddp
from dynapipe_ext.launch.job.model_folder import load_initial_weights
from dynapipe_ext.models.tensors import num_parameters, tensor_groups
from dynapipe_ext.tools.checkpoint import export_hf_weights
from tests.support.checkpoints import differences
from tests.support.megatron_ranks import CPU
from tests.support.published_models import (
    CASES,
    LENGTH,
    ROWS,
    SAME_ARITHMETIC,
    STEPS,
    Published,
    built,
    difference,
    empty,
    hidden,
    part_of_rank,
    published,
    ranks,
    said,
    tokens,
    whole_tensors,
)  # fmt: skip
from tests.support.rank_jobs import forget_models

LIMIT = 1e-5
# (ranks, sequence parallel) -> cases; mistral-window has 2 query groups for 4 ranks.
SPREAD = {
    (Topology(2, 2, 1, (1, 3)), False): (
        "llama-tied",
        "gpt2",
        "gemma3",
        "deepseek-v3",
        "smollm3",
        "granite-bias",
        "gpt-oss",
        "maverick",
    ),
    (Topology(1, 4, 1), False): ("gpt2", "gemma2"),
    (Topology(2, 1, 2), False): ("t5", "t5-v1.1"),
    (Topology(4, 1, 1), True): ("deepseek-v2-lite", "mistral-window", "qwen2-moe", "t5"),
    (Topology(2, 1, 1), True): (
        "deepseek-v3-yarn",
        "qwen3-tied-bias",
        "mixtral",
        "qwen3-moe",
        "phi3",
        "olmo2",
        "gemma2",
        "gemma3-stretched",
        "granite",
        "olmoe",
        "olmo3-yarn",
        "starcoder2",
        "glm4",
        "glm4-moe-groups",
        "nemotron",
        "gpt-oss",
        "maverick",
    ),
}

# Who receives is asked of tensors' places alone: tied and cut in many ways, latent, of experts, of two sides.
RECEIVE_ALONE = ("llama-tied", "deepseek-v3", "deepseek-v2-lite", "qwen2-moe", "t5")


@dataclass(frozen=True)
class Converted:
    """What Megatron's model of the same weights says."""

    state: dict[str, tuple[int, ...]]  # shapes in the built model's state_dict
    promised: dict[str, tuple[int, ...]]  # shapes of megatron_tensors, vocabulary padded
    logits: torch.Tensor
    masked_logits: torch.Tensor | None
    one_row: torch.Tensor
    losses: list[float]


@dataclass(frozen=True)
class Spread:
    """What one of several ranks says, or the last stage's together."""

    output: torch.Tensor  # this rank's columns of the logits; before the last stage, what it sends on
    losses: torch.Tensor  # of each position, on the last stage
    gradient_fault: float
    not_exported: list[str]


def converted(one: Published) -> Converted:
    a = one.architecture
    model = built(one, Topology(), 0)
    state = {name: tuple(tensor.shape) for name, tensor in own_state(model).items()}
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


def own_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}


def trained(one: Published, topology: Topology, rank: int, model: Any) -> tuple[torch.Tensor, float]:
    """Losses, and the largest difference between a rank's gradients and its part of transformers', over the largest of
    these."""
    chunk = wrap_ddp(model.train(), model.config)
    losses = said(chunk, tokens(), labels=tokens().roll(-1, 1))
    losses[:, :-1].mean().backward()
    finalize_grads([chunk])
    wanted = part_of_rank(replace(one, tensors=one.gradients), topology, rank)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    fault = max(difference(p.main_grad, wanted[name]) for name, p in model.named_parameters()) / largest
    return losses.detach(), fault


def export_faults(one: Published, chunks: list[Any], receivers: Any = "all", *, receives: bool = True) -> list[str]:
    """What differs between the files and what a running model exports, its order among it."""
    exported = list(export_hf_weights(chunks, one.architecture, receivers=receivers))
    if not receives:
        return [name for name, _ in exported]
    order = [info.name for group in tensor_groups(one.architecture) for info in group.tensors]
    shared = [name for name, tensor in exported if tensor.untyped_storage().nbytes() != tensor.nbytes]
    return differences(dict(exported), one.tensors) + shared + ["order"] * ([name for name, _ in exported] != order)


def trains(name: str, sequence_parallel: bool) -> bool:
    """Whether ranks are asked for gradients: where one stage is all and sequence parallelism trains."""
    return sequence_parallel and not name.startswith("t5")


def spread(
    one: Published,
    topology: Topology,
    rank: int,
    *,
    sequence_parallel: bool,
    with_gradients: bool,
    receives_alone: bool,
) -> Spread:
    me, losses, fault = topology.coordinates(rank), torch.empty(0), 0.0
    model = empty(one, topology, rank, sequence_parallel=sequence_parallel).eval()
    load_initial_weights(model, str(one.folder), one.architecture)
    state, wanted = own_state(model), part_of_rank(one, topology, rank)
    assert state.keys() == wanted.keys(), sorted(state.keys() ^ wanted.keys())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    with torch.no_grad():
        if me.pp_rank:
            received = torch.empty(LENGTH, ROWS, one.architecture.hidden_size)
            dist.recv(received, topology.rank(tp_rank=me.tp_rank, pp_rank=me.pp_rank - 1, dp_rank=me.dp_rank))
            model.set_input_tensor(received)
        output = said(model, tokens())
        if me.pp_rank < topology.pp - 1:
            dist.send(output, topology.rank(tp_rank=me.tp_rank, pp_rank=me.pp_rank + 1, dp_rank=me.dp_rank))
        elif not with_gradients:
            losses = said(model, tokens(), labels=tokens().roll(-1, 1))
    if me.pp_rank:
        model.set_input_tensor(None)
    if with_gradients:
        losses, fault = trained(one, topology, rank, model)
    not_exported = export_faults(one, [model])
    if receives_alone:
        not_exported += export_faults(one, [model], "first", receives=rank == 0)
    return Spread(output, losses, fault, not_exported)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    asked = {name for (_, parallel), names in SPREAD.items() for name in names if trains(name, parallel)}
    return {name: published(name, tmp_path_factory.mktemp("model"), with_gradients=name in asked) for name in CASES}


@pytest.fixture(scope="module")
def alone(models: dict[str, Published], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    def all_cases(_rank: int) -> dict[str, Converted]:
        initialize_parallel(Topology(), 0)
        return {name: converted(one) for name, one in models.items()}

    (results,) = ranks(1, tmp_path_factory.mktemp("alone"), all_cases)
    return results


@pytest.fixture(scope="module")
def together(models: dict[str, Published], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """By (topology, sequence parallel, name), logits of the whole vocabulary; the first replica's last stage, and what
    any rank could not export."""

    def all_cases(topologies: list[Topology], rank: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for (topology, parallel), names in SPREAD.items():
            if topology not in topologies:
                continue
            initialize_parallel(topology, 0)
            for name in names:
                found[topology, parallel, name] = spread(
                    models[name],
                    topology,
                    rank,
                    sequence_parallel=parallel,
                    with_gradients=trains(name, parallel),
                    receives_alone=name in RECEIVE_ALONE,
                )
            forget_models()
        return found

    results: dict[Any, list[Spread]] = {}
    for size in (2, 4):
        alike = [topology for topology, _ in SPREAD if topology.world_size == size]
        of_ranks = ranks(size, tmp_path_factory.mktemp("together"), partial(all_cases, alike))
        results |= {key: [found[key] for found in of_ranks] for key in of_ranks[0]}
    said_together = {}
    for key, of_all in results.items():
        topology = key[0]
        last = [topology.rank(tp_rank=t, pp_rank=topology.pp - 1, dp_rank=0) for t in range(topology.tp)]
        of_last = [of_all[rank] for rank in last]
        assert all(torch.equal(of_last[0].losses, one.losses) for one in of_last)
        said_together[key] = Spread(
            torch.cat([one.output for one in of_last], dim=-1),
            of_last[0].losses,
            max(one.gradient_fault for one in of_last),
            [fault for one in of_all for fault in one.not_exported],
        )
    return said_together


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
    assert worst <= limit(models[name].logits)


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


def limit(wanted: torch.Tensor) -> float:
    """Of differences from logits, the largest of which may be above 1."""
    return LIMIT * max(1.0, float(wanted.abs().max()))


def key_id(key: tuple[Topology, bool, str]) -> str:
    return f"{key[2]}-tp{key[0].tp}pp{key[0].pp}{'-sp' * key[1]}"


@pytest.mark.parametrize("key", [(*ranks, name) for ranks, names in SPREAD.items() for name in names], ids=key_id)
def test_several_ranks_say_what_transformers_says(
    key: tuple[Topology, bool, str], models: dict[str, Published], together: dict[Any, Any]
) -> None:
    found, wanted = together[key], models[key[2]].logits
    assert difference(found.output, wanted) <= limit(wanted)
    expected = torch.nn.functional.cross_entropy(wanted.transpose(1, 2), tokens().roll(-1, 1), reduction="none")
    assert difference(found.losses, expected) <= LIMIT
    assert found.gradient_fault <= LIMIT


@pytest.mark.parametrize("key", [(*ranks, name) for ranks, names in SPREAD.items() for name in names], ids=key_id)
def test_every_rank_exports_the_bits_of_the_files_and_the_first_alone_where_asked(
    key: tuple[Topology, bool, str], together: dict[Any, Any]
) -> None:
    assert together[key].not_exported == []


def test_a_rank_with_several_stages_exports_them_and_another_model_is_refused(
    models: dict[str, Published], tmp_path: Path
) -> None:
    """A V of four stages over two ranks, whose first has both ends of a tied model, in DDP."""
    one, topology = models["llama-tied"], Topology(pp=2, placement=(0, 1, 1, 0))

    def main(rank: int) -> list[str]:
        initialize_parallel(topology, 0)
        config = transformer_config(one.architecture, topology, dtype="float32")

        def build(stage: int) -> Any:
            return build_model(one.architecture, topology, stage, config, seed=None, device=CPU)

        chunks = build_chunks(one.architecture, topology, rank, build)
        for chunk in chunks:
            load_initial_weights(chunk, str(one.folder), one.architecture)
        wrapped = [wrap_ddp(chunk, config) for chunk in chunks]
        another = replace(one.architecture, qkv_bias=True, tied_embeddings=False, family="qwen2", num_layers=3)
        with pytest.raises(DataError, match=r"the model has no .*linear_qkv.bias; .*which qwen2 has not"):
            list(export_hf_weights(chunks, another))
        with pytest.raises(ConfigError, match="give the list of this rank's model chunks"):
            list(export_hf_weights(wrapped[0], one.architecture))
        return export_faults(one, wrapped)

    assert ranks(2, tmp_path, main) == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_the_losses_of_transformers(
    name: str, models: dict[str, Published], alone: dict[str, Converted]
) -> None:
    # Adam's first steps are gradients' signs: where Gemma's are smallest, rounding turns some.
    assert alone[name].losses == pytest.approx(models[name].losses, abs=1e-4 if name.startswith("gemma") else 1e-5)
    assert alone[name].losses[0] - alone[name].losses[-1] > 1e-2  # it learns


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("llama", "gpt-oss"))])
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
