"""The settings of a run, read from TOML: one table a concern, unknown names refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from dynapipe_ext.batch.topology import check_fill_waits, own_placement
from dynapipe_ext.errors import ConfigError, reason, refuse_unknown
from dynapipe_ext.settings.agreement import (
    check_data_settings,
    check_evaluation,
    check_heads,
    check_optimizer,
    check_pieces_of_model,
    check_stages,
    refuse_order_in_bits,
)
from dynapipe_ext.settings.deepspeed_settings import with_decided, with_read
from dynapipe_ext.settings.model_settings import with_adapted, with_described
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
    RunSettings,
    TopologySettings,
)
from dynapipe_ext.settings.values import checked_value, refuse_out_of_bounds

_READ = "described"  # of [model], [lora] and [deepspeed]: no setting, but what one of them names


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training run depends on, besides secrets and the ranks' addresses."""

    run: RunSettings = field(default_factory=RunSettings)
    topology: TopologySettings = field(default_factory=TopologySettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataSettings = field(default_factory=DataSettings)
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
        tables = get_type_hints(cls)
        refuse_unknown(raw, tables, where)
        if not_tables := [name for name in raw if not isinstance(raw[name], Mapping)]:
            raise ConfigError(f"{where}: {not_tables[0]} must be a table like [{not_tables[0]}]")
        raw = with_decided(raw)
        names = {table: get_type_hints(settings).keys() - {_READ} for table, settings in tables.items()}
        built = {}
        for name, table in tables.items():
            values = raw.get(name, {})
            hints = {key: hint for key, hint in get_type_hints(table).items() if key != _READ}
            refuse_unknown(values, hints, f"{where}: [{name}]", names)
            checked = {key: checked_value(v, hints[key], f"{where}: [{name}] {key}") for key, v in values.items()}
            built[name] = table(**checked)
        adapts = built["lora"].enabled
        built["model"] = with_described(built["model"], raw.get("model", {}), where, adapts=adapts)
        built["lora"] = with_adapted(built["lora"], built["model"], where)
        built["deepspeed"] = with_read(built["deepspeed"])
        config = cls(**built)
        config.check(where)
        return config

    def to_json(self) -> dict[str, Any]:
        return {name: {key: v for key, v in table.items() if key != _READ} for name, table in asdict(self).items()}

    def with_values(self, **tables: Mapping[str, Any]) -> TrainConfig:
        """The same settings with some replaced, for command-line flags: with_values(run={"steps": 5})."""
        decided = with_decided(tables)
        changed = {name: replace(getattr(self, name), **values) for name, values in decided.items() if values}
        if {"model", "lora"} & changed.keys():
            model, lora = changed.get("model", self.model), changed.get("lora", self.lora)
            model = with_described(model, decided.get("model", {}), "command line", adapts=lora.enabled)
            changed |= {"model": model, "lora": with_adapted(lora, model, "command line")}
        if "deepspeed" in changed:
            changed["deepspeed"] = with_read(changed["deepspeed"])
        config = replace(self, **changed)
        config.check("command line")
        return config

    def check(self, where: str) -> None:
        """Refuse values that no run can work with; what depends on the data is checked where it is known."""
        refuse_out_of_bounds(self.to_json(), where)
        model, plan, topology = self.model, self.plan, self.topology
        if self.debug.log_level == "debug" and not self.debug.log_dir:
            raise ConfigError(f"{where}: [debug] log_level is 'debug' but no log_dir says where logs go: give one")
        check_data_settings(self.data, where)
        check_optimizer(self.optimizer, where)
        if not 0 <= model.dropout < 1:
            raise ConfigError(f"{where}: [model] dropout is {model.dropout} but must lie in 0..1")
        if model.num_decoder_layers and plan.rule == "fixed-rows":
            raise ConfigError(
                f"{where}: [plan] rule 'fixed-rows' packs rows that attend as a whole, which would mix the inputs of an"
                " encoder-decoder: take rule dynapipe-ext, or packed-balanced"
            )
        check_fill_waits(plan.fill_waits, plan.schedule, plan.split_backward, f"{where}: [plan] ")
        check_stages(topology, plan, where)
        check_evaluation(self.eval, where)
        check_heads(model, topology, where)
        check_pieces_of_model(model, plan.pieces, where)
        if self.optimizer.deterministic:
            refuse_order_in_bits(model, plan, pp=topology.pp, deepspeed_config=self.deepspeed.config, where=where)

    @property
    def placement(self) -> PlacementChoice:
        """Of stages on ranks, as it is named or as the schedule needs it."""
        return self.topology.placement or own_placement(self.plan.schedule)
