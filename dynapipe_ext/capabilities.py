"""What works with what: the features that some kinds of runs do not have, and why.

One table gives rejections of settings, what "auto" may choose, and the page "What works with what"
(`python -m tests.support.capabilities_page`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dynapipe_ext.errors import ConfigError

if TYPE_CHECKING:
    from dynapipe_ext.settings.train_config import TrainConfig

RunKind = Literal[
    "megatron-core",
    "transformers",
    "encoder-decoder",
    "experts",
    "adapters",
    "preferences",
    "DeepSpeed",
    "ZeRO 2 and 3",
    "deterministic",
]
RunFeature = Literal[
    "tensor parallelism",
    "pipeline parallelism",
    "context parallelism",
    "context-parallel degree by step",
    "vocabulary parallelism",
    "vocabulary parallelism auto",
    "half layers",
    "distributed optimizer",
    "packed rows",
    "whole-row attention",
    "rival split policies",
    "pieces of long samples",
    "published schedules",
    "split backward",
    "full recomputation over stages",
    "costs fitted to the run",
    "dropout",
    "random first weights",
    "skipped steps, offloaded optimizer",
    "comparison",
    "adapters",
    "preferences",
    "DeepSpeed",
    "deterministic",
]


@dataclass(frozen=True, slots=True)
class Limit:
    """A feature that a run of all `kinds` does not have. Its rejection reads: the setting that asks for the feature,
    "but", `reason`, a colon and `move`."""

    feature: RunFeature
    kinds: tuple[RunKind, ...]
    reason: str
    move: str

    def make_error(self, setting: str) -> ConfigError:
        return ConfigError(f"{setting} but {self.reason}: {self.move}")


_EITHER, _OUT, _NAME_IT = "leave one of both out", "leave it out", "name it, or leave deterministic out"
_RULES, _LAYERS, _WHOLE = (
    "take dynapipe-ext or packed-balanced",
    "give whole numbers",
    "set vocabulary_parallel 'whole'",
)
_PADDED, _FOLDER = "give --layout padded, or leave --backend out", "name a folder with weights, or no --backend"
_SIDES: tuple[RunKind, ...] = ("encoder-decoder",)
_T5: tuple[RunKind, ...] = ("encoder-decoder", "transformers")

# Of several limits that hold, the first is told.
_OF_SETTINGS: tuple[Limit, ...] = (
    Limit("preferences", _SIDES, "no pairs are made of an encoder-decoder's samples", "take a decoder-only model"),
    Limit(
        "pieces of long samples", _SIDES, "inputs of an encoder-decoder attend to later positions", "plan whole samples"
    ),
    Limit("pieces of long samples", ("preferences",), "a pair of answers stays whole", "set pieces to 'off'"),
    Limit("rival split policies", ("preferences",), "it does not keep pairs of answers together", _RULES),
    Limit("dropout", ("preferences",), "scores that are compared would be drawn anew at each step", _OUT),
    Limit("whole-row attention", _SIDES, "it would mix the inputs of an encoder-decoder", _RULES),
    Limit("context parallelism", ("DeepSpeed",), "a DeepSpeed engine computes whole rows on each rank", _EITHER),
    Limit("context parallelism", _T5, "relative biases of transformers are of whole rows", "set context_parallel to 1"),
    # A product over a slice of a row rounds otherwise than one over the row.
    Limit("context-parallel degree by step", ("deterministic",), "bits hold for one degree", _NAME_IT),
    # Parts of a vocabulary add up their sums, where a whole one has one.
    Limit("vocabulary parallelism auto", ("deterministic",), "bits hold for one choice, not the costs'", _NAME_IT),
    Limit("costs fitted to the run", ("deterministic",), "what actions take is never the same twice", _EITHER),
    Limit("deterministic", ("DeepSpeed",), "a DeepSpeed engine sums gradients in an order of its own", _EITHER),
    Limit("deterministic", ("experts",), "it does not cover experts", "leave it out, or take another model"),
    # Each layer of a decoder adds to the gradient of the encoder's output. Under full recomputation Megatron first adds
    # up the layers of a stage, and then the sum that the next stage sends: the order depends on where stages end.
    Limit(
        "full recomputation over stages",
        ("encoder-decoder", "deterministic"),
        "the order in which decoder layers then add up gradients of the encoder's output depends on pp",
        "set recompute to 'none' or 'selective', or pp to 1",
    ),
)
# What is judged once file, flags and the model's folder are merged: defaults of one may give way to those of another.
_OF_RUNS: tuple[Limit, ...] = (
    Limit("packed rows", _T5, "relative positions know no borders of packed pairs", _PADDED),
    Limit("random first weights", _T5, "transformers trains encoder-decoders from weights on", _FOLDER),
    Limit("DeepSpeed", _T5, "no engine trains an encoder-decoder", "leave --deepspeed or --backend out"),
    Limit("deterministic", _T5, "encoder-decoders of transformers have no such mode", "leave --backend out"),
    Limit("costs fitted to the run", ("adapters",), "times are fitted to models that train whole", _EITHER),
    Limit(
        "adapters", ("megatron-core",), "peft adapts what transformers computes", "name a decoder's folder by --model"
    ),
    Limit(
        "random first weights", ("adapters",), "adapters train next to weights that stay", "name a folder by --model"
    ),
    Limit("DeepSpeed", ("megatron-core",), "an engine trains models of transformers", "give --model, and no --backend"),
    Limit("pipeline parallelism", ("ZeRO 2 and 3",), "ZeRO 2 and 3 train without pp", "use --dp, or take ZeRO stage 1"),
    Limit(
        "tensor parallelism",
        ("transformers",),
        "transformers computes layers on one rank",
        "give --tp 1, also if nothing names tp",
    ),
    Limit(
        "distributed optimizer", ("transformers",), "only megatron-core's models have it", "set distributed to false"
    ),
    Limit("pieces of long samples", ("DeepSpeed",), "a DeepSpeed engine trains whole samples", "give --pieces off"),
    Limit(
        "skipped steps, offloaded optimizer", ("DeepSpeed",), "an engine then skips none", "set nan_policy to 'stop'"
    ),
    Limit("published schedules", ("ZeRO 2 and 3",), "ZeRO 2 and 3 reduce in each backward", "give --schedule 1f1b"),
    Limit("split backward", ("ZeRO 2 and 3",), "ZeRO 2 and 3 reduce in each backward", _OUT),
    # No setting asks for a comparison: --compare does, which asks `find_limit`.
    Limit("comparison", ("DeepSpeed",), "DeepSpeed has one model in a process", "leave --compare out"),
    Limit("comparison", _SIDES, "its rows would mix the inputs of an encoder-decoder", "leave --compare out"),
)
# What a topology may have, however it was chosen.
_OF_STAGES: tuple[Limit, ...] = (
    Limit("half layers", _SIDES, "layers of a model with a decoder side stay whole", _LAYERS),
    Limit("half layers", ("adapters",), "layers with adapters stay whole", _LAYERS),
    Limit("half layers", ("DeepSpeed",), "layers of a DeepSpeed engine stay whole", _LAYERS),
    Limit("vocabulary parallelism", _SIDES, "a model with a decoder side keeps it whole", _WHOLE),
    Limit("vocabulary parallelism", ("transformers",), "models of transformers keep it whole", _WHOLE),
    Limit("vocabulary parallelism", ("adapters",), "a model with adapters keeps it whole", _WHOLE),
    Limit("vocabulary parallelism", ("DeepSpeed",), "a DeepSpeed engine keeps it whole", _WHOLE),
)
LIMITS = {"settings": _OF_SETTINGS, "run": _OF_RUNS, "stages": _OF_STAGES}


def find_limit(feature: RunFeature, kinds: Collection[RunKind]) -> Limit | None:
    """Return the limit of a feature that holds for a run of these kinds; None if the run may have it."""
    every = (limit for limits in LIMITS.values() for limit in limits)
    return next((one for one in every if one.feature == feature and {*one.kinds} <= {*kinds}), None)


def check_features(config: TrainConfig, of: Literal["settings", "run", "stages"], where: str = "") -> None:
    """Reject what the settings ask for and such a run does not have, by one part of the limits. Raises ConfigError."""
    kinds, settings = find_kinds(config), dict(list_features(config))
    for limit in LIMITS[of]:
        if limit.feature in settings and {*limit.kinds} <= kinds:
            raise limit.make_error(f"{where}{settings[limit.feature]}")


def find_kinds(config: TrainConfig) -> set[RunKind]:
    """Return the kinds that a run of these settings is of."""
    model = config.model
    kinds: dict[RunKind, bool] = {
        "megatron-core": not model.uses_transformers,
        "transformers": model.uses_transformers,
        "encoder-decoder": model.num_decoder_layers > 0,
        "experts": model.described is not None and model.described.num_experts > 0,
        "adapters": config.lora.enabled,
        "preferences": bool(config.preferences.loss),
        "DeepSpeed": bool(config.deepspeed.config),
        "ZeRO 2 and 3": config.deepspeed.meets_inside,
        "deterministic": config.optimizer.deterministic,
    }
    return {kind for kind, is_one in kinds.items() if is_one}


def list_features(config: TrainConfig) -> Iterator[tuple[RunFeature, str]]:
    """Yield the features that settings ask for, each with the setting and its value."""
    plan, topology, optimizer, lora = config.plan, config.topology, config.optimizer, config.lora
    vocabulary, offloads = topology.vocabulary_parallel, config.deepspeed.offloads_optimizer
    requests: tuple[tuple[RunFeature, str, object], ...] = (
        ("tensor parallelism", "topology.tp", topology.tp > 1),
        ("pipeline parallelism", "topology.pp", topology.pp > 1),
        ("context parallelism", "topology.context_parallel", topology.context_parallel != 1),
        ("context-parallel degree by step", "topology.context_parallel", topology.context_parallel == "auto"),
        ("vocabulary parallelism", "topology.vocabulary_parallel", vocabulary not in ("whole", "auto")),
        ("vocabulary parallelism auto", "topology.vocabulary_parallel", vocabulary == "auto"),
        ("half layers", "topology.layers_per_stage", any(n % 1 for n in topology.layers_per_stage)),
        ("distributed optimizer", "optimizer.distributed", optimizer.distributed),
        ("packed rows", "plan.layout", plan.layout == "packed"),
        ("whole-row attention", "plan.split_policy", plan.split_policy == "fixed-rows"),
        ("rival split policies", "plan.split_policy", plan.split_policy not in ("dynapipe-ext", "packed-balanced")),
        ("pieces of long samples", "plan.pieces", plan.pieces != "off"),
        ("published schedules", "plan.schedule", plan.schedule not in ("adaptive", "1f1b")),
        ("split backward", "plan.split_backward", plan.split_backward),
        (
            "full recomputation over stages",
            "plan.recompute",
            topology.pp > 1 and plan.recompute in ("auto", "full", "head+full"),
        ),
        ("costs fitted to the run", "plan.adapt_costs", plan.adapt_costs),
        (
            "dropout",
            "model.dropout" if config.model.dropout else "lora.lora_dropout",
            config.model.dropout or lora.lora_dropout,
        ),
        ("random first weights", "model.init_from", not config.model.init_from),
        ("skipped steps, offloaded optimizer", "optimizer.nan_policy", optimizer.nan_policy == "skip" and offloads),
        ("adapters", "lora.enabled", lora.enabled),
        ("preferences", "preferences.loss", config.preferences.loss),
        ("DeepSpeed", "deepspeed.config", config.deepspeed.config),
        ("deterministic", "optimizer.deterministic", optimizer.deterministic),
    )
    for feature, setting, is_asked in requests:
        if is_asked:
            table, name = setting.split(".")
            yield feature, f"[{table}] {name} is {getattr(getattr(config, table), name)!r}"
