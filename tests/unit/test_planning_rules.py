"""Splits by our rules and the peers': what micro-batches are made of, and what cannot be planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import (
    GlobalBatchPlan,
    MicroBatch,
    ReplicaPlan,
    SampleLength,
    check_cover,
    sample_lengths,
)
from dynapipe_ext.batch.topology import PlacementName, Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.partitioning import packing
from dynapipe_ext.partitioning.balance import assign_replicas
from dynapipe_ext.partitioning.packing import RowPackingPolicy, RowPackings, make_evaluate, pack
from dynapipe_ext.partitioning.padded import MicroBatchLimits, SortOrder, price_cuts, sort_samples
from dynapipe_ext.partitioning.rules import (
    cut_fixed_rows,
    karmarkar_karp,
    list_row_lengths,
    pack_documents,
    pad_to_batch_max,
    split_as_dynapipe,
    with_short_ends,
)
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals
from tests.bench.peer_rules import first_fit_in_order, verl_rule

COSTS = TokenCosts(4, ns_per_token=100, ns_per_token_squared=1, overhead_ns=2000)
BY_BATCH, NO_CAPS = make_evaluate(COSTS), MicroBatchLimits()


@dataclass(frozen=True)
class ByTokens(TokenCosts):
    """Times and bytes of each kind per token."""

    def evaluate_shapes(self, rows: Any, encoder_len: Any, decoder_len: Any = 0, recompute: str = "none") -> Any:
        costs = super().evaluate_shapes(rows, encoder_len, decoder_len)
        ns, num_bytes = {"none": (100, 1000), "full": (130, 10)}[recompute]
        tokens = np.broadcast_to(np.asarray(rows) * encoder_len, costs.forward_ns.shape)
        forward, stored = tokens * ns, tokens * num_bytes
        return replace(costs, forward_ns=forward, backward_ns=0 * forward, stored_bytes=stored)


def split_padded(
    samples: list[SampleLength],
    costs: TokenCosts,
    *,
    pp: int,
    dp: int,
    caps: MicroBatchLimits = NO_CAPS,
    kinds: Sequence[Any] = ("none",),
    equal_counts: bool = False,
    order: SortOrder = "sorted",
) -> list[MicroBatch]:
    priced = price_cuts(
        sort_samples(samples, order), costs, kinds, caps, weight=dp * (pp - 1), equal_counts=equal_counts, is_exact=True
    )
    cuts = priced.make_first_cuts(pp=pp, dp=dp, min_in_flight=1, equal_counts=equal_counts)
    return [priced.make_micro_batch(cut) for cut in cuts]


def best_packed(
    samples: Any,
    evaluate: Any,
    *,
    max_tokens: int,
    pp: int = 1,
    dp: int = 1,
    max_bytes: int | None = None,
    equal_counts: bool = False,
) -> list[MicroBatch]:
    rows = RowPackings.from_samples(samples, evaluate, RowPackingPolicy(max_tokens=max_tokens))
    return list(rows.list_finalists(evaluate, pp=pp, dp=dp, max_bytes=max_bytes, equal_counts=equal_counts)[0])


def packed_rows(lengths: list[int], num_rows: int, **rule: Any) -> list[MicroBatch]:
    found = RowPackings.from_samples(sample_lengths(lengths), BY_BATCH, RowPackingPolicy(**rule)).with_count(num_rows)
    assert found is not None
    return list(found)


def indices(replicas: list[list[MicroBatch]]) -> list[list[list[int]]]:
    return [[[s.index for s in m.samples] for m in replica] for replica in replicas]


def test_pad_to_batch_max_deals_equal_micro_batches_of_the_longest_length() -> None:
    replicas = pad_to_batch_max(sample_lengths([3, 9, 5, 1, 2]), dp=2, rows_per_micro_batch=2, pad_multiple=4)
    assert indices(replicas) == [[[0, 1], [4]], [[2, 3]]]
    assert {m.encoder_len for r in replicas for m in r} == {12}
    by_tokens = pad_to_batch_max(sample_lengths([3, 9, 5, 1, 2]), dp=1, max_tokens=24, pad_multiple=4)
    assert indices(by_tokens) == [[[0, 1], [2, 3], [4]]]


ON_ANY = [
    Topology(), Topology(pp=2), Topology(pp=4), Topology(dp=3), Topology(pp=2, dp=2, placement=(0, 1, 1, 0)),
    Topology(pp=2, dp=8, placement=(0, 1, 0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("lengths", [[9] * 16, [30, 3, 17, 64, 12, 5, 41, 2, 8], [64]])
def test_padding_to_the_batch_maximum_within_max_tokens_cuts_alike_on_every_topology(lengths: list[int]) -> None:
    """The micro-batches of deterministic runs; without `max_tokens` the rule tries several numbers of rows."""
    cut: dict[bool, set[Any]] = {True: set(), False: set()}
    for topology in ON_ANY:
        costs = TokenCosts(topology.num_stages, overhead_ns=2000, bytes_per_token=1000)
        for is_bounded in cut:
            bound = 200 if is_bounded else 0
            planner = Planner(
                topology, costs, 10**6, split_policy="batch-max", max_tokens=bound, seed=topology.pp, effort=200
            )
            parts = planner.plan(lengths, step=topology.dp).batch.micro_batches
            cut[is_bounded].add(frozenset((m.samples, m.layout, m.rows, m.encoder_len) for m in parts))
    assert len(cut[True]) == 1
    assert len(cut[False]) > 1 or len(lengths) == 1


def test_fixed_rows_cuts_at_row_ends_and_each_piece_keeps_its_own_targets() -> None:
    samples = [SampleLength(0, 3, target=2), SampleLength(1, 9, target=6), SampleLength(2, 2, target=2)]
    rows = [m for replica in cut_fixed_rows(samples, row_len=5, dp=1) for m in replica]
    pieces = [[(s.index, s.start, s.encoder, s.target) for s in m.samples] for m in rows]
    assert pieces == [[(0, 0, 3, 2), (1, 0, 2, 0)], [(1, 2, 5, 4)], [(1, 7, 2, 2), (2, 0, 2, 2)]]
    assert [(m.encoder_len, m.attention, m.layout) for m in rows] == [(5, "row", "packed")] * 3


def test_dynapipe_rule_takes_the_first_recompute_type_that_fits_for_the_whole_plan() -> None:
    samples = sample_lengths([100, 10, 10, 10])
    kinds: tuple[Any, ...] = ("full", "none", "selective")
    roomy, tight = (split_as_dynapipe(samples, COSTS, kinds, pp=4, dp=1, max_bytes=b) for b in (10**9, 500_000))
    assert {m.recompute for m in roomy[0]} == {"none"}
    assert {m.recompute for m in tight[0]} == {"none"}
    (replica,) = split_as_dynapipe(samples, ByTokens(1), ("none", "full"), pp=2, dp=1, max_bytes=50_000)
    assert {m.recompute for m in replica} == {"full"}
    with pytest.raises(PlanError, match="is one of DynaPipe's"):
        split_as_dynapipe(samples, COSTS, ("stage",), pp=2, dp=1)


def test_each_micro_batch_takes_the_fastest_recompute_type_that_fits() -> None:
    caps = MicroBatchLimits(max_bytes=50_000)
    split = split_padded(sample_lengths([100, 10]), ByTokens(1), pp=2, dp=1, caps=caps, kinds=("none", "full"))
    assert [(m.encoder_len, m.recompute) for m in split] == [(10, "none"), (100, "full")]


def test_karmarkar_karp_leaves_no_group_empty() -> None:
    for count in range(3, 9):
        groups = karmarkar_karp([1] * count, 3)
        assert sorted(i for g in groups for i in g) == list(range(count))
        assert min(map(len, groups)) >= 1


def test_class_order_serves_encoder_decoder_samples_better_than_the_plain_sort() -> None:
    costs = TokenCosts(4, ns_per_token=100, ns_per_token_squared=0.01, overhead_ns=20_000)
    rng = np.random.default_rng(5)
    pairs = np.exp(rng.normal(4.5, 1.0, (200, 2))).astype(np.int64) + 1
    samples = [SampleLength(i, int(e), int(d)) for i, (e, d) in enumerate(pairs)]

    def value(split: list[MicroBatch]) -> int:
        time_ns, _ = make_evaluate(costs)(split)
        return int(time_ns.sum() + 3 * time_ns.max())

    in_classes, in_order = (
        value(split_padded(samples, costs, pp=4, dp=1, order=order)) for order in ("classes", "sorted")
    )
    assert in_classes < 0.95 * in_order
    assert value(split_as_dynapipe(samples, costs, ("none",), pp=4, dp=1)[0]) < 0.95 * in_order


@pytest.mark.parametrize(("pp", "count", "dp"), [(1, 7, 4), (4, 9, 8), (1, 4, 4)])
def test_no_split_has_fewer_micro_batches_than_replicas(pp: int, count: int, dp: int) -> None:
    samples = sample_lengths([5] * count)
    assert len(split_padded(samples, COSTS, pp=pp, dp=dp)) >= dp
    assert len(best_packed(samples, BY_BATCH, max_tokens=1000, pp=pp, dp=dp)) >= dp
    assert all(pack_documents(samples, BY_BATCH, max_tokens=1000, dp=dp))


def test_equal_counts_makes_the_number_of_micro_batches_a_multiple_of_the_replicas() -> None:
    samples = sample_lengths(list(range(3, 50)))
    assert len(split_padded(samples, COSTS, pp=4, dp=3, equal_counts=True)) % 3 == 0
    assert len(best_packed(samples, BY_BATCH, max_tokens=100, pp=4, dp=3, equal_counts=True)) % 3 == 0
    assert len({len(r) for r in pack_documents(samples, BY_BATCH, max_tokens=100, dp=3, equal_counts=True)}) == 1


def test_packed_rows_follow_the_asked_number_and_are_none_where_they_are_too_tight() -> None:
    split = packed_rows([40, 30, 20, 10], 2, max_tokens=50)
    assert sorted(m.encoder_len for m in split) == [50, 50]
    rows = RowPackings.from_samples(sample_lengths([40, 30, 20, 10]), BY_BATCH, RowPackingPolicy(max_tokens=50))
    assert (rows.least, rows.with_count(1)) == (2, None)


def test_a_row_passed_over_for_lack_of_room_takes_later_smaller_documents() -> None:
    split = packed_rows([70, 30, 30, 30, 25, 10], 2, max_tokens=100)
    assert sorted([s.encoder for s in m.samples] for m in split) == [[30, 30, 30, 10], [70, 25]]


def test_rounding_up_keeps_packed_rows_within_max_tokens() -> None:
    split = packed_rows([10, 8], 2, max_tokens=20, pad_multiple=8)
    assert sorted(m.encoder_len for m in split) == [8, 16]


def test_the_byte_cap_is_exact() -> None:
    samples = sample_lengths([10, 10])
    _, needed = BY_BATCH([MicroBatch(tuple(samples))])
    counts = [
        len(split_padded(samples, COSTS, pp=2, dp=1, caps=MicroBatchLimits(max_bytes=int(needed[0]) - less)))
        for less in (0, 1)
    ]
    assert counts == [1, 2]


def test_swaps_repair_what_longest_first_gets_wrong() -> None:
    costs = [3, 3, 2, 2, 2]
    assert [sum(costs[i] for i in share) for share in assign_replicas(costs, 2)] == [6, 6]


def test_packed_rows_that_cannot_be_priced_give_way_to_shorter_ones() -> None:
    def at_most_60(micro_batches: Sequence[MicroBatch]) -> tuple[IntArray, IntArray]:
        if max(m.encoder_len for m in micro_batches) > 60:
            raise PlanError("outside the grid")
        return BY_BATCH(micro_batches)

    split = best_packed(sample_lengths([50, 20, 20, 20, 10]), at_most_60, max_tokens=1000)
    assert sum(m.rows for m in split) >= 2
    assert max(m.encoder_len for m in split) <= 60
    with pytest.raises(PlanError, match="outside the grid"):
        best_packed(sample_lengths([70, 20]), at_most_60, max_tokens=1000)


def test_packed_rows_balance_attention_and_not_tokens() -> None:
    """One long document costs more than its tokens in short ones, so the row that has it gets fewer tokens."""
    split = packed_rows([1000, *[10] * 1500], 2, max_tokens=20_000)
    time_ns, _ = BY_BATCH(split)
    assert time_ns.max() <= 1.15 * time_ns.min()
    assert min(m.encoder_len for m in split) == next(m.encoder_len for m in split if m.samples[0].index == 0)


def pad(lengths: list[int], dp: int = 1, *, equal_counts: bool = False, **caps: int) -> object:
    return split_padded(
        sample_lengths(lengths), COSTS, pp=2, dp=dp, caps=MicroBatchLimits(**caps), equal_counts=equal_counts
    )


def row(lengths: list[int], **more: Any) -> object:
    return best_packed(sample_lengths(lengths), BY_BATCH, max_tokens=100, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad([9, 200], max_tokens=100), r"sample 1 \(200 .* 100 tok"),
        (lambda: pad([9, 200], max_bytes=1000), r"sample 0 .* 9000 B .* 1000 B"),
        (lambda: pad([9] * 3, dp=2, max_tokens=9, equal_counts=True), "3 samples .* no two of them"),
        (lambda: row([9, 200]), "sample 1 has 200 positions .* has 100"),
        (lambda: row([9, 99], max_bytes=9500), "sample 1 with 99 positions needs 99,000 B but 9,500 B is"),
        (lambda: cut_fixed_rows([SampleLength(4, 3, 2)], row_len=10, dp=1), "sample 4 has a decoder side"),
        (lambda: pad_to_batch_max(sample_lengths([9, 200]), dp=1, max_tokens=100), "sample 1 makes rows of 200"),
        (lambda: assign_replicas([5], 2), "1 micro-batches cannot feed 2 replicas"),
        (lambda: assign_replicas([5] * 3, 2, equal_counts=True), "3 micro-batches do not divide .* into 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_by_name(call: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()  # type: ignore[operator]


def test_heavy_tailed_loads_over_64_replicas_stay_within_one_percent() -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        costs = np.exp(rng.normal(10, 1.5, 2048))
        costs = np.minimum(costs, 0.999 * costs.sum() / 64).astype(np.int64)
        mean = costs.sum() / 64
        loads = [costs[share].sum() for share in assign_replicas(costs.tolist(), 64)]
        assert costs.max() <= mean or max(loads) == costs.max()
        assert max(loads) <= 1.01 * max(mean, costs.max())


def test_the_seed_turns_the_replicas_round() -> None:
    costs = [9, 1, 5, 5]
    assert sorted(map(tuple, assign_replicas(costs, 3))) == sorted(map(tuple, assign_replicas(costs, 3, seed=1)))
    assert len({tuple(assign_replicas(costs, 3, seed=seed)[0]) for seed in range(3)}) == 3


def test_as_many_rows_are_packed_as_a_pipeline_of_that_depth_runs_first() -> None:
    lengths = np.random.default_rng(3).integers(1, 400, 60).tolist()
    least = -(-sum(lengths) // 4000)
    tried = [packed_rows(lengths, n, max_tokens=4000) for n in range(least, len(lengths) + 1)]
    for pp in (1, 2, 4):

        def expected_ns(rows: Sequence[MicroBatch], pp: int = pp) -> int:
            time_ns = BY_BATCH(rows)[0]
            return int(time_ns.sum() + (pp - 1) * time_ns.max())

        chosen = best_packed(sample_lengths(lengths), BY_BATCH, pp=pp, max_tokens=4000)
        assert chosen in tried
        assert expected_ns(chosen) <= 1.001 * min(map(expected_ns, tried))
        assert (len(chosen) == least) == (pp == 1)


def test_rows_packed_once_and_judged_several_times_are_those_packed_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = sample_lengths(np.random.default_rng(3).integers(1, 400, 60).tolist())
    judges = [make_evaluate(COSTS, min_in_flight=held) for held in (1, 2, 4)]
    cap = int(BY_BATCH([MicroBatch(tuple(samples[:12]), "packed")])[1].max())
    alone = [best_packed(samples, judge, max_tokens=1000, pp=4, dp=2, max_bytes=cap) for judge in judges]
    assert len(alone[0]) < len(alone[2])  # what is held changes which rows fit

    packed: list[int] = []

    def counted(samples: Any, weights: Any, num_rows: int, room: int, order: Any) -> Any:
        packed.append(num_rows)
        return pack(samples, weights, num_rows, room, order)

    monkeypatch.setattr(packing, "pack", counted)
    rows = RowPackings.from_samples(samples, BY_BATCH, RowPackingPolicy(max_tokens=1000))
    shared = [rows.list_finalists(judge, pp=4, dp=2, max_bytes=cap, equal_counts=False) for judge in judges]
    assert [list(best) for best, *_ in shared] == alone
    assert len(packed) == len(set(packed))


STEADY = settings(derandomize=True)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


def covers(replicas: list[list[MicroBatch]], samples: list[SampleLength]) -> None:
    plan = GlobalBatchPlan(step=0, replicas=tuple(ReplicaPlan(d, tuple(r)) for d, r in enumerate(replicas)))
    check_cover(plan, samples)


def test_first_fit_keeps_the_order_of_the_data_and_returns_to_rows_with_room() -> None:
    samples = sample_lengths([6, 7, 3, 5, 4, 1])
    assert indices(first_fit_in_order(samples, max_tokens=10, dp=1)) == [[[0, 2, 5], [1], [3, 4]]]
    assert indices(first_fit_in_order(samples, max_tokens=10, dp=2)) == [[[0, 2, 5], [3, 4]], [[1]]]


def test_first_fit_of_padded_rows_counts_the_padding() -> None:
    samples = sample_lengths([6, 3, 2, 2, 4])
    (replica,) = first_fit_in_order(samples, max_tokens=12, dp=1, layout="padded")
    assert [[s.encoder for s in m.samples] for m in replica] == [[6, 3], [2, 2, 4]]
    assert [m.padded_tokens for m in replica] == [12, 12]
    rounded = first_fit_in_order(samples, max_tokens=12, dp=1, layout="padded", pad_multiple=4)
    assert [m.padded_tokens for m in rounded[0]] == [8, 12, 4]


@STEADY
@given(LENGTHS, st.integers(1, 4), st.sampled_from([200, 512]), st.sampled_from(["padded", "packed"]))
def test_first_fit_trains_every_sample_once_within_the_cap(lengths: list[int], dp: int, cap: int, layout: str) -> None:
    samples = sample_lengths(lengths)
    replicas = first_fit_in_order(samples, max_tokens=cap, dp=dp, layout=layout)  # type: ignore[arg-type]
    covers(replicas, samples)
    assert len(replicas) == dp
    assert max(m.padded_tokens for replica in replicas for m in replica) <= cap
    assert max(map(len, replicas)) - min(map(len, replicas)) <= 1


def test_verl_balances_work_over_replicas_and_counts_over_both() -> None:
    samples = sample_lengths([4000, 100, 100, 100, 100, 100, 100, 3500])
    replicas = verl_rule(samples, max_tokens=4096, dp=2)
    assert [sum(len(m.samples) for m in replica) for replica in replicas] == [4, 4]
    assert len({len(replica) for replica in replicas}) == 1
    assert sorted(max(s.encoder for m in replica for s in m.samples) for replica in replicas) == [3500, 4000]


def test_verl_puts_the_cheap_micro_batches_first_and_last() -> None:
    (replica,) = verl_rule(sample_lengths([100, 90, 80, 70, 60, 50]), max_tokens=100, dp=1)
    assert [m.real_tokens for m in replica] == [70, 90, 110, 100, 80]


def test_verl_gives_all_replicas_the_count_of_the_one_that_needs_most_while_samples_last() -> None:
    assert indices(verl_rule(sample_lengths([100, 60, 60]), max_tokens=100, dp=2)) == [[[1], [2]], [[0]]]
    longer = verl_rule(sample_lengths([100, 3, 3, 3, 60, 60, 60]), max_tokens=100, dp=2)
    assert [len(replica) for replica in longer] == [2, 2]


def test_verl_weighs_long_samples_by_more_than_their_tokens() -> None:
    replicas = verl_rule(sample_lengths([20_000, 10_000, 10_000, 1000, 1000]), max_tokens=32_768, dp=2)
    assert sorted(sum(m.real_tokens for m in replica) for replica in replicas) == [20_000, 22_000]


@STEADY
@given(LENGTHS, st.integers(1, 4))
def test_verl_trains_every_sample_once_in_as_many_micro_batches_on_all_replicas(lengths: list[int], dp: int) -> None:
    samples = sample_lengths(lengths)
    replicas = verl_rule(samples, max_tokens=256, dp=dp)
    covers(replicas, samples)
    assert len(replicas) == dp
    counts = {min(len(r), sum(len(m.samples) for m in r)) for r in replicas if r}
    if len(lengths) % dp == 0:
        assert len({sum(len(m.samples) for m in r) for r in replicas}) == 1
        assert len(counts) == 1


@pytest.mark.parametrize("rule", [first_fit_in_order, verl_rule])
def test_a_sample_longer_than_a_micro_batch_is_named(rule: object) -> None:
    with pytest.raises(PlanError, match=r"sample 1 .* 300"):
        rule(sample_lengths([5, 300]), max_tokens=256, dp=1)  # type: ignore[operator]


def test_graded_rows_take_the_place_of_no_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep pipelines of short samples need far more rows than graded ones are: few starts cost 5 to 8 % here."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 1.0, 300), 8, 2000).astype(int).tolist()
    planner = Planner(Topology(pp=16), TokenCosts(16), 10**12, layout="packed")
    with_graded = planner.plan(lengths).makespan_ns
    monkeypatch.setattr(RowPackings, "with_grades", lambda *_: None)
    assert with_graded <= planner.plan(lengths).makespan_ns


@pytest.mark.parametrize(("placement", "dp"), [("linear", 1), ("v", 8)])
def test_a_cap_on_rows_makes_no_plan_much_shorter(placement: PlacementName, dp: int) -> None:
    """Of a model that leaves little memory graded rows are short ones; where W fills the waits, few rows are best."""
    lengths = np.random.default_rng(0).normal(150, 45, 420).clip(40, 400).astype(int).tolist()
    topology = Topology(pp=2, dp=dp, placement=place_stages(placement, 2)).with_layers(32)
    costs = AnalyticCosts(preset("llama-2-7b"), topology)
    planner = Planner(topology, costs, 72e9, layout="packed", split_backward=placement == "v")
    capped = [replace(planner, max_tokens=most).plan(lengths).makespan_ns for most in (512, 1024, 1536, 2048)]
    assert planner.plan(lengths).makespan_ns <= 1.003 * min(capped)


def test_a_rival_takes_the_fastest_of_several_row_lengths_and_orders_of_the_rows() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(5, 1, 300).clip(8, 400)]
    costs = TokenCosts(8, ns_per_token_squared=2, overhead_ns=400_000, bytes_per_token=1)
    topology, zb_v = Topology(pp=4, dp=2, placement=place_stages("v", 4)), list_rivals(4)[-1]

    def step_s(max_tokens: int) -> float:
        return Planner(topology, costs, 1e12, **{**zb_v.rules, "max_tokens": max_tokens}).plan(lengths).makespan_s

    tried = {n: step_s(n) for n in list_row_lengths(max(lengths), sum(lengths), num_rows=8, pad_multiple=8)}
    assert len(tried) > 4
    assert step_s(0) == min(tried.values()) < tried[min(tried)]
    rows = [MicroBatch((SampleLength(i, n),), "packed") for i, n in enumerate((40, 50, 10, 30, 20))]
    (ordered,) = with_short_ends([rows], BY_BATCH)
    assert [m.encoder_len for m in ordered] == [10, 30, 50, 40, 20]
