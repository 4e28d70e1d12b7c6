"""Bytes and seconds of a head and its loss: whole logits beside slices of positions, and the longest sample that fits.

    python tests/bench/logits.py [--machine TEXT] [--vocab V] [--hidden-size H]

"row": one row of 32k tokens through norm, head and loss, forwards and backwards, each in a process of its own: the most
bytes beside what is there before and after (resident memory), and CPU seconds. "short": the same of 1,024 tokens, which
no plan slices, by the function that stages call (the least of three). "longest": the longest whole sample of
Llama 3 8B on TP2 PP4 in 72 GB by counted costs (long.py), over replicas, without and with heads in slices.
Writes results/logits.json; exit status 1 where a bar is missed: bytes of logits / 8.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders import provenance
from long import LIMIT_BYTES, Case
from proven import planned_step

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, sample_lengths
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

RESULT = Path(__file__).parent / "results" / "logits.json"
FORMAT = "dynapipe-logits/1"
ROW, SHORT, TIMES = 32 * 1024, HEAD_SLICE, 3
LEAST_TIMES_LESS = 8


def ran(tokens: int, vocab: int, hidden: int, *, slices: bool) -> tuple[int, float]:
    """The most resident bytes above those before, and CPU seconds, of a forward and a backward in this process."""
    import torch

    from dynapipe_ext.executor.stages.chunk_runner import HEAD_SLICE_KEY, HeadSlices
    from dynapipe_ext.executor.stages.sliced_head import head_loss_sum

    torch.manual_seed(0)
    x, norm = torch.randn(1, tokens, hidden, requires_grad=True), torch.nn.RMSNorm(hidden)
    weight = torch.nn.Linear(hidden, vocab, bias=False).weight
    batch: dict[str, Any] = {"labels": torch.randint(0, vocab, (1, tokens)), "loss_weights": torch.ones(1, tokens)}
    batch |= {HEAD_SLICE_KEY: HeadSlices()} if slices else {}
    weight.grad, x.grad = torch.zeros_like(weight), torch.zeros_like(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.process_time()
    head_loss_sum(norm(x), weight, batch).backward()
    cpu_s = time.process_time() - start_s
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), cpu_s


def in_own_process(tokens: int, vocab: int, hidden: int, *, slices: bool) -> dict[str, float]:
    call = f"import json, logits; print(json.dumps(logits.ran({tokens}, {vocab}, {hidden}, slices={slices})))"
    command = [sys.executable, "-c", call]
    peak_bytes, cpu_s = json.loads(subprocess.check_output(command, cwd=Path(__file__).parent, timeout=600))
    return {"peak_bytes": peak_bytes, "cpu_s": cpu_s}


def planned(costs: AnalyticCosts, tokens: int) -> StepPlan | None:
    try:
        planner = Planner(costs.topology, costs, LIMIT_BYTES, layout="packed")
        return planned_step(planner, sample_lengths([tokens])).step_plan
    except PlanError:
        return None


def longest(costs: AnalyticCosts) -> int:
    """Tokens, to 500."""
    fits, too_many = 1000, 1 << 21
    while too_many - fits > 500:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if planned(costs, middle) else (fits, middle)
    return fits


def longest_samples() -> list[dict[str, Any]]:
    rows = []
    for dp in (1, 2, 4, 8, 16):
        costs = Case("llama-3-8b", 2, 4, dp, "one", 0).costs
        sliced = replace(costs, head_slice=HEAD_SLICE)
        row: dict[str, Any] = {"dp": dp, "whole": longest(costs), "slices": longest(sliced)}
        both = [planned(one, row["whole"]) for one in (costs, sliced)]
        assert both[0]
        assert both[1]
        rows.append(row | {"slices_over_whole_s": both[1].makespan_s / both[0].makespan_s})
    return rows


def text(result: dict[str, Any]) -> str:
    lines = [f"Logits ({result['machine']}, {result['date']}, commit {result['commit']})"]
    lines.append(f"{'tokens':>7} {'':8} {'peak MB':>9} {'CPU s':>7}")
    for tokens, both in result["rows"].items():
        lines += [f"{tokens:>7} {kind:8} {1e-6 * r['peak_bytes']:9.0f} {r['cpu_s']:7.2f}" for kind, r in both.items()]
    lines.append(f"{'dp':>3} {'whole':>8} {'slices':>8} tokens, and seconds of the longest whole one by slices / whole")
    lines += [f"{r['dp']:3} {r['whole']:8} {r['slices']:8} {r['slices_over_whole_s']:.3f}" for r in result["longest"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="")
    parser.add_argument("--vocab", type=int, default=8_192)
    parser.add_argument("--hidden-size", type=int, default=64)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for tokens, times in ((ROW, 1), (SHORT, TIMES)):
        measured = {"whole": False, "slices": True}
        rows[str(tokens)] = {
            kind: min(
                (in_own_process(tokens, args.vocab, args.hidden_size, slices=slices) for _ in range(times)),
                key=lambda one: one["cpu_s"],
            )
            for kind, slices in measured.items()
        }
    result = {"format": FORMAT, **provenance(args.machine), "vocab": args.vocab, "hidden_size": args.hidden_size}
    result |= {"rows": rows, "longest": longest_samples()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    long_row = rows[str(ROW)]
    return int(long_row["whole"]["peak_bytes"] < LEAST_TIMES_LESS * long_row["slices"]["peak_bytes"])


if __name__ == "__main__":
    sys.exit(main())
