"""Every way to spread a model over a cluster, and why some cannot work or do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import RECOMPUTES, Layout, Pieces, Recompute, with_sliced_head
from dynapipe_ext.batch.topology import Offload, PlacementName, Topology, Vocabulary, list_cp_degrees, place_stages
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary, split_vocabulary
from dynapipe_ext.costs.cluster import Cluster, Precision
from dynapipe_ext.costs.estimated import EstimatedCosts, Strategy, estimate_costs
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.states import StateRecipe
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE, Architecture, layer_kinds
from dynapipe_ext.models.flops import layer_weights
from dynapipe_ext.partitioning.pieces import list_piece_sizes
from dynapipe_ext.reproducible import product
from dynapipe_ext.settings.plan_rules import PlanRules
from dynapipe_ext.settings.tables import PlacementChoice, VocabularyChoice
from dynapipe_ext.tools.estimate.lengths import LengthData, typical_shapes
from dynapipe_ext.tools.estimate.memory import bytes_in_pieces

OFFLOADS_TRIED: tuple[Offload, ...] = ("none", "optimizer", "all")  # "weights" frees less and needs more of the link
RecomputeChoice = Literal[Recompute, "auto"]
TRAINED_DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp32": "float32"}  # of `dynapipe train`
_MOST_STAGES = 8  # of a rank
_PAD_MULTIPLE = 8
_MIXED = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed choices. An empty tuple leaves a choice to the search, and placement "auto" that of stages. With a
    `vocabulary` "auto" every pipeline is tried with a whole one and with one over its ranks."""

    tp: tuple[int, ...] = ()
    cp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = ()
    placement: PlacementChoice = "auto"
    vocabulary: VocabularyChoice = "whole"
    zero_stages: tuple[int, ...] = ()
    offloads: tuple[Offload, ...] = ()
    recomputes: tuple[RecomputeChoice, ...] = ()
    layouts: tuple[Layout, ...] = ()
    pieces: Pieces = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of an estimate: a model, a cluster, data, and how to train. `recipe` is for 16 bits; fp32 has its
    own."""

    architecture: Architecture
    name: str
    cluster: Cluster
    data: LengthData
    precision: Precision = "bf16"
    recipe: StateRecipe = "megatron"
    limits: Limits = Limits()
    seed: int = 0

    @property
    def states_recipe(self) -> StateRecipe:
        return "fp32" if self.precision == "fp32" else self.recipe

    def costs(self, strategy: Strategy, layout: Layout) -> EstimatedCosts:
        a, recipe = self.architecture, self.states_recipe
        return estimate_costs(a, self.cluster, strategy, precision=self.precision, recipe=recipe, layout=layout)


class Dropped:
    """Counts of options by the reason that ruled them out; where they did not fit, with the smallest excess in
    bytes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.least_excess: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, *, excess_bytes: int = 0, option: str = "") -> None:
        self.counts[reason] += 1
        if excess_bytes and excess_bytes < self.least_excess.get(reason, (1 << 62, ""))[0]:
            self.least_excess[reason] = excess_bytes, option

    def lines(self) -> list[str]:
        """A line for each reason, the most frequent first."""
        lines = []
        for reason, count in self.counts.most_common():
            text = f"{count:,} x {reason}"
            if reason in self.least_excess:
                num_bytes, option = self.least_excess[reason]
                text += f" (closest: {option}, by {num_bytes / 1e9:,.1f} GB)"
            lines.append(text)
        return lines


def pad_multiple(strategy: Strategy) -> int:
    """The multiple to which rows are rounded up: 8, and the needs of sequence parallelism, on each of the ranks that
    share a row."""
    return strategy.cp * math.lcm(_PAD_MULTIPLE, strategy.topology.tp)


def spreads(question: Question, dropped: Dropped) -> Iterator[Strategy]:
    """All strategies that use every device and divide the model. Under placement "auto" each has one stage a rank:
    `placed_otherwise` derives the other placements from it."""
    cluster, a, limits = question.cluster, question.architecture, question.limits
    for tp in _divisors(cluster.world_size):
        if limits.tp and tp not in limits.tp:
            continue
        if reason := _tp_fault(a, cluster, tp):
            dropped.add(reason)
            continue
        for cp in limits.cp:
            if reason := _cp_fault(a, cluster, tp, cp):
                dropped.add(reason)
                continue
            for pp in _divisors(cluster.world_size // tp // cp):
                if limits.pp and pp not in limits.pp:
                    continue
                if pp > a.total_layers:
                    dropped.add(f"pp exceeds the {a.total_layers} layers")
                    continue
                unplaced = Topology(tp=tp, pp=pp, dp=cluster.world_size // tp // cp // pp)
                for topology in _placed(question, unplaced, dropped):
                    layers = balanced_layers(a, topology)
                    yield from _with_states(question, replace(topology, layers_per_stage=layers), cp, dropped)


def _placed(question: Question, topology: Topology, dropped: Dropped) -> Iterator[Topology]:
    """The topology under the placement that is asked for, where its layers fill it."""
    name = question.limits.placement
    if name == "linear" or name == "auto":
        yield from _spread(question, topology, dropped)
    else:
        for placed in _filled(question.architecture, topology, name, (2,), dropped):
            yield from _spread(question, placed, dropped)


def _spread(question: Question, topology: Topology, dropped: Dropped) -> Iterator[Topology]:
    """The topology with the vocabulary as it is asked for; one pipeline rank has all of it."""
    a, vocabulary = question.architecture, question.limits.vocabulary
    if topology.pp == 1 or vocabulary in ("whole", "auto"):
        yield topology
    if topology.pp == 1 or vocabulary == "whole":
        return
    if a.num_decoder_layers:
        dropped.add("a vocabulary over the pipeline ranks of an encoder-decoder")
        return
    of_model: Vocabulary = "both" if a.tied_embeddings else "head"
    yield split_vocabulary(topology, of_model if vocabulary == "auto" else vocabulary)


def placed_otherwise(question: Question, strategy: Strategy, dropped: Dropped) -> Iterator[Strategy]:
    """A strategy of one stage a rank with several: interleaved up to all layers of a rank, but at most
    `_MOST_STAGES`, or as a V."""
    a, topology = question.architecture, replace(gather_vocabulary(strategy.topology), layers_per_stage=())
    most = min(_MOST_STAGES, a.total_layers // topology.pp)
    interleaved = sorted({n for n in (2, 4, most) if 1 < n <= most})
    names: tuple[tuple[PlacementName, Sequence[int]], ...] = (
        ("interleaved", interleaved),
        ("v", [n for n in interleaved if n in (2, 4)]),
    )
    for name, rounds in names:
        for layers in _filled(a, topology, name, rounds, dropped):
            placed = split_vocabulary(layers, strategy.topology.vocabulary)
            yield replace(strategy, topology=replace(placed, layers_per_stage=balanced_layers(a, placed)))


def _filled(
    a: Architecture, topology: Topology, name: PlacementName, rounds: Sequence[int], dropped: Dropped
) -> Iterator[Topology]:
    """The topology under a placement of several stages a rank, wherever layers fill these."""
    if a.num_decoder_layers:
        dropped.add("several stages a rank of an encoder-decoder")
        return
    for number in rounds:
        try:
            placed = replace(topology, placement=place_stages(name, topology.pp, number))
        except ConfigError as error:
            dropped.add(str(error) if topology.pp > 1 else f"placement {name} of one pipeline rank")
            continue
        if placed.num_stages > a.total_layers:
            dropped.add(f"{number} stages a rank exceed the {a.total_layers} layers")
            continue
        yield placed


def train_fault(question: Question, strategy: Strategy) -> str:
    """Why `dynapipe train` cannot run a strategy; empty where it can."""
    a, s = question.architecture, strategy
    if s.ep > 1:
        return f"experts are spread over {s.ep} ranks: it has all of them on each replica"
    if a.num_experts and s.topology.tp > 1 and not s.sequence_parallel:
        return f"{a.family} has experts, which need sequence parallelism at tp {s.topology.tp}"
    if question.precision not in TRAINED_DTYPES:
        return f"precision {question.precision} needs loss scaling"
    if s.zero_stage > 1 or s.offload != "none":
        return (
            f"ZeRO stage {s.zero_stage} with offload {s.offload}: it has stages 0 and 1, on the device (others at tp 1,"
            " by --deepspeed)"
        )
    if question.states_recipe not in ("megatron", "fp32"):
        return f"states are those of {question.recipe}, not Megatron's"
    if VOCAB_MULTIPLE % s.topology.tp:
        return f"tp {s.topology.tp} is no power of two up to {VOCAB_MULTIPLE}"
    if not a.num_decoder_layers and (longest := question.data.longest.encoder) > a.max_seq_len:
        return f"a sample has {longest:,} positions and the model takes {a.max_seq_len:,}: --truncate cuts there"
    return ""


def _cp_fault(a: Architecture, cluster: Cluster, tp: int, cp: int) -> str:
    if cp == 1:
        return ""
    if cp not in list_cp_degrees(cp):
        return f"cp {cp}, which is no power of two"
    if cluster.world_size // tp % cp:
        return f"cp {cp} does not divide the devices that tp leaves"
    if not cluster.device.is_fused:
        return f"cp {cp} without fused attention, which it needs"
    if a.num_decoder_layers or a.attention_softcap:
        return f"cp {cp} with attention that stores its scores"
    return ""


def _tp_fault(a: Architecture, cluster: Cluster, tp: int) -> str:
    if cluster.gpus_per_node % tp:
        return f"tp does not divide the {cluster.gpus_per_node} devices of a node"
    for name, size in (a.divided_sizes | {"hidden_size": a.hidden_size}).items():
        if size % tp:
            return f"tp does not divide {name} {size:,}"
    return a.groups_fault(tp)


def _with_states(question: Question, topology: Topology, cp: int, dropped: Dropped) -> Iterator[Strategy]:
    a, limits, dp = question.architecture, question.limits, topology.dp
    num_holders = dp * cp  # ranks with the same weights
    shares = [n for n in _divisors(math.gcd(dp, a.num_experts)) if n == 1 or a.num_experts] if a.num_experts else [1]
    for zero_stage in (0, 1, 2, 3):
        if limits.zero_stages and zero_stage not in limits.zero_stages:
            continue
        if num_holders == 1 and zero_stage and limits.zero_stages != (zero_stage,):
            continue  # one replica has no other to share with: the same as stage 0
        if zero_stage >= 2 and topology.pp > 1:
            dropped.add("ZeRO stage 2 or 3 under a pipeline, whose stages add gradients of many micro-batches")
            continue
        for offload in limits.offloads or (OFFLOADS_TRIED if question.cluster.device.has_host else ("none",)):
            if offload == "all" and zero_stage != 3:
                continue
            for ep in shares:
                yield Strategy(
                    topology=topology,
                    zero_stage=zero_stage,
                    offload=offload,
                    ep=ep,
                    cp=cp,
                    sequence_parallel=topology.tp > 1,
                )


def balanced_layers(a: Architecture, topology: Topology) -> tuple[float, ...]:
    """The numbers of layers of all stages that give the busiest stage the least work. The head counts as a part of a
    layer; over all ranks it weighs alike on each.

    Remaining layers go to later stages, which hold fewer micro-batches at a time. Encoder-decoders are cut evenly. The
    result is empty where Megatron's even cut is as good.
    """
    even = topology.with_layers(a.total_layers).layers_per_stage
    held = topology.layer_stages
    num_stages = len(held)
    if a.num_decoder_layers or num_stages == 1:
        return ()
    of_layer = {i: layer_weights(kind) for kind, layers in layer_kinds(a) for i in layers}
    each = [of_layer[i] for i in range(a.num_layers)]
    before = [0.0, *accumulate(weights / each[-1] for weights in each)]  # in layers like the last
    head = a.vocab_size * a.hidden_size / each[-1] if topology.vocabulary == "whole" else 0.0
    layers = [1] * num_stages
    for _ in range(a.total_layers - num_stages):
        ends = [0, *accumulate(layers)]
        work = [before[end] - before[start] for start, end in pairwise(ends)]
        work[-1] += head
        least = min(range(num_stages), key=lambda s: (round(work[s], 6), -s))
        layers[least] += 1
    layers = [0] * held.start + layers + [0] * (topology.num_stages - held.stop)
    return () if tuple(layers) == even else tuple(layers)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A strategy and a kind of recomputation that fit, with the expectations from screening.

    `work_s_per_token`: work of the busiest stage, over all replicas. `fill_s`: the time to fill the pipeline with a
    mean sample. `fixed_s`: the part of a step that does not depend on the batch. `waits`: memory keeps the pipeline
    from being full.
    """

    strategy: Strategy
    recompute: RecomputeChoice
    layout: Layout
    costs: EstimatedCosts
    work_s_per_token: float
    fill_s: float
    fixed_s: float
    waits: bool = False

    def step_s(self, tokens: float) -> float:
        return tokens * self.work_s_per_token + self.fill_s + self.fixed_s

    @property
    def name(self) -> str:
        return f"{strategy_name(self.strategy)}, recompute {self.recompute}"

    def rules(self, pieces: Pieces) -> PlanRules:
        """What the option is planned by, here and by `dynapipe train`; samples run in `pieces` where they can."""
        return PlanRules(
            layout=self.layout,
            pad_multiple=pad_multiple(self.strategy),
            recompute=self.recompute,
            replica_counts="equal" if _has_equal_counts(self.strategy) else "free",
            pieces=_pieces(pieces, self.costs, self.layout),
        )


def _has_equal_counts(strategy: Strategy) -> bool:
    """Whether all replicas need equally many micro-batches, since collectives over replicas lie inside them."""
    return strategy.zero_stage >= 2 or strategy.ep > 1


def _pieces(wanted: Pieces, costs: EstimatedCosts, layout: Layout) -> Pieces:
    """What is wanted where samples can be cut: not in padded rows, at equal counts or without a price."""
    can_be = layout == "packed" and not _has_equal_counts(costs.strategy) and costs.facts.prices_pieces
    return wanted if can_be else "off"


def strategy_name(strategy: Strategy) -> str:
    t = strategy.topology
    text = f"tp {t.tp} x pp {t.pp} x dp {t.dp}"
    text += f" x cp {strategy.cp}" if strategy.cp > 1 else ""
    text += f", {strategy.topology.placement_name}" if t.placement else ""
    text += f" x ep {strategy.ep}" if strategy.ep > 1 else ""
    text += f", ZeRO {strategy.zero_stage}" if strategy.zero_stage else ""
    return text + (f", offload {strategy.offload}" if strategy.offload != "none" else "")


def screened(question: Question, strategy: Strategy, fixed_s: float, dropped: Dropped) -> list[Candidate]:
    """The candidates under which the longest sample fits, one for each kind of recomputation."""
    cluster, name = question.cluster, strategy_name(strategy)
    candidates: list[Candidate] = []
    layouts: tuple[Layout, ...] = question.limits.layouts or (
        ("padded",) if question.data.is_uniform else ("padded", "packed")
    )
    choices = question.limits.recomputes or ("none", "selective", "full", "auto")
    for layout in layouts:
        try:
            costs = question.costs(strategy, layout)
        except ConfigError as error:
            dropped.add(str(error))
            return []
        held = costs.join_stages(costs.states.device.total) + costs.join_stages(costs.states.buffers, np.maximum)
        over = int(held.max()) - cluster.limit_bytes
        if over > 0:
            dropped.add("weights and states alone do not fit", excess_bytes=over, option=name)
            return candidates
        if reason := _host_fault(question, costs):
            dropped.add(reason)
            return candidates
        kinds = RECOMPUTES + (with_sliced_head(RECOMPUTES) if costs.facts.slices_head else ())
        priced = {kind: _screen(question, costs, kind, layout, fixed_s) for kind in kinds}
        if all(isinstance(p, int) for p in priced.values()):
            over = min(p for p in priced.values() if isinstance(p, int))
            dropped.add("the longest sample does not fit even alone", excess_bytes=over, option=name)
            return candidates
        fitting = {kind: p for kind, p in priced.items() if isinstance(p, Candidate)}
        for kind in choices:
            if kind == "auto":
                best = min(fitting.values(), key=lambda p: p.step_s(1e6))
                if choices == ("auto",) or best.recompute != "none" or best.waits:
                    # A mixture cannot be worse than one kind for all, so it is planned first.
                    candidates.append(replace(best, recompute="auto", work_s_per_token=_MIXED * best.work_s_per_token))
            elif kind in fitting:
                candidates.append(fitting[kind])
            else:
                excess = priced[kind]
                assert isinstance(excess, int)
                dropped.add(f"the longest sample does not fit with recompute {kind}", excess_bytes=excess, option=name)
    return candidates


def _host_fault(question: Question, costs: EstimatedCosts) -> str:
    need = host_bytes_per_node(question, costs)
    if question.cluster.host_memory_gb and need > question.cluster.host_memory_gb * 1e9:
        return f"offloaded states exceed the host's {question.cluster.host_memory_gb:g} GB a node"
    return ""


def host_bytes_per_node(question: Question, costs: EstimatedCosts) -> int:
    """Host bytes of the fullest node; consecutive ranks share a node."""
    topology = costs.weight_topology
    ranks = np.repeat(costs.join_stages(costs.states.host), topology.tp * topology.dp)
    return int(ranks.reshape(-1, question.cluster.gpus_per_node).sum(axis=1).max())


def _screen(
    question: Question, costs: EstimatedCosts, kind: Recompute, layout: Layout, fixed_s: float
) -> Candidate | int:
    """A candidate with its expected work, or the bytes by which the longest sample exceeds the limit."""
    strategy = costs.strategy
    lengths, share = typical_shapes(question.data, pad_multiple(strategy))
    rows = np.ones(len(lengths), np.int64)
    try:
        priced = costs.evaluate_shapes(rows, lengths[:, 0], lengths[:, 1], kind)
    except PlanError:
        return 1
    limit, static = question.cluster.limit_bytes, costs.join_stages(priced.static_bytes)
    stored = costs.join_stages(np.minimum(priced.stored_bytes, INFEASIBLE // strategy.stages_per_rank))
    working = costs.join_stages(priced.working_bytes, np.maximum)
    need = int((static[:, None] + stored + working).max())
    longest = question.data.longest.encoder
    sizes = list_piece_sizes(_pieces(question.limits.pieces, costs, layout), longest, 0)
    if need > limit and sizes:
        need = min(need, bytes_in_pieces(costs, longest, sizes[0], pad_multiple(strategy), kind))
    if need > limit:
        return need - limit
    busy_ns = costs.join_stages(product(priced.forward_ns + priced.backward_ns, share))
    tokens = question.data.mean_tokens
    pp, dp, rounds = strategy.topology.pp, strategy.topology.dp, strategy.stages_per_rank
    room = (limit - static) / np.maximum(1.0, costs.join_stages(product(priced.stored_bytes, share)))
    full = (
        np.arange(pp, 0, -1) if rounds == 1 else np.full(pp, pp)
    )  # ranks with several stages can hold pp micro-batches on all of them
    in_flight = np.maximum(1.0, np.minimum(room, full))
    slowdown = float((full / in_flight).max())  # a pipeline with too few micro-batches in flight waits
    work_ns = float(busy_ns.max()) * max(1.0, slowdown)
    return Candidate(
        strategy=strategy,
        recompute=kind,
        layout=layout,
        costs=costs,
        work_s_per_token=work_ns / 1e9 / tokens / dp,
        fill_s=float(busy_ns.sum() - busy_ns.max()) / 1e9 / rounds,
        fixed_s=fixed_s,
        waits=slowdown > 1.0,
    )
