"""What anything that JSON holds is on all ranks: sent by one of them, or gathered of each."""

from __future__ import annotations

import json
from typing import Any


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
