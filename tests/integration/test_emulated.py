"""Sleeping ranks do what the plan says: PP4 x DP2, a real server, a planner process, links that take their time.

How near their steps come to the prediction is for `tests/bench/emulated.py` to say: a machine that others load takes
longer.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward
from dynapipe_ext.executor.proven_step import Plans, prove_step
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S

BENCH = Path(__file__).resolve().parent.parent / "bench"
TOPOLOGY = Topology(pp=4, dp=2)
NUM_STEPS, BATCH_SIZE = 2, 60
LETTERS: dict[type, str] = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}

# Unequal stages, seconds that grow faster than tokens, links slow enough to be seen; a step takes half a second.
COSTS = TokenCosts(
    4,
    ns_per_token=25_000,
    ns_per_token_squared=20,
    overhead_ns=500_000,
    bytes_per_token=1000,
    transfer_ns_per_token=2_500,
    stage_scale=(1.0, 0.8, 1.1, 1.3),
)


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's harness: tests/bench is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import emulation

    yield emulation
    sys.modules.pop("emulation", None)


def batches() -> tuple[tuple[int, ...], ...]:
    """Many short samples and a few long ones, other ones in each step."""
    draw = np.random.default_rng(3)
    return tuple(
        tuple(int(n) for n in np.minimum(600, 8 + draw.lognormal(4.2, 1.0, BATCH_SIZE)).astype(int))
        for _ in range(NUM_STEPS)
    )


def make_planner(schedule: Any) -> Planner:
    """`schedule` "split" is the searched one with I and W, with room for buffers, so that its first plan stands.

    Of two stages a rank each costs half of its rank's one.
    """
    split, placement = schedule == "split", place_stages("v", 4) if schedule == "zb-v" else ()
    scale = tuple(COSTS.stage_scale[rank] / 2 for rank in placement)
    return Planner(
        replace(TOPOLOGY, placement=placement),
        replace(COSTS, num_stages=8, stage_scale=scale) if placement else COSTS,
        5e6 if split else 2.5e6,
        schedule="adaptive" if split else schedule,
        split_backward=split,
        format=ActivationFormat(2),
        collectives=ReplicaCollectives(),
    )


@pytest.mark.parametrize(
    ("schedule", "transport"),
    [("adaptive", "strict"), ("zb-v", "torch"), ("split", "strict"), ("zb-h1", "torch")],
)
def test_ranks_run_the_proven_plans_in_order_and_no_sooner_than_predicted(
    emulation: Any, redis_server: RedisServer, schedule: Any, transport: Any
) -> None:
    planner = make_planner(schedule)
    case = emulation.Case(planner=planner, batches=batches(), transport=transport)
    plans = [prove_step(planner, lengths, step=step).plans for step, lengths in enumerate(numbered())]
    steps = emulation.run_emulated(case, redis_server.address, timeout_s=LIMIT_S)
    assert len(steps) == NUM_STEPS
    for step, plan in zip(steps, plans, strict=True):
        check_what_ran(step, plan, planner)


def numbered() -> list[Any]:
    """The steps' samples as the loader numbers them: through all steps."""
    sizes = np.array([n for batch in batches() for n in batch])
    lengths = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)
    return [sample_lengths(lengths, range(i, i + BATCH_SIZE)) for i in range(0, len(lengths), BATCH_SIZE)]


def check_what_ran(step: Any, plans: Plans, planner: Planner) -> None:
    """Every rank ran exactly its actions, in order, for at least the seconds of the cost model.

    `plans` may be other ones than the planner's first, which may leave no room for buffers in flight.
    """
    makespan_s = max(rank.makespan_s for replica in plans for rank in replica)
    assert step.predicted_s == pytest.approx(makespan_s, rel=1e-9)  # the plan out of the store is this one
    assert step.measured_s >= 0.99 * makespan_s
    assert step.losses == (0.0,) * TOPOLOGY.world_size
    assert step.num_micro_batches == tuple(len(replica[0].micro_batches) for replica in plans)
    for rank in range(TOPOLOGY.world_size):
        me = TOPOLOGY.coordinates(rank)
        spans, plan = step.trace.by_rank()[rank], plans[me.dp_rank][me.pp_rank]
        planned = [f"{i.stage}{LETTERS[type(i)]}{i.micro_batch}" for i in plan.instructions if type(i) in LETTERS]
        assert [span.label for span in spans] == planned
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        slept = durations(planner.costs.evaluate(plan.micro_batches))
        assert all(span.duration_s >= slept[span.label] - 1e-6 for span in spans)


def test_the_case_is_uneven() -> None:
    """Else this would prove little: sizes, counts of the replicas and steps differ, and ranks do wait."""
    plans = [make_planner("adaptive").plan(lengths, step=step) for step, lengths in enumerate(numbered())]
    assert any(len({len(replica.micro_batches) for replica in plan.batch.replicas}) == 2 for plan in plans)
    tokens = [m.padded_tokens for plan in plans for m in plan.batch.micro_batches]
    assert max(tokens) > 3 * min(tokens)
    assert min(len(plan.batch.micro_batches) for plan in plans) > 2 * TOPOLOGY.pp
    assert 0.25 < statistics.median(plan.makespan_s for plan in plans) < 1.0
    assert all(plan.bubble_ratio > 0.05 for plan in plans)


def durations(costs: MicroBatchCosts) -> dict[str, float]:
    """Seconds of every action that a schedule could have."""
    tables = {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}
    return {
        f"{stage}{letter}{m}": int(table[stage, m]) / 1e9
        for letter, table in tables.items()
        for stage, m in np.ndindex(table.shape)
    }
