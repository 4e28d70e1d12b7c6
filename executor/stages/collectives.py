"""Bytes, and anything that JSON holds, from one rank to all or from each rank. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dynapipe_ext.errors import ExecutionError


def send_bytes(data: bytes, device: Any, *, source: int = 0, group: Any = None) -> bytes:
    """What rank `source` gives as `data`, on every rank of the group."""
    import torch
    import torch.distributed as dist

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
    """The `data` of every rank of the group, in their order: on every rank, or only on the job's first one (`to_first`;
    the others get an empty list)."""
    import torch
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    longest = max(1, *(int(size) for size in sizes))
    own_row = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    rows = [] if to_first and dist.get_rank() else [torch.empty_like(own_row) for _ in sizes]
    if to_first:
        dist.gather(own_row, rows or None, dst=0)
    else:
        dist.all_gather(rows, own_row, group=group)
    return [bytes(row[: int(size)].cpu().numpy()) for row, size in zip(rows, sizes, strict=bool(rows))]


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
