"""A rank's place in a topology over torch.distributed: its transport, and its sums over other ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.errors import ConfigError, ExecutionError, check_timeout
from dynapipe_ext.executor.device import rank_device
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport, make_group, make_pipeline_groups


class ParallelContext:
    """Made from a topology on every rank of the job at the same point, once torch.distributed is initialised.

    `coordinates` say where this rank is, `stages` which stages it holds, `transport` moves their buffers, and the sums
    are what `TorchStage(parallel=…)` asks for. `replicas` is the process group of the ranks that hold the same stages,
    one of each replica. What waits longer than `timeout_s` fails: with an ExecutionError over gloo, by the end of the
    process over NCCL.
    Errors: ConfigError where torch.distributed has another number of ranks, or cannot move what a GPU holds.
    """

    def __init__(self, topology: Topology, *, device: torch.device | None = None, timeout_s: float = 120.0) -> None:
        check_timeout(timeout_s)
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group before ParallelContext")
        topology.check_num_ranks(dist.get_world_size())
        rank = dist.get_rank()
        self.topology = topology
        self.coordinates: Coordinates = topology.coordinates(rank)
        self.stages = topology.stages_of(self.coordinates.pp_rank)
        self.device = device or rank_device(dist.get_node_local_rank(fallback_rank=rank))
        if self.device.type == "cuda" and dist.get_backend() == "gloo":
            raise ConfigError(
                f"torch.distributed is on gloo but this rank computes on {self.device}, whose memory ends a process"
                " that gives it to gloo: call init_process_group with nccl and a device for each rank, or give"
                " device=torch.device('cpu')"
            )
        groups = make_pipeline_groups(topology, rank, timeout_s=timeout_s)
        self.transport = TorchP2PTransport(topology, rank, groups, device=self.device, timeout_s=timeout_s)
        self._rank, self._timeout_s = rank, timeout_s
        self.replicas = self.group(lambda c: (c.tp_rank, c.pp_rank))
        self._pipeline_groups: dict[tuple[int, ...], Any] = {}

    def group(self, in_common: Callable[[Coordinates], Hashable | None]) -> Any:
        """Return the process group of the ranks that have as much `in_common` as this one; all ranks make theirs at
        once. A rank with None gets torch's NON_GROUP_MEMBER."""
        return make_group(self.topology, self._rank, in_common, timeout_s=self._timeout_s)

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """Over the ranks that hold the same stages, one of each replica."""
        if self.topology.dp > 1:
            dist.all_reduce(tensor, group=self.replicas)

    def sum_over_job(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def sum_over_pipeline(self, pp_ranks: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
        """Return the sum over these pipeline ranks of one replica; all ranks of the job ask for it at one point.

        Only these ranks may call it: it raises ExecutionError on other ranks, instead of a sum over the job.
        """
        if pp_ranks not in self._pipeline_groups:
            group = self.group(lambda c: (c.tp_rank, c.dp_rank) if c.pp_rank in pp_ranks else None)
            self._pipeline_groups[pp_ranks] = group
        if self.coordinates.pp_rank not in pp_ranks:
            return partial(_refuse_sum, self.coordinates.pp_rank, pp_ranks)
        return partial(dist.all_reduce, group=self._pipeline_groups[pp_ranks])


def _refuse_sum(pp_rank: int, pp_ranks: tuple[int, ...], _tensor: torch.Tensor) -> None:
    raise ExecutionError(
        f"pipeline rank {pp_rank} calls a sum over pipeline ranks {', '.join(map(str, pp_ranks))}, of which it is not"
        " one: call it on these ranks only"
    )
