"""Cost tables made from few measurements: which shapes are measured, the costs between these, and their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, LAYER_RECOMPUTES, MicroBatch, Recompute, SampleLength, round_up
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.codec import from_json
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import COLUMNS, SLICED_HEAD, WEIGHT, LayerKind
from dynapipe_ext.costs.measured_blocks import BlockTimes
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.packed_rows import PackedLayer
from dynapipe_ext.costs.pieces import PieceSurcharge, PieceSurcharges, SampleInPieces
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, count_parameters
from dynapipe_ext.costs.surface import (
    EXACT,
    NOISE,
    PARTS,
    QUANTITIES,
    Measured,
    MeasuredShape,
    ModelPart,
    compute_left_out_errors,
    fit_surface,
    rank_shapes,
    reduce_shape,
)
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.reproducible import exp, log

MeasuredKind = tuple[ModelPart, Recompute]

_LEAST_SHAPES, _FEWEST = 8, 3
_SIZES = ("rows", "length", "decoder_len")  # of a shape, as it is written
_LAYER_KINDS: Mapping[ModelPart, LayerKind] = {"layer": "encoder", "encoder": "encoder", "decoder": "decoder"}
_MOST = (1e6,) * 4 + (1e18,) * 2  # of every quantity
_HEAD: MeasuredKind = ("head", "none")
_SLICED: MeasuredKind = ("head", "head")
_SHORTEST_TARGET = 4  # many are one word: packed rows are priced by rows of at least the shortest measured length
_FEW_PIECES, _MANY_PIECES = 4, 16  # of a sample that is measured in pieces: long ones, and short ones at most
_EDGE = 1.6  # a little above two steps of the grid, rounding included
_CELL = 1.5  # a written table's cell: positions at its far corner over those at its near one, rounding included
_PER_DOUBLING = 4  # points of the written table: a multilinear cell then misses a square by less than 0.8 %
# Measurements end when this share of the time is over; the longest row, without which there is no table, has longer.
SHAPES_END, PIECES_END, _LONGEST_END = 0.55, 0.8, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRange:
    """The padded shapes that a cost table is to price: rows of `min_len` to `max_len` positions, micro-batches of at
    most `max_tokens`, under each mode of `recomputes`. Lengths are multiples of `multiple`: the tensor-parallel ranks
    that share a sequence, else 1. Up to 1.6 x `max_tokens` are measured, for the far corners of the last grid cells.

    For an encoder-decoder, `max_len` bounds the encoder side and `max_decoder_len` the decoder side (0: no decoder
    side), whose rows may be shorter than `min_len`. Tokens are then those of both sides."""

    max_len: int
    max_tokens: int
    max_decoder_len: int = 0
    min_len: int = 16
    multiple: int = 1
    recomputes: tuple[Recompute, ...] = LAYER_RECOMPUTES

    def __post_init__(self) -> None:
        of_pair = f", which a pair of {self.max_len} + {self.max_decoder_len} must fit into"
        for least, most in self.sides:
            if not 1 <= least <= most <= self.max_len + self.max_decoder_len <= self.max_tokens:
                raise ConfigError(
                    f"lengths {least} to {most}, {self.max_tokens} tokens per micro-batch"
                    f"{of_pair if self.max_decoder_len else ''}: they must ascend"
                )
            if least % self.multiple or most % self.multiple:
                raise ConfigError(
                    f"lengths {least} to {most} must be multiples of {self.multiple}, the ranks that share a sequence"
                )

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """The measured parts of the model: "layer" and "head", or "encoder", "decoder" and "head"."""
        return ("encoder", "decoder", "head") if self.max_decoder_len else ("layer", "head")

    @property
    def layer_kinds(self) -> list[MeasuredKind]:
        return list(itertools.product(self.parts[:-1], self.recomputes))

    @property
    def kinds(self) -> list[MeasuredKind]:
        """Each measured part with a recomputation mode; the head unsplit ("none") and in slices ("head")."""
        return [*self.layer_kinds, _HEAD, _SLICED]

    @property
    def fullest_kinds(self) -> list[MeasuredKind]:
        """Each layer with the first of `recomputes`, under which it stores most, and the unsplit head."""
        return [*self.layer_kinds[:: len(self.recomputes)], _HEAD]

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """The (shortest, longest) row of each side, in positions; the encoder's first, then any decoder's."""
        whole = self.min_len, self.max_len
        if not self.max_decoder_len:
            return (whole,)
        return whole, (round_up(min(self.min_len, _SHORTEST_TARGET), self.multiple), self.max_decoder_len)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of a measured shape."""
        return int(_EDGE * self.max_tokens)

    def holds(self, shape: MeasuredShape) -> bool:
        rows, *lengths = shape
        inside = all(least <= n <= most for n, (least, most) in zip(lengths, self.sides, strict=True))
        return inside and rows * sum(lengths) <= self.most_tokens

    def list_first(self) -> list[MeasuredShape]:
        """List the shapes to measure first, fewest tokens first: small ones tell how long large ones will take.

        One row of the shortest and longest lengths. As many rows as fit of the shortest, longest and geometric mean
        lengths; with the latter, also the geometric mean of rows."""
        most = self.most_tokens
        middle = tuple(round_up(round((least * most) ** 0.5), self.multiple) for least, most in self.sides)
        ends = list(itertools.product(*self.sides))
        few, many = [(1, *lengths) for lengths in ends], [(most // sum(n), *n) for n in (*ends, middle)]
        inner = (max(1, round((most / sum(middle)) ** 0.5)), *middle)
        return sorted(sorted({*few, *many, inner}), key=_count_tokens)

    @property
    def longest_row(self) -> MeasuredShape:
        return (1, *(most for _, most in self.sides))

    def list_candidates(self) -> list[MeasuredShape]:
        return self.list_grid(1, 2)

    def list_grid(self, rows_per_doubling: int, lengths_per_doubling: int) -> list[MeasuredShape]:
        """List the shapes on a grid with this many numbers of rows, and lengths, per doubling."""
        rows = _spread(1, self.most_tokens // sum(least for least, _ in self.sides), rows_per_doubling, 1)
        sides = [_spread(*side, lengths_per_doubling, self.multiple) for side in self.sides]
        return [shape for shape in itertools.product(rows, *sides) if self.holds(shape)]

    @property
    def piece_sizes(self) -> list[int]:
        """The sizes of measured pieces in positions, ascending: a quarter of `max_tokens` (or `max_len`), a third and
        an eighth of it. Prices are fitted to the first and the last; the one between only shows their error."""
        longest = min(self.max_len, max(self.min_len, self.max_tokens // _FEW_PIECES))
        multiple = self.multiple
        return sorted({max(multiple, longest // part // multiple * multiple) for part in (8, 3, 1)})

    @property
    def cut_samples(self) -> list[tuple[Recompute, int]]:
        """The (recomputation mode, piece size in positions) of each sample that prices of pieces are fitted to."""
        return list(itertools.product(self.recomputes, sorted({self.piece_sizes[0], self.piece_sizes[-1]})))

    def sample_in_pieces(self, size: int, recompute: Recompute) -> list[MicroBatch]:
        """Return a sample's pieces of `size` positions each: 2 to 16, of about `max_tokens` positions together."""
        count = max(2, min(_MANY_PIECES, self.max_tokens // size))
        samples = (SampleLength(0, size, start=number * size) for number in range(count))
        return [MicroBatch((sample,), "packed", recompute, "carried") for sample in samples]

    def list_packed_rows(self, recompute: Recompute) -> list[MicroBatch]:
        """List packed rows to measure: one document (short, middle, long), many short ones, two middle and two short
        ones. Of an encoder-decoder also single pairs of short and middle sides. None has more than `most_tokens`."""
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
        """List up to `count` shapes within `max_tokens` whose price depends only on heads in several slices."""
        shapes = [s for s in self.list_grid(3, 3) if s[0] * s[-1] >= _CELL * HEAD_SLICE]
        return _spread_over([s for s in shapes if _count_tokens(s) <= self.max_tokens], count)

    def list_first_sliced(self) -> list[MeasuredShape]:
        """List three shapes, or all if there are fewer, whose logits the chunked head computes in several slices."""
        shapes = reversed(self.list_grid(_PER_DOUBLING, _PER_DOUBLING))
        seen = {reduce_shape("head", s): s for s in shapes if s[0] * s[-1] > HEAD_SLICE}
        return [seen[own] for own in _spread_over(sorted(sorted(seen), key=_count_tokens), _FEWEST)]

    def draw_held_out(self, count: int, seed: int) -> list[MeasuredShape]:
        """Draw `count` random shapes within `max_tokens`; logarithms of lengths and rows are evenly distributed."""
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
    """Measurements of a model. `points`: costs by (part, recomputation mode), then by what `reduce_shape` leaves of a
    shape; None: it did not fit in memory. `packed`: fitted bytes of layers on packed rows, by (mode, layer). `pieces`:
    samples in pieces by mode, for all modes or none. `blocks`: times of context-parallel groups by degree."""

    points: dict[MeasuredKind, dict[MeasuredShape, Measured | None]] = field(default_factory=dict)
    packed: dict[tuple[Recompute, LayerKind], PackedLayer] = field(default_factory=dict)
    pieces: dict[Recompute, list[SampleInPieces]] = field(default_factory=dict)
    blocks: dict[int, BlockTimes] = field(default_factory=dict)

    @property
    def slices_head(self) -> bool:
        """Whether the chunked head can be priced: at least 3 shapes with several slices were measured and fit."""
        return len(self.get_measured(_SLICED)) >= _FEWEST

    def get_measured(self, kind: MeasuredKind) -> dict[MeasuredShape, Measured]:
        return {s: m for s, m in self.points.get(kind, {}).items() if m is not None}

    def list_shapes(self) -> list[MeasuredShape]:
        """List the shapes that were visited, whether they fit or not, with the lengths of all sides."""
        points = [points for (part, _), points in self.points.items() if part in ("layer", "decoder")]
        return sorted(set().union(*points))

    def list_fitting(self, within: ProfileRange) -> list[MeasuredShape]:
        """List the visited shapes that fit in memory for every part, under the recomputation mode that stores most."""
        measured = [(kind[0], self.get_measured(kind)) for kind in within.fullest_kinds]
        return [s for s in self.list_shapes() if all(reduce_shape(part, s) in own for part, own in measured)]

    def find_errors(self, within: ProfileRange) -> dict[MeasuredShape, float]:
        """Return the largest relative error of each shape's F and B times over all parts, predicted from other
        shapes."""
        worst: dict[MeasuredShape, float] = {}
        for kind, name in itertools.product(within.fullest_kinds, ("forward_s", "backward_s")):
            values = {s: getattr(m, name) for s, m in self.get_measured(kind).items()}
            errors = compute_left_out_errors(values, kind[0])
            for shape in self.points[within.fullest_kinds[-2]]:
                if (own := reduce_shape(kind[0], shape)) in errors:
                    worst[shape] = max(worst.get(shape, 0.0), errors[own])
        return worst

    def visit(self, shape: MeasuredShape, measure: TimedDevice, kinds: Sequence[MeasuredKind]) -> None:
        """Measure each (part, recomputation mode) of `kinds` at a shape, unless it is measured already. A shape at
        least as large as one that did not fit is noted as None without a measurement. The chunked head is measured only
        if it has several slices."""
        for kind in kinds:
            points, own = self.points.setdefault(kind, {}), reduce_shape(kind[0], shape)
            if own not in points and (kind != _SLICED or _count_tokens(own) > HEAD_SLICE):
                too_large = any(m is None and _is_within(s, own) for s, m in points.items())
                points[own] = None if too_large else measure(kind[0], make_padded(shape, kind[1]))

    def cut(self, measure: TimedDevice, within: ProfileRange, done: Callable[[], object]) -> None:
        """Measure samples in pieces, set `pieces`, and call `done` after each sample. If not all pieces fit in memory
        and in time, half of them are measured, and so on. Without a sample of every mode, `pieces` is empty."""
        part, samples = within.parts[0], dict[Recompute, list[SampleInPieces]]()
        for recompute, size in within.cut_samples:
            pieces = within.sample_in_pieces(size, recompute)
            halved = [pieces[: len(pieces) >> n] for n in range(len(pieces).bit_length() - 1)]
            in_time = [few for few in halved if measure.has_time(1.5 * measure.expect_s(part, *few), PIECES_END)]
            if not in_time:
                break
            document = measure(part, MicroBatch((SampleLength(0, size),), "packed", recompute))
            two = measure(part, *pieces[:2], bytes_only=True)
            if document and two and (most := next(filter(None, (measure(part, *few) for few in in_time)), None)):
                one = SampleInPieces(size=size, document=document, pieces=most, two=two)
                samples.setdefault(recompute, []).append(one)
            done()
        self.pieces = samples if set(samples) == set(within.recomputes) else {}

    def to_json(self) -> list[dict[str, Any]]:
        """Return `points` as JSON, an entry for each; packed rows and pieces are to be measured again."""
        return [
            {"part": part, "recompute": recompute, **dict(zip(_SIZES, shape, strict=False))}
            | ({name: getattr(measured, name) for name in QUANTITIES} if measured else {})
            for (part, recompute), points in self.points.items()
            for shape, measured in points.items()
        ]

    @classmethod
    def from_json(
        cls,
        raw: Sequence[Mapping[str, Any]],
        where: str = "measurements",
        blocks: Mapping[str, Any] = MappingProxyType({}),
    ) -> Profile:
        """Read the points that `to_json` wrote, and `blocks`: for each degree, the fields of `BlockTimes`. Raises
        DataError, which names `where` and the entry at fault."""
        profile = cls()
        for i, one in enumerate(raw):
            with _naming_errors(f"{where}: entry {i}"):
                kind = one["part"], one["recompute"]
                shape = tuple(int(one[name]) for name in _SIZES[: 3 if kind[0] == "decoder" else 2])
                values = [one[name] for name in QUANTITIES] if "forward_s" in one else []
                is_known = kind == _SLICED or (kind[0] in PARTS and kind[1] in LAYER_RECOMPUTES)
                in_range = all(0 <= value <= most for value, most in zip(values, _MOST, strict=False))
                if not is_known or not in_range or min(shape) < 1:
                    raise ValueError(f"nothing measures {short(one)}")
                profile.points.setdefault(kind, {})[shape] = Measured(*values) if values else None
        for width, times in blocks.items():
            with _naming_errors(f"{where}: width {short(width)}"):
                profile.blocks[int(width)] = from_json(BlockTimes, times)
        return profile


@contextmanager
def _naming_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{what} cannot be read ({error!r}): remove the file") from error


def choose_and_measure(
    profile: Profile,
    measure: TimedDevice,
    within: ProfileRange,
    *,
    error_target: float,
    most_shapes: int,
    go_on: Callable[[Profile], bool],
) -> None:
    """Measure into `profile`: the first shapes, then one by one the shape whose costs are most uncertain. This ends
    after `most_shapes`, if the mean of `find_errors` (of at least 8) is at most `error_target`, or if `go_on(profile)`,
    called after each shape, returns False. Shapes for which there is no time are left out. Then measure bytes of packed
    rows, and more shapes of a chunked head if it has too few.

    Raises DataError if fewer than 3 shapes fit on the device, or there is no time for the longest row."""
    while True:
        enough = len(profile.list_fitting(within)) >= _FEWEST
        for shape in _list_next(profile, within, error_target=error_target, most_shapes=most_shapes):
            if shape == within.longest_row:
                _approach_longest_row(profile, measure, within)
            if _is_in_time(shape, measure, within):
                break
        else:
            break
        profile.visit(shape, measure, within.kinds)
        if not go_on(profile) and enough:
            break
    if not enough:
        raise DataError(
            f"{len(profile.list_fitting(within))} shapes of {within.min_len} to {within.max_len} positions and at most"
            f" {within.max_tokens} tokens fit on this device, but a table needs {_FEWEST}: give other lengths, fewer"
            " tokens or a higher --max-seconds"
        )
    for part, recompute in within.layer_kinds:
        rows = [(m, measure(part, m, bytes_only=True)) for m in within.list_packed_rows(recompute)]
        if len(fitting := [(m, (one.stored_bytes, one.peak_bytes)) for m, one in rows if one]) >= _FEWEST:
            kind = _LAYER_KINDS[part]
            profile.packed[recompute, kind] = PackedLayer.fit(kind, *zip(*fitting, strict=True))
    for shape in within.list_first_sliced() if not profile.slices_head else ():
        if _is_in_time(shape, measure, within):
            profile.visit(shape, measure, [_SLICED])


def _list_next(
    profile: Profile, within: ProfileRange, *, error_target: float, most_shapes: int
) -> Iterator[MeasuredShape]:
    """Yield shapes to measure, the most wanted one first; none if the table will be good enough."""
    known = profile.list_shapes()
    yield from (shape for shape in within.list_first() if shape not in known)
    unknown = [shape for shape in within.list_candidates() if shape not in known]
    if len(profile.list_fitting(within)) < _FEWEST:
        yield from sorted(unknown, key=_count_tokens)
    elif len(known) < most_shapes:
        errors = profile.find_errors(within)
        if len(errors) < _LEAST_SHAPES or float(np.mean(list(errors.values()))) > error_target:
            yield from rank_shapes(errors, unknown)


def _approach_longest_row(profile: Profile, measure: TimedDevice, within: ProfileRange) -> None:
    """Measure shorter rows until their times tell that there is time for the longest. Raises DataError if none do."""
    for share in (64, 16, 4, 1):
        if _is_in_time(within.longest_row, measure, within):
            return
        shorter = (1, *(max(least, round_up(most // share, within.multiple)) for least, most in within.sides))
        if _is_in_time(shorter, measure, within):
            profile.visit(shorter, measure, within.kinds)
    raise DataError(
        f"there is no time to measure a row of {' + '.join(map(str, within.longest_row[1:]))} positions, which a table"
        " needs: raise --max-seconds (what was measured is kept), or lower --max-len"
    )


def _is_in_time(shape: MeasuredShape, measure: TimedDevice, within: ProfileRange) -> bool:
    rows = make_padded(shape, "none")
    expected_s = sum(measure.expect_s(part, rows) for part, _ in within.kinds)
    return measure.has_time(expected_s, _LONGEST_END if shape == within.longest_row else SHAPES_END)


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
    """Return the cost table of a profile, on a dense grid, with all layers on one stage until `with_topology` places
    them. `value_bytes`: of a weight, 2 or 4. `tp`: the measured tensor-parallel degree. `distributed_optimizer`:
    replicas share its states. `provenance`: notes that the table keeps. The vocabulary counts as `architecture` has it
    (see `Architecture.padded`)."""
    a, head = architecture, _collect_columns(profile, _HEAD, within)
    grids: dict[tuple[Recompute, LayerKind], Grid] = {
        (kind[1], _LAYER_KINDS[kind[0]]): Grid.from_points(_collect_columns(profile, kind, within))
        for kind in within.layer_kinds
    }
    grids |= dict.fromkeys([(recompute, "postprocess") for recompute in within.recomputes], Grid.from_points(head))
    if profile.slices_head:
        grids[SLICED_HEAD] = _make_chunked_grid(head, _collect_columns(profile, _SLICED, within))
    kept_values = 2 * a.kv_size_on(tp)
    surcharges: dict[Recompute, PieceSurcharge] = {}
    for kind, samples in profile.pieces.items():
        cut = [one.with_table_bytes(grids[kind, "encoder"], profile.packed.get((kind, "encoder"))) for one in samples]
        surcharges[kind] = PieceSurcharge.fit(cut, kept_values, value_bytes)
    # Of an encoder position: its final RMSNorm keeps the input and the normalised values (those of 16-bit inputs in
    # fp32), and stages keep its output for all decoder layers. A decoder-only model's norm is measured with its head.
    widths: dict[LayerKind, int] = {"encoder": 2 * 4, "decoder": value_bytes} if a.num_decoder_layers else {}
    once_bytes = {kind: width * a.hidden_size / within.multiple for kind, width in widths.items()}
    weight, gradient, optimizer = BYTES_PER_PARAMETER["megatron" if value_bytes == 2 else "fp32"]
    states = [(weight + gradient) / value_bytes, optimizer / value_bytes]
    return CostTable(
        grids=grids,
        parameter_bytes={name: float(count * value_bytes) for name, count in count_named_parameters(a, tp).items()},
        once_bytes=once_bytes,
        hidden_size=a.hidden_size,
        num_layers=a.num_layers,
        num_decoder_layers=a.num_decoder_layers,
        topology=Topology(tp=tp),
        packed_layers=profile.packed,
        blocks={width: times.block(width) for width, times in sorted(profile.blocks.items())},
        pieces=PieceSurcharges(kept_values=kept_values, by_recompute=surcharges) if surcharges else None,
        state_parts=(states[0], states[1]) if distributed_optimizer else (sum(states), 0.0),
        value_bytes=value_bytes,
        provenance=dict(provenance or {}),
    )


def count_named_parameters(a: Architecture, tp: int) -> dict[str, int]:
    """Count parameters of one layer of each kind, embedding, head and the like on one tensor-parallel rank, by the
    names that `count_parameters_by_stage` reads."""
    is_pair = a.num_decoder_layers > 0
    biases, norm = (a.relative_buckets * a.num_heads, a.hidden_size) if is_pair else (0, 0)  # of the encoder
    model = replace(a, num_layers=3 - is_pair, num_decoder_layers=2 * is_pair)  # one on each stage
    first, second, *others = count_parameters(model, Topology(tp=tp, pp=3 + is_pair)).total.tolist()
    layer = second - biases - norm
    embedding = first - layer - biases
    counts = {"encoder": layer}
    if is_pair:
        counts["decoder"] = layer = others[0] - embedding - biases
    head, tied = others[-1] - layer - biases, a.tied_embeddings * a.hidden_size * a.vocab_size // tp
    counts |= {"embedding": embedding, "head": head - tied, "tied_head": tied}
    return counts | ({"encoder_norm": norm, "position_biases": biases} if is_pair else {})


_Columns = dict[str, dict[MeasuredShape, float]]  # of a grid, by name, at all its shapes that fit


def _collect_columns(profile: Profile, kind: MeasuredKind, within: ProfileRange) -> _Columns:
    measured = profile.get_measured(kind)
    missing = [s for s, m in profile.points[kind].items() if m is None]
    shapes = dict.fromkeys(reduce_shape(kind[0], s) for s in within.list_grid(_PER_DOUBLING, _PER_DOUBLING))
    fits = [s for s in shapes if not any(_is_within(m, s) for m in missing)]
    columns = {}
    for column in (*COLUMNS, WEIGHT):
        unit, noise = (1e3, NOISE) if column.endswith("_ms") else (1e-6, EXACT)
        name = column.replace("_ms", "_s").replace("_mb", "_bytes")
        surface = fit_surface({s: float(getattr(m, name)) for s, m in measured.items()}, kind[0], noise=noise)
        values = surface(np.array(fits, np.float64)).tolist()
        columns[column] = {s: round(value * unit, 6) for s, value in zip(fits, values, strict=True)}
    return columns


def _make_chunked_grid(whole: _Columns, sliced: _Columns) -> Grid:
    """Make the grid of a chunked head: as measured for more than one slice, else as the unsplit one, as it then runs.

    Between the longest shape of one slice and the next one it is a mixture of both, whose bytes are too many. So it is
    one grid, on whose points bounds may be based.
    """
    columns = {}
    for name in whole:
        columns[name] = {s: value for s, value in whole[name].items() if _count_tokens(s) <= HEAD_SLICE}
        columns[name] |= {s: value for s, value in sliced[name].items() if _count_tokens(s) > HEAD_SLICE}
    return Grid.from_points(columns)


def make_padded(shape: MeasuredShape, recompute: Recompute) -> MicroBatch:
    """Return the micro-batch of padded rows of a shape (rows, then the length of each side)."""
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
