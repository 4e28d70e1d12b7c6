"""The set-up script's decisions, with stand-ins for Python and pip: what it installs, when, and what it says."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_S

FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in
  *version_info*) exit ${OLD:-0} ;;
  *find_spec*) exit ${BASE_HAS_NO_TORCH:-1} ;;
  *"import torch"*) exit ${VENV_HAS_NO_TORCH:-1} ;;
  *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *"pip install"*) echo "the index is away"; exit ${PIP_FAILS:-0} ;;
esac
"""


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A folder with a space in its path that holds the script and a pyproject.toml, and a stand-in for Python."""
    folder = tmp_path / "a b" / "check out"
    (folder / "launch").mkdir(parents=True)
    shutil.copy(root / "launch/setup.sh", folder / "launch/setup.sh")
    (folder / "pyproject.toml").write_text("[project]\n")
    fake = tmp_path / "bin" / "fake python"
    fake.parent.mkdir()
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o700)
    return folder


def start(checkout: Path, extras: str, **variables: str) -> subprocess.Popen[str]:
    """Start the script; the stand-in notes its calls in the file `calls`."""
    log = checkout.parent / "calls"
    environment = {
        "PATH": os.environ["PATH"],
        "LOG": str(log),
        "DYNAPIPE_PYTHON": str(checkout.parent.parent / "bin" / "fake python"),
        **variables,
    }
    script = 'set -euo pipefail; source "$1/launch/setup.sh"; dynapipe_setup "$1" "$2"; echo "at $venv_python"'
    return subprocess.Popen(
        ["bash", "-c", script, "bash", str(checkout), extras],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def set_up(checkout: Path, extras: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run the script; its status, what it said, and the calls of Python that it made."""
    log = checkout.parent / "calls"
    log.write_text("")
    with start(checkout, extras, **variables) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, log.read_text().splitlines()


def test_the_first_run_installs_and_the_second_does_nothing(checkout: Path) -> None:
    status, output, calls = set_up(checkout, "train")
    assert status == 0
    assert f"at {checkout}/.venv/bin/python" in output
    assert [call for call in calls if "pip install" in call] == [
        f"python -m pip install --no-compile -e {checkout}[train] torch==2.13.0",
    ]
    assert set_up(checkout, "train") == (0, f"at {checkout}/.venv/bin/python\n", [])


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_two_at_once_install_once(checkout: Path) -> None:
    with start(checkout, "train") as one, start(checkout, "train") as other:
        assert "at " in one.communicate(timeout=LIMIT_S)[0]
        assert "at " in other.communicate(timeout=LIMIT_S)[0]
    calls = (checkout.parent / "calls").read_text()
    assert calls.count("pip install") == 1


def test_more_extras_are_added_and_fewer_are_there_already(checkout: Path) -> None:
    set_up(checkout, "train")
    assert any("[train,test]" in call for call in set_up(checkout, "train,test")[2])
    assert set_up(checkout, "train")[2] == []
    assert set_up(checkout, "train,test")[2] == []


def test_a_changed_pyproject_or_a_moved_checkout_installs_again(checkout: Path) -> None:
    set_up(checkout, "train")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert any("pip install" in call for call in set_up(checkout, "train")[2])
    moved = checkout.rename(checkout.with_name("moved"))
    assert any(f"-e {moved}[train]" in call for call in set_up(moved, "train")[2])


def test_a_torch_that_is_there_is_kept(checkout: Path) -> None:
    calls = set_up(checkout, "train", VENV_HAS_NO_TORCH="0", BASE_HAS_NO_TORCH="0")[2]
    assert any("-m venv --system-site-packages" in call for call in calls)
    assert not any("torch==" in call for call in calls)


def test_the_torch_requirement_can_be_chosen(checkout: Path) -> None:
    calls = set_up(checkout, "train", DYNAPIPE_TORCH="torch==2.9.0")[2]
    assert f"python -m pip install --no-compile -e {checkout}[train] torch==2.9.0" in calls


def test_an_active_environment_is_not_used(checkout: Path, tmp_path: Path) -> None:
    assert f"at {checkout}/.venv/bin/python" in set_up(checkout, "train", VIRTUAL_ENV=str(tmp_path))[1]


def test_an_old_python_is_refused(checkout: Path) -> None:
    status, output, _ = set_up(checkout, "train", OLD="1")
    assert status == 2
    assert "is no Python >= 3.11" in output


def test_a_failing_install_shows_pips_words_and_is_tried_again(checkout: Path) -> None:
    status, output, _ = set_up(checkout, "train", PIP_FAILS="1")
    assert status == 2
    assert "the index is away" in output
    assert "build/setup.log" in output
    status, output, calls = set_up(checkout, "train")
    assert status == 0
    assert any("pip install" in call for call in calls)
