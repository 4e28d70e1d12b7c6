"""Steps of forwards alone: planned, lowered, proven, sent, executed, and never mistaken for training or the reverse."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import LengthArray, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError, PlanError, VerificationError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import Backward, ExecutionPlan, Forward, Instruction, Recv, Send, WaitRecv
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.training_loop import EvalResult, evaluate
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, validate
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import gpipe
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.show.plan import list_orders
from tests.support.limits import LIMIT_S

KEY = b"k" * 32
COSTS = TokenCosts(4, bytes_per_token=100, static_bytes=900, transfer_ns_per_token=200, overhead_ns=5000)
LENGTHS = [5, 90, 30, 22, 70, 41, 8, 9, 10, 64, 33, 2, 18, 55, 27]
SAMPLES = [SampleLength(i, n, target=n - 1) for i, n in enumerate(LENGTHS)]


def planner(
    pp: int = 4, dp: int = 1, placement: tuple[int, ...] = (), limit: float = 30_000, **options: Any
) -> Planner:
    topology = Topology(pp=pp, dp=dp, placement=placement)
    costs = replace(COSTS, num_stages=topology.num_stages)
    needed: Any = {"format": ActivationFormat(4), "collectives": ReplicaCollectives()}
    return Planner(topology, costs, limit, **needed, **options).for_forwards()


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=25),
    shape=st.sampled_from([(1, 1, ()), (2, 1, ()), (3, 2, ()), (4, 4, ()), (2, 2, (0, 1, 1, 0)), (2, 1, (0, 1, 0, 1))]),
    layout=st.sampled_from(["padded", "packed"]),
    limit=st.integers(18_000, 60_000),
)
def test_every_sample_runs_once_forwards_and_no_rank_exceeds_the_limit_on_what_is_planned_and_on_what_runs(
    sizes: list[int], shape: tuple[int, int, tuple[int, ...]], layout: Any, limit: int
) -> None:
    planning = planner(*shape, limit=limit + 900 * 2, layout=layout, max_tokens=104 if layout == "packed" else 0)
    plan = planning.plan(sizes)
    assert plan.forward_only
    assert Counter(s.index for m in plan.batch.micro_batches for s in m.samples) == Counter(range(len(sizes)))
    assert {m.recompute for m in plan.batch.micro_batches} == {"none"}
    assert plan.peak_bytes <= planning.memory_limit_bytes
    for replica, schedule, prediction in zip(plan.batch.replicas, plan.schedules, plan.predictions, strict=True):
        validate(schedule, len(replica.micro_batches))
        costs = planning.costs.evaluate(replica.micro_batches)
        assert prediction.lower_bound_ns <= prediction.makespan_ns == compute_makespan_ns(schedule, costs)
    samples = [SampleLength(i, n, target=n) for i, n in enumerate(sizes)]
    for ranks in prove_step(planning, samples, step=0).plans:  # proven, or this raises
        for rank_plan in ranks:
            assert rank_plan.forward_only
            assert rank_plan.peak_bytes <= planning.memory_limit_bytes
            assert not any(isinstance(i, Backward) for i in rank_plan.instructions)
            assert decode(encode(rank_plan, KEY), KEY) == rank_plan


def test_a_planner_for_forwards_is_a_function_of_its_settings_and_travels_as_json() -> None:
    training = Planner(Topology(pp=4), COSTS, 30_000, schedule="1f1b", recompute="full", format=ActivationFormat(4))
    forwards = training.for_forwards()
    again = Planner.from_json(json.loads(json.dumps(forwards.to_json())))
    assert again == forwards == forwards.for_forwards()
    assert again.plan(LENGTHS) == forwards.plan(LENGTHS)
    assert (training.forward_only, forwards.forward_only) == (False, True)
    assert forwards.replan(forwards.plan(LENGTHS), LENGTHS, reserve_bytes=10_000).forward_only


@pytest.mark.parametrize("wrong", [{"schedule": "gpipe"}, {"split_backward": True}, {"recompute": "full"}])
def test_settings_that_concern_backwards_are_refused_beside_costs_of_forwards_alone(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Planner(Topology(pp=4), adjust(COSTS, forward_only=True), 30_000, **wrong)


def test_forwards_hold_the_model_s_static_bytes_and_no_more_than_a_training_forward_that_keeps_little() -> None:
    shape = Architecture.gpt(
        num_layers=8,
        hidden_size=64,
        num_heads=4,
        num_query_groups=4,
        ffn_hidden_size=256,
        gated_mlp=False,
        vocab_size=512,
        max_seq_len=512,
        tied_embeddings=True,
    )
    base = AnalyticCosts(shape, Topology(pp=2))
    micro_batches = [MicroBatch((SampleLength(0, 100), SampleLength(1, 70))), MicroBatch((SampleLength(2, 300),))]
    none, full = (base.evaluate([replace(m, recompute=kind) for m in micro_batches]) for kind in ("none", "full"))
    alone = adjust(base, forward_only=True).evaluate(micro_batches)
    assert (alone.forward_ns == none.forward_ns).all()
    assert (alone.static_bytes == none.static_bytes).all()
    assert {int(x.sum()) for x in (alone.stored_bytes, alone.backward_ns, alone.weight_ns)} == {0}
    assert (alone.working_bytes <= full.stored_bytes + full.working_bytes).all()
    assert (alone.working_bytes < none.stored_bytes + none.working_bytes).all()
    assert (alone.working_bytes >= full.working_bytes).all()
    shapes = adjust(base, forward_only=True).evaluate_shapes([2, 1], [100, 300], [0, 0])
    assert (shapes.working_bytes == alone.working_bytes).all()
    with pytest.raises(PlanError, match="'full' but a forward-only run"):
        adjust(base, forward_only=True).evaluate([replace(micro_batches[0], recompute="full")])


class NoneAlone(TokenCosts):
    """Knows no recomputation of micro-batches above 50 tokens, as a measured grid may."""

    def price(self, features: Any) -> Any:
        costs = TokenCosts.price(self, features)
        costs = replace(costs, stored_bytes=costs.stored_bytes + 7 * (costs.working_bytes == 0))
        return costs.refuse((features.recompute != "none") & (features.tokens > 50))


def test_where_full_recomputation_was_not_measured_a_forward_is_held_to_need_what_it_stores() -> None:
    small, large = MicroBatch((SampleLength(0, 10),)), MicroBatch((SampleLength(1, 90),))
    alone = adjust(NoneAlone(1, bytes_per_token=100), forward_only=True).evaluate([small, large])
    assert alone.working_bytes.tolist() == [[1000, 9007]]


def test_forwards_fit_micro_batches_that_training_cannot_hold() -> None:
    shape = Architecture.gpt(
        num_layers=8,
        hidden_size=64,
        num_heads=4,
        num_query_groups=4,
        ffn_hidden_size=256,
        gated_mlp=False,
        vocab_size=512,
        max_seq_len=512,
        tied_embeddings=True,
    )
    costs = AnalyticCosts(shape, Topology(), layer_overhead_ns=1_000_000)
    training = Planner(Topology(), costs, 12e6, recompute="none")
    plans = [planning.plan([60] * 64) for planning in (training, training.for_forwards())]
    training_most, forwards_most = (max(m.rows for m in plan.batch.micro_batches) for plan in plans)
    assert forwards_most > 2 * training_most


def test_micro_batches_are_cut_for_what_all_stages_of_a_rank_leave_free() -> None:
    """Each rank holds the weights of two stages, 20 kB of 26 kB: a micro-batch of 6 kB fits, one of 16 kB does not."""
    costs = TokenCosts(4, bytes_per_token=100, static_bytes=10_000, overhead_ns=10**9)
    planning = Planner(Topology(pp=2, placement=(0, 1, 1, 0)), costs, 26_000).for_forwards()
    plan = planning.plan([30] * 12)
    assert {m.rows for m in plan.batch.micro_batches} == {1}
    assert plan.peak_bytes == 20_000 + 32 * 100


def test_a_training_schedule_without_backwards_is_refused_by_validate_verify_and_the_reader_of_plans(
    tmp_path: Path,
) -> None:
    plan = planner().plan(LENGTHS)
    forwards = plan.schedules[0]
    count = forwards.num_micro_batches
    with pytest.raises(PlanError, match="runs F but must run FB or FIW: only a forward-only schedule may lack"):
        validate(replace(forwards, forward_only=False), count)
    with pytest.raises(PlanError, match="runs FB but must run F"):
        validate(replace(gpipe(4, count), forward_only=True), count)
    (ranks,) = prove_step(planner(), SAMPLES, step=0).plans
    programs = [rank_plan.instructions for rank_plan in ranks]
    assert verify(programs, (0, 1, 2, 3), len(ranks[0].micro_batches), forward_only=True)
    with pytest.raises(VerificationError, match="ends without the whole backward"):
        verify(programs, (0, 1, 2, 3), len(ranks[0].micro_batches))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(plan, planner().topology)))
    file = read_plan_file(path)
    assert [schedule for schedule, _ in list_orders(file)] == list(plan.schedules)
    with pytest.raises(PlanError, match="must run FB or FIW"):
        list_orders(replace(file, forward_only=False))
    training = Planner(Topology(pp=4), COSTS, 60_000).plan(LENGTHS)
    assert "forward_only" not in plan_json(training, Topology(pp=4))


def test_costs_that_store_for_backwards_are_refused_for_a_schedule_without_them_and_half_a_step_too() -> None:
    plan = planner(dp=2).plan(LENGTHS)
    with pytest.raises(PlanError, match="store activations for backwards"):
        compute_makespan_ns(plan.schedules[0], COSTS.evaluate(plan.batch.replicas[0].micro_batches))
    with pytest.raises(PlanError, match="some replicas are forward-only"):
        replace(plan, schedules=(plan.schedules[0], replace(plan.schedules[1], forward_only=False)))


Program = list[Instruction]


def _without(kind: type) -> Callable[[list[Program]], None]:
    def change(ranks: list[Program]) -> None:
        del ranks[1][next(i for i, x in enumerate(ranks[1]) if isinstance(x, kind))]

    return change


def _swapped(kind: type) -> Callable[[list[Program]], None]:
    def change(ranks: list[Program]) -> None:
        a, b = [i for i, x in enumerate(ranks[1]) if isinstance(x, kind)][:2]
        ranks[1][a], ranks[1][b] = ranks[1][b], ranks[1][a]

    return change


def _with_backward(ranks: list[Program]) -> None:
    ranks[3].append(Backward(3, 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without(Recv), "nothing under way"),
        (_without(WaitRecv), "has not arrived|never waits"),
        (_without(Send), "nothing under way|leaks"),
        (_without(Forward), "nothing to send"),
        (_swapped(Send), "has not been computed|disagree on the order"),
        (_swapped(Recv), "disagree on the order|nothing under way"),
        (_with_backward, "forwards alone has no backward"),
    ],
    ids=["recv", "wait", "send", "forward", "sends", "receives", "backward"],
)
def test_the_proof_refuses_a_damaged_plan(change: Callable[[list[Program]], None], reason: str) -> None:
    (ranks,) = prove_step(planner(), SAMPLES, step=0).plans
    programs = [list(rank_plan.instructions) for rank_plan in ranks]
    change(programs)
    with pytest.raises(VerificationError, match=reason):
        verify(programs, (0, 1, 2, 3), len(ranks[0].micro_batches), forward_only=True)


def test_forwards_gather_sharded_weights_over_replicas_and_end_without_a_reduction() -> None:
    """Under ZeRO-3 three samples on two replicas need equal counts; under ZeRO-2, whose collectives follow gradients,
    they do not."""
    shape = Architecture.gpt(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_query_groups=4,
        ffn_hidden_size=64,
        gated_mlp=False,
        vocab_size=128,
        max_seq_len=128,
        tied_embeddings=True,
    )
    topology, samples = Topology(pp=2, dp=2), [SampleLength(i, 60, target=60) for i in range(3)]
    for zero_stage, is_proven in ((2, True), (3, False)):
        costs = AnalyticCosts(shape, topology, zero_stage=zero_stage)  # type: ignore[arg-type]
        planning = Planner(topology, costs, 1e9, max_tokens=96, format=ActivationFormat(32)).for_forwards()
        if is_proven:
            prove_step(planning, samples, step=0)
            continue
        with pytest.raises(VerificationError, match="weight gather in a forward"):
            prove_step(planning, samples, step=0)
        prove_step(replace(planning, replica_counts="equal"), [*samples, SampleLength(3, 60, target=60)], step=0)


class Data:
    """Seeded lengths; token j of sample i is 7 i + j. All but the first are targets, or none where lengths say so."""

    def __init__(self, num_samples: int = 41) -> None:
        sizes = np.random.default_rng(3).integers(3, 90, num_samples)
        self.lengths: LengthArray = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        length, _, targets = self.lengths[index]
        return TokenSample(index, 7 * index + np.arange(length + 1), 1 + length - targets)


class Adding:
    """Stages that add 1 to every token; the loss of a position is its sum. A backward fails the test."""

    def __init__(self, stages: list[int], total: list[float]) -> None:
        self.stages, self.total = stages, total

    def start_step(self, plan: ExecutionPlan) -> None:
        self.plan, self.batches, self.sum = plan, {}, 0.0

    def load(self, micro_batch: int, batch: Any) -> None:
        self.batches[micro_batch] = batch

    def forward(self, stage: int, micro_batch: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert stage in self.stages
        batch = self.batches[micro_batch]
        out = (inputs[0] if inputs else batch["tokens"]) + 1
        if stage + 1 < self.plan.num_stages:
            return (out,)
        self.sum += float((out * batch["loss_weights"]).sum())
        return ()

    def backward(self, stage: int, micro_batch: int, output_grads: Any) -> Any:
        raise AssertionError("a backward in evaluation")

    backward_input = backward_weight = backward

    def finish_step(self) -> float:
        self.total.append(self.sum / self.plan.loss_divisor)
        return self.sum / self.plan.loss_divisor

    def held_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("placement", [(), (0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_evaluation_on_inline_ranks_gives_the_loss_of_one_pass_over_the_data(
    placement: tuple[int, ...], layout: Any
) -> None:
    data, planning = Data(), planner(2, 2, placement, layout=layout, max_tokens=104)
    num_stages = planning.topology.num_stages
    results: dict[tuple[int, int], EvalResult | Exception] = {}
    hubs, losses = [InlineHub(timeout_s=LIMIT_S) for _ in range(2)], []

    def rank(dp_rank: int, pp_rank: int) -> None:
        at = Coordinates(tp_rank=0, pp_rank=pp_rank, dp_rank=dp_rank)
        stage = Adding([s for s, r in enumerate(planning.topology.stage_ranks) if r == pp_rank], losses)
        try:
            with DynaPipeDataLoader(data, planning, tokens_per_batch=500, coordinates=at) as loader:
                executor = PipelineExecutor(stage, hubs[dp_rank].transport(pp_rank))
                results[dp_rank, pp_rank] = evaluate(executor, loader)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            results[dp_rank, pp_rank] = error

    threads = [threading.Thread(target=rank, args=(d, p)) for d in range(2) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    wanted = sum(
        float((data[i].tokens[:-1] + num_stages).sum()) for i in range(len(data))
    ) / int(data.lengths[:, 2].sum())  # fmt: skip
    last = planning.topology.stage_ranks[-1]
    found = [results[dp_rank, last] for dp_rank in range(2)]
    assert all(isinstance(one, EvalResult) for one in results.values()), results
    assert sum(one.loss for one in found) == pytest.approx(wanted, rel=1e-12)  # type: ignore[union-attr]
    for one in results.values():
        assert isinstance(one, EvalResult)
        assert (one.real_tokens, one.num_steps >= 3) == (int(data.lengths[:, 0].sum()), True)


def test_an_evaluation_refuses_plans_that_train_no_data_and_no_steps() -> None:
    data = Data()
    executor = PipelineExecutor(Adding([0], []), InlineHub().transport(0))
    training = Planner(Topology(), replace(COSTS, num_stages=1), 1e9, format=ActivationFormat(4))
    at = Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
    with DynaPipeDataLoader(data, training, batch_size=10, coordinates=at) as loader:
        with pytest.raises(ConfigError, match="the plan of step 0 has backwards"):
            evaluate(executor, loader)
        with pytest.raises(ConfigError, match="num_steps is 0"):
            evaluate(executor, loader, 0)
    with pytest.raises(DataError, match="no steps"):
        evaluate(executor, [])
    with DynaPipeDataLoader(data, training.for_forwards(), batch_size=10, coordinates=at) as loader:
        assert evaluate(executor, loader, 2).num_steps == 2


def test_an_evaluation_leaves_global_batches_without_targets_out_of_its_mean() -> None:
    """One sample a batch, every third without a target."""
    data = Data()
    data.lengths[::3, 2] = 0
    executor = PipelineExecutor(Adding([0], []), InlineHub().transport(0))
    at = Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
    planning = Planner(Topology(), replace(COSTS, num_stages=1), 1e9, format=ActivationFormat(4)).for_forwards()
    counted = [i for i in range(len(data)) if i % 3]
    wanted = sum(float((data[i].tokens[:-1] + 1).sum()) for i in counted) / int(data.lengths[counted, 2].sum())
    with DynaPipeDataLoader(data, planning, batch_size=1, coordinates=at) as loader:
        assert evaluate(executor, loader).loss == pytest.approx(wanted, rel=1e-12)
    data.lengths[:, 2] = 0
    with (
        DynaPipeDataLoader(data, planning, batch_size=1, coordinates=at) as loader,
        pytest.raises(DataError, match="global batches have no target tokens"),
    ):
        evaluate(executor, loader)
