"""Spans of the traced steps, from all ranks to rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.timeline import Span

Spans = Mapping[int, Sequence[Span]]  # by the step's number from 0; seconds from the first start on any rank


class TracedSpans:
    """A listener that keeps one rank's spans of the traced steps."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[Span, ...]] = {}

    def step_done(self, done: StepDone) -> None:
        if done.spans:
            self.spans[done.step] = done.spans

    def close(self) -> None: ...


def give_spans(store: Store, rank: int, spans: Spans) -> None:
    """Leave a rank's spans in the run's store."""
    store.put(_key(rank), json.dumps({step: [asdict(span) for span in of] for step, of in spans.items()}).encode())


def take_spans(store: Store, world_size: int, timeout_s: float) -> list[Spans]:
    """Those of all ranks, in rank order; the store holds them no longer. Errors: StoreError after `timeout_s`."""
    everyone = [json.loads(store.get(_key(rank), timeout_s)) for rank in range(world_size)]
    store.delete(*map(_key, range(world_size)))
    return [
        {int(step): [Span(**{**span, "shape": tuple(span["shape"])}) for span in of] for step, of in raw.items()}
        for raw in everyone
    ]


def _key(rank: int) -> str:
    return f"spans/{rank}"
