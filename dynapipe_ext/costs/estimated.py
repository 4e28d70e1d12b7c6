"""Costs of a published model on a cluster: counted work and bytes, its ZeRO states and its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, Layout, MicroBatch
from dynapipe_ext.batch.topology import Offload, ReplicaCollectives, Topology
from dynapipe_ext.batch.vocabulary_parallel import refuse_spread
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.cluster import Cluster, Precision
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import (
    CostModel,
    IntArray,
    MicroBatchCosts,
    ModelFacts,
    bytes_keeping_inputs,
    fingerprint,
)
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, StateRecipe, States, count_states
from dynapipe_ext.costs.unfused import PlainLayers
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture, kinds_of_stages

LAYER_OVERHEAD_NS = 20_000  # of a forward or a backward of one layer: kernel launches, norms, residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How a model is spread: the topology (with layers on its stages), ZeRO, and what lies on the host. Each replica's
    rows are divided over `cp` context parallel ranks, which lie between tensor and data parallel ones.
    """

    topology: Topology
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Offload = "none"
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    @property
    def stages_per_rank(self) -> int:
        return len(self.topology.layer_stages) // self.topology.pp

    @property
    def placement(self) -> str:
        """The name under which settings know it."""
        return self.topology.placement_name.partition(",")[0]

    @property
    def weight_topology(self) -> Topology:
        """With context parallel ranks among the replicas, in blocks of `cp`: they hold the same weights."""
        return replace(self.topology, dp=self.topology.dp * self.cp, width=self.cp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimatedCosts(CostModel):
    """A `CostModel` of any family: what `base` counts, plus what happens between ranks.

    Tensor parallel ranks sum two activations a layer in each direction (a decoder layer of T5 three; Megatron-LM,
    Shoeybi et al. 2019, sec. 3), rings of 2 (t - 1) / t times the bytes; recomputing layers or stages sums those of
    forwards again. Experts exchange tokens twice a layer and direction. From ZeRO stage 2 on a backward also scatters
    its gradients and at stage 3 weights are gathered for every forward and backward; these overlap with the work, so
    the longer of both counts. Context parallel ranks are the blocks of a step of that width: `base` counts one of them
    over `weight_topology`, with what attention exchanges; nothing of that overlaps. `plain` layers keep what operators
    one by one keep. Static bytes are those of `states`; working bytes hold what ZeRO has whole at once
    and, between stages, two messages on either side and direction.
    """

    base: AnalyticCosts
    states: States
    strategy: Strategy
    recipe: StateRecipe
    tensor_link: Link
    replica_link: Link
    expert_link: Link
    links: Links
    host_bytes_per_s: float
    plain: PlainLayers | None = None
    _layers: IntArray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_layers", self.base.stage_layers)

    @property
    def topology(self) -> Topology:
        return self.strategy.topology

    @property
    def weight_topology(self) -> Topology:
        return self.base.topology

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def facts(self) -> ModelFacts:
        """Messages have no format: their buffers are among the working bytes."""
        return ModelFacts(
            replica_collectives=ReplicaCollectives.of_zero(self.strategy.zero_stage, ep=self.strategy.ep),
            prices_pieces=self.base.facts.prices_pieces,
            slices_head=self.base.head_slice > 0,
        )

    def over(self, topology: Topology | None) -> tuple[EstimatedCosts, Topology]:
        """Of its own topology alone. Errors: ConfigError for another one."""
        if topology not in (None, self.topology):
            raise ConfigError(
                f"an estimate of {self.topology} cannot be placed over {topology}: estimate that strategy"
            )
        return self, self.topology

    def at_width(self, width: int) -> EstimatedCosts:
        """Errors: ConfigError above 1: the strategy has a width of its own, `cp`."""
        if width > 1:
            raise ConfigError(f"an estimate of cp {self.strategy.cp} has no width {width}: estimate cp {width}")
        return self

    @property
    def layers_per_stage(self) -> IntArray:
        """Of both sides, shape (S,)."""
        counts: IntArray = self._layers.sum(axis=1)
        return counts

    def of_ranks(self, of_stages: npt.NDArray[Any], join: np.ufunc = np.add) -> npt.NDArray[Any]:
        """Of each pipeline rank: values of its stages joined, along the first axis."""
        joined: npt.NDArray[Any] = np.zeros((self.topology.pp, *of_stages.shape[1:]), of_stages.dtype)
        join.at(joined, list(self.topology.stage_ranks), of_stages)
        return joined

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        return self.base.explain_refusal(micro_batch)

    def price(self, features: Features) -> MicroBatchCosts:
        costs, (enc, dec, *_) = self.base.price(features), features.positions
        recompute, is_sliced = split_kinds(features.recompute)
        again = (recompute == "full") | (recompute == "stage")
        forward_ns, backward_ns = self._collectives_ns(-(-enc // self.strategy.cp), dec, again)
        gather_ns, scatter_ns = self._replicas_ns()
        stored, working = costs.stored_bytes, costs.working_bytes
        if self.plain is not None:
            is_sliced, carried = self.base.chunks_head(is_sliced, enc), features.pieces
            stored, working = self._plain_bytes(self.plain, enc, features.shapes[1], recompute, is_sliced)
            if carried is not None:
                spared = self.plain.spared_bytes(carried.own, selective=recompute == "selective")
                stored = stored - self._layers[:, :1] * (recompute != "full") * spared
            stored, working = bytes_keeping_inputs(recompute == "stage", stored, working, costs.transfer_bytes)
            if carried is not None:
                kept_bytes, joined = self.plain.carried_bytes(carried)
                stored, working = (
                    stored + self._layers[:, :1] * kept_bytes,
                    working + (self._layers[:, :1] > 0) * joined,
                )
        return replace(
            costs,
            forward_ns=np.maximum(costs.forward_ns + forward_ns, gather_ns),
            backward_ns=np.maximum(costs.backward_ns + backward_ns, gather_ns + scatter_ns),
            stored_bytes=stored,
            working_bytes=working + self.states.buffers[:, None] + self.message_bytes(costs),
            static_bytes=self.states.device.total,
        ).refusing(costs.infeasible)

    def message_bytes(self, costs: MicroBatchCosts) -> IntArray:
        """Buffers of messages of a micro-batch on every stage: two a direction on either side."""
        padded = np.zeros((self.num_stages + 1, costs.num_micro_batches), np.int64)
        padded[1:-1] = costs.transfer_bytes
        either: IntArray = 4 * np.maximum(padded[:-1], padded[1:])
        return either

    def head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """The part of the stored bytes of every stage that is the head's: norm, logits; shape (S, M)."""
        if self.plain is None:
            return self.base.head_bytes(micro_batches)
        head: IntArray = np.zeros((self.num_stages, len(micro_batches)), np.int64)
        kept_positions = (0 if m.layer_recompute == "stage" else m.padded_tokens for m in micro_batches)
        positions = np.fromiter(kept_positions, np.int64)
        _, is_sliced = split_kinds(np.array([m.recompute for m in micro_batches], np.str_))
        head[-1] = self._plain_head_bytes(self.plain, positions, self.base.chunks_head(is_sliced, positions))
        return head

    def _collectives_ns(
        self, enc: IntArray, dec: IntArray, again: npt.NDArray[np.bool_]
    ) -> tuple[IntArray, npt.NDArray[np.int64]]:
        num_enc, num_dec = self._layers[:, :1], self._layers[:, 1:]
        forward = np.zeros((len(self._layers), len(enc)))
        backward = forward
        a = self.base.architecture
        a_token = self.base.activation_bytes_per_value * a.hidden_size
        tp = self.topology.tp
        if tp > 1:
            per_byte, latency = _ring(self.tensor_link, tp, times=2)
            cross = num_dec * (3 * dec * a_token * per_byte + 3 * latency)
            forward = num_enc * (2 * enc * a_token * per_byte + 2 * latency) + cross
            backward = forward + num_dec * enc * a_token * per_byte
            if a.num_query_groups % tp:  # ranks that share key heads gather all rows of queries, keys and values
                per_byte, latency = _ring(self.tensor_link, tp, times=1)
                a_row = self.base.activation_bytes_per_value * (a.query_size + 2 * a.kv_size)
                gather = num_enc * (enc * a_row * per_byte + latency)
                forward, backward = forward + gather, backward + gather
        ep = self.strategy.ep
        if ep > 1 and a.num_experts:
            per_byte, latency = _ring(self.expert_link, ep, times=1)
            rows = a.top_k * enc / (tp if self.strategy.sequence_parallel else 1)
            exchange = 2 * self._num_mixtures * (rows * a_token * per_byte + latency)
            forward, backward = forward + exchange, backward + exchange
        backward = backward + np.where(again, forward, 0)
        return np.rint(forward).astype(np.int64), np.rint(backward).astype(np.int64)

    @property
    def _num_mixtures(self) -> IntArray:
        """Layers of experts on every stage, shape (S, 1)."""
        kinds = kinds_of_stages(self.base.architecture, tuple(map(int, self._layers[:, 0])))
        counts: IntArray = np.array([own for kind, own in kinds if kind.num_experts], np.int64)
        per_stage: IntArray = counts.sum(axis=0, keepdims=True).T
        return per_stage

    def _replicas_ns(self) -> tuple[IntArray, IntArray]:
        """Of every stage and micro-batch: gathering weights, scattering gradients; shape (S, 1)."""
        nothing = np.zeros((self.num_stages, 1), np.int64)
        dp, zero = self.weight_topology.dp, self.strategy.zero_stage
        if zero < 2 or dp == 1:
            return nothing, nothing
        weight, gradient, _ = BYTES_PER_PARAMETER[self.recipe]
        per_byte, latency = _ring(self.replica_link, dp, times=1)
        common = self.states.parameters.common[:, None]
        scatter = np.rint(common * gradient * per_byte + latency).astype(np.int64)
        if zero == 2:
            return nothing, scatter
        from_host = 1e9 / (dp * self.host_bytes_per_s) if self.strategy.offload == "all" else 0.0
        gather = np.rint(common * weight * (per_byte + from_host) + latency).astype(np.int64)
        return gather, scatter

    def _plain_head_bytes(
        self, plain: PlainLayers, tokens: IntArray, is_sliced: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        whole, sliced = plain.head_bytes(tokens), self.base.chunked_head_bytes(tokens)[0]
        return np.where(is_sliced, whole - plain.logits_bytes(tokens) + sliced, whole)

    def _plain_bytes(
        self,
        plain: PlainLayers,
        tokens: IntArray,
        positions: IntArray,
        recompute: npt.NDArray[np.str_],
        is_sliced: npt.NDArray[np.bool_],
    ) -> tuple[IntArray, IntArray]:
        """Stored and working bytes. When a layer runs backwards the head's are gone, and at the end the layers' too."""
        layers = self._layers[:, :1]
        stages = np.arange(self.num_stages)[:, None]
        is_first, is_last = stages == 0, stages == self.num_stages - 1
        kept_bytes = np.where(recompute == "full", plain.checkpoint_bytes(tokens), plain.layer_bytes(tokens, positions))
        head = is_last * self._plain_head_bytes(plain, tokens, is_sliced)
        tied = plain.architecture.tied_embeddings and self.num_stages == 1
        shared = np.where(recompute == "full", plain.shared_bytes(positions), 0)
        stored = layers * kept_bytes + (layers > 0) * shared + head
        of_layer = np.where(layers > 0, plain.layer_working_bytes(tokens, kept_bytes, positions, tied=tied) - head, 0)
        head_working = plain.head_working_bytes(tokens, tied=tied)
        of_head = is_last * np.where(is_sliced, self.base.chunked_head_bytes(tokens)[1], head_working)
        of_embedding = is_first * plain.embedding_working_bytes(tied=tied) - stored
        return stored, np.maximum(np.maximum(of_layer, of_head), np.maximum(of_embedding, 0))

    def fingerprint(self) -> str:
        return fingerprint(
            {"base": self.base.to_json(), "static": self.states.device.total.tolist(), "recipe": self.recipe}
            | {"zero_stage": self.strategy.zero_stage, "offload": self.strategy.offload, "ep": self.strategy.ep}
            | {"plain": self.plain is not None}
            | ({"cp": self.strategy.cp} if self.strategy.cp > 1 else {})
        )


def _ring(link: Link, size: int, *, times: int) -> tuple[float, float]:
    """(ns a byte, ns a collective) of one that moves `times` x (size - 1) / size of its bytes over every link."""
    return times * (size - 1) / size * 1e9 / link.bytes_per_s, float(link.latency_ns)


def ring_s(num_bytes: float, link: Link, size: int, *, times: int = 1) -> float:
    """Seconds of one collective over `size` ranks: 1 for a gather, a scatter or an exchange, 2 for a sum."""
    if size == 1 or not num_bytes:
        return 0.0
    per_byte, latency = _ring(link, size, times=times)
    return (num_bytes * per_byte + latency) / 1e9


def estimated_costs(
    architecture: Architecture,
    cluster: Cluster,
    strategy: Strategy,
    *,
    precision: Precision,
    recipe: StateRecipe,
    layout: Layout = "padded",
) -> EstimatedCosts:
    """Costs under a strategy. Errors: ConfigError for sizes that do not divide over it."""
    topology = strategy.weight_topology
    tp = topology.tp
    held = count_states(
        architecture.padded(tp),
        topology,
        recipe,
        zero_stage=strategy.zero_stage,
        offload=strategy.offload,
        ep=strategy.ep,
    )
    base, plain = _counted_costs(architecture, cluster, strategy, precision), None
    if not architecture.num_decoder_layers and not cluster.device.is_fused and PlainLayers.know(architecture):
        refuse_spread(topology, "an estimate of operators one by one")
        plain = PlainLayers.of(base, packed=layout == "packed")
    return EstimatedCosts(
        base=base,
        states=held,
        strategy=strategy,
        recipe=recipe,
        tensor_link=cluster.group_link(1, tp),
        replica_link=cluster.group_link(tp, topology.dp),
        expert_link=cluster.group_link(tp * strategy.cp, strategy.ep),
        links=cluster.links,
        host_bytes_per_s=cluster.host_bytes_per_s,
        plain=plain,
    )


def _counted_costs(
    architecture: Architecture, cluster: Cluster, strategy: Strategy, precision: Precision
) -> AnalyticCosts:
    """What the padded model's own layers cost, without what the strategy adds to them."""
    topology, flops_per_s = strategy.weight_topology, cluster.flops_per_s(precision)
    padded = architecture.padded(topology.tp)
    value_bytes: Literal[2, 4] = 4 if precision == "fp32" else 2
    # An engine of ZeRO 3 gathers a head's weight for its own forward alone.
    head_slice = HEAD_SLICE if strategy.zero_stage < 3 else 0
    return AnalyticCosts(
        padded,
        topology,
        flops_per_s=flops_per_s,
        overhead_ns=0,
        layer_overhead_ns=LAYER_OVERHEAD_NS,
        activation_bytes_per_value=value_bytes,
        param_bytes=value_bytes,
        sequence_parallel=strategy.sequence_parallel,
        flash=not architecture.attention_softcap,  # capped scores are computed and kept whole
        links=cluster.links,
        ep=strategy.ep,
        head_slice=head_slice,
    )
