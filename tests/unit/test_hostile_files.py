"""What reads a file ends well or refuses it, within 512 MB and 10 s of CPU time, whatever stands in it: each
value of valid files becomes huge, negative, missing or of another kind, or the whole file is one that promises much."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.length_bounds import SideBounds
from dynapipe_ext.data.preprocessing import template_limits
from dynapipe_ext.data.preprocessing.transformers_encoder import load_model_tokenizer
from dynapipe_ext.data.sample_selection import read_tasks
from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.launch import cli
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.model_folders import model_folder, write_chats, write_model_tokenizer
from tests.support.tiny_sizes import TINY_SIZES

_MOST_BYTES, _MOST_CPU_S = 512 << 20, 10
_GONE = object()
CONFIG = f"""
[topology]
pp = 2
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 256
[data]
path = "prepared"
tokens_per_batch = 1024
"""


def in_limits(folder: Path, work: Callable[[], int], *, has_cpu_limit: bool = True) -> tuple[int, str]:
    """The exit status of `work` in a fork of this process in `folder` that may take so much more, and what it says. A
    defect is status 1, too little memory or time minus a signal's number, or 1."""
    said = folder / "said"
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.chdir(folder)
            place = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(place, 1)
            os.dup2(place, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            used = resource.getrusage(resource.RUSAGE_SELF)
            most_cpu_s = int(used.ru_utime + used.ru_stime) + _MOST_CPU_S + 1
            pages = int(Path("/proc/self/statm").read_bytes().split()[0])
            most_bytes = pages * resource.getpagesize() + _MOST_BYTES
            if has_cpu_limit:
                resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s))
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
            status = work()
        except BaseException:  # noqa: BLE001 - it is said, as by an interpreter
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text(errors="replace")


def mutants(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Places in a JSON value, and what to put there."""
    for place, one in _places(value):
        match one:
            case bool() | None:
                yield place, 10**9
            case int() | float():
                yield from ((place, number) for number in (10**9, 10**18, -1, 0))
            case str():
                yield from ((place, text) for text in ("", "x" * 10_000, 10**9))
            case list():
                yield from ((place, more) for more in ([], one * 1000, {}))
        if place and isinstance(place[-1], str):
            yield from ((place, other) for other in (_GONE, None, [[]]))


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield place, value
    if isinstance(value, (dict, list)):
        for key, one in [*(value.items() if isinstance(value, dict) else enumerate(value))][:12]:
            yield from _places(one, (*place, key))


def changed(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    if not place:
        return other
    copy = value.copy()
    if other is _GONE and len(place) == 1:
        del copy[place[0]]
    else:
        copy[place[0]] = changed(value[place[0]], place[1:], other)
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid files of every kind."""
    here = tmp_path_factory.mktemp("files")
    (here / "job.toml").write_text(CONFIG)
    write_costs(TrainConfig.read(here / "job.toml"), 258, here / "costs.json")
    np.save(here / "lengths.npy", np.array([12, 7, 35, 41, 9, 102, 88, 16]))
    (here / "data.jsonl").write_text("\n".join(json.dumps({"input": "a b" * i, "target": "c"}) for i in range(1, 9)))
    model_folder("llama", here / "model")
    write_chats(here / "chats.jsonl", 3)
    words = ["preprocess", "--input", "data.jsonl", "--tokenizer", "bytes", "--output", "prepared"]
    status, said = in_limits(here, lambda: cli.main(words))
    assert status == 0, said
    (here / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6}, "gradient_clipping": 1.0})
    )
    (here / "tasks.json").write_text(json.dumps({"a": {"weight": 1.0, "max_input_len": 100, "max_target_len": 10}}))
    return here


def command(*words: str) -> Callable[[], int]:
    return lambda: cli.main(list(words))


def reads(read: Callable[[str], Any], name: str) -> Callable[[], int]:
    def work() -> int:
        try:
            read(name)
        except DynaPipeError:
            return 2
        return 0

    return work


def read_prepared(name: str) -> None:
    dataset = TokenDataset.open(name)
    assert len([dataset.vocab_size, dataset.num_truncated, dataset.tasks, dataset.fingerprint, dataset[0]]) == 5


PLAN = ["plan", "--lengths", "lengths.npy", "--config", "job.toml", "--tokens-per-batch", "400"]
KINDS = {
    "costs.json": command(*PLAN, "--costs", "costs.json"),
    "prepared/meta.json": reads(read_prepared, "prepared"),
    "model/config.json": command("flops", "--model", "model/config.json", "--seq-len", "100", "--batch-size", "2"),
    "ds.json": command("launch", "--dry-run", "--model", "model", "--data", "data.jsonl", "--deepspeed", "ds.json"),
    "tasks.json": reads(lambda name: read_tasks(name, SideBounds(100, 10)), "tasks.json"),
}


@pytest.mark.parametrize("name", KINDS)
def test_no_value_of_a_json_file_takes_memory_or_time_or_ends_in_a_traceback(name: str, folder: Path) -> None:
    """All mutants of a file in one process, with the limits of one command."""
    valid = (folder / name).read_bytes()
    value, tried = json.loads(valid), folder / "tried"

    def try_all() -> int:
        for number, (place, other) in enumerate(mutants(value)):
            if number % max(1, _MOST_TRIED and count // _MOST_TRIED):
                continue
            tried.write_text(f"{place}: {str(other)[:40]}")
            (folder / name).write_text(json.dumps(changed(value, place, other)))
            if KINDS[name]() not in (0, 2):
                return 3
        return 0

    count = sum(1 for _ in mutants(value))
    try:
        status, said = in_limits(folder, try_all)
    finally:
        (folder / name).write_bytes(valid)
    assert status == 0, (tried.read_text(), said[-2000:])


_MOST_TRIED = 40  # of a file; 0: all


@pytest.mark.parametrize("num_ranks", [20_000])
def test_a_schedule_of_many_ranks_takes_time_in_proportion(num_ranks: int, folder: Path) -> None:
    (folder / "wide.csv").write_text("".join(f"{stage}F0,{stage}B0\n" for stage in range(num_ranks)))
    status, said = in_limits(folder, command("show-schedule", "wide.csv"))
    assert status == 0, said[-2000:]


def npy(shape: tuple[int, ...], descr: str) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)


@pytest.mark.parametrize("name", ["lengths", "offsets", "task_ids"])
def test_arrays_of_prepared_data_that_lie_about_their_shape_are_refused(name: str, folder: Path) -> None:
    file = folder / "prepared" / f"{name}.npy"
    valid = file.read_bytes()
    contents = [
        npy(shape, descr) for shape in ((10**9, 3), (10**18,), (-5,), ()) for descr in ("<i8", "|O", "<U1000000")
    ]

    def try_all() -> int:
        for content in contents:
            file.write_bytes(content)
            if KINDS["prepared/meta.json"]() != 2:
                return 3
        return 0

    try:
        status, said = in_limits(folder, try_all)
    finally:
        file.write_bytes(valid)
    assert status == 0, said[-2000:]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.3 s of CPU time",
        ),
        ("{{ 'x' * 10**9 }}", "it takes more than 256 MiB"),
        (
            "{% set a = namespace(x='a') %}{% for i in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
            "it takes more than 256 MiB",
        ),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_chat_template_that_ends_nowhere_is_refused(
    template: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_MOST_CPU_S", 0.3)
    write_model_tokenizer(tmp_path, template=template)
    encoder = load_model_tokenizer(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def render() -> int:
        try:
            encoder.render([{"role": "user", "content": "hello"}], None)
        except Exception as error:  # noqa: BLE001 - its message is looked at
            print(error)
        return int(resource.getrlimit(resource.RLIMIT_AS)[1] == limits[1])

    _, said = in_limits(tmp_path, render)
    assert "the chat template refuses the messages" in said
    assert says in said
