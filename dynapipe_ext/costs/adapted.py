"""What training costs by what its actions have taken: a view of any cost model, with times fitted in the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import RECOMPUTES, MicroBatch, Recompute
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs import abilities
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, IntArray, MicroBatchCosts
from dynapipe_ext.costs.tokens import count_positions, fingerprint
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

LETTERS = "FBIW"
_MOST = 2.0**40
_OF_KIND = {(letter, kind): f"{letter} {kind}" for letter in "BI" for kind in RECOMPUTES}
_NAMES = (*LETTERS, *_OF_KIND.values())
_ENOUGH = 8  # actions of one kind of recomputation for a correction of their own
_WORTH_MORE_TERMS = 0.5  # of the error with a factor alone: more terms than are needed follow noise


@dataclass(frozen=True, slots=True)
class TimeCorrection:
    """An action's time: scale x what another model says + overhead + so much a token and a squared length."""

    scale: float = 1.0
    overhead_ns: float = 0.0
    ns_per_token: float = 0.0
    ns_per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= _MOST:
                raise ConfigError(f"{name} of a correction is {short(value)} but must be a number of 0 to {_MOST:.0f}")


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """One action of `letter` that has run: `base_ns` is what the costs before any correction say, `predicted_ns` what
    those say that its plan was made with. `tokens` and `squares` as `count_positions`; `shape` is (rows, encoder_len,
    decoder_len).
    """

    stage: int
    letter: str
    recompute: Recompute
    shape: tuple[int, int, int]
    tokens: int
    squares: int
    base_ns: int
    predicted_ns: int
    measured_ns: int


def times_by_letter(costs: MicroBatchCosts) -> dict[str, IntArray]:
    """Of each letter of actions, shape (S, M)."""
    return {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}


@dataclass(frozen=True, slots=True)
class AdaptedCosts:
    """The costs of `base` with other times: `corrections[s]` has those of stage s, by the letters of actions, and where
    backwards of one kind of recomputation were measured enough, by both ("B full"), which then comes first.

    A letter that was not measured keeps its time, but B is I and W where both were, and W goes with B where it alone
    was. What takes no time goes on taking none, what cannot be stays so; bytes and transfers are those of `base`.
    Errors: ConfigError for other than one mapping a stage, of such names.
    """

    base: CostModel
    corrections: tuple[Mapping[str, TimeCorrection], ...]

    def __post_init__(self) -> None:
        if len(self.corrections) != self.base.num_stages:
            raise ConfigError(f"{len(self.corrections)} corrections for {self.base.num_stages} stages: give one each")
        if unknown := [name for stage in self.corrections for name in stage if name not in _NAMES]:
            raise ConfigError(f"a correction is of actions {short(unknown[0])}: give one of {', '.join(_NAMES)}")

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def replica_collectives(self) -> ReplicaCollectives | None:
        return abilities.replica_collectives_of(self.base)

    @property
    def activation_format(self) -> ActivationFormat | None:
        return abilities.activation_format_of(self.base)

    @property
    def has_decoder(self) -> bool | None:
        return abilities.has_decoder(self.base)

    @property
    def prices_pieces(self) -> bool:
        return abilities.prices_pieces(self.base)

    @property
    def unadapted(self) -> CostModel:
        return self.base

    def over(self, topology: Topology | None) -> tuple[CostModel, Topology]:
        """Over the same stages with any number of replicas. Over other stages what was fitted says nothing: `base`."""
        ours, before = abilities.over_topology(self.base, None)
        base, topology = abilities.over_topology(self.base, topology or before)
        same = base is ours or replace(topology, dp=1) == replace(before, dp=1)
        return (replace(self, base=base) if same else base), topology

    def recounted(self, change: Callable[[Any], Any]) -> AdaptedCosts:
        return replace(self, base=abilities.recounted(self.base, change))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        tokens, squares = np.array([count_positions(m) for m in micro_batches], np.int64).reshape(-1, 2).T
        kinds = np.array([m.recompute for m in micro_batches], dtype=np.str_)
        return self._corrected(self.base.evaluate(micro_batches), tokens, squares, kinds)

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Costs of padded shapes given as arrays, as `base` has them."""
        costs = abilities.shape_prices(self.base).evaluate_shapes(rows, encoder_len, decoder_len, recompute)
        r, e, d = (
            np.ravel(x)
            for x in np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (rows, encoder_len, decoder_len)))
        )
        return self._corrected(costs, r * (e + d), r * (e * e + d * d), np.full(r.shape, recompute))

    def _corrected(
        self, costs: MicroBatchCosts, tokens: IntArray, squares: IntArray, kinds: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        times = times_by_letter(costs)
        forward, backward, weight = (np.array(times[letter]) for letter in "FBW")
        for s, stage in enumerate(self.corrections):
            terms = {letter: _terms(times[letter][s], tokens, squares) for letter in LETTERS}
            known = {letter: _times(stage, letter, terms[letter], kinds) for letter in LETTERS if letter in stage}
            if "F" in known:
                forward[s] = known["F"]
            if "I" in known and "W" in known:
                backward[s], weight[s] = known["I"] + known["W"], known["W"]
            elif "B" in known:
                backward[s] = known["B"]
                weight[s] = np.floor(weight[s] / np.maximum(times["B"][s], 1) * known["B"])
        for new, old in ((forward, times["F"]), (backward, times["B"]), (weight, times["W"])):
            np.copyto(new, old, where=(old == 0) | (times["F"] >= INFEASIBLE))
        return replace(costs, forward_ns=forward, backward_ns=backward, weight_ns=weight)

    def to_json(self) -> dict[str, Any]:
        corrections = [{letter: list(astuple(one)) for letter, one in stage.items()} for stage in self.corrections]
        return {"kind": "adapted", "base": abilities.costs_as_json(self.base), "corrections": corrections}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], base: CostModel) -> AdaptedCosts:
        """What `to_json` wrote, its `base` read."""
        try:
            stages = tuple({letter: TimeCorrection(*one) for letter, one in of.items()} for of in raw["corrections"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"adapted costs {sorted(raw)} cannot be read: {error}: give what a run wrote") from error
        return cls(base, stages)

    def fingerprint(self) -> str:
        return fingerprint(self.to_json() | {"base": self.base.fingerprint()})


def adapted(costs: CostModel, actions: Sequence[MeasuredAction]) -> AdaptedCosts:
    """The costs, or those that they adapt already, with the times of measured actions, stage by stage and letter by
    letter; what was not measured this time keeps the correction that it has."""
    base, corrections = (
        (costs.base, costs.corrections) if isinstance(costs, AdaptedCosts) else (costs, ({},) * costs.num_stages)
    )
    alike: dict[tuple[int, str], list[MeasuredAction]] = defaultdict(list)
    for action in actions:
        if action.base_ns > 0 and action.measured_ns > 0:
            alike[action.stage, action.letter].append(action)
            if of_kind := _OF_KIND.get((action.letter, action.recompute)):
                alike[action.stage, of_kind].append(action)
    fitted = {key: _fit(of) for key, of in alike.items() if key[1] in LETTERS or len(of) >= _ENOUGH}
    return AdaptedCosts(
        base,
        tuple(
            {**before, **{name: fitted[s, name] for name in _NAMES if (s, name) in fitted}}
            for s, before in enumerate(corrections)
        ),
    )


def prediction_error(costs: AdaptedCosts, actions: Sequence[MeasuredAction]) -> tuple[float, float]:
    """What predictions are off by, over what was measured: those of the plans, and those of `costs`."""
    measured_ns = sum(action.measured_ns for action in actions)
    before_ns = sum(abs(action.predicted_ns - action.measured_ns) for action in actions)
    after_ns = 0.0
    for action in actions:
        terms = _terms(np.array([action.base_ns]), np.array([action.tokens]), np.array([action.squares]))
        stage, kind = costs.corrections[action.stage], np.array([action.recompute])
        after_ns += abs(float(_times(stage, action.letter, terms, kind)[0]) - action.measured_ns)
    return before_ns / measured_ns, after_ns / measured_ns


def _terms(base_ns: IntArray, tokens: IntArray, squares: IntArray) -> FloatArray:
    """(M, 4): what a `TimeCorrection` has coefficients of."""
    return np.stack([base_ns, np.ones_like(base_ns), tokens, squares], axis=1).astype(np.float64)


def _times(
    stage: Mapping[str, TimeCorrection], letter: str, terms: FloatArray, kinds: npt.NDArray[np.str_]
) -> FloatArray:
    """Corrected times of micro-batches that are recomputed so."""
    found = np.rint(product(terms, astuple(stage.get(letter, TimeCorrection()))))
    for kind in RECOMPUTES:
        if own := stage.get(f"{letter} {kind}"):
            found = np.where(kinds == kind, np.rint(product(terms, astuple(own))), found)
    return found


def _fit(actions: Sequence[MeasuredAction]) -> TimeCorrection:
    """Of least relative errors: a factor alone, unless overhead, tokens and squares explain much of what it leaves."""
    columns = np.array([(a.base_ns, a.tokens, a.squares) for a in actions], np.int64).T
    terms, measured = _terms(*columns), np.array([a.measured_ns for a in actions], np.float64)
    factor = np.append(non_negative_least_squares(terms[:, :1], measured), [0.0, 0.0, 0.0])
    full = non_negative_least_squares(terms, measured)
    errors = [float(np.abs(product(terms, found) - measured).sum()) for found in (factor, full)]
    chosen = full if errors[1] < _WORTH_MORE_TERMS * errors[0] else factor
    return TimeCorrection(*chosen.tolist())
