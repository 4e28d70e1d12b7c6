"""The one place that decides which device a rank computes on, which backend its process groups use and whether Triton's
kernels run; and bytes, or anything that JSON holds, from one rank to all or from each rank. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError, ExecutionError

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def rank_device(local_rank: int) -> torch.device:
    """The rank's accelerator where CUDA exists, else the CPU."""
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no device: this machine has {torch.cuda.device_count()}: start fewer"
                " ranks here, or hide the devices (CUDA_VISIBLE_DEVICES='') to run on the CPU"
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def use_device(local_rank: int, *, in_segments_that_grow: bool) -> torch.device:
    """`rank_device`, which this process computes on from now on: call it before anything has memory there.

    In segments that grow, 200 steps of changing shapes kept .4 % more of a GPU's memory than they held; torch's own
    segments broke into fragments, and the ninth step ran out of the memory that its plan fitted in
    (`tests/bench/results/gpu_memory.json`).
    """
    device = rank_device(local_rank)
    if device.type == "cuda":
        if in_segments_that_grow:
            _set_allocator("expandable_segments:True")
        torch.cuda.set_device(device)
    return device


def _set_allocator(settings: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of newer names, which differ from version to version
        torch.cuda.memory._set_allocator_settings(settings)


def compute_deterministically() -> None:
    """Have torch take kernels that give the same bits in every run, for the life of this process.

    Where it has none, it raises an error that names the operation.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # an aid for debugging


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels of `executor/stages/kernels.py` take this tensor's place and type."""
    return x.is_cuda and x.dtype in _KERNEL_TYPES and _gpu_runs_kernels()


@cache
def _gpu_runs_kernels() -> bool:
    """A GPU that does not is named once, with the reason."""
    from dynapipe_ext.executor.stages.kernels import gated

    try:
        return bool(torch.isfinite(gated(torch.ones(1, 2, device="cuda"), "silu")).all())
    except Exception as error:  # noqa: BLE001  whatever Triton's compiler lacks here: torch computes the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"Triton's kernels do not run here ({reason}): torch's operations take their place, and a step takes up to"
            " a third longer: install triton and a C compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, which is not waited for: from pageable memory a copy would wait for all work
    that is queued."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def process_group_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def device_bytes(device: torch.device) -> int:
    """Memory of an accelerator, or of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def send_bytes(data: bytes, device: Any, *, source: int = 0, group: Any = None) -> bytes:
    """What rank `source` gives as `data`, on every rank of the group."""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    row = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if data and dist.get_rank() == source:
        row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(row, source, group=group)
    return bytes(row.cpu().numpy())


def send_json(value: Any, source: int, group: Any, device: Any) -> Any:
    """What rank `source` gives, anything that JSON holds, on every rank of the group."""
    return json.loads(send_bytes(json.dumps(value).encode(), device, source=source, group=group))


def gather_bytes(data: bytes, device: Any, *, group: Any = None, to_first: bool = False) -> list[bytes]:
    """Return the `data` of every rank of the group, in their order: on every rank, or only on the group's first one
    (`to_first`; the other ranks get an empty list)."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    longest = max(1, *(int(size) for size in sizes))
    own_row = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    rows = [] if to_first and dist.get_rank(group) else [torch.empty_like(own_row) for _ in sizes]
    if to_first:
        dist.gather(own_row, rows or None, dst=dist.get_process_group_ranks(group)[0], group=group)
    else:
        dist.all_gather(rows, own_row, group=group)
    return [bytes(row[: int(size)].cpu().numpy()) for row, size in zip(rows, sizes, strict=bool(rows))]


def most_of_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, on every rank."""
    numbers = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers.item())


def gather_json(value: Any, device: Any, group: Any = None) -> list[Any]:
    """The `value` of every rank, anything that JSON holds, on every rank in their order."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), device, group=group)]


def check_same_plans(text: str, device: Any, *, what: str, pipeline: Any = None) -> None:
    """A collective call of all ranks, or of those of a process group `pipeline`, each with what it has planned.

    Errors: ExecutionError, on every one of them, where the texts differ.
    """
    digests = gather_json(hashlib.sha256(text.encode()).hexdigest(), device, pipeline)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    ranks, more = "ranks", ""
    if pipeline is not None:
        ranks, more = "pipeline ranks", ", and give all stages the same numbers and lengths"
    raise ExecutionError(
        f"{ranks} 0 and {other} planned the {what} differently: start all ranks with the same arguments, the same cost"
        f" file and the same version of dynapipe-ext{more}"
    )
