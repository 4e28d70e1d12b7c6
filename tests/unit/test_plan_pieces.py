"""Plans of long samples in pieces: what is cut, what it is worth, what it costs, and where it is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import (
    MicroBatch,
    SampleLength,
    find_pieces,
    sample_lengths,
    sample_pieces,
)
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.partitioning.packing import RowPackingPolicy, make_evaluate
from dynapipe_ext.partitioning.pieces import RowTime, cut_into_pieces, list_piece_choices
from dynapipe_ext.schedules import candidates
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.check.check_plan import check
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.check.recomputed_bounds import batch_bound_ns
from dynapipe_ext.tools.show.plan import micro_batch_table, of_proven_step, view_of_file
from dynapipe_ext.tools.show.schedule import read_schedule

LLAMA = Architecture.gpt(
    num_layers=4, hidden_size=64, num_heads=4, num_query_groups=2, ffn_hidden_size=256, gated_mlp=True,
    vocab_size=512, max_seq_len=1 << 20, tied_embeddings=False, position="rope",
)  # fmt: skip


KINDS = ("none", "stage")


def carried(index: int, start: int, length: int, *others: SampleLength, recompute: str = "none") -> MicroBatch:
    return MicroBatch(
        (SampleLength(index, length, start=start), *others), "packed", recompute=recompute, attention="carried"
    )


def planner(pieces, *, pp: int = 2, dp: int = 2, limit: float = 1e9, **settings) -> Planner:
    costs = TokenCosts(pp, ns_per_token_squared=1, bytes_per_token=100)
    return Planner(Topology(pp=pp, dp=dp), costs, limit, layout="packed", pieces=pieces, effort=200, **settings)


def is_cut(plan: StepPlan) -> bool:
    return any(m.attention == "carried" for m in plan.batch.micro_batches)


LONG = sample_lengths([9000, 30, 500, 3000, 70, 200, 41, 900, 12, 60])


def test_pieces_are_taken_where_they_end_the_step_earlier_and_share_rows_with_short_documents() -> None:
    whole, cut_plan = planner("off").plan(LONG), planner("auto").plan(LONG)
    assert not is_cut(whole)
    assert cut_plan.makespan_ns < 0.7 * whole.makespan_ns
    carriers = [m for m in cut_plan.batch.micro_batches if m.attention == "carried"]
    assert any(len(m.samples) > 1 for m in carriers)
    assert cut_plan.certificate is not None
    assert cut_plan.certificate.batch_ns is not None


def test_a_plan_and_its_file_are_shown_with_the_piece_that_each_micro_batch_carries(tmp_path: Path) -> None:
    provable = planner("auto", format=ActivationFormat(8), collectives=ReplicaCollectives())
    proven = prove_step(provable, LONG, step=0)
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(proven.step_plan, Topology(pp=2, dp=2))))
    shown = of_proven_step(proven, Topology(pp=2, dp=2)), view_of_file(read_plan_file(tmp_path / "plan.json"))
    for dp_rank, replica in enumerate(proven.step_plan.batch.replicas):
        pieces = find_pieces(replica.micro_batches)
        assert read_schedule(tmp_path / "plan.json", replica=dp_rank)[1] == pieces
        for view in shown:
            *_, last = micro_batch_table(view.replicas[dp_rank]).columns
            count = len(replica.micro_batches)
            texts = [str(pieces.get(m, "")) for m in range(count)]
            assert list(last.cells) == (texts if pieces else [m.recompute for m in replica.micro_batches])
    assert any(map(find_pieces, [replica.micro_batches for replica in proven.step_plan.batch.replicas]))


def test_the_page_of_long_samples_and_its_picture_tell_what_the_bench_found(root: Path) -> None:
    rows = json.loads((root / "tests/bench/results/long.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["model"], row["dp"], row["data"]) == ("llama-2-7b", 2, "tail"))
    whole, cut = f"{row['whole_over_floor']:.2f}", f"{row['over_floor']:.2f}"
    picture = (root / ".github" / "pieces.svg").read_text()
    assert re.findall(r"([\d.]+) × the bound", picture) == [whole, cut]
    told = (root / ".github/docs/long-samples.md").read_text()
    assert f"takes {cut} times that bound" in told
    ideal = f"{row['dynamic_cp_over_floor']:.2f}"
    assert (
        f"in pieces, {whole} times whole; an ideal dynamic context parallelism, which exchanges for free, {ideal}"
        in told
    )
    big = [row for row in rows if (row["model"], row["data"]) == ("llama-3-8b", "one")]
    assert len(big) == 2
    for row in big:  # "one sample of 256k fits Llama 3 8B on TP2 PP4 so"
        assert row["whole_over_floor"] is None
        assert row["recomputed"]["stage"]
        assert row["peak_gb"] <= 72


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=14), st.integers(0, 9), st.booleans())
def test_auto_is_never_slower_than_whole_samples_and_never_under_its_bound(lengths, seed, split) -> None:
    both = [planner(p, seed=seed, split_backward=split).plan(sample_lengths(lengths)) for p in ("off", "auto")]
    assert both[1].makespan_ns <= both[0].makespan_ns
    if max(lengths) <= 2048:
        assert both[0] == both[1]
    bound_ns = both[1].certificate.batch_ns
    again_ns = batch_bound_ns(
        TokenCosts(2, ns_per_token_squared=1, bytes_per_token=100), [(n, 0) for n in lengths], (0, 1), dp=2,
        split=split, packed=True, pieces=is_cut(both[1]),
    )  # fmt: skip
    assert bound_ns <= both[1].makespan_ns
    assert bound_ns <= again_ns <= bound_ns + 10**6 * is_cut(both[1]) + 10**4


def test_what_a_cut_is_expected_to_take_is_what_its_rows_take() -> None:
    samples = sample_lengths([60_000, 20_000, *range(100, 5000, 70)])
    costs = AnalyticCosts(preset("llama-2-7b"), Topology(tp=8, pp=4), layer_overhead_ns=60_000)
    price = make_evaluate(costs)
    for tokens in (2048, 4096, 8192):
        choices = list_piece_choices(samples, price, [tokens], dp=1, depth=4)
        assert [choice.even == RowTime() for choice in choices] == [True, False]  # of equal length, of equal time
        for cut in choices:
            times, _ = price(cut.make_rows(samples, price, RowPackingPolicy(max_tokens=tokens, pad_multiple=8)))
            fill_ns = 2 * (cut.makespan_ns - cut.hoped_ns)
            assert cut.makespan_ns - fill_ns == pytest.approx(int(times.sum()), rel=0.01)
            assert fill_ns == pytest.approx(3 * int(times.max()), rel=0.1)


@pytest.mark.parametrize(
    ("expected_ns", "hoped_ns", "least_ns", "whole_ns", "pieces_ns", "tried"),
    [
        (90, 80, 100, 120, 95, ["pieces"]),  # no whole samples are as fast
        (90, 80, 100, 102, 110, ["pieces", "whole"]),
        (130, 125, 100, 120, 119, ["whole"]),  # no hope
        (130, 115, 100, 120, 119, ["whole", "pieces"]),
        (130, 115, 100, None, 119, ["whole", "pieces"]),
        (90, 80, 100, 120, None, ["pieces", "whole"]),
    ],
)
def test_neither_is_searched_where_the_other_is_known_to_be_faster(
    monkeypatch, expected_ns, hoped_ns, least_ns, whole_ns, pieces_ns, tried
) -> None:
    times, found = {"whole": whole_ns, "pieces": pieces_ns}, []

    def made(name: str) -> SimpleNamespace:
        found.append(name)
        if times[name] is None:
            raise PlanError(name)
        return SimpleNamespace(name=name, makespan_ns=times[name])

    listed = [
        candidates.PlanCandidate(1, True, expected_ns, hoped_ns, partial(made, "pieces")),
        candidates.PlanCandidate(1, False, least_ns, least_ns, partial(made, "whole")),
    ]
    monkeypatch.setattr(candidates, "list_candidates", lambda *_, **__: listed)
    best = candidates.plan_fastest([None], [], 0)
    assert found == tried
    assert best.makespan_ns == min(times[name] for name in tried if times[name] is not None)
    times.update(whole=None, pieces=None)
    with pytest.raises(PlanError, match="whole"):
        candidates.plan_fastest([None], [], 0)


def test_the_bound_of_pieces_is_the_longest_samples_work_where_that_is_most() -> None:
    plan = planner(1000, dp=4).plan(sample_lengths([20_000, 10, 10, 10]))
    alone_ns = 3 * (50_000 + 1000 * 20_000 + 20_000**2)  # F and B of the whole sample on one rank
    assert plan.certificate.batch_ns == pytest.approx(alone_ns, rel=1e-3)
    assert plan.makespan_ns < 1.1 * alone_ns


def test_what_fits_in_no_row_fits_in_pieces() -> None:
    """Whole, a row's recomputation needs all its bytes at once; of pieces, those of one."""
    lengths = sample_lengths([20_000, 100, 300])
    with pytest.raises(PlanError, match="is the limit"):
        planner("off", limit=1e6).plan(lengths)
    for pieces in ("auto", 2048):
        plan = planner(pieces, limit=1e6).plan(lengths)
        assert is_cut(plan)
        assert plan.peak_bytes <= 1e6


def test_stages_are_recomputed_where_memory_makes_pieces_be_recomputed_and_nowhere_else(tmp_path: Path) -> None:
    """256k of Llama 3 8B over TP2 x PP4: the logits of all pieces alone are 67 GB."""
    big = AnalyticCosts(
        preset("llama-3-8b"), Topology(tp=2, pp=4), flops_per_s=350e12, sequence_parallel=True,
        distributed_optimizer=True,
    )  # fmt: skip
    made = Planner(big.topology, big, 80e9, layout="packed", pieces="auto", effort=500)
    alone = sample_lengths([256 * 1024])
    with pytest.raises(PlanError, match=r"positions needs [\d,]+ B but 80,000,000,000 B is the limit"):
        replace(made, recompute="full").plan(alone)
    plan = made.plan(alone)
    assert {m.recompute for m in plan.batch.micro_batches} >= {"stage", "none"}
    assert plan.peak_bytes <= 80e9
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan, big.topology)))
    read = read_plan_file(tmp_path / "plan.json")
    assert not check(read, big, memory_limit_bytes=80 * 10**9, lengths={0: (256 * 1024, 0)}).faults
    ample = replace(made, memory_limit_bytes=400e9)
    assert {m.recompute for m in ample.plan(alone).batch.micro_batches} == {"none"}


def test_a_pieces_stage_that_is_recomputed_keeps_what_it_received_and_carried_keys_and_values() -> None:
    costs = AnalyticCosts(LLAMA, Topology(pp=2), overhead_ns=0)
    none, stage = (costs.evaluate([carried(0, start, 32, recompute=kind) for start in (0, 32)]) for kind in KINDS)
    chain = 2 * 2 * 32 * (2 * 64 + 4 * 32)  # keys and values of all positions, gradients of the first piece's, a stage
    received = 32 * 64 * 2
    assert stage.stored_bytes.tolist() == [[chain, 0], [chain + received, received]]
    assert (stage.stored_bytes + stage.working_bytes == none.stored_bytes + none.working_bytes).all()
    assert (stage.backward_ns == none.backward_ns + none.forward_ns).all()
    assert not stage.weight_ns.any()


@settings(max_examples=100)
@given(
    st.integers(2, 50_000),
    st.integers(1, 9000),
    st.sampled_from([1, 8, 16]),
    st.floats(0, 1),
    st.integers(0, 50_000),
)
@example(6109, 85, 1, 1.3225250248416885e-18, 0)
def test_pieces_tile_their_sample_in_equal_times(length, tokens, multiple, squared, targets) -> None:
    sample = SampleLength(3, length, target=min(length, targets))
    pieces = cut_into_pieces(sample, tokens, multiple, RowTime(square_ns=squared))
    assert [p.start for p in pieces] == [0, *np.cumsum([p.encoder for p in pieces])[:-1].tolist()]
    assert sum(p.encoder for p in pieces) == length
    assert sum(p.target for p in pieces) == sample.target
    assert len(pieces) <= -(-length // tokens)
    assert all(p.encoder % multiple == 0 for p in pieces[:-1])
    times = [(p.start + p.encoder - p.start) + squared * ((p.start + p.encoder) ** 2 - p.start**2) for p in pieces]
    step = 2 * multiple * (1 + 2 * squared * length)  # what rounding both ends may move
    assert max(times[:-1], default=0) - min(times[:-1], default=0) <= step + 1e-6 * max(times)


def test_squares_of_pieces_add_up_to_those_of_the_sample() -> None:
    whole = MicroBatch((SampleLength(0, 96),), "packed")
    parts = [carried(0, start, 32) for start in (0, 32, 64)]
    assert sum(count_positions(part)[1] for part in parts) == count_positions(whole)[1] == 96**2
    mixed = carried(0, 32, 32, SampleLength(5, 7))
    assert count_positions(mixed)[1] == 64**2 - 32**2 + 7**2


def test_counted_pieces_take_the_time_of_the_sample_and_hold_their_keys_values_and_gradients() -> None:
    """The numbers of 12 keys and values of 2 x 32 in each of 2 layers of a stage, 2 bytes, and 4 a gradient sum."""
    costs = AnalyticCosts(LLAMA, Topology(pp=2), overhead_ns=0)
    whole = costs.evaluate([MicroBatch((SampleLength(0, 96),), "packed")])
    parts = costs.evaluate([carried(0, start, 32) for start in (0, 32, 64)])
    assert np.abs(parts.forward_ns.sum(axis=1) - whole.forward_ns[:, 0]).max() <= 3
    assert np.abs(parts.backward_ns.sum(axis=1) - whole.backward_ns[:, 0]).max() <= 3
    a_position = 2 * 2 * 32  # keys and values of 2 groups of 16, in 2 layers
    kept = parts.stored_bytes.sum(axis=1) - whole.stored_bytes[:, 0]
    assert kept.tolist() == [4 * a_position * 64] * 2  # sums of gradients of all but the last piece's; no second copy
    full = costs.evaluate([carried(0, start, 32, recompute="full") for start in (0, 32, 64)])
    plain = costs.evaluate([MicroBatch((SampleLength(0, 96),), "packed", recompute="full")])
    assert (full.stored_bytes.sum(axis=1) - plain.stored_bytes[:, 0]).tolist() == [a_position * (2 * 96 + 4 * 64)] * 2
    assert full.stored_bytes[0].argmax() == 0, "they lie there from the first piece's forward to its backward"


def test_what_has_no_price_for_pieces_refuses_them_by_name() -> None:
    costs = TokenCosts(2)
    with pytest.raises(PlanError, match="these AdjustedCosts have no price for pieces"):
        adjust(costs, forward_only=True).evaluate([carried(7, 0, 4)])
    windows = AnalyticCosts(replace(LLAMA, sliding_window=64), Topology(pp=2))
    with pytest.raises(PlanError, match="positions 0 to 4 of sample 7"):
        windows.evaluate([carried(7, 0, 4)])
    learned = AnalyticCosts(replace(LLAMA, position="learned", max_seq_len=50), Topology(pp=2))
    with pytest.raises(PlanError, match="rows of 64 positions"):
        learned.evaluate([carried(0, 32, 32)])
    with pytest.raises(ConfigError, match="AnalyticCosts have no price for pieces"):
        Planner(Topology(pp=2), windows, 1e9, layout="packed", pieces="auto")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layout": "padded"}, 'layout "packed"'),
        ({"schedule": "1f1b"}, "adaptive schedule"),
        ({"split_policy": "packed-balanced"}, "split_policy dynapipe-ext"),
        ({"replica_counts": "equal"}, 'replica_counts "free"'),
        ({"pieces": 4}, "8 .pad_multiple. to"),
        ({"pieces": True}, "choose from off, auto, or a whole number"),
        ({"pieces": "some"}, "choose from off, auto, or a whole number"),
    ],
)
def test_settings_that_do_not_go_with_pieces_are_refused(wrong, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Planner(Topology(), TokenCosts(1), 1e9, **{"layout": "packed", "pieces": 64} | wrong)


def test_samples_with_a_decoder_side_are_not_cut() -> None:
    with pytest.raises(PlanError, match="decoder side"):
        planner(64).plan(sample_lengths([[100, 50], [30, 20]]))


def test_all_pieces_of_a_sample_are_on_one_replica_under_every_placement() -> None:
    for placement in ((0, 1, 1, 0), (0, 1, 0, 1), (0, 1)):
        topology = Topology(pp=2, dp=2, placement=placement)
        costs = TokenCosts(len(placement), ns_per_token_squared=1)
        for split in (False, True):
            made = Planner(topology, costs, 1e9, layout="packed", pieces=512, effort=300, split_backward=split)
            plan = made.plan(LONG)
            found = [pieces for replica in plan.batch.replicas for pieces in sample_pieces(replica.micro_batches)]
            assert len(found) == 3  # of the samples of 9000, 3000 and 900


def test_a_planner_of_pieces_goes_to_other_processes_and_its_evaluation_cuts_nothing() -> None:
    one = planner(512)
    assert Planner.from_json(one.to_json()) == one
    assert one.for_forwards().pieces == "off"
