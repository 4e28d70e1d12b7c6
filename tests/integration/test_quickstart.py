"""A fresh clone trains with the README's first command, installs only once, and then runs the README's others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.launch import cli
from tests.support.limits import LIMIT_S
from tests.support.pages import blocks, readme_commands
from tests.support.preloaded import Preloaded

SHORT = ("--steps", "1", "--tokens-per-batch", "2048", "--tp", "1", "--pp", "2", "--dp", "1")
QUICK = ("--steps", "3", "--tokens-per-batch", "2048", "--effort", "500")
# What pip says when it reaches no index (its retries, its resolver, its sockets).
NO_INDEX = (
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "ProxyError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "NewConnectionError",
)


# The plainest compilation of the core: this suite's own environment is users'.
QUICKLY = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"


def lend_needed(environment: Path) -> None:
    """Make an environment that has pip and what the extra "train" asks for from this one, and nothing else of it.

    Installing torch takes longer than all that follows; tests/repo/test_setup_script.py shows what is asked for, and
    `bash tests/run.sh` installs all of it so itself.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=LIMIT_S)
    (packages,) = environment.glob("lib/python3*/site-packages")
    needed = importlib.metadata.requires("dynapipe-ext") or []
    asked = [line for line in needed if "extra" not in line or re.search("extra == .train.", line)]
    names, lent = ["pip", *(re.split(r"[^\w.-]", line)[0] for line in asked)], set()
    while names:
        name = names.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform or an extra
        if distribution.name in lent:
            continue
        lent.add(distribution.name)
        names += [re.split(r"[^\w.-]", needed)[0] for needed in distribution.requires or () if "extra" not in needed]
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(str(distribution.locate_file(part))).resolve())


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a clone would hold after a commit of everything here, in a folder with spaces in its path."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("git is missing or this is no git checkout: its files cannot be listed")
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    target = tmp_path_factory.mktemp("fresh clone") / "dynapipe ext"
    for name in sorted({name for name in listed.split("\0") if (root / name).is_file()}):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)
    lend_needed(target / ".venv")
    yield target
    shutil.rmtree(target)  # its environment is large


def run(command: list[str], cwd: Path, limit_s: int) -> subprocess.CompletedProcess[str]:
    """A command as a user's shell would run it: without the environment of the tests that run now."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DYNAPIPE_", "PYTHON"))}
    return subprocess.run(
        ["timeout", "-k", "20", str(limit_s), *command],  # ends the whole process group, ranks and store included
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", "CMAKE_ARGS": QUICKLY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s + 30,
        check=False,
    )


def quickstart(checkout: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", str(checkout / "launch/quickstart.sh"), *arguments], cwd, LIMIT_S)


def installed(checkout: Path) -> dict[str, int]:
    """When each part of the environment was written: the set-up's log, its stamp, the folder of the packages."""
    parts = [checkout / "build/setup.log", *checkout.glob(".venv/.dynapipe-*")]
    parts += [*checkout.glob(".venv/lib/python3*/site-packages"), checkout / ".venv/pyvenv.cfg"]
    return {str(part): part.stat().st_mtime_ns for part in parts}


@pytest.fixture(scope="module")
def first_run(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the first command was run from; the environment is installed after it."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    done = quickstart(checkout, cwd, "--run-dir", "runs/x", *QUICK)
    said = done.stdout + done.stderr
    if "starting dynapipe quickstart" not in said and any(words in said for words in NO_INDEX):
        pytest.skip(f"no package index can be reached: {said.splitlines()[-1]}")
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert "dynapipe: installing dynapipe-ext[train]" in done.stderr
    (cwd / "said").write_text(done.stdout)
    return cwd


def report_of(run_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return report


@pytest.mark.slow
def test_a_fresh_clone_trains_eight_ranks_with_one_command(first_run: Path) -> None:
    report = report_of(first_run / "runs/x")
    assert report["steps"] == len(report["losses"]) == 3
    assert report["topology"] == {"tp": 1, "pp": 4, "dp": 2}
    assert report["losses"][-1] < report["losses"][0]
    assert (first_run / "runs/x/index.html").exists()


@pytest.mark.slow
def test_the_first_commands_last_lines_compare_and_say_where_to_look(first_run: Path) -> None:
    how, result, loss, page = (first_run / "said").read_text().splitlines()[-4:]
    assert re.match(r"(measured on|simulated, .*:) 8 emulated ranks \(PP4 x DP2\)", how)
    assert re.match(
        r"the same samples, .* the best rival, packed .*: ours \S+ s, .* packed ZB-V \S+ s per step; ", result
    )
    assert re.match(r"the real run: loss \S+ → \S+ in 3 steps; its curve and all else: runs/x/index.html", loss)
    assert page == "the comparison's page: runs/x/emulated.html"
    assert result[1:] in (first_run / "runs/x/emulated.html").read_text()


@pytest.mark.slow
def test_the_second_command_installs_nothing(checkout: Path, first_run: Path) -> None:
    before = installed(checkout)
    assert len(before) == 4
    again = quickstart(checkout, first_run, "--help")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "usage: dynapipe quickstart" in again.stdout
    assert "installing" not in again.stderr
    assert "making .venv" not in again.stderr
    assert installed(checkout) == before


@pytest.mark.slow
def test_what_was_trained_writes_on(
    root: Path, first_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command and the lines of the page, in this environment."""
    page = (root / ".github/docs/pretrain.md").read_text()
    (command,) = [line for line in readme_commands(page) if " convert " in line]
    (lines,) = blocks(page, "python")
    monkeypatch.chdir(first_run)
    assert cli.main(command.split()[1:]) == 0
    capsys.readouterr()
    exec(compile(lines, "pretrain.md", "exec"), {})
    written = capsys.readouterr().out
    assert written.startswith("The first")
    assert len(written.strip()) > len("The first")


# Commands of the README as they stand there, each with what keeps its run short: one small step on two ranks.
COMMANDS = {
    "dynapipe doctor": (),
    "dynapipe plan --lengths lengths.npy --pp 4 --dp 2": (),
    "dynapipe train --split-backward": SHORT,
    "dynapipe train --data my.jsonl --truncate": SHORT,
    "dynapipe train --config mine.toml": SHORT,
    "dynapipe flops runs/latest": (),
    "dynapipe demo runs/latest": (),
    "dynapipe preprocess --input corpus.jsonl --tokenizer bytes --output prepared": (),
    "dynapipe train --data prepared": SHORT,
    "dynapipe estimate --model llama-2-70b --nodes 6 --gpus-per-node 4 --gpu-memory-gb 80": ("--plans", "1"),
}
SHOWN = {
    "doctor": "Redis server",
    "plan": "lower bound",
    "flops": "MFU",
    "demo": "the same samples, ",
    "preprocess": "200",
    "estimate": "68,976,648,192",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_run_as_they_stand(
    command: str, checkout: Path, first_run: Path, preloaded: Preloaded
) -> None:
    """In the fresh environment; training, which has run in it, in this one."""
    np.save(first_run / "lengths.npy", np.random.default_rng(0).integers(5, 900, 200))
    lines = (json.dumps({"input": f"say {i} " * (1 + i % 60), "target": f"{i}"}) for i in range(200))
    (first_run / "my.jsonl").write_text("\n".join(lines))
    (first_run / "corpus.jsonl").write_text((first_run / "my.jsonl").read_text())
    smaller = (checkout / "launch/configs/quickstart.toml").read_text().replace("num_layers = 8", "num_layers = 4")
    (first_run / "mine.toml").write_text(smaller)
    program, *arguments = command.split()
    assert program == "dynapipe"
    if arguments[0] == "train":
        preloaded.train(*arguments[1:], *COMMANDS[command], cwd=first_run)
        assert report_of(first_run / "runs/latest")["steps"] == 1
        return
    done = run([str(checkout / ".venv/bin/dynapipe"), *arguments, *COMMANDS[command]], first_run, limit_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert SHOWN[arguments[0]] in done.stdout
