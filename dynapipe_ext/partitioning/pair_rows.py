"""Prices of padded samples that take two rows each, being pairs of documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import Recompute
from dynapipe_ext.costs.model import MicroBatchCosts, PricesShapes


@dataclass(frozen=True, slots=True)
class PairRows:
    """Prices by samples of so many rows each."""

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
