"""The settings of a run, read from TOML and flags: one table a concern, unknown names refused.

`check_…` refuse values that are each within their bounds, but not together. Flags have the form, choices, words and
defaults that their settings declare.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from dynapipe_ext.batch.micro_batches import Pieces
from dynapipe_ext.batch.topology import Topology, check_layer_counts, list_cp_degrees, place_stages
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.capabilities import check_features
from dynapipe_ext.data.sample_selection import weighted_files
from dynapipe_ext.errors import ConfigError, reason, refuse_unknown
from dynapipe_ext.models.named_models import carried_fault
from dynapipe_ext.settings.declared import Setting, check_declared, list_settings
from dynapipe_ext.settings.deepspeed_settings import with_decided, with_read
from dynapipe_ext.settings.model_settings import with_adapted, with_described
from dynapipe_ext.settings.plan_rules import check_placed, check_rules, own_placement
from dynapipe_ext.settings.removed import describe_removed, list_keys
from dynapipe_ext.settings.tables import (
    CheckpointSettings,
    DataSettings,
    DeepSpeedSettings,
    EvalSettings,
    JobSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    PlacementChoice,
    PlanSettings,
    PreferenceSettings,
    RunSettings,
    TopologySettings,
)
from dynapipe_ext.toml_text import parse_toml

Tables = dict[str, dict[str, Any]]
DEGREES = ("tp", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All settings that a training run depends on, without secrets and the ranks' addresses.

    `named` are the (table, name) that a file of settings has itself: the others are defaults, which flags, a model's
    folder and the data may replace.
    """

    run: RunSettings = field(default_factory=RunSettings)
    topology: TopologySettings = field(default_factory=TopologySettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataSettings = field(default_factory=DataSettings)
    preferences: PreferenceSettings = field(default_factory=PreferenceSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    job: JobSettings = field(default_factory=JobSettings)
    named: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def read(cls, path: str | Path, over: TrainConfig | None = None) -> TrainConfig:
        """Read the settings of a file, on top of `over` (None: the defaults).

        Raises ConfigError naming the file, and the table and name that are unknown or of the wrong type.
        """
        raw, over = read_toml(path), over or cls()
        config = cls.from_json(raw, str(path), over)
        return replace(config, named=over.named | {(table, name) for table, values in raw.items() for name in values})

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str = "config", over: TrainConfig | None = None) -> TrainConfig:
        """Make the settings of `raw`, on top of `over` (None: the defaults), with what they replace reset.

        Raises ConfigError naming `where`, table, name, value and bound.
        """
        tables, over = list_tables(), over or cls()
        for name in (*list_keys(raw), *(f"[{table}]" for table in raw)):
            if removed := describe_removed(name):
                raise ConfigError(f"{where}: {removed}")
        refuse_unknown(raw, tables, where)
        for name, values in raw.items():
            if not isinstance(values, Mapping):
                raise ConfigError(f"{where}: {name} must be a table like [{name}]")
            refuse_unknown(values, tables[name], f"{where}: [{name}]", tables)
        return over._replace(with_replaced(raw, over), where)

    def to_json(self) -> dict[str, Any]:
        return {
            table: {name: getattr(getattr(self, table), name) for name in settings}
            for table, settings in list_tables().items()
        }

    def with_values(self, **tables: Mapping[str, Any]) -> TrainConfig:
        """Replace some settings, for command-line flags: with_values(run={"steps": 5})."""
        return self._replace(tables, "command line")

    def _replace(self, tables: Mapping[str, Mapping[str, Any]], where: str) -> TrainConfig:
        """Replace settings of the same names, and add what a DeepSpeed configuration decides. Raises ConfigError."""
        if "deepspeed" in tables:
            tables = with_decided(tables)
        changed = {}
        for table, values in tables.items():
            settings = list_tables()[table]
            checked = {
                name: settings[name].check_value(value, f"{where}: [{table}] ") for name, value in values.items()
            }
            changed[table] = replace(getattr(self, table), **checked)
        if {"model", "lora"} & changed.keys():
            model, lora = changed.get("model", self.model), changed.get("lora", self.lora)
            model = with_described(model, tables.get("model", {}), where, adapts=lora.enabled)
            changed |= {"model": model, "lora": with_adapted(lora, model, where)}
        if "deepspeed" in changed:
            changed["deepspeed"] = with_read(changed["deepspeed"])
        config = with_preferences(replace(self, **changed), tables, where)
        config.check(where)
        return config

    def check(self, where: str) -> None:
        """Reject values that no run can work with; what depends on the data is checked later."""
        for table in list_tables():
            check_declared(getattr(self, table), f"{where}: [{table}] ")
        model, plan, topology = self.model, self.plan, self.topology
        if self.run.log_level == "debug" and not self.run.log_dir:
            raise ConfigError(f"{where}: [run] log_level is 'debug' but no log_dir says where logs go: give one")
        check_data_settings(self.data, where)
        check_preferences(self, where)
        check_optimizer(self.optimizer, where)
        check_features(self, "settings", f"{where}: ")
        check_pieces_of_model(model, plan.pieces, where)  # first: no rule of plans would help such a model
        check_width(self, where)
        check_rules(plan, f"{where}: [plan] ")
        check_stages(topology, plan, where)
        check_evaluation(self.eval, where)
        if model.from_scratch and model.init_from:
            raise ConfigError(
                f"{where}: [model] from_scratch starts from random weights but init_from is {model.init_from}: leave"
                " one of both out"
            )
        check_heads(model, topology, where)

    @property
    def placement(self) -> PlacementChoice:
        """The placement of stages on ranks, as it is named or as the schedule needs it."""
        return self.topology.placement or own_placement(self.plan.schedule)


def read_toml(path: str | Path, content: str = "settings") -> dict[str, Any]:
    """Read the tables of a TOML file. Raises ConfigError naming it and its `content`."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {reason(error)}: give a file of {content}") from error


def with_preferences(config: TrainConfig, given_tables: Mapping[str, Mapping[str, Any]], where: str) -> TrainConfig:
    """Make the records pairs and the loss a mean over these, if the run learns preferences. Raises ConfigError if the
    settings name others."""
    if not config.preferences.loss:
        return config
    for table, name, value in (("data", "template", "preference"), ("plan", "loss_norm", "samples")):
        if (named := given_tables.get(table, {}).get(name)) not in (None, "auto", value):
            raise ConfigError(
                f"{where}: [{table}] {name} is {named!r} but [preferences] loss {config.preferences.loss!r} takes"
                f" only {value!r}: leave it out"
            )
    data, plan = replace(config.data, template="preference"), replace(config.plan, loss_norm="samples")
    return replace(config, data=data, plan=plan)


@cache
def list_tables() -> Mapping[str, Mapping[str, Setting]]:
    """List all settings of a run, by table and name."""
    return {table: list_settings(owner) for table, owner in get_type_hints(TrainConfig).items() if table != "named"}


def check_optimizer(optimizer: OptimizerSettings, where: str) -> None:
    """Reject rates that no schedule of the learning rate has. Raises ConfigError."""
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(f"{where}: [optimizer] betas is {optimizer.betas} but must be two numbers of 0 to below 1")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"{where}: [optimizer] min_lr is {optimizer.min_lr:g} but must be at most lr, which is {optimizer.lr:g}:"
            " lower min_lr too"
        )


def check_stages(topology: TopologySettings, plan: PlanSettings, where: str) -> None:
    """Reject stages that cannot lie on ranks so, or not under the schedule. Raises ConfigError."""
    placement: PlacementChoice = topology.placement or own_placement(plan.schedule)
    if "auto" in (placement, topology.vocabulary_parallel):
        at = f"{where}: [topology] {'placement' if placement == 'auto' else 'vocabulary_parallel'} is 'auto'"
        if topology.layers_per_stage:
            raise ConfigError(
                f"{at}, which chooses layers_per_stage, but that is {topology.layers_per_stage}: leave it out, or"
                " name a placement and a vocabulary"
            )
        if plan.schedule != "adaptive":
            raise ConfigError(
                f"{at}, but schedule {plan.schedule!r} runs under only one, {own_placement(plan.schedule)}: leave"
                " placement out, or take the adaptive schedule"
            )
    name = "linear" if placement == "auto" else placement  # tried ones are made later
    try:
        check_layer_counts(topology.layers_per_stage)
        placed = Topology(pp=topology.pp, placement=place_stages(name, topology.pp, topology.stages_per_rank))
        if topology.vocabulary_parallel != "auto":
            placed = split_vocabulary(placed, topology.vocabulary_parallel)
    except ConfigError as error:
        raise ConfigError(f"{where}: [topology] {error}") from error
    check_placed(plan.schedule, placed, f"{where}: [plan] ")


def check_width(config: TrainConfig, where: str) -> None:
    """Reject a degree of context parallelism that data parallel ranks do not make. Raises ConfigError."""
    degree, dp = config.topology.context_parallel, config.topology.dp
    if degree not in ("auto", *(allowed := list_cp_degrees(dp))):
        raise ConfigError(
            f"{where}: [topology] context_parallel is {degree!r} but must be a power of two that divides dp {dp}: give"
            f" one of {', '.join(map(str, allowed))}"
        )


def check_data_settings(data: DataSettings, where: str) -> None:
    """Reject settings that do not go together. Raises ConfigError."""
    if (data.tokens_per_batch > 0) == (data.batch_size > 0):
        raise ConfigError(
            f"{where}: [data] tokens_per_batch is {data.tokens_per_batch} and batch_size is"
            f" {data.batch_size}: set exactly one of them above 0"
        )
    if data.mixture and data.path:
        raise ConfigError(
            f"{where}: [data] path is {data.path} and mixture is {list(data.mixture)}: leave one out, or name all"
            " files in mixture"
        )
    weighted_files(data.mixture)
    if len(data.fields) > 2:
        raise ConfigError(f"{where}: [data] fields is {list(data.fields)}: name prompt and response, or only a text")
    if len(data.fields) == 1 and data.template not in ("auto", "text"):
        raise ConfigError(
            f"{where}: [data] fields is {list(data.fields)}, plain texts, but template is {data.template!r}: leave one"
            " of both out"
        )


def check_preferences(config: TrainConfig, where: str) -> None:
    """Reject settings that do not go with pairs of answers. Raises ConfigError."""
    preferences = config.preferences
    if not preferences.loss:
        if config.data.template == "preference":
            raise ConfigError(
                f"{where}: [data] template is 'preference' but [preferences] loss says of no loss to learn them by: set"
                " it, to dpo for example"
            )
        if preferences != PreferenceSettings():
            raise ConfigError(
                f"{where}: [preferences] describes a loss but loss is '', which learns from texts: set it, to dpo for"
                " example, or leave the others out"
            )
        return
    at = f"{where}: [preferences] loss is {preferences.loss!r}"
    if preferences.label_smoothing and preferences.loss != "dpo":
        raise ConfigError(
            f"{at} but label_smoothing is {preferences.label_smoothing:g}, which only dpo has: leave it out"
        )
    if preferences.gamma != PreferenceSettings().gamma and preferences.loss != "simpo":
        raise ConfigError(f"{at} but gamma is {preferences.gamma:g}, which only simpo has: leave it out")


def check_evaluation(settings: EvalSettings, where: str) -> None:
    """Reject an evaluation without data, with two kinds of them, or data that no evaluation reads."""
    table = f"{where}: [eval]"
    if settings.path and settings.fraction:
        raise ConfigError(
            f"{table} path is {settings.path} and fraction is {settings.fraction}: evaluate on data of their own or on"
            " a part of the training data, leave one out"
        )
    if settings.every and not (settings.path or settings.fraction):
        raise ConfigError(
            f"{table} every is {settings.every} but there is nothing to evaluate on: give path, held-out data, or"
            " fraction, the part of the training data to hold out, like 0.05"
        )
    named = [f"{name} is {value}" for name in ("path", "fraction", "steps") if (value := getattr(settings, name))]
    if named and not settings.every:
        raise ConfigError(
            f"{table} {' and '.join(named)} but every is 0, which never evaluates: set every, or leave the others out"
        )


def check_heads(model: ModelSettings, topology: TopologySettings, where: str) -> None:
    """Reject sizes of heads, positions and experts that no model has. Raises ConfigError."""
    if model.described is not None:
        if model.described.num_experts and topology.tp > 1 and not topology.sequence_parallel:
            raise ConfigError(
                f"{where}: [model] architecture {model.architecture} has {model.described.num_experts} experts,"
                f" which Megatron trains with tp {topology.tp} only under sequence parallelism: set [topology]"
                " sequence_parallel = true, or tp 1"
            )
        return
    if (model.position == "relative") != (model.num_decoder_layers > 0):
        raise ConfigError(
            f"{where}: [model] position is {model.position!r} and num_decoder_layers is {model.num_decoder_layers}:"
            " relative positions are those of an encoder-decoder, which has a decoder's layers, and no others"
        )
    for name, divisor in (("hidden_size", "num_heads"), ("num_heads", "num_query_groups")):
        if (size := getattr(model, name)) % (count := getattr(model, divisor)):
            raise ConfigError(
                f"{where}: [model] {name} is {size} but must be a multiple of {divisor}, which is {count}"
            )
    head_size = model.hidden_size // model.num_heads
    if model.position == "rope" and head_size % 2:
        raise ConfigError(
            f"{where}: [model] hidden_size / num_heads is {model.hidden_size} / {model.num_heads} = {head_size} but"
            ' must be even with position = "rope", which turns pairs of numbers'
        )


def check_pieces_of_model(model: ModelSettings, pieces: Pieces, where: str) -> None:
    """Reject pieces of long samples if attention cannot continue from piece to piece. Raises ConfigError."""
    if pieces == "off" or model.described is None:
        return
    if fault := carried_fault(model.architecture) if model.uses_transformers else model.described.pieces_fault:
        raise ConfigError(f'{where}: [plan] pieces is {pieces!r} but {fault} (pieces = "off")')


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all settings, in groups by their table in the file."""
    for table, settings in list_tables().items():
        group = parser.add_argument_group(f"[{table}]")
        for one in settings.values():
            if one.flag:
                _add_flag_of(group, one)


def add_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add the flags of the named settings, as "plan.layout"."""
    for name in names:
        _add_flag_of(parser, _find_setting(name))


def add_flag(parser: argparse._ActionsContainer, name: str, help: str, **options: Any) -> None:
    """Add the flag of one setting, with help of its own, and other `options` of argparse."""
    one = _find_setting(name)
    parser.add_argument(one.flag, **one.flag_options | options, help=help)


def _find_setting(name: str) -> Setting:
    table, _, key = name.partition(".")
    return list_tables()[table][key]


def _add_flag_of(parser: argparse._ActionsContainer, one: Setting) -> None:
    says_default = "default" in one.help or one.default in ("", False, ())
    default = "" if says_default else f" (default: {one.default})"
    parser.add_argument(*filter(None, (one.flag, one.alias)), **one.flag_options, help=one.help + default)


def read_flags(
    args: argparse.Namespace, config: TrainConfig, tables: Mapping[str, Mapping[str, Any]], *, of_file: bool
) -> Tables:
    """Return the settings in `tables`, overridden by the flags of the command line: what replaces settings of `config`.

    What a flag replaces is reset (`with_replaced`). With `of_file` degrees of parallelism without a flag stay those of
    the file. Else they are 1, once one of them has a flag.
    """
    settings: Tables = {table: dict(tables.get(table, {})) for table in list_tables()}
    for table, declared_settings in list_tables().items():
        for name, one in declared_settings.items():
            value = getattr(args, one.flag[2:].replace("-", "_"), None)
            if value is not None:
                settings[table][name] = tuple(value) if isinstance(value, list) else value
    if settings["data"].keys() & {"batch_size", "tokens_per_batch"}:  # also for --batch-size 0, which means none
        settings["data"] = {"batch_size": 0, "tokens_per_batch": 0} | settings["data"]
    settings = with_replaced(settings, config)
    if not of_file and settings["topology"].keys() & {*DEGREES}:
        settings["topology"] = dict.fromkeys(DEGREES, 1) | settings["topology"]
    return {table: values for table, values in settings.items() if values}


# Each row has settings of which one is given: whoever gives some of them resets the others to these values, which mean
# that they are not given. No step of warm-up is an answer, too.
_ALTERNATIVES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("data", {"batch_size": 0, "tokens_per_batch": 0}),
    ("data", {"path": "", "mixture": ()}),
    ("eval", {"path": "", "fraction": 0.0}),
    ("optimizer", {"warmup_steps": 0, "warmup_fraction": 0.0}),
)


def with_replaced(tables: Mapping[str, Mapping[str, Any]], config: TrainConfig) -> Tables:
    """Return the settings with those of `config` that they replace reset. `steps` reset the epochs, and one of a row of
    alternatives the other ones. A placement or another `pp` resets the layers of stages; `pp` 1 also the placement."""
    replaced: Tables = {table: dict(values) for table, values in tables.items()}
    if "steps" in replaced.get("run", {}):
        replaced["run"] = {"epochs": 0.0} | replaced["run"]
    for table, alternatives in _ALTERNATIVES:
        named = {name for name, value in replaced.get(table, {}).items() if value or name == "warmup_steps"}
        if named & alternatives.keys():
            replaced[table] = {**alternatives, **replaced[table]}
    if topology := replaced.get("topology"):
        pp, before = topology.get("pp", config.topology.pp), config.topology.pp
        others: dict[str, Any] = {"placement": "", "vocabulary_parallel": "whole"} if pp == 1 and pp != before else {}
        if pp != before or "placement" in topology or topology.get("vocabulary_parallel") == "auto":
            others["layers_per_stage"] = ()  # those of other stages
        replaced["topology"] = others | topology
    return replaced
