"""Estimates of a published model on a cluster: counted work and bytes, ZeRO states, and collectives between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, Layout, MicroBatch
from dynapipe_ext.batch.topology import Offload, ReplicaCollectives, Topology, require_whole_layers
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.cluster import Cluster, Precision
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.layers import list_layers
from dynapipe_ext.costs.links import Link
from dynapipe_ext.costs.model import (
    CostCapabilities,
    CostModel,
    IntArray,
    MicroBatchCosts,
    fingerprint,
    reduce_to_ranks,
)
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, StateRecipe, States, count_states
from dynapipe_ext.costs.unfused import PlainLayers, counts_plain_layers
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

LAYER_OVERHEAD_NS = 20_000  # of a forward or a backward of one layer: kernel launches, norms, residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The division of a model: the topology (with layers on its stages), ZeRO stage, expert parallel degree `ep`, and
    the states on the host. The rows of each replica are divided over `cp` context parallel ranks, between tensor and
    data parallel ones in the order of ranks."""

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
        """The name of the placement of stages, as settings write it."""
        return self.topology.placement_name.partition(",")[0]

    @property
    def weight_topology(self) -> Topology:
        """The topology with dp x cp replicas, as all these hold copies of weights; its `width` is `cp`."""
        return replace(self.topology, dp=self.topology.dp * self.cp, width=self.cp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimatedCosts(CostModel):
    """A `CostModel` of what `base` counts plus collectives between ranks.

    Tensor parallel ranks sum two activations per layer in each direction (a T5 decoder layer three; Shoeybi et al.
    2019, "Megatron-LM", sec. 3), as rings of 2 (t - 1) / t times the bytes. Recomputed layers or stages sum those of
    forwards again. Experts exchange tokens twice per layer and direction. From ZeRO stage 2 on a backward also scatters
    its gradients, and at stage 3 weights are gathered for every forward and backward. These overlap with the work: the
    longer of both counts. `base` counts one rank of a context-parallel group, over `weight_topology`, with its
    exchanges, which do not overlap. `plain`: layers store what plain operators store. Static bytes are those of
    `states`. Working bytes include the full units of ZeRO and the buffers of messages."""

    base: AnalyticCosts
    states: States
    strategy: Strategy
    recipe: StateRecipe
    cluster: Cluster
    plain: PlainLayers | None = None

    @property
    def topology(self) -> Topology:
        return self.strategy.topology

    @property
    def weight_topology(self) -> Topology:
        return self.base.topology

    @property
    def replica_link(self) -> Link:
        return self.cluster.group_link(self.topology.tp, self.weight_topology.dp)

    @property
    def num_stages(self) -> int:
        return self.base.num_stages

    @property
    def facts(self) -> CostCapabilities:
        """Capabilities of the estimate. There is no activation format: message buffers are working bytes."""
        return CostCapabilities(
            replica_collectives=ReplicaCollectives.of_zero(self.strategy.zero_stage, ep=self.strategy.ep),
            prices_pieces=self.base.facts.prices_pieces,
            slices_head=self.base.head_slice > 0,
        )

    def with_topology(self, topology: Topology | None) -> tuple[EstimatedCosts, Topology]:
        """Return the costs and their own topology. Raises ConfigError for another one."""
        if topology not in (None, self.topology):
            raise ConfigError(
                f"an estimate of {self.topology} cannot be placed over {topology}: estimate that strategy"
            )
        return self, self.topology

    def at_width(self, width: int) -> EstimatedCosts:
        """Return the costs as they are. Raises ConfigError for a degree above 1: the strategy has its own, `cp`."""
        if width > 1:
            raise ConfigError(f"an estimate of cp {self.strategy.cp} has no width {width}: estimate cp {width}")
        return self

    @property
    def layers_per_stage(self) -> IntArray:
        """Layers of encoder and decoder together, shape (S,)."""
        return np.array(list(map(sum, self.base.layout.pairs)), np.int64)

    def join_stages(self, of_stages: npt.NDArray[Any], join: np.ufunc = np.add) -> npt.NDArray[Any]:
        """Reduce the first axis from stages to pipeline ranks: `join` (default: add) each rank's stages."""
        return reduce_to_ranks(of_stages, self.topology.stage_ranks, join)

    def explain_refusal(self, micro_batch: MicroBatch) -> str:
        return self.base.explain_refusal(micro_batch)

    def price(self, features: Features) -> MicroBatchCosts:
        costs, (enc, dec, *_) = self.base.price(features), features.positions
        recompute, _ = split_kinds(features.recompute)
        again = (recompute == "full") | (recompute == "stage")
        forward_ns, backward_ns = self._time_collectives(-(-enc // self.strategy.cp), dec, again)
        gather_ns, scatter_ns = self._time_replicas()
        stored, working = costs.stored_bytes, costs.working_bytes
        if self.plain:
            stored, working = self.plain.count_bytes(features, costs.transfer_bytes)
        return replace(
            costs,
            forward_ns=np.maximum(costs.forward_ns + forward_ns, gather_ns),
            backward_ns=np.maximum(costs.backward_ns + backward_ns, gather_ns + scatter_ns),
            stored_bytes=stored,
            working_bytes=working + self.states.buffers[:, None] + self.count_message_bytes(costs),
            static_bytes=self.states.device.total,
        ).refuse(costs.infeasible)

    def count_message_bytes(self, costs: MicroBatchCosts) -> IntArray:
        """Return the bytes of message buffers, (S, M): four times the larger message that a stage receives or sends."""
        padded = np.zeros((self.num_stages + 1, costs.num_micro_batches), np.int64)
        padded[1:-1] = costs.transfer_bytes
        either: IntArray = 4 * np.maximum(padded[:-1], padded[1:])
        return either

    def count_head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Return the stored bytes of the head (final norm, logits) on every stage, (S, M)."""
        if not self.plain:
            return self.base.count_head_bytes(micro_batches)
        is_last = np.arange(self.num_stages)[:, None] == self.num_stages - 1
        return np.asarray(is_last * self.plain.count_head_bytes(micro_batches))

    def _time_collectives(
        self, enc: IntArray, dec: IntArray, again: npt.NDArray[np.bool_]
    ) -> tuple[IntArray, IntArray]:
        """Return the times that tensor and expert parallel collectives add to F and B, of `enc` and `dec` positions."""
        a, counts, tp, ep = self.base.architecture, self.base.layout.counts, self.topology.tp, self.strategy.ep
        num_enc, num_dec = counts["encoder"], counts["decoder"]
        value_bytes = self.base.activation_bytes_per_value
        a_token = value_bytes * a.hidden_size
        forward = backward = np.zeros((self.num_stages, len(enc)))
        if tp > 1:
            link = self.cluster.group_link(1, tp)
            cross = num_dec * _time_ring(link, tp, 3 * dec * a_token, times=2, count=3)
            forward = num_enc * _time_ring(link, tp, 2 * enc * a_token, times=2, count=2) + cross
            backward = forward + _time_ring(link, tp, num_dec * enc * a_token, times=2, count=0)
            if a.num_query_groups % tp:  # ranks that share key heads gather all rows of queries, keys and values
                gather = num_enc * _time_ring(link, tp, enc * (value_bytes * (a.query_size + 2 * a.kv_size)))
                forward, backward = forward + gather, backward + gather
        if ep > 1 and a.num_experts:
            link = self.cluster.group_link(tp * self.strategy.cp, ep)
            rows = a.top_k * enc / (tp if self.strategy.sequence_parallel else 1)
            mixtures = sum(one.counts for one in list_layers(a, self.base.topology) if one.model.num_experts)
            exchange = 2 * mixtures * _time_ring(link, ep, rows * a_token)
            forward, backward = forward + exchange, backward + exchange
        backward = backward + np.where(again, forward, 0)
        return np.rint(forward).astype(np.int64), np.rint(backward).astype(np.int64)

    def _time_replicas(self) -> tuple[IntArray, IntArray]:
        """Return each stage's times of gathering weights and of scattering gradients, shape (S, 1)."""
        nothing = np.zeros((self.num_stages, 1), np.int64)
        dp, zero = self.weight_topology.dp, self.strategy.zero_stage
        if zero < 2 or dp == 1:
            return nothing, nothing
        weight, gradient, _ = BYTES_PER_PARAMETER[self.recipe]
        common, link = self.states.parameters.common[:, None], self.replica_link
        scatter = np.rint(_time_ring(link, dp, common * gradient)).astype(np.int64)
        if zero == 2:
            return nothing, scatter
        from_host = 1e9 / (dp * self.cluster.host_bytes_per_s) if self.strategy.offload == "all" else 0.0
        gather = np.rint(_time_ring(link, dp, common * weight) + common * weight * from_host).astype(np.int64)
        return gather, scatter

    def fingerprint(self) -> str:
        return fingerprint(
            {"base": self.base.to_json(), "static": self.states.device.total.tolist(), "recipe": self.recipe}
            | {"zero_stage": self.strategy.zero_stage, "offload": self.strategy.offload, "ep": self.strategy.ep}
            | {"plain": self.plain is not None}
            | ({"cp": self.strategy.cp} if self.strategy.cp > 1 else {})
        )


def _time_ring(link: Link, size: int, num_bytes: Any, *, times: int = 1, count: int = 1) -> Any:
    """Return the ns of `count` collectives that move `times` x (size - 1) / size of their bytes over every link: 1 for
    a gather, a scatter or an exchange, 2 for a sum."""
    return num_bytes * (times * (size - 1) / size * 1e9 / link.bytes_per_s) + count * float(link.latency_ns)


def time_ring_s(num_bytes: float, link: Link, size: int, *, times: int = 1) -> float:
    """Return the seconds of one collective over a ring. `times`: 1 for a gather, a scatter or an all-to-all, 2 for a
    sum."""
    return _time_ring(link, size, num_bytes, times=times) / 1e9 if size > 1 and num_bytes else 0.0


def estimate_costs(
    architecture: Architecture,
    cluster: Cluster,
    strategy: Strategy,
    *,
    precision: Precision,
    recipe: StateRecipe,
    layout: Layout = "padded",
) -> EstimatedCosts:
    """Return the costs of training under a strategy. Raises ConfigError for sizes that do not divide over it."""
    topology = strategy.weight_topology
    tp = topology.tp
    require_whole_layers(topology.layers_per_stage, "an estimate")
    held = count_states(
        architecture.padded(tp),
        topology,
        recipe,
        zero_stage=strategy.zero_stage,
        offload=strategy.offload,
        ep=strategy.ep,
    )
    base, plain = _count_costs(architecture, cluster, strategy, precision), None
    if not cluster.device.is_fused and counts_plain_layers(architecture):
        require_whole_vocabulary(topology, "an estimate of operators one by one")
        plain = PlainLayers(base, packed=layout == "packed")
    return EstimatedCosts(base=base, states=held, strategy=strategy, recipe=recipe, cluster=cluster, plain=plain)


def _count_costs(
    architecture: Architecture, cluster: Cluster, strategy: Strategy, precision: Precision
) -> AnalyticCosts:
    """Return what the padded model's own layers cost, without what the strategy adds to them."""
    topology, flops_per_s = strategy.weight_topology, cluster.flops_per_s(precision)
    padded = architecture.padded(topology.tp)
    value_bytes: Literal[2, 4] = 4 if precision == "fp32" else 2
    # An engine of ZeRO 3 gathers a head's weight only for its own forward.
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
