"""What the proof of a plan's instructions adds to its verdict: the buffers in flight that must fit beside the peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynapipe_ext.tools.check.check_plan import Compared, Verdict
from dynapipe_ext.tools.check.plan_file import PlanFile


def with_buffers(
    verdict: Verdict, plan: PlanFile, in_flight_bytes: Sequence[Sequence[int]], *, memory_limit_bytes: int
) -> Verdict:
    """The verdict on a plan that runs to its end, with the most bytes in flight [dp_rank][pp_rank] as proven."""
    figures, faults = [], []
    for number, (replica, peaks, proven_bytes) in enumerate(
        zip(plan.replicas, verdict.peak_bytes, in_flight_bytes, strict=True)
    ):
        where = f"replica {number}"
        if replica.in_flight_bytes and len(replica.in_flight_bytes) != len(proven_bytes):
            faults.append(
                f"{where}: bytes in flight of {len(replica.in_flight_bytes)} ranks are claimed but there are"
                f" {len(proven_bytes)}"
            )
            continue
        for rank, num_bytes in enumerate(proven_bytes):
            claimed = replica.in_flight_bytes[rank] if replica.in_flight_bytes else None
            figures.append(Compared(where, f"bytes in flight on pipeline rank {rank}", claimed, num_bytes, "B"))
            if claimed is not None and claimed != num_bytes:
                faults.append(
                    f"{where}: pipeline rank {rank} is claimed to have {claimed} B in flight at most but has"
                    f" {num_bytes} B"
                )
            if (peak := peaks[rank] + num_bytes) > memory_limit_bytes:
                faults.append(
                    f"{where}: pipeline rank {rank} needs {peak} B at its peak with buffers in flight but the limit is"
                    f" {memory_limit_bytes} B: plan it again, or raise the limit"
                )
    return replace(verdict, figures=(*verdict.figures, *figures), faults=(*verdict.faults, *faults))
