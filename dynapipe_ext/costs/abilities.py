"""What a cost model may offer besides prices, asked for here and nowhere else.

A cost model of one's own needs `num_stages`, `evaluate` and `fingerprint` (`CostModel`) and plans with these alone.
Each function below looks for one more attribute by its name, and says what holds for a model without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts, PricesShapes
from dynapipe_ext.costs.states import EXACT_SUM_BYTES, Offload
from dynapipe_ext.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
    from dynapipe_ext.costs.floor import GrowingTimes
    from dynapipe_ext.costs.table_points import TablePoints


def over_topology(costs: CostModel, topology: Topology | None) -> tuple[CostModel, Topology]:
    """`over`: the costs over a topology, or with None over their own, and that topology.

    Without it a model is taken for that of its stages, wherever they are. Errors: ConfigError where costs cannot go.
    """
    if (over := getattr(costs, "over", None)) is None:
        return costs, topology or Topology(pp=costs.num_stages)
    return cast("tuple[CostModel, Topology]", over(topology))


def has_decoder(costs: CostModel) -> bool | None:
    """`has_decoder`: whether samples have a decoder side. None without it: tokens of any kind are priced."""
    return cast("bool | None", getattr(costs, "has_decoder", None))


def layers_to_place(costs: CostModel) -> int:
    """`total_layers`: how many layers stages are made of. Errors: ConfigError without it: stages are then fixed."""
    if (total := getattr(costs, "total_layers", None)) is None:
        raise ConfigError(
            f"{type(costs).__name__} price stages as they are, not the layers in them, so no other placement can be"
            " tried: name the placement that they are for, or give a measured table or counted costs"
        )
    return cast(int, total)


def replica_collectives_of(costs: CostModel) -> ReplicaCollectives | None:
    """`replica_collectives`: what the training that is priced issues over replicas. None without it: unknown."""
    return cast("ReplicaCollectives | None", getattr(costs, "replica_collectives", None))


def activation_format_of(costs: CostModel) -> ActivationFormat | None:
    """`activation_format`: what the messages that are priced hold. None without it: unknown."""
    return cast("ActivationFormat | None", getattr(costs, "activation_format", None))


def floor_of(costs: CostModel, stage_ranks: Sequence[int], *, split: bool) -> TablePoints | GrowingTimes | None:
    """`floor`: what no micro-batch goes below (see `costs.floor`). None without it: no bound over all plans."""
    floor = getattr(costs, "floor", None)
    return None if floor is None else cast("TablePoints | GrowingTimes", floor(tuple(stage_ranks), split=split))


def recounted(costs: CostModel, change: Callable[[Any], Any]) -> CostModel:
    """`recounted`: the costs with what is counted in them changed. Without it nothing is counted: as they are."""
    again = getattr(costs, "recounted", None)
    return costs if again is None else cast(CostModel, again(change))


def with_exact_sums(costs: CostModel, value_bytes: int) -> CostModel:
    """`exact_sums`, or `state_parts` of weights of `value_bytes`: the costs where ranks also hold deterministic mode's
    sums of gradients; of a view (`base`), of what it views. Without any of them bytes of states are fixed: as they are.
    """
    own = cast(Any, costs)
    if hasattr(costs, "exact_sums"):
        return cast(CostModel, replace(own, exact_sums=True))
    if hasattr(costs, "state_parts"):
        whole, divided = own.state_parts
        return cast(CostModel, replace(own, state_parts=(whole + EXACT_SUM_BYTES / value_bytes, divided)))
    if hasattr(costs, "base"):
        return cast(CostModel, replace(own, base=with_exact_sums(own.base, value_bytes)))
    return costs


def measured_sizes(costs: CostModel) -> Mapping[str, Any]:
    """`measured_sizes`: of the model that was measured, what is known, by the names of `Architecture`; of a view
    (`base`), of what it views. Nothing without it."""
    viewed = getattr(costs, "base", None)
    return cast("Mapping[str, Any]", getattr(costs, "measured_sizes", {} if viewed is None else measured_sizes(viewed)))


def sharded_state_bytes(costs: CostModel) -> float:
    """`state_parts`: bytes of states for each byte of parameters that are divided over replicas; of a view (`base`), of
    what it views. None without it."""
    viewed = getattr(costs, "base", None)
    return float(getattr(costs, "state_parts", (0.0, 0.0 if viewed is None else sharded_state_bytes(viewed)))[1])


def offload_of(costs: CostModel) -> Offload:
    """`offload`: what of its states a rank leaves on the host. Nothing without it."""
    return cast("Offload", getattr(costs, "offload", "none"))


def unadapted(costs: CostModel) -> CostModel:
    """`unadapted`: the costs before a run has fitted times to them. Without it nothing was fitted: as they are."""
    return cast(CostModel, getattr(costs, "unadapted", costs))


def prices_forwards_alone(costs: CostModel) -> bool:
    """`prices_forwards_alone`: whether no backward follows a forward. Not without it."""
    return bool(getattr(costs, "prices_forwards_alone", False))


def costs_as_json(costs: CostModel) -> dict[str, Any]:
    """`to_json`: what other processes read costs from. Errors: ConfigError without it."""
    if (to_json := getattr(costs, "to_json", None)) is None:
        raise ConfigError(
            f"{type(costs).__name__} has no to_json, by which planner processes and other ranks get their costs: plan"
            " in this process (num_workers 0), or give one of the cost models of dynapipe_ext.costs"
        )
    return cast("dict[str, Any]", to_json())


def prices_pieces(costs: CostModel) -> bool:
    """`prices_pieces`: whether pieces of long samples have a price (attention "carried"). Not without it."""
    return bool(getattr(costs, "prices_pieces", False))


def refuse_carried(micro_batches: Sequence[MicroBatch], who: str) -> None:
    """Errors: PlanError for a micro-batch with a piece of a long sample."""
    for m in micro_batches:
        if m.attention == "carried":
            piece = m.samples[0]
            raise PlanError(
                f"a micro-batch carries positions {piece.start} to {piece.start + piece.encoder} of sample"
                f" {piece.index}, but {who} have no price for pieces: plan whole samples (pieces off), or price by"
                " counted costs (AnalyticCosts) or a table with pieces (`dynapipe profile`)"
            )


def shape_prices(costs: CostModel) -> PricesShapes:
    """`evaluate_shapes`: padded shapes priced as arrays. Without it they are priced one by one by `evaluate`."""
    return cast(PricesShapes, costs) if hasattr(costs, "evaluate_shapes") else _OneByOne(costs)


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Shapes as micro-batches of equal samples; one that is refused costs INFEASIBLE."""

    costs: CostModel

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
        shapes = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (rows, encoder_len, decoder_len)))
        flat = zip(*(np.ravel(x).tolist() for x in shapes), strict=True)
        columns = [self._column(r, e, d, recompute) for r, e, d in flat]
        like = next((one for one in columns if one is not None), None) or self._any()
        never = _infeasible(like)
        return MicroBatchCosts.join([never if one is None else one for one in columns], like=like)

    def _column(self, rows: int, encoder: int, decoder: int, recompute: Recompute) -> MicroBatchCosts | None:
        samples = tuple(SampleLength(i, encoder, decoder) for i in range(rows))
        try:
            return self.costs.evaluate([MicroBatch(samples, "padded", recompute)])
        except PlanError:
            return None

    def _any(self) -> MicroBatchCosts:
        return self.costs.evaluate([MicroBatch((SampleLength(0, 1),))])


def _infeasible(like: MicroBatchCosts) -> MicroBatchCosts:
    one = like.take([0])
    for table in (one.forward_ns, one.backward_ns, one.weight_ns, one.stored_bytes, one.working_bytes):
        table[:] = INFEASIBLE
    return one
