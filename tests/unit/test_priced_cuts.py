"""Cuts of ordered samples: priced as the micro-batches they would be, within the caps, and cut as asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import find_bottleneck
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.padded import Cut, MicroBatchLimits, RangeCosts, price_cuts, sort_samples
from dynapipe_ext.schedules.search.optimizer import make_records
from dynapipe_ext.schedules.search.proposals import StepProblem
from dynapipe_ext.settings.plan_rules import PlanRules

COSTS = TokenCosts(2, ns_per_token=100, ns_per_token_squared=0.05, overhead_ns=9000, bytes_per_token=10)


def batch(count: int, *, decoder: bool, seed: int = 0) -> list[SampleLength]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4, 1, (count, 2)), 900).astype(int) + 1
    return [SampleLength(i, int(e), int(d) if decoder else 0) for i, (e, d) in enumerate(lengths)]


def priced(samples: list[SampleLength], caps: MicroBatchLimits, order: str = "sorted") -> RangeCosts:
    return price_cuts(sort_samples(samples, order), COSTS, ("none", "full"), caps, weight=6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("decoder", "order"), [(False, "sorted"), (True, "sorted"), (True, "classes")])
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_cut_costs_what_it_costs_as_a_micro_batch(decoder: bool, order: str, multiple: int) -> None:
    cuts = priced(batch(70, decoder=decoder), MicroBatchLimits(pad_multiple=multiple), order)
    assert cuts.shapes.shape[1] > 5
    assert (cuts.shapes[:, 0] >= 0).all()
    for end in range(1, 71):
        for rows in range(1, cuts.shapes.shape[1] + 1):
            shape = int(cuts.shapes[end - 1, rows - 1])
            if shape < 0:
                continue
            assert rows <= end
            for kind in (0, 1):
                whole = COSTS.evaluate([cuts.make_micro_batch(Cut(end - rows, end, kind))])
                assert whole.forward_ns[:, 0].tolist() == cuts.kind_costs[kind].forward_ns[:, shape].tolist()
                assert whole.stored_bytes[:, 0].tolist() == cuts.kind_costs[kind].stored_bytes[:, shape].tolist()


def test_cuts_reach_beyond_the_longest_sample_and_break_no_cap() -> None:
    samples = batch(90, decoder=False)
    longest = max(s.encoder for s in samples)
    caps = MicroBatchLimits(max_bytes=10 * 1400, max_tokens=1200)
    cuts = priced(samples, caps)
    single = int(find_bottleneck(COSTS.evaluate_shapes([1], [longest], [0]))[0][0])
    seen = set()
    for end in range(1, 91):
        for rows in range(1, min(end, cuts.shapes.shape[1]) + 1):
            part = cuts.make_micro_batch(Cut(end - rows, end, 0))
            time_ns, num_bytes = find_bottleneck(COSTS.evaluate([part]))
            within = part.padded_tokens <= 1200 and num_bytes[0] <= 14_000 and time_ns[0] <= single * 5 // 4
            assert (cuts.shapes[end - 1, rows - 1] >= 0) == within
            seen.add(within)
    assert seen == {True, False}


def test_batches_of_short_samples_get_priced_many() -> None:
    """Alone each is mostly overhead: what is worth a look grows until even cuts stop getting better."""
    samples = [SampleLength(i, 1 + i % 3) for i in range(600)]
    cuts = priced(samples, MicroBatchLimits())
    assert cuts.shapes.shape[1] > 30


@pytest.mark.parametrize("equal", [False, True])
def test_cuts_cover_the_batch_for_every_replica(equal: bool) -> None:
    for count, dp in ((3, 3), (7, 3), (40, 4)):
        cuts = priced(batch(count, decoder=False), MicroBatchLimits()).make_first_cuts(
            pp=4, dp=dp, min_in_flight=2, equal_counts=equal
        )
        assert [cuts[0].first, cuts[-1].end] == [0, count]
        assert all(a.end == b.first for a, b in pairwise(cuts))
        assert len(cuts) >= dp
        assert not equal or len(cuts) % dp == 0


def test_what_does_not_fit_is_refused_by_sample() -> None:
    samples = [SampleLength(0, 10), SampleLength(5, 400), SampleLength(2, 20)]
    with pytest.raises(PlanError, match=r"sample 5 .* needs 4000 B by itself but 3999 B"):
        priced(samples, MicroBatchLimits(max_bytes=3999))
    with pytest.raises(PlanError, match=r"sample 5 .* above the cap of 399 tokens"):
        priced(samples, MicroBatchLimits(max_tokens=399))
    cuts = priced(samples, MicroBatchLimits(max_bytes=4000))
    assert cuts.make_first_cuts(pp=2, dp=1, min_in_flight=1)
    with pytest.raises(PlanError, match="sample 5 does not fit 2 times into 4000 B"):
        cuts.make_first_cuts(pp=2, dp=1, min_in_flight=2)
    assert max(cuts.compute_times(cuts.make_first_cuts(pp=2, dp=1, min_in_flight=1))) < INFEASIBLE


@pytest.mark.parametrize("stage_ranks", [None, (0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("min_in_flight", [1, 2, 9])
def test_the_bottleneck_is_the_busiest_rank_and_the_fullest_one(
    stage_ranks: tuple[int, ...] | None, min_in_flight: int
) -> None:
    rng = np.random.default_rng(min_in_flight)
    made = TokenCosts(4, ns_per_token=100, ns_per_token_squared=0.05, overhead_ns=9000, bytes_per_token=10)
    costs = made.evaluate_shapes(rng.integers(1, 9, 200), rng.integers(1, 900, 200))
    tables = ("forward_ns", "backward_ns", "stored_bytes", "working_bytes")
    uneven = {name: getattr(costs, name) * rng.integers(0, 5, (4, 200)) for name in tables}
    uneven["static_bytes"] = rng.integers(0, 10**6, 4)
    costs = replace(costs, **uneven)
    never = np.arange(200) % 7 == 0
    ranks = np.array(stage_ranks if stage_ranks and len(set(stage_ranks)) < 4 else range(4))
    count = int(ranks.max()) + 1
    for one in (costs, costs.refuse(never), replace(costs, forward_ns=np.where(never, INFEASIBLE, costs.forward_ns))):
        times, needs = find_bottleneck(one, min_in_flight, stage_ranks)
        for m in range(200):
            cannot_run = (one.forward_ns[:, m] >= INFEASIBLE).any() or (one.stored_bytes[:, m] >= INFEASIBLE).any()
            work = [int((one.forward_ns + one.backward_ns)[ranks == rank, m].sum()) for rank in range(count)]
            assert times[m] == (INFEASIBLE if cannot_run else max(work))
            if (one.stored_bytes[:, m] < INFEASIBLE).all():
                held = [min_in_flight if min_in_flight > count else min(count - r, min_in_flight) for r in range(count)]
                assert needs[m] == max(
                    int(one.static_bytes[ranks == rank].sum())
                    + held[rank] * int(one.stored_bytes[ranks == rank, m].sum())
                    + int(one.working_bytes[ranks == rank, m].max())
                    for rank in range(count)
                )


@pytest.mark.parametrize("decoder", [False, True])
def test_pairs_are_cut_for_twice_as_many_in_flight_as_ranks_as_well(decoder: bool) -> None:
    samples, limit = batch(60, decoder=decoder), 12_000
    proposed = StepProblem(
        topology=Topology(pp=2), costs=COSTS, limit_bytes=limit, rules=PlanRules(pad_multiple=1), kinds=("none", "full")
    ).propose_cuts(samples, 0)
    order = sort_samples(samples, "classes" if decoder else "sorted")
    cuts = price_cuts(order, COSTS, ("none", "full"), MicroBatchLimits(max_bytes=limit), weight=1)
    made = [tuple(cuts.make_first_cuts(pp=2, dp=1, min_in_flight=count)) for count in (4, 2, 1)]
    assert made[0] != made[1]
    starts = [proposal.start.cuts for proposal in proposed]
    assert [one in starts for one in made] == [decoder, True, True]


@pytest.mark.parametrize("split", [False, True])
def test_records_hold_every_cost_of_every_shape_and_kind(split: bool) -> None:
    rng = np.random.default_rng(0)
    made = TokenCosts(3, ns_per_token=100, ns_per_token_squared=0.05, overhead_ns=9000, bytes_per_token=10)
    costs = made.evaluate_shapes(rng.integers(1, 9, 21), rng.integers(1, 900, 21))
    never = np.arange(21) % 5 == 0
    kinds = [costs, replace(costs.refuse(never), weight_ns=rng.integers(0, 99, (3, 21)))]
    records = make_records(kinds, split=split)
    for record, one in zip(records, kinds, strict=True):
        gradient = one.input_ns if split else one.backward_ns
        transfer = np.vstack([one.transfer_ns, np.zeros((1, 21), np.int64)])
        forward = np.where(one.forward_ns.max(axis=0) >= INFEASIBLE, INFEASIBLE, one.forward_ns)
        tables = (forward, gradient, one.weight_ns, one.stored_bytes, one.working_bytes, transfer)
        assert record.tolist() == np.stack(tables, axis=-1).transpose(1, 0, 2).tolist()
