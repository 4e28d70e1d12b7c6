"""DynaPipe's variables mean the settings that flags and files give; a rank's log ends with why the rank did."""

import argparse
import resource
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.launch.command_parser import CommandParser
from dynapipe_ext.launch.commands import launch as launch_command
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.processes.env import RankEnv, debug_settings, kv_store_url
from dynapipe_ext.launch.rank.rank_log import Dispensable, LogFile, RankLog, rank_log
from dynapipe_ext.launch.store import asked_store
from dynapipe_ext.settings.tables import RunSettings
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.steps import a_step

VARIABLES = {
    "DYNAPIPE_DEBUG": "DEBUG",
    "DYNAPIPE_LOGGING_DEBUG_DIR": "logs",
    "DYNAPIPE_DEBUG_DUMP_EP_STATS": "1",
    "DYNAPIPE_DEBUG_DUMP_EP_PREFIX": "plans",
}
MEANT = RunSettings(log_dir="logs", log_level="debug", plan_dir="plans")


def settings(*words: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    return requested.config_from(parser.parse_args(words))


def test_variables_flags_and_a_file_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[run]\nlog_dir = "logs"\nlog_level = "debug"\nplan_dir = "plans"\n')
    assert settings("--log-dir", "logs", "--log-level", "debug", "--plan-dir", "plans").run == MEANT
    assert settings("--config", str(file)).run == MEANT
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert settings().run == MEANT
    file.write_text('[run]\nlog_dir = "others"\n')
    assert settings("--config", str(file), "--plan-dir", "own").run == RunSettings(
        log_dir="logs", log_level="debug", plan_dir="own"
    )


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"DYNAPIPE_DEBUG": "WARNING"}, "DYNAPIPE_DEBUG is 'WARNING' but must be INFO or DEBUG"),
        ({"DYNAPIPE_DEBUG_DUMP_EP_STATS": "true"}, "set DYNAPIPE_DEBUG_DUMP_EP_PREFIX to a directory"),
        ({"DYNAPIPE_DEBUG_DUMP_EP_STATS": "yes"}, "'yes' but must be true or false"),
    ],
)
def test_what_a_variable_cannot_mean_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        debug_settings(variables)


def test_a_prefix_alone_dumps_nothing_as_in_dynapipe() -> None:
    assert debug_settings({"DYNAPIPE_DEBUG_DUMP_EP_PREFIX": "plans", "DYNAPIPE_DEBUG_DUMP_EP_STATS": "False"}) == {}


def test_a_level_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[run\] log_level is 'debug' but no log_dir"):
        settings("--log-level", "debug")


@pytest.mark.parametrize(
    ("host", "port", "tls", "url"),
    [
        ("", "", True, None),
        ("localhost", "", True, "redis://localhost:29500/0"),
        ("", "6379", True, "redis://localhost:6379/0"),
        ("node0", "6379", True, "rediss://node0:6379/0"),
        ("node0", "6379", False, "redis://node0:6379/0"),
        ("::1", "1", True, "redis://[::1]:1/0"),
    ],
)
def test_host_and_port_are_the_stores_address(host: str, port: str, tls: bool, url: str | None) -> None:
    assert kv_store_url({"DYNAPIPE_KV_HOST": host, "DYNAPIPE_KV_PORT": port}, tls=tls) == url


@pytest.mark.parametrize("port", ["0", "65536", "redis", "-1", "٣"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="DYNAPIPE_KV_PORT is"):
        kv_store_url({"DYNAPIPE_KV_PORT": port})


def test_a_store_that_is_named_wins_over_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_store(None) is None
    monkeypatch.setenv("DYNAPIPE_KV_HOST", "node0")
    with pytest.raises(ConfigError, match="DYNAPIPE_STORE_PASSWORD"):
        asked_store(None)
    monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", "secret")
    named = asked_store(None)
    assert named is not None
    assert (named.url, named.password) == ("rediss://node0:29500/0", "secret")
    given = asked_store("redis://127.0.0.1:1/0")
    assert given is not None
    assert given.url == "redis://127.0.0.1:1/0"


def test_launch_hands_them_to_every_node_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("node0\nnode1\n")
    for name, value in {**VARIABLES, "DYNAPIPE_KV_HOST": "node9", "DYNAPIPE_STORE_PASSWORD": "hidden"}.items():
        monkeypatch.setenv(name, value)
    parser = CommandParser()
    launch_command.add_arguments(parser)
    words = ["--hosts", str(tmp_path / "hosts"), "--run-dir", "shared", "--plan-dir", "own", "--dry-run"]
    assert launch_command.run(parser.parse_args(words)) == 0
    said = capsys.readouterr().out
    flags = "--log-level debug --log-dir logs --plan-dir plans --store rediss://node9:29500/0 --run-dir shared"
    assert said.count(f"{flags} --plan-dir own") == 4  # the launcher and torchrun of each node
    assert "hidden" not in said


def env(rank: int) -> RankEnv:
    return RankEnv(rank=rank, world_size=4, local_rank=rank, local_world_size=4, master_addr="node0", master_port=1)


def test_a_ranks_log_ends_with_the_calls_that_ended_it_and_goes_on_after(tmp_path: Path) -> None:
    asked = RunSettings(log_dir=str(tmp_path / "new" / "logs"))
    with pytest.raises(MemoryError), rank_log(asked, env(3)):
        raise MemoryError("no room")
    with rank_log(asked, env(3)) as log:
        assert log is not None
        assert not log.every_action
    (file,) = (tmp_path / "new" / "logs").iterdir()
    assert file.name == "rank-00003.log"
    first, second = file.read_text().split("rank 3 of 4 is process")[1:]
    assert "ended by an error" in first
    assert first.splitlines()[-2].endswith("MemoryError: no room")
    assert second.endswith("ended well\n")


def test_a_log_on_a_full_disk_ends_by_its_name(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DataError, match=r"rank-00003\.log"), rank_log(RunSettings(log_dir=str(tmp_path)), env(3)):
            pytest.fail("the first line has no room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_log_whose_disk_fills_says_so_once_and_the_rank_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(OSError), open("/dev/full", "a", buffering=1) as file:  # what closes it fails again
        log = RankLog(LogFile(file), every_action=False)
        log.say("this has no room")
        replace(log, variant="another").say("nor this")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("/dev/full cannot be written (No space left on device): make room")
    assert line.endswith("; no more is written there, and the run goes on")


def test_a_logger_of_others_that_fails_says_so_once_and_the_run_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    class Failing:
        steps = 0

        def step_done(self, done: StepDone) -> None:
            self.steps += 1
            if done.number > 1:
                raise ConnectionError("no such host")

        def close(self) -> None:
            raise ConnectionError("still no such host")

    failing = Failing()
    listener = Dispensable(failing, "Weights & Biases")
    for step in range(4):
        listener.step_done(a_step(step))
    listener.close()
    assert failing.steps == 2
    assert capfd.readouterr().err == (
        "Weights & Biases: no more is written after step 2, and the run goes on: ConnectionError: no such host\n"
    )


def test_no_log_is_kept_unasked_and_a_place_that_is_none_is_named(tmp_path: Path) -> None:
    with rank_log(RunSettings(), env(0)) as log:
        assert log is None
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"rank-00000.log cannot be written \(File exists\)"),
        rank_log(RunSettings(log_dir=str(tmp_path / "file")), env(0)),
    ):
        pass
