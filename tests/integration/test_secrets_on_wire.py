"""Neither the store's password nor the key of plans crosses the network of a job's ranks, whichever way it starts, nor
is in an argument, a log or a file of the run: all frames of its hosts are captured, and the ranks' own secrets sought.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.hosts import INTO, Host, NoHostsError, joined_hosts, store_of
from tests.support.limits import LIMIT_S
from tests.support.listeners import listeners_in, refuse_open
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES
from tests.support.wire import SECRETS_VARIABLE, Wire, captured, refuse_secrets

CONFIG = f"""
[run]
steps = 2
log_dir = "logs"
log_level = "debug"
plan_dir = "plans"
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 2048
[plan]
costs = "costs.json"
"""
TRAIN, LAUNCH = "-m dynapipe_ext.launch.cli train --compare", "-m dynapipe_ext.launch.cli launch --max-restarts 0"
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --standalone -m dynapipe_ext.launch.rank"
RANK_OF_TWO = (
    "-m torch.distributed.run --nproc-per-node 1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint {endpoint}"
    " --rdzv-conf is_host={is_host} --local-addr {address} -m dynapipe_ext.launch.rank"
)

_LOOK_S = 0.1
SETTINGS = " --config job.toml --run-dir run"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    try:
        with joined_hosts() as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(CONFIG)
    write_costs(TrainConfig.read(tmp_path / "job.toml"), 258, tmp_path / "costs.json")
    for name in ("secrets", "scratch"):
        (tmp_path / name).mkdir()
    return tmp_path


def run_on(hosts: list[Host], words: Sequence[str], preloaded: Preloaded, folder: Path) -> tuple[Wire, str, set[str]]:
    """What passes while a command runs on each of these hosts, what all say, and the addresses at which they listen;
    they must succeed."""
    listeners: set[str] = set()
    environment = {**os.environ, SECRETS_VARIABLE: str(folder / "secrets"), "TMPDIR": str(folder / "scratch")}
    with (folder / "said").open("w") as said, captured([name for name, _, _ in hosts]) as wire:
        jobs = [
            subprocess.Popen(
                ["sh", "-c", f"name=$0; exec {INTO}", name, *shlex.split(f"{preloaded.interpreter} {command}")],
                cwd=folder, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL,
            )
            for (name, _, _), command in zip(hosts, words, strict=True)
        ]  # fmt: skip
        deadline_s = time.monotonic() + LIMIT_S
        for job, (name, _, _) in zip(jobs, hosts, strict=True):
            while job.poll() is None and time.monotonic() < deadline_s:
                listeners |= listeners_in(name)
                with suppress(subprocess.TimeoutExpired):
                    job.wait(_LOOK_S)
        statuses = [job.wait(LIMIT_S) for job in jobs]
    text = (folder / "said").read_text()
    assert not any(statuses), text
    return wire, text, listeners


@pytest.mark.parametrize("words", [TRAIN, LAUNCH, TORCHRUN], ids=["train", "launch", "torchrun"])
def test_on_one_machine_no_secret_crosses_the_network_and_nothing_listens_to_it(
    words: str, hosts: list[Host], folder: Path, preloaded: Preloaded
) -> None:
    wire, said, listeners = run_on(hosts[:1], [words + SETTINGS], preloaded, folder)
    refuse_secrets(wire, folder, said)
    if words != TORCHRUN:  # whose own meeting place is open
        refuse_open(listeners)
    assert list((folder / "scratch").glob("dynapipe*")) == []  # nothing stays of what ranks read


def test_ranks_of_torchrun_on_two_machines_make_the_keys_of_what_both_have(
    hosts: list[Host], folder: Path, preloaded: Preloaded
) -> None:
    with store_of(hosts[0], folder) as flags:
        if not flags:
            (folder / "secret").touch(0o600)
            (folder / "secret").write_text("of this job alone")
            flags = ["--secret-file", "secret"]
        places = [{"endpoint": f"{hosts[0][1]}:29411", "is_host": int(i == 0), "address": hosts[i][1]} for i in (0, 1)]
        words = [f"{RANK_OF_TWO.format(**place)}{SETTINGS} {shlex.join(flags)}" for place in places]
        wire, said, _ = run_on(hosts, words, preloaded, folder)
    refuse_secrets(wire, folder, said)
    assert "unencrypted" not in said
