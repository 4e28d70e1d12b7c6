"""What tests of several folders share: a real server, real ranks, the project's source files."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from dynapipe_ext.launch.processes import env

env.limit_threads(1)  # before any test module imports torch

from dynapipe_ext.launch.processes.cluster import run_local  # noqa: E402
from dynapipe_ext.launch.processes.env import RankEnv  # noqa: E402
from dynapipe_ext.launch.store import RedisServer  # noqa: E402
from tests.support.forked_programs import ForkedPopen  # noqa: E402
from tests.support.limits import LIMIT_S  # noqa: E402
from tests.support.preloaded import TRANSFORMERS, Preloaded, PreloadedError  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SHARED = "DYNAPIPE_TESTS_PRELOADED"  # where the process listens that all workers share
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "dynapipe_ext": "dynapipe_ext",
    "schedules": "dynapipe_ext.schedules",
    "executor": "dynapipe_ext.executor",
    "tools": "dynapipe_ext.tools",
    "launch": "dynapipe_ext.launch",
}

# The same examples each time, so that a suite fails by a change alone; `--hypothesis-profile explore` draws others, and
# more. Nothing is asserted of wall time.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("suite")

RunRanks = Callable[..., list[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of real ranks come first, the dearest before them: the many short ones then leave no worker idle. Ray takes
    its time to start, and little of a core, as do tests of what waits."""
    dear = ["test_quickstart.py", "test_ray.py", "test_profile_command.py", "test_oracle.py", "test_family_logits.py"]
    dear += ["test_preferences_command.py", "test_megatron_script.py", "test_joined_ranks.py", "test_two_nodes.py"]
    dear += ["test_transport.py", "test_train_command.py", "test_collect_memory.py", "test_checkpoints.py"]
    dear += ["test_inference.py", "test_meeting.py", "test_deepspeed_checkpoints.py", "test_foreign_loops.py"]
    order = {name: place for place, name in enumerate(dear)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        name = item.path.name
        return "integration" not in item.path.parts and name not in order, order.get(name, len(order))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded by its end, torch and megatron too, stays: neither tests nor forked ranks seek garbage in it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # tests make many objects, and little garbage that refers to itself
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[object]) -> None:
    """Workers are forks of one process, which has collected the tests once; their commands are forks of its parent."""
    import execnet

    shared = Preloaded()
    config.add_cleanup(lambda: shared.__exit__(None, None, None))
    shared.__enter__().load(*TRANSFORMERS)
    os.environ[_SHARED] = shared.address
    try:
        collected = shared.after(f"from tests.support.collected import collect; collect({config.args!r})")
    except PreloadedError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.INTERNAL_ERROR)
    config.add_cleanup(lambda: collected.__exit__(None, None, None))
    specs[:] = [execnet.XSpec(f"{spec}//python={collected.interpreter}") for spec in specs]


@dataclass(frozen=True, slots=True)
class Source:
    """A module of the package: where it lies below the root, and the name it is imported by."""

    path: str
    module: str

    @property
    def file(self) -> Path:
        return ROOT / self.path


def sources() -> list[Source]:
    found = []
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join((package, *(part for part in parts if part != "__init__")))
            found.append(Source(file.relative_to(ROOT).as_posix(), module))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def all_sources() -> list[Source]:
    """Every module of the package."""
    return sources()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One embedded server for the whole session: tests keep apart by their keys."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """`preloaded.run(["train", …])`: commands as processes that need not import torch and megatron."""
    with Preloaded(os.environ.get(_SHARED, "")) as process:
        yield process


@pytest.fixture(scope="session")
def preloaded_transformers(preloaded: Preloaded) -> Preloaded:
    """The same, whose commands need not import transformers, peft and DeepSpeed either."""
    preloaded.load(*TRANSFORMERS)
    return preloaded


@pytest.fixture
def forked_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planner processes that start in milliseconds: forks of those that start them, as those of `preloaded` are."""
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)


@pytest.fixture(scope="session")
def wait_until_gone() -> Callable[[int], None]:
    """`wait_until_gone(pid)` returns when a process that is no child of ours has ended, which it must."""

    def wait(pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            assert select.select([descriptor], [], [], LIMIT_S)[0], f"process {pid} still runs"
        finally:
            os.close(descriptor)

    return wait


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """`run_ranks(world_size, fn)` runs `fn(env)` in forked ranks and returns each rank's result.

    Import torch (or megatron) at the top of the test module: the ranks are forks of the test's process. A result is
    anything that pickles. A rank that fails fails the test; at the limit every rank's stack is printed.
    """

    def run(world_size: int, fn: Callable[[RankEnv], Any], timeout_s: float = LIMIT_S) -> list[Any]:
        from tests.support import rank_results  # it imports torch

        folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()

        def main(rank: RankEnv) -> int:
            rank_results.write(fn(rank), folder / str(rank.rank))
            return 0

        run_local(main, world_size, timeout_s=timeout_s)
        return [rank_results.read(folder / str(rank)) for rank in range(world_size)]

    return run
