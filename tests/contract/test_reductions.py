"""Sums over ranks: threads of one process and ranks of a job alike."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext import ParallelContext
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.protocols import Reductions
from dynapipe_ext.executor.transport.inline import InlineReductions
from tests.support.limits import LIMIT_S


def sums(parallel: Reductions, rank: int) -> list[list[int]]:
    """What a rank has after sums over the job, twice, and over replicas of (rank, 1)."""
    found = []
    for reduce in (parallel.sum_over_job, parallel.sum_over_job, parallel.sum_over_replicas):
        tensor = torch.tensor([rank, 1])
        reduce(tensor)
        found.append(tensor.tolist())
    return found


def test_threads_sum_over_their_pipeline():
    parallel, found = InlineReductions(Topology(pp=3), timeout_s=LIMIT_S), {}

    def rank(number: int) -> None:
        found[number] = sums(parallel, number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == {number: [[3, 3], [3, 3], [number, 1]] for number in range(3)}


def test_a_thread_that_does_not_come_to_a_sum_ends_the_wait_of_the_others():
    with pytest.raises(ExecutionError, match="not all 2 ranks"):
        InlineReductions(Topology(pp=2), timeout_s=0.05).sum_over_job(torch.zeros(1))


def test_ranks_sum_over_the_job_and_over_the_replicas_of_their_stages(run_ranks):
    topology = Topology(pp=2, dp=2, placement=(0, 1, 1, 0))

    def main(env):
        dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
        with pytest.raises(ConfigError, match="4 ranks were started but tp 1 x pp 2 x dp 1 needs 2"):
            ParallelContext(Topology(pp=2))
        with pytest.raises(ConfigError, match="on gloo but this rank computes on cuda:1"):
            ParallelContext(topology, device=torch.device("cuda", 1))
        parallel = ParallelContext(topology, timeout_s=LIMIT_S)
        found = parallel.stages, sums(parallel, env.rank)
        of_first = parallel.sum_over_pipeline((0,))
        if parallel.coordinates.pp_rank == 1:
            with pytest.raises(ExecutionError, match="rank 1 calls a sum over pipeline ranks 0, of which"):
                of_first(torch.ones(1))
        nobody = parallel.group(lambda place: None)
        dist.all_reduce(alone := torch.ones(1), group=nobody)
        assert alone.item() == 1
        dist.barrier()
        dist.destroy_process_group()
        return found

    ends, middle = [[6, 4], [6, 4], [1, 2]], [[6, 4], [6, 4], [5, 2]]
    assert run_ranks(4, main) == [((0, 3), ends)] * 2 + [((1, 2), middle)] * 2


def test_a_context_without_torch_distributed_is_refused():
    with pytest.raises(ConfigError, match="call init_process_group before ParallelContext"):
        ParallelContext(Topology())
