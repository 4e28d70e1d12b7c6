"""`fill_waits` on real ranks: every wait of a training run may be filled, and weights and losses keep their bits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.executor.protocols import Pending
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.transport.torch_p2p import WatchedTransport
from dynapipe_ext.launch.job.configured import (
    Variant,
    analytic_costs,
    architecture_of,
    make_planner,
    topology_of,
    variants,
)
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.run_data import RunData, run_data
from dynapipe_ext.launch.job.settled import SettledJob, SettledPlanning
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.launch.processes.env import RankEnv, num_cores
from dynapipe_ext.launch.rank import megatron_run
from dynapipe_ext.launch.rank import variant_run as rank
from dynapipe_ext.launch.rank.one_rank import train_rank
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.settings.train_config import TrainConfig

megatron_cpu.install()

VOCABULARY = 258
BASE = TrainConfig.from_json(
    {
        "run": {"steps": 2, "traced_steps": 2},
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


@dataclass(frozen=True)
class Outcome:
    num_asked: int  # how often the executor asked whether a transfer has arrived
    labels: list[str]  # of all steps, in the order in which they ran
    weights: dict[str, np.ndarray]


def settled(config: TrainConfig, costs: CostModel, data: RunData, server: RedisServer, place: Path) -> SettledJob:
    planning = SettledPlanning(config=config, costs=costs, topology=topology_of(config), num_cores=num_cores())
    keys = JobKeys("of all ranks", salt=place.name)
    return SettledJob(planning=planning, data=data, address=server.address, keys=keys, run_dir=place)


def trained(config: TrainConfig, server: RedisServer, late_ranks: frozenset[int]):
    """Returns this rank's Outcome of the program that `dynapipe train` and torchrun run.

    On late ranks no transfer looks as if it had arrived.
    """
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
    data = run_data(config)

    def main(env: RankEnv) -> Outcome:
        asked: list[bool] = []
        models: list[torch.nn.Module] = []
        labels: list[str] = []

        class Noted(WatchedTransport):
            def arrived(self, pending: Pending) -> bool:
                asked.append(super().arrived(pending))
                return asked[-1] and env.rank not in late_ranks

        build, recorder = megatron_run.build_model, rank.SpanRecorder.record

        def noted_build(*arguments, **named):
            models.append(build(*arguments, **named))
            return models[-1]

        def noted_record(self, span) -> None:
            labels.append(span.label)
            recorder(self, span)

        rank.WatchedTransport = Noted  # this process is a fork: the test's own modules stay as they are
        megatron_run.build_model = noted_build
        rank.SpanRecorder.record = noted_record
        place = Path(config.run.run_dir)
        assert train_rank(env, settled(config, costs, data, server, place)) == 0
        named = torch.nn.ModuleList(models).named_parameters()
        return Outcome(len(asked), labels, {n: p.detach().numpy().copy() for n, p in named})

    return main


SHARDED = {"tp": 2, "pp": 2, "dp": 1, "sequence_parallel": True}


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    ranks: list[Outcome]


def run(config: TrainConfig, run_ranks, server: RedisServer, late_ranks: frozenset[int]) -> Ran:
    t = config.topology
    ranks = run_ranks(t.tp * t.pp * t.dp, trained(config, server, late_ranks))
    report = json.loads((Path(config.run.run_dir) / "report.json").read_text())
    assert max(count for step in report["num_micro_batches"] for count in step) >= 3
    return Ran(report["losses"], ranks)


@pytest.mark.parametrize(
    ("schedule", "topology", "strict", "late"),
    [
        ("adaptive", {}, False, [0, 1]),
        # Ranks of one stage then run their weight gradients at different places.
        ("zb-h1", SHARDED, True, [1, 3]),
        ("adaptive", {"dp": 2}, True, [2, 3]),
    ],
    ids=["everything late", "one of tp2 late", "one of dp2 late"],
)
@pytest.mark.usefixtures("forked_planners")
def test_a_training_run_that_fills_its_waits_has_the_bits_of_one_that_does_not(
    run_ranks,
    redis_server: RedisServer,
    tmp_path: Path,
    schedule: str,
    topology: dict[str, Any],
    strict: bool,
    late: list[int],
) -> None:
    config = BASE.with_values(run={"run_dir": str(tmp_path / "run")}, topology=topology, job={"strict": True})
    config = config.with_values(plan={"schedule": schedule, "split_backward": schedule == "adaptive"})
    empty = run(config, run_ranks, redis_server, frozenset())
    config = config.with_values(
        run={"run_dir": str(tmp_path / "filled")}, plan={"fill_waits": True}, job={"strict": strict}
    )
    filled = run(config, run_ranks, redis_server, frozenset(late))
    assert len(empty.losses) == 2
    assert empty.losses == filled.losses
    for a, b in zip(empty.ranks, filled.ranks, strict=True):
        assert a.num_asked == 0
        assert b.num_asked > 0
        assert any("W" in label for label in b.labels)
        assert sorted(b.labels) == sorted(a.labels)
        assert b.weights.keys() == a.weights.keys()
        assert all(np.array_equal(values, a.weights[name]) for name, values in b.weights.items())
    assert any(empty.ranks[one].labels != filled.ranks[one].labels for one in late)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("forked_planners")
def test_late_transfers_leave_the_sums_of_a_tied_embedding_as_they_are(
    run_ranks, redis_server: RedisServer, tmp_path: Path, deterministic: bool
) -> None:
    """Under a V its rank adds up W of the head and backwards of the first stage."""
    config = BASE.with_values(
        run={"steps": 1, "traced_steps": 1},
        topology={"placement": "v"},
        model={"num_layers": 4, "tied_embeddings": True},
        plan={"fill_waits": True},
        optimizer={"deterministic": deterministic},
    )
    soon, late = (
        run(config.with_values(run={"run_dir": str(tmp_path / name)}), run_ranks, redis_server, late_ranks)
        for name, late_ranks in (("soon", frozenset[int]()), ("late", frozenset({0, 1})))
    )
    assert soon.losses == late.losses
    assert not deterministic or [one.labels for one in soon.ranks] != [one.labels for one in late.ranks]
    for a, b in zip(soon.ranks, late.ranks, strict=True):
        assert all(np.array_equal(values, a.weights[name]) for name, values in b.weights.items())


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


def test_only_the_configured_run_fills_waits_where_others_are_compared_with_it() -> None:
    config = BASE.with_values(plan={"fill_waits": True})
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=0)
    planners = [make_planner(variant.config, costs) for variant in variants(config, compare=True)]
    assert [planner.fill_waits for planner in planners] == [True, False, False, False]
    assert [replace(planner, fill_waits=False) for planner in planners[1:]] == planners[1:]


class Stream:
    def __init__(self) -> None:
        self.num_synchronised = 0

    def synchronize(self) -> None:
        self.num_synchronised += 1


def test_on_an_accelerator_a_transfer_is_late_only_once_the_rank_s_own_stream_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    pending = SimpleNamespace(is_completed=lambda: stream.num_synchronised > 0, wait=tuple)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(rank.TorchP2PTransport, "recv", lambda self, _: pending)
    context: Any = SimpleNamespace(config=BASE, rank=0, groups={}, device=torch.device("cuda", 0))
    variant = Variant("here", BASE)
    filling = Variant("here", BASE.with_values(plan={"split_backward": True, "fill_waits": True}))
    assert isinstance(rank._transport(context, variant), rank.TorchP2PTransport)
    transport: Any = rank._transport(context, filling)
    assert isinstance(transport, WatchedTransport)
    assert transport.arrived(transport.recv(SimpleNamespace(peer=1, channel=0)))
    assert stream.num_synchronised == 1
