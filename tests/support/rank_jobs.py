"""Small jobs of real ranks, one after the other in the same processes: to make these takes longer than such a job."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from dynapipe_ext.executor.stages.megatron.model import destroy_parallel
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.env import RankEnv
from tests.support import rank_results
from tests.support.limits import LIMIT_S

_Key = TypeVar("_Key", bound=Hashable)


def in_turn(jobs: Mapping[_Key, tuple[int, Callable[[RankEnv], Any]]]) -> dict[_Key, list[Any]]:
    """What every job returns on each of its ranks, of which it has so many; jobs of as many share their processes.

    A job meets by the env that it is given, and leaves its process group; a result is anything that pickles. Import
    torch and megatron at the top of the test module: the ranks are forks of the test's process. A job that fails ends
    those that share its processes, too, and is named; at the limit, of all jobs of a size, every rank's stack is shown.
    """
    found: dict[_Key, list[Any]] = {}
    for size in sorted({size for size, _ in jobs.values()}):
        own = {key: job for key, (ranks, job) in jobs.items() if ranks == size}
        with tempfile.TemporaryDirectory() as scratch:

            def main(env: RankEnv, own: Mapping[_Key, Any] = own, place: Path = Path(scratch)) -> int:
                returned = []
                for number, (key, job) in enumerate(own.items()):
                    try:
                        returned.append(job(replace(env, init_method=f"{env.init_method}-{number}")))
                    except Exception as error:
                        error.add_note(f"in the job {key}")
                        raise
                    forget_models()
                rank_results.write(returned, place / str(env.rank))
                return 0

            run_local(main, size, timeout_s=LIMIT_S)
            ranks = [rank_results.read(Path(scratch) / str(rank)) for rank in range(size)]
        found |= dict(zip(own, map(list, zip(*ranks, strict=True)), strict=True))
    return found


def forget_models() -> None:
    """And all process groups but the world's, whose threads look around a hundred times a second each. Hooks on the
    nodes at which gradients are summed hold a DDP, which holds the nodes: no collection sees that."""
    destroy_parallel()
    for one in gc.get_objects():
        if isinstance(one, DistributedDataParallel):
            one.grad_accs.clear()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
