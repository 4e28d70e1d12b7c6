"""What several ways of training took for the same global batches on emulated ranks, in figures and in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynapipe_ext.batch.micro_batches import LengthArray, round_up
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.proven_step import ProvenStep
from dynapipe_ext.schedules.rivals import describe_gain
from dynapipe_ext.timeline import Trace
from dynapipe_ext.tools.console import counted, figure, percent

OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStep:
    """A proven step, and what the pipeline ranks of each replica did in it, in seconds from the step's start."""

    proven: ProvenStep
    replicas: tuple[Trace, ...]

    @property
    def step_s(self) -> float:
        return max(span.end_s for trace in self.replicas for span in trace.spans)

    @property
    def idle_ratio(self) -> float:
        """Idle time of all ranks over their number times the step."""
        ranks = sum(len(trace.ranks) for trace in self.replicas)
        return 1 - sum(trace.busy_s for trace in self.replicas) / (ranks * self.step_s)

    @property
    def padding_ratio(self) -> float:
        return 1 - self.proven.step_plan.batch.padding_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of training by its name, with a step for each global batch; `detail` says how it plans."""

    name: str
    detail: str
    steps: tuple[EmulatedStep, ...]

    @property
    def step_s(self) -> float:
        return statistics.fmean(step.step_s for step in self.steps)

    @property
    def predicted_s(self) -> float:
        return statistics.fmean(step.proven.step_plan.makespan_s for step in self.steps)

    @property
    def idle_ratio(self) -> float:
        return statistics.fmean(step.idle_ratio for step in self.steps)

    @property
    def padding_ratio(self) -> float:
        return statistics.fmean(step.padding_ratio for step in self.steps)

    @property
    def micro_batches(self) -> str:
        """Of each replica, in the first step."""
        replicas = self.steps[0].proven.step_plan.batch.replicas
        return " + ".join(str(len(replica.micro_batches)) for replica in replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same global batches in several ways, ours last; `misfits` says why a rival, by its name, is not among them.
    `samples` and `costs` say where both are from; ranks slept
    `scale` times as long as the costs count. `batches` are the lengths, `pad_multiple` what rows are rounded up to.
    `late` is None where the steps were measured; where they are simulated instead, by what share ranks were late."""

    ways: tuple[Way, ...]
    topology: Topology
    batches: tuple[LengthArray, ...]
    pad_multiple: int
    samples: str
    costs: str
    scale: float
    late: float | None = None
    misfits: Mapping[str, str] = field(default_factory=dict)

    @property
    def lateness(self) -> float:
        """The largest share of any way by which steps took longer than planned."""
        return max(way.step_s / way.predicted_s for way in self.ways) - 1

    def simulated(self) -> Comparison:
        """The same steps as the plans predict them, for a machine too busy to wake sleeping ranks in time."""

        def planned(way: Way) -> Way:
            steps = (EmulatedStep(proven=s.proven, replicas=s.proven.step_plan.traces) for s in way.steps)
            return replace(way, steps=tuple(steps))

        return replace(self, ways=tuple(map(planned, self.ways)), late=self.lateness)

    @property
    def padded_ratio(self) -> float:
        """Padding where every sample is as long as the longest of its global batch."""
        return statistics.fmean(_padded_ratio(batch, self.pad_multiple) for batch in self.batches)

    @property
    def result(self) -> str:
        """One sentence: the gain over the best rival first, then the seconds of each way, and who does not fit."""
        *rivals, ours = self.ways
        gain = describe_gain(ours.step_s, {way.name: way.step_s for way in rivals})
        times = ", ".join(f"{way.name} {figure(way.step_s, 3)} s" for way in (ours, *rivals))
        padding = ", ".join(percent(way.padding_ratio) for way in (ours, *rivals))
        unfit = "".join(f"; {name} left out: {reason}" for name, reason in self.misfits.items())
        return (
            f"the same samples, {gain}: {times} per step; padding {padding} ({percent(self.padded_ratio)} if all were"
            f" padded to the longest){unfit}"
        )

    @property
    def how(self) -> str:
        """What was measured, so that nobody takes it for training."""
        ranks, t = self.topology.pp * self.topology.dp, self.topology
        slower = "" if self.scale == 1 else f", {figure(self.scale, 2)} times as slowly"
        shared = f"; TP{t.tp} ranks do alike, one stands for them" if t.tp > 1 else ""
        on = f"{counted(ranks, 'emulated rank')} (PP{t.pp} x DP{t.dp}{shared})"
        steps = f"the mean of {counted(len(self.batches), 'step')}; nothing is computed"
        if self.late is None:
            way = (
                f"measured on {on}: they run the plans' instructions and sleep for the seconds that the model's costs"
                f" count{slower}, {steps}. Steps took up to {percent(max(0.0, self.lateness))} longer than planned"
            )
        else:
            way = (
                f"simulated, as this machine is too busy to measure: {on} woke up so late that steps took up to"
                f" {percent(self.late, 0)} longer than planned. These are the planned seconds, {steps}"
            )
        return f"{way}. Samples: {self.samples}. Costs: {self.costs}."

    @property
    def lines(self) -> Sequence[str]:
        return (self.result, self.how)


def _padded_ratio(batch: LengthArray, multiple: int) -> float:
    tokens = batch[:, 0] + batch[:, 1]
    return 1 - int(tokens.sum()) / (len(tokens) * round_up(int(tokens.max()), multiple))
