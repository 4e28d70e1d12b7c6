"""What a disk that is full does to `dynapipe train`: its cause in one line, by the rank that met it, and status 2."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.tools.account.report import RunReport
from tests.integration.test_resume_command import SETTINGS
from tests.support.limits import LIMIT_S
from tests.support.preloaded import Command, Preloaded
from tests.support.rank_processes import rank_process

# A limit on the size of files would cut what a rank compiles, and leave it so for all that come later.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1"}
ENDED = r"dynapipe: error: rank 0 ended with exit status 2 \(see its message above\)\n"


def train(preloaded: Preloaded, folder: Path, steps: int, at_step_2: Callable[[Command], None], *flags: str) -> str:
    """What a run says of its failure, the lines of its log left out."""
    (folder / "settings.toml").write_text(SETTINGS.replace("steps = 40", f"steps = {steps}"))
    said = []
    words = ["train", "--config", "settings.toml", "--run-dir", "run", *flags]
    with preloaded.started(words, cwd=folder, environment=ENVIRONMENT) as command:
        for line in command.stderr:
            if line.startswith("step 2 "):
                at_step_2(command)
            if "cannot be written" in line or "rror" in line or "Traceback" in line or line.startswith("rank"):
                said.append(line)
        command.communicate(LIMIT_S)
    assert command.returncode == 2, said
    return "".join(said)


def test_a_report_that_cannot_be_written_is_named_once_by_rank_0(preloaded: Preloaded, tmp_path: Path) -> None:
    def fill(_: Command) -> None:
        (tmp_path / "run" / "trace.json").mkdir()  # no place for the file

    said = train(preloaded, tmp_path, 6, fill)
    why = "rank 0: run/trace.json is a folder: name another file, or move it away\n"
    assert re.fullmatch(rf"ranks: .*\n{why}{ENDED}", said)
    assert RunReport.read(tmp_path / "run" / "report.json").unfinished is not None


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_run_without_room_for_a_checkpoint_goes_on_and_waits_for_it_at_its_end(
    makes_room: bool, preloaded: Preloaded, tmp_path: Path
) -> None:
    """Where it is asked to end meanwhile, it says what is missing, and goes on from the checkpoint before."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    words = ["train", "--config", "settings.toml", "--run-dir", "run", "--save-every", "3"]
    lines = []
    with preloaded.started(words, cwd=tmp_path, environment=ENVIRONMENT) as command:
        for line in command.stderr:
            lines.append(line)
            if line.startswith("step 4 "):  # of its files only checkpoints grow
                process = rank_process(1, 2, tmp_path)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
            if "the run waits for it" in line and makes_room:
                resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            elif "the run waits for it" in line:
                command.send_signal(signal.SIGTERM)
        command.communicate(LIMIT_S)
    said = "".join(lines)
    assert command.returncode == (0 if makes_room else 143), said
    opening = re.search(
        r"checkpoints: in run/checkpoints every 3 steps, and at the end \(about (.*) kB each, the"
        r" newest 2 stay\)\n",
        said,
    )
    assert opening, said
    root = tmp_path / "run" / "checkpoints"
    written = sum(file.stat().st_size for file in (root / "iter_0000003").glob("*.distcp"))
    assert float(opening[1]) * 1000 == pytest.approx(written, rel=0.5)  # of tensors this small half is their names
    why = (
        rf"the checkpoint was not saved: rank 1 could not write below {root}: File too large; one takes about"
        rf" {opening[1]} kB below {root}, where .* are free: make room there"
    )
    assert re.search(rf"step 6: {why}; it is tried again after 60 s\n.*step 24: {why}; the run", said, re.DOTALL), said
    assert "Traceback" not in said
    assert "unexpected pos" not in said
    kept = {"iter_0000003", "iter_0000024"} if makes_room else {"iter_0000003"}
    assert {entry.name for entry in root.iterdir()} == {*kept, "latest_checkpointed_iteration.txt"}
    if not makes_room:
        saved = r"saved: run/checkpoints/iter_0000003; to go on: dynapipe train --resume run\n"
        assert re.search(rf"\n{why}, then resume\n.*{saved}", said, re.DOTALL), said
        assert "step 4 (1/1) " in preloaded.train("--resume", "run", "--steps", "4", cwd=tmp_path)


def test_of_ranks_that_fail_since_one_could_not_write_none_is_heard(preloaded: Preloaded, tmp_path: Path) -> None:
    def fill(_: Command) -> None:
        process = rank_process(0, 2, tmp_path)  # as a full disk: its files end here
        resource.prlimit(process, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    said = train(preloaded, tmp_path, 40, fill, "--compare")  # whose steps wait for no checkpoint
    why = r"run/events.jsonl cannot be written \(File too large\): make room there"
    assert re.fullmatch(rf"ranks: .*\n({why}; the run keeps its steps until then\n)?rank 0: {why}\n{ENDED}", said)
