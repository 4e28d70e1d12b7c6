"""The process environment: the one file that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, short

STORE_PASSWORD_VARIABLE = "DYNAPIPE_STORE_PASSWORD"
_JOB_SECRET_VARIABLE = "DYNAPIPE_JOB_SECRET"
_LAUNCHER_VARIABLE = "DYNAPIPE_LAUNCHER"
_RESTART_VARIABLE = "DYNAPIPE_RESTART"
_MEETING_VARIABLE = "DYNAPIPE_MEETING"
_TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DYNAPIPE_KV_PORT = "29500"  # DynaPipe's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """A process's place in its job, under torchrun's names.

    `init_method` is for torch.distributed.init_process_group: a file if this package has started all ranks on this
    machine, "env://" under torchrun.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    init_method: str = "env://"

    def __post_init__(self) -> None:
        for name, index, size in (
            ("RANK", self.rank, self.world_size),
            ("LOCAL_RANK", self.local_rank, self.local_world_size),
        ):
            if not 0 <= index < size:
                raise ConfigError(f"{name} is {index} but must be in 0..{size - 1}: start this with torchrun")

    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def export(self) -> None:
        """Set torchrun's variables in this process, for libraries that look there."""
        os.environ.update(self.variables())


def rank_env(variables: Mapping[str, str] | None = None) -> RankEnv:
    """This process's place, from torchrun's variables. Errors: ConfigError naming a missing variable or a bad number.

    >>> rank_env(RankEnv(rank=3, world_size=8, local_rank=1, local_world_size=2,
    ...                  master_addr="node0", master_port=29500).variables()).rank
    3
    """
    variables = os.environ if variables is None else variables
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start this with torchrun --nproc-per-node N -m …, or use dynapipe train"
        )
    env = RankEnv(
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE"),
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT"),
    )
    meeting_file = variables.get(_MEETING_VARIABLE)
    if meeting_file and env.local_world_size == env.world_size:
        return replace(env, init_method=f"file://{meeting_file}")
    return env


def own_device(local_rank: int) -> Any:
    """The device of a rank, on which this process computes from now on. A GPU's memory is allocated as
    PYTORCH_ALLOC_CONF says, else in segments that grow."""
    from dynapipe_ext.executor.device import use_device

    return use_device(local_rank, in_segments_that_grow=not any(os.environ.get(name) for name in _ALLOCATOR))


def under_torchrun() -> bool:
    """Whether a launcher has already made this process one rank of a job."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def num_ranks_here() -> int | None:
    """How many ranks of the job torchrun has started on this machine; None for a process that it has not started."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "") if under_torchrun() else ""
    return int(number) if number.isascii() and number.isdigit() else None


def store_password() -> str | None:
    """The password of the user's own store; None where the variable is not set."""
    return os.environ.get(STORE_PASSWORD_VARIABLE) or None


def job_secret() -> str:
    """The secret that a launcher has given all ranks of a job, empty without one. It leaves the environment: of the
    processes that this one starts, torchrun alone needs it (`agent_variables`)."""
    return os.environ.pop(_JOB_SECRET_VARIABLE, "")


def shared_secret() -> str:
    """The secret of a job in torchrun's agent, which leaves it to the ranks; empty without one."""
    return os.environ.get(_JOB_SECRET_VARIABLE, "")


def offer_meeting_file(path: Path) -> None:
    """Have the ranks that this process starts, all ranks of a job, meet in a file that is to be made at `path`."""
    os.environ[_MEETING_VARIABLE] = str(path)


def node_variables(secret: str, *, is_restart: bool) -> dict[str, str]:
    """What the launcher of a job hands to those on its nodes: secrets, and whether its ranks have run before."""
    password = store_password()
    variables = {_JOB_SECRET_VARIABLE: secret} | ({STORE_PASSWORD_VARIABLE: password} if password else {})
    return variables | ({_RESTART_VARIABLE: "1"} if is_restart else {})


def is_restart() -> bool:
    """Whether a launcher, or torchrun's agent, starts the ranks of this job again."""
    return bool(os.environ.get(_RESTART_VARIABLE)) or agent_attempt() not in (None, "0")


def kv_store_url(variables: Mapping[str, str] | None = None, *, tls: bool = True) -> str | None:
    """The URL of the store that DynaPipe's variables name, or None. Other machines are reached with `tls`. It has no
    password.

    >>> kv_store_url({"DYNAPIPE_KV_HOST": "node0", "DYNAPIPE_KV_PORT": "6380"}), kv_store_url({"DYNAPIPE_KV_PORT": "1"})
    ('rediss://node0:6380/0', 'redis://localhost:1/0')
    """
    variables = os.environ if variables is None else variables
    host, port = variables.get("DYNAPIPE_KV_HOST", ""), variables.get("DYNAPIPE_KV_PORT", "")
    if not host and not port:
        return None
    port = port or _DYNAPIPE_KV_PORT
    if not (port.isascii() and port.isdigit() and 1 <= int(port) < 1 << 16):
        raise ConfigError(f"DYNAPIPE_KV_PORT is {short(port)} but must be a port in 1..65535: correct it, or unset it")
    host = host or "localhost"
    scheme = "rediss" if tls and host not in ("localhost", "127.0.0.1", "::1") else "redis"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/0"


def debug_settings(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of [run] that DynaPipe's variables set. Errors: ConfigError for values that DynaPipe refuses.

    >>> debug_settings({"DYNAPIPE_DEBUG": "DEBUG", "DYNAPIPE_LOGGING_DEBUG_DIR": "logs"})
    {'log_level': 'debug', 'log_dir': 'logs'}
    """
    variables = os.environ if variables is None else variables
    settings = {}
    if level := variables.get("DYNAPIPE_DEBUG"):
        if level not in ("INFO", "DEBUG"):
            raise ConfigError(f"DYNAPIPE_DEBUG is {short(level)} but must be INFO or DEBUG: correct it, or unset it")
        settings["log_level"] = level.lower()
    if log_dir := variables.get("DYNAPIPE_LOGGING_DEBUG_DIR"):
        settings["log_dir"] = log_dir
    dumps = variables.get("DYNAPIPE_DEBUG_DUMP_EP_STATS", "").lower()
    if dumps in ("true", "1", "t"):
        settings["plan_dir"] = variables.get("DYNAPIPE_DEBUG_DUMP_EP_PREFIX", "")
        if not settings["plan_dir"]:
            raise ConfigError("DYNAPIPE_DEBUG_DUMP_EP_STATS is set: set DYNAPIPE_DEBUG_DUMP_EP_PREFIX to a directory")
    elif dumps not in ("", "false", "0", "f"):
        raise ConfigError(f"DYNAPIPE_DEBUG_DUMP_EP_STATS is {short(dumps)} but must be true or false: correct it")
    return settings


def limit_threads(num_threads: int = 1) -> int:
    """Have numeric libraries use `num_threads` each, unless the user chose; returns the number in force.

    The libraries read it at their first import: call this before torch and numpy are imported. Ranks that share cores
    are many times slower with thread pools.
    """
    return int(os.environ.setdefault("OMP_NUM_THREADS", str(num_threads)).partition(",")[0] or num_threads)


def keep_cuda_forkable() -> None:
    """Make torch look for CUDA through the driver's library, not the CUDA runtime. Call before importing torch.

    A process that has touched the runtime cannot fork ranks that use it (pytorch/pytorch#83973).
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def keep_cublas_deterministic() -> None:
    """Give cuBLAS a workspace of its own, unless the user chose one. Without it torch's deterministic mode refuses
    matrix products. Call before the first of them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def visible_devices() -> str | None:
    """The accelerators that processes here may use, as CUDA takes them; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def named_interface() -> str:
    """The network interface that the user has chosen for ranks, or nothing."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def use_interface(name: str) -> list[str]:
    """Make gloo and NCCL connect over a network interface, unless the user chose one; returns the variables set.

    Otherwise gloo resolves the host's name, which fails or hangs on machines without a name service.
    """
    interfaces = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without = it would be a prefix
    unset = [variable for variable in interfaces if not os.environ.get(variable)]
    os.environ.update({variable: interfaces[variable] for variable in unset})
    return unset


@dataclass(frozen=True, slots=True)
class SlurmPlace:
    """The Slurm job and the step of it that this process is part of, with their numbers of nodes (0: unknown)."""

    job: str
    step: str
    job_nodes: int
    step_nodes: int


def slurm_place(variables: Mapping[str, str] | None = None) -> SlurmPlace | None:
    """None outside of a step.

    >>> slurm_place({"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"})
    SlurmPlace(job='71', step='0', job_nodes=2, step_nodes=1)
    """
    variables = os.environ if variables is None else variables
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
    if not (job and step):
        return None

    def number(*names: str) -> int:
        text = next((variables[name] for name in names if variables.get(name)), "0")
        return int(text) if text.isascii() and text.isdigit() else 0

    return SlurmPlace(job, step, number("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), number("SLURM_STEP_NUM_NODES"))


def agent_attempt() -> str | None:
    """The number of this start of the job, by the torchrun agent whose store the ranks share; None without an agent."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process of `dynapipe launch` that watches a node's ranks, and the folder with their records."""

    pid: int
    records: Path

    def variables(self) -> dict[str, str]:
        return {_LAUNCHER_VARIABLE: f"{self.pid}:{self.records}"}


def launcher() -> Launcher | None:
    """The `dynapipe launch` that watches this rank; None under another launcher or none."""
    pid, separator, records = os.environ.get(_LAUNCHER_VARIABLE, "").partition(":")
    return Launcher(int(pid), Path(records)) if separator and pid.isdigit() else None


def agent_variables(logs: Path, secret: str, *, is_restart: bool) -> dict[str, str]:
    """The variables for a torchrun started here, again where `is_restart`. Everybody on the machine can read arguments,
    so the secret goes here."""
    variables = {"PET_LOG_DIR": str(logs)} | ({_JOB_SECRET_VARIABLE: secret} if secret else {})
    if is_restart:
        variables[_RESTART_VARIABLE] = "1"
    if not os.environ.get(_TORCH_LOG):  # else each connection of a lost rank is a warning with its calls
        variables[_TORCH_LOG] = "ERROR"
    return variables


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of this process's environment with `extra` added, for a child process."""
    return {**os.environ, **(extra or {})}


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r} but must be a whole number: start this with torchrun")
    return int(text)
