"""Plans by hand in which long samples are cut, and random orders that their pieces allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dynapipe_ext.batch.micro_batches import (
    GlobalBatchPlan,
    MicroBatch,
    Recompute,
    ReplicaPlan,
    SampleLength,
    sample_pieces,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan


def cut_sample(sample: TokenSample, borders: Sequence[int]) -> list[SampleLength]:
    """The pieces of a sample between inner borders."""
    pieces = []
    for start, end in itertools.pairwise((0, *borders, sample.positions)):
        target = int(sample.is_target[start + 1 : end + 1].sum())
        pieces.append(SampleLength(sample.index, end - start, 0, target, start))
    return pieces


def pieced_replicas(
    samples: Sequence[TokenSample],
    dp: int,
    recompute: Recompute,
    random: Random,
    *,
    cut_from: int = 20,
    pad_multiple: int = 4,
) -> list[list[MicroBatch]]:
    """Samples of `cut_from` positions and more in two to four unequal pieces, whole ones behind some of them and in
    rows of their own, all rows in a random order."""
    replicas: list[list[MicroBatch]] = []
    for dp_rank in range(dp):
        own = list(samples[dp_rank::dp])
        short = [SampleLength(s.index, s.positions, 0, s.target) for s in own if s.positions < cut_from]
        rows: list[MicroBatch] = []
        for sample in (s for s in own if s.positions >= cut_from):
            borders = sorted(random.sample(range(1, sample.positions), random.choice((1, 2, 3))))
            for piece in cut_sample(sample, borders):
                behind = [short.pop() for _ in range(random.choice((0, 1, 2))) if short]
                rows.append(MicroBatch((piece, *behind), "packed", recompute, "carried", pad_multiple=pad_multiple))
        rows += [MicroBatch(tuple(short), "packed", recompute, pad_multiple=pad_multiple)] if short else []
        random.shuffle(rows)
        replicas.append(rows)
    return replicas


def hand_made(
    topology: Topology, replicas: Sequence[Sequence[MicroBatch]], schedules: Sequence[PipelineSchedule]
) -> StepPlan:
    """A step of given micro-batches and orders, of blocks of the topology's width, which promises nothing but its
    times."""
    costs = tuple(TokenCosts(topology.num_stages, transfer_ns_per_token=10).evaluate(replica) for replica in replicas)
    predictions = tuple(
        Prediction(
            makespan_ns=compute_makespan_ns(s, c), lower_bound_ns=0, peak_bytes=(0,) * len(s.ranks), bubble_ratio=0.0
        )
        for s, c in zip(schedules, costs, strict=True)
    )
    plans = tuple(ReplicaPlan(dp_rank, tuple(replica)) for dp_rank, replica in enumerate(replicas))
    return StepPlan(GlobalBatchPlan(step=0, replicas=plans, width=topology.width), tuple(schedules), predictions, costs)


def random_legal_schedule(
    topology: Topology, micro_batches: Sequence[MicroBatch], random: Random, *, split: bool = False
) -> PipelineSchedule:
    """An order, at random among all in which no action waits for a later one and pieces keep to theirs."""
    gradient = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
    last = topology.num_stages - 1
    needs: dict[Action, set[Action]] = {}
    for stage, m in itertools.product(range(last + 1), range(len(micro_batches))):
        forward, back = Action(stage, Kind.FORWARD, m), Action(stage, gradient, m)
        needs[forward] = {replace(forward, stage=stage - 1)} if stage else set()
        needs[back] = {forward} | ({replace(back, stage=stage + 1)} if stage < last else set())
        if split:
            needs[Action(stage, Kind.BACKWARD_WEIGHT, m)] = {back}
    for stage, pieces in itertools.product(range(last + 1), sample_pieces(micro_batches)):
        for before, behind in itertools.pairwise(pieces):
            needs[Action(stage, Kind.FORWARD, behind)].add(Action(stage, Kind.FORWARD, before))
            needs[Action(stage, gradient, before)].add(Action(stage, gradient, behind))
    ranks: list[list[Action]] = [[] for _ in range(topology.pp)]
    done: set[Action] = set()
    while len(done) < len(needs):
        action = random.choice([a for a, needed in needs.items() if a not in done and needed <= done])
        ranks[topology.stage_ranks[action.stage]].append(action)
        done.add(action)
    return PipelineSchedule("random", tuple(map(tuple, ranks)), topology.stage_ranks)
