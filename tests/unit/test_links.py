"""Links of pipeline boundaries and the times of messages over them."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

SHAPE = Architecture.gpt(
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=256,
    gated_mlp=False,
    vocab_size=512,
    max_seq_len=128,
    tied_embeddings=True,
)
FAST, SLOW = Link(1_000, 300e9), Link(10_000, 25e9)


def links(ranks_per_node: int) -> Links:
    return Links(intra=FAST, inter=SLOW, ranks_per_node=ranks_per_node)


@given(
    num_bytes=st.integers(0, 2**40),
    bytes_per_s=st.integers(1, 10**9 - 1) | st.integers(10**6, 10**12).map((1000).__mul__),
)
def test_a_transfer_is_latency_and_bytes_over_bandwidth_rounded_up_exactly(num_bytes: int, bytes_per_s: int) -> None:
    exact = 7 + math.ceil(Fraction(num_bytes * 10**9, bytes_per_s))
    if exact < 2**62:
        assert int(Link(7, bytes_per_s).transfer_ns(num_bytes)) == exact


@pytest.mark.parametrize(
    ("topology", "ranks_per_node", "crossing"),
    [
        (Topology(pp=4), 4, [False, False, False]),
        (Topology(tp=2, pp=4), 4, [False, True, False]),
        (Topology(tp=4, pp=4), 8, [False, True, False]),
        (Topology(tp=2, pp=2, dp=4), 8, [True]),  # a stage's replicas fill a node
        (Topology(tp=1, pp=2, dp=3), 4, [True]),  # replica 0 stays in its node, replicas 1 and 2 do not
        (Topology(pp=4), 1, [True, True, True]),
    ],
)
def test_boundaries_cross_nodes_as_ranks_lie_in_megatron_order(
    topology: Topology, ranks_per_node: int, crossing: list[bool]
) -> None:
    assert links(ranks_per_node).list_boundaries(topology) == tuple(SLOW if crosses else FAST for crosses in crossing)


def test_stages_of_one_rank_send_nothing_and_a_v_turns_back_over_the_same_links() -> None:
    topology = Topology(pp=4, tp=2, placement=(0, 1, 2, 3, 3, 2, 1, 0))
    assert links(4).list_boundaries(topology) == (FAST, SLOW, FAST, None, FAST, SLOW, FAST)


def test_analytic_transfers_take_the_link_of_their_boundary() -> None:
    topology = Topology(tp=2, pp=4, placement=(0, 1, 2, 3, 3, 2, 1, 0))
    model = AnalyticCosts(SHAPE, topology, links=links(4))
    costs = model.evaluate([MicroBatch((SampleLength(0, 100),))])
    sent = 2 * 64 * 100
    fast, slow = (1_000 + math.ceil(sent / 300), 10_000 + math.ceil(sent / 25))
    assert costs.transfer_bytes[:, 0].tolist() == [sent] * 7
    assert costs.transfer_ns[:, 0].tolist() == [fast, slow, fast, 0, fast, slow, fast]


def test_without_links_every_boundary_is_alike() -> None:
    alone = AnalyticCosts(SHAPE, Topology(tp=2, pp=4), latency_ns=5, bandwidth_bytes_per_s=3e9)
    assert alone.evaluate([MicroBatch((SampleLength(0, 100),))]).transfer_ns[:, 0].tolist() == [5 + 4267] * 3


def test_json_round_trip_keeps_links_and_they_change_the_fingerprint() -> None:
    model = AnalyticCosts(SHAPE, Topology(pp=2), links=links(4))
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(model))))
    assert again == model
    others = [AnalyticCosts(SHAPE, Topology(pp=2), links=other) for other in (None, links(8))]
    assert len({model.fingerprint(), *(other.fingerprint() for other in others)}) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1, 1e9), "latency_ns of a link is -1"),
        (lambda: Link(0, 0.0), "bytes_per_s of a link is 0: give 1"),
        (lambda: Link(0, math.nan), "bytes_per_s of a link is nan"),
        (lambda: links(0), "ranks_per_node is 0"),
    ],
)
def test_links_that_cannot_be_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
