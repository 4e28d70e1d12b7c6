"""States of a rank against published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ZERO_STAGES, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, RECIPES, count_parameters, state_bytes
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

LLAMA_70B = 68_976_648_192
SMALL = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=256,
    gated_mlp=False,
    vocab_size=512,
    max_seq_len=128,
    tied_embeddings=True,
)


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 1103.6), (1, 310.4), (2, 178.2), (3, 46.0)])
def test_llama_70b_on_24_ranks_holds_what_each_zero_stage_leaves(zero_stage: int, gigabytes: float) -> None:
    """16 bytes a parameter; what is divided is divided by 24 (Rajbhandari et al. 2020, fig. 1)."""
    total = state_bytes(LLAMA_70B, "mixed", zero_stage=zero_stage, dp=24).total[0]
    assert round(total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_example_of_7_5_billion_parameters_on_64_ranks(zero_stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, fig. 1 (16.6 is that of the figure; exactly, 16.64)."""
    total = state_bytes(7_500_000_000, "mixed", zero_stage=zero_stage, dp=64).total[0]
    assert round(total / 1e9, 1) == gigabytes


def test_megatron_keeps_18_bytes_a_parameter_or_6_and_12_over_dp() -> None:
    assert state_bytes(1000).total[0] == 18_000
    parts = state_bytes(1000, zero_stage=1, dp=8)
    assert (parts.weights[0], parts.gradients[0], parts.optimizer[0]) == (2000, 4000, 1500)


def test_fp32_adam_keeps_16_bytes_without_a_master_copy() -> None:
    parts = state_bytes(1000, "fp32")
    assert (parts.weights[0], parts.gradients[0], parts.optimizer[0]) == (4000, 4000, 8000)


@pytest.mark.parametrize(
    ("parameters", "zero_stage", "dp", "gibibytes"), [(2_851_000_000, 2, 8, 15.93), (60_506_624, 3, 1, 1.01)]
)
def test_deepspeed_estimates_are_reproduced(parameters: int, zero_stage: int, dp: int, gibibytes: float) -> None:
    """What its estimators print without offloading: T5-3B on 8 ranks (4 + 16 / dp), T5-small on one (18 / dp), without
    the gathered layer."""
    parts = state_bytes(parameters, "deepspeed", zero_stage=zero_stage, dp=dp)
    assert round(parts.total[0] / 2**30, 2) == gibibytes


@pytest.mark.parametrize("dp", [1, 8])
def test_deepspeed_estimates_with_offload_are_reproduced(dp: int) -> None:
    """Its formulas of a device's bytes: 2 per parameter at stage 2; at stage 3 2 / dp of weights unless offloaded."""
    count = 60_506_624

    def total(zero_stage: int, offload: Any) -> int:
        options: Any = {"zero_stage": zero_stage, "dp": dp, "offload": offload}
        return int(state_bytes(count, "deepspeed", **options).total[0])

    assert total(2, "optimizer") == 2 * count
    assert total(3, "optimizer") == 2 * count // dp
    assert total(3, "all") == 0
    assert total(3, "weights") == 16 * count // dp
    assert total(1, "optimizer") == 4 * count  # gradients stay until a step's last backward


def test_frozen_weights_have_neither_gradients_nor_states_and_stage_3_divides_them() -> None:
    for zero_stage, weights in ((2, 2200), (3, 275)):
        parts = state_bytes(100, "mixed", zero_stage=zero_stage, dp=8, frozen_parameters=1000)
        assert (parts.weights[0], parts.gradients[0], parts.optimizer[0]) == (weights, 25, 150)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_zero_stage_holds_more_than_the_one_before_and_shares_round_up(recipe: Any) -> None:
    totals = [int(state_bytes(1001, recipe, zero_stage=stage, dp=7).total[0]) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 1001 * sum(BYTES_PER_PARAMETER[recipe])
    shares = state_bytes(1001, recipe, zero_stage=3, dp=7)
    for part, width in zip((shares.weights, shares.optimizer), BYTES_PER_PARAMETER[recipe][::2], strict=True):
        assert part[0] == -(-1001 * width // 7)


def test_one_replica_divides_nothing() -> None:
    assert {int(state_bytes(1001, "mixed", zero_stage=stage, dp=1).total[0]) for stage in range(4)} == {16 * 1001}


def test_states_of_several_stages_are_those_of_each() -> None:
    together = state_bytes(np.array([5, 70, 900]), zero_stage=2, dp=4).total
    assert together.tolist() == [int(state_bytes(n, zero_stage=2, dp=4).total[0]) for n in (5, 70, 900)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "adagrad"}, "'adagrad' is not known: give one of megatron"),
        ({"zero_stage": 4}, "ZeRO stage 4"),
        ({"dp": 0}, "dp 0: give at least 1"),
        ({"offload": "disk"}, "offload is 'disk': give one of none, optimizer, weights, all"),
        ({"offload": "weights", "zero_stage": 2}, "'weights' moves weights, which zero_stage 2 does not divide"),
    ],
)
def test_states_that_cannot_be_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        state_bytes(10, **settings)


def test_the_analytic_model_separates_weights_gradients_and_optimizer() -> None:
    model = AnalyticCosts(SMALL, Topology(pp=2, dp=4), zero_stage=1)
    parts = model.states.device
    assert (parts.gradients == 2 * parts.weights).all()
    assert (parts.weights + parts.gradients + parts.optimizer).tolist() == model.states.device.total.tolist()
    assert parts.optimizer.tolist() == [-(-6 * int(n) // 4) for n in parts.weights]


def test_the_distributed_optimizer_is_zero_stage_1() -> None:
    topology = Topology(dp=4)
    flag = AnalyticCosts(SMALL, topology, distributed_optimizer=True).states.device.total
    assert flag.tolist() == AnalyticCosts(SMALL, topology, zero_stage=1).states.device.total.tolist()


def test_zero_holds_one_layer_whole_while_it_runs_its_gradients_at_stage_2_its_weights_too_at_stage_3() -> None:
    one = [MicroBatch((SampleLength(0, 16),))]
    working = [
        AnalyticCosts(SMALL, Topology(dp=4), zero_stage=z).evaluate(one).working_bytes[0, 0] for z in ZERO_STAGES
    ]
    five, four = (count_parameters(a, Topology()).total[0] for a in (replace(SMALL, num_layers=5), SMALL))
    layer = five - four
    assert [int(w - working[0]) for w in working] == [0, 0, 4 * layer, 6 * layer]


def test_the_analytic_model_takes_every_recipe_for_16_bit_weights() -> None:
    """Rajbhandari et al. 2020, sec. 3.1: 2 + 2 + 12 bytes where gradients stay 16-bit, beside Megatron's 2 + 4 + 12."""
    for recipe in ("megatron", "mixed", "deepspeed"):
        model = AnalyticCosts(SMALL, Topology(pp=2, dp=4), state_recipe=recipe)
        count = count_parameters(SMALL, Topology(pp=2)).total
        parts = model.states.device
        for part, width in zip(
            (parts.weights, parts.gradients, parts.optimizer), BYTES_PER_PARAMETER[recipe], strict=True
        ):
            assert part.tolist() == (width * count).tolist()
    one = [MicroBatch((SampleLength(0, 16),))]
    five, four = (count_parameters(a, Topology()).total[0] for a in (replace(SMALL, num_layers=5), SMALL))
    layer = five - four
    # Its 16-bit gradients; as DeepSpeed estimates for stage 3, those and its 16-bit weights.
    for recipe, zero_stage, width in (("mixed", 2, 2), ("deepspeed", 3, 4)):
        sharded = AnalyticCosts(SMALL, Topology(dp=4), state_recipe=recipe, zero_stage=zero_stage)
        whole = replace(sharded, zero_stage=0).evaluate(one).working_bytes
        assert int((sharded.evaluate(one).working_bytes - whole)[0, 0]) == width * layer


def test_four_byte_weights_are_fp32_whatever_the_recipe_and_fp32_is_no_recipe_of_16_bit_ones() -> None:
    wide = AnalyticCosts(SMALL, Topology(), param_bytes=4, state_recipe="mixed")
    assert wide.states.device.total.tolist() == [16 * count_parameters(SMALL, Topology()).total[0]]
    with pytest.raises(ConfigError, match=r"state_recipe is 'fp32': give megatron, mixed or deepspeed.*param_bytes 4"):
        AnalyticCosts(SMALL, Topology(), state_recipe="fp32")
