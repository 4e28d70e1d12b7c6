"""What the stages of a pipeline cost by measurements of one layer of each kind, and what they hold beside layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    LAYER_RECOMPUTES,
    MicroBatch,
    Recompute,
    recompute_of_layers,
    slices_head,
    with_sliced_head,
)
from dynapipe_ext.batch.topology import StageLayers, Topology, layers_of_cut, refuse_half_layers
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture

LayerKind = Literal["encoder", "decoder", "postprocess", "attention", "mlp"]
KINDS: tuple[LayerKind, ...] = ("encoder", "decoder", "postprocess")
SLICED_HEAD: tuple[Recompute, LayerKind] = ("head", "postprocess")  # the grid of a head in slices, of any layers
HALVES: tuple[LayerKind, ...] = ("attention", "mlp")  # of an encoder layer
LayerPart = Literal["layer", "attention", "mlp"]
COLUMNS = ("forward_ms", "backward_ms", "stored_mb", "peak_mb")  # MB = 10^6 bytes; peak is while the layer runs
WEIGHT = "weight_ms"  # a column that not every measurement has
_PRICES = ("forward_ms", "backward_ms", WEIGHT, "stored_mb", "peak_mb")  # the rows of what stages cost
HEAD_PEAK = "peak_mb"  # a column that not every measurement of a head has
# Of a position, between parts of a head, beside hidden states: the log of the sum so far, and the target's logit.
HEAD_MESSAGE_BYTES = 2 * 4


def check_grids(grids: Mapping[tuple[Recompute, LayerKind], Grid]) -> None:
    """Errors: ConfigError for none, for a grid of no layer, and for columns that its layer needs or nobody reads."""
    if not grids:
        raise ConfigError("a cost table needs at least one grid")
    for (recompute, kind), grid in grids.items():
        name = f"the grid of {short(kind)} under recompute {short(recompute)}"
        if recompute not in ALL_RECOMPUTES or kind not in get_args(LayerKind):
            raise ConfigError(
                f"{name} is of no layer: give one of {', '.join(get_args(LayerKind))} under one of"
                f" {', '.join(ALL_RECOMPUTES)}"
            )
        of_bytes = set(COLUMNS[2:]) & set(grid.columns)
        needed = COLUMNS[:2] if kind == "postprocess" and not of_bytes else COLUMNS
        if missing := [column for column in needed if column not in grid.columns]:
            raise ConfigError(f"{name} has no column {missing[0]}: measure again")
        if unread := [column for column in grid.columns if column not in (*COLUMNS, WEIGHT)]:
            raise ConfigError(f"{name} has a column {short(unread[0])}: columns are {', '.join((*COLUMNS, WEIGHT))}")


def check_bytes(*tables: Mapping[Any, float]) -> None:
    """Errors: ConfigError for numbers of bytes that cannot be."""
    for name, size in itertools.chain.from_iterable(table.items() for table in tables):
        if not 0 <= size <= INFEASIBLE:
            raise ConfigError(f"bytes of {name} are {short(size)} but must be 0 to {INFEASIBLE:,}: measure again")


def kinds_of(grids: Mapping[tuple[Recompute, LayerKind], Grid]) -> tuple[Recompute, ...]:
    """The kinds of recomputation that grids price; with the head in slices too, where that was measured."""
    of_layers = tuple(kind for kind in LAYER_RECOMPUTES if (kind, "encoder") in grids)
    return of_layers + (with_sliced_head(of_layers) if SLICED_HEAD in grids else ())


def grids_of(
    grids: Mapping[tuple[Recompute, LayerKind], Grid], recompute: Recompute, kinds: Sequence[LayerKind] = KINDS
) -> list[Grid | None]:
    """The grids of a kind of recomputation, one of each of `kinds`; with the head in slices, the head's own."""
    of_layers = recompute_of_layers(recompute)
    head: Recompute = SLICED_HEAD[0] if slices_head(recompute) else of_layers
    return [grids.get((head if kind == "postprocess" else of_layers, kind)) for kind in kinds]


def stage_values(
    grids: Sequence[Grid | None],
    layout: Sequence[tuple[int, int]],
    shapes: FloatArray,
    *,
    has_decoder: bool,
    head_on_every: bool = False,
) -> tuple[FloatArray, BoolArray]:
    """Forward, backward and W in ms, MB stored and MB while the last layer runs: (5, stages, M); and what is known.

    `grids`: one of each of KINDS, if there is one; `layout`: (encoder, decoder) layers of every stage; `shapes` (3, M).
    """
    total, in_table = np.zeros((len(_PRICES), len(layout), shapes.shape[1])), np.ones(shapes.shape[1], bool)
    if not grids[0] or (has_decoder and not grids[1]):
        return total, ~in_table
    prices = []
    for grid, axes in zip(grids, ([0, 1], [0, 1, 2], [0, 2] if has_decoder else [0, 1]), strict=True):
        values, measured = _layer_prices(grid, shapes[axes])
        in_table &= measured
        prices.append(values)
    encoder, decoder, head = prices
    for stage, (num_encoder, num_decoder) in enumerate(layout):
        total[:4, stage] = num_encoder * encoder[:4] + num_decoder * decoder[:4]
        if head_on_every or stage + 1 == len(layout):
            total[:4, stage] += head[:4]
        if num_encoder:
            total[4, stage] = (num_encoder - 1) * encoder[3] + encoder[4]
        if num_decoder:
            while_decoder = num_encoder * encoder[3] + (num_decoder - 1) * decoder[3] + decoder[4]
            total[4, stage] = np.maximum(total[4, stage], while_decoder)
    return total, in_table


def _layer_prices(grid: Grid | None, places: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Return the rows of `_PRICES` of one layer, 0 for each column that there is none of; and what is known."""
    prices, in_table = np.zeros((len(_PRICES), places.shape[1])), np.ones(places.shape[1], bool)
    if grid:
        values, in_table = grid.at(list(places))
        prices[[_PRICES.index(name) for name in grid.columns]] = values
    return prices, in_table


def parts_of_stages(stages: Sequence[StageLayers]) -> Iterator[tuple[LayerPart, list[range]]]:
    """What stages are made of, the layers of every stage: whole ones, then attention alone and MLPs alone, if any."""
    yield "layer", [stage.whole for stage in stages]
    if any(map(len, halves := [stage.attention_half for stage in stages])):
        yield "attention", halves
    if any(map(len, halves := [stage.mlp_half for stage in stages])):
        yield "mlp", halves


@lru_cache(maxsize=64)
def layers_of_stages(
    num_layers: int, total_layers: int, num_stages: int, layers_per_stage: tuple[float, ...]
) -> list[tuple[int, int]]:
    """(encoder, decoder) layers of every stage, whole ones: halves do not count. Without `layers_per_stage`, layer i of
    T is on stage i S // T. Errors: ConfigError for half layers of a model with a decoder side."""
    if num_layers == total_layers and layers_per_stage:
        return [(len(stage.whole), 0) for stage in layers_of_cut(layers_per_stage)]
    whole = refuse_half_layers(layers_per_stage, "a model with a decoder side")
    stage_of = [s for s, n in enumerate(whole) for _ in range(n)]
    stage_of = stage_of or [i * num_stages // total_layers for i in range(total_layers)]
    counts = [[0, 0] for _ in range(num_stages)]
    for layer, stage in enumerate(stage_of):
        counts[stage][layer >= num_layers] += 1
    return [(encoder, decoder) for encoder, decoder in counts]


def first_decoder_stage(layers: Sequence[tuple[int, int]]) -> int | None:
    """Where the decoder begins, by the (encoder, decoder) layers of every stage; None for a model without one.

    >>> first_decoder_stage([(2, 0), (1, 1), (0, 2)])
    1
    """
    return next((stage for stage, (_, num_decoder) in enumerate(layers) if num_decoder), None)


def encoder_end_stage(layers: Sequence[tuple[int, int]]) -> int:
    """Where the encoder ends, or what a decoder-only model has in its place.

    >>> encoder_end_stage([(2, 0), (1, 1), (0, 2)])
    1
    """
    return max(stage for stage, (num_encoder, _) in enumerate(layers) if num_encoder)


def values_with_halves(
    total: FloatArray,
    grids: Sequence[Grid | None],
    halves: Sequence[tuple[int, int]],
    shapes: FloatArray,
) -> FloatArray:
    """Forward, backward and W in ms, MB stored and MB while something runs, (5, stages, M): `total` of whole layers and
    the head, and on top attentions and MLPs alone, `halves` of every stage, by their `grids`.

    A half that runs needs its own working memory beside all that the stage stores. `total` may be written over.
    """
    if not all(grids):
        return total  # of a kind of recomputation that the table does not have: no shape is known
    working = total[4] - total[3]
    for grid, counts in zip(grids, np.array(halves, np.float64).T[:, :, None], strict=True):
        half, _ = _layer_prices(grid, shapes[:2])
        total[:4] += counts * half[:4, None]
        working = np.maximum(working, counts * (half[4] - half[3]))
    total[4] = total[3] + working
    return total


def values_with_spread_head(
    total: FloatArray, head: Grid, stages: range, shapes: FloatArray, hidden_bytes: int
) -> tuple[FloatArray, BoolArray]:
    """`total` of layers, (5, stages, M) as `values_with_halves` has it, with the same part of the head on each of
    `stages`; and which shapes the head's grid knows.

    A part takes as much of the head's time and memory as it has of the vocabulary. All of the head's input of
    `hidden_bytes` a position comes on top, and what a message brings beside it, which a stage keeps with its own.
    """
    parts = len(stages)
    at, in_table = head.at(list(shapes[:2]))
    values = dict(zip(head.columns, at / parts, strict=True))
    with_head, nothing = total.copy(), np.zeros(shapes.shape[1])
    forward, backward, stored, _ = (values.get(name, nothing) for name in COLUMNS)
    kept_mb = 1e-6 * (hidden_bytes + 2 * HEAD_MESSAGE_BYTES) * shapes[0] * shapes[1]
    with_head[:4, stages] += np.stack([forward, backward, values.get(WEIGHT, nothing), stored + kept_mb])[:, None]
    if HEAD_PEAK in values:
        running = with_head[3, stages] + values[HEAD_PEAK] - stored
        with_head[4, stages] = np.maximum(with_head[4, stages], running)
    return with_head, in_table


def equivalent_shape(m: MicroBatch, grid: Grid | None) -> tuple[float, float, float]:
    """(rows, encoder_len, decoder_len), not always whole.

    A packed row of P positions with document attention is the padded shape with the same tokens and the same sum of
    squared lengths, P / L rows of length L = sum(l^2) / P: matrix products depend on the first and attention on the
    second. L never goes below the shortest row of `grid`, its layers' of all sides, so that many tiny documents cost
    their tokens; nor, on either side of pairs, above the longest row where no document does. Whole-row attention is one
    padded row of P positions.
    """
    encoder, decoder = m.encoder_len, m.decoder_len
    if m.layout == "padded" or m.attention == "row":
        return m.rows, encoder, decoder
    pad = (encoder - sum(s.encoder for s in m.samples)) + (decoder - sum(s.decoder for s in m.samples))
    documents = m.documents if not decoder else [s.tokens for s in m.samples]
    squares = sum(length**2 for length in documents) + pad**2
    rows = (encoder + decoder) ** 2 / squares
    if grid:
        lengths = zip((encoder, decoder), grid.axes[1:], strict=False)
        rows = min([rows, *(length / float(axis[0]) for length, axis in lengths)])
    if grid and decoder:
        most_e, most_d = (float(axis[-1]) for axis in grid.axes[1:])
        if all(s.encoder <= most_e and s.decoder <= most_d for s in m.samples):
            rows = max(rows, encoder / most_e, decoder / most_d)
    rows = max(1.0, rows)
    return rows, encoder / rows, decoder / rows


def parameters_by_stage(
    layers: Sequence[tuple[int, int]],
    parameters: Mapping[str, float],
    halves: Sequence[tuple[int, int]] = (),
    topology: Topology | None = None,
) -> FloatArray:
    """Parameters of every stage: those of its layers, and of the `halves` of layers that it has alone; an "embedding"
    on the first stage and where the decoder begins; the "head" on the last stage, and the "tied_head" there unless it
    has an embedding; the "encoder_norm" where the encoder ends; "position_biases" once for each of encoder and decoder
    that the stage has layers of.

    Over the stages of a `topology` embedding and head are divided as it says.
    """
    if topology is not None and topology.vocabulary != "whole":
        return _parameters_of_spread(layers, parameters, halves, topology)
    halves = halves or [(0, 0)] * len(layers)
    end, last = encoder_end_stage(with_halves(layers, halves)), len(layers) - 1
    embeddings = {0, first_decoder_stage(layers) or 0}
    total = [
        num_encoder * parameters["encoder"]
        + (num_decoder * parameters["decoder"] if num_decoder else 0.0)
        + (parameters["embedding"] if stage in embeddings else 0.0)
        + (parameters.get("head", 0.0) if stage == last else 0.0)
        + (parameters.get("tied_head", 0.0) if stage == last and stage not in embeddings else 0.0)
        + (parameters.get("encoder_norm", 0.0) if stage == end else 0.0)
        + parameters.get("position_biases", 0.0) * ((num_encoder > 0) + (num_decoder > 0))
        for stage, (num_encoder, num_decoder) in enumerate(layers)
    ]
    for stage, counts in enumerate(halves):
        total[stage] += sum(count * parameters[part] for part, count in zip(HALVES, counts, strict=True) if count)
    return np.array(total)


def _parameters_of_spread(
    layers: Sequence[tuple[int, int]],
    parameters: Mapping[str, float],
    halves: Sequence[tuple[int, int]],
    topology: Topology,
) -> FloatArray:
    """`parameters_by_stage` of a decoder-only model, its learned positions and final norm divided like their ends."""
    ends = dict.fromkeys(("embedding", "head", "tied_head"), 0.0)
    total = parameters_by_stage(layers, {**parameters, **ends}, halves)
    for name, stages in ("embedding", topology.embedding_stages), ("head", topology.head_stages):
        total[stages] += parameters.get(name, 0.0) / len(stages)
    return total


def with_halves(layers: Sequence[tuple[int, int]], halves: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(encoder, decoder) layers of which every stage holds any part.

    >>> with_halves([(2, 0), (0, 0)], [(1, 0), (0, 1)])
    [(3, 0), (1, 0)]
    """
    pairs = zip(layers, halves, strict=True)
    return [(encoder + attention + mlp, decoder) for (encoder, decoder), (attention, mlp) in pairs]


def once_by_stage(layers: Sequence[tuple[int, int]], once: Mapping[LayerKind, float]) -> FloatArray:
    """`once["encoder"]` on the stage where the encoder ends, `once["decoder"]` on every stage with decoder layers."""
    end, decoder = encoder_end_stage(layers), once.get("decoder", 0.0)
    held = [once.get("encoder", 0.0) * (stage == end) + decoder * (n > 0) for stage, (_, n) in enumerate(layers)]
    return np.array(held)


def stage_layers(architecture: Architecture, topology: Topology) -> list[tuple[int, int]]:
    """(encoder or decoder-only, decoder) layers of every stage. Errors: ConfigError for too few layers."""
    topology = topology.with_layers(architecture.total_layers)
    return layers_of_stages(
        architecture.num_layers, architecture.total_layers, topology.num_stages, topology.layers_per_stage
    )


def reading_stages(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """The stages that read tokens: those of embeddings and heads, and the one where a decoder begins."""
    layers = stage_layers(architecture, topology)
    return *topology.embedding_stages, first_decoder_stage(layers) or 0, *topology.head_stages
