"""Which rank trains which samples in each step of an epoch, as a value, and how good that is."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dynapipe_ext.batching.sampling.even_steps import least_cost
from dynapipe_ext.batching.sampling.fill import Steps, fill_steps, joined, place_rest
from dynapipe_ext.batching.sampling.padded_steps import fill_padded, padded_costs
from dynapipe_ext.batching.sampling.spread import spread, unfed
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import NO_ARRAY, DataError, PlanError

Objective = Literal["tokens", "quadratic", "padded"]
Last = Literal["spread", "pad", "carry"]

_FULL = 2048  # one part in so many of the cap stays free in "full" steps
_LOOKED_AT = 1.001  # the gap of steps this even is not worked out
_FILL = (0.984, 0.95, 0.9, 0.75, 0.0)  # how full other samples make a step of those that are due, as far as they fit
_WINDOW = 16  # steps of samples from which those others are chosen if they should be of like length


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """How samples are filled into steps: at most `max_tokens` a rank and step, balanced by `objective`.

    `last`: the samples that do not fill a step are spread over all steps ("spread"), trained in a last step that
    repeats others ("pad"), or left for the next epoch ("carry"), whose first steps train them.
    """

    num_replicas: int
    max_tokens: int
    objective: Objective
    last: Last


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Samples of each rank and step: `samples[starts[b] : starts[b + 1]]` with b = step x num_replicas + rank.

    `rest` are samples left for the next epoch, in order; `num_repeated` counts samples trained a second time.
    """

    samples: IntArray
    starts: IntArray
    rest: IntArray
    num_replicas: int
    num_repeated: int = 0

    @property
    def num_steps(self) -> int:
        return (len(self.starts) - 1) // self.num_replicas

    def batch(self, step: int, rank: int) -> list[int]:
        """Samples of one rank in one step."""
        number = step * self.num_replicas + rank
        samples: list[int] = self.samples[self.starts[number] : self.starts[number + 1]].tolist()
        return samples

    def trained(self, num_steps: int) -> IntArray:
        """Samples of the first steps, over all ranks."""
        return self.samples[: self.starts[num_steps * self.num_replicas]]

    def to_bytes(self) -> bytes:
        """The plan as an npz file, for one rank to plan and the others to receive."""
        file = io.BytesIO()
        scalars = np.array([self.num_replicas, self.num_repeated], np.int64)
        np.savez(file, samples=self.samples, starts=self.starts, rest=self.rest, scalars=scalars)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> EpochPlan:
        """The plan that `to_bytes` wrote. Raises DataError for anything else."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                num_replicas, num_repeated = file["scalars"].tolist()
                return cls(file["samples"], file["starts"], file["rest"], num_replicas, num_repeated)
        except (*NO_ARRAY, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{len(data)} bytes are no epoch plan ({error}): share what to_bytes gave") from error


def plan_epoch(order: IntArray, tokens: IntArray, costs: IntArray, rule: StepRule, *, num_first: int = 0) -> EpochPlan:
    """Return the plan of samples in the given order; `tokens` and `costs` are by sample. A pure function.

    The first `num_first` of the order were left before: with "carry" the first steps train them, so that none is left
    again. No step has a sample twice.

    Raises PlanError if some rank would have no sample in a step, naming the numbers.
    """
    by_place, cost = tokens[order], costs[order]
    num_ranks = rule.num_replicas
    if len(order) < num_ranks and rule.last == "spread":
        raise PlanError(
            f"{len(order)} samples cannot feed {num_ranks} ranks: use fewer ranks, or last='pad' to repeat some"
        )
    if rule.last == "carry":
        due = _carried_steps(order, by_place, cost, rule, num_first)
        rest = np.setdiff1d(np.arange(len(order), dtype=np.int64), np.concatenate([due.places, due.left]))
        fresh = _ordinary_steps(by_place[rest], cost[rest], rule)
        left = np.sort(np.concatenate([due.left, rest[fresh.left]]))
        steps = joined([due, Steps(rest[fresh.places], fresh.starts, left)], left)
    else:
        steps = _ordinary_steps(by_place, cost, rule)
    repeated = 0
    if rule.last == "pad" and len(steps.left):
        steps, repeated = _padded_up(steps, by_place, cost, rule)
    return EpochPlan(order[steps.places], steps.starts, order[steps.left], num_ranks, repeated)


def _ordinary_steps(tokens: IntArray, costs: IntArray, rule: StepRule) -> Steps:
    """Return steps of samples none of which is due; unless they are spread, what would not fill a step is left."""
    if rule.objective == "padded":
        all_of_them = rule.last == "spread"
        steps = fill_padded(tokens, num_ranks=rule.num_replicas, cap=rule.max_tokens, all_of_them=all_of_them)
        if all_of_them and len(steps.left):
            raise unfed(len(tokens), (len(steps.starts) - 1) // rule.num_replicas + 1, rule.num_replicas)
        return steps
    if rule.last == "spread":
        return spread(tokens, costs, num_ranks=rule.num_replicas, cap=rule.max_tokens)
    return _full_steps(tokens, costs, rule)


def _full_steps(tokens: IntArray, costs: IntArray, rule: StepRule) -> Steps:
    """Full steps only (less so if samples are too long to fill them); what is left would not fill another."""
    target = rule.num_replicas * (rule.max_tokens - rule.max_tokens // _FULL)
    parts: list[Steps] = []
    left = np.arange(len(tokens), dtype=np.int64)
    left_tokens, left_costs = tokens, costs
    while len(left) >= rule.num_replicas and (num_steps := int(left_tokens.sum()) // target):
        part = fill_steps(
            left_tokens,
            left_costs,
            num_steps=min(num_steps, len(left) // rule.num_replicas),
            num_ranks=rule.num_replicas,
            cap=rule.max_tokens,
            target=target,
        )
        parts.append(Steps(left[part.places] if parts else part.places, part.starts, left[part.left]))
        left = left[part.left]
        left_tokens, left_costs = tokens[left], costs[left]
    return joined(parts, left)


def _carried_steps(order: IntArray, tokens: IntArray, costs: IntArray, rule: StepRule, num_first: int) -> Steps:
    """Return steps of the samples that the last epoch left, and of those that the order has twice, filled up with
    others of the order; left are those for which the order has too few samples to feed all ranks."""
    rest = np.arange(len(order), dtype=np.int64)
    parts: list[Steps] = []
    left = [np.zeros(0, np.int64)]
    due = _first_ones(order, rest[:num_first])
    while len(due):
        others = np.setdiff1d(rest, due, assume_unique=True)
        others = _first_ones(order, others[~np.isin(order[others], order[due])])
        if len(due) + len(others) < rule.num_replicas:
            left.append(due)
            rest, due = np.setdiff1d(rest, due, assume_unique=True), due[:0]
        else:
            step, due = _filled_up(due, others, tokens, costs, rule, _FILL)
            parts.append(step)
            rest = np.setdiff1d(rest, step.places, assume_unique=True)
        if not len(due):
            first = _first_ones(order, rest)
            twice = np.setdiff1d(rest, first, assume_unique=True)
            due = first[np.isin(order[first], order[twice])]
    return joined(parts, np.sort(np.concatenate(left)))


def _first_ones(order: IntArray, places: IntArray) -> IntArray:
    """Return the places, in order, of which no earlier one has the same sample."""
    return places[np.sort(np.unique(order[places], return_index=True)[1])]


def _padded_up(steps: Steps, tokens: IntArray, costs: IntArray, rule: StepRule) -> tuple[Steps, int]:
    """Return the left samples in last steps, filled up with samples from the start of the order, and how many these
    are."""
    parts, left, repeated = [steps], steps.left, 0
    while len(left):
        others = np.setdiff1d(np.arange(len(tokens), dtype=np.int64), left, assume_unique=True)
        others = others if len(others) else left
        last, left_now = _filled_up(left, others, tokens, costs, rule, _FILL if rule.objective != "padded" else (0.0,))
        repeated += len(last.places) - (len(left) - len(left_now))
        parts.append(Steps(last.places, last.starts, left_now))
        left = left_now
    return joined(parts, left), repeated


def _filled_up(
    due: IntArray, others: IntArray, tokens: IntArray, costs: IntArray, rule: StepRule, shares: Sequence[float]
) -> tuple[Steps, IntArray]:
    """Return one step of places that are due and of as many others, the first ones, as one of the `shares` of its room
    admits, ever fewer until no due one lacks room; and the due ones that are left. Others too few for all ranks are
    repeated."""
    room_of_step = rule.num_replicas * rule.max_tokens
    if rule.objective == "padded":  # of the first ones those of like length, which pad least
        near = others[: max(rule.num_replicas, int(np.searchsorted(np.cumsum(tokens[others]), _WINDOW * room_of_step)))]
        others = near[np.argsort(np.abs(tokens[near] - np.median(tokens[due])), kind="stable")]
    sums = np.cumsum(tokens[others])
    for share in shares:
        room = int(share * room_of_step) - int(tokens[due].sum())
        wanted = max(int(np.searchsorted(sums, room, side="right")), rule.num_replicas - len(due))
        places = np.concatenate([due, np.resize(others, wanted)])
        step = _one_step(tokens[places], costs[places], rule)
        left = due[step.left[step.left < len(due)]]
        if not len(left):
            break
    return Steps(places[step.places], step.starts, left), left


def _one_step(tokens: IntArray, costs: IntArray, rule: StepRule) -> Steps:
    """One step of what fits; every rank has a sample."""
    if rule.objective != "padded":
        target = max(1, int(tokens.sum()))
        steps = fill_steps(tokens, costs, num_steps=1, num_ranks=rule.num_replicas, cap=rule.max_tokens, target=target)
        return place_rest(steps, tokens, cap=rule.max_tokens)
    # Longest first, each group as long as it fits: at most one group a rank, which a few samples more may need.
    filled = fill_padded(tokens, num_ranks=rule.num_replicas, cap=rule.max_tokens, all_of_them=True)
    end = int(filled.starts[rule.num_replicas])
    left = np.sort(np.concatenate([filled.left, filled.places[end:]]))
    return Steps(filled.places[:end], filled.starts[: rule.num_replicas + 1], left)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMetrics:
    """How well an epoch is packed and balanced.

    efficiency = tokens over steps x ranks x cap; utilization = tokens over the sum over steps of (largest rank's tokens
    x ranks); padding_efficiency = tokens over rows x longest; L2 lag = sqrt(max - min over ranks of sum(len^2)) of a
    step; cost_ratio = largest over mean cost of the ranks in a step; cost_excess = the same over
    max(1, largest sample's cost / mean cost), which no assignment of that step could beat; cost_gap = the largest cost
    over `least_cost`, which is more where the dearest sample has to lie in a full batch.
    """

    num_steps: int
    num_samples: int
    num_repeated: int
    num_left: int
    tokens: int
    efficiency: float
    utilization: float
    padding_efficiency: float
    l2_lag_mean: float
    l2_lag_max: float
    cost_ratio_mean: float
    cost_ratio_max: float
    cost_excess_mean: float
    cost_excess_max: float
    cost_gap_mean: float
    cost_gap_max: float


def measure(plan: EpochPlan, tokens: IntArray, costs: IntArray | None, max_tokens: int) -> SamplerMetrics:
    """The metrics of a plan; `costs` by sample, or None where a batch costs its padded tokens."""
    if not plan.num_steps:
        raise DataError(f"the plan has no step to measure: {len(plan.rest)} samples wait for the next epoch")
    shape = (-1, plan.num_replicas)
    lengths = tokens[plan.samples]
    used = np.add.reduceat(lengths, plan.starts[:-1]).reshape(shape)
    squares = np.add.reduceat(lengths * lengths, plan.starts[:-1]).reshape(shape)
    padded = padded_costs(lengths, plan.starts).reshape(shape)
    sample_costs = lengths if costs is None else costs[plan.samples]
    load = padded if costs is None else np.add.reduceat(sample_costs, plan.starts[:-1]).reshape(shape)
    largest = np.maximum.reduceat(sample_costs, plan.starts[:-1]).reshape(shape).max(axis=1)
    mean = np.maximum(load.mean(axis=1), 1e-9)
    ratio = load.max(axis=1) / mean
    excess = ratio / np.maximum(1.0, largest / mean)
    gap = excess.copy()
    for step in [] if costs is None else np.flatnonzero(excess > _LOOKED_AT).tolist():
        assert costs is not None
        of_step = plan.samples[plan.starts[step * plan.num_replicas] : plan.starts[(step + 1) * plan.num_replicas]]
        least = least_cost(tokens[of_step], costs[of_step], num_ranks=plan.num_replicas, cap=max_tokens)
        gap[step] = load[step].max() / least
    lag = np.sqrt((squares.max(axis=1) - squares.min(axis=1)).astype(np.float64))
    total = int(used.sum())
    return SamplerMetrics(
        num_steps=plan.num_steps,
        num_samples=len(plan.samples),
        num_repeated=plan.num_repeated,
        num_left=len(plan.rest),
        tokens=total,
        efficiency=total / (plan.num_steps * plan.num_replicas * max_tokens),
        utilization=total / (int(used.max(axis=1).sum()) * plan.num_replicas),
        padding_efficiency=total / int(padded.sum()),
        l2_lag_mean=float(lag.mean()),
        l2_lag_max=float(lag.max()),
        cost_ratio_mean=float(ratio.mean()),
        cost_ratio_max=float(ratio.max()),
        cost_excess_mean=float(excess.mean()),
        cost_excess_max=float(excess.max()),
        cost_gap_mean=float(gap.mean()),
        cost_gap_max=float(gap.max()),
    )


def plan_left(order: IntArray, tokens: IntArray, costs: IntArray, rule: StepRule, *, num_first: int = 0) -> EpochPlan:
    """`plan_epoch` of what is left of an epoch: none at all is fine, and some are repeated where they are too few."""
    if not len(order):
        none = np.zeros(0, np.int64)
        return EpochPlan(none, np.zeros(1, np.int64), none, rule.num_replicas)
    try:
        return plan_epoch(order, tokens, costs, rule, num_first=num_first)
    except PlanError:
        if rule.last != "spread":
            raise
        return plan_epoch(order, tokens, costs, replace(rule, last="pad"))


def left_after(
    order: IntArray,
    tokens: IntArray,
    costs: IntArray,
    rule: StepRule,
    segments: Sequence[tuple[int, int]],
    *,
    num_first: int = 0,
) -> IntArray:
    """What is left of the order after segments of (number of ranks, steps done).

    A job that went on with another number of ranks planned the samples that were left anew; so does this. Raises
    DataError for more steps than there are.
    """
    for num_replicas, num_steps in segments:
        plan = plan_left(order, tokens, costs, replace(rule, num_replicas=num_replicas), num_first=num_first)
        num_first = 0
        if num_steps > plan.num_steps:
            raise DataError(
                f"the state says that {num_steps} steps of {num_replicas} ranks were done but there are"
                f" {plan.num_steps}: it is of other lengths or settings"
            )
        trained = np.bincount(plan.trained(num_steps), minlength=len(tokens))
        order = _without(order, trained)
    return order


def _without(order: IntArray, trained: IntArray) -> IntArray:
    """The order less as many occurrences of each sample as were trained, the first ones first."""
    by_sample = np.argsort(order, kind="stable")
    ordered = order[by_sample]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.arange(len(order), dtype=np.int64) - first
    keep = np.zeros(len(order), np.bool_)
    keep[by_sample] = occurrence >= trained[ordered]
    return order[keep]
