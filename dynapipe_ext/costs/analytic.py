"""Costs of a Megatron GPT from its description alone: parameters, FLOPs and bytes, counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, carried_start
from dynapipe_ext.batch.topology import (
    DTYPE_OF_WIDTH,
    ActivationFormat,
    Offload,
    ReplicaCollectives,
    StageLayers,
    Topology,
    ZeroStage,
    refuse_half_layers,
    stage_layers_of,
)
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.features import Features, PiecePositions, split_kinds
from dynapipe_ext.costs.floor import GrowingTimes
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray
from dynapipe_ext.costs.layers import HEAD_MESSAGE_BYTES, LayerPart, parts_of_stages
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import (
    UNCOUNTED_TAX,
    CostModel,
    IntArray,
    MicroBatchCosts,
    ModelFacts,
    PricesShapes,
    SlicedHead,
    check_tax,
    growing_times,
    scaled_bytes,
    topology_from_json,
    topology_to_json,
)
from dynapipe_ext.costs.states import (
    ADAM_MOMENTS,
    StateBytes,
    StateRecipe,
    States,
    check_states,
    checked_topology,
    count_states,
)
from dynapipe_ext.errors import ConfigError, check_integer, settle_field_types, short
from dynapipe_ext.models.architecture import Architecture, kinds_of_ranges

_MOST_FACTOR = 1_000_000


def check_rates(values: Any) -> None:
    """Errors: ConfigError for rates by which times do not fit into 64 bits."""
    for name, least in (("flops_per_s", 1e6), ("bandwidth_bytes_per_s", 1.0)):
        if not getattr(values, name) >= least:
            raise ConfigError(f"{name} is {short(getattr(values, name))} but must be at least {least:g}")


def check_bytes_factors(values: Any) -> None:
    """Errors: ConfigError for a factor of stored bytes that cannot be."""
    for name in ("layer_bytes_factor", "head_bytes_factor"):
        if not 0 <= getattr(values, name) <= _MOST_FACTOR:
            raise ConfigError(f"{name} is {short(getattr(values, name))} but must be 0 to {_MOST_FACTOR:,}")


@dataclass(frozen=True, slots=True)
class MeasuredAdapters:
    """Stored over counted bytes of layers and of the head where the adapters of this name train, and nothing else."""

    adapters: str
    layer_bytes_factor: float
    head_bytes_factor: float

    def __post_init__(self) -> None:
        settle_field_types(self)
        check_bytes_factors(self)


@dataclass(frozen=True, slots=True)
class AnalyticCosts(CostModel):
    """Nanoseconds and bytes of micro-batches on every stage of a Megatron GPT.

    Time of an action = `overhead_ns` + layers x `layer_overhead_ns` + FLOPs / `flops_per_s` (the rate the device
    reaches, not its peak; it stands for tensor-parallel communication too). Per token a layer's matrix products take 2
    FLOPs a weight, attention over rows of length L takes 4 q L^2 with heads of q values in all, half of it where the
    kernel skips what the causal mask hides (`flash`); backward is twice forward, plus what is recomputed: the layers
    (full), core attention (selective) or all of the stage. W of a split backward is one forward's worth of matrix
    products, or nothing where layers or stages are recomputed: what that brings back is not kept until W. Tensor
    parallelism divides everything.

    A stage may hold half a layer: its attention, with the norm before it and its residual sum, or its MLP with those.
    Either half takes its own FLOPs, half of `layer_overhead_ns`, and keeps its own activations.

    Stored bytes follow Korthikanti et al. 2022 (sec. 4, table 2) for any width of values: norm inputs, matrix inputs,
    q, k, v, the scores unless `flash`, masks under `dropout`; the last stage adds the final norm, the head's input and
    fp32 logits. `working_bytes` is the larger of one layer's recomputed activations with the gradient of its widest
    value, and the logits once more in the width of values. With `split_backward` stored bytes are at least what I keeps
    until W: inputs and output gradients of matrix products, gathered where the sequence is divided.

    `layer_bytes_factor` and `head_bytes_factor` multiply the stored bytes of layers and of the head: what an
    implementation keeps beyond the count (unfused operations, copies), as measured on the device. Where the adapters
    named `adapters` train, `measured_adapters` of that name have these factors instead: layers whose weights do not
    train keep fewer inputs. A recomputed layer keeps its whole input, however little it keeps else.

    With `head_slice` there are prices for kinds of recomputation whose head is in slices of so many positions
    (`SlicedHead`).

    Experts: `capacity_factor` 0 is dropless; above 0 every expert computes its capacity, ceil(capacity_factor x top_k
    x tokens / num_experts) rows, padded up to it or dropping what is above. Tokens are spread evenly, so `ep` replicas
    that share the experts compute what each alone would; the rate stands for their exchange of tokens. A layer keeps
    the dispatched rows (copied over TP), the inputs of activation function and fc2 (the router's weight multiplies the
    latter, as Megatron does), and fp32 router probabilities.

    Static bytes by `state_bytes`: `state_recipe` for 16-bit weights (not "fp32"), fp32 for 4-byte ones; experts'
    states are divided over the dp / ep replicas that share them. `distributed_optimizer` is another way to say
    `zero_stage` 1. From stage 2 on the largest unreduced unit (a layer, an embedding) adds its gradients to
    `working_bytes`, at stage 3 its gathered weights too. `exact_sums` are deterministic mode's, `num_moments` the
    optimizer's of each parameter; what `offload` leaves on the host is not counted.

    Transfers: `links`, or without them `latency_ns` and `bandwidth_bytes_per_s` on every boundary.

    At a width of the topology above 1 these are the costs of one rank of a block: of its slice of positions in all but
    attention's core, and of its share of that. What attention exchanges is counted over `links` (`BlockAttention`),
    in a forward, in its backward, and where a layer is recomputed in that forward, too. Without links it is `width_tax`
    of the FLOPs' time: ten percent is above what 8 H200 took between 2 and 4 ranks of one node. Keys and values of a
    long sample's pieces lie by heads, with all positions. Where they are gathered, a running layer also holds those of
    the whole row, and their gradients.

    A head over pipeline ranks costs each of its stages the same part of the products and of the logits, and the
    overhead of an action and of half a layer. Each of them keeps the head's input (all but the first get it in a
    message) and four fp32 numbers a position: the sum and the target of the message, and its own.
    """

    architecture: Architecture
    topology: Topology
    flops_per_s: float = 100e12
    overhead_ns: int = 20_000
    layer_overhead_ns: int = 0
    layer_bytes_factor: float = 1.0
    head_bytes_factor: float = 1.0
    bandwidth_bytes_per_s: float = 25e9
    latency_ns: int = 10_000
    activation_bytes_per_value: Literal[2, 4] = 2
    param_bytes: Literal[2, 4] = 2
    sequence_parallel: bool = False
    flash: bool = True
    distributed_optimizer: bool = False
    dropout: bool = False
    split_backward: bool = False
    head_slice: int = 0
    zero_stage: ZeroStage = 0
    state_recipe: StateRecipe = "megatron"
    ep: int = 1
    links: Links | None = None
    capacity_factor: float = 0.0
    exact_sums: bool = False
    offload: Offload = "none"
    num_moments: int = ADAM_MOMENTS
    width_tax: float = UNCOUNTED_TAX
    adapters: str = ""  # empty: all weights train
    measured_adapters: MeasuredAdapters | None = None

    def __post_init__(self) -> None:
        settle_field_types(self)
        checked_topology(self.architecture, self.topology, self.ep)
        _ = self.sliced_head
        check_states(self.state_recipe, self.zero_stage, self.offload)
        if self.state_recipe == "fp32":
            raise ConfigError("state_recipe is 'fp32': give megatron, mixed or deepspeed, and for fp32 param_bytes 4")
        check_rates(self)
        for name in ("overhead_ns", "layer_overhead_ns", "latency_ns"):
            check_integer(name, getattr(self, name), least=0, most=INFEASIBLE)
        check_bytes_factors(self)
        if not 0 <= self.capacity_factor < math.inf or (self.capacity_factor and not self.architecture.num_experts):
            raise ConfigError(
                f"capacity_factor is {self.capacity_factor} with num_experts {self.architecture.num_experts}: it must"
                " be finite, at least 0, and 0 without experts"
            )
        check_integer("num_moments", self.num_moments, least=0, most=8)
        check_tax(self.width_tax)

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def facts(self) -> ModelFacts:
        """Pieces have no price where experts drop what is beyond their capacity, or a window hides earlier pieces."""
        shards = self.topology.tp if self.sequence_parallel else 1
        dtype = DTYPE_OF_WIDTH[self.activation_bytes_per_value]
        return ModelFacts(
            has_decoder=False,
            total_layers=self.architecture.num_layers,
            replica_collectives=ReplicaCollectives.of_zero(self.zero_stage, ep=self.ep),
            activation_format=ActivationFormat(
                self.architecture.hidden_size,
                dtype,
                sequence_shards=shards,
                first_head_stage=self.topology.first_head_stage,
            ),
            prices_halves=True,
            prices_spread=True,
            prices_pieces=not self.capacity_factor and not self.architecture.sliding_window,
            offload=self.offload,
            slices_head=self.head_slice > 0,
            width=self.topology.width,
            measured_adapters=bool(self._measured_adapters),
        )

    @property
    def _measured_adapters(self) -> MeasuredAdapters | None:
        """What was measured of the adapters that train."""
        measured = self.measured_adapters
        return measured if measured and measured.adapters == self.adapters else None

    @property
    def sliced_head(self) -> SlicedHead:
        a, tp = self.architecture, self.topology.tp
        return SlicedHead(
            slice_len=self.head_slice,
            hidden_size=a.hidden_size,
            columns=a.vocab_size // tp // len(self.topology.head_stages),
            value_bytes=self.activation_bytes_per_value,
            divided=self.sequence_parallel,
        )

    @property
    def _layers(self) -> tuple[StageLayers, ...]:
        return stage_layers_of(self.topology, self.architecture.num_layers)

    @property
    def stage_layers(self) -> IntArray:
        """(encoder or decoder-only, decoder) layers of every stage, shape (S, 2). Errors: ConfigError for half ones."""
        counts = self.topology.with_layers(self.architecture.num_layers).layers_per_stage
        return np.array([(count, 0) for count in refuse_half_layers(counts, "an estimate")], np.int64)

    def _attentions(self) -> IntArray:
        """Layers of every stage whose attention it computes, shape (S, 1)."""
        return np.array([len(stage.attention) for stage in self._layers], np.int64)[:, None]

    def over(self, topology: Topology | None) -> tuple[AnalyticCosts, Topology]:
        """The same model, rates and factors over another topology, layers filled in."""
        if topology is None:
            return self, self.topology
        topology = topology.with_layers(self.architecture.num_layers)
        return replace(self, topology=topology), topology

    def at_width(self, width: int) -> AnalyticCosts:
        return replace(self, topology=self.topology.at_width(width))

    def recounted(self, change: Callable[[AnalyticCosts], AnalyticCosts]) -> AnalyticCosts:
        return change(self)

    def with_exact_sums(self, value_bytes: int) -> AnalyticCosts:
        return replace(self, exact_sums=True)

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: PricesShapes | None = None) -> GrowingTimes:
        """For bounds over all plans."""
        return growing_times(least or self, split=split, rounds_up=self.capacity_factor > 0)

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        m, a = micro_batch, self.architecture
        if m.decoder_len:
            return (
                f"a micro-batch has decoder length {m.decoder_len}, but the analytic model prices decoder-only models"
                " (their length is encoder): measure a cost table for encoder-decoder models"
            )
        if a.position == "learned" and (longest := _longest(m)) > a.max_seq_len:
            return (
                f"a {m.layout} micro-batch has rows of {longest} positions but the model has {a.max_seq_len} learned"
                " position embeddings: raise max_seq_len or truncate samples"
            )
        return ""

    def price(self, features: Features) -> MicroBatchCosts:
        costs = self._price(features.tokens, features.squares, features.recompute)
        if features.pieces is not None:
            costs = self._with_pieces(costs, features.pieces, split_kinds(features.recompute)[0])
        return costs.refusing(self._refused(features))

    def _refused(self, features: Features) -> BoolArray:
        """Which micro-batches have a decoder side, or more positions than the model has embeddings of."""
        refused: BoolArray = features.positions[1] > 0
        if self.architecture.position != "learned":
            return refused
        if features.padded_shapes is not None:
            longest = features.padded_shapes[1]
        else:
            longest = np.fromiter(map(_longest, features.micro_batches), np.int64)
        refused |= longest > self.architecture.max_seq_len
        return refused

    def _with_pieces(
        self, costs: MicroBatchCosts, positions: PiecePositions, recompute: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        """With what the pieces of a sample, all among these micro-batches, keep for one another in every layer.

        Its keys and values lie in a buffer from the first piece's F to its B, which is the last, and so do the sums in
        fp32 of the gradients that pieces give to the positions before them. A layer then keeps no others, and has
        gradients of all positions so far while it runs.
        """
        a, values, layers = self.architecture, self.activation_bytes_per_value, self._attentions()
        a_position = 2 * a.kv_size_on(self.topology.tp)  # values a layer
        kept_values = a_position if self.topology.width == 1 else self._block.kept_values
        own = positions.own // self.topology.width
        copied = 0 if self.topology.width == 1 else np.floor(self._block.copied_values * positions.own).astype(np.int64)
        keeps_own = (recompute == "none") | (recompute == "selective")
        in_buffers = values * (a_position * own + copied)
        stored = kept_values * positions.kept_bytes(values) - keeps_own * in_buffers
        again = (recompute == "stage") * in_buffers
        gradients = kept_values * values * positions.joined
        return replace(
            costs,
            stored_bytes=costs.stored_bytes + layers * stored,
            working_bytes=costs.working_bytes + (layers > 0) * gradients - layers * again,
        )

    @property
    def _block(self) -> BlockAttention:
        return BlockAttention.of(self.architecture, self.topology)

    def _with_exchanges(
        self, costs: MicroBatchCosts, tokens: IntArray, recompute: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        """With what attention exchanges within a block, and holds for that, of rows of so many positions."""
        block, layers, values = self._block, self._attentions(), self.activation_bytes_per_value
        copied = np.ceil(values * block.copied_values * tokens).astype(np.int64)
        keeps = (recompute == "none") | (recompute == "selective")
        gathered = (2 * values * block.kept_values if block.gather_ranks > 1 else 0) * tokens
        forward_ns = backward_ns = np.zeros_like(costs.forward_ns)
        if self.links is not None:
            time = block.exchange_time(self.topology, self.links, values)
            forward_ns = np.rint(layers * time(tokens)).astype(np.int64)
            again = (recompute == "full") | (recompute == "selective")  # of a stage: see keeping_inputs
            backward_ns = forward_ns * (1 + again)
        return replace(
            costs,
            forward_ns=costs.forward_ns + forward_ns,
            backward_ns=costs.backward_ns + backward_ns,
            stored_bytes=costs.stored_bytes + layers * (keeps | (recompute == "stage")) * copied,
            working_bytes=costs.working_bytes + (layers > 0) * (~keeps * copied + gathered),
        )

    def head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Stored bytes of the final norm, the head and its logits on every stage, shape (S, M)."""
        layers = (self._measured_adapters or self).layer_bytes_factor
        without = replace(self, layer_bytes_factor=layers, head_bytes_factor=0.0, measured_adapters=None)
        head: IntArray = self.evaluate(micro_batches).stored_bytes - without.evaluate(micro_batches).stored_bytes
        return head

    def _price(self, tokens: IntArray, squares: IntArray, recompute: npt.NDArray[np.str_]) -> MicroBatchCosts:
        a, tp = self.architecture, self.topology.tp
        recompute, is_sliced = split_kinds(recompute)
        full, selective = recompute == "full", recompute == "selective"
        width, whole_tokens, whole_squares = self.topology.width, tokens, squares
        tokens, squares = -(-tokens // width), -(-squares // width)  # of one rank
        is_sliced = self.sliced_head.of(is_sliced, tokens)
        stage_layers, attentions = self._layers, self._attentions()
        heads, values = self.topology.head_stages, self.activation_bytes_per_value
        has_head = np.arange(self.num_stages)[:, None] >= heads.start
        attention_flops = (1 if self.flash else 2) * (a.query_size + a.attended_size) * whole_squares // tp
        matmul = head = has_head * (2 * a.vocab_size * a.hidden_size // tp // len(heads) * whole_tokens)
        again = attentions * np.where(full | selective, attention_flops, 0) + is_sliced * head
        stored, working = np.zeros((2, self.num_stages, len(tokens)), np.int64)
        for part, layers in parts_of_stages(stage_layers):
            for kind, counts in kinds_of_ranges(a, layers):
                count, routed = np.array(counts, np.int64)[:, None], self._routed(kind, tokens)
                all_routed = width * routed if self.capacity_factor else self._routed(kind, whole_tokens)
                flops = self._layer_flops(kind, whole_tokens, all_routed, part)
                matmul = matmul + count * flops
                again = again + count * np.where(full, flops, 0)
                layer = whole = self._layer_bytes(kind, tokens, squares, "none", part)
                if full.any():
                    layer = np.where(full, self._layer_bytes(kind, tokens, squares, "full", part), layer)
                if selective.any():
                    layer = np.where(selective, self._layer_bytes(kind, tokens, squares, "selective", part), layer)
                stored = stored + count * layer
                running = whole - layer + values * self._widest(kind, tokens, routed, part)
                working = np.maximum(working, np.where(count > 0, running, 0))
        forward = matmul + attentions * attention_flops
        head_bytes, head_working = self._head_bytes(tokens, is_sliced)
        # A stage sends the residual stream, its rank's share of it under sequence parallelism.
        sent = self._split(values * a.hidden_size * tokens) + (has_head[:-1] * HEAD_MESSAGE_BYTES) * tokens
        links = self.links or Links.uniform(Link(self.latency_ns, self.bandwidth_bytes_per_s))
        halves = attentions + np.array([len(stage.mlp) for stage in stage_layers], np.int64)[:, None]
        halves = halves + (has_head if len(heads) > 1 else 0)
        overhead_ns = self.overhead_ns + halves * self.layer_overhead_ns // 2
        costs = MicroBatchCosts(
            forward_ns=overhead_ns + self._ns(forward, taxed=True),
            backward_ns=overhead_ns + self._ns(2 * forward + again, taxed=True),
            weight_ns=self._ns(np.where(full, 0, matmul - is_sliced * head)),
            stored_bytes=self._as_measured(stored, has_head * head_bytes, full),
            working_bytes=np.maximum(working, has_head * head_working) + self._states.buffers[:, None],
            transfer_ns=links.transfer_ns(self.topology, sent),
            transfer_bytes=sent,
            static_bytes=self.static_bytes(),
        )
        costs = costs if width == 1 else self._with_exchanges(costs, whole_tokens, recompute)
        return costs.keeping_inputs(recompute == "stage")

    def _as_measured(self, layer_bytes: IntArray, head_bytes: IntArray, is_full: npt.NDArray[np.bool_]) -> IntArray:
        """What is stored, of counted bytes."""
        factors = self._measured_adapters or self
        of_layers = scaled_bytes(layer_bytes, factors.layer_bytes_factor)
        of_layers = np.where(is_full, np.maximum(layer_bytes, of_layers), of_layers)
        of_head = scaled_bytes(head_bytes, factors.head_bytes_factor)
        return np.asarray(of_layers + of_head)

    def _head_bytes(self, tokens: IntArray, is_sliced: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """What the final norm and the head of every stage keep of a rank's tokens, and need more while they run."""
        heads, values, hidden_size = (
            self.topology.head_stages,
            self.activation_bytes_per_value,
            self.architecture.hidden_size,
        )
        logits = tokens * self.sliced_head.columns
        logits_bytes = np.where(is_sliced, self.sliced_head.kept_bytes(tokens), 4 * logits)
        num_inputs = 1 + (np.arange(self.num_stages)[:, None] == heads.start)  # the norm's and the head's
        kept_bytes: IntArray = num_inputs * self._split(values * hidden_size * tokens) + logits_bytes
        if len(heads) > 1:
            kept_bytes = kept_bytes + 2 * HEAD_MESSAGE_BYTES * tokens
        if self.split_backward:
            put_off = values * (hidden_size * tokens + logits)
            kept_bytes = np.where(is_sliced, kept_bytes, np.maximum(kept_bytes, put_off))
        return kept_bytes, np.where(is_sliced, self.sliced_head.working_bytes(tokens), values * logits)

    def _layer_flops(self, kind: Architecture, tokens: IntArray, routed: IntArray, part: LayerPart) -> IntArray:
        """Of the matrix products of one layer, or of a half of it."""
        tp, gates = self.topology.tp, kind.num_experts + int(kind.shared_expert_gate)
        attention = 2 * (kind.attention_parameters // tp * tokens)
        mlp = 2 * (kind.mlp_parameters // tp * routed) + 2 * kind.shared_parameters // tp * tokens
        mlp = mlp + self._split(2 * kind.hidden_size * gates * tokens)  # the router
        return (part != "mlp") * attention + (part != "attention") * mlp

    def _widest(self, kind: Architecture, tokens: IntArray, routed: IntArray, part: LayerPart) -> IntArray:
        """Values of the widest activation of one layer, or of a half of it."""
        tp, h = self.topology.tp, kind.hidden_size
        if part == "attention":
            return max((kind.query_size + 2 * kind.kv_size) // tp, h) * tokens
        return max(kind.fc1_size // tp, h) * routed

    def _routed(self, a: Architecture, tokens: IntArray) -> IntArray:
        """Rows that the MLPs of a layer compute: each token once, or as often as experts take it."""
        if not a.num_experts:
            return tokens
        rows = a.top_k * tokens
        if not self.capacity_factor:
            return rows
        return a.num_experts * np.ceil(self.capacity_factor * rows / a.num_experts).astype(np.int64)

    def _ns(self, flops: IntArray, *, taxed: bool = False) -> IntArray:
        """Of FLOPs that the ranks of a block divide; `taxed`, with what they exchange where that is not counted."""
        flop_ns, width = 1e9 / self.flops_per_s, self.topology.width
        if width > 1:
            flop_ns *= (1 + self.width_tax * (taxed and self.links is None)) / width
        time_ns: IntArray = np.rint(flops * flop_ns).astype(np.int64)
        return time_ns

    def _split(self, num_bytes: IntArray) -> IntArray:
        """Bytes that sequence parallelism divides over tensor-parallel ranks and plain tensor parallelism copies."""
        if not self.sequence_parallel:
            return num_bytes
        share: IntArray = -(-num_bytes // self.topology.tp)
        return share

    def _layer_bytes(
        self, a: Architecture, tokens: IntArray, squares: IntArray, recompute: Recompute, part: LayerPart
    ) -> IntArray:
        """Activations that one layer, or a half of it, keeps for its backward; if recomputed, either half its input."""
        tp, values = self.topology.tp, self.activation_bytes_per_value
        h, of_attention, of_mlp = a.hidden_size, part != "mlp", part != "attention"
        if recompute == "full":
            return self._split(values * h * tokens)
        inputs = {"pre": 2, "post": 2, "both": 3}[a.norm_placement]  # of either half: norms, qkv or fc1
        copied = (of_attention + of_mlp) * (inputs * values * h + (h if self.dropout else 0))  # masks of one byte
        if a.shared_expert_gate and of_mlp:  # its output and the gated one's factor
            copied += values * (h + 1)
        if a.latent and of_attention:
            copied += values * a.latent.kept_values
        keys = a.kv_size_on(tp)
        # Of ranks that share a key head, values are a part of all rows of qkv, which each of them has gathered.
        with_values = a.value_size // tp if a.num_query_groups % tp == 0 else a.query_size + 2 * a.kv_size
        attention = values * ((a.query_size + a.attended_size) // tp + keys + with_values) * tokens
        if a.qk_norm:  # the inputs of these norms
            attention = attention + values * (a.query_size // tp + keys) * tokens
        attention, routed = of_attention * attention, of_mlp * self._routed(a, tokens)
        mlp = values * (a.fc1_size + a.ffn_hidden_size) * routed // tp  # activation function's and fc2's inputs
        mlp = mlp + of_mlp * (values * 3 * a.shared_ffn_hidden_size * tokens // tp)
        kept_bytes = self._split(copied * tokens) + attention + mlp
        if a.num_experts and of_mlp:
            kept_bytes = kept_bytes + values * h * routed + self._split(4 * a.num_experts * tokens)
        if self.split_backward:
            put_off = 2 * values * h * (of_attention * tokens + routed)
            kept_bytes = np.maximum(kept_bytes, put_off + attention + mlp)
        if recompute == "selective" or not of_attention:
            return kept_bytes
        if self.flash:  # the log-sum-exp of every head and position, fp32
            return kept_bytes + 4 * a.num_heads // tp * tokens
        scores = 2 * values + 1 if self.dropout else values  # softmax, and with dropout its mask and its output
        return kept_bytes + scores * a.num_heads // tp * squares

    @property
    def _recipe(self) -> StateRecipe:
        return "fp32" if self.param_bytes == 4 else self.state_recipe

    @property
    def _zero_stage(self) -> int:
        return max(self.zero_stage, int(self.distributed_optimizer))

    @property
    def _states(self) -> States:
        return count_states(
            self.architecture,
            self.topology,
            self._recipe,
            zero_stage=self._zero_stage,
            offload=self.offload,
            ep=self.ep,
            exact_sums=self.exact_sums,
            num_moments=self.num_moments,
        )

    def static_parts(self) -> StateBytes:
        """Return weights, gradients and optimizer states of one rank of every stage."""
        return self._states.device

    def static_bytes(self) -> IntArray:
        """Return the sum of `static_parts`."""
        return self._states.device.total

    def to_json(self) -> dict[str, Any]:
        described = {"architecture": self.architecture.to_json(), "topology": topology_to_json(self.topology)}
        usual = {"exact_sums": False, "offload": "none", "head_slice": 0, "num_moments": ADAM_MOMENTS}
        usual |= {"width_tax": UNCOUNTED_TAX, "adapters": "", "measured_adapters": None}
        own = dict(item for item in asdict(self).items() if item not in usual.items())
        return {"kind": "analytic", **own, **described}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AnalyticCosts:
        fields = {key: value for key, value in raw.items() if key != "kind"}
        try:
            links, adapters = fields.pop("links", None), fields.pop("measured_adapters", None)
            if "shape" in fields:  # written before models had one description: sizes, and the experts' capacity
                sizes = dict(fields.pop("shape"))
                fields["capacity_factor"] = sizes.pop("capacity_factor", 0.0)
                architecture = Architecture.gpt(**sizes)
            else:
                architecture = Architecture.from_json(fields.pop("architecture"))
            return cls(
                architecture,
                topology_from_json(fields.pop("topology")),
                links=None if links is None else Links.from_json(links),
                measured_adapters=None if adapters is None else MeasuredAdapters(**adapters),
                **fields,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"analytic costs cannot be read: {type(error).__name__} {error}") from error


def _longest(m: MicroBatch) -> int:
    """Return the positions that the longest row, or document of a packed row, needs embeddings for."""
    whole = m.layout == "padded" or m.attention == "row"
    return m.encoder_len if whole else carried_start(m) + max(m.documents)
