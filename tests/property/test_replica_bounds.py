"""A replica's bounds one by one: the same numbers as code that shares nothing with them finds."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.tools.check.recomputed_bounds import replica_bounds_ns

PLACEMENTS = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 1, 0)}


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    stages=st.sampled_from(sorted(PLACEMENTS)),
    num=st.integers(0, 7),
    split=st.booleans(),
    in_forward=st.booleans(),
)
@example(seed=9, stages=3, num=2, split=True, in_forward=False)  # where the last W of another rank counts
def test_the_bounds_of_a_replica_are_those_that_brute_force_finds(
    seed: int, stages: int, num: int, split: bool, in_forward: bool
) -> None:
    rng = np.random.default_rng(seed)
    backward = rng.integers(0, 60, (stages, num))
    costs = MicroBatchCosts(
        forward_ns=rng.integers(0, 40, (stages, num)),
        backward_ns=backward,
        weight_ns=rng.integers(0, backward + 1),
        stored_bytes=rng.integers(0, 30, (stages, num)),
        working_bytes=rng.integers(0, 9, (stages, num)),
        transfer_ns=rng.integers(0, 20, (stages - 1, num)),
        transfer_bytes=np.zeros((stages - 1, num), np.int64),
        static_bytes=rng.integers(0, 10, stages),
        working_in="F" if in_forward else "FBI",
    )
    placement = PLACEMENTS[stages]
    bounds = bound_replica(placement, costs, split=split, memory_limit_bytes=100)
    found = replica_bounds_ns(costs, placement, split=split, limit_bytes=100)
    assert [bounds.stage_ns, bounds.chain_ns, bounds.heads_tails_ns, bounds.byte_time_ns] == list(found.values())
    assert bounds.heads_tails_ns >= max(bounds.stage_ns, bounds.chain_ns)
    assert bound_replica(placement, costs, split=split).best_ns == bounds.heads_tails_ns
    assert bound_replica(placement, costs, split=split).byte_time_ns is None
