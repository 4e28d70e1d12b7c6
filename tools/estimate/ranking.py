"""What a model needs and how to train it on a cluster: every way that fits, planned, timed and ranked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ZERO_STAGES
from dynapipe_ext.costs.estimated import EstimatedCosts, Strategy, time_ring_s
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, state_bytes
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.tensors import num_parameters
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.estimate.memory import EstimatedMemory, Evaluation, evaluation, planned_memory
from dynapipe_ext.tools.estimate.options import (
    Candidate,
    Dropped,
    Question,
    RecomputeChoice,
    host_bytes_per_node,
    placed_otherwise,
    screened,
    spreads,
    train_fault,
)

# The rate at which a node's processors read and write states in an update, about that of CPU-Adam (Ren et al. 2021,
# sec. 5).
HOST_UPDATE_BYTES_PER_S = 100e9
_TIMED_FLOPS_PER_S = 1e12  # at this rate a nanosecond is 1,000 FLOPs, and whole models stay within 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of the parts of a step, without overlap: the pipeline as predicted, the exchange of gradients and weights
    between replicas and of tied copies, the optimizer, and the host's link.
    """

    pipeline_s: float
    exchange_s: float
    optimizer_s: float
    offload_s: float

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.exchange_s + self.optimizer_s + self.offload_s


def step_time(question: Question, costs: EstimatedCosts, pipeline_s: float) -> StepTime:
    """A step with the parts outside the pipeline: ring exchanges, one update of the states, the host's link."""
    cluster, strategy, topology = question.cluster, costs.strategy, costs.weight_topology
    weight, gradient, optimizer = BYTES_PER_PARAMETER[costs.recipe]
    parameters = costs.states.parameters
    common, experts = costs.join_stages(parameters.common), costs.join_stages(parameters.experts)
    dp, few, zero = topology.dp, topology.dp // strategy.ep, strategy.zero_stage
    expert_link = cluster.group_link(topology.tp * strategy.ep, few)
    exchange = 0.0
    for num_common, num_experts in zip(common.tolist(), experts.tolist(), strict=True):
        parts = ((num_common, costs.replica_link, dp), (num_experts, expert_link, few))
        if zero == 0:
            seconds = sum(time_ring_s(n * gradient, link, size, times=2) for n, link, size in parts)
        elif zero == 1:
            seconds = sum(time_ring_s(n * (gradient + weight), link, size) for n, link, size in parts)
        else:
            seconds = sum(time_ring_s(n * weight, link, size) for n, link, size in parts) if zero == 2 else 0.0
        exchange = max(exchange, seconds)
    exchange += _tied_s(question, costs, gradient)
    share = int((-(-common // dp) + -(-experts // few)).max()) if zero else int((common + experts).max())
    touched = share * (
        gradient + 2 * optimizer + 2 * weight
    )  # gradients are read; states and weights are read and written
    if strategy.offload == "none":
        update = touched / cluster.device.memory_bytes_per_s
    else:
        update = touched * cluster.gpus_per_node / HOST_UPDATE_BYTES_PER_S
    return StepTime(
        pipeline_s=pipeline_s,
        exchange_s=exchange,
        optimizer_s=update,
        offload_s=float(costs.join_stages(costs.states.moved).max()) / cluster.host_bytes_per_s,
    )


def _tied_s(question: Question, costs: EstimatedCosts, gradient: int) -> float:
    """Seconds to sum the gradients of a tied embedding's two copies."""
    a, topology = question.architecture, costs.weight_topology
    first, last = topology.stage_ranks[0], topology.stage_ranks[-1]
    if not a.tied_embeddings or first == last:
        return 0.0
    links = question.cluster.links
    link = links.inter if links.crosses_nodes(topology, first, last) else links.intra
    num_bytes = a.padded_vocab_size(tp=topology.tp) * a.hidden_size // topology.tp * gradient
    return time_ring_s(num_bytes, link, 2, times=2)


def model_flops(plan: StepPlan, costs: EstimatedCosts) -> float:
    """FLOPs of forward and backward of the real tokens with attention, without recomputation and padding."""
    base = costs.base
    timed = replace(base, flops_per_s=_TIMED_FLOPS_PER_S, layer_overhead_ns=0, topology=base.topology)
    samples = [s for m in plan.batch.micro_batches for s in m.samples]
    lengths, counts = np.unique([(s.encoder, s.decoder) for s in samples], axis=0, return_counts=True)
    priced = timed.evaluate_shapes(np.ones(len(lengths), np.int64), lengths[:, 0], lengths[:, 1])
    forward = float((priced.forward_ns.sum(axis=0) * counts).sum()) * _TIMED_FLOPS_PER_S / 1e9
    return 3.0 * forward * base.topology.tp


COARSE_EFFORT = 100
AS_FAST = 0.95  # of the fastest rate: an estimate cannot distinguish such options, so the simplest comes first
_WORTH = 0.97  # a batch is large enough if it has this share of the rate of a batch twice as large
_FINALISTS = 4
_PROMISING = 4  # strategies of one stage a rank that are also tried with several
_HOPE = 1.15  # An option is planned only if 1.15 times its expected rate would win.
_OTHERS = 4  # One in 4 planned options may be one that `dynapipe train` does not run.
_MOST_REPLICAS = 32  # At most so many replicas of a step are planned. Of equal samples, one stands for all.

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Bounds of a search. `tokens_per_batch`: least and most tokens of a global batch; equal values fix it.
    `most_samples`: of a global batch. `most_plans`: options that are planned. `effort`: moves for the final plans of
    the best options (2000 are enough: four times as many changed the rate of none of 18 options by more than 0.2 %).
    """

    tokens_per_batch: tuple[int, int]
    most_samples: int = 1024
    most_plans: int = 24
    effort: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One planned way to train, with figures of a mean step over the planned batches."""

    candidate: Candidate
    tokens_per_batch: int
    real_tokens: float
    num_samples: float
    num_micro_batches: tuple[int, int]  # least and most of a replica
    largest: MicroBatch
    recomputes: Counter[str]
    padding_efficiency: float
    bubble_ratio: float
    lower_bound_s: float
    time: StepTime
    mfu: float
    memory: tuple[EstimatedMemory, ...]
    evaluation: Evaluation
    host_bytes_per_node: int
    effort: int
    batch_curve: tuple[tuple[int, float], ...] = ()  # tokens of a batch, tokens/s, where others were tried

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    @property
    def costs(self) -> EstimatedCosts:
        return self.candidate.costs

    @property
    def tokens_per_s(self) -> float:
        return self.real_tokens / self.time.total_s

    @property
    def peak_bytes(self) -> int:
        return max(stage.total for stage in self.memory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """The answer: ranked options, what was dropped and why, and figures that no choice changes.

    Options that `dynapipe train` runs come before others, and those that need more memory than hosts usually have come
    last; alike ones are in order of rate. But the simplest one within 5 % of the fastest comes first.
    """

    question: Question
    search: Search
    num_parameters: int
    options: tuple[Option, ...]
    dropped: Dropped
    num_fitting: int
    states_if_replicated: tuple[int, ...] = ()  # bytes of a device under ZeRO 0 to 3, one replica each


def estimate(question: Question, search: Search, advance: Advance | None = None) -> Estimate:
    """All options that fit. The most promising ones are planned, the best of them with full effort.

    The result depends on the question and the search alone. `advance` is called for each planned option, of
    `search.most_plans` in all. Errors: ConfigError where no batch of the search can hold the data.
    """
    least, most = search.tokens_per_batch
    if not 1 <= least <= most:
        raise ConfigError(f"tokens of a global batch are {least} to {most}: give a range from 1 up")
    if most < question.data.most_tokens:
        raise ConfigError(
            f"a sample has {question.data.most_tokens:,} tokens but a global batch has at most {most:,}: raise"
            " --tokens-per-batch"
        )
    dropped = Dropped()
    candidates = _candidates(question, spreads(question, dropped), dropped)
    if question.limits.placement == "auto":
        candidates += _candidates(question, _placed_otherwise(question, most, candidates, dropped), dropped)
    sized = [(candidate, batch_tokens(question, search, candidate)) for candidate in candidates]
    order = {id(candidate): _class(question, candidate) for candidate in candidates}
    sized.sort(key=lambda pair: (order[id(pair[0])], pair[0].step_s(pair[1]) / pair[1], _simplicity(pair[0])))
    chosen = _chosen(question, sized, search.most_plans)
    if len(sized) > len(chosen):
        dropped.counts[f"screened out: expected to be slower than the {len(chosen)} that were planned"] = len(
            sized
        ) - len(chosen)
    options = _planned_options(question, search, chosen, dropped, advance)
    return Estimate(
        question=question,
        search=search,
        num_parameters=num_parameters(question.architecture),
        options=tuple(options),
        dropped=dropped,
        num_fitting=len(candidates),
        states_if_replicated=replicated_states(question),
    )


def _candidates(question: Question, strategies: Iterable[Strategy], dropped: Dropped) -> list[Candidate]:
    return [
        candidate
        for strategy in strategies
        for candidate in screened(question, strategy, _fixed_s(question, strategy), dropped)
    ]


def _placed_otherwise(
    question: Question, tokens: int, candidates: Sequence[Candidate], dropped: Dropped
) -> Iterator[Strategy]:
    """The most promising pipelines with several stages a rank, by what a step of so many tokens takes where filling the
    pipeline costs nothing."""
    hoped_s: dict[Strategy, float] = {}
    for candidate in candidates:
        s = candidate.strategy
        if s.topology.pp > 1 and not train_fault(question, s):
            work_s = candidate.step_s(tokens) - candidate.fill_s
            hoped_s[s] = min(hoped_s.get(s, math.inf), work_s)
    for strategy in sorted(hoped_s, key=lambda s: hoped_s[s])[:_PROMISING]:
        yield from placed_otherwise(question, strategy, dropped)


def _class(question: Question, candidate: Candidate) -> tuple[bool, bool]:
    """Whether `dynapipe train` does not run it, and whether it needs more memory than hosts usually have."""
    is_unusual = host_bytes_per_node(question, candidate.costs) > question.cluster.usual_host_bytes
    return bool(train_fault(question, candidate.strategy)), is_unusual


def _planned_options(
    question: Question,
    search: Search,
    chosen: Sequence[tuple[Candidate, int]],
    dropped: Dropped,
    advance: Advance | None,
) -> list[Option]:
    """The chosen candidates, planned and ranked: all with little effort, the best again with full effort."""
    options: list[Option] = []
    best_s: dict[tuple[bool, bool], float] = {}  # of a token, of each class
    for candidate, tokens in chosen:
        kind = _class(question, candidate)
        if candidate.step_s(tokens) / tokens > _HOPE * best_s.get(kind, math.inf):
            dropped.add("screened out: expected to be slower than others that were planned")
        else:
            try:
                option = planned(question, candidate, tokens, COARSE_EFFORT)
                if 1 / option.tokens_per_s <= _HOPE * best_s.get(kind, math.inf):
                    option = _grown(question, search, option)
                options.append(option)
                best_s[kind] = min(best_s.get(kind, math.inf), 1 / option.tokens_per_s)
            except PlanError:
                dropped.add("no plan of a whole batch fits")
        if advance:
            advance(1)
    options = _simplest_first(question, _distinct(options, dropped))
    finalists = [_final(question, search, option) for option in options[:_FINALISTS]]
    options = _simplest_first(question, [*finalists, *options[_FINALISTS:]])
    if options and not options[0].batch_curve:  # it moved to the front after the others were planned again
        options = _simplest_first(question, [_final(question, search, options[0]), *options[1:]])
    return options


def _chosen(question: Question, sized: Sequence[tuple[Candidate, int]], most: int) -> list[tuple[Candidate, int]]:
    """The best candidate of every topology, with and without offload, then others; `sized` has the fastest of each
    class first. One in `_OTHERS` may be what `dynapipe train` does not run, and as many as have room."""
    seen: Counter[object] = Counter()
    turns: dict[bool, list[tuple[bool, int]]] = {False: [], True: []}  # by whether it is not run
    for place, (candidate, _) in enumerate(sized):
        s = candidate.strategy
        key = s.topology, s.cp, s.offload == "none"
        turns[bool(train_fault(question, s))].append((seen[key] > 0, place))
        seen[key] += 1
    run, others = (sorted(turns[is_other]) for is_other in (False, True))
    num_others = min(len(others), max(most // _OTHERS, most - len(run)))
    return [sized[place] for _, place in sorted(run[: most - num_others] + others[:num_others], key=lambda t: t[1])]


def _simplest_first(question: Question, options: Sequence[Option]) -> list[Option]:
    """Options by class, then in order of rate, with the simplest of the fastest ones first."""
    classes = {id(option): _class(question, option.candidate) for option in options}
    ranked = sorted(options, key=lambda o: (classes[id(o)], -o.tokens_per_s, _simplicity(o.candidate)))
    alike = [option for option in ranked if classes[id(option)] == classes[id(ranked[0])]]
    as_fast = [option for option in alike if option.tokens_per_s >= AS_FAST * alike[0].tokens_per_s]
    as_fast.sort(key=lambda option: _simplicity(option.candidate))
    return [*as_fast[:1], *(option for option in ranked if option is not as_fast[0])]


def _simplicity(candidate: Candidate) -> tuple[object, ...]:
    """A key that orders options by complexity, the simplest first."""
    s, t = candidate.strategy, candidate.strategy.topology
    kinds = get_args(RecomputeChoice)
    machinery = s.offload != "none", s.zero_stage, s.ep, s.cp, s.stages_per_rank
    return *machinery, kinds.index(candidate.recompute), t.tp, t.pp, t.placement, candidate.layout


def _distinct(options: Sequence[Option], dropped: Dropped) -> list[Option]:
    """The options without plans of "auto" that chose one kind for all, since that kind is an option itself."""
    fixed = {(o.strategy, o.candidate.layout, o.candidate.recompute) for o in options}
    distinct = []
    for option in options:
        kinds = list(option.recomputes)
        same = (option.strategy, option.candidate.layout, kinds[0])
        if option.candidate.recompute == "auto" and len(kinds) == 1 and same in fixed:
            dropped.add("recompute auto chose one kind for all, which is an option of its own")
        else:
            distinct.append(option)
    return distinct


def _grown(question: Question, search: Search, option: Option) -> Option:
    """The option with its batch doubled as long as that gains more than 3 %.

    Screening prices a mean sample, which tells too little about a large batch where overheads count.
    """
    _, most = tokens_bounds(question, search)
    while 2 * option.tokens_per_batch <= most:
        try:
            larger = planned(question, option.candidate, 2 * option.tokens_per_batch, COARSE_EFFORT)
        except PlanError:
            break
        if option.tokens_per_s >= _WORTH * larger.tokens_per_s:
            break
        option = larger
    return option


def _final(question: Question, search: Search, option: Option) -> Option:
    """The option planned with full effort, in the smallest batch that is as good as one of half or twice its size."""
    least, most = tokens_bounds(question, search)
    rates = {option.tokens_per_batch: option.tokens_per_s}
    for other in (option.tokens_per_batch // 2, option.tokens_per_batch * 2):
        if least <= other <= most:
            try:
                rates[other] = planned(question, option.candidate, other, COARSE_EFFORT).tokens_per_s
            except PlanError:
                continue
    tokens = min(t for t, rate in rates.items() if rate >= _WORTH * max(rates.values()))
    num_batches = 1 if question.data.is_uniform else 2
    with suppress(PlanError):  # a second batch may not fit where the first did
        option = planned(question, option.candidate, tokens, search.effort, num_batches)
    return replace(option, batch_curve=tuple(sorted(rates.items())))


def tokens_bounds(question: Question, search: Search) -> tuple[int, int]:
    """Least and most tokens of a batch that the data and the search allow."""
    data = question.data
    least, most = search.tokens_per_batch
    most = max(data.most_tokens, min(most, int(data.mean_tokens * search.most_samples)))
    if data.is_file:
        most = max(data.most_tokens, min(most, data.total_tokens))
    return min(max(least, data.most_tokens), most), most


def batch_tokens(question: Question, search: Search, candidate: Candidate) -> int:
    """The smallest batch, by doublings, that trains within 3 % of the rate of the largest."""
    least, most = tokens_bounds(question, search)
    least = min(most, max(least, round(candidate.strategy.topology.dp * question.data.mean_tokens)))
    best = most / candidate.step_s(most)
    tokens = least
    while tokens < most and tokens / candidate.step_s(tokens) < _WORTH * best:
        tokens = min(2 * tokens, most)
    return tokens


def planned(question: Question, candidate: Candidate, tokens: int, effort: int, num_batches: int = 1) -> Option:
    """The option with planned global batches of so many tokens. Of many replicas some are planned, with samples as long
    and as short as those of all (`_of_replicas`). Errors: PlanError where one does not fit."""
    costs, rules = candidate.costs, replace(candidate.rules(question.limits.pieces), effort=effort)
    most = 1 if question.data.is_uniform else _MOST_REPLICAS
    replicas = min(costs.topology.dp, most)
    topology = replace(costs.topology, dp=replicas)
    planner = Planner(topology, costs, question.cluster.limit_bytes, question.seed, **rules.as_keywords())
    batches = [question.data.batch(tokens, question.seed, index) for index in range(num_batches)]
    plans = [
        planner.plan(_of_replicas(batch, replicas, costs.topology.dp), step=index)
        for index, batch in enumerate(batches)
    ]
    fullest = max(plans, key=lambda plan: plan.peak_bytes)
    micro_batches = [m for plan in plans for m in plan.batch.micro_batches]
    counts = [len(replica.micro_batches) for plan in plans for replica in plan.batch.replicas]
    real = float(np.mean([sum(sample.tokens for sample in batch) for batch in batches]))
    planned_tokens = float(np.mean([plan.batch.real_tokens for plan in plans]))
    reserved = round(question.cluster.reserved_gb * 1e9)
    time = step_time(question, costs, float(np.mean([plan.makespan_s for plan in plans])))
    return Option(
        candidate=candidate,
        tokens_per_batch=tokens,
        real_tokens=real,
        num_samples=float(np.mean([len(batch) for batch in batches])),
        num_micro_batches=(min(counts), max(counts)),
        largest=max(micro_batches, key=lambda m: m.padded_tokens),
        recomputes=Counter(m.recompute for m in micro_batches),
        padding_efficiency=planned_tokens / float(np.mean([plan.batch.padded_tokens for plan in plans])),
        bubble_ratio=float(np.mean([plan.bubble_ratio for plan in plans])),
        lower_bound_s=float(np.mean([plan.lower_bound_s for plan in plans])),
        time=time,
        mfu=float(np.mean([model_flops(plan, costs) for plan in plans]))
        * (real / planned_tokens)
        / (time.total_s * question.cluster.world_size * question.cluster.device.peak_flops_per_s[question.precision]),
        memory=planned_memory(fullest, costs, reserved),
        evaluation=evaluation(fullest, costs, reserved),
        host_bytes_per_node=host_bytes_per_node(question, costs),
        effort=effort,
    )


def _of_replicas(batch: Sequence[SampleLength], some: int, dp: int) -> list[SampleLength]:
    """What `some` of `dp` replicas have of a batch: evenly spaced samples in order of tokens, from the longest on, so
    that as many are as long as in all of it."""
    by_tokens = sorted(batch, key=lambda sample: (-sample.tokens, sample.index))
    chosen = [by_tokens[place * dp // some] for place in range(-(-len(batch) * some // dp))]
    return [replace(sample, index=place) for place, sample in enumerate(chosen)]


def _fixed_s(question: Question, strategy: Strategy) -> float:
    """Seconds of a step outside its pipeline; 0 where the sizes do not divide, which screening reports."""
    try:
        return step_time(question, question.costs(strategy, "padded"), 0.0).total_s
    except ConfigError:
        return 0.0


def replicated_states(question: Question) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer on a device under ZeRO stages 0 to 3, if every device were a
    replica."""
    total, dp = num_parameters(question.architecture), question.cluster.world_size
    return tuple(int(state_bytes(total, question.states_recipe, zero_stage=z, dp=dp).total[0]) for z in ZERO_STAGES)
