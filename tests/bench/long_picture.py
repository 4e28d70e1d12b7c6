"""The README's picture of pieces: one batch of tests/bench/long.py, whole samples above pieces, on one time axis.

    python tests/bench/long_picture.py [--out FILE]

Llama 2 7B (TP8 PP4 DP2) on the data "tail", as simulated there: every rectangle is an action of a pipeline rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from long import SHARED, Case, floor_s, lengths, planned

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.schedules.actions import Action, Kind
from dynapipe_ext.schedules.step_plan import StepPlan

PICTURE = Path(__file__).resolve().parents[2] / ".github" / "pieces.svg"
CASE = Case("llama-2-7b", 8, 4, 2, "tail", 10**6)
LONG_TOKENS = 32 * 1024

# As on trace pages: blue forwards, orange backwards; the longer the sample, the darker.
FILLS = {Kind.FORWARD: ("#b9d7f5", "#5b9bdb", "#0d4685"), Kind.BACKWARD: ("#fbd9b4", "#ec9a4c", "#a34700")}
WIDTH, LEFT, RIGHT, BAR, ROW, PANE_GAP, HEAD = 1000, 72, 14, 13, 15, 16, 24


def picture(panes: Mapping[str, StepPlan], samples: Sequence[SampleLength], least_s: float) -> str:
    """An SVG of the plans of one batch, one above the other, with their makespans over the floor `least_s`."""
    scale = (WIDTH - LEFT - RIGHT) / max(plan.makespan_s for plan in panes.values())
    parts, top = [], 30
    for name, plan in panes.items():
        says = f"{name}: {plan.makespan_s:.1f} s, {plan.makespan_s / least_s:.2f} × the bound"
        parts.append(f'<text x="{LEFT}" y="{top + 15}" class="head">{says}</text>')
        rows_top = top + HEAD
        parts += _rows(plan, samples, rows_top, scale)
        top = rows_top + _height(plan) + PANE_GAP
    x = LEFT + least_s * scale
    parts.append(f'<path class="bound" d="M{x:.1f} 30V{top}"/><text x="{x + 4:.1f}" y="{top}">bound</text>')
    for second in range(0, int((WIDTH - LEFT - RIGHT) / scale) + 1):
        parts.append(f'<text x="{LEFT + second * scale:.1f}" y="{top + 16}" class="tick">{second} s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" role="img"'
        f' aria-label="{" over ".join(panes)}: the same batch on one time axis">\n'
        "<style>text{font:12px system-ui,sans-serif;fill:#5b6675}.head{font-weight:650;fill:#1b2330}"
        ".name{text-anchor:end}.tick{text-anchor:middle}.bound{stroke:#1b2330;stroke-dasharray:4 3}</style>\n"
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join([*_legend(), *parts]) + "\n</svg>\n"
    )


def _height(plan: StepPlan) -> int:
    return sum(len(schedule.ranks) * ROW + 5 for schedule in plan.schedules)


def _rows(plan: StepPlan, samples: Sequence[SampleLength], top: int, scale: float) -> Iterator[str]:
    """The ranks of every replica; actions of one colour are one path."""
    longest = max(sample.encoder for sample in samples)
    shade_of = [(s.encoder >= LONG_TOKENS) + (s.encoder == longest) for s in samples]
    paths: dict[str, list[str]] = {fill: [] for fills in FILLS.values() for fill in fills}
    for replica, schedule, trace in zip(plan.batch.replicas, plan.schedules, plan.traces, strict=True):
        shades = [max(shade_of[sample.index] for sample in m.samples) for m in replica.micro_batches]
        for rank in range(len(schedule.ranks)):
            y = top + rank * ROW
            yield f'<path d="M{LEFT} {y}h{WIDTH - LEFT - RIGHT}v{BAR}H{LEFT}z" fill="#f3f5f8"/>'
            yield f'<text x="{LEFT - 7}" y="{y + 11}" class="name">dp{replica.dp_rank} pp{rank}</text>'
            for span in trace.of_rank(rank):
                action = Action.parse(span.label)
                x, end = (round(LEFT + at_s * scale, 1) for at_s in (span.start_s, span.end_s))
                fill = FILLS[action.kind][shades[action.micro_batch]]
                paths[fill].append(f"M{x:g} {y}H{end:g}v{BAR}H{x:g}z")
        top += len(schedule.ranks) * ROW + 5
    for fill, path in paths.items():
        if path:
            yield f'<path fill="{fill}" stroke="#fff" stroke-width=".15" d="{"".join(path)}"/>'


def _legend() -> Iterator[str]:
    names = ("short samples", "of 32k and 64k tokens", "the one of 128k")
    x = LEFT
    for shade, name in enumerate(names):
        for fills in FILLS.values():
            yield f'<rect x="{x}" y="8" width="20" height="11" fill="{fills[shade]}"/>'
            x += 22
        yield f'<text x="{x + 4}" y="18">{name}</text>'
        x += 36 + 7 * len(name)
    yield f'<text x="{WIDTH - RIGHT}" y="18" class="name">blue forwards, orange backwards</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    samples = lengths(CASE, SHARED)
    whole, cut = (planned(CASE.costs, samples, pieces)[0] for pieces in ("off", "auto"))
    assert whole is not None
    assert cut is not None
    panes = {"Whole samples": whole, "Long samples in pieces": cut}
    args.out.write_text(picture(panes, samples, floor_s(CASE, samples)), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
