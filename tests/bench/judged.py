"""Reference batches, what ours is held to on them, and the judge that scores plans of them in its own process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bound import whole_layers_bound_s

from dynapipe_ext.batch.micro_batches import SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import DataError

MEMORY_GB = 36
_JUDGE_TIMEOUT_S = 240
_MOST_LENGTH, _MANY_TOKENS = 2048, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file of reference batches and its bars; `closed` and `faster` are (without, with) split backward, `placed_…` of
    the placement and the layers per stage that are best for its batches.
    """

    name: str
    file: str
    model: str
    layers: int
    topology: Topology
    extra: tuple[int, int]
    most_planning_s: float
    placed_planning_s: float | None = None
    closed: tuple[float, float] | None = None
    faster: tuple[float, float] | None = None
    placed_closed: tuple[float, float] | None = None
    placed_faster: tuple[float, float] | None = None
    over_bound: float | None = None


_GPT, _T5 = Topology(tp=1, pp=4, dp=2), Topology(tp=2, pp=4, dp=1)
CASES = (
    Case(name="GPT 64k", file="gpt_64k.json", model="gpt_6.7b", layers=32, topology=_GPT, extra=(-1, 0),
         most_planning_s=0.05, placed_planning_s=0.1, closed=(0.40, 0.55), placed_closed=(0.85, 0.97), over_bound=1.08),
    Case(name="GPT 256k", file="gpt_256k.json", model="gpt_6.7b", layers=32, topology=_GPT, extra=(-1, 0),
         most_planning_s=0.2, placed_planning_s=0.25, closed=(0.35, 0.45), placed_closed=(0.70, 0.85), over_bound=1.04),
    Case(name="T5 64k", file="t5_64k.json", model="t5_11b", layers=24, topology=_T5, extra=(0, 2),
         most_planning_s=0.15, faster=(1.15, 1.2), placed_faster=(1.42, 1.50)),
)  # fmt: skip
MANY = Case(name="GPT 1M", file="gpt_1m.json", model="gpt_6.7b", layers=32, topology=Topology(tp=1, pp=4, dp=8),
            extra=(-1, 0), most_planning_s=0.8)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan of one batch, with the judge's verdict; `cpu_s` of planning at `load`, `digest` of its file."""

    case: str
    column: str
    index: int
    makespan_s: float
    bound_s: float
    digest: str
    cpu_s: float
    load: float
    repeatable: bool | None = None
    verdict: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are, and how often a plan is timed."""

    shared: Path
    scratch: Path
    runs: int

    def costs(self, case: Case) -> CostTable:
        folder = self.shared / "data" / "a100_layer_costs"
        return CostTable.read_a100(folder, case.model, topology=case.topology, num_layers=case.layers)

    def path(self, case: Case) -> Path:
        return (self.scratch if case is MANY else self.shared / "data" / "reference_plans") / case.file

    def batches(self, case: Case) -> list[dict[str, Any]]:
        try:
            raw: list[dict[str, Any]] = json.loads(self.path(case).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path(case)} cannot be read ({error}): name the folder with --shared") from error
        return raw

    def least_s(self, case: Case) -> list[float]:
        """What no plan of whole layers beats, wherever they are placed, a batch; nothing where that is not known."""
        if not case.placed_closed:
            return []
        options = {"num_layers": case.layers, "dp": case.topology.dp, "limit_bytes": MEMORY_GB * 1e9}
        lengths = ([sample.encoder for sample in samples_of(case, batch)] for batch in self.batches(case))
        return [whole_layers_bound_s(self.costs(case), one, **options) for one in lengths]

    def judge(self, case: Case, index: int, plan: Path) -> dict[str, Any]:
        """The judge's line on one plan's file."""
        command = [sys.executable, self.shared / "judge_plan.py", "--costs", self.shared / "data" / "a100_layer_costs"]
        command += ["--model", case.model, "--layers", case.layers, "--memory-mb", MEMORY_GB * 1000]
        command += ["--extra", *case.extra]
        command += ["--batch", self.path(case), "--index", index, "--plan", plan]
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            timeout=_JUDGE_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        if done.returncode == 2 or not done.stdout.strip():
            raise DataError(f"the judge cannot read {plan}: {done.stderr.strip()[-300:]}")
        line: dict[str, Any] = json.loads(done.stdout)
        return line


def samples_of(case: Case, batch: Mapping[str, Any]) -> list[SampleLength]:
    """The positions that samples need: their lengths and `extra`, as the judge counts them."""
    encoder, decoder = np.array(batch["lengths"], np.int64).T
    encoder = np.maximum(1, encoder + case.extra[0])
    decoder = np.maximum(1, decoder + case.extra[1]) if case.faster else np.zeros_like(decoder)
    return sample_lengths(np.stack([encoder, decoder], axis=1))


def closed_share(m: Measured, reference_s: float, bounds: Mapping[tuple[str, str, int], float]) -> float:
    """Of the room between the reference and the bound of its case, column and batch, the share that the plan closes.

    Not a number where there is no bound.
    """
    bound_s = bounds.get((m.case, m.column, m.index), math.nan)
    return float((reference_s - m.verdict["makespan_s"]) / (reference_s - bound_s))


def write_many(bench: Bench) -> None:
    """The batch of 1M tokens, in the reference plans' form: consecutive samples, cut."""
    path = bench.shared / "data" / "multitask_lengths.npy"
    try:
        lengths = np.minimum(np.load(path).astype(np.int64).sum(axis=1), _MOST_LENGTH)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): name the folder with --shared") from error
    count = int(np.searchsorted(np.cumsum(lengths), _MANY_TOKENS)) + 1
    bench.path(MANY).write_text(json.dumps([{"lengths": [[n, 0] for n in lengths[:count].tolist()]}]))
