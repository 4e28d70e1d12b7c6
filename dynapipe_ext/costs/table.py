"""Costs interpolated from measured per-layer grids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute
from dynapipe_ext.batch.topology import DTYPE_OF_WIDTH, ActivationFormat, Topology
from dynapipe_ext.costs.a100 import hidden_size_of, read_grids, read_parameter_bytes
from dynapipe_ext.costs.abilities import refuse_carried
from dynapipe_ext.costs.beside_layers import once_by_stage, parameters_by_stage
from dynapipe_ext.costs.equivalent_shape import equivalent_shape
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray, FloatArray, Grid
from dynapipe_ext.costs.layers import (
    KINDS,
    WEIGHT,
    LayerKind,
    first_decoder_stage,
    layers_of_stages,
    stage_values,
    weight_as_backward,
)
from dynapipe_ext.costs.links import Links
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts, within_layers
from dynapipe_ext.costs.piece_surcharge import PieceSurcharges
from dynapipe_ext.costs.table_json import STATES_PER_PARAMETER_BYTE, VALUE_BYTES, table_fields, table_to_json
from dynapipe_ext.costs.tokens import fingerprint
from dynapipe_ext.errors import ConfigError, DataError, PlanError

if TYPE_CHECKING:
    from dynapipe_ext.costs.table_points import TablePoints

HEAD_PEAK = "peak_mb"  # a column that not every measurement has


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """Measured costs of one layer of each kind, laid out over the stages of a topology.

    `grids[recompute, kind]` has the columns `COLUMNS` (postprocess, the LM head: the two times at least) over the axes
    rows and encoder_len (the head: rows and output length), for decoder layers rows, encoder_len and decoder_len. A
    decoder-only model has encoder layers only; an encoder-decoder has `num_layers` of each, encoder first, or
    `num_decoder_layers` of the decoder's where that is not 0. With a column "weight_ms" in the grids of layers, W of a
    split backward is as measured, else `split_w` of the backward.

    `packed_bytes`: stored bytes of packed rows over those of the padded shape, by recomputation (else 1). `once_bytes`:
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
    once_bytes: Mapping[LayerKind, float] = field(default_factory=dict)
    value_bytes: int = VALUE_BYTES  # of what crosses stage boundaries
    pieces: PieceSurcharges | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    replica_collectives: ClassVar[None] = None  # layers were measured, not how replicas share them

    def __post_init__(self) -> None:
        if not 0 <= self.split_w <= 1:
            raise ConfigError(f"split_w is {self.split_w} but is a share of the backward: give 0 to 1")
        if self.comm_gbps <= 0 or self.comm_latency_us < 0:
            raise ConfigError(
                f"a link of {self.comm_gbps} Gbit/s and {self.comm_latency_us} us cannot be: above 0, 0 or more"
            )
        if len(self.state_parts) != 2 or min(self.state_parts) < 0 or self.value_bytes not in (2, 4):
            raise ConfigError(
                f"states {self.state_parts} and values of {self.value_bytes} bytes: give two parts, 2 or 4"
            )
        if self.lm_head not in ("last", "every"):
            raise ConfigError(f"lm_head is {self.lm_head!r}: give 'last' or 'every'")
        if not self.grids:
            raise ConfigError("a cost table needs at least one grid")
        if self.num_layers < 1 or self.num_stages > self.total_layers:
            raise ConfigError(
                f"{self.total_layers} layers cannot fill {self.num_stages} stages: lower pp or add layers"
            )
        given = self.topology.layers_per_stage
        if given and sum(given) != self.total_layers:
            raise ConfigError(
                f"layers_per_stage {given} sums to {sum(given)} but the model has {self.total_layers} layers"
            )
        if self.pieces and set(self.pieces.by_recompute) != set(self.recomputes):
            raise ConfigError(
                f"pieces were measured under recompute {', '.join(self.pieces.by_recompute)} but shapes under"
                f" {', '.join(self.recomputes)}: measure both under the same"
            )
        if missing := sorted({"encoder", "embedding", *(["decoder"] * self.has_decoder)} - self.parameter_bytes.keys()):
            raise ConfigError(f"the cost table has no parameter sizes of {missing}")

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def activation_format(self) -> ActivationFormat:
        first = first_decoder_stage(self.stage_layers())
        return ActivationFormat(self.hidden_size, DTYPE_OF_WIDTH[self.value_bytes], first_decoder_stage=first)

    @property
    def has_decoder(self) -> bool:
        return any(kind == "decoder" for _, kind in self.grids)

    @property
    def prices_pieces(self) -> bool:
        return self.pieces is not None

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
    def measured_sizes(self) -> dict[str, Any]:
        """Of the model that was measured, as far as it is known, by the names of `Architecture`."""
        said = self.provenance.get("model")
        sizes = dict(said) if isinstance(said, Mapping) else {}
        sizes |= {"num_layers": self.num_layers, "num_decoder_layers": self.total_layers - self.num_layers}
        return sizes | {"hidden_size": self.hidden_size, "dtype": DTYPE_OF_WIDTH[self.value_bytes]}

    def stage_layers(self) -> list[tuple[int, int]]:
        """(encoder, decoder) layers of every stage; layer i of T is on stage i S // T unless layers_per_stage says."""
        return layers_of_stages(self.num_layers, self.total_layers, self.num_stages, self.topology.layers_per_stage)

    def over(self, topology: Topology | None) -> tuple[CostTable, Topology]:
        """The same measurements over other stages; the tensor-parallel degree is part of what was measured."""
        topology = topology or self.topology
        if topology.tp != self.topology.tp:
            raise ConfigError(
                f"the cost table was measured at tp {self.topology.tp}, not {topology.tp}: measure that too"
            )
        return replace(self, topology=topology), topology

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool) -> TablePoints:
        """Times at all measured points, for bounds over all plans."""
        from dynapipe_ext.costs.table_points import table_points

        return table_points(self, stage_ranks, split)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        if self.pieces is None:
            refuse_carried(micro_batches, "tables in which none were measured")
        own = within_layers(micro_batches)
        shapes = np.array([self._equivalent(m) for m in own], np.float64).reshape(-1, 3).T
        tokens = np.array([(m.rows * m.encoder_len, m.rows * m.decoder_len) for m in micro_batches], np.float64)
        tokens, recompute = tokens.reshape(-1, 2).T, np.array([m.recompute for m in micro_batches], dtype=np.str_)
        costs, known = self._price(shapes, tokens, recompute)
        packed = np.array([m.layout == "packed" and m.attention != "row" for m in micro_batches], bool)
        if (lost := packed & ~known).any():
            measured = np.unique(np.concatenate([grid.axes[0] for grid in self.grids.values()]))
            below = measured[np.maximum(np.searchsorted(measured, shapes[0], side="right") - 1, 0)]
            factor, shapes[0] = np.where(lost, shapes[0] / below, 1.0), np.where(lost, below, shapes[0])
            costs, known = self._price(shapes, tokens, recompute, factor)
        if not known.all():
            index = int(np.flatnonzero(~known)[0])
            refused = own[index] if "B" in self.working_in else micro_batches[index]
            raise PlanError(self._refusal(refused, shapes[:, index]))
        if self.packed_bytes:
            more = [self.packed_bytes.get(m.recompute, 1.0) if p else 1.0 for m, p in zip(own, packed, strict=True)]
            costs = costs.holding(np.array(more))
        if self.pieces is None or all(m.attention != "carried" for m in micro_batches):
            return costs
        layers = np.array([num_layers for num_layers, _ in self.stage_layers()], np.int64)
        return self.pieces.added(costs, micro_batches, layers, self.value_bytes)

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Costs of padded shapes given as arrays; every cost of a shape outside the grid is INFEASIBLE."""
        shapes = np.array(np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (rows, encoder_len, decoder_len))))
        shapes = shapes.reshape(3, -1)
        return self._price(shapes, shapes[0] * shapes[1:], recompute)[0]

    def _equivalent(self, m: MicroBatch) -> tuple[float, float, float]:
        return equivalent_shape(m, self.grids.get((m.recompute, "decoder" if m.decoder_len else "encoder")))

    def _stages(self, recompute: Recompute, shapes: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Forward, backward and W in ms, MB stored and MB while the last layer or the head runs: (5, stages, M)."""
        grids = [self.grids.get((recompute, kind)) for kind in KINDS]
        on_every = self.lm_head == "every"
        layout, options = self.stage_layers(), {"has_decoder": self.has_decoder, "head_on_every": on_every}
        (forward, backward, stored, running), known = stage_values(grids, layout, shapes, **options)
        weight = np.zeros_like(backward)
        if self.has_weights:
            as_backward = [grid and weight_as_backward(grid) for grid in grids]
            weight = stage_values(as_backward, layout, shapes, **options)[0][1]
        head = grids[-1]
        if head and HEAD_PEAK in head.columns:
            at, _ = head.at(list(shapes[[0, 2] if self.has_decoder else [0, 1]]))
            while_head = stored + at[head.columns.index(HEAD_PEAK)] - at[head.columns.index("stored_mb")]
            stages = slice(None) if on_every else slice(-1, None)
            running[stages] = np.maximum(running[stages], while_head[stages])
        if self.once_bytes:
            once = once_by_stage(layout, self.once_bytes)[:, None] * 1e-6 * shapes[0] * shapes[1]
            stored, running = stored + once, running + once
        return np.stack([forward, backward, weight, stored, running]), known

    def _price(
        self,
        shapes: FloatArray,
        tokens: FloatArray,
        recompute: npt.NDArray[np.str_] | Recompute,
        factor: FloatArray | float = 1.0,
    ) -> tuple[MicroBatchCosts, BoolArray]:
        """Costs of shapes (3, M), times a factor, with (encoder, decoder) tokens (2, M); and which the grid knows."""
        layout = self.stage_layers()
        count = shapes.shape[1]
        again = np.broadcast_to(np.asarray(recompute) == "stage", count)
        if isinstance(recompute, str):
            ms_and_mb, known = self._stages("none" if recompute == "stage" else recompute, shapes)
        else:
            ms_and_mb, known = np.zeros((5, len(layout), count)), np.zeros(count, bool)
            for kind in LAYER_RECOMPUTES:
                if (chosen := (recompute == kind) | again * (kind == "none")).any():
                    ms_and_mb[:, :, chosen], known[chosen] = self._stages(kind, shapes[:, chosen])
        if "B" not in self.working_in:  # of stages that are recomputed whole that is what they need most
            known = known & ~again
        decoded = np.cumsum([num_decoder for _, num_decoder in layout])[:-1] > 0
        bytes_sent = (tokens[0] + decoded[:, None] * tokens[1]) * (self.value_bytes * self.hidden_size)
        pairs = itertools.pairwise(self.topology.stage_ranks)
        apart = np.array([a != b for a, b in pairs], np.float64)[:, None]
        sent_ns = apart * (self.comm_latency_us * 1e3 + bytes_sent * 8 / self.comm_gbps)

        def integers(values: FloatArray) -> IntArray:
            return np.rint(values).astype(np.int64)

        forward, backward, weight, stored, running = integers(ms_and_mb * factor * 1e6)
        weight = np.minimum(weight, backward) if self.has_weights else integers(self.split_w * backward)
        working = np.maximum(running - stored, 0)
        sent = integers(bytes_sent)
        transfer = self.links.transfer_ns(self.topology, sent) if self.links else integers(sent_ns)
        if not known.all():
            for table in (forward, backward, weight, stored, working, transfer, sent):
                table[:, ~known] = INFEASIBLE
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
        return costs.keeping_inputs(again & known), known

    def static_bytes(self) -> IntArray:
        """Weights, gradients and optimizer states of every stage by `state_parts`; unless given, parameter bytes x
        (2 + 6 / dp): 16-bit weights and gradients, ZeRO stage 1.
        """
        here, sharded = self.state_parts
        total = parameters_by_stage(self.stage_layers(), self.parameter_bytes)
        return np.rint(total * (here + sharded / self.topology.dp)).astype(np.int64)

    def _refusal(self, m: MicroBatch, shape: FloatArray) -> str:
        text = f"a {m.layout} micro-batch of {m.rows} x {m.encoder_len}"
        text += f" (decoder {m.decoder_len})" if self.has_decoder else ""
        if m.layout == "packed" and m.attention != "row":
            text += f", priced as {shape[0]:.1f} x {shape[1]:.1f},"
        if m.recompute not in self.recomputes:
            return f"{text} with recompute {m.recompute!r}: the cost table has only {', '.join(self.recomputes)}"
        axes = self.grids[m.recompute, "decoder" if self.has_decoder else "encoder"].axes
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
        return table_to_json(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostTable:
        """What `to_json` wrote. Errors: DataError for what is no table, or one of another version."""
        return cls(**table_fields(raw))

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

        Their peaks are those of forwards: working bytes count in F alone, as in their own planner.
        """
        return cls(
            grids=read_grids(Path(directory), model, topology.tp),
            parameter_bytes=read_parameter_bytes(Path(directory), model, topology.tp),
            hidden_size=hidden_size or hidden_size_of(model),
            num_layers=num_layers,
            topology=topology,
            lm_head=lm_head,
            split_w=split_w,
            comm_gbps=comm_gbps,
            comm_latency_us=comm_latency_us,
            working_in="F",
            provenance={"device": "A100 40 GB", "source": "DynaPipe (arXiv 2311.10418) layer costs", "model": model},
        )
