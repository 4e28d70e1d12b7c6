"""A run whose costs are wrong finds the right ones: sleeping ranks, a real server, a planner process, one switch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.drift import CostWatch
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.emulated import EmulatedStage
from dynapipe_ext.executor.training_loop import LoopHooks, LoopSettings, SpanRecorder, StepExecutors, train_steps
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport, make_pipeline_groups
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.rank.variant_run import broadcast_bytes, bytes_on_first
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.schedules.evaluation.simulate import find_last_end_ns, simulate_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from tests.support.limits import LIMIT_S

BATCH_SIZE, NUM_STEPS, CPU = 24, 6, torch.device("cpu")
TOPOLOGY = Topology(pp=2, dp=2)
# A step takes a third of a second, so that what sleepers oversleep is little of it.
RIGHT = TokenCosts(
    2, ns_per_token=20_000, ns_per_token_squared=200, overhead_ns=500_000, bytes_per_token=1000, stage_scale=(1.0, 1.3)
)
WRONG = {
    "stages scaled wrongly": replace(RIGHT, overhead_ns=100_000, stage_scale=(4.0, 0.4)),
    "no quadratic part": replace(RIGHT, ns_per_token_squared=0, ns_per_token=60_000),
}


class Lengths:
    """A few long samples among many short ones; nobody reads them."""

    def __init__(self) -> None:
        sizes = np.minimum(600, 8 + np.random.default_rng(3).lognormal(4.0, 1.1, BATCH_SIZE * NUM_STEPS)).astype(int)
        self.lengths = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was read by a rank that needs no data")


class NoWeights:
    lr = 0.0

    def step(self, executed: Any) -> float:
        return 0.0


def planner_with(costs: CostModel) -> Planner:
    return Planner(TOPOLOGY, costs, 1e6, format=ActivationFormat(2), collectives=ReplicaCollectives(), effort=4000)


def run(costs: CostModel, address: Any, env: RankEnv) -> list[Any]:
    """Each step's number, predicted makespan and fit, and the costs that hold in the end."""
    dist.init_process_group("gloo", init_method=env.init_method, rank=env.rank, world_size=env.world_size)
    transport = TorchP2PTransport(
        TOPOLOGY, env.rank, make_pipeline_groups(TOPOLOGY, env.rank, timeout_s=LIMIT_S), device=CPU, timeout_s=LIMIT_S
    )
    stage = EmulatedStage(
        lambda plan: RIGHT.evaluate(plan.micro_batches), ActivationFormat(2), lambda spec: torch.zeros(spec.shape)
    )
    recorder = SpanRecorder()
    executor = PipelineExecutor(stage, transport, recorder=recorder, rank=env.rank)
    loader = DynaPipeDataLoader(
        Lengths(),
        planner_with(costs),
        batch_size=BATCH_SIZE,
        num_workers=1,
        store=address,
        delivery=PlanDelivery(namespace="drift"),
        coordinates=TOPOLOGY.coordinates(env.rank),
        needs_data=False,
    )
    watch = CostWatch(
        costs,
        adapts=True,
        gather=partial(bytes_on_first, device=CPU),
        share=partial(broadcast_bytes, device=CPU),
        adopt=lambda step, found: loader.plan_with(planner_with(found)),
    )
    with loader:
        executors = StepExecutors(plain=executor, traced=executor, recorder=recorder)
        settings = LoopSettings(num_steps=NUM_STEPS)
        steps = [
            (done.step, done.predicted_makespan_s, done.fit)
            for done in train_steps(loader, executors, NoWeights(), settings, [], LoopHooks(watch=watch))
        ]
        dist.barrier()
    transport.close()
    dist.destroy_process_group()
    return [steps, cost_model_to_json(watch.costs)]


def step_plan(costs: CostModel, step: int) -> StepPlan:
    samples = sample_lengths(Lengths().lengths, range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE))
    return prove_step(planner_with(costs), samples, step=step).step_plan


def true_makespan_s(plan: StepPlan) -> float:
    """What a plan takes where `RIGHT` is the truth."""
    ends = [
        find_last_end_ns(simulate_ns(schedule, RIGHT.evaluate(replica.micro_batches)))
        for replica, schedule in zip(plan.batch.replicas, plan.schedules, strict=True)
    ]
    return max(ends) / 1e9


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_run_with_wrong_costs_goes_on_with_the_plans_of_right_ones(
    run_ranks: Any, redis_server: RedisServer, wrong: TokenCosts
) -> None:
    ranks = run_ranks(4, lambda env: run(wrong, redis_server.address, env))
    steps, raw = ranks[0]
    found = cost_model_from_json(raw)
    assert [step for step, _, _ in steps] == list(range(NUM_STEPS))
    assert [fit is not None for _, _, fit in steps] == [False, False, False, True, False, False]
    fit = steps[3][2]
    assert fit.error_before > 0.2
    assert fit.error_after < 0.7 * fit.error_before  # on a machine that others load, sleepers oversleep
    for other_steps, other_raw in ranks:  # one switch on all ranks, to the same bits
        assert other_raw == raw
        assert [fit for _, _, fit in other_steps] == [fit for _, _, fit in steps]
    for step in range(NUM_STEPS):  # nobody has run a plan of other costs than those that held
        of_replicas = {other_steps[step][1] for other_steps, _ in ranks}
        held = step_plan(wrong if step < 4 else found, step)
        assert max(of_replicas) == pytest.approx(held.makespan_s, rel=1e-9)
    before, after, best = (
        sum(true_makespan_s(step_plan(costs, step)) for step in range(NUM_STEPS)) for costs in (wrong, found, RIGHT)
    )
    assert before > 1.1 * best
    assert after < 1.05 * best
