"""Python programs that `dynapipe` starts, planners, torchrun and its ranks, as forks of the process that starts them.

So that a job costs no imports. What a program is given is what an executed one has: standard streams, working
directory, environment, session or process group, signal handlers, and no other descriptor of its parent.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

_TITLES = {
    "dynapipe_ext.executor.plans.planner_process": "planner",
    "dynapipe_ext.launch.processes.torchrun": "torchrun",
    "dynapipe_ext.launch.rank": "rank",
}
_forked = {"dynapipe_ext.executor.plans.planner_process"}


def install() -> None:
    """For planners."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def install_for_launch() -> None:
    """For torchrun and its ranks, too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    install()
    _forked.update(_TITLES)
    subprocess_handler.Popen = ForkedPopen  # type: ignore[misc, assignment]
    # What events of a rendezvous are named by: it looks through the sources of all modules, of which there are many.
    dynamic_rendezvous.get_method_name = lambda *_: ""  # type: ignore[assignment]


class ForkedPopen(subprocess.Popen[Any]):
    def _execute_child(self, args: Sequence[str], *given: Any) -> None:  # subprocess.py of Python 3.11
        words = list(args)
        module = words[words.index("-m") + 1] if "-m" in words else ""
        if words[0] != sys.executable or module not in _forked:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        _, preexec, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = given
        *_, new_session, process_group = rest
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            streams = (p2cread, c2pwrite, errwrite)
            _become(module, words[words.index("-m") + 2 :], streams, cwd, env, preexec, new_session, process_group)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _release_descriptors() -> None:
    """All but the standard streams lead nowhere. Their numbers stay taken: objects that are left of the parent close
    them at some time, and must not close what has got the number since."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != nowhere:
            with suppress(OSError):  # of the listing itself
                os.fstat(int(name))
                os.dup2(nowhere, int(name), inheritable=False)


def _become(
    module: str,
    arguments: Sequence[str],
    streams: Sequence[int],
    cwd: str | None,
    environment: Mapping[str, str] | None,
    preexec: Callable[[], None] | None,
    new_session: bool,
    process_group: int,
) -> NoReturn:
    status = 1
    try:
        if new_session:
            os.setsid()
        elif process_group >= 0:
            os.setpgid(0, process_group)
        for number, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
        _release_descriptors()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        if cwd is not None:
            os.chdir(cwd)
        if preexec is not None:
            preexec()
        from dynapipe_ext.launch.processes.cluster import set_process_title

        set_process_title(f"{_TITLES[module]} {module}")
        sys.argv = [module, *arguments]
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # it was imported once
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)
