"""The README's five figures, the summary of docs/results.md and its table of public workloads, from the result files.

    python tests/bench/headlines.py [--write]

Prints the blocks, or writes each between its markers. A figure names what it is (measured, emulated,
simulated), its machine and the file that it comes from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
README, PAGE = ROOT / "README.md", ROOT / ".github" / "docs" / "results.md"
_LINK = "tests/bench/results"


def headlines() -> str:
    """The README's block."""
    rows = [_step(), _pieces(), _gpu(), _tuning(), _bits()]
    lines = [f"| {what} | {figure} | {how} | [{name}]({_LINK}/{name}.json) |" for what, figure, how, name in rows]
    return "\n".join(["| what | figure | how | from |", "|---|---|---|---|", *lines])


def summary() -> str:
    """The block of the page of results."""
    rows = [*_plans(), *_exactness(), *_tools()]
    lines = [f"| {what} | {figure} | [{name}](../../{_LINK}/{name}.json) |" for what, figure, name in rows]
    return "\n".join(["| what | figure | file |", "|---|---|---|", *lines])


_RULES = ("balanced", "verl", "dynamic CP", "ours, width 1", "ours")  # of public.py


def public() -> str:
    """The table of public workloads on the page of results: makespan over work."""
    names = ("packed, balanced, 1F1B", "verl's balance, 1F1B", "dynamic CP, 1F1B", "ours, width 1", "ours, width auto")
    lines = [f"| data, model | DP | {' | '.join(names)} | width | GB | planning, CPU s |", "|---" * 10 + "|"]
    for row in _read("public")["rows"]:
        steps, ours = row["steps"], row["steps"]["ours"]
        best = min(step["over_work"] for step in steps.values() if step)
        cells = [_over_work(steps[rule], best) for rule in _RULES]
        shown = [f"{row['data']}, {row['model']}", str(row["plane"]), *cells]
        shown += [str(ours["width"]), f"{ours['peak_gb']:.0f}", f"{ours['cpu_s']:.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _over_work(step: dict[str, Any] | None, best: float) -> str:
    if step is None:
        return "does not fit"
    figure = f"{step['over_work']:.2f}"
    return f"**{figure}**" if step["over_work"] <= 1.0005 * best else figure


def _plans() -> Iterator[tuple[str, str, str]]:
    plans = _read("plans")
    bars = {bar["what"]: bar for bar in plans["bars"]}
    for kind in ("whole backward", "split backward", "placed, split backward"):
        for size in ("64k", "256k"):
            closed = bars[f"GPT {size}, {kind}: room closed"]
            yield f"GPT {size}, {kind}: room to the bound that we close", f"{100 * closed['value']:.0f} %", "plans"
    missed = [bar for bar in plans["bars"] if bar["passed"] is False]
    for bar in missed:
        yield (
            f"missed: {bar['what']}",
            f"{bar['value']:.2f}{bar['unit']}, aimed at {bar['bar']:g}{bar['unit']}",
            "plans",
        )
    worst = max(bar["value"] for what, bar in bars.items() if "worst error" in what and "emulated" not in what)
    yield "makespans and peaks predicted against an independent judge, worst", f"{100 * worst:.1g} %", "plans"
    emulated = next(bar for what, bar in bars.items() if what.startswith("emulated"))
    yield "makespan emulated against predicted, worst", f"{100 * emulated['value']:.1f} %", "plans"
    yield "bubble of uneven micro-batches, mean over a grid", _read("plans_grid")["bars"][0]["note"], "plans_grid"
    last = _read("scale")["rows"][0]
    yield f"planning a step, {last['case']}: CPU seconds", f"{last['step_cpu_s']:.2f}", "scale"


def _exactness() -> Iterator[tuple[str, str, str]]:
    variants = _read("families")["variants"]
    apart = max(error for ways in variants.values() for way in ways.values() for error in way.values())
    yield f"losses of {len(variants)} models beside plain loops, largest difference", f"{apart:.1g}", "families"
    for name, run in _read("deterministic")["runs"].items():
        share = run["deterministic_cpu_s"] / run["plain_cpu_s"]
        yield f"`--deterministic`, {name}: CPU seconds over plain ones", f"{share:.2f}", "deterministic"
    chaos = _read("chaos")
    yield "jobs under random faults", f"{chaos['num_runs']} runs, {chaos['num_wrong']} wrong", "chaos"


def _tools() -> Iterator[tuple[str, str, str]]:
    for data, result in _read("finetune")["data"].items():
        costs = ", ".join(f"{way} {cost:.0f}" for way, cost in result["cpu_us_per_real_token"].items())
        yield f"fine-tuning on {data}: CPU µs a real token", costs, "finetune"
    estimate = _read("estimate")
    errors = [row["error"] for row in estimate["published_step_times"]]
    yield "published step times, estimated", f"{100 * min(errors):.0f} to {100 * max(errors):+.0f} %", "estimate"
    memory = estimate["memory"]
    exact, stored = f"{memory['states_exact']} of {memory['shapes']}", memory["stored"]["largest"]
    yield "memory, estimated", f"states exact in {exact} shapes, stored bytes within {100 * stored:.1f} %", "estimate"
    cost = _read("overhead")["instructions"]["cpu_us_an_instruction"]
    yield "CPU µs an instruction of the executor", f"{cost:.1f}", "overhead"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _step() -> tuple[str, str, str, str]:
    result = _read("emulated")
    seconds = {row["column"]: row["measured_s"] for row in result["rows"]}
    figure = f"**{seconds['ours, placed, split']:.2f} s**; packed 1F1B {seconds['packing']:.2f} s"
    figure += f", interleaved {seconds['packing, interleaved']:.2f} s, padded {seconds['padding']:.1f} s"
    what = f"a step of {round(result['tokens'] / 1024)}k tokens, GPT 6.7B, PP4 × DP2"
    return what, figure, f"emulated: real ranks, sleeping stages; {result['machine']}", "emulated"


def _pieces() -> tuple[str, str, str, str]:
    result = _read("long")
    row = next(r for r in result["rows"] if (r["model"], r["dp"], r["data"]) == ("llama-2-7b", 2, "tail"))
    figure = f"**{row['over_floor']:.2f} × the bound** in pieces, {row['whole_over_floor']:.2f} × whole"
    return f"one sample of {row['longest'] // 1024}k among short ones", figure, "simulated, Llama 2 7B", "long"


def _gpu() -> tuple[str, str, str, str]:
    result = _read("h100_flash_attn_4")
    best, usual = (steps["ours"] for steps in (result["steps"], _read("h100")["steps"]))
    figure = f"**{best['real_tokens_per_s']:,.0f} tokens/s, {100 * best['mfu']:.0f} % MFU** with flash-attn 4"
    figure += f"; {usual['real_tokens_per_s']:,.0f}, {100 * usual['mfu']:.0f} % without"
    figure += f"; whole packed rows {result['steps']['packing, whole rows']['real_tokens_per_s']:,.0f}"
    what = f"{result['parameters'] / 1e9:.2f}B parameters, one GPU"
    return what, figure, "measured, one H100", "h100_flash_attn_4"


def _tuning() -> tuple[str, str, str, str]:
    result = _read("finetune")
    cost = result["data"]["chats"]["cpu_us_per_real_token"]
    figure = f"**{cost['ours']:.0f} µs a token**; TRL's way {cost['TRL-style']:.0f}, a packing collator"
    figure += f" {cost['collator']:.0f}"
    return "fine-tuning on chats", figure, f"measured, CPU seconds; {result['machine']}", "finetune"


def _bits() -> tuple[str, str, str, str]:
    bits = _read("deterministic")["bits"]
    digests = bits["digests"]
    same = "one result, bit for bit" if len({*digests.values()}) == 1 else "NOT the same bits"
    what = "PP, DP, schedules, resume with `--deterministic`"
    return what, f"**{len(digests)} arrangements, {bits['steps']} steps: {same}**", "measured", "deterministic"


def written(page: str, name: str, block: str) -> str:
    """A page with what is between the markers of a block replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    assert page.count(begin) == page.count(end) == 1, f"the page must hold {begin} and {end} once"
    return page.partition(begin)[0] + f"{begin}\n{block}\n{end}" + page.partition(end)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the README and the page of results")
    args = parser.parse_args()
    blocks = ((README, "headlines", headlines()), (PAGE, "summary", summary()), (PAGE, "public", public()))
    for page, name, block in blocks:
        if args.write:
            page.write_text(written(page.read_text(), name, block))
        print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
