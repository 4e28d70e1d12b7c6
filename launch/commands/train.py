"""`dynapipe train`: a job is requested and settled, then ranks are forked on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import secrets
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.free_memory import Room, sizes_of_devices
from dynapipe_ext.executor.plans.channel import store_patience_s
from dynapipe_ext.launch.job.model_folder import configured_cut
from dynapipe_ext.launch.job.requested import add_arguments, requested_job
from dynapipe_ext.launch.job.room import Place
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.launch.job.run_data import PREPARE_LIMIT_S
from dynapipe_ext.launch.job.settled import SettledJob, settled_job
from dynapipe_ext.launch.processes.cluster import run_local, set_process_title
from dynapipe_ext.launch.processes.env import RankEnv, limit_threads, num_cores, visible_devices
from dynapipe_ext.launch.processes.signals import outlive_readers
from dynapipe_ext.launch.rank.one_rank import rank_title, train_rank
from dynapipe_ext.launch.run.outcome import claimed
from dynapipe_ext.models.layer_pattern import ProvenCut
from dynapipe_ext.settings.train_config import DEGREES, TrainConfig
from dynapipe_ext.tools.console import counted, error_console, say_loading

__all__ = ["add_arguments", "run"]

_DEGREES_ON = {1: (1, 1, 1), 2: (1, 2, 1), 4: (1, 2, 2)}  # tp, pp, dp by the number of accelerators


def run(args: argparse.Namespace) -> int:
    take_devices(args)
    trained(args)
    return 0


def take_devices(args: argparse.Namespace) -> None:
    """Have ranks that nobody has counted be as many as the accelerators here suffice for, where they are fewer than the
    usual 8, and say so."""
    if args.config or args.model or args.resume or any(getattr(args, name) is not None for name in DEGREES):
        return
    num_devices = len(sizes_of_devices(visible_devices()))
    degrees = _DEGREES_ON.get(1 << (num_devices.bit_length() - 1) if num_devices else 0)
    if degrees is None:
        return
    args.tp, args.pp, args.dp = degrees
    if args.pp == 1 and args.placement is None:
        args.placement = "linear"
    num_ranks = counted(math.prod(degrees), "rank")
    print(
        f"{counted(num_devices, 'GPU')} here: {num_ranks} (TP{args.tp} x PP{args.pp} x DP{args.dp}) instead of 8; "
        "CUDA_VISIBLE_DEVICES= has all 8 run on the CPU",
        file=sys.stderr,
    )


def trained(args: argparse.Namespace) -> Path:
    """Train as the flags say. The run's directory."""
    limit_threads()  # before anything loads torch, which measures with as many as it starts with
    request = requested_job(args, _place(), secret=secrets.token_hex(32))  # which the ranks inherit
    console = error_console()
    overwrite = request.overwrite and request.resumed is None  # else it is what --output holds that may be lost
    # A store that has served the run before is waited for.
    store_wait_s = store_patience_s(request.config.job.timeout_s) if request.resumed else None
    with claimed(request, console, overwrite=overwrite, store_wait_s=store_wait_s) as request:
        config = request.config
        job = settled_job(request, _ThisMachine(config), console)
        outlive_readers()
        limits = {"save_s": config.checkpoint.grace_s, "stopped_s": config.job.timeout_s}
        run_local(partial(_rank, job), job.topology.world_size, **limits)
    return job.run_dir


def _place() -> Place:
    """All ranks are forked on this machine."""
    return Place(room=Room.here(visible_devices()))


def _rank(job: SettledJob, env: RankEnv) -> int:
    set_process_title(rank_title(env, job.config))
    return train_rank(env, job)


class _ThisMachine:
    """The machine that ranks are forked on, all of them."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def place(self) -> Place:
        return _place()

    def num_cores(self) -> int | None:
        _import_once(self._config)
        from dynapipe_ext.executor.device import rank_device

        return num_cores() if rank_device(0).type == "cpu" else None

    def proven_cut(self, config: TrainConfig) -> ProvenCut:
        """In a process of its own, like measured costs."""
        _import_once(config)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "cut.json"

            def alone(env: RankEnv) -> int:
                answer: dict[str, Any]
                try:
                    answer = {"cut": configured_cut(config).to_json()}
                except ConfigError as error:
                    answer = {"refusal": str(error)}
                path.write_text(json.dumps(answer))
                return 0

            run_local(alone, 1, timeout_s=max(config.job.timeout_s, PREPARE_LIMIT_S))
            answer = json.loads(path.read_text())
        if "refusal" in answer:
            raise ConfigError(answer["refusal"])
        return ProvenCut.from_json(answer["cut"])

    def measured_costs(self, config: TrainConfig, vocab_size: int) -> CostModel:
        """In a process of its own: torch's threads and process groups do not survive a fork."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "costs.json"

            def alone(env: RankEnv) -> int:
                costs = settle_costs(config, vocab_size)
                path.write_text(json.dumps(cost_model_to_json(costs)))
                return 0

            limits = {"timeout_s": max(config.job.timeout_s, PREPARE_LIMIT_S), "stopped_s": config.job.timeout_s}
            run_local(alone, 1, **limits)
            return cost_model_from_json(json.loads(path.read_text()))


def _import_once(config: TrainConfig) -> None:
    """What the ranks need, imported before they are forked: once instead of once a rank."""
    say_loading("torch", "megatron-core")
    from dynapipe_ext.executor.stages import megatron_cpu

    megatron_cpu.install()
    needed = ["launch.rank.variant_run", "executor.store.redis"]
    if config.model.uses_transformers:
        needed.append("launch.rank.transformers_run")
    else:
        needed.append("launch.rank.megatron_run")
    if config.lora.enabled:
        needed.append("executor.stages.transformers.adapters")
    for name in needed:
        importlib.import_module(f"dynapipe_ext.{name}")
