"""A job settled once: every process that trains or plans starts from what these functions return.

requested.requested_job ─► JobRequest         settings, first weights, store, loggers, places: refused before all else
run.outcome.claimed ─► JobRequest             its run directory and its store are there
settled_job ─► SettledJob                     data read, costs read or measured, layers placed: what ranks start from
SettledPlanning ─► Planner                    what plans follow from, with or without a run

`dynapipe train` goes through all of these and forks ranks, which inherit the value. Under torchrun each rank makes the
request; the first rank settles it, and the others make their jobs from the values that it sends (`peers_job`).
`dynapipe plan` and `check-plan` have no run: they make a SettledPlanning of a file of settings, costs and flags
(`commands.plan_inputs`). `replay` reads the planner that a SettledPlanning has made. `profile` measures the model of
the same settings, before there are costs. `estimate` plans for cluster and costs of its own, by rules that it writes as
settings of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from rich.console import Console

from dynapipe_ext.batch.topology import ActivationFormat, PlacementName, ReplicaCollectives, Topology, Vocabulary
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary, split_vocabulary
from dynapipe_ext.capabilities import find_kinds, find_limit
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch.job.configured import (
    architecture_of,
    batches_to_place,
    check_batches,
    check_fits,
    configured_format,
    followed_placement,
    layers_to_place,
    make_planner,
    placement_trials,
    runs_half_layers,
    settled_steps,
    topology_of,
    trained_costs,
    trials_table,
    with_placement,
)
from dynapipe_ext.launch.job.data_form import OTHER_FORM
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.model_folder import (
    adapters_line,
    dropout_line,
    first_weights,
    idle_line,
    layout_line,
    prediction_line,
    random_line,
    settled_cut,
    warmup_line,
    widened_line,
    with_bounded_rows,
)
from dynapipe_ext.launch.job.requested import JobRequest, refuse_done
from dynapipe_ext.launch.job.room import Place, refuse_no_room
from dynapipe_ext.launch.job.run_costs import resumed_costs, settle_costs
from dynapipe_ext.launch.job.run_data import (
    RunData,
    check_data,
    data_lines,
    refuse_other_data,
    refuse_other_first_weights,
    refuse_other_training,
    refuse_pieces,
    run_data,
    shown_forms,
)
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.layer_pattern import ProvenCut
from dynapipe_ext.schedules.placements import PlacementTrial, SampledBatches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import show
from dynapipe_ext.tools.progress import WorkProgress
from dynapipe_ext.tools.show.samples import sample_text

_SPREAD: tuple[Vocabulary, ...] = ("head", "both")  # tried in this order


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
        """What ranks send to one another. Errors: ConfigError where neither settings nor costs say, and for a
        `hidden_size` other than what they say."""
        said = configured_format(self.config) if self.is_of_config else self.costs.facts.activation_format
        if said is not None:
            if self.hidden_size not in (None, said.hidden_size):
                raise ConfigError(
                    f"--hidden-size is {self.hidden_size} but the {'model has' if self.is_of_config else 'costs have'}"
                    f" {said.hidden_size}: leave it out"
                )
            return said
        if self.hidden_size is not None:
            first_head = self.topology.first_head_stage
            return ActivationFormat(
                self.hidden_size, self.config.model.dtype, first_decoder_stage=0, first_head_stage=first_head
            )
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

    @property
    def vocabularies(self) -> tuple[Vocabulary, ...]:
        """Those under which placements are tried: the one that is named; under "auto" a whole one and, where costs and
        the run allow it, the head over pipeline ranks, of a tied model both ends."""
        vocabulary = self.config.topology.vocabulary_parallel
        if vocabulary != "auto":
            return (vocabulary,)
        if not self.costs.facts.prices_spread or (
            self.is_of_config and find_limit("vocabulary parallelism", find_kinds(self.config))
        ):
            return ("whole",)
        for spread in _SPREAD:
            try:
                self.costs.with_topology(split_vocabulary(gather_vocabulary(self.topology), spread))
            except ConfigError:  # one rank, rows that do not divide, or a tied model with the head alone
                continue
            return ("whole", spread)
        return ("whole",)

    def with_topology(self, topology: Topology) -> SettledPlanning:
        """The same model on other stages."""
        config, costs = with_placement(self.config, topology), self.costs.with_topology(topology)[0]
        return replace(self, config=config, costs=costs, topology=topology)


def placed_planning(
    planning: SettledPlanning, batches: Callable[[], SampledBatches]
) -> tuple[SettledPlanning, tuple[PlacementTrial, ...]]:
    """The same with its placement and vocabulary named, and what was tried on the batches: nothing where they were
    named already.

    Placements are compared by the costs before a fit. Fitted times go on where the best placement is the one that they
    were fitted for. Every process that asks finds the same. Errors as `placement_trials`; ConfigError for costs of one
    topology alone.
    """
    config = planning.config
    if "auto" not in (config.placement, config.topology.vocabulary_parallel):
        named_config = replace(config, topology=replace(config.topology, placement=config.placement))
        return replace(planning, config=named_config), ()
    comparable = replace(planning, costs=adjust(planning.costs, fitted=None))
    trials = placement_trials(
        planning.topology,
        lambda topology: comparable.with_topology(topology).planner,
        layers_to_place(planning.costs),
        batches(),
        names=get_args(PlacementName) if config.placement == "auto" else (config.placement,),
        vocabularies=planning.vocabularies,
        halves=planning.costs.facts.prices_halves and (runs_half_layers(config) or not planning.is_of_config),
    )
    return planning.with_topology(trials[0].topology), trials


class Machine(Protocol):
    """Where the ranks of a job run: asked once data are read, as answers take long, or need torch."""

    def place(self) -> Place:
        """The memory for ranks."""
        ...

    def num_cores(self) -> int | None:
        """The cores of all ranks together; None on accelerators, of which each rank has one."""
        ...

    def proven_cut(self, config: TrainConfig) -> ProvenCut:
        """Of the configured model, which transformers computes. Errors: ConfigError."""
        ...

    def measured_costs(self, config: TrainConfig, vocab_size: int) -> CostModel:
        """Of the configured model on one device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledJob:
    """All that the ranks of a job start from; each has an equal one.

    `data` are read once, so that all forked ranks train on the same, whatever becomes of the files meanwhile.
    `run_dir` is the directory that rank 0 fills; its owner has claimed it, and holds it for as long as the ranks run.
    """

    planning: SettledPlanning
    data: RunData
    address: StoreAddress
    keys: JobKeys
    run_dir: Path
    compare: bool = False
    resumed: Path | None = None
    overwrite: bool = False
    first_weights: str = ""

    @property
    def config(self) -> TrainConfig:
        return self.planning.config

    @property
    def topology(self) -> Topology:
        return self.planning.topology

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.config, self.data.whole.vocab_size)

    @property
    def checkpoints(self) -> Path:
        return (self.run_dir / CHECKPOINTS).resolve()

    def to_json(self) -> dict[str, Any]:
        """What ranks on other machines cannot settle for themselves; without secrets (`JobKeys.for_peers`)."""
        return {
            "topology": self.config.to_json()["topology"],
            "steps": self.config.run.steps,
            "layout": self.config.plan.layout,
            "cut": self.config.model.cut.to_json() if self.config.model.cut else None,
            "costs": cost_model_to_json(self.planning.costs),
            "num_cores": self.planning.num_cores,
            "store": replace(self.address, password="").to_json(),
            "run_dir": str(self.run_dir.resolve()),
            "resumed": str(self.resumed.resolve()) if self.resumed else "",
            "first_weights": self.first_weights,
        }


def peers_job(request: JobRequest, raw: Mapping[str, Any], keys: JobKeys, data: RunData) -> SettledJob:
    """The job of a rank that has the same request as rank 0, from what that one has settled and the data here."""
    config = request.config
    password = request.address.password if request.address else keys.store_password
    topology = TrainConfig.from_json({"topology": raw["topology"]}).topology
    model = replace(config.model, cut=ProvenCut.from_json(raw["cut"]) if raw["cut"] else None)
    plan = replace(config.plan, layout=raw["layout"])
    run = replace(config.run, steps=raw["steps"], epochs=0.0)
    config = replace(config, topology=topology, run=run, model=model, plan=plan)
    return SettledJob(
        planning=SettledPlanning(
            config=config,
            costs=cost_model_from_json(raw["costs"]),
            topology=topology_of(config),
            num_cores=raw["num_cores"],
        ),
        data=data,
        address=replace(StoreAddress.from_json(raw["store"]), password=password),
        keys=keys,
        run_dir=Path(raw["run_dir"]),
        compare=request.compare,
        resumed=Path(raw["resumed"]) if raw["resumed"] else None,
        overwrite=request.overwrite,
        first_weights=raw["first_weights"],
    )


def settled_job(request: JobRequest, machine: Machine, console: Console) -> SettledJob:
    """The job that ranks start from, of a request whose directory and store exist. It reads the data, reads or measures
    the costs, places the layers, and refuses what cannot be trained. `console` prints the results.

    Errors: ConfigError, DataError and PlanError.
    """
    named, compare = request.layout_is_named, request.compare
    if request.resumed is not None:
        refuse_other_training(request.resumed, request.config)
    config = settled_cut(request.config, machine.proven_cut, layout_is_named=named, compare=compare)
    request = replace(request, config=config)
    assert request.address is not None
    assert request.keys is not None
    config, data = _settled_data(request, console)
    weights = first_weights(config)
    if request.resumed is not None:
        refuse_other_first_weights(request.resumed, config, weights)
    vocab_size, place = data.whole.vocab_size, machine.place()
    check_data(data, partial(refuse_no_room, config, place, vocab_size=vocab_size))
    has_costs = config.plan.costs or request.resumed is not None
    costs = settle_costs(config, vocab_size, resumed_costs(request.resumed)) if has_costs else None
    num_cores = machine.num_cores()
    costs = costs or machine.measured_costs(config, vocab_size)
    _say_notices(config, console, is_new=request.resumed is None)
    planning = SettledPlanning(config=config, costs=costs, topology=topology_of(config), num_cores=num_cores)
    planning, trials = placed_planning(planning, partial(batches_to_place, config, data.train.lengths))
    if trials:
        show(trials_table(trials), console=console)
    limit_of = partial(place.limit_bytes, config)
    check_data(data, partial(check_fits, planning.config, planning.costs, limit_of=limit_of))
    console.print(ranks_line(planning.topology), soft_wrap=True)
    return SettledJob(
        planning=planning,
        data=data,
        address=request.address,
        keys=request.keys,
        run_dir=Path(request.run_dir),
        compare=request.compare,
        resumed=request.resumed,
        overwrite=request.overwrite,
        first_weights=weights,
    )


def _settled_data(request: JobRequest, console: Console) -> tuple[TrainConfig, RunData]:
    """The data, and the settings with the steps that their epochs come to."""
    config = request.config
    progress, advance = data_progress(config)
    with progress:
        data = run_data(config, advance)
    config = config.with_values(data={"template_date": data.whole.template_date})  # for resumes on other days
    console.print("\n".join(data_lines(data)), markup=False, soft_wrap=True)
    if request.num_shown or config.eval.path:
        forms = [form for form in shown_forms(config) if request.num_shown or form.endswith(OTHER_FORM)]
        console.print(*forms, sep="\n", end="\n" if forms else "", markup=False, soft_wrap=True)
    show_samples(data.whole, request.num_shown, console)
    refuse_pieces(config, data, compare=request.compare)
    check_data(data, partial(check_batches, config))
    config = settled_steps(config, data.train.lengths)
    longest = max(int(part.lengths[:, 0].max(initial=0)) for part in (data.train, data.held_out) if part is not None)
    config = with_bounded_rows(config, longest)
    if request.resumed is not None:
        refuse_done(request.resumed, config)
        refuse_other_data(request.resumed, config, data)
    return config, data


def _say_notices(config: TrainConfig, console: Console, *, is_new: bool) -> None:
    notices = (
        random_line(config) if is_new else "",
        followed_placement(config),
        layout_line(config),
        adapters_line(config),
        idle_line(config),
        widened_line(config),
        dropout_line(config),
        prediction_line(config.model.architecture),
        warmup_line(config),
    )
    if text := "\n".join(line for line in notices if line):
        console.print(text, markup=False, soft_wrap=True)


def show_samples(dataset: TokenDataset, number: int, console: Console) -> None:
    """Print what the first samples have become, what carries loss in colour."""
    for index in range(min(number, len(dataset))):
        console.print(f"sample {index}:", sample_text(dataset[index], dataset.tokenizer()), soft_wrap=True)


def ranks_line(topology: Topology) -> str:
    """Return what a job prints about its ranks when it starts."""
    return f"ranks: {topology.world_size} (TP{topology.tp} x PP{topology.pp} x DP{topology.dp})"


def data_progress(config: TrainConfig) -> tuple[WorkProgress, Callable[[int], None]]:
    """A progress display for `run_data` and the function that feeds it with samples done so far."""
    total = None if config.data.path or config.data.mixture else config.data.num_samples
    progress, num_done = WorkProgress("tokenizing", total), 0

    def advance(samples: int) -> None:
        nonlocal num_done
        progress.advance(samples - num_done)
        num_done = samples

    return progress, advance
