"""The run that a user requests, by flags and a file of settings. Impossible requests are refused before anything is
written.

flags ─► config_from ─► TrainConfig ─► requested_job ─► JobRequest ─► settled.settled_job (with data and costs)

`dynapipe train`, each rank of torchrun and `dynapipe launch` begin here, so they refuse the same in the same words.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynapipe_ext.data.dataset import is_prepared
from dynapipe_ext.data.sample_selection import data_settings
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch.command_parser import add_truncate, cut_at, ending, refuse_below
from dynapipe_ext.launch.job.configured import topology_of, variants
from dynapipe_ext.launch.job.job_keys import JobKeys, refuse_guessable
from dynapipe_ext.launch.job.model_folder import (
    refuse_random_weights,
    refuse_unsupported,
    settings_of_model,
    usual_rates,
    usual_settings,
)
from dynapipe_ext.launch.job.own_outputs import is_own_output
from dynapipe_ext.launch.job.room import Place, refuse_no_room
from dynapipe_ext.launch.job.run_data import named_files, refuse_missing_file
from dynapipe_ext.launch.job.run_directory import (
    CHECKPOINTS,
    is_unfinished,
    place_of_resumed,
    run_to_resume,
    runs_folder,
)
from dynapipe_ext.launch.job.saved_settings import describe_losses, read_saved_settings, refuse_untrusted
from dynapipe_ext.launch.processes.cluster import LOST_STATUS
from dynapipe_ext.launch.processes.env import debug_settings, kv_store_url, num_ranks_here, store_password
from dynapipe_ext.launch.processes.scratch import read_secret
from dynapipe_ext.launch.store import asked_store
from dynapipe_ext.settings.deepspeed_settings import extract_settings, read_deepspeed_config
from dynapipe_ext.settings.train_config import TrainConfig, add_setting_flags, read_flags
from dynapipe_ext.tools.console import counted, say_loading
from dynapipe_ext.tools.step_listeners import require_logger

_EPILOG = """examples:
  dynapipe train
  dynapipe train --data my.jsonl --truncate --steps 100 --run-dir runs/mine
  dynapipe train --model my-llama --data chats.jsonl --output tuned --epochs 2 --eval-fraction 0.05 --eval-every 50
  dynapipe train --config launch/configs/quickstart.toml --layout packed --compare
  dynapipe train --resume latest --steps 80
"""


TRAINING_STATUSES = {
    LOST_STATUS: "ranks or the store were lost: --resume goes on",
    130: "saved on Ctrl-C (twice: ended at once)",
    138: "saved on SIGUSR1 (143: SIGTERM, 129: the terminal closed)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG, TRAINING_STATUSES)
    parser.add_argument("--config", metavar="FILE", help="settings in TOML; flags override them")
    parser.add_argument("--model", metavar="MODEL", help="its folder: sizes, weights, tokenizer and chat template")
    add_setting_flags(parser)
    parser.add_argument("--warmup", metavar="N", help="steps of rising learning rate, or below 1 the part of all steps")
    parser.add_argument("--show-samples", type=int, default=0, metavar="N", help="print what N samples become")
    add_truncate(parser, "--max-seq-len; without --truncate longer ones are refused")
    parser.add_argument(
        "--store", metavar="URL", help="your own Redis-compatible server, or a file with its URL (default: embedded)"
    )
    parser.add_argument(
        "--secret-file", metavar="FILE", help="password of --store, or a secret of the job; mode 600, on every node"
    )
    parser.add_argument("--insecure-store", action="store_true", help="allow a store without TLS on another machine")
    parser.add_argument("--overwrite", action="store_true", help="lose what --run-dir and --output hold")
    parser.add_argument(
        "--resume", metavar="RUN_DIR", help='go on from its newest checkpoint; "latest": the newest run'
    )
    parser.add_argument(
        "--compare", action="store_true", help="also train the rivals: packed rows under published schedules, padding"
    )


def config_from(args: argparse.Namespace) -> TrainConfig:
    """The defaults, or the settings of the run to go on with, with the file's on top, and the flags on top of these."""
    refuse_below(args, 0, "show_samples")
    if args.epochs == 0:
        raise ConfigError("--epochs is 0, no pass over the data: give more, or --steps")
    if args.epochs is not None and args.steps is not None:
        raise ConfigError(f"--epochs {args.epochs:g} and --steps {args.steps} both say how long to train: give one")
    config = TrainConfig()
    if args.resume:
        saved = read_saved_settings(run_to_resume(args.resume))
        if saved is not None:
            config = replace(saved, named=frozenset({("plan", "layout")}))  # all of it was settled
        elif not args.config:
            raise ConfigError(f"--resume {args.resume} holds no run, as it has no config.toml: name a run's directory")
    if args.config:
        config = TrainConfig.read(args.config, config)
    if args.resume:
        own_weights = {"--init-from": args.init_from, "--from-scratch": args.from_scratch}
        if also := [flag for flag, value in own_weights.items() if value is not None]:
            raise ConfigError(f"--resume {args.resume} has weights of its own: leave out {', '.join(also)}")
        place = place_of_resumed(config.run.run_dir, run_to_resume(args.resume))
        config = config.with_values(run={"run_dir": place})
    if args.model:
        config = _with_model(config, args)
    tables = read_flags(args, config, {"run": debug_settings()}, of_file=bool(args.config or args.resume))
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
    config = config.with_values(**_beside_file(tables, config))
    if args.resume:
        given = config.named | {(table, name) for table, values in tables.items() for name in values}
        refuse_untrusted(config, run_to_resume(args.resume), given)
    else:
        refuse_random_weights(config.model)
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """Settings of a run, and where it is to be.

    `run_dir` empty means a new directory. `address` is the user's own store; None: the run has one of its own.
    `secret` is what all ranks have and nobody else, empty where they share nothing; `keys` are made of it once the
    request is claimed. `resumed` is the checkpoint to go on from. `overwrite`: what the directory and `--output` hold
    may be lost. `num_shown`: samples to print once they are read. `layout_is_named`: padded or packed rows were asked
    for, and are no default.
    """

    config: TrainConfig
    compare: bool = False
    run_dir: str = ""
    resumed: Path | None = None
    address: StoreAddress | None = None
    secret: str = field(default="", repr=False)
    keys: JobKeys | None = None
    overwrite: bool = False
    num_shown: int = 0
    layout_is_named: bool = False


def requested_job(args: argparse.Namespace, place: Place | None, *, secret: str = "") -> JobRequest:
    """The request that the flags of a run describe. Settings, memory, first weights, store, loggers and output folders
    are checked; nothing is written yet, and no data are read. One rank of a job checks the memory of its `place` and
    the weights; the others pass None. `secret` is a launcher's.

    Errors: ConfigError, DataError and PlanError.
    """
    config = config_from(args)
    refuse_settings(config, compare=args.compare)
    if place is not None:
        for loss in describe_losses(run_to_resume(args.resume)) if args.resume else ():
            print(f"note: {loss}", file=sys.stderr)
        refuse_no_room(config, place)
        if not args.resume:
            refuse_missing_file(config)
            refuse_other_ids(config)
        _open_weights(config)
    address, secret = store_and_secret(args, secret)
    for logger in config.run.loggers:
        require_logger(logger)
    run_dir, resumed = _resumed_run(args, config)
    refuse_output(config, run_dir, overwrite=args.overwrite)
    return JobRequest(
        config=config,
        compare=args.compare,
        run_dir=run_dir,
        resumed=resumed,
        address=address,
        secret=secret,
        overwrite=args.overwrite,
        num_shown=args.show_samples,
        layout_is_named=args.layout is not None or ("plan", "layout") in config.named,
    )


def refuse_other_ids(config: TrainConfig) -> None:
    """Errors: ConfigError for first weights beside a tokenizer that is made of this run's texts."""
    weights, data = config.model.init_from, config.data
    if weights and data.tokenizer == "bpe" and (data.mixture or (data.path and not is_prepared(data.path))):
        raise ConfigError(
            f"the weights of {weights} know the ids of their own tokenizer, but tokenizer is 'bpe', which is made of"
            " this run's texts: name theirs by --tokenizer, or give prepared data"
        )


def _open_weights(config: TrainConfig) -> None:
    """Errors: DataError and ConfigError for first weights that are not those of the model."""
    described = config.model.described
    if config.model.init_from and (described is None or described.family != "transformers"):
        say_loading("torch")
        from dynapipe_ext.launch.job.model_folder import open_initial_weights

        open_initial_weights(config.model.init_from, described)


def store_and_secret(args: argparse.Namespace, launched: str = "") -> tuple[StoreAddress | None, str]:
    """The user's own store, if there is one, and the secret that all ranks share: the launcher's, the one in the secret
    file, or the store's password; empty if there is none. Errors: ConfigError."""
    line = ""
    if args.secret_file:
        line = read_secret(Path(args.secret_file), store_password() if args.store or kv_store_url() else None)
    if (address := asked_store(args.store, line or None, insecure=args.insecure_store)) is not None:
        return address, launched or address.password
    return None, launched or (refuse_guessable(line, args.secret_file) if line else "")


def refuse_settings(config: TrainConfig, *, compare: bool) -> None:
    """Errors: ConfigError for settings of which no run can be, whatever its data and machines."""
    refuse_unsupported(config)
    topology_of(config)
    variants(config, compare=compare)


def _resumed_run(args: argparse.Namespace, config: TrainConfig) -> tuple[str, Path | None]:
    """The run's directory (empty: a new one), and the checkpoint that --resume goes on from. Errors: ConfigError."""
    if not args.resume:
        return config.run.run_dir, None
    if args.run_dir is not None:
        raise ConfigError(f"--resume {args.resume} goes on in its own directory: leave out --run-dir {args.run_dir}")
    run_dir = run_to_resume(args.resume)
    return str(run_dir), to_go_on_from(run_dir, config, compare=args.compare, overwrite=args.overwrite)


def refuse_output(config: TrainConfig, run_dir: str, *, overwrite: bool) -> None:
    """Errors: ConfigError for an output folder that cannot be written once the model is trained, or that the run itself
    reads or writes (`run_dir` empty: a new directory in runs/); for a model without a published form."""
    output = config.checkpoint.output
    if not output:
        return
    if config.model.described is None:
        raise ConfigError(
            f"--output {output} is for published models, but the model is in sizes of its own: name one by --model or"
            " --architecture, or convert the run's checkpoints"
        )
    place = Path(os.path.abspath(output))
    sources = map(Path, named_files(config).values())
    inside = place.resolve()
    if holders := [source for source in sources if source.exists() and source.resolve().is_relative_to(inside)]:
        raise ConfigError(f"--output {output} holds {holders[0]}, which the run reads: choose another folder")
    own = (Path(run_dir) if run_dir else runs_folder(run_dir)).resolve()
    if own.is_relative_to(inside) or inside.is_relative_to(own / CHECKPOINTS):
        raise ConfigError(f"--output {output} is where the run writes what is its own: choose a folder beside {own}")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--output {output} is a file: choose a folder")
    is_own = bool(run_dir) and is_own_output(Path(run_dir), output)
    if place.is_dir() and any(place.iterdir()) and not overwrite and not is_own:
        raise ConfigError(f"--output {output} holds something: choose another folder, or lose that by --overwrite")


def to_go_on_from(run_dir: Path, config: TrainConfig, *, compare: bool, overwrite: bool) -> Path:
    """The newest checkpoint of a run. Errors: ConfigError where the settings leave it nothing to do."""
    overwrite = overwrite and not config.checkpoint.output  # what that holds may be lost
    if compare or overwrite:
        raise ConfigError(f"--resume goes on with {run_dir}: leave out {'--compare' if compare else '--overwrite'}")
    newest = latest(run_dir / CHECKPOINTS)
    if not config.run.epochs:
        refuse_done(newest, config)
    return newest


def refuse_done(newest: Path, config: TrainConfig) -> None:
    """Errors: ConfigError where a checkpoint has done all the steps of the settings, and what follows them is done."""
    num_steps_done = read_manifest(newest).run.step
    if num_steps_done > config.run.steps or is_done(newest, config):
        raise ConfigError(
            f"{newest} has done {counted(num_steps_done, 'step')} and steps is {config.run.steps}: raise --steps to"
            " go on"
        )


def is_done(newest: Path, config: TrainConfig) -> bool:
    """Whether a checkpoint has done just the steps of the settings, its run has said so, and `output` is made."""
    output = config.checkpoint.output
    only_ends = is_unfinished(newest.parents[1]) or bool(output and not Path(output).exists())
    return read_manifest(newest).run.step == config.run.steps and not only_ends


def _with_model(config: TrainConfig, args: argparse.Namespace) -> TrainConfig:
    """With what `--model` says; the flags come on top. Errors: ConfigError where another flag says it too."""
    other_flags = {"--resume": args.resume, "--architecture": args.architecture, "--init-from": args.init_from}
    if also := [flag for flag, value in other_flags.items() if value]:
        raise ConfigError(f"--model {args.model} says what {', '.join(also)} would: leave one of them out")
    of_file = {name: getattr(config.model, name) for name in ("architecture", "init_from")}
    if also := [
        f"{name} {at}" for name, at in of_file.items() if at and os.path.abspath(at) != os.path.abspath(args.model)
    ]:
        raise ConfigError(
            f"--model {args.model} says what [model] {', '.join(also)} of {args.config} would: leave one of them out"
        )
    from_scratch = config.model.from_scratch if args.from_scratch is None else args.from_scratch
    tables = settings_of_model(args.model, tokenizer=args.tokenizer, from_scratch=from_scratch)
    if not args.config:
        num_ranks = (args.tp or 1) * (args.pp or 1) * (args.dp or 1)
        tables = usual_settings(min(num_ranks, num_ranks_here() or num_ranks)) | tables
    if tables["model"]["init_from"]:
        adapts = config.lora.enabled if args.lora is None else args.lora
        engine = extract_settings(config.deepspeed.described)["optimizer"] if config.deepspeed.described else {}
        named = {name for table, name in config.named if table == "optimizer"}
        tables |= usual_rates({*named, *engine}, adapts=adapts)
    return config.with_values(**_beside_file(tables, config))


def _beside_file(tables: dict[str, dict[str, Any]], config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Settings of flags, with those of the file that what these name would replace: a model its rows' length, a
    DeepSpeed configuration what it decides."""
    kept = {"model": ("max_seq_len",)} if "architecture" in tables.get("model", {}) else {}
    if path := tables.get("deepspeed", {}).get("config"):
        kept |= {
            name: (*kept.get(name, ()), *values)
            for name, values in extract_settings(read_deepspeed_config(path)).items()
        }
    of_file = {
        table: {name: getattr(getattr(config, table), name) for name in names if (table, name) in config.named}
        for table, names in kept.items()
    }
    return tables | {table: values | tables.get(table, {}) for table, values in of_file.items() if values}


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
