"""A rank whose node has other data than rank 0 ends the job before its first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    topology_of,
)
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.run_data import RunData, run_data
from dynapipe_ext.launch.job.settled import SettledJob, SettledPlanning
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.launch.processes.env import RankEnv, num_cores
from dynapipe_ext.launch.rank.one_rank import train_rank
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.settings.train_config import TrainConfig

megatron_cpu.install()

VOCABULARY = 258
BASE = TrainConfig.from_json(
    {
        "run": {"steps": 2},
        "topology": {"tp": 1, "pp": 2, "dp": 1},
        "model": {
            "num_layers": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "num_query_groups": 2,
            "ffn_hidden_size": 64,
            "max_seq_len": 256,
        },
        "data": {"num_samples": 60, "tokenizer": "bytes", "truncate": True, "tokens_per_batch": 2048},
        # max_tokens makes several micro-batches. Under a tight memory limit the two runs could split differently: other
        # buffers are in flight.
        "plan": {"layout": "padded", "max_tokens": 512, "split_backward": True},
        "job": {"timeout_s": 60},
    }
)


def settled(config: TrainConfig, costs: CostModel, data: RunData, server: RedisServer, place: Path) -> SettledJob:
    planning = SettledPlanning(config=config, costs=costs, topology=topology_of(config), num_cores=num_cores())
    keys = JobKeys("of all ranks", salt=place.name)
    return SettledJob(planning=planning, data=data, address=server.address, keys=keys, run_dir=place)


def test_a_rank_whose_node_has_other_data_ends_the_job(
    run_ranks, redis_server: RedisServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = BASE.with_values(run={"run_dir": str(tmp_path / "run")})
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
    data = [run_data(config.with_values(data={"num_samples": number})) for number in (60, 61)]

    def main(env: RankEnv) -> int:
        return train_rank(env, settled(config, costs, data[env.rank], redis_server, tmp_path / "run"))

    with pytest.raises(JobError, match=r"rank [01] ended"):
        run_ranks(2, main)
    said = capfd.readouterr().err
    assert re.search(r"comparison of the data: the number of samples is 60 for rank 0 .* and 61 for rank 1 ", said)
    assert said.count("have the same files on every node") == 1
