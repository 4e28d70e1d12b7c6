"""Seconds of a step around its pipeline, and the FLOPs that a model needs for its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.encoder_decoder import EncoderDecoderCosts
from dynapipe_ext.costs.estimated import EstimatedCosts, ring_s
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.estimate.options import Question

# A node's processors reading and writing states in an update; about what CPU-Adam reaches (Ren et al. 2021, sec. 5).
HOST_UPDATE_BYTES_PER_S = 100e9
_TIMED_FLOPS_PER_S = 1e12  # at this rate a nanosecond is 1,000 FLOPs, and whole models stay within 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, one after the other: the pipeline as the planner predicts it, the exchange of gradients and
    weights between replicas and of tied copies, the optimizer, and what crosses the host's link. Nothing is assumed to
    overlap with the pipeline.
    """

    pipeline_s: float
    exchange_s: float
    optimizer_s: float
    offload_s: float

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.exchange_s + self.optimizer_s + self.offload_s


def step_time(question: Question, costs: EstimatedCosts, pipeline_s: float) -> StepTime:
    """What comes on top of the pipeline: ring exchanges, states read and written once, the host's link."""
    cluster, strategy, topology = question.cluster, costs.strategy, costs.weight_topology
    weight, gradient, optimizer = BYTES_PER_PARAMETER[costs.recipe]
    parameters = costs.states.parameters
    common, experts = costs.of_ranks(parameters.common), costs.of_ranks(parameters.experts)
    dp, few, zero = topology.dp, topology.dp // strategy.ep, strategy.zero_stage
    apart = cluster.group_link(topology.tp * strategy.ep, few)
    exchange = 0.0
    for mine, of_experts in zip(common.tolist(), experts.tolist(), strict=True):
        parts = ((mine, costs.replica_link, dp), (of_experts, apart, few))
        if zero == 0:
            seconds = sum(ring_s(n * gradient, link, size, times=2) for n, link, size in parts)
        elif zero == 1:
            seconds = sum(ring_s(n * (gradient + weight), link, size) for n, link, size in parts)
        else:
            seconds = sum(ring_s(n * weight, link, size) for n, link, size in parts) if zero == 2 else 0.0
        exchange = max(exchange, seconds)
    exchange += _tied_s(question, costs, gradient)
    share = int((-(-common // dp) + -(-experts // few)).max()) if zero else int((common + experts).max())
    touched = share * (gradient + 2 * optimizer + 2 * weight)  # read; states and weights read and written
    if strategy.offload == "none":
        update = touched / cluster.device.memory_bytes_per_s
    else:
        update = touched * cluster.gpus_per_node / HOST_UPDATE_BYTES_PER_S
    return StepTime(
        pipeline_s=pipeline_s,
        exchange_s=exchange,
        optimizer_s=update,
        offload_s=float(costs.of_ranks(costs.states.moved).max()) / cluster.host_bytes_per_s,
    )


def _tied_s(question: Question, costs: EstimatedCosts, gradient: int) -> float:
    """Summing the gradients of a tied embedding's two copies."""
    a, topology = question.architecture, costs.weight_topology
    first, last = topology.stage_ranks[0], topology.stage_ranks[-1]
    if not a.tied_embeddings or first == last:
        return 0.0
    links = question.cluster.links
    link = links.inter if links.crosses_nodes(topology, first, last) else links.intra
    num_bytes = a.padded_vocab_size(tp=topology.tp) * a.hidden_size // topology.tp * gradient
    return ring_s(num_bytes, link, 2, times=2)


def model_flops(plan: StepPlan, costs: EstimatedCosts) -> float:
    """Of forward and backward of the real tokens, attention included, nothing recomputed or padded."""
    base = costs.base
    timed: AnalyticCosts | EncoderDecoderCosts = replace(
        base, flops_per_s=_TIMED_FLOPS_PER_S, layer_overhead_ns=0, topology=base.topology
    )
    samples = [s for m in plan.batch.micro_batches for s in m.samples]
    lengths, counts = np.unique([(s.encoder, s.decoder) for s in samples], axis=0, return_counts=True)
    priced = timed.evaluate_shapes(np.ones(len(lengths), np.int64), lengths[:, 0], lengths[:, 1])
    forward = float((priced.forward_ns.sum(axis=0) * counts).sum()) * _TIMED_FLOPS_PER_S / 1e9
    return 3.0 * forward * base.topology.tp
