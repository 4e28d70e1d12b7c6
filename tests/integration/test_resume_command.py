"""`dynapipe train` that is asked to end, killed, and resumed: the run is the one that nobody disturbed."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.limits import LIMIT_S
from tests.support.preloaded import Command, Preloaded
from tests.support.tiny_sizes import TINY_SIZES

STEPS = 24
SETTINGS = f"""
[run]
steps = {STEPS}
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 256
dropout = 0.1
[data]
num_samples = 100
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
[job]
timeout_s = 480
strict = true
"""


def ended(start: AbstractContextManager[Command]) -> tuple[int | None, str]:
    with start as command:
        _, said = command.communicate(LIMIT_S)
    return command.returncode, said


def signalled_at(step: int, number: signal.Signals, start: AbstractContextManager[Command]) -> tuple[int | None, str]:
    """The exit status and what it said of a run that is sent a signal once it has done `step`."""
    said = []
    with start as command:
        for line in command.stderr:
            said.append(line)
            if line.startswith(f"step {step} "):
                break
        command.send_signal(number)
        _, rest = command.communicate(LIMIT_S)
    return command.returncode, "".join(said) + rest


def test_a_run_that_was_ended_killed_and_resumed_is_the_one_that_was_not(preloaded: Preloaded, tmp_path: Path) -> None:
    """All losses to the bit, with dropout, in a directory that is moved in between; costs are those that the first
    start measured."""

    def train(*arguments: str) -> AbstractContextManager[Command]:
        return preloaded.started(["train", *arguments], cwd=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"})

    config, broken, whole = tmp_path / "settings.toml", tmp_path / "runs" / "broken", tmp_path / "runs" / "whole"
    config.write_text(SETTINGS)
    status, said = signalled_at(3, signal.SIGTERM, train("--config", str(config), "--run-dir", str(broken)))
    assert (status, "save, for at most 60 s" in said) == (143, True), said
    first = read_manifest(latest(broken / "checkpoints")).run
    assert 3 <= first.step < STEPS
    assert RunReport.read(broken / "report.json").unfinished == "ended by a signal (SIGTERM)"
    second = train("--resume", "latest", "--save-every", "3")
    status, said = signalled_at(first.step + 5, signal.SIGKILL, second)
    assert status == -signal.SIGKILL, said
    assert f"step {first.step + 1} (1/" in said
    saved = read_manifest(latest(broken / "checkpoints")).run
    assert first.step < saved.step < STEPS
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    broken.rename(moved)
    shutil.rmtree(tmp_path / "runs")
    settings = moved / "config.toml"
    settings.write_bytes(settings.read_bytes()[:700])  # as a crash may leave it
    status, said = ended(train("--resume", "elsewhere/moved"))
    assert status == 0, said
    assert said.count("config.toml was cut, as by a crash: the settings of elsewhere/moved/checkpoints/iter_") == 1
    assert not (tmp_path / "runs").exists()  # nothing is looked for, or written, where the run was
    assert (moved / "data").resolve().parent == tmp_path / "elsewhere" / "tokenized"
    assert TrainConfig.read(moved / "config.toml").run.run_dir == "elsewhere/moved"
    status, said = ended(train("--config", str(config), "--run-dir", str(whole), "--costs", str(moved / "costs.json")))
    assert status == 0, said
    a, b = (RunReport.read(run / "report.json").result for run in (moved, whole))
    assert len(a.losses) == STEPS
    assert a.losses == b.losses
    assert a.real_tokens_per_step == b.real_tokens_per_step
    last = [read_manifest(latest(run / "checkpoints")).run for run in (moved, whole)]
    assert last[0].num_samples == last[1].num_samples
    assert last[0].loader == last[1].loader
    status, said = ended(train("--resume", str(whole)))
    assert status == 2
    assert f"has done {STEPS} steps and steps is {STEPS}: raise --steps" in said
    settings = (whole / "config.toml").read_text()
    for flags, says in (
        (("--tokens-per-batch", "777"), "was trained with tokens_per_batch 1024 but this run has tokens_per_batch 777"),
        (("--dtype", "bfloat16"), "holds another model: dtype"),
    ):
        more = ("--steps", str(STEPS + 1), "--weight-decay", "0.5", *flags)
        status, said = ended(train("--resume", str(whole), *more))
        assert (status, says in said) == (2, True), said
        assert (whole / "config.toml").read_text() == settings  # which the next resume reads
    (whole / "events.jsonl").write_bytes((whole / "events.jsonl").read_bytes()[:5000])
    (whole / "report.json").write_bytes(b"")
    outside = _replace_by_links(whole, tmp_path / "outside")
    status, said = ended(train("--resume", str(whole), "--steps", str(STEPS + 1)))
    assert status == 0, said
    assert f"was cut or damaged: the losses of steps 1 to {STEPS} are lost" in said
    assert RunReport.read(whole / "report.json").result.first_step == STEPS
    assert {place: place.read_bytes() for place in outside} == outside
    assert {place.name for place in outside} >= {".lock", "config.toml", "events.jsonl", "history.jsonl", "report.json"}


def _replace_by_links(run: Path, outside: Path) -> dict[Path, bytes]:
    """Put all files of a run elsewhere, and links in their place, as somebody may plant them: a second name of those
    that grow, and symbolic links for the rest. What they then hold."""
    outside.mkdir()
    contents = {}
    for file in [*run.iterdir(), run / "checkpoints" / "latest_checkpointed_iteration.txt"]:
        if file.is_file() and not file.is_symlink():
            place = file.rename(outside / file.name)
            contents[place] = place.read_bytes()
            if file.name in (".lock", "history.jsonl"):
                os.link(place, file)
            else:
                file.symlink_to(place)
    return contents


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--resume", "nowhere"], "there is no directory nowhere"),
        (["--resume", ".", "--config", "settings.toml"], "holds no complete checkpoint"),
        (["--resume", ".", "--config", "settings.toml", "--compare"], "leave out --compare"),
        (["--resume", ".", "--config", "settings.toml", "--run-dir", "other"], "leave out --run-dir other"),
        (["--resume", ".", "--config", "settings.toml", "--init-from", "x"], "has weights of its own: leave out"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dynapipe_ext.launch import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text(SETTINGS)
    assert cli.main(["train", *flags]) == 2
    assert says in capsys.readouterr().err
