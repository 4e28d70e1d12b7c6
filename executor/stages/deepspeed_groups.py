"""The ranks of a job as a DeepSpeed engine asks for them: the `mpu` of `deepspeed.initialize`."""

from __future__ import annotations

from typing import Any

from dynapipe_ext.executor.transport.parallel_context import ParallelContext


class ModelParallelUnit:
    """Made on every rank of the job at the same point.

    To DeepSpeed (0.19) the ranks of one replica are model parallel: norms, overflows and the names of files go by them.
    What it asks of slices is tensor parallelism, which torch modules do not have.
    """

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel
        self._stages = parallel.group(lambda coordinates: coordinates.dp_rank)

    def get_data_parallel_group(self) -> Any:
        return self._parallel.replicas

    def get_data_parallel_rank(self) -> int:
        return self._parallel.coordinates.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._parallel.topology.dp

    def get_model_parallel_group(self) -> Any:
        return self._stages

    def get_model_parallel_rank(self) -> int:
        return self._parallel.coordinates.pp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._parallel.topology.pp

    def get_pipe_parallel_world_size(self) -> int:
        return self._parallel.topology.pp

    def get_slice_parallel_rank(self) -> int:
        return 0

    def get_slice_parallel_world_size(self) -> int:
        return 1
