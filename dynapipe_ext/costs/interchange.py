"""Cost models as JSON, whichever of the four they are, and views of them: how planners receive them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.costs.abilities import costs_as_json
from dynapipe_ext.costs.adapted import AdaptedCosts
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.encoder_decoder_run import EncoderDecoderRunCosts
from dynapipe_ext.costs.forwards import ForwardCosts
from dynapipe_ext.costs.frozen import FrozenCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, reason, short

_NUM_CORES = "num_cores"  # of the machine that seconds are of, beside the fields of any kind


def cost_model_to_json(model: CostModel) -> dict[str, Any]:
    """A cost model as JSON; its "kind" says which of the four it is, or what view of one (adapted, forwards, frozen).

    Errors: ConfigError for one of another kind.
    """
    return costs_as_json(model)


def cost_model_from_json(raw: Mapping[str, Any]) -> CostModel:
    """The cost model that `cost_model_to_json` wrote."""
    if raw.get("kind") == "forwards":
        base = raw.get("base")
        if not isinstance(base, Mapping) or base.get("kind") == "forwards":
            raise DataError(f"costs of forwards alone have the base {short(base)}, not a cost model: write them again")
        return ForwardCosts(cost_model_from_json(base))
    if raw.get("kind") == "adapted":
        base = raw.get("base")
        if not isinstance(base, Mapping) or base.get("kind") in ("adapted", "forwards"):
            raise DataError(f"adapted costs have the base {short(base)}, not a cost model: write them again")
        return AdaptedCosts.from_json(raw, cost_model_from_json(base))
    if raw.get("kind") == "frozen":
        base = raw.get("base")
        if not isinstance(base, Mapping):
            raise DataError(f"costs of frozen weights have the base {short(base)}, not a cost model: write them again")
        return FrozenCosts.from_json(raw, _base_from_json(base))
    return _base_from_json(raw)


def run_costs_to_json(model: CostModel, num_cores: int | None) -> dict[str, Any]:
    """A cost model as JSON with the cores that all ranks of its run shared; none where each had a device."""
    return cost_model_to_json(model) | ({} if num_cores is None else {_NUM_CORES: num_cores})


def read_cost_file(path: str | Path) -> CostModel:
    """The cost model in a JSON file of any kind. Errors: DataError for a file that holds none."""
    return read_run_costs(path)[0]


def read_run_costs(path: str | Path) -> tuple[CostModel, int | None]:
    """The cost model in a JSON file of any kind, and the cores that the ranks of the run that wrote it shared (None:
    each had a device, or no run wrote it). Errors: DataError for a file that holds none."""
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


def _base_from_json(raw: Mapping[str, Any]) -> CostModel:
    match raw.get("kind"):
        case "analytic":
            return AnalyticCosts.from_json(raw)
        case "encoder-decoder":
            return EncoderDecoderRunCosts.from_json(raw)
        case "table":
            return CostTable.from_json(raw)
        case "tokens":
            return TokenCosts.from_json(raw)
        case other:
            raise ConfigError(f"cost model has kind {other!r}: expected analytic, encoder-decoder, table or tokens")
