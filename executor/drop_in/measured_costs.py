"""Costs of a model that nobody can count, from a step of it: what each action took and what its forward keeps."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.timeline import Span

STEPS_BEFORE = 1  # whose times say how long it takes to begin: what is loaded and allocated comes then
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_BYTES_OF_STATES = 18  # a parameter, by Adam in mixed precision, where no device says what is held
_ROUNDING = 1e-9  # of a fit, on one processor or another: it is no byte more


@dataclass(frozen=True, slots=True)
class StageRow:
    """A micro-batch on a stage of one rank: positions, positions that attend x attended to, seconds, bytes kept."""

    stage: int
    tokens: int
    squares: int
    forward_s: float
    backward_s: float
    stored_bytes: int

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> StageRow:
        stage, tokens, squares, forward_s, backward_s, stored_bytes = numbers
        return cls(int(stage), int(tokens), int(squares), forward_s, backward_s, int(stored_bytes))

    @property
    def numbers(self) -> list[float]:
        return [self.stage, self.tokens, self.squares, self.forward_s, self.backward_s, self.stored_bytes]


@dataclass(slots=True)
class StepMeasurement:
    """Recorder of one step of a rank."""

    plan: ExecutionPlan
    device: torch.device
    spans: list[Span] = field(default_factory=list)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    @property
    def clock(self) -> Callable[[], float]:
        if self.device.type != "cuda":
            return time.perf_counter

        def clock() -> float:
            torch.cuda.synchronize(self.device)
            return time.perf_counter()

        return clock

    def rows(self) -> list[StageRow]:
        """Of each micro-batch and stage. On a CPU, whose cores ranks may share, seconds are those of the CPU."""
        seconds: dict[tuple[int, int, str], float] = defaultdict(float)
        stored: dict[tuple[int, int], int] = {}
        held = 0
        for span in self.spans:
            stage, letter, micro_batch = re.fullmatch(_ACTION, span.label).groups()  # type: ignore[union-attr]
            place = int(stage), int(micro_batch)
            seconds[(*place, "F" if letter == "F" else "B")] += (
                span.cpu_s if self.device.type == "cpu" else span.duration_s
            )
            if letter == "F":
                stored[place] = max(0, span.num_bytes - held)
            held = span.num_bytes
        return [
            StageRow(
                stage,
                *count_positions(self.plan.micro_batches[micro_batch]),
                seconds[stage, micro_batch, "F"],
                seconds[stage, micro_batch, "B"],
                num_bytes,
            )
            for (stage, micro_batch), num_bytes in stored.items()
        ]


def with_measured_costs(
    pipeline: MegatronPipeline, measurement: StepMeasurement, *, longest: int, num_parameters: int
) -> MegatronPipeline:
    """The pipeline with costs of its model for samples of up to `longest` positions. Recomputation, whose costs were
    not measured, is chosen no more. `num_parameters` are this rank's. A collective call."""
    if pipeline.device.type == "cuda":
        static_bytes = int(torch.cuda.memory_allocated(pipeline.device))
    else:
        static_bytes = _BYTES_OF_STATES * num_parameters
    own = [static_bytes, [row.numbers for row in measurement.rows()]]
    of_ranks = gather_json(own, pipeline.device)
    fitted: Any = None
    if dist.get_rank() == 0:  # the others take its numbers, whatever processors they have
        rows = [StageRow.of_numbers(numbers) for _, rows in of_ranks for numbers in rows]
        static_bytes = max(int(one) for one, _ in of_ranks)
        fitted = costs_of_rows(rows, pipeline.topology.num_stages, longest=longest, static_bytes=static_bytes).to_json()
    costs = TokenCosts.from_json(gather_json(fitted, pipeline.device)[0])
    return replace(pipeline, costs=costs, counts_memory=True, recompute=pipeline.recompute or "none")


def costs_of_rows(rows: Sequence[StageRow], num_stages: int, *, longest: int, static_bytes: int) -> TokenCosts:
    """Costs fitted to measured rows of every stage. Times are the slowest stage's polynomial, those of other stages in
    proportion. Bytes are those that the fullest stage keeps of a position in a sample of `longest`.

    Positions that attend weigh with their number where bytes grow with it (attention that keeps its scores).
    """
    by_stage = [[row for row in rows if row.stage == stage] for stage in range(num_stages)]
    means = [math.fsum(row.forward_s + row.backward_s for row in own) / len(own) for own in by_stage]
    slowest = by_stage[max(range(num_stages), key=means.__getitem__)]
    table = np.array([[1.0, row.tokens, row.squares] for row in slowest])
    overhead_s, token_s, square_s = _least_squares(table, np.array([row.forward_s for row in slowest]))
    forward_s = math.fsum(row.forward_s for row in slowest)
    a_position = 0.0
    for own in by_stage:
        stored_bytes = np.array([row.stored_bytes for row in own], float)
        linear, square = _least_squares(np.array([[row.tokens, row.squares] for row in own], float), stored_bytes)
        a_position = max(a_position, linear + square * longest, *(row.stored_bytes / row.tokens for row in own))
    return TokenCosts(
        num_stages,
        ns_per_token=max(1, round(1e9 * token_s)),
        ns_per_token_squared=1e9 * square_s,
        overhead_ns=max(1, round(1e9 * overhead_s)),
        backward_ratio=math.fsum(row.backward_s for row in slowest) / forward_s if forward_s else 2.0,
        bytes_per_token=math.ceil(a_position * (1 - _ROUNDING)),
        static_bytes=static_bytes,
        stage_scale=tuple(mean / max(means) for mean in means),
    )


def _least_squares(table: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> list[float]:
    """Coefficients of at least 0 whose squared errors are least: of all choices of columns, the best that has none
    below 0."""
    count = table.shape[1]
    best, least = [0.0] * count, math.inf
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            factors, *_ = np.linalg.lstsq(table[:, columns], values, rcond=None)
            error = float(((table[:, columns] @ factors - values) ** 2).sum())
            if (factors >= 0).all() and error < least * (1 - _ROUNDING):
                least = error
                best = [0.0] * count
                for column, one in zip(columns, factors.tolist(), strict=True):
                    best[column] = one
    return best
