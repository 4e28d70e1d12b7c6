"""Schedules and plans as text: lines of actions, JSON, and torch's CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    MicroBatch,
    Piece,
    ReplicaPlan,
    SampleLength,
    pieces_by_position,
    sample_pieces,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import DynaPipeError, PlanError, short
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import Certificate, ReplicaBounds
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.timeline import Trace

PLAN_FORMAT = "dynapipe-plan/1"
_MOST_SHOWN = 40  # characters of a wrong value
_MOST_COUNT = 1 << 31
_MARKS = {Kind.FORWARD: "", Kind.BACKWARD: "'", Kind.BACKWARD_INPUT: "i", Kind.BACKWARD_WEIGHT: "w"}
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.BACKWARD_INPUT: "=", Kind.BACKWARD_WEIGHT: "~"}


def format_lines(schedule: PipelineSchedule) -> str:
    """One line a pipeline rank: its number, a colon, its actions in order. parse_lines reads it back."""
    return "".join(" ".join([f"{rank}:", *map(str, actions)]) + "\n" for rank, actions in enumerate(schedule.ranks))


def parse_lines(text: str, name: str = "schedule") -> PipelineSchedule:
    """The schedule of `format_lines`; stages lie on the ranks whose lines name them. Empty lines and # comments pass.

    Errors: PlanError naming the line: a rank out of turn, an action that is none, a stage on two ranks or on none.

    >>> parse_lines("0: 0F0 0B0\\n1: 1F0 1B0").stage_ranks
    (0, 1)
    """
    ranks: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        body = line.partition("#")[0].strip()
        if not body:
            continue
        rank, colon, actions = body.partition(":")
        if not colon or rank.strip() != str(len(ranks)):
            raise PlanError(f"line {number} {line!r} must begin with '{len(ranks)}:', the next pipeline rank")
        try:
            ranks.append(tuple(Action.parse(word) for word in actions.split()))
        except PlanError as error:
            raise PlanError(f"line {number}: {error}") from error
    return PipelineSchedule(name, tuple(ranks), stage_ranks_of(ranks))


def draw(schedule: PipelineSchedule, trace: Trace, *, width: int = 100) -> str:
    """A picture for terminals: one row a rank, columns in proportion to time, `width` columns for the makespan.

    F of micro-batch 3 is "3---", B "3'==", I "3i==", W "3w~~"; idle time is dots. Where a rank holds several stages the
    stage comes first ("1.3---"), if there is room for that in every action. One too short for its label shows as much
    of it as fits.

    Errors: PlanError if the trace is not of this schedule, or `width` is below 1.
    """
    margin = len(str(len(schedule.ranks) - 1))
    rows = picture(schedule, trace, width=width)
    return "".join(f"{rank:>{margin}} |{''.join(text for text, _ in row)}|\n" for rank, row in enumerate(rows))


def picture(schedule: PipelineSchedule, trace: Trace, *, width: int) -> list[list[tuple[str, Kind | None]]]:
    """The rows of `draw` as texts, each an action's with its kind, or dots and None where the rank is idle."""
    if width < 1:
        raise PlanError(f"width is {width} columns but a picture needs at least 1")
    start_s = min((span.start_s for span in trace.spans), default=0.0)
    scale = width / trace.makespan_s if trace.makespan_s > 0 else 0.0
    columns: list[list[tuple[int, int, Action]]] = []
    of_rank = trace.by_rank()
    for rank, actions in enumerate(schedule.ranks):
        spans = sorted(of_rank.get(rank, ()), key=lambda span: (span.start_s, span.end_s))
        if sorted(span.label for span in spans) != sorted(map(str, actions)):
            raise PlanError(f"the trace of rank {rank} has other actions than schedule {schedule.name!r}")
        columns.append([])
        end = 0
        for span in spans:
            left = max(end, round((span.start_s - start_s) * scale))
            end = max(left, round((span.end_s - start_s) * scale))
            columns[rank].append((left, end, Action.parse(span.label)))
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
    """A step's plan for people and tools: format dynapipe-plan/1, ready for json.dump.

    `in_flight_bytes` [dp_rank][pp_rank], beside the peaks, are of buffers that only instructions have. A plan of
    forwards alone says so: "forward_only" is true.

    A micro-batch whose first document is a piece of a long sample says which: "carried" is [start, end] in positions.

    Errors: PlanError for a plan that cuts samples in another way (fixed rows) and for one of ranks that share cores.
    """
    _refuse_cut_samples(step_plan)
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
    unknown: list[Any] = [None] * len(step_plan.schedules)
    replicas = [
        _replica_json(*replica)
        for replica in zip(
            step_plan.batch.replicas,
            step_plan.schedules,
            step_plan.predictions,
            in_flight_bytes or unknown,
            certificate.replicas if certificate else unknown,
            strict=True,
        )
    ]
    marked = {"forward_only": True} if step_plan.forward_only else {}
    plan = {"format": PLAN_FORMAT, "topology": shape, **marked, "replicas": replicas}
    if certificate is not None:
        whole = {"batch_bound_s": certificate.batch_ns, "free_batch_bound_s": certificate.free_batch_ns}
        plan |= {name: ns / 1e9 for name, ns in whole.items() if ns is not None}
    return plan


def _replica_json(
    replica: ReplicaPlan,
    schedule: PipelineSchedule,
    prediction: Prediction,
    in_flight_bytes: Sequence[int] | None,
    bounds: ReplicaBounds | None,
) -> dict[str, Any]:
    predicted: dict[str, Any] = {
        "makespan_s": prediction.makespan_ns / 1e9,
        "lower_bound_s": prediction.lower_bound_ns / 1e9,
        "peak_bytes": list(prediction.peak_bytes),
    }
    if in_flight_bytes is not None:
        predicted["in_flight_bytes"] = list(in_flight_bytes)
    if bounds is not None:
        numbers = asdict(bounds).items()
        predicted["bounds"] = {name.replace("_ns", "_s"): ns / 1e9 for name, ns in numbers if ns is not None}
    body: dict[str, Any] = {"name": schedule.name, "stages": schedule.lines()}
    if schedule.stage_ranks != tuple(range(len(schedule.ranks))):
        body["placement"] = list(schedule.stage_ranks)
    return {
        "dp_rank": replica.dp_rank,
        "micro_batches": [_micro_batch_json(micro_batch) for micro_batch in replica.micro_batches],
        "schedule": body,
        "predicted": predicted,
    }


def _refuse_cut_samples(step_plan: StepPlan) -> None:
    seen: set[int] = set()
    for micro_batch in step_plan.batch.micro_batches:
        has_piece = micro_batch.attention == "carried"
        for sample in micro_batch.samples[1 if has_piece else 0 :]:
            if sample.start or sample.index in seen:
                raise PlanError(
                    f"the plan cuts sample {sample.index} into pieces, which {PLAN_FORMAT} cannot hold: write plans of"
                    " another rule than fixed-rows, or of longer rows"
                )
            seen.add(sample.index)


def read_plan_json(data: Any) -> tuple[Topology, list[list[dict[str, Any]]], list[PipelineSchedule]]:
    """Topology, and per data-parallel rank the micro-batches (as in the JSON) and the schedule, each proven to run.

    Errors: PlanError naming the field or the action at fault.
    """
    root = _mapping(data, "plan")
    if root.get("format") != PLAN_FORMAT:
        raise PlanError(f"the plan's format is {short(root.get('format'))} but this version reads {PLAN_FORMAT!r}")
    forward_only = root.get("forward_only", False)
    if not isinstance(forward_only, bool):
        raise PlanError(f"the plan's forward_only is {short(forward_only)} but must be true or false")
    shape = _mapping(_field(root, "topology", "plan"), "topology")
    micro_batches, schedules = [], []
    num_replicas = _num_replicas(_field(shape, "dp", "topology"), shape.get("width", 1))
    for dp_rank, raw in enumerate(_replicas_in_order(root, num_replicas)):
        shapes, schedule = _read_replica(raw, f"replica {dp_rank}", forward_only=forward_only)
        micro_batches.append(shapes)
        schedules.append(schedule)
    return _read_topology(shape, schedules), micro_batches, schedules


def _num_replicas(dp: Any, width: Any) -> Any:
    """Errors: PlanError for a width that cannot be; what dp cannot be is left for the replicas to say."""
    if type(width) is not int or width < 1 or (type(dp) is int and dp % width):
        raise PlanError(f"topology: width is {short(width)} with dp {short(dp)} but must be an integer that divides it")
    return dp // width if type(dp) is int else dp


def _replicas_in_order(root: Mapping[str, Any], dp: Any) -> list[Mapping[str, Any]]:
    """The replicas by dp_rank, which must be 0 to dp - 1, in a plan of width 1; of others, to dp / width - 1."""
    replicas = [_mapping(raw, f"replicas[{i}]") for i, raw in enumerate(_list(root, "replicas", "plan"))]
    numbers = [_field(raw, "dp_rank", f"replicas[{i}]") for i, raw in enumerate(replicas)]
    if not replicas or dp != len(replicas) or sorted(numbers, key=str) != sorted(range(len(replicas)), key=str):
        raise PlanError(
            f"the replicas have dp_rank {short(numbers)} but the topology needs each of 0..dp-1 with dp {short(dp)}"
            " once"
        )
    return [raw for _, raw in sorted(zip(numbers, replicas, strict=True), key=lambda pair: int(pair[0]))]


def _read_replica(
    raw: Mapping[str, Any], where: str, *, forward_only: bool
) -> tuple[list[dict[str, Any]], PipelineSchedule]:
    """A replica's micro-batches, and its schedule, proven to run."""
    shapes = [
        _check_micro_batch(m, f"{where} micro-batch {i}") for i, m in enumerate(_list(raw, "micro_batches", where))
    ]
    schedule = _read_schedule(_mapping(_field(raw, "schedule", where), f"{where} schedule"), where)
    schedule = replace(schedule, forward_only=forward_only)
    try:
        validate(schedule, len(shapes), sample_pieces([_micro_batch_of(shape) for shape in shapes]))
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    return shapes, schedule


def _read_topology(shape: Mapping[str, Any], schedules: Sequence[PipelineSchedule]) -> Topology:
    """The topology of schedules that place stages alike."""
    placements = {schedule.stage_ranks for schedule in schedules}
    if len(placements) != 1:
        raise PlanError(f"the replicas place stages differently: {sorted(placements)}")
    (placement,) = placements
    identity = placement == tuple(range(len(placement)))
    tp, pp = _field(shape, "tp", "topology"), _field(shape, "pp", "topology")
    if type(tp) is not int:
        raise PlanError(f"topology: tp is {short(tp)} but must be an integer of at least 1")
    if pp != len(schedules[0].ranks):
        raise PlanError(f"the schedules have {len(schedules[0].ranks)} ranks but the topology has pp {short(pp)}")
    try:
        return Topology(
            tp=tp,
            pp=pp,
            dp=_field(shape, "dp", "topology"),
            layers_per_stage=tuple(shape.get("layers_per_stage", ())),
            placement=() if identity else placement,
            width=shape.get("width", 1),
            vocabulary=shape.get("vocabulary", "whole"),
        )
    except (DynaPipeError, TypeError) as error:
        raise PlanError(f"the plan's topology {short(shape)}: {error}") from error


def _micro_batch_json(micro_batch: MicroBatch) -> dict[str, Any]:
    positions = {}
    if micro_batch.attention == "carried":
        piece = micro_batch.samples[0]
        positions["carried"] = [piece.start, piece.start + piece.encoder]
    return {
        "samples": [sample.index for sample in micro_batch.samples],
        "layout": micro_batch.layout,
        "rows": micro_batch.rows,
        "encoder_len": micro_batch.encoder_len,
        "decoder_len": micro_batch.decoder_len,
        "recompute": micro_batch.recompute,
        **positions,
        **({"documents": micro_batch.documents} if any(sample.first for sample in micro_batch.samples) else {}),
    }


def _check_micro_batch(raw: Any, where: str) -> dict[str, Any]:
    shape = dict(_mapping(raw, where))
    samples = _list(shape, "samples", where)
    counts = {key: _field(shape, key, where) for key in ("rows", "encoder_len", "decoder_len")}
    for key, value in [*counts.items(), *(("samples", index) for index in samples)]:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_COUNT:
            raise PlanError(f"{where}: {key} has {short(value)}, which is not a count or an index of 0 to 2^31")
    layout, documents = _field(shape, "layout", where), shape.get("documents", samples)  # two of a pair
    padded_rows = len(documents) if isinstance(documents, list) and len(documents) <= 2 * len(samples) else 0
    if layout not in ("padded", "packed") or counts["rows"] != (padded_rows if layout == "padded" else 1):
        raise PlanError(
            f"{where}: layout {short(layout)} with {len(samples)} samples in {counts['rows']} rows: padded has a row"
            " a sample (two a pair, whose documents are listed), packed has one"
        )
    if shape.get("recompute") not in ALL_RECOMPUTES:
        raise PlanError(
            f"{where}: recompute is {short(shape.get('recompute'))} but must be one of {', '.join(ALL_RECOMPUTES)}"
        )
    if "carried" in shape:
        piece = _list(shape, "carried", where)
        ints = len(piece) == 2 and all(type(position) is int for position in piece)
        if not ints or not 0 <= piece[0] < piece[1] <= _MOST_COUNT or layout != "packed" or not samples:
            raise PlanError(
                f"{where}: carried is {short(piece)} but must be [start, end], positions of the packed row's first"
                " sample"
            )
    return shape


def pieces_in_json(micro_batches: Sequence[Mapping[str, Any]]) -> dict[int, Piece]:
    """`pieces_by_position` of a replica's micro-batches as `read_plan_json` gives them."""
    return pieces_by_position([_micro_batch_of(shape) for shape in micro_batches])


def _micro_batch_of(shape: Mapping[str, Any]) -> MicroBatch:
    """A micro-batch that holds the piece that the JSON says it has, or nothing."""
    if "carried" not in shape:
        return MicroBatch(())
    start, end = shape["carried"]
    return MicroBatch((SampleLength(shape["samples"][0], end - start, start=start),), "packed", attention="carried")


def _read_schedule(raw: Mapping[str, Any], where: str) -> PipelineSchedule:
    lists = _list(raw, "stages", f"{where} schedule")
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in lists):
        raise PlanError(f"{where}: schedule.stages must hold one list of actions such as '2F0' per pipeline rank")
    ranks = tuple(tuple(_action(text, where) for text in texts) for texts in lists)
    placement = raw.get("placement", list(range(len(ranks))))
    if not isinstance(placement, list) or not all(type(rank) is int for rank in placement):
        raise PlanError(f"{where}: schedule.placement {short(placement)} must list the pipeline rank of each stage")
    return PipelineSchedule(str(raw.get("name", "")), ranks, tuple(placement))


def _action(text: str, where: str) -> Action:
    if len(text) > _MOST_SHOWN:
        raise PlanError(f"{where}: action {short(text)} is not of the form 2F0 (stage, one of F B I W, micro-batch)")
    return Action.parse(text)


def stage_ranks_of(ranks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The rank of each stage, by the actions. Errors: PlanError for a stage on two ranks or on none."""
    placed: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if placed.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"stage {action.stage} is on rank {placed[action.stage]} and, by {action}, on rank {rank}"
                )
    if not placed:
        return tuple(range(len(ranks)))
    if len(placed) <= max(placed):
        missing = [stage for stage in range(len(placed) + 1) if stage not in placed]
        raise PlanError(f"stages {missing} have no action on any rank: number stages from 0 without gaps")
    return tuple(placed[stage] for stage in range(len(placed)))


def _field(raw: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in raw:
        raise PlanError(f"{where} has no field {key!r}")
    return raw[key]


def _list(raw: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = _field(raw, key, where)
    if not isinstance(value, list):
        raise PlanError(f"{where}: {key} is {type(value).__name__} but must be a list")
    return value


def _mapping(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise PlanError(f"{where} is {type(raw).__name__} but must be an object")
    return raw


_LONGEST_CELL = 32  # characters; far above any action


def to_csv(schedule: PipelineSchedule) -> str:
    """The schedule as torch's `_load_csv` reads it. Where stages lie follows from the actions; the name is left out.

    >>> from dynapipe_ext.schedules.published.zero_bubble import zb_h1
    >>> print(to_csv(zb_h1(2, 1)), end="")
    0F0,0I0,0W0
    1F0,1I0,1W0
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str, name: str = "schedule") -> PipelineSchedule:
    """The schedule of `to_csv`, or of torch's `_dump_csv`, whose empty cells (steps without work) are passed over.

    Stages lie on the ranks whose rows name them. The order is not proven to run: see validate.

    Errors: PlanError naming row and cell (both from 1): no action, one that occurs twice, a stage on two ranks; or the
    stages that no row names.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n").lines()
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    ranks = []
    seen: dict[Action, str] = {}
    stage_ranks: dict[int, tuple[int, str]] = {}
    for rank, row in enumerate(_rows(text)):
        actions = []
        for column, cell in enumerate(row, 1):
            if not (word := cell.strip()):
                continue
            where = f"row {rank + 1}, cell {column}"
            action = _csv_action(word, where)
            if action in seen:
                raise PlanError(f"{where}: action {action} stands in {seen[action]} already")
            seen[action] = where
            first_rank, first = stage_ranks.setdefault(action.stage, (rank, where))
            if first_rank != rank:
                raise PlanError(f"{where}: {action} puts stage {action.stage} on a second rank, after that of {first}")
            actions.append(action)
        ranks.append(tuple(actions))
    if not stage_ranks:
        raise PlanError("the text has no action: give a row for each pipeline rank, such as '0F0,0B0'")
    num_stages = max(stage_ranks) + 1
    if len(stage_ranks) < num_stages:
        missing = next(stage for stage in range(num_stages) if stage not in stage_ranks)
        highest = stage_ranks[num_stages - 1][1]
        raise PlanError(
            f"{highest} names stage {num_stages - 1} but no row has an action of stage {missing}: number stages from 0"
            " without gaps"
        )
    return PipelineSchedule(name, tuple(ranks), tuple(stage_ranks[stage][0] for stage in range(num_stages)))


def _rows(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        rows += reader
    except csv.Error as error:
        raise PlanError(f"row {len(rows) + 1}: {error}: cells are actions such as 2F0 with commas between") from error
    return rows


def _csv_action(word: str, where: str) -> Action:
    if len(word) > _LONGEST_CELL:
        raise PlanError(f"{where}: {word[:_LONGEST_CELL]!r}… is no action: give one such as 2F0")
    try:
        return Action.parse(word)
    except PlanError as error:
        raise PlanError(f"{where}: {error}; communication (SEND_F, RECV_B, UNSHARD, …) is worked out here") from error
