"""A job's keys: the same on every rank, of a secret that is told to ranks only where they cannot have it otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.processes.env import job_secret
from dynapipe_ext.launch.rank import rank_program

SECRET = "of the launcher of this job"


@pytest.fixture(autouse=True)
def _keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank names its process; here that is the one of the tests."""
    monkeypatch.setattr(rank_program, "set_process_title", lambda _: None)


@pytest.mark.parametrize(
    ("secret", "on_one_machine", "words"),
    [
        (SECRET, True, {"salt"}),
        (SECRET, False, {"salt"}),
        ("", True, {"salt", "file"}),
        ("", False, {"salt", "secret"}),
    ],
)
def test_all_ranks_make_the_same_keys_and_none_of_them_is_told(
    secret: str, on_one_machine: bool, words: set[str]
) -> None:
    mine = JobKeys.begun(secret)
    with mine.for_peers(on_one_machine=on_one_machine) as told:
        assert set(told) == words
        heard = JobKeys.from_rank_0(json.loads(json.dumps(told)), secret)
    keys = [mine.store_password, mine.plan_key.hex(), mine.namespace]
    assert keys == [heard.store_password, heard.plan_key.hex(), heard.namespace]
    assert len({*keys, mine.secret, mine.salt}) == 5
    hidden = {*keys, mine.secret} - ({told["secret"]} if "secret" in words else set())
    assert not [key for key in hidden if key in json.dumps(told)]
    assert not [key for key in (mine.secret, mine.salt) if key in repr(mine)]
    if "file" in told:
        assert not Path(told["file"]).exists()
    other = JobKeys.begun(secret)  # another attempt
    assert (other.plan_key, other.store_password, other.namespace) != (mine.plan_key, *keys[::2])
    assert other.plan_key != mine.plan_key


@pytest.mark.parametrize(("first", "other"), [(SECRET, ""), ("", SECRET)])
def test_a_secret_that_some_nodes_lack_is_refused(first: str, other: str) -> None:
    for on_one_machine in (True, False):
        with (
            JobKeys.begun(first).for_peers(on_one_machine=on_one_machine) as told,
            pytest.raises(ConfigError, match="give every node the same --secret-file") as caught,
        ):
            JobKeys.from_rank_0(told, other)
        assert SECRET not in str(caught.value)


def test_the_secret_leaves_the_environment_with_the_first_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAPIPE_JOB_SECRET", SECRET)
    assert (job_secret(), job_secret()) == (SECRET, "")


@pytest.mark.parametrize(
    ("ranks_here", "flags", "launched", "warns"),
    [
        (2, [], "", True),
        (4, [], "", False),
        (2, [], SECRET, False),
        (2, ["--secret-file", "secret"], "", False),
        (2, ["--store", "rediss://:password@localhost:1/0"], "", False),
    ],
)
def test_rank_0_warns_where_keys_must_travel_in_clear(
    ranks_here: int,
    flags: list[str],
    launched: str,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def claimed(request: object, *_: object, **__: object) -> Iterator[object]:
        yield request

    monkeypatch.chdir(tmp_path)
    Path("secret").touch(0o600)
    Path("secret").write_text(SECRET)
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks_here)}
    for name, value in (
        place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DYNAPIPE_JOB_SECRET": launched}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_program, "claimed", claimed)
    monkeypatch.setattr(rank_program, "train_rank", lambda *_, **__: 0)
    monkeypatch.setattr(rank_program, "_settle_network", lambda *_: None)
    assert rank_program.main(["--tp", "4", *flags]) == 0
    said = capsys.readouterr().err
    assert ("key of plans go to the other nodes unencrypted" in said) == warns
    assert SECRET not in said
