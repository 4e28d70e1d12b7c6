"""The planning call: what it returns whatever it is given, what it refuses, and what losses come to by its shares."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext import AnalyticCosts, TokenCosts, Topology, plan_micro_batches
from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.partitioning.packing import RowPackings
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.step_plan import StepPlan
from tests.support.limits import LIMIT_S

QWEN = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
ROLLOUTS = np.clip(np.random.default_rng(0).lognormal(5.0, 1.0, 60), 1, 900).astype(np.int64)


def costs_of(pp: int) -> TokenCosts:
    return TokenCosts(pp, bytes_per_token=100, static_bytes=900, ns_per_token_squared=2)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), max_size=30),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    cap=st.integers(16, 300),
    limit=st.integers(5_000, 80_000),
    layout=st.sampled_from(["packed", "padded"]),
    counts=st.sampled_from(["free", "equal"]),
    multiple=st.sampled_from([1, 8]),
)
def test_caps_and_bytes_hold_and_every_sample_runs_once_or_the_call_refuses_by_name(
    lengths: list[int], pp: int, dp: int, cap: int, limit: int, layout: str, counts: str, multiple: int
) -> None:
    rules: dict[str, Any] = {"layout": layout, "replica_counts": counts, "pad_multiple": multiple}
    try:
        planned = plan_micro_batches(
            lengths, Topology(pp=pp, dp=dp), costs_of(pp), max_tokens=cap, memory_limit_bytes=limit, **rules
        )
    except PlanError:
        too_long = max(lengths, default=0) > cap // multiple * multiple
        too_few = len(lengths) < dp and counts == "equal"
        too_large = max(lengths, default=0) * 100 + 100 * multiple > (limit - 900) // pp  # of what 1F1B holds of one
        assert not lengths or too_long or too_few or too_large or counts == "equal"
        return
    assert Counter(i for partition in planned.partitions for i in partition) == Counter(range(len(lengths)))
    assert max(m.padded_tokens for m in planned.plan.batch.micro_batches) <= cap
    assert planned.plan.peak_bytes <= limit
    assert len(set(planned.num_micro_batches)) == 1 or counts == "free"
    for d, (partition, groups) in enumerate(zip(planned.partitions, planned.local_micro_batches, strict=True)):
        assert [place for group in groups for place in group] == list(range(len(partition)))
        assert tuple(tuple(partition[place] for place in group) for group in groups) == planned.micro_batches[d]
        validate(planned.plan.schedules[d], len(groups))


@pytest.mark.parametrize(
    ("lengths", "rules", "error", "says"),
    [
        ([], {}, PlanError, "0 samples but a plan needs at least 1: leave the step out"),
        (
            [5, 900],
            {"max_tokens": 512},
            PlanError,
            "sample 1 has 900 positions .* 512 .*: raise max_tokens or truncate",
        ),
        ([5, 900], {"max_tokens": 512, "layout": "padded"}, PlanError, "sample 1 .*512 tokens.*raise it"),
        ([5], {"replica_counts": "equal"}, PlanError, "1 samples cannot feed 2 replicas"),
        ([5, 7], {"memory_limit_bytes": 900}, PlanError, "limit"),
        ([5, 0], {}, DataError, "sample 1 has lengths"),
        ([5.5], {}, DataError, "must be integers"),
        ([1 << 31], {"max_tokens": 1 << 31}, PlanError, "2147483648 positions takes longer.*lower max_tokens"),
        ([1 << 31] * 3 + [1], {"max_tokens": 1 << 32}, PlanError, "takes longer.*or truncate"),
        ([5], {"max_tokens": 0}, ConfigError, "max_tokens is 0 and memory_limit_bytes is None.*give the positions"),
        ([5], {"max_tokens": -1}, ConfigError, "max_tokens is -1"),
        ([5], {"max_tokens": 8, "layot": "packed"}, ConfigError, "layot is not a rule of plans; did you mean 'layout'"),
        ([5], {"max_tokens": 8, "topology": None}, ConfigError, "topology is None but must be a Topology"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_value_bound_and_next_move(
    lengths: Any, rules: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan_micro_batches(
            lengths, costs=costs_of(2), **{"topology": Topology(pp=2, dp=2), "max_tokens": 1000, **rules}
        )


@pytest.mark.parametrize("counts", ["free", "equal"])
def test_graded_rows_fill_and_drain_a_pipeline_sooner_than_even_ones(
    counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full rows with ever smaller ones at a step's ends: a shorter step of the same samples."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5.0, 0.8, 400), 8, 600).astype(np.int64)
    options: dict[str, Any] = {"max_tokens": 1000, "replica_counts": counts}

    def planned() -> StepPlan:
        return plan_micro_batches(lengths, Topology(pp=4, dp=2), costs_of(4), **options).plan

    graded = planned()
    monkeypatch.setattr(RowPackings, "with_grades", lambda *_: None)
    even = planned()
    assert graded.makespan_ns < 0.99 * even.makespan_ns
    for replica in graded.batch.replicas:
        tokens = [m.encoder_len for m in replica.micro_batches]
        assert max(tokens[0], tokens[-1]) < 0.3 * max(tokens) < np.median(tokens)


def test_one_sample_leaves_other_replicas_without_micro_batches() -> None:
    planned = plan_micro_batches([5], Topology(dp=3), costs_of(1), max_tokens=8)
    assert planned.partitions == ((0,), (), ())
    assert planned.shares() == ((1.0,), (), ())


def test_numbers_of_numpys_are_numbers() -> None:
    lengths, counted = ROLLOUTS.astype(np.uint16), {"max_tokens": 1000, "memory_limit_bytes": 10**9, "pad_multiple": 8}
    taken = {"max_tokens": np.int64(1000), "memory_limit_bytes": np.float32(1e9), "pad_multiple": np.int32(8)}
    plain, by_numpy = (
        plan_micro_batches(lengths, Topology(pp=2, dp=2), costs_of(2), **rules) for rules in (counted, taken)
    )
    assert plain.plan == by_numpy.plan


PLANS: list[dict[str, Any]] = [
    {"max_tokens": 1000},
    {"max_tokens": 2000, "replica_counts": "equal"},
    {"max_tokens": 4000, "layout": "padded"},
    {"memory_limit_bytes": 10**9, "pieces": 128},
]


@pytest.mark.parametrize("rules", PLANS)
@pytest.mark.parametrize("dp", [1, 3])
def test_losses_by_shares_are_those_of_the_whole_batch_whatever_the_plan(rules: dict[str, Any], dp: int) -> None:
    """A mean over tokens, over sequences, and over the tokens of answers that a filter left (DAPO's)."""
    generator = np.random.default_rng(1)
    losses = [generator.normal(size=length) for length in ROLLOUTS]
    kept = (ROLLOUTS < 700) * ROLLOUTS // 2  # the last half of each is its answer; the longest are left out
    planned = plan_micro_batches(ROLLOUTS, Topology(pp=2, dp=dp), costs_of(2), **rules)

    def loss(own_mean: Any, counts: Any) -> float:
        groups = zip(planned.plan.batch.replicas, planned.shares(counts), strict=True)
        pairs = [
            (m, share) for replica, shares in groups for m, share in zip(replica.micro_batches, shares, strict=True)
        ]
        return sum(share * own_mean(m.samples) for m, share in pairs if share)

    def over_tokens(samples: Any) -> float:
        return float(np.concatenate([losses[s.index][s.start : s.start + s.encoder] for s in samples]).mean())

    def over_sequences(samples: Any) -> float:
        return float(np.mean([losses[s.index].mean() for s in samples]))

    def over_kept(samples: Any) -> float:
        return float(np.concatenate([losses[s.index][-kept[s.index] :] for s in samples if kept[s.index]]).mean())

    assert loss(over_tokens, None) == pytest.approx(np.concatenate(losses).mean(), rel=1e-12)
    if "pieces" in rules:
        with pytest.raises(ConfigError, match="pieces off"):
            planned.shares(kept)
        return
    assert loss(over_sequences, [1] * len(ROLLOUTS)) == pytest.approx(np.mean([x.mean() for x in losses]), rel=1e-12)
    of_kept = np.concatenate([x[-n:] for x, n in zip(losses, kept, strict=True) if n]).mean()
    assert loss(over_kept, kept) == pytest.approx(of_kept, rel=1e-12)
    for wrong, says in (([1], "1 counts for 60 samples"), ([-1] * 60, "count of sample 0 is -1"), ([0] * 60, "are 0")):
        with pytest.raises(ConfigError, match=says):
            planned.shares(wrong)
    assert planned.shares(np.full(len(ROLLOUTS), 200, np.uint8)) == planned.shares([1] * len(ROLLOUTS))
    for wrong, says in ((np.full(len(ROLLOUTS), np.inf), "count of sample 0 is inf"), ({}, "counts are {}: give a")):
        with pytest.raises(ConfigError, match=says):
            planned.shares(wrong)


def test_forwards_run_the_micro_batches_of_the_step_on_the_same_replicas() -> None:
    planned = plan_micro_batches(ROLLOUTS, Topology(pp=4, dp=2), costs_of(4), max_tokens=1000, recompute="full")
    forwards = planned.forwards()
    assert forwards.forward_only
    assert forwards.makespan_ns < planned.plan.makespan_ns
    for replica, groups in zip(forwards.batch.replicas, planned.micro_batches, strict=True):
        assert sorted(tuple(s.index for s in m.samples) for m in replica.micro_batches) == sorted(groups)
        assert {m.recompute for m in replica.micro_batches} == {"none"}


def test_forwards_of_what_computes_otherwise_in_training_are_refused() -> None:
    llama = AnalyticCosts(preset("llama-2-7b"), Topology(pp=4), head_slice=1024)
    for rules, says in (({"pieces": 256}, "piece of a long sample"), ({"recompute": "head"}, "head in slices")):
        planned = plan_micro_batches([2000, 90], Topology(pp=4), llama, memory_limit_bytes=1e12, **rules)
        with pytest.raises(PlanError, match=says):
            planned.forwards()


def test_a_model_s_description_prices_it_and_the_answer_is_a_function_of_the_arguments() -> None:
    by_config, again = (plan_micro_batches(ROLLOUTS, Topology(tp=2, pp=2), QWEN, max_tokens=2000) for _ in range(2))
    assert by_config == again
    samples = [SampleLength(7 + i, int(n), target=3) for i, n in enumerate(ROLLOUTS)]
    named = plan_micro_batches(samples, Topology(tp=2, pp=2), by_config.planner.costs, max_tokens=2000)
    assert named.partitions == tuple(tuple(7 + i for i in partition) for partition in by_config.partitions)
    assert sum(sum(shares) for shares in named.shares([1] * 60)) == pytest.approx(1)


def test_planning_needs_no_torch() -> None:
    script = (
        "import sys; from dynapipe_ext import TokenCosts, Topology, plan_micro_batches as plan;"
        "p = plan([5, 9, 2], Topology(pp=2), TokenCosts(2), max_tokens=16); p.forwards(); p.shares();"
        f"plan([5, 9], Topology(), {QWEN}, max_tokens=16); print(p.partitions, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stderr == ""
    assert done.stdout.endswith("False\n")
