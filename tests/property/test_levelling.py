"""Levelling: cuts stay a cover, and many long replicas gain by it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.search import proposals
from dynapipe_ext.schedules.search.levelling import balance_loads
from tests.property.test_search import random_costs

Case = tuple[MicroBatchCosts, tuple[int, ...], np.ndarray, list[tuple[int, int]], list[list[int]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Times of random shapes, which of them may be, and single items over the replicas."""
    items, width, dp = (draw(st.integers(1, most)) for most in (24, 5, 5))
    stage_ranks = draw(st.sampled_from([(0,), (0, 1, 2), (0, 1, 1, 0)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = np.full((items, width), -1, np.int32)
    for end in range(items):
        for r in range(min(width, end + 1)):
            shapes[end, r] = end * width + r if r == 0 or rng.random() < 0.8 else -1
    groups: list[list[int]] = [[] for _ in range(dp)]
    for item in range(items):
        groups[int(rng.integers(0, dp))].append(item)
    costs = random_costs(rng, len(stage_ranks), items * width)
    return costs, stage_ranks, shapes, [(i, i + 1) for i in range(items)], groups


@settings(max_examples=40)
@given(case=cases(), moves=st.integers(0, 250), seed=st.integers(0, 9), equal=st.booleans())
def test_levelled_cuts_cover_the_items_and_may_all_be(case: Case, moves: int, seed: int, equal: bool) -> None:
    *_, shapes, first_cuts, first_groups = case
    cuts, groups = balance_loads(*case, split=bool(seed % 2), moves=moves, seed=seed, equal_counts=equal)
    assert [item for first, end in cuts for item in range(first, end)] == list(range(len(first_cuts)))
    assert all(shapes[end - 1, end - first - 1] >= 0 for first, end in cuts)
    assert sorted(m for group in groups for m in group) == list(range(len(cuts)))
    if equal:
        assert list(map(len, groups)) == list(map(len, first_groups))


def test_steps_of_many_long_replicas_are_shorter_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 2400)
    costs = TokenCosts(8, ns_per_token=1_000, ns_per_token_squared=2, bytes_per_token=4_096, overhead_ns=3_000)
    planner = Planner(Topology(tp=1, pp=8, dp=16), costs, 64e9, effort=300)
    with_it = planner.plan(lengths.tolist())
    monkeypatch.setattr(proposals, "has_long_replicas", lambda *_: False)
    without = planner.plan(lengths.tolist())
    assert with_it.makespan_ns < without.makespan_ns
