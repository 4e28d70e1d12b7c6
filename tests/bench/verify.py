"""CPU time to prove one replica's plan, a case a row: alone, and as one of two whose collectives are proven too.

python tests/bench/verify.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.executor.instructions import Instruction, lower_schedule
from dynapipe_ext.executor.proof import verify, verify_step, with_collectives
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.published.full_backward import one_f_one_b

CASES = [(4, 16, False), (8, 64, False), (8, 64, True)]  # pipeline ranks, micro-batches, split backward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    print(
        "ranks  micro-batches  backward  instructions  median ms  fastest ms  in a step of two: median ms  fastest ms"
    )
    for num_ranks, num_micro_batches, split in CASES:
        programs, stage_ranks = plan(num_ranks, num_micro_batches, split=split)
        alone_ms = spent_ms(partial(verify, programs, stage_ranks, num_micro_batches), rounds)
        counts = [num_micro_batches] * 2
        step_ms = [
            ms / 2 for ms in spent_ms(lambda p=programs, s=stage_ranks, c=counts: prove_step([p, p], s, c), rounds)
        ]
        print(
            f"{num_ranks:5}  {num_micro_batches:13}  {'split' if split else 'whole':>8}  {sum(map(len, programs)):12}"
            f"  {statistics.median(alone_ms):9.3f}  {min(alone_ms):10.3f}"
            f"  {statistics.median(step_ms):27.3f}  {min(step_ms):10.3f}"
        )
    return 0


def prove_step(
    replicas: Sequence[Sequence[Sequence[Instruction]]], stage_ranks: Sequence[int], counts: Sequence[int]
) -> None:
    """As plans are proven before they are published."""
    verify_step(with_collectives(replicas, ReplicaCollectives()), stage_ranks, counts)


def spent_ms(action: Callable[[], object], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        before_ns = time.process_time_ns()
        action()
        found.append((time.process_time_ns() - before_ns) / 1e6)
    return found


def plan(
    num_ranks: int, num_micro_batches: int, *, split: bool
) -> tuple[tuple[tuple[Instruction, ...], ...], Sequence[int]]:
    """1F1B over micro-batches of unequal lengths; a split backward runs its two halves one after the other."""
    schedule = one_f_one_b(num_ranks, num_micro_batches)
    if split:
        halves = {Kind.FORWARD: [Kind.FORWARD], Kind.BACKWARD: [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]}
        ranks = tuple(
            tuple(Action(action.stage, kind, action.micro_batch) for action in rank for kind in halves[action.kind])
            for rank in schedule.ranks
        )
        schedule = PipelineSchedule("1F1B, split", ranks, schedule.stage_ranks)
    rng = np.random.default_rng(0)
    lens = rng.integers(16, 512, num_micro_batches)
    forward_ns = np.repeat(lens[None] * 100, num_ranks, axis=0)
    zeros = np.zeros_like(forward_ns)
    costs = MicroBatchCosts(
        forward_ns=forward_ns,
        backward_ns=2 * forward_ns,
        weight_ns=forward_ns,
        stored_bytes=zeros,
        working_bytes=zeros,
        transfer_ns=zeros[:-1] + 50,
        transfer_bytes=zeros[:-1],
        static_bytes=np.zeros(num_ranks, np.int64),
    )
    micro_batches = [MicroBatch((SampleLength(i, int(length)),)) for i, length in enumerate(lens)]
    times = simulate_ns(schedule, costs)
    programs = lower_schedule(schedule, times, micro_batches, ActivationFormat(64), costs.transfer_ns.tolist())
    return programs, schedule.stage_ranks


if __name__ == "__main__":
    raise SystemExit(main())
