"""Spans of the traced steps, from all ranks to rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from dynapipe_ext.executor.events import StepDone
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


def spans_to_bytes(spans: Spans) -> bytes:
    return json.dumps({step: [asdict(span) for span in of] for step, of in spans.items()}).encode()


def spans_from_bytes(data: bytes) -> Spans:
    raw = json.loads(data)
    return {int(step): [Span(**{**span, "shape": tuple(span["shape"])}) for span in of] for step, of in raw.items()}
