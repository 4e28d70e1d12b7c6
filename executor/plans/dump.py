"""Every plan of a run on disk: what was planned, for which lengths and at what cost, to look at and to plan again.

DIR/step-000012.json        the plan numbered 12 (from 0): lengths, micro-batches, schedules, predictions, trace
DIR/.step-000013.json       one of a step ahead, gone once the run has ended: steps that ran or failed are shown
DIR/planner-3f1c….json      the settings and costs that made it, by what they are
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.durable_files import replace_file
from dynapipe_ext.errors import DataError, writing_move
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

DUMP_FORMAT, DUMPED_PLANNER_FORMAT = "dynapipe-dump/1", "dynapipe-dumped-planner/1"


_TOOK_FILES: set[Path] = set()  # directories into which this process has written


class DumpingPlanner:
    """A planner whose plans become files in `directory` as their steps begin, which the loader that is given it says.
    Of a step planned again, the last plan stays. Where the directory takes no more, one line on stderr says so, and
    planning goes on.

    Errors of `plan`: besides the planner's own, DataError for a directory that never took a file.
    """

    def __init__(self, planner: Planner, directory: str | Path) -> None:
        self.planner, self.directory = planner, Path(directory)
        self.topology, self.memory_limit_bytes = planner.topology, planner.memory_limit_bytes
        self._planner_file = ""
        self._takes_no_more = False

    @property
    def activation_format(self) -> ActivationFormat:
        return self.planner.activation_format

    @property
    def replica_collectives(self) -> ReplicaCollectives:
        return self.planner.replica_collectives

    def plan(self, samples: Sequence[SampleLength], *, step: int) -> StepPlan:
        return self._dumped(samples, self.planner.plan(samples, step=step), 0)

    def replan(self, plan: StepPlan, samples: Sequence[SampleLength], *, reserve_bytes: int) -> StepPlan:
        return self._dumped(samples, self.planner.replan(plan, samples, reserve_bytes=reserve_bytes), reserve_bytes)

    def _dumped(self, samples: Sequence[SampleLength], plan: StepPlan, reserve_bytes: int) -> StepPlan:
        step = plan.batch.step
        if self._takes_no_more:
            return plan
        try:
            if not self._planner_file:
                described = self.planner.to_json()
                self._planner_file = planner_file(described)
                written = {"format": DUMPED_PLANNER_FORMAT, "planner": described}
                _write(self.directory / self._planner_file, json.dumps(written))
                _TOOK_FILES.add(self.directory)
            dump = {
                "format": DUMP_FORMAT,
                "planner": self._planner_file,
                "version": version("dynapipe-ext"),
                "step": step,
                "reserve_bytes": reserve_bytes,
                "samples": [_sample_json(s) for s in samples],
                "replicas": replicas_json(plan),
            }
            _write(self._place_ahead(step), json.dumps(dump))
        except DataError as error:
            if self.directory not in _TOOK_FILES:
                raise
            self._takes_no_more = True
            print(f"dynapipe: {error}; no plan is kept from step {step + 1} on", file=sys.stderr, flush=True)
        return plan

    def begins(self, step: int) -> None:
        """Show the plan of a step that is to run now, where it was planned here and no rank has shown it before."""
        with suppress(OSError):  # none is there, or none can be moved: then it stays one of a step ahead
            self._place_ahead(step).replace(self.directory / f"step-{step:06d}.json")

    def _place_ahead(self, step: int) -> Path:
        return self.directory / f".step-{step:06d}.json"

    def to_json(self) -> Mapping[str, Any]:
        return {"planner": self.planner.to_json(), "directory": str(self.directory)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DumpingPlanner:
        return cls(Planner.from_json(raw["planner"]), raw["directory"])


def forget_plans_ahead(directory: str | Path) -> None:
    """Remove the plans of steps that have not begun, and what a killed planner has left of one."""
    for pattern in (".step-*.json", "..step-*.part"):
        for place in Path(directory).glob(pattern):
            place.unlink(missing_ok=True)


def planner_file(described: Mapping[str, Any]) -> str:
    """The name of the file of a planner with this `to_json`: equal planners have equal ones."""
    return f"planner-{hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]}.json"


def replicas_json(plan: StepPlan) -> list[dict[str, Any]]:
    """What a plan has each replica do and what it promises, as plain JSON values; equal plans give equal ones."""
    return [
        {
            "dp_rank": replica.dp_rank,
            "micro_batches": list(map(_micro_batch_json, replica.micro_batches)),
            "schedule": {
                "name": schedule.name,
                "forward_only": schedule.forward_only,
                "placement": list(schedule.stage_ranks),
                "stages": schedule.to_lines(),
            },
            "predicted": asdict(prediction) | {"peak_bytes": list(prediction.peak_bytes)},
            "trace": [asdict(span) | {"shape": list(span.shape)} for span in trace.spans],
        }
        for replica, schedule, prediction, trace in zip(
            plan.batch.replicas, plan.schedules, plan.predictions, plan.traces, strict=True
        )
    ]


def _sample_json(sample: SampleLength) -> list[int]:
    """Index, encoder, decoder and target; of a pair of documents also the positions of the first."""
    return [sample.index, sample.encoder, sample.decoder, sample.target, *([sample.first] if sample.first else [])]


def _micro_batch_json(micro_batch: MicroBatch) -> dict[str, Any]:
    shape = {name: getattr(micro_batch, name) for name in ("rows", "encoder_len", "decoder_len")}
    tokens = {name: getattr(micro_batch, name) for name in ("real_tokens", "padded_tokens", "target_tokens")}
    rules = {name: getattr(micro_batch, name) for name in ("layout", "recompute", "attention")}
    samples = [[s.index, s.start, s.encoder, s.decoder, s.target] for s in micro_batch.samples]
    return {**shape, **tokens, **rules, "samples": samples}


def _write(path: Path, text: str) -> None:
    """In one step: readers see the old file or the whole new one, whoever else writes the same."""
    try:
        replace_file(path, (text + "\n").encode())
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}): {writing_move(error.errno)}, or choose another [run]"
            " plan_dir"
        ) from error
