"""The picture of public workloads: makespan over work of each rule, by data and plane, from results/public.json.

    python tests/bench/public_picture.py [--out FILE]

Llama 2 7B. A bar that would be higher than the picture ends in its figure. The dashed line is the work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from public import OURS, PEERS, PLANES, RESULT

PICTURE = Path(__file__).resolve().parents[2] / ".github" / "width.svg"
MODEL, TOP = "7B", 3.0
WIDTH, LEFT, HEAD, HEIGHT, FOOT = 1000, 44, 54, 210, 40
FILLS = {PEERS[0]: "#c9d2dd", PEERS[1]: "#98a7ba", PEERS[2]: "#ec9a4c", OURS: "#3f83cf"}
NAMES = {
    PEERS[0]: "best packed rival",
    PEERS[1]: "verl's balance, 1F1B",
    PEERS[2]: "dynamic context parallelism, 1F1B, free communication",
    OURS: "ours, width auto",
}
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#5b6675}.head{font-weight:650;fill:#1b2330;text-anchor:middle}"
    ".mid{text-anchor:middle}.end{text-anchor:end}.over{font-size:10px}.work{stroke:#1b2330;stroke-dasharray:4 3}"
    ".page{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#9aa6b5}.head{fill:#e7ebf0}.work{stroke:#e7ebf0}"
    ".page{fill:#12161c}}</style>\n"
)


def drawn(rows: list[Mapping[str, Any]]) -> str:
    found = {(row["data"], row["plane"]): row["steps"] for row in rows if row["model"] == MODEL}
    names = list(dict.fromkeys(data for data, _ in found if (data, PLANES[0]) in found))
    parts, pane = [*_legend(), *_axis()], (WIDTH - LEFT) / len(names)
    for i, data in enumerate(names):
        left = LEFT + i * pane
        parts.append(f'<text x="{left + pane / 2:.0f}" y="{HEAD - 8}" class="head">{data}</text>')
        for j, plane in enumerate(PLANES):
            at = left + (j + 0.5) * pane / len(PLANES)
            parts.append(f'<text x="{at:.0f}" y="{HEAD + HEIGHT + 16}" class="mid">DP{plane}</text>')
            parts += _bars(found[data, plane], at, 0.8 * pane / len(PLANES) / len(FILLS))
    label = "makespan over work of four rules, by data and data parallel ranks"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEAD + HEIGHT + FOOT}" role="img"'
        f' aria-label="{label}">\n{_STYLE}<rect width="100%" height="100%" class="page"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _y(over_work: float) -> float:
    return HEAD + HEIGHT * (1 - min(over_work, TOP) / TOP)


def _bars(steps: Mapping[str, Any], middle: float, width: float) -> Iterator[str]:
    for k, (rule, fill) in enumerate(FILLS.items()):
        x, step = middle + (k - len(FILLS) / 2) * width, steps[rule]
        if step is None:
            continue
        over, y = step["over_work"], _y(step["over_work"])
        yield f'<path d="M{x:.1f} {HEAD + HEIGHT}V{y:.1f}h{width - 1:.1f}V{HEAD + HEIGHT}z" fill="{fill}"/>'
        if over > TOP:
            yield (
                f'<text transform="translate({x + width / 2 + 3:.1f} {y + 30:.0f}) rotate(-90)" class="over">{over:.1f}'
                "</text>"
            )


def _axis() -> Iterator[str]:
    for level in (1, 2, 3):
        yield f'<text x="{LEFT - 8}" y="{_y(level) + 4:.0f}" class="end">{level} ×</text>'
    yield f'<path class="work" d="M{LEFT} {_y(1):.1f}H{WIDTH}"/>'


def _legend() -> Iterator[str]:
    x = LEFT
    for rule, fill in FILLS.items():
        yield f'<rect x="{x}" y="8" width="20" height="11" fill="{fill}"/>'
        yield f'<text x="{x + 25}" y="18">{NAMES[rule]}</text>'
        x += 52 + round(6.4 * len(NAMES[rule]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    args.out.write_text(drawn(json.loads(RESULT.read_text())["rows"]), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
