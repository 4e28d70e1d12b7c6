"""The usual ways and ours on the same global batches, each executed by emulated ranks.

settings, costs, lengths ─► a planner a way ─► prove_step ─► emulated_step ─► Comparison
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, round_up, sample_lengths
from dynapipe_ext.batch.topology import placement_of
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.executor.emulated_step import emulated_step
from dynapipe_ext.executor.proven_step import ProvenStep, prove_step
from dynapipe_ext.launch.job.configured import global_batches, make_planner, topology_of, usual_way
from dynapipe_ext.settings.plan_rules import ScheduleName
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.comparison import Comparison, EmulatedStep, Way

_LEAST_S, _MOST_S = 1.2, 3.0  # that the longest step sleeps: short sleeps end late, long ones bore
_MOST_LATE = 0.1  # by which share a step may exceed its plan and still be called measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What steps are planned from, with or without a run: settings, the costs of their model, all samples' lengths."""

    config: TrainConfig
    costs: CostModel
    lengths: LengthArray
    samples_from: str
    costs_from: str


def emulated_comparison(job: PlannedJob, *, num_batches: int = 3) -> Comparison:
    """Packed 1F1B, interleaved 1F1B where the layers divide, and the job's own way, on its first global batches.

    Each way is at its best: packed rows have the length, of a few, that is planned to be fastest. Every rank has a core
    or device of its own, whatever the machine has. A machine too busy to wake them in time shows the plans' own seconds
    instead, and says so. Errors: ConfigError for a job without a pipeline, an encoder-decoder's or one of pairs of
    answers; PlanError where a way does not fit the memory limit.
    """
    config = job.config
    _refuse_incomparable(config)
    batches = global_batches(config, job.lengths, 0, drop_last=config.data.drop_last)
    steps = range(min(num_batches, len(batches)))
    samples = [sample_lengths(job.lengths, batches[step]) for step in steps]
    proven = {
        name: [_fastest(ways, job.costs, of_step, step) for step, of_step in zip(steps, samples, strict=True)]
        for name, ways in _ways(config, job.lengths).items()
    }
    longest_s = max(step.step_plan.makespan_s for way in proven.values() for step in way)
    scale = min(max(1.0, _LEAST_S / longest_s), _MOST_S / longest_s)
    ways = [
        Way(
            name=name,
            detail=_DETAILS[name],
            steps=tuple(EmulatedStep(proven=one, replicas=emulated_step(one, scale=scale)) for one in of_way),
        )
        for name, of_way in proven.items()
    ]
    comparison = Comparison(
        ways=tuple(ways),
        topology=topology_of(config),
        batches=tuple(job.lengths[list(batches[step])] for step in steps),
        pad_multiple=config.plan.pad_multiple,
        samples=job.samples_from,
        costs=job.costs_from,
        scale=scale,
    )
    return comparison if comparison.lateness <= _MOST_LATE else comparison.simulated()


_PACKED, _INTERLEAVED, _OURS = "packed 1F1B", "interleaved", "ours"
_DETAILS = {
    _PACKED: "rows of whole documents, balanced, one forward and one backward in turn",
    _INTERLEAVED: "the same rows, two stages a rank, one after the other",
    _OURS: "variable micro-batches in a searched order, as the settings say",
}


def _refuse_incomparable(config: TrainConfig) -> None:
    if config.topology.pp == 1:
        raise ConfigError("pp is 1, so there is no pipeline whose idle time could be compared: take 2 or more")
    if config.model.num_decoder_layers:
        raise ConfigError("an encoder-decoder's samples are not packed by the usual ways: compare a decoder's run")
    if config.preferences.loss:
        raise ConfigError("pairs of answers are not packed by the usual ways: compare a run on texts")


def _ways(config: TrainConfig, lengths: LengthArray) -> Mapping[str, Sequence[TrainConfig]]:
    """The settings of each way; of several, the fastest for a step counts."""
    multiple, row = config.plan.pad_multiple, config.model.max_seq_len
    longest = int((lengths[:, 0] + lengths[:, 1]).max())
    rows = sorted({round_up(longest, multiple), *(round_up(max(longest, n), multiple) for n in (row, 2 * row))})
    schedules: dict[str, ScheduleName] = {_PACKED: "1f1b"}
    if config.model.total_layers % len(placement_of("interleaved", config.topology.pp)) == 0:
        schedules[_INTERLEAVED] = "interleaved-1f1b"
    packed = {
        name: [usual_way(config, schedule=one, layout="packed", rule="packed-balanced", max_tokens=n) for n in rows]
        for name, one in schedules.items()
    }
    return packed | {_OURS: [config]}


def _fastest(ways: Iterable[TrainConfig], costs: CostModel, samples: Sequence[SampleLength], step: int) -> ProvenStep:
    """Errors: PlanError where none of the ways fits."""
    best, refusal = None, None
    for config in ways:
        planner = make_planner(config, costs.over(topology_of(config))[0])
        try:
            proven = prove_step(planner, samples, step=step)
        except PlanError as error:
            refusal = error
            continue
        if best is None or proven.step_plan.makespan_s < best.step_plan.makespan_s:
            best = proven
    if best is None:
        assert refusal is not None
        raise refusal
    return best
