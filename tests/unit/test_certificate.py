"""Certificates of plans: where they come from, what they refuse, and that an independent judge has the same bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.evaluation.bounds import Certificate
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import certify, free_batch_ns
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.show.plan import certificate_of_file
from tests.support.limits import LIMIT_S

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.mark.parametrize(
    ("file", "model", "layers", "topology", "extra"),
    [
        ("gpt_64k.json", "gpt_6.7b", 32, Topology(pp=4, dp=2), (-1, 0)),
        ("t5_64k.json", "t5_11b", 24, Topology(tp=2, pp=4), (0, 2)),
    ],
)
def test_the_batch_bound_of_measured_tables_is_the_judges(
    file: str, model: str, layers: int, topology: Topology, extra: tuple[int, int], tmp_path: Path
) -> None:
    data = SHARED / "data"
    if not (SHARED / "judge_plan.py").exists() or not (data / "a100_layer_costs").exists():
        pytest.skip("there are no measured tables beside the repository")
    lengths = np.array(json.loads((data / "reference_plans" / file).read_text())[0]["lengths"])[::3]
    (tmp_path / "batch.json").write_text(json.dumps([{"lengths": lengths.tolist()}]))
    encoder, decoder = np.maximum(1, lengths[:, 0] + extra[0]), np.maximum(1, lengths[:, 1] + extra[1])
    samples = sample_lengths(np.stack([encoder, decoder * (model == "t5_11b")], axis=1))
    costs = CostTable.read_a100(data / "a100_layer_costs", model, topology=topology, num_layers=layers)
    planner = Planner(topology, costs, 36_000 * 10**6, pad_multiple=1, effort=0)
    plan = planner.plan(samples)
    certificate = certify(plan, costs, samples, memory_limit_bytes=36_000 * 10**6)
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan, topology, certificate=certificate)))
    flags = ["--costs", data / "a100_layer_costs", "--model", model, "--layers", layers, "--memory-mb", 36_000]
    flags += ["--batch", tmp_path / "batch.json", "--index", 0, "--extra", *extra]
    command = [sys.executable, SHARED / "judge_plan.py", *flags, "--plan", tmp_path / "plan.json"]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True, text=True, check=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    judged = json.loads(done.stdout)
    assert judged["valid"]
    assert certificate.batch_ns is not None
    assert certificate.batch_ns / 1e9 > 1.01 * judged["batch_bound_s"]  # which knows no memory limit
    unlimited = certify(plan, costs, samples).batch_ns
    assert unlimited is not None
    assert unlimited / 1e9 == pytest.approx(judged["batch_bound_s"], abs=5e-6)
    free_ns = free_batch_ns(plan, costs, samples)
    assert free_ns is not None
    assert free_ns / 1e9 == pytest.approx(judged["free_batch_bound_s"], abs=5e-6)
    assert certificate.bound_ns / 1e9 >= max(replica["lower_bound_s"] for replica in judged["replicas"]) - 2e-6


SAMPLES = sample_lengths([40, 9, 31, 64, 18])


def test_a_certificate_is_in_the_plans_file_and_comes_out_again(tmp_path: Path) -> None:
    planner = Planner(Topology(pp=2, dp=2), TokenCosts(2, static_bytes=7), 10**6, layout="padded", effort=0)
    plan = planner.plan(SAMPLES)
    certificate = certify(plan, planner.costs, SAMPLES, memory_limit_bytes=10**6)
    certificate = replace(certificate, free_batch_ns=free_batch_ns(plan, planner.costs, SAMPLES))
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan, planner.topology, certificate=certificate)))
    assert certificate_of_file(read_plan_file(tmp_path / "plan.json")) == certificate
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan, planner.topology)))
    assert certificate_of_file(read_plan_file(tmp_path / "plan.json")) is None
    assert certificate.gap is not None
    assert certificate.batch_gap is not None
    assert 0 <= certificate.gap <= certificate.batch_gap
    assert certificate.batch_ns is not None
    assert certificate.free_batch_ns is not None
    assert 0 < certificate.free_batch_ns <= certificate.batch_ns
    unlimited = certify(plan, planner.costs, SAMPLES)
    assert [replica.byte_time_ns for replica in unlimited.replicas] == [None, None]
    assert Certificate(makespan_ns=0, replicas=(), batch_ns=None).gap is None


def test_a_plan_that_beats_its_bound_was_priced_by_another_model() -> None:
    planner = Planner(Topology(pp=2), TokenCosts(2), 10**6, layout="padded", effort=0)
    plan = planner.plan(SAMPLES)
    with pytest.raises(PlanError, match="priced by another cost model"):
        certify(plan, TokenCosts(2, ns_per_token=5000), SAMPLES)


def test_a_plan_of_cut_samples_has_no_batch_bound() -> None:
    planner = Planner(Topology(), TokenCosts(1), 10**6, layout="padded", effort=0)
    plan = planner.plan([SampleLength(0, 20, 0, 20)])
    halves = tuple(MicroBatch((SampleLength(0, 10, 0, 10, start),)) for start in (0, 10))
    pieces = replace(plan.batch, replicas=(replace(plan.batch.replicas[0], micro_batches=halves),))
    cut = replace(plan, batch=pieces)
    assert certify(plan, planner.costs, [SampleLength(0, 20, 0, 20)]).batch_ns is not None
    assert certify(cut, planner.costs, [SampleLength(0, 20, 0, 20)]).batch_ns is None
