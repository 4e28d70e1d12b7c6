"""The limits of a chat template come off whatever ends it, and nothing of a tokenizer is left on disk."""

from __future__ import annotations

import json
import queue
import resource
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest

from dynapipe_ext.data.preprocessing import template_limits, transformers_encoder, worker
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.template_limits import in_template_limits
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder, load_model_tokenizer
from dynapipe_ext.errors import DataError
from tests.support.limits import LIMIT_S
from tests.support.model_folders import write_model_tokenizer
from tests.support.stopped_child import in_child


@pytest.fixture(autouse=True)
def limits_come_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(template_limits, "_MOST_CPU_S", 0.05)
    monkeypatch.setattr(template_limits, "_AGAIN_S", 0.02)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    yield
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert not template_limits.MEMORY_UNLIMITED.locked()


def spin() -> NoReturn:
    while True:
        pass


def fill() -> None:
    bytes(1 << 40)


class LateToEnd:
    """Errors within `__del__` are said, and lost."""

    def __del__(self) -> None:
        spin()


def after_lost_interruption() -> None:
    LateToEnd()
    spin()


@pytest.mark.parametrize(
    ("render", "error"),
    [(spin, TimeoutError), (fill, MemoryError), (lambda: signal.raise_signal(signal.SIGVTALRM), TimeoutError)],
)
def test_limits_come_off_after_every_error(render, error):
    with pytest.raises(error, match="it takes more than"):
        in_template_limits(render)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_is_lost_comes_again():
    with pytest.raises(TimeoutError):
        in_template_limits(after_lost_interruption)


def test_what_ends_the_process_is_no_error_of_the_template_and_finds_no_limits():
    with pytest.raises(KeyboardInterrupt):
        in_template_limits(lambda: signal.raise_signal(signal.SIGINT))


def test_limits_come_off_beside_other_threads_which_take_memory_once_they_are():
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    rendering = threading.Event()

    def take() -> None:
        rendering.wait(LIMIT_S)
        with template_limits.MEMORY_UNLIMITED:
            taken.put(len(bytes(300 << 20)))

    def render() -> str:
        rendering.set()
        return "hello"

    thread = threading.Thread(target=take)
    thread.start()
    assert in_template_limits(render) == "hello"
    thread.join()
    assert taken.get() == 300 << 20
    assert in_template_limits(lambda: in_thread(lambda: in_template_limits(render))) == "hello"


def in_thread(work):
    """Its result, which has no limits: an interruption would reach the main thread, not this one."""
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: answer.put(work()))
    thread.start()
    thread.join()
    return answer.get()


@pytest.fixture
def carried(tmp_path: Path) -> FolderEncoder:
    write_model_tokenizer(tmp_path / "model", template="{{ messages[0]['content'] }}")
    return load_model_tokenizer(tmp_path / "model")


def test_a_carried_tokenizer_leaves_nothing_and_never_takes_the_working_directory(carried, tmp_path, monkeypatch):
    """tempfile takes the working directory where a disk is full, or a place of temporary files is gone."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "work"))
    used: list[Path] = []
    load = transformers_encoder._load
    monkeypatch.setattr(transformers_encoder, "_load", lambda folder: used.append(folder) or load(folder))
    again = FolderEncoder.from_record(json.loads(carried.as_json()))
    assert again.behaviour == carried.behaviour
    assert [(place.parent == Path.cwd(), place.exists()) for place in used] == [(False, False)]
    assert not [*Path.cwd().iterdir()]
    monkeypatch.setattr(transformers_encoder, "_OTHER_PLACES", ())
    with pytest.raises(DataError, match="set TMPDIR"):
        FolderEncoder.from_record(json.loads(carried.as_json()))


def test_a_worker_whose_parent_ends_while_it_loads_a_tokenizer_leaves_nothing(carried, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    load = transformers_encoder._load

    def work() -> int:
        ours, theirs = socket.socketpair()
        parent = Connection(ours.detach())
        parent.send((EncodeSettings(target="dataset"), carried.as_json()))

        def load_alone(folder: Path) -> object:
            parent.close()
            return load(folder)

        monkeypatch.setattr(transformers_encoder, "_load", load_alone)
        return worker.main([str(theirs.detach())])

    assert in_child(work, tmp_path / "said") == 0, (tmp_path / "said").read_text()
    assert not [*(tmp_path / "scratch").iterdir()]
