"""The certificate's bounds: under the best of all plans where all can be tried, and the same as brute force finds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.adjustments import FittedTimes, FrozenWeights, TimeCorrection, adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import INFEASIBLE, Grid
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts, UserCosts
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.actions import Action, Kind, make_linear_schedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica, find_batch_floor
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns
from dynapipe_ext.tools.check.recomputed_bounds import batch_bound_ns

Lengths = list[tuple[int, int]]
ROWS, ENCODER, DECODER = (1, 2, 4), (8, 16, 64), (4, 16, 32)


def table(
    topology: Topology,
    *,
    seed: int,
    decoder: bool = False,
    recomputes: tuple[Recompute, ...] = ("none", "full"),
    missing: float = 0.0,
) -> CostTable:
    """Uneven measurements on unequal axes: roughly in proportion to rows x length, plus an overhead."""
    rng = np.random.default_rng(seed)
    grids = {}
    for recompute in recomputes:
        for kind in ("encoder", *(["decoder"] if decoder else []), "postprocess"):
            axes = [ROWS, ENCODER[::2] if kind == "decoder" else ENCODER]
            if kind == "decoder":
                axes.append(DECODER)
            elif kind == "postprocess" and decoder:
                axes[1] = DECODER[1:]
            columns: dict[str, dict[tuple[int, ...], float]] = {}
            for point in itertools.product(*axes):
                if rng.random() < missing and point != tuple(axis[0] for axis in axes):
                    continue
                size = point[0] * sum(point[1:])
                scale = {"none": 1.0, "selective": 1.1, "full": 1.3}[recompute]
                for name, factor in (("forward_ms", 1.0), ("backward_ms", 2.0 * scale)):
                    columns.setdefault(name, {})[point] = 0.1 + factor * size**0.9 * rng.uniform(0.7, 1.4) / 50
                if kind != "postprocess":
                    columns.setdefault("stored_mb", {})[point] = size / scale**3 * rng.uniform(0.7, 1.4)
                    columns.setdefault("peak_mb", {})[point] = 1.2 * size * rng.uniform(0.7, 1.4)
            grids[recompute, kind] = Grid.from_points(columns)
    sizes = {"encoder": 1e6, "decoder": 1e6, "embedding": 1e6}
    layers = topology.num_stages * (1 if decoder else 2)
    return CostTable(
        grids=grids, parameter_bytes=sizes, hidden_size=64, num_layers=layers, topology=topology, comm_gbps=0.05
    )


def partitions(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to put items into micro-batches."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [(first,), *smaller]
        for i, part in enumerate(smaller):
            yield [*smaller[:i], (first, *part), *smaller[i + 1 :]]


def shortest_ns(costs: MicroBatchCosts, *, split: bool, stage_ranks: Sequence[int] = ()) -> int:
    """The least makespan over all orders on two ranks with a stage each (or on one, or with stages on `stage_ranks`),
    by dynamic programming.

    A state is how far each micro-batch is; of the ways to reach it those are kept that no other is before in all of:
    both ranks' clocks, and when each micro-batch's last output arrives.
    """
    num, last = costs.num_micro_batches, costs.num_stages - 1
    chain = [("F", s) for s in range(last + 1)] + [("I" if split else "B", s) for s in reversed(range(last + 1))]
    tables = {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}
    duration = {kind: table.tolist() for kind, table in tables.items()}
    ranks = stage_ranks or tuple(range(last + 1))
    clocks, transfer = max(ranks) + 1, costs.transfer_ns.tolist()
    State = tuple[tuple[int, tuple[bool, ...]], ...]
    Way = tuple[int, ...]  # clocks of the ranks, then arrivals
    start: State = tuple((0, (False,) * (last + 1)) for _ in range(num))
    layer: dict[State, list[Way]] = {start: [(0,) * (clocks + num)]}
    steps = num * (len(chain) + (last + 1 if split else 0))
    for _ in range(steps):
        following: dict[State, set[Way]] = {}
        for state, ways in layer.items():
            for m, (done, weights) in enumerate(state):
                moves = []
                if done < len(chain):
                    kind, s = chain[done]
                    moves.append((kind, s, (done + 1, weights)))
                if split:
                    for s in range(last + 1):
                        if not weights[s] and done > chain.index(("I", s)):
                            moves.append(("W", s, (done, (*weights[:s], True, *weights[s + 1 :]))))
                for kind, s, moved in moves:
                    reached = following.setdefault((*state[:m], moved, *state[m + 1 :]), set())
                    takes, ready, rank = duration[kind][s][m], clocks + m, ranks[s]
                    crosses = kind != "W" and moved[0] < len(chain) and chain[moved[0]][1] != s
                    sent = transfer[min(s, chain[moved[0]][1])][m] if crosses else 0
                    for way in ways:
                        times = list(way)
                        begin = way[rank] if kind == "W" else max(way[rank], way[ready])
                        times[rank] = begin + takes
                        if kind != "W":
                            times[ready] = times[rank] + sent
                        reached.add(tuple(times))
        layer = {state: _not_dominated(ways) for state, ways in following.items()}
    return min(max(way[:clocks]) for ways in layer.values() for way in ways)


def _not_dominated(ways: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if len(ways) == 1:
        return list(ways)
    times = np.array(list(ways))
    before = (times[:, None] <= times).all(axis=2)  # all are different
    return [tuple(way) for way in times[before.sum(axis=0) == 1].tolist()]


def best_makespan_ns(
    costs: CostModel,
    lengths: Lengths,
    *,
    dp: int,
    split: bool,
    layouts: Sequence[Layout],
    kinds: Sequence[Recompute],
    stage_ranks: Sequence[int] = (),
) -> int:
    """Over every split, layout and recomputation of each micro-batch, replica and order."""
    samples = samples_of(lengths)
    options = list(itertools.product(layouts, kinds))

    @cache
    def replica_ns(members: frozenset[tuple[tuple[int, ...], Layout, Recompute]]) -> int:
        micro_batches = [
            MicroBatch(tuple(samples[i] for i in part), layout, kind) for part, layout, kind in sorted(members)
        ]
        try:
            return shortest_ns(costs.evaluate(micro_batches), split=split, stage_ranks=stage_ranks) if members else 0
        except PlanError:  # outside the table
            return INFEASIBLE

    best = INFEASIBLE
    for parts in partitions(range(len(samples))):
        for chosen in itertools.product(options, repeat=len(parts)):
            for homes in itertools.product(range(dp), repeat=len(parts)):
                replicas: list[set[tuple[tuple[int, ...], Layout, Recompute]]] = [set() for _ in range(dp)]
                for part, (layout, kind), home in zip(parts, chosen, homes, strict=True):
                    replicas[home].add((part, layout, kind))
                best = min(best, max(replica_ns(frozenset(replica)) for replica in replicas))
    assert best < INFEASIBLE
    return best


def has_price(costs: CostModel, length: tuple[int, int], layouts: Sequence[Layout], kinds: Sequence[Recompute]) -> bool:
    """Whether a sample can be a micro-batch of its own: a table may lack its cells."""
    sample = SampleLength(0, *length)
    for layout, kind in itertools.product(layouts, kinds):
        with contextlib.suppress(PlanError):
            costs.evaluate([MicroBatch((sample,), layout, kind)])
            return True
    return False


def samples_of(lengths: Lengths) -> list[SampleLength]:
    return [SampleLength(i, *sides) for i, sides in enumerate(lengths)]


def bound_ns(
    costs: CostModel,
    lengths: Lengths,
    *,
    stages: Sequence[int],
    dp: int,
    split: bool,
    packed: bool,
    limit_bytes: int | None = None,
) -> int:
    floor = find_batch_floor(
        costs, samples_of(lengths), stages, split=split, packed=packed, memory_limit_bytes=limit_bytes
    )
    assert floor is not None
    return floor.bound_ns(dp)


def test_the_shortest_order_is_the_one_that_trying_all_finds() -> None:
    for seed, split in itertools.product(range(6), (False, True)):
        rng = np.random.default_rng(seed)
        sizes = {name: rng.integers(1, 40, (2, 2)) for name in ("forward_ns", "input_ns", "weight_ns")}
        costs = MicroBatchCosts(
            forward_ns=sizes["forward_ns"],
            backward_ns=sizes["input_ns"] + sizes["weight_ns"],
            weight_ns=sizes["weight_ns"],
            stored_bytes=np.zeros((2, 2), np.int64),
            working_bytes=np.zeros((2, 2), np.int64),
            transfer_ns=rng.integers(0, 15, (1, 2)),
            transfer_bytes=np.zeros((1, 2), np.int64),
            static_bytes=np.zeros(2, np.int64),
        )
        kinds = "FIW" if split else "FB"
        orders = [
            order
            for order in itertools.permutations([(kind, m) for kind in kinds for m in range(2)])
            if all([k for k, m in order if m == one] == list(kinds) for one in range(2))
        ]
        found = []
        for pair in itertools.product(orders, repeat=2):
            ranks = [[Action(s, Kind(kind), m) for kind, m in order] for s, order in enumerate(pair)]
            with contextlib.suppress(PlanError):  # some wait for one another for ever
                found.append(compute_makespan_ns(make_linear_schedule("tried", ranks), costs))
        assert shortest_ns(costs, split=split) == min(found)
        assert bound_replica((0, 1), costs, split=split).best_ns <= min(found)


GPT = [(5, 0), (9, 0), (16, 0), (40, 0)]
T5 = [(8, 4), (20, 3), (9, 20), (16, 16)]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("lengths", "decoder"), [(GPT, False), (T5, True)], ids=["gpt", "t5"])
def test_no_plan_of_two_stages_beats_the_batch_bound(lengths: Lengths, decoder: bool, dp: int, split: bool) -> None:
    topology = Topology(pp=2, dp=dp)
    for num_samples, recomputes in ((3 if split else 4, ("none",)), (3, ("none", "full"))):
        costs = table(topology, seed=num_samples, decoder=decoder, recomputes=recomputes)
        some = lengths[:num_samples]
        best = best_makespan_ns(costs, some, dp=dp, split=split, layouts=("padded",), kinds=costs.recomputes)
        bound = bound_ns(costs, some, stages=(0, 1), dp=dp, split=split, packed=False)
        assert best / 4 < bound <= best


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_no_plan_with_a_head_over_two_ranks_beats_the_batch_bound(split: bool) -> None:
    """Counted and measured, under a head that is three times as long as a layer."""
    topology = split_vocabulary(Topology(pp=2), "head")
    wide = replace(SHAPE, vocab_size=1024, tied_embeddings=False)
    counted = AnalyticCosts(wide, topology, flops_per_s=1e9, overhead_ns=3_000)
    for costs in table(topology, seed=7, recomputes=("none",)), counted:
        some = GPT[: 2 if split else 3]
        options = {"split": split, "dp": 1}
        layouts: tuple[Layout, ...] = ("padded", "packed")
        placed = topology.stage_ranks
        best = best_makespan_ns(costs, some, layouts=layouts, kinds=("none",), stage_ranks=placed, **options)
        bound = bound_ns(costs, some, stages=placed, packed=True, **options)
        assert best / 4 < bound <= best


def test_no_packed_or_padded_plan_beats_the_bound_of_packed_plans() -> None:
    for lengths, decoder in ((GPT, False), (T5, True)):
        costs = table(Topology(pp=2), seed=3, decoder=decoder, recomputes=("none",))
        for split in (False, True):
            some = lengths[1:]
            best = best_makespan_ns(costs, some, dp=1, split=split, layouts=("padded", "packed"), kinds=("none",))
            bound = bound_ns(costs, some, stages=(0, 1), dp=1, split=split, packed=True)
            assert best / 10 < bound <= best
            assert bound <= bound_ns(costs, some, stages=(0, 1), dp=1, split=split, packed=False)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("decoder", [False, True], ids=["gpt", "t5"])
def test_no_split_of_six_samples_beats_the_batch_bound_on_one_stage(decoder: bool, dp: int) -> None:
    lengths = [(6, 3), (8, 8), (12, 4), (16, 30), (33, 5), (64, 16)]
    lengths = [(e, d * decoder) for e, d in lengths]
    raised = 0
    for seed in range(6):
        costs = table(Topology(dp=dp), seed=seed, decoder=decoder, missing=0.2 * (seed % 2))
        tight = int(costs.count_static_bytes()[0]) + 270_000_000
        unlimited = None
        for limit_bytes in (None, tight):
            best = best_on_one_stage_ns(costs, lengths, dp=dp, limit_bytes=limit_bytes)
            if best >= INFEASIBLE:  # a sample that runs nowhere has no plan
                continue
            bound = bound_ns(costs, lengths, stages=(0,), dp=dp, split=False, packed=False, limit_bytes=limit_bytes)
            assert best / 3 < bound <= best
            if limit_bytes is None:
                unlimited = bound
            elif unlimited is not None:
                assert bound >= unlimited
                raised += bound > 1.01 * unlimited
    assert raised >= 2  # the limit counts


def best_on_one_stage_ns(costs: CostTable, lengths: Lengths, *, dp: int, limit_bytes: int | None) -> int:
    """Over every split whose micro-batches fit by themselves, their recomputation and replicas: the least work."""
    samples = [SampleLength(i, e, d) for i, (e, d) in enumerate(lengths)]

    @cache
    def work_ns(part: tuple[int, ...]) -> int:
        found = [INFEASIBLE]
        for kind in costs.recomputes:
            try:
                priced = costs.evaluate([MicroBatch(tuple(samples[i] for i in part), "padded", kind)])
            except PlanError:
                continue
            held = int(priced.static_bytes[0] + priced.stored_bytes[0, 0] + priced.working_bytes[0, 0])
            if limit_bytes is None or held <= limit_bytes:
                found.append(int(priced.forward_ns[0, 0] + priced.backward_ns[0, 0]))
        return min(found)

    best = INFEASIBLE
    for parts in partitions(range(len(samples))):
        for homes in itertools.product(range(dp), repeat=len(parts)):
            loads = [sum(work_ns(p) for p, h in zip(parts, homes, strict=True) if h == rank) for rank in range(dp)]
            best = min(best, max(loads))
    return best


SHAPE = Architecture.gpt(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_query_groups=2,
    ffn_hidden_size=32,
    gated_mlp=False,
    vocab_size=64,
    max_seq_len=128,
    tied_embeddings=False,
)
EXPERTS = replace(SHAPE, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    "costs",
    [
        TokenCosts(2, ns_per_token=700, ns_per_token_squared=3.5, overhead_ns=20_000, transfer_ns_per_token=9),
        AnalyticCosts(SHAPE, Topology(pp=2, layers_per_stage=(1, 1)), flops_per_s=1e9, overhead_ns=3_000),
        AnalyticCosts(
            EXPERTS, Topology(pp=2, layers_per_stage=(1, 1)), flops_per_s=1e8, overhead_ns=3_000, capacity_factor=1.3
        ),
    ],
    ids=["tokens", "analytic", "experts"],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_no_plan_beats_the_batch_bound_of_a_cost_model_without_a_grid(costs: CostModel, split: bool) -> None:
    lengths = [(3, 0), (17, 0), (30, 0)]
    best = best_makespan_ns(costs, lengths, dp=1, split=split, layouts=("padded", "packed"), kinds=("none",))
    assert best / 4 < bound_ns(costs, lengths, stages=(0, 1), dp=1, split=split, packed=True) <= best


def corrections(seed: int, num_stages: int) -> FittedTimes:
    """Factors alone, or with overheads and rates of tokens and squares; some of one kind of recomputation."""
    rng = np.random.default_rng(seed)

    def one() -> TimeCorrection:
        more = rng.uniform(0, [40_000, 900, 20]) * rng.integers(0, 2)
        return TimeCorrection(float(rng.uniform(0.2, 1.6)), *more.tolist())

    names = rng.permutation(["F", "B", "I", "W", "B none", "B full", "B stage", "I full", "I stage"])
    return FittedTimes(tuple({str(name): one() for name in names[: rng.integers(1, 10)]} for _ in range(num_stages)))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    base=st.sampled_from(["tokens", "analytic", "experts", "table"]),
    frozen=st.sampled_from([None, 0.0, 0.2, 1.0]),
    fits=st.booleans(),
    split=st.booleans(),
    packed=st.booleans(),
)
def test_no_plan_beats_the_batch_bound_of_frozen_weights_or_fitted_times(
    seed: int, base: str, frozen: float | None, fits: bool, split: bool, packed: bool
) -> None:
    topology = Topology(pp=2, layers_per_stage=(1, 1))
    costs: CostModel = {
        "tokens": TokenCosts(2, ns_per_token=700, ns_per_token_squared=3.5, overhead_ns=20_000),
        "analytic": AnalyticCosts(SHAPE, topology, flops_per_s=1e9, overhead_ns=3_000),
        "experts": AnalyticCosts(EXPERTS, topology, flops_per_s=1e8, overhead_ns=3_000, capacity_factor=1.3),
        "table": replace(table(Topology(pp=2), seed=seed, missing=0.1 * (seed % 2)), split_w=(seed % 11) / 10),
    }[base]
    if frozen is not None:
        costs = adjust(costs, frozen=FrozenWeights((frozen, 0.5)))
    if fits:
        costs = adjust(costs, fitted=corrections(seed, 2))
    lengths = [(3, 0), (17, 0), (30, 0)][: 2 if split else 3]
    layouts: tuple[Layout, ...] = ("padded", "packed") if packed else ("padded",)
    kinds: tuple[Recompute, ...] = ("none", "full", "stage")
    assume(base != "table" or all(has_price(costs, length, layouts, kinds) for length in lengths))
    best = best_makespan_ns(costs, lengths, dp=1, split=split, layouts=layouts, kinds=kinds)
    bound = bound_ns(costs, lengths, stages=(0, 1), dp=1, split=split, packed=packed)
    assert bound <= best
    if base != "table" and not (fits and split):
        assert bound > best / 4  # and it is one
        oracle = batch_bound_ns(costs, lengths, (0, 1), dp=1, split=split, packed=packed)
        assert oracle is None or bound <= oracle <= best + 1


@pytest.mark.parametrize("packed", [False, True])
def test_times_fitted_without_any_scale_bound_nothing_and_break_nothing(packed: bool) -> None:
    constant = FittedTimes(({name: TimeCorrection(0.0, overhead_ns=9e6) for name in "FB"},) * 2)
    costs = adjust(table(Topology(pp=2), seed=0, missing=0.0), fitted=constant)
    assert 0 <= bound_ns(costs, [(3, 0), (17, 0)], stages=(0, 1), dp=1, split=False, packed=packed) <= 10**9


def test_the_batch_bound_is_reached_where_one_micro_batch_is_best() -> None:
    costs = TokenCosts(1, ns_per_token=1000, ns_per_token_squared=1.0, overhead_ns=50_000)
    lengths = [(32, 0)] * 5
    reached = costs.evaluate([MicroBatch(tuple(SampleLength(i, 32) for i in range(5)))])
    whole = int(reached.forward_ns[0, 0] + reached.backward_ns[0, 0])
    assert whole - 20 <= bound_ns(costs, lengths, stages=(0,), dp=1, split=False, packed=False) <= whole


def test_there_is_no_batch_bound_of_an_unknown_model_or_of_a_sample_that_cannot_run() -> None:
    unknown = UserCosts(TokenCosts(1))
    assert find_batch_floor(unknown, samples_of([(1, 0)]), (0,), split=False, packed=False) is None
    forwards = adjust(TokenCosts(1), forward_only=True)
    assert find_batch_floor(forwards, samples_of([(1, 0)]), (0,), split=False, packed=False) is None
    assert find_batch_floor(TokenCosts(1), samples_of([]), (0,), split=False, packed=False) is None
    assert find_batch_floor(table(Topology(), seed=0), samples_of([(65, 0)]), (0,), split=False, packed=False) is None
    analytic = AnalyticCosts(SHAPE, Topology())
    assert find_batch_floor(analytic, samples_of([(129, 0)]), (0,), split=False, packed=False) is None


PLACEMENTS = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 1, 0), 5: (0, 1, 2, 1, 0)}  # the last: a head over 3 ranks


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    stages=st.sampled_from(sorted(PLACEMENTS)),
    decoder=st.booleans(),
    split=st.booleans(),
    packed=st.booleans(),
    missing=st.sampled_from([0.0, 0.1, 0.3]),
    dp=st.integers(1, 3),
    room_mb=st.none() | st.integers(50, 1500),
    lengths=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 32)), min_size=1, max_size=8),
)
def test_the_batch_bound_is_the_one_that_brute_force_finds(
    seed: int,
    stages: int,
    decoder: bool,
    split: bool,
    packed: bool,
    missing: float,
    dp: int,
    room_mb: int | None,
    lengths: Lengths,
) -> None:
    """Exactly so for packed rows, and decoder-only samples without a limit; else it is at most that."""
    placement = PLACEMENTS[stages]
    decoder = decoder and stages < 5
    topology = Topology(pp=len(set(placement)), dp=dp, placement=placement if stages == 4 else ())
    if stages == 5:
        topology = split_vocabulary(Topology(pp=3, dp=dp), "head")
    costs = table(topology, seed=seed, decoder=decoder, missing=missing)
    needs = [(e, d * decoder) for e, d in lengths]
    limit = None if room_mb is None else int(costs.count_static_bytes().sum()) + room_mb * 10**6
    floor = find_batch_floor(costs, samples_of(needs), placement, split=split, packed=packed, memory_limit_bytes=limit)
    found = batch_bound_ns(costs, needs, placement, dp=dp, split=split, packed=packed, limit_bytes=limit)
    exact = packed or (not decoder and limit is None)
    if floor is None or exact:
        assert (floor is None) == (found is None)
    if floor is not None and found is not None:
        slack = 10 * len(lengths) * stages + (1e-9 if exact else 0.6) * found
        assert found - slack <= floor.bound_ns(dp) <= found
