"""Parameters and products of any model that transformers can build, counted on the meta device: no weight is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.pytorch_utils import Conv1D

from dynapipe_ext.errors import ConfigError, in_one_line, short
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.models.counted import CountedAttention, CountedModel

_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k", "top_k")
_OF_QUERIES = ("q_proj", "q_b_proj", "query")
_OF_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj")


def count_model(raw: Mapping[str, Any], where: str) -> CountedModel:
    """Errors: ConfigError where transformers cannot build a model of the configuration, or its layers are not found."""
    model = _built({name: value for name, value in raw.items() if name != "quantization_config"}, where)
    config = model.config.get_text_config()
    stem, layers = _layers(model, where)
    embedding, head = (end() for end in (model.get_input_embeddings, model.get_output_embeddings))
    embedded = 0 if embedding is None else sum(p.numel() for p in embedding.parameters())
    head_weight = getattr(head, "weight", None)
    is_tied = embedding is not None and head_weight is getattr(embedding, "weight", None)
    active, weights, uncounted = _products(model, stem, layers, config)
    return CountedModel(
        model_type=str(raw["model_type"]),
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=embedded,
        layers=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
        head=0 if head is None or is_tied else sum(p.numel() for p in head.parameters()),
        active=active,
        layer_weights=weights,
        head_weights=0 if head_weight is None else head_weight.numel(),
        attention=tuple(_attention(layers, config)),
        uncounted=uncounted,
    )


def _built(raw: Mapping[str, Any], where: str) -> Any:
    try:
        config = transformers.AutoConfig.for_model(**_with_floats(raw))
    except Exception as error:  # whatever a family's configuration raises for its fields
        raise ConfigError(f"{where}: transformers cannot read it ({in_one_line(error)})") from error
    for name in _CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            try:
                with quietly(), torch.device("meta"):
                    return auto.from_config(config)
            except Exception as error:  # as above
                raise ConfigError(f"{where}: transformers cannot build it ({in_one_line(error)})") from error
    raise ConfigError(f"{where}: transformers has no model of model_type {short(raw.get('model_type'))}")


def _with_floats(value: Any) -> Any:
    """The value with its numbers that JSON does not have, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        tagged = value.get("__float__") if len(value) == 1 else None
        is_number = tagged in ("Infinity", "-Infinity", "NaN")
        return float(str(tagged)) if is_number else {name: _with_floats(one) for name, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def _layers(model: Any, where: str) -> tuple[str, Any]:
    """The name of the decoder's list of layers, and the list: that of most parameters that lies in no other."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    outer = {name: own for name, own in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ConfigError(f"{where}: {type(model).__name__} has no list of layers: it cannot be counted")
    stem = max(outer, key=lambda name: sum(p.numel() for p in outer[name].parameters()))
    return stem, outer[stem]


def _products(model: Any, stem: str, layers: Any, config: Any) -> tuple[int, int, tuple[str, ...]]:
    """Parameters that a token meets, weights of the layers that it is multiplied with, and what was not counted."""
    num_experts, top_k = (
        next((n for name in names if isinstance(n := getattr(config, name, None), int) and n), 0)
        for names in (_NUM_EXPERTS, _TOP_K)
    )
    inactive, weights, uncounted = 0, 0, Counter[str]()
    for name, module in layers.named_modules():
        of_experts = num_experts and "experts" in name.split(".") and "shared" not in name
        for kind, parameter in module.named_parameters(recurse=False):
            size = parameter.numel()
            used = size * top_k // num_experts if of_experts and top_k else size
            inactive += size - used
            is_product = parameter.dim() == 2 and kind == "weight" and not isinstance(module, torch.nn.Embedding)
            is_product |= bool(of_experts) and parameter.dim() == 3 and "bias" not in kind
            if is_product:
                weights += used
            elif parameter.dim() > 1 and "bias" not in kind:
                uncounted[f"{type(module).__name__}.{kind}"] += 1
        if _recurs(module):
            uncounted[f"the recurrence of {type(module).__name__}"] += 1
    if num_experts and not top_k:
        uncounted["experts that a token does not take (their number a token is not known): all count as taken"] += 1
    towers = {name.partition(".")[0] if "." in name else name for name in _towers(model, stem)}
    named = [f"{what} of {count} layers" if count > 1 else what for what, count in uncounted.items()]
    total = sum(p.numel() for p in model.parameters())
    return total - inactive, weights, (*named, *(f"products of {tower}" for tower in sorted(towers)))


def _recurs(module: Any) -> bool:
    """Whether a module mixes positions in another way than by attention: linear attention, state spaces."""
    kind = type(module).__name__.lower()
    return any(
        word in kind
        for word in ("deltanet", "mamba", "mixer", "linearattention", "rwkv", "shortconv", "rglru", "lightning")
    )


def _towers(model: Any, stem: str) -> Iterator[str]:
    """Products outside the layers, the embedding and the head."""
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and not name.startswith(f"{stem}.") and id(module) not in ends:
            yield name


def _attention(layers: Any, config: Any) -> Iterator[CountedAttention]:
    """Of all layers that attend; those alike together."""
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    window = getattr(config, "sliding_window", None) or 0
    uses_windows = bool(window) and getattr(config, "use_sliding_window", True)
    alike: Counter[tuple[int, int, int]] = Counter()
    for index, layer in enumerate(layers):
        kind = kinds[index] if index < len(kinds) else ""
        for module in layer.modules():
            if not type(module).__name__.endswith("Attention") or _recurs(module):
                continue
            has_window = uses_windows and kind in ("", "sliding_attention")
            own = getattr(module, "sliding_window", window if has_window else 0) or 0
            alike[(*_widths(module, config), own)] += 1
            break
    for (query_size, value_size, own), count in alike.items():
        yield CountedAttention(layers=count, query_size=query_size, value_size=value_size, window=own)


def _widths(module: Any, config: Any) -> tuple[int, int]:
    """Of all queries and all values that a layer attends with: by its projections, else by the configuration."""
    of_output = next((own for name in _OF_OUTPUT if (own := getattr(module, name, None)) is not None), None)
    of_queries = next((own for name in _OF_QUERIES if (own := getattr(module, name, None)) is not None), None)
    head_dim = getattr(module, "head_dim", None)  # first, since that of a configuration may be a layer's own
    if not isinstance(head_dim, int):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    whole = config.num_attention_heads * head_dim
    value_size = getattr(of_output, "in_features", whole)
    query_size = getattr(of_queries, "out_features", whole)
    return (whole if query_size == 2 * whole else query_size), value_size  # twice: queries with their gates
