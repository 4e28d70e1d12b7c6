"""The memory that ranks may take: of each device here, or of this machine within its control groups."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_USABLE_PERCENT = 90


def usable_bytes(num_bytes: int) -> int:
    """What plans take of a device or of free memory where nobody sets a limit. The rest is for what no plan counts:
    contexts, NCCL's buffers, fragments, the interpreter.

    >>> usable_bytes(80_000_000_000)
    72000000000
    """
    return num_bytes * _USABLE_PERCENT // 100


_DEVICES = ("/dev/nvidia0", "/dev/kfd")  # a driver's own, whatever its tools say


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of this machine: `free_bytes` of the host, which ranks without devices share, and what each device has.
    With nothing else on it the host would have `most_bytes` (0: unknown).

    `has_unknown_devices`: ranks run on devices whose size the driver's tool does not say.
    """

    free_bytes: int
    device_bytes: tuple[int, ...] = ()
    has_unknown_devices: bool = False
    most_bytes: int = 0

    @classmethod
    def here(cls, visible_devices: str | None = None) -> Room:
        """`visible_devices` as in CUDA_VISIBLE_DEVICES; None: all."""
        sizes = sizes_of_devices(visible_devices)
        named = bool(visible_devices and visible_devices.strip())
        listed = visible_devices is None and any(Path(device).exists() for device in _DEVICES)
        unknown = not sizes and (named or listed)
        return cls(
            free_bytes=free_bytes(), device_bytes=sizes, has_unknown_devices=unknown, most_bytes=most_free_bytes()
        )

    def of_a_rank(self, num_ranks: int) -> int:
        """Of the smallest device, or an equal part of the host."""
        return min(self.device_bytes, default=self.free_bytes // num_ranks)


def sizes_of_devices(visible: str | None = None) -> tuple[int, ...]:
    """Of each device, by the driver's own tool: asking CUDA would keep this process from forking ranks."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    if visible is not None and not visible.strip():
        return ()
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    chosen = None if visible is None else [word.strip() for word in visible.split(",")]
    if chosen and any(word.startswith("MIG") for word in chosen):
        chosen = None  # a part of a device, whose size is not listed: no more than the devices have
    return tuple(
        int(row[2]) << 20
        for row in rows
        if len(row) == 3 and row[2].isdigit()
        if chosen is None or row[0] in chosen or any(word and row[1].startswith(word) for word in chosen)
    )


def free_bytes(root: Path = Path("/")) -> int:
    """What processes here may still take: of the machine, and of each control group that they are in, whose page cache
    counts as free. `root` holds proc and sys."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    (kibibytes,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    free = kibibytes << 10
    for group in _control_groups(root):
        for limit, usage, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # of the first version
        ):
            with contextlib.suppress(OSError, ValueError):  # another version's, or "max"
                room, used = (int((group / name).read_text()) for name in (limit, usage))
                free = min(free, room - used + _in_statistics(group, cached))
    return max(0, free)


def most_free_bytes(root: Path = Path("/")) -> int:
    """What processes here might take if no other did: all of the machine, or of the tightest control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    (kibibytes,) = (int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    most = kibibytes << 10
    for group in _control_groups(root):
        for limit in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # another version's, or "max"
                most = min(most, int((group / limit).read_text()))
    return most


def _control_groups(root: Path) -> Iterator[Path]:
    """The groups of this process that may limit memory, up to the outermost one that is seen here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inside = mounted / path.lstrip("/")
        yield from (inside, *(folder for folder in inside.parents if folder.is_relative_to(mounted)))


def _in_statistics(group: Path, name: str) -> int:
    lines = (group / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
