"""Work that stands still is ended at the job's limit for silence, by the name of what it did."""

from __future__ import annotations

import signal
import time
from typing import Any, NoReturn

import pytest

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.measuring import rate
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.launch.processes.cluster import JobError, ended_if_silent, run_local
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.limits import LIMIT_S


def test_measuring_that_hangs_is_ended_long_before_the_limit_of_all_preparation(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def where_it_hangs(*_: Any, sign: rate.Sign, **__: Any) -> NoReturn:
        for length in (32, 64, 128):  # each within the limit
            sign(f"measuring of {length} tokens")
            time.sleep(0.3)
        time.sleep(10 * LIMIT_S)
        raise AssertionError

    monkeypatch.setattr(rate, "measure_rate", where_it_hangs)
    config, before = TrainConfig().with_values(job={"timeout_s": 3.0}), signal.getsignal(signal.SIGALRM)
    start_s = time.monotonic()
    with pytest.raises(ExecutionError, match=r"measuring of 128 tokens has not ended after 3 s \(stacks above\): look"):
        settle_costs(config, 300)
    assert time.monotonic() - start_s < LIMIT_S
    assert "in where_it_hangs" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_process_that_hangs_where_python_cannot_raise_ends_with_the_same_words(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynapipe_ext.launch.processes.cluster._GIVE_UP_S", 0.2)

    def main(env: RankEnv) -> int:
        with ended_if_silent(0.2, "look there") as sign:
            sign("waiting for a device")
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(10 * LIMIT_S)
        return 0

    with pytest.raises(JobError, match="rank 0 ended with exit status 75"):
        run_local(main, 1, timeout_s=LIMIT_S)
    assert "waiting for a device has not ended after 0.2 s (stacks above): look there\n" in capfd.readouterr().err


def test_what_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with ended_if_silent(LIMIT_S, "look there") as sign:
        sign("nothing")
    assert signal.getsignal(signal.SIGALRM) == before
