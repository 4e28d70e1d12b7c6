"""The settings of a run as plain values, read from TOML: one table a concern, unknown names refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dynapipe_ext.batch.micro_batches import Layout, LossNorm, Pieces
from dynapipe_ext.batch.topology import (
    PlacementName,
    ScheduleName,
    Topology,
    check_fill_waits,
    check_placed,
    own_placement,
    placement_of,
)
from dynapipe_ext.errors import ConfigError, reason
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.transformers_sizes import Backend
from dynapipe_ext.settings.data_settings import DataSettings, EvalSettings, check_data_settings, check_evaluation
from dynapipe_ext.settings.deepspeed_settings import DeepSpeedSettings, with_decided, with_read
from dynapipe_ext.settings.lora_settings import LoraSettings, with_adapted
from dynapipe_ext.settings.model_settings import (
    check_heads,
    check_pieces_of_model,
    refuse_order_in_bits,
    with_described,
)
from dynapipe_ext.settings.values import checked_value, refuse_out_of_bounds, refuse_unknown

PlacementChoice = Literal[PlacementName, "auto"]
_READ = "described"  # of [model], [lora] and [deepspeed]: no setting, but what one of them names
SaveFormat = Literal["hf", "megatron", "deepspeed"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]
SplitRule = Literal["dynapipe-ext", "batch-max", "fixed-rows", "packed-balanced", "dynapipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """`run_dir` empty means a new directory under runs/, named by the time. Figures of all ranks are gathered every
    `log_every` steps, and at the last `traced_steps`, whose timelines go into trace.html. `epochs` above 0 is how often
    the data are gone through, and takes the place of `steps`. `wandb` names a project of Weights & Biases to log to."""

    steps: int = 40
    epochs: float = 0.0
    seed: int = 0
    run_dir: str = ""
    log_every: int = 1
    traced_steps: int = 3
    tensorboard: bool = False
    wandb: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySettings:
    """`placement` empty is the one that the schedule needs, else linear; "auto" tries all on batches of the run and
    takes the best, with its `layers_per_stage`, before the model is built. `stages_per_rank` 0 is the placement's own
    number."""

    tp: int = 2
    pp: int = 2
    dp: int = 2
    placement: Literal[PlacementChoice, ""] = ""
    stages_per_rank: int = 0
    layers_per_stage: tuple[int, ...] = ()
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """`architecture` names a published model (a config.json or its folder, Megatron's arguments as JSON, a preset) and
    gives all sizes; then `max_seq_len` alone may be said, to keep rows shorter. `init_from` is the folder of a
    checkpoint whose weights the run starts with. `backend`: what computes the model ("auto": megatron-core where it
    can, which with adapters it cannot, else transformers). `described` is read, not given: the model that
    `architecture` names.

    With `num_decoder_layers` the model is T5 in sizes of one's own, `num_layers` those of its encoder; `max_seq_len`
    bounds input and target together, and may be above what a published T5 was trained on: its positions are relative.
    """

    architecture: str = ""
    backend: Backend = "auto"
    init_from: str = ""
    num_layers: int = 4
    num_decoder_layers: int = 0
    hidden_size: int = 128
    num_heads: int = 4
    num_query_groups: int = 4
    ffn_hidden_size: int = 512
    gated_mlp: bool = False
    max_seq_len: int = 1024
    tied_embeddings: bool = True
    position: Literal["learned", "rope", "relative"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    described: Architecture | None = None

    @property
    def total_layers(self) -> int:
        """Of encoder and decoder, or of a decoder alone: what stages are made of."""
        return self.num_layers + self.num_decoder_layers

    @property
    def uses_transformers(self) -> bool:
        return self.described is not None and (
            self.described.family == "transformers" or self.backend == "transformers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """`costs` names a cost file; empty means: measure this machine before the run. `max_tokens` caps the positions of
    one micro-batch (0: only memory does). `pieces` cuts samples of more than so many tokens; "auto": where steps then
    end earlier. `fill_waits` lets ranks run weight gradients of split backwards while they wait for a transfer.
    `adapt_costs` fits the costs anew to what the run's actions take, where these are far off."""

    layout: Layout = "packed"
    schedule: ScheduleName = "adaptive"
    rule: SplitRule = "dynapipe-ext"
    costs: str = ""
    memory_limit_gb: float = 1.0
    pad_multiple: int = 8
    max_tokens: int = 0
    effort: int = 8000
    split_backward: bool = False
    fill_waits: bool = False
    loss_norm: LossNorm = "tokens"
    recompute: Literal["auto", "none", "selective", "full", "stage"] = "auto"
    replica_counts: Literal["free", "equal"] = "free"
    pieces: Pieces = "off"
    adapt_costs: bool = False

    @property
    def memory_limit_bytes(self) -> int:
        return round(self.memory_limit_gb * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with linear warm-up, then `lr_schedule` down to `min_lr` over the run ("wsd" is constant, and linear over
    its last tenth). Warm-up takes `warmup_steps`, or where it is above 0 `warmup_fraction` of all steps. Weights decay
    but for norms and biases; `clip_grad` is the global norm (0: off).

    A step whose loss or gradients are not finite changes no weight: `nan_policy` "stop" ends the run there, "skip"
    leaves out up to `max_skips` such steps in a row. `deterministic`: sums of gradients, their norm and the loss are
    exact, so that for the same micro-batches they have the same bits under every plan, PP and DP degree; that takes 8
    bytes a parameter more, which plans count."""

    lr: float = 2e-3
    min_lr: float = 2e-4
    lr_schedule: LrSchedule = "cosine"
    warmup_steps: int = 5
    warmup_fraction: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    distributed: bool = False
    nan_policy: Literal["stop", "skip"] = "stop"
    max_skips: int = 3
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """A run saves every `save_every` steps and every `save_minutes` (0: not by these), and always at its end. The
    `keep_last` newest stay (0: all), with `keep_best` also that of the least loss, by validation where there is one.
    `background`: training goes on while a copy is written. A run that is asked to end by a signal saves and has ended
    within `grace_s`. One that ends well leaves its model in the folder `output`, if named, as `save_format`: that of
    the checkpoint `keep_best` has kept, else the last one's."""

    output: str = ""
    save_format: SaveFormat = "hf"
    save_every: int = 0
    save_minutes: float = 0.0
    keep_last: int = 2
    keep_best: bool = False
    background: bool = False
    grace_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """`strict` enforces NCCL's ordering rules over gloo. `redis_server` is the embedded store's server binary."""

    timeout_s: float = 120.0
    strict: bool = False
    redis_server: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings:
    """Each rank keeps a log in `log_dir`; at level "debug" of every action as it ends, for which accelerators are
    synchronised. The plan of every step is written into `plan_dir`, for `dynapipe replay`. Empty: not."""

    log_dir: str = ""
    log_level: Literal["info", "debug"] = "info"
    plan_dir: str = ""


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
        data, optimizer = self.data, self.optimizer
        if self.debug.log_level == "debug" and not self.debug.log_dir:
            raise ConfigError(f"{where}: [debug] log_level is 'debug' but no log_dir says where logs go: give one")
        check_data_settings(data, where)
        if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
            raise ConfigError(
                f"{where}: [optimizer] betas is {optimizer.betas} but must be two numbers of 0 to below 1"
            )
        if not 0 <= optimizer.warmup_fraction < 1:
            raise ConfigError(
                f"{where}: [optimizer] warmup_fraction is {optimizer.warmup_fraction} but must lie in 0..1:"
                " warmup_steps counts steps"
            )
        if not 0 <= self.model.dropout < 1:
            raise ConfigError(f"{where}: [model] dropout is {self.model.dropout} but must lie in 0..1")
        if optimizer.min_lr > optimizer.lr:
            raise ConfigError(
                f"{where}: [optimizer] min_lr is {optimizer.min_lr:g} but must be at most lr, which is"
                f" {optimizer.lr:g}: lower min_lr too"
            )
        if self.model.num_decoder_layers and self.plan.rule == "fixed-rows":
            raise ConfigError(
                f"{where}: [plan] rule 'fixed-rows' packs rows that attend as a whole, which would mix the inputs of an"
                " encoder-decoder: take rule dynapipe-ext, or packed-balanced"
            )
        check_fill_waits(self.plan.fill_waits, self.plan.schedule, self.plan.split_backward, f"{where}: [plan] ")
        self._check_placement(where)
        check_evaluation(self.eval, where)
        check_heads(self, where)
        check_pieces_of_model(self, where)
        if optimizer.deterministic:
            refuse_order_in_bits(self, where)

    @property
    def placement(self) -> PlacementChoice:
        """Of stages on ranks, as it is named or as the schedule needs it."""
        return self.topology.placement or own_placement(self.plan.schedule)

    def _check_placement(self, where: str) -> None:
        t = self.topology
        if self.placement == "auto":
            said = f"{where}: [topology] placement is 'auto'"
            if t.layers_per_stage:
                raise ConfigError(
                    f"{said}, which chooses layers_per_stage, but that is {t.layers_per_stage}: leave it out, or name a"
                    " placement"
                )
            if self.plan.schedule != "adaptive":
                raise ConfigError(
                    f"{said}, but schedule {self.plan.schedule!r} runs under one alone,"
                    f" {own_placement(self.plan.schedule)}: leave placement out, or take the adaptive schedule"
                )
            return
        try:
            stage_ranks = placement_of(self.placement, t.pp, t.stages_per_rank or None)
        except ConfigError as error:
            raise ConfigError(f"{where}: [topology] {error}") from error
        check_placed(self.plan.schedule, Topology(pp=t.pp, placement=stage_ranks), f"{where}: [plan] ")
