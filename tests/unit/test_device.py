"""How a rank makes a device its own."""

from __future__ import annotations

import pytest
import torch

from dynapipe_ext.executor import device
from dynapipe_ext.launch.processes import env


@pytest.mark.parametrize(
    ("own", "expected"), [({}, ["expandable_segments:True"]), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, [])]
)
def test_a_gpus_memory_is_allocated_as_the_environment_says_or_else_in_segments_that_grow(
    own: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for name in env._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "rank_device", lambda local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    assert env.own_device(1) == torch.device("cuda", 1)
    assert said == expected


def test_a_rank_without_gpus_computes_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        assert env.own_device(0) == torch.device("cpu")
