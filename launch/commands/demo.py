"""`dynapipe demo`: the usual ways and ours on the same samples, run by emulated ranks, with a page; no training."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynapipe_ext.costs.interchange import read_run_costs
from dynapipe_ext.data.shipped_lengths import SOURCE, shipped_lengths
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import ending
from dynapipe_ext.launch.commands.plan_inputs import read_lengths
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.launch.job.saved_settings import read_saved_settings
from dynapipe_ext.launch.run.emulated import PlannedJob, emulated_comparison
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import show
from dynapipe_ext.tools.show.comparison import Comparison
from dynapipe_ext.tools.show.comparison_page import write_comparison_page

PAGE = "emulated.html"
_FLOPS_PER_S, _OVERHEAD_NS, _VOCAB_SIZE = 156e12, 500_000, 50_257  # half of an A100's peak; of an action
_NUM_SAMPLES, _NUM_BATCHES = 2_000, 2

_EPILOG = """examples:
  dynapipe demo
  dynapipe demo runs/latest
  dynapipe demo --html demo.html

Without a run: GPT 6.7B on 8 ranks, and lengths of public instruction data. With one: its settings, data and costs.
Ranks run the plans' instructions and sleep for the seconds that costs count, so idle time shows on any machine. It
needs neither torch nor a GPU.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="of this run, instead of what is shipped")
    parser.add_argument(
        "--html", metavar="FILE", help=f"where the page goes (default: {PAGE} in the run's directory, or in runs/)"
    )


def run(args: argparse.Namespace) -> int:
    job = shipped_job() if args.run_dir is None else job_of_run(Path(args.run_dir))
    page = Path(args.html) if args.html else Path(args.run_dir or "runs") / PAGE
    comparison = emulated_comparison(job, num_batches=_NUM_BATCHES)
    write_comparison_page(page, comparison)
    show(*lines_of(comparison, page))
    return 0


def lines_of(comparison: Comparison, page: Path) -> list[str]:
    """The last lines of the output: what was measured, how, and where the page is."""
    return [comparison.how, comparison.result, f"page: {page}"]


def shipped_job() -> PlannedJob:
    """GPT 6.7B, PP4 x DP2, on GPUs like an A100, and public lengths."""
    config = TrainConfig().with_values(
        topology={"tp": 1, "pp": 4, "dp": 2, "placement": "v"},
        model={
            "num_layers": 32,
            "hidden_size": 4096,
            "num_heads": 32,
            "num_query_groups": 32,
            "ffn_hidden_size": 16384,
            "max_seq_len": 2048,
            "dtype": "bfloat16",
        },
        data={"tokens_per_batch": 32_768},
        plan={"split_backward": True, "memory_limit_gb": 72.0},
    )
    architecture = architecture_of(config, _VOCAB_SIZE)
    costs = analytic_costs(config, architecture, flops_per_s=_FLOPS_PER_S, overhead_ns=_OVERHEAD_NS)
    lengths = shipped_lengths(_NUM_SAMPLES, most=config.model.max_seq_len)
    counted = f"GPT 6.7B, FLOPs counted at {_FLOPS_PER_S / 1e12:g} TFLOP/s a rank, half of an A100's peak"
    return PlannedJob(config=config, costs=costs, lengths=lengths, samples_from=SOURCE, costs_from=counted)


def job_of_run(run_dir: Path) -> PlannedJob:
    """What a run has planned its steps from. Errors: ConfigError for a folder without a run."""
    config, costs_file = read_saved_settings(run_dir), run_dir / "costs.json"
    if config is None or not costs_file.is_file():
        missing = "costs.json" if config else "config.toml"
        raise ConfigError(f"{run_dir} holds no run, as it has no {missing}: name a run's directory")
    costs, num_cores = read_run_costs(costs_file)
    return PlannedJob(
        config=config,
        costs=costs,
        lengths=read_lengths(run_dir / "data" / "lengths.npy"),
        samples_from=f"the data of {run_dir}",
        costs_from="the run's, of its model on one core" if num_cores else "the run's",
    )
