"""Costs of a Megatron GPT or T5, counted from its architecture: parameters, FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import (
    DTYPE_OF_WIDTH,
    ActivationFormat,
    Offload,
    ReplicaCollectives,
    Topology,
    ZeroStage,
)
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.codec import dump_fields, from_json
from dynapipe_ext.costs.features import Features, Kinds, PiecePositions, split_kinds
from dynapipe_ext.costs.floor import GrowingTimes
from dynapipe_ext.costs.grid import INFEASIBLE, BoolArray
from dynapipe_ext.costs.layers import HEAD_MESSAGE_BYTES, CountedLayers, StageLayout, lay_out, list_layers
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import (
    UNCOUNTED_TAX,
    CostCapabilities,
    CostModel,
    IntArray,
    MicroBatchCosts,
    check_numbers,
    make_growing_times,
    scale_bytes,
)
from dynapipe_ext.costs.states import ADAM_MOMENTS, StateRecipe, States, check_states, check_topology, count_states
from dynapipe_ext.errors import ConfigError, PlanError, settle_field_types
from dynapipe_ext.models.architecture import Architecture

_FACTORS, _TIMES = (0, 1_000_000), (0, INFEASIBLE)
_NOT_OF_PAIRS = ("flash", "zero_stage", "state_recipe", "ep", "links", "capacity_factor")


@dataclass(frozen=True, slots=True)
class MeasuredAdapters:
    """Measured / counted stored bytes, of layers (`layer_bytes_factor`) and of the head (`head_bytes_factor`), if only
    the adapters of this name train."""

    adapters: str
    layer_bytes_factor: float
    head_bytes_factor: float

    def __post_init__(self) -> None:
        settle_field_types(self)
        check_numbers(self, layer_bytes_factor=_FACTORS, head_bytes_factor=_FACTORS)


@dataclass(frozen=True, slots=True)
class AnalyticCosts(CostModel):
    """Nanoseconds and bytes of micro-batches on every stage of a Megatron GPT or T5.

    Time of an action = `overhead_ns` + layers x `layer_overhead_ns` + FLOPs / `flops_per_s` (the rate the device
    reaches, not its peak; it includes tensor-parallel communication). Per token a layer's matrix products take 2 FLOPs
    per weight. Attention over rows of length L takes 4 q L^2, where q is the sum of all head sizes, or half of it if
    the kernel skips masked work (`flash`). Backward is twice forward, plus what is recomputed: layers (full), core
    attention (selective) or the entire stage. W of a split backward takes the time of a forward's matrix products. If
    layers or stages are recomputed it takes none, as recomputed activations are not kept until W. Tensor parallelism
    divides everything.

    A stage may hold half a layer: its attention, with the norm before it and its residual sum, or its MLP with those.
    Either half takes its own FLOPs, half of `layer_overhead_ns`, and stores its own activations.

    Stored bytes follow Korthikanti et al. 2022 (sec. 4, table 2) for values of any size: norm inputs, matrix inputs, q,
    k, v, the scores unless `flash`, masks under `dropout`. The last stage adds the final norm, the head's input and
    fp32 logits. `working_bytes` is the larger of one layer's recomputed activations with the gradient of its widest
    value, and the logits once more as values. With `split_backward` stored bytes are at least what I keeps until W:
    inputs and output gradients of matrix products, gathered if sequence parallelism divides them.

    `layer_bytes_factor` and `head_bytes_factor` multiply the stored bytes of layers and of the head: what an
    implementation stores beyond the count (unfused operations, copies), as measured on the device. If the adapters
    named `adapters` train, factors of `measured_adapters` of that name replace these: layers whose weights do not train
    store fewer inputs. A recomputed layer stores its full input in any case.

    With `head_slice` there are prices for recomputation modes with a chunked head, in slices of this many positions
    (`count_chunked_head_bytes`). B computes the product again, slice by slice, and all weight gradients at once, which
    leaves W none. Two fp32 numbers per position are stored in place of logits.

    Experts: `capacity_factor` 0 is dropless. Above 0 each expert computes ceil(capacity_factor x top_k x tokens /
    num_experts) rows: it pads fewer and drops more. Tokens are spread evenly, so each of `ep` replicas that share the
    experts computes as many rows as by itself; `flops_per_s` includes their exchange of tokens. A layer stores the
    dispatched rows (copied over TP), the inputs of activation function and fc2 (the router's weight multiplies the
    latter, as in Megatron), and fp32 router probabilities.

    Static bytes by `state_bytes`: `state_recipe` for 16-bit weights (not "fp32"), fp32 for 4-byte ones; experts' states
    are divided over the dp / ep replicas that share them. `distributed_optimizer` means `zero_stage` 1. From stage 2 on
    the largest unreduced unit (a layer, an embedding) adds its gradients to `working_bytes`, at stage 3 its gathered
    weights too. `exact_sums`: gradient sums of deterministic mode; `num_moments`: of each parameter in the optimizer.
    What `offload` leaves on the host is not counted.

    Transfers: `links`, or without them `latency_ns` and `bandwidth_bytes_per_s` on every stage boundary.

    At a context-parallel degree above 1 these are the costs of one rank of a group: of its position shard, and of its
    share of core attention. Exchanges in attention are counted over `links` (`BlockAttention`): in a forward, in its
    backward, and in recomputation. Without links they take `width_tax` of the FLOPs' time (0.1: above what 8 H200 took
    between 2 and 4 ranks of one node). Keys and values of a long sample's pieces are divided by heads, with all
    positions. If they are gathered, a running layer also holds those of the full row, and their gradients.

    With vocabulary parallelism each of the head's stages has an equal part of its products and logits, and the overhead
    of an action and of half a layer. It stores the head's input (all but the first get it in a message) and four fp32
    numbers per position: the sum and the target of the message, and its own.

    An encoder-decoder has encoder layers first, then decoder ones, which also attend to the encoder's output: queries
    and output come from decoder tokens, keys and values from encoder tokens. Relative position biases rule out kernels
    that skip or store less, and masks, also those of scores, are as wide as values. Decoder stages hold the encoder's
    output once; messages carry the encoder's hidden states, after the first decoder layer both sides'. With
    `split_backward` under sequence parallelism a layer keeps what is gathered for its matrix products until W.
    Exchanges in context-parallel groups always take `width_tax`. Pieces, half layers and vocabulary parallelism have no
    price."""

    LATER_FIELDS: ClassVar = (  # older files do not have them (`codec.py`)
        "exact_sums", "offload", "head_slice", "num_moments", "width_tax", "adapters", "measured_adapters",
    )  # fmt: skip
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
        check_topology(self.architecture, self.topology, self.ep)
        allowed, width = self.facts.priced_widths, self.topology.width
        if allowed and width not in allowed:
            raise ConfigError(
                f"context-parallel degree {width} does not divide the {self.architecture.num_heads // self.topology.tp}"
                " heads of a tensor parallel rank, and keys of two sides are not gathered: take one of"
                f" {', '.join(map(str, allowed))}"
            )
        check_states(self.state_recipe, self.zero_stage, self.offload)
        if self.state_recipe == "fp32":
            raise ConfigError("state_recipe is 'fp32': give megatron, mixed or deepspeed, and for fp32 param_bytes 4")
        # So that times fit into 64 bits.
        check_numbers(self, flops_per_s=(1e6, math.inf), bandwidth_bytes_per_s=(1.0, math.inf), width_tax=(0, 100))
        check_numbers(self, overhead_ns=_TIMES, layer_overhead_ns=_TIMES, latency_ns=_TIMES, num_moments=(0, 8))
        check_numbers(self, layer_bytes_factor=_FACTORS, head_bytes_factor=_FACTORS, head_slice=_TIMES)
        if not 0 <= self.capacity_factor < math.inf or (self.capacity_factor and not self.architecture.num_experts):
            raise ConfigError(
                f"capacity_factor is {self.capacity_factor} with num_experts {self.architecture.num_experts}: it must"
                " be finite, at least 0, and 0 without experts"
            )

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def has_decoder(self) -> bool:
        return self.architecture.num_decoder_layers > 0

    @property
    def facts(self) -> CostCapabilities:
        """Capabilities of these costs. Pieces have no price for an encoder-decoder, for experts with a capacity, and
        for windows, which hide earlier pieces."""
        a, topology, has_decoder = self.architecture, self.topology, self.has_decoder
        heads = max(1, a.num_heads // topology.tp)  # keys of an encoder-decoder are not gathered, only divided by heads
        widths = tuple(1 << power for power in range((heads & -heads).bit_length())) if has_decoder else None
        form = ActivationFormat(
            a.hidden_size,
            DTYPE_OF_WIDTH[self.activation_bytes_per_value],
            sequence_shards=topology.tp if self.sequence_parallel else 1,
            first_decoder_stage=self.layout.first_decoder_stage,
            first_head_stage=topology.first_head_stage,
        )
        return CostCapabilities(
            has_decoder=has_decoder,
            total_layers=a.total_layers,
            replica_collectives=ReplicaCollectives.of_zero(self.zero_stage, ep=self.ep),
            activation_format=form,
            prices_halves=not has_decoder,
            prices_spread=not has_decoder,
            prices_pieces=not (has_decoder or self.capacity_factor or a.sliding_window),
            offload=self.offload,
            slices_head=self.head_slice > 0,
            width=topology.width,
            priced_widths=widths,
            measured_adapters=bool(self._measured_adapters),
        )

    @property
    def _measured_adapters(self) -> MeasuredAdapters | None:
        """The measured factors, if they are of the adapters that train."""
        measured = self.measured_adapters
        return measured if measured and measured.adapters == self.adapters else None

    @property
    def layout(self) -> StageLayout:
        return lay_out(self.architecture.num_layers, self.architecture.total_layers, self.topology)

    def with_topology(self, topology: Topology | None) -> tuple[AnalyticCosts, Topology]:
        """Return the same model, rates and factors over another topology, and this topology with layers on its
        stages."""
        if topology is None:
            return self, self.topology
        topology = topology.with_layers(self.architecture.total_layers)
        return replace(self, topology=topology), topology

    def at_width(self, width: int) -> AnalyticCosts:
        return replace(self, topology=self.topology.at_width(width))

    def change_analytic(self, change: Callable[[AnalyticCosts], AnalyticCosts]) -> AnalyticCosts:
        return change(self)

    def with_exact_sums(self, value_bytes: int) -> AnalyticCosts:
        return replace(self, exact_sums=True)

    def get_floor(
        self, stage_ranks: tuple[int, ...], *, split: bool, least: CostModel | None = None
    ) -> GrowingTimes | None:
        """Return lower bounds; None for an encoder-decoder, as cross attention does not grow by tokens and squares."""
        if self.has_decoder:
            return None
        return make_growing_times(least or self, split=split, rounds_up=self.capacity_factor > 0)

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        m, a = micro_batch, self.architecture
        if m.decoder_len and not self.has_decoder:
            return (
                f"a micro-batch has decoder length {m.decoder_len}, but these costs are of a decoder-only model: give"
                " encoder lengths alone"
            )
        if a.position == "learned" and (longest := _find_longest(m)) > a.max_seq_len:
            return (
                f"a {m.layout} micro-batch has rows of {longest} positions but the model has {a.max_seq_len} learned"
                " position embeddings: raise max_seq_len or truncate samples"
            )
        return ""

    def _find_refused(self, features: Features) -> BoolArray:
        """Find micro-batches with a decoder side, or with more positions than the model has embeddings of; for an
        encoder-decoder, shapes without a decoder side."""
        decoder, is_shape = features.positions[1], features.padded_shapes is not None
        if self.has_decoder:
            return np.asarray((decoder == 0) & is_shape)
        if self.architecture.position != "learned":
            return np.asarray(decoder > 0)
        longest = features.shapes[1] if is_shape else np.array([*map(_find_longest, features.micro_batches)], np.int64)
        return np.asarray((decoder > 0) | (longest > self.architecture.max_seq_len))

    def count_head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Return stored bytes of the final norm, the head and its logits on every stage, shape (S, M)."""
        layers = (self._measured_adapters or self).layer_bytes_factor
        without = replace(self, layer_bytes_factor=layers, head_bytes_factor=0.0, measured_adapters=None)
        head: IntArray = self.evaluate(micro_batches).stored_bytes - without.evaluate(micro_batches).stored_bytes
        return head

    def price(self, features: Features) -> MicroBatchCosts:
        a, topology, width, layout = self.architecture, self.topology, self._width, self.layout
        recompute, asks_chunks = split_kinds(features.recompute)
        full, group, rank = recompute == "full", features.positions, -(-features.positions // width)
        tokens = rank[int(self.has_decoder)]
        in_chunks = self.needs_chunks(asks_chunks, tokens)
        on_stages = np.zeros((5, self.num_stages, len(recompute)), np.int64)
        for layers in list_layers(a, topology):
            one = self._price_layer(layers, group, rank, recompute)
            on_stages[:4] += layers.counts * one[:4, None]
            on_stages[4] = np.maximum(on_stages[4], (layers.counts > 0) * one[4])
        if self.has_decoder:
            on_stages[3] += self._count_side_bytes(rank, full)
        flops, stored, working = on_stages[:3], self._as_measured(on_stages[3], full), on_stages[4]
        head_flops, head_stored, head_working = self._price_head(group, tokens, in_chunks, full)
        with_head = slice(topology.head_stages.start, None)
        flops[:, with_head] += head_flops[:, None]
        stored[with_head] += scale_bytes(head_stored, (self._measured_adapters or self).head_bytes_factor)
        working[with_head] = np.maximum(working[with_head], head_working)
        overhead_ns = self.overhead_ns + layout.halves * self.layer_overhead_ns // 2
        # A stage sends the residual stream, its rank's share of it under sequence parallelism.
        hidden = self.split(self.activation_bytes_per_value * a.hidden_size * rank[:2])
        sent = layout.add_messages(hidden, HEAD_MESSAGE_BYTES * tokens)
        link = Link(self.latency_ns, self.bandwidth_bytes_per_s)
        links = self.links or Links(intra=link, inter=link, ranks_per_node=1)
        costs = MicroBatchCosts(
            forward_ns=overhead_ns + self._compute_ns(flops[0], taxed=True),
            backward_ns=overhead_ns + self._compute_ns(flops[1], taxed=True),
            weight_ns=self._compute_ns(flops[2]),
            stored_bytes=stored,
            working_bytes=working + self.states.buffers[:, None],
            transfer_ns=links.transfer_ns(topology, sent),
            transfer_bytes=sent,
            static_bytes=self.states.device.total,
        )
        if width > 1 and not self.has_decoder:
            costs = self._with_exchanges(costs, group[0], recompute)
        costs = costs.keep_inputs(recompute == "stage")
        if features.pieces is not None:
            costs = self._with_pieces(costs, features.pieces, recompute)
        return costs.refuse(self._find_refused(features))

    def _price_layer(self, layers: CountedLayers, group: IntArray, rank: IntArray, recompute: Kinds) -> IntArray:
        """Return the FLOPs of F, B and W in one layer, or in a half of it, and the bytes on one rank that it stores and
        that it needs while it runs, (5, M): for a context-parallel group's positions and for one rank's.

        A layer stores its input; without full recomputation inner values in its place; without any the scores, too.
        """
        kind, tp, values = layers.model, self.topology.tp, self.activation_bytes_per_value
        h, is_decoder, of_attention = kind.hidden_size, layers.kind == "decoder", layers.kind != "mlp"
        side = int(is_decoder)
        full, selective = recompute == "full", recompute == "selective"
        group_squares, tokens, squares = group[2 + side], rank[side], rank[2 + side]
        skips_masked = self.flash and not self.has_decoder
        # The softmax, and with dropout its mask and its output; of fused kernels one fp32 sum per head and position.
        a_score = (2 * values + self._mask_bytes if self.dropout else values) * kind.num_heads // tp
        scores = of_attention * (4 * kind.num_heads // tp * tokens if skips_masked else a_score * squares)
        routed = self._count_routed(kind, tokens)
        inner = self._count_inner_bytes(layers, tokens, routed)
        if is_decoder:  # attention to the encoder's output
            group_squares = group_squares + group[4]
            inner = inner + self.split((2 + self.dropout) * values * h * tokens)
            inner = inner + values * kind.query_size // tp * (2 * tokens + 2 * rank[0])
            scores = scores + a_score * rank[4]
        attended = (1 if skips_masked else 2) * (kind.query_size + kind.attended_size)
        attention = of_attention * (attended * group_squares // tp)
        if layers.kind == "attention":
            widest = max((kind.query_size + 2 * kind.kv_size) // tp, h) * tokens
        else:
            widest = max(kind.fc1_size // tp, h) * routed
        products = self._count_products(layers, group, rank)
        stored = np.where(full, self.split(values * h * tokens), inner + np.where(selective, 0, scores))
        again = full * products + (full | selective) * attention
        forward = products + attention
        running = inner + scores - stored + values * widest
        return np.stack([forward, 2 * forward + again, np.where(full, 0, products), stored, running])

    def _count_side_bytes(self, rank: IntArray, full: BoolArray) -> IntArray:
        """Return what stages of an encoder-decoder hold in addition, shape (S, M): the encoder's output for all layers
        of a decoder, and what is gathered for layers' products until W."""
        num_encoder, num_decoder = self.layout.counts["encoder"], self.layout.counts["decoder"]
        values = self.activation_bytes_per_value * self.architecture.hidden_size
        held: IntArray = (num_decoder > 0) * self.split(values * rank[0])
        if self.has_decoder and self.split_backward and self.sequence_parallel:
            gathered = values * (4 * num_encoder * rank[0] + num_decoder * (6 * rank[1] + rank[0]))
            held = held + np.where(full, 0, gathered - gathered // self.topology.tp)
        return held

    def _count_inner_bytes(self, layers: CountedLayers, tokens: IntArray, routed: IntArray) -> IntArray:
        """Return what one layer, or a half of it, keeps of its self-attention and MLP, without the scores."""
        kind, tp, values, h = layers.model, self.topology.tp, self.activation_bytes_per_value, layers.model.hidden_size
        of_attention, of_mlp = layers.kind != "mlp", layers.kind != "attention"
        inputs = {"pre": 2, "post": 2, "both": 3}[kind.norm_placement]  # of either half: norms, qkv or fc1
        copied = (of_attention + of_mlp) * (inputs * values * h + self.dropout * self._mask_bytes * h)
        if kind.shared_expert_gate and of_mlp:  # its output and the gated one's factor
            copied += values * (h + 1)
        if kind.latent and of_attention:
            copied += values * kind.latent.kept_values
        keys = kind.kv_size_on(tp)
        # Of ranks that share a key head, values are a part of all rows of qkv, which each of them has gathered.
        with_values = kind.value_size // tp if kind.num_query_groups % tp == 0 else kind.query_size + 2 * kind.kv_size
        in_parts = values * ((kind.query_size + kind.attended_size) // tp + keys + with_values)
        if kind.qk_norm:  # the inputs of these norms
            in_parts += values * (kind.query_size // tp + keys)
        divided = of_attention * in_parts * tokens
        if of_mlp:  # inputs of the activation function and of fc2
            divided = divided + values * (kind.fc1_size + kind.ffn_hidden_size) * routed // tp
            divided = divided + values * 3 * kind.shared_ffn_hidden_size * tokens // tp
        inner = self.split(copied * tokens) + divided
        if kind.num_experts and of_mlp:
            inner = inner + values * h * routed + self.split(4 * kind.num_experts * tokens)
        if self._defers:
            inner = np.maximum(inner, 2 * values * h * (of_attention * tokens + of_mlp * routed) + divided)
        return inner

    def _count_products(self, layers: CountedLayers, group: IntArray, rank: IntArray) -> IntArray:
        """Return the FLOPs of the matrix products in one layer, or in a half of it."""
        kind, tp, tokens = layers.model, self.topology.tp, group[int(layers.kind == "decoder")]
        products: IntArray = 2 * ((layers.kind != "mlp") * (kind.attention_parameters // tp) * tokens)
        if layers.kind != "attention":
            counted, times = (rank[0], self._width) if self.capacity_factor else (tokens, 1)
            routed = times * self._count_routed(kind, counted)
            products = products + 2 * (kind.mlp_parameters // tp * routed) + 2 * kind.shared_parameters // tp * tokens
            routers = kind.num_experts + int(kind.shared_expert_gate)
            products = products + self.split(2 * kind.hidden_size * routers * tokens)
        if layers.kind == "decoder":  # queries and outputs, keys and values of attention to the encoder's output
            products = products + 4 * kind.hidden_size * kind.query_size // tp * (group[0] + group[1])
        return products

    def _with_pieces(self, costs: MicroBatchCosts, positions: PiecePositions, recompute: Kinds) -> MicroBatchCosts:
        """Add what the pieces of a sample, all among these micro-batches, keep for one another in every layer.

        Its keys and values are in a buffer from the first piece's F to its B, which is the last. So are the fp32 sums
        of the gradients that pieces give to the positions before them. A layer then keeps no others, and has
        gradients of all positions so far while it runs.
        """
        values, layers = self.activation_bytes_per_value, self.layout.attentions
        a_position = 2 * self.architecture.kv_size_on(self.topology.tp)  # values per layer
        kept_values = a_position if self._width == 1 else self._block.kept_values
        copied = np.floor(self._block.copied_values * positions.own).astype(np.int64)
        in_buffers = values * (a_position * (positions.own // self._width) + copied)
        keeps_own = (recompute == "none") | (recompute == "selective")
        stored = kept_values * positions.count_kept_bytes(values) - keeps_own * in_buffers
        again = (recompute == "stage") * in_buffers
        gradients = kept_values * values * positions.joined
        return replace(
            costs,
            stored_bytes=costs.stored_bytes + layers * stored,
            working_bytes=costs.working_bytes + (layers > 0) * gradients - layers * again,
        )

    @property
    def _block(self) -> BlockAttention:
        return BlockAttention.from_architecture(self.architecture, self.topology)

    @property
    def _width(self) -> int:
        return self.topology.width

    @property
    def _mask_bytes(self) -> int:
        """Bytes of one value of a dropout mask, which a CPU's operators keep as wide as values."""
        return self.activation_bytes_per_value if self.has_decoder else 1

    @property
    def _defers(self) -> bool:
        """Whether inputs and output gradients of matrix products are kept until W."""
        return self.split_backward and not self.has_decoder

    def _with_exchanges(self, costs: MicroBatchCosts, tokens: IntArray, recompute: Kinds) -> MicroBatchCosts:
        """Add what attention exchanges within a context-parallel group, and holds for that."""
        block, values, layers = self._block, self.activation_bytes_per_value, self.layout.attentions
        copied = np.ceil(values * block.copied_values * tokens).astype(np.int64)
        again = (recompute == "full") | (recompute == "selective")  # of a stage: see keep_inputs
        gathered = (2 * values * block.kept_values if block.gather_ranks > 1 else 0) * tokens
        exchange_ns = np.zeros_like(costs.forward_ns)
        if self.links is not None:
            link = self.links.find_group_link(self.topology.tp, self._width)
            exchange_ns = np.rint(layers * block.exchange_ns(tokens, values, link)).astype(np.int64)
        return replace(
            costs,
            forward_ns=costs.forward_ns + exchange_ns,
            backward_ns=costs.backward_ns + exchange_ns * (1 + again),
            stored_bytes=costs.stored_bytes + layers * (recompute != "full") * copied,
            working_bytes=costs.working_bytes
            + (layers > 0) * (((recompute == "full") | (recompute == "stage")) * copied + gathered),
        )

    def _as_measured(self, layer_bytes: IntArray, is_full: BoolArray) -> IntArray:
        """Return what layers store, of counted bytes. A recomputed one keeps its input, whatever it keeps else."""
        measured = scale_bytes(layer_bytes, (self._measured_adapters or self).layer_bytes_factor)
        return measured if self.has_decoder else np.where(is_full, np.maximum(layer_bytes, measured), measured)

    def _price_head(
        self, group: IntArray, tokens: IntArray, in_chunks: BoolArray, full: BoolArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return what one of the head's parts costs with the final norm, for a group's positions and for a rank's
        tokens: FLOPs of F, B and W, (3, M), bytes that each part stores, (parts, M), and that it needs, (M,)."""
        a, heads, values = self.architecture, self.topology.head_stages, self.activation_bytes_per_value
        products = 2 * a.vocab_size * a.hidden_size // self.topology.tp // len(heads) * group[int(self.has_decoder)]
        logits, (kept_in_chunks, working_in_chunks) = tokens * self._head_columns, self.count_chunked_head_bytes(tokens)
        num_inputs = 1 + (np.arange(len(heads))[:, None] == 0)  # the head's, and on the first stage the norm's
        stored = num_inputs * self.split(values * a.hidden_size * tokens)
        stored = stored + np.where(in_chunks, kept_in_chunks, 4 * logits)
        if len(heads) > 1:
            stored = stored + 2 * HEAD_MESSAGE_BYTES * tokens
        if self._defers:
            stored = np.where(in_chunks, stored, np.maximum(stored, values * (a.hidden_size * tokens + logits)))
        flops = np.stack([products, (2 + in_chunks) * products, np.where(full | in_chunks, 0, products)])
        return flops, stored, np.where(in_chunks, working_in_chunks, values * logits)

    @property
    def _head_columns(self) -> int:
        """Columns of the vocabulary on one rank."""
        return self.architecture.vocab_size // self.topology.tp // len(self.topology.head_stages)

    def needs_chunks(self, asks_chunks: BoolArray, positions: IntArray) -> BoolArray:
        """Return which micro-batches have a chunked head of several slices, (M,): `asks_chunks`, with more `positions`
        than one slice. Raises PlanError if a chunked head has no price."""
        if asks_chunks.any() and not self.head_slice:
            raise PlanError(
                'these costs have no price for a head in slices: give recompute "none", "selective", "full" or'
                ' "stage", or counted costs with head_slice'
            )
        return asks_chunks & (positions > self.head_slice)

    def count_chunked_head_bytes(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return bytes that a chunked head stores in place of logits, and its working bytes, for rows of `positions`.

        Working bytes are a slice's logits in fp32 and as values, and the weight's gradient (of 16-bit weights added up
        in fp32) with a slice's own. The gradient of the head's input, which sequence parallelism gathers, is
        included."""
        values, h = self.activation_bytes_per_value, self.architecture.hidden_size
        slice_bytes = (4 + values) * self._head_columns * (np.minimum(positions, self.head_slice) + h)
        return 2 * 4 * positions, slice_bytes + (2 if self.sequence_parallel else 1) * values * h * positions

    def _count_routed(self, a: Architecture, tokens: IntArray) -> IntArray:
        """Return the rows that the MLPs of a layer compute: each token once, or once per expert that receives it."""
        if not a.num_experts:
            return tokens
        rows = a.top_k * tokens
        if not self.capacity_factor:
            return rows
        return a.num_experts * np.ceil(self.capacity_factor * rows / a.num_experts).astype(np.int64)

    def _compute_ns(self, flops: IntArray, *, taxed: bool = False) -> IntArray:
        """Return the time of FLOPs that the ranks of a context-parallel group divide; `taxed`: with what they exchange,
        if that is not counted."""
        flop_ns, width = 1e9 / self.flops_per_s, self._width
        if width > 1:
            flop_ns *= (1 + self.width_tax * (taxed and (self.links is None or self.has_decoder))) / width
        time_ns: IntArray = np.rint(flops * flop_ns).astype(np.int64)
        return time_ns

    def split(self, num_bytes: IntArray) -> IntArray:
        """Return the bytes on each tensor-parallel rank of values that only sequence parallelism divides."""
        if not self.sequence_parallel:
            return num_bytes
        share: IntArray = -(-num_bytes // self.topology.tp)
        return share

    @property
    def states(self) -> States:
        """Bytes of weights, gradients and optimizer states of every stage, and of ZeRO's buffers."""
        return count_states(
            self.architecture,
            self.topology,
            "fp32" if self.param_bytes == 4 else self.state_recipe,
            zero_stage=max(self.zero_stage, int(self.distributed_optimizer)),
            offload=self.offload,
            ep=self.ep,
            exact_sums=self.exact_sums,
            num_moments=self.num_moments,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the costs as JSON. Encoder-decoders leave out fields of decoder-only models that have their defaults,
        and describe the full architecture."""
        if not self.has_decoder:
            return {"kind": "analytic", **dump_fields(self)}
        raw = {"kind": "encoder-decoder", **dump_fields(self, _NOT_OF_PAIRS)}
        raw["architecture"] = asdict(self.architecture)
        return raw if raw.pop("overhead_ns") == 0 else raw | {"overhead_ns": self.overhead_ns}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AnalyticCosts:
        """Return the costs that `to_json` wrote. Raises ConfigError for other content."""
        values = {key: value for key, value in raw.items() if key != "kind"}
        if raw.get("kind") == "encoder-decoder":
            values = {"overhead_ns": 0, **values}
        try:
            if "shape" in values:  # written before models had one description: sizes, and the experts' capacity
                sizes = dict(values.pop("shape"))
                values["capacity_factor"] = sizes.pop("capacity_factor", 0.0)
                values["architecture"] = Architecture.gpt(**sizes).to_json()
            return from_json(cls, values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"analytic costs cannot be read: {type(error).__name__} {error}") from error


def _find_longest(m: MicroBatch) -> int:
    """Return the positions that the longest row, or document of a packed row, needs embeddings for."""
    whole = m.layout == "padded" or m.attention == "row"
    earlier = m.samples[0].start if m.attention == "carried" else 0  # positions of the sample in earlier pieces
    return m.encoder_len if whole else earlier + max(m.documents)
