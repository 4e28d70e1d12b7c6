"""Steps of a data loader read ahead of their consumer, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.plans.source import PlanSource
from dynapipe_ext.executor.plans.step_positions import StepPosition
from dynapipe_ext.executor.protocols import Batch

_SLICE_S = 0.5  # how late Ctrl-C may be noticed that comes as a wait begins: Python looks for it only around one


@dataclass(frozen=True, slots=True)
class ReadStep:
    """One step, ready; the times bound the interval in which the reader waited for its plan."""

    micro_batches: list[Batch]
    plan: ExecutionPlan
    plan_asked_s: float
    planned_s: float


def read_ahead(
    read: Callable[[StepPosition], ReadStep], places: Sequence[StepPosition], source: PlanSource
) -> Generator[ReadStep, None, None]:
    """`read(place)` for each place, the next one in a thread while the consumer works on the current one."""
    with ThreadPoolExecutor(1, thread_name_prefix="dynapipe-loader") as pool:
        try:  # Ctrl-C may already come while the thread starts
            pending = pool.submit(read, places[0])
            for following in places[1:]:
                item = _awaited(pending)
                pending = pool.submit(read, following)
                yield item
            yield _awaited(pending)
        finally:
            source.close()  # else leaving the pool would wait for a plan that nobody wants any more


def _awaited(pending: Future[ReadStep]) -> ReadStep:
    while not wait([pending], _SLICE_S).done:
        pass
    return pending.result()
