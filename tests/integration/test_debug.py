"""A run that DynaPipe's variables ask for logs and plans, at the store that they name: what it leaves, and a replay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dynapipe_ext.costs.interchange import cost_model_to_json, read_cost_file
from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

SETTINGS = f"""
[run]
steps = 5
run_dir = "run"
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 256
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
[plan]
costs = "costs.json"
adapt_costs = true
[job]
timeout_s = 480
"""
VOCABULARY = 258
NUM_STEPS, NUM_BEFORE_FIT = 5, 4


@pytest.fixture(scope="module")
def folder(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debugged")
    (folder / "settings.toml").write_text(SETTINGS)
    config = TrainConfig.read(folder / "settings.toml")
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=1e7, overhead_ns=0)
    (folder / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))  # this machine is much faster
    port = free_port()
    with RedisServer(port=port) as server:
        variables = {
            "GLOO_SOCKET_IFNAME": "lo",
            "DYNAPIPE_KV_HOST": "127.0.0.1",
            "DYNAPIPE_KV_PORT": str(port),
            "DYNAPIPE_STORE_PASSWORD": server.address.password or "",
            "DYNAPIPE_DEBUG": "DEBUG",
            "DYNAPIPE_LOGGING_DEBUG_DIR": "logs",
            "DYNAPIPE_DEBUG_DUMP_EP_STATS": "True",
            "DYNAPIPE_DEBUG_DUMP_EP_PREFIX": "plans",
        }
        done = preloaded.run(["train", "--config", "settings.toml"], cwd=folder, environment=variables)
    assert done.returncode == 0, done.stderr
    assert "embedded" not in done.stderr  # the store is that of the variables
    (folder / "password").write_text(server.address.password or "")
    return folder


def test_each_rank_keeps_a_log_of_its_steps_and_actions(folder: Path) -> None:
    logs = sorted((folder / "logs").iterdir())
    assert [log.name for log in logs] == ["rank-00000.log", "rank-00001.log"]
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert (folder / "password").read_text() not in text
        assert f"rank {rank} of 2 is process" in text
        assert text.endswith("ended well\n")
        for step in (1, NUM_STEPS):
            own = text[text.index(f"step {step} begins (plan {step - 1})") :]
            body, _, _ = own.partition(f"step {step} done: loss ")
            planned = re.findall(rf"instruction \d+: ({rank}[FBIW]\d+)$", body, re.MULTILINE)
            assert planned
            assert re.findall(rf"({rank}[FBIW]\d+) took", body) == planned


def test_each_plan_is_dumped_and_replays_the_same(folder: Path, preloaded: Preloaded) -> None:
    for step in (0, NUM_BEFORE_FIT - 1, NUM_BEFORE_FIT):
        done = preloaded.run(["replay", f"plans/step-{step:06d}.json"], cwd=folder)
        assert done.stdout.endswith(f"plan {step} is the same, bit for bit\n"), done.stdout + done.stderr
        assert done.returncode == 0
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    dump = json.loads((folder / "plans" / "step-000001.json").read_text())
    shapes = [m for replica in dump["replicas"] for m in replica["micro_batches"]]
    (second,) = [event for event in events if event.get("step") == 2 and "loss" in event]
    assert sum(m["real_tokens"] for m in shapes) == second["real_tokens"]


def test_fitted_costs_hold_from_one_step_on_and_in_the_run_that_goes_on(folder: Path, preloaded: Preloaded) -> None:
    def planner_of(step: int) -> str:
        name: str = json.loads((folder / "plans" / f"step-{step:06d}.json").read_text())["planner"]
        return name

    more = ["--steps", str(NUM_STEPS + 1), "--plan-dir", "plans", "--log-dir", "logs"]
    preloaded.train("--resume", "run", *more, cwd=folder)
    before, after = {planner_of(step) for step in range(4)}, {planner_of(step) for step in range(4, NUM_STEPS + 1)}
    assert (len(before), len(after), before & after) == (1, 1, set())
    names = {path.name for path in (folder / "plans").iterdir() if not path.name.startswith("planner-")}
    assert names == {f"step-{step:06d}.json" for step in range(NUM_STEPS + 1)}  # planners were ahead of the last one
    (kept,) = (folder / "run").glob("costs-after-*.json")
    assert kept.name == f"costs-after-{NUM_BEFORE_FIT:06d}.json"
    saved = read_manifest(latest(folder / "run" / "checkpoints")).run
    assert saved.cost_model() == read_cost_file(kept) != read_cost_file(folder / "run" / "costs.json")
    report = RunReport.read(folder / "run" / "report.json").result
    ((number, fit),) = report.fits
    assert number == NUM_BEFORE_FIT
    assert fit.error_before > 5
    assert fit.error_after < 0.2 * fit.error_before
    assert report.furthest_off is not None
    assert report.furthest_off.letter in "FB"


def test_the_run_keeps_what_the_variables_said(folder: Path) -> None:
    debug = TrainConfig.read(folder / "run" / "config.toml").run
    assert (debug.log_dir, debug.log_level, debug.plan_dir) == ("logs", "debug", "plans")
