"""Search of placements before a run, on some of its batches: of stages on ranks, and of layers on stages.

A placement is fixed for a run. Each one is judged by the steps that the run would have. Layers then move between
stages, one or half of one at a time, for as long as that shortens the steps. Of the possible moves only those are
planned that leave the busiest rank the least work: no plan of the same micro-batches is shorter than that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import PlacementName, Topology, Vocabulary, place_stages
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.errors import ConfigError, PlanError, VerificationError
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

SampledBatches = Sequence[Sequence[SampleLength]]

_SAMPLED = 3  # batches
_TRIED = 6  # neighbours planned per round of layer moves, those with the least work on the busiest rank
_ROUNDS = 20  # at most: they end when none of those shortens the steps
_TRIAL_EFFORT = 4  # a trial has the planner's effort over this
_MORE_STAGES = 4  # per rank, tried if ranks are idle for a larger share of the step than this:
_IDLE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTrial:
    """Figures of the sampled batches' steps under one topology. `makespan_s`: their sum, of means under timing noise
    (`Planner.noise`). `peak_bytes`: of the fullest rank. `bubble_ratio`: the mean of all steps.

    `refusal`: why no plan was found, or ""; `makespan_s` is then infinite, and the other figures are 0.
    """

    topology: Topology
    makespan_s: float
    peak_bytes: int
    bubble_ratio: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PlacementSearch:
    """Search of the topologies that have the degrees of `base`, each judged on the same `batches`.

    `planner_over` returns the planner of a topology, and `step_of` its step for one batch (or raises PlanError or
    VerificationError). With `halves`, stages may begin and end between attention and MLP. Each placement is tried under
    each of the `vocabularies`.
    """

    base: Topology
    planner_over: Callable[[Topology], Planner]
    step_of: Callable[[Planner, Sequence[SampleLength]], StepPlan]
    num_layers: int
    batches: SampledBatches
    halves: bool = False
    vocabularies: Sequence[Vocabulary] = ("whole",)

    def list_trials(self, names: Sequence[PlacementName]) -> tuple[PlacementTrial, ...]:
        """Return the best trial of every placement, the fastest first, without placements that the model cannot fill.

        The fastest placement with several stages per rank may idle for much of the step, as with few micro-batches. It
        is then tried with more stages per rank as well, which fill and drain in less time.

        Raises PlanError if no placement has a plan, with the reason of the first; ConfigError if none can be made.
        """
        trials: list[PlacementTrial] = []
        errors: list[ConfigError] = []
        for name, vocabulary in product(names, self.vocabularies):
            try:
                trials.append(self._find_best(name, None, vocabulary))
            except ConfigError as error:
                errors.append(error)
        if not trials:
            raise errors[0]
        several = [trial for trial in trials if not trial.topology.placement_name.startswith("linear")]
        best = min(several, key=_get_makespan_s, default=trials[0])
        if best in several and best.bubble_ratio > _IDLE:
            with suppress(ConfigError):  # the model cannot fill as many
                name = cast(PlacementName, best.topology.placement_name.partition(",")[0])
                trials.append(self._find_best(name, _MORE_STAGES, best.topology.vocabulary))
        if all(trial.refusal for trial in trials):
            raise PlanError(f"no placement of stages has a plan: {trials[0].refusal}")
        return tuple(sorted(trials, key=_get_makespan_s))

    def _find_best(self, name: PlacementName, stages_per_rank: int | None, vocabulary: Vocabulary) -> PlacementTrial:
        """Try the placement with even layers and with the best. Raises ConfigError if the model cannot fill it."""
        placement = () if name == "linear" else place_stages(name, self.base.pp, stages_per_rank)
        layers = replace(self.base, placement=placement, layers_per_stage=(), vocabulary="whole")
        even = split_vocabulary(layers.with_layers(self.num_layers), vocabulary)
        candidates = dict.fromkeys((even, self._move_layers(even)))
        return min((self._try(topology, 1) for topology in candidates), key=_get_makespan_s)

    def _move_layers(self, even: Topology) -> Topology:
        """Move layers from even ones on, for as long as that shortens the steps."""
        best = self._try(even, _TRIAL_EFFORT)
        seen_layers = {even.layers_per_stage}
        for _ in range(_ROUNDS):
            near = _list_neighbours(best.topology, halves=self.halves)
            fresh = [topology for topology in near if topology.layers_per_stage not in seen_layers]
            seen_layers.update(topology.layers_per_stage for topology in fresh)
            tried = [
                self._try(topology, _TRIAL_EFFORT) for topology in sorted(fresh, key=self._measure_busiest)[:_TRIED]
            ]
            better = min(tried, key=_get_makespan_s, default=best)
            if better.makespan_s >= best.makespan_s:
                break
            best = better
        return best.topology

    def _try(self, topology: Topology, part: int) -> PlacementTrial:
        """Plan all batches with the effort over `part`."""
        planner = self.planner_over(topology)
        planner = replace(planner, effort=planner.effort // part)
        try:
            plans = [self.step_of(planner, samples) for samples in self.batches]
        except (PlanError, VerificationError) as error:
            return PlacementTrial(
                topology=topology, makespan_s=float("inf"), peak_bytes=0, bubble_ratio=0.0, refusal=str(error)
            )
        bubbles = [sum(p.bubble_ratio for p in plan.predictions) / len(plan.predictions) for plan in plans]
        return PlacementTrial(
            topology=topology,
            makespan_s=sum(plan.mean_makespan_ns(planner.noise) / 1e9 for plan in plans),
            peak_bytes=max((plan.peak_bytes for plan in plans), default=0),
            bubble_ratio=sum(bubbles) / max(1, len(plans)),
        )

    def _measure_busiest(self, topology: Topology) -> tuple[int, tuple[float, ...]]:
        """Return the busiest rank's work with every sample of the first batch by itself: what layer moves change first.

        The layers break ties.
        """
        samples, planner = self.batches[0] if self.batches else (), self.planner_over(topology)
        rows = [MicroBatch((sample,), planner.layout, pad_multiple=planner.pad_multiple) for sample in samples]
        costs = planner.costs.evaluate(rows)
        by_rank = [0] * topology.pp
        for rank, work in zip(topology.stage_ranks, (costs.forward_ns + costs.backward_ns).sum(axis=1), strict=True):
            by_rank[rank] += int(work)
        return max(by_rank), topology.layers_per_stage


def _get_makespan_s(trial: PlacementTrial) -> float:
    return trial.makespan_s


def _list_neighbours(topology: Topology, *, halves: bool) -> Iterator[Topology]:
    """Yield topologies with one layer, or half of one, moved from a stage that keeps as much to another with layers."""
    layers, stages = topology.layers_per_stage, topology.layer_stages
    for amount, giver, taker in product((0.5, 1) if halves else (1,), stages, stages):
        if taker != giver and layers[giver] > amount:
            moved = list(layers)
            moved[giver] -= amount
            moved[taker] += amount
            yield replace(topology, layers_per_stage=tuple(moved))


def sample_batches(num_batches: int) -> tuple[int, ...]:
    """Return the indices of up to 3 batches, evenly spread over the `num_batches` of an epoch.

    >>> sample_batches(100), sample_batches(2)
    ((0, 33, 66), (0, 1))
    """
    count = min(_SAMPLED, num_batches)
    return tuple(k * num_batches // count for k in range(count))
