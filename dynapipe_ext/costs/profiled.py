"""A cost table from few measurements: which shapes to measure, what is known between them, and how well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import LayerKind
from dynapipe_ext.costs.parameters import parameters_per_stage
from dynapipe_ext.costs.surface import (
    PARTS,
    QUANTITIES,
    Measured,
    ModelPart,
    Shape,
    Surface,
    left_out_errors,
    next_shape,
)
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.plan import RECOMPUTES, Layout, MicroBatch, Recompute, round_up
from dynapipe_ext.reproducible import exp, log
from dynapipe_ext.topology import Topology

_TIMES, _LEAST_SHAPES, _FEWEST = ("forward_s", "backward_s"), 8, 3
_MOST_BYTES, _MOST_SECONDS = 1e18, 1e6
_EXACT = 1e-3  # relative noise of counted bytes
_EDGE = 1.6  # a little above two steps of the grid, rounding included
_PER_DOUBLING = 4  # points of the written table: a multilinear cell then misses a square by less than 0.8 %


class MeasureShape(Protocol):
    """One layer or the head, for one micro-batch; None where it does not fit. With `bytes_only` times are 0."""

    def __call__(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRange:
    """Which shapes the table will price: lengths from `min_len` to `max_len`, rows x length up to `max_tokens`. Lengths
    are multiples of `multiple`, the ranks that share a sequence. Some more tokens are measured, for the far corners of
    the grid's last cells.
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

    @property
    def most_tokens(self) -> int:
        """What is measured."""
        return max(self.max_tokens, int(_EDGE * self.max_tokens))

    def holds(self, shape: Shape) -> bool:
        return self.min_len <= shape[1] <= self.max_len and shape[0] * shape[1] <= self.most_tokens

    def first(self) -> list[Shape]:
        """The corners, the middle of the longest side, and the middle."""
        middle, most = round_up(round((self.min_len * self.max_len) ** 0.5), self.multiple), self.most_tokens
        corners = [(1, self.min_len), (1, self.max_len), (most // self.min_len, self.min_len)]
        sides = [(most // self.max_len, self.max_len), (most // middle, middle)]
        return list(dict.fromkeys([*corners, *sides, (max(1, round((most / middle) ** 0.5)), middle)]))

    def candidates(self) -> list[Shape]:
        return [s for s in itertools.product(self.rows(1), self.lengths(2)) if self.holds(s)]

    def rows(self, per_doubling: int) -> list[int]:
        return _spread(1, self.most_tokens // self.min_len, per_doubling, 1)

    def lengths(self, per_doubling: int) -> list[int]:
        return _spread(self.min_len, self.max_len, per_doubling, self.multiple)

    def held_out(self, count: int, seed: int) -> list[Shape]:
        """Shapes within `max_tokens` that nobody chose, spread evenly over doublings."""
        random = np.random.default_rng(seed)
        found: list[Shape] = []
        while len(found) < count:
            exponent = random.uniform(log(self.min_len), log(self.max_len))
            length = round_up(round(float(exp(exponent))), self.multiple)
            rows = round(float(exp(random.uniform(0.0, log(max(1.0, self.max_tokens / length))))))
            if length <= self.max_len and rows * length <= self.max_tokens:
                found.append((rows, length))
        return found


@dataclass(slots=True)
class Profile:
    """What was measured: by part and recomputation, by (rows, length); None where a shape did not fit. `packed`: bytes
    that a layer keeps for a packed row over those of padded rows with as many tokens and squares.
    """

    points: dict[tuple[ModelPart, Recompute], dict[Shape, Measured | None]] = field(default_factory=dict)
    packed: dict[Recompute, float] = field(default_factory=dict)

    def kinds(self, within: ProfileRange) -> list[tuple[ModelPart, Recompute]]:
        """The head recomputes nothing."""
        return [("layer", r) for r in within.recomputes] + [("head", "none")]

    def known(self, part: ModelPart, recompute: Recompute) -> dict[Shape, Measured]:
        return {s: m for s, m in self.points.get((part, recompute), {}).items() if m is not None}

    def shapes(self) -> list[Shape]:
        return sorted(set().union(*self.points.values())) if self.points else []

    def visit(self, shape: Shape, measure: MeasureShape, within: ProfileRange) -> None:
        """Measure a shape in every way that is still missing. Larger ones than what did not fit do not fit."""
        for kind in self.kinds(within):
            points = self.points.setdefault(kind, {})
            if shape not in points:
                too_large = any(m is None and s[0] <= shape[0] and s[1] <= shape[1] for s, m in points.items())
                points[shape] = None if too_large else measure(kind[0], _micro_batch(shape, kind[1]))

    def fitting(self, within: ProfileRange) -> list[Shape]:
        """Shapes that fit with the kind of recomputation that keeps most, and in the head."""
        layers, heads = self.known("layer", within.recomputes[0]), self.known("head", "none")
        return sorted(layers.keys() & heads.keys())

    def pack(self, measure: MeasureShape, within: ProfileRange) -> None:
        """Measure what packing keeps beyond padding, at a middle shape that fits."""
        shapes = [s for s in self.fitting(within) if s[0] > 1]
        if not shapes:
            return
        shape = sorted(shapes, key=lambda s: s[0] * s[1])[len(shapes) // 2]
        for recompute in within.recomputes:
            padded = self.known("layer", recompute).get(shape)
            row = measure("layer", _micro_batch(shape, recompute, "packed"), bytes_only=True)
            if recompute not in self.packed and padded and row:
                ratios = row.stored_bytes / padded.stored_bytes, row.peak_bytes / padded.peak_bytes
                self.packed[recompute] = max(1.0, *ratios)

    def errors(self, within: ProfileRange) -> dict[Shape, float]:
        """Of each shape, the worst error of a time of a layer or the head when that shape is left out."""
        worst: dict[Shape, float] = {}
        for part, recompute in (("layer", within.recomputes[0]), ("head", "none")):
            known = self.known(part, recompute)  # type: ignore[arg-type]
            for name in _TIMES:
                for shape, error in left_out_errors({s: getattr(m, name) for s, m in known.items()}).items():
                    worst[shape] = max(worst.get(shape, 0.0), error)
        return worst

    def to_json(self) -> list[dict[str, Any]]:
        """The points. Packing is measured at the end, and again where that was not reached."""
        return [
            {"part": part, "recompute": recompute, "rows": rows, "length": length, **(asdict(m) if m else {})}
            for (part, recompute), points in self.points.items()
            for (rows, length), m in points.items()
        ]

    @classmethod
    def from_json(cls, raw: Sequence[Mapping[str, Any]], where: str = "measurements") -> Profile:
        """Errors: DataError naming the entry at fault."""
        profile = cls()
        for i, one in enumerate(raw):
            try:
                kind, shape = (one["part"], one["recompute"]), (int(one["rows"]), int(one["length"]))
                measured = Measured(**{name: one[name] for name in QUANTITIES}) if "forward_s" in one else None
                sound = kind[0] in PARTS and kind[1] in RECOMPUTES and min(shape) >= 1 and _is_sound(measured)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise DataError(f"{where}: entry {i} cannot be read ({error!r}): remove the file") from error
            if not sound:
                raise DataError(f"{where}: entry {i} is {short(one)}, which nothing measures: remove the file")
            profile.points.setdefault(kind, {})[shape] = measured
        return profile


def _is_sound(measured: Measured | None) -> bool:
    return measured is None or all(
        0 <= getattr(measured, name) <= (_MOST_SECONDS if name.endswith("_s") else _MOST_BYTES) for name in QUANTITIES
    )


def choose_and_measure(
    profile: Profile,
    measure: MeasureShape,
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
    waiting = within.first() + sorted(within.candidates(), key=lambda s: s[0] * s[1])
    for place, shape in enumerate(waiting):
        enough = len(profile.fitting(within)) >= _FEWEST
        if enough and place >= len(within.first()):
            break
        profile.visit(shape, measure, within)
        if not go_on(profile, None) and enough:
            break
    if len(profile.fitting(within)) < _FEWEST:
        raise DataError(
            f"{len(profile.fitting(within))} shapes from {within.min_len} to {within.max_len} positions and up to"
            f" {within.max_tokens} tokens were measured and fit on this device, but a table needs {_FEWEST}: give other"
            " lengths, or fewer tokens where they do not fit"
        )
    while True:
        errors = profile.errors(within)
        error = float(np.mean(list(errors.values())))
        done = len(errors) >= _LEAST_SHAPES and error <= error_target
        if not go_on(profile, error) or done or len(profile.shapes()) >= most_shapes:
            break
        chosen = next_shape(list(errors), errors, [s for s in within.candidates() if s not in profile.shapes()])
        if chosen is None:
            break
        profile.visit(chosen, measure, within)
    profile.pack(measure, within)


def cost_table(
    profile: Profile,
    within: ProfileRange,
    architecture: Architecture,
    *,
    value_bytes: int,
    tp: int = 1,
    distributed_optimizer: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> CostTable:
    """The measurements on a dense grid, for a pipeline of one stage until it is laid out over a topology; `tp` is the
    tensor-parallel degree that was measured; the vocabulary counts as it is (see `Architecture.padded`).
    """
    a = architecture
    grids: dict[tuple[Recompute, LayerKind], Grid] = {}
    head_grid = _grid(profile, ("head", "none"), within)
    for recompute in within.recomputes:
        grids[recompute, "encoder"] = _grid(profile, ("layer", recompute), within)
        grids[recompute, "postprocess"] = head_grid
    one, two = (parameters_per_stage(replace(a, num_layers=n), Topology(tp=tp))[0] for n in (1, 2))
    head = a.hidden_size * a.vocab_size // tp
    embedding = head + (a.hidden_size * a.max_seq_len if a.position == "learned" else 0)
    norm = one - (two - one) - embedding - (0 if a.tied_embeddings else head)
    whole, optimizer = 1 + 4 / value_bytes, 8 / value_bytes  # gradients and Adam's moments are fp32
    optimizer += 4 / value_bytes if value_bytes < 4 else 0  # and a master copy of 16-bit weights
    return CostTable(
        grids=grids,
        parameter_bytes={
            "encoder": float((two - one) * value_bytes),
            "embedding": float(embedding * value_bytes),
            "head": float((norm if a.tied_embeddings else norm + head) * value_bytes),
            "tied_head": float(head * value_bytes if a.tied_embeddings else 0),
        },
        hidden_size=a.hidden_size,
        num_layers=a.num_layers,
        topology=Topology(tp=tp),
        packed_bytes=profile.packed,
        state_parts=(whole, optimizer) if distributed_optimizer else (whole + optimizer, 0.0),
        value_bytes=value_bytes,
        provenance=dict(provenance or {}),
    )


def _grid(profile: Profile, kind: tuple[ModelPart, Recompute], within: ProfileRange) -> Grid:
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


def _micro_batch(shape: Shape, recompute: Recompute, layout: Layout = "padded") -> MicroBatch:
    rows, length = shape
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), layout, recompute)


def _spread(least: int, most: int, per_doubling: int, multiple: int) -> list[int]:
    """Multiples from `least` to `most` at even ratios."""
    num_steps = (-(-(most**per_doubling) // least**per_doubling) - 1).bit_length()  # so many, rounded up, in integers
    places = least * exp(np.linspace(0.0, log(most / least), num_steps + 1))
    return sorted({round_up(round(float(n)), multiple) for n in places})
