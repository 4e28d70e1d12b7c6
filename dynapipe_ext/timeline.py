"""What happened when: the one format of simulated and measured runs, so their difference is a subtraction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynapipe_ext.batch.micro_batches import Piece

_MICRO_BATCH = re.compile(r"[FBIW]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action on one rank. `label` is the action as text ("2F0"); `cpu_s` is CPU time (equal to the duration in a
    simulation); `num_bytes` is memory held right after it; `shape` is (rows, encoder_len, decoder_len); `piece`
    is what its micro-batch carries of a cut sample."""

    rank: int
    label: str
    start_s: float
    end_s: float
    cpu_s: float = 0.0
    num_bytes: int = 0
    shape: tuple[int, ...] = ()
    piece: Piece | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one step over a set of ranks; times count from the start of the step."""

    spans: tuple[Span, ...]
    name: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def makespan_s(self) -> float:
        """First start to last end."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def busy_s(self) -> float:
        return sum(span.duration_s for span in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over (ranks x makespan)."""
        whole = len(self.ranks) * self.makespan_s
        return 1.0 - self.busy_s / whole if whole > 0 else 0.0

    def by_rank(self) -> Mapping[int, tuple[Span, ...]]:
        """The spans of each rank that has any, in their order."""
        spans: dict[int, list[Span]] = {}
        for span in self.spans:
            spans.setdefault(span.rank, []).append(span)
        return {rank: tuple(own) for rank, own in spans.items()}

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Trace:
        """The same spans with the shape of the micro-batch that their label names ("2F0" is micro-batch 0)."""
        return Trace(
            tuple(replace(span, shape=shapes[int(_MICRO_BATCH.split(span.label)[1])]) for span in self.spans), self.name
        )

    def with_pieces(self, pieces: Mapping[int, Piece]) -> Trace:
        """The same spans of one replica with the piece that the micro-batch of their label carries, if any."""
        of = [pieces.get(int(_MICRO_BATCH.split(span.label)[1])) for span in self.spans]
        return Trace(tuple(replace(span, piece=piece) for span, piece in zip(self.spans, of, strict=True)), self.name)

    def with_pieces_of(self, planned: Trace) -> Trace:
        """The same spans with the pieces that a trace of the same step has on the same ranks, action by action."""
        pieces = {(span.rank, span.label): span.piece for span in planned.spans}
        return Trace(tuple(replace(span, piece=pieces.get((span.rank, span.label))) for span in self.spans), self.name)

    def on_ranks(self, rank_of: Sequence[int]) -> Trace:
        """The same spans with ranks renamed through `rank_of`."""
        return Trace(tuple(replace(span, rank=rank_of[span.rank]) for span in self.spans), self.name)


def merge(traces: Iterable[Trace], name: str = "") -> Trace:
    """Spans of several ranks as one trace, in time order."""
    spans = [span for trace in traces for span in trace.spans]
    return Trace(tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.label))), name)


def chrome_events(trace: Trace, process: int = 0) -> list[dict[str, Any]]:
    """Complete events of the Chrome trace format (microseconds), which Perfetto reads as well."""
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": trace.name or "dynapipe"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in trace.ranks
        ),
        *(
            {
                "ph": "X",
                "name": span.label,
                "pid": process,
                "tid": span.rank,
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(span.duration_s * 1e6, 3),
                "args": {"cpu_s": span.cpu_s, "bytes": span.num_bytes, "shape": list(span.shape)}
                | ({"piece": str(span.piece)} if span.piece else {}),
            }
            for span in trace.spans
        ),
    ]
