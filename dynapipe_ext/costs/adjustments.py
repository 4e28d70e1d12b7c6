"""Adjustments of the prices of a cost model (`prices`), and the adjusted costs (`costs`).

prices ─► frozen weights ─► fitted times ─► forward-only ─► costs, for micro-batches and for padded shapes"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import RECOMPUTES, MicroBatch, Recompute, with_sliced_head
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.codec import dump_fields, from_json
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.floor import Floor, GrowingTimes
from dynapipe_ext.costs.model import (
    CostCapabilities,
    CostModel,
    IntArray,
    MicroBatchCosts,
    fingerprint,
    make_growing_times,
)
from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.reproducible import FloatArray, product

LETTERS = "FBIW"
_MAX = 2.0**40
_MAX_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Frozen weights, as with adapters: stage s trains the share `trained_shares[s]`, 0 to 1, of weight-gradient FLOPs.

    A frozen weight has no gradient: W, and B by as much, are shorter by the share of frozen weights, under full
    recomputation too. All else is per stage. `static_bytes` replace those of the prices (empty: they stay), as frozen
    weights have neither gradients nor optimizer states. `token_bytes`: what adapters store per token on top; if layers
    are recomputed, they are working bytes, of all layers at once. `idle_bytes`: weights on top that no data runs
    through, such as those of a vision tower."""

    LATER_FIELDS: ClassVar = ("token_bytes", "idle_bytes")  # older files do not have them (`codec.py`)
    trained_shares: tuple[float, ...]
    static_bytes: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()
    idle_bytes: tuple[int, ...] = ()

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless every field has one number per stage, within its bounds."""
        for name in self.__slots__:
            is_share, values = name == "trained_shares", getattr(self, name)
            if (is_share or values) and len(values) != num_stages:
                raise ConfigError(f"{name} has {len(values)} entries for {num_stages} stages: give one per stage")
            max_value = 1 if is_share else _MAX_BYTES
            for value in values:
                if not isinstance(value, int | float) or not 0 <= value <= max_value:
                    raise ConfigError(f"{name} has {short(value)} but must be numbers of 0 to {max_value}")

    def adjust(
        self, costs: MicroBatchCosts, plain: MicroBatchCosts, kinds: npt.NDArray[np.str_], tokens: IntArray
    ) -> MicroBatchCosts:
        """Return adjusted `costs` of micro-batches with recomputation modes `kinds`, (M,), and `tokens`, (M,). `plain`:
        the costs without recomputation.

        Under full recomputation I does the work for weight gradients and W takes no time: W of `plain` is its time."""
        weight_ns = np.where(plain.infeasible, costs.weight_ns, np.minimum(plain.weight_ns, costs.backward_ns))
        kept_bytes = np.outer(self.token_bytes or (0,) * costs.num_stages, tokens).astype(np.int64)
        is_stored = split_kinds(kinds)[0] == "none"
        return replace(
            costs,
            stored_bytes=costs.stored_bytes + kept_bytes * is_stored,
            working_bytes=costs.working_bytes + kept_bytes * ~is_stored,
            **self._shorten(costs, costs.backward_ns - np.floor(self._frozen * weight_ns)),
        ).refuse(costs.infeasible)

    def bind(self, costs: MicroBatchCosts, plain: MicroBatchCosts) -> MicroBatchCosts:
        """Return times at measured points such that interpolation between them never exceeds the adjusted times.

        W that is cut off at B is not linear between points. If that happens, only the trained share of B counts."""
        weight_ns = np.where(plain.infeasible, costs.weight_ns, np.maximum(plain.weight_ns, costs.weight_ns))
        is_cut = ((weight_ns >= costs.backward_ns) & ~costs.infeasible).any(axis=1, keepdims=True)
        backward_ns = np.floor(costs.backward_ns - self._frozen * np.where(is_cut, costs.backward_ns, weight_ns))
        return replace(costs, **self._shorten(costs, backward_ns)).refuse(costs.infeasible)

    def _shorten(self, costs: MicroBatchCosts, backward_ns: npt.NDArray[Any]) -> dict[str, Any]:
        static = np.array(self.static_bytes, np.int64) if self.static_bytes else costs.static_bytes
        return {
            "backward_ns": backward_ns.astype(np.int64),
            "weight_ns": costs.weight_ns - np.floor(self._frozen * costs.weight_ns).astype(np.int64),
            "static_bytes": static + np.array(self.idle_bytes or (0,) * costs.num_stages, np.int64),
        }

    @property
    def _frozen(self) -> FloatArray:
        return 1.0 - np.array(self.trained_shares)[:, None]


@dataclass(frozen=True, slots=True)
class TimeCorrection:
    """A corrected time: scale x its time before + overhead + rates x tokens and squared lengths of the micro-batch."""

    scale: float = 1.0
    overhead_ns: float = 0.0
    ns_per_token: float = 0.0
    ns_per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= _MAX:
                raise ConfigError(f"{name} of a correction is {short(value)} but must be a number of 0 to {_MAX:.0f}")

    def __call__(self, terms: FloatArray) -> FloatArray:
        """Return corrected times in ns, (M,), of micro-batches with these `make_correction_terms`, (M, 4)."""
        return np.rint(product(terms, astuple(self)))


StageCorrections = Mapping[str, TimeCorrection]
OF_KIND = {(letter, kind): f"{letter} {kind}" for letter in "BI" for kind in RECOMPUTES}
CORRECTED = (*LETTERS, *OF_KIND.values())


def list_times(costs: MicroBatchCosts) -> dict[str, IntArray]:
    """Return the times in ns of each action kind (F, B, I, W), shape (S, M)."""
    return {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}


def make_correction_terms(times_ns: IntArray, tokens: IntArray, squares: IntArray) -> FloatArray:
    """Return (M, 4) terms: times before, ones, tokens, squared lengths."""
    return np.stack([times_ns, np.ones_like(times_ns), tokens, squares], axis=1).astype(np.float64)


def correct_times(stage: StageCorrections, letter: str, terms: FloatArray, kinds: npt.NDArray[np.str_]) -> FloatArray:
    """Return times in ns, (M,), of actions of one kind: by its correction for their recomputation mode ("B full"), else
    by that of the kind ("B"), else unchanged."""
    times_ns = stage.get(letter, TimeCorrection())(terms)
    for kind in RECOMPUTES:
        if own := stage.get(f"{letter} {kind}"):
            times_ns = np.where(kinds == kind, own(terms), times_ns)
    return times_ns


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Corrected times of actions: `corrections[s]` has those of stage s by action kind (F, B, I, W). With enough
    measured actions of one recomputation mode it also has those of kind and mode ("B full"), which then replace the
    kind's.

    Actions without measurements keep their time. A measured I and W also price B, as their sum. A measured B without
    them also scales W, in proportion. Times of 0 stay 0, and a shape that cannot run stays so. Bytes and transfers do
    not change."""

    corrections: tuple[StageCorrections, ...]

    def __hash__(self) -> int:
        return hash(tuple(tuple(sorted(stage)) for stage in self.corrections))

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless each stage has corrections, and only of known actions."""
        if len(self.corrections) != num_stages:
            raise ConfigError(f"{len(self.corrections)} corrections for {num_stages} stages: give one each")
        if unknown := [name for stage in self.corrections for name in stage if name not in CORRECTED]:
            raise ConfigError(f"a correction is of actions {short(unknown[0])}: give one of {', '.join(CORRECTED)}")

    def adjust(
        self, costs: MicroBatchCosts, kinds: npt.NDArray[np.str_], tokens: IntArray, squares: IntArray
    ) -> MicroBatchCosts:
        """Return adjusted `costs` of micro-batches with recomputation modes `kinds`, `tokens` and `squares`, (M,)."""
        times = list_times(costs)
        forward, backward, weight = (times[letter].copy() for letter in "FBW")
        for s, stage in enumerate(self.corrections):
            fitted = {
                letter: correct_times(stage, letter, make_correction_terms(of[s], tokens, squares), kinds)
                for letter, of in times.items()
            }
            forward[s] = fitted["F"]
            if "I" in stage and "W" in stage:
                backward[s], weight[s] = fitted["I"] + fitted["W"], fitted["W"]
            elif "B" in stage:
                weight[s] = np.floor(weight[s] / np.maximum(backward[s], 1) * fitted["B"])
                backward[s] = fitted["B"]
        new: dict[str, Any] = {"forward_ns": forward, "backward_ns": backward, "weight_ns": weight}
        for name, after in new.items():
            before = getattr(costs, name)
            new[name] = np.where((before == 0) | costs.infeasible, before, after)
        return replace(costs, **new)

    def bind(self, costs: MicroBatchCosts, kinds: npt.NDArray[np.str_]) -> MicroBatchCosts:
        """Return lower bounds of the adjusted times: each stage's times multiplied by the least factor that applies to
        them. (A stage that is recomputed is at least as slow as one that is not.)"""
        forward = np.array([[stage["F"].scale if "F" in stage else 1.0] for stage in self.corrections])
        backward = np.ones(costs.forward_ns.shape)
        for kind in {*kinds.tolist()}:
            modes = ("none", "stage") if kind == "none" else (kind,)
            factors = [[min(_backward_scale(stage, mode) for mode in modes)] for stage in self.corrections]
            backward[:, kinds == kind] = factors
        return replace(
            costs,
            forward_ns=np.floor(forward * costs.forward_ns).astype(np.int64),
            backward_ns=np.floor(backward * costs.backward_ns).astype(np.int64),
            weight_ns=np.floor(backward * costs.weight_ns).astype(np.int64),
        ).refuse(costs.infeasible)

    @property
    def scales(self) -> list[float]:
        """1, and the `scale` of every correction of every stage."""
        return [1.0, *(correction.scale for stage in self.corrections for correction in stage.values())]


def _backward_scale(stage: StageCorrections, kind: str) -> float:
    """Return the least factor by which the corrections of a stage change B, I and W under a recomputation mode."""
    letters = "IW" if "I" in stage and "W" in stage else "B" if "B" in stage else ""
    return min((stage.get(f"{letter} {kind}", stage[letter]).scale for letter in letters), default=1.0)


ADJUSTMENTS = ("frozen", "adapted", "forwards")  # their kinds in JSON, in the order in which they apply


@dataclass(frozen=True, slots=True)
class AdjustedCosts(CostModel):
    """The costs of `prices` after adjustments; `adjust` makes them.

    With `forward_only` no backward follows: B and W take no time, and nothing is stored after F. Static bytes stay,
    since gradients and optimizer states are in memory while a training run is evaluated. The sum of stored and working
    bytes of training, without recomputation or under full recomputation, limits the working bytes here: a forward
    without gradients keeps nothing that either of these drops.

    `lowest`: prices are those of each adjustment's `bind`, for bounds over all plans."""

    prices: CostModel
    frozen: FrozenWeights | None = None
    fitted: FittedTimes | None = None
    forward_only: bool = False
    lowest: bool = False

    def __post_init__(self) -> None:
        assert not isinstance(self.prices, AdjustedCosts), "adjust by `adjust`"
        for one in (self.frozen, self.fitted):
            if one:
                one.check(self.prices.num_stages)

    @property
    def num_stages(self) -> int:
        return self.prices.num_stages

    @property
    def facts(self) -> CostCapabilities:
        facts = self.prices.facts
        return replace(facts, prices_pieces=False, forwards_alone=True) if self.forward_only else facts

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        return self.prices.explain_refusal(micro_batch)

    def price(self, features: Features) -> MicroBatchCosts:
        """Return adjusted costs. Raises PlanError for recomputed micro-batches if costs are forward-only."""
        recompute, cp_degree = features.recompute, self.prices.facts.width
        tokens, squares = -(-features.tokens // cp_degree), -(-features.squares // cp_degree)  # of one rank

        def price_under(kind: Recompute | None) -> MicroBatchCosts:
            """Price the micro-batches as they are recomputed (None), or all by one mode."""
            costs = self.prices.price(features if kind is None else features.with_recompute(kind))
            kinds = recompute if kind is None else np.full(recompute.shape, kind)
            if self.frozen:
                plain = costs if (kinds == "none").all() else self.prices.price(features.with_recompute("none"))
                least = self.frozen.bind(costs, plain) if self.lowest else None
                costs = least or self.frozen.adjust(costs, plain, kinds, tokens)
            if not self.fitted:
                return costs
            return self.fitted.bind(costs, kinds) if self.lowest else self.fitted.adjust(costs, kinds, tokens, squares)

        if not self.forward_only:
            return price_under(None)
        if (recomputed := recompute[recompute != "none"]).size:
            raise PlanError(
                f"a micro-batch asks for recompute {str(recomputed[0])!r} but a forward-only run recomputes"
                ' nothing: give "none"'
            )
        costs, full = price_under(None).drop_backwards(), price_under("full").drop_backwards()
        return replace(costs, working_bytes=np.minimum(costs.working_bytes, full.working_bytes))

    def get_floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: CostModel | None = None) -> Floor | None:
        """Return lower bounds of the adjusted times; None for forward-only costs, and if `prices` have none.

        `GrowingTimes` are the least of all recomputation modes; None if fitted times would turn the time of a short
        sample from 0 into more. Times at measured points are those of each adjustment's `bind`."""
        at_points = replace(self, lowest=True)
        floor = None if self.forward_only else self.prices.get_floor(stage_ranks, split=split, least=least or at_points)
        if floor is None:
            return None
        # Rounding changes this much at most, of F and B of one micro-batch on one stage.
        error_ns = floor.error_ns + (1 if self.frozen else 0)
        scales = self.fitted.scales if self.fitted else [1.0]
        error_ns = 2 * max(scales) * error_ns + 4 if self.fitted else error_ns
        if not isinstance(floor, GrowingTimes):
            attended_ns = floor.attended_ns and tuple(min(scales) * ns for ns in floor.attended_ns)
            return replace(floor, error_ns=error_ns, attended_ns=attended_ns)
        token = self.prices.evaluate_shapes([1], [1])
        if self.fitted and not (token.forward_ns.all() and token.backward_ns.all()):
            return None
        return make_growing_times(
            self,
            split=split,
            rounds_up=bool(floor.rounding_ns.any()),
            kinds=RECOMPUTES + (with_sliced_head(RECOMPUTES) if self.facts.slices_head else ()),
            chain=at_points if split else None,
            error_ns=error_ns,
        )

    def with_topology(self, topology: Topology | None) -> tuple[CostModel, Topology]:
        """As `CostModel.with_topology`. With other stages (all but dp and width), fitted times are dropped, and frozen
        weights raise ConfigError."""
        own_prices, before = self.prices.with_topology(None)
        prices, topology = self.prices.with_topology(topology or before)
        if prices is own_prices or replace(topology, dp=1, width=1) == replace(before, dp=1, width=1):
            return replace(self, prices=prices), topology
        if self.frozen:
            raise ConfigError(
                f"these costs of frozen weights are of {self.num_stages} stages, {before}, and cannot be placed"
                f" over {topology}: give that topology, or the costs before adapters"
            )
        return adjust(prices, forward_only=self.forward_only), topology

    def at_width(self, width: int) -> AdjustedCosts:
        return replace(self, prices=self.prices.at_width(width))

    def change_analytic(self, change: Callable[[Any], Any]) -> AdjustedCosts:
        return replace(self, prices=self.prices.change_analytic(change))

    def with_exact_sums(self, value_bytes: int) -> AdjustedCosts:
        return replace(self, prices=self.prices.with_exact_sums(value_bytes))

    def _describe(self) -> list[dict[str, Any]]:
        """Describe each adjustment, the first one first."""
        described: list[dict[str, Any]] = []
        if self.frozen:
            described.append({"kind": "frozen", **dump_fields(self.frozen)})
        if self.fitted:
            stages = [{name: list(astuple(one)) for name, one in of.items()} for of in self.fitted.corrections]
            described.append({"kind": "adapted", "corrections": stages})
        return [*described, {"kind": "forwards"}] if self.forward_only else described

    def to_json(self) -> dict[str, Any] | None:
        """Return the last adjustment as JSON; its "base" is the one before it, and so on to `prices`. None if these
        have no JSON."""
        raw = self.prices.to_json()
        for one in self._describe():
            raw = None if raw is None else {**one, "base": raw}
        return raw

    def fingerprint(self) -> str:
        hashed = self.prices.fingerprint()
        for one in self._describe():
            hashed = fingerprint({**one, "base": hashed})
        return hashed


def adjust(costs: CostModel, **changes: Any) -> CostModel:
    """Return the costs with other adjustments, `frozen`, `fitted` or `forward_only`; None or False removes one."""
    before = costs if isinstance(costs, AdjustedCosts) else AdjustedCosts(costs)
    after = replace(before, **changes)
    if after == before:
        return costs
    return after if after.frozen or after.fitted or after.forward_only else after.prices


def read_adjustment(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword argument of `adjust` for JSON of one of `ADJUSTMENTS`. Raises ConfigError."""
    fields = {name: value for name, value in raw.items() if name not in ("kind", "base")}
    try:
        match raw["kind"]:
            case "frozen":
                return {"frozen": from_json(FrozenWeights, fields)}
            case "adapted":
                stages = ({name: TimeCorrection(*one) for name, one in of.items()} for of in fields["corrections"])
                return {"fitted": FittedTimes(tuple(stages))}
            case _:
                return {"forward_only": True}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{raw['kind']} costs {sorted(raw)} cannot be read: {error}: write them again") from error


def find_fitted_times(costs: CostModel) -> FittedTimes | None:
    """Return the times that are fitted in these costs; None if there are none."""
    return costs.fitted if isinstance(costs, AdjustedCosts) else None
