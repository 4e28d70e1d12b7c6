"""What a run leaves behind in figures: `report.json` (dynapipe-report/1).

A `RunReport` is one run: its `RunFacts` and its `result`. The result and each entry of `compare` are `RunResult`s with
the same figures, so baselines compare like with like. The report stores no rates: they follow from tokens and seconds.
In JSON null stands for an unknown figure, and for a loss that is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from dynapipe_ext.batch.micro_batches import ALL_RECOMPUTES
from dynapipe_ext.batch.topology import Topology, Vocabulary
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.events import CostsFit, DriftingShape, EvalDone, PreferenceFigures, losses_compare
from dynapipe_ext.models.flops import Positions, Work
from dynapipe_ext.tools.console import counted
from dynapipe_ext.tools.files import Fields, read_json, write_atomic

_Number = TypeVar("_Number", int, float)

FORMAT = "dynapipe-report/1"
# Only some steps have these figures of all ranks and of a simulation.
_SOMETIMES_KNOWN = ("measured_makespan_s", "predicted_makespan_s", "measured_bubble_ratio", "predicted_bubble_ratio")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The store that carried the plans: "valkey" "9.1.0"."""

    server: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The figures of one run over S steps, the first of which has the number `first_step` (from 0).

    Per step (length S): `losses`, `real_tokens_per_step`, `step_s` (wall seconds), `num_micro_batches` (a count for
    each replica), and the makespans and bubble ratios. Those are None at steps without figures of all ranks, which are
    gathered every `log_every` steps; a kind without any figure may be empty. Over the run: `padded_tokens` and
    `exposed_planning_s`, the time that ranks waited for plans (None: unknown). Over `accounted_steps` (indices; None:
    all): `cpu_s` of all ranks together, and `work`, from which FLOPs are counted. Per rank, in rank order:
    `predicted_peak_bytes` and `measured_peak_bytes` (None: unknown). `evaluations` are in the order of their steps.
    `furthest_off` is the shape with the largest prediction error over the run. `fits` has the steps after which costs
    were fitted; `preferences` the steps that learned some, by number; `refused` those that changed no weight, and why.
    """

    name: str
    layout: str
    schedule: str
    losses: tuple[float, ...]
    real_tokens_per_step: tuple[int, ...]
    padded_tokens: int
    step_s: tuple[float, ...]
    cpu_s: float
    num_micro_batches: tuple[tuple[int, ...], ...]
    measured_makespan_s: tuple[float | None, ...]
    predicted_makespan_s: tuple[float | None, ...] = ()
    measured_bubble_ratio: tuple[float | None, ...] = ()
    predicted_bubble_ratio: tuple[float | None, ...] = ()
    exposed_planning_s: float | None = 0.0
    predicted_peak_bytes: tuple[int, ...] | None = None
    measured_peak_bytes: tuple[int, ...] | None = None
    work: Work = field(default_factory=Work)
    accounted_steps: tuple[int, ...] | None = None
    first_step: int = 0
    evaluations: tuple[EvalDone, ...] = ()
    furthest_off: DriftingShape | None = None
    fits: tuple[tuple[int, CostsFit], ...] = ()
    preferences: tuple[tuple[int, PreferenceFigures], ...] = ()
    refused: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        steps = len(self.losses)
        for name in ("real_tokens_per_step", "step_s", "num_micro_batches"):
            if len(getattr(self, name)) != steps:
                raise DataError(f"{self.name}: {name} has {len(getattr(self, name))} entries for {steps} losses")
        for name in _SOMETIMES_KNOWN:
            if len(getattr(self, name)) not in (0, steps):
                raise DataError(f"{self.name}: {name} has {len(getattr(self, name))} entries: give none or {steps}")
        if any(not 0 <= index < steps for index in self.accounted_steps or ()):
            raise DataError(f"{self.name}: accounted_steps has an index outside of the {steps} steps")
        if self.padded_tokens < self.real_tokens:
            raise DataError(
                f"{self.name}: padded_tokens {self.padded_tokens} is less than the {self.real_tokens} real tokens:"
                " padded counts every position, real ones included"
            )

    @property
    def real_tokens(self) -> int:
        return sum(self.real_tokens_per_step)

    @property
    def elapsed_s(self) -> float:
        return sum(self.step_s)

    @property
    def real_tokens_per_s(self) -> float:
        return self.real_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def accounted(self, values: Sequence[_Number]) -> list[_Number]:
        """Of values per step, those of the accounted steps."""
        return list(values) if self.accounted_steps is None else [values[index] for index in self.accounted_steps]

    @property
    def cpu_s_per_token(self) -> float | None:
        """CPU seconds per real token of the accounted steps; None without such steps."""
        tokens = sum(self.accounted(self.real_tokens_per_step))
        return self.cpu_s / tokens if tokens else None

    @property
    def padding_efficiency(self) -> float:
        """Real tokens over padded tokens."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def averaged_steps(self) -> tuple[int, ...]:
        """Indices of the steps over which makespans and bubbles are averaged: those that have every kind of figure that
        any step has. So measured and predicted means cover the same steps."""
        kinds = [getattr(self, name) for name in _SOMETIMES_KNOWN]
        present = [kind for kind in kinds if any(value is not None for value in kind)]
        return tuple(
            step for step in range(len(self.losses)) if present and all(kind[step] is not None for kind in present)
        )

    def mean(self, values: Sequence[float | None]) -> float | None:
        """The mean of makespans or bubble ratios over `averaged_steps`; None where they are unknown."""
        averaged = [value for step in self.averaged_steps if values and (value := values[step]) is not None]
        return math.fsum(averaged) / len(averaged) if averaged else None

    def to_json(self) -> dict[str, Any]:
        preferences = [{"step": number, **preferences_json(figures)} for number, figures in self.preferences]
        return {
            **({"preferences": preferences} if preferences else {}),
            "name": self.name,
            "layout": self.layout,
            "schedule": self.schedule,
            "losses": [finite(loss) for loss in self.losses],
            "real_tokens": self.real_tokens,
            "real_tokens_per_step": list(self.real_tokens_per_step),
            "padded_tokens": self.padded_tokens,
            "padding_efficiency": self.padding_efficiency,
            "real_tokens_per_s": self.real_tokens_per_s,
            "step_s": list(self.step_s),
            "cpu_s": self.cpu_s,
            "cpu_s_per_token": self.cpu_s_per_token,
            "num_micro_batches": [list(counts) for counts in self.num_micro_batches],
            "predicted_makespan_s": list(self.predicted_makespan_s),
            "measured_makespan_s": list(self.measured_makespan_s),
            "predicted_makespan_mean_s": self.mean(self.predicted_makespan_s),
            "measured_makespan_mean_s": self.mean(self.measured_makespan_s),
            "bubble_ratio": {
                "predicted": self.mean(self.predicted_bubble_ratio),
                "measured": self.mean(self.measured_bubble_ratio),
                "predicted_per_step": list(self.predicted_bubble_ratio),
                "measured_per_step": list(self.measured_bubble_ratio),
            },
            "averaged_steps": [self.first_step + step + 1 for step in self.averaged_steps],
            "exposed_planning_s": self.exposed_planning_s,
            "work": self.work.to_json(),
            "accounted_steps": None if self.accounted_steps is None else list(self.accounted_steps),
            "first_step": self.first_step,
            "evaluations": [evaluation_json(done) for done in self.evaluations],
            "furthest_off": self.furthest_off and asdict(self.furthest_off),
            "fits": [{"after": number, **asdict(fit)} for number, fit in self.fits],
            **(
                {"refused": [{"step": step, "reason": reason} for step, reason in self.refused]} if self.refused else {}
            ),
            "peak_bytes": {
                "predicted": None if self.predicted_peak_bytes is None else list(self.predicted_peak_bytes),
                "measured": None if self.measured_peak_bytes is None else list(self.measured_peak_bytes),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is needed to repeat a run and to read its figures. `date` is ISO 8601. `device_bytes` is the memory of one
    rank's device; on a CPU it is that of the machine, which all ranks share (None: unknown)."""

    topology: Topology
    device: str
    num_cores: int
    seed: int
    loss_norm: str
    date: str
    oversubscribed: bool
    store: StoreInfo | None
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    device_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "device": self.device,
            "device_bytes": self.device_bytes,
            "num_cores": self.num_cores,
            "oversubscribed": self.oversubscribed,
            "versions": dict(self.versions),
            "topology": {"tp": self.topology.tp, "pp": self.topology.pp, "dp": self.topology.dp},
            "layers_per_stage": list(self.topology.layers_per_stage),
            "placement": list(self.topology.placement),
            **({} if self.topology.vocabulary == "whole" else {"vocabulary": self.topology.vocabulary}),
            "model": dict(self.model),
            "seed": self.seed,
            "loss_norm": self.loss_norm,
            "store": self.store and {"server": self.store.server, "version": self.store.version},
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> RunFacts:
        topology = fields.sub("topology")
        store = None if fields.raw("store") is None else fields.sub("store")
        return cls(
            topology=Topology(
                tp=topology.one("tp", int),
                pp=topology.one("pp", int),
                dp=topology.one("dp", int),
                layers_per_stage=fields.many("layers_per_stage", float),
                placement=fields.many("placement", int),
                vocabulary=cast(Vocabulary, fields.one("vocabulary", str, "whole")),
            ),
            device=fields.one("device", str),
            num_cores=fields.one("num_cores", int),
            seed=fields.one("seed", int),
            loss_norm=fields.one("loss_norm", str),
            date=fields.one("date", str),
            oversubscribed=fields.one("oversubscribed", bool),
            store=None if store is None else StoreInfo(store.one("server", str), store.one("version", str)),
            versions=fields.one("versions", dict),
            model=fields.one("model", dict),
            device_bytes=None if fields.raw("device_bytes") is None else fields.one("device_bytes", int),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run. `compare` holds the baselines, or is None; `unfinished` says why a run ended before its last step."""

    facts: RunFacts
    result: RunResult
    compare: tuple[RunResult, ...] | None = None
    unfinished: str | None = None

    @property
    def steps(self) -> int:
        return len(self.result.losses)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "unfinished": self.unfinished,
            **self.facts.to_json(),
            "steps": self.steps,
            **self.result.to_json(),
            "compare": None if self.compare is None else [result.to_json() for result in self.compare],
        }

    def write(self, path: str | Path) -> None:
        """Write the report. Readers see the old file or the whole new one, never a part."""
        write_atomic(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> RunReport:
        """The report in a file. Errors: DataError naming the file and the field that is absent or of another type."""
        fields = Fields(read_json(path, FORMAT, "a run report"), str(path))
        compare = fields.raw("compare")
        if compare is not None and not isinstance(compare, list):
            raise DataError(f"{path}: compare is {type(compare).__name__}: expected null or a list of results")
        return cls(
            facts=RunFacts.from_fields(fields),
            result=_result(fields),
            unfinished=None if fields.raw("unfinished") is None else fields.one("unfinished", str),
            compare=None
            if compare is None
            else tuple(_result(Fields(entry, f"{path}: compare[{i}]")) for i, entry in enumerate(compare)),
        )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _result(fields: Fields) -> RunResult:
    bubble, peaks = fields.sub("bubble_ratio"), fields.sub("peak_bytes")
    losses = fields.one("losses", list)
    return RunResult(
        name=fields.one("name", str),
        layout=fields.one("layout", str),
        schedule=fields.one("schedule", str),
        losses=tuple(math.nan if loss is None else fields.check("losses", loss, float) for loss in losses),
        real_tokens_per_step=fields.many("real_tokens_per_step", int),
        padded_tokens=fields.one("padded_tokens", int),
        step_s=fields.many("step_s", float),
        cpu_s=fields.one("cpu_s", float),
        num_micro_batches=tuple(
            tuple(fields.check(f"num_micro_batches[{i}]", count, int) for count in counts)
            for i, counts in enumerate(fields.many("num_micro_batches", list))
        ),
        predicted_makespan_s=_known(fields, "predicted_makespan_s"),
        measured_makespan_s=_known(fields, "measured_makespan_s"),
        predicted_bubble_ratio=_known(bubble, "predicted_per_step"),
        measured_bubble_ratio=_known(bubble, "measured_per_step"),
        exposed_planning_s=None
        if fields.raw("exposed_planning_s") is None
        else fields.one("exposed_planning_s", float),
        work=work_from(fields.sub("work")),
        accounted_steps=None if fields.raw("accounted_steps") is None else fields.many("accounted_steps", int),
        first_step=fields.one("first_step", int),
        evaluations=tuple(
            evaluation_from(Fields(done, f"evaluations[{i}]")) for i, done in enumerate(fields.one("evaluations", list))
        ),
        furthest_off=None if fields.raw("furthest_off") is None else drifting_from(fields.sub("furthest_off")),
        fits=tuple(
            ((fit_fields := Fields(fit, f"fits[{i}]")).one("after", int), fit_from(fit_fields))
            for i, fit in enumerate(fields.one("fits", list))
        ),
        preferences=tuple(
            ((of_step := Fields(figures, f"preferences[{i}]")).one("step", int), preferences_from(of_step))
            for i, figures in enumerate(fields.one("preferences", list, []))
        ),
        refused=tuple(
            ((of_step := Fields(one, f"refused[{i}]")).one("step", int), of_step.one("reason", str))
            for i, one in enumerate(fields.one("refused", list, []))
        ),
        predicted_peak_bytes=None if peaks.raw("predicted") is None else peaks.many("predicted", int),
        measured_peak_bytes=None if peaks.raw("measured") is None else peaks.many("measured", int),
    )


def _known(fields: Fields, name: str) -> tuple[float | None, ...]:
    return tuple(None if value is None else fields.check(name, value, float) for value in fields.one(name, list))


def evaluation_json(done: EvalDone) -> dict[str, Any]:
    return {
        "step": done.number,
        "loss": finite(done.loss),
        "real_tokens": done.real_tokens,
        "num_samples": done.num_samples,
        "seconds": done.seconds,
        "validated_on": done.validated_on,
    }


def evaluation_from(fields: Fields) -> EvalDone:
    return EvalDone(
        step=fields.one("step", int) - 1,
        loss=math.nan if fields.raw("loss") is None else fields.one("loss", float),
        real_tokens=fields.one("real_tokens", int),
        num_samples=fields.one("num_samples", int),
        seconds=fields.one("seconds", float),
        validated_on=fields.one("validated_on", str, ""),
    )


def least_evaluation(evaluations: Iterable[EvalDone]) -> EvalDone | None:
    """That of the least finite loss, among those of the samples and the kind of loss that the last one is of."""
    least: EvalDone | None = None
    for done in evaluations:
        if least is not None and not losses_compare(least.validated_on, done.validated_on):
            least = None
        if math.isfinite(done.loss) and (least is None or done.loss < least.loss):
            least = done
    return least


def drifting_from(fields: Fields) -> DriftingShape:
    rows, encoder_len, decoder_len = fields.many("shape", int)
    return DriftingShape(
        fields.one("stage", int),
        fields.one("letter", str),
        (rows, encoder_len, decoder_len),
        fields.one("measured_s", float),
        fields.one("predicted_s", float),
    )


def fit_from(fields: Fields) -> CostsFit:
    return CostsFit(fields.one("error_before", float), fields.one("error_after", float))


def preferences_json(figures: PreferenceFigures) -> dict[str, float | None]:
    named = asdict(figures) | {"margin": figures.margin}
    return {name: finite(value) for name, value in named.items()}


def preferences_from(fields: Fields) -> PreferenceFigures:
    names = ("chosen_reward", "rejected_reward", "accuracy")
    return PreferenceFigures(
        **{name: math.nan if fields.raw(name) is None else fields.one(name, float) for name in names}
    )


def work_from(fields: Fields) -> Work:
    executed, kinds = fields.sub("executed"), fields.one("executed", dict)
    executed.only(ALL_RECOMPUTES)
    # Older files lack some.
    by_kind = {kind: _positions(executed.sub(kind)) for kind in ALL_RECOMPUTES if kind in kinds}
    return Work(_positions(fields.sub("real")), {kind: p for kind, p in by_kind.items() if p != Positions()})


def _positions(fields: Fields) -> Positions:
    return Positions(**{name: fields.one(name, int) for name in Positions.__slots__})


def shared_cores_note(num_ranks: int, num_cores: int) -> str:
    """
    >>> shared_cores_note(8, 2)
    '8 ranks share 2 cores: an idle rank lends its core, so compare CPU time a token, not tokens/s, makespan or bubble.'
    """
    return (
        f"{num_ranks} ranks share {counted(num_cores, 'core')}: an idle rank lends its core, so compare CPU time a"
        " token, not tokens/s, makespan or bubble."
    )
