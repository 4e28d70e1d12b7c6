"""Schedules and plans as text: lines of actions, JSON, and torch's CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import Certificate
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.timeline import Trace

PLAN_FORMAT = "dynapipe-plan/1"
_MARKS = {Kind.FORWARD: "", Kind.BACKWARD: "'", Kind.BACKWARD_INPUT: "i", Kind.BACKWARD_WEIGHT: "w"}
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.BACKWARD_INPUT: "=", Kind.BACKWARD_WEIGHT: "~"}


def format_lines(schedule: PipelineSchedule) -> str:
    """Return the schedule as text, a line per pipeline rank: its number, a colon, and its actions in order."""
    return "".join(" ".join([f"{rank}:", *map(str, actions)]) + "\n" for rank, actions in enumerate(schedule.ranks))


def parse_lines(text: str, name: str = "schedule") -> PipelineSchedule:
    """Return the schedule of a text by `format_lines`; a stage is on the rank whose line names it.

    Empty lines and # comments are skipped; `validate` checks whether the order can run. Raises PlanError naming the
    line: a rank out of turn, a word that is not an action, a stage on two ranks or on none.

    >>> parse_lines("0: 0F0 0B0\\n1: 1F0 1B0").stage_ranks
    (0, 1)
    """
    rows: list[_Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if body := line.partition("#")[0].strip():
            rank, colon, actions = body.partition(":")
            if not colon or rank.strip() != str(len(rows)):
                raise PlanError(f"line {number} {line!r} must begin with '{len(rows)}:', the next pipeline rank")
            rows.append([(word, f"line {number}") for word in actions.split()])
    return _make_schedule(rows, name)


def to_csv(schedule: PipelineSchedule) -> str:
    """Return the schedule as CSV for torch's `_load_csv`: a row of actions per rank. The schedule's name is left out.

    >>> from dynapipe_ext.schedules.published.zero_bubble import zb_h1
    >>> print(to_csv(zb_h1(2, 1)), end="")
    0F0,0I0,0W0
    1F0,1I0,1W0
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str, name: str = "schedule") -> PipelineSchedule:
    """Return the schedule of a CSV by `to_csv`, or by torch's `_dump_csv`, whose empty cells are steps without work.

    A stage is on the rank whose row names it; `validate` checks whether the order can run. Raises PlanError naming row
    and cell (both from 1): communication or another text that is not an action, a stage on two ranks or on none.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n").to_lines()
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    rows: list[_Row] = []
    try:
        for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True):
            words = ((cell.strip(), f"row {len(rows) + 1}, cell {column}") for column, cell in enumerate(row, 1))
            rows.append([(word, place) for word, place in words if word])
    except csv.Error as error:
        raise PlanError(f"row {len(rows) + 1}: {error}: cells are actions such as 2F0 with commas between") from error
    return _make_schedule(rows, name)


_Row = list[tuple[str, str]]  # words of a rank, each with its place in the text


def _make_schedule(rows: Sequence[_Row], name: str) -> PipelineSchedule:
    ranks: list[list[Action]] = []
    stages: dict[int, tuple[int, str]] = {}  # rank and first place of each
    for rank, row in enumerate(rows):
        ranks.append([])
        for word, place in row:
            try:
                action = Action.parse(word)
            except PlanError as error:
                raise PlanError(f"{place}: {error}") from error
            first_rank, first = stages.setdefault(action.stage, (rank, place))
            if first_rank != rank:
                raise PlanError(f"{place}: {action} puts stage {action.stage} on a second rank, after that of {first}")
            ranks[rank].append(action)
    highest = max(stages, default=-1)
    if len(stages) <= highest:
        missing = next(stage for stage in range(highest) if stage not in stages)
        raise PlanError(
            f"{stages[highest][1]} names stage {highest} but there is no action of stage {missing}: number stages"
            " from 0 without gaps"
        )
    stage_ranks = tuple(stages[stage][0] for stage in range(len(stages))) or tuple(range(len(ranks)))
    return PipelineSchedule(name, tuple(map(tuple, ranks)), stage_ranks)


def draw(schedule: PipelineSchedule, trace: Trace, *, width: int) -> str:
    """Return a picture for terminals: a row per rank, `width` characters wide, in proportion to time.

    F of micro-batch 3 is "3---", B "3'==", I "3i==", W "3w~~"; idle time is dots. If ranks hold several stages, the
    stage comes first ("1.3---") if it fits into every action. A label too long for its action is cut off.
    """
    margin = len(str(len(schedule.ranks) - 1))
    rows = draw_cells(schedule, trace, width=width)
    return "".join(f"{rank:>{margin}} |{''.join(text for text, _ in row)}|\n" for rank, row in enumerate(rows))


def draw_cells(schedule: PipelineSchedule, trace: Trace, *, width: int) -> list[list[tuple[str, Kind | None]]]:
    """Return the rows of `draw` as pairs: an action's text and kind, or dots and None while the rank is idle."""
    start_s = min((span.start_s for span in trace.spans), default=0.0)
    scale = width / trace.makespan_s if trace.makespan_s > 0 else 0.0
    columns: list[list[tuple[int, int, Action]]] = [[] for _ in schedule.ranks]
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
        row = columns[span.rank]
        left = max(row[-1][1] if row else 0, round((span.start_s - start_s) * scale))
        row.append((left, max(left, round((span.end_s - start_s) * scale)), Action.parse(span.label)))
    with_stage = len(schedule.ranks) < schedule.num_stages and all(
        len(_label(action, with_stage=True)) <= right - left for row in columns for left, right, action in row
    )
    rows = []
    for row in columns:
        texts: list[tuple[str, Kind | None]] = []
        end = 0
        for left, right, action in row:
            label = _label(action, with_stage=with_stage)
            texts.append(("." * (left - end), None))
            texts.append((label.ljust(right - left, _FILL[action.kind])[: right - left], action.kind))
            end = right
        texts.append(("." * (width - end), None))
        rows.append([(text, kind) for text, kind in texts if text])
    return rows


def _label(action: Action, *, with_stage: bool) -> str:
    return f"{action.stage}." * with_stage + f"{action.micro_batch}{_MARKS[action.kind]}"


def plan_json(
    step_plan: StepPlan,
    topology: Topology,
    *,
    in_flight_bytes: Sequence[Sequence[int]] | None = None,
    certificate: Certificate | None = None,
) -> dict[str, Any]:
    """Return a step's plan for people and tools: format dynapipe-plan/1, ready for json.dump.

    `in_flight_bytes[dp_rank][pp_rank]`: message buffers, which are known once the plan is lowered to instructions.
    `certificate` adds all bounds. A micro-batch whose first document is a piece of a long sample has "carried": [start,
    end] of the piece in positions. Raises PlanError for samples cut in another way (fixed rows), and for ranks that
    share cores.
    """
    _check_whole_samples(step_plan)
    if step_plan.cores is not None:
        raise PlanError(
            f"this plan is of ranks that share {step_plan.cores.num_cores} cores, but the format's figures are of ranks"
            " with one or a device each: plan without num_cores"
        )
    shape: dict[str, Any] = {"tp": topology.tp, "pp": topology.pp, "dp": topology.dp}
    if step_plan.width > 1:
        shape["width"] = step_plan.width
    if topology.layers_per_stage:
        shape["layers_per_stage"] = list(topology.layers_per_stage)
    if topology.vocabulary != "whole":
        shape["vocabulary"] = topology.vocabulary
    replicas = [_make_replica_json(step_plan, d, in_flight_bytes, certificate) for d in range(len(step_plan.schedules))]
    marked = {"forward_only": True} if step_plan.forward_only else {}
    plan = {"format": PLAN_FORMAT, "topology": shape, **marked, "replicas": replicas}
    if certificate is not None:
        whole = {"batch_bound_s": certificate.batch_ns, "free_batch_bound_s": certificate.free_batch_ns}
        plan |= {name: ns / 1e9 for name, ns in whole.items() if ns is not None}
    return plan


def _make_replica_json(
    step_plan: StepPlan, d: int, in_flight_bytes: Sequence[Sequence[int]] | None, certificate: Certificate | None
) -> dict[str, Any]:
    replica, schedule, prediction = step_plan.batch.replicas[d], step_plan.schedules[d], step_plan.predictions[d]
    predicted: dict[str, Any] = {
        "makespan_s": prediction.makespan_ns / 1e9,
        "lower_bound_s": prediction.lower_bound_ns / 1e9,
        "peak_bytes": list(prediction.peak_bytes),
    }
    if in_flight_bytes is not None:
        predicted["in_flight_bytes"] = list(in_flight_bytes[d])
    if certificate is not None:
        bounds = asdict(certificate.replicas[d]).items()
        predicted["bounds"] = {name.replace("_ns", "_s"): ns / 1e9 for name, ns in bounds if ns is not None}
    body: dict[str, Any] = {"name": schedule.name, "stages": schedule.to_lines()}
    if schedule.stage_ranks != tuple(range(len(schedule.ranks))):
        body["placement"] = list(schedule.stage_ranks)
    micro_batches = [_make_micro_batch_json(micro_batch) for micro_batch in replica.micro_batches]
    return {"dp_rank": replica.dp_rank, "micro_batches": micro_batches, "schedule": body, "predicted": predicted}


def _check_whole_samples(step_plan: StepPlan) -> None:
    indices: set[int] = set()
    for micro_batch in step_plan.batch.micro_batches:
        has_piece = micro_batch.attention == "carried"
        for sample in micro_batch.samples[1 if has_piece else 0 :]:
            if sample.start or sample.index in indices:
                raise PlanError(
                    f"the plan cuts sample {sample.index} into pieces, which {PLAN_FORMAT} cannot hold: write plans of"
                    " another rule than fixed-rows, or of longer rows"
                )
            indices.add(sample.index)


def _make_micro_batch_json(micro_batch: MicroBatch) -> dict[str, Any]:
    samples, extra = micro_batch.samples, {}
    if micro_batch.attention == "carried":
        extra["carried"] = [samples[0].start, samples[0].start + samples[0].encoder]
    if any(sample.first for sample in samples):
        extra["documents"] = list(micro_batch.documents)
    shape = {name: getattr(micro_batch, name) for name in ("layout", "rows", "encoder_len", "decoder_len", "recompute")}
    return {"samples": [sample.index for sample in samples], **shape, **extra}
