"""Cost models as JSON, whichever of the four they are, for training or forwards alone: how planners receive them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.fitted import BaseCosts, FittedCosts
from dynapipe_ext.costs.forwards import ForwardCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, short


def cost_model_to_json(model: BaseCosts | FittedCosts | ForwardCosts) -> dict[str, Any]:
    """A cost model as JSON; its "kind" says which of the four it is, or that it is one of forwards alone."""
    match model:
        case ForwardCosts(base):
            return {"kind": "forwards", "base": cost_model_to_json(base)}  # type: ignore[arg-type]
        case AnalyticCosts() | CostTable() | TokenCosts() | FittedCosts():
            return model.to_json()
        case _:
            assert_never(model)


def cost_model_from_json(raw: Mapping[str, Any]) -> CostModel:
    """The cost model that `cost_model_to_json` wrote."""
    if raw.get("kind") == "fitted":
        base = raw.get("base")
        if not isinstance(base, Mapping):
            raise DataError(f"fitted costs have the base {base!r}, not a cost model: fit them again")
        return FittedCosts.from_json(raw, _base_from_json(base))
    if raw.get("kind") == "forwards":
        base = raw.get("base")
        if not isinstance(base, Mapping) or base.get("kind") == "forwards":
            raise DataError(f"costs of forwards alone have the base {short(base)}, not a cost model: write them again")
        return ForwardCosts(cost_model_from_json(base))
    return _base_from_json(raw)


def _base_from_json(raw: Mapping[str, Any]) -> BaseCosts:
    match raw.get("kind"):
        case "analytic":
            return AnalyticCosts.from_json(raw)
        case "table":
            return CostTable.from_json(raw)
        case "tokens":
            return TokenCosts.from_json(raw)
        case other:
            raise ConfigError(f"cost model has kind {other!r}: expected analytic, table, tokens or fitted")
