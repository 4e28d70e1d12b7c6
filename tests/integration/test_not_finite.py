"""A step that is not finite, or has nothing to learn from, changes nothing on any rank, and says where it went wrong.

Real megatron-core ranks, TP2 x PP2 x DP2, over gloo.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.data.sample_selection import format_ranges
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import Case, build, join, samples_of, step_plan_of, tensors_of
from tests.support.rank_jobs import in_turn

ALL = Topology(tp=2, pp=2, dp=2)
FEW = (2, 1, 1, 1)  # samples of each micro-batch
CULPRIT, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.input_layernorm.weight"


class Rank:
    """One rank that runs steps whose batches a test may spoil."""

    def __init__(self, env, settings: OptimizerSettings) -> None:
        join(env)
        self.case = Case(ALL, distributed_optimizer=settings.distributed, is_deterministic=settings.deterministic)
        self.me = ALL.coordinates(env.rank)
        self.model, self.ddp, _ = build(self.case, ALL, env.rank)
        self.optimizer = MegatronOptimizer([self.ddp], self.ddp.config, settings, num_steps=20)
        self.transport = StrictTransport(
            ALL, env.rank, make_pipeline_groups(ALL, env.rank, timeout_s=LIMIT_S), timeout_s=LIMIT_S
        )
        exact = ExactMegatronGradients([self.ddp]) if settings.deterministic else None
        self.stage = MegatronStage([self.ddp], gradients=exact)
        self.executor = PipelineExecutor(self.stage, self.transport)

    def step(self, step: int, spoil=None):
        """The update's outcome, or its error as text; `spoil(plan, batches)` gives the plan to run."""
        form = ActivationFormat(self.case.model.shape.hidden_size)
        plan = lower(step_plan_of(self.case, step, FEW), form)[self.me.dp_rank][self.me.pp_rank]
        batches = [tensors_of(m, samples_of(step), "tokens") for m in plan.micro_batches]
        if spoil is not None:
            plan = spoil(plan, batches)
        loss = self.executor.execute(plan, batches)
        try:
            return self.optimizer.step(ExecutedStep(plan, loss, self.stage.losses()))
        except ExecutionError as error:
            return str(error)

    def held(self) -> list[torch.Tensor]:
        """Weights, moments, and the learning rate."""
        inner = self.optimizer._optimizer.chained_optimizers[0].optimizer
        moments = [t.clone() for state in inner.state.values() for t in state.values()]
        return [*(p.detach().clone() for p in self.model.parameters()), *moments, torch.tensor(self.optimizer.lr)]

    def leave(self) -> None:
        self.transport.close()
        dist.barrier()
        dist.destroy_process_group()


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def bad_loss(plan: ExecutionPlan, batches) -> ExecutionPlan:
    """Not a number in one sample of the second micro-batch of replica 1."""
    if plan.dp_rank == 1:
        batches[1]["loss_weights"][0, :2] = torch.nan
    return plan


def without_targets(plan: ExecutionPlan, batches) -> ExecutionPlan:
    for batch in batches:
        batch["loss_weights"].zero_()
    bare = tuple(
        replace(m, samples=tuple(replace(sample, target=0) for sample in m.samples)) for m in plan.micro_batches
    )
    return replace(plan, micro_batches=bare)


def spoiled(culprit: str, factor: float, **settings: bool):
    """What is said of a loss that is not finite and of a gradient times `factor`, and whether nothing changed."""

    def main(env) -> tuple[list[str], bool]:
        rank = Rank(env, OptimizerSettings(clip_grad=0.0, **settings))
        assert isinstance(rank.step(0), float)
        before = rank.held()
        messages = [rank.step(1, bad_loss)]
        culprits = [p for name, p in rank.model.named_parameters() if name == culprit]
        if rank.me == ALL.coordinates(1):  # one tensor parallel rank of the first stage of one replica
            culprits[0].register_hook(lambda gradient: gradient * factor)
        messages.append(rank.step(2))
        is_same = same(before, rank.held())
        rank.leave()
        return messages, is_same

    return main


SPOILS = [None, bad_loss, None, bad_loss, bad_loss]


def skipping(env) -> tuple[list[type], str, list[bool]]:
    """The outcomes of steps, the last one's words, and which changed something."""
    rank = Rank(env, OptimizerSettings(nan_policy="skip", max_skips=1))
    outcomes, held = [], []
    for step, spoil in enumerate(SPOILS):
        outcomes.append(rank.step(step, spoil))
        held.append(rank.held())
    rank.leave()
    changed = [not same(before, after) for before, after in itertools.pairwise(held)]
    return [type(outcome) for outcome in outcomes], outcomes[-1], changed


def aimless(env) -> tuple[Refused, bool]:
    """The outcome of a step without target tokens, and whether nothing changed."""
    rank = Rank(env, OptimizerSettings(weight_decay=0.1))
    rank.step(0)
    before = rank.held()
    outcome = rank.step(1, without_targets)
    is_same = same(before, rank.held())
    rank.leave()
    return outcome, is_same


@pytest.fixture(scope="module")
def ran():
    return in_turn({job: (8, main) for job, main in JOBS.items()})


SPOILED = {
    "plain": spoiled(CULPRIT, torch.inf),
    "zero1": spoiled(CULPRIT, torch.inf, distributed=True),
    "large": spoiled(CULPRIT, 1e24),  # finite, of a norm that is not
    "exact": spoiled(NORM, 1e20, deterministic=True),  # finite, and above what exact sums hold
}
JOBS = {**SPOILED, skipping: skipping, aimless: aimless}


@pytest.mark.parametrize("job", SPOILED)
def test_what_is_not_finite_stops_all_ranks_before_a_weight_changes(job, ran):
    plan = lower(step_plan_of(Case(ALL), 1, FEW), ActivationFormat(32))[1][0]
    samples = format_ranges(sample.index for sample in plan.micro_batches[1].samples)
    found = ran[job]
    assert len({tuple(messages) for messages, _ in found}) == 1
    (loss, gradient), _ = found[0]
    assert f"step 2 is not finite (loss nan): the loss of micro-batch 1 of replica 1 (samples {samples}) is nan" in loss
    assert "step 3 is not finite" in gradient
    assert (NORM if job == "exact" else CULPRIT) in gradient
    assert ("is above 2.62e+05, which exact sums do not hold" in gradient) == (job == "exact")
    assert ("above 1.8e+19, whose square float32 cannot hold" in gradient) == (job == "large")
    assert "no weight was changed" in gradient
    assert all(is_same for _, is_same in found)


def test_steps_are_skipped_up_to_the_number_in_a_row(ran):
    for kinds, last, changed in ran[skipping]:
        assert kinds == [float, Refused, float, Refused, str]
        assert "after 1 steps that were skipped in a row" in last
        assert last.endswith("or raise [optimizer] max_skips")
        assert changed == [False, True, False, False]


def test_a_step_without_target_tokens_changes_nothing_and_says_so(ran):
    expected = Refused("step 2 has no target tokens: it has nothing to learn from")
    assert ran[aimless] == [(expected, True)] * 8
