"""The flags of `dynapipe train` that stand for settings, one each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args

from dynapipe_ext.batch.micro_batches import Layout, LossNorm
from dynapipe_ext.batch.topology import ScheduleName
from dynapipe_ext.launch.command_parser import (
    MAX_INPUT_HELP,
    MAX_TARGET_HELP,
    PIECES_HELP,
    TASKS_HELP,
    pieces_flag,
)
from dynapipe_ext.models.named_models import Backend
from dynapipe_ext.settings.flag_values import betas, dtype, numbers
from dynapipe_ext.settings.tables import LrSchedule, PlacementChoice, SaveFormat, TemplateChoice
from dynapipe_ext.settings.train_config import TrainConfig

# flag -> (table, name, keyword arguments of argparse); a flag left out keeps the setting of the file.
_FLAGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "--data": (
        "data",
        "path",
        {
            "nargs": "+",
            "metavar": "FILE",
            "help": "JSONL (also compressed), several as FILE=WEIGHT; or a folder of dynapipe preprocess",
        },
    ),
    "--tokens-per-batch": (
        "data",
        "tokens_per_batch",
        {"type": int, "metavar": "N", "help": "real tokens of a step"},
    ),
    "--batch-size": (
        "data",
        "batch_size",
        {"type": int, "metavar": "N", "help": "samples of a step, instead"},
    ),
    "--template": (
        "data",
        "template",
        {"choices": get_args(TemplateChoice), "help": "what records are; auto: as the first one"},
    ),
    "--input-key": ("data", "input_key", {"metavar": "KEY", "help": "field of the prompt (input, prompt)"}),
    "--target-key": ("data", "target_key", {"metavar": "KEY", "help": "field of the response (target, response)"}),
    "--text-key": (
        "data",
        "text_key",
        {"metavar": "KEY", "help": "field of plain text (text), read though pairs are there"},
    ),
    "--max-input-len": ("data", "max_input_len", {"type": int, "metavar": "N", "help": MAX_INPUT_HELP}),
    "--max-target-len": ("data", "max_target_len", {"type": int, "metavar": "N", "help": MAX_TARGET_HELP}),
    "--tasks": ("data", "tasks", {"metavar": "FILE", "help": f"{TASKS_HELP}, and weights"}),
    "--num-workers": ("data", "num_workers", {"type": int, "metavar": "N", "help": "planner processes; 0: in line"}),
    "--steps": ("run", "steps", {"type": int, "metavar": "N", "help": "optimizer steps"}),
    "--epochs": ("run", "epochs", {"type": float, "metavar": "N", "help": "passes over the data, instead of steps"}),
    "--seed": ("run", "seed", {"type": int, "metavar": "N", "help": "of data order, weights and dropout"}),
    "--run-dir": ("run", "run_dir", {"metavar": "DIR", "help": "report, traces, events (default: runs/ and the time)"}),
    "--log-every": ("run", "log_every", {"type": int, "metavar": "N", "help": "steps between lines of the log"}),
    "--wandb": ("run", "wandb", {"metavar": "PROJECT", "help": "log to Weights & Biases"}),
    "--tp": ("topology", "tp", {"type": int, "metavar": "N", "help": "tensor parallel ranks"}),
    "--pp": ("topology", "pp", {"type": int, "metavar": "N", "help": "pipeline ranks"}),
    "--dp": ("topology", "dp", {"type": int, "metavar": "N", "help": "data parallel replicas"}),
    "--placement": (
        "topology",
        "placement",
        {
            "choices": get_args(PlacementChoice),
            "help": "of stages on ranks (default: the schedule's); auto: tried",
        },
    ),
    "--stages-per-rank": (
        "topology",
        "stages_per_rank",
        {"type": int, "metavar": "N", "help": "under interleaved, v (default: 2)"},
    ),
    "--layers-per-stage": (
        "topology",
        "layers_per_stage",
        {"type": numbers, "metavar": "N,N,…", "help": "of each stage (default: even)"},
    ),
    "--sequence-parallel": ("topology", "sequence_parallel", {"action": "store_true", "help": "over the tp ranks"}),
    "--architecture": (
        "model",
        "architecture",
        {"metavar": "MODEL", "help": "config.json or its folder, or a preset: a published model instead of own sizes"},
    ),
    "--backend": ("model", "backend", {"choices": get_args(Backend), "help": "what computes the model"}),
    "--lora": ("lora", "enabled", {"action": "store_true", "help": "train adapters of peft, not the model's weights"}),
    "--lora-r": ("lora", "r", {"type": int, "metavar": "R", "help": "rank of the adapters"}),
    "--lora-alpha": ("lora", "lora_alpha", {"type": float, "metavar": "A", "help": "over the rank: their scale"}),
    "--lora-dropout": ("lora", "lora_dropout", {"type": float, "metavar": "P", "help": "before the adapters"}),
    "--lora-target-modules": (
        "lora",
        "target_modules",
        {"nargs": "+", "metavar": "NAME", "help": "adapted layers, or all-linear (default: peft's of the family)"},
    ),
    "--init-from": ("model", "init_from", {"metavar": "DIR", "help": "start from the weights of a checkpoint"}),
    "--tokenizer": ("data", "tokenizer", {"metavar": "NAME", "help": "bpe, bytes, or as dynapipe preprocess takes it"}),
    "--max-seq-len": ("model", "max_seq_len", {"type": int, "metavar": "N", "help": "longest sample in tokens"}),
    "--dtype": (
        "model",
        "dtype",
        {
            "type": dtype,
            "choices": ("float32", "bfloat16"),
            "help": "of weights (fp32, bf16 for short); their masters are fp32",
        },
    ),
    "--layout": ("plan", "layout", {"choices": get_args(Layout), "help": "of micro-batches"}),
    "--schedule": ("plan", "schedule", {"choices": get_args(ScheduleName), "help": "of the pipeline"}),
    "--split-backward": ("plan", "split_backward", {"action": "store_true", "help": "run B as I and W"}),
    "--fill-waits": ("plan", "fill_waits", {"action": "store_true", "help": "run W while a transfer is waited for"}),
    "--pieces": ("plan", "pieces", {"type": pieces_flag, "metavar": "auto|off|N", "help": PIECES_HELP}),
    "--costs": ("plan", "costs", {"metavar": "FILE", "help": "cost model as JSON (default: measure this machine)"}),
    "--adapt-costs": ("plan", "adapt_costs", {"action": "store_true", "help": "fit costs in the run where far off"}),
    "--memory-limit-gb": ("plan", "memory_limit_gb", {"type": float, "metavar": "GB", "help": "of a rank, 10^9 bytes"}),
    "--loss-norm": ("plan", "loss_norm", {"choices": get_args(LossNorm), "help": "divide by target tokens or samples"}),
    "--lr": ("optimizer", "lr", {"type": float, "metavar": "LR", "help": "highest learning rate"}),
    "--min-lr": ("optimizer", "min_lr", {"type": float, "metavar": "LR", "help": "at the end (in proportion to --lr)"}),
    "--lr-schedule": (
        "optimizer",
        "lr_schedule",
        {"choices": get_args(LrSchedule), "help": "after the warm-up"},
    ),
    "--weight-decay": ("optimizer", "weight_decay", {"type": float, "metavar": "W", "help": "not of norms and biases"}),
    "--clip-grad": ("optimizer", "clip_grad", {"type": float, "metavar": "NORM", "help": "of all gradients; 0: off"}),
    "--betas": ("optimizer", "betas", {"type": betas, "metavar": "B1,B2", "help": "of Adam"}),
    "--deterministic": (
        "optimizer",
        "deterministic",
        {"action": "store_true", "help": "same bits under every plan, pp and dp of the same micro-batches"},
    ),
    "--output": ("checkpoint", "output", {"metavar": "DIR", "help": "folder to make of the trained model"}),
    "--save-format": ("checkpoint", "save_format", {"choices": get_args(SaveFormat), "help": "of --output"}),
    "--keep-best": ("checkpoint", "keep_best", {"action": "store_true", "help": "by validation; --output is then it"}),
    "--save-every": ("checkpoint", "save_every", {"type": int, "metavar": "STEPS", "help": "between checkpoints"}),
    "--save-minutes": ("checkpoint", "save_minutes", {"type": float, "metavar": "M", "help": "between checkpoints"}),
    "--keep-last": ("checkpoint", "keep_last", {"type": int, "metavar": "N", "help": "checkpoints that stay; 0: all"}),
    "--grace": ("checkpoint", "grace_s", {"type": float, "metavar": "SECONDS", "help": "to save in after a signal"}),
    "--eval-every": ("eval", "every", {"type": int, "metavar": "STEPS", "help": "between validation losses; 0: none"}),
    "--eval-steps": ("eval", "steps", {"type": int, "metavar": "N", "help": "global batches of each; 0: all"}),
    "--eval-data": ("eval", "path", {"metavar": "FILE", "help": "held-out data, as --data takes it"}),
    "--eval-fraction": ("eval", "fraction", {"type": float, "metavar": "F", "help": "of the data held out instead"}),
    "--deepspeed": ("deepspeed", "config", {"metavar": "FILE", "help": "ds_config.json of an engine that trains"}),
    "--strict": ("job", "strict", {"action": "store_true", "help": "enforce NCCL's ordering rules over gloo"}),
    "--log-dir": ("debug", "log_dir", {"metavar": "DIR", "help": "keep a log of each rank there"}),
    "--log-level": ("debug", "log_level", {"choices": ("info", "debug"), "help": "debug: with every action"}),
    "--plan-dir": ("debug", "plan_dir", {"metavar": "DIR", "help": "keep every step's plan there, for replay"}),
    "--redis-server": ("job", "redis_server", {"metavar": "PATH", "help": "server binary of the embedded store"}),
}


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Each with the default of its setting; one that is left out is None."""
    for flag, (table, name, options) in _FLAGS.items():
        default = getattr(getattr(TrainConfig(), table), name)
        known = "default" in options["help"] or default in ("", False, ())
        said = options["help"] if known else f"{options['help']} (default: {default})"
        parser.add_argument(flag, default=None, **options | {"help": said})


def given_settings(args: argparse.Namespace, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings in `tables`, with those of the flags that are given on top."""
    found = {table: dict(values) for table, values in tables.items()}
    for flag, (table, name, _) in _FLAGS.items():
        value = getattr(args, flag.lstrip("-").replace("-", "_"))
        if value is not None:
            found.setdefault(table, {})[name] = tuple(value) if isinstance(value, list) else value
    return found
