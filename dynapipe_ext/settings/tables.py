"""The tables of a run's settings, as plain values: one class a table of the TOML file, one declaration a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dynapipe_ext.batch.micro_batches import Layout
from dynapipe_ext.batch.topology import Offload, PlacementName, Vocabulary, ZeroStage, list_cp_degrees
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.layer_pattern import ProvenCut
from dynapipe_ext.models.named_models import Backend
from dynapipe_ext.settings.declared import (
    parse_betas,
    parse_dtype,
    parse_layer_counts,
    parse_number_or_word,
    setting,
)
from dynapipe_ext.settings.plan_rules import PlanRules

PlacementChoice = Literal[PlacementName, "auto"]
VocabularyChoice = Literal[Vocabulary, "auto"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]
TemplateChoice = Literal["auto", "chat", "prompt", "text", "preference"]
PreferenceKind = Literal["", "dpo", "ipo", "orpo", "simpo"]
LossOnChoice = Literal["answers", "last-answer"]
Logger = Literal["tensorboard", "wandb"]
_MOMENTS = {"adagrad": 1, "lion": 1, "sgd": 0}  # of each parameter, by an optimizer of DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The length of the run, and what it writes. `epochs` above 0 counts passes over the data and replaces `steps`. The
    figures of all ranks are gathered every `log_every` steps. An empty `run_dir` means a new directory under runs/,
    named by the time. The project of "wandb" (Weights & Biases) is named by WANDB_PROJECT. Each rank writes a log into
    `log_dir`; at level "debug" with every action as it ends, which synchronises accelerators. The plan of every step
    that has begun is written into `plan_dir`, for `dynapipe replay`."""

    steps: int = setting(40, "--steps", "optimizer steps", at_least=1)
    epochs: float = setting(0.0, "--epochs", "passes over the data, instead of steps", "N", at_least=0, at_most=10_000)
    seed: int = setting(0, "--seed", "seed of data order, weights and dropout", at_least=0)
    run_dir: str = setting("", "--run-dir", "report, traces, events (default: runs/ and the time)", "DIR")
    log_every: int = setting(1, at_least=1)
    loggers: tuple[Logger, ...] = setting((), "--loggers", "log to TensorBoard, Weights & Biases, or both")
    log_dir: str = setting("", "--log-dir", "keep a log of each rank there", "DIR")
    log_level: Literal["info", "debug"] = setting("info", "--log-level", "debug: with every action")
    plan_dir: str = setting("", "--plan-dir", "keep every step's plan there, for replay", "DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySettings:
    """An empty `placement` is the one that the schedule needs, linear for most. "auto" plans batches of the run under
    every placement, before the model is built, and takes the best with its `layers_per_stage`. Ranks have the
    placement's usual number of stages, or as many as `layers_per_stage` names, which counts only stages of layers.
    `vocabulary_parallel` "head" divides the head over the pipeline ranks, in stages behind the layers; "both" divides
    the embedding too, in stages before them; "whole" divides neither, and "auto" tries them like placements.
    `context_parallel` data parallel ranks form one replica, each with a slice of every row's positions; "auto" lets
    each step take the degree whose plan ends first.
    """

    tp: int = setting(2, "--tp", "tensor parallel ranks", at_least=1, at_most=1 << 16)
    pp: int = setting(2, "--pp", "pipeline ranks", at_least=1, at_most=1 << 16)
    dp: int = setting(2, "--dp", "data parallel replicas", at_least=1, at_most=1 << 16)
    context_parallel: Literal["auto"] | int = setting(
        1,
        "--context-parallel",
        "data parallel ranks that share each row of a replica; auto: each step's best",
        "auto|N",
        alias="--cp",
        parse=parse_number_or_word,
        at_least=1,
        at_most=1 << 20,
    )
    placement: Literal[PlacementChoice, ""] = setting(
        "", "--placement", "placement of stages on ranks (default: as the schedule needs; auto: try each on the data)"
    )
    layers_per_stage: tuple[float, ...] = setting(
        (),
        "--layers-per-stage",
        "layers of each stage, as 8.5,8,7.5 (default: even)",
        "N,N,…",
        parse=parse_layer_counts,
    )
    vocabulary_parallel: VocabularyChoice = setting(
        "whole",
        "--vocabulary-parallel",
        "split over pipeline ranks: the output layer (head), the embedding too (both), or as is fastest (auto)",
    )
    sequence_parallel: bool = setting(False, "--sequence-parallel", "cut norms and dropout over the tp ranks, too")

    @property
    def stages_per_rank(self) -> int | None:
        """The stages of `layers_per_stage` per rank; None without it, for the placement's usual number."""
        return max(1, len(self.layers_per_stage) // self.pp) if self.layers_per_stage else None

    @property
    def widths(self) -> tuple[int, ...]:
        """The context-parallel degrees that a step may have."""
        return list_cp_degrees(self.dp) if self.context_parallel == "auto" else (self.context_parallel,)

    def __post_init__(self) -> None:
        wholes = tuple(int(count) if count == count // 1 else count for count in self.layers_per_stage)
        object.__setattr__(self, "layers_per_stage", wholes)  # as they are written elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """`architecture` names a published model: its config.json or folder, Megatron's arguments as JSON, or a preset. It
    gives all sizes; only `max_seq_len` may be set with it, to keep rows shorter. `described` holds those sizes; it is
    read from the model and not a setting. `init_from` is the folder of a checkpoint with the first weights. A published
    configuration without it trains only with `from_scratch`, from random weights; a preset, which has no weights, needs
    neither. `backend` "auto" computes the model by megatron-core if that is possible, else by transformers, as for
    adapters. `layer_pattern` is a file that names the modules of a transformers model, if they cannot be derived;
    `cut` is where the model is cut into stages, once that is proven, and not a setting. `dropout` is the rate of all
    dropout in training; the rates in a config.json do not count.

    With `num_decoder_layers` the model is a T5 of these sizes, and its encoder has `num_layers`. `max_seq_len` then
    bounds input and target together. It may exceed that of a published T5, whose positions are relative.
    """

    architecture: str = setting(
        "", "--architecture", "config.json or its folder, or a preset: a published model instead of own sizes", "MODEL"
    )
    backend: Backend = setting("auto", "--backend", "what computes the model")
    init_from: str = setting("", "--init-from", "start from the weights of a checkpoint", "DIR")
    from_scratch: bool = setting(False, "--from-scratch", "start a published model from RANDOM WEIGHTS")
    layer_pattern: str = setting(
        "", "--layer-pattern", "names of a transformers model's modules (default: derived)", "FILE"
    )
    num_layers: int = setting(4, at_least=1)
    num_decoder_layers: int = setting(0, at_least=0)
    hidden_size: int = setting(128, at_least=1)
    num_heads: int = setting(4, at_least=1)
    num_query_groups: int = setting(4, at_least=1)
    ffn_hidden_size: int = setting(512, at_least=1)
    gated_mlp: bool = setting(False)
    max_seq_len: int = setting(1024, "--max-seq-len", "longest sample in tokens", at_least=1)
    tied_embeddings: bool = setting(True)
    position: Literal["learned", "rope", "relative"] = setting("rope")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm")
    bias: bool = setting(True)
    dropout: float = setting(0.0, at_least=0, below=1)
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "--dtype", "type of weights (fp32, bf16 for short); master weights are fp32", parse=parse_dtype
    )
    described: Architecture | None = None
    cut: ProvenCut | None = None

    @property
    def total_layers(self) -> int:
        """The number of layers in stages, of encoder and decoder."""
        return self.num_layers + self.num_decoder_layers

    @property
    def uses_transformers(self) -> bool:
        return self.described is not None and (
            self.described.family == "transformers" or self.backend == "transformers"
        )


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer: its name within the block, its numbers of inputs and outputs, and which part of all blocks has
    it."""

    name: str
    num_inputs: int
    num_outputs: int
    part_of_blocks: float = 1.0

    def answers_to(self, target: str) -> bool:
        """Return whether peft matches the name: all of it or its end."""
        return f".{self.name}".endswith(f".{target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The adapters. With `enabled`, they train instead of the model's weights; the names are those of peft's
    LoraConfig. Adapters have rank `r` and scale `lora_alpha` / `r`. They are attached to the linear layers
    `target_modules` of every block: "all-linear" means all of them, and no name those that peft adapts for the family.
    `described` lists the adapted layers; it is read from the model and not a setting."""

    enabled: bool = setting(False, "--lora", "train adapters of peft, not the model's weights")
    r: int = setting(8, "--lora-r", "rank of the adapters", "R", at_least=1)
    lora_alpha: float = setting(8.0, "--lora-alpha", "scale the adapters' outputs by A / rank", "A", above=0)
    lora_dropout: float = setting(
        0.0, "--lora-dropout", "dropout rate of the adapters' inputs", "P", at_least=0, below=1
    )
    target_modules: tuple[str, ...] = setting(
        (), "--lora-target-modules", "adapted layers, or all-linear (default: peft's of the family)", "NAME"
    )
    described: tuple[LinearLayer, ...] | None = None

    @property
    def stored_as(self) -> str:
        """A name of what decides which bytes a forward stores under the adapters; empty if none train."""
        if not self.enabled:
            return ""
        layers = " ".join(sorted(layer.name for layer in self.described or ()))
        return f"r {self.r}, {'with' if self.lora_dropout else 'no'} dropout, beside {layers}"

    @property
    def num_weights_a_block(self) -> int:
        """The number of weights in the adapters of a block, or their mean if blocks differ."""
        weights = (layer.part_of_blocks * (layer.num_inputs + layer.num_outputs) for layer in self.described or ())
        return round(self.r * sum(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The training data. `path` names them; empty: the built-in generator, which makes `num_samples`. `mixture` names
    several files instead, either all with their share of the samples, as "a.jsonl=0.7", or all without.

    `tokenizer` is "bpe" (trained on the data, with `vocab_size` ids), "bytes", or a name for `dynapipe preprocess
    --tokenizer`. The tokenizer of a model's folder also applies that model's chat template: `template` says what the
    records are, "auto" what the first one is. Loss falls on every answer of a chat that does not say otherwise, or on
    only the last of those (`loss_on`). `fields` names the fields of prompt and response, or of a text if it names one;
    by default they are found by their usual names.

    `template_date` (YYYY-MM-DD) is the day that a chat template prints which asks for it. By default it is the day of
    preparation; a run keeps it in its settings, so that a resume makes the same tokens on another day or machine.

    `max_input_len` and `max_target_len` bound the two sides of a sample; 0: only the whole sample is bounded. `tasks`
    is a file with such bounds, and weights, for each task. Exactly one of `tokens_per_batch` and `batch_size` is above
    0.
    """

    path: str = setting(
        "",
        "--data",
        "JSON, CSV, Parquet, Arrow or text; several as FILE=WEIGHT; or a folder of dynapipe preprocess",
        "FILE",
        nargs="+",
    )
    mixture: tuple[str, ...] = setting(())
    num_samples: int = setting(4000, at_least=1)
    tokenizer: str = setting("bpe", "--tokenizer", "bpe, bytes, or a name for dynapipe preprocess --tokenizer", "NAME")
    vocab_size: int = setting(1024, at_least=1)
    template: TemplateChoice = setting("auto", "--template", "what records are; auto: as the first one")
    loss_on: LossOnChoice = setting("answers", "--loss-on", "answers of a chat that are trained on")
    fields: tuple[str, ...] = setting(
        (), "--fields", "fields of prompt and response, or of text (default: found)", "NAME"
    )
    template_date: str = setting("")
    truncate: bool = setting(False)
    max_input_len: int = setting(0, "--max-input-len", "maximum tokens of an input; 0: only of a sample", at_least=0)
    max_target_len: int = setting(0, "--max-target-len", "maximum tokens of a target; 0: only of a sample", at_least=0)
    tasks: str = setting("", "--tasks", "TOML or JSON of tasks with other such lengths, and weights", "FILE")
    tokens_per_batch: int = setting(8192, "--tokens-per-batch", "real tokens of a step", at_least=0)
    batch_size: int = setting(0, "--batch-size", "samples of a step, instead", at_least=0)
    drop_last: bool = setting(False)
    num_workers: int = setting(1, "--num-workers", "planner processes; 0: in line", at_least=0, at_most=1 << 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSettings:
    """The loss of preferences. With a `loss` the run learns from pairs of a chosen and a rejected answer to a prompt;
    empty: from texts. dpo (Rafailov et al. 2023, arXiv 2305.18290) and ipo (Azar et al. 2023, arXiv 2310.12036, by the
    mean of tokens as TRL) compare with the model that the run begins with. orpo (Hong et al. 2024, arXiv 2403.07691)
    and simpo (Meng et al. 2024, arXiv 2405.14734) do not. `beta` "auto" is 0.1, of simpo 2. `gamma` is simpo's margin;
    `label_smoothing` is dpo's, the share of pairs that are the wrong way round."""

    loss: PreferenceKind = setting("", "--preferences", "learn from pairs of a chosen and a rejected answer")
    beta: Literal["auto"] | float = setting(
        "auto", "--beta", "strength of --preferences (auto: 0.1; simpo: 2)", "B", parse=parse_number_or_word, above=0
    )
    gamma: float = setting(1.0, at_least=0)
    label_smoothing: float = setting(0.0, at_least=0, below=0.5)

    @property
    def needs_references(self) -> bool:
        """Whether the loss compares with the model that the run begins with."""
        return self.loss in ("dpo", "ipo")

    @property
    def used_beta(self) -> float:
        if self.beta == "auto":
            return 2.0 if self.loss == "simpo" else 0.1
        return self.beta


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """The validation loss is taken every `every` steps (0: never) and after the last step. It covers the first `steps`
    global batches of a fixed order (0: all). The data are those in `path`, read by the tokenizer of the training data;
    or a `fraction` of the training samples, which the seed draws and which are never trained on."""

    every: int = setting(0, "--eval-every", "steps between validation losses; 0: none", "STEPS", at_least=0)
    steps: int = setting(0, "--eval-steps", "global batches of each; 0: all", at_least=0)
    path: str = setting("", "--eval-data", "held-out data, in the forms of --data", "FILE")
    fraction: float = setting(0.0, "--eval-fraction", "fraction of the data held out instead", "F", at_least=0, below=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(PlanRules):
    """The rules of the run's plans, and what plans are made for. `costs` names a cost file; empty: measure this machine
    before the run. `adapt_costs` fits the costs again to the times of the run's actions, if they are far off."""

    layout: Layout = setting("packed", **PlanRules.__dataclass_fields__["layout"].metadata)  # another default
    costs: str = setting("", "--costs", "cost model as JSON (default: measure this machine)", "FILE")
    memory_limit_gb: float = setting(
        1.0, "--memory-limit-gb", "memory of a rank, 10^9 bytes", "GB", at_least=1e-9, at_most=1e9
    )
    adapt_costs: bool = setting(False)

    @property
    def memory_limit_bytes(self) -> int:
        return round(self.memory_limit_gb * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW. The learning rate rises over `warmup_steps`, or over `warmup_fraction` of all steps if that is above 0.
    It then follows `lr_schedule` from `lr` to `min_lr`; "wsd" is constant, and linear over the last tenth. Weights of
    norms and biases do not decay, whatever their shapes and whatever computes the model: those that transformers'
    Trainer leaves out (`get_decay_parameter_names`). `clip_grad` bounds the global norm of gradients (0: off).

    A step whose loss or gradients are not finite, or whose gradient norm is above 1.8e19, changes no weight and does
    not count. `nan_policy` "stop" ends the run there; "skip" continues, for up to `max_skips` such steps in a row. With
    `deterministic`, sums of gradients, their norm and the loss are exact: equal micro-batches give equal bits under
    every plan, pp and dp, for one tp, context-parallel degree and vocabulary layout. That takes 8 bytes more for each
    parameter, which plans count.
    """

    lr: float = setting(2e-3, "--lr", "highest learning rate", "LR", above=0, at_most=1e6)
    min_lr: float = setting(
        2e-4, "--min-lr", "learning rate at the end (default: in proportion to --lr)", "LR", at_least=0
    )
    lr_schedule: LrSchedule = setting("cosine", "--lr-schedule", "learning rates after the warm-up")
    warmup_steps: int = setting(5, at_least=0)
    warmup_fraction: float = setting(0.0, at_least=0, below=1, hint="warmup_steps counts steps")
    betas: tuple[float, ...] = setting((0.9, 0.999), "--betas", "betas of Adam", "B1,B2", parse=parse_betas)
    weight_decay: float = setting(
        0.01, "--weight-decay", "weight decay, but not of norms and biases", "W", at_least=0, at_most=1e6
    )
    clip_grad: float = setting(1.0, at_least=0)
    distributed: bool = setting(False)
    nan_policy: Literal["stop", "skip"] = setting("stop")
    max_skips: int = setting(3, at_least=1)
    deterministic: bool = setting(
        False, "--deterministic", "same bits under every plan, pp and dp of the same micro-batches"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """A run saves every `save_every` steps and every `save_minutes` (0: not by these), and at its end. "auto" saves
    every 10 minutes, or after 20 times the duration of the last save if that is longer, and leaves out saves for which
    the disk has no space. The other saves are tried again after a minute, and the last one waits for space, up to an
    hour. The `keep_last` newest checkpoints stay (0: all). With `keep_best` the one of the least loss stays too, of the
    validation loss if there is one. After a signal to end, the run saves and ends within `grace_s`. At its end the run
    writes its model into the folder `output`: the checkpoint that `keep_best` kept, else the last one. A run of
    adapters writes only the adapters."""

    output: str = setting("", "--output", "folder to make of the trained model", "DIR")
    save_every: int = setting(0, "--save-every", "steps between checkpoints; 0: none", "STEPS", at_least=0)
    save_minutes: Literal["auto"] | float = setting("auto", at_least=0)
    keep_last: int = setting(2, "--keep-last", "checkpoints that stay; 0: all", at_least=0)
    keep_best: bool = setting(
        False, "--keep-best", "also keep the checkpoint of the lowest loss, and write it to --output (default: off)"
    )
    grace_s: float = setting(60.0, above=0, at_most=1e7)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """The DeepSpeed engine. `config` is the configuration file of an engine that trains the model; empty: no engine
    does. What the file decides becomes settings of other tables. `described` holds the file; it is read and not a
    setting."""

    config: str = setting("", "--deepspeed", "ds_config.json of an engine that trains", "FILE")
    described: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> ZeroStage:
        stage: ZeroStage = self._zero.get("stage", 0)
        return stage

    @property
    def offload(self) -> Offload:
        """The states that the engine leaves on the host. An optimizer of which a part (`ratio`) stays on the device
        counts as if all of it did."""
        weights = self._offloads("offload_param")
        if not self.offloads_optimizer or self._zero["offload_optimizer"].get("ratio", 1.0) != 1.0:
            return "weights" if weights else "none"
        return "all" if weights else "optimizer"

    @property
    def num_moments(self) -> int:
        """Values that the optimizer keeps per parameter: those of Adam, unless the file names another known one."""
        section = (self.described or {}).get("optimizer", {})
        return count_moments(str(section.get("type", "AdamW")), section.get("params", {}))

    @property
    def offloads_optimizer(self) -> bool:
        """Whether, wholly or in part."""
        return self._offloads("offload_optimizer")

    def _offloads(self, section: str) -> bool:
        """Return whether a section offloads. In DeepSpeed stage 0 has no offload, and only stage 3 offloads weights."""
        least = {"offload_optimizer": 1, "offload_param": 3}[section]
        return self.zero_stage >= least and (self._zero.get(section) or {}).get("device", "none") != "none"

    @property
    def _zero(self) -> dict[str, Any]:
        section: dict[str, Any] = (self.described or {}).get("zero_optimization", {})
        return section

    @property
    def meets_inside(self) -> bool:
        """Whether replicas meet in collectives of each micro-batch, as from ZeRO stage 2 on."""
        return self.zero_stage >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """No rank waits longer than `timeout_s` for another. `strict` enforces NCCL's ordering rules over gloo.
    `redis_server` is the binary of the embedded store; empty: the installed one."""

    timeout_s: float = setting(120.0, above=0, at_most=1e7)
    strict: bool = setting(False, "--strict", "enforce NCCL's ordering rules over gloo")
    redis_server: str = setting("", "--redis-server", "server binary of the embedded store", "PATH")


def count_moments(kind: str, parameters: Mapping[str, Any]) -> int:
    """Count the values that a DeepSpeed optimizer keeps per parameter; an unknown one counts as Adam.

    >>> count_moments("AdamW", {}), count_moments("SGD", {"momentum": 0.9}), count_moments("Adam", {"amsgrad": True})
    (2, 1, 3)
    """
    more = {"sgd": "momentum", "adam": "amsgrad", "adamw": "amsgrad"}.get(kind.lower(), "")
    return _MOMENTS.get(kind.lower(), 2) + (parameters.get(more, 0) not in (0, "auto"))
