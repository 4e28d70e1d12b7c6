"""The table of subcommands, each imported on use, and the exit statuses and messages of their errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.errors import NO_ROOM, ConfigError, DataError, DynaPipeError, in_one_line, install_advice
from dynapipe_ext.launch.command_parser import CommandParser, ending, json_place
from dynapipe_ext.launch.processes.cluster import USER_ERROR_STATUS, failure_status
from dynapipe_ext.launch.processes.env import keep_cuda_forkable
from dynapipe_ext.tools.files import deliver_error

_DEFECT_STATUS = 1
_BROKEN_PIPE_STATUS = 141  # 128 + SIGPIPE


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A word on the command line; `module` has `add_arguments(parser)` and `run(args) -> int`."""

    name: str
    module: str
    summary: str


_COMMANDS = "dynapipe_ext.launch.commands."
_SUMMARIES = {
    "estimate": "say what a model needs on a cluster, and how to train it",
    "train": "train a model on ranks of this machine, with a report",
    "quickstart": "train a small model here, and compare packed rows and ours",
    "launch": "train on one machine or many, with restarts",
    "demo": "compare packed rows and ours on sleeping ranks, with a picture",
    "plan": "show the plan of a lengths file without training",
    "check-plan": "prove a plan's file, its bounds and its peaks",
    "replay": "plan a step of a run again, and show what differs",
    "show-schedule": "draw a published schedule, or one from a file or plan",
    "preprocess": "tokenize a corpus to a dataset or to .bin/.idx",
    "convert": "convert a checkpoint between Hugging Face, Megatron, DeepSpeed and Meta",
    "profile": "measure a model here and write a cost table",
    "compare": "say how two runs differ, and draw both",
    "flops": "count FLOPs, MFU and HFU of a run, a log or a step",
    "collect-memory": "measure peaks of inference batches",
    "train-memory-model": "learn batch sizes from measured peaks",
    "doctor": "show what is installed and whether a run can start here",
}
_OTHER_MODULES = {"profile": "profile_model"}
SUBCOMMANDS = tuple(
    Subcommand(name, _COMMANDS + _OTHER_MODULES.get(name, name.replace("-", "_")), summary)
    for name, summary in _SUMMARIES.items()
)

# The extra to install for a missing package, by its import name.
_EXTRAS = {
    "torch": "train",
    "megatron": "train",
    "tokenizers": "train",
    "zstandard": "train",
    "psutil": "train",
    "einops": "train",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "pyarrow": "data",
    "tiktoken": "data",
    "ray": "ray",
    "sklearn": "inference",
    "scipy": "inference",
    "threadpoolctl": "inference",
    "flash_attn": "flash",
}

_EPILOG = """examples:
  dynapipe demo
  dynapipe doctor
  dynapipe train --steps 20
  dynapipe train --data my.jsonl --tp 2 --pp 2 --dp 2 --layout packed
  dynapipe COMMAND --help
"""


def run_subcommand(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit status."""
    keep_cuda_forkable()  # some commands look for devices and then fork ranks
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # write escapes for characters outside its encoding, as standard error does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # None: it was closed before the start
            sys.stdout.flush()  # inside this try, which handles a reader that has gone
        return status
    except DynaPipeError as error:
        return _reported(error, failure_status(error), json_place(arguments))
    except BrokenPipeError:
        _leave_output()
        return _BROKEN_PIPE_STATUS
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _leave_output()
        full = DataError(f"there is no room to write, on standard output or a disk ({error.strerror}): make some")
        return _reported(full, USER_ERROR_STATUS, None)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends this way
            return _BROKEN_PIPE_STATUS
        raise
    except Exception as defect:
        deliver_error(json_place(arguments), f"a defect of dynapipe: {in_one_line(defect)}", _DEFECT_STATUS)
        raise


def _reported(error: DynaPipeError, status: int, json_to: str | None) -> int:
    message = in_one_line(error)
    deliver_error(json_to, message, status)
    print(f"dynapipe: error: {message}", file=sys.stderr)
    return status


def _leave_output() -> None:
    """Send standard output nowhere, since Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="dynapipe",
        description="Training on samples of very different lengths: micro-batch plans, pipeline schedules, execution.",
        epilog=ending(_EPILOG),
    )
    parser.add_argument("--version", action="version", version=f"dynapipe {importlib.metadata.version('dynapipe-ext')}")
    words = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        for subcommand in SUBCOMMANDS:
            added = words.add_parser(subcommand.name, help=subcommand.summary, description=subcommand.summary)
            if subcommand.name == chosen:  # the other modules are not imported, and their parsers stay empty
                module = importlib.import_module(subcommand.module)
                module.add_arguments(added)
                added.set_defaults(run=module.run)
        args = parser.parse_args(arguments)
        status: int = args.run(args)
    except ModuleNotFoundError as error:
        raise _missing_package(error) from error
    return status


def _missing_package(error: ModuleNotFoundError) -> Exception:
    """The error for an optional package that is not installed; other errors are returned unchanged."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return error
    return ConfigError(f"this needs {package}, which is not installed: {install_advice(extra)}")
