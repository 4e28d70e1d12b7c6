"""A vocabulary over the ranks of a pipeline: stages that hold a part of it, and what they send."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, PlacementName, TensorSpec, Topology, Vocabulary, place_stages
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary, split_vocabulary
from dynapipe_ext.costs.codec import from_json, to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.plan_rules import check_placed

SPREAD: tuple[Vocabulary, ...] = ("head", "both")


def placed(name: PlacementName, pp: int) -> Topology:
    return Topology(pp=pp, placement=() if name == "linear" else place_stages(name, pp))


@pytest.mark.parametrize("vocabulary", SPREAD)
@pytest.mark.parametrize("name", ["linear", "interleaved", "v"])
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_every_rank_holds_a_part_and_layers_stay_where_they_were(
    vocabulary: Vocabulary, name: PlacementName, pp: int
) -> None:
    """Chains begin and end in stages of layers, with each part on the rank of its number; nothing else moves."""
    layers = placed(name, pp).with_layers(19)
    spread = split_vocabulary(layers, vocabulary)
    parts = [spread.vocabulary_part(stage) for stage in spread.head_stages]
    assert sorted(parts) == list(range(pp))
    assert parts == [spread.stage_ranks[stage] for stage in spread.head_stages]
    chain = spread.stage_ranks[spread.head_stages.start :]
    assert all(abs(one - other) == 1 for one, other in pairwise(chain))
    assert spread.head_stages[0] == spread.layer_stages[-1]
    assert spread.embedding_stages[-1] == spread.layer_stages[0]
    assert len(spread.embedding_stages) == (pp if vocabulary == "both" else 1)
    assert [spread.layers_per_stage[stage] for stage in spread.layer_stages] == list(layers.layers_per_stage)
    assert sum(spread.layers_per_stage) == 19
    assert gather_vocabulary(spread) == layers
    assert split_vocabulary(placed(name, pp), vocabulary).with_layers(19) == spread
    assert spread.placement_name.startswith(layers.placement_name + ", ")


def test_a_whole_vocabulary_is_a_chain_of_one_stage_at_either_end() -> None:
    topology = Topology(pp=3)
    assert (topology.embedding_stages, topology.head_stages) == (range(1), range(2, 3))
    assert topology.layer_stages == range(3)
    assert topology.vocabulary_part(2) == topology.vocabulary_part(0) == 0
    assert split_vocabulary(topology, "whole") == topology
    head = split_vocabulary(topology, "head")
    assert head.vocabulary_part(0) == 0  # the embedding is whole there
    with pytest.raises(ConfigError, match="stage 1 of 5 holds no part of the vocabulary"):
        head.vocabulary_part(1)


def test_topologies_say_their_vocabulary_in_json_where_it_is_spread() -> None:
    whole, spread = Topology(pp=2), split_vocabulary(Topology(pp=2, dp=2, width=2), "both").with_layers(4)
    assert "vocabulary" not in to_json(whole)
    assert to_json(spread)["vocabulary"] == "both"
    for topology in (whole, spread):
        assert from_json(Topology, to_json(topology)) == topology


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"pp": 2, "vocabulary": "tail"}, "vocabulary is 'tail' but must be one of whole, head, both"),
        ({"pp": 1, "vocabulary": "head"}, "is split over pipeline ranks, but pp is 1"),
        ({"pp": 2, "vocabulary": "both"}, "needs a chain of a stage per rank"),
        ({"pp": 2, "vocabulary": "head", "placement": (1, 0, 0)}, "needs a chain of a stage per rank"),
        (
            {"pp": 2, "vocabulary": "head", "placement": (0, 1, 0), "layers_per_stage": (2, 1, 1)},
            "has layers only on stages 0..1",
        ),
    ],
)
def test_chains_of_another_form_are_refused(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Topology(**fields)
    assert refusal in str(refused.value)


def test_a_vocabulary_is_not_spread_twice() -> None:
    with pytest.raises(ConfigError, match="is already split"):
        split_vocabulary(split_vocabulary(Topology(pp=2), "head"), "both")


def test_published_schedules_are_for_stages_of_layers_alone() -> None:
    for schedule, name in ("1f1b", "linear"), ("interleaved-1f1b", "interleaved"), ("zb-v", "v"):
        topology = placed(name, 4)  # type: ignore[arg-type]
        check_placed(schedule, topology)  # type: ignore[arg-type]
        spread = split_vocabulary(topology, "head")
        check_placed("adaptive", spread)
        with pytest.raises(ConfigError, match="head spread"):
            check_placed(schedule, spread)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_stages_of_the_head_send_two_numbers_of_every_position(order: Any) -> None:
    """Sequence parallel ranks divide hidden states, but not these; ranks of a block divide both."""
    form = ActivationFormat(8, "bfloat16", order=order, sequence_shards=2, first_head_stage=3)
    micro_batch = MicroBatch(sample_lengths([32, 30]), "padded", pad_multiple=8)
    for width, seq_len, positions in (1, 16, 32), (4, 4, 8):
        joined = form.at_width(width)
        hidden = TensorSpec((seq_len, 2, 8) if order == "sbh" else (2, seq_len, 8), "bfloat16")
        number = TensorSpec((positions, 2) if order == "sbh" else (2, positions), "float32")
        assert joined.specs(micro_batch, 2) == (hidden,)
        assert joined.specs(micro_batch, 3) == joined.specs(micro_batch, 5) == (hidden, number, number)
    assert replace(form, dtype="float64").specs(micro_batch, 3)[1].dtype == "float64"


def test_formats_without_a_spread_head_are_written_as_before() -> None:
    plain, spread = ActivationFormat(8), ActivationFormat(8, first_head_stage=3, position_shards=2)
    assert sorted(to_json(plain)) == ["dtype", "first_decoder_stage", "hidden_size", "order", "sequence_shards"]
    for form in (plain, spread):
        assert from_json(ActivationFormat, to_json(form)) == form
    assert (plain.changing_stages, spread.changing_stages) == ((), (3,))


def test_a_planner_of_a_spread_vocabulary_is_written_and_read() -> None:

    topology = split_vocabulary(Topology(pp=2, dp=2), "head")
    costs = TokenCosts(num_stages=3, ns_per_token=10, ns_per_token_squared=1, bytes_per_token=4)
    planner = Planner(topology, costs, 1e9, format=ActivationFormat(8, first_head_stage=1))
    assert Planner.from_json(planner.to_json()) == planner
