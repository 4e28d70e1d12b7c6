import gzip
import os
import resource
import signal
import sys

import pytest

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing import workers as workers_module
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess
from dynapipe_ext.data.preprocessing.workers import InlineWorkers, ProcessWorkers
from dynapipe_ext.errors import ConfigError, DataError, ExecutionError
from tests.support.preprocessing import (
    BYTES,
    DATASET,
    WORK,
    Counting,
    Stopping,
    content,
    made_up,
    small_blocks,  # noqa: F401
    stopped,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("num_results", [1, 3])
def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_bytes(tmp_path, num_results):
    files = find_inputs([made_up(tmp_path / "a.jsonl"), made_up(tmp_path / "b.jsonl", seed=4)])
    preprocess(files, tmp_path / "whole", settings=DATASET, encoder=BYTES)
    for stop in (num_results, num_results + 2):
        with pytest.raises(KeyboardInterrupt):
            preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=Stopping(DATASET, stop))
        assert not (tmp_path / "out").exists()
    workers = Counting(DATASET, BYTES)
    outcome = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=workers)
    assert outcome.num_kept_samples > 0
    num_blocks = len(list(inputs.BlockStream(files)))
    assert workers.num_blocks == num_blocks - (2 * num_results + 2)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / WORK).exists()


@pytest.mark.parametrize(
    ("damage", "most_kept_blocks"),
    [
        (lambda work: (work / "tokens.bin").write_bytes((work / "tokens.bin").read_bytes()[:-1]), 4),
        (lambda work: (work / "tokens.bin").write_bytes(b"\xff" + (work / "tokens.bin").read_bytes()[1:]), 0),
        (lambda work: (work / "sizes.bin").write_bytes((work / "sizes.bin").read_bytes() + b"half"), 5),
        (lambda work: (work / "journal.jsonl").write_bytes((work / "journal.jsonl").read_bytes()[:-9]), 4),
        (lambda work: (work / "journal.jsonl").write_bytes((work / "journal.jsonl").read_bytes() + b'{"blo'), 5),
        (lambda work: (work / "journal.jsonl").write_bytes(b"garbage\n"), 0),
        (lambda work: (work / "first_target.bin").unlink(), 0),
    ],
)
def test_work_that_was_damaged_is_done_again_and_no_more(tmp_path, damage, most_kept_blocks):
    files = stopped(tmp_path)
    damage(tmp_path / WORK)
    workers = Counting(DATASET, BYTES)
    preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=workers)
    assert workers.num_blocks == len(list(inputs.BlockStream(files))) - most_kept_blocks
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_work_is_kept_up_to_the_first_change_of_the_input(tmp_path):
    files = stopped(tmp_path)
    text = (tmp_path / "a.jsonl").read_text()
    third = list(inputs.BlockStream(files))[2].payload.decode()
    (tmp_path / "a.jsonl").write_text(text.replace(third, third[:-1] + " \n"))
    workers = Counting(DATASET, BYTES)
    files = find_inputs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=workers)
    assert workers.num_blocks == len(list(inputs.BlockStream(files))) - 2
    assert content(tmp_path / "out")["tokens.bin"] == content(tmp_path / "whole")["tokens.bin"]


def test_an_input_that_became_shorter_gives_up_what_was_made_of_its_end(tmp_path):
    stopped(tmp_path)
    files = find_inputs([made_up(tmp_path / "a.jsonl", 5)])
    preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert len(TokenDataset.open(tmp_path / "out")) == 5


def test_other_settings_keep_nothing(tmp_path):
    files = stopped(tmp_path)
    settings = EncodeSettings(target="dataset", max_seq_len=50_000)
    outcome = preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    assert outcome.num_kept_samples == 0


def test_an_error_names_file_and_line_and_what_comes_before_it_is_kept(tmp_path):
    path = made_up(tmp_path / "d.jsonl")
    lines = path.read_text().splitlines()
    good = lines[50]
    lines[50] = '{"input": 3, "target": "x"}'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"d\.jsonl, line 51: field 'input' is a number but must be a string"):
        preprocess(
            find_inputs([path]),
            tmp_path / "out",
            settings=DATASET,
            encoder=BYTES,
            workers=ProcessWorkers(DATASET, BYTES, 2),
        )
    lines[50] = good
    path.write_text("\n".join(lines))
    outcome = preprocess(find_inputs([path]), tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert 0 < outcome.num_kept_samples <= 50
    assert outcome.num_samples == 60


def test_an_error_before_anything_is_done_leaves_nothing_behind(tmp_path):
    (tmp_path / "d.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match="line 1, column 1: not JSON"):
        preprocess(find_inputs([tmp_path / "d.jsonl"]), tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


@pytest.mark.parametrize("workers", [None, 2])
def test_a_damaged_file_is_told_after_all_that_comes_before_it_is_kept(tmp_path, workers):
    packed = gzip.compress(made_up(tmp_path / "d.jsonl").read_bytes())
    (tmp_path / "d.jsonl.gz").write_bytes(packed[:-40])
    files = find_inputs([tmp_path / "d.jsonl.gz"])
    encoding = ProcessWorkers(DATASET, BYTES, workers) if workers else None
    with pytest.raises(DataError, match="ends too early after line"):
        preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=encoding)
    assert (tmp_path / WORK / "tokens.bin").stat().st_size > 0


def test_two_runs_do_not_prepare_the_same_output(tmp_path):
    files = find_inputs([made_up(tmp_path / "d.jsonl")])

    class Second(InlineWorkers):
        def run(self, blocks):
            with pytest.raises(DataError, match="another process prepares the same output"):
                preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
            return super().run(blocks)

    preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=Second(DATASET, BYTES))
    assert len(TokenDataset.open(tmp_path / "out")) == 60


def test_megatrons_format_resumes_and_an_index_appears_last(tmp_path, monkeypatch):
    settings = EncodeSettings(target="megatron", keys=("input", "target"))
    files = stopped(tmp_path, settings)
    for function in ("write_lengths", "_same_file"):
        with monkeypatch.context() as patched:
            patched.setattr(f"dynapipe_ext.data.preprocessing.preprocess.{function}", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
        assert not list(tmp_path.glob("out*"))
    outcome = preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    assert outcome.num_kept_samples > 0
    for path in outcome.outputs:
        assert path.read_bytes() == path.with_name(path.name.replace("out", "whole", 1)).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_an_output_that_is_in_place_does_not_change_with_work_that_goes_on(tmp_path):
    settings = EncodeSettings(target="megatron", keys=("input", "target"))
    stopped(tmp_path, settings)
    placed = tmp_path / "input.bin"
    os.link(tmp_path / WORK / "tokens-0.bin", placed)
    before = placed.read_bytes()
    files = find_inputs([made_up(tmp_path / "a.jsonl", 5)])
    preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    assert placed.read_bytes() == before


def test_work_left_over_beside_a_finished_output_is_removed(tmp_path):
    files = stopped(tmp_path)
    (tmp_path / WORK).rename(tmp_path / "aside")
    preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    (tmp_path / "aside").rename(tmp_path / WORK)
    assert preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES).reused
    assert not (tmp_path / WORK).exists()


def test_a_worker_that_is_killed_is_told_and_what_is_done_is_kept(tmp_path):
    files = find_inputs([made_up(tmp_path / "d.jsonl", 200)])

    class Killing(ProcessWorkers):
        def run(self, blocks):
            for number, result in enumerate(super().run(blocks)):
                if number == 2:
                    for worker in self._workers:
                        os.kill(worker.process.pid, signal.SIGKILL)
                yield result

    with pytest.raises(ExecutionError, match=r"was killed by SIGKILL.*ask for fewer with --workers.*is kept"):
        preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, workers=Killing(DATASET, BYTES, 2))
    outcome = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert outcome.num_kept_samples > 0


def test_workers_start_as_blocks_come_and_end_with_their_context():
    blocks = [inputs.Block("d", "jsonl", "line", i, b'{"text": "a"}\n', 1) for i in range(3)]
    with ProcessWorkers(DATASET, BYTES, 2) as workers:
        assert [result.num_samples for result in workers.run(iter(blocks[:1]))] == [1]
        assert len(workers._workers) == 1
        results = list(workers.run(iter(blocks * 5)))
        assert [result.digest for result in results] == [block.digest() for block in blocks * 5]
        processes = [worker.process for worker in workers._workers]
        assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(ConfigError, match="number of workers is 0"):
        ProcessWorkers(DATASET, BYTES, 0)


def test_a_worker_takes_no_module_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('taken from the working folder')")
    monkeypatch.chdir(tmp_path)
    block = inputs.Block("d", "jsonl", "line", 1, b'{"text": "a"}\n', 1)
    with ProcessWorkers(DATASET, BYTES, 1) as workers:
        assert len(list(workers.run(iter([block])))) == 1


def test_a_worker_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with ProcessWorkers(DATASET, BYTES, 1) as workers, pytest.raises(ExecutionError, match="cannot be started"):
        list(workers.run(iter([inputs.Block("d", "jsonl", "line", 1, b"{}", 1)])))
    assert workers_module.usable_cores() >= 1


def test_a_full_disk_is_told_and_what_is_done_is_kept(tmp_path):
    files = find_inputs([made_up(tmp_path / "d.jsonl")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        with pytest.raises(DataError, match=r"cannot be written .*: make room and start again, what is done is kept"):
            preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    outcome = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert outcome.num_kept_samples > 0
    assert outcome.num_samples == 60


def test_arrays_take_their_room_before_they_are_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    files = find_inputs([made_up(tmp_path / "d.jsonl")])
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(DataError, match=r"No space left on device.*: make room"):
            preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert not (tmp_path / "out").exists()
    assert preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES).num_kept_samples == 60
