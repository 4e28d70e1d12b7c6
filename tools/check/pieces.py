"""Long samples in pieces, in a plan's file: what is wrong with the pieces, and with the order they run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from dynapipe_ext.tools.check.plan_file import ReplicaFile, ShapeFile

PlainAction = tuple[int, str, int]  # stage, kind, micro-batch


def used_samples(replica: ReplicaFile) -> list[int]:
    """The samples of a replica as often as they are trained; pieces are parts of one training."""
    whole = [s for m in replica.micro_batches for s in m.samples[0 if m.piece is None else 1 :]]
    return whole + sorted({m.samples[0] for m in replica.micro_batches if m.piece is not None and m.samples})


def piece_faults(
    replica: ReplicaFile, ranks: Sequence[Sequence[PlainAction]], lengths: Mapping[int, tuple[int, int]] | None
) -> list[str]:
    """Why the pieces of a replica are no samples, or run in an order in which gradients are wrong.

    On every stage forwards go from the first piece to the last, and backwards (B, or I) from the last to the first.
    """
    faults = []
    place = {
        (stage, "F" if kind == "F" else "G", m): at
        for actions in ranks
        for at, (stage, kind, m) in enumerate(actions)
        if kind != "W"
    }
    stages = sorted({stage for actions in ranks for stage, _, _ in actions})
    for sample, pieces in sorted(_pieces(replica.micro_batches).items()):
        end = 0
        for first, last, m in pieces:
            if first != end or last <= first:
                faults.append(
                    f"micro-batch {m} carries positions {first} to {last} of sample {sample} but the pieces before it"
                    f" on its replica end at {end}"
                )
            end = last
        if lengths is not None and sample in lengths and lengths[sample] != (end, 0):
            encoder, decoder = lengths[sample]
            faults.append(f"the pieces of sample {sample} end at {end} but it has {encoder} + {decoder} positions")
        for (_, _, earlier), (_, _, later) in pairwise(pieces):
            for stage in stages:
                for kind, one, other in (("F", earlier, later), ("G", later, earlier)):
                    at, then = place.get((stage, kind, one)), place.get((stage, kind, other))
                    if at is not None and then is not None and at > then:
                        what = "forward" if kind == "F" else "backward"
                        faults.append(
                            f"on stage {stage} micro-batch {other} runs {what} before micro-batch {one}, of the same"
                            f" sample {sample}: gradients would be wrong in silence"
                        )
    return faults


def _pieces(micro_batches: Sequence[ShapeFile]) -> dict[int, list[tuple[int, int, int]]]:
    """Of each cut sample: (start, end, micro-batch) of its pieces in turn."""
    pieces_of: dict[int, list[tuple[int, int, int]]] = {}
    for number, m in enumerate(micro_batches):
        if m.piece is not None and m.samples:
            pieces_of.setdefault(m.samples[0], []).append((*m.piece, number))
    return {sample: sorted(pieces) for sample, pieces in pieces_of.items()}
