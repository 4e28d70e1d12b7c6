"""How much a schedule loses when times are not as predicted, beside a dispatcher that runs whatever is ready.

Every action is longer or shorter by a random share, and one stage may be slow throughout. The loss is the makespan
under noise less the noise-free makespan of the same way of running: the schedule in its order, and readiness-first
dispatch on the same micro-batches under the same byte limit, which decides again under noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynapipe_ext.batch.micro_batches import SamplePieces
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.partitioning.padded import Cut
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns
from dynapipe_ext.schedules.search.optimizer import (
    NEVER,
    NO_LIMIT,
    AnnealingSchedule,
    DispatchPolicy,
    Problem,
    make_records,
)

# A gradient before a forward before a W, and a W as soon as nothing else can run.
READINESS_FIRST = DispatchPolicy(extra=NO_LIMIT, rhythm=0, patience=1 << 20)
_UNIT = 1000


@dataclass(frozen=True, slots=True)
class Noise:
    """Every action takes a factor drawn evenly from 1 -+ `spread`; those of `slow_stage` take `slow_factor` on top."""

    spread: float = 0.2
    slow_stage: int | None = None
    slow_factor: float = 1.3

    def __post_init__(self) -> None:
        if not 0 <= self.spread < 1:
            raise ConfigError(f"spread is {self.spread} but must be at least 0 and below 1: 0.2 is 20 % either way")
        if not self.slow_factor > 0:
            raise ConfigError(f"slow_factor is {self.slow_factor} but must be above 0: 1.3 is a stage 30 % slower")


@dataclass(frozen=True, slots=True)
class Loss:
    """One way of running under several draws of noise, in seconds. `noise_free_s` is its makespan as predicted."""

    noise_free_s: float
    noisy_s: tuple[float, ...]

    @property
    def losses_s(self) -> tuple[float, ...]:
        return tuple(noisy - self.noise_free_s for noisy in self.noisy_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.losses_s)

    @property
    def p95_s(self) -> float:
        return float(np.percentile(self.losses_s, 95))


@dataclass(frozen=True, slots=True)
class Slack:
    """The two ways of running one schedule, under the same draws."""

    in_order: Loss
    readiness_first: Loss


def noisy_costs(costs: MicroBatchCosts, noise: Noise, *, seed: int, split: bool) -> MicroBatchCosts:
    """The costs as they turn out: a factor for each F and B, or under `split` for each F, I and W. Bytes stay.

    A function of its arguments, in whole nanoseconds. Errors: ConfigError for a slow stage that does not exist.
    """
    num_stages = costs.num_stages
    if noise.slow_stage is not None and not 0 <= noise.slow_stage < num_stages:
        raise ConfigError(f"slow stage {noise.slow_stage} does not exist: choose one of 0 to {num_stages - 1}")
    spread = round(noise.spread * _UNIT)
    factors = np.random.default_rng(seed).integers(_UNIT - spread, _UNIT + spread + 1, (3, *costs.forward_ns.shape))
    if noise.slow_stage is not None:
        factors[:, noise.slow_stage] = factors[:, noise.slow_stage] * round(noise.slow_factor * _UNIT) // _UNIT
    forward_ns = costs.forward_ns * factors[0] // _UNIT
    if not split:
        backward_ns, weight_ns = (ns * factors[1] // _UNIT for ns in (costs.backward_ns, costs.weight_ns))
    else:
        weight_ns = costs.weight_ns * factors[2] // _UNIT
        backward_ns = costs.input_ns * factors[1] // _UNIT + weight_ns
    return replace(costs, forward_ns=forward_ns, backward_ns=backward_ns, weight_ns=weight_ns)


def readiness_first(
    costs: MicroBatchCosts, stage_ranks: Sequence[int], *, memory_limit_bytes: int, split: bool
) -> PipelineSchedule:
    """What ranks run that take whatever is ready, in the order of the costs' columns, under the byte limit.

    Simulated on these costs, it is what such ranks do when times turn out so.
    Errors: PlanError where a micro-batch does not fit alone.
    """
    free = [memory_limit_bytes] * (max(stage_ranks) + 1)
    for rank, num_bytes in zip(stage_ranks, costs.static_bytes.tolist(), strict=True):
        free[rank] -= num_bytes
    taken_ns, schedule = dispatch(costs, READINESS_FIRST, stage_ranks, free, split=split)
    if taken_ns >= NEVER:
        raise PlanError(
            f"readiness-first dispatch is blocked by a limit of {memory_limit_bytes} B: raise it, or use smaller"
            " micro-batches"
        )
    return replace(schedule, name="readiness-first")


def dispatch(
    costs: MicroBatchCosts,
    rule: DispatchPolicy,
    stage_ranks: Sequence[int],
    free_bytes: Sequence[int],
    *,
    split: bool,
    short_stages: Sequence[int] = (),
    sample_pieces: Sequence[SamplePieces] = (),
) -> tuple[int, PipelineSchedule]:
    """Return what a rule makes of micro-batches in the order of the costs' columns: its makespan in ns (NEVER if it is
    blocked), and the schedule. `free_bytes` of each rank: its limit less what is static."""
    positions = list(range(costs.num_micro_batches))
    problem = Problem(
        stage_ranks=tuple(stage_ranks),
        free_bytes=tuple(free_bytes),
        split=split,
        working_in_backward=costs.working_in != "F",
        records=make_records([costs], split=split),
        shapes=np.array(positions, np.int32).reshape(-1, 1),
        policies=[rule],
        sample_pieces=tuple(sample_pieces),
        short_stages=tuple(short_stages),
    )
    state = problem.search([Cut(m, m + 1, 0) for m in positions], [[positions]], AnnealingSchedule(0, 0))
    if state.makespan_ns[0] >= NEVER:
        return NEVER, PipelineSchedule("blocked", ((),) * len(free_bytes), tuple(stage_ranks))
    (schedule,) = problem.make_schedules(state)
    return state.makespan_ns[0], schedule


def measure_slack(
    schedule: PipelineSchedule,
    costs: MicroBatchCosts,
    noise: Noise,
    *,
    memory_limit_bytes: int,
    seeds: Sequence[int],
) -> Slack:
    """Simulated losses under one draw a seed. Micro-batches are numbered in injection order, as planners number them.

    Errors: ConfigError without a seed; PlanError as `simulate_ns` and `readiness_first`.
    """
    if not seeds:
        raise ConfigError("slack needs at least one seed of noise: give seeds=range(20)")
    split = schedule.is_split

    def runs(priced: MicroBatchCosts) -> tuple[float, ...]:
        greedy = readiness_first(priced, schedule.stage_ranks, memory_limit_bytes=memory_limit_bytes, split=split)
        return compute_makespan_ns(schedule, priced) / 1e9, compute_makespan_ns(greedy, priced) / 1e9

    planned = runs(costs)
    noisy = [runs(noisy_costs(costs, noise, seed=seed, split=split)) for seed in seeds]
    return Slack(
        *(Loss(free_s, tuple(column)) for free_s, column in zip(planned, zip(*noisy, strict=True), strict=True))
    )
