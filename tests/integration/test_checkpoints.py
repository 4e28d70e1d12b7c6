"""What a run has learned comes back: to the bit on the same topology, within rounding on every other, after any kill.

Real megatron-core ranks over gloo. Steps are planned as in the oracle's tests, in uneven micro-batches.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints.folder import RunState, latest
from dynapipe_ext.executor.checkpoints.megatron_checkpoint import CheckpointSaver, load_checkpoint
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.stages.megatron.model import global_name
from dynapipe_ext.executor.stages.megatron.optimizer import SHARDING
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.models.written_arguments import run_arguments
from dynapipe_ext.tools.checkpoint import WriterOptions, convert, prepare_conversion, recognise
from tests.support.megatron_ranks import (
    NUM_SAMPLES,
    Case,
    Model,
    build,
    build_trained,
    format_of,
    join,
    samples_of,
    step_plan_of,
    tensors_of,
)
from tests.support.rank_jobs import in_turn
from tests.support.saved_manifests import edit_manifest

from megatron.core import dist_checkpointing  # isort: skip
from tests.support.limits import LIMIT_S

SAVED, END = 1, 3
FEW = (2, 1, 2, 1)  # samples of each micro-batch
ALL = Topology(tp=2, pp=2, dp=2)
V, INTERLEAVED = Topology(pp=2, dp=2, placement=(0, 1, 1, 0)), Topology(pp=2, placement=(0, 1, 0, 1))
COSTS = TokenCosts(num_stages=2)


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    weights: dict[str, torch.Tensor]


def state_of(step: int, case: Case, losses: list[float]) -> RunState:
    return RunState(
        step=step,
        num_samples=step * NUM_SAMPLES,
        loader={"global_step": step},
        model=sizes(case),
        settings={},
        costs=cost_model_to_json(COSTS),
        costs_fingerprint=COSTS.fingerprint(),
        recent_losses=tuple(losses),
    )


def sizes(case: Case) -> dict[str, Any]:
    return {**run_arguments(case.model.shape, "float32")}


def run(case: Case, root: Path, *, saves: bool, background: bool = False):
    """Train from the newest checkpoint, or from the start, to END; with `saves`, save at SAVED and train on."""

    def main(env) -> Ran:
        join(env)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        chunks, optimizer = build_trained(case, topology, env.rank)
        groups = make_pipeline_groups(topology, env.rank, timeout_s=LIMIT_S)
        transport = StrictTransport(topology, env.rank, groups, timeout_s=LIMIT_S)
        stage = MegatronStage(chunks, dropout=case.dropout > 0)
        executor = PipelineExecutor(stage, transport)
        form = format_of(case)
        losses: list[float] = []
        with CheckpointSaver(root, chunks, optimizer, sizes(case), background=background) as saver:
            if not saves:
                losses += load_checkpoint(latest(root), chunks, optimizer, model=sizes(case)).run.recent_losses
            for step in range(len(losses), END):
                plan = lower(step_plan_of(case, step, FEW), form)[me.dp_rank][me.pp_rank]
                samples = samples_of(step)
                batches = [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches]
                losses.append(executor.execute(plan, batches))
                assert isinstance(optimizer.step(ExecutedStep(plan, losses[-1], stage.losses())), float)
                saver.advance()
                if saves and step + 1 == SAVED:
                    saver.save(state_of(step + 1, case, losses))
        layers = topology.with_layers(case.model.shape.num_layers).stage_layers
        weights = {
            global_name(name, layers[stage].held.start): p.detach().clone()
            for stage, chunk in zip(topology.stages_of(me.pp_rank), chunks, strict=True)
            for name, p in chunk.module.named_parameters()
        }
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return Ran(losses, weights)

    return main


PLAIN, SHARDED = Case(Topology(tp=2, dp=2)), Case(ALL, model=Model(tied=False), distributed_optimizer=True)
HALVES = (0.5, 1.5, 1, 1)  # cuts between attention and MLP
FOLDED = Case(replace(V, layers_per_stage=HALVES), schedule="adaptive", distributed_optimizer=True)
DROPPING = Case(Topology(tp=2), "packed", Model(modern=False), dropout=0.1)
SPREAD = Case(  # the head in parts on both pipeline ranks
    split_vocabulary(Topology(pp=2, dp=2), "head"),
    model=Model(tied=False),
    schedule="adaptive",
    distributed_optimizer=True,
)
BOTH = Case(split_vocabulary(Topology(pp=2), "both"), schedule="adaptive")  # parts of a tied embedding, too
BITS = [PLAIN, SHARDED, FOLDED, DROPPING, SPREAD, BOTH]
OTHERS = [  # who goes on, and who saved
    (Case(Topology()), PLAIN),
    (replace(SHARDED, topology=Topology(), distributed_optimizer=False), SHARDED),
    (Case(Topology(pp=4), "packed", Model(tied=False), schedule="adaptive"), SHARDED),
    (Case(Topology(tp=2, pp=2, layers_per_stage=(1, 3)), sequence_parallel=True), PLAIN),
    (Case(Topology(pp=2, layers_per_stage=(2.5, 1.5))), PLAIN),
    (Case(Topology(dp=2), distributed_optimizer=True), PLAIN),
    (replace(SHARDED, topology=INTERLEAVED, schedule="adaptive"), SHARDED),
    (Case(Topology()), FOLDED),
    (Case(Topology(pp=2)), FOLDED),
    (Case(Topology(pp=2), model=Model(tied=False)), SPREAD),
    (Case(split_vocabulary(Topology(tp=2, pp=2), "head"), model=Model(tied=False), schedule="adaptive"), SPREAD),
    (Case(split_vocabulary(replace(V, dp=1), "both"), schedule="adaptive"), PLAIN),
    (Case(Topology(pp=2)), BOTH),
    (Case(split_vocabulary(INTERLEAVED, "head"), "packed", Model(tied=False), schedule="adaptive"), SHARDED),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Has a folder of checkpoints of each of BITS, by its name."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(root) -> dict[Case, list[Ran]]:
    """The ranks of each of BITS, which have saved."""
    return in_turn(
        {
            case: (case.topology.world_size, run(case, root / str(case), saves=True, background=case == SHARDED))
            for case in BITS
        }
    )


@pytest.fixture(scope="module")
def resumed(root, saved) -> dict[tuple[Case, Case], list[Ran]]:
    """The ranks that went on from what others, or they themselves, had saved, by the cases of both."""
    return in_turn(
        {
            (case, source): (case.topology.world_size, run(case, root / str(source), saves=False))
            for case, source in (*zip(BITS, BITS, strict=True), *OTHERS)
        }
    )


@pytest.mark.parametrize("case", BITS, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(case, saved, resumed):
    for a, b in zip(saved[case], resumed[case, case], strict=True):
        assert b.losses == a.losses
        assert len(b.losses) == END
        assert [name for name in a.weights if not torch.equal(a.weights[name], b.weights[name])] == []


@pytest.mark.parametrize(("case", "source"), OTHERS, ids=str)
def test_another_topology_goes_on_with_the_same_losses(case, source, saved, resumed):
    for ran in resumed[case, source]:
        assert ran.losses == pytest.approx(saved[source][0].losses, rel=1e-5)


def weights_of(root: Path, case: Case, said: Case | None = None):
    """What a rank holds that has loaded the newest checkpoint into a model said to be that of `said`; or a refusal."""

    def main(env) -> Any:
        join(env)
        model, ddp, optimizer = build(case, case.topology, env.rank)
        try:
            load_checkpoint(latest(root), [ddp], optimizer, model=sizes(said or case))
            found: Any = {name: p.detach().clone() for name, p in model.named_parameters()}
        except DataError as error:
            found = str(error)
        dist.destroy_process_group()
        return found

    return main


def by_megatron(root: Path):
    """What Megatron's own loader fills a model with, and the iteration it finds."""

    def main(env) -> tuple[dict[str, torch.Tensor], int]:
        join(env)
        model, _, optimizer = build(Case(Topology()), Topology(), 0)
        sharded = model.sharded_state_dict(metadata={**SHARDING})
        state = {
            "model": sharded,
            "optimizer": optimizer._optimizer.sharded_state_dict(sharded, True, metadata={**SHARDING}),
        }
        loaded = dist_checkpointing.load(state, str(latest(root)), strict="raise_all")
        model.load_state_dict(loaded["model"])
        optimizer._optimizer.load_state_dict(loaded["optimizer"])
        dist.destroy_process_group()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, loaded["iteration"]

    return main


BROKEN = (".metadata", "common.pt", "__0_0.distcp")  # files that others could have written


@pytest.fixture(scope="module")
def loaded(root, saved) -> dict[str, Any]:
    """What one process finds in what PLAIN has saved: as it is, by Megatron, into another model, and, by the name of a
    file, with a bomb in its place."""
    place, other, same = root / str(PLAIN), Case(Topology(), model=Model(modern=False)), Case(Topology())
    jobs = {"truth": weights_of(place, same), "by Megatron": by_megatron(place)}
    jobs["spread"] = weights_of(root / str(SPREAD), replace(same, model=Model(tied=False)))
    jobs |= {"sizes": weights_of(place, other), "tensor": weights_of(place, other, same)}
    for name in BROKEN:
        shutil.copytree(place, root / name)
        file = latest(root / name) / name
        bomb = pickle.dumps(_Bomb(root / "exploded"))
        file.write_bytes((bomb + bytes(file.stat().st_size))[: file.stat().st_size])
        edit_manifest(file.parent)
        jobs[name] = weights_of(root / name, same)
    return {key: found for key, (found,) in in_turn({key: (1, job) for key, job in jobs.items()}).items()}


def test_megatron_and_conversion_read_what_was_saved(root, loaded, tmp_path):
    """Megatron's own loader finds every tensor and no other; Hugging Face's names hold the same bits."""
    truth, (weights, iteration) = loaded["truth"], loaded["by Megatron"]
    assert iteration == SAVED
    assert [name for name in truth if not torch.equal(truth[name], weights[name])] == []
    place, target = root / str(PLAIN), tmp_path / "hf"
    convert(prepare_conversion(place, target, "hf", WriterOptions(), verify=True))
    published = load_file(target / "model.safetensors")
    assert torch.equal(published["model.embed_tokens.weight"], truth["embedding.word_embeddings.weight"])
    assert torch.equal(
        published["model.layers.3.mlp.down_proj.weight"], truth["decoder.layers.3.mlp.linear_fc2.weight"]
    )
    convert(prepare_conversion(root / str(SPREAD), tmp_path / "spread", "hf", WriterOptions(), verify=True))
    head = load_file(tmp_path / "spread" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, loaded["spread"]["output_layer.weight"])
    convert(prepare_conversion(root / str(FOLDED), tmp_path / "halves", "hf", WriterOptions(), verify=True))
    assert load_file(tmp_path / "halves" / "model.safetensors").keys() == published.keys()
    state = recognise(place)[0].open(place).state
    assert state is not None
    assert (state.iteration, state.optimizer_step, state.consumed_samples) == (SAVED, SAVED, SAVED * NUM_SAMPLES)


def test_another_model_is_refused_by_its_sizes_or_by_the_tensor(loaded):
    assert "num_query_groups 2 where 4 is configured" in loaded["sizes"]
    assert "swiglu True where False is configured" in loaded["sizes"]
    assert "linear_qkv" in loaded["tensor"]


class _Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_loading_unpickles_nothing_that_others_could_have_written(root, loaded):
    assert [isinstance(loaded[name], str) for name in BROKEN] == [False, False, True]
    assert "holds no tensor at byte" in loaded[BROKEN[-1]]
    assert not (root / "exploded").exists()
