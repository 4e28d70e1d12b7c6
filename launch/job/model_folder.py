"""A model's folder as settings and first weights, what transformers can be asked for, and where its model is cut."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynapipe_ext.batch.document_attention import DOCUMENT_ATTENTION, register_document_attention
from dynapipe_ext.batch.micro_batches import round_up
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.capabilities import check_features
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.errors import ConfigError, DataError, format_bytes, install_advice, reason
from dynapipe_ext.executor.free_memory import Room, usable_bytes
from dynapipe_ext.launch.job.configured import idle_bytes
from dynapipe_ext.launch.processes.env import visible_devices
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.layer_pattern import MASKED_ROW, LayerPattern, ProvenCut, read_pattern
from dynapipe_ext.models.module_tree import read_transformers_config
from dynapipe_ext.models.named_models import (
    config_file,
    dropout_rates,
    drops_values,
    is_float32_folder,
    rates_in,
    raw_config,
    refuse_adapters,
)
from dynapipe_ext.settings.tables import ModelSettings, OptimizerSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.checkpoint import has_all_weights, recognise
from dynapipe_ext.tools.console import percent

if TYPE_CHECKING:
    from dynapipe_ext.tools.checkpoint import CheckpointReader

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
_NUM_PAGES, _PAGE_BYTES = 256, 4096


def refuse_unsupported(config: TrainConfig) -> None:
    """Errors: ConfigError for settings that only models of megatron-core have, or that a DeepSpeed engine has not, and
    for adapters of what peft does not adapt."""
    if config.model.layer_pattern and not needs_cut(config):
        raise ConfigError(
            f"[model] layer_pattern is {config.model.layer_pattern}, which names modules of a decoder that transformers"
            f" computes, but {config.model.architecture or 'a model of own sizes'} is none: leave it out, or give"
            " --backend transformers and such a model"
        )
    check_features(config, "run")
    if config.lora.enabled and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"--lora trains adapters of peft, which is not installed: {install_advice('lora')}")
    if config.model.uses_transformers:
        return
    if config.model.backend == "transformers":
        raise ConfigError(
            "--backend transformers computes a model of --model or --architecture, and none is named: name one, or"
            " leave it out"
        )
    if raw_config(config.model.architecture).get("output_router_logits"):
        raise ConfigError(
            f"output_router_logits of {config.model.architecture} adds a loss of all routers together, which no"
            " stage sees: set it to false in its config.json"
        )


def widened_line(config: TrainConfig) -> str:
    """What becomes of a folder's 16-bit weights in a run of float32; else nothing.

    The output is not rounded back to the folder's type: it holds the weights of which the losses were computed.
    """
    model, folder = config.model, config.model.init_from
    if not folder or model.described is None or model.dtype != "float32":
        return ""
    raw = raw_config(folder)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or model.described.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return ""
    what = "train as float32" if config.lora.enabled else "train and are saved as float32"
    return (
        f"note: the {dtype} weights of {folder} {what}, in twice the bytes: --dtype bf16 keeps them in"
        " 16 bits, beside float32 masters"
    )


def idle_line(config: TrainConfig) -> str:
    """What becomes of the weights that no text runs through; else nothing."""
    model, cut = config.model, config.model.cut
    if cut is None or not cut.num_idle_weights:
        return ""
    idle_weights = f"{cut.num_idle_weights:,} weights of {', '.join(cut.pattern.idle)}"
    if config.deepspeed.config and model.dtype != "float32" and is_float32_folder(model.init_from):
        return (
            f"note: the engine rounds {idle_weights}, through which no text runs, to {model.dtype}: leave --deepspeed"
            " out to keep them as they are"
        )
    num_bytes = format_bytes(idle_bytes(config))
    return f"no text runs through {idle_weights}: they stay as they are on stage 0, in {num_bytes}"


def adapters_line(config: TrainConfig) -> str:
    """What of a run's model trains, where that are adapters; else nothing."""
    lora, described = config.lora, config.model.described
    if not lora.enabled or described is None:
        return ""
    (frozen,) = count_parameters(described, Topology()).total.tolist()
    trained = described.num_layers * lora.num_weights_a_block
    beside = ", ".join(layer.name.rpartition(".")[2] for layer in lora.described or ())
    share = percent(trained / (trained + frozen))
    return f"lora: {trained:,} weights of adapters train ({share} of all), rank {lora.r} beside {beside}"


def first_weights(config: TrainConfig) -> str:
    """Names the values that a run begins with, where it needs them to its end: adapters stand beside them, or the loss
    compares with them. Empty where it does not, or draws them.

    Of each file of weights the size and pages at even distances are read, a megabyte. Values that were trained further
    differ everywhere. Errors: DataError for files that cannot be read.
    """
    if not config.model.init_from or not (config.lora.enabled or config.preferences.needs_references):
        return ""
    folder, digest = Path(config.model.init_from), hashlib.sha256()
    files = sorted(file for suffix in _WEIGHT_SUFFIXES for file in folder.glob(f"*{suffix}"))
    files = files or sorted(file for suffix in _WEIGHT_SUFFIXES for file in folder.rglob(f"*{suffix}"))
    try:
        for path in files:
            with path.open("rb") as file:
                num_bytes = file.seek(0, os.SEEK_END)
                digest.update(f"{path.relative_to(folder)} {num_bytes}\n".encode())
                for page in range(_NUM_PAGES):
                    file.seek(num_bytes * page // _NUM_PAGES)
                    digest.update(file.read(_PAGE_BYTES))
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({reason(error)}): look at its files of weights") from error
    return digest.hexdigest()


def open_initial_weights(path: str, architecture: Architecture | None) -> CheckpointReader:
    """A reader of the checkpoint, which is checked to hold all weights of `architecture` and no others.

    Errors: DataError for an incomplete checkpoint, naming its tensors; ConfigError for a checkpoint of another model.
    """
    if architecture is None:
        raise ConfigError(
            f"init_from is {path} but the model is in sizes of its own: name the checkpoint's model by [model]"
            " architecture (its config.json)"
        )
    kind, _ = recognise(Path(path))
    reader = kind.open(Path(path))
    stored, configured = (asdict(replace(a, dtype="float32")) for a in (reader.architecture, architecture))
    if other := [
        f"{name} {stored[name]!r}, not {configured[name]!r}" for name in stored if stored[name] != configured[name]
    ]:
        move = "name its own config.json"
        if architecture.num_decoder_layers and stored["tied_embeddings"] != configured["tied_embeddings"]:
            move += ", which must say of tie_word_embeddings what its files do (transformers 5 writes true of every T5)"
        raise ConfigError(
            f"init_from {path} is a checkpoint of another model than [model] architecture: it has {'; '.join(other)}:"
            f" {move}"
        )
    reader.check()
    return reader


def load_initial_weights(model: Any, path: str, architecture: Architecture) -> None:
    """Fill a stage's weights from a checkpoint, a group of tensors at a time. Errors as `open_initial_weights`."""
    from dynapipe_ext.executor.stages.megatron.model import fill_weights, held_weights
    from dynapipe_ext.tools.checkpoint import megatron_weights

    reader = open_initial_weights(path, architecture if architecture.family != "gpt" else None)
    needed_names = {name for name, _ in held_weights(model)}
    fill_weights(model, megatron_weights(reader, needed_names))


Tables = dict[str, dict[str, Any]]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
# Of a run that goes on with published weights; one from the first step on has the defaults of the settings.
_FINE_TUNING: Tables = {"optimizer": {"lr": 2e-5, "min_lr": 2e-6, "warmup_fraction": 0.03}}
_ADAPTING: Tables = {"optimizer": {"lr": 2e-4, "min_lr": 2e-5, "warmup_fraction": 0.03}}  # adapters start at zero


def settings_of_model(path: str, *, tokenizer: str | None, from_scratch: bool) -> Tables:
    """Return `[model]` and `[data]` of a run on the model in a folder, or described by a config.json: its sizes, its
    weights if the folder has them and is not trained `from_scratch`, its tokenizer unless another one is named.

    Raises ConfigError for what is not such a folder, or lacks a tokenizer if none is named; DataError for a folder with
    a part of its weights.
    """
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    refuse_adapters(place)
    if not (folder / "config.json" if place.is_dir() else place).is_file():
        raise ConfigError(f"--model {path} has no config.json: give a model's folder as save_pretrained writes it")
    starts_from_weights = place.is_dir() and has_all_weights(place) and not from_scratch
    tables: Tables = {"model": {"architecture": path, "init_from": path if starts_from_weights else ""}}
    if tokenizer is None:
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(f"--model {path} has no tokenizer: name the one it was trained with by --tokenizer")
        tables["data"] = {"tokenizer": str(folder)}
    return tables


def refuse_random_weights(model: ModelSettings) -> None:
    """Check that random weights were asked for if a published model starts without its own.

    A preset is a set of sizes, which has no weights. Raises ConfigError; DataError for a configuration next to a part
    of its weights.
    """
    named = model.architecture
    if not named or model.init_from or not (file := config_file(named)).is_file():
        return
    has_weights = file.name == "config.json" and has_all_weights(file.parent)  # raises for a part of them
    if model.from_scratch:
        return
    if has_weights:
        raise ConfigError(
            f"{named} is a configuration next to weights, which would not be trained: give --model {file.parent}, or"
            " --from-scratch to start from RANDOM WEIGHTS"
        )
    raise ConfigError(
        f"{named} has a configuration but no weights: give a folder that has both, or --from-scratch to start from"
        " RANDOM WEIGHTS"
    )


def random_line(config: TrainConfig) -> str:
    """Return what a run says of the weights of a published model that it draws; empty if it starts from weights."""
    model = config.model
    if not model.architecture or model.init_from:
        return ""
    return f"RANDOM WEIGHTS: those of {model.architecture} are drawn by seed {config.run.seed}, none are loaded"


def usual_settings(num_ranks: int) -> Tables:
    """Defaults of `--model` without a file of settings: one pass over the data, one rank, and this machine's memory
    divided by the `num_ranks` on it."""
    return {
        "run": {"epochs": 1.0},
        "topology": {"tp": 1, "pp": 1, "dp": 1},
        "plan": {"memory_limit_gb": memory_of_a_rank_gb(num_ranks)},
    }


def usual_rates(named: Collection[str], *, adapts: bool) -> Tables:
    """Learning rates and warm-up of a model that goes on with its weights, higher ones for adapters, where a file of
    settings has not `named` its own under [optimizer]."""
    usual = (_ADAPTING if adapts else _FINE_TUNING)["optimizer"]
    decides = {"lr": ("lr",), "min_lr": ("lr", "min_lr")}  # a named rate has the lowest of a file, or the default
    decides |= dict.fromkeys(("warmup_fraction", "warmup_steps"), ("warmup_fraction", "warmup_steps"))
    return {"optimizer": {name: value for name, value in usual.items() if not {*decides[name]} & {*named}}}


def dropout_line(config: TrainConfig) -> str:
    """Return what a run says of the dropout in a config.json that it trains without, or of the fields that `[model]
    dropout` is put into; empty if there is none."""
    model = config.model
    if not model.architecture:
        return ""
    file = config_file(model.architecture)
    if model.uses_transformers:
        rates = rates_in(read_transformers_config(model.architecture).to_dict())
        if model.dropout:
            names = sorted(name for name in rates if drops_values(name))
            return f"dropout: {model.dropout:g} as {', '.join(names)} of {file}"
        rates = {name: rate for name, rate in rates.items() if rate}
    else:
        rates = {} if model.dropout else dropout_rates(model.architecture)
    if not rates:
        return ""
    rates_text = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return f"dropout: none, though {file} has {rates_text}: [model] dropout of a --config sets one rate for all"


def warmup_line(config: TrainConfig) -> str:
    """What is said of a warm-up, other than the usual short one, that is longer than the run; else nothing."""
    optimizer, steps = config.optimizer, config.run.steps
    if optimizer.warmup_fraction or optimizer.warmup_steps <= max(steps, OptimizerSettings().warmup_steps):
        return ""
    return f"note: the warm-up takes {optimizer.warmup_steps} steps of {steps}: lr {optimizer.lr:g} is never reached"


def prediction_line(architecture: str) -> str:
    """What is said of a config.json's layers of multi-token prediction, which no model here has; else nothing."""
    if not architecture:
        return ""
    raw = raw_config(architecture)
    if not (layers := [f"{name} {raw[name]}" for name in _PREDICTION_LAYERS if raw.get(name)]):
        return ""
    return f"multi-token prediction: left out, though {config_file(architecture)} has {', '.join(layers)}"


def memory_of_a_rank_gb(num_ranks: int) -> float:
    """What plans take of the smallest device here, or without one of this machine's free memory by its ranks."""
    return max(0.1, round(usable_bytes(Room.here(visible_devices()).of_a_rank(num_ranks)) / 1e9, 1))


def needs_cut(config: TrainConfig) -> bool:
    """Whether the model is a decoder that transformers computes."""
    return config.model.uses_transformers and not config.model.num_decoder_layers


def named_pattern(config: TrainConfig) -> LayerPattern | None:
    """That of `[model] layer_pattern`, if there is one. Errors: ConfigError."""
    return read_pattern(config.model.layer_pattern) if config.model.layer_pattern else None


def part_options(config: TrainConfig, *, shares_rows: bool = False) -> dict[str, Any]:
    """How transformers makes the parts of the run's model: of a decoder its pattern and attn_implementation.
    `shares_rows`: plans may join ranks, whose attention is then ours in padded rows, too."""
    if config.model.num_decoder_layers:
        return {}
    cut = config.model.cut or configured_cut(config)
    if shares_rows:
        return {"pattern": cut.pattern, "attn_implementation": register_document_attention()}
    if config.plan.layout == "packed" and cut.attention:
        register_document_attention()
        return {"pattern": cut.pattern, "attn_implementation": cut.attention}  # masks would cost squares of whole rows
    return {"pattern": cut.pattern}


def configured_cut(config: TrainConfig) -> ProvenCut:
    """Where the run's model is cut. It computes, so not in a process that forks ranks. Errors: ConfigError."""
    from dynapipe_ext.executor.stages.transformers.parts import proven_cut_of_folder

    return proven_cut_of_folder(config.model.architecture, named_pattern(config))


def settled_cut(
    config: TrainConfig,
    prove: Callable[[TrainConfig], ProvenCut] = configured_cut,
    *,
    layout_is_named: bool,
    compare: bool = False,
) -> TrainConfig:
    """The settings as all who train or plan go on with them: where transformers computes the model, with its proven
    cut and rows that are exact. Errors: ConfigError of the proof, and as `with_cut`."""
    if not needs_cut(config):
        return config
    return with_cut(config, prove(config), layout_is_named=layout_is_named, compare=compare)


def with_cut(config: TrainConfig, cut: ProvenCut, *, layout_is_named: bool, compare: bool = False) -> TrainConfig:
    """The settings with their model's cut, and with padded rows where packed ones are not exact.

    Errors: ConfigError where packed rows are asked for by name, or by what needs them.
    """
    config = replace(config, model=replace(config.model, cut=cut))
    plan, name = config.plan, config.model.architecture
    if plan.pieces != "off" and cut.attention != DOCUMENT_ATTENTION:
        raise ConfigError(
            f"pieces of a sample need {DOCUMENT_ATTENTION}, which is not exact in {name}: give --pieces off"
            + (f" ({cut.packed_fault})" if cut.packed_fault else "")
        )
    if plan.layout != "packed" or not cut.packed_fault:
        return config
    asker = "--compare packs rows" if compare else "layout is packed" if layout_is_named else ""
    if asker or plan.split_policy != TrainConfig().plan.split_policy:
        raise ConfigError(
            f"{asker or f'{plan.split_policy} packs rows'}, but packing is not exact in {name} ({cut.packed_fault}):"
            " give --layout padded" + (" and leave --compare out" if compare else "")
        )
    return config.with_values(plan={"layout": "padded"})


def with_bounded_rows(config: TrainConfig, longest: int) -> TrainConfig:
    """The settings with a bound of packed rows, where masks of whole rows keep documents apart and none is set: of what
    is measured, or of the data's `longest` sample."""
    cut, plan = config.model.cut, config.plan
    if plan.layout != "packed" or plan.max_tokens or cut is None or cut.attention or cut.packed_fault:
        return config
    return config.with_values(plan={"max_tokens": round_up(max(MASKED_ROW, longest), plan.pad_multiple)})


def layout_line(config: TrainConfig) -> str:
    """What is said where rows are padded since they cannot be packed, or bounded since masks take their squares; else
    nothing."""
    cut, plan, name = config.model.cut, config.plan, config.model.architecture
    if cut is None:
        return ""
    if plan.layout == "packed" and not cut.attention and plan.max_tokens and ("plan", "max_tokens") not in config.named:
        return (
            f"rows have at most {plan.max_tokens} positions: {name} keeps documents apart by masks, which take the"
            " square of a row ([plan] max_tokens sets another bound)"
        )
    if not cut.packed_fault or plan.layout != "padded":
        return ""
    return f"rows are padded: packing is not exact in {name} ({cut.packed_fault})"
