"""Parts of a transformers model out of a folder or a seed, on real ranks and off them."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core import optimizer_param_scheduler  # noqa: F401  (here, once, instead of in every rank)

from dynapipe_ext import ParallelContext, PipelineExecutor, Planner, TokenCosts, Topology
from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, place_stages
from dynapipe_ext.data.batches import collate
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.transformers.optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.limits import LIMIT_S
from tests.support.tiny_models import CONFIGS, one_by_one, samples_of, tiny_model

SAMPLES = samples_of((3, 12, 7, 20, 5, 9, 14, 4, 6, 11))
GRID = Topology(pp=2, dp=2)
HALVES = Topology(pp=4, layers_per_stage=(0.5, 1.5, 1.5, 0.5))
V = Topology(pp=2, placement=place_stages("v", 2))
HALVES_IN_A_V = replace(V, layers_per_stage=HALVES.layers_per_stage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    tiny_model("gpt2").save_pretrained(path)
    return path


def plan_of(topology: Topology, coordinates: Any, step: int, **options: Any):
    lengths = [SampleLength(s.index, s.positions, target=s.target) for s in SAMPLES]
    costs, form = TokenCosts(topology.num_stages, overhead_ns=10**5), ActivationFormat(16, order="bsh")
    planner = Planner(
        topology, costs, 10**9, format=form, collectives=ReplicaCollectives(), **{"max_tokens": 40} | options
    )
    return prove_step(planner, lengths, step=step).plans[coordinates.dp_rank][coordinates.pp_rank]


def tensors_of(plan: ExecutionPlan) -> list[dict[str, torch.Tensor]]:
    batches = [collate(m, [SAMPLES[s.index] for s in m.samples]) for m in plan.micro_batches]
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]


def steps(
    env: Any,
    topology: Topology,
    parts_of: Callable[[int], list[TransformersPart]],
    saved: Path | None = None,
    **options: Any,
):
    """Losses of two steps on a rank, and its weights, which all ranks then save in one folder."""
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
    parallel = ParallelContext(topology, timeout_s=LIMIT_S)
    parts = parts_of(parallel.coordinates.pp_rank)
    executor = PipelineExecutor(TransformersStage(parts, parallel=parallel), parallel.transport)
    optimizer = torch.optim.SGD({p for part in parts for p in part.parameters()}, lr=0.3)
    losses = []
    for step in range(2):
        plan = plan_of(topology, parallel.coordinates, step, **options)
        losses.append(executor.execute(plan, tensors_of(plan)))
        optimizer.step()
    weights = {name: p.detach().clone() for part in parts for name, p in part.model.named_parameters()}
    if saved is not None:
        for _ in range(2):
            try:
                save_parts(parts, saved, parallel=parallel, writes=parallel.coordinates.dp_rank == 0)
            except ConfigError as error:
                losses.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return losses, weights


def test_two_stages_and_two_replicas_out_of_a_folder_train_the_whole_model_and_save_it(run_ranks, folder, tmp_path):
    saved = tmp_path / "saved"

    def main(env):
        return steps(env, GRID, lambda pp_rank: parts_of_folder(folder, GRID, pp_rank), saved, split_backward=True)

    ranks = run_ranks(4, main)
    model = tiny_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    expected = []
    for _ in range(2):
        expected.append(one_by_one(model, SAMPLES)[0])
        optimizer.step()
    whole = dict(model.named_parameters())
    for (*losses, refused), weights in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "saved exists: name a new folder" in refused
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-5, msg=name)
    assert {name for _, weights in ranks for name in weights} == set(whole)
    embedding = "transformer.wte.weight"  # lies on both ends
    copies = [weights[embedding] for _, weights in ranks]
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
    held = {name: weight for _, weights in ranks for name, weight in weights.items()}
    assert {name for name, _ in loaded.named_parameters()} == set(held)
    assert all(torch.equal(weight, held[name]) for name, weight in loaded.named_parameters())


def test_deterministic_steps_have_the_same_bits_on_every_topology(run_ranks, folder):
    """Tied ends, gradients clipped by one norm; the micro-batches are those of one rule for all."""
    options = {"split_policy": "packed-balanced", "layout": "packed", "max_tokens": 24, "split_backward": True}
    settings = OptimizerSettings(lr=0.1, warmup_steps=0, clip_grad=0.4, deterministic=True)

    def trained(topology: Topology) -> tuple[list[float], list[Any], dict[str, torch.Tensor]]:
        parallel = ParallelContext(topology, timeout_s=LIMIT_S)
        parts = parts_of_folder(folder, topology, parallel.coordinates.pp_rank)
        stage = TransformersStage(parts, accumulator=ExactAccumulator, parallel=parallel)
        executor = PipelineExecutor(stage, parallel.transport)
        optimizer = TransformersOptimizer(parts, settings, num_steps=5, parallel=parallel)
        losses, norms = [], []
        for step in range(5):
            plan = plan_of(topology, parallel.coordinates, step, **options)
            losses.append(executor.execute(plan, tensors_of(plan)))
            norms.append(optimizer.step(ExecutedStep(plan, losses[-1], stage.losses())))
        weights = {name: p.detach().clone() for part in parts for name, p in part.model.named_parameters()}
        return losses, norms, weights

    def main(env):
        dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
        found = [trained(topology) for topology in (Topology(dp=4), GRID, HALVES)]
        dist.barrier()
        dist.destroy_process_group()
        return found

    ranks = run_ranks(4, main)
    losses, norms, whole = ranks[0][0]
    assert min(norms) > 0.4
    for found in (found for rank in ranks for found in rank):
        assert found[:2] == (losses, norms)
        assert [name for name, weight in found[2].items() if not torch.equal(weight, whole[name])] == []


def test_dropout_is_the_same_on_one_rank_and_on_two(run_ranks, folder):
    """With all samples in one micro-batch whatever the topology; two have layers in halves, which they recompute."""
    options = {"split_policy": "batch-max", "pad_multiple": 1}

    def parts_of(topology: Topology) -> Callable[[int], list[TransformersPart]]:
        return lambda pp_rank: parts_of_config(CONFIGS["gpt2"](), topology, pp_rank, seed=4, dropout=0.2)

    (alone, _), *_ = run_ranks(1, lambda env: steps(env, Topology(), parts_of(Topology()), **options))
    halves = HALVES_IN_A_V
    (pair, _), (other, _) = run_ranks(2, lambda env: steps(env, halves, parts_of(halves), recompute="full", **options))
    assert pair == other == pytest.approx(alone, rel=1e-5)
    assert alone[0] != pytest.approx(alone[1], rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_every_topology_starts_from_the_same_fresh_model_and_holds_its_parts_alone(family):
    config = CONFIGS[family]()
    (whole,) = parts_of_config(config, seed=7)
    expected = whole.model.state_dict()
    assert not torch.equal(
        expected[next(iter(expected))], parts_of_config(config, seed=8)[0].model.state_dict()[next(iter(expected))]
    )
    for topology in (Topology(pp=4), HALVES_IN_A_V):
        held: list[str] = []
        for pp_rank in range(topology.pp):
            parts = parts_of_config(config, topology, pp_rank, seed=7)
            weights = {name: p for part in parts for name, p in part.model.named_parameters()}
            assert all(torch.equal(p, expected[name]) for name, p in weights.items())
            held += weights
        copied = {"transformer.wte.weight"} if family == "gpt2" and topology.pp == 4 else set()
        assert {name for name in held if held.count(name) > 1} == copied
        assert set(held) == {name for name, _ in whole.model.named_parameters()}


def test_a_rank_with_both_ends_has_one_tied_weight(folder):
    first, last = parts_of_folder(folder, V, 0)
    assert first.model.get_input_embeddings().weight is last.model.get_output_embeddings().weight


def test_a_folder_that_lacks_weights_is_refused_by_their_names(folder, tmp_path):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.n_layer = 5
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"lacks weights of GPT2LMHeadModel.*transformer\.h\.4\.attn"):
        parts_of_folder(tmp_path, Topology(pp=2), 1)
    parts_of_folder(tmp_path, Topology(pp=2), 0)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused_by_the_rank_that_has_it(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    for topology, rank in ((Topology(), 0), (Topology(pp=2), 1), (V, 0)):
        with pytest.raises(DataError, match=r"a head that differs from .*, to which its config\.json ties it"):
            parts_of_folder(tmp_path, topology, rank)
    parts_of_folder(tmp_path, Topology(pp=2), 0)


def test_weights_that_cannot_be_read_are_refused_by_their_folder(folder, tmp_path):
    def refused(name: str, content: bytes | None) -> None:
        place = Path(shutil.copytree(sharded, tmp_path / f"{len(list(tmp_path.iterdir()))}"))
        (place / name).unlink()
        if content is not None:
            (place / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{place} has weights that cannot be read"):
            parts_of_folder(place)

    sharded = tmp_path / "sharded"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(sharded, max_shard_size="10KB")
    shard = sorted(sharded.glob("model-*.safetensors"))[1].name
    refused(shard, None)
    refused(shard, (sharded / shard).read_bytes()[:-9])
    refused(shard, b"version https://git-lfs.github.com/spec/v1\n")
    for file in sharded.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), sharded / "pytorch_model.bin")
    refused("pytorch_model.bin", (sharded / "pytorch_model.bin").read_bytes()[:-9])
    refused("pytorch_model.bin", pickle.dumps(os.getcwd))


def test_memory_that_ends_while_weights_are_read_is_not_told_as_files_that_cannot_be(folder, monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", fails)
    with pytest.raises(ConfigError, match=r"memory of this rank is too small for its part of .*: raise pp"):
        parts_of_folder(folder)


def test_a_saved_model_is_one_that_transformers_loads_and_never_takes_the_place_of_another(folder, tmp_path):
    whole = tiny_model("gpt2").state_dict()
    for topology in (Topology(), HALVES_IN_A_V):  # in one file, and in one a stage
        place = tmp_path / topology.placement_name
        parts = [part for pp_rank in range(topology.pp) for part in parts_of_folder(folder, topology, pp_rank)]
        parts.sort(key=lambda part: part.place.stage)
        save_parts(parts, place)
        saved = transformers.AutoModelForCausalLM.from_pretrained(place).state_dict()
        assert set(saved) == set(whole)
        assert all(torch.equal(saved[name], whole[name]) for name in whole)
        assert len(list(place.glob("*.safetensors"))) == topology.num_stages
        assert not list(tmp_path.glob(".*"))
        with pytest.raises(ConfigError, match="exists: name a new folder"):
            save_parts(parts, place)


def test_adapters_of_peft_train_over_stages_and_are_saved_as_one_adapter(run_ranks, folder, tmp_path):
    peft = pytest.importorskip("peft")
    topology = Topology(pp=2)

    def with_adapters(parts: list[TransformersPart]) -> list[TransformersPart]:
        for part in parts:
            part.model.add_adapter(peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
            with torch.no_grad():
                for name, weight in part.model.named_parameters():
                    if "lora" in name:
                        weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))
        return parts

    def main(env):
        found = steps(env, topology, lambda pp_rank: with_adapters(parts_of_folder(folder, topology, pp_rank)))
        return found[0], {name: w for name, w in found[1].items() if "lora" in name}

    (losses, first), (_, last) = run_ranks(2, main)
    assert losses[1] < losses[0]
    parts = [part for pp_rank in range(2) for part in with_adapters(parts_of_folder(folder, topology, pp_rank))]
    for part in parts:
        part.model.load_state_dict({**first, **last}, strict=False)
    save_parts(parts, tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    weights = {n.removeprefix("base_model.model."): w for n, w in loaded.named_parameters() if "lora" in n}
    assert set(weights) == {*first, *last}
    assert all(torch.equal(weights[name], weight) for name, weight in {**first, **last}.items())
