"""Every figure of the README and of docs/results.md that is from a result file, and the blocks that hold them.

    python tests/bench/headlines.py [--write]

Prints the blocks, or writes each between its markers. A figure names what it is (measured, emulated, simulated), its
machine and the file that it comes from. The figures of the workload that the README shows are all from workload.json;
emulated ones are shown if emulated.json has the very plans of that file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynapipe_ext.schedules.rivals import describe_gain, pick_best_rival

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


_RULES = {  # of public.py
    "rival": "best rival",
    "verl": "verl's balance, 1F1B",
    "dynamic CP": "dynamic CP, free exchange",
    "dynamic CP, taxed": "dynamic CP, taxed as ours",
    "ours, width 1": "ours, width 1",
    "ours": "ours, width auto",
}


def public() -> str:
    """The table of public workloads on the page of results: makespan over the work of all ranks."""
    heads = ["data, model", "DP", *_RULES.values(), "the rival", "width", "GB", "planning, CPU s"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows = _read("public")["rows"]
    for row in rows:
        steps, ours = row["steps"], row["steps"]["ours"] or {}
        best = min(step["over_work"] for step in steps.values() if step)
        shown = [f"{row['data']}, {row['model']}", str(row["plane"])]
        shown += [_over_work(steps[rule], best) for rule in _RULES]
        shown += [steps["rival"]["rival"].removeprefix("packed ") if steps["rival"] else ""]
        shown += [str(ours[key]) if key == "width" else f"{ours[key]:.{n}f}" for key, n in _OF_OURS.items()] or [""] * 3
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*_public_gains(rows), "", *lines, "", *_public_bars(rows)])


_OF_OURS = {"width": 0, "peak_gb": 0, "cpu_s": 2}


def _public_gains(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In how many rows ours ends before each rule, or after it, and by how much in the median."""
    for rule in ("rival", "verl", "dynamic CP", "dynamic CP, taxed"):
        both = [row for row in rows if row["steps"][rule] and row["steps"]["ours"]]
        ratios = [row["steps"]["ours"]["makespan_s"] / row["steps"][rule]["makespan_s"] for row in both]
        behind = [row for row, ratio in zip(both, ratios, strict=True) if ratio > 1.0005]
        named = ", ".join(f"{row['data']} {row['model']} DP{row['plane']}" for row in behind)
        text = f"- over {_RULES[rule]}: in the median {100 * (1 - statistics.median(ratios)):.1f} % less time"
        text += f"; ours is behind in {len(behind)} of {len(both)} rows ({named})" if behind else "; never behind"
        yield f"{text}." if len(both) == len(rows) else f"{text}. It does not fit in {len(rows) - len(both)} rows."


def _public_bars(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    missed = [f"{row['data']} {row['model']} DP{row['plane']}: {fault}" for row in rows for fault in row["missed"]]
    yield f"Bars that are missed: {'; '.join(missed) or 'none'}."


def rollouts() -> str:
    """The table of rollouts on the page of results: makespan over the floor, of 128 rollouts."""
    names = {
        "rival": "packed rows, best schedule", "verl": "verl", "slime": "slime", "nemo-rl": "NeMo-RL", "whole": "ours",
        "pieces": "ours in pieces", "placed": "ours, placed, split", "order": "bound of the order",
    }  # fmt: skip
    lines = [f"| model, data | {' | '.join(names.values())} |", "|---" * (len(names) + 1) + "|"]
    gains = []
    for row in _read("rollouts")["rows"]:
        if row["rollouts"] != 128:
            continue
        over = row["over_floor"]
        figures = ["does not fit" if over[name] is None else f"{over[name]:.3f}" for name in names]
        what = f"{row['model'].split('-')[-1].upper()}, {row['data']}"
        lines.append(f"| {what} | {' | '.join(figures)} |")
        rivals = {names[name]: over[name] for name in ("rival", "verl", "slime", "nemo-rl") if over[name]}
        best = min(value for name in ("whole", "pieces", "placed") if (value := over[name]))
        even = describe_gain(over["whole"], rivals).partition(" time ")[0]
        faults = f" Missed: {', '.join(row['missed'])}." if row["missed"] else ""
        gains.append(f"- {what}: **{describe_gain(best, rivals)}**; whole rollouts on even layers {even}.{faults}")
    return "\n".join([*gains, "", *lines])


def one_gpu() -> str:
    """The table of one GPU on the page of results."""
    columns = {"flash-attn 4": _read("h100_flash_attn_4"), "torch's attention": _read("h100")}
    ways = ("ours", "ours, without kernels", "packing, whole rows", "padding, grouped by length")
    heads = [
        f"{name}: {what}"
        for name in columns
        for what in ("real tokens/s", "MFU", "seconds, peak: predicted ÷ measured")
    ]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for way in ways:
        cells = []
        for result in columns.values():
            step = result["steps"][way]
            cells += [f"{step['real_tokens_per_s']:,.0f}", f"{100 * step['mfu']:.1f} %"]
            cells += [f"{step['predicted_over_measured_s']:.2f}, {step['predicted_over_measured_peak']:.2f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    gains = []
    for name, result in columns.items():
        gain, bare = (_gain_per_token(result["steps"], ways[2:], own) for own in ways[:2])
        gains.append(f"- {name}: **{gain}**, with our kernels in both; without them in ours {bare}.")
    return "\n".join([*gains, "", *lines])


def _gain_per_token(steps: Mapping[str, Any], rivals: Sequence[str], ours: str = "ours") -> str:
    per_token = {name: 1 / steps[name]["real_tokens_per_s"] for name in (ours, *rivals)}
    return describe_gain(per_token[ours], {name: per_token[name] for name in rivals})


def gpu_peers() -> str:
    """The table of TRL on one GPU on the page of results."""
    ways = _read("gpu_peers")["ways"]
    names = {
        "megatron": "`dynapipe train`", "transformers": "`--backend transformers`", "packed": "SFTTrainer, packing",
        "padding-free": "padding-free", "padded": "padded, grouped by length",
    }  # fmt: skip
    figures = [f"{ways[name]['real_tokens_per_s']:,.0f}" for name in names]
    gains = {
        name: _gain_per_token(ways, ("packed", "padding-free", "padded"), name) for name in ("megatron", "transformers")
    }
    said = [
        f"- {names[name]}: **{gain.replace('packed', 'SFTTrainer with packing')}**." for name, gain in gains.items()
    ]
    return "\n".join(
        [*said, "", f"| {' | '.join(names.values())} |", "|---" * len(names) + "|", f"| {' | '.join(figures)} |"]
    )


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
        costs = {_OTHER_WAYS.get(way, way): cost for way, cost in result["cpu_us_per_real_token"].items()}
        ours_us = costs.pop("ours")
        gain = describe_gain(ours_us, costs).replace("time", "CPU time").replace("rival", "way")
        others = ", ".join(f"{way} {cost:.0f}" for way, cost in sorted(costs.items(), key=lambda one: one[1]))
        yield f"fine-tuning on {data}: CPU µs per real token", f"{gain}: ours {ours_us:.0f}, {others}", "finetune"
    estimate = _read("estimate")
    errors = [row["error"] for row in estimate["published_step_times"]]
    yield "published step times, estimated", f"{100 * min(errors):.0f} to {100 * max(errors):+.0f} %", "estimate"
    memory = estimate["memory"]
    exact, stored = f"{memory['states_exact']} of {memory['shapes']}", memory["stored"]["largest"]
    yield "memory, estimated", f"states exact in {exact} shapes, stored bytes within {100 * stored:.1f} %", "estimate"
    overhead = _read("overhead")
    yield (
        "CPU µs per instruction of the executor",
        f"{overhead['instructions']['cpu_us_an_instruction']:.1f}",
        "overhead",
    )
    for stages, name in (("pp2_stages1", "PP2"), ("pp4_stages1", "PP4"), ("pp2_stages2", "PP2, two stages per rank")):
        cpu = {
            who: [overhead["actions"][f"{stages}_{who}_{what}_us"] for what in ("process", "thread")]
            for who in ("ours", "torch")
        }
        gain = describe_gain(cpu["ours"][0], {"torch.distributed.pipelining": cpu["torch"][0]}).replace(
            "time", "CPU time"
        )
        figures = "; ".join(
            f"{who} {process:.0f} process, {thread:.0f} thread" for who, (process, thread) in cpu.items()
        )
        yield f"CPU µs per action, {name}", f"{gain.replace('the best rival, ', '')}: {figures}", "overhead"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


OURS, EVEN = "ours, packed, placed, split", "ours, packed, V, split"
_SHORT = {OURS: "ours", EVEN: "ours, on the layers of ZB-V"}


def pictured(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the ways that the README's picture shows of the first batch, each with the line above its pane: packed
    1F1B and the best rival above ours."""
    step_s = _first_batch(result)
    rivals = [name for name in result["rivals"] if name in step_s]
    best = pick_best_rival({name: step_s[name] for name in rivals})
    heads = {}
    for column in dict.fromkeys([*rivals[:1], best, EVEN, OURS]):
        way = result["sizes"][0]["batches"][0]["ways"][column]
        name = _SHORT.get(column, column) + (", the best rival" if column == best else "")
        idle = f"{100 * way['bubble_ratio']:.0f} % idle"
        heads[column] = f"{name}: {way['makespan_s']:.2f} s, {way['micro_batches']} micro-batches, {idle}"
    return heads


def picture_heads() -> list[str]:
    """Return the lines that the README's picture must have."""
    return list(pictured(_read("workload")).values())


def gain() -> str:
    """Return the README's sentence on its picture."""
    result = _read("workload")
    step_s = _first_batch(result)
    rivals = {name: step_s[name] for name in result["rivals"] if name in step_s}
    best = pick_best_rival(rivals)
    even, usual = describe_gain(step_s[EVEN], rivals), f"packed 1F1B {rivals['packed 1F1B']:.2f} s"
    return "\n".join(
        [
            f"**{step_s[OURS]:.2f} s per step, {describe_gain(step_s[OURS], rivals)} ({rivals[best]:.2f} s).** On the"
            f" even layers of ZB-V ours takes {step_s[EVEN]:.2f} s, {even.partition(' time ')[0]}; {usual}.",
            "",
            f"GPT 6.7B on measured A100 layer costs, {_topology(result)}, {result['limit_gb']:g} GB per device,"
            " simulated; all steps are proven. Each row is a rank; gaps are idle time. No plan ends before the dashed"
            " line. Every word is explained under [Words](.github/docs/README.md#words).",
        ]
    )


def workload(result: Mapping[str, Any], emulated: Mapping[str, Any] | None) -> str:
    """Return the table of the workload on the page of results: a row per way of training."""
    first, slept = result["sizes"][0], _same_plans(result, emulated)
    sizes = [f"{round(size['tokens'] / 1024)}k tokens" for size in result["sizes"]]
    counts = [len(size["batches"]) for size in result["sizes"]]
    heads = [
        "", "first batch, simulated", "first batch, emulated",
        *(f"{name}, median of {count}" for name, count in zip(sizes, counts, strict=True)),
        "padding efficiency", "bubble", "CPU, planning and proof",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for column, name in result["columns"].items():
        own = [
            f"**{name}**" if column == OURS else name,
            _seconds(_first_batch(result).get(column)),
            _seconds(slept.get(column)),
            *(_seconds(_median(size, column, "makespan_s")) or "does not fit" for size in result["sizes"]),
            *(
                "" if (value := _median(first, column, key)) is None else f"{value:.3f}"
                for key in ("padding_efficiency", "bubble_ratio")
            ),
            _seconds(_median(first, column, "planning_cpu_s"), digits=2),
        ]
        lines.append(f"| {' | '.join(own)} |")
    bounds = [statistics.median(batch["bound_s"] for batch in size["batches"]) for size in result["sizes"]]
    lines.append(
        f"| bound | {_seconds(first['batches'][0]['bound_s'])} | | {' | '.join(map(_seconds, bounds))} | | | |"
    )
    if all("reference" in batch for size in result["sizes"] for batch in size["batches"]):
        reported = [
            _seconds(statistics.median(batch["reference"]["makespan_s"] for batch in size["batches"]))
            for size in result["sizes"]
        ]
        own_first = _seconds(first["batches"][0]["reference"]["makespan_s"])
        lines.append(f"| DynaPipe's own planner, as it reports | {own_first} | | {' | '.join(reported)} | | | |")
    return "\n".join([*_gains(result, slept), "", *lines, "", *_notes(result), *_compared_run(result)])


def _gains(result: Mapping[str, Any], slept: Mapping[str, float]) -> Iterator[str]:
    """What ours gains over the best rival, on the first batch and in the median of each size."""

    def sentence(what: str, step_s: Mapping[str, float]) -> str:
        rivals = {name: step_s[name] for name in result["rivals"] if name in step_s}
        even = describe_gain(step_s[EVEN], rivals).partition(" time ")[0]
        return f"- {what}: **{describe_gain(step_s[OURS], rivals)}**; on the even layers of ZB-V {even}."

    yield sentence("first batch, simulated", _first_batch(result))
    if {OURS, EVEN, *result["rivals"]} <= slept.keys():
        yield sentence("first batch, emulated", slept)
    else:
        yield "- first batch, emulated: not yet measured with these rivals."
    for size in result["sizes"]:
        medians = {column: _median(size, column, "makespan_s") for column in result["columns"]}
        known = {column: seconds for column, seconds in medians.items() if seconds is not None}
        yield sentence(f"{round(size['tokens'] / 1024)}k tokens, median of {len(size['batches'])}, simulated", known)


def _notes(result: Mapping[str, Any]) -> list[str]:
    return [
        f"- {result['machine']}, {result['date']}; {result['costs']}; {_topology(result)}, {result['limit_gb']:g} GB"
        f" per device, for rivals too; {result['lengths']}. Not run on GPUs: simulated figures are the cost table's.",
        "- simulated: exact simulation of a proven step; emulated: real ranks, store and transfers, sleeping for the"
        " table's seconds; CPU: measured. Padding, bubble and CPU are medians at the first size.",
        "- Rivals pack by best fit, with attention within each document, and take the fastest of several row lengths,"
        " orders of the rows and recomputation modes for each step; their CPU seconds are those of trying them all."
        " Padding takes the best of several micro-batch sizes. Every way pads to 8 and may recompute.",
        "- DynaPipe's rule is its split and its balancing in our implementation, under our adaptive schedule. Its own"
        " planner's simulator counts inputs one position shorter.",
        "- Packed rows have no measurements of their own: they are priced as padded shapes with the same tokens and the"
        " same sum of squared lengths.",
        "- The bound is the least work of the whole model divided by the ranks. It holds for every split, layout,"
        " order, placement and recomputation, with unlimited memory: no plan is faster, and the fastest may be slower.",
    ]


def _compared_run(result: Mapping[str, Any]) -> Iterator[str]:
    for row in result["compared_run"]:
        values = sorted(row["values"].items(), key=lambda item: item[0] != "ours")
        figures = ", ".join(f"{name} {value:.{row['digits']}f}{row['unit']}" for name, value in values)
        yield f"- {row['name']} (`dynapipe train --compare`), measured: {figures}."


def _first_batch(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the first batch, which the README shows and emulated.py runs, by column; of those that fit."""
    ways = result["sizes"][0]["batches"][0]["ways"]
    return {column: way["makespan_s"] for column, way in ways.items() if "makespan_s" in way}


def _same_plans(result: Mapping[str, Any], emulated: Mapping[str, Any] | None) -> dict[str, float]:
    """Emulated seconds by column, of the rows that ran the plans of the first batch on unstretched time."""
    if emulated is None or emulated["costs_fingerprint"] != result["costs_fingerprint"] or emulated["scale"] != 1:
        return {}
    planned = _first_batch(result)
    return {
        row["column"]: row["measured_s"]
        for row in emulated["rows"]
        if math.isclose(planned.get(row["column"], 0.0), row["predicted_s"], rel_tol=1e-6)
    }


def _median(size: Mapping[str, Any], column: str, key: str) -> float | None:
    """None for a column that does not fit one of the batches."""
    ways = [batch["ways"][column] for batch in size["batches"]]
    return statistics.median(way[key] for way in ways) if all(key in way for way in ways) else None


def _seconds(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f} s"


def _topology(result: Mapping[str, Any]) -> str:
    degrees = result["topology"]
    return " × ".join(f"{name.upper()}{degrees[name]}" for name in ("pp", "dp"))


def _step() -> tuple[str, str, str, str]:
    result = _read("workload")
    step_s, slept = _first_batch(result), _same_plans(result, _read("emulated"))
    how = "simulated, proven steps"
    if {OURS, *result["rivals"]} <= slept.keys():
        step_s, how = slept, f"emulated: real ranks, sleeping stages; {_read('emulated')['machine']}"
    rivals = {name: step_s[name] for name in result["rivals"] if name in step_s}
    times = ", ".join(f"{seconds:.2f} s" for seconds in (step_s[OURS], rivals[pick_best_rival(rivals)]))
    figure = f"**{describe_gain(step_s[OURS], rivals)}** ({times}); packed 1F1B {rivals['packed 1F1B']:.2f} s"
    what = f"a step of {round(result['sizes'][0]['tokens'] / 1024)}k tokens, GPT 6.7B, {_topology(result)}"
    return what, figure, how, "workload"


def _pieces() -> tuple[str, str, str, str]:
    result = _read("long")
    row = next(r for r in result["rows"] if (r["model"], r["dp"], r["data"]) == ("llama-2-7b", 2, "tail"))
    rivals = {"ideal dynamic CP": row["dynamic_cp_over_floor"], "whole samples": row["whole_over_floor"]}
    figure = f"**{describe_gain(row['over_floor'], rivals)}**: {row['over_floor']:.2f} × the bound in pieces"
    figure += f", {row['whole_over_floor']:.2f} × whole"
    what = f"one sample of {row['longest'] // 1024}k among short ones"
    return what, figure, "simulated, Llama 2 7B", "long"


def _gpu() -> tuple[str, str, str, str]:
    result, usual = _read("h100_flash_attn_4"), _read("h100")
    best = result["steps"]["ours"]
    gain = _gain_per_token(result["steps"], ("packing, whole rows", "padding, grouped by length"))
    gain = gain.replace("packing, whole rows", "whole packed rows")
    rates = f"{best['real_tokens_per_s']:,.0f} tokens/s, {100 * best['mfu']:.0f} % MFU with flash-attn 4"
    figure = f"**{gain}**: {rates}; {usual['steps']['ours']['real_tokens_per_s']:,.0f} without"
    what = f"{result['parameters'] / 1e9:.2f}B parameters, one GPU, our kernels in all"
    return what, figure, "measured, one H100", "h100_flash_attn_4"


_OTHER_WAYS = {  # of finetune.py
    "collator": "a packing collator", "length groups": "grouped by length", "TRL-style": "TRL's packing",
}  # fmt: skip


def _tuning() -> tuple[str, str, str, str]:
    result = _read("finetune")
    cost = result["data"]["chats"]["cpu_us_per_real_token"]
    others = {name: cost[way] for way, name in _OTHER_WAYS.items()}
    gain = describe_gain(cost["ours"], others).replace("time", "CPU time").replace("rival", "way")
    slower = ", ".join(f"{name} {value:.0f}" for name, value in sorted(others.items(), key=lambda one: one[1])[1:])
    figure = f"**{gain}**: {cost['ours']:.0f} µs; {slower}"
    return "fine-tuning on chats, without flash-attn", figure, f"measured; {result['machine']}", "finetune"


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


def blocks() -> tuple[tuple[Path, str, str], ...]:
    """Return every block: its page, the name of its markers, its text."""
    return (
        (README, "gain", gain()),
        (README, "headlines", headlines()),
        (PAGE, "workload", workload(_read("workload"), _read("emulated"))),
        (PAGE, "summary", summary()),
        (PAGE, "public", public()),
        (PAGE, "rollouts", rollouts()),
        (PAGE, "one-gpu", one_gpu()),
        (PAGE, "gpu-peers", gpu_peers()),
    )


def write_pages() -> None:
    """Write every block into its page."""
    for page, name, block in blocks():
        page.write_text(written(page.read_text(), name, block))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the README and the page of results")
    args = parser.parse_args()
    if args.write:
        write_pages()
    for _, _, block in blocks():
        print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
