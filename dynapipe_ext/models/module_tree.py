"""The modules of a model of transformers, without memory: built on torch's meta device.

torch and transformers are loaded when a function is called, so that whoever imports this needs neither.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, in_one_line
from dynapipe_ext.models.named_models import drops_values, is_rate


def meta_model(whole: Any, config: Any) -> Any:
    """The whole model without memory. Errors: ConfigError where the configuration does not make one."""
    try:
        with importlib.import_module("torch").device("meta"):
            return whole._from_config(copy.deepcopy(config))
    except Exception as error:
        raise ConfigError(f"config.json makes no {whole.__name__} ({in_one_line(error)}): correct it") from error


def layer_list(model: Any) -> tuple[str, Any]:
    """The list of decoder layers, by its name and itself: of the lists with as many modules as the configuration says,
    and within no other, the one with most weights. Errors: ConfigError where no list has that many."""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {name: module for name, module in model.named_modules() if type(module).__name__ == "ModuleList"}
    outer = {name: one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    fitting = {name: one for name, one in outer.items() if len(one) == num_layers}
    if not fitting:
        named = ", ".join(f"{name} of {len(one)}" for name, one in outer.items()) or "none"
        raise ConfigError(
            f"{type(model).__name__} has no list of {num_layers} layers that run one after the other (its lists:"
            f" {named}): name it by --layer-pattern FILE"
        )
    return max(fitting.items(), key=lambda pair: num_weights(pair[1]))


def num_weights(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def causal_class(config: Any) -> Any:
    """The class of the causal model that a configuration describes, be it the text half of one that reads images too.

    Errors: ConfigError.
    """
    transformers = importlib.import_module("transformers")
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            whole = mapping[type(config)]
            if whole.config_class is not config.sub_configs.get("text_config"):  # else it is the text's half alone
                return whole
    raise ConfigError(f"transformers has no causal model for a {type(config).__name__}: give the config of one")


def read_transformers_config(folder: str | Path) -> Any:
    """Transformers' own configuration of a model's folder or config.json. Errors: ConfigError."""
    transformers = importlib.import_module("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} makes no configuration of {folder} ({in_one_line(error)}): give"
            " a model that it knows"
        ) from error


Rate = tuple[Any, str, float]  # a configuration of transformers, a field of it, and its value


def nested_configs(config: Any) -> list[Any]:
    """Return a configuration and those within it, of towers and text."""
    return [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]


def set_dropout(config: Any, rate: float) -> list[Rate]:
    """Give all dropout of a configuration one rate, and leave out no layers; return the rates that it had.

    What else is drawn in training (a router's jitter) is off, too. Raises ConfigError for a rate above 0 if the
    configuration has no dropout.
    """
    before = [
        (part, name, value)
        for part in nested_configs(config)
        for name, value in list(vars(part).items())
        if is_rate(name, value)
    ]
    if rate and not any(drops_values(name) for _, name, _ in before):
        raise ConfigError(
            f"[model] dropout is {rate:g} but a {config.model_type} of transformers has none: leave it out, or take"
            " --backend megatron"
        )
    put_rates((part, name, rate if drops_values(name) else 0.0) for part, name, _ in before)
    return before


def put_rates(rates: Iterable[Rate]) -> None:
    """Give fields of configurations their values."""
    for part, name, value in rates:
        setattr(part, name, value)


def linear_layers(folder: str | Path) -> Iterator[tuple[str, int, int, float]]:
    """The linear layers within the decoder layers of a model: name within the layer, inputs, outputs, and which part of
    all decoder layers has it (layers may differ). Errors: ConfigError."""
    config = read_transformers_config(folder)
    _, layers = layer_list(meta_model(causal_class(config), config))
    linear = importlib.import_module("torch").nn.Linear
    counts: dict[tuple[str, int, int], int] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, linear):
                size = module.in_features, module.out_features
            elif type(module).__name__ == "Conv1D":  # GPT-2's, with its weight transposed
                size = tuple(module.weight.shape)
            else:
                continue
            counts[(name, *size)] = counts.get((name, *size), 0) + 1
    for (name, num_inputs, num_outputs), count in counts.items():
        yield name, num_inputs, num_outputs, count / len(layers)
