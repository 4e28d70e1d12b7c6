"""The planner's edges: batches shorter than the replicas, equal counts under every rule, and what a job refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import SampleLength, as_length_array, check_cover, round_up, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.launch.job.configured import check_fits, make_planner, topology_of, unfit_rivals, variants
from dynapipe_ext.partitioning.padded import MicroBatchLimits, price_cuts, sort_samples
from dynapipe_ext.partitioning.rules import (
    cut_fixed_rows,
    pack_documents,
    pad_to_batch_max,
    split_as_dynapipe,
)
from dynapipe_ext.schedules import planner as planner_module
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals
from dynapipe_ext.schedules.search import optimizer
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.plan_rules import SplitPolicy
from dynapipe_ext.settings.train_config import TrainConfig

COSTS = TokenCosts(2, ns_per_token_squared=1000, overhead_ns=0)
RULES: tuple[SplitPolicy, ...] = get_args(SplitPolicy)
LAYOUTS = ("padded", "packed")


def planned(lengths: Sequence[int], **options: Any) -> StepPlan:
    settings = {"layout": "padded", "effort": 1, **options}
    return Planner(Topology(pp=2, dp=settings.pop("dp", 2)), COSTS, 1e9, **settings).plan(lengths)


def counts(plan: StepPlan) -> list[int]:
    return [len(replica.micro_batches) for replica in plan.batch.replicas]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[100], [100, 7, 9]])
def test_a_batch_of_fewer_samples_than_replicas_leaves_replicas_empty(
    rule: SplitPolicy, layout: str, lengths: list[int]
) -> None:
    plan = planned(lengths, split_policy=rule, layout=layout, dp=4)
    check_cover(plan.batch, sample_lengths(lengths))
    assert counts(plan)[-1] == 0
    assert len(plan.predictions) == 4


def test_a_plan_that_leaves_out_a_sample_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search did wrong."""
    best = planner_module.plan_fastest
    monkeypatch.setattr(
        planner_module, "plan_fastest", lambda problems, samples, step: best(problems, samples[1:], step)
    )
    with pytest.raises(PlanError, match=r"leaves out samples \[0\] \(1 in all\)"):
        planned([9, 4, 7])


def test_starts_are_tried_in_threads_where_there_are_cores_with_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [SampleLength(i, 100 + 37 * i % 90) for i in range(40)]
    planner = Planner(Topology(pp=2, dp=2), COSTS, 1e9, layout="packed", effort=400)
    plans, pools = [], []
    made = optimizer.ThreadPoolExecutor

    def counted(workers: int) -> Any:
        pools.append(workers)
        return made(workers)

    monkeypatch.setattr(optimizer, "ThreadPoolExecutor", counted)
    for cores in (1, 2, 8):
        monkeypatch.setattr(optimizer.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        plans.append(planner.plan(samples))
    assert len(pools) == 2
    assert min(pools) == 2 < max(pools)
    assert all((plan.batch, plan.schedules) == (plans[0].batch, plans[0].schedules) for plan in plans)


def test_a_batch_of_fewer_fixed_rows_than_replicas_leaves_replicas_empty() -> None:
    assert counts(planned([10, 10, 10, 10], split_policy="fixed-rows", layout="packed", max_tokens=1024)) == [1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_equal_counts_refuse_a_batch_of_fewer_samples_than_replicas(rule: SplitPolicy, layout: str) -> None:
    with pytest.raises(PlanError, match=r"1 samples cannot feed 2 replicas of equal counts: .*drop_last.* enlarge"):
        planned([100], split_policy=rule, layout=layout, replica_counts="equal")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[500, 400, 300, 200, 100], [100, 100, 100], [10, 10, 10, 10]])
def test_equal_counts_hold_under_every_rule(rule: SplitPolicy, layout: str, lengths: list[int]) -> None:
    plan = planned(lengths, split_policy=rule, layout=layout, replica_counts="equal", max_tokens=1024)
    check_cover(plan.batch, sample_lengths(lengths))
    assert len(set(counts(plan))) == 1
    assert counts(plan)[0] > 0


def test_equal_counts_merge_down_only_where_samples_are_too_few_and_caps_allow_it() -> None:
    def cuts(lengths: list[int], caps: MicroBatchLimits) -> list[list[int]]:
        order = sort_samples(sample_lengths(lengths), "sorted")
        priced = price_cuts(order, COSTS, ("none",), caps, weight=2, equal_counts=True)
        firsts = priced.make_first_cuts(pp=2, dp=2, min_in_flight=1, equal_counts=True)
        return [[s.encoder for s in priced.make_micro_batch(cut).samples] for cut in firsts]

    assert cuts([500, 400, 300, 200, 100], MicroBatchLimits()) == [[100, 200], [300], [400], [500]]
    with pytest.raises(PlanError, match=r"no two of them fit into one .*max_tokens 500"):
        cuts([500] * 3, MicroBatchLimits(max_tokens=500))


def test_a_long_document_beside_short_ones_reaches_every_replica() -> None:
    """One row holds all three: it is cut where several documents are, not at the longest row."""
    assert counts(planned([1000, 10, 10], layout="packed", dp=3)) == [1, 1, 1]


def test_a_short_batch_keeps_the_cap_on_tokens() -> None:
    with pytest.raises(PlanError, match=r"sample 0 .*100"):
        planned([200], layout="padded", max_tokens=100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: pad_to_batch_max(s, dp=2, rows_per_micro_batch=1, equal_counts=True), "3 samples .* 4 micro-batch"),
        (lambda s: cut_fixed_rows(s, row_len=1, dp=2, equal_counts=True), "3 positions cannot fill 4 micro-batches"),
        (
            lambda s: pack_documents(
                s, lambda m: (np.ones(len(m), np.int64),) * 2, max_tokens=1, dp=2, equal_counts=True
            ),
            "3 samples do not spread over 4 or 2 rows of 1 positions",
        ),
        (lambda s: split_as_dynapipe(s, COSTS, ("none",), pp=2, dp=4, equal_counts=True), "3 micro-.* 4 replicas"),
    ],
)
def test_equal_counts_that_cannot_be_are_refused_with_the_numbers(call: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call(sample_lengths([1, 1, 1]))


def test_fixed_rows_of_equal_counts_are_filled_alike() -> None:
    replicas = cut_fixed_rows(sample_lengths([20, 5]), row_len=10, dp=2, equal_counts=True)
    assert [len(replica) for replica in replicas] == [2, 2]
    rows = [row for replica in replicas for row in replica]
    assert sorted(m.real_tokens for m in rows) == [6, 6, 6, 7]
    assert {m.encoder_len for m in rows} == {10}


LENGTH = st.one_of(st.integers(1, 9), st.integers(1, 400))
BATCH = st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=14)


@settings(derandomize=True, max_examples=150)
@given(
    BATCH,
    st.booleans(),
    st.sampled_from(RULES),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([0, 64, 1024]),
    st.sampled_from([80_000, 10**9]),
)
def test_a_plan_covers_its_batch_in_equal_counts_where_asked_or_is_refused(
    pairs: list[tuple[int, int]],
    decoder: bool,
    rule: SplitPolicy,
    layout: Any,
    equal: bool,
    dp: int,
    max_tokens: int,
    limit: int,
) -> None:
    samples = [SampleLength(i, e, d if decoder else 0, target=1) for i, (e, d) in enumerate(pairs)]
    options: Any = {"split_policy": rule, "layout": layout, "max_tokens": max_tokens, "effort": 1}
    options |= {"replica_counts": "equal"} if equal else {}
    planner = Planner(Topology(pp=2, dp=dp), COSTS, limit, **options)
    roomy = limit == 10**9 and not max_tokens and not (decoder and rule in ("batch-max", "fixed-rows"))
    try:
        plan = planner.plan(samples, step=3)
    except PlanError:
        assert not roomy or equal  # free counts always fit where there is room
        return
    check_cover(plan.batch, samples)
    assert len(counts(plan)) == dp
    if equal:
        assert len(set(counts(plan))) == 1
        assert counts(plan)[0] > 0
    if max_tokens and rule == "dynapipe-ext":
        for m in plan.batch.micro_batches:
            sides = (m.encoder_len, m.decoder_len)
            assert (m.padded_tokens if layout == "padded" else max(sides)) <= max_tokens


def config(**tables: Any) -> TrainConfig:
    return TrainConfig().with_values(**tables)


@pytest.mark.parametrize("equal", [False, True])
def test_every_way_that_compare_runs_plans_a_short_last_batch(equal: bool) -> None:
    """Three samples on two replicas divide only if rows are merged or spread; one sample leaves a replica empty."""
    settings = config(topology={"pp": 2, "dp": 2}, plan={"memory_limit_gb": 10.0})
    for variant in variants(settings, compare=True):
        planner = make_planner(variant.config, replace(COSTS, num_stages=topology_of(variant.config).num_stages))
        planner = replace(planner, replica_counts="equal" if equal else "free")
        for lengths in ([100, 90, 80], *([] if equal else [[100]])):
            plan = planner.plan(lengths)
            check_cover(plan.batch, sample_lengths(lengths))
            assert not equal or len(set(counts(plan))) == 1


def test_compare_runs_every_rival_that_the_layers_allow_each_on_its_own_placement() -> None:
    settings = config(topology={"pp": 2, "placement": "v", "layers_per_stage": [2, 0, 1, 1]})
    found = {one.name: (one.config.plan.schedule, topology_of(one.config)) for one in variants(settings, compare=True)}
    stages = [(0, 1, 1, 0), *[(0, 1)] * 3, (0, 1, 0, 1), (0, 1, 1, 0)]
    assert [topology.stage_ranks for _, topology in found.values()] == stages
    assert list(found)[-3:] == [rival.name for rival in list_rivals(2)]
    for name, schedule in (("packed interleaved 1F1B", "interleaved-1f1b"), ("packed ZB-V", "zb-v")):
        assert found[name][0] == schedule
    assert found["packed interleaved 1F1B"][1].layers_per_stage == (1, 1, 1, 1)
    assert found["packed ZB-V"][1].layers_per_stage == (2, 0, 1, 1)  # the job's own: it has the same placement
    assert not unfit_rivals(settings)
    three = config(topology={"pp": 2}, model={"num_layers": 3})
    assert [one.name for one in variants(three, compare=True)][-1] == "packed 1F1B"
    reason = "3 layers cannot fill 4 stages: lower pp or add layers"
    assert unfit_rivals(three) == {"packed interleaved 1F1B": reason, "packed ZB-V": reason}


@pytest.mark.parametrize(
    ("layout", "max_tokens", "message"),
    [
        ("packed", 100, r"sample 2 has 99 tokens, but a packed row has 96 positions \(max_tokens 100, .*at least 104"),
        ("padded", 103, r"sample 2 has 99 tokens, 104 padded, but a padded .* 103 positions .* to at least 104"),
    ],
)
def test_max_tokens_below_a_sample_is_refused_before_the_launch(layout: str, max_tokens: int, message: str) -> None:
    settings = config(plan={"layout": layout, "max_tokens": max_tokens, "memory_limit_gb": 10.0})
    with pytest.raises(PlanError, match=message):
        check_fits(settings, COSTS, as_length_array([9, 50, 99, 20]))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.integers(1, 70), st.integers(8, 80), st.sampled_from([1, 8]))
@settings(derandomize=True, max_examples=60)
def test_max_tokens_is_refused_exactly_where_the_planner_would(
    layout: str, longest: int, max_tokens: int, multiple: int
) -> None:
    plan = {"layout": layout, "max_tokens": max_tokens, "pad_multiple": multiple, "effort": 1}
    tables: dict[str, Any] = {"topology": {"pp": 2, "dp": 1}, "plan": {**plan, "memory_limit_gb": 10.0}}
    lengths = as_length_array([3, longest, 5])

    def refused(call: Any) -> bool:
        try:
            call()
        except PlanError:
            return True
        return False

    settings = config(**tables)
    planner = make_planner(settings, COSTS)
    assert refused(lambda: check_fits(settings, COSTS, lengths)) == refused(lambda: planner.plan(lengths))
    assert refused(lambda: planner.plan(lengths)) == (round_up(longest, multiple) > max_tokens)


def test_learned_positions_need_a_max_seq_len_of_whole_rows() -> None:
    model = {"position": "learned", "max_seq_len": 100}
    with pytest.raises(ConfigError, match=r"max_seq_len is 100 but .* pad_multiple 8, to 104 .* max_seq_len 104"):
        topology_of(config(model=model))
    topology_of(config(model={**model, "max_seq_len": 104}))
    topology_of(config(model={**model, "position": "rope"}))


def test_costs_nobody_has_measured_make_micro_batches_of_several_samples() -> None:
    """The README's loop over its own data: 36 to 49 micro-batches for 4,096 tokens where nothing was fixed in them."""
    drawn = generate_examples(num_samples=300, seed=0, families=["copy", "reverse", "sort", "add", "parity", "lookup"])
    lengths = np.array([min(1024, len(one.input) + len(one.target) + 1) for one in drawn])
    batches = GlobalBatches(as_length_array(lengths.tolist()), batch_size=None, tokens_per_batch=4096, seed=0)
    for topology in (Topology(), Topology(pp=2, dp=2)):
        planner = Planner(topology, TokenCosts(topology.num_stages), 1e9)
        for batch in itertools.islice(batches, 4):
            plan = planner.plan(sample_lengths(lengths.tolist(), batch))
            assert len(plan.batch.micro_batches) <= 16
            assert plan.batch.real_tokens >= 0.85 * plan.batch.padded_tokens
    first = Planner(Topology(pp=4, dp=2), TokenCosts(num_stages=4), memory_limit_bytes=1e9).plan([30] * 200)
    assert max(len(replica.micro_batches) for replica in first.batch.replicas) <= 12  # of equal samples, too


@pytest.mark.parametrize("settings", [{"schedule": "zb-h1"}, {"schedule": "zb-h2"}, {"split_backward": True}])
def test_split_backwards_are_planned_with_their_own_bound(settings: Any) -> None:
    lengths = [30, 20, 90, 10, 40, 60, 55, 33]
    plan = planned(lengths, effort=50, **settings)
    for schedule, prediction in zip(plan.schedules, plan.predictions, strict=True):
        assert schedule.is_split
        assert prediction.lower_bound_ns <= prediction.makespan_ns
    if "split_backward" in settings:
        assert plan.makespan_s < planned(lengths, effort=50).makespan_s


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(("memory_limit_bytes", value, "1 to 2.60") for value in (float("inf"), float("nan"), 2.0**61, 0, 0.5, -1e9)),
        *(("memory_limit_bytes", value, "1 to 2.60") for value in ("1e9", None, True)),
        *(("effort", value, "at least 0 and at most 1,000,000,000") for value in (1.5, True, "9", -1, 10**23)),
        *(("pad_multiple", value, "at least 1 and at most 16,777,216") for value in (0, 8.0, 1 << 41)),
        *(("seed", value, "must be an integer") for value in (0.0, "0", None, True)),
        ("layout", "zzz", "choose from padded, packed"),
        ("split_policy", "fixed_rows", "choose from dynapipe-ext, batch-max, fixed-rows"),
        ("recompute", None, "choose from auto, none, selective, full, stage"),
        ("schedule", "1F1B", "choose from adaptive, 1f1b"),
        ("loss_norm", ["tokens"], "choose from tokens, samples"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_value_and_bound(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Planner(Topology(pp=2), COSTS, **{"memory_limit_bytes": 1e9, name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}")


def test_a_setting_with_more_digits_than_python_prints_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_limit_bytes is an integer of 16610 bits but must be"):
        Planner(Topology(pp=2), COSTS, 10**5000)


def test_settings_at_their_bounds_are_taken() -> None:
    Planner(Topology(pp=2), COSTS, 2.0**60, -5, effort=10**9, max_tokens=1 << 40, pad_multiple=1 << 24)
    Planner(Topology(pp=2), COSTS, np.int64(1), 1 << 70, effort=0, max_tokens=0, pad_multiple=1)


def test_lengths_of_torch_and_pandas_are_those_of_a_list() -> None:
    torch, pandas = pytest.importorskip("torch"), pytest.importorskip("pandas")
    lengths = [12, 7, 35, 41]
    planner = Planner(Topology(), TokenCosts(1), memory_limit_bytes=1e9, effort=20)
    plan = planner.plan(lengths)
    for others in (torch.tensor(lengths), pandas.Series(lengths), np.array(lengths, np.int32)):
        assert planner.plan(others).batch == plan.batch
    with pytest.raises(DataError, match="must be a list of SampleLength or of integers"):
        planner.plan(torch.tensor(5))
