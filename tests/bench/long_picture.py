"""The picture of pieces in the docs: one batch of tests/bench/long.py, whole samples above pieces, on one time axis.

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
from dynapipe_ext.schedules.actions import Kind
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.show.plan_drawing import LEFT, RIGHT, WIDTH, FillOf, Pane, drawn

PICTURE = Path(__file__).resolve().parents[2] / ".github" / "pieces.svg"
CASE = Case("llama-2-7b", 8, 4, 2, "tail", 10**6)
LONG_TOKENS = 32 * 1024

# As on trace pages: blue forwards, orange backwards; the longer the sample, the darker.
FILLS = {Kind.FORWARD: ("#b9d7f5", "#5b9bdb", "#0d4685"), Kind.BACKWARD: ("#fbd9b4", "#ec9a4c", "#a34700")}


def picture(plans: Mapping[str, StepPlan], samples: Sequence[SampleLength], least_s: float) -> str:
    """An SVG of the plans of one batch, one above the other, with their makespans over the floor `least_s`."""
    panes = {
        name: Pane(
            head=f"{name}: {plan.makespan_s:.1f} s, {plan.makespan_s / least_s:.2f} × the bound",
            replicas=plan.traces,
            fill_of=_fill_of(plan, samples),
        )
        for name, plan in plans.items()
    }
    return drawn(panes, _legend(), least_s=least_s)


def _fill_of(plan: StepPlan, samples: Sequence[SampleLength]) -> FillOf:
    """Darker, the longer the longest sample of the action's micro-batch."""
    longest = max(sample.encoder for sample in samples)
    shade_of = [(s.encoder >= LONG_TOKENS) + (s.encoder == longest) for s in samples]
    shades = {
        replica.dp_rank: [max(shade_of[sample.index] for sample in m.samples) for m in replica.micro_batches]
        for replica in plan.batch.replicas
    }
    return lambda dp_rank, action: FILLS[action.kind][shades[dp_rank][action.micro_batch]]


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
