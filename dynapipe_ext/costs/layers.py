"""Prices of stages, from one measured layer per kind, and the parameters that stages hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    Recompute,
)
from dynapipe_ext.batch.topology import StageLayers, Topology, list_stage_layers, require_whole_layers
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture

LayerKind = Literal["encoder", "decoder", "postprocess", "attention", "mlp"]
KINDS: tuple[LayerKind, ...] = ("encoder", "decoder", "postprocess")
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
SLICED_HEAD: tuple[Recompute, LayerKind] = ("head", "postprocess")  # the grid of a head in slices, of any layers
HALVES: tuple[LayerKind, ...] = ("attention", "mlp")  # of an encoder layer
LayerPart = Literal["layer", "attention", "mlp"]
COLUMNS = ("forward_ms", "backward_ms", "stored_mb", "peak_mb")  # MB = 10^6 bytes; peak is while the layer runs
WEIGHT = "weight_ms"  # a column that not every measurement has
_PRICES = ("forward_ms", "backward_ms", WEIGHT, "stored_mb", "peak_mb")  # the rows of what stages cost
HEAD_PEAK = "peak_mb"  # a column that not every measurement of a head has
# Per position, between parts of a head, next to hidden states: the log of the sum so far, the target's logit.
HEAD_MESSAGE_BYTES = 2 * 4


def check_grids(grids: Mapping[tuple[Recompute, LayerKind], Grid]) -> None:
    """Check the layers and columns of grids. Raises ConfigError."""
    if not grids:
        raise ConfigError("a cost table needs at least one grid")
    for (recompute, kind), grid in grids.items():
        name = f"the grid of {short(kind)} under recompute {short(recompute)}"
        if recompute not in ALL_RECOMPUTES or kind not in get_args(LayerKind):
            raise ConfigError(
                f"{name} is not of a layer: give one of {', '.join(get_args(LayerKind))} under one of"
                f" {', '.join(ALL_RECOMPUTES)}"
            )
        of_bytes = set(COLUMNS[2:]) & set(grid.columns)
        needed = COLUMNS[:2] if kind == "postprocess" and not of_bytes else COLUMNS
        if missing := [column for column in needed if column not in grid.columns]:
            raise ConfigError(f"{name} has no column {missing[0]}: measure again")
        if unread := [column for column in grid.columns if column not in (*COLUMNS, WEIGHT)]:
            raise ConfigError(f"{name} has a column {short(unread[0])}: columns are {', '.join((*COLUMNS, WEIGHT))}")


def check_bytes(*tables: Mapping[Any, float]) -> None:
    """Check numbers of bytes. Raises ConfigError."""
    for name, size in itertools.chain.from_iterable(table.items() for table in tables):
        if not 0 <= size <= INFEASIBLE:
            raise ConfigError(f"bytes of {name} are {short(size)} but must be 0 to {INFEASIBLE:,}: measure again")


def price_layer(grid: Grid | None, places: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Return forward, backward and W in ms, MB stored and MB while it runs of one layer, (5, M): 0 for each column that
    there is none of; and what is known."""
    prices, in_table = np.zeros((len(_PRICES), places.shape[1])), np.ones(places.shape[1], bool)
    if grid:
        values, in_table = grid.interpolate(list(places))
        prices[[_PRICES.index(name) for name in grid.columns]] = values
    return prices, in_table


def lay_on_stages(
    prices: Mapping[LayerKind, FloatArray],
    layers: Sequence[tuple[int, int]],
    halves: Sequence[tuple[int, int]],
) -> FloatArray:
    """Return forward, backward and W in ms, MB stored and MB while the last layer runs, (5, S, M), of `price_layer`.

    `layers`: (encoder, decoder) layers of every stage; `halves`: its attentions and MLPs without their other half. A
    half that runs needs its own working memory in addition to all that the stage stores.
    """
    encoder, decoder, head = prices["encoder"], prices["decoder"], prices["postprocess"]
    total = np.zeros((len(_PRICES), len(layers), encoder.shape[1]))
    for stage, (num_encoder, num_decoder) in enumerate(layers):
        total[:4, stage] = num_encoder * encoder[:4] + num_decoder * decoder[:4]
        if stage + 1 == len(layers):
            total[:4, stage] += head[:4]
        if num_encoder:
            total[4, stage] = (num_encoder - 1) * encoder[3] + encoder[4]
        if num_decoder:
            while_decoder = num_encoder * encoder[3] + (num_decoder - 1) * decoder[3] + decoder[4]
            total[4, stage] = np.maximum(total[4, stage], while_decoder)
    if any(map(any, halves)):
        working = total[4] - total[3]
        for kind, counts in zip(HALVES, np.array(halves, np.float64).T[:, :, None], strict=True):
            total[:4] += counts * prices[kind][:4, None]
            working = np.maximum(working, counts * (prices[kind][4] - prices[kind][3]))
        total[4] = total[3] + working
    return total


def list_layer_parts(stages: Sequence[StageLayers]) -> Iterator[tuple[LayerPart, list[range]]]:
    """Yield the layers of every stage: full ones, then attentions and MLPs without their other half, if any."""
    yield "layer", [stage.whole for stage in stages]
    if any(map(len, halves := [stage.attention_half for stage in stages])):
        yield "attention", halves
    if any(map(len, halves := [stage.mlp_half for stage in stages])):
        yield "mlp", halves


@lru_cache(maxsize=64)
def count_stage_layers(
    num_layers: int, total_layers: int, num_stages: int, layers_per_stage: tuple[float, ...]
) -> list[tuple[int, int]]:
    """Count (encoder, decoder) layers of every stage, without halves. Without `layers_per_stage`, layer i of
    T is on stage i S // T. Raises ConfigError for half layers of a model with a decoder side."""
    if num_layers == total_layers and layers_per_stage:
        return [(len(stage.whole), 0) for stage in list_stage_layers(layers_per_stage)]
    whole = require_whole_layers(layers_per_stage, "a model with a decoder side")
    stage_of = [s for s, n in enumerate(whole) for _ in range(n)]
    stage_of = stage_of or [i * num_stages // total_layers for i in range(total_layers)]
    counts = [[0, 0] for _ in range(num_stages)]
    for layer, stage in enumerate(stage_of):
        counts[stage][layer >= num_layers] += 1
    return [(encoder, decoder) for encoder, decoder in counts]


def first_decoder_stage(layers: Sequence[tuple[int, int]]) -> int | None:
    """Find the stage on which the decoder begins; None for a model without one.

    >>> first_decoder_stage([(2, 0), (1, 1), (0, 2)])
    1
    """
    return next((stage for stage, (_, num_decoder) in enumerate(layers) if num_decoder), None)


def find_encoder_end(layers: Sequence[tuple[int, int]]) -> int:
    """Find the stage on which the encoder, or a decoder-only model, ends.

    >>> find_encoder_end([(2, 0), (1, 1), (0, 2)])
    1
    """
    return max(stage for stage, (num_encoder, _) in enumerate(layers) if num_encoder)


def count_parameters_by_stage(
    layers: Sequence[tuple[int, int]],
    parameters: Mapping[str, float],
    halves: Sequence[tuple[int, int]],
    topology: Topology,
) -> FloatArray:
    """Return the parameters of every stage: those of its layers and `halves`, and its parts of the vocabulary.

    The stage where the decoder begins has an "embedding", too. The last stage has the "tied_head" unless its rank has
    an embedding. The "encoder_norm" is where the encoder ends. "position_biases" count once for each of encoder and
    decoder that the stage has layers of.
    """
    end = find_encoder_end(with_halves(layers, halves))
    embeddings, heads = {*topology.embedding_stages, first_decoder_stage(layers) or 0}, topology.head_stages
    is_on_first_rank = topology.stage_ranks[-1] == topology.stage_ranks[0]
    has_copy = topology.vocabulary == "whole" and heads.start not in embeddings and not is_on_first_rank
    total = np.zeros(len(layers))
    for stage, ((num_encoder, num_decoder), counts) in enumerate(zip(layers, halves, strict=True)):
        parts = zip(("encoder", "decoder", *HALVES), (num_encoder, num_decoder, *counts), strict=True)
        total[stage] = sum(count * parameters[part] for part, count in parts if count)
        if stage in embeddings:
            total[stage] += parameters["embedding"] / len(topology.embedding_stages)
        if stage in heads:
            total[stage] += parameters.get("head", 0.0) / len(heads) + has_copy * parameters.get("tied_head", 0.0)
        total[stage] += parameters.get("encoder_norm", 0.0) * (stage == end)
        total[stage] += parameters.get("position_biases", 0.0) * ((num_encoder > 0) + (num_decoder > 0))
    return total


def with_halves(layers: Sequence[tuple[int, int]], halves: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Count the (encoder, decoder) layers of which every stage holds any part.

    >>> with_halves([(2, 0), (0, 0)], [(1, 0), (0, 1)])
    [(3, 0), (1, 0)]
    """
    pairs = zip(layers, halves, strict=True)
    return [(encoder + attention + mlp, decoder) for (encoder, decoder), (attention, mlp) in pairs]


def place_once_bytes(layers: Sequence[tuple[int, int]], once: Mapping[LayerKind, float]) -> FloatArray:
    """Return `once["encoder"]` on the stage where the encoder ends, `once["decoder"]` on stages with decoder layers."""
    end, decoder = find_encoder_end(layers), once.get("decoder", 0.0)
    held = [once.get("encoder", 0.0) * (stage == end) + decoder * (n > 0) for stage, (_, n) in enumerate(layers)]
    return np.array(held)


def stage_layers(architecture: Architecture, topology: Topology) -> list[tuple[int, int]]:
    """Count (encoder or decoder-only, decoder) layers of every stage. Raises ConfigError for too few layers."""
    topology = topology.with_layers(architecture.total_layers)
    return count_stage_layers(
        architecture.num_layers, architecture.total_layers, topology.num_stages, topology.layers_per_stage
    )


def list_reading_stages(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """List the stages that read tokens: those of embeddings and heads, and the one where a decoder begins."""
    layers = stage_layers(architecture, topology)
    return *topology.embedding_stages, first_decoder_stage(layers) or 0, *topology.head_stages
