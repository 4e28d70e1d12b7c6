"""Where a process ends that commands of tests are forks of, those who wait for it hear so, and at once."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

from tests.support import preloaded as module
from tests.support.limits import LIMIT_S, SOON_S
from tests.support.preloaded import Command, Preloaded, PreloadedError


def test_a_command_that_cannot_begin_says_that_the_preloaded_process_has_ended() -> None:
    with pytest.raises(PreloadedError, match="has ended"):
        Command(io.BytesIO(), io.StringIO(), io.StringIO(""))


def test_a_command_whose_status_never_comes_leaves_no_timer_that_its_test_would_wait_for() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    command = Command(io.BytesIO(), io.StringIO("step 1\n"), io.StringIO(f"{ended.pid}\n"))
    with pytest.raises(PreloadedError):
        command.communicate(LIMIT_S)
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(SOON_S)
        assert not timer.is_alive()


def test_an_interpreter_whose_preloaded_process_ends_fails_in_one_line() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/it")
        listener.listen()
        words = [sys.executable, "-P", module.__file__, "interpret", f"{folder}/it", "-c", "pass"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as interpreter:
            connection, _ = listener.accept()
            with connection:
                _, streams, _, _ = socket.recv_fds(connection, 1 << 17, 4)
                for stream in streams:
                    os.close(stream)
            _, stderr = interpreter.communicate(timeout=LIMIT_S)
    assert (interpreter.returncode, len(stderr.splitlines())) == (1, 1)
    assert "has ended" in stderr


def test_tests_that_cannot_be_collected_are_said_to_be(preloaded: Preloaded, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PreloadedError):
        preloaded.after("import no_such_module")
    assert "No module named 'no_such_module'" in capfd.readouterr().err
