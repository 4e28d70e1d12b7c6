"""Torch's generators: seeded before a layer, and as they were where a forward runs a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

Replay = Callable[[], AbstractContextManager[None]]  # within: random numbers as from when it was made


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, which without CUDA formats its caller's stack each time: a fifth of a small layer's time."""
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    (torch.manual_seed if on_device else torch.default_generator.manual_seed)(seed)


def replay_torch(device: torch.device) -> Replay:
    """Of the generators of the CPU and the device, which stand afterwards where they stood before."""
    on_device = device.type == "cuda"
    cpu_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if on_device else None

    @contextmanager
    def replay() -> Iterator[None]:
        with torch.random.fork_rng([device] if on_device else []):
            torch.set_rng_state(cpu_state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)
            yield

    return replay
