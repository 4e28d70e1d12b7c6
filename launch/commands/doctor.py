"""`dynapipe doctor`: what is installed and active here, and whether a training run can start."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import dynapipe_ext.errors
from dynapipe_ext.errors import DynaPipeError, install_advice
from dynapipe_ext.executor.drop_in.clone import clone_version, misfits
from dynapipe_ext.executor.free_memory import most_free_bytes
from dynapipe_ext.executor.loops import TRIED
from dynapipe_ext.executor.proven_step import PROVEN_RULE
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.launch.processes.env import limit_threads
from dynapipe_ext.launch.store import RedisServer, find_server_binary
from dynapipe_ext.settings.train_config import add_flag
from dynapipe_ext.tools.console import deliver, say_loading

_MEGATRON_VERSIONS = ((0, 16), (0, 20))  # first supported, first unsupported: as in pyproject.toml
_GB = 1e9
_NEWER_KERNELS = (
    "flash-attn 4 was made for such a GPU, and made steps on an H100 13 % faster: pip install --pre flash-attn-4"
    " (flash-attn-4[cu13] for CUDA 13)"
)

_EPILOG = """examples:
  dynapipe doctor
  dynapipe doctor --json found.json
  dynapipe doctor --megatron ~/Megatron-LM
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. A run can start if every `required` check is `ok`. `hint` is the next move otherwise."""

    name: str
    ok: bool
    value: str
    required: bool = False
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG, {1: "a run cannot start here"})
    add_flag(parser, "job.redis_server", "server program of the store (default: the one found)")
    parser.add_argument(
        "--megatron", type=Path, metavar="DIR", help="a clone of Megatron-LM to train with planned schedules"
    )
    add_json(parser, "the report")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when a training run can start here, else 1."""
    checks = all_checks(args.redis_server, args.megatron)
    ready = can_train(checks)
    if sys.stdout.isatty():
        report: list[RenderableType] = [_table(checks)]
    else:
        lines = ((f"{_mark(check):<8}{check.name:<18}{check.value}", check.hint) for check in checks)
        report = ["  ".join(filter(None, line)) for line in lines]
    verdict = "A training run can start here." if ready else "A training run cannot start here: see what is missing."
    facts = {"can_train": ready, "checks": [asdict(check) for check in checks]}
    deliver(args.json, facts, *report, verdict)
    return 0 if ready else 1


def can_train(checks: tuple[Check, ...]) -> bool:
    return all(check.ok for check in checks if check.required)


def all_checks(redis_server: str | None = None, megatron_lm: Path | None = None) -> tuple[Check, ...]:
    """Every check in the order of the report, with one of a clone of Megatron-LM if there is one.

    A probe that raises becomes a failed check, and the report goes on.
    """
    limit_threads()
    clone: list[tuple[str, Callable[[], Check]]] = []
    if megatron_lm is not None:
        clone.append(("Megatron-LM", lambda: _megatron_lm(megatron_lm)))
    loops = [(name, partial(_loop, name)) for name in TRIED if _version(name) is not None]
    probes: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("Python", _python),
        ("dynapipe-ext", _package),
        ("plans", lambda: Check("plans", True, f"proven: {PROVEN_RULE}")),
        ("torch", _torch),
        ("devices", _devices),
        ("megatron-core", _megatron),
        *clone,
        *loops,
        ("tokenizers", lambda: _distribution("tokenizers", "train", required=True)),
        ("deepspeed", lambda: _distribution("deepspeed", "deepspeed")),
        ("transformers", lambda: _distribution("transformers", "transformers")),
        ("peft", lambda: _distribution("peft", "lora")),
        ("flash-attn", lambda: _distribution("flash-attn", "flash")),
        ("attention", _attention),
        ("redis-py", lambda: _distribution("redis", "", required=True)),
        ("hiredis", _hiredis),
        ("Redis server", lambda: _server(redis_server)),
        ("CPU cores", _cores),
        ("memory", _memory),
    )
    return tuple(_guarded(name, probe) for name, probe in probes)


def _guarded(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - this command reports packages that are broken in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        return Check(name, False, f"broken: {reason}", required=True, hint=f"reinstall {name}")


def _python() -> Check:
    version = platform.python_version()
    return Check("Python", True, f"{version}  {sys.executable}", required=True)


def _package() -> Check:
    folder = Path(dynapipe_ext.errors.__file__).parent
    return Check("dynapipe-ext", True, f"{importlib.metadata.version('dynapipe-ext')}  {folder}", required=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution(name: str, extra: str, *, required: bool = False) -> Check:
    version = _version(name)
    if version is not None:
        return Check(name, True, version, required)
    return Check(name, False, "not installed", required, install_advice(extra) if extra else f"pip install {name}")


def _loop(name: str) -> Check:
    version = _version(name)
    hint = "" if version == TRIED[name] else f"its adapter was tried with {TRIED[name]}"
    return Check(name, version == TRIED[name], version or "not installed", hint=hint)


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", False, "not installed", True, f"pip install torch, then {install_advice('train')}")
    if _is_cpu_build():  # its files say everything; an import would take seconds
        return Check("torch", True, f"{_version('torch')}  CPU build", True)
    say_loading("torch")
    import torch
    import torch.distributed

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if not torch.distributed.is_available():
        return Check("torch", False, f"{torch.__version__}  {build}", True, "this build has no torch.distributed")
    backends = [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]
    return Check("torch", True, f"{torch.__version__}  {build} build, {' and '.join(backends)}", True)


def _is_cpu_build() -> bool:
    """Whether the version.py of the installed torch names no CUDA, ROCm or XPU, and its library exists."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    built = runpy.run_path(str(folder / "version.py"))
    has_library = any((folder / "lib").glob("libtorch_cpu.*"))
    return has_library and not any(built.get(kind) for kind in ("cuda", "hip", "xpu"))


def _devices() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("devices", False, "unknown without torch")
    if _is_cpu_build():
        return Check("devices", True, "CPU only")
    import torch

    count = torch.cuda.device_count()
    if not count:
        return Check("devices", True, "CPU only")
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    return Check("devices", True, f"{count} x {', '.join(names)}")


def _megatron() -> Check:
    version = _version("megatron-core")
    lowest, beyond = (".".join(map(str, bound)) for bound in _MEGATRON_VERSIONS)
    install = f"pip install 'megatron-core>={lowest},<{beyond}'"
    if version is None:
        return Check("megatron-core", False, "not installed", True, install)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    fits = _MEGATRON_VERSIONS[0] <= numbers < _MEGATRON_VERSIONS[1]
    return Check("megatron-core", fits, version, True, "" if fits else install)


def _megatron_lm(clone: Path) -> Check:
    """The check of a clone, whose training scripts run its own megatron-core instead of the installed one."""
    try:
        version, faults = clone_version(clone), misfits(clone)
    except DynaPipeError as error:
        return Check("Megatron-LM", False, "cannot be read", True, str(error))
    if not _MEGATRON_VERSIONS[0] <= version[:2] < _MEGATRON_VERSIONS[1]:
        faults.insert(0, "its version is not supported")
    value = f"{'.'.join(map(str, version))}  {clone}"
    hint = f"{'; '.join(faults)}: take core_v0.16.1" if faults else ""
    return Check("Megatron-LM", not faults, value, True, hint)


def _attention() -> Check:
    """The attention kernels for packed rows, best first. The hint names installed packages that cannot be used."""
    if _is_cpu_build():
        return Check("attention", True, "sdpa")
    try:
        kernels = importlib.import_module("dynapipe_ext.batch.packed_attention")
    except ModuleNotFoundError as error:
        return Check("attention", False, f"unknown without {error.name}")
    unusable = {kernel.name: kernels.load_kernel(kernel)[1] for kernel in kernels.KERNELS}
    hints, here = [f"{name} {reason}" for name, reason in unusable.items() if reason], kernels.list_attention_kernels()
    if kernels.lacks_newer_kernels():
        hints.append(_NEWER_KERNELS)
    return Check("attention", True, ", then ".join(here), hint="; ".join(hints))


def _hiredis() -> Check:
    version = _version("hiredis")
    hint = "pip install hiredis (a plan of 1 MB is read 20 times faster with it)"
    if version is None:
        return Check("hiredis", False, "not installed", hint=hint)
    import redis.utils

    if not redis.utils.HIREDIS_AVAILABLE:
        return Check("hiredis", False, f"{version}, too old for redis-py", hint=hint)
    return Check("hiredis", True, f"{version}, active")


def _server(binary: str | None) -> Check:
    try:
        path = find_server_binary(binary)
        with RedisServer(binary=binary) as server:
            return Check("Redis server", True, f"{server.name} {server.version}  {path}", True)
    except DynaPipeError as error:
        return Check("Redis server", False, "not available", True, str(error))


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    return Check("CPU cores", True, str(cores))


def _memory() -> Check:
    return Check("memory", True, f"{most_free_bytes() / _GB:.1f} GB")


def _mark(check: Check) -> str:
    return "ok" if check.ok else "MISSING" if check.required else "-"


def _table(checks: tuple[Check, ...]) -> Table:
    table = Table(title="dynapipe doctor")
    for column in ("", "what", "found", "next move"):
        table.add_column(column, overflow="fold")
    for check in checks:
        style = "green" if check.ok else "bold red" if check.required else "dim"
        table.add_row(Text(_mark(check), style), check.name, check.value, check.hint.replace("[", "\\["))
    return table
