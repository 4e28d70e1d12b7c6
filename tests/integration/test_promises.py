"""What a run's report and timeline promise: memory within the prediction, and no action before its input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.preloaded import Preloaded
from tests.support.trace_files import read_trace_file


@pytest.fixture(scope="module", params=["packed", "padded"])
def run_dir(request, preloaded: Preloaded, tmp_path_factory) -> Path:
    """The default model on the 4 ranks of one replica with its share of a batch, two steps, uneven stages."""
    layout = request.param
    folder = tmp_path_factory.mktemp("promises") / layout
    topology = ["--tp", "2", "--pp", "2", "--dp", "1", "--layers-per-stage", "1,3"]
    data = ["--layout", layout, "--tokens-per-batch", "2048"]
    preloaded.train("--steps", "2", *data, *topology, "--strict", "--run-dir", str(folder))
    return folder


def test_no_rank_holds_more_than_was_predicted(run_dir):
    report = json.loads((run_dir / "report.json").read_text())
    peaks = report["peak_bytes"]
    assert len(peaks["measured"]) == len(peaks["predicted"]) == 4
    for measured, predicted in zip(peaks["measured"], peaks["predicted"], strict=True):
        assert 0.75 * predicted <= measured <= predicted


def test_no_measured_action_starts_before_its_input_has_ended(run_dir):
    record = read_trace_file(run_dir / "trace.json")
    assert len(record.measured) == 2
    for trace in record.measured:
        ends = {(record.rank_names[span.rank], span.label): span.end_s for span in trace.spans}
        checked = 0
        for span in trace.spans:
            replica, _, tensor = record.rank_names[span.rank].split()
            stage, kind, micro_batch = int(span.label[0]), span.label[1], span.label[2:]
            source = stage - 1 if kind == "F" else stage + 1
            if 0 <= source <= 1:
                end_s = ends[f"{replica} pp{source} {tensor}", f"{source}{kind}{micro_batch}"]
                assert span.start_s >= end_s - 1e-6, (trace.name, span)
                checked += 1
        assert checked == len(trace.spans) // 2
        assert min(span.start_s for span in trace.spans) >= 0


def test_costs_of_a_run_follow_the_settings_of_the_next_one(run_dir):
    """Rates are measured, but widths and sharding come from the settings that use them."""
    from dynapipe_ext.costs.interchange import read_cost_file
    from dynapipe_ext.launch.job.configured import configured_costs
    from dynapipe_ext.settings.train_config import TrainConfig

    costs = read_cost_file(run_dir / "costs.json")
    wide = configured_costs(TrainConfig(), costs)
    narrow = configured_costs(TrainConfig().with_values(model={"dtype": "bfloat16"}, topology={"pp": 4}), costs)
    assert (wide.param_bytes, wide.activation_bytes_per_value, wide.num_stages) == (4, 4, 2)
    assert (narrow.param_bytes, narrow.activation_bytes_per_value, narrow.num_stages) == (2, 2, 4)
    assert wide.flops_per_s == narrow.flops_per_s
    assert wide.layer_bytes_factor == narrow.layer_bytes_factor > 0
