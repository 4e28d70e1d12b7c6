"""Costs interpolated between measurements of single layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import (
    LAYER_RECOMPUTES,
    MicroBatch,
    Recompute,
    recompute_of_layers,
    slices_head,
    with_sliced_head,
    without_stage,
)
from dynapipe_ext.batch.topology import DTYPE_OF_WIDTH, ActivationFormat, Topology, require_whole_layers
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.costs.a100 import find_hidden_size, read_layers
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.codec import dump_fields, from_json, to_json
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.floor import TablePoints
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid
from dynapipe_ext.costs.layers import (
    HALVES,
    HEAD_MESSAGE_BYTES,
    HEAD_PEAK,
    KINDS,
    LAYER_KINDS,
    SLICED_HEAD,
    WEIGHT,
    LayerKind,
    StageLayout,
    check_bytes,
    check_grids,
    count_parameters_by_stage,
    lay_on_stages,
    lay_out,
    price_layer,
)
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.measured_blocks import MeasuredBlock
from dynapipe_ext.costs.measured_points import make_points
from dynapipe_ext.costs.model import (
    TABLES,
    CostCapabilities,
    CostModel,
    IntArray,
    MicroBatchCosts,
    check_numbers,
    fingerprint,
    no_width,
)
from dynapipe_ext.costs.packed_rows import PackedLayer, count_packed_sizes, slice_sizes
from dynapipe_ext.costs.pieces import PieceSurcharges
from dynapipe_ext.costs.states import EXACT_SUM_BYTES, make_tie_error
from dynapipe_ext.errors import ConfigError, DataError, settle_field_types
from dynapipe_ext.models.architecture import MOST_LAYERS

FORMAT = "dynapipe-costs/1"
STATES_PER_PARAMETER_BYTE = (2.0, 6.0)  # 16-bit weights and gradients; fp32 master and Adam moments, sharded over dp
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable(CostModel):
    """Measured costs of one layer of each kind, summed over the layers of each stage of a topology.

    `grids[recompute, kind]` has the columns `COLUMNS` (postprocess, the LM head: the two times at least) over the axes
    rows and encoder_len (the head: rows and output length), for decoder layers rows, encoder_len and decoder_len. A
    decoder-only model has encoder layers only; an encoder-decoder has `num_layers` of each, encoder first, or
    `num_decoder_layers` of the decoder's if that is not 0. With a column "weight_ms" in the grids of layers, W of a
    split backward is as measured, else `split_w` of the backward.

    Grids and parameter bytes of "attention" and "mlp", of an encoder layer, price stages that are cut between the two.
    With vocabulary parallelism each part of a head takes its share of the measured head.

    `packed_layers`: bytes of a layer on packed rows, if they are above those of the padded shape. `packed_bytes`, of
    older tables: stored bytes of packed rows / those of the padded shape, by recomputation mode (else 1). `once_bytes`:
    what is stored in addition to layers per encoder position, where the encoder ends ("encoder"), and on every stage
    with decoder layers ("decoder"; else 0). `state_parts`: bytes of states per byte of parameters, first on every
    replica, then divided over replicas.

    A message between any two ranks takes `comm_latency_us` and its bits at `comm_gbps` (10^9 bits/s). With `links` it
    takes the time of its stage boundary's link.

    Between grid points costs are multilinear. Below the grid a shape costs what the smallest point costs. Above it, or
    next to a point that was not measured, `evaluate` raises PlanError and `evaluate_shapes` returns INFEASIBLE.

    Packed rows have no axis of their own: they are priced as `_find_equivalent_shapes` says. If that needs a point that
    was not measured, they are priced by the next smaller measured number of rows, in proportion. A piece of a long
    sample is priced as a document of such a row plus `pieces`; without these it has no price.

    At a context-parallel degree above 1 a rank takes its share of the time of full rows. Exchanges in attention come on
    top. `blocks`, by measured degree, have the time of these and a layer's overhead on position shards; other degrees
    then have no price. Without any `blocks` exchanges are counted over `links` (without them, `comm_gbps`). Bytes are
    the larger of a share of the full row's bytes and a shorter row's bytes."""

    LATER_FIELDS: ClassVar = (  # older files do not have them (`codec.py`)
        "num_decoder_layers", "links", "state_parts", "value_bytes", "packed_bytes", "once_bytes", "pieces", "blocks",
    )  # fmt: skip
    grids: Mapping[tuple[Recompute, LayerKind], Grid]
    # Weights on one tensor-parallel rank: of a layer of each kind, and what else `count_parameters_by_stage` names.
    parameter_bytes: Mapping[str, float]
    hidden_size: int
    num_layers: int
    topology: Topology
    num_decoder_layers: int = 0
    split_w: float = 0.45
    comm_gbps: float = 4800.0
    comm_latency_us: float = 0.0
    links: Links | None = None
    working_in: Literal["FBI", "F"] = "FBI"
    state_parts: tuple[float, float] = STATES_PER_PARAMETER_BYTE
    packed_bytes: Mapping[Recompute, float] = field(default_factory=dict)
    packed_layers: Mapping[tuple[Recompute, LayerKind], PackedLayer] = field(default_factory=dict)
    once_bytes: Mapping[LayerKind, float] = field(default_factory=dict)
    value_bytes: int = VALUE_BYTES  # of what crosses stage boundaries
    pieces: PieceSurcharges | None = None
    blocks: Mapping[int, MeasuredBlock] = field(default_factory=dict)  # by context-parallel degree, above 1
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle_field_types(self)
        check_grids(self.grids)
        check_bytes(self.parameter_bytes, self.packed_bytes, self.once_bytes)
        check_numbers(self, num_layers=(1, MOST_LAYERS), num_decoder_layers=(0, MOST_LAYERS), split_w=(0, 1))
        check_numbers(self, comm_gbps=(1e-6, math.inf), comm_latency_us=(0, 1e9))
        if len(self.state_parts) != 2 or not all(0 <= part < 1000 for part in self.state_parts):
            raise ConfigError(f"state_parts are {self.state_parts} but must be two numbers of 0 to below 1000")
        if self.value_bytes not in (2, 4):
            raise ConfigError(f"value_bytes is {self.value_bytes} but must be 2 or 4")
        _ = self.layout  # rejects a cut that does not have as many layers
        if not self._prices_halves:
            require_whole_layers(self.topology.layers_per_stage, "a cost table without grids of both halves")
        if self.has_decoder:
            require_whole_vocabulary(self.topology, "a table with a decoder side")
        if self.topology.vocabulary == "head" and self.parameter_bytes.get("tied_head"):
            raise make_tie_error()
        measured = [recompute for recompute in LAYER_RECOMPUTES if (recompute, "encoder") in self.grids]
        if self.pieces and {*self.pieces.by_recompute} != {*measured}:
            raise ConfigError(
                f"pieces were measured under recompute {', '.join(self.pieces.by_recompute)} but shapes under"
                f" {', '.join(measured)}: measure both under the same"
            )
        if missing := sorted({"encoder", "embedding", *(["decoder"] * self.has_decoder)} - self.parameter_bytes.keys()):
            raise ConfigError(f"the cost table has no parameter sizes of {missing}")
        if (width := self.topology.width) > 1 and self._block is None:
            raise no_width("measured costs of this table", width)
        if width not in (self.facts.priced_widths or (width,)):
            widths = ", ".join(map(str, self.blocks))
            raise ConfigError(
                f"context-parallel degree {width} has no price: this cost table has those of {widths}: take one of"
                f" these, or measure (dynapipe profile --widths {width})"
            )

    @property
    def _prices_halves(self) -> bool:
        return {kind for _, kind in self.grids} & self.parameter_bytes.keys() >= {*HALVES}

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def facts(self) -> CostCapabilities:
        """Capabilities of the table. Collectives of replicas are unknown: only layers were measured."""
        dtype = DTYPE_OF_WIDTH[self.value_bytes]
        described = self.provenance.get("model")
        sizes = dict(described) if isinstance(described, Mapping) else {}
        sizes |= {"num_layers": self.num_layers, "num_decoder_layers": self.total_layers - self.num_layers}
        return CostCapabilities(
            has_decoder=self.has_decoder,
            total_layers=self.total_layers,
            activation_format=ActivationFormat(
                self.hidden_size,
                dtype,
                first_decoder_stage=self.layout.first_decoder_stage,
                first_head_stage=self.topology.first_head_stage,
            ),
            prices_halves=self._prices_halves,
            prices_spread=not self.has_decoder,
            prices_pieces=self.pieces is not None,
            slices_head=SLICED_HEAD in self.grids,
            sharded_state_bytes=self.state_parts[1],
            width=self.topology.width,
            priced_widths=(1, *self.blocks) if self.blocks else None,
            measured_sizes=sizes | {"hidden_size": self.hidden_size, "dtype": dtype},
        )

    @property
    def has_decoder(self) -> bool:
        return any(kind == "decoder" for _, kind in self.grids)

    @property
    def total_layers(self) -> int:
        return self.num_layers + (self.num_decoder_layers or self.num_layers) * self.has_decoder

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The recomputation modes that were measured for all kinds of layers on these stages."""
        kinds = ["encoder", *["decoder"] * self.has_decoder, *(HALVES if self.topology.has_half_layers else ())]
        return tuple(r for r in LAYER_RECOMPUTES if all((r, kind) in self.grids for kind in kinds))

    @property
    def kinds(self) -> tuple[Recompute, ...]:
        """Priced recomputation modes: the measured ones, and those with a chunked head if that was measured."""
        return self.recomputes + (with_sliced_head(self.recomputes) if SLICED_HEAD in self.grids else ())

    @property
    def layout(self) -> StageLayout:
        return lay_out(self.num_layers, self.total_layers, self.topology)

    def with_topology(self, topology: Topology | None) -> tuple[CostTable, Topology]:
        """As `CostModel.with_topology`. Raises ConfigError if its `tp` is not the measured one."""
        topology = topology or self.topology
        if topology.tp != self.topology.tp:
            raise ConfigError(
                f"the cost table was measured at tp {self.topology.tp}, not {topology.tp}: measure that too"
            )
        return replace(self, topology=topology), topology

    def at_width(self, width: int) -> CostTable:
        """Return the costs at a context-parallel degree. Raises ConfigError if it or the heads' sizes are unknown."""
        return replace(self, topology=self.topology.at_width(width))

    @property
    def _block(self) -> BlockAttention | None:
        """None if the heads are unknown, or there is a decoder side."""
        return None if self.has_decoder else BlockAttention.from_sizes(self.facts.measured_sizes, self.topology)

    @property
    def _tax(self) -> float:
        """Overhead of a layer's time on slices, beyond exchanges; 0 if degrees were not measured."""
        measured = self.blocks.get(self.topology.width)
        return measured.tax if measured else 0.0

    def with_exact_sums(self, value_bytes: int) -> CostTable:
        whole, divided = self.state_parts
        return replace(self, state_parts=(whole + EXACT_SUM_BYTES / value_bytes, divided))

    def get_floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: CostModel | None = None) -> TablePoints:
        """Return the times at all measured points, for bounds over all plans."""
        return make_points(self, stage_ranks, split, least)

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        m, features = micro_batch, Features.from_micro_batches([micro_batch])
        (shape,) = self._find_equivalent_shapes(features, count_packed_sizes(features)).T
        if "B" in self.working_in:
            m = m.with_recompute(without_stage(m.recompute))
        text = f"a {m.layout} micro-batch of {m.rows} x {m.encoder_len}"
        text += f" (decoder {m.decoder_len})" if self.has_decoder else ""
        if m.layout == "packed" and m.attention != "row":
            text += f", priced as {shape[0]:.1f} x {shape[1]:.1f},"
        if m.recompute not in self.kinds:
            return f"{text} with recompute {m.recompute!r}: the cost table has only {', '.join(self.kinds)}"
        axes = self.grids[m.layer_recompute, "decoder" if self.has_decoder else "encoder"].axes
        for name, value, axis in zip(("rows", "encoder_len", "decoder_len"), shape, axes, strict=False):
            if value > axis[-1]:
                return (
                    f"{text} lies above the cost table, which ends at {name} {axis[-1]:.0f} and refuses to extrapolate:"
                    f" measure a larger grid, or make micro-batches and samples smaller"
                )
        return (
            f"{text} with recompute {m.recompute!r} leans on points that were not measured (they did not fit on the"
            " device), and the cost table refuses to extrapolate: use fewer rows or more recomputation"
        )

    def price(self, features: Features) -> MicroBatchCosts:
        """Return the costs of micro-batches or shapes; those outside the grids are INFEASIBLE."""
        layout, again, sizes = self.layout, split_kinds(features.recompute)[0] == "stage", count_packed_sizes(features)
        shapes, is_packed = self._find_equivalent_shapes(features, sizes), sizes[0] > 0
        ms_and_mb, in_table = self._price_kinds(features, shapes, sizes)
        if (lost := is_packed & ~in_table).any():
            measured = np.unique(np.concatenate([grid.axes[0] for grid in self.grids.values()]))
            below = measured[np.maximum(np.searchsorted(measured, shapes[0], side="right") - 1, 0)]
            factor, shapes[0] = np.where(lost, shapes[0] / below, 1.0), np.where(lost, below, shapes[0])
            ms_and_mb, in_table = self._price_kinds(features, shapes, sizes / factor)
            ms_and_mb *= factor
        if "B" not in self.working_in:  # of stages that are recomputed whole that is what they need most
            in_table &= ~again
        hidden = features.positions[:2] * (self.value_bytes * self.hidden_size)
        bytes_sent = layout.add_messages(hidden, HEAD_MESSAGE_BYTES * features.positions[0]) / self.topology.width
        sent = np.rint(bytes_sent).astype(np.int64)
        if self.links:
            transfer = self.links.transfer_ns(self.topology, sent)
        else:
            apart = np.array([a != b for a, b in itertools.pairwise(self.topology.stage_ranks)], np.float64)[:, None]
            sent_ns = apart * (self.comm_latency_us * 1e3 + bytes_sent * 8 / self.comm_gbps)
            transfer = np.rint(sent_ns).astype(np.int64)
        forward, backward, weight, stored, running = np.rint(ms_and_mb * 1e6).astype(np.int64)
        if any(WEIGHT in grid.columns for grid in self.grids.values()):
            weight = np.minimum(weight, backward)
        else:
            weight = np.rint(self.split_w * backward).astype(np.int64)
        tables = (forward, backward, weight, stored, np.maximum(running - stored, 0), transfer, sent)
        named = {name: np.where(in_table, table, INFEASIBLE) for name, table in zip(TABLES, tables, strict=True)}
        costs = MicroBatchCosts(**named, static_bytes=self.count_static_bytes(), working_in=self.working_in)
        costs = costs.keep_inputs(again & in_table)
        for kind, more in self.packed_bytes.items():
            own = is_packed & in_table & (features.layers_within_stage == kind)
            stored, working = (
                np.ceil(np.where(own, more, 1.0) * b).astype(np.int64)
                for b in (costs.stored_bytes, costs.working_bytes)
            )
            costs = replace(costs, stored_bytes=stored, working_bytes=working)
        if self.pieces is None or features.pieces is None:
            return costs
        attentions = layout.attentions[:, 0]
        costs = self.pieces.add(costs, features, attentions, self.value_bytes, block=self._block, tax=self._tax)
        return costs.refuse(~in_table)

    def _find_equivalent_shapes(self, features: Features, sizes: FloatArray) -> FloatArray:
        """Return rows, encoder and decoder lengths, (3, M), not always whole, of rows with `count_packed_sizes`.

        A packed row of P positions with document attention is the padded shape with the same tokens and the same sum of
        squared lengths, P / L rows of length L = sum(l^2) / P. Matrix products depend on the first and attention on the
        second. L never goes below the shortest measured row, so that many tiny documents cost their tokens; nor, on
        either side of pairs, above the longest row if no document does. Whole-row attention is one padded row.
        """
        shapes = features.shapes.astype(np.float64)
        is_packed, encoder, decoder, *squares, across = sizes
        if not is_packed.any():
            return shapes
        rows, kinds = (encoder + decoder) ** 2 / np.maximum(sum(squares) + 2 * across, 1), features.layers_within_stage
        for recompute, side in itertools.product(dict.fromkeys(kinds.tolist()), KINDS[:2]):
            own = (kinds == recompute) & ((decoder > 0) == (side == "decoder"))
            if own.any() and (grid := self.grids.get((recompute, side))):
                for positions, axis in zip((encoder, decoder), grid.axes[1:], strict=False):
                    rows = np.where(own, np.minimum(rows, positions / axis[0]), rows)
                if side == "decoder":
                    most_e, most_d = (float(axis[-1]) for axis in grid.axes[1:])
                    fits = [
                        all(s.encoder <= most_e and s.decoder <= most_d for s in m.samples)
                        for m in features.micro_batches
                    ]
                    rows = np.where(own & fits, np.maximum(rows, np.maximum(encoder / most_e, decoder / most_d)), rows)
        rows = np.maximum(1.0, rows)
        return np.where(is_packed > 0, np.stack([rows, encoder / rows, decoder / rows]), shapes)

    def _price_kinds(self, features: Features, shapes: FloatArray, sizes: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return `_price_rank` of shapes (3, M), each under its recomputation mode."""
        prices, in_table = np.zeros((5, self.num_stages, shapes.shape[1])), np.zeros(shapes.shape[1], bool)
        for kind in dict.fromkeys(features.recompute.tolist()):
            if (within := without_stage(kind)) in self.kinds:
                own = features.recompute == kind
                of_kind = self._price_rank(within, shapes[:, own], features.positions[0][own], sizes[:, own])
                prices[:, :, own], in_table[own] = of_kind
        return prices, in_table

    def _price_rank(
        self, recompute: Recompute, shapes: FloatArray, tokens: IntArray, sizes: FloatArray
    ) -> tuple[FloatArray, BoolArray]:
        """Return `_price_stages` of one rank of a context-parallel group, for rows of this many tokens (M,)."""
        whole, in_table = self._price_stages(recompute, shapes, sizes)
        if (width := self.topology.width) == 1 or (block := self._block) is None:
            return whole, in_table
        share, _ = self._price_stages(recompute, shapes / [[1], [width], [1]], slice_sizes(sizes, width))
        link = Link(round(self.comm_latency_us * 1e3), self.comm_gbps * 1e9 / 8)
        if self.links:
            link = self.links.find_group_link(self.topology.tp, width)
        layers = self.layout.attentions
        forward = layers * block.exchange_ns(tokens, self.value_bytes, link, self.blocks.get(width)) * 1e-6
        backward = forward * (1 + (recompute_of_layers(recompute) != "none"))
        gathered = 2 * self.value_bytes * block.kept_values * (block.gather_ranks > 1) * 1e-6 * tokens
        copied = layers * self.value_bytes * block.copied_values * 1e-6 * tokens
        whole = whole / width
        stored, running = (np.maximum(whole[i], share[i]) + copied for i in (3, 4))
        own = whole[:3] * (1 + self._tax)
        return np.stack([own[0] + forward, own[1] + backward, own[2], stored, running + gathered]), in_table

    def _price_stages(
        self, recompute: Recompute, shapes: FloatArray, sizes: FloatArray
    ) -> tuple[FloatArray, BoolArray]:
        """Return forward, backward and W in ms, MB stored and MB while the last layer or the head runs: (5, S, M); and
        which shapes the grids know."""
        layer, heads = recompute_of_layers(recompute), self.topology.head_stages
        in_table, prices = np.ones(shapes.shape[1], bool), dict[LayerKind, FloatArray]()
        head_grid = self.grids.get(SLICED_HEAD if slices_head(recompute) else (layer, "postprocess"))
        for kind in LAYER_KINDS if self.topology.has_half_layers else KINDS:
            is_head = kind == "postprocess"
            grid = head_grid if is_head else self.grids.get((layer, kind))
            places = shapes[[0, 2] if is_head and self.has_decoder else slice(len(grid.axes) if grid else 0)]
            prices[kind], measured = price_layer(grid, places)
            in_table &= measured
            if grid and (packed := self.packed_layers.get((layer, kind))):
                prices[kind][3:] += np.maximum(0.0, packed.multiply(sizes) - prices[kind][3:]) * (sizes[0] > 0)
        head, stages = prices["postprocess"], slice(heads.start, None)
        if len(heads) > 1:
            prices["postprocess"] = np.zeros_like(head)
        layout = self.layout
        total = lay_on_stages(prices, layout.counts)
        if len(heads) > 1 and head_grid:
            # A part takes as much of the head's time and memory as it has of the vocabulary. All of the head's input
            # comes on top, and what a message brings with it, which a stage keeps with its own.
            head = head / len(heads)
            kept_bytes = self.value_bytes * self.hidden_size + 2 * HEAD_MESSAGE_BYTES
            total[:3, stages] += head[:3, None]
            total[3, stages] += head[3] + 1e-6 * kept_bytes * shapes[0] * shapes[1]
        if head_grid and HEAD_PEAK in head_grid.columns:
            total[4, stages] = np.maximum(total[4, stages], total[3, stages] + head[4] - head[3])
        if self.once_bytes:
            once = self.once_bytes.get("decoder", 0.0) * (layout.counts["decoder"] > 0)
            once[layout.encoder_end] += self.once_bytes.get("encoder", 0.0)
            total[3:] += once * 1e-6 * shapes[0] * shapes[1]
        return total, in_table

    def count_static_bytes(self) -> IntArray:
        """Return the bytes of weights, gradients and optimizer states, (S,), by `state_parts`. Default: parameter bytes
        x (2 + 6 / dp), of 16-bit weights and gradients and ZeRO stage 1."""
        here, sharded = self.state_parts
        total = count_parameters_by_stage(self.layout, self.parameter_bytes)
        return np.rint(total * (here + sharded / self.topology.dp)).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        def list_by_layer(values: Mapping[tuple[Recompute, LayerKind], Grid | PackedLayer]) -> list[dict[str, Any]]:
            return [{"recompute": key[0], "layer": key[1], **to_json(values[key])} for key in sorted(values)]

        raw = dump_fields(self, skip=("grids", "packed_layers"))
        packed = {"packed_layers": list_by_layer(self.packed_layers)} if self.packed_layers else {}
        grids = {"grids": list_by_layer(self.grids)}
        return {"format": FORMAT, "kind": "table", "lm_head": "last", **raw, **packed, **grids}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostTable:
        """Return the table that `to_json` wrote. Raises DataError for other content and versions."""
        if raw.get("format") != FORMAT:
            raise DataError(
                f"cost table has format {raw.get('format')!r} but this version reads {FORMAT!r}: measure again"
            )
        if raw.get("lm_head", "last") != "last":
            raise DataError(f"cost table has lm_head {raw['lm_head']!r}, but its head is on the last stage: remove it")
        try:
            values = {one.name: raw[one.name] for one in fields(cls) if one.name in raw}
            for name, read in (("grids", Grid.from_json), ("packed_layers", partial(from_json, PackedLayer))):
                listed = map(dict, raw[name] if name == "grids" else raw.get(name, ()))
                values[name] = {(one.pop("recompute"), one.pop("layer")): read(one) for one in listed}
            return from_json(cls, values)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DataError(f"cost table cannot be read: {type(error).__name__} {error}") from error

    def fingerprint(self) -> str:
        """Return a hash of all fields but `provenance`."""
        return fingerprint({key: value for key, value in self.to_json().items() if key != "provenance"})

    @classmethod
    def read_a100(
        cls,
        directory: str | Path,
        model: str,
        *,
        topology: Topology,
        num_layers: int,
        hidden_size: int | None = None,
    ) -> CostTable:
        """Read `model` from the CSV files of DynaPipe's published A100 measurements, at the topology's tensor-parallel
        degree.

        Attention and MLP were not measured separately: they have shares of a layer by their FLOPs (`halve_grids`).
        Peaks were measured in forwards only, so working bytes count in F only, as in DynaPipe's own planner. Raises
        DataError or ConfigError for files that cannot be read, or another degree."""
        hidden_size = hidden_size or find_hidden_size(model)
        grids, parameter_bytes = read_layers(Path(directory), model, topology.tp, hidden_size)
        return cls(
            grids=grids,
            parameter_bytes=parameter_bytes,
            hidden_size=hidden_size,
            num_layers=num_layers,
            topology=topology,
            working_in="F",
            provenance={"device": "A100 40 GB", "source": "DynaPipe (arXiv 2311.10418) layer costs", "model": model},
        )
