"""The table of the page of results: the peers, ours and a bound on the same batches, costs and memory limit.

    python tests/bench/readme_table.py --costs DIR --shared DIR [--report RUN/report.json] [--write PAGE]

Prints Markdown between its markers and writes results/readme_table.json. Emulated figures come from the file that
emulated.py wrote, measured ones from a run's report.json (made with --compare); a figure that nobody made stays empty.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bound import batch_bound_s
from contenders import (
    COLUMNS,
    MEMORY_LIMIT_BYTES,
    TOPOLOGY,
    Batch,
    Costs,
    best_plan,
    cost_model,
    provenance,
    read_batches,
    topology_for,
)

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import DataError, DynaPipeError, PlanError
from dynapipe_ext.schedules.step_plan import free_batch_ns
from dynapipe_ext.tools.account.report import RunReport, RunResult
from dynapipe_ext.tools.files import read_json

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
RESULTS = Path(__file__).parent / "results"
PLACED = "ours, placed, split"
FIGURES = ("makespan_s", "padding_efficiency", "bubble_ratio", "planning_cpu_s")
TIE = 0.005  # closer than this is no difference
Tag = Literal["simulated", "emulated", "measured", "reference"]
Columns = dict[str, list[float]]  # column -> one value a batch; a column that no plan fits is absent

# Names of the runs of `dynapipe train --compare`, by column.
_RUNS = {
    "padding": "padding to the batch maximum, 1F1B",
    "packing": "packing, document attention, balanced, 1F1B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure over the columns. `best` says which way is better; "bound" and "reference" are no contenders."""

    name: str
    tag: Tag
    values: Mapping[str, float]
    unit: str = ""
    digits: int = 2
    best: Literal["low", "high"] = "low"
    notes: Mapping[str, str] = field(default_factory=dict)

    def leaders(self) -> set[str]:
        """Columns of others better than all of ours by more than a tie."""
        own = [self.values[column] for column in ("ours", PLACED) if column in self.values]
        if not own:
            return set()
        sign = 1 if self.best == "low" else -1
        ours, others = min(own, key=lambda value: sign * value), COLUMNS.keys() - {"ours", PLACED}
        return {c for c, value in self.values.items() if c in others and sign * (ours - value) > TIE * abs(ours)}


def simulated(
    costs_over: Callable[[Topology], Costs], batches: Sequence[Batch], *, limit_bytes: float = MEMORY_LIMIT_BYTES
) -> dict[str, Columns]:
    """FIGURES of each column and batch; besides, the bound, what DynaPipe's own planner reported, and our plans
    of packed rows."""
    figures: dict[str, Columns] = {name: {} for name in FIGURES}
    figures["free"] = {}
    costs = costs_over(TOPOLOGY)
    for column in (*COLUMNS, "ours, packed"):
        topology = topology_for(column, costs, batches)
        over = costs_over(topology)
        for batch in batches:
            try:
                plan, _, cpu_s = best_plan(column, over, batch.lengths, topology=topology, limit_bytes=limit_bytes)
            except PlanError as error:
                print(f"{column}: {error}", file=sys.stderr)
                for name in figures:
                    figures[name].pop(column, None)
                break
            found = (plan.makespan_s, plan.batch.padding_efficiency, plan.bubble_ratio, cpu_s)
            for name, value in zip(FIGURES, found, strict=True):
                figures[name].setdefault(column, []).append(value)
            if column == PLACED:
                free_ns = free_batch_ns(plan, over, sample_lengths(batch.lengths))
                assert free_ns is not None  # of a CostTable or TokenCosts
                figures["free"].setdefault(column, []).append(free_ns / 1e9)
    makespan_s = figures["makespan_s"]
    makespan_s["bound"] = [batch_bound_s(costs, batch.lengths, dp=TOPOLOGY.dp) for batch in batches]
    references = [batch.reference for batch in batches if batch.reference is not None]
    if len(references) == len(batches):
        makespan_s["reference"] = [max(raw["makespan_ms"]) / 1e3 for raw in references]
        figures["padding_efficiency"]["reference"] = [raw["efficiency"] for raw in references]
        figures["planning_cpu_s"]["reference"] = [raw["partition_cpu_s"] + raw["sched_cpu_s"] for raw in references]
    return figures


def simulated_rows(tokens: int, figures: Mapping[str, Columns]) -> list[Row]:
    """Medians over the batches."""
    size = f"{tokens // 1024}k tokens"

    def medians(name: str) -> dict[str, float]:
        return {column: statistics.median(values) for column, values in figures[name].items()}

    makespan_s, notes = figures["makespan_s"], {}
    for column, bounds in (("ours", makespan_s["bound"]), (PLACED, figures["free"].get(PLACED, []))):
        if column in makespan_s:
            over = [found / bound for found, bound in zip(makespan_s[column], bounds, strict=True)]
            notes[column] = f"{statistics.median(over):.3f} x its bound"
    step_s, efficiency, bubble, cpu_s = (medians(name) for name in FIGURES)
    return [
        Row(name=f"makespan of a step, {size}", tag="simulated", values=step_s, unit=" s", digits=3, notes=notes),
        Row(name=f"padding efficiency, {size}", tag="simulated", values=efficiency, digits=3, best="high"),
        Row(name=f"bubble ratio, {size}", tag="simulated", values=bubble, digits=3),
        Row(name=f"planning a step, CPU time, {size}", tag="measured", values=cpu_s, unit=" s"),
    ]


def emulated_rows(result: Mapping[str, Any]) -> list[Row]:
    """What emulated.py measured."""
    rows = {row["column"]: row for row in result["rows"]}
    columns = [column for column in COLUMNS if column in rows]
    return [
        Row(
            name=f"makespan, {round(result['tokens'] / 1024)}k tokens, sleeping ranks, time x {result['scale']:g}",
            tag="emulated",
            values={column: rows[column]["measured_s"] for column in columns},
            unit=" s",
            digits=3,
            notes={c: f"predicted {rows[c]['predicted_s']:.3f}" for c in columns},
        )
    ]


def report_rows(report: RunReport) -> list[Row]:
    """CPU time a real token and the last loss, from a run with --compare. Raises DataError without one."""
    if not report.compare:
        raise DataError("the report has no baselines: make it with dynapipe train --compare")
    by_name: dict[str, RunResult] = {result.name: result for result in report.compare}
    runs = {column: by_name[name] for column, name in _RUNS.items() if name in by_name} | {"ours": report.result}
    t = report.facts.topology
    where = f"small CPU model, TP{t.tp} PP{t.pp} DP{t.dp}"
    return [
        Row(
            name=f"CPU time a real token, {where}",
            tag="measured",
            values={column: run.cpu_s_per_token * 1e6 for column, run in runs.items()},
            unit=" µs",
            digits=0,
        ),
        Row(
            name=f"loss after {report.steps} steps, {where}",
            tag="measured",
            values={column: run.losses[-1] for column, run in runs.items() if run.losses},
            digits=3,
        ),
    ]


def markdown(rows: Sequence[Row], footnotes: Sequence[str]) -> str:
    """The table between its markers. A column that beats ours is bold and ours is marked; what is unknown is empty."""
    heads = ["", *COLUMNS.values(), "bound"]
    lines = [BEGIN, f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [_cell(row, column) for column in (*COLUMNS, "bound")]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in footnotes), END])


def _cell(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None:
        return ""
    leaders = row.leaders()
    figure = f"{value:.{row.digits}f}{row.unit}"
    figure = f"**{figure}**" if column in leaders else figure
    last = PLACED if PLACED in row.values else "ours"
    marks = ["*ours is behind*"] if column == last and leaders else []
    marks += [row.notes[column]] if column in row.notes else []
    text = f"{figure} {row.tag}" + "".join(f"; {mark}" for mark in marks)
    if column == "dynapipe" and "reference" in row.values:
        text += f"; {row.values['reference']:.{row.digits}f}{row.unit} reference"
    return text


def written(readme: str, table: str) -> str:
    """A page with the block between its markers replaced. Raises DataError unless it has each once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise DataError(f"the page must hold {BEGIN} once and {END} once after it: put them where the table belongs")
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table, readme, flags=re.S)


def footnotes_of(
    made: Mapping[str, Any], costs: str, lengths: str, figures: Mapping[int, Mapping[str, Columns]]
) -> list[str]:
    """How to read the table, and what it does not show; `figures` by the tokens of a batch."""
    sizes = ", ".join(f"{len(found['makespan_s']['bound'])} at {tokens // 1024}k" for tokens, found in figures.items())
    packed = [
        f"{statistics.median(found['makespan_s']['ours, packed']):.3f} s at {tokens // 1024}k"
        for tokens, found in figures.items()
        if "ours, packed" in found["makespan_s"]
    ]
    notes = [
        f"{made['machine']}, {made['date']}; {costs}; TP1 PP4 DP2, {MEMORY_LIMIT_BYTES / 1e9:g} GB a device; {lengths};"
        f" medians over the global batches ({sizes}). Not run on GPUs: simulated figures are the cost table's.",
        "simulated: exact simulation of the plan; emulated: real ranks, store and transfers, sleeping for the table's"
        " seconds; measured: real work on the machine named; reference: what DynaPipe's own planner reports for these"
        " batches (its simulator; its inputs are one position shorter). Bold: better than ours by more than 0.5 %.",
        "Every column pads to 8 and may recompute. Padding and packing take the best of several micro-batch sizes."
        " DynaPipe's rule is its split and its balancing in our implementation, under our adaptive schedule.",
        "Packed rows have no measurements of their own: they are priced as padded shapes with the same tokens and the"
        " same sum of squared lengths.",
        "The bound holds for every split and layout of whole samples, every order and every choice of recomputation,"
        " with one stage a rank, whole backwards and unlimited memory (tests/bench/bound.py): no such plan can be"
        " faster, and the fastest may well be slower. That of the last of our columns is the least work over all ranks,"
        " wherever layers live.",
    ]
    if packed:
        notes.append(f"Our planner on packed rows instead of padded ones (simulated): {', '.join(packed)}.")
    return notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs (default: made-up costs)")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans (default: generated lengths)")
    parser.add_argument("--report", type=Path, help="report.json of a run with --compare")
    parser.add_argument("--emulated", type=Path, default=RESULTS / "emulated.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--batches", type=int, default=0, help="at most so many batches of each size (0: all)")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULTS / "readme_table.json")
    parser.add_argument("--write", type=Path, help="the page whose block is to be replaced")
    args = parser.parse_args()
    try:
        table, result = build(args)
        if args.write:
            args.write.write_text(written(args.write.read_text(), table))
    except (DynaPipeError, OSError) as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table)
    return 0


def build(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    made = provenance(args.machine)
    costs, cost_name = cost_model(args.costs)

    def costs_over(topology: Topology) -> Costs:
        return cost_model(args.costs, topology)[0]

    rows: list[Row] = []
    figures: dict[int, dict[str, Columns]] = {}
    length_name = ""
    for tokens in args.tokens:
        batches, length_name = read_batches(args.shared, tokens, limit=args.batches)
        figures[tokens] = simulated(costs_over, batches)
        rows += simulated_rows(tokens, figures[tokens])
    if args.emulated.exists():
        emulated = read_json(args.emulated, "dynapipe-emulated/1", "a result of emulated.py")
        if emulated["costs_fingerprint"] == costs.fingerprint():
            rows += emulated_rows(emulated)
        else:
            print(f"{args.emulated} was made with other costs ({emulated['costs']}): left out", file=sys.stderr)
    if args.report:
        rows += report_rows(RunReport.read(args.report))
    table = markdown(rows, footnotes_of(made, cost_name, length_name, figures))
    result = {
        "format": "dynapipe-readme-table/1",
        **made,
        "costs": cost_name,
        "costs_fingerprint": costs.fingerprint(),
        "lengths": length_name,
        "per_batch": {str(tokens): found for tokens, found in figures.items()},
        "rows": [{"name": r.name, "tag": r.tag, "values": dict(r.values), "behind": sorted(r.leaders())} for r in rows],
    }
    return table, result


if __name__ == "__main__":
    sys.exit(main())
