"""Costs fitted to traces: they recover the model that made the traces, and say where they do not know."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.fitted import FittedCosts, fit_costs, observations
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.errors import DataError, PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.schedules.judge.simulate import simulate
from dynapipe_ext.schedules.notation import parse_lines
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.timeline import Trace
from dynapipe_ext.tools.show.timeline import TraceRecord, read_trace_file, write_trace_file
from dynapipe_ext.topology import Topology

SHAPE = Architecture.gpt(
    num_layers=6,
    hidden_size=256,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=1024,
    gated_mlp=False,
    vocab_size=512,
    max_seq_len=1024,
    tied_embeddings=True,
)
TOPOLOGY = Topology(pp=2, layers_per_stage=(4, 2))
TRUTH = AnalyticCosts(SHAPE, TOPOLOGY, flops_per_s=1e12, overhead_ns=50_000)
BASE = replace(TRUTH, flops_per_s=7e12, overhead_ns=1)  # the right bytes, the wrong times
UNSEEN = [(3, 333), (5, 77), (1, 1000), (2, 512)]


def padded(rows: int, length: int, **more: Any) -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), **more)


def micro_batches(count: int = 40) -> list[MicroBatch]:
    chance = random.Random(1)
    return [padded(chance.randint(1, 8), chance.randint(16, 1000)) for _ in range(count)]


def recorded(batch: list[MicroBatch], *, split: bool = False) -> Trace:
    """The trace of a step whose actions take exactly what TRUTH says."""
    ids = range(len(batch))
    schedule = one_f_one_b(2, len(batch))
    if split:
        lines = [[f"{s}F{i}" for i in ids] + [f"{s}I{i} {s}W{i}" for i in ids] for s in range(2)]
        schedule = parse_lines("\n".join(f"{s}: {' '.join(line)}" for s, line in enumerate(lines)))
    trace = simulate(schedule, TRUTH.evaluate(batch))
    return trace.with_shapes([(m.rows, m.encoder_len, 0) for m in batch])


def noisy(trace: Trace, spread: float) -> Trace:
    chance = random.Random(2)
    spans = tuple(
        replace(span, end_s=span.start_s + span.duration_s * (1 + chance.uniform(-spread, spread)))
        for span in trace.spans
    )
    return Trace(spans, trace.name)


def worst_error(fitted: FittedCosts) -> float:
    batch = [padded(*shape) for shape in UNSEEN]
    ours, truth = fitted.evaluate(batch), TRUTH.evaluate(batch)
    pairs = [(ours.forward_ns, truth.forward_ns), (ours.backward_ns, truth.backward_ns)]
    return max(float(np.abs(a / b - 1).max()) for a, b in pairs)


def test_a_fit_recovers_the_coefficients_that_made_the_trace() -> None:
    fitted = fit_costs(observations(recorded(micro_batches())), BASE)
    per_square = {0: 4 * 2 * 256 / 1e3, 1: 2 * 2 * 256 / 1e3}  # layers x 2 h FLOPs at 1e3 a nanosecond
    per_token = {s: n * 2 * (SHAPE.attention_parameters + SHAPE.mlp_parameters) / 1e3 for s, n in enumerate((4, 2))}
    per_token[1] += 2 * 512 * 256 / 1e3
    for fit in fitted.fits:
        passes = {"F": 1, "B": 2}[fit.kind]
        assert fit.overhead_ns == pytest.approx(50_000, rel=0.01)
        assert fit.ns_per_token == pytest.approx(passes * per_token[fit.stage], rel=0.01)
        assert fit.ns_per_square == pytest.approx(passes * per_square[fit.stage], rel=0.01)
    assert fitted.held_out_error < 1e-4
    assert worst_error(fitted) < 1e-4


def test_a_noisy_trace_is_fitted_within_its_noise_and_the_held_out_error_says_how_well() -> None:
    fitted = fit_costs(observations(noisy(recorded(micro_batches(200)), 0.1)), BASE)
    assert worst_error(fitted) < 0.1
    assert 0.03 < fitted.held_out_error < 0.1  # the mean of |uniform(-0.1, 0.1)| is 0.05
    assert fitted.provenance["held_out_error"] == fitted.held_out_error


def test_split_backwards_are_fitted_as_their_two_parts() -> None:
    fitted = fit_costs(observations(recorded(micro_batches(), split=True)), BASE)
    batch = [padded(*shape) for shape in UNSEEN]
    ours, truth = fitted.evaluate(batch), TRUTH.evaluate(batch)
    assert np.abs(ours.backward_ns - truth.backward_ns).max() <= 2 + truth.backward_ns.max() * 1e-4
    assert np.abs(ours.weight_ns / truth.weight_ns - 1).max() < 0.01


def test_weight_gradients_under_full_recomputation_are_fitted_apart() -> None:
    """A trainer that drops recomputed activations has nothing to do in such a W: that must not bend the others."""
    batch = [replace(m, recompute="full" if i % 2 else "none") for i, m in enumerate(micro_batches(80))]
    full = np.array([m.recompute == "full" for m in batch])
    costs = TRUTH.evaluate(batch)
    taken = replace(
        costs, weight_ns=np.where(full, 3_000, costs.weight_ns), backward_ns=costs.backward_ns + 3_000 * full
    )
    ids = range(len(batch))
    lines = [" ".join([*(f"{s}F{i}" for i in ids), *(f"{s}I{i} {s}W{i}" for i in ids)]) for s in range(2)]
    trace = simulate(parse_lines("\n".join(f"{s}: {line}" for s, line in enumerate(lines))), taken)
    fitted = fit_costs(observations(trace, topology=TOPOLOGY, micro_batches={0: batch}), BASE)
    assert fitted.recomputes == ("none", "full")
    ours = fitted.evaluate(batch)
    for name in ("backward_ns", "weight_ns"):
        assert getattr(ours, name) == pytest.approx(getattr(taken, name), rel=0.01), name


def test_whole_backwards_leave_nothing_to_put_off_under_full_recomputation() -> None:
    batch = [replace(m, recompute="full" if i % 2 else "none") for i, m in enumerate(micro_batches(80))]
    trace = simulate(one_f_one_b(2, len(batch)), TRUTH.evaluate(batch))
    fitted = fit_costs(observations(trace, topology=TOPOLOGY, micro_batches={0: batch}), BASE, split_w=0.4)
    ours = fitted.evaluate([padded(2, 300), padded(2, 300, recompute="full")])
    assert ours.weight_ns[:, 0].tolist() == pytest.approx((0.4 * ours.backward_ns[:, 0]).tolist(), abs=1)
    assert ours.weight_ns[:, 1].tolist() == [0, 0]


def test_bytes_and_transfers_are_those_of_the_base_and_times_are_whole_nanoseconds() -> None:
    fitted = fit_costs(observations(recorded(micro_batches())), BASE)
    batch = [padded(*shape) for shape in UNSEEN]
    ours, base = fitted.evaluate(batch), BASE.evaluate(batch)
    for name in ("stored_bytes", "working_bytes", "transfer_ns", "transfer_bytes", "static_bytes"):
        assert getattr(ours, name).tolist() == getattr(base, name).tolist()
    assert {getattr(ours, name).dtype for name in ("forward_ns", "backward_ns", "weight_ns")} == {np.dtype(np.int64)}
    assert (ours.weight_ns <= ours.backward_ns).all()


def test_packed_documents_are_fitted_by_their_own_lengths() -> None:
    chance = random.Random(3)
    batch = [
        MicroBatch(tuple(SampleLength(i, chance.randint(8, 500)) for i in range(chance.randint(1, 6))), "packed")
        for _ in range(40)
    ]
    trace = simulate(one_f_one_b(2, len(batch)), TRUTH.evaluate(batch))
    fitted = fit_costs(observations(trace, topology=TOPOLOGY, micro_batches={0: batch}), BASE)
    assert worst_error(replace(fitted, longest_row=1000)) < 1e-4


def test_rows_are_priced_up_to_a_quarter_beyond_the_longest_recorded_one_and_refused_above() -> None:
    fitted = fit_costs(observations(recorded([padded(1 + i % 5, 20 * (1 + i)) for i in range(40)])), BASE)
    assert fitted.longest_row == 800
    fitted.evaluate([padded(1, 1000)])
    with pytest.raises(PlanError, match=r"attends over 1001 positions .* has 800"):
        fitted.evaluate([padded(1, 1001)])
    assert (fitted.evaluate_shapes([1, 1], [1000, 1001]).forward_ns == INFEASIBLE).tolist() == [[False, True]] * 2


def test_recomputation_that_was_not_recorded_is_refused() -> None:
    fitted = fit_costs(observations(recorded(micro_batches())), BASE)
    with pytest.raises(PlanError, match="recompute 'full' but only none"):
        fitted.evaluate([padded(1, 64, recompute="full")])
    assert (fitted.evaluate_shapes(1, 64, recompute="full").backward_ns == INFEASIBLE).all()


def test_shapes_as_arrays_cost_what_micro_batches_cost() -> None:
    fitted = fit_costs(observations(recorded(micro_batches())), BASE)
    one = fitted.evaluate([padded(*shape) for shape in UNSEEN])
    two = fitted.evaluate_shapes([rows for rows, _ in UNSEEN], [length for _, length in UNSEEN])
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (micro_batches(7), "7 spans of B on stage 0 with recompute 'none' were recorded but a fit needs at least 8"),
        ([padded(1 + i % 4, 64) for i in range(20)], "too few different shapes"),  # one length only
    ],
)
def test_too_few_or_too_alike_spans_are_refused(batch: list[MicroBatch], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_costs(observations(recorded(batch)), BASE)


def test_spans_without_shape_are_refused_and_waits_are_passed_over() -> None:
    trace = recorded(micro_batches())
    waits = Trace((*trace.spans, replace(trace.spans[0], label="wait 1F3")))
    assert observations(waits) == observations(trace)
    with pytest.raises(DataError, match=r"has shape \(\)"):
        observations(Trace((replace(trace.spans[0], shape=()),)))


def test_a_trace_on_disk_gives_the_same_costs(tmp_path: Path) -> None:
    trace = recorded(micro_batches())
    write_trace_file(tmp_path / "trace.json", TraceRecord(measured=(trace,)))
    (again,) = read_trace_file(tmp_path / "trace.json").measured
    ours, theirs = (fit_costs(observations(one), BASE) for one in (trace, again))
    batch = [padded(*shape) for shape in UNSEEN]
    assert np.abs(ours.evaluate(batch).forward_ns - theirs.evaluate(batch).forward_ns).max() <= 1


def test_json_round_trip_keeps_costs_and_fingerprint_and_provenance_does_not_change_it() -> None:
    fitted = fit_costs(observations(recorded(micro_batches())), BASE, provenance={"run": "first"})
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(fitted))))
    assert again == fitted
    assert again.fingerprint() == fitted.fingerprint() == replace(fitted, provenance={}).fingerprint()
    assert replace(fitted, longest_row=1).fingerprint() != fitted.fingerprint()
    with pytest.raises(DataError, match="fitted costs have the base None"):
        cost_model_from_json({"kind": "fitted"})
