"""Prices of padded samples that take two rows each, being pairs of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import Recompute, SampleLength
from dynapipe_ext.costs.model import MicroBatchCosts, PricesShapes
from dynapipe_ext.errors import PlanError


def rows_of_samples(samples: Sequence[SampleLength]) -> int:
    """Rows that each sample takes. Errors: PlanError where only some are pairs."""
    rows = {len(sample.documents) for sample in samples}
    if len(rows) > 1:
        raise PlanError("padded micro-batches are of pairs or of single documents, and this batch has both: part them")
    return rows.pop()


def of_rows(costs: PricesShapes, rows: int) -> PricesShapes:
    """Prices by samples of so many rows each."""
    return costs if rows == 1 else _OfRows(costs, rows)


@dataclass(frozen=True, slots=True)
class _OfRows:
    costs: PricesShapes
    rows: int

    @property
    def num_stages(self) -> int:
        return self.costs.num_stages

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        return self.costs.evaluate_shapes(self.rows * np.asarray(rows), encoder_len, decoder_len, recompute)
