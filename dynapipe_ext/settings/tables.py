"""The tables of a run's settings, as plain values: one class a table of the TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dynapipe_ext.batch.micro_batches import Layout, LossNorm, Pieces
from dynapipe_ext.batch.topology import PlacementName, ScheduleName
from dynapipe_ext.costs.states import Offload, ZeroStage
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import Backend

PlacementChoice = Literal[PlacementName, "auto"]
SaveFormat = Literal["hf", "megatron", "deepspeed"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]
TemplateChoice = Literal["auto", "chat", "prompt", "text"]
SplitRule = Literal["dynapipe-ext", "batch-max", "fixed-rows", "packed-balanced", "dynapipe"]
MEETS_INSIDE = 2  # the first ZeRO stage with collectives in each micro-batch


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


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of every block, by its name within the block, and how many values it takes and gives."""

    name: str
    num_inputs: int
    num_outputs: int

    def answers_to(self, target: str) -> bool:
        """As peft matches names: the whole name or its end."""
        return self.name == target or self.name.endswith(f".{target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Where `enabled`, adapters train in place of the model's weights, as peft's LoraConfig has them: of rank `r`,
    scaled by `lora_alpha` / `r`, with `lora_dropout` before them, beside the linear layers `target_modules` of every
    block ("all-linear": all; empty: those that peft takes for the family). `described` is read, not given: the adapted
    layers."""

    enabled: bool = False
    r: int = 8
    lora_alpha: float = 8.0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    described: tuple[LinearLayer, ...] | None = None

    @property
    def num_weights_a_block(self) -> int:
        """Of the adapters beside one block's layers."""
        return sum(self.r * (layer.num_inputs + layer.num_outputs) for layer in self.described or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """`path` empty means the built-in generator. `mixture` names several files instead, all with weights, as
    "a.jsonl=0.7", or none: the shares of the samples that training sees. `tokenizer`: "bpe" (trained on the data,
    `vocab_size` ids), "bytes", or what `dynapipe preprocess --tokenizer` takes. Of a model's folder of transformers the
    tokenizer does what that model was trained with: `template` says of what the records are ("auto": what the first one
    has), the keys name their fields where these are not input and target, prompt and response, or text; `text_key`
    alone reads texts, whatever else there is. `max_input_len`
    and `max_target_len` bound the sides of samples beside their whole (0: not), and `tasks` is a file that gives tasks
    other bounds, and weights. Exactly one of `tokens_per_batch` and `batch_size` is above 0."""

    path: str = ""
    mixture: tuple[str, ...] = ()
    num_samples: int = 4000
    tokenizer: str = "bpe"
    vocab_size: int = 1024
    template: TemplateChoice = "auto"
    input_key: str = ""
    target_key: str = ""
    text_key: str = ""
    truncate: bool = False
    max_input_len: int = 0
    max_target_len: int = 0
    tasks: str = ""
    tokens_per_batch: int = 8192
    batch_size: int = 0
    drop_last: bool = False
    num_workers: int = 1
    prefetch_steps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """The validation loss is taken every `every` steps (0: never) and after the last one, over the first `steps` global
    batches of a fixed order (0: all). The data are those in `path`, text or tokens, by the training data's tokenizer;
    or the `fraction` of the training data's samples that is drawn by the seed and never trained on."""

    every: int = 0
    steps: int = 0
    path: str = ""
    fraction: float = 0.0


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
class DeepSpeedSettings:
    """`config` names the configuration of a DeepSpeed engine that trains the model (empty: none does); what it decides
    are settings of other tables. `described` is read, not given: what the file says."""

    config: str = ""
    described: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> ZeroStage:
        stage: ZeroStage = self._zero.get("stage", 0)
        return stage

    @property
    def offload(self) -> Offload:
        """What of its states the engine leaves on the host. An optimizer of which a part (`ratio`) stays on the device
        counts as if all of it did."""
        weights = self._offloads("offload_param")
        if not self.offloads_optimizer or self._zero["offload_optimizer"].get("ratio", 1.0) != 1.0:
            return "weights" if weights else "none"
        return "all" if weights else "optimizer"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether, wholly or in part."""
        return self._offloads("offload_optimizer")

    def _offloads(self, section: str) -> bool:
        """As DeepSpeed takes it: stage 0 has no offload, and stage 3 alone one of weights."""
        least = {"offload_optimizer": 1, "offload_param": 3}[section]
        return self.zero_stage >= least and (self._zero.get(section) or {}).get("device", "none") != "none"

    @property
    def _zero(self) -> dict[str, Any]:
        section: dict[str, Any] = (self.described or {}).get("zero_optimization", {})
        return section

    @property
    def meets_inside(self) -> bool:
        """Whether replicas meet in collectives of each micro-batch."""
        return self.zero_stage >= MEETS_INSIDE


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
