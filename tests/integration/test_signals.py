"""A signal that ends a job raises once, where it can be heard."""

import faulthandler
import os
import pty
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from dynapipe_ext.executor.plans import channel
from dynapipe_ext.launch.processes import torchrun
from dynapipe_ext.launch.processes.cluster import Supervised, run_local
from dynapipe_ext.launch.processes.env import RankEnv
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


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP], ids=["stacks", "hang-up"])
def test_no_process_that_starts_ends_or_changes_its_handlers_is_killed_by_who_asks_for_stacks(
    number: signal.Signals, tmp_path: Path
) -> None:
    """In a stream of requests: a command at its start, while it takes handlers up and puts them away, while it starts
    another program, and at its very end, when the interpreter puts back what there was. A SIGHUP that nohup ignores
    stays ignored."""
    code = f"""
import os, signal, sys
from dynapipe_ext.launch import cli, subcommands
from dynapipe_ext.launch.processes.cluster import Supervised
from dynapipe_ext.launch.processes.signals import stacks_asked_for
from types import SimpleNamespace

class AtTheEnd:
    def __del__(self, sleep=__import__("time").sleep):
        sleep(0.2)

def run(args):
    open({str(tmp_path / "began")!r}, "w").close()
    for _ in range(100):
        with stacks_asked_for():
            pass
    with Supervised.spawn("slow", ["sleep", "0.2"]) as child:
        while child.poll() is None:
            pass
        assert child.poll() == 0, child.verdict()
    return 0

sys.modules["job"] = SimpleNamespace(add_arguments=lambda parser: None, run=run)
sys.keeper = AtTheEnd()
subcommands.SUBCOMMANDS = (subcommands.Subcommand("job", "job", "a job"),)
sys.exit(cli.main(["job"]))
"""
    ignored = {signal.SIGHUP} & {number}
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_IGN) for one in ignored] and None,
    )
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    while command.poll() is None:
        for pid in (command.pid, *children_of(command.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(1e-3)
    assert command.wait(LIMIT_S) == 0


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_torchruns_ranks_and_planners_are_not_killed_by_requests_before_they_listen() -> None:
    """They inherit that from who starts them, until they have handlers of their own."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)"
    words = ["--standalone", "--nproc-per-node", "1", "--no-python", sys.executable, "-c", code]
    with Supervised.fork("torchrun", lambda: torchrun.main(words)) as agent:
        select.select([agent.pidfd], [], [], LIMIT_S)
        assert agent.poll() == 0
    with channel._blocked(*channel.FOR_RANKS):
        assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False).returncode == 0


def test_ranks_save_and_end_once_their_terminal_is_gone(tmp_path: Path) -> None:
    """And say so to nobody. Ranks, their planners and the terminal's foreground are one group."""
    code = f"""
import os, signal, sys, time
from dynapipe_ext.launch import cli, subcommands
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.signals import outlive_readers
from types import SimpleNamespace

def rank(env):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    open({str(tmp_path)!r} + f"/there-{{env.rank}}", "w").close()
    signal.sigwait([signal.SIGUSR1])
    print("saved", flush=True)
    print("saved", file=sys.stderr)
    open({str(tmp_path)!r} + f"/saved-{{env.rank}}", "w").close()
    return 138

def run(args):
    try:
        run_local(rank, 2, save_s=480)
    finally:
        print("over", flush=True)
    return 0

outlive_readers()

sys.modules["job"] = SimpleNamespace(add_arguments=lambda parser: None, run=run)
subcommands.SUBCOMMANDS = (subcommands.Subcommand("job", "job", "a job"),)
sys.exit(cli.main(["job"]))
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child executes at once
        pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
        os.execv(sys.executable, [sys.executable, "-c", code])
    while len(list(tmp_path.glob("there-*"))) < 2:
        time.sleep(0.01)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_process_without_standard_streams_writes_what_is_meant_for_them_into_no_file(tmp_path: Path) -> None:
    code = f"""
import os, sys
from dynapipe_ext.launch import cli, subcommands
from dynapipe_ext.launch.processes.cluster import say_at_once
from types import SimpleNamespace

def run(args):
    files = [open(f"{tmp_path}/{{number}}", "w") for number in range(3)]
    for file in files:
        file.write("weights")
        file.flush()
    say_at_once("words")
    print("words", flush=True)
    print("words", file=sys.stderr, flush=True)
    return 7

sys.modules["job"] = SimpleNamespace(add_arguments=lambda parser: None, run=run)
subcommands.SUBCOMMANDS = (subcommands.Subcommand("job", "job", "a job"),)
sys.exit(cli.main(["job"]))
"""
    closing = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closing, timeout=LIMIT_S, check=False).returncode == 7
    assert {file.read_text() for file in tmp_path.iterdir()} == {"weights"}


def test_what_nobody_reads_any_more_is_lost_and_no_error() -> None:
    code = """
import os, sys
from dynapipe_ext.launch.processes.signals import outlive_readers
outlive_readers()
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr):
    print("words" * 100_000, file=stream, flush=True)
os._exit(7)
"""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **streams) as process:
        for reader in (process.stdout, process.stderr):
            assert reader is not None
            reader.close()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(LIMIT_S) == 7


def test_a_log_on_a_full_disk_is_lost_and_a_reader_that_rests_is_waited_for() -> None:
    code = """
import os, sys
from dynapipe_ext.launch.processes.signals import outlive_readers
outlive_readers()
print("words", flush=True)
os.set_blocking(2, False)
for _ in range(100):
    print("words" * 2000, file=sys.stderr)
os._exit(7)
"""
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-c", code]
        with subprocess.Popen(arguments, stdout=full, stderr=subprocess.PIPE) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)  # the pipe is full
            assert process.stderr is not None
            assert process.stderr.read() == (b"words" * 2000 + b"\n") * 100
            assert process.wait(LIMIT_S) == 7


def _pressing(folder: Path, status: int, *, times: int = 1) -> Callable[[RankEnv], int]:
    """What ranks do of which the first presses Ctrl-C so many `times`: once all are there, then each time that it is
    asked to save. After the last time they save and end with `status`."""

    def rank(env: RankEnv) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        (folder / f"there-{env.rank}").touch()
        while env.rank == 0 and len(list(folder.glob("there-*"))) < env.world_size:
            time.sleep(0.01)
        for _ in range(times):
            if env.rank == 0:
                os.kill(os.getppid(), signal.SIGINT)
            signal.sigwait([signal.SIGUSR1])
        time.sleep(0.2)
        (folder / f"saved-{env.rank}").touch()
        return status

    return rank


def test_ranks_save_and_end_after_ctrl_c(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), ending_signals_raise():
        run_local(_pressing(tmp_path, 128 + signal.SIGUSR1), 2, save_s=LIMIT_S)
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert f"asked to end: the ranks finish their step and save, for at most {LIMIT_S:g} s" in capfd.readouterr().err


def test_a_second_ctrl_c_ends_ranks_that_are_saving(tmp_path: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ending_signals_raise():
        run_local(_pressing(tmp_path, 0, times=2), 1, save_s=10 * LIMIT_S)
    assert time.monotonic() - start_s < LIMIT_S


def test_ctrl_c_once_ranks_have_nothing_left_to_do_changes_nothing(tmp_path: Path) -> None:
    try:
        with ending_signals_raise():
            run_local(_pressing(tmp_path, 0), 2, save_s=LIMIT_S)
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("raised though all ranks ended well")


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
