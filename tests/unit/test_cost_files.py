"""Cost files with a value changed: read as a cost model that prices, or refused by name."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FittedTimes, TimeCorrection, adjust
from dynapipe_ext.costs.codec import to_json
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DynaPipeError
from tests.unit.test_costs_pieces import table
from tests.unit.test_costs_stage_inputs import MODELS

_GONE = object()
ODD = (None, -1, 0, 1.5, True, "x", math.nan, math.inf, 1e30, 10**30, [], {}, _GONE)
PRICED: dict[str, CostModel] = {
    **{name: MODELS[name] for name in ("counted", "tokens", "pairs")},
    "measured": table(),
    "fitted": adjust(MODELS["tokens"], fitted=FittedTimes(({"F": TimeCorrection(2.0)},) * 3)),
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value within a JSON value, but of long lists."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key, inner in [*(value.items() if isinstance(value, dict) else enumerate(value))][:40]:
            if isinstance(value, dict) or key < 2:
                yield from places(inner, (*place, key))


def changed(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    whole = copy.deepcopy(value)
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if other is _GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = other
    return whole


@pytest.mark.parametrize("name", PRICED)
def test_a_changed_value_is_priced_or_refused_by_name(name: str) -> None:
    raw, num_priced = cost_model_to_json(PRICED[name]), 0
    samples = [SampleLength(index, 24, 8 * (name == "pairs"), 4) for index in range(2)]
    micro_batches = [MicroBatch((sample,)) for sample in samples]
    for place in places(raw):
        if place[0] == "provenance":
            continue
        for other in ODD:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    costs = cost_model_from_json(changed(raw, place, other))
                    costs.evaluate(micro_batches)
                    costs.evaluate_shapes([1, 2], [8, 8], 8 * (name == "pairs"))
                    num_priced += len(costs.fingerprint()) > 0
                except DynaPipeError:
                    pass
                except Exception as error:
                    raise AssertionError(f"{place}: {other!r} ends in {type(error).__name__}: {error}") from error
    assert num_priced > len(ODD)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["grids"][2].update(layer="x"), "the grid of 'x' under recompute 'none' is not of a layer"),
        (lambda raw: raw["grids"][0]["columns"].pop("stored_mb"), "has no column stored_mb"),
        (lambda raw: raw["grids"][0]["columns"].update(y=raw["grids"][0]["columns"]["peak_mb"]), "has a column 'y'"),
        (lambda raw: raw.update(num_layers=10**30), "num_layers is 1000.* but must be an integer"),
        (lambda raw: raw["parameter_bytes"].update(embedding=-1.0), "bytes of embedding are -1.0 but must be 0 to"),
        (lambda raw: raw.update(working_in="x"), "working_in is 'x' but must be one of FBI, F"),
        (lambda raw: raw.update(state_parts=[math.nan, 1.0]), "state_parts is .nan, 1.0. but must be a list"),
        (lambda raw: raw["grids"][0]["axes"][1].__setitem__(0, 0), "must be rows and lengths: whole numbers, above 0"),
    ],
)
def test_a_table_of_other_values_is_refused(change: Any, says: str) -> None:
    raw = copy.deepcopy(cost_model_to_json(PRICED["measured"]))
    change(raw)
    with pytest.raises(DynaPipeError, match=says):
        cost_model_from_json(raw)


def test_a_model_of_other_types_is_refused_whoever_makes_it() -> None:
    raw: Any = cost_model_to_json(PRICED["counted"])
    for name, other in (("qkv_bias", 5), ("gated_mlp", {}), ("rope_theta", "x"), ("top_k", 10**30)):
        with pytest.raises(ConfigError, match=rf"{name} is .* but must be "):
            cost_model_from_json({**raw, "architecture": {**raw["architecture"], name: other}})


def test_numbers_of_numpy_and_whole_floats_are_pythons_then() -> None:
    raw: Any = cost_model_to_json(PRICED["counted"])
    plain = MODELS["counted"]
    other = replace(
        plain,
        latency_ns=np.int64(plain.latency_ns),
        flops_per_s=Fraction(plain.flops_per_s),
        flash=np.bool_(plain.flash),
        param_bytes=np.int64(plain.param_bytes),
        overhead_ns=float(plain.overhead_ns),
    )
    assert other == plain
    assert json.dumps(cost_model_to_json(other)) == json.dumps(raw)
    tokens = TokenCosts(np.int64(2), ns_per_token=np.int64(7), stage_scale=np.array([1.0, 2.0]))  # type: ignore[arg-type]
    assert tokens == TokenCosts(2, ns_per_token=7, stage_scale=(1.0, 2.0))
    assert tokens.fingerprint() == TokenCosts(2, ns_per_token=7, stage_scale=(1.0, 2.0)).fingerprint()
    assert json.dumps(to_json(Topology(pp=np.int64(2)))) == json.dumps(to_json(Topology(pp=2)))  # type: ignore[arg-type]
    read = cost_model_from_json({**raw, "latency_ns": float(raw["latency_ns"])})
    assert read.fingerprint() == plain.fingerprint()
