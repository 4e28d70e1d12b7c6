"""The one place that decides which device a rank computes on and which backend its process groups use."""

from __future__ import annotations

import os

import torch

from dynapipe_ext.errors import ConfigError


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


def compute_deterministically() -> None:
    """Have torch take kernels that give the same bits in every run, for the life of this process.

    Where it has none, it raises an error that names the operation.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # an aid for debugging


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
