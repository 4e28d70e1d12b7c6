"""Plans through real DeepSpeed engines on gloo ranks, beside one sample at a time in a plain loop."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from dynapipe_ext import InlineHub, ParallelContext, PipelineExecutor, Planner, TokenCosts, Topology
from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.data.batches import collate
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages import chunk_runner, megatron_cpu
from dynapipe_ext.executor.stages.deepspeed.engine import DeepSpeedOptimizer, make_engine
from dynapipe_ext.executor.stages.deepspeed.stage import DeepSpeedStage, EngineGradients, engine_model, engine_stage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import token_loss_sum
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.checkpoints import tiny
from tests.support.deepspeed_ranks import quiet
from tests.support.limits import LIMIT_S
from tests.support.tiny_models import SIZES, VOCAB, one_by_one, samples_of, tiny_model

megatron_cpu.install()  # here, once, instead of in every rank, whose learning rates are Megatron's
SAMPLES = samples_of((3, 12, 7, 20, 5, 14))
REPLICAS = Topology(dp=2)
LR, DECAY, CLIP, STEPS = 1e-2, 0.1, 0.5, 3
# What is wrong with steps that come between, and the factor of their gradients.
SPOILS = {"loss": 1.0, "gradients": 1e24, "sums": math.inf}
CPU = torch.device("cpu")
COMPILES = "deepspeed.runtime.zero.muon"  # as it is imported, by every engine
MODEL = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of a model; `fewer`: of the middle step, whose second replica is left without a micro-batch."""

    zero: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    fewer: bool = False
    topology: Topology = REPLICAS
    schedule: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        parameters = {"lr": LR, "weight_decay": DECAY, "torch_adam": True}
        own = {
            # What plans make of it must not depend on these two.
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 5,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": parameters},
            "zero_optimization": dict(self.zero),
            "zero_allow_untested_optimizer": True,
        }
        return own | dict(self.others)


CPU_OFFLOAD = {"device": "cpu", "pin_memory": True}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
AT_ONCE = BF16 | {"bf16": {"enabled": True, "immediate_grad_update": True}}
ENGINES = {
    "zero0": Engine({"stage": 0}, fewer=True),
    "zero1": Engine({"stage": 1}, fewer=True),
    "zero2": Engine({"stage": 2}),
    "zero2-head": Engine({"stage": 2}, schedule={"recompute": "head+full"}),
    "zero3": Engine({"stage": 3, "sub_group_size": 1000, "stage3_param_persistence_threshold": 10}),
    "zero2-offload": Engine({"stage": 2, "offload_optimizer": CPU_OFFLOAD}),
    "zero3-offload": Engine({"stage": 3, "offload_optimizer": CPU_OFFLOAD, "offload_param": CPU_OFFLOAD}),
    "zero1-bf16": Engine({"stage": 1}, BF16, fewer=True),
    "zero2-bf16": Engine({"stage": 2}, BF16),
}
PIPELINE, V = Topology(pp=2), Topology(pp=2, placement=(0, 1, 1, 0))
GRID = Topology(pp=2, dp=2)
SPLIT = {"split_backward": True}
PIPELINES = {  # whose embedding and head are one weight, on the first and the last stage
    "zero1-pp-head": Engine({"stage": 1}, topology=PIPELINE, schedule=SPLIT | {"recompute": "head"}),
    "zero0-v": Engine({"stage": 0}, topology=V),
    "zero1-v": Engine({"stage": 1}, topology=V, schedule=SPLIT),
    "zero0-pp-bf16": Engine({"stage": 0}, {"bf16": {"enabled": True}}, topology=PIPELINE),
    "zero1-pp-bf16": Engine({"stage": 1}, BF16, topology=PIPELINE, schedule=SPLIT),
    "zero1-pp-bf16-at-once": Engine({"stage": 1}, AT_ONCE, topology=PIPELINE, schedule=SPLIT),
    "zero1-pp-bf16-offload": Engine({"stage": 1, "offload_optimizer": CPU_OFFLOAD}, BF16, topology=PIPELINE),
}
GRIDS = {
    "zero0-grid": Engine({"stage": 0}, fewer=True, topology=GRID),
    "zero1-grid": Engine({"stage": 1}, fewer=True, topology=GRID, schedule=SPLIT),
}
ALL = ENGINES | PIPELINES | GRIDS
EXACT = [name for name in ALL if "bf16" not in name]


def samples_of_step(engine: Engine, step: int):
    return SAMPLES[:1] if engine.fewer and step == 1 else SAMPLES


def plan_of(
    samples, rank: int, zero_stage: int, step: int = 0, topology: Topology = REPLICAS, dtype="float32", **options: Any
):
    lengths = [SampleLength(s.index, s.positions, target=s.target) for s in samples]
    costs, form = TokenCosts(topology.num_stages, overhead_ns=10**5), ActivationFormat(16, dtype, order="bsh")
    collectives = ReplicaCollectives.of_zero(zero_stage)
    options = {"replica_counts": "equal" if zero_stage >= 2 else "free", "max_tokens": 24, **options}
    planner = Planner(topology, costs, 10**9, format=form, collectives=collectives, **options)
    place = topology.coordinates(rank)
    return prove_step(planner, lengths, step=step).plans[place.dp_rank][place.pp_rank]


def batches_of(plan: ExecutionPlan) -> list[dict[str, torch.Tensor]]:
    batches = [collate(m, [SAMPLES[s.index] for s in m.samples]) for m in plan.micro_batches]
    return [{name: torch.from_numpy(value) for name, value in batch.items()} for batch in batches]


def in_ranks(main: Any, folder: Any, num_ranks: int) -> list[Any]:
    def rank_main(env: RankEnv) -> int:
        env.export()
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=env.init_method, rank=env.rank, world_size=env.world_size, timeout=limit
        )
        with quiet():
            torch.save(main(env.rank), folder / str(env.rank))
        dist.barrier()
        dist.destroy_process_group()
        return 0

    run_local(rank_main, num_ranks, timeout_s=LIMIT_S)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(num_ranks)]


def trained(engine: Engine, rank: int) -> list[Any]:
    """Loss, gradient norm and counts of micro-batches of each step that is taken; between them come some that are not,
    of which nothing may stay."""
    chunk_runner.HEAD_SLICE = 4  # where a plan has heads in slices
    topology = engine.topology
    parallel = ParallelContext(topology, device=CPU, timeout_s=LIMIT_S)
    parts = parts_of_model(tiny_model(MODEL).train(), topology, parallel.coordinates.pp_rank)
    ds = make_engine(engine_model(parts), engine.config, parallel)
    stage = engine_stage(ds, parts, parallel=parallel)
    settings = OptimizerSettings(
        lr=LR, min_lr=LR, lr_schedule="constant", warmup_steps=0, weight_decay=DECAY, nan_policy="skip", max_skips=3
    )
    optimizer = DeepSpeedOptimizer(ds, settings, num_steps=STEPS, parallel=parallel, device=CPU)
    executor, told = PipelineExecutor(stage, parallel.transport), []
    dtype = "bfloat16" if "bf16" in engine.others else "float32"

    def run(step: int, spoil: str = "") -> tuple[float, float | Refused, Any]:
        samples, zero_stage = samples_of_step(engine, step), ds.zero_optimization_stage()
        plan = plan_of(samples, rank, zero_stage, step, topology, dtype, **engine.schedule)
        batches = batches_of(plan)
        for batch in batches:
            batch["loss_weights"] *= SPOILS.get(spoil, 1.0)
        loss = executor.execute(plan, batches)
        if spoil == "sums":
            optimizer._largest.zero_()  # as if the sum over micro-batches were the first that is not finite
        executed = ExecutedStep(plan, math.nan if spoil == "loss" else 0.0 if spoil else loss)
        return loss, optimizer.step(executed), plan.num_micro_batches

    for step in range(STEPS):
        for spoil in SPOILS if step == 1 else ():
            _, refused, _ = run(step, spoil)
            assert isinstance(refused, Refused), (spoil, refused)
        told.append(run(step))
    assert optimizer.place.num_updates == STEPS
    ds.destroy()
    return told


MISSPELT: dict[str, dict[str, Any]] = {  # which settings leave to DeepSpeed
    "field": {"zero_optimization": {"stage": 2, "offload_optimiser": {}}},
    "parameter": {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}},
    "scheduler": {"scheduler": {"type": "WarmupLr", "params": {}}},
    "parameter of the scheduler": {"scheduler": {"type": "WarmupLR", "params": {"warmup_maximum_lr": 1e-3}}},
}


def refused(parallel: ParallelContext, rank: int) -> dict[str, str]:
    """What plans and engines that do not fit are told, and what a loss that is not finite leaves behind."""
    said = {}

    def note(name: str, work: Any) -> None:
        try:
            work()
        except (ConfigError, ExecutionError) as error:
            said[name] = str(error)

    layers = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
    ds = make_engine(layers, ENGINES["zero2"].config, parallel)
    stage = DeepSpeedStage(ds, token_loss_sum, parallel=parallel)
    unequal = plan_of(SAMPLES[:1], rank, 1)
    balanced = {"split_policy": "packed-balanced", "replica_counts": "equal", "layout": "packed"}
    in_flight = plan_of(SAMPLES, rank, 1, schedule="gpipe", **balanced)
    note("unequal", lambda: stage.start_step(unequal))
    of_stages = plan_of(SAMPLES, rank, 2, layout="padded", recompute="stage")
    note("stages", lambda: stage.start_step(of_stages))
    apart = DeepSpeedStage(ds, token_loss_sum, parallel=parallel, restarts_attention=True)
    executor = PipelineExecutor(apart, InlineHub().transport(0))
    note("in flight", lambda: executor.execute(in_flight, batches_of(in_flight)))
    note("replicas", lambda: EngineGradients(ds, []).begin(plan_of(SAMPLES, 0, 0, topology=Topology())))
    plan = plan_of(SAMPLES, rank, 2, layout="padded")
    batches = batches_of(plan)
    before = ds.module[1].weight.detach().clone()
    optimizer = DeepSpeedOptimizer(ds, OptimizerSettings(), num_steps=9, parallel=parallel, device=CPU)
    if rank == 1:
        batches[-1]["loss_weights"][0, 0] = torch.nan
    executor = PipelineExecutor(stage, parallel.transport)
    note("not finite", lambda: optimizer.step(ExecutedStep(plan, executor.execute(plan, batches), stage.losses())))
    assert torch.equal(ds.module[1].weight, before)
    ds.destroy()
    in_stages = ParallelContext(PIPELINE, device=CPU, timeout_s=LIMIT_S)
    parts = parts_of_model(tiny_model(MODEL), PIPELINE, in_stages.coordinates.pp_rank)
    ds = make_engine(engine_model(parts), ENGINES["zero2"].config, in_stages)
    note("parts", lambda: engine_stage(ds, parts, parallel=in_stages))
    overlapping = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    ds = make_engine(torch.nn.Linear(2, 2), ENGINES["zero1"].config | overlapping, parallel)
    note("overlap", lambda: DeepSpeedStage(ds, token_loss_sum))
    for name, misspelt in MISSPELT.items():
        config = ENGINES["zero2"].config | misspelt
        note(name, lambda config=config: make_engine(torch.nn.Linear(2, 2), config, parallel))
    return said


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    def main(rank: int) -> Any:
        for name in [name for name in sys.modules if name.startswith(COMPILES)]:
            del sys.modules[name]  # as where ranks do not find it imported
        before = set(sys.modules)
        told = {name: trained(engine, rank) for name, engine in (ENGINES | PIPELINES).items()}
        assert COMPILES in sys.modules
        assert not [name for name in set(sys.modules) - before if name.startswith("torch._inductor")]  # 3 s to load
        return told, refused(ParallelContext(REPLICAS, device=CPU, timeout_s=LIMIT_S), rank)

    return in_ranks(main, tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    def main(rank: int) -> Any:
        return {name: trained(engine, rank) for name, engine in GRIDS.items()}

    return in_ranks(main, tmp_path_factory.mktemp("grid"), 4)


def plain_loop(fewer: bool) -> list[tuple[float, float]]:
    model, told = tiny_model(MODEL), []
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decaying}, {"params": others, "weight_decay": 0.0}], lr=LR, weight_decay=DECAY
    )
    for step in range(STEPS):
        loss, _ = one_by_one(model, samples_of_step(Engine({}, fewer=fewer), step))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        told.append((loss, float(norm)))
    return told


@pytest.fixture(scope="module")
def plain() -> dict[bool, list[tuple[float, float]]]:
    return {fewer: plain_loop(fewer) for fewer in (False, True)}


@pytest.mark.parametrize("name", EXACT)
def test_every_zero_stage_trains_as_a_plain_loop_does_whatever_steps_are_refused(ran, grid, plain, name):
    for told in grid if name in GRIDS else [told for told, _ in ran]:
        for (loss, norm, _), (expected, expected_norm) in zip(told[name], plain[ALL[name].fewer], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_micro_batches_vary_and_a_replica_may_have_none_where_gradients_are_reduced_once(ran):
    counts = [counts for _, _, counts in ran[0][0]["zero1"]]
    assert min(counts[0]) > 1
    assert counts[1] == (1, 0)
    assert all(len(set(counts)) == 1 for _, _, counts in ran[0][0]["zero3"])


@pytest.mark.parametrize("name", [name for name in ENGINES | PIPELINES if "bf16" in name])
def test_bfloat16_engines_come_as_close_as_bfloat16_does(ran, plain, name):
    # Without grad_accum_dtype an engine of ZeRO 0 sums gradients over micro-batches in bfloat16, the others in fp32.
    rel = 2e-2 if "data_types" in ALL[name].others else 3e-2
    for told, _ in ran:
        expected = plain[ALL[name].fewer]
        assert [loss for loss, _, _ in told[name]] == pytest.approx([loss for loss, _ in expected], rel=rel)
        assert told[name][0][1] == pytest.approx(expected[0][1], rel=0.03)  # a wrong division is a factor


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unequal", r"ZeRO 2 .* has \(1, 0\) micro-batches: plan with replica_counts='equal'"),
        ("stages", r"ZeRO 2 .* recomputes whole stages, .*: recompute layers"),
        ("parts", "ZeRO 2 .* but the model is in 2 stages: take one, or ZeRO 0 or 1"),
        ("in flight", r"ZeRO 2 .* runs 0F0 0F1 .*: take a schedule of whole backwards"),
        ("replicas", "the plan is for 1 replicas but the engine for 2"),
        (
            "not finite",
            r"step 1 is not finite \(loss nan\): the loss of micro-batch 1 of replica 1"
            r" \(samples 3\) is nan; no weight was changed",
        ),
        ("overlap", "overlap_comm with ZeRO 1"),
        ("field", "DeepSpeed refuses its configuration, so correct the file: .*offload_optimiser"),
        ("parameter", "DeepSpeed refuses its configuration, so correct the file: .*'learning_rate'"),
        ("scheduler", "DeepSpeed refuses its configuration, so correct the file: .*WarmupLr"),
        ("parameter of the scheduler", "DeepSpeed refuses its configuration, .*'warmup_maximum_lr'"),
    ],
)
def test_what_would_be_wrong_or_hang_is_refused_on_every_rank(ran, name, says):
    for _, said in ran:
        assert re.search(says, said[name], re.DOTALL), said


def test_parts_of_an_encoder_decoder_are_refused():
    engine: Any = None
    with pytest.raises(ConfigError, match=r"engines train causal models .*: give TransformersStage the parts of a T5"):
        engine_stage(engine, parts_of_model(tiny("t5")), parallel=engine)


def test_a_deepspeed_that_cannot_be_loaded_leaves_logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    with pytest.raises(ImportError):
        make_engine(torch.nn.Linear(1, 1), {}, SimpleNamespace())  # type: ignore[arg-type]
    assert logging.root.manager.disable == logging.INFO
