"""`dynapipe quickstart`: a small model trained on real ranks, then its first steps in several ways on emulated ranks.

Real ranks that share cores cannot show idle time, as an idle rank lends its core. Emulated ones can.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.launch.command_parser import ending
from dynapipe_ext.launch.commands import train
from dynapipe_ext.launch.commands.demo import PAGE, job_of_run, lines_of
from dynapipe_ext.launch.job.requested import TRAINING_STATUSES
from dynapipe_ext.launch.run.emulated import PlannedJob, emulated_comparison
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from dynapipe_ext.tools.console import counted, show
from dynapipe_ext.tools.show.comparison_page import write_comparison_page
from dynapipe_ext.tools.show.run_page import PAGE_FILE

_EPILOG = """examples:
  dynapipe quickstart
  dynapipe quickstart --steps 30
  dynapipe quickstart --data my.jsonl --truncate

It takes the flags of `dynapipe train`, and its settings from launch/configs/quickstart.toml where no other are named.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.epilog = ending(_EPILOG, TRAINING_STATUSES)


def run(args: argparse.Namespace) -> int:
    train.take_devices(args)
    shipped = Path(str(files("dynapipe_ext.launch") / "configs" / "quickstart.toml"))
    if not (args.config or args.model or args.resume):
        args.config = str(shipped)
    run_dir = train.trained(args)
    show(*_compared(run_dir, TrainConfig.read(shipped)))
    return 0


def _compared(run_dir: Path, shipped: TrainConfig) -> list[str]:
    """The last lines: the ways on emulated ranks, the loss of the real ones, and where both are to be seen."""
    report = RunReport.read(run_dir / "report.json")
    losses = report.result.losses
    loss = f"the real run: loss {losses[0]:.3g} → {losses[-1]:.3g} in {counted(report.steps, 'step')}"
    lines = [f"{loss}; its curve and all else: {run_dir / PAGE_FILE}"]
    print("comparing on emulated ranks, for some seconds", file=sys.stderr, flush=True)
    try:
        comparison = emulated_comparison(_with_pipeline(job_of_run(run_dir), shipped))
    except DynaPipeError as error:
        return [f"no comparison on emulated ranks: {error}", *lines]
    page = run_dir / PAGE
    write_comparison_page(page, comparison)
    how, result, where = lines_of(comparison, page)
    return [how, result, *lines, where.replace("page:", "the comparison's page:")]


def _with_pipeline(job: PlannedJob, shipped: TrainConfig) -> PlannedJob:
    """The job, on the shipped pipeline where it has none: emulated ranks need no devices."""
    if job.config.topology.pp > 1:
        return job
    return replace(job, config=replace(job.config, topology=shipped.topology))
