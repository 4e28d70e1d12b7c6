"""Steps whose replicas are blocks of several data parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.instructions import Send
from dynapipe_ext.executor.loader import InlinePlanSource
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.schedules.planner import Planner

LENGTHS = [37, 5, 120, 64, 9, 250, 31, 18, 77, 3]
FORMAT = ActivationFormat(16, sequence_shards=2)


def planner(dp: int = 4, width: int = 1, **options: Any) -> Planner:
    options = {"layout": "packed", "effort": 200, "pad_multiple": 2, "format": FORMAT, **options}
    options["collectives"] = ReplicaCollectives()
    return Planner(Topology(pp=2, dp=dp, width=width), TokenCosts(2), 10**9, **options)


@pytest.mark.parametrize("width", [3, 8, 0, -2, 6])
def test_a_width_that_does_not_divide_the_plane_in_powers_of_two_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"width .*{width}"):
        Topology(dp=12, width=width)


def test_a_block_is_of_neighbouring_data_parallel_ranks() -> None:
    topology = Topology(tp=2, pp=2, dp=8, width=4)
    ranks = [topology.rank(tp_rank=1, pp_rank=1, dp_rank=d) for d in range(8) if topology.replica_of(d) == 1]
    assert ranks == [25, 27, 29, 31]
    assert [topology.slice_of(d) for d in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert topology.at_width(1).to_json() == Topology(tp=2, pp=2, dp=8).to_json()
    assert "width" not in Topology(dp=8).to_json()


def test_a_plan_has_a_replica_a_block_and_rows_whose_slices_are_even() -> None:
    plan = planner(dp=8, width=4).plan(LENGTHS)
    assert (plan.width, len(plan.batch.replicas), len(plan.schedules)) == (4, 2, 2)
    assert all(m.encoder_len % (4 * 2) == 0 for m in plan.batch.micro_batches)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_all_ranks_of_a_block_take_one_plan_in_shapes_of_slices(width: int) -> None:
    proven = prove_step(planner(width=width), sample_lengths(LENGTHS), step=3)
    assert {(plan.width, plan.step) for replica in proven.plans for plan in replica} == {(width, 3)}
    for dp_rank in range(4):
        source = InlinePlanSource(lambda place: proven, dp_rank=dp_rank, pp_rank=0)
        plan = source.plan(StepPosition(0, 0, 3))
        assert plan is proven.plans[dp_rank // width][0]
        assert plan.dp_rank == dp_rank // width
        for send in (one for one in plan.instructions if isinstance(one, Send)):
            whole = plan.micro_batches[send.buffer.micro_batch].encoder_len
            assert send.specs[0].shape[0] * width * FORMAT.sequence_shards == whole
