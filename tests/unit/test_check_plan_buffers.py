"""`dynapipe check-plan` proves the instructions of a file's plan: buffers in flight fit, and replicas agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.launch import cli
from dynapipe_ext.models.architecture import Architecture
from tests.unit.test_check_plan import checked, made

SHAPE = Architecture.gpt(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=128,
    gated_mlp=False,
    vocab_size=256,
    max_seq_len=4096,
    tied_embeddings=True,
)


def test_a_plan_whose_buffers_in_flight_take_it_above_the_limit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = made(tmp_path, "gpt_6.7b")
    predicted = [replica["predicted"] for replica in raw["replicas"]]
    pairs = [pair for one in predicted for pair in zip(one["peak_bytes"], one["in_flight_bytes"], strict=True)]
    whole = max(peak + in_flight for peak, in_flight in pairs)
    assert whole > max(peak for peak, _ in pairs)
    for limit, count in ((whole, 0), (whole - 1, 1)):
        _, verdict = checked(tmp_path, raw, "gpt_6.7b", capsys, **{"--memory-limit-gb": str(limit / 1e9)})
        over = f"needs {whole} B at its peak with buffers in flight but the limit is {limit} B"
        assert sum(over in fault for fault in verdict["faults"]) == count
        assert not any("at its peak but the limit" in fault for fault in verdict["faults"])


def test_replicas_that_meet_inside_micro_batches_must_agree_in_a_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The costs of a run under ZeRO stage 3 say so; the plan was made for another."""
    shape, topology = SHAPE, Topology(pp=2, dp=2)
    np.save(tmp_path / "lengths.npy", np.array([400, 30, 20, 70, 310, 50, 44]))
    flags = ["--lengths", str(tmp_path / "lengths.npy"), "--memory-limit-gb", "1", "--costs"]
    for stage in (1, 3):
        costs = AnalyticCosts(shape, topology, 1e9, 0, zero_stage=stage)  # type: ignore[arg-type]
        (tmp_path / f"zero{stage}.json").write_text(json.dumps(cost_model_to_json(costs)))
    target = str(tmp_path / "plan.json")
    size = ["--batch-size", "7", "--layout", "padded", "--step", "0"]
    assert cli.main(["plan", *flags, str(tmp_path / "zero1.json"), *size, "--json", target]) == 0
    counts = {len(replica["micro_batches"]) for replica in json.loads(Path(target).read_text())["replicas"]}
    assert len(counts) == 2
    capsys.readouterr()
    assert cli.main(["check-plan", target, *flags, str(tmp_path / "zero1.json"), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["check-plan", target, *flags, str(tmp_path / "zero3.json"), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any('replica_counts = "equal"' in fault for fault in faults)
    assert cli.main(["plan", *flags, str(tmp_path / "zero3.json"), *size]) == 2
    assert 'replica_counts = "equal"' in capsys.readouterr().err  # in the words of the ranks
