"""Which settings a run of a model has that transformers itself computes. No torch."""

from __future__ import annotations

import importlib.util

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.parameters import parameters_per_stage
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.tools.wording import percent
from dynapipe_ext.topology import Topology


def refuse_unsupported(config: TrainConfig) -> None:
    """Errors: ConfigError for settings that only models of megatron-core have, or that a DeepSpeed engine has not, and
    for adapters of what peft does not adapt."""
    if config.model.uses_transformers and config.model.num_decoder_layers:
        _refuse_beside_pairs(config)
    if config.lora.enabled:
        _refuse_adapters(config)
    if config.deepspeed.config:
        _refuse_beside_engine(config)
        return
    if not config.model.uses_transformers:
        return
    if found := [name for name, is_asked in _asked_of_megatron(config).items() if is_asked]:
        raise ConfigError(
            f"{config.model.architecture} is computed by transformers, whose runs have no {', '.join(found)}: leave it"
            " out (dropout is that of its config.json), or, where megatron-core has a twin, --lora and --backend"
        )


def adapters_line(config: TrainConfig) -> str:
    """What of a run's model trains, where that are adapters; else nothing."""
    lora, described = config.lora, config.model.described
    if not lora.enabled or described is None:
        return ""
    (frozen,) = parameters_per_stage(described, Topology())
    trained = described.num_layers * lora.num_weights_a_block
    beside = ", ".join(layer.name.rpartition(".")[2] for layer in lora.described or ())
    share = percent(trained / (trained + frozen))
    return f"lora: {trained:,} weights of adapters train ({share} of all), rank {lora.r} beside {beside}"


def _refuse_adapters(config: TrainConfig) -> None:
    model = config.model
    if config.plan.adapt_costs:
        raise ConfigError(
            "--lora and --adapt-costs: times are fitted to costs of models that train whole. Leave one of them out, or"
            " give --costs that dynapipe profile has measured"
        )
    if not model.uses_transformers:
        named = model.architecture or "a model in sizes of its own"
        raise ConfigError(
            f"--lora adapts models that transformers computes, by peft, but {named} is computed by megatron-core: name"
            " a decoder's folder by --model, with backend transformers or none"
        )
    if not model.init_from:
        raise ConfigError(
            f"--lora trains beside weights that stay as they are, but {model.architecture} gives none to start from:"
            " name a folder with weights by --model, or train all of them without --lora"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("--lora trains adapters of peft, which is not installed: pip install 'dynapipe-ext[lora]'")


def _refuse_beside_pairs(config: TrainConfig) -> None:
    """Errors: ConfigError for what an encoder-decoder has by megatron-core alone, or not at all."""
    model, plan = config.model, config.plan
    if plan.layout != "padded":
        raise ConfigError(
            f"{model.architecture} is computed by transformers, whose relative positions know no borders of packed"
            " pairs: give --layout padded, or leave --backend out"
        )
    if not model.init_from:
        raise ConfigError(
            f"{model.architecture} is an encoder-decoder, which transformers trains from weights on, but gives none:"
            " name a folder with weights by --model, or leave --backend out"
        )
    asked = {"--deepspeed": config.deepspeed.config, "--deterministic": config.optimizer.deterministic}
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{model.architecture} is an encoder-decoder that transformers computes, of which runs have no"
            f" {', '.join(found)}: leave it out, or where megatron-core has that, leave --backend out"
        )


def _asked_of_megatron(config: TrainConfig) -> dict[str, bool]:
    return {
        "tp": config.topology.tp > 1,
        "dropout": config.model.dropout > 0,
        "the distributed optimizer": config.optimizer.distributed,
        "saving in the background": config.checkpoint.background,
        f"save_format {config.checkpoint.save_format}": config.checkpoint.save_format != "hf",
    }


def _refuse_beside_engine(config: TrainConfig) -> None:
    path, zero_stage, plan = config.deepspeed.config, config.deepspeed.zero_stage, config.plan
    if not config.model.uses_transformers:
        raise ConfigError(
            f"--deepspeed {path} trains models that transformers computes: name one by --model, and leave out --backend"
        )
    if config.topology.pp > 1 and config.deepspeed.meets_inside:
        raise ConfigError(
            f"a DeepSpeed engine of ZeRO stage {zero_stage} ({path}) trains without pp, which is"
            f" {config.topology.pp}: leave --pp out, and replicas (--dp) divide what the stage says; or take stage 1,"
            " where pipeline ranks divide weights and gradients"
        )
    offloads = config.deepspeed.offloads_optimizer
    asked = _asked_of_megatron(config) | {
        f"pieces {plan.pieces}": plan.pieces != "off",
        "nan_policy skip with an offloaded optimizer": config.optimizer.nan_policy == "skip" and offloads,
    }
    if config.deepspeed.meets_inside:
        asked |= {
            f"schedule {plan.schedule}": plan.schedule not in ("adaptive", "1f1b"),
            "split_backward": plan.split_backward,
            "replica_counts free": plan.replica_counts == "free",
        }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"a DeepSpeed engine of ZeRO stage {zero_stage} ({path}) trains without {', '.join(found)}: leave it out"
        )
