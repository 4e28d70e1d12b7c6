"""Costs of micro-batches as integer arrays, and what every cost model can do. Planning, schedules and bounds read
nothing else of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Offload, ReplicaCollectives, Topology
from dynapipe_ext.costs.features import Features
from dynapipe_ext.costs.floor import ROUNDING_NS, Floor, GrowingTimes, PaddedTimes
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray
from dynapipe_ext.costs.grid import IntArray as IntArray
from dynapipe_ext.errors import ConfigError, PlanError, short

UNCOUNTED_TAX = 0.1  # of computing, if no links are known: see AnalyticCosts
_REFUSED = ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes")
TABLES = (*_REFUSED, "transfer_ns", "transfer_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCosts:
    """Costs of M micro-batches on S stages. Integers only, so that plans are equal on every machine.

    Of shape (S, M): `forward_ns`, `backward_ns` (the full backward, with recomputation) and `weight_ns` (the part W of
    a split backward, which can be put off: B = I + W). Also (S, M): `stored_bytes` (held from F to B, or to W if split)
    and `working_bytes` (needed in addition while one layer runs). Of shape (S - 1, M): `transfer_ns` and
    `transfer_bytes` over the boundary between stages s and s + 1, in either direction. Of shape (S,): `static_bytes`
    (weights, gradients, optimizer states). `working_in`: the actions that need the working bytes, "FBI", or "F" if only
    forwards were measured."""

    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    stored_bytes: IntArray
    working_bytes: IntArray
    transfer_ns: IntArray
    transfer_bytes: IntArray
    static_bytes: IntArray
    working_in: Literal["FBI", "F"] = "FBI"

    @property
    def num_stages(self) -> int:
        return int(self.forward_ns.shape[0])

    @property
    def num_micro_batches(self) -> int:
        return int(self.forward_ns.shape[1])

    @property
    def input_ns(self) -> IntArray:
        """Time of I, the input gradients of a split backward: B - W, shape (S, M)."""
        return self.backward_ns - self.weight_ns

    def sum_chain_ns(self, *, split: bool) -> npt.NDArray[np.float64]:
        """Return ns, (M,): F, then B, on all stages; if split, F, I and stage 0's W. No transfers."""
        forward = self.forward_ns.sum(axis=0).astype(np.float64)
        if not split:
            return np.asarray(forward + self.backward_ns.sum(axis=0))
        return np.asarray(forward + self.input_ns.sum(axis=0) + self.weight_ns[0])

    @property
    def infeasible(self) -> BoolArray:
        """Flags of micro-batches that cannot run, booleans of shape (M,)."""
        return np.asarray((self.forward_ns >= INFEASIBLE).any(axis=0))

    def refuse(self, refused: BoolArray) -> MicroBatchCosts:
        """Return the costs with INFEASIBLE times and bytes of the `refused` micro-batches, booleans of shape (M,)."""
        if not refused.any():
            return self
        tables: dict[str, Any] = {name: np.where(refused, INFEASIBLE, getattr(self, name)) for name in _REFUSED}
        return replace(self, **tables)

    def _with_tables(self, change: Callable[[str], IntArray]) -> MicroBatchCosts:
        tables = {name: change(name) for name in TABLES}
        return MicroBatchCosts(**tables, static_bytes=self.static_bytes, working_in=self.working_in)

    def take(self, micro_batches: Sequence[int] | IntArray) -> MicroBatchCosts:
        """Return the costs of only the micro-batches with these indices, in this order."""
        order = np.asarray(micro_batches, dtype=np.int64)
        return self._with_tables(lambda name: np.take(getattr(self, name), order, axis=1))

    def keep_inputs(self, chosen: BoolArray) -> MicroBatchCosts:
        """Return the costs if the `chosen` micro-batches, booleans of shape (M,), recompute whole stages.

        A stage stores only its input (stage 0: nothing). B runs F again and does all of W, so nothing is left to put
        off. The other bytes that F stores become working bytes."""
        if not chosen.any():
            return self
        stored, working = keep_input_bytes(chosen, self.stored_bytes, self.working_bytes, self.transfer_bytes)
        return replace(
            self,
            backward_ns=self.backward_ns + chosen * self.forward_ns,
            weight_ns=np.where(chosen, 0, self.weight_ns),
            stored_bytes=stored,
            working_bytes=working,
        )

    def drop_backwards(self) -> MicroBatchCosts:
        """Return forward-only costs: no backward; stored bytes become working bytes of F."""
        zeros = np.zeros_like(self.forward_ns)
        return replace(
            self,
            backward_ns=zeros,
            weight_ns=zeros,
            stored_bytes=zeros,
            working_bytes=self.stored_bytes + self.working_bytes,
            working_in="F",
        )

    @classmethod
    def choose(cls, kinds: Sequence[MicroBatchCosts], kind: IntArray, columns: IntArray) -> MicroBatchCosts:
        """Return the costs whose micro-batch m is number `columns[m]` of `kinds[kind[m]]`, with static bytes of
        `kinds[0]`."""
        first, chosen = kinds[0], [np.flatnonzero(kind == index) for index in range(len(kinds))]

        def from_kinds(name: str) -> IntArray:
            table = np.empty((len(getattr(first, name)), len(columns)), np.int64)
            for costs, own in zip(kinds, chosen, strict=True):
                if len(own):
                    table[:, own] = getattr(costs, name)[:, columns[own]]
            return table

        return first._with_tables(from_kinds)

    @classmethod
    def join(cls, parts: Sequence[MicroBatchCosts], *, like: MicroBatchCosts) -> MicroBatchCosts:
        """Return the costs of the micro-batches of all `parts`, in order. Static bytes are those of `like`."""
        return like._with_tables(
            lambda name: np.concatenate([getattr(like, name)[:, :0], *(getattr(part, name) for part in parts)], axis=1)
        )


def find_bottleneck(
    costs: MicroBatchCosts,
    min_in_flight: int = 1,
    stage_ranks: Sequence[int] | None = None,
) -> tuple[IntArray, IntArray]:
    """Return each micro-batch's F + B on its busiest rank in ns, and the bytes it needs on the fullest rank: (M,).

    `stage_ranks[s]`: the rank of stage s (default: one rank per stage). Bytes are states, working memory and stored
    micro-batches of this shape. A rank stores as many as 1F1B holds (num_ranks - rank), but at most `min_in_flight`;
    every rank stores `min_in_flight` if that is above num_ranks."""
    ranks = range(costs.num_stages) if stage_ranks is None else stage_ranks
    num_ranks = len(set(ranks))
    held: IntArray = np.minimum(np.arange(num_ranks, 0, -1, dtype=np.int64), min_in_flight)
    if min_in_flight > num_ranks:
        held = np.full_like(held, min_in_flight)
    work_ns = costs.forward_ns + costs.backward_ns
    stored, static = reduce_to_ranks(costs.stored_bytes, ranks), reduce_to_ranks(costs.static_bytes, ranks)
    working = reduce_to_ranks(costs.working_bytes, ranks, np.maximum)
    needed = _find_largest(static[:, None] + held[:, None] * stored + working)
    cannot_store = _find_largest(costs.stored_bytes) >= INFEASIBLE
    cannot_run = cannot_store | (_find_largest(work_ns) >= INFEASIBLE)
    busiest = np.minimum(_find_largest(reduce_to_ranks(work_ns, ranks)), INFEASIBLE)
    return np.where(cannot_run, INFEASIBLE, busiest), np.where(cannot_store, INFEASIBLE, needed)


def reduce_to_ranks(table: npt.NDArray[Any], stage_ranks: Sequence[int], join: np.ufunc = np.add) -> npt.NDArray[Any]:
    """Reduce a table's first axis from stages to pipeline ranks: `join` (default: add) each rank's stages."""
    num_ranks = len(set(stage_ranks))
    if num_ranks == len(table):
        return table
    ranks = np.array(stage_ranks)
    return np.stack([join.reduce(table[ranks == rank]) for rank in range(num_ranks)])


def _find_largest(table: IntArray) -> IntArray:
    """Find the largest of each column; row by row, which is faster than `max(axis=0)` of a few long rows."""
    largest: IntArray = reduce(np.maximum, table)
    return largest


def keep_input_bytes(
    chosen: npt.NDArray[np.bool_], stored: IntArray, working: IntArray, transferred: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the stored and working bytes, (S, M), after `MicroBatchCosts.keep_inputs`."""
    received = np.zeros_like(stored)
    received[1:] = transferred
    return np.where(chosen, received, stored), working + chosen * np.maximum(stored - received, 0)


def scale_bytes(num_bytes: IntArray, factor: float) -> IntArray:
    """Multiply bytes by a measured factor, rounding up."""
    return num_bytes if factor == 1.0 else np.ceil(num_bytes * factor).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCapabilities:
    """Capabilities of a cost model in addition to prices. The defaults: it knows nothing more.

    `has_decoder`: samples have a decoder side; None: any tokens are priced. `total_layers`: those of all stages; None:
    stages are priced as they are. `replica_collectives`, `activation_format`: what training sends over replicas, what
    messages hold; None: unknown. It can price `prices_halves`: stages cut inside a layer, `prices_spread`: vocabulary
    parallelism, `prices_pieces`: pieces of samples, `slices_head`: a chunked head. `width`: ranks that share each
    priced micro-batch (context parallel). `offload`: states kept on the host. `sharded_state_bytes`: bytes of states
    that are divided over replicas, per byte of parameters. `measured_sizes`: the measured model's, named as in
    `Architecture`."""

    has_decoder: bool | None = None
    total_layers: int | None = None
    replica_collectives: ReplicaCollectives | None = None
    activation_format: ActivationFormat | None = None
    prices_halves: bool = False
    prices_spread: bool = False
    prices_pieces: bool = False  # pieces of long samples (attention "carried")
    width: int = 1
    priced_widths: tuple[int, ...] | None = None  # those with a price, if not all have one
    forwards_alone: bool = False  # no backward follows a forward
    offload: Offload = "none"
    slices_head: bool = False  # prices for kinds of recomputation with the head in slices
    sharded_state_bytes: float = 0.0
    measured_adapters: bool = False  # stored bytes are of the adapters that train, not of all weights
    measured_sizes: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class MicroBatchPricer(Protocol):
    """The members that a user's own cost model needs; `as_cost_model` makes a `CostModel` of it.

    `evaluate` raises PlanError, which names the shape and the bound, for a shape that it cannot price (outside a
    measured grid, say). `fingerprint` is a hash of all that changes prices, equal on all ranks and planners of a
    job."""

    @property
    def num_stages(self) -> int: ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts: ...

    def fingerprint(self) -> str: ...


class CostModel:
    """Base class of cost models: ns and bytes of micro-batches on every stage of one topology. A subclass implements
    `num_stages` and `price`, and `to_json` if other processes are to read it.

    The other methods are those of a model that prices its stages as they are and knows nothing more."""

    __slots__ = ()

    if TYPE_CHECKING:  # a model may have it as a field

        @property
        def num_stages(self) -> int: ...

    @property
    def facts(self) -> CostCapabilities:
        return CostCapabilities()

    def price(self, features: Features) -> MicroBatchCosts:
        """Return the costs of M micro-batches or padded shapes; those that the model cannot price are INFEASIBLE."""
        raise NotImplementedError

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        """Return why a micro-batch has no price; "" if it has one."""
        return ""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        """Return the costs of micro-batches, which must include all pieces of each long sample.

        Raises PlanError for one that the model cannot price, naming the shape and the bound."""
        features = Features.from_micro_batches(micro_batches)
        if features.pieces is not None and not self.facts.prices_pieces:
            piece = next(m.samples[0] for m in micro_batches if m.attention == "carried")
            raise PlanError(
                f"a micro-batch carries positions {piece.start} to {piece.start + piece.encoder} of sample"
                f" {piece.index}, but these {type(self).__name__} have no price for pieces: plan whole samples"
            )
        costs = self.price(features)
        for index in np.flatnonzero(costs.infeasible).tolist():
            if reason := self.explain_refusal(micro_batches[index]):
                raise PlanError(reason)
        return costs

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Return the costs of padded shapes: numbers of rows, and lengths, broadcast. Those without a price are
        INFEASIBLE."""
        return self.price(Features.from_shapes(rows, encoder_len, decoder_len, recompute))

    def get_floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: CostModel | None = None) -> Floor | None:
        """Return lower bounds of the times of all micro-batches, for bounds over all plans; None if none are known.

        `least`, if given, prices shapes in place of this model: with adjustments, the least times after them."""
        return None

    def with_topology(self, topology: Topology | None) -> tuple[CostModel, Topology]:
        """Return the costs over a topology (None: their own), and this topology with layers on its stages.

        Raises ConfigError for a topology that the model cannot price."""
        return self, topology or Topology(pp=self.num_stages)

    def at_width(self, width: int) -> CostModel:
        """Return one rank's costs in a context-parallel group of `width` data parallel ranks, each with a position
        shard of every row (`CostCapabilities.width` is that degree).

        Work on positions, stored bytes of positions, and messages are divided by the degree; overheads and weights are
        not. Exchanges in attention come on top (`costs/blocks.py`). Raises ConfigError if their time is not known."""
        if width > 1:
            raise no_width(type(self).__name__, width)
        return self

    def change_analytic(self, change: Callable[[Any], Any]) -> CostModel:
        """Return the costs with `change(costs)` in place of `AnalyticCosts` in them; other costs as they are."""
        return self

    def with_exact_sums(self, value_bytes: int) -> CostModel:
        """Return the costs with deterministic mode's gradient sums in the static bytes; a weight has `value_bytes`
        bytes.

        If the static bytes are fixed, the costs stay as they are."""
        return self

    def to_json(self) -> dict[str, Any] | None:
        """Return the costs as JSON from which other processes can read them; None if the model has no such form."""
        return None

    def fingerprint(self) -> str:
        """Return a hash of all that changes prices, equal on all ranks and planners of a job."""
        return fingerprint(self.to_json() or {})


def as_cost_model(costs: MicroBatchPricer) -> CostModel:
    """Return a `CostModel` as it is, and any other `MicroBatchPricer` as `UserCosts`."""
    return costs if isinstance(costs, CostModel) else UserCosts(costs)


@dataclass(frozen=True, slots=True)
class UserCosts(CostModel):
    """A user's own cost model, `prices`, with all methods of a `CostModel`. Its `evaluate_shapes` prices shapes, if it
    has one. Else each shape is priced as a micro-batch of equal samples.

    It is priced over any topology with as many stages. There are no bounds over all plans."""

    prices: MicroBatchPricer

    @property
    def num_stages(self) -> int:
        return self.prices.num_stages

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        return self._check("evaluate", self.prices.evaluate(micro_batches), len(micro_batches))

    def _check(self, method: str, costs: MicroBatchCosts, count: int) -> MicroBatchCosts:
        """Check the prices of `count` micro-batches. Raises ConfigError."""
        stages = self.num_stages
        shapes = {name: (stages - name.startswith("transfer"), count) for name in TABLES} | {"static_bytes": (stages,)}
        for name, shape in shapes.items():
            table: Any = getattr(costs, name, None)
            is_table = isinstance(table, np.ndarray) and np.issubdtype(table.dtype, np.integer) and table.shape == shape
            if not is_table or (table.size and table.min() < 0):
                held = " ".join(repr(table).split())
                raise ConfigError(
                    f"{name} of {type(self.prices).__name__} is {short(held)} but must be an array of integers from 0"
                    f" on, of shape {shape}: correct its {method}"
                )
        return costs

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        try:
            self.prices.evaluate([micro_batch])
        except PlanError as error:
            return str(error)
        return ""

    def price(self, features: Features) -> MicroBatchCosts:
        micro_batches = features.micro_batches
        if features.padded_shapes is not None:
            (rows, encoder_len, decoder_len), kinds = features.padded_shapes, features.recompute.tolist()
            if kinds and (evaluate_shapes := getattr(self.prices, "evaluate_shapes", None)):
                costs = evaluate_shapes(rows, encoder_len, decoder_len, kinds[0])
                return self._check("evaluate_shapes", costs, len(kinds))
            micro_batches = [
                MicroBatch(tuple(SampleLength(i, encoder, decoder) for i in range(count)), "padded", kind)
                for (count, encoder, decoder), kind in zip(features.padded_shapes.T.tolist(), kinds, strict=True)
            ]
        try:
            return self.evaluate(micro_batches)
        except PlanError:
            return self._evaluate_each(micro_batches)

    def _evaluate_each(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        """Price each micro-batch by itself; one that is rejected costs INFEASIBLE."""
        has_price = [not self.explain_refusal(m) for m in micro_batches]
        priced = [m for m, is_priced in zip(micro_batches, has_price, strict=True) if is_priced]
        costs = self.prices.evaluate(priced or [MicroBatch((SampleLength(0, 1),))])
        columns = np.minimum(np.cumsum([0, *has_price])[:-1], costs.num_micro_batches - 1)
        return costs.take(columns).refuse(~np.array(has_price))

    def at_width(self, width: int) -> Self:
        if width > 1:
            raise no_width(type(self.prices).__name__, width)
        return self

    def fingerprint(self) -> str:
        return self.prices.fingerprint()


def no_width(who: str, width: int) -> ConfigError:
    return ConfigError(
        f"{who} do not say what attention exchanges between {width} context-parallel ranks: plan with degree 1, or take"
        " AnalyticCosts or a table of `dynapipe profile`"
    )


def check_numbers(values: Any, **bounds: tuple[float, float]) -> None:
    """Raise ConfigError if a named field of `values` is not within its (least, most) bounds."""
    for name, (least, most) in bounds.items():
        if not least <= (value := getattr(values, name)) <= most:
            raise ConfigError(f"{name} is {short(value)} but must be {least:g} to {most:g}: give such a number")


def make_growing_times(
    costs: CostModel,
    *,
    split: bool,
    rounds_up: bool = False,
    kinds: Sequence[Recompute] = ("none",),
    chain: CostModel | None = None,
    error_ns: float = ROUNDING_NS,
) -> GrowingTimes:
    """Make the lower bounds of costs with times overhead + a tokens + b squared lengths: the least over modes `kinds`.

    `rounds_up`: the model rounds work up, by at most what one token costs by itself. `chain`: costs of the dependency
    chain (default: `costs`)."""

    def price_padded(rows: int, lengths: IntArray) -> PaddedTimes:
        shapes = np.full(len(lengths), rows), lengths[:, 0], lengths[:, 1]
        priced = [costs.evaluate_shapes(*shapes, kind) for kind in kinds]
        chained = [chain.evaluate_shapes(*shapes, kind) for kind in kinds] if chain else priced
        return PaddedTimes(
            np.min([one.forward_ns for one in priced], axis=0).astype(np.float64),
            np.min([one.backward_ns for one in priced], axis=0).astype(np.float64),
            np.min([one.sum_chain_ns(split=split) for one in chained], axis=0),
        )

    rounding_ns = np.zeros(costs.num_stages)
    if rounds_up:
        token = price_padded(1, np.array([[1, 0]]))
        rounding_ns = (token.forward + token.backward)[:, 0]
    return GrowingTimes(price_padded, rounding_ns, error_ns)


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings as canonical JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
