"""Where a run's layers live, settled before its model is built: `placement = "auto"` becomes what suits its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast, get_args

from rich.table import Table

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import PlacementName, Topology
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch.job.job import global_batches, placed_stages
from dynapipe_ext.schedules.placements import PlacementSearch, PlacementTrial, SampledBatches, sampled_batches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.wording import format_bytes, percent, seconds


def placement_trials(
    base: Topology,
    planner_over: Callable[[Topology], Planner],
    num_layers: int,
    batches: SampledBatches,
    *,
    stages_per_rank: int,
) -> tuple[PlacementTrial, ...]:
    """What every placement would give, proven, each with its best layers per stage, the best first; `stages_per_rank` 0
    is each placement's own number. Errors: those of `PlacementSearch.trials` and, but for steps refused, `prove_step`.
    """
    search = PlacementSearch(base, planner_over, _proven, num_layers, batches)
    return search.trials(get_args(PlacementName), stages_per_rank or None)


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
    return [sample_lengths(lengths, batches[step]) for step in sampled_batches(len(batches))]


def with_placement(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The settings that name a topology's placement and layers."""
    chosen = replace(
        config.topology,
        placement=cast(PlacementName, topology.placement_name.partition(",")[0]),
        stages_per_rank=topology.num_stages // topology.pp,
        layers_per_stage=topology.layers_per_stage,
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
        placed = (one.topology.placement_name, ",".join(map(str, one.topology.layers_per_stage)))
        if one.refusal:
            table.add_row(*placed, "-", "-", one.refusal)
        else:
            figures = seconds(one.makespan_s), percent(one.bubble_ratio), format_bytes(one.peak_bytes)
            table.add_row(*placed, *figures)
    return table
