"""Seconds that a rank takes to make the process groups of a job, with torch's fake backend, which connects nobody.

    python tests/bench/process_groups.py

What is measured is what a rank does for the groups of other ranks. A rank is a member of at most two groups for each
neighbour. No key is left in the store: torch makes groups without a barrier, from its version 2.1 on.

2026-11-28, torch 2.13, 2-core x86_64: 0.02 s for PP16 x DP32 (512 ranks, 960 groups), 0.13 s for PP16 x DP256.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.transport.torch_p2p import Groups, make_pipeline_groups


def pipeline_groups(topology: Topology, rank: int) -> tuple[Groups, float, int]:
    """Return the groups of a rank, the seconds that it took to make them, and the keys that they left in the store."""
    store = HashStore()
    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=store)
    try:
        num_keys, start_s = store.num_keys(), time.perf_counter()
        groups = make_pipeline_groups(topology, rank, timeout_s=60)
        return groups, time.perf_counter() - start_s, store.num_keys() - num_keys
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    for dp in (32, 256):
        topology = Topology(pp=16, dp=dp)
        for rank in (0, topology.world_size // 2):
            groups, seconds, num_keys = pipeline_groups(topology, rank)
            print(f"{topology.world_size} ranks, rank {rank}: {len(groups)} groups in {seconds:.3f} s, {num_keys} keys")
