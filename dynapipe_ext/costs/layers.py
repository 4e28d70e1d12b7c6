"""Layers on stages: their numbers, the sums of their prices, and the stages that hold parts of the vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import ALL_RECOMPUTES, Recompute
from dynapipe_ext.batch.topology import Topology, require_whole_layers
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid, IntArray
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture, kinds_of_ranges

LayerKind = Literal["encoder", "decoder", "postprocess", "attention", "mlp"]
KINDS: tuple[LayerKind, ...] = ("encoder", "decoder", "postprocess")
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
SLICED_HEAD: tuple[Recompute, LayerKind] = ("head", "postprocess")  # the grid of a head in slices, of any layers
HALVES: tuple[LayerKind, ...] = ("attention", "mlp")  # of an encoder layer
COLUMNS = ("forward_ms", "backward_ms", "stored_mb", "peak_mb")  # MB = 10^6 bytes; peak is while the layer runs
WEIGHT = "weight_ms"  # a column that not every measurement has
_PRICES = ("forward_ms", "backward_ms", WEIGHT, "stored_mb", "peak_mb")  # the rows of what stages cost
HEAD_PEAK = "peak_mb"  # a column that not every measurement of a head has
# Per position, between parts of a head, next to hidden states: the log of the sum so far, the target's logit.
HEAD_MESSAGE_BYTES = 2 * 4
Number = TypeVar("Number", np.int64, np.float64)


def check_grids(grids: Mapping[tuple[Recompute, LayerKind], Grid]) -> None:
    """Raise ConfigError for grids of unknown layers or recomputation modes, and for missing or unknown columns."""
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
    """Raise ConfigError for bytes below 0 or above INFEASIBLE."""
    for name, size in itertools.chain.from_iterable(table.items() for table in tables):
        if not 0 <= size <= INFEASIBLE:
            raise ConfigError(f"bytes of {name} are {short(size)} but must be 0 to {INFEASIBLE:,}: measure again")


@dataclass(frozen=True, slots=True, eq=False)
class StageLayout:
    """The layers of every stage by kind: full layers of an encoder or a decoder-only model, full layers of a decoder,
    and attentions and MLPs whose other half is on another stage. `layers`: their indices; `counts`: their numbers, (S,
    1). `halves`: numbers of half layers, (S, 1): two per layer, and one for a part of a split head."""

    topology: Topology
    layers: Mapping[LayerKind, list[range]]
    counts: Mapping[LayerKind, IntArray]
    has_head: BoolArray  # or a part of it, shape (S, 1)
    halves: IntArray

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(Encoder, decoder) layers of every stage; half layers do not count."""
        return [(len(e), len(d)) for e, d in zip(self.layers["encoder"], self.layers["decoder"], strict=True)]

    @property
    def first_decoder_stage(self) -> int | None:
        """Index of the stage on which the decoder begins; None without a decoder."""
        return next((stage for stage, layers in enumerate(self.layers["decoder"]) if layers), None)

    @property
    def encoder_end(self) -> int:
        """Index of the stage on which the encoder, or a decoder-only model, ends."""
        return int(np.flatnonzero(sum(self.counts[kind] for kind in ("encoder", *HALVES)))[-1])

    @property
    def attentions(self) -> IntArray:
        """Numbers of encoder layers whose attention a stage computes, shape (S, 1)."""
        return self.counts["encoder"] + self.counts["attention"]

    def add_messages(self, sides: npt.NDArray[Number], head: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return what messages hold over each stage boundary, (S - 1, M): `sides[0]` of the encoder, from the first
        decoder layer on also `sides[1]` of the decoder, and between parts of a head also `head`."""
        has_decoder = np.cumsum(self.counts["decoder"])[:-1, None] > 0
        return np.asarray(sides[0] + has_decoder * sides[1] + self.has_head[:-1] * head)

    def find_holders(self, *, tied: bool = False) -> tuple[set[int], set[int]]:
        """Return the stages with an embedding (or a part), and those with weights of a head (or a part). The first
        decoder stage has an embedding. If `tied`, only copies count as a head: the last stage has one, unless its rank
        has an embedding or the same part of it."""
        ranks, heads = self.topology.stage_ranks, {*self.topology.head_stages}
        embeddings = {*self.topology.embedding_stages, self.first_decoder_stage or 0}
        if tied:
            heads = set() if self.topology.vocabulary != "whole" or ranks[-1] == ranks[0] else heads - embeddings
        return embeddings, heads


@lru_cache(maxsize=64)  # every price of a micro-batch asks for it
def lay_out(num_layers: int, total_layers: int, topology: Topology) -> StageLayout:
    """Lay `total_layers` on stages. The first `num_layers` of them are of the encoder or the decoder-only model.

    Raises ConfigError for too few layers, and for half layers of a model with a decoder side.

    >>> layout = lay_out(3, 5, Topology(pp=2, layers_per_stage=(2, 3)))
    >>> layout.pairs, layout.first_decoder_stage, layout.encoder_end
    ([(2, 0), (1, 2)], 1, 1)
    """
    if total_layers > num_layers:
        require_whole_layers(topology.layers_per_stage, "a model with a decoder side")
    stages = topology.with_layers(total_layers).stage_layers
    layers: dict[LayerKind, list[range]] = {
        "encoder": [range(stage.whole.start, min(stage.whole.stop, num_layers)) for stage in stages],
        "decoder": [range(max(stage.whole.start, num_layers), stage.whole.stop) for stage in stages],
        "attention": [stage.attention_half for stage in stages],
        "mlp": [stage.mlp_half for stage in stages],
    }
    counts = {kind: np.array([[len(one)] for one in of_stages], np.int64) for kind, of_stages in layers.items()}
    has_head = np.arange(topology.num_stages)[:, None] >= topology.head_stages.start
    halves = sum(count * (1 if kind in HALVES else 2) for kind, count in counts.items())
    return StageLayout(topology, layers, counts, has_head, halves + has_head * (len(topology.head_stages) > 1))


@dataclass(frozen=True, slots=True, eq=False)
class CountedLayers:
    """Numbers of layers of one kind, full or half ones, on every stage, (S, 1). `model`: the architecture as if all
    layers were of this kind (with experts, for example)."""

    model: Architecture
    kind: LayerKind
    counts: IntArray


@lru_cache(maxsize=64)  # every price of a micro-batch asks for it
def list_layers(a: Architecture, topology: Topology) -> tuple[CountedLayers, ...]:
    """List the layers of all stages by kind. Raises ConfigError as `lay_out` does."""
    return tuple(
        CountedLayers(model, kind, np.array(counts, np.int64)[:, None])
        for kind, layers in lay_out(a.num_layers, a.total_layers, topology).layers.items()
        for model, counts in ([(a, tuple(map(len, layers)))] if kind == "decoder" else kinds_of_ranges(a, layers))
        if any(counts)
    )


def price_layer(grid: Grid | None, places: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Return prices of one layer of M shapes, (5, M), and which of them are known, (M,). Rows are ms of F, B and W, MB
    stored, and MB while it runs (stored ones included); columns that the grid does not have are 0."""
    prices, in_table = np.zeros((len(_PRICES), places.shape[1])), np.ones(places.shape[1], bool)
    if grid:
        values, in_table = grid.interpolate(list(places))
        prices[[_PRICES.index(name) for name in grid.columns]] = values
    return prices, in_table


def lay_on_stages(prices: Mapping[LayerKind, FloatArray], counts: Mapping[LayerKind, IntArray]) -> FloatArray:
    """Return prices of all layers of each stage, (5, S, M), from `price_layer` by kind and `StageLayout.counts`. Rows
    are ms of F, B and W, MB stored, and MB while the last layer runs.

    A half layer needs its own working memory while it runs, in addition to all that the stage stores."""
    (encoder, num_encoder), (decoder, num_decoder) = ((prices[kind], counts[kind]) for kind in KINDS[:2])
    total = np.zeros((len(_PRICES), len(num_encoder), encoder.shape[1]))
    total[:4] = num_encoder * encoder[:4, None] + num_decoder * decoder[:4, None]
    total[:4, -1] += prices["postprocess"][:4]
    while_encoder = (num_encoder - 1) * encoder[3] + encoder[4]
    while_decoder = num_encoder * encoder[3] + (num_decoder - 1) * decoder[3] + decoder[4]
    total[4] = np.maximum((num_encoder > 0) * while_encoder, (num_decoder > 0) * while_decoder)
    if halves := [kind for kind in HALVES if counts[kind].any()]:
        working = total[4] - total[3]
        for kind in halves:
            total[:4] += counts[kind] * prices[kind][:4, None]
            working = np.maximum(working, counts[kind] * (prices[kind][4] - prices[kind][3]))
        total[4] = total[3] + working
    return total


def count_parameters_by_stage(layout: StageLayout, parameters: Mapping[str, float]) -> FloatArray:
    """Return the parameters of every stage, (S,), from those of one layer or half layer of each kind, and others.

    "embedding", "head" and "tied_head" are on the stages of `StageLayout.find_holders`, "encoder_norm" is where the
    encoder ends. "position_biases" count once for each of encoder and decoder that the stage has layers of."""
    topology, (embeddings, copies) = layout.topology, layout.find_holders(tied=True)
    total = np.zeros(topology.num_stages)
    for kind, counts in layout.counts.items():
        total += counts[:, 0] * parameters.get(kind, 0.0)
    total[[*embeddings]] += parameters["embedding"] / len(topology.embedding_stages)
    total[topology.head_stages] += parameters.get("head", 0.0) / len(topology.head_stages)
    total[[*copies]] += parameters.get("tied_head", 0.0)
    total[layout.encoder_end] += parameters.get("encoder_norm", 0.0)
    for side in ("encoder", "decoder"):
        total += parameters.get("position_biases", 0.0) * (layout.counts[side][:, 0] > 0)
    return total
