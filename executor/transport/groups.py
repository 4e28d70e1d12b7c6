"""Process groups for pipeline transfers: one for each direction between two ranks that exchange buffers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynapipe_ext.topology import Topology

Groups = dict[tuple[int, int], Any]  # (peer pp_rank, communicator) -> process group


def make_pipeline_groups(topology: Topology, rank: int, *, timeout_s: float) -> Groups:
    """This rank's groups. Every rank of the job must call this at the same point: group creation is collective.

    Directions have groups of their own because NCCL runs a pair's operations in order, without tags, on one queue.
    """
    me = topology.coordinates(rank)
    neighbours = sorted(
        {(min(a, b), max(a, b)) for a, b in zip(topology.stage_ranks, topology.stage_ranks[1:], strict=False) if a != b}
    )
    mine: Groups = {}
    for dp_rank in range(topology.dp):
        for tp_rank in range(topology.tp):
            for low, high in neighbours:
                ends = [topology.rank(tp_rank=tp_rank, pp_rank=p, dp_rank=dp_rank) for p in (low, high)]
                for channel in (0, 1):
                    group = dist.new_group(ends, timeout=timedelta(seconds=timeout_s))
                    if (me.tp_rank, me.dp_rank) == (tp_rank, dp_rank) and me.pp_rank in (low, high):
                        mine[high if me.pp_rank == low else low, channel] = group
    return mine
