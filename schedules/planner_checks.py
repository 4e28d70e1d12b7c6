"""What a planner refuses of its own values: limits, widths, pieces without a price, collectives nobody priced."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batch.micro_batches import Pieces
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, widths_of
from dynapipe_ext.costs.adjustments import AdjustedCosts
from dynapipe_ext.costs.model import CostModel, PricesMicroBatches, UserCosts
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.schedules.search.problem import NO_LIMIT_BYTES
from dynapipe_ext.settings.plan_rules import PlanRules


def check_forward_only(rules: PlanRules) -> None:
    """Refuse what concerns backwards. Errors: ConfigError."""
    concerns_backwards = {
        "schedule": rules.schedule != "adaptive",
        "split_backward": rules.split_backward,
        "recompute": rules.recompute not in ("auto", "none"),
        "noise": rules.noise > 0,
    }
    for name, is_set in concerns_backwards.items():
        if is_set:
            raise ConfigError(
                f"{name} is {getattr(rules, name)!r} but steps of forwards alone have no backward:"
                " leave it out, or take Planner.for_forwards(), which does"
            )


def check_types(
    topology: Topology, costs: object, message_format: ActivationFormat | None, collectives: ReplicaCollectives | None
) -> None:
    """Refuse what is not of the declared class. Errors: ConfigError naming field, value and class."""
    kinds: dict[str, tuple[object, tuple[type, ...]]] = {
        "topology": (topology, (Topology,)),
        "format": (message_format, (ActivationFormat, type(None))),
        "collectives": (collectives, (ReplicaCollectives, type(None))),
    }
    for name, (value, choices) in kinds.items():
        if not isinstance(value, choices):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in choices)
            raise ConfigError(f"{name} is {short(value)} but must be of type {wanted}: give such a value")
    if not isinstance(costs, PricesMicroBatches):
        raise ConfigError(f"costs are {short(costs)}, which price nothing: give a cost model (TokenCosts)")


def class_of_costs(costs: CostModel) -> str:
    """Of the class that prices, without adjustments."""
    return type(costs.prices if isinstance(costs, UserCosts | AdjustedCosts) else costs).__name__


def check_bounds(memory_limit_bytes: float, seed: int, num_cores: int | None) -> None:
    """Refuse a memory limit, seed or number of cores that cannot be. Errors: ConfigError naming value and bound."""
    limit = memory_limit_bytes
    if not isinstance(limit, int | float | np.integer) or isinstance(limit, bool) or not 1 <= limit <= NO_LIMIT_BYTES:
        raise ConfigError(
            f"memory_limit_bytes is {short(limit)} but must be a number of 1 to 2^60: give the bytes of one rank's"
            " device"
        )
    if type(seed) is not int:
        raise ConfigError(f"seed is {short(seed)} but must be an integer: give one such as 0")
    if num_cores is not None and (type(num_cores) is not int or num_cores < 1):
        raise ConfigError(
            f"num_cores is {short(num_cores)} but must be a number of at least 1, or None: give the cores that"
            " all ranks share"
        )


def check_widths(widths: tuple[int, ...], topology: Topology) -> None:
    """Refuse widths to choose from that data parallel ranks cannot have. Errors: ConfigError."""
    allowed = widths_of(topology.dp)
    if not isinstance(widths, tuple) or not set(widths) <= set(allowed) or sorted(set(widths)) != [*widths]:
        raise ConfigError(
            f"widths {short(widths)} of dp {topology.dp}: give some of {', '.join(map(str, allowed))}, ascending"
        )
    if widths and topology.width != 1:
        raise ConfigError(
            f"widths are {short(widths)} but the topology has width {topology.width} already: leave one of both out"
        )


def check_priced_pieces(pieces: Pieces, costs: CostModel) -> None:
    """Refuse pieces of samples where the costs have no price for them. Errors: ConfigError."""
    if pieces != "off" and not costs.facts.prices_pieces:
        raise ConfigError(
            f"pieces is {pieces!r} but these {class_of_costs(costs)} have no price for pieces of long samples:"
            " give a table in which `dynapipe profile` has measured some, counted costs (AnalyticCosts, without windows"
            " and experts of a capacity), or pieces off"
        )


def check_collectives(collectives: ReplicaCollectives | None, costs: CostModel) -> None:
    """Refuse a run whose micro-batches issue other collectives than the costs price. Errors: ConfigError."""
    priced = costs.facts.replica_collectives
    if collectives and priced and collectives.of_micro_batches != priced.of_micro_batches:
        raise ConfigError(
            f"collectives {collectives.of_micro_batches} inside micro-batches and with their gradients were given, but"
            f" the costs are those of a run with {priced.of_micro_batches}: leave collectives out, or give the costs of"
            " this run (zero_stage, ep)"
        )


def room_of(limit_bytes: float, reserve_bytes: int) -> int:
    """Bytes of a rank that a plan may fill. Errors: PlanError for none."""
    room = int(limit_bytes) - reserve_bytes
    if room <= 0:
        raise PlanError(f"{room} B are left for a rank: raise memory_limit_bytes")
    return room
