"""What changes the prices of a cost model, and costs that are so changed.

prices ─► FrozenWeights ─► FittedTimes ─► ForwardsAlone ─► costs, the same way for micro-batches and for padded shapes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import RECOMPUTES, MicroBatch, Recompute, with_sliced_head
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.floor import Floor, GrowingTimes
from dynapipe_ext.costs.model import (
    CostModel,
    IntArray,
    MicroBatchCosts,
    ModelFacts,
    PricesShapes,
    fingerprint,
    growing_times,
)
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.reproducible import FloatArray, product

LETTERS = "FBIW"
_MOST = 2.0**40
_MOST_BYTES = 1 << 60

# Costs before an adjustment: of micro-batches as they are recomputed (None), or all of them by one kind.
CostsBefore = Callable[[Recompute | None], MicroBatchCosts]


@dataclass(frozen=True, slots=True, eq=False)
class AdjustedWork:
    """What adjustments read of M micro-batches, arrays of shape (M,): padded tokens, squared lengths as
    `count_positions` has them, and the kind of recomputation. Of blocks of ranks, one rank's share of them."""

    tokens: IntArray
    squares: IntArray
    recompute: npt.NDArray[np.str_]

    def kinds(self, kind: Recompute | None) -> npt.NDArray[np.str_]:
        """The kinds of recomputation where all micro-batches are recomputed by `kind`, or as they are (None)."""
        return self.recompute if kind is None else np.full(self.recompute.shape, kind)


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Stage s trains the share `trained_shares[s]` of its weights' products, as under adapters.

    A frozen weight has no gradient: W, and B by as much, are shorter by the share of the others, under full
    recomputation too. `static_bytes` of each stage take the place of the prices' own: frozen weights have neither
    gradients nor optimizer states (empty: the prices' own). `token_bytes` of each stage are what adapters keep of every
    token in addition; where layers are recomputed these bytes come back, counted as if all at once. `idle_bytes` of
    each stage are weights on top that nothing runs through, such as those of a tower of images.
    """

    trained_shares: tuple[float, ...]
    static_bytes: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()
    idle_bytes: tuple[int, ...] = ()

    kind: ClassVar = "frozen"

    def check(self, num_stages: int) -> None:
        """Errors: ConfigError for shares that are none, or not one a stage."""
        for name in ("trained_shares", "static_bytes", "token_bytes", "idle_bytes"):
            most = 1 if name == "trained_shares" else _MOST_BYTES
            values = getattr(self, name)
            if (name == "trained_shares" or values) and len(values) != num_stages:
                raise ConfigError(f"{name} has {len(values)} entries for {num_stages} stages: give one a stage")
            for value in values:
                if not isinstance(value, int | float) or not 0 <= value <= most:
                    raise ConfigError(f"{name} has {short(value)} but must be numbers of 0 to {most}")

    def facts(self, facts: ModelFacts) -> ModelFacts:
        return facts

    def adjusted(self, before: CostsBefore, work: AdjustedWork, kind: Recompute | None) -> MicroBatchCosts:
        costs = before(kind)
        kinds = work.kinds(kind)
        is_stored = split_kinds(kinds)[0] == "none"
        # The work for weight gradients; under full recomputation I does it and W is nothing, so W without says it.
        plain = costs if (kinds == "none").all() else before("none")
        weight_ns = np.where(plain.infeasible, costs.weight_ns, np.minimum(plain.weight_ns, costs.backward_ns))
        kept_bytes = np.outer(self.token_bytes or (0,) * costs.num_stages, work.tokens).astype(np.int64)
        return replace(
            costs,
            stored_bytes=costs.stored_bytes + kept_bytes * is_stored,
            working_bytes=costs.working_bytes + kept_bytes * ~is_stored,
            backward_ns=costs.backward_ns - _part(self._frozen, weight_ns),
            weight_ns=costs.weight_ns - _part(self._frozen, costs.weight_ns),
            static_bytes=self._static(costs),
        ).refusing(costs.infeasible)

    def least(self, before: CostsBefore, kind: Recompute | None) -> MicroBatchCosts:
        """Times at measured points between which the interpolated ones are nowhere above the adjusted ones.

        W that is cut off at B is not linear between points. There a stage's B keeps its trained share alone.
        """
        costs, plain = before(kind), before("none")
        weight_ns = np.where(plain.infeasible, costs.weight_ns, np.maximum(plain.weight_ns, costs.weight_ns))
        is_cut = ((weight_ns >= costs.backward_ns) & ~costs.infeasible).any(axis=1, keepdims=True)
        backward_ns = costs.backward_ns - self._frozen * np.where(is_cut, costs.backward_ns, weight_ns)
        return replace(
            costs,
            backward_ns=np.floor(backward_ns).astype(np.int64),
            weight_ns=costs.weight_ns - _part(self._frozen, costs.weight_ns),
            static_bytes=self._static(costs),
        ).refusing(costs.infeasible)

    def error_ns(self, before_ns: float) -> float:
        """What rounding changes at most, of F and B of one micro-batch on one stage."""
        return before_ns + 1

    @property
    def _frozen(self) -> FloatArray:
        return 1.0 - np.array(self.trained_shares)[:, None]

    def _static(self, costs: MicroBatchCosts) -> IntArray:
        static = np.array(self.static_bytes, np.int64) if self.static_bytes else costs.static_bytes
        return static + np.array(self.idle_bytes or (0,) * costs.num_stages, np.int64)

    def to_json(self) -> dict[str, Any]:
        """Bytes of tokens and idle ones are left out where there are none, as before adjustments knew them."""
        more = {name: list(values) for name in ("token_bytes", "idle_bytes") if (values := getattr(self, name))}
        return {"trained_shares": list(self.trained_shares), "static_bytes": list(self.static_bytes), **more}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FrozenWeights:
        try:
            more = {name: tuple(raw.get(name, ())) for name in ("token_bytes", "idle_bytes")}
            return cls(tuple(raw["trained_shares"]), tuple(raw["static_bytes"]), **more)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"costs of frozen weights {sorted(raw)} cannot be read: {error}") from error


def _part(share: FloatArray, times_ns: IntArray) -> IntArray:
    part: IntArray = np.floor(share * times_ns).astype(np.int64)
    return part


@dataclass(frozen=True, slots=True)
class TimeCorrection:
    """An action's time: scale x its time before + overhead + so much a token and a squared length."""

    scale: float = 1.0
    overhead_ns: float = 0.0
    ns_per_token: float = 0.0
    ns_per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= _MOST:
                raise ConfigError(f"{name} of a correction is {short(value)} but must be a number of 0 to {_MOST:.0f}")

    def __call__(self, terms: FloatArray) -> FloatArray:
        """Times of micro-batches with these `correction_terms`, shape (M,)."""
        return np.rint(product(terms, astuple(self)))


StageCorrections = Mapping[str, TimeCorrection]
OF_KIND = {(letter, kind): f"{letter} {kind}" for letter in "BI" for kind in RECOMPUTES}
CORRECTED = (*LETTERS, *OF_KIND.values())


def times_by_letter(costs: MicroBatchCosts) -> dict[str, IntArray]:
    """Of each letter of actions, shape (S, M)."""
    return {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}


def correction_terms(times_ns: IntArray, tokens: IntArray, squares: IntArray) -> FloatArray:
    """(M, 4): what a `TimeCorrection` has coefficients of."""
    return np.stack([times_ns, np.ones_like(times_ns), tokens, squares], axis=1).astype(np.float64)


def corrected_times(stage: StageCorrections, letter: str, terms: FloatArray, kinds: npt.NDArray[np.str_]) -> FloatArray:
    """Times of a letter's actions in micro-batches of these kinds of recomputation; a kind's own correction first."""
    times_ns = stage.get(letter, TimeCorrection())(terms)
    for kind in RECOMPUTES:
        if own := stage.get(f"{letter} {kind}"):
            times_ns = np.where(kinds == kind, own(terms), times_ns)
    return times_ns


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Other times of actions: `corrections[s]` has those of stage s by letter (F, B, I, W). Where backwards of one kind
    of recomputation were measured often enough, it also has corrections by letter and kind ("B full"), which replace
    those of the letter.

    Actions without measurements keep their time. A measured I and W also price B, as their sum. A measured B without
    them also scales W, in proportion. What takes no time goes on taking none, and a shape that cannot run stays so.
    Bytes and transfers do not change.
    """

    corrections: tuple[StageCorrections, ...]

    kind: ClassVar = "adapted"

    def __hash__(self) -> int:
        return hash(tuple(tuple(sorted(stage)) for stage in self.corrections))

    def check(self, num_stages: int) -> None:
        """Errors: ConfigError for other than one mapping a stage, of the names of actions."""
        if len(self.corrections) != num_stages:
            raise ConfigError(f"{len(self.corrections)} corrections for {num_stages} stages: give one each")
        if unknown := [name for stage in self.corrections for name in stage if name not in CORRECTED]:
            raise ConfigError(f"a correction is of actions {short(unknown[0])}: give one of {', '.join(CORRECTED)}")

    def facts(self, facts: ModelFacts) -> ModelFacts:
        return facts

    def adjusted(self, before: CostsBefore, work: AdjustedWork, kind: Recompute | None) -> MicroBatchCosts:
        costs, kinds = before(kind), work.kinds(kind)
        times = times_by_letter(costs)
        forward, backward, weight = (np.array(times[letter]) for letter in "FBW")
        for s, stage in enumerate(self.corrections):
            fitted = {
                letter: corrected_times(
                    stage, letter, correction_terms(times[letter][s], work.tokens, work.squares), kinds
                )
                for letter in LETTERS
                if letter in stage
            }
            if "F" in fitted:
                forward[s] = fitted["F"]
            if "I" in fitted and "W" in fitted:
                backward[s], weight[s] = fitted["I"] + fitted["W"], fitted["W"]
            elif "B" in fitted:
                backward[s] = fitted["B"]
                weight[s] = np.floor(weight[s] / np.maximum(times["B"][s], 1) * fitted["B"])
        refused = costs.infeasible
        for new, old in ((forward, times["F"]), (backward, times["B"]), (weight, times["W"])):
            np.copyto(new, old, where=(old == 0) | refused)
        return replace(costs, forward_ns=forward, backward_ns=backward, weight_ns=weight)

    def least(self, before: CostsBefore, kind: Recompute | None) -> MicroBatchCosts:
        """Times that are nowhere above the adjusted ones, and linear in the times before: scaled by the least factors
        that apply to a stage. (A stage that is recomputed whole is at least as slow as one that is not at all.)"""
        costs = before(kind)
        kinds: tuple[Recompute, ...] = ("none", "stage") if kind == "none" else (kind or "none",)
        forward = [stage["F"].scale if "F" in stage else 1.0 for stage in self.corrections]
        backward = [min(_backward_scale(stage, one) for one in kinds) for stage in self.corrections]
        factors = {"forward_ns": forward, "backward_ns": backward, "weight_ns": backward}
        scaled: dict[str, Any] = {
            name: np.floor(np.array(factor)[:, None] * getattr(costs, name)).astype(np.int64)
            for name, factor in factors.items()
        }
        return replace(costs, **scaled).refusing(costs.infeasible)

    def error_ns(self, before_ns: float) -> float:
        """What rounding changes at most, of F and B of one micro-batch on one stage."""
        return 2 * max(1.0, *self._scales) * before_ns + 4

    @property
    def least_scale(self) -> float:
        """What an action's time before is multiplied with at least."""
        return min(1.0, *self._scales)

    @property
    def _scales(self) -> list[float]:
        return [1.0, *(correction.scale for stage in self.corrections for correction in stage.values())]

    def to_json(self) -> dict[str, Any]:
        corrections = [{letter: list(astuple(one)) for letter, one in stage.items()} for stage in self.corrections]
        return {"corrections": corrections}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FittedTimes:
        try:
            stages = tuple({letter: TimeCorrection(*one) for letter, one in of.items()} for of in raw["corrections"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"adapted costs {sorted(raw)} cannot be read: {error}: give what a run wrote") from error
        return cls(stages)


def _backward_scale(stage: StageCorrections, kind: Recompute) -> float:
    """The least factor by which the corrections of a stage change B, I and W of micro-batches recomputed so."""

    def scale(letter: str) -> float:
        return stage.get(f"{letter} {kind}", stage[letter]).scale

    if "I" in stage and "W" in stage:
        return min(scale("I"), scale("W"))
    return scale("B") if "B" in stage else 1.0


@dataclass(frozen=True, slots=True)
class ForwardsAlone:
    """No backward follows: B and W take no time, and nothing is stored from F on.

    Static bytes stay, since gradients and optimizer states lie in memory while a training run is evaluated. The working
    bytes of F are at most those that the forward of a training step stores and needs in addition, without recomputation
    or under full recomputation, whichever is less: a forward without gradients keeps nothing that either of these
    drops. Micro-batches ask for no recomputation, and there are no pieces of long samples.
    """

    kind: ClassVar = "forwards"

    def check(self, num_stages: int) -> None:
        """Any number of stages has forwards."""

    def facts(self, facts: ModelFacts) -> ModelFacts:
        return replace(facts, prices_pieces=False, forwards_alone=True)

    def adjusted(self, before: CostsBefore, work: AdjustedWork, kind: Recompute | None) -> MicroBatchCosts:
        """Errors: PlanError for micro-batches that ask for recomputation."""
        if (recomputed := work.kinds(kind)[work.kinds(kind) != "none"]).size:
            raise PlanError(
                f"a micro-batch asks for recompute {str(recomputed[0])!r} but forwards alone have nothing to recompute:"
                ' give "none"'
            )
        alone, full = before(kind).forwards(), before("full").forwards()
        return replace(alone, working_bytes=np.minimum(alone.working_bytes, full.working_bytes))

    def to_json(self) -> dict[str, Any]:
        return {}


Adjustment = FrozenWeights | FittedTimes | ForwardsAlone
_ORDER: tuple[type[Adjustment], ...] = get_args(Adjustment)
OneKind = TypeVar("OneKind", FrozenWeights, FittedTimes)


@dataclass(frozen=True, slots=True)
class AdjustedCosts(CostModel):
    """The costs of `prices` after `adjustments`, one of each kind at most, in the order of `Adjustment`.

    `adjusted` makes them. Fitted times and trained shares are those of the stages that they were made for.
    """

    prices: CostModel
    adjustments: tuple[Adjustment, ...]

    def __post_init__(self) -> None:
        places = [_ORDER.index(type(one)) for one in self.adjustments]
        assert places == sorted(set(places)), self.adjustments
        assert not isinstance(self.prices, AdjustedCosts), "adjust by `adjusted`"
        for one in self.adjustments:
            one.check(self.prices.num_stages)

    @property
    def num_stages(self) -> int:
        return self.prices.num_stages

    @property
    def facts(self) -> ModelFacts:
        facts = self.prices.facts
        for one in self.adjustments:
            facts = one.facts(facts)
        return facts

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        return self.prices.explain_refusal(micro_batch)

    def price(self, features: Features) -> MicroBatchCosts:
        """Raises PlanError for what an adjustment does not allow."""

        def before(kind: Recompute | None) -> MicroBatchCosts:
            return self.prices.price(features if kind is None else features.with_recompute(kind))

        width = self.prices.facts.width
        work = AdjustedWork(-(-features.tokens // width), -(-features.squares // width), features.recompute)
        for one in self.adjustments:
            before = partial(one.adjusted, before, work)
        return before(None)

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: PricesShapes | None = None) -> Floor | None:
        """For bounds over all plans of training; None for forwards alone, and where `prices` have none.

        Grown times: as adjusted, the least of all kinds of recomputation; None where fitted times would turn the time
        of a short sample from nothing into something. Measured points: `least` of each adjustment.
        """
        if self.facts.forwards_alone:
            return None
        at_points = LeastTimes(self.prices, self.adjustments)
        floor = self.prices.floor(stage_ranks, split=split, least=least or at_points)
        if floor is None:
            return None
        error_ns = floor.error_ns
        for one in self.adjustments:
            error_ns = one.error_ns(error_ns) if not isinstance(one, ForwardsAlone) else error_ns
        if not isinstance(floor, GrowingTimes):
            return replace(floor, error_ns=error_ns, attended_ns=self._least_attended_ns(floor.attended_ns))
        token = self.prices.evaluate_shapes([1], [1])
        if any(isinstance(one, FittedTimes) for one in self.adjustments) and not (
            token.forward_ns.all() and token.backward_ns.all()
        ):
            return None
        return growing_times(
            self,
            split=split,
            rounds_up=bool(floor.rounding_ns.any()),
            kinds=RECOMPUTES + (with_sliced_head(RECOMPUTES) if self.facts.slices_head else ()),
            chain=at_points if split else None,
            error_ns=error_ns,
        )

    def _least_attended_ns(self, attended_ns: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """What positions of pieces take at least for those before them, after a fit."""
        fitted = fitted_times(self)
        if fitted is None or attended_ns is None:
            return attended_ns
        return tuple(fitted.least_scale * one_ns for one_ns in attended_ns)

    def over(self, topology: Topology | None) -> tuple[CostModel, Topology]:
        """Over the same stages, with any number of replicas. Over other stages fitted times are left out.

        Errors: ConfigError for trained shares over other stages.
        """
        own_prices, before = self.prices.over(None)
        prices, topology = self.prices.over(topology or before)
        if prices is own_prices or replace(topology, dp=1, width=1) == replace(before, dp=1, width=1):
            return replace(self, prices=prices), topology
        if any(isinstance(one, FrozenWeights) for one in self.adjustments):
            raise ConfigError(
                f"these costs of frozen weights are of {self.num_stages} stages, {before}, and cannot be placed"
                f" over {topology}: give that topology, or the costs before adapters"
            )
        return _with(prices, [one for one in self.adjustments if not isinstance(one, FittedTimes)]), topology

    def at_width(self, width: int) -> AdjustedCosts:
        return replace(self, prices=self.prices.at_width(width))

    def recounted(self, change: Callable[[Any], Any]) -> AdjustedCosts:
        return replace(self, prices=self.prices.recounted(change))

    def with_exact_sums(self, value_bytes: int) -> AdjustedCosts:
        return replace(self, prices=self.prices.with_exact_sums(value_bytes))

    def to_json(self) -> dict[str, Any] | None:
        """Each adjustment around what it adjusts, its "base"."""
        raw = self.prices.to_json()
        for one in self.adjustments:
            raw = None if raw is None else {"kind": one.kind, "base": raw, **one.to_json()}
        return raw

    def fingerprint(self) -> str:
        hashed = self.prices.fingerprint()
        for one in self.adjustments:
            hashed = fingerprint({"kind": one.kind, "base": hashed, **one.to_json()})
        return hashed


def adjusted(costs: CostModel, adjustment: Adjustment) -> AdjustedCosts:
    """The costs with one more adjustment, in place of the one of its kind that they may have."""
    prices, others = costs, tuple[Adjustment, ...]()
    if isinstance(costs, AdjustedCosts):
        prices, others = costs.prices, tuple(one for one in costs.adjustments if type(one) is not type(adjustment))
    return AdjustedCosts(prices, tuple(sorted((*others, adjustment), key=lambda one: _ORDER.index(type(one)))))


def without(costs: CostModel, kind: type[Adjustment]) -> CostModel:
    """The costs before the adjustment of a kind; the same ones where there is none."""
    if not isinstance(costs, AdjustedCosts) or not any(isinstance(one, kind) for one in costs.adjustments):
        return costs
    return _with(costs.prices, [one for one in costs.adjustments if not isinstance(one, kind)])


def fitted_times(costs: CostModel) -> FittedTimes | None:
    """The times that were fitted to these costs; None before a fit."""
    return _adjustment(costs, FittedTimes)


def frozen_weights(costs: CostModel) -> FrozenWeights | None:
    """What of the weights does not train; None where all do."""
    return _adjustment(costs, FrozenWeights)


def _adjustment(costs: CostModel, kind: type[OneKind]) -> OneKind | None:
    adjustments = costs.adjustments if isinstance(costs, AdjustedCosts) else ()
    return next((one for one in adjustments if isinstance(one, kind)), None)


def _with(prices: CostModel, adjustments: Sequence[Adjustment]) -> CostModel:
    return AdjustedCosts(prices, tuple(adjustments)) if adjustments else prices


@dataclass(frozen=True, slots=True)
class LeastTimes:
    """Prices of shapes by the `least` of each adjustment."""

    prices: CostModel
    adjustments: tuple[Adjustment, ...]

    @property
    def num_stages(self) -> int:
        return self.prices.num_stages

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        def before(kind: Recompute | None) -> MicroBatchCosts:
            return self.prices.evaluate_shapes(rows, encoder_len, decoder_len, kind or recompute)

        for one in self.adjustments:
            if not isinstance(one, ForwardsAlone):
                before = partial(one.least, before)
        return before(recompute)
