"""Where a run's layers live, settled before its model is built: `placement = "auto"` becomes what suits its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from rich.table import Table

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.abilities import layers_to_place, over_topology
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.launch.job import make_planner, placed_stages, topology_of, trained_costs
from dynapipe_ext.lengths import LengthArray, sample_lengths
from dynapipe_ext.schedules.placements import PlacementSearch, PlacementTrial, SampledBatches, sampled_batches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.tools.wording import format_bytes, percent, seconds
from dynapipe_ext.topology import PlacementName


def placement_trials(planner: Planner, batches: SampledBatches, *, stages_per_rank: int) -> tuple[PlacementTrial, ...]:
    """What every placement would give, each with its best layers per stage, the best first; `stages_per_rank` 0 is each
    placement's own number. Errors: those of `PlacementSearch.trials`; ConfigError for costs of one topology alone."""
    costs = planner.costs
    search = PlacementSearch(planner, lambda t: over_topology(costs, t)[0], layers_to_place(costs), batches)
    return search.trials(get_args(PlacementName), stages_per_rank or None)


def settled_placement(
    config: TrainConfig, costs: CostModel, lengths: LengthArray, num_cores: int | None
) -> tuple[TrainConfig, CostModel, tuple[PlacementTrial, ...]]:
    """Settings that name a placement, costs over it, and what was tried on the training data of such `lengths`: nothing
    where it was named already.

    Every process that asks finds the same. Errors as `placement_trials`.
    """
    t, data = config.topology, config.data
    if config.placement != "auto":
        return replace(config, topology=replace(t, placement=config.placement)), costs, ()
    batches = GlobalBatches(
        lengths,
        batch_size=data.batch_size or None,
        tokens_per_batch=data.tokens_per_batch or None,
        seed=config.run.seed,
        drop_last=data.drop_last,
    )
    sampled = [sample_lengths(lengths, batches[step]) for step in sampled_batches(len(batches))]
    search = PlacementSearch(
        make_planner(config, costs, num_cores),
        lambda topology: trained_costs(config, over_topology(costs, topology)[0], topology),
        layers_to_place(costs),
        sampled,
    )
    trials = search.trials(get_args(PlacementName), t.stages_per_rank or None)
    best = trials[0].topology
    name = cast(PlacementName, best.placement_name.partition(",")[0])
    chosen = replace(
        t, placement=name, stages_per_rank=best.num_stages // best.pp, layers_per_stage=best.layers_per_stage
    )
    settled = replace(config, topology=chosen)
    return settled, over_topology(costs, topology_of(settled))[0], trials


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
        placed = (one.topology.placement_name, ",".join(map(str, one.topology.layers_per_stage)))
        if one.refusal:
            table.add_row(*placed, "-", "-", one.refusal)
        else:
            figures = seconds(one.makespan_s), percent(one.bubble_ratio), format_bytes(one.peak_bytes)
            table.add_row(*placed, *figures)
    return table
