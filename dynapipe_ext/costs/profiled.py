"""A cost table from few measurements: which shapes to measure, what is known between them, and how well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dynapipe_ext.costs.analytic import ModelShape, parameters_per_stage
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import LayerKind
from dynapipe_ext.costs.surface import PARTS, QUANTITIES, Measured, Part, Shape, Surface, left_out_errors, next_shape
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import RECOMPUTES, Layout, MicroBatch, Recompute, round_up
from dynapipe_ext.topology import Topology

Measure = Callable[[Part, MicroBatch], Measured | None]
_TIMES, _LEAST_SHAPES = ("forward_s", "backward_s"), 8
_EXACT = 1e-3  # relative noise of counted bytes
_PER_DOUBLING = 4  # points of the written table: a multilinear cell then misses a square by less than 0.8 %


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRange:
    """Which shapes are measured: lengths from `min_len` to `max_len`, rows x length up to `max_tokens`. Lengths are
    multiples of `multiple`, the ranks that share a sequence.
    """

    max_len: int
    max_tokens: int
    min_len: int = 16
    multiple: int = 1
    recomputes: tuple[Recompute, ...] = RECOMPUTES

    def __post_init__(self) -> None:
        if not 1 <= self.min_len <= self.max_len <= self.max_tokens:
            raise ConfigError(
                f"lengths {self.min_len} to {self.max_len} and {self.max_tokens} tokens a micro-batch: they must ascend"
            )
        if self.min_len % self.multiple or self.max_len % self.multiple:
            raise ConfigError(
                f"lengths {self.min_len} to {self.max_len} must be multiples of {self.multiple}, the ranks that share a"
                " sequence"
            )

    def holds(self, shape: Shape) -> bool:
        return self.min_len <= shape[1] <= self.max_len and shape[0] * shape[1] <= self.max_tokens

    def first(self) -> list[Shape]:
        """The corners, the middle of the longest side, and the middle."""
        middle = round_up(round((self.min_len * self.max_len) ** 0.5), self.multiple)
        corners = [(1, self.min_len), (1, self.max_len), (self.max_tokens // self.min_len, self.min_len)]
        rest = [self.max_tokens // self.max_len, self.max_tokens // middle, round((self.max_tokens / middle) ** 0.5)]
        shapes = [*corners, (rest[0], self.max_len), (rest[1], middle), (max(1, rest[2]), middle)]
        return list(dict.fromkeys(shapes))

    def candidates(self) -> list[Shape]:
        return [s for s in itertools.product(self.rows(1), self.lengths(2)) if self.holds(s)]

    def rows(self, per_doubling: int) -> list[int]:
        return _spread(1, self.max_tokens // self.min_len, per_doubling, 1)

    def lengths(self, per_doubling: int) -> list[int]:
        return _spread(self.min_len, self.max_len, per_doubling, self.multiple)

    def held_out(self, count: int, seed: int) -> list[Shape]:
        """Shapes spread evenly over doublings, that nobody chose."""
        random = np.random.default_rng(seed)
        found: list[Shape] = []
        while len(found) < count:
            exponent = random.uniform(np.log(self.min_len), np.log(self.max_len))
            length = round_up(round(float(np.exp(exponent))), self.multiple)
            rows = round(float(np.exp(random.uniform(0.0, np.log(max(1.0, self.max_tokens / length))))))
            if self.holds((rows, length)):
                found.append((rows, length))
        return found


@dataclass(slots=True)
class Profile:
    """What was measured: by part and recomputation, by (rows, length); None where a shape did not fit."""

    points: dict[tuple[Part, Recompute], dict[Shape, Measured | None]] = field(default_factory=dict)

    def kinds(self, within: ProfileRange) -> list[tuple[Part, Recompute]]:
        """The head recomputes nothing."""
        return [("layer", r) for r in within.recomputes] + [("head", "none")]

    def known(self, part: Part, recompute: Recompute) -> dict[Shape, Measured]:
        return {s: m for s, m in self.points.get((part, recompute), {}).items() if m is not None}

    def shapes(self) -> list[Shape]:
        return sorted(set().union(*self.points.values())) if self.points else []

    def visit(self, shape: Shape, measure: Measure, within: ProfileRange) -> None:
        """Measure a shape in every way that is still missing. Larger ones than what did not fit do not fit."""
        for kind in self.kinds(within):
            points = self.points.setdefault(kind, {})
            if shape not in points:
                too_large = any(m is None and s[0] <= shape[0] and s[1] <= shape[1] for s, m in points.items())
                points[shape] = None if too_large else measure(kind[0], _padded(shape, kind[1]))

    def errors(self) -> dict[Shape, float]:
        """Of each shape, the worst error of a time of a layer or the head when that shape is left out."""
        worst: dict[Shape, float] = {}
        for part in PARTS:
            known = self.known(part, "none")
            for name in _TIMES:
                for shape, error in left_out_errors({s: getattr(m, name) for s, m in known.items()}).items():
                    worst[shape] = max(worst.get(shape, 0.0), error)
        return worst

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"part": part, "recompute": recompute, "rows": rows, "length": length, **(asdict(m) if m else {})}
            for (part, recompute), points in self.points.items()
            for (rows, length), m in points.items()
        ]

    @classmethod
    def from_json(cls, raw: Sequence[Mapping[str, Any]]) -> Profile:
        profile = cls()
        try:
            for one in raw:
                measured = Measured(**{name: one[name] for name in QUANTITIES}) if "forward_s" in one else None
                kind = (one["part"], one["recompute"])
                profile.points.setdefault(kind, {})[int(one["rows"]), int(one["length"])] = measured
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"measurements cannot be read: {type(error).__name__} {error}: remove the file") from error
        return profile


def choose_and_measure(
    profile: Profile,
    measure: Measure,
    within: ProfileRange,
    *,
    error_target: float,
    most_shapes: int,
    go_on: Callable[[Profile, float | None], bool],
) -> None:
    """Measure the first shapes, then, one by one, the shape about which least is known, until the mean error of shapes
    that are left out is at most `error_target`, there are `most_shapes`, or `go_on(profile, error)` is False.

    Errors: DataError where hardly anything fits on the device.
    """
    for shape in within.first():
        profile.visit(shape, measure, within)
        if not go_on(profile, None):
            break
    while True:
        if len(profile.known("layer", "none")) < 3:
            raise DataError("fewer than 3 shapes fit on this device: lower the tokens of a micro-batch")
        errors = profile.errors()
        error = float(np.mean(list(errors.values())))
        enough = len(errors) >= _LEAST_SHAPES and error <= error_target
        if not go_on(profile, error) or enough or len(profile.shapes()) >= most_shapes:
            return
        chosen = next_shape(list(errors), errors, [s for s in within.candidates() if s not in profile.shapes()])
        if chosen is None:
            return
        profile.visit(chosen, measure, within)


def cost_table(
    profile: Profile,
    within: ProfileRange,
    shape: ModelShape,
    *,
    value_bytes: int,
    tp: int = 1,
    distributed_optimizer: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> CostTable:
    """The measurements on a dense grid, for a pipeline of one stage until it is laid out over a topology; `tp` is the
    tensor-parallel degree that was measured.
    """
    grids: dict[tuple[Recompute, LayerKind], Grid] = {}
    head_grid = _grid(profile, ("head", "none"), within)
    for recompute in within.recomputes:
        grids[recompute, "encoder"] = _grid(profile, ("layer", recompute), within)
        grids[recompute, "postprocess"] = head_grid
    one, two = (parameters_per_stage(replace(shape, num_layers=n), Topology(tp=tp))[0] for n in (1, 2))
    head = shape.hidden_size * shape.vocab_size // tp
    embedding = head + (shape.hidden_size * shape.max_seq_len if shape.position == "learned" else 0)
    norm = one - (two - one) - embedding - (0 if shape.tied_embeddings else head)
    whole, optimizer = 1 + 4 / value_bytes, 8 / value_bytes  # gradients and Adam's moments are fp32
    optimizer += 4 / value_bytes if value_bytes < 4 else 0  # and a master copy of 16-bit weights
    return CostTable(
        grids=grids,
        parameter_bytes={
            "encoder": float((two - one) * value_bytes),
            "embedding": float(embedding * value_bytes),
            "head": float((norm if shape.tied_embeddings else norm + head) * value_bytes),
            "tied_head": float(head * value_bytes if shape.tied_embeddings else 0),
        },
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        topology=Topology(tp=tp),
        state_parts=(whole, optimizer) if distributed_optimizer else (whole + optimizer, 0.0),
        value_bytes=value_bytes,
        provenance=dict(provenance or {}),
    )


def _grid(profile: Profile, kind: tuple[Part, Recompute], within: ProfileRange) -> Grid:
    known = profile.known(*kind)
    missing = [s for s, m in profile.points[kind].items() if m is None]
    lengths, rows = within.lengths(_PER_DOUBLING), within.rows(_PER_DOUBLING)
    fits = [
        s
        for s in itertools.product(rows, lengths)
        if within.holds(s) and not any(m[0] <= s[0] and m[1] <= s[1] for m in missing)
    ]
    places = np.array(fits, np.float64)

    def column(name: str, unit: float) -> dict[tuple[int, ...], float]:
        noise = {"noise": _EXACT} if name.endswith("bytes") else {}
        surface = Surface.fit({s: float(getattr(m, name)) for s, m in known.items()}, **noise)
        return {s: round(float(v) * unit, 6) for s, v in zip(fits, surface(places), strict=True)}

    columns = {"forward_ms": column("forward_s", 1e3), "backward_ms": column("backward_s", 1e3)}
    columns |= {"stored_mb": column("stored_bytes", 1e-6), "peak_mb": column("peak_bytes", 1e-6)}
    columns["weight_ms"] = column("weight_s", 1e3)
    return Grid.from_points(columns)


def _padded(shape: Shape, recompute: Recompute, layout: Layout = "padded") -> MicroBatch:
    rows, length = shape
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), layout, recompute)


def _spread(least: int, most: int, per_doubling: int, multiple: int) -> list[int]:
    """Multiples from `least` to `most` at even ratios."""
    doublings = np.log2(most / least)
    steps = np.linspace(0.0, doublings, int(np.ceil(doublings * per_doubling)) + 1)
    return sorted({round_up(round(float(n)), multiple) for n in least * 2.0**steps})
