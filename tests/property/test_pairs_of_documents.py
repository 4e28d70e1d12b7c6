"""Pairs of documents are planned as one sample each: never parted, priced as two documents, in either layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, check_cover, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import DataError, PlanError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.models.flops import work_of
from dynapipe_ext.schedules.planner import Planner

DOCUMENTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=9)
TOPOLOGIES = (Topology(), Topology(pp=2), Topology(dp=2), Topology(pp=2, placement=place_stages("v", 2)))


def pairs_of(documents) -> list[SampleLength]:
    return [SampleLength(i, a + b, target=2, first=a) for i, (a, b) in enumerate(documents)]


def singles_of(documents) -> list[SampleLength]:
    return [SampleLength(i, length, target=1) for i, length in enumerate(n for pair in documents for n in pair)]


@given(DOCUMENTS, st.sampled_from(("padded", "packed")), st.sampled_from((1, 8)))
def test_pairs_are_priced_and_counted_as_their_two_documents(documents, layout, multiple):
    both, apart = (
        MicroBatch(tuple(samples), layout, pad_multiple=multiple)
        for samples in (pairs_of(documents), singles_of(documents))
    )
    assert (both.rows, both.encoder_len) == (apart.rows, apart.encoder_len)
    assert both.padded_tokens == apart.padded_tokens
    assert both.documents == apart.documents
    assert count_positions(both) == count_positions(apart)
    assert work_of([both]) == work_of([apart])


@settings(deadline=None, max_examples=30)
@given(DOCUMENTS, st.sampled_from(("padded", "packed")), st.sampled_from(TOPOLOGIES), st.booleans())
def test_plans_keep_pairs_whole_and_within_their_caps_and_bounds(documents, layout, topology, split):
    samples = pairs_of(documents)
    costs = TokenCosts(topology.num_stages, ns_per_token_squared=20, overhead_ns=10**4)
    form = ActivationFormat(16, order="bsh")
    options = {"layout": layout, "max_tokens": 128, "pad_multiple": 1, "split_backward": split}
    planner = Planner(topology, costs, 10**9, format=form, collectives=ReplicaCollectives(), **options)
    proven = prove_step(planner, samples, step=3)
    check_cover(proven.step_plan.batch, samples)
    micro_batches = proven.step_plan.batch.micro_batches
    assert max(m.padded_tokens for m in micro_batches) <= 128
    assert sorted(s.index for m in micro_batches for s in m.samples) == [s.index for s in samples]
    rows = [2 * len(m.samples) if layout == "padded" else 1 for m in micro_batches]
    assert [m.rows for m in micro_batches] == rows
    certificate = proven.step_plan.certificate
    assert certificate.batch_ns is not None
    assert 0 < certificate.batch_ns <= certificate.makespan_ns
    for plan in (plan for replica in proven.plans for plan in replica):
        assert decode(encode(plan, b"k" * 32), b"k" * 32).micro_batches == plan.micro_batches


def test_lengths_with_a_fourth_column_are_of_pairs():
    assert sample_lengths(np.array([[9, 0, 4, 3]])) == [SampleLength(0, 9, 0, 4, first=3)]
    for wrong in ([9, 0, 4, 9], [9, 0, 4, 0], [9, 2, 4, 3]):
        with pytest.raises(DataError, match="first document of the encoder side"):
            sample_lengths(np.array([wrong]))


@pytest.mark.parametrize("wrong", [{"first": 9}, {"first": -1}, {"first": 3, "decoder": 2}, {"first": 3, "start": 1}])
def test_a_sample_that_is_no_whole_pair_is_not_planned_as_one(wrong):
    planner = Planner(Topology(), TokenCosts(1), 10**9, format=ActivationFormat(16))
    with pytest.raises(DataError, match="first only in a whole decoder-only sample"):
        planner.plan([SampleLength(0, **{"encoder": 9, "target": 4, **wrong})])


def test_a_plan_that_parts_a_pair_or_gives_it_other_documents_is_refused():
    planner = Planner(Topology(), TokenCosts(1), 10**9, format=ActivationFormat(16))
    for planned in ({"first": 4}, {}):
        batch = planner.plan([SampleLength(0, 9, target=4, **planned)]).batch
        with pytest.raises(
            PlanError, match=rf"sample 0 is planned as .*first={planned.get('first', 0)}\b.* is .*first=3\b"
        ):
            check_cover(batch, [SampleLength(0, 9, target=4, first=3)])
