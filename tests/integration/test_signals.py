"""A signal that ends a job raises once, where it can be heard."""

import faulthandler
import os
import signal
import time
from threading import Thread

import pytest

from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.signals import (
    ending_signals_blocked,
    ending_signals_raise,
    show_own_stacks,
    stacks_asked_for,
)
from tests.support.limits import LIMIT_S


def test_after_the_first_ending_signal_the_next_ones_are_ignored() -> None:
    with pytest.raises(KeyboardInterrupt), ending_signals_raise():  # noqa: PT012 - the clean-up is the point
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_another_thread_takes_while_it_is_blocked_waits_too() -> None:
    other = Thread(target=time.sleep, args=[0.2])  # it blocks nothing, as those of libraries
    inside = False
    with pytest.raises(KeyboardInterrupt), ending_signals_raise():  # noqa: PT012 - where it raises is the point
        other.start()
        with ending_signals_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            other.join()
            while not inside:  # a handler would run here
                inside = True
        raise AssertionError("not raised behind the block")
    assert inside


def test_a_command_shows_its_own_stacks_on_request_before_and_after_its_ranks_and_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    show_own_stacks()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        with stacks_asked_for() as asked:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert asked.wait(LIMIT_S)
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        faulthandler.unregister(signal.SIGUSR2)
    assert capfd.readouterr().err.count("in test_a_command_shows_its_own_stacks") == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_whose_exception_is_lost_in_a_destructor_ends_the_ranks_all_the_same() -> None:
    class Destroyed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with ending_signals_raise():
        destroyed = Destroyed()
        del destroyed
        with pytest.raises(KeyboardInterrupt):
            run_local(lambda env: signal.pause(), 1, timeout_s=LIMIT_S)
