"""The parser of every subcommand, and the flags that stand for settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from dynapipe_ext.batch.micro_batches import Layout, LossNorm
from dynapipe_ext.batch.topology import ScheduleName
from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.models.transformers_sizes import Backend
from dynapipe_ext.settings.data_settings import TemplateChoice
from dynapipe_ext.settings.train_config import LrSchedule, PlacementChoice, SaveFormat, TrainConfig

_MOST_POSITIONS = 1 << 40  # of a sample
PIECES_HELP = "run samples of more than N tokens in pieces; auto: where that is faster"
MAX_INPUT_HELP = "most tokens of an input; 0: only of a sample"
MAX_TARGET_HELP = "most tokens of a target; 0: only of a sample"
TASKS_HELP = "TOML or JSON of tasks with other such lengths"
_STATUSES = {
    0: "done",
    1: "a defect of dynapipe, after its traceback",
    2: "a mistake in what was given",
    130: "Ctrl-C",
}


class CommandParser(argparse.ArgumentParser):
    """Takes whole flags only, refuses what it does not know itself (not its parent), and suggests what may be meant.
    What was given stays as it stood in `words`."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._subparsers is None:  # before anything else is said to be wrong or missing
            words = [str(word).partition("=")[0] for word in (sys.argv[1:] if args is None else args)]
            for word in words[: words.index("--") if "--" in words else None]:
                if word.startswith("--") and word not in self._option_string_actions:
                    self.error(f"unknown {word}{did_you_mean(word, self._option_string_actions)}")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown {' '.join(unknown)}")
        if self._subparsers is None:
            found.words = tuple(sys.argv[1:] if args is None else args)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help says more)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # Most often a variable of a shell that is not set. A subcommand's value is all the words behind it.
        if not arg_string.strip() and not isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(action, "is empty: give a value, or leave it out")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = did_you_mean(str(value), map(str, action.choices))
            known = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is unknown: choose from {known}{near}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of each option that has one and does not say it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        said, default = action.help or "", action.default
        if "default" in said or action.required or default in (None, "", False, argparse.SUPPRESS):
            return said
        if isinstance(default, list | tuple):
            return f"{said} (default: {','.join(map(str, default))})"
        return f"{said} (default: %(default)s)"


def ending(epilog: str, statuses: Mapping[int, str] | None = None) -> str:
    """A subcommand's epilog, which opens with examples, and then what its exit statuses mean."""
    meanings = _STATUSES | dict(statuses or {})
    return f"{epilog.strip()}\n\nexit status: {'; '.join(f'{status} {what}' for status, what in meanings.items())}\n"


def add_json(parser: argparse._ActionsContainer, what: str) -> None:
    """`--json [FILE]`, whose value `tools.console.deliver` takes."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help=f"{what} as JSON: alone on standard output, or in FILE"
    )


def add_pieces(parser: argparse._ActionsContainer, default: object) -> None:
    parser.add_argument("--pieces", type=pieces_flag, metavar="auto|off|N", help=f"{PIECES_HELP} (default: {default})")


def pieces_flag(text: str) -> object:
    """The value of `--pieces`. Errors: ConfigError."""
    from dynapipe_ext.batch.micro_batches import pieces_of  # with numpy, which no help needs

    return pieces_of(text)


def add_truncate(parser: argparse._ActionsContainer, longest: str) -> None:
    """`--truncate [N]`, which `cut_at` reads; `longest` is what holds without N."""
    parser.add_argument(
        "--truncate", nargs="?", type=int, const=True, metavar="N", help=f"cut samples at N tokens (default: {longest})"
    )


def cut_at(truncate: int | bool | None, longest: int | None) -> int | None:
    """Where to cut, by the value of `--truncate`; None for nowhere. `longest` is what holds without N.

    Errors: ConfigError for an N below 1, and where neither says a length.
    """
    if truncate is not True:
        if truncate is not None and not 1 <= truncate <= _MOST_POSITIONS:
            raise ConfigError(f"--truncate is {short(truncate)} but must be at least 1, at most {_MOST_POSITIONS:,}")
        return truncate
    if longest is None:
        raise ConfigError("--truncate cuts samples, but nothing says where: give --truncate N, or --max-seq-len N")
    return longest


def degrees(args: argparse.Namespace, *, of_file: bool) -> dict[str, int]:
    """The degrees of parallelism that flags give; one that is not given is 1 as soon as another is, or the file's."""
    given = {name: value for name in ("tp", "pp", "dp") if (value := getattr(args, name)) is not None}
    return given if of_file or not given else {"tp": 1, "pp": 1, "dp": 1} | given


def dtype(text: str) -> str:
    """A type of weights by torch's name or the short one.

    >>> dtype("bf16"), dtype("float16")
    ('bfloat16', 'float16')
    """
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(text, text)


def numbers(text: str) -> tuple[int, ...]:
    """A type of arguments: whole numbers of at least 1 with commas.

    >>> numbers("9,8, 8,7")
    (9, 8, 8, 7)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers of at least 1, like 3,5")
    return tuple(map(int, parts))


def _betas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers of 0 to below 1, like 0.9,0.999") from None


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
    "--betas": ("optimizer", "betas", {"type": _betas, "metavar": "B1,B2", "help": "of Adam"}),
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
