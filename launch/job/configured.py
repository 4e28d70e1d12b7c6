"""What settings come to: topology, architecture, costs, planner, and the placement that "auto" takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
from rich.table import Table

from dynapipe_ext.batch.micro_batches import (
    HEAD_SLICE,
    LAYER_RECOMPUTES,
    LengthArray,
    MicroBatch,
    Recompute,
    SampleLength,
    round_up,
    sample_lengths,
    with_sliced_head,
)
from dynapipe_ext.batch.topology import (
    ActivationFormat,
    PlacementName,
    ReplicaCollectives,
    Topology,
    Vocabulary,
    place_stages,
    require_whole_layers,
)
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary, split_vocabulary
from dynapipe_ext.capabilities import check_features, find_kinds, find_limit
from dynapipe_ext.costs.adapters import price_adapters, with_idle_weights
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, StateRecipe, state_bytes
from dynapipe_ext.data.batches import GlobalBatches, GlobalBatchRule
from dynapipe_ext.errors import ConfigError, LowMemoryError, PlanError, format_bytes
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE, Architecture
from dynapipe_ext.models.named_models import is_float32_folder
from dynapipe_ext.schedules.placements import PlacementSearch, PlacementTrial, SampledBatches, sample_batches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import Rival, list_rivals
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.plan_rules import ScheduleName, own_placement
from dynapipe_ext.settings.tables import ModelSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import percent, seconds

_OURS = "dynapipe-ext"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of training the same job, with all its settings; `--compare` runs several."""

    name: str
    config: TrainConfig


def variants(config: TrainConfig, *, compare: bool) -> list[Variant]:
    """Return the configured run, and with `compare` the rivals (`list_rivals`), padding and fixed rows with it. A rival
    that this job cannot be trained by is left out (`unfit_rivals`). Raises ConfigError for a comparison that cannot be.
    """
    configured = Variant(_OURS, config)
    if not compare:
        return [configured]
    if limit := find_limit("comparison", find_kinds(config)):
        raise limit.make_error("--compare was given")
    fixed_rows: dict[str, Any] = {
        "layout": "packed",
        "split_policy": "fixed-rows",
        "max_tokens": config.model.max_seq_len,
    }
    weaker: dict[str, dict[str, Any]] = {
        "padding to the batch maximum, 1F1B": {"layout": "padded", "split_policy": "batch-max", "max_tokens": 0},
        "packing into fixed rows, whole-row attention, 1F1B": fixed_rows,
    }
    unfit = unfit_rivals(config)
    ways = [Variant(name, usual_way(config, **plan)) for name, plan in weaker.items()]
    rivals = [rival for rival in list_rivals(config.topology.pp) if rival.name not in unfit]
    return [configured, *ways, *(Variant(rival.name, rival_way(config, rival)) for rival in rivals)]


def unfit_rivals(config: TrainConfig) -> dict[str, str]:
    """Return why rivals, by their names, cannot train this job; one that only lacks memory shows that in its steps."""
    reasons = {}
    for rival in list_rivals(config.topology.pp):
        try:
            rival_way(config, rival)
        except ConfigError as error:
            reasons[rival.name] = str(error)
    return reasons


def rival_way(config: TrainConfig, rival: Rival) -> TrainConfig:
    """Return the settings of the same job trained the way of a rival. Raises ConfigError if the job cannot be."""
    way = usual_way(config, **rival.rules)
    topology_of(way)
    return way


def usual_way(config: TrainConfig, *, schedule: ScheduleName = "1f1b", **plan: Any) -> TrainConfig:
    """The same job planned otherwise, on the placement of its schedule; where that is the job's, layers stay."""
    topology = config.topology
    if config.placement != own_placement(schedule):
        topology = replace(topology, placement="", layers_per_stage=())
    topology = replace(topology, vocabulary_parallel="whole")
    searched: dict[str, Any] = {"split_backward": False, "pieces": "off", "noise": 0.0}
    usual = replace(config.plan, schedule=schedule, **searched, **plan)
    run = replace(config.run, plan_dir="")  # that is of the run's own plans
    return replace(config, topology=topology, plan=usual, run=run)


def placed_stages(config: TrainConfig) -> Topology:
    """The topology with stages on its ranks, and layers on them where the settings say so; of degree 1 where each step
    chooses one.

    Placement "auto" is linear here and vocabulary_parallel "auto" whole, until they are settled (`placed_planning`).
    """
    t, name = config.topology, config.placement
    placement: tuple[int, ...] = ()
    if name != "linear" and name != "auto":
        placement = place_stages(name, t.pp, t.stages_per_rank)
    width = 1 if t.context_parallel == "auto" else t.context_parallel
    layers = Topology(tp=t.tp, pp=t.pp, dp=t.dp, layers_per_stage=t.layers_per_stage, placement=placement, width=width)
    parts = t.vocabulary_parallel
    return layers if parts == "auto" or parts == "whole" else split_vocabulary(layers, parts)


def runs_half_layers(config: TrainConfig) -> bool:
    """Whether the stages of this job may begin and end within a layer: those of transformers where that is proven of
    the family."""
    cut = config.model.cut
    return find_limit("half layers", find_kinds(config)) is None and (cut is None or bool(cut.pattern.halves))


def topology_of(config: TrainConfig) -> Topology:
    """The topology with layers on its stages. Raises ConfigError for what does not divide, naming both numbers."""
    t, m = config.topology, config.model
    topology = placed_stages(config).with_layers(m.total_layers)
    check_features(config, "stages")
    if not runs_half_layers(config):
        require_whole_layers(topology.layers_per_stage, "this model of transformers")
    refuse_undivided(m, t.tp)
    if t.sequence_parallel and config.plan.pad_multiple % t.tp:
        raise ConfigError(
            f"pad_multiple is {config.plan.pad_multiple} but sequence parallelism cuts rows in tp = {t.tp} parts:"
            f" make it a multiple of {t.tp}"
        )
    learned = m.described.max_seq_len if m.described else m.max_seq_len
    if m.position == "learned" and (longest := round_up(m.max_seq_len, config.plan.pad_multiple)) > learned:
        multiple = config.plan.pad_multiple
        move = f"make max_seq_len {longest} or another multiple of pad_multiple"
        if m.described:  # which learns no more
            shorter = learned // multiple * multiple
            move = f"make max_seq_len {shorter}, or pad_multiple less" if shorter else f"make pad_multiple {learned}"
        raise ConfigError(
            f"max_seq_len is {m.max_seq_len} but rows are rounded up to pad_multiple {multiple}, to {longest} positions"
            f" of which only {learned} are learned: {move}"
        )
    _refuse_stretched(m)
    return topology


def _refuse_stretched(m: ModelSettings) -> None:
    """Errors: ConfigError for samples so long that the model would turn them by frequencies of their own length."""
    exact = m.described.most_exact_tokens if m.described else 0
    if m.described and m.described.rope_scaling and 0 < exact < m.max_seq_len:
        raise ConfigError(
            f"max_seq_len is {m.max_seq_len} but this {m.described.family} turns samples of more than {exact} tokens by"
            f" other frequencies ({m.described.rope_scaling.kind}), which megatron-core does not: make max_seq_len"
            f" {exact} and truncate (--truncate {exact}), or take --backend transformers"
        )


def refuse_undivided(m: ModelSettings, tp: int) -> None:
    """Errors: ConfigError for a size of the model that tensor parallel ranks do not divide, or key heads that they can
    neither divide nor share."""
    sizes = {name: getattr(m, name) for name in ("num_heads", "ffn_hidden_size", "hidden_size")}
    for name, size in (sizes | (m.described.divided_sizes if m.described else {})).items():
        if size % tp:
            raise ConfigError(f"tp is {tp} but does not divide {name} {size}: choose another tp or size")
    groups = m.num_query_groups
    fault = (
        f"num_query_groups {groups} must divide tp {tp} or be a multiple of it" if groups % tp and tp % groups else ""
    )
    if fault := m.described.groups_fault(tp) if m.described else fault:
        raise ConfigError(f"{fault}: choose another tp or size")
    if VOCAB_MULTIPLE % tp:
        raise ConfigError(f"tp is {tp} but must divide {VOCAB_MULTIPLE}: choose a power of two up to that")


def architecture_of(config: TrainConfig, vocab_size: int) -> Architecture:
    """The run's model: the published one that the settings name, or one in the sizes of the settings. The latter has
    the data's `vocab_size`, padded to one multiple for all topologies: weights must not depend on tp.
    """
    m = config.model
    if m.described is not None:
        return m.described
    sizes: dict[str, Any] = {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "num_heads": m.num_heads,
        "ffn_hidden_size": m.ffn_hidden_size,
        "gated_mlp": m.gated_mlp,
        "vocab_size": round_up(vocab_size, VOCAB_MULTIPLE),
        "max_seq_len": m.max_seq_len,
        "tied_embeddings": m.tied_embeddings,
    }
    if m.num_decoder_layers:
        return Architecture.t5(num_decoder_layers=m.num_decoder_layers, **sizes)
    assert m.position != "relative"
    return Architecture.gpt(num_query_groups=m.num_query_groups, position=m.position, norm=m.norm, bias=m.bias, **sizes)


def analytic_costs(
    config: TrainConfig, architecture: Architecture, *, flops_per_s: float, overhead_ns: int
) -> AnalyticCosts:
    """Counted FLOPs at a given rate, counted bytes; `overhead_ns` of an action, or of a layer of an encoder-decoder."""
    costs = AnalyticCosts(architecture.padded(), Topology(), flops_per_s=flops_per_s, overhead_ns=overhead_ns)
    if architecture.num_decoder_layers:
        costs = replace(costs, overhead_ns=0, layer_overhead_ns=overhead_ns)
    return configured_costs(config, costs)


def configured_costs(config: TrainConfig, costs: AnalyticCosts) -> AnalyticCosts:
    """Rates and factors as they were measured; what follows from the settings (topology, dtype, sharding) from them."""
    plan, width = config.plan, 4 if config.model.dtype == "float32" else 2
    settled: dict[str, Any] = {
        "topology": topology_of(config),
        "activation_bytes_per_value": width,
        "param_bytes": width,
        "sequence_parallel": config.topology.sequence_parallel and config.topology.tp > 1,
        "dropout": config.model.dropout > 0,
        "distributed_optimizer": config.optimizer.distributed,
        "split_backward": plan.is_split,
        "head_slice": HEAD_SLICE if can_slice_head(config) else 0,
    }
    if not costs.facts.has_decoder:
        settled |= {"zero_stage": config.deepspeed.zero_stage, "offload": config.deepspeed.offload, "ep": 1}
        settled["adapters"] = config.lora.stored_as
        if config.deepspeed.config:
            settled |= {"state_recipe": "deepspeed", "num_moments": config.deepspeed.num_moments}
    return replace(costs, **settled)


def can_slice_head(config: TrainConfig) -> bool:
    """Whether the run's stages compute heads in slices: not where an engine gathers a head's weight for its own forward
    alone."""
    return config.deepspeed.zero_stage < 3


def planned_kinds(config: TrainConfig, costs: CostModel) -> tuple[Recompute, ...]:
    """The kinds of recomputation under which a run may plan whole samples; forwards alone have none."""
    if costs.facts.forwards_alone:
        return ("none",)
    if config.plan.recompute != "auto":
        return (config.plan.recompute,)
    in_slices = costs.facts.slices_head and can_slice_head(config)
    return (*LAYER_RECOMPUTES, *(with_sliced_head(LAYER_RECOMPUTES) if in_slices else ()))


def trained_costs(config: TrainConfig, costs: CostModel, topology: Topology) -> CostModel:
    """The costs of what the settings train, from `costs` over `topology` that train the whole model: with adapters,
    deterministic sums, and the weights that no text runs through, where the model has them."""
    costs = _trained_alone(config, costs, topology)
    idle = idle_bytes(config)
    return with_idle_weights(costs, (idle,) + (0,) * (costs.num_stages - 1)) if idle else costs


def idle_bytes(config: TrainConfig) -> int:
    """Bytes of the weights that no text runs through (a tower of images), on the first stage's device. Their values are
    as wide as in the folder or in the run, whichever is wider."""
    model, engine = config.model, config.deepspeed
    number = model.cut.num_idle_weights if model.cut else 0
    recipe: StateRecipe = "fp32" if keeps_wide_idle(config) else trained_recipe(config)
    dp, moved = config.topology.dp, engine.offload
    states = state_bytes(0, recipe, zero_stage=engine.zero_stage, dp=dp, frozen_parameters=number, offload=moved)
    return int(states.weights[0])


def keeps_wide_idle(config: TrainConfig) -> bool:
    """Whether weights that no text runs through stay in the 32 bits that their folder has, beside others of 16."""
    model = config.model
    return model.dtype != "float32" and not config.deepspeed.config and is_float32_folder(model.init_from)


def _trained_alone(config: TrainConfig, costs: CostModel, topology: Topology) -> CostModel:
    model, recipe, exact_sums = config.model, trained_recipe(config), config.optimizer.deterministic
    if not config.lora.enabled or model.described is None:
        return costs.with_exact_sums(BYTES_PER_PARAMETER[recipe][0]) if exact_sums else costs
    architecture, zero_stage = model.described.padded(), config.deepspeed.zero_stage
    return price_adapters(
        costs,
        config.lora,
        architecture,
        topology,
        recipe=recipe,
        zero_stage=zero_stage,
        exact_sums=exact_sums,
        num_moments=config.deepspeed.num_moments,
    )


def trained_recipe(config: TrainConfig) -> StateRecipe:
    """What a weight that trains takes where transformers computes the model."""
    if config.model.dtype == "float32":
        return "fp32"
    return "deepspeed" if config.deepspeed.config else "megatron"


def settled_steps(config: TrainConfig, lengths: LengthArray) -> TrainConfig:
    """The settings with the steps that their epochs come to on data of these lengths, and no epochs.

    Errors: DataError for a sample over the token budget.
    """
    if not config.run.epochs:
        return config
    whole, part = int(config.run.epochs), config.run.epochs % 1
    drop_last = config.data.drop_last
    epochs = range(whole + (part > 0))
    num_batches = [len(global_batches(config, lengths, epoch, drop_last=drop_last)) for epoch in epochs]
    steps = sum(num_batches[:whole]) + (round(part * num_batches[whole]) if part else 0)
    return replace(config, run=replace(config.run, steps=max(1, steps), epochs=0.0))


def check_batches(config: TrainConfig, lengths: LengthArray, *, forwards_alone: bool = False) -> None:
    """Refuse a sample over the token budget, which is that of evaluation, too, before anything is started.

    Errors: DataError naming it.
    """
    global_batches(config, lengths, 0, drop_last=False)


def training_rule(config: TrainConfig) -> GlobalBatchRule:
    """How a run cuts its epochs into global batches."""
    data, seed = config.data, config.run.seed
    sizes: dict[str, Any] = {"batch_size": data.batch_size or None, "tokens_per_batch": data.tokens_per_batch or None}
    return GlobalBatchRule(**sizes, shuffle=True, drop_last=data.drop_last, seed=seed)


def global_batches(config: TrainConfig, lengths: LengthArray, epoch: int, *, drop_last: bool) -> GlobalBatches:
    """What a run on data of these lengths trains on in an epoch. Errors: DataError for a sample over the budget."""
    return replace(training_rule(config), drop_last=drop_last).batches(lengths, epoch)


LimitOf = Callable[[int], int]


def check_fits(
    config: TrainConfig,
    costs: CostModel,
    lengths: LengthArray,
    limit_of: LimitOf | None = None,
    *,
    forwards_alone: bool = False,
) -> None:
    """Refuse a sample that fits no micro-batch or no rank even alone, before the launch; of samples that are evaluated
    `forwards_alone` run. `limit_of`: what each of so many ranks may hold, where that is not the settings' limit alone.

    Errors: PlanError naming the longest such sample, of a pair's both sides or of either; with pieces, what their plan
    of it says.
    """
    if config.plan.pieces != "off" and not forwards_alone:
        alone = sample_lengths(lengths, [int(np.argmax(lengths[:, 0]))])
        replace(make_planner(config, costs), effort=0).plan(alone)
        return
    _check_max_tokens(config, lengths)
    sides = lengths[:, 0] + lengths[:, 1], lengths[:, 0], lengths[:, 1]
    for longest in dict.fromkeys(int(np.argmax(side)) for side in sides):
        (sample,) = sample_lengths(lengths, [longest])
        limit = limit_of or (lambda _: config.plan.memory_limit_bytes)
        _check_alone(config, costs, sample, limit, forwards_alone=forwards_alone)


def _check_alone(
    config: TrainConfig, costs: CostModel, sample: SampleLength, limit_of: LimitOf, *, forwards_alone: bool
) -> None:
    """Refuse a sample that no rank can hold. Errors: PlanError."""
    plan, limit = config.plan, config.plan.memory_limit_bytes
    try:
        num_bytes, rank = _bytes_alone(config, costs, sample, forwards_alone=forwards_alone)
    except PlanError as error:
        raise PlanError(f"sample {sample.index} with {sample.tokens} tokens cannot be priced: {error}") from None
    if num_bytes > limit:
        fitting = _what_fits(config, costs, sample, limit_of, forwards_alone=forwards_alone)
        raise LowMemoryError(  # by default the limit is what was free
            f"sample {sample.index} with {sample.tokens} tokens needs {num_bytes} B on pipeline rank {rank} even alone,"
            f" but memory_limit_gb {plan.memory_limit_gb:g} is {limit} B a rank: raise it,"
            f" {fitting}, or lower max_seq_len with --truncate"
        )


def _bytes_alone(
    config: TrainConfig, costs: CostModel, sample: SampleLength, *, forwards_alone: bool
) -> tuple[int, int]:
    """What a sample alone needs on the fullest pipeline rank, and which that is, recomputed as far as the plan may.

    Errors: PlanError for a kind of recomputation that was not measured, or a shape outside of the table.
    """
    plan, topology = config.plan, topology_of(config)
    costs = trained_costs(config, costs, topology)
    costs = adjust(costs, forward_only=True) if forwards_alone else costs
    needs: list[tuple[int, int]] = []
    refusal: PlanError | None = None
    for kind in planned_kinds(config, costs):
        try:
            alone = costs.evaluate([MicroBatch((sample,), plan.layout, kind, pad_multiple=plan.pad_multiple)])
        except PlanError as error:
            refusal = refusal or error
            continue
        held = alone.static_bytes + alone.stored_bytes[:, 0]
        of_ranks = [list(topology.stages_of(rank)) for rank in range(topology.pp)]
        totals = [int(held[stages].sum() + alone.working_bytes[stages, 0].max()) for stages in of_ranks]
        needs.append((max(totals), totals.index(max(totals))))
    if not needs:
        assert refusal is not None
        raise refusal
    return min(needs)


def _what_fits(
    config: TrainConfig, costs: CostModel, sample: SampleLength, limit_of: LimitOf, *, forwards_alone: bool
) -> str:
    """The fewest ranks that a sample fits on, as advice; of as many, those of the least tp."""
    linear = replace(config.topology, placement="linear", layers_per_stage=())
    for num_ranks in (2, 4, 8, 16, 32, 64, 128, 256):
        for degrees in _degrees(config, num_ranks):
            try:
                at = replace(config, topology=replace(linear, **degrees))
                placed = costs.with_topology(topology_of(at))[0]
                num_bytes, _ = _bytes_alone(at, placed, sample, forwards_alone=forwards_alone)
            except (ConfigError, PlanError):  # sizes that this topology does not divide, costs of another one
                continue
            if num_bytes <= limit_of(num_ranks):
                sizes = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
                return f"take {sizes}, where it needs {num_bytes / 1e9:.3g} GB a rank"
    if config.deepspeed.meets_inside:
        return "take a higher ZeRO stage"
    return "raise pp" if config.model.uses_transformers else "raise tp or pp"


def _degrees(config: TrainConfig, num_ranks: int) -> Iterator[dict[str, Any]]:
    """How so many ranks can divide a model of these settings: its layers, or by ZeRO 2 and 3 alone its states."""
    if config.deepspeed.meets_inside:
        yield {"dp": num_ranks}
        return
    for tp in (1,) if config.model.uses_transformers else (1, 2, 4, 8):
        yield {"tp": tp, "pp": num_ranks // tp}


def _check_max_tokens(config: TrainConfig, lengths: LengthArray) -> None:
    """Refuse the sample furthest above the positions that max_tokens leaves one micro-batch, if there is one."""
    plan, sides = config.plan, lengths[:, :2]
    if not plan.max_tokens:
        return
    multiple = plan.pad_multiple
    if plan.layout == "packed":
        positions, room = sides.max(axis=1), plan.max_tokens // multiple * multiple
        least, row = round_up(int(positions.max()), multiple), "a packed row"
    else:
        positions, room = (-(-sides // multiple) * multiple).sum(axis=1), plan.max_tokens
        least, row = int(positions.max()), "a padded micro-batch"
    worst = int(positions.argmax())
    if positions[worst] > room:
        padded = f", {positions[worst]} padded" if plan.layout == "padded" else ""
        raise PlanError(
            f"sample {worst} has {int(sides[worst].sum())} tokens{padded}, but {row} has {room} positions (max_tokens"
            f" {plan.max_tokens}, pad_multiple {multiple}): raise max_tokens to at least {least}, or lower max_seq_len"
            " with --truncate"
        )


def make_planner(
    config: TrainConfig,
    costs: CostModel,
    num_cores: int | None = None,
    *,
    topology: Topology | None = None,
    message_format: ActivationFormat | None = None,
    collectives: ReplicaCollectives | None = None,
) -> Planner:
    """The configured planner; `num_cores` are those that all ranks have together, None on accelerators. The rest is
    that of the configured model, unless it is named: costs may be of a model that the settings do not describe."""
    plan, topology = config.plan, topology or topology_of(config)
    collectives = collectives or ReplicaCollectives.of_zero(config.deepspeed.zero_stage)
    counts: Literal["free", "equal"] = "equal" if any(collectives.of_micro_batches) else "free"
    widths, priced = config.topology.widths, costs.facts.priced_widths
    return Planner(
        topology,
        trained_costs(config, costs, topology),
        plan.memory_limit_bytes,
        config.run.seed,
        **plan.as_keywords() | {"replica_counts": counts},
        format=message_format or configured_format(config),
        collectives=collectives,
        num_cores=num_cores,
        widths=tuple(width for width in widths if width in (priced or widths))
        if config.topology.context_parallel == "auto" and topology.dp > 1
        else (),
    )


def configured_format(config: TrainConfig) -> ActivationFormat:
    """What ranks of the configured model send to one another."""
    m, topology = config.model, topology_of(config)
    shards = topology.tp if config.topology.sequence_parallel else 1
    order: Literal["sbh", "bsh"] = "bsh" if m.uses_transformers else "sbh"
    return ActivationFormat(
        m.hidden_size,
        m.dtype,
        order=order,
        sequence_shards=shards,
        first_decoder_stage=lay_out(m.num_layers, m.total_layers, topology).first_decoder_stage,
        first_head_stage=topology.first_head_stage,
    )


def placement_trials(
    base: Topology,
    planner_over: Callable[[Topology], Planner],
    num_layers: int,
    batches: SampledBatches,
    *,
    names: Sequence[PlacementName] = get_args(PlacementName),
    vocabularies: Sequence[Vocabulary] = ("whole",),
    halves: bool,
) -> tuple[PlacementTrial, ...]:
    """What every placement would give under every one of the `vocabularies`, proven, each with its best layers per
    stage, the best first; with `halves` layers may be cut between attention and MLP. Errors: those of
    `PlacementSearch.trials` and, but for steps refused, `prove_step`.
    """
    search = PlacementSearch(base, planner_over, _proven, num_layers, batches, halves, vocabularies)
    return search.list_trials(names)


def layers_to_place(costs: CostModel) -> int:
    """How many layers stages are made of. Errors: ConfigError for costs of stages as they are."""
    if (total := costs.facts.total_layers) is None:
        raise ConfigError(
            f"{type(costs).__name__} price stages as they are, not the layers in them, so no other placement can be"
            " tried: name the placement that they are for, or give a measured table or counted costs"
        )
    return total


def _proven(planner: Planner, samples: Sequence[SampleLength]) -> StepPlan:
    return prove_step(planner, samples, step=0).step_plan


def batches_to_place(config: TrainConfig, lengths: LengthArray) -> SampledBatches:
    """Some of the batches that a run on data of these lengths begins with."""
    batches = global_batches(config, lengths, 0, drop_last=config.data.drop_last)
    return [sample_lengths(lengths, batches[step]) for step in sample_batches(len(batches))]


def with_placement(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The settings that name a topology's placement, layers and vocabulary."""
    layers = gather_vocabulary(topology)
    chosen = replace(
        config.topology,
        placement=cast(PlacementName, layers.placement_name.partition(",")[0]),
        layers_per_stage=layers.layers_per_stage,
        vocabulary_parallel=topology.vocabulary,
    )
    return replace(config, topology=chosen)


def followed_placement(config: TrainConfig) -> str:
    """What is said where the schedule, and nobody else, has put several stages on a rank; else nothing."""
    if config.topology.placement or config.placement == "linear":
        return ""
    return f"placement: {placed_stages(config).placement_name}, which schedule {config.plan.schedule} needs"


def trials_table(trials: Sequence[PlacementTrial]) -> Table:
    """What each placement came to; the first is taken."""
    table = Table(title="Placements tried, the first is taken", title_justify="left", title_style="bold")
    for name in ("placement", "layers per stage", "makespan", "bubble", "peak of a rank"):
        table.add_column(name, justify="left" if name.startswith(("p", "l")) else "right")
    for one in trials:
        layers = gather_vocabulary(one.topology).layers_per_stage
        placed = (one.topology.placement_name, ",".join(map(str, layers)))
        if one.refusal:
            table.add_row(*placed, "-", "-", one.refusal)
        else:
            figures = seconds(one.makespan_s), percent(one.bubble_ratio), format_bytes(one.peak_bytes)
            table.add_row(*placed, *figures)
    return table
