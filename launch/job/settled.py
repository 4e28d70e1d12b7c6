"""What the plans of a job follow from, settled once for all who plan: training, `dynapipe plan` and `check-plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import FittedTimes, without
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.job import configured_format, make_planner, trained_costs
from dynapipe_ext.launch.job.placement import layers_to_place, placement_trials, with_placement
from dynapipe_ext.schedules.placements import PlacementTrial, SampledBatches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledPlanning:
    """Settings, and the costs of training their whole model over `topology`.

    `num_cores` are those that all ranks share, None where each has a device. `is_of_config`: the settings describe the
    model; else the costs alone say what they are of, and `hidden_size` where they do not.
    """

    config: TrainConfig
    costs: CostModel
    topology: Topology
    num_cores: int | None = None
    is_of_config: bool = True
    hidden_size: int | None = None

    @property
    def trained_costs(self) -> CostModel:
        """Of what the settings train of the model, and of how they sum gradients: what plans are priced with."""
        return trained_costs(self.config, self.costs, self.topology)

    @property
    def message_format(self) -> ActivationFormat:
        """What ranks send to one another. Errors: ConfigError where neither settings nor costs say."""
        if self.hidden_size is not None:
            return ActivationFormat(self.hidden_size, self.config.model.dtype, first_decoder_stage=0)
        if self.is_of_config:
            return configured_format(self.config)
        if (own := self.costs.facts.activation_format) is not None:
            return own
        raise ConfigError(
            f"{type(self.costs).__name__} do not say how large the messages between ranks are, which must fit beside"
            " all else: give --hidden-size N, or the model with --config FILE"
        )

    @property
    def collectives(self) -> ReplicaCollectives:
        """What replicas issue together."""
        own = None if self.is_of_config else self.costs.facts.replica_collectives
        return own or ReplicaCollectives.of_zero(self.config.deepspeed.zero_stage)

    @property
    def planner(self) -> Planner:
        return make_planner(
            self.config,
            self.costs,
            self.num_cores,
            topology=self.topology,
            message_format=self.message_format,
            collectives=self.collectives,
        )

    def over(self, topology: Topology) -> SettledPlanning:
        """The same model on other stages."""
        config, costs = with_placement(self.config, topology), self.costs.over(topology)[0]
        return replace(self, config=config, costs=costs, topology=topology)


def placed_planning(
    planning: SettledPlanning, batches: Callable[[], SampledBatches]
) -> tuple[SettledPlanning, tuple[PlacementTrial, ...]]:
    """The same with its placement named, and what was tried on the batches: nothing where it was named already.

    Placements are compared by the costs before a fit. Fitted times go on where the best placement is the one that they
    were fitted for. Every process that asks finds the same. Errors as `placement_trials`; ConfigError for costs of one
    topology alone.
    """
    config = planning.config
    if config.placement != "auto":
        named = replace(config, topology=replace(config.topology, placement=config.placement))
        return replace(planning, config=named), ()
    comparable = replace(planning, costs=without(planning.costs, FittedTimes))
    trials = placement_trials(
        planning.topology,
        lambda topology: comparable.over(topology).planner,
        layers_to_place(planning.costs),
        batches(),
        stages_per_rank=config.topology.stages_per_rank,
    )
    return planning.over(trials[0].topology), trials
