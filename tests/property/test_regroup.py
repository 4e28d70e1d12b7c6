"""Exchanges of samples between micro-batches: nothing lost, and plans that are shorter for it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.core import native
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.search import proposals
from dynapipe_ext.schedules.search.regrouping import ShapeLaw, fit_shape_law

LAW: ShapeLaw = (2e6, 1e4, 1.5e4, 2.5, 1.25, 0.75)


def cost(group: list[int], encoder: list[int], decoder: list[int]) -> float:
    c0, c1, c2, c3, c4, c5 = LAW
    e, d = max(encoder[i] for i in group), max(decoder[i] for i in group)
    return c0 + len(group) * (c1 * e + c2 * d + c3 * e * e + c4 * d * d + c5 * e * d)


def tokens(group: list[int], encoder: list[int], decoder: list[int]) -> int:
    return len(group) * (max(encoder[i] for i in group) + max(decoder[i] for i in group))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    count = draw(st.integers(1, 30))
    lengths = st.lists(st.integers(0, 600), min_size=count, max_size=count)
    starts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=8))) if count > 1 else []
    ends = [*starts, count]
    groups = [list(range(a, b)) for a, b in zip([0, *starts], ends, strict=True)]
    return groups, draw(lengths), draw(lengths)


@given(cases(), st.integers(0, 400), st.integers(0, (1 << 64) - 1), st.sampled_from([1.0, 1.2, 10.0]))
def test_every_item_stays_in_one_group_within_its_limits(case, moves, seed, room) -> None:  # type: ignore[no-untyped-def]
    groups, encoder, decoder = case
    most = int(room * max(tokens(group, encoder, decoder) for group in groups))
    found = native.regrouped(groups, encoder, decoder, LAW, most, moves, seed) if len(groups) > 1 else groups
    assert all(tokens(group, encoder, decoder) <= most for group in found)
    assert sorted(i for group in found for i in group) == list(range(len(encoder)))
    assert len(found) == len(groups)
    assert all(found)
    before, after = ([cost(group, encoder, decoder) for group in one] for one in (groups, found))
    median = sorted(before)[len(before) // 2]
    assert all(now <= 1.0001 * max(1.1 * was, median) for was, now in zip(before, after, strict=True))


def test_samples_long_on_one_side_part_from_those_long_on_the_other() -> None:
    encoder, decoder = [500, 5] * 12, [5, 300] * 12
    groups = [list(range(k, k + 4)) for k in range(0, 24, 4)]
    found = native.regrouped(groups, encoder, decoder, LAW, 1 << 40, 4000, 0)
    assert all(len({encoder[i] for i in group}) == 1 for group in found)


def test_a_law_that_shapes_follow_is_found() -> None:
    rows, e, d = np.meshgrid([1, 2, 4, 8], [16, 64, 128, 256], [8, 32, 100])
    sizes = np.stack([rows.ravel(), e.ravel(), d.ravel()]).astype(np.int64)
    times = np.array([cost([0] * r, [length], [other]) for r, length, other in sizes.T.tolist()]).astype(np.int64)
    usual = int(np.median(times))
    found = fit_shape_law(sizes, times, usual)
    assert found is None  # a dozen shapes take about as long as that
    found = fit_shape_law(np.repeat(sizes, 4, axis=1), np.repeat(times, 4), usual)
    assert found == pytest.approx(LAW, rel=0.05)


def test_plans_of_two_sides_are_shorter_for_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = TokenCosts(4, ns_per_token=1000, ns_per_token_squared=0.2, overhead_ns=300_000, bytes_per_token=1000)
    planner = Planner(Topology(pp=4), costs, 10**9, pad_multiple=1, effort=500)
    source = random.Random(0)
    batches = [
        [SampleLength(i, *(int(source.lognormvariate(mean, 1)) + 1 for mean in (4, 3))) for i in range(200)]
        for _ in range(3)
    ]
    with_exchanges = [planner.plan(batch).makespan_ns for batch in batches]

    def refuse(*_: object) -> None:
        raise PlanError("no exchanges")

    monkeypatch.setattr(proposals, "exchange_samples", refuse)
    without = [planner.plan(batch).makespan_ns for batch in batches]
    assert sum(with_exchanges) < 0.99 * sum(without), (with_exchanges, without)
