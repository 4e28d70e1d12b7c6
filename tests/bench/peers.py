"""The peers' rules beside ours, written from their descriptions, each as a planned step on the same costs and limit.

    DynaPipe       its split (split_as_dynapipe) and its cyclic memory-aware schedule, micro-batches ordered by clusters
    Megatron       samples in order, first fit into micro-batches of so many tokens, dealt in turn; 1F1B
    verl           samples to replicas and micro-batches by Karmarkar-Karp on its workload; 1F1B
    readiness      our split; each rank runs whatever is ready, backwards first, no order prescribed

Padded micro-batches can be judged. Megatron and verl run packed rows in practice: those are simulated only, priced by
the cost table as padded shapes of the same tokens and squares. A rule that leaves a size open is given its best one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from peer_rules import first_fit_in_order, verl_rule
from proven import proven

from dynapipe_ext.batch.micro_batches import (
    LAYER_RECOMPUTES,
    GlobalBatchPlan,
    Layout,
    MicroBatch,
    ReplicaPlan,
    SampleLength,
    check_cover,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.rules import split_as_dynapipe
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, make_linear_schedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import StageMemory, compute_peak_bytes, simulate
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan

Replicas = list[list[MicroBatch]]
Scheduler = Callable[[MicroBatchCosts, int], PipelineSchedule]  # costs and memory limit -> schedule

_TOKENS = (1024, 2048, 4096, 8192, 16384)  # of a micro-batch, where a rule leaves it open


def peer_plan(
    peer: str,
    samples: Sequence[SampleLength],
    costs: CostTable,
    topology: Topology,
    limit_bytes: int,
    *,
    layout: Layout = "padded",
    ours: StepPlan | None = None,
) -> StepPlan:
    """The peer's best plan. `ours` gives "readiness" its micro-batches.

    Raises PlanError where nothing of the peer fits the limit.
    """
    candidates: Iterator[tuple[Callable[[], Replicas], Scheduler]]
    match peer:
        case "DynaPipe":
            cut = partial(
                split_as_dynapipe,
                samples,
                costs,
                LAYER_RECOMPUTES,
                pp=topology.pp,
                dp=topology.dp,
                max_bytes=limit_bytes,
            )
            candidates = iter([(cut, _cyclic)])
        case "Megatron" | "verl":
            rule = first_fit_in_order if peer == "Megatron" else verl_rule
            candidates = (
                (partial(rule, samples, max_tokens=tokens, dp=topology.dp, layout=layout, recompute=kind), natural)
                for tokens in _TOKENS
                for kind in LAYER_RECOMPUTES
            )
        case "readiness":
            if ours is None:
                raise PlanError("readiness-first dispatch has no split of its own: give our plan")
            given = [list(replica.micro_batches) for replica in ours.batch.replicas]
            candidates = iter([((lambda: given), _readiness)])
        case _:
            raise PlanError(f"no peer is called {peer!r}: use DynaPipe, Megatron, verl or readiness")
    best: StepPlan | None = None
    refusal: PlanError | None = None
    for make, schedule in candidates:
        try:
            found = step_plan(make(), schedule, costs, limit_bytes)
        except PlanError as error:
            refusal = error  # the last one: of the largest micro-batches
            continue
        if best is None or found.makespan_s < best.makespan_s:
            best = found
    if best is None:
        assert refusal is not None
        raise refusal
    check_cover(best.batch, samples)
    return best


def step_plan(replicas: Replicas, schedule: Scheduler, costs: CostModel, limit_bytes: int) -> StepPlan:
    """A plan of given micro-batches, scheduled, simulated and proven. Raises PlanError above the limit."""
    plans, schedules, predictions, evaluated = [], [], [], []
    for dp_rank, micro_batches in enumerate(replicas):
        priced = costs.evaluate(micro_batches)
        made = schedule(priced, limit_bytes)
        peaks = compute_peak_bytes(made, priced)
        if max(peaks) > limit_bytes:
            raise PlanError(f"replica {dp_rank} needs {max(peaks)} B but the limit is {limit_bytes} B")
        trace = simulate(made, priced)
        plans.append(ReplicaPlan(dp_rank, tuple(micro_batches)))
        schedules.append(made)
        predictions.append(
            Prediction(
                makespan_ns=round(trace.makespan_s * 1e9),
                lower_bound_ns=bound_replica(made, priced, split=made.is_split).best_ns if micro_batches else 0,
                peak_bytes=peaks,
                bubble_ratio=trace.bubble_ratio,
            )
        )
        evaluated.append(priced)
    batch = GlobalBatchPlan(step=0, replicas=tuple(plans))
    step = StepPlan(batch, tuple(schedules), tuple(predictions), tuple(evaluated))
    return proven(step, costs, limit_bytes).step_plan


def natural(costs: MicroBatchCosts, limit_bytes: int) -> PipelineSchedule:
    """1F1B in the given order, whatever the limit."""
    del limit_bytes
    return one_f_one_b(costs.num_stages, costs.num_micro_batches)


def _cyclic(costs: MicroBatchCosts, limit_bytes: int) -> PipelineSchedule:
    return clustered_cyclic(costs, memory_limit_bytes=limit_bytes)


def _readiness(costs: MicroBatchCosts, limit_bytes: int) -> PipelineSchedule:
    return readiness_first(costs, memory_limit_bytes=limit_bytes)


def readiness_first(costs: MicroBatchCosts, *, memory_limit_bytes: int, split: bool = False) -> PipelineSchedule:
    """Whatever is ready and fits in bytes runs: a backward before a forward before, under `split`, a weight gradient.

    Never above the limit: stored bytes are held from F to B, or to W. No deadlock: forwards run in the order of their
    arrival, hence in the order of stage 0 everywhere, and a W that waits is run as soon as nothing else can.
    """
    stages, last = costs.num_stages, costs.num_stages - 1
    forward, weight, transfer = costs.forward_ns.tolist(), costs.weight_ns.tolist(), costs.transfer_ns.tolist()
    gradient = (costs.input_ns if split else costs.backward_ns).tolist()
    memory = [StageMemory(costs, s, memory_limit_bytes) for s in range(stages)]
    inputs: list[list[tuple[int, int]]] = [[(0, m) for m in range(costs.num_micro_batches)], *([] for _ in range(last))]
    gradients: list[list[tuple[int, int]]] = [[] for _ in range(stages)]  # heaps of (arrival, micro-batch)
    weights: list[list[int]] = [[] for _ in range(stages)]
    free_at, actions = [0] * stages, [[] for _ in range(stages)]  # type: ignore[var-annotated]
    events = [(0, 0)]
    while events:
        now, s = heapq.heappop(events)
        if free_at[s] > now:
            continue
        if gradients[s] and gradients[s][0][0] <= now:
            _, m = heapq.heappop(gradients[s])
            end = now + gradient[s][m]
            actions[s].append(Action(s, Kind.BACKWARD_INPUT if split else Kind.BACKWARD, m))
            if split:
                weights[s].append(m)
            else:
                memory[s].release(m)
            if s:
                arrival = end + transfer[s - 1][m]
                heapq.heappush(gradients[s - 1], (arrival, m))
                heapq.heappush(events, (arrival, s - 1))
        elif inputs[s] and inputs[s][0][0] <= now and memory[s].admit(inputs[s][0][1]):
            _, m = heapq.heappop(inputs[s])
            end = now + forward[s][m]
            actions[s].append(Action(s, Kind.FORWARD, m))
            if s == last:
                heapq.heappush(gradients[s], (end, m))
            else:
                arrival = end + transfer[s][m]
                heapq.heappush(inputs[s + 1], (arrival, m))
                heapq.heappush(events, (arrival, s + 1))
        elif weights[s]:
            m = weights[s].pop(0)
            end = now + weight[s][m]
            actions[s].append(Action(s, Kind.BACKWARD_WEIGHT, m))
            memory[s].release(m)
        else:
            continue
        free_at[s] = end
        heapq.heappush(events, (end, s))
    return make_linear_schedule("readiness-first", actions)


def renumbered(plan: StepPlan) -> StepPlan:
    """The plan with micro-batches numbered in the order in which they enter stage 0, as plan files have them."""
    batches, schedules, costs = [], [], []
    for replica, schedule, priced in zip(plan.batch.replicas, plan.schedules, plan.costs, strict=True):
        order = [a.micro_batch for a in schedule.ranks[0] if a.kind is Kind.FORWARD]
        place = {m: i for i, m in enumerate(order)}
        batches.append(replace(replica, micro_batches=tuple(replica.micro_batches[m] for m in order)))
        ranks = tuple(tuple(replace(a, micro_batch=place[a.micro_batch]) for a in rank) for rank in schedule.ranks)
        schedules.append(replace(schedule, ranks=ranks))
        costs.append(priced.take(order))
    return StepPlan(replace(plan.batch, replicas=tuple(batches)), tuple(schedules), plan.predictions, tuple(costs))
