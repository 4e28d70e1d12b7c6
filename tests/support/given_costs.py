"""Costs for short runs: to measure them takes longer than such a run, and two runs would plan differently."""

from __future__ import annotations

import json
from pathlib import Path

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.settings.train_config import TrainConfig


def write_costs(config: TrainConfig, vocab_size: int, path: Path) -> None:
    """Counted costs of a run's model, for `--costs`."""
    costs = analytic_costs(config, architecture_of(config, vocab_size), flops_per_s=50e9, overhead_ns=1_000_000)
    path.write_text(json.dumps(cost_model_to_json(costs)))
