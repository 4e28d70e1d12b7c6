"""What forwards alone cost: a view of any cost model, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.costs.abilities import (
    activation_format_of,
    costs_as_json,
    refuse_carried,
    replica_collectives_of,
    shape_prices,
)
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.costs.tokens import fingerprint
from dynapipe_ext.errors import ConfigError, PlanError


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """The costs of `base` where no backward follows: B and W take no time, and nothing is stored from F on.

    Static bytes stay, since gradients and optimizer states lie in memory while a training run is evaluated. The working
    bytes of F are at most what the forward of a training step stores and needs on top, without recomputation or under
    full recomputation, whichever is less: a forward without gradients drops all that these drop. Micro-batches ask for
    no recomputation.
    """

    base: CostModel

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def replica_collectives(self) -> ReplicaCollectives | None:
        return replica_collectives_of(self.base)

    @property
    def activation_format(self) -> ActivationFormat | None:
        return activation_format_of(self.base)

    @property
    def prices_forwards_alone(self) -> bool:
        return True

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        """Errors: PlanError for a micro-batch that asks for recomputation, and for what `base` cannot price."""
        refuse_carried(micro_batches, "forwards alone")
        for m in micro_batches:
            if m.recompute != "none":
                raise PlanError(
                    f"a micro-batch asks for recompute {m.recompute!r} but forwards alone have nothing to recompute:"
                    ' give "none"'
                )
        none = self.base.evaluate(micro_batches)
        return _forwards(none, self._recomputed(micro_batches, none))

    def _recomputed(self, micro_batches: Sequence[MicroBatch], none: MicroBatchCosts) -> MicroBatchCosts:
        """Costs under full recomputation; those of `none` where `base` cannot price that: a measured table may end
        earlier for it."""
        asked = [replace(m, recompute="full") for m in micro_batches]
        try:
            return self.base.evaluate(asked)
        except PlanError:
            if len(asked) == 1:
                return none
        each = [self._recomputed([m], none.take([i])) for i, m in enumerate(micro_batches)]
        return MicroBatchCosts.join(each, like=none)

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Costs of padded shapes given as arrays, as `base` has them; `recompute` must be "none"."""
        if recompute != "none":
            raise ConfigError(f'forwards of padded shapes have nothing to recompute, not {recompute!r}: give "none"')
        price = shape_prices(self.base).evaluate_shapes
        return _forwards(*(price(rows, encoder_len, decoder_len, kind) for kind in ("none", "full")))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "forwards", "base": costs_as_json(self.base)}

    def fingerprint(self) -> str:
        return fingerprint({"kind": "forwards", "base": self.base.fingerprint()})


def _forwards(none: MicroBatchCosts, full: MicroBatchCosts) -> MicroBatchCosts:
    """Forwards of what costs `none` without and `full` under full recomputation."""
    alone = none.forwards()
    return replace(alone, working_bytes=np.minimum(alone.working_bytes, full.forwards().working_bytes))
