"""Costs interpolated from measured per-layer grids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute, recompute_of_layers, without_stage
from dynapipe_ext.batch.topology import DTYPE_OF_WIDTH, ActivationFormat, Topology, refuse_half_layers
from dynapipe_ext.batch.vocabulary_parallel import refuse_spread
from dynapipe_ext.costs.a100 import hidden_size_of, read_layers
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.features import Features
from dynapipe_ext.costs.floor import TablePoints
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid
from dynapipe_ext.costs.layers import (
    COLUMNS,
    HALVES,
    HEAD_MESSAGE_BYTES,
    HEAD_PEAK,
    KINDS,
    SLICED_HEAD,
    WEIGHT,
    LayerKind,
    check_bytes,
    check_grids,
    equivalent_shape,
    first_decoder_stage,
    grids_of,
    kinds_of,
    layers_of_stages,
    once_by_stage,
    parameters_by_stage,
    stage_values,
    values_with_halves,
    values_with_spread_head,
    with_halves,
)
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.measured_blocks import MeasuredBlock
from dynapipe_ext.costs.measured_points import table_points
from dynapipe_ext.costs.model import (
    CostModel,
    IntArray,
    MicroBatchCosts,
    ModelFacts,
    PricesShapes,
    fingerprint,
    no_width,
    topology_from_json,
    topology_to_json,
    within_layers,
)
from dynapipe_ext.costs.packed_rows import (
    PackedLayer,
    added_to_stages,
    packed_from_json,
    packed_sizes,
    packed_to_json,
    sizes_of_slice,
)
from dynapipe_ext.costs.pieces import PieceSurcharges
from dynapipe_ext.costs.states import EXACT_SUM_BYTES, refused_tie
from dynapipe_ext.errors import ConfigError, DataError, check_integer, settle_field_types
from dynapipe_ext.models.architecture import MOST_LAYERS

FORMAT = "dynapipe-costs/1"
# What was not known to tables from the start is left out where it says nothing: these read as they always did.
STATES_PER_PARAMETER_BYTE = (2.0, 6.0)  # 16-bit weights and gradients; fp32 master and Adam moments, sharded over dp
VALUE_BYTES = 2
_Values = tuple[FloatArray, BoolArray]  # those of `stage_values`, and what the grids know


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable(CostModel):
    """Measured costs of one layer of each kind, laid out over the stages of a topology.

    `grids[recompute, kind]` has the columns `COLUMNS` (postprocess, the LM head: the two times at least) over the axes
    rows and encoder_len (the head: rows and output length), for decoder layers rows, encoder_len and decoder_len. A
    decoder-only model has encoder layers only; an encoder-decoder has `num_layers` of each, encoder first, or
    `num_decoder_layers` of the decoder's where that is not 0. With a column "weight_ms" in the grids of layers, W of a
    split backward is as measured, else `split_w` of the backward.

    Grids and parameter bytes of "attention" and "mlp", of an encoder layer, price stages that are cut between the two.
    Parts of a head over pipeline ranks take their share of the measured head (`values_with_spread_head`).

    `packed_layers`: bytes of a layer on packed rows, where they are above those of the padded shape; `packed_bytes`, of
    older tables: stored bytes of packed rows over those of the padded shape, by recomputation (else 1). `once_bytes`:
    for each encoder position, what the stage where the encoder ends stores beside its layers ("encoder"), and what
    every stage with decoder layers does ("decoder"; else 0).
    `state_parts`: bytes of states for each byte of parameters, on every replica and divided over replicas.

    A message takes `comm_latency_us` and its bytes at `comm_gbps` between any two ranks or, given `links`, what the
    link of its boundary takes.

    Between grid points costs are multilinear. Below the grid a shape costs what the smallest point costs. Above it, or
    next to a point that was not measured, `evaluate` raises PlanError and `evaluate_shapes` answers INFEASIBLE.

    Packed rows have no axis of their own: they are priced as `equivalent_shape` says. Where that leans on a point that
    was not measured, it is priced by the next smaller measured number of rows, in proportion. A piece of a long sample
    is a document of such a row and takes what `pieces` adds; without them it has no price.

    At a width of the topology above 1 a rank of a block takes its share of the time of whole rows: rows of its share of
    positions were measured, but attend to less. What attention exchanges comes on top: `blocks` of the widths that were
    measured say how long that takes, and what slices take beyond their share; other widths then have no price. Without
    any it is counted over `links` (without them, `comm_gbps`). Bytes are the larger of a share of the whole row's and
    those of a row of a share of positions.
    """

    grids: Mapping[tuple[Recompute, LayerKind], Grid]
    # Weights on one tensor-parallel rank: of one layer of each kind, and of what else `parameters_by_stage` names.
    parameter_bytes: Mapping[str, float]
    hidden_size: int
    num_layers: int
    topology: Topology
    num_decoder_layers: int = 0
    lm_head: Literal["last", "every"] = "last"
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
    blocks: Mapping[int, MeasuredBlock] = field(default_factory=dict)  # by width, above 1
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle_field_types(self)
        check_grids(self.grids)
        check_bytes(self.parameter_bytes, self.packed_bytes, self.once_bytes)
        check_integer("num_layers", self.num_layers, least=1, most=MOST_LAYERS)
        check_integer("num_decoder_layers", self.num_decoder_layers, least=0, most=MOST_LAYERS)
        if not 0 <= self.split_w <= 1:
            raise ConfigError(f"split_w is {self.split_w} but is a share of the backward: give 0 to 1")
        if self.comm_gbps < 1e-6 or not 0 <= self.comm_latency_us <= 1e9:
            raise ConfigError(
                f"a link of {self.comm_gbps} Gbit/s and {self.comm_latency_us} us cannot be: 1e-6 or more, 0 to 1e9"
            )
        if len(self.state_parts) != 2 or not all(0 <= part < 1000 for part in self.state_parts):
            raise ConfigError(f"state_parts are {self.state_parts} but must be two numbers of 0 to below 1000")
        if self.value_bytes not in (2, 4):
            raise ConfigError(f"value_bytes is {self.value_bytes} but must be 2 or 4")
        layers_per_stage = self.topology.layers_per_stage
        _ = self.topology.with_layers(self.total_layers)  # refuses a cut that does not have as many
        if self.has_decoder or not self._prices_halves:
            who = "a model with a decoder side" if self.has_decoder else "a cost table without grids of both halves"
            refuse_half_layers(layers_per_stage, who)
        if self.has_decoder or self.lm_head == "every":
            refuse_spread(self.topology, "a table with a decoder side, or with a head on every stage,")
        if self.topology.vocabulary == "head" and self.parameter_bytes.get("tied_head"):
            raise refused_tie()
        if self.pieces and set(self.pieces.by_recompute) != set(self.recomputes):
            raise ConfigError(
                f"pieces were measured under recompute {', '.join(self.pieces.by_recompute)} but shapes under"
                f" {', '.join(self.recomputes)}: measure both under the same"
            )
        if missing := sorted({"encoder", "embedding", *(["decoder"] * self.has_decoder)} - self.parameter_bytes.keys()):
            raise ConfigError(f"the cost table has no parameter sizes of {missing}")
        if (width := self.topology.width) > 1 and self._block is None:
            raise no_width("measured costs of this table", width)
        if width not in (self.facts.priced_widths or (width,)):
            widths = ", ".join(map(str, self.blocks))
            raise ConfigError(
                f"blocks of width {width} have no price: this cost table has those of {widths}: take one of these, or"
                f" measure (dynapipe profile --widths {width})"
            )

    @property
    def _prices_halves(self) -> bool:
        return {kind for _, kind in self.grids} & self.parameter_bytes.keys() >= {*HALVES}

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def facts(self) -> ModelFacts:
        """What replicas issue is unknown: layers were measured, not how replicas share them."""
        dtype, first = DTYPE_OF_WIDTH[self.value_bytes], first_decoder_stage(self.stage_layers())
        described = self.provenance.get("model")
        sizes = dict(described) if isinstance(described, Mapping) else {}
        sizes |= {"num_layers": self.num_layers, "num_decoder_layers": self.total_layers - self.num_layers}
        return ModelFacts(
            has_decoder=self.has_decoder,
            total_layers=self.total_layers,
            activation_format=ActivationFormat(
                self.hidden_size, dtype, first_decoder_stage=first, first_head_stage=self.topology.first_head_stage
            ),
            prices_halves=self._prices_halves,
            prices_spread=not self.has_decoder and self.lm_head == "last",
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
    def has_weights(self) -> bool:
        """Whether W was measured apart from the backward."""
        return any(WEIGHT in grid.columns for grid in self.grids.values())

    @property
    def total_layers(self) -> int:
        return self.num_layers + (self.num_decoder_layers or self.num_layers) * self.has_decoder

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The recomputation types that were measured."""
        return tuple(r for r in LAYER_RECOMPUTES if (r, "encoder") in self.grids)

    @property
    def kinds(self) -> tuple[Recompute, ...]:
        """Those, and the same with the head in slices where that was measured."""
        return kinds_of(self.grids)

    def stage_layers(self) -> list[tuple[int, int]]:
        """(encoder, decoder) layers of every stage; layer i of T is on stage i S // T unless layers_per_stage says."""
        topology = self.topology if self.topology.vocabulary == "whole" else self.topology.with_layers(self.num_layers)
        return layers_of_stages(self.num_layers, self.total_layers, self.num_stages, topology.layers_per_stage)

    def stage_halves(self) -> list[tuple[int, int]]:
        """(attentions, MLPs) that are alone on every stage, the other half of their layer being on another one."""
        if not self.topology.has_half_layers:
            return [(0, 0)] * self.num_stages
        return [(len(stage.attention_half), len(stage.mlp_half)) for stage in self.topology.stage_layers]

    def stage_attentions(self) -> list[int]:
        """Encoder layers of every stage whose attention it computes."""
        pairs = zip(self.stage_layers(), self.stage_halves(), strict=True)
        return [num_layers + attention for (num_layers, _), (attention, _) in pairs]

    def over(self, topology: Topology | None) -> tuple[CostTable, Topology]:
        """The same measurements over other stages; the tensor-parallel degree is part of what was measured."""
        topology = topology or self.topology
        if topology.tp != self.topology.tp:
            raise ConfigError(
                f"the cost table was measured at tp {self.topology.tp}, not {topology.tp}: measure that too"
            )
        return replace(self, topology=topology), topology

    def at_width(self, width: int) -> CostTable:
        """Errors: ConfigError for tables that do not say which heads were measured (DynaPipe's, older ones)."""
        return replace(self, topology=self.topology.at_width(width))

    @property
    def _block(self) -> BlockAttention | None:
        """None where the heads are unknown, or there is a decoder side."""
        return None if self.has_decoder else BlockAttention.of_sizes(self.facts.measured_sizes, self.topology)

    @property
    def _tax(self) -> float:
        """Of a layer's time on slices, beyond exchanges; 0 where widths were not measured."""
        measured = self.blocks.get(self.topology.width)
        return measured.tax if measured else 0.0

    def with_exact_sums(self, value_bytes: int) -> CostTable:
        whole, divided = self.state_parts
        return replace(self, state_parts=(whole + EXACT_SUM_BYTES / value_bytes, divided))

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: PricesShapes | None = None) -> TablePoints:
        """Times at all measured points, for bounds over all plans."""
        return table_points(self, stage_ranks, split, least)

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        (own,) = within_layers([micro_batch])
        return self._refusal(own if "B" in self.working_in else micro_batch, np.array(self._equivalent(own)))

    def price(self, features: Features) -> MicroBatchCosts:
        """Price micro-batches; every cost of a shape outside the grid is INFEASIBLE."""
        tokens, recompute = features.positions[:2].astype(np.float64), features.recompute
        if features.padded_shapes is not None:
            return self._price(features.padded_shapes.astype(np.float64), tokens, recompute)[0]
        own = within_layers(features.micro_batches)
        shapes = np.array([self._equivalent(m) for m in own], np.float64).reshape(-1, 3).T
        sizes = packed_sizes(own) if self.packed_layers else None
        costs, in_table = self._price(shapes, tokens, recompute, sizes)
        packed = np.array([m.layout == "packed" and m.attention != "row" for m in own], bool)
        if (lost := packed & ~in_table).any():
            measured = np.unique(np.concatenate([grid.axes[0] for grid in self.grids.values()]))
            below = measured[np.maximum(np.searchsorted(measured, shapes[0], side="right") - 1, 0)]
            factor, shapes[0] = np.where(lost, shapes[0] / below, 1.0), np.where(lost, below, shapes[0])
            costs, in_table = self._price(shapes, tokens, recompute, sizes, factor)
        if self.packed_bytes:
            kinds = (m.layer_recompute if p else None for m, p in zip(own, packed & in_table, strict=True))
            factor = np.array([self.packed_bytes.get(kind, 1.0) if kind else 1.0 for kind in kinds])
            stored, working = (np.ceil(factor * b).astype(np.int64) for b in (costs.stored_bytes, costs.working_bytes))
            costs = replace(costs, stored_bytes=stored, working_bytes=working)
        if self.pieces is None or features.pieces is None:
            return costs
        layers = np.array(self.stage_attentions(), np.int64)
        costs = self.pieces.added(
            costs, features.pieces, recompute, layers, self.value_bytes, self._block, tax=self._tax
        )
        return costs.refusing(~in_table)

    def _equivalent(self, m: MicroBatch) -> tuple[float, float, float]:
        return equivalent_shape(m, self.grids.get((m.layer_recompute, "decoder" if m.decoder_len else "encoder")))

    def _of_rank(
        self, recompute: Recompute, shapes: FloatArray, tokens: FloatArray, sizes: FloatArray | None
    ) -> _Values:
        """`_stages` of one rank of a block, for rows of so many tokens (M,)."""
        whole, in_table = self._stages(recompute, shapes, sizes)
        if (width := self.topology.width) == 1 or (block := self._block) is None:
            return whole, in_table
        of_slice = None if sizes is None else sizes_of_slice(sizes, width)
        share, _ = self._stages(recompute, shapes / [[1], [width], [1]], of_slice)
        if measured := self.blocks.get(width):
            time = block.measured_time(measured, self.value_bytes)
        else:
            time = block.exchange_time(self.topology, self.links or Links.uniform(self._link), self.value_bytes)
        layers = np.array(self.stage_attentions())[:, None]
        forward = layers * time(tokens) * 1e-6
        backward = forward * (1 + (recompute_of_layers(recompute) != "none"))
        gathered = 2 * self.value_bytes * block.kept_values * (block.gather_ranks > 1) * 1e-6 * tokens
        copied = layers * self.value_bytes * block.copied_values * 1e-6 * tokens
        whole = whole / width
        stored, running = (np.maximum(whole[i], share[i]) + copied for i in (3, 4))
        own = whole[:3] * (1 + self._tax)
        return np.stack([own[0] + forward, own[1] + backward, own[2], stored, running + gathered]), in_table

    @property
    def _link(self) -> Link:
        return Link(round(self.comm_latency_us * 1e3), self.comm_gbps * 1e9 / 8)

    def _stages(self, recompute: Recompute, shapes: FloatArray, sizes: FloatArray | None) -> _Values:
        """Forward, backward and W in ms, MB stored and MB while the last layer or the head runs: (5, stages, M)."""
        grids = grids_of(self.grids, recompute)
        on_every, head, heads = self.lm_head == "every", grids[-1], self.topology.head_stages
        if len(heads) > 1:
            grids[-1] = None  # parts of it come below
        layout = self.stage_layers()
        total, in_table = stage_values(grids, layout, shapes, has_decoder=self.has_decoder, head_on_every=on_every)
        if sizes is not None and sizes.any():
            total[3:] += added_to_stages(layout, self._more_of_packed(recompute, shapes, sizes))
        if self.topology.has_half_layers:
            total = values_with_halves(total, grids_of(self.grids, recompute, HALVES), self.stage_halves(), shapes)
        if head and len(heads) > 1:
            total, known = values_with_spread_head(total, head, heads, shapes, self.value_bytes * self.hidden_size)
            in_table &= known
        elif head and HEAD_PEAK in head.columns:
            at, _ = head.at(list(shapes[[0, 2] if self.has_decoder else [0, 1]]))
            while_head = total[3] + at[head.columns.index(HEAD_PEAK)] - at[head.columns.index("stored_mb")]
            stages = slice(None) if on_every else slice(-1, None)
            total[4, stages] = np.maximum(total[4, stages], while_head[stages])
        if self.once_bytes:
            held = with_halves(layout, self.stage_halves())
            total[3:] += once_by_stage(held, self.once_bytes)[:, None] * 1e-6 * shapes[0] * shapes[1]
        return total, in_table

    def _more_of_packed(
        self, recompute: Recompute, shapes: FloatArray, sizes: FloatArray
    ) -> dict[LayerKind, FloatArray]:
        """MB (stored, peak) of a layer of each kind on packed rows above those of the padded shapes: none below."""
        kinds, layer = KINDS[: 1 + self.has_decoder], recompute_of_layers(recompute)
        more: dict[LayerKind, FloatArray] = {kind: np.zeros((2, shapes.shape[1])) for kind in kinds}
        for kind in kinds:
            if (packed := self.packed_layers.get((layer, kind))) and (grid := self.grids.get((layer, kind))):
                values, _ = grid.at(list(shapes[: len(grid.axes)]))
                padded = values[[grid.columns.index(name) for name in COLUMNS[2:]]]
                more[kind] = np.maximum(0.0, packed.of(sizes) - padded) * (sizes[0] > 0)
        return more

    def _price(
        self,
        shapes: FloatArray,
        tokens: FloatArray,
        recompute: npt.NDArray[np.str_] | Recompute,
        sizes: FloatArray | None = None,
        factor: FloatArray | float = 1.0,
    ) -> tuple[MicroBatchCosts, BoolArray]:
        """Costs of shapes (3, M), times a factor, with (encoder, decoder) tokens (2, M), those of packed rows of these
        `sizes`; and which the grid knows."""
        sizes, layout = None if sizes is None else sizes / factor, self.stage_layers()
        if isinstance(recompute, str):
            ms_and_mb, in_table, again = self._of_kind(recompute, shapes, tokens[0], sizes)
        else:
            ms_and_mb = np.zeros((5, len(layout), len(recompute)))
            in_table, again = np.zeros((2, len(recompute)), bool)
            for kind in dict.fromkeys(recompute.tolist()):
                own = recompute == kind
                of_kind = self._of_kind(kind, shapes[:, own], tokens[0][own], None if sizes is None else sizes[:, own])
                ms_and_mb[:, :, own], in_table[own], again[own] = of_kind
        if "B" not in self.working_in:  # of stages that are recomputed whole that is what they need most
            in_table = in_table & ~again
        decoded = np.cumsum([num_decoder for _, num_decoder in layout])[:-1] > 0
        bytes_sent = (tokens[0] + decoded[:, None] * tokens[1]) * (self.value_bytes * self.hidden_size)
        if (sends_sums := np.arange(len(layout) - 1)[:, None] >= self.topology.head_stages.start).any():
            bytes_sent = bytes_sent + sends_sums * HEAD_MESSAGE_BYTES * tokens[0]
        bytes_sent = bytes_sent / self.topology.width
        pairs = itertools.pairwise(self.topology.stage_ranks)
        apart = np.array([a != b for a, b in pairs], np.float64)[:, None]
        sent_ns = apart * (self.comm_latency_us * 1e3 + bytes_sent * 8 / self.comm_gbps)

        def integers(values: FloatArray) -> IntArray:
            return np.rint(values).astype(np.int64)

        ms_and_mb *= factor
        ms_and_mb *= 1e6
        forward, backward, weight, stored, running = np.rint(ms_and_mb, out=ms_and_mb).astype(np.int64)
        weight = np.minimum(weight, backward) if self.has_weights else integers(self.split_w * backward)
        working = np.maximum(running - stored, 0)
        sent = integers(bytes_sent)
        transfer = self.links.transfer_ns(self.topology, sent) if self.links else integers(sent_ns)
        if not in_table.all():
            for table in (forward, backward, weight, stored, working, transfer, sent):
                table[:, ~in_table] = INFEASIBLE
        costs = MicroBatchCosts(
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=weight,
            stored_bytes=stored,
            working_bytes=working,
            transfer_ns=transfer,
            transfer_bytes=sent,
            static_bytes=self.static_bytes(),
            working_in=self.working_in,
        )
        return costs.keeping_inputs(again & in_table), in_table

    def _of_kind(
        self, kind: Recompute, shapes: FloatArray, tokens: FloatArray, sizes: FloatArray | None
    ) -> tuple[FloatArray, BoolArray, BoolArray]:
        """`_of_rank` of shapes under one kind, and which of them are recomputed stage by stage: all or none."""
        within, count = without_stage(kind), shapes.shape[1]
        recomputed = np.full(count, within != kind)
        if within in self.kinds:
            return *self._of_rank(within, shapes, tokens, sizes), recomputed
        return np.zeros((5, len(self.stage_layers()), count)), np.zeros(count, bool), recomputed

    def static_bytes(self) -> IntArray:
        """Weights, gradients and optimizer states of every stage by `state_parts`; unless given, parameter bytes x
        (2 + 6 / dp): 16-bit weights and gradients, ZeRO stage 1.
        """
        here, sharded = self.state_parts
        total = parameters_by_stage(self.stage_layers(), self.parameter_bytes, self.stage_halves(), self.topology)
        return np.rint(total * (here + sharded / self.topology.dp)).astype(np.int64)

    def _refusal(self, m: MicroBatch, shape: FloatArray) -> str:
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

    def to_json(self) -> dict[str, Any]:
        return {
            **{"format": FORMAT, "kind": "table"},
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            **({"num_decoder_layers": self.num_decoder_layers} if self.num_decoder_layers else {}),
            "topology": topology_to_json(self.topology),
            "lm_head": self.lm_head,
            "split_w": self.split_w,
            "comm_gbps": self.comm_gbps,
            "comm_latency_us": self.comm_latency_us,
            **({"links": self.links.to_json()} if self.links else {}),
            "working_in": self.working_in,
            **({"state_parts": list(self.state_parts)} if self.state_parts != STATES_PER_PARAMETER_BYTE else {}),
            **({"value_bytes": self.value_bytes} if self.value_bytes != VALUE_BYTES else {}),
            **({"packed_bytes": dict(self.packed_bytes)} if self.packed_bytes else {}),
            **({"packed_layers": packed_to_json(self.packed_layers)} if self.packed_layers else {}),
            **({"once_bytes": dict(self.once_bytes)} if self.once_bytes else {}),
            **({"pieces": self.pieces.to_json()} if self.pieces else {}),
            **({"blocks": {str(width): one.to_json() for width, one in self.blocks.items()}} if self.blocks else {}),
            "parameter_bytes": dict(self.parameter_bytes),
            "provenance": dict(self.provenance),
            "grids": [
                {"recompute": recompute, "layer": kind, **self.grids[recompute, kind].to_json()}
                for recompute, kind in sorted(self.grids)
            ],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostTable:
        """What `to_json` wrote. Errors: DataError for what is no table, or one of another version."""
        if raw.get("format") != FORMAT:
            raise DataError(
                f"cost table has format {raw.get('format')!r} but this version reads {FORMAT!r}: measure again"
            )
        try:
            return cls(
                **{
                    "grids": {(grid["recompute"], grid["layer"]): Grid.from_json(grid) for grid in raw["grids"]},
                    "parameter_bytes": {name: float(value) for name, value in raw["parameter_bytes"].items()},
                    "hidden_size": raw["hidden_size"],
                    "num_layers": raw["num_layers"],
                    "num_decoder_layers": raw.get("num_decoder_layers", 0),
                    "topology": topology_from_json(raw["topology"]),
                    "lm_head": raw["lm_head"],
                    "split_w": float(raw["split_w"]),
                    "comm_gbps": float(raw["comm_gbps"]),
                    "comm_latency_us": float(raw["comm_latency_us"]),
                    "links": Links.from_json(raw["links"]) if "links" in raw else None,
                    "working_in": raw.get("working_in", "FBI"),
                    "state_parts": tuple(map(float, raw.get("state_parts", STATES_PER_PARAMETER_BYTE))),
                    "packed_bytes": {kind: float(value) for kind, value in raw.get("packed_bytes", {}).items()},
                    "packed_layers": packed_from_json(raw.get("packed_layers", ())),
                    "once_bytes": {kind: float(value) for kind, value in raw.get("once_bytes", {}).items()},
                    "value_bytes": raw.get("value_bytes", VALUE_BYTES),
                    "pieces": PieceSurcharges.from_json(raw["pieces"]) if "pieces" in raw else None,
                    "blocks": {
                        int(width): MeasuredBlock.from_json(one) for width, one in raw.get("blocks", {}).items()
                    },
                    "provenance": dict(raw["provenance"]),
                }
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DataError(f"cost table cannot be read: {type(error).__name__} {error}") from error

    @classmethod
    def read(cls, path: str | Path) -> CostTable:
        """The table of a file written by `write`."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (OSError, json.JSONDecodeError, AttributeError) as error:
            raise DataError(f"cost table {path} cannot be read: {error}") from error

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    def fingerprint(self) -> str:
        """Hash of everything but the provenance."""
        return fingerprint({key: value for key, value in self.to_json().items() if key != "provenance"})

    @classmethod
    def read_a100(
        cls,
        directory: str | Path,
        model: str,
        *,
        topology: Topology,
        num_layers: int,
        lm_head: Literal["last", "every"] = "last",
        split_w: float = 0.45,
        comm_gbps: float = 4800.0,
        comm_latency_us: float = 0.0,
        hidden_size: int | None = None,
    ) -> CostTable:
        """The table of `model` in the CSV form of DynaPipe's published A100 measurements, at the topology's tp.

        Attention and MLP were not measured apart: they have their parts of a layer by their FLOPs (`grids_of_halves`).
        Their peaks are those of forwards: working bytes count in F alone, as in their own planner.
        """
        hidden_size = hidden_size or hidden_size_of(model)
        grids, parameter_bytes = read_layers(Path(directory), model, topology.tp, hidden_size)
        return cls(
            grids=grids,
            parameter_bytes=parameter_bytes,
            hidden_size=hidden_size,
            num_layers=num_layers,
            topology=topology,
            lm_head=lm_head,
            split_w=split_w,
            comm_gbps=comm_gbps,
            comm_latency_us=comm_latency_us,
            working_in="F",
            provenance={"device": "A100 40 GB", "source": "DynaPipe (arXiv 2311.10418) layer costs", "model": model},
        )
