"""The settings of a run, read from TOML: one table a concern, unknown names refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from dynapipe_ext.errors import ConfigError, reason, refuse_unknown
from dynapipe_ext.settings.agreement import (
    check_data_settings,
    check_evaluation,
    check_heads,
    check_optimizer,
    check_pieces_of_model,
    check_preferences,
    check_stages,
    check_width,
    refuse_order_in_bits,
)
from dynapipe_ext.settings.declared import Setting, check_declared, declared
from dynapipe_ext.settings.deepspeed_settings import with_decided, with_read
from dynapipe_ext.settings.model_settings import with_adapted, with_described
from dynapipe_ext.settings.plan_rules import check_rules, own_placement
from dynapipe_ext.settings.tables import (
    CheckpointSettings,
    DataSettings,
    DebugSettings,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training run depends on, besides secrets and the ranks' addresses."""

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
    debug: DebugSettings = field(default_factory=DebugSettings)

    @classmethod
    def read(cls, path: str | Path) -> TrainConfig:
        """Errors: ConfigError naming the file, and the table and name that are unknown or of the wrong type."""
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as TOML: {reason(error)}: give a file of settings") from error
        return cls.from_json(raw, where=str(path))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str = "config") -> TrainConfig:
        """Errors: ConfigError naming `where`, table, name, value and bound."""
        tables = declared_tables()
        refuse_unknown(raw, tables, where)
        if not_tables := [name for name in raw if not isinstance(raw[name], Mapping)]:
            raise ConfigError(f"{where}: {not_tables[0]} must be a table like [{not_tables[0]}]")
        for name, values in raw.items():
            refuse_unknown(values, tables[name], f"{where}: [{name}]", tables)
        return cls()._with(raw, where)

    def to_json(self) -> dict[str, Any]:
        return {
            table: {name: getattr(getattr(self, table), name) for name in settings}
            for table, settings in declared_tables().items()
        }

    def with_values(self, **tables: Mapping[str, Any]) -> TrainConfig:
        """The same settings with some replaced, for command-line flags: with_values(run={"steps": 5})."""
        return self._with(tables, "command line")

    def _with(self, tables: Mapping[str, Mapping[str, Any]], where: str) -> TrainConfig:
        """With these settings in place of those of the same names, and with what a DeepSpeed configuration decides.
        Errors: ConfigError."""
        if "deepspeed" in tables:
            tables = with_decided(tables)
        changed = {}
        for table, values in tables.items():
            settings = declared_tables()[table]
            checked = {name: settings[name].checked(value, f"{where}: [{table}] ") for name, value in values.items()}
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
        """Refuse values that no run can work with; what depends on the data is checked where it is known."""
        for table in declared_tables():
            check_declared(getattr(self, table), f"{where}: [{table}] ")
        model, plan, topology = self.model, self.plan, self.topology
        if self.debug.log_level == "debug" and not self.debug.log_dir:
            raise ConfigError(f"{where}: [debug] log_level is 'debug' but no log_dir says where logs go: give one")
        check_data_settings(self.data, where)
        check_preferences(self.preferences, self.data, self.plan, model, where)
        check_optimizer(self.optimizer, where)
        if model.num_decoder_layers and plan.rule == "fixed-rows":
            raise ConfigError(
                f"{where}: [plan] rule 'fixed-rows' packs rows that attend as a whole, which would mix the inputs of an"
                " encoder-decoder: take rule dynapipe-ext, or packed-balanced"
            )
        check_pieces_of_model(model, plan.pieces, where)  # first: no rule of plans would help such a model
        check_width(topology, model, self.deepspeed.config, where)
        check_rules(plan, f"{where}: [plan] ", counts_may_be_free=1 < topology.dp in topology.widths)
        check_stages(topology, plan, where)
        check_evaluation(self.eval, where)
        check_heads(model, topology, where)
        if self.optimizer.deterministic:
            refuse_order_in_bits(model, plan, topology, deepspeed_config=self.deepspeed.config, where=where)

    @property
    def placement(self) -> PlacementChoice:
        """Of stages on ranks, as it is named or as the schedule needs it."""
        return self.topology.placement or own_placement(self.plan.schedule)


def with_preferences(config: TrainConfig, given_tables: Mapping[str, Mapping[str, Any]], where: str) -> TrainConfig:
    """Where the run learns preferences, its records are pairs and its loss is a mean over these. Errors: ConfigError
    where the settings name others."""
    if not config.preferences.loss:
        return config
    for table, name, value in (("data", "template", "preference"), ("plan", "loss_norm", "samples")):
        if (named := given_tables.get(table, {}).get(name)) not in (None, "auto", value):
            raise ConfigError(
                f"{where}: [{table}] {name} is {named!r} but [preferences] loss {config.preferences.loss!r} takes"
                f" {value!r} alone: leave it out"
            )
    data, plan = replace(config.data, template="preference"), replace(config.plan, loss_norm="samples")
    return replace(config, data=data, plan=plan)


@cache
def declared_tables() -> Mapping[str, Mapping[str, Setting]]:
    """All settings of a run, by table and name."""
    return {table: declared(owner) for table, owner in get_type_hints(TrainConfig).items()}
