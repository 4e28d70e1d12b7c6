"""Values of costs, to compare one with another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from dynapipe_ext.costs.model import MicroBatchCosts


def list_values(costs: MicroBatchCosts) -> dict[str, Any]:
    """Return everything that costs hold as plain values, which are equal for equal costs."""
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in asdict(costs).items()}
