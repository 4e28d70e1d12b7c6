"""Collectives inside a stage (tensor and data parallel) have no instruction that could name them when they fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynapipe_ext.errors import ExecutionError

# What gloo and NCCL say of a peer that is late or gone; both raise plain RuntimeErrors (torch 2.6 to 2.13).
_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl", "broken pipe", "socket")


@contextmanager
def named_collectives(what: str) -> Iterator[None]:
    """Turn a backend's error within into an ExecutionError that says what this rank was doing."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        reason = str(error).splitlines()[0]
        raise ExecutionError(
            f"{what}: another rank that takes part in it is late or gone ({reason}):"
            " look at the first message of the other ranks"
        ) from error


def send_json(value: Any, source: int, group: Any, device: Any) -> Any:
    """What rank `source` gives, anything that JSON holds, on every rank of the group. Nothing is pickled."""
    import torch
    import torch.distributed as dist

    text = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    row = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if text:
        row.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(row, source, group=group)
    return json.loads(row.cpu().numpy().tobytes())


def gather_json(value: Any, device: Any) -> list[Any]:
    """Every rank's `value`, anything that JSON holds, on every rank in their order. Nothing is pickled."""
    import torch
    import torch.distributed as dist

    own_text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own_text)], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(own_text, (0, longest - len(own_text))))
    return [json.loads(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
