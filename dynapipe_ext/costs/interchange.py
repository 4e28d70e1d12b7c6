"""Cost models as JSON, with adjustments. Planner processes and other ranks receive them in this form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.costs.adjustments import ADJUSTMENTS, adjust, read_adjustment
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel, MicroBatchPricer, UserCosts, as_cost_model
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, reason, short

_KINDS: Mapping[str, type[AnalyticCosts | CostTable | TokenCosts]] = {
    "analytic": AnalyticCosts, "encoder-decoder": AnalyticCosts, "table": CostTable, "tokens": TokenCosts
}  # fmt: skip
_NUM_CORES = "num_cores"  # of the machine that was measured, next to the fields of any kind


def cost_model_to_json(costs: MicroBatchPricer) -> dict[str, Any]:
    """Return a cost model as JSON. Its "kind" is "analytic", "encoder-decoder", "table", "tokens", or an adjustment of
    "base". Raises ConfigError for models without `to_json`: a user's own, and estimates."""
    model = as_cost_model(costs)
    if (raw := model.to_json()) is None:
        own = model.prices if isinstance(model, UserCosts) else model
        raise ConfigError(
            f"{type(own).__name__} has no to_json, by which planner processes and other ranks get their costs: plan"
            " in this process (num_workers 0), or give one of the cost models of dynapipe_ext.costs"
        )
    return raw


def cost_model_from_json(raw: Mapping[str, Any]) -> CostModel:
    """Return the model that `cost_model_to_json` or `run_costs_to_json` wrote. Raises DataError or ConfigError."""
    raw = {key: value for key, value in raw.items() if key != _NUM_CORES}
    kind = raw.get("kind")
    if kind in ADJUSTMENTS:
        base = raw.get("base")
        if not isinstance(base, Mapping) or base.get("kind") in ADJUSTMENTS[ADJUSTMENTS.index(kind) :]:
            raise DataError(f"{kind} costs have the base {short(base)}, not a cost model: write them again")
        return adjust(cost_model_from_json(base), **read_adjustment(raw))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"cost model has kind {kind!r}: expected {', '.join(_KINDS)}")
    return _KINDS[kind].from_json(raw)


def run_costs_to_json(model: CostModel, num_cores: int | None) -> dict[str, Any]:
    """Return a cost model as JSON, with the CPU cores that all ranks of its run shared (None: each had a device)."""
    return cost_model_to_json(model) | ({} if num_cores is None else {_NUM_CORES: num_cores})


def read_cost_file(path: str | Path) -> CostModel:
    """Return the cost model in a JSON file. Raises DataError or ConfigError for other files."""
    return read_run_costs(path)[0]


def read_run_costs(path: str | Path) -> tuple[CostModel, int | None]:
    """Return the cost model in a JSON file, and the number of cores that the ranks of its run shared (None: each had a
    device, or no run wrote it). Raises DataError or ConfigError for other files."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cost file {path} cannot be read ({reason(error)}): give a cost model written as JSON"
        ) from error
    if not isinstance(raw, dict):
        raise DataError(f"cost file {path} holds {type(raw).__name__}: give a cost model written as JSON")
    num_cores = raw.pop(_NUM_CORES, None)
    if num_cores is not None and (type(num_cores) is not int or num_cores < 1):
        raise DataError(f"cost file {path}: num_cores is {short(num_cores)} but must be a number of at least 1")
    try:
        return cost_model_from_json(raw), num_cores
    except DynaPipeError as error:
        raise type(error)(f"cost file {path}: {error}") from error
