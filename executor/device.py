"""The one place that decides which device a rank computes on and which backend its process groups use."""

from __future__ import annotations

import torch


def rank_device(local_rank: int) -> torch.device:
    """The rank's accelerator where CUDA exists, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def process_group_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
