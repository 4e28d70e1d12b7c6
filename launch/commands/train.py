"""`dynapipe train`: settings, data, costs and store are settled first, then ranks are forked on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.sample_selection import data_settings
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import add_truncate, cut_at, ending
from dynapipe_ext.launch.env import RankEnv, debug_settings, limit_threads, num_cores
from dynapipe_ext.launch.job.job import check_batches, check_fits, settled_steps, topology_of, variants
from dynapipe_ext.launch.job.model_folder import (
    adapters_line,
    dropout_line,
    prediction_line,
    refuse_unsupported,
    settings_of_model,
    usual_settings,
    widened_line,
)
from dynapipe_ext.launch.job.placement import batches_to_place, followed_placement, trials_table
from dynapipe_ext.launch.job.run_costs import resumed_costs, settle_costs
from dynapipe_ext.launch.job.run_data import (
    check_data,
    data_lines,
    refuse_other_data,
    refuse_pieces,
    run_data,
)
from dynapipe_ext.launch.job.settled import SettledPlanning, placed_planning
from dynapipe_ext.launch.processes.cluster import run_local, set_process_title
from dynapipe_ext.launch.rank.rank_log import require_loggers
from dynapipe_ext.launch.rank.train_rank import (
    TrainingJob,
    data_progress,
    rank_title,
    ranks_line,
    refuse_done,
    show_samples,
    to_go_on_from,
    train_rank,
)
from dynapipe_ext.launch.run.outcome import keeping_what_ran
from dynapipe_ext.launch.run.run_directory import RunDirectory, place_of_resumed, run_to_resume
from dynapipe_ext.launch.run.trained_model import refuse_output
from dynapipe_ext.launch.setting_flags import add_setting_flags, settings_of_flags
from dynapipe_ext.launch.store import RedisServer, asked_store, greet_store
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import say_loading

_EPILOG = """examples:
  dynapipe train
  dynapipe train --data my.jsonl --truncate --steps 100 --run-dir runs/mine
  dynapipe train --model my-llama --data chats.jsonl --output tuned --epochs 2 --eval-fraction 0.05 --eval-every 50
  dynapipe train --config launch/configs/quickstart.toml --layout packed --compare
  dynapipe train --resume latest --steps 80
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("--config", metavar="FILE", help="settings in TOML; flags override them")
    parser.add_argument("--model", metavar="MODEL", help="its folder: sizes, weights, tokenizer and chat template")
    add_setting_flags(parser)
    parser.add_argument("--warmup", metavar="N", help="steps of rising learning rate, or below 1 the part of all steps")
    parser.add_argument("--show-samples", type=int, default=0, metavar="N", help="print what N samples become")
    add_truncate(parser, "--max-seq-len; without --truncate longer ones are refused")
    parser.add_argument(
        "--store", metavar="URL", help="your own Redis-compatible server, or a file with its URL (default: embedded)"
    )
    parser.add_argument("--insecure-store", action="store_true", help="allow a store without TLS on another machine")
    parser.add_argument("--overwrite", action="store_true", help="lose what --run-dir and --output hold")
    parser.add_argument(
        "--resume", metavar="RUN_DIR", help='go on from its newest checkpoint; "latest": the newest run'
    )
    parser.add_argument("--compare", action="store_true", help="run the usual ways beside the configured one")


def config_from(args: argparse.Namespace) -> TrainConfig:
    """The file's settings, or those of the run to go on with, or the defaults, with the flags on top."""
    if args.show_samples < 0:
        raise ConfigError(f"--show-samples is {args.show_samples} but must be at least 0")
    if args.epochs == 0:
        raise ConfigError("--epochs is 0, no pass over the data: give more, or --steps")
    if args.epochs is not None and args.steps is not None:
        raise ConfigError(f"--epochs {args.epochs:g} and --steps {args.steps} both say how long to train: give one")
    config = TrainConfig()
    if args.config:
        config = TrainConfig.read(args.config)
    elif args.resume:
        settings = run_to_resume(args.resume) / "config.toml"
        if not settings.is_file():
            raise ConfigError(f"--resume {args.resume} holds no run, as it has no config.toml: name a run's directory")
        config = TrainConfig.read(settings)
    if args.resume:
        place = place_of_resumed(config.run.run_dir, run_to_resume(args.resume))
        config = config.with_values(run={"run_dir": place})
    if args.model:
        config = _with_model(config, args)
    tables: dict[str, dict[str, Any]] = settings_of_flags(
        args, {"debug": debug_settings()}, of_file=bool(args.config or args.resume)
    )
    optimizer = tables.setdefault("optimizer", {})
    if "lr" in optimizer and "min_lr" not in optimizer:
        optimizer["min_lr"] = config.optimizer.min_lr * optimizer["lr"] / config.optimizer.lr
    if args.warmup is not None:
        optimizer |= _warmup(args.warmup)
    if args.data is not None:
        tables["data"] |= data_settings(args.data)
    if args.truncate is not None:
        tables.setdefault("data", {})["truncate"] = True
    if args.truncate not in (None, True):
        tables["model"] = {"max_seq_len": cut_at(args.truncate, None)} | tables.get("model", {})
        if tables["model"]["max_seq_len"] != args.truncate:
            raise ConfigError(f"--truncate is {args.truncate} and --max-seq-len {args.max_seq_len}: give one of them")
    return config.with_values(**tables)


def resumed_run(args: argparse.Namespace, config: TrainConfig) -> tuple[str, Path | None]:
    """The run's directory (empty: a new one), and the checkpoint that --resume goes on from. Errors: ConfigError."""
    if not args.resume:
        return config.run.run_dir, None
    if args.run_dir is not None:
        raise ConfigError(f"--resume {args.resume} goes on in its own directory: leave out --run-dir {args.run_dir}")
    run_dir = run_to_resume(args.resume)
    return str(run_dir), to_go_on_from(run_dir, config, compare=args.compare, overwrite=args.overwrite)


def _with_model(config: TrainConfig, args: argparse.Namespace) -> TrainConfig:
    """With what `--model` says; the flags come on top. Errors: ConfigError where another flag says it too."""
    given = {"--resume": args.resume, "--architecture": args.architecture, "--init-from": args.init_from}
    if also := [flag for flag, value in given.items() if value]:
        raise ConfigError(f"--model {args.model} says what {', '.join(also)} would: leave one of them out")
    tables = settings_of_model(args.model, tokenizer=args.tokenizer)
    if not args.config:
        num_ranks = (args.tp or 1) * (args.pp or 1) * (args.dp or 1)
        tables = usual_settings(tables, num_ranks=num_ranks, adapts=bool(args.lora)) | tables
    return config.with_values(**tables)


def _warmup(text: str) -> dict[str, Any]:
    """
    >>> _warmup("100"), _warmup("0.03")
    ({'warmup_steps': 100, 'warmup_fraction': 0.0}, {'warmup_fraction': 0.03})
    """
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"--warmup is {text!r} but must be steps, like 100, or a part of them, like 0.03") from None
    if 0 < value < 1:
        return {"warmup_fraction": value}
    if not value.is_integer():
        raise ConfigError(f"--warmup is {text}, neither a number of steps nor a part of them below 1")
    return {"warmup_steps": int(value), "warmup_fraction": 0.0}


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    limit_threads()
    console = Console(stderr=True, highlight=False)
    refuse_unsupported(config)
    topology = topology_of(config)  # refuses what does not divide before anything is prepared
    variants(config, compare=args.compare)
    described = config.model.described
    if config.model.init_from and (described is None or described.family != "transformers"):
        say_loading("torch")
        from dynapipe_ext.launch.job.model_folder import open_initial_weights

        open_initial_weights(config.model.init_from, described)
    address = asked_store(args.store, insecure=args.insecure_store)
    require_loggers(config)
    run_dir, resumed = resumed_run(args, config)
    refuse_output(config, run_dir, overwrite=args.overwrite)
    overwrite = args.overwrite and resumed is None  # else it is what --output holds that may be lost
    with RunDirectory(run_dir, overwrite=overwrite, resume=resumed is not None) as directory:
        if address is not None:
            greet_store(address)  # refused here, once, rather than by every rank
        progress, advance = data_progress(config)
        with progress:
            data = run_data(config, advance)
        console.print("\n".join(data_lines(data)), markup=False, soft_wrap=True)
        show_samples(data.whole, args.show_samples, console)
        refuse_pieces(config, data, compare=args.compare)
        check_data(data, lambda lengths: check_batches(config, lengths))
        config = settled_steps(config, data.train.lengths)
        if resumed is not None:
            refuse_done(resumed, config)
            refuse_other_data(resumed, config, data)
        has_costs = config.plan.costs or resumed is not None
        given = settle_costs(config, data.whole.vocab_size, resumed_costs(resumed)) if has_costs else None
        _import_once(config)
        # Its report is written once everything has ended.
        with keeping_what_ran(directory), ExitStack() as stack:
            if address is None:
                server = stack.enter_context(RedisServer(binary=config.job.redis_server or None))
                address = server.address
                console.print(f"store: embedded {server.name} {server.version} on a unix socket")
            costs = given or _measure(config, data.whole.vocab_size)
            notices = (
                followed_placement(config),
                adapters_line(config),
                widened_line(config),
                dropout_line(config),
                prediction_line(config.model.architecture),
            )
            if said := "\n".join(line for line in notices if line):
                console.print(said, markup=False, soft_wrap=True)
            planning = SettledPlanning(config=config, costs=costs, topology=topology_of(config), num_cores=_num_cores())
            planning, trials = placed_planning(planning, partial(batches_to_place, config, data.train.lengths))
            config, costs = planning.config, planning.costs
            if trials:
                console.print(trials_table(trials))
            check_data(data, lambda lengths: check_fits(config, costs, lengths))
            console.print(ranks_line(topology), soft_wrap=True)
            job = TrainingJob(
                config, args.compare, directory.path, address, costs, data, resumed, overwrite=args.overwrite
            )
            limits = {"save_s": config.checkpoint.grace_s, "stopped_s": config.job.timeout_s}
            run_local(partial(_rank, job), topology.world_size, **limits)
    return 0


def _rank(job: TrainingJob, env: RankEnv) -> int:
    set_process_title(rank_title(env, job.config))
    return train_rank(env, job)


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


def _num_cores() -> int | None:
    """The cores of the ranks to fork; None on accelerators."""
    from dynapipe_ext.executor.device import rank_device

    return num_cores() if rank_device(0).type == "cpu" else None


def _measure(config: TrainConfig, vocab_size: int) -> CostModel:
    """In a process of its own: torch's threads and process groups do not survive a fork."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "costs.json"

        def alone(env: RankEnv) -> int:
            costs = settle_costs(config, vocab_size)
            path.write_text(json.dumps(cost_model_to_json(costs)))
            return 0

        run_local(alone, 1, timeout_s=config.job.timeout_s)
        return cost_model_from_json(json.loads(path.read_text()))
