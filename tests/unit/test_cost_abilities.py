"""Cost models of one's own: three members plan, and get every ability at the door."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import AdjustedCosts, FittedTimes, TimeCorrection
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.floor import Floor
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import MicroBatchCosts, UserCosts, as_cost_model
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor
from dynapipe_ext.schedules.planner import Planner

TOKENS = TokenCosts(2, ns_per_token_squared=2.0, overhead_ns=5_000)
GPT = Architecture.gpt(
    num_layers=4, hidden_size=64, num_heads=4, num_query_groups=2, ffn_hidden_size=96, gated_mlp=True, vocab_size=512,
    max_seq_len=128, tied_embeddings=True, position="rope", norm="rmsnorm", bias=False,
)  # fmt: skip


@dataclass(frozen=True)
class Own:
    """The least that a cost model of one's own is."""

    num_stages: int = 2
    longest: int = 1 << 30

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        if any(m.encoder_len > self.longest for m in micro_batches):
            raise PlanError("too long")
        return TOKENS.evaluate(micro_batches)

    def fingerprint(self) -> str:
        return "own"


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_three_members_plan_as_the_same_prices_with_every_ability(layout: Any) -> None:
    lengths = [12, 7, 150, 41, 9, 90]
    own, full = (
        Planner(Topology(pp=2), costs, 10**6, 0, layout=layout, effort=50).plan(lengths) for costs in (Own(), TOKENS)
    )
    assert own.batch == full.batch
    assert own.schedules == full.schedules
    assert own.makespan_s == full.makespan_s


def test_shapes_of_a_model_of_ones_own_are_priced_by_itself_where_it_does() -> None:
    class WithShapes(Own):
        def evaluate_shapes(self, rows: Any, encoder_len: Any, decoder_len: Any = 0, recompute: Any = "none") -> Any:
            priced.append(len(rows))
            return TOKENS.evaluate_shapes(rows, encoder_len, decoder_len, recompute)

    priced: list[int] = []
    as_cost_model(WithShapes()).evaluate_shapes([1, 2, 1], [3, 4, 5])
    assert priced == [3]


def test_shapes_that_a_model_of_ones_own_prices_wrongly_are_refused_by_name() -> None:
    class OneTooFew(Own):
        def evaluate_shapes(self, rows: Any, encoder_len: Any, decoder_len: Any = 0, recompute: Any = "none") -> Any:
            return TOKENS.evaluate_shapes(rows[1:], encoder_len[1:], 0, recompute)

    with pytest.raises(ConfigError, match=r"forward_ns of OneTooFew .* of shape \(2, 3\): correct its evaluate_shapes"):
        as_cost_model(OneTooFew()).evaluate_shapes([1, 2, 1], [3, 4, 5])


def test_what_a_model_does_not_offer_has_an_answer_that_holds_for_any() -> None:
    own = as_cost_model(Own())
    assert as_cost_model(own) is own
    assert own.with_topology(None) == (own, Topology(pp=2))
    assert own.with_topology(Topology(tp=4, pp=2)) == (own, Topology(tp=4, pp=2))
    assert own.facts.has_decoder is None
    assert own.change_analytic(lambda counted: counted) is own.with_exact_sums(2) is own
    assert find_batch_floor(own, sample_lengths([3]), (0, 1), split=False, packed=False) is None
    with pytest.raises(ConfigError, match="Own has no to_json, by which planner processes"):
        cost_model_to_json(own)


def test_costs_that_were_fitted_recount_what_they_were_fitted_to() -> None:
    counted = AnalyticCosts(GPT, Topology(pp=2))
    fitted = AdjustedCosts(counted, fitted=FittedTimes(({"F": TimeCorrection(2.0)}, {})))
    again = fitted.change_analytic(lambda costs: replace(costs, split_backward=True))
    assert again == replace(fitted, prices=replace(counted, split_backward=True))


def test_shapes_are_priced_one_by_one_where_a_model_prices_micro_batches_alone() -> None:
    rows, lengths = [1, 3, 2], [40, 8, 64]
    given, wanted = (as_cost_model(costs).evaluate_shapes(rows, lengths, 0, "full") for costs in (Own(), TOKENS))
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "transfer_ns", "static_bytes"):
        assert getattr(given, name).tolist() == getattr(wanted, name).tolist()
    refused = as_cost_model(Own(longest=50)).evaluate_shapes(rows, lengths, 0, "full")
    assert (refused.forward_ns >= INFEASIBLE).tolist() == [[False, False, True]] * 2


def test_a_model_of_ones_own_may_promise_a_floor_and_is_bounded_by_it() -> None:
    class Promising(UserCosts):
        def get_floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: Any = None) -> Floor | None:
            return TOKENS.get_floor(stage_ranks, split=split)

    promising = Promising(Own())
    own, full = (
        find_batch_floor(c, sample_lengths([30, 7]), (0, 1), split=False, packed=True) for c in (promising, TOKENS)
    )
    assert own is not None
    assert full is not None
    assert own.bound_ns(2) == full.bound_ns(2) > 0


def test_costs_in_the_form_of_earlier_versions_are_read_as_they_were() -> None:
    model = AnalyticCosts(replace(GPT, num_experts=4, top_k=2), Topology(pp=2), capacity_factor=1.25)
    raw = json.loads(json.dumps(cost_model_to_json(model)))
    del raw["architecture"], raw["capacity_factor"]
    sizes = {
        **{"num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96},
        **{"gated_mlp": True, "vocab_size": 512, "max_seq_len": 128, "tied_embeddings": True, "position": "rope"},
        **{"norm": "rmsnorm", "bias": False, "num_experts": 4, "top_k": 2, "capacity_factor": 1.25, "head_dim": 0},
        **{"qkv_bias": False, "qk_norm": False},
    }
    assert cost_model_from_json({**raw, "shape": sizes}) == model


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gpt2"])
def test_a_published_model_survives_json_and_a_damaged_one_is_refused(name: str) -> None:
    a = preset(name)
    raw = json.loads(json.dumps(asdict(a)))
    assert Architecture.from_json(raw) == a
    for damage in ({"position": "polar"}, {"no_such": 1}, {"rope_scaling": {"kind": "linear", "factr": 2.0}}):
        with pytest.raises(ConfigError):
            Architecture.from_json({**raw, **damage})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward_ns": [[1, 1]]}, "forward_ns of Wrong is .* but must be an array of integers"),
        ({"transfer_ns": np.zeros((2, 1), np.int64)}, r"transfer_ns of Wrong is .* of shape \(1, 1\)"),
        ({"stored_bytes": np.full((2, 1), -5)}, "stored_bytes of Wrong is .* from 0 on"),
        ({"backward_ns": np.zeros((2, 1))}, "backward_ns of Wrong is .* array of integers"),
    ],
)
def test_prices_of_ones_own_that_are_no_prices_are_refused(change: dict[str, Any], says: str) -> None:
    class Wrong(Own):
        def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
            return replace(super().evaluate(micro_batches), **change)

    with pytest.raises(ConfigError, match=says):
        as_cost_model(Wrong()).evaluate([MicroBatch(tuple(sample_lengths([5])))])
