"""Collectives inside a stage (tensor and data parallel) have no instruction that could name them when they fail."""

from __future__ import annotations

import json
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from dynapipe_ext.errors import ExecutionError

# What gloo and NCCL say of a peer that is late or gone; both raise plain RuntimeErrors (torch 2.6 to 2.13).
_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl", "broken pipe", "socket")


class _NamedCollectives(ContextDecorator):
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in _SIGNS):
            return
        reason = str(error).splitlines()[0]
        raise ExecutionError(
            f"{self._what}: another rank that takes part in it is late or gone ({reason}):"
            " look at the first message of the other ranks"
        ) from error


def named_collectives(what: str) -> _NamedCollectives:
    """Within, or over a function: a backend's error becomes an ExecutionError that says what this rank was doing."""
    return _NamedCollectives(what)


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
