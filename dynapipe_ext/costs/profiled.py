"""Cost tables from few measurements: the shapes to measure, the costs between them, and their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    HEAD_SLICE,
    LAYER_RECOMPUTES,
    MicroBatch,
    Recompute,
    SampleLength,
    round_up,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import SLICED_HEAD, LayerKind
from dynapipe_ext.costs.measured_blocks import BlockTimes
from dynapipe_ext.costs.measuring_time import MeasuringTime
from dynapipe_ext.costs.packed_rows import PackedLayer
from dynapipe_ext.costs.pieces import MeasurePieces, PieceSurcharge, PieceSurcharges, SampleInPieces
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.surface import (
    PARTS,
    QUANTITIES,
    Measured,
    MeasuredShape,
    ModelPart,
    Surface,
    choose_next_shape,
    compute_left_out_errors,
    reduce_shape,
)
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.reproducible import exp, log

_TIMES, _LEAST_SHAPES, _FEWEST = ("forward_s", "backward_s"), 8, 3
_SIZES = ("rows", "length", "decoder_len")  # of a shape, as it is written
_LAYER_KINDS: Mapping[ModelPart, LayerKind] = {"layer": "encoder", "encoder": "encoder", "decoder": "decoder"}
_MOST_BYTES, _MOST_SECONDS = 1e18, 1e6
_SLICED: tuple[ModelPart, Recompute] = ("head", "head")  # the head in slices
_EXACT = 1e-3  # relative noise of counted bytes
_SHORTEST_TARGET = 4  # many are one word: packed rows are priced by rows of at least the shortest measured length
_FEW_PIECES, _MANY_PIECES = 4, 16  # of a sample that is measured in pieces: long ones, and short ones at most
_EDGE = 1.6  # a little above two steps of the grid, rounding included
_CELL = 1.5  # a written table's cell: positions at its far corner over those at its near one, rounding included
_PER_DOUBLING = 4  # points of the written table: a multilinear cell then misses a square by less than 0.8 %


class MeasureShape(Protocol):
    """Measures one layer or the head, for one micro-batch; None if it does not fit. With `bytes_only` times are 0.

    Of a pair's two lengths a part reads what `reduce_shape` says.
    """

    def __call__(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRange:
    """The shapes that the table will price: lengths from `min_len` to `max_len`, rows x length up to `max_tokens`.
    Lengths are multiples of `multiple`, the ranks that share a sequence. Some more tokens are measured, for the far
    corners of the grid's last cells.

    For an encoder-decoder, `max_len` bounds the encoder side and `max_decoder_len` the decoder side (0: there is none),
    whose rows may be shorter; tokens are those of both sides.
    """

    max_len: int
    max_tokens: int
    max_decoder_len: int = 0
    min_len: int = 16
    multiple: int = 1
    recomputes: tuple[Recompute, ...] = LAYER_RECOMPUTES

    def __post_init__(self) -> None:
        pair = f", which a pair of {self.max_len} + {self.max_decoder_len} must fit into"
        of_sides, longest_tokens = pair if self.max_decoder_len else "", self.max_len + self.max_decoder_len
        for least, most in self.sides:
            if not 1 <= least <= most <= longest_tokens <= self.max_tokens:
                raise ConfigError(
                    f"lengths {least} to {most}, {self.max_tokens} tokens per micro-batch{of_sides}: they must ascend"
                )
            if least % self.multiple or most % self.multiple:
                raise ConfigError(
                    f"lengths {least} to {most} must be multiples of {self.multiple}, the ranks that share a sequence"
                )

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """The measured parts of the model; the last one before the head sees all of a shape."""
        return ("encoder", "decoder", "head") if self.max_decoder_len else ("layer", "head")

    def find_fullest(self, part: ModelPart) -> Recompute:
        """Return the measured recomputation mode with which a part keeps most."""
        return "none" if part == "head" else self.recomputes[0]

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """Positions of the shortest and the longest row of each side."""
        whole = self.min_len, self.max_len
        if not self.max_decoder_len:
            return (whole,)
        return whole, (round_up(min(self.min_len, _SHORTEST_TARGET), self.multiple), self.max_decoder_len)

    @property
    def most_tokens(self) -> int:
        """The most tokens that are measured."""
        return int(_EDGE * self.max_tokens)

    def holds(self, shape: MeasuredShape) -> bool:
        rows, *lengths = shape
        inside = all(least <= n <= most for n, (least, most) in zip(lengths, self.sides, strict=True))
        return inside and rows * sum(lengths) <= self.most_tokens

    def list_first(self) -> list[MeasuredShape]:
        """Return the corners, the middle of the longest side, and the middle, by size: small ones time large ones."""
        most = self.most_tokens
        middle = tuple(round_up(round((least * most) ** 0.5), self.multiple) for least, most in self.sides)
        ends = list(itertools.product(*self.sides))
        few, many = [(1, *lengths) for lengths in ends], [(most // sum(n), *n) for n in (*ends, middle)]
        inner = (max(1, round((most / sum(middle)) ** 0.5)), *middle)
        return sorted({*few, *many, inner}, key=lambda shape: (_count_tokens(shape), shape))

    @property
    def longest_row(self) -> MeasuredShape:
        return (1, *(most for _, most in self.sides))

    def list_candidates(self) -> list[MeasuredShape]:
        return self.list_grid(1, 2)

    def list_grid(self, rows_per_doubling: int, lengths_per_doubling: int) -> list[MeasuredShape]:
        """Return all shapes with this many rows and lengths per doubling."""
        rows = _spread(1, self.most_tokens // sum(least for least, _ in self.sides), rows_per_doubling, 1)
        sides = [_spread(*side, lengths_per_doubling, self.multiple) for side in self.sides]
        return [shape for shape in itertools.product(rows, *sides) if self.holds(shape)]

    @property
    def piece_sizes(self) -> list[int]:
        """Positions of the measured pieces, and of one between for their error; a sample has four of the longest."""
        longest = min(self.max_len, max(self.min_len, self.max_tokens // _FEW_PIECES))
        multiple = self.multiple
        return sorted({max(multiple, longest // part // multiple * multiple) for part in (8, 3, 1)})

    @property
    def cut_samples(self) -> list[tuple[Recompute, int]]:
        """Recomputation modes and piece positions of the samples that prices are fitted to."""
        return list(itertools.product(self.recomputes, sorted({self.piece_sizes[0], self.piece_sizes[-1]})))

    def sample_in_pieces(self, size: int, recompute: Recompute) -> list[MicroBatch]:
        """Return the pieces of a sample with about `max_tokens` positions."""
        count = max(2, min(_MANY_PIECES, self.max_tokens // size))
        samples = (SampleLength(0, size, start=number * size) for number in range(count))
        return [MicroBatch((sample,), "packed", recompute, "carried") for sample in samples]

    def list_packed_rows(self, recompute: Recompute) -> list[MicroBatch]:
        """Return packed rows of one document, of many short ones, and of several; also pairs of unlike sides."""
        short, long = ([side[end] for side in self.sides] for end in (0, 1))
        middle = [max(least, most // 4 // self.multiple * self.multiple) for least, most in self.sides]
        many = max(2, min(_MANY_PIECES, sum(middle) // sum(short)))
        rows = [[short], [middle], [long], [short] * many, [middle, middle, short, short]]
        if self.max_decoder_len:
            rows += [[[*pair]] for pair in itertools.product(*zip(short, middle, strict=True))]
        rows = [row for row in rows if sum(map(sum, row)) <= self.most_tokens]
        samples = [tuple(SampleLength(i, *sizes) for i, sizes in enumerate(row)) for row in rows]
        return [MicroBatch(row, "packed", recompute, pad_multiple=self.multiple) for row in samples]

    def list_sliced(self, count: int) -> list[MeasuredShape]:
        """Return shapes within `max_tokens` whose price depends on chunked heads of several slices only."""
        shapes = [
            s
            for s in self.list_grid(3, 3)
            if _count_tokens(s) <= self.max_tokens and s[0] * s[-1] >= _CELL * HEAD_SLICE
        ]
        return _spread_over(shapes, count)

    def draw_held_out(self, count: int, seed: int) -> list[MeasuredShape]:
        """Return random shapes within `max_tokens`, spread evenly over doublings."""
        random = np.random.default_rng(seed)
        shapes: list[MeasuredShape] = []
        while len(shapes) < count:
            exponents = [random.uniform(*log(side)) for side in self.sides]
            lengths = [round_up(round(float(exp(exponent))), self.multiple) for exponent in exponents]
            rows = round(float(exp(random.uniform(0.0, log(max(1.0, self.max_tokens / sum(lengths)))))))
            if self.holds((rows, *lengths)) and rows * sum(lengths) <= self.max_tokens:
                shapes.append((rows, *lengths))
        return shapes


@dataclass(slots=True)
class Profile:
    """Measurements: by part and recomputation mode, by what the part sees of a shape; None if that did not fit.
    `packed`: bytes of layers on packed rows, by mode and layer. `pieces`: long samples in pieces, by mode; under every
    mode or none. `blocks`: context-parallel groups, by degree.
    """

    points: dict[tuple[ModelPart, Recompute], dict[MeasuredShape, Measured | None]] = field(default_factory=dict)
    packed: dict[tuple[Recompute, LayerKind], PackedLayer] = field(default_factory=dict)
    pieces: dict[Recompute, list[SampleInPieces]] = field(default_factory=dict)
    blocks: dict[int, BlockTimes] = field(default_factory=dict)

    def list_kinds(self, within: ProfileRange) -> list[tuple[ModelPart, Recompute]]:
        """List the parts with their recomputation modes; the head is computed at once, or in slices."""
        layers = within.parts[:-1]
        return [(part, r) for part in layers for r in within.recomputes] + [("head", "none"), _SLICED]

    @property
    def slices_head(self) -> bool:
        """Whether enough shapes with more positions than a slice of the head fit."""
        return len(self.get_measured(*_SLICED)) >= _FEWEST

    def get_measured(self, part: ModelPart, recompute: Recompute) -> dict[MeasuredShape, Measured]:
        return {s: m for s, m in self.points.get((part, recompute), {}).items() if m is not None}

    def list_shapes(self) -> list[MeasuredShape]:
        """Return the full shapes that were visited."""
        visited = set().union(*(points for kind, points in self.points.items() if kind != _SLICED))
        num_sizes = max(map(len, visited), default=0)
        return sorted(shape for shape in visited if len(shape) == num_sizes)

    def expect_s(self, shape: MeasuredShape, spent: MeasuringTime, within: ProfileRange) -> float:
        """Return the expected seconds of a visit."""
        return sum(spent.expect_s(part, [_make_micro_batch(shape, kind)]) for part, kind in self.list_kinds(within))

    def visit(
        self,
        shape: MeasuredShape,
        measure: MeasureShape,
        within: ProfileRange,
        kinds: Sequence[tuple[ModelPart, Recompute]] = (),
    ) -> None:
        """Measure a shape as `kinds` (all, if empty) that are missing. If a shape did not fit, no larger one does."""
        for kind in kinds or self.list_kinds(within):
            points, own = self.points.setdefault(kind, {}), reduce_shape(kind[0], shape)
            if own not in points and (kind != _SLICED or _count_tokens(own) > HEAD_SLICE):
                too_large = any(m is None and _is_within(s, own) for s, m in points.items())
                points[own] = None if too_large else measure(kind[0], _make_micro_batch(shape, kind[1]))

    def slice_head(self, measure: MeasureShape, within: ProfileRange, in_time: Callable[[MeasuredShape], bool]) -> None:
        """Measure chunked heads at as many shapes as a surface needs, if there may be several slices and there is time.

        Ranges with one length have too few such shapes among the first ones.
        """
        shapes: dict[MeasuredShape, MeasuredShape] = {}
        for shape in within.list_grid(_PER_DOUBLING, _PER_DOUBLING):
            if shape[0] * shape[-1] > HEAD_SLICE:
                shapes.setdefault(reduce_shape("head", shape), shape)
        self.points.setdefault(_SLICED, {})
        for own in _spread_over(sorted(shapes, key=_count_tokens), 0 if self.slices_head else _FEWEST):
            if own not in self.points[_SLICED] and in_time(shapes[own]):
                self.visit(shapes[own], measure, within, [_SLICED])

    def list_fitting(self, within: ProfileRange) -> list[MeasuredShape]:
        """Return the shapes that fit with the recomputation mode that keeps most, and in the head."""
        measured = {part: self.get_measured(part, within.find_fullest(part)) for part in within.parts}
        return [s for s in self.list_shapes() if all(reduce_shape(part, s) in own for part, own in measured.items())]

    def pack(self, measure: MeasureShape, within: ProfileRange) -> None:
        """Measure what layers keep of packed rows. Keep nothing if hardly any fit."""
        for part, recompute in itertools.product(within.parts[:-1], within.recomputes):
            rows = within.list_packed_rows(recompute)
            measured = [(m, measure(part, m, bytes_only=True)) for m in rows]
            if len(fitting := [(m, one) for m, one in measured if one]) >= _FEWEST:
                kind = _LAYER_KINDS[part]
                bytes_of = [(one.stored_bytes, one.peak_bytes) for _, one in fitting]
                self.packed[recompute, kind] = PackedLayer.fit(kind, [m for m, _ in fitting], bytes_of)

    def cut(
        self,
        measure: MeasureShape,
        measure_pieces: MeasurePieces,
        within: ProfileRange,
        done: Callable[[], object],
        in_time: Callable[[Sequence[MicroBatch]], bool] = lambda _pieces: True,
    ) -> None:
        """Measure samples in pieces, fewer pieces if not all fit or there is no time. Keep nothing if two do not."""
        samples: dict[Recompute, list[SampleInPieces]] = {}
        for kind, size in within.cut_samples:
            pieces = within.sample_in_pieces(size, kind)
            while len(pieces) > 2 and not in_time(pieces):
                pieces = pieces[: len(pieces) // 2]
            if not in_time(pieces):
                break
            document = measure(within.parts[0], MicroBatch((SampleLength(0, size),), "packed", kind))
            two, measured = measure_pieces(pieces[:2], bytes_only=True), None
            while document and two and not measured and len(pieces) >= 2:
                measured = measure_pieces(pieces)
                pieces = pieces[: len(pieces) // 2]
            if document and two and measured:
                one = SampleInPieces(size=size, document=document, pieces=measured, two=two)
                samples.setdefault(kind, []).append(one)
            done()
        self.pieces = samples if set(samples) == set(within.recomputes) else {}

    def find_errors(self, within: ProfileRange) -> dict[MeasuredShape, float]:
        """Return each shape's worst error of a time of a part, when what it sees of the shape is left out."""
        worst: dict[MeasuredShape, float] = {}
        visited = self.points[within.parts[-2], within.recomputes[0]]
        for part in within.parts:
            measured = self.get_measured(part, within.find_fullest(part))
            for name in _TIMES:
                errors = compute_left_out_errors({s: getattr(m, name) for s, m in measured.items()}, part)
                for shape in visited:
                    if (own := reduce_shape(part, shape)) in errors:
                        worst[shape] = max(worst.get(shape, 0.0), errors[own])
        return worst

    def to_json(self) -> list[dict[str, Any]]:
        """Return the measured points as JSON, without packed rows, which a resumed profile measures again."""
        return [
            {"part": part, "recompute": recompute, **dict(zip(_SIZES, s, strict=False)), **(asdict(m) if m else {})}
            for (part, recompute), points in self.points.items()
            for s, m in points.items()
        ]

    def dump_blocks(self) -> dict[str, Any]:
        """Return the seconds of context-parallel groups, by degree."""
        return {str(width): times.to_json() for width, times in sorted(self.blocks.items())}

    @classmethod
    def from_json(
        cls,
        raw: Sequence[Mapping[str, Any]],
        where: str = "measurements",
        blocks: Mapping[str, Any] = MappingProxyType({}),
    ) -> Profile:
        """Read a profile. Raises DataError naming the entry at fault."""
        profile = cls()
        for i, one in enumerate(raw):
            try:
                kind = one["part"], one["recompute"]
                shape = tuple(int(one[name]) for name in _SIZES[: 3 if kind[0] == "decoder" else 2])
                measured = Measured(**{name: one[name] for name in QUANTITIES}) if "forward_s" in one else None
                sound = (
                    (kind == _SLICED or (kind[0] in PARTS and kind[1] in LAYER_RECOMPUTES))
                    and min(shape) >= 1
                    and _is_sound(measured)
                )
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise DataError(f"{where}: entry {i} cannot be read ({error!r}): remove the file") from error
            if not sound:
                raise DataError(f"{where}: entry {i} is {short(one)}, which nothing measures: remove the file")
            profile.points.setdefault(kind, {})[shape] = measured
        for width, times in blocks.items():
            try:
                profile.blocks[int(width)] = BlockTimes.from_json(times)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise DataError(f"{where}: width {short(width)} cannot be read ({error!r}): remove the file") from error
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
    go_on: Callable[[Profile], bool],
    in_time: Callable[[MeasuredShape], bool] = lambda _shape: True,
) -> None:
    """Measure the first shapes, then one by one the shape whose costs are most uncertain. End when the mean error
    of shapes that are left out is at most `error_target`, after `most_shapes`, or when `go_on(profile)` is False. Leave
    out what is not `in_time`.

    Raises DataError if hardly anything fits on the device, or there is no time for the longest row.
    """
    _measure_first(profile, measure, within, go_on=go_on, in_time=in_time)
    while True:
        errors = profile.find_errors(within)
        error = float(np.mean(list(errors.values())))
        done = len(errors) >= _LEAST_SHAPES and error <= error_target
        if not go_on(profile) or done or len(profile.list_shapes()) >= most_shapes:
            break
        unknown = [s for s in within.list_candidates() if s not in profile.list_shapes()]
        chosen = choose_next_shape(errors, unknown)
        if chosen is not None and not in_time(chosen):
            chosen = choose_next_shape(errors, [s for s in unknown if in_time(s)])
        if chosen is None:
            break
        profile.visit(chosen, measure, within)
    profile.pack(measure, within)
    profile.slice_head(measure, within, in_time)


def _measure_first(
    profile: Profile,
    measure: MeasureShape,
    within: ProfileRange,
    *,
    go_on: Callable[[Profile], bool],
    in_time: Callable[[MeasuredShape], bool],
) -> None:
    """Measure the first shapes, and further ones until enough for a table fit. Raises as `choose_and_measure` does."""
    first = within.list_first()
    for index, shape in enumerate(first + sorted(within.list_candidates(), key=_count_tokens)):
        enough = len(profile.list_fitting(within)) >= _FEWEST
        if enough and index >= len(first):
            break
        is_known = shape in profile.list_shapes()
        for part in (64, 16, 4) if shape == within.longest_row and not is_known else ():
            shorter = (1, *(max(least, round_up(most // part, within.multiple)) for least, most in within.sides))
            if not in_time(shape) and in_time(shorter):  # its time may tell that there is enough for the longest
                profile.visit(shorter, measure, within)
        if not is_known and not in_time(shape):
            if shape == within.longest_row:
                raise DataError(
                    f"there is no time to measure a row of {' + '.join(map(str, shape[1:]))} positions, which a table"
                    " needs: raise --max-seconds (what was measured is kept), or lower --max-len"
                )
            continue
        profile.visit(shape, measure, within)
        if not is_known and not go_on(profile) and enough:
            break
    if len(profile.list_fitting(within)) < _FEWEST:
        raise DataError(
            f"{len(profile.list_fitting(within))} shapes of {within.min_len} to {within.max_len} positions and at most"
            f" {within.max_tokens} tokens fit on this device, but a table needs {_FEWEST}: give other lengths, fewer"
            " tokens or a higher --max-seconds"
        )


def make_cost_table(
    profile: Profile,
    within: ProfileRange,
    architecture: Architecture,
    *,
    value_bytes: int,
    tp: int = 1,
    distributed_optimizer: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> CostTable:
    """Return the measurements on a dense grid, for a pipeline of one stage until it is placed over a topology; `tp` is
    the measured tensor-parallel degree; the vocabulary counts as it is (see `Architecture.padded`).
    """
    a = architecture
    grids: dict[tuple[Recompute, LayerKind], Grid] = {}
    head = _collect_columns(profile, ("head", "none"), within)
    head_grid = Grid.from_points(head)
    for recompute in within.recomputes:
        for part in within.parts[:-1]:
            grids[recompute, _LAYER_KINDS[part]] = Grid.from_points(
                _collect_columns(profile, (part, recompute), within)
            )
        grids[recompute, "postprocess"] = head_grid
    if profile.slices_head:
        grids[SLICED_HEAD] = _make_chunked_grid(head, _collect_columns(profile, _SLICED, within))
    whole, optimizer = 1 + 4 / value_bytes, 8 / value_bytes  # gradients and Adam's moments are fp32
    optimizer += 4 / value_bytes if value_bytes < 4 else 0  # and a master copy of 16-bit weights
    kept_values = 2 * a.kv_size_on(tp)
    surcharges: dict[Recompute, PieceSurcharge] = {}
    for kind, samples in profile.pieces.items():
        cut = [one.with_table_bytes(grids[kind, "encoder"], profile.packed.get((kind, "encoder"))) for one in samples]
        surcharges[kind] = PieceSurcharge.fit(cut, kept_values, value_bytes)
    return CostTable(
        grids=grids,
        parameter_bytes={name: float(count * value_bytes) for name, count in count_named_parameters(a, tp).items()},
        once_bytes=count_once_bytes(a, value_bytes, shards=within.multiple),
        hidden_size=a.hidden_size,
        num_layers=a.num_layers,
        num_decoder_layers=a.num_decoder_layers,
        topology=Topology(tp=tp),
        packed_layers=profile.packed,
        blocks={width: times.block(width) for width, times in sorted(profile.blocks.items())},
        pieces=PieceSurcharges(kept_values=kept_values, by_recompute=surcharges) if surcharges else None,
        state_parts=(whole, optimizer) if distributed_optimizer else (whole + optimizer, 0.0),
        value_bytes=value_bytes,
        provenance=dict(provenance or {}),
    )


def count_named_parameters(a: Architecture, tp: int) -> dict[str, int]:
    """Count parameters on one tensor-parallel rank, under the names that `count_parameters_by_stage` knows."""
    is_pair = int(a.num_decoder_layers > 0)

    def count(num_layers: int, num_decoder_layers: int) -> int:
        model = replace(a, num_layers=num_layers, num_decoder_layers=num_decoder_layers)
        return int(count_parameters(model, Topology(tp=tp)).total[0])

    least = count(1, is_pair)
    layers = {"encoder": count(2, is_pair) - least} | ({"decoder": count(1, 2) - least} if is_pair else {})
    head = a.hidden_size * a.vocab_size // tp
    embedding = head + (a.hidden_size * a.max_seq_len if a.position == "learned" else 0)
    norms = least - sum(layers.values()) - embedding - (0 if a.tied_embeddings else head)
    of_encoder: dict[str, int] = {}
    if is_pair:  # each side has a norm and position biases
        of_encoder = {"encoder_norm": a.hidden_size, "position_biases": norms // 2 - a.hidden_size}
        norms = a.hidden_size
    own, tied = (0, head) if a.tied_embeddings else (head, 0)
    return layers | {"embedding": embedding, "head": norms + own, "tied_head": tied} | of_encoder


def count_once_bytes(a: Architecture, value_bytes: int, *, shards: int) -> dict[LayerKind, float]:
    """Count the bytes of each encoder position on one of the `shards` ranks that share a sequence.

    The encoder's final RMSNorm keeps its input and the normalised values (those of 16-bit inputs in fp32). Its output
    is kept for all decoder layers of a stage. A decoder-only model's final norm is measured with its head.
    """
    if not a.num_decoder_layers:
        return {}
    return {"encoder": 2 * 4 * a.hidden_size / shards, "decoder": value_bytes * a.hidden_size / shards}


_Columns = Mapping[str, Mapping[tuple[int, ...], float]]  # by name, of every shape


def _collect_columns(profile: Profile, kind: tuple[ModelPart, Recompute], within: ProfileRange) -> _Columns:
    measured = profile.get_measured(*kind)
    missing = [s for s, m in profile.points[kind].items() if m is None]
    shapes = dict.fromkeys(reduce_shape(kind[0], shape) for shape in within.list_grid(_PER_DOUBLING, _PER_DOUBLING))
    fits = [s for s in shapes if not any(_is_within(m, s) for m in missing)]
    places = np.array(fits, np.float64)

    def read_column(name: str, unit: float) -> dict[tuple[int, ...], float]:
        noise = {"noise": _EXACT} if name.endswith("bytes") else {}
        surface = Surface.fit({s: float(getattr(m, name)) for s, m in measured.items()}, kind[0], **noise)
        return {s: round(float(v) * unit, 6) for s, v in zip(fits, surface(places), strict=True)}

    columns = {"forward_ms": read_column("forward_s", 1e3), "backward_ms": read_column("backward_s", 1e3)}
    columns |= {"stored_mb": read_column("stored_bytes", 1e-6), "peak_mb": read_column("peak_bytes", 1e-6)}
    columns["weight_ms"] = read_column("weight_s", 1e3)
    return columns


def _make_chunked_grid(whole: _Columns, sliced: _Columns) -> Grid:
    """Make the grid of a chunked head: as measured for more than one slice, else as the unsplit one, as it then runs.

    Between the longest shape of one slice and the next one it is a mixture of both, whose bytes are too many. So it is
    one grid, on whose points bounds may be based.
    """
    return Grid.from_points(
        {
            name: {s: value for s, value in whole[name].items() if _count_tokens(s) <= HEAD_SLICE}
            | {s: value for s, value in sliced[name].items() if _count_tokens(s) > HEAD_SLICE}
            for name in whole
        }
    )


def _make_micro_batch(shape: MeasuredShape, recompute: Recompute) -> MicroBatch:
    rows, *lengths = shape
    return MicroBatch(tuple(SampleLength(i, *lengths) for i in range(rows)), "padded", recompute)


def _spread_over(shapes: Sequence[MeasuredShape], count: int) -> list[MeasuredShape]:
    """Return `count` of them, or all, including the first and the last."""
    places = np.linspace(0, len(shapes) - 1, min(count, len(shapes))).round().astype(int)
    return [shapes[place] for place in places]


def _count_tokens(shape: MeasuredShape) -> int:
    """Return the positions of all sides."""
    return shape[0] * sum(shape[1:])


def _is_within(shape: MeasuredShape, other: MeasuredShape) -> bool:
    """Return whether no size is larger than the other shape's."""
    return all(a <= b for a, b in zip(shape, other, strict=True))


def _spread(least: int, most: int, per_doubling: int, multiple: int) -> list[int]:
    """Return multiples from `least` to `most` at even ratios."""
    num_steps = (-(-(most**per_doubling) // least**per_doubling) - 1).bit_length()  # rounded up, in integers
    places = least * exp(np.linspace(0.0, log(most / least), num_steps + 1))
    return sorted({round_up(round(float(n)), multiple) for n in places})
