"""A measured cost table as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.links import Links
from dynapipe_ext.costs.piece_surcharge import PieceSurcharges
from dynapipe_ext.costs.tokens import topology_from_json, topology_to_json
from dynapipe_ext.errors import DataError

if TYPE_CHECKING:
    from dynapipe_ext.costs.table import CostTable

FORMAT = "dynapipe-costs/1"
# What was not known to tables from the start is left out where it says nothing: these read as they always did.
STATES_PER_PARAMETER_BYTE = (2.0, 6.0)  # 16-bit weights and gradients; fp32 master and Adam moments, sharded over dp
VALUE_BYTES = 2


def table_to_json(table: CostTable) -> dict[str, Any]:
    return {
        **{"format": FORMAT, "kind": "table"},
        "hidden_size": table.hidden_size,
        "num_layers": table.num_layers,
        **({"num_decoder_layers": table.num_decoder_layers} if table.num_decoder_layers else {}),
        "topology": topology_to_json(table.topology),
        "lm_head": table.lm_head,
        "split_w": table.split_w,
        "comm_gbps": table.comm_gbps,
        "comm_latency_us": table.comm_latency_us,
        **({"links": table.links.to_json()} if table.links else {}),
        "working_in": table.working_in,
        **({"state_parts": list(table.state_parts)} if table.state_parts != STATES_PER_PARAMETER_BYTE else {}),
        **({"value_bytes": table.value_bytes} if table.value_bytes != VALUE_BYTES else {}),
        **({"packed_bytes": dict(table.packed_bytes)} if table.packed_bytes else {}),
        **({"once_bytes": dict(table.once_bytes)} if table.once_bytes else {}),
        **({"pieces": table.pieces.to_json()} if table.pieces else {}),
        "parameter_bytes": dict(table.parameter_bytes),
        "provenance": dict(table.provenance),
        "grids": [
            {"recompute": recompute, "layer": kind, **table.grids[recompute, kind].to_json()}
            for recompute, kind in sorted(table.grids)
        ],
    }


def table_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a CostTable. Errors: DataError for what is no table, or one of another version."""
    if raw.get("format") != FORMAT:
        raise DataError(f"cost table has format {raw.get('format')!r} but this version reads {FORMAT!r}: measure again")
    try:
        return {
            "grids": {(grid["recompute"], grid["layer"]): Grid.from_json(grid) for grid in raw["grids"]},
            "parameter_bytes": {name: float(value) for name, value in raw["parameter_bytes"].items()},
            "hidden_size": int(raw["hidden_size"]),
            "num_layers": int(raw["num_layers"]),
            "num_decoder_layers": int(raw.get("num_decoder_layers", 0)),
            "topology": topology_from_json(raw["topology"]),
            "lm_head": raw["lm_head"],
            "split_w": float(raw["split_w"]),
            "comm_gbps": float(raw["comm_gbps"]),
            "comm_latency_us": float(raw["comm_latency_us"]),
            "links": Links.from_json(raw["links"]) if "links" in raw else None,
            "working_in": raw.get("working_in", "FBI"),
            "state_parts": tuple(map(float, raw.get("state_parts", STATES_PER_PARAMETER_BYTE))),
            "packed_bytes": {kind: float(value) for kind, value in raw.get("packed_bytes", {}).items()},
            "once_bytes": {kind: float(value) for kind, value in raw.get("once_bytes", {}).items()},
            "value_bytes": int(raw.get("value_bytes", VALUE_BYTES)),
            "pieces": PieceSurcharges.from_json(raw["pieces"]) if "pieces" in raw else None,
            "provenance": dict(raw["provenance"]),
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"cost table cannot be read: {type(error).__name__} {error}") from error
