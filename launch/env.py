"""The process environment: the one file that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynapipe_ext.errors import ConfigError

STORE_PASSWORD_VARIABLE = "DYNAPIPE_STORE_PASSWORD"
_LAUNCHER_VARIABLE = "DYNAPIPE_LAUNCHER"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """A process's place in its job, under torchrun's names.

    `init_method` is for torch.distributed.init_process_group: "env://" under torchrun, a file where all ranks were
    forked on this machine.
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
    """This process's place from torchrun's variables; raises ConfigError naming what is missing or no number.

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
    return RankEnv(
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE"),
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT"),
    )


def under_torchrun() -> bool:
    """Whether a launcher has already made this process one rank of a job."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def store_password() -> str | None:
    """The password of the user's own store, or None where none was given."""
    return os.environ.get(STORE_PASSWORD_VARIABLE) or None


def limit_threads(num_threads: int = 1) -> int:
    """Have numeric libraries use `num_threads` each, unless the user chose; returns the number in force.

    They read it once, when first imported: call this before torch and numpy are. Ranks that share cores and run
    thread pools besides are many times slower.
    """
    return int(os.environ.setdefault("OMP_NUM_THREADS", str(num_threads)).partition(",")[0] or num_threads)


def keep_cuda_forkable() -> None:
    """Have torch ask the driver's library, not the CUDA runtime, whether there is CUDA. Call before importing torch.

    A process that has touched the runtime cannot fork ranks that use it (pytorch/pytorch#83973).
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def keep_cublas_deterministic() -> None:
    """Have cuBLAS work in a space of its own, unless the user chose: else torch's deterministic mode refuses matrix
    products. Call before the first of them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_interface(name: str) -> list[str]:
    """Have gloo and NCCL connect over a network interface, each unless the user chose; returns the variables set.

    Otherwise gloo resolves the host's name, which fails or hangs on machines without a name service.
    """
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without = any that begins so will do
    taken = [variable for variable in wanted if not os.environ.get(variable)]
    os.environ.update({variable: wanted[variable] for variable in taken})
    return taken


def agent_attempt() -> str | None:
    """Which start of the job this is, by the torchrun agent whose store ranks share; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class Launcher:
    """The `dynapipe launch` that watches the ranks of a node, and the folder in which they tell it how they are."""

    pid: int
    records: Path

    def variables(self) -> dict[str, str]:
        return {_LAUNCHER_VARIABLE: f"{self.pid}:{self.records}"}


def launcher() -> Launcher | None:
    """Whose rank this is; None under another launcher, or none."""
    pid, separator, records = os.environ.get(_LAUNCHER_VARIABLE, "").partition(":")
    return Launcher(int(pid), Path(records)) if separator and pid.isdigit() else None


def agent_variables(logs: Path, password: str | None) -> dict[str, str]:
    """What a torchrun that is started here is told besides its arguments, which everybody on the machine can read."""
    said = {"PET_LOG_DIR": str(logs)}
    return said if password is None else said | {STORE_PASSWORD_VARIABLE: password}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of this process's environment with `extra` in it, for a process it starts."""
    return {**os.environ, **(extra or {})}


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r} but must be a whole number: start this with torchrun")
    return int(text)
