"""Reads the trace file of a run, which the project itself only writes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynapipe_ext.batch.micro_batches import Piece
from dynapipe_ext.timeline import Span, Trace
from dynapipe_ext.tools.show.timeline import FORMAT, TraceRecord

_COLUMNS = ("rank", "label", "shape", "start_ns", "end_ns", "cpu_ns", "bytes")


def read_trace_file(path: Path) -> TraceRecord:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["format"] == FORMAT
    return TraceRecord(
        measured=tuple(map(_trace, data["measured"])),
        simulated=tuple(map(_trace, data["simulated"])),
        title=data["title"],
        subtitle=data["subtitle"],
        notes=tuple(data["notes"]),
        rank_names={int(rank): name for rank, name in data["rank_names"].items()},
    )


def _trace(data: Any) -> Trace:
    names = [field.name for field in fields(Piece)]
    pieces = [Piece(**dict(zip(names, values, strict=True))) for values in data.get("pieces", ())]
    carried = data.get("piece", [None] * len(data["rank"]))
    return Trace(
        tuple(
            Span(
                rank=rank,
                label=data["labels"][label],
                start_s=start_ns / 1e9,
                end_s=end_ns / 1e9,
                cpu_s=cpu_ns / 1e9,
                num_bytes=num_bytes,
                shape=tuple(data["shapes"][shape]),
                piece=None if place is None else pieces[place],
            )
            for rank, label, shape, start_ns, end_ns, cpu_ns, num_bytes, place in zip(
                *(data[name] for name in _COLUMNS), carried, strict=True
            )
        ),
        data["name"],
    )
