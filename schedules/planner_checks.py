"""Checks of a planner's own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, list_cp_degrees
from dynapipe_ext.costs.adjustments import AdjustedCosts
from dynapipe_ext.costs.model import CostModel, MicroBatchPricer, UserCosts
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.schedules.search.problem import NO_LIMIT_BYTES
from dynapipe_ext.settings.plan_rules import PlanRules

if TYPE_CHECKING:
    from dynapipe_ext.schedules.planner import Planner


def name_costs(costs: CostModel) -> str:
    """Return the name of the class that prices, without adjustments."""
    return type(costs.prices if isinstance(costs, UserCosts | AdjustedCosts) else costs).__name__


def check_types(planner: Planner) -> None:
    """Check the classes of a planner's values. Raises ConfigError naming field, value and class."""
    for name, kind, may_be_none in (
        ("topology", Topology, False),
        ("format", ActivationFormat, True),
        ("collectives", ReplicaCollectives, True),
    ):
        value = getattr(planner, name)
        if not isinstance(value, kind) and not (may_be_none and value is None):
            wanted = f"{kind.__name__} or None" if may_be_none else kind.__name__
            raise ConfigError(f"{name} is {short(value)} but must be of type {wanted}: give such a value")
    if not isinstance(planner.costs, MicroBatchPricer):
        raise ConfigError(f"costs are {short(planner.costs)}, which price nothing: give a cost model (TokenCosts)")


def check_values(planner: Planner) -> None:
    """Check a planner's limits, degrees and collectives against each other and its costs. Raises ConfigError."""
    if fault := next(_list_faults(planner), None):
        raise ConfigError(fault)


def check_pieces(problems: Sequence[tuple[PlanRules, CostModel]]) -> None:
    """Check that costs price the pieces that the rules of a degree have. Raises ConfigError."""
    for rules, costs in problems:
        if rules.pieces != "off" and not costs.facts.prices_pieces:
            raise ConfigError(
                f"pieces is {rules.pieces!r} but these {name_costs(costs)} have no price for pieces of long samples:"
                " give a table in which `dynapipe profile` has measured some, counted costs (AnalyticCosts), or pieces"
                " off"
            )


def _list_faults(planner: Planner) -> Iterator[str]:
    limit, seed, cores = planner.memory_limit_bytes, planner.seed, planner.num_cores
    widths, topology = planner.widths, planner.topology
    if not isinstance(limit, int | float | np.integer) or isinstance(limit, bool) or not 1 <= limit <= NO_LIMIT_BYTES:
        yield f"memory_limit_bytes is {short(limit)} but must be a number of 1 to 2^60: give the bytes of one device"
    if type(seed) is not int:
        yield f"seed is {short(seed)} but must be an integer: give one such as 0"
    if cores is not None and (type(cores) is not int or cores < 1):
        yield f"num_cores is {short(cores)} but must be a number of at least 1, or None: give the cores of all ranks"
    allowed = list_cp_degrees(topology.dp)
    if not isinstance(widths, tuple) or not set(widths) <= set(allowed) or sorted(set(widths)) != [*widths]:
        yield f"widths {short(widths)} of dp {topology.dp}: give some of {', '.join(map(str, allowed))}, ascending"
    elif widths and topology.width != 1:
        yield f"widths are {short(widths)} but the topology has width {topology.width} already: leave one of both out"
    given, priced = planner.collectives, planner.costs.facts.replica_collectives
    if given and priced and given.of_micro_batches != priced.of_micro_batches:
        yield (
            f"collectives {given.of_micro_batches} inside micro-batches and with their gradients were given, but the"
            f" costs are those of a run with {priced.of_micro_batches}: leave collectives out, or give the costs of"
            " this run (zero_stage, ep)"
        )
    if planner.forward_only:
        concerns_backwards = {
            "schedule": planner.schedule != "adaptive",
            "split_backward": planner.split_backward,
            "recompute": planner.recompute not in ("auto", "none"),
            "noise": planner.noise > 0,
        }
        for name in (name for name, is_set in concerns_backwards.items() if is_set):
            yield (
                f"{name} is {getattr(planner, name)!r} but forward-only steps have no backward: leave it out, or use"
                " Planner.for_forwards(), which does"
            )
