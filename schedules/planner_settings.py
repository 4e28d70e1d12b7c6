"""What a `Planner` may be made of: each setting by its type, bounds and choices, before anything is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.config import SplitRule
from dynapipe_ext.costs.abilities import prices_pieces, replica_collectives_of
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.plan import RECOMPUTES, Layout, LossNorm
from dynapipe_ext.schedule_names import ScheduleName
from dynapipe_ext.suggestion import did_you_mean
from dynapipe_ext.topology import Topology

if TYPE_CHECKING:
    from dynapipe_ext.schedules.planner import Planner

_BOUNDS = {"pad_multiple": (1, 1 << 24), "max_tokens": (0, 1 << 40), "effort": (0, 10**9)}
_MOST_PIECE = 1 << 31
_MOST_BYTES = 1 << 60  # sums of bytes and of bytes x time stay within the integers of both cores
_CHOICES: dict[str, tuple[object, ...]] = {
    "layout": get_args(Layout),
    "schedule": get_args(ScheduleName),
    "rule": get_args(SplitRule),
    "loss_norm": get_args(LossNorm),
    "recompute": (*RECOMPUTES, None),
}
_SWITCHES = ("split_backward", "fill_waits", "equal_counts")


def check_forward_only(planner: Planner) -> None:
    """Refuse what concerns backwards. Errors: ConfigError."""
    given = {
        "schedule": planner.schedule != "adaptive",
        "split_backward": planner.split_backward,
        "fill_waits": planner.fill_waits,
        "recompute": planner.recompute not in (None, "none"),
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{name} is {getattr(planner, name)!r} but steps of forwards alone have no backward:"
                " leave it out, or take Planner.for_forwards(), which does"
            )


def check_pieces(planner: Planner) -> None:
    """Refuse pieces where they cannot be. Errors: ConfigError naming the setting beside which they do not go."""
    pieces = planner.pieces
    if pieces != "auto" and (type(pieces) is not int or not planner.pad_multiple <= pieces <= _MOST_PIECE):
        raise ConfigError(
            f"pieces is {short(pieces)} but must be off, auto or the tokens of a piece, {planner.pad_multiple}"
            f" (pad_multiple) to {_MOST_PIECE:,}"
        )
    beside = {
        "layout": (planner.layout == "packed", 'pieces share packed rows with short documents: layout "packed"'),
        "schedule": (planner.schedule == "adaptive", "published schedules know no pieces: the adaptive schedule"),
        "rule": (planner.rule == "dynapipe-ext", "peers' rules cut in their own way: rule dynapipe-ext"),
        "equal_counts": (not planner.equal_counts, "all pieces of a sample run on one replica: let counts differ"),
    }
    for name, (goes, why) in beside.items():
        if not goes:
            raise ConfigError(f"pieces is {pieces!r} with {name} {getattr(planner, name)!r}: {why}, or pieces off")
    if not prices_pieces(planner.costs):
        raise ConfigError(
            f"pieces is {pieces!r} but these {type(planner.costs).__name__} have no price for pieces of long samples:"
            " give a table in which `dynapipe profile` has measured some, counted costs (AnalyticCosts, without windows"
            " and experts of a capacity), or pieces off"
        )


def check_types(planner: Planner) -> None:
    """Refuse what is not of the declared class. Errors: ConfigError naming field, value and class."""
    kinds: dict[str, tuple[type, ...]] = {
        "topology": (Topology,),
        "format": (ActivationFormat, type(None)),
        "collectives": (ReplicaCollectives, type(None)),
        **dict.fromkeys(_SWITCHES, (bool,)),
    }
    for name, choices in kinds.items():
        value = getattr(planner, name)
        if not isinstance(value, choices):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in choices)
            raise ConfigError(f"{name} is {short(value)} but must be of type {wanted}: give such a value")
    if not callable(getattr(planner.costs, "evaluate", None)):
        raise ConfigError(f"costs are {short(planner.costs)}, which price nothing: give a cost model (TokenCosts)")


def check_bounds(planner: Planner) -> None:
    """Refuse values of another type or out of bounds. Errors: ConfigError naming value, bound and next move."""
    limit = planner.memory_limit_bytes
    if not isinstance(limit, int | float | np.integer) or isinstance(limit, bool) or not 1 <= limit <= _MOST_BYTES:
        raise ConfigError(
            f"memory_limit_bytes is {short(limit)} but must be a number of 1 to 2^60: give the bytes of one rank's"
            " device"
        )
    if type(planner.seed) is not int:
        raise ConfigError(f"seed is {short(planner.seed)} but must be an integer: give one such as 0")
    for name, (least, most) in _BOUNDS.items():
        value = getattr(planner, name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"{name} is {short(value)} but must be an integer of {least} to {most:,}: give one within these bounds"
            )
    if planner.num_cores is not None and (type(planner.num_cores) is not int or planner.num_cores < 1):
        raise ConfigError(
            f"num_cores is {short(planner.num_cores)} but must be a number of at least 1, or None: give the cores that"
            " all ranks share"
        )
    for name, choices in _CHOICES.items():
        value = getattr(planner, name)
        if not isinstance(value, str | None) or value not in choices:
            near = did_you_mean(str(value), map(str, choices))
            raise ConfigError(f"{name} is {short(value)}: choose from {', '.join(map(str, choices))}{near}")


def check_collectives(given: ReplicaCollectives | None, costs: CostModel) -> None:
    """Refuse a run whose micro-batches issue other collectives than the costs price. Errors: ConfigError."""
    known = replica_collectives_of(costs)
    if given and known and given.of_micro_batches != known.of_micro_batches:
        raise ConfigError(
            f"collectives {given.of_micro_batches} inside micro-batches and with their gradients were given, but the"
            f" costs are those of a run with {known.of_micro_batches}: leave collectives out, or give the costs of this"
            " run (zero_stage, ep)"
        )
