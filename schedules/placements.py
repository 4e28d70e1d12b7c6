"""Where layers live: placements of stages on ranks, and layers on stages, tried on real batches before a run.

A placement is fixed for a run. Each candidate is judged by the steps that the run would have. Layers then move between
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
from dynapipe_ext.batch.topology import PlacementName, Topology, Vocabulary, placement_of
from dynapipe_ext.batch.vocabulary_parallel import spread_vocabulary
from dynapipe_ext.errors import ConfigError, PlanError, VerificationError
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

SampledBatches = Sequence[Sequence[SampleLength]]

_SAMPLED = 3  # batches
_TRIED = 6  # neighbours planned in a round of moves of layers, those with the least work on the busiest rank
_ROUNDS = 20  # at most: they end where none of those shortens the steps
_TRIAL_EFFORT = 4  # a trial has one part in so many of the planner's effort
_FINALS = 3  # trials with the shortest steps, planned again with all of the effort
_MORE_STAGES = 4  # a rank, tried where ranks are idle for a larger share of the step than this:
_IDLE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTrial:
    """What the sampled batches came to under one topology. `makespan_s` is their sum, of the means where plans are
    judged by these (`Planner.noise`); the peak is the largest rank's.

    `refusal` says why no plan was found; the figures are then infinite and 0.
    """

    topology: Topology
    makespan_s: float
    peak_bytes: int
    bubble_ratio: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PlacementSearch:
    """Tries topologies of one shape, that of `base`, on the same batches. `planner_over` gives the planner of a
    topology, and `step_of` the step that it makes of a batch (or raises PlanError or VerificationError). With `halves`
    stages may begin and end between attention and MLP. Placements are tried under each of the `vocabularies`."""

    base: Topology
    planner_over: Callable[[Topology], Planner]
    step_of: Callable[[Planner, Sequence[SampleLength]], StepPlan]
    num_layers: int
    batches: SampledBatches
    halves: bool = False
    vocabularies: Sequence[Vocabulary] = ("whole",)

    def trials(self, names: Sequence[PlacementName], stages_per_rank: int | None = None) -> tuple[PlacementTrial, ...]:
        """The best trial of every placement, the best of all first, without placements that the model cannot fill.

        Without `stages_per_rank`, ranks have the placement's own number. Where few micro-batches leave them idle, the
        better placement of several stages a rank is tried with more, too, which fill and drain in less time.

        Errors: PlanError where no placement has a plan, with the reason of the first; ConfigError where none can be
        made.
        """
        trials: list[PlacementTrial] = []
        refusal: ConfigError | None = None
        for name, vocabulary in product(names, self.vocabularies):
            try:
                trials.append(self._best_of(name, stages_per_rank, vocabulary))
            except ConfigError as error:
                refusal = refusal or error
        several = [one for one in trials if not one.topology.placement_name.startswith("linear")]
        if several and not stages_per_rank:
            best = min(several, key=lambda one: one.makespan_s)
            if best.bubble_ratio > _IDLE:
                with suppress(ConfigError):  # the model cannot fill so many
                    name = cast(PlacementName, best.topology.placement_name.partition(",")[0])
                    trials.append(self._best_of(name, _MORE_STAGES, best.topology.vocabulary))
        if not trials:
            assert refusal is not None
            raise refusal
        if all(one.refusal for one in trials):
            raise PlanError(f"no placement of stages has a plan: {trials[0].refusal}")
        return tuple(sorted(trials, key=lambda one: one.makespan_s))

    def _best_of(self, name: PlacementName, stages_per_rank: int | None, vocabulary: Vocabulary) -> PlacementTrial:
        """The placement with even layers or its best. Errors: ConfigError where the model cannot fill it."""
        even = self._shaped(name, stages_per_rank, vocabulary)
        finals = {one.layers_per_stage: one for one in (even, *self._promising(even))}.values()
        return min((self._trial(one, 1) for one in finals), key=lambda one: one.makespan_s)

    def _shaped(self, name: PlacementName, stages_per_rank: int | None, vocabulary: Vocabulary) -> Topology:
        base = self.base
        if name == "linear":
            stages_per_rank = None
        ranks = placement_of(name, base.pp, stages_per_rank)
        placement = () if name == "linear" else ranks
        layers = replace(base, placement=placement, layers_per_stage=(), vocabulary="whole")
        return spread_vocabulary(layers.with_layers(self.num_layers), vocabulary)

    def _promising(self, even: Topology) -> list[Topology]:
        """The topologies with the shortest steps of all that were tried on the way from even layers to the best. Trials
        of little effort differ by chance as much as layers of which one moves."""
        best = self._trial(even, _TRIAL_EFFORT)
        trials, seen = [best], {even.layers_per_stage}
        for _ in range(_ROUNDS):
            near = _neighbours(best.topology, halves=self.halves)
            fresh = [one for one in near if one.layers_per_stage not in seen]
            seen.update(one.layers_per_stage for one in fresh)
            fresh.sort(key=self._busiest_ns)
            tried = [self._trial(one, _TRIAL_EFFORT) for one in fresh[:_TRIED]]
            trials += tried
            better = min(tried, key=lambda one: one.makespan_s, default=best)
            if better.makespan_s >= best.makespan_s:
                break
            best = better
        return [one.topology for one in sorted(trials, key=lambda one: one.makespan_s)[:_FINALS]]

    def _trial(self, topology: Topology, part: int) -> PlacementTrial:
        """All batches planned with one part in so many of the effort."""
        planner = self.planner_over(topology)
        planner = replace(planner, effort=planner.effort // part)
        makespan_s, bubbles, peak_bytes = 0.0, 0.0, 0
        for samples in self.batches:
            try:
                plan = self.step_of(planner, samples)
            except (PlanError, VerificationError) as error:
                return PlacementTrial(
                    topology=topology, makespan_s=float("inf"), peak_bytes=0, bubble_ratio=0.0, refusal=str(error)
                )
            makespan_s += plan.mean_makespan_ns(planner.noise) / 1e9
            bubbles += sum(p.bubble_ratio for p in plan.predictions) / len(plan.predictions)
            peak_bytes = max(peak_bytes, *(max(p.peak_bytes) for p in plan.predictions))
        return PlacementTrial(
            topology=topology,
            makespan_s=makespan_s,
            peak_bytes=peak_bytes,
            bubble_ratio=bubbles / max(1, len(self.batches)),
        )

    def _busiest_ns(self, topology: Topology) -> tuple[int, tuple[float, ...]]:
        """Work of the busiest rank with every sample of the first batch by itself: what moving layers changes first."""
        samples, planner = self.batches[0] if self.batches else (), self.planner_over(topology)
        alone = [MicroBatch((sample,), planner.layout, pad_multiple=planner.pad_multiple) for sample in samples]
        priced = planner.costs.evaluate(alone)
        work = (priced.forward_ns + priced.backward_ns).sum(axis=1)
        by_rank = [0] * topology.pp
        for stage, rank in enumerate(topology.stage_ranks):
            by_rank[rank] += int(work[stage])
        return max(by_rank), topology.layers_per_stage


def _neighbours(topology: Topology, *, halves: bool) -> Iterator[Topology]:
    """Topologies with one layer, or half of one, moved from a stage that keeps as much to another stage of layers."""
    layers, stages = topology.layers_per_stage, topology.layer_stages
    for amount in (0.5, 1) if halves else (1,):
        for giver in stages:
            for taker in stages:
                if taker != giver and layers[giver] > amount:
                    moved = list(layers)
                    moved[giver] -= amount
                    moved[taker] += amount
                    yield replace(topology, layers_per_stage=tuple(moved))


def sampled_batches(num_batches: int) -> tuple[int, ...]:
    """Numbers of a few batches spread evenly over an epoch.

    >>> sampled_batches(100), sampled_batches(2)
    ((0, 33, 66), (0, 1))
    """
    count = min(_SAMPLED, num_batches)
    return tuple(k * num_batches // count for k in range(count))
