"""A save that is killed before any one of its file operations leaves the last good checkpoint, and nothing else."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron_ranks import join  # isort: skip  # first: it imports megatron uncompiled

from dynapipe_ext.durable_files import checksum
from dynapipe_ext.errors import DataError, ExecutionError, NoRoomError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints import megatron_checkpoint, saving
from dynapipe_ext.executor.checkpoints.deepspeed_checkpoint import load_engine
from dynapipe_ext.executor.checkpoints.folder import MANIFEST, RunState, read_manifest
from dynapipe_ext.executor.checkpoints.megatron_checkpoint import (
    CheckpointSaver,
    TensorWriter,
    load_checkpoint,
    read_tensors,
)
from dynapipe_ext.executor.checkpoints.saving import open_checkpoint
from dynapipe_ext.executor.checkpoints.transformers_checkpoint import load_parts
from dynapipe_ext.executor.protocols import OptimizerPlace

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip
from tests.support.limits import LIMIT_S

STEPS = (1, 2)
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def sharded(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """A tensor whose rows lie on all ranks, one after the other."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return ShardedTensor.from_rank_offsets(key, tensor, (0, rank, world_size))


class Trained:
    """Stands for a rank's model and its optimizer: one tensor that tells which step it was saved at."""

    def __init__(self, step: int) -> None:
        self.weight = torch.full((3, 4), float(step))
        self.module, self.place = self, OptimizerPlace(step, {"num_steps": step})

    def parameters(self) -> Any:
        return iter([self.weight])

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, ShardedTensor]:
        return {"weight": sharded("weight", self.weight)}

    def sharded_state(self, _model: Any) -> dict[str, Any]:
        return {"moment": sharded("moment", self.weight + 0.5)}


def run_at(step: int) -> RunState:
    return RunState(
        step=step, num_samples=0, loader={}, model={}, settings={}, costs={}, costs_fingerprint="", recent_losses=(1.0,)
    )


def save(root: Path, step: int, value: int, keep_last: int = 2) -> None:
    trained: Any = Trained(value)
    with CheckpointSaver(root, [trained], trained, {}, keep_last=keep_last) as saver:
        saver.save(run_at(step))


def in_a_child(folder: Path, work: Any) -> int:
    """The wait status of a fork that runs `work` as the only rank."""
    pid = os.fork()
    if pid == 0:
        try:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
            dist.init_process_group("gloo", f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # pytest's own handling must not go on in the fork
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_before(operation: int, root: Path) -> None:
    """Kill this process before file operation number `operation` below `root`; syncs count, which have no event."""
    seen = 0
    own_thread_fsync = os.fsync

    def count() -> None:
        nonlocal seen
        if seen == operation:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPERATIONS and str(root) in str(arguments[0]):
            count()

    def fsync(descriptor: Any) -> None:
        count()
        own_thread_fsync(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync


def test_what_a_save_that_failed_late_left_too_many_goes_as_the_run_goes_on(tmp_path):
    root = tmp_path / "checkpoints"

    def work() -> None:
        for step in (1, 2, 3):
            save(root, step, step, keep_last=0)
        trained: Any = Trained(3)
        with CheckpointSaver(root, [trained], trained, {}, keep_last=2):
            pass

    assert in_a_child(tmp_path, work) == 0
    assert [read_manifest(one).run.step for one in folders.checkpoints(root)] == [2, 3]


@pytest.mark.parametrize(("step", "before"), [(3, 2), (2, 2)], ids=["a new step", "a step saved before"])
def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_checkpoint(step, before, tmp_path):
    operation, status, newest = 0, -1, set()
    while status != 0:
        root = tmp_path / f"{operation}" / "checkpoints"
        root.parent.mkdir()

        def work(root: Path = root, operation: int = operation) -> None:
            for done in STEPS:
                save(root, done, done)
            killed_before(operation, root)
            save(root, step, 10)

        status = in_a_child(tmp_path, work)
        assert status in (0, signal.SIGKILL), operation
        folders.tidy(root)
        found = folders.latest(root)
        manifest = read_manifest(found)
        trained = Trained(0)
        moment = torch.zeros(3, 4)
        state = trained.sharded_state_dict() | {"moment": sharded("moment", moment)}
        read_tensors(found, manifest.tensors, state)
        value = float(trained.weight[0, 0])
        assert torch.equal(moment, trained.weight + 0.5)
        assert (manifest.run.step, value) in {(before, float(before)), (step, 10.0)}
        names = {entry.name for entry in root.iterdir()}
        assert names == {folder.name for folder in folders.checkpoints(root)} | {folders.POINTER}
        assert (root / folders.POINTER).read_text() == str(manifest.run.step)
        newest.add(value)
        operation += 1
    assert operation > 20
    assert newest == {float(before), 10.0}


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_rank_that_cannot_write_fails_all_ranks_by_name(background, run_ranks, tmp_path):
    root = tmp_path / "checkpoints"

    def main(env) -> tuple[str, str]:
        join(env)
        trained: Any = Trained(1)
        saver = CheckpointSaver(root, [trained], trained, {}, background=background)
        saver.save(run_at(1))
        saver.advance(wait=True)
        if env.rank == 1:  # as a full disk: files of this process end at 100 bytes
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            sys.dont_write_bytecode = True  # which would be cut, and stay
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        said = []
        for act in (lambda: saver.save(run_at(2)), lambda: saver.advance(wait=True)):
            try:
                act()
                said.append("")
            except NoRoomError as error:
                said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        dist.destroy_process_group()
        return said[0], said[1]

    for at_once, later in run_ranks(2, main):
        found = at_once or later if background else at_once  # a thread may have ended before `save` returned
        assert "rank 1 could not write" in found
        assert "File too large" in found
        assert not (at_once and later)
    assert {entry.name for entry in root.iterdir()} == {"iter_0000001", folders.POINTER}


def test_every_rank_refuses_a_checkpoint_of_which_any_file_is_damaged(run_ranks, tmp_path):
    """Megatron's own files, too, and none of them where all are intact."""
    root = tmp_path / "checkpoints"

    def main(env) -> dict[str, str]:
        join(env)
        trained: Any = Trained(1)
        with CheckpointSaver(root, [trained], trained, {}) as saver:
            saver.save(run_at(1))
        folder, said = folders.latest(root), {}
        for name in (*read_manifest(folder).files, ""):
            _flip_bit(folder / name, env.rank)
            try:
                open_checkpoint(folder, {}, torch.device("cpu"))
                said[name] = ""
            except DataError as error:
                said[name] = str(error)
            _flip_bit(folder / name, env.rank)
        dist.destroy_process_group()
        return said

    first, second = run_ranks(2, main)
    folder = folders.latest(root)
    assert first == second
    assert first.pop("") == ""
    assert first.keys() == {path.name for path in folder.iterdir()} - {MANIFEST}
    for name, said in first.items():
        assert said.startswith(f"{folder / name} is damaged: its content is not what was saved: remove {folder} to")


@pytest.mark.parametrize("backend", ["megatron", "transformers", "deepspeed"])
def test_no_backend_loads_a_damaged_checkpoint(backend, tmp_path):
    part = folders.begin(tmp_path, 1)
    (part / "model").mkdir()
    (part / "model" / "weights").write_bytes(b"as saved")
    manifest = saving.new_manifest(run_at(1), OptimizerPlace(1, {}), "torch")
    checksums = {"model/weights": checksum(part / "model" / "weights")}
    folder = folders.publish(part, replace(manifest, files={"model/weights": 8}, checksums=checksums))
    (folder / "model" / "weights").write_bytes(b"as safed")
    trained: Any = Trained(1)
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    load: Any = {
        "megatron": partial(load_checkpoint, folder, [trained], trained),
        "transformers": partial(load_parts, folder, [trained], trained, trained),
        "deepspeed": partial(load_engine, folder, engine, trained),
    }[backend]
    with pytest.raises(DataError, match="model/weights is damaged: its content is not what was saved"):
        load(model={})


def _flip_bit(file: Path, rank: int) -> None:
    """On rank 0, once no rank reads the file and before any does."""
    dist.barrier()
    if rank == 0 and file.is_file():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    dist.barrier()


@pytest.mark.parametrize(
    ("error", "at", "background"),
    [
        (ValueError, "in its thread", False),
        (MemoryError, "in its thread", True),
        (SystemExit, "in its thread", True),
        (AttributeError, "before it writes", False),
        (TypeError, "before it is published", True),
    ],
)
def test_whatever_one_rank_fails_by_no_checkpoint_is_published_and_all_ranks_say_why(
    error, at, background, run_ranks, tmp_path
):
    root = tmp_path / "checkpoints"

    def main(env) -> str:
        join(env)
        trained: Any = Trained(1)
        saver = CheckpointSaver(root, [trained], trained, {}, keep_last=1, background=background)
        saver.save(run_at(1))
        saver.advance(wait=True)
        if env.rank == 1:

            def fail(*_: Any) -> None:
                raise error("as it was")

            if at == "in its thread":
                megatron_checkpoint.checksum = fail  # this process has forked for the test
            elif at == "before it writes":
                trained.sharded_state = fail
            else:
                saving.sync_below = fail
        said = ""
        try:
            saver.save(run_at(2))
            saver.advance(wait=True)
        except ExecutionError as caught:
            said = str(caught)
        dist.barrier()
        dist.destroy_process_group()
        return said

    for said in run_ranks(2, main):
        assert f"the checkpoint was not saved: rank 1 could not write below {root}: {error.__name__}: " in said
        assert "as it was" in said
    assert {entry.name for entry in root.iterdir()} == {"iter_0000001", folders.POINTER}


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(run_ranks, tmp_path):
    root = tmp_path / "checkpoints"

    def main(env) -> str:
        join(env)
        trained: Any = Trained(1)
        saver = CheckpointSaver(root, [trained], trained, {}, num_bytes=10**18)
        with pytest.raises(NoRoomError) as caught:
            saver.save(run_at(1))
        dist.barrier()
        dist.destroy_process_group()
        return str(caught.value)

    first, second = run_ranks(2, main)
    assert first == second or "are free" in second  # what is free may change between two looks
    assert first.startswith(f"the checkpoint was not saved: rank 0 could not write below {root}: No space left on")
    assert f"; one takes about 1000000.0 TB below {root}, where " in first
    assert not root.exists() or not list(root.iterdir())


def test_ranks_whose_peer_is_gone_say_of_which_step_the_checkpoint_is(run_ranks, tmp_path):
    def main(env) -> list[str]:
        join(env)
        trained: Any = Trained(1)
        saver, said = CheckpointSaver(tmp_path / "checkpoints", [trained], trained, {}), []
        dist.barrier()
        for act in (lambda: saver.most(0, 7), lambda: saver.save(run_at(8))) if env.rank == 0 else ():
            with pytest.raises(ExecutionError) as caught:
                act()
            said.append(str(caught.value))
        dist.destroy_process_group()
        return said

    met, saving = run_ranks(2, main)[0]
    assert met.startswith("agreement of all ranks on a checkpoint of step 7: another rank")
    assert saving.startswith("checkpoint of step 8: another rank")


def test_in_the_background_the_weights_of_the_moment_are_saved(run_ranks, tmp_path):
    root = tmp_path / "checkpoints"

    def main(env) -> None:
        join(env)
        updated, write = threading.Event(), TensorWriter._write

        def write_after_the_update(writer: Any, *arguments: Any) -> None:
            assert updated.wait(LIMIT_S)
            write(writer, *arguments)

        TensorWriter._write = write_after_the_update
        trained: Any = Trained(1)
        with CheckpointSaver(root, [trained], trained, {}, background=True) as saver:
            saver.save(run_at(1))
            trained.weight.fill_(2.0)
            updated.set()
        dist.destroy_process_group()

    run_ranks(2, main)
    found = folders.latest(root)
    whole = torch.zeros(6, 4)
    read_tensors(found, read_manifest(found).tensors, {"weight": sharded("weight", whole)})
    assert torch.equal(whole, torch.ones(6, 4))
