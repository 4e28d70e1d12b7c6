"""Process groups: of ranks that have something in common, and for each direction between two that exchange buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynapipe_ext.topology import Coordinates, Topology

Groups = dict[tuple[int, int], Any]  # (peer pp_rank, communicator) -> process group


def make_group(
    topology: Topology, rank: int, in_common: Callable[[Coordinates], Hashable | None], *, timeout_s: float
) -> Any:
    """The group of the ranks that have as much `in_common` as this one; None where that is None.

    Every rank of the job must call this at the same point: group creation is collective.
    """
    groups: dict[Hashable, list[int]] = {}
    for other in range(topology.world_size):
        groups.setdefault(in_common(topology.coordinates(other)), []).append(other)
    groups.pop(None, None)
    made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in groups.values()]
    return next((group for group, ranks in zip(made, groups.values(), strict=True) if rank in ranks), None)


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
