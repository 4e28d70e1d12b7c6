"""The rivals and ours on the same global batches, each executed by emulated ranks.

settings, costs, lengths ─► a planner a way ─► prove_step ─► emulated_step ─► Comparison
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, sample_lengths
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.executor.emulated_step import emulated_step
from dynapipe_ext.executor.proven_step import ProvenStep, prove_step
from dynapipe_ext.launch.job.configured import global_batches, make_planner, rival_way, topology_of
from dynapipe_ext.schedules.rivals import list_rivals
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.comparison import OURS, Comparison, EmulatedStep, Way

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
    """Run the rivals (`list_rivals`) and the job's own way on its first global batches.

    Each step of each way is proven and within the job's memory limit; a rival without such a step for every batch is
    left out with its reason. Every rank has a core or device of its own, whatever the machine has. A machine too busy
    to wake the ranks in time shows the plans' own seconds instead, and says so. Raises ConfigError for a job without a
    pipeline, an encoder-decoder's or one of pairs of answers; PlanError if ours does not fit the memory limit.
    """
    config = job.config
    _refuse_incomparable(config)
    batches = global_batches(config, job.lengths, 0, drop_last=config.data.drop_last)
    steps = range(min(num_batches, len(batches)))
    samples = [sample_lengths(job.lengths, batches[step]) for step in steps]
    ours = _proven_steps(config, job.costs, samples)
    details, proven, misfits = {OURS: _DETAIL}, {}, {}
    for rival in list_rivals(config.topology.pp):
        try:
            proven[rival.name] = _proven_steps(rival_way(config, rival), job.costs, samples)
        except (ConfigError, PlanError) as error:
            misfits[rival.name] = str(error)
        details[rival.name] = rival.detail
    proven[OURS] = ours
    longest_s = max(step.step_plan.makespan_s for way in proven.values() for step in way)
    scale = min(max(1.0, _LEAST_S / longest_s), _MOST_S / longest_s)
    ways = [
        Way(
            name=name,
            detail=details[name],
            steps=tuple(EmulatedStep(proven=one, replicas=emulated_step(one, scale=scale)) for one in of_way),
        )
        for name, of_way in proven.items()
    ]
    comparison = Comparison(
        ways=tuple(ways),
        misfits=misfits,
        topology=topology_of(config),
        batches=tuple(job.lengths[list(batches[step])] for step in steps),
        pad_multiple=config.plan.pad_multiple,
        samples=job.samples_from,
        costs=job.costs_from,
        scale=scale,
    )
    return comparison if comparison.lateness <= _MOST_LATE else comparison.simulated()


_DETAIL = "variable micro-batches in a searched order, as the settings say"


def _refuse_incomparable(config: TrainConfig) -> None:
    if config.topology.pp == 1:
        raise ConfigError("pp is 1, so there is no pipeline whose idle time could be compared: take 2 or more")
    if config.model.num_decoder_layers:
        raise ConfigError("an encoder-decoder's samples are not packed by the usual ways: compare a decoder's run")
    if config.preferences.loss:
        raise ConfigError("pairs of answers are not packed by the usual ways: compare a run on texts")


def _proven_steps(config: TrainConfig, costs: CostModel, samples: Sequence[Sequence[SampleLength]]) -> list[ProvenStep]:
    """Return the proven step of each batch. Raises PlanError if one does not fit, ConfigError if no step can be
    planned this way."""
    planner = make_planner(config, costs.with_topology(topology_of(config))[0])
    return [prove_step(planner, of_step, step=step) for step, of_step in enumerate(samples)]
