"""Costs fitted to the actions of recorded runs: what this model took on these devices, one polynomial a stage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.floor import GrowingTimes, PaddedTimes
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts, fingerprint, sum_of_squares
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.plan import RECOMPUTES, MicroBatch, Recompute
from dynapipe_ext.reproducible import non_negative_least_squares, product, rank
from dynapipe_ext.timeline import Trace
from dynapipe_ext.topology import Topology

ActionKind = Literal["F", "B", "I", "W"]
BaseCosts = AnalyticCosts | CostTable | TokenCosts

REACH = 1.25  # rows this many times the longest recorded one are still priced
MIN_OBSERVATIONS = 8  # of one kind on one stage; three coefficients and something to hold out
_FOLDS = 5
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One recorded action. `squares` is tokens x context (`sum_of_squares`); `row_len` the longest row that attends,
    a document where attention restarts at each; `seconds` by the clock that was chosen."""

    stage: int
    kind: ActionKind
    recompute: Recompute
    tokens: int
    squares: int
    row_len: int
    seconds: float


def observations(
    trace: Trace,
    *,
    topology: Topology | None = None,
    micro_batches: Mapping[int, Sequence[MicroBatch]] | None = None,
    recompute: Recompute = "none",
    clock: Literal["wall", "cpu"] = "wall",
) -> tuple[Observation, ...]:
    """The actions of a trace ("2F0"); other spans (waits, reductions) are passed over.

    A span has the shape of its micro-batch but neither its documents nor its recomputation. Without more, shapes are
    taken as padded rows that all ran under `recompute`. Runs of packed rows or of several kinds of recomputation need
    `micro_batches[dp_rank]`, in the order of the step's plan, and the `topology` that says which replica a rank is in.
    "cpu" takes CPU seconds: where ranks share cores, wall time measures the neighbours.
    """
    if micro_batches is not None and topology is None:
        raise ConfigError("micro_batches are given by replica: give the topology as well, which places ranks in them")
    found = []
    for span in trace.spans:
        if not (match := _ACTION.fullmatch(span.label)):
            continue
        kind: ActionKind = match[2]  # type: ignore[assignment]  # the pattern admits these four only
        where = f"span {span.label!r} of rank {span.rank} in trace {trace.name!r}"
        seconds = span.duration_s if clock == "wall" else span.cpu_s
        if not (math.isfinite(seconds) and seconds > 0):
            raise DataError(
                f"{where} took {seconds} {clock} seconds but a fit needs more than 0: check the recorder's clock, or"
                " take the other one"
            )
        if micro_batches is not None and topology is not None:
            dp_rank, index = topology.coordinates(span.rank).dp_rank, int(match[3])
            if index >= len(micro_batches.get(dp_rank, ())):
                raise DataError(
                    f"{where} names micro-batch {index} but replica {dp_rank} is given"
                    f" {len(micro_batches.get(dp_rank, ()))}: give the plan of this very step"
                )
            m = micro_batches[dp_rank][index]
            decoder, size, kind_of_recompute = m.decoder_len, _size(m), m.recompute
        elif len(span.shape) >= 2 and min(span.shape[:2]) > 0:
            rows, length = span.shape[:2]
            decoder, size, kind_of_recompute = sum(span.shape[2:]), (rows * length, rows * length**2, length), recompute
        else:
            raise DataError(f"{where} has shape {span.shape}, not (rows, length): record it, or give micro_batches")
        if decoder:
            raise DataError(f"{where} has a decoder: the fit knows decoder-only models, measure a cost table instead")
        found.append(Observation(
            stage=int(match[1]), kind=kind, recompute=kind_of_recompute, tokens=size[0], squares=size[1],
            row_len=size[2], seconds=seconds,
        ))  # fmt: skip
    return tuple(found)


def _size(m: MicroBatch) -> tuple[int, int, int]:
    """(tokens, tokens x context, longest row that attends) of a decoder-only micro-batch."""
    whole = m.layout == "padded" or m.attention == "row"
    return m.padded_tokens, sum_of_squares(m), m.encoder_len if whole else max(s.encoder for s in m.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """ns = overhead_ns + ns_per_token tokens + ns_per_square tokens x context, of one kind of action on one stage.

    `held_out_error`: mean |predicted - measured| / measured over observations that their fit had not seen.
    """

    stage: int
    kind: ActionKind
    recompute: Recompute  # that of B and I, and "full" of W, which may then have nothing to do; else "none"
    overhead_ns: float
    ns_per_token: float
    ns_per_square: float
    num_observations: int
    held_out_error: float

    def ns(self, tokens: IntArray, squares: IntArray) -> IntArray:
        time_ns = self.overhead_ns + self.ns_per_token * tokens + self.ns_per_square * squares
        return np.rint(time_ns).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Times from recorded runs; bytes and transfers from `base`, a cost model of the same stages.

    B is the fit of B, or of I and W where runs split the backward. W is the fit of W, or `split_w` of B where none was
    recorded; under full recomputation it is the fit of W under that alone, or nothing. A row more than `REACH` times
    the longest recorded one is refused with PlanError by `evaluate` and costs INFEASIBLE in `evaluate_shapes`; so is a
    kind of recomputation that was not recorded.
    """

    base: BaseCosts
    fits: tuple[Fit, ...]
    longest_row: int
    split_w: float = 0.45
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.split_w <= 1:
            raise ConfigError(f"split_w is {self.split_w} but is a share of the backward: give 0 to 1")
        for fit in self.fits:
            coefficients = (fit.overhead_ns, fit.ns_per_token, fit.ns_per_square)
            if not all(math.isfinite(x) and x >= 0 for x in coefficients):
                raise DataError(f"the fit of {fit.kind} on stage {fit.stage} is {coefficients}: costs are not negative")
        keys = self._by_key()
        for stage in range(self.num_stages):
            if (stage, "F", "none") not in keys:
                raise DataError(f"stage {stage} of {self.num_stages} has no recorded forwards: record every stage")
        if not self.recomputes:
            raise DataError("no backward (B, or I and W) was recorded on every stage: record a whole training step")
        stray = sorted({fit.stage for fit in self.fits} - set(range(self.num_stages)))
        if stray:
            raise DataError(f"stages {stray} were recorded but the base costs have {self.num_stages} stages")

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def replica_collectives(self) -> ReplicaCollectives | None:
        return self.base.replica_collectives

    @property
    def activation_format(self) -> ActivationFormat | None:
        return self.base.activation_format

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The kinds of recomputation whose backward is known on every stage."""
        keys, stages = self._by_key(), range(self.num_stages)
        return tuple(r for r in RECOMPUTES if all(_has_backward(keys, stage, r) for stage in stages))

    @property
    def held_out_error(self) -> float:
        """The largest of the fits' errors."""
        return max(fit.held_out_error for fit in self.fits)

    def _by_key(self) -> dict[tuple[int, ActionKind, Recompute], Fit]:
        return {(fit.stage, fit.kind, fit.recompute): fit for fit in self.fits}

    def over(self, topology: Topology | None) -> tuple[FittedCosts, Topology]:
        """Over another number of replicas: times are those of the stages that ran.

        Errors: ConfigError for other stages, where the base knows its layers.
        """
        match self.base:
            case TokenCosts():
                return self, topology or Topology(pp=self.num_stages)
            case AnalyticCosts():
                num_layers = self.base.architecture.num_layers
            case CostTable():
                num_layers = self.base.num_layers
        recorded = self.base.topology.with_layers(num_layers)
        asked = recorded if topology is None else topology.with_layers(num_layers)
        if replace(asked, dp=recorded.dp) != recorded:
            raise ConfigError(
                f"the costs were fitted to runs of {_stages(recorded)} but {_stages(asked)} are asked for: record runs"
                " of these, or give costs that were not fitted"
            )
        return replace(self, base=replace(self.base, topology=asked)), asked

    def recounted(self, change: Callable[[AnalyticCosts], AnalyticCosts]) -> FittedCosts:
        """Bytes of a counted base as `change` has them; times stay those of the fits."""
        return replace(self, base=change(self.base)) if isinstance(self.base, AnalyticCosts) else self

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool) -> GrowingTimes:
        """For bounds over all plans: from the fits alone, as the base that knows bytes may refuse so many rows.

        W may be as short as its fit says whatever B is, so nothing is counted for the I of a split backward but on
        stage 0, where I + W = B.
        """

        def padded(rows: int, lengths: IntArray) -> PaddedTimes:
            tokens, squares = rows * lengths.sum(axis=1), rows * (lengths**2).sum(axis=1)
            ns = {key: fit.ns(tokens, squares) for key, fit in self._by_key().items()}
            forward = np.array([ns[stage, "F", "none"] for stage in range(self.num_stages)], np.float64)
            backward = np.array(
                [
                    np.min([_backward_ns(ns, stage, r) for r in self.recomputes], axis=0)
                    for stage in range(len(forward))
                ],
                np.float64,
            )
            chain = forward.sum(axis=0) + (backward[0] if split else backward.sum(axis=0))
            return PaddedTimes(forward, backward, chain)

        return GrowingTimes(padded, np.zeros(self.num_stages))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        for m in micro_batches:
            row_len = _size(m)[2]
            if m.decoder_len:
                raise PlanError(f"a micro-batch has decoder length {m.decoder_len} but only forward rows were recorded")
            if row_len > REACH * self.longest_row:
                raise PlanError(
                    f"a {m.layout} micro-batch attends over {row_len} positions but the longest recorded row has"
                    f" {self.longest_row}, and fitted costs refuse to go beyond {REACH} x that: record longer rows, or"
                    " make samples shorter"
                )
            if m.recompute not in self.recomputes:
                raise PlanError(
                    f"a micro-batch has recompute {m.recompute!r} but only {', '.join(self.recomputes)} were recorded:"
                    " record a run with it, or plan without it"
                )
        sizes = np.array([_size(m)[:2] for m in micro_batches], np.int64).reshape(-1, 2)
        recompute = np.array([m.recompute for m in micro_batches], dtype=np.str_)
        return self._timed(self.base.evaluate(micro_batches), sizes[:, 0], sizes[:, 1], recompute)

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Costs of padded shapes given as arrays; times and bytes of a shape that is refused are INFEASIBLE."""
        r, e, d = (
            x.ravel() for x in np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (rows, encoder_len, decoder_len)))
        )
        base = self.base.evaluate_shapes(r, e, d, recompute)
        bad = (d > 0) | (e > REACH * self.longest_row) | (base.forward_ns >= INFEASIBLE).any(axis=0)
        bad |= recompute not in self.recomputes
        kinds = np.full(r.shape, recompute if recompute in self.recomputes else self.recomputes[0])
        costs = self._timed(base, r * e, r * e * e, kinds)

        def refused(values: IntArray) -> IntArray:
            return np.where(bad, INFEASIBLE, values)

        return replace(
            costs,
            forward_ns=refused(costs.forward_ns),
            backward_ns=refused(costs.backward_ns),
            weight_ns=refused(costs.weight_ns),
            stored_bytes=refused(costs.stored_bytes),
            working_bytes=refused(costs.working_bytes),
        )

    def _timed(
        self, base: MicroBatchCosts, tokens: IntArray, squares: IntArray, recompute: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        """The base's costs with fitted times."""
        keys = self._by_key()
        forward, backward, weight = (np.zeros(base.forward_ns.shape, np.int64) for _ in range(3))
        for stage in range(self.num_stages):
            forward[stage] = keys[stage, "F", "none"].ns(tokens, squares)
            for kind in self.recomputes:
                if not (chosen := recompute == kind).any():
                    continue
                t, q = tokens[chosen], squares[chosen]
                weight_fit = keys.get((stage, "W", _w_under(kind)))
                put_off = weight_fit.ns(t, q) if weight_fit else np.zeros_like(t)
                if whole := keys.get((stage, "B", kind)):
                    backward[stage, chosen] = whole.ns(t, q)
                else:
                    backward[stage, chosen] = keys[stage, "I", kind].ns(t, q) + put_off
                if not weight_fit and kind != "full":
                    put_off = np.rint(self.split_w * backward[stage, chosen]).astype(np.int64)
                weight[stage, chosen] = np.minimum(put_off, backward[stage, chosen])
        return replace(base, forward_ns=forward, backward_ns=backward, weight_ns=weight)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "fitted",
            "base": self.base.to_json(),
            "fits": [asdict(fit) for fit in self.fits],
            "longest_row": self.longest_row,
            "split_w": self.split_w,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], base: BaseCosts) -> FittedCosts:
        """The inverse of `to_json`, given what its "base" was read as."""
        try:
            fits = tuple(Fit(**fit) for fit in raw["fits"])
            return cls(base, fits, int(raw["longest_row"]), float(raw["split_w"]), dict(raw["provenance"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"fitted costs cannot be read: {type(error).__name__} {error}: fit them again") from error

    def fingerprint(self) -> str:
        """Hash of everything but the provenance."""
        settings = {key: value for key, value in self.to_json().items() if key not in ("provenance", "base")}
        return fingerprint({**settings, "base": self.base.fingerprint()})


def _w_under(recompute: Recompute) -> Recompute:
    """What W is fitted by: a trainer that keeps no recomputed activations has no W where all are recomputed."""
    return "full" if recompute == "full" else "none"


def _has_backward(keys: Mapping[tuple[int, ActionKind, Recompute], Fit], stage: int, recompute: Recompute) -> bool:
    split = (stage, "I", recompute) in keys and (stage, "W", _w_under(recompute)) in keys
    return (stage, "B", recompute) in keys or split


def _backward_ns(
    ns: Mapping[tuple[int, ActionKind, Recompute], IntArray], stage: int, recompute: Recompute
) -> IntArray:
    """B, or I and W where backwards were recorded in two parts."""
    if (stage, "B", recompute) in ns:
        return ns[stage, "B", recompute]
    return ns[stage, "I", recompute] + ns[stage, "W", _w_under(recompute)]


def _stages(topology: Topology) -> str:
    layers = ", ".join(map(str, topology.layers_per_stage))
    return f"{topology.num_stages} stages of {layers} layers on tp {topology.tp} x pp {topology.pp}"


def fit_costs(
    recorded: Iterable[Observation],
    base: BaseCosts,
    *,
    split_w: float = 0.45,
    provenance: Mapping[str, Any] | None = None,
) -> FittedCosts:
    """Non-negative least squares of relative errors, for each stage, kind of action and (B, I) recomputation.

    The provenance gains the number of observations and the largest held-out error. Errors: DataError for fewer than
    `MIN_OBSERVATIONS` of one kind on one stage, or lengths too alike to tell the three coefficients apart.
    """
    groups: dict[tuple[int, ActionKind, Recompute], list[Observation]] = {}
    longest = 0
    for one in recorded:
        under = {"F": "none", "W": _w_under(one.recompute)}.get(one.kind, one.recompute)
        groups.setdefault((one.stage, one.kind, under), []).append(one)
        longest = max(longest, one.row_len)
    fits = tuple(_fit(*key, groups[key]) for key in sorted(groups))
    told = {
        "observations": sum(fit.num_observations for fit in fits),
        "held_out_error": max((fit.held_out_error for fit in fits), default=0.0),
    }
    return FittedCosts(base, fits, longest, split_w, {**(provenance or {}), **told})


def _fit(stage: int, kind: ActionKind, recompute: Recompute, group: list[Observation]) -> Fit:
    name = f"{kind} on stage {stage}" + (f" with recompute {recompute!r}" if kind != "F" else "")
    if len(group) < MIN_OBSERVATIONS:
        raise DataError(
            f"{len(group)} spans of {name} were recorded but a fit needs at least {MIN_OBSERVATIONS}: record more steps"
        )
    points = sorted((one.tokens, one.squares, one.seconds * 1e9) for one in group)
    x_N3 = np.array([(1.0, tokens, squares) for tokens, squares, _ in points])
    y_N = np.array([ns for *_, ns in points])
    if rank(x_N3) < 3:
        raise DataError(
            f"the {len(group)} spans of {name} have too few different shapes to tell overhead, tokens and context"
            " apart: record micro-batches of several lengths and several numbers of tokens"
        )
    fold_N = np.arange(len(points)) % _FOLDS
    errors = np.zeros(len(points))
    for fold in range(_FOLDS):
        out = fold_N == fold
        seen_3 = non_negative_least_squares(x_N3[~out], y_N[~out])
        errors[out] = np.abs(product(x_N3[out], seen_3) - y_N[out]) / y_N[out]
    overhead, per_token, per_square = (float(c) for c in non_negative_least_squares(x_N3, y_N))
    return Fit(
        stage=stage, kind=kind, recompute=recompute, overhead_ns=overhead, ns_per_token=per_token,
        ns_per_square=per_square, num_observations=len(group), held_out_error=float(errors.mean()),
    )  # fmt: skip
