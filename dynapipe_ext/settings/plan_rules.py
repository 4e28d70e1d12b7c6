"""The rules of a plan: what decides how a batch is cut and scheduled, next to topology, costs, memory and seed.

Also the names of schedules, and the placements under which they run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from dynapipe_ext.batch.micro_batches import Layout, LossNorm, Pieces, Recompute
from dynapipe_ext.batch.topology import PlacementName, Topology
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.settings.declared import check_declared, parse_number_or_word, setting

SplitPolicy = Literal["dynapipe-ext", "batch-max", "fixed-rows", "packed-balanced", "dynapipe"]
ScheduleName = Literal["adaptive", "1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "cyclic"]
# Every backward as I and W, asked for or not.
SPLIT_SCHEDULES: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", "zb-v", "v-half")
_MOST_PIECE = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """The one declaration of these rules. A `Planner`, the [plan] table of a run and the drop-in's settings are plan
    rules with more fields of their own.

    `layout`: samples of a micro-batch are rows padded to the longest, or documents end to end in one row. A
    `split_policy` other than "dynapipe-ext" splits batches as a peer does, for comparisons, and at its best: sizes that
    it leaves open, like the length of packed rows without `max_tokens`, are those whose step ends first. `max_tokens`
    limits the positions of one micro-batch, of padded rows over both sides, of a packed row of either side; 0: only
    memory limits it. `effort` counts the moves that the search tries: where the batch is cut, recomputation, replica,
    order, dispatch policy. From 8 replicas on it tries more, in proportion. A larger effort begins as a smaller one
    does and ends no worse; for packed rows from 8,000 on, as a smaller one begins from fewer numbers of rows.

    `split_backward` runs backwards as I and W under the adaptive schedule. `recompute` "auto" chooses for each
    micro-batch, and "stage" only for samples in pieces: whole samples that do not fit with "full" do not fit with
    "stage" either. If it would recompute or nothing fits, it also tries the kinds with "head", a chunked head.
    `replica_counts` "equal" gives every replica as many micro-batches; runs decide it by what replicas do together.
    `pieces` cuts samples of more tokens than that, and runs their pieces one after another ("carried" attention);
    "auto" does so where the step is predicted to end earlier. With `noise` the search judges an order by its mean
    makespan over times that are drawn evenly from 1 - noise to 1 + noise of the predicted ones. Predictions and bounds
    stay those of the predicted times.
    """

    layout: Layout = setting("padded", "--layout", "layout of micro-batches")
    schedule: ScheduleName = setting("adaptive", "--schedule", "schedule of the pipeline")
    split_policy: SplitPolicy = setting(
        "dynapipe-ext", help="split batches as this package or, to compare, a peer does"
    )
    pad_multiple: int = setting(8, "--pad-multiple", "rows are rounded up to it", at_least=1, at_most=1 << 24)
    max_tokens: int = setting(
        0, "--max-tokens", "maximum positions of a micro-batch; 0: as memory allows", at_least=0, at_most=1 << 40
    )
    effort: int = setting(8000, "--effort", "moves tried by the search", at_least=0, at_most=10**9)
    split_backward: bool = setting(False, "--split-backward", "run B as I and W")
    loss_norm: LossNorm = setting("tokens")
    recompute: Literal["auto", Recompute] = setting("auto")
    replica_counts: Literal["free", "equal"] = "free"
    pieces: Pieces = setting(
        "off",
        "--pieces",
        "run samples of more than N tokens in pieces (auto: if that is faster)",
        "auto|off|N",
        parse=parse_number_or_word,
    )
    noise: float = setting(
        0.0, "--noise", "judge orders by times that may be off by such a share", "SHARE", at_least=0, at_most=0.9
    )

    @property
    def equal_counts(self) -> bool:
        return self.replica_counts == "equal"

    @property
    def is_split(self) -> bool:
        """Whether backwards run as I and W."""
        return self.split_backward or self.schedule in SPLIT_SCHEDULES

    def as_keywords(self) -> dict[str, Any]:
        """Return only the rules, to hold all of them in another class: `Planner(topology, costs, limit, **...)`."""
        return {f.name: getattr(self, f.name) for f in fields(PlanRules)}


def check_rules(rules: PlanRules, where: str = "", *, counts_may_be_free: bool = False) -> None:
    """Reject rules of another type, out of bounds, or that do not go together. Raises ConfigError.

    `counts_may_be_free`: in steps of some context-parallel degree, whatever `replica_counts` is.
    """
    check_declared(rules, where)
    if rules.split_backward and rules.schedule != "adaptive":
        raise ConfigError(
            f"{where}split_backward goes with the adaptive schedule, not with {rules.schedule!r}: choose one of them"
        )
    if rules.noise and rules.schedule != "adaptive":
        raise ConfigError(
            f"{where}noise is {rules.noise:g} with schedule {rules.schedule!r}, whose order is given: search one"
            " (adaptive), or leave noise out"
        )
    if rules.pieces != "off":
        _check_pieces(rules, where, counts_are_free=counts_may_be_free or not rules.equal_counts)
    if rules.max_tokens and rules.max_tokens < rules.pad_multiple:
        raise ConfigError(
            f"{where}max_tokens is {rules.max_tokens} but must be at least pad_multiple, which is"
            f" {rules.pad_multiple}, or 0"
        )


def _check_pieces(rules: PlanRules, where: str, *, counts_are_free: bool) -> None:
    """Reject pieces with rules that do not cut samples."""
    pieces = rules.pieces
    if pieces != "auto" and not rules.pad_multiple <= int(pieces) <= _MOST_PIECE:
        raise ConfigError(
            f"{where}pieces is {short(pieces)} but must be off, auto or the tokens of a piece, {rules.pad_multiple}"
            f" (pad_multiple) to {_MOST_PIECE:,}"
        )
    beside = {
        "layout": (rules.layout == "packed", 'pieces share packed rows with short documents: layout "packed"'),
        "schedule": (rules.schedule == "adaptive", "published schedules know no pieces: the adaptive schedule"),
        "split_policy": (rules.split_policy == "dynapipe-ext", "peers cut in their own way: split_policy dynapipe-ext"),
        "replica_counts": (
            counts_are_free,
            'all pieces of a sample run on one replica: replica_counts "free", one'
            " replica of all data parallel ranks (width)",
        ),
    }
    for name, (goes, why) in beside.items():
        if not goes:
            raise ConfigError(f"{where}pieces is {pieces!r} with {name} {getattr(rules, name)!r}: {why}, or pieces off")


def own_placement(schedule: ScheduleName) -> PlacementName:
    """Return the placement under which a schedule runs by default.

    >>> own_placement("zb-v"), own_placement("adaptive")
    ('v', 'linear')
    """
    if schedule == "interleaved-1f1b":
        return "interleaved"
    return "v" if schedule in ("zb-v", "v-half") else "linear"


def check_placed(schedule: ScheduleName, topology: Topology, where: str = "") -> None:
    """Reject stages on other ranks than the schedule has them; the adaptive one accepts any. Raises ConfigError."""
    placement, needed = topology.placement_name, own_placement(schedule)
    if schedule == "adaptive":
        return
    match needed:
        case "linear":
            is_placed, stages = placement == needed, "one stage a rank"
        case "interleaved":
            is_placed, stages = topology.is_interleaved, "interleaved stages"
        case "v":
            is_placed, stages = placement == "v, 2 stages a rank", "two stages a rank in a V"
    if not is_placed:
        move = f"take placement {needed!r}" if topology.vocabulary == "whole" else "leave the vocabulary whole"
        raise ConfigError(
            f"{where}schedule {schedule!r} is for {stages}, but the placement is {topology.stage_ranks} ({placement}):"
            f" {move}, or take the adaptive schedule, which runs under any"
        )
