"""Files changed at random are read, or refused in one line of ours, each within 512 MB and 10 s of CPU time.

Seeds are fixed; DYNAPIPE_FUZZ=5000 tries so many files of each kind, with seeds of their own."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.data.indexed_dataset import read_index, write_index
from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.executor.checkpoints.folder import MANIFEST, read_manifest
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.processes.nodes import read_hosts
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.run_events import read_events, report_of
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.checkpoint.files.safetensors_file import read_header
from dynapipe_ext.tools.checkpoint.files.torch_file import read_torch_file
from dynapipe_ext.tools.checkpoint.huggingface.folder import open_checkpoint
from tests.support.given_costs import write_costs
from tests.support.model_folders import model_folder
from tests.support.steps import a_step
from tests.unit.test_checkpoint_files import saved
from tests.unit.test_hostile_files import CONFIG, PLAN, changed, in_limits, mutants, read_prepared
from tests.unit.test_run_events import written

_LONG = int(os.environ.get("DYNAPIPE_FUZZ", "0"))
_MOST_CPU_S = 10.0
_WORDS = [
    b"0", b"-1", b"999999999999999999999", b"1e999", b"NaN", b"", b"\x00", b"[[", b'"', b"\n", b"\xff\xfe", b"a" * 5000
]  # fmt: skip
_VALUES = [10**9, 10**30, -1, 0.5, float("nan"), float("inf"), True, None, "", "x" * 5000, [], {}, [[[[]]]], [0] * 3000]


SHARD = "weights/model-00001-of-00007.safetensors"


@dataclass(frozen=True)
class Kind:
    """A file of a folder of valid ones, and what reads it. `header`: the bytes before its JSON, if it has any."""

    name: str
    read: Callable[[Path], Any]
    is_json: bool = False


def read_lengths(folder: Path) -> None:
    read_prepared(str(folder / "prepared"))


KINDS = [
    Kind("hosts", lambda here: read_hosts(here / "hosts")),
    Kind("job.toml", lambda here: TrainConfig.read(here / "job.toml")),
    Kind(f"checkpoints/step-00000003/{MANIFEST}", lambda here: read_manifest(here / "checkpoints/step-00000003"), True),
    Kind(SHARD, lambda here: read_header(here / SHARD)),
    Kind("weights/model.safetensors.index.json", lambda here: open_checkpoint(here / "weights"), True),
    Kind("weights/config.json", lambda here: open_checkpoint(here / "weights"), True),
    Kind("weights.pt", lambda here: read_torch_file(here / "weights.pt")),
    Kind("events.jsonl", lambda here: report_of(read_events(here / "events.jsonl"), unfinished="ended")),
    Kind("plan.json", lambda here: read_plan_file(here / "plan.json"), True),
    Kind("costs.json", lambda here: read_cost_file(here / "costs.json"), True),
    Kind("corpus.idx", lambda here: read_index(here / "corpus")),
    Kind("prepared/lengths.npy", read_lengths),
    Kind("prepared/meta.json", read_lengths, True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("files")
    (here / "hosts").write_text("node1 slots=4\nme@node2 slots=2 # comment\nnode3\n")
    (here / "job.toml").write_text(CONFIG)
    write_costs(TrainConfig.read(here / "job.toml"), 258, here / "costs.json")
    saved(here / "checkpoints", 3).rename(here / "checkpoints/step-00000003.made")
    (here / "checkpoints/step-00000003.made").rename(here / "checkpoints/step-00000003")
    np.save(here / "lengths.npy", np.array([12, 7, 35, 41, 9, 102, 88, 16]))
    (here / "data.jsonl").write_text("\n".join(json.dumps({"input": "a b" * i, "target": "c"}) for i in range(1, 9)))
    model_folder("llama", here / "weights")
    kept = {"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}
    torch.save(kept, here / "weights.pt")
    written(here / "events.jsonl", a_step(0), a_step(1, gathered=2))
    write_index(here / "corpus.idx", np.dtype(np.int32), np.array([3, 4, 5]))
    (here / "corpus.bin").write_bytes(bytes(48))
    for words in (
        ["preprocess", "--input", "data.jsonl", "--tokenizer", "bytes", "--output", "prepared"],
        [*PLAN, "--costs", "costs.json", "--json", "plan.json"],
    ):
        status, said = in_limits(here, lambda words=words: cli.main(words))  # type: ignore[misc]
        assert status == 0, said
    return here


@st.composite
def bytes_changed(draw: st.DrawFn, valid: bytes) -> bytes:
    """A few places of the file hold something else, or the file ends early."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.sampled_from([0, 1, 2, 4, 8, 64])))
        match draw(st.sampled_from(["word", "bytes", "number", "end", "twice"])):
            case "word":
                content[start:stop] = draw(st.sampled_from(_WORDS))
            case "bytes":
                content[start:stop] = draw(st.binary(max_size=8))
            case "number":
                content[start : start + 8] = struct.pack("<q", draw(st.sampled_from([-1, 2**31, 2**40, 2**62, 0, 7])))
            case "end":
                del content[start:]
            case _:
                content[start:start] = content[start : start + draw(st.integers(1, 200))]
    return bytes(content)


@st.composite
def json_changed(draw: st.DrawFn, valid: Any) -> bytes:
    """A value of a JSON file is another, is missing, or nests deep; or a key is there twice."""
    places = [place for place, _ in mutants(valid)]
    value = valid
    for _ in range(draw(st.integers(1, 3))):
        try:
            value = changed(value, draw(st.sampled_from(places)), draw(st.sampled_from(_VALUES)))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # the place is gone
    text = json.dumps(value)
    match draw(st.sampled_from(["as it is"] * 6 + ["deep", "twice"])):
        case "deep":
            text = text.replace(":", ":" + "[" * 5000, 1)
        case "twice":
            text = text.replace("{", '{"format": 3, "format": 4,', 1)
    return text.encode()


def one_by_one(kind: Kind, folder: Path, valid: bytes) -> int:
    """0 once all changed files were read or refused."""
    changes = bytes_changed(valid)
    if kind.is_json:
        changes |= json_changed(json.loads(valid))

    @settings(
        max_examples=_LONG or 40, derandomize=not _LONG, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changes)
    def one(content: bytes) -> None:
        (folder / kind.name).write_bytes(content)
        (folder / "tried").write_bytes(content)
        start_s = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(start_s + _MOST_CPU_S) + 2, resource.RLIM_INFINITY))
        refusal = ""
        try:
            kind.read(folder)
        except DynaPipeError as error:
            refusal = str(error)
        assert len(refusal) < 20_000
        assert "\n" not in refusal, refusal
        assert time.process_time() - start_s < _MOST_CPU_S

    one()
    return 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_changed_at_random_is_read_or_refused_in_one_line(kind: Kind, folder: Path) -> None:
    valid = (folder / kind.name).read_bytes()
    kind.read(folder)
    try:
        status, said = in_limits(folder, lambda: one_by_one(kind, folder, valid), has_cpu_limit=False)
    finally:
        (folder / kind.name).write_bytes(valid)
    assert status == 0, ((folder / "tried").read_bytes()[:3000], said[-3000:])
