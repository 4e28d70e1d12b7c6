"""Every way into a job plans the same: forked ranks, torchrun's, `dynapipe plan`, `check-plan` and `replay`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.executor.plans.dump import DumpingPlanner
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands import plan as plan_command
from dynapipe_ext.launch.commands import train as train_command
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of, global_batches, variants
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.model_folder import configured_cut
from dynapipe_ext.launch.job.requested import JobRequest, add_arguments, requested_job
from dynapipe_ext.launch.job.room import Place
from dynapipe_ext.launch.job.settled import SettledJob, peers_job, settled_job
from dynapipe_ext.launch.processes.env import RankEnv, num_cores
from dynapipe_ext.launch.rank import one_rank
from dynapipe_ext.launch.run.outcome import begin_run, run_facts
from dynapipe_ext.models.layer_pattern import ProvenCut
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import StoreInfo
from dynapipe_ext.tools.files import toml_of
from tests.support.model_folders import model_folder

ARGUMENTS = argparse.Namespace(step=0, time_limit=None)
PAIRS = {"model": {"num_decoder_layers": 2, "num_layers": 2, "position": "relative", "norm": "rmsnorm", "bias": False}}
ONE_TP = {"tp": 1, "pp": 2, "dp": 2}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {},
    "padded": {"plan": {"layout": "padded"}, "topology": ONE_TP},
    "one core a rank": {"topology": {"tp": 1, "pp": 1, "dp": 1}},
    "encoder-decoder": PAIRS,
    "pieces": {"plan": {"pieces": 64}, "topology": ONE_TP},
    "split backward": {"plan": {"split_backward": True}},
    "a published schedule": {"plan": {"schedule": "zb-h1"}, "topology": ONE_TP},
    "placement v": {"topology": {"placement": "v", "tp": 1}},
    "placement auto": {"topology": {"placement": "auto", "tp": 1, "dp": 1}},
    "uneven layers": {"topology": {"layers_per_stage": [1, 3]}},
    "deterministic": {"optimizer": {"deterministic": True}},
    "held-out data": {"eval": {"fraction": 0.2, "every": 1}},
    "bf16, states over replicas": {"model": {"dtype": "bfloat16"}, "optimizer": {"distributed": True}},
    "sequence parallel": {"topology": {"sequence_parallel": True}},
    "transformers": {
        "model": {"architecture": "MODEL", "from_scratch": True, "backend": "transformers"},
        "topology": ONE_TP,
    },
    "LoRA": {
        "model": {"architecture": "MODEL", "init_from": "MODEL", "backend": "transformers"},
        "lora": {"enabled": True},
        "topology": ONE_TP,
    },
    "ZeRO 1": {
        "model": {"architecture": "MODEL", "from_scratch": True},
        "deepspeed": {"config": "zero1.json"},
        "topology": ONE_TP,
    },
    "ZeRO 2": {
        "model": {"architecture": "MODEL", "from_scratch": True},
        "deepspeed": {"config": "zero2.json"},
        "topology": {"tp": 1, "pp": 1, "dp": 2},
    },
}


@dataclass(frozen=True)
class Measured:
    """A machine that is measured in no time."""

    own: Any

    def place(self) -> Place:
        place: Place = self.own.place()
        return place

    def num_cores(self) -> int | None:
        cores: int | None = self.own.num_cores()
        return cores

    def proven_cut(self, config: TrainConfig) -> ProvenCut:
        return configured_cut(config)

    def measured_costs(self, config: TrainConfig, vocab_size: int) -> CostModel:
        return analytic_costs(config, architecture_of(config, vocab_size), flops_per_s=1e10, overhead_ns=20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a published model, and files of an engine; tokens are kept here from case to case."""
    folder = tmp_path_factory.mktemp("jobs")
    random = np.random.default_rng(0)
    lines = [
        json.dumps({"input": "a" * int(n), "target": "b" * int(m)}) for n, m in random.integers(4, 110, (48, 2)) // 2
    ]
    (folder / "data.jsonl").write_text("\n".join([*lines, json.dumps({"input": "a" * 30, "target": "b" * 90})]))
    model_folder("llama", folder / "model")
    for stage in (1, 2):
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return folder


def requested(folder: Path, case: str) -> JobRequest:
    tables: dict[str, dict[str, Any]] = {
        "plan": {"effort": 40, "pad_multiple": 8},
        "data": {"path": str(folder / "data.jsonl"), "tokenizer": "bytes", "tokens_per_batch": 1500},
        "model": {"max_seq_len": 256},
        "run": {"steps": 2},
    }
    for table, values in CASES[case].items():
        tables[table] = tables.get(table, {}) | values
    if "architecture" in tables["model"]:
        tables["model"]["max_seq_len"] = 128
        tables["data"] |= {"truncate": True}
    text = toml_of(tables, case).replace("MODEL", str(folder / "model")).replace('"zero', f'"{folder}/zero')
    (folder / "job.toml").write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    request = requested_job(parser.parse_args(["--config", str(folder / "job.toml")]), None)
    place = folder / case.replace(" ", "-").replace(",", "")
    config = replace(request.config, run=replace(request.config.run, run_dir=str(place)))
    return replace(
        request,
        config=config,
        run_dir=str(place),
        address=StoreAddress.parse("redis://:secret@localhost:1/0"),
        keys=JobKeys.begun(""),
    )


def step_0(job: SettledJob) -> dict[str, Any]:
    lengths = job.data.train.lengths
    batch = global_batches(job.config, lengths, 0, drop_last=False)[0]
    made = plan_command._made(job.planning.planner, sample_lengths(lengths, batch), ARGUMENTS)
    raw: dict[str, Any] = json.loads(json.dumps(plan_command._json(made, ARGUMENTS)))
    return raw


def begun(job: SettledJob) -> Path:
    job.run_dir.mkdir()
    facts = run_facts(job, StoreInfo("redis", "7"), device="cpu", device_bytes=0, num_cores=num_cores())
    begin_run(job, facts, variants(job.config, compare=False))
    np.save(job.run_dir / "lengths.npy", job.data.train.lengths)
    return job.run_dir


@pytest.mark.parametrize("case", CASES)
def test_every_way_in_plans_the_same(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_command, "_import_once", lambda config: None)
    request, console = requested(folder, case), Console(quiet=True)
    place = RankEnv(rank=0, world_size=4, local_rank=0, local_world_size=4, master_addr="", master_port=0)
    forked = settled_job(request, Measured(train_command._ThisMachine(request.config)), console)
    launched = settled_job(request, Measured(one_rank._RanksMachine(place, torch.device("cpu"))), console)
    peer = peers_job(request, json.loads(json.dumps(launched.to_json())), launched.keys, launched.data)
    planned = step_0(forked)
    assert replace(forked, data=launched.data) == launched
    assert forked.data.fingerprint == launched.data.fingerprint
    assert peer.planning == replace(forked.planning, config=peer.config)
    assert peer.planning.planner == forked.planning.planner
    assert peer.config.topology == forked.config.topology
    run_dir = begun(forked)
    given = ["--config", str(run_dir / "config.toml"), "--costs", str(run_dir / "costs.json")]
    given += ["--lengths", str(run_dir / "lengths.npy")]
    plan = run_dir / "plan.json"
    assert cli.main(["plan", *given, "--json", str(plan)]) == 0
    assert json.loads(plan.read_text()) == planned
    capsys.readouterr()
    assert cli.main(["check-plan", str(plan), *given]) == 0, capsys.readouterr().out
    lengths = forked.data.train.lengths
    samples = sample_lengths(lengths, global_batches(forked.config, lengths, 0, drop_last=False)[0])
    dumping = DumpingPlanner(forked.planning.planner, run_dir / "plans")
    prove_step(dumping, samples, step=0)
    dumping.begins(0)
    assert cli.main(["replay", str(run_dir / "plans" / "step-000000.json")]) == 0
