"""Weights by their names on the Hub into a live model on many ranks, and out of it; experts over ranks, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages.megatron.model import (
    build_chunks,
    build_model,
    fill_weights,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint import export_hf_weights, load_hf_weights, weight_buckets
from tests.support.checkpoints import differences
from tests.support.megatron_ranks import CPU
from tests.support.published_models import Published, part_of_rank, published, ranks, whole_tensors
from tests.support.rank_jobs import forget_models


@dataclass(frozen=True)
class Layout:
    """How a model lies on ranks: expert parallel ranks, and those that cut an expert (None: the tensor parallel)."""

    topology: Topology
    ep: int = 1
    etp: int | None = None


SPREAD: dict[Layout, tuple[str, ...]] = {
    Layout(Topology(2, 2, 2), ep=2): ("mixtral", "deepseek-v3"),
    Layout(Topology(2, 2, 2), ep=4, etp=1): ("qwen2-moe",),
    Layout(Topology(2, 2, 1), ep=2, etp=1): ("olmoe", "glm4-moe"),
    Layout(Topology(2, 2, 1), etp=1): ("mixtral",),
    Layout(Topology(2, 2, 1)): ("llama-tied", "gpt2", "deepseek-v2-lite", "t5"),
    Layout(Topology(2, 2, 1, placement=(0, 1, 1, 0))): ("qwen3-moe",),
    Layout(Topology(1, 2, 2, placement=(0, 1, 0, 1)), ep=2): ("qwen3-moe",),
    Layout(split_vocabulary(Topology(2, 2, 1), "head")): ("qwen3-moe",),
    Layout(split_vocabulary(Topology(2, 2, 1), "both")): ("llama-tied",),
}
CASES = [(layout, name) for layout, names in SPREAD.items() for name in names]


def build(one: Published, layout: Layout, rank: int) -> list[Any]:
    """Chunks whose weights are NaN, in DDP."""
    forget_models()
    initialize_parallel(layout.topology, 0, architecture=one.architecture)
    if layout.ep > 1 or layout.etp:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.topology.tp,
            pipeline_model_parallel_size=layout.topology.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
    config = transformer_config(one.architecture, layout.topology, dtype="float32")
    config.expert_model_parallel_size = layout.ep
    config.expert_tensor_parallel_size = layout.etp or layout.topology.tp

    def stage(number: int) -> Any:
        return build_model(one.architecture, layout.topology, number, config, seed=None, device=CPU)

    pp_rank = layout.topology.coordinates(rank).pp_rank
    return [wrap_ddp(chunk, config) for chunk in build_chunks(one.architecture, layout.topology, pp_rank, stage)]


def misplaced(one: Published, chunks: list[Any]) -> list[str]:
    """Experts that are not where Megatron's own layers say that they are, or not cut as their linear layers are."""
    whole = {tensor.name: value for tensor, value in whole_tensors(one)}
    etp, rank = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    faults = []
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        for number, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
            stem = f"decoder.layers.{layer.layer_number - 1}.mlp.experts.local_experts.{number}"
            halves = [half.chunk(etp)[rank] for half in whole[f"{stem}.linear_fc1.weight"].chunk(2)]
            if not torch.equal(expert.linear_fc1.weight, torch.cat(halves)):
                faults.append(f"{stem}.linear_fc1")
            if not torch.equal(expert.linear_fc2.weight, whole[f"{stem}.linear_fc2.weight"].chunk(etp, 1)[rank]):
                faults.append(f"{stem}.linear_fc2")
    return faults


def faults_of(one: Published, layout: Layout, rank: int) -> list[str]:
    """What a model that was loaded holds at a wrong place, or exports otherwise than the files have it."""
    chunks, given = build(one, layout, rank), dict(reversed(one.tensors.items()))
    shared = {name: tensor.clone() for name, tensor in given.items()}

    def with_memory_used_again() -> Any:
        for name, tensor in shared.items():
            yield name, tensor
            tensor.fill_(torch.nan)

    load_hf_weights(chunks, one.architecture, with_memory_used_again())
    faults = misplaced(one, chunks)
    if layout == Layout(layout.topology) and not layout.topology.placement and not one.architecture.num_decoder_layers:
        wanted = part_of_rank(one, layout.topology, rank)
        state = {k: v for k, v in chunks[0].module.state_dict().items() if not k.endswith("_extra_state")}
        faults += differences(state, wanted)
    if layout.topology.vocabulary != "whole":
        faults += filled_otherwise(one, layout, rank, chunks)
    exported = list(export_hf_weights(chunks, one.architecture))
    order = [info.name for group in tensor_groups(one.architecture) for info in group.tensors]
    faults += differences(dict(exported), one.tensors) + ["order"] * ([name for name, _ in exported] != order)
    received = dict(export_hf_weights(chunks, one.architecture, receivers="first"))
    return faults + (differences(received, one.tensors) if rank == 0 else list(received))


def filled_otherwise(one: Published, layout: Layout, rank: int, chunks: list[Any]) -> list[str]:
    """Weights that differ from those of `chunks` where a run fills its own from a checkpoint, at its start."""
    filled, whole = build(one, layout, rank), {tensor.name: value for tensor, value in whole_tensors(one)}
    faults = []
    for chunk, loaded in zip(filled, chunks, strict=True):
        fill_weights(chunk.module, whole.items())
        faults += differences(dict(chunk.module.named_parameters()), dict(loaded.module.named_parameters()))
    return faults


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    return {name: published(name, tmp_path_factory.mktemp("model")) for _, name in CASES}


@pytest.fixture(scope="module")
def faults(models: dict[str, Published], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[str]]:
    def of_size(size: int, rank: int) -> dict[Any, list[str]]:
        torch.set_num_threads(1)
        return {
            case: faults_of(models[case[1]], case[0], rank) for case in CASES if case[0].topology.world_size == size
        }

    found: dict[Any, list[str]] = {}
    for size in (4, 8):
        for of_rank in ranks(size, tmp_path_factory.mktemp("ranks"), partial(of_size, size)):
            for case, own in of_rank.items():
                found.setdefault(case, []).extend(own)
    return found


def case_id(case: tuple[Layout, str]) -> str:
    layout, name = case
    kind = (
        layout.topology.vocabulary if layout.topology.vocabulary != "whole" else "v" * bool(layout.topology.placement)
    )
    return f"{name}-tp{layout.topology.tp}pp{layout.topology.pp}ep{layout.ep}{kind}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_weights_by_their_names_go_into_a_live_model_and_come_out_bit_for_bit(
    case: tuple[Layout, str], faults: dict[Any, list[str]]
) -> None:
    assert faults[case] == []


def test_weights_that_do_not_fit_are_refused_by_name_on_every_rank(
    models: dict[str, Published], tmp_path: Path
) -> None:
    one, layout = models["qwen3-moe"], Layout(Topology(1, 2, 1))
    tensors = dict(one.tensors)
    router = "model.layers.1.mlp.gate.weight"
    deeper = replace(one.architecture, num_layers=one.architecture.num_layers + 1)
    refused: dict[str, tuple[Any, str]] = {
        "unknown": (tensors | {"base_model.model.x.lora_A.weight": tensors[router]}, "lora_A.weight is no weight of"),
        "misshapen": (tensors | {router: tensors[router].t()}, f"{router} has shape"),
        "rounded": (tensors | {router: tensors[router].double()}, f"{router} is torch.float64, which .* would round"),
        "missing": ({k: v for k, v in tensors.items() if k != router}, f"no {router} came"),
    }

    def main(rank: int) -> None:
        chunks = build(one, layout, rank)
        for given, message in refused.values():
            with pytest.raises(DataError, match=message):
                load_hf_weights(chunks, one.architecture, given.items())
        with pytest.raises(DataError, match=f"{router} comes twice"):
            load_hf_weights(chunks, one.architecture, [(router, tensors[router])] * 2)
        with pytest.raises(DataError, match=r"the model has no decoder\.layers"):
            load_hf_weights(chunks, deeper, tensors.items())
        chunks[0].module.decoder.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(DataError, match=r"decoder\.lora_A, which qwen3_moe has not"):
            list(export_hf_weights(chunks, one.architecture))

    ranks(2, tmp_path, main)


def test_buckets_keep_the_order_and_their_bytes() -> None:
    weights = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate((3, 4, 5, 20, 1, 6, 3))]
    buckets = list(weight_buckets(iter(weights), 10))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["0", "1"], ["2"], ["3"], ["4", "5", "6"]]
    assert [list(bucket) for bucket in weight_buckets(weights, 100)] == [weights]
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        list(weight_buckets(weights, 0))
