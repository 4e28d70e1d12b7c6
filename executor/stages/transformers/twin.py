"""A small model of the same class and kinds of layers as a configuration describes, in this process's memory.

What a family computes follows from its class and from the settings in its configuration. The twin keeps both, and has
few layers (all kinds of them), few ids, and where the class allows it narrow layers; a model that is small already is
its own twin. Its weights are drawn, and far enough from zero for every module to show in the logits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, in_one_line
from dynapipe_ext.models.module_tree import layer_list, meta_model, nested_configs, num_weights, set_dropout

TWIN_VOCABULARY = 96
_SMALL = 3_000_000  # weights of a model that is its own twin
_MOST = 600_000_000  # weights of any twin
_MOST_LAYERS = 12
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
_PER_LAYER = ("layer", "pattern", "block")  # in names of lists with a value a layer
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_HEAD_DIM = 16


def twin_config(whole: Any, config: Any) -> Any:
    """The configuration of a twin that can be built and run. Errors: ConfigError where there is none."""
    fault: Exception | None = None
    for small in _small_configs(whole, config):
        try:
            twin = built_twin(whole, small)
            with torch.no_grad():
                twin(input_ids=token_ids(twin, 5, seed=1), use_cache=False)
        except Exception as error:  # noqa: BLE001 (of whatever library code it runs; it is said if no twin runs)
            fault = fault or error
            continue
        return small
    reason = in_one_line(fault) if fault else f"it has more than {_MOST:,} weights in few layers"
    raise ConfigError(
        f"no small {whole.__name__} can be built and run, so that no cut into stages can be proven ({reason}): train"
        " another model, or this one without stages"
    ) from fault


def built_twin(whole: Any, small: Any, attention: str | None = None) -> Any:
    """The twin of a small configuration, in training mode; its weights are always the same, and float32 whatever the
    configuration's own type is, so that rounding hides nothing and stands for nothing.

    `attention` is its attn_implementation, None the one that transformers chooses.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = copy.deepcopy(small)
        for part in nested_configs(small):
            part.dtype = torch.float32
        twin = whole._from_config(small, **({"attn_implementation": attention} if attention else {}))
        _draw(twin)
    return twin.train()


def token_ids(model: Any, length: int, *, seed: int) -> torch.Tensor:
    """Drawn ids of one row, none of them special."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(3, vocabulary - 1), vocabulary, (1, length), generator=generator)


def _small_configs(whole: Any, config: Any) -> Iterator[Any]:
    """Configurations of twins, the smallest first that keep what the family computes."""
    config = copy.deepcopy(config)
    config._attn_implementation = None  # of the model that was built by it: such kernels may need more than ids
    model = meta_model(whole, config)
    if num_weights(model) <= _SMALL:
        small = copy.deepcopy(config)
        set_dropout(small, 0.0)
        yield small
        return
    num_layers = layers_of_all_kinds(model)
    for shrinks in ((_narrow, _thin), (_few_heads, _thin), (_thin,), ()):
        try:
            small = _shrunk(config, num_layers, shrinks)
            fits = num_weights(meta_model(whole, small)) <= _MOST
        except Exception:  # noqa: BLE001 (sizes that depend on one another, refused in as many ways)
            continue
        if fits:
            yield small


def _shrunk(config: Any, num_layers: int, shrinks: Sequence[Callable[[Any], None]]) -> Any:
    small = _with_few_ids(config, num_layers)
    for shrink in shrinks:
        for part in nested_configs(small):
            shrink(part)
    set_dropout(small, 0.0)
    return small


def layers_of_all_kinds(model: Any, *, least: int = 3) -> int:
    """Of a model's first layers, as many as have all kinds, `least` or more where it has as many."""
    try:
        _, layers = layer_list(model)
    except ConfigError:
        return 2
    settings = vars(model.config.get_text_config()).items()
    per_layer = [value for name, value in settings if _is_per_layer(name, value, len(layers))]

    def kind(number: int) -> tuple[Any, ...]:
        parts = tuple((name, type(module)) for name, module in layers[number].named_modules())
        return (*parts, *(str(value[number]) for value in per_layer))

    kinds = [kind(number) for number in range(len(layers))]
    num_layers = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    return min(max(least, num_layers), len(kinds), _MOST_LAYERS)


def _is_per_layer(name: str, value: Any, num_layers: int) -> bool:
    """Whether a setting is a list of one value a layer; of a few numbers with decimals, its name has to say so."""
    if not isinstance(value, list | tuple) or len(value) != num_layers:
        return False
    return any(word in name for word in _PER_LAYER) or not any(isinstance(one, float) for one in value)


def with_layers(config: Any, num_layers: int) -> Any:
    """A copy with so many layers in the text's part, kinds in their order, and two in others."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for part in nested_configs(small):
        for name in _LAYERS:
            if part is not text and type(getattr(part, name, None)) is int:
                setattr(part, name, min(2, getattr(part, name)))
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if num_layers != before and _is_per_layer(name, value, before):
            setattr(text, name, type(value)(islice(cycle(value), num_layers)))
    text.num_hidden_layers = num_layers
    return small


def _with_few_ids(config: Any, num_layers: int) -> Any:
    """A copy with so many layers, and few ids."""
    small = with_layers(config, num_layers)
    text = small.get_text_config()
    for one in {id(text): text, id(small): small}.values():
        for name in _SPECIAL_IDS:
            if getattr(one, name, None) is not None:
                setattr(one, name, 0)
    for name, value in list(vars(text).items()):
        if name.startswith("vocab_size") and type(value) is int:
            setattr(text, name, min(value, TWIN_VOCABULARY))
    return small


def _thin(part: Any) -> None:
    """Narrow feed-forward layers, be they experts' or not."""
    for name, value in list(vars(part).items()):
        is_width = "intermediate_size" in name or name in ("ffn_dim", "ffn_hidden_size", "n_inner")
        if is_width and (type(value) is int or (value is None and name == "n_inner")):
            setattr(part, name, min(value or 64, 64))


def _narrow(part: Any) -> None:
    """Few heads of few values, of attention or else of states."""
    _few_heads(part, _HEAD_DIM)
    sizes = [getattr(part, name, None) for name in ("num_heads", "head_dim", "expand", "hidden_size", "state_size")]
    if getattr(part, "num_attention_heads", None) is None and all(type(size) is int for size in sizes):  # Mamba 2
        part.hidden_size, part.head_dim, part.n_groups = 4 * _HEAD_DIM, _HEAD_DIM, 1
        part.num_heads = part.expand * part.hidden_size // _HEAD_DIM
        part.state_size = min(part.state_size, _HEAD_DIM)


def _few_heads(part: Any, head_dim: int = 1 << 30) -> None:
    heads, hidden = (getattr(part, name, None) for name in ("num_attention_heads", "hidden_size"))
    if type(heads) is not int or type(hidden) is not int:
        return
    groups = getattr(part, "num_key_value_heads", None)
    if groups:
        part.num_key_value_heads = min(groups, 4 if groups == heads else 2)
    part.num_attention_heads = min(heads, 4)
    own = getattr(part, "head_dim", None)
    head_dim = min(own or hidden // heads, head_dim)
    if own and not getattr(part, "qk_rope_head_dim", None):  # in latent attention that is another width
        part.head_dim = head_dim
    part.hidden_size = part.num_attention_heads * head_dim
    if getattr(part, "mamba_n_heads", None) and getattr(part, "mamba_expand", None):
        part.mamba_d_head, part.mamba_n_groups = _HEAD_DIM, 1
        part.mamba_n_heads = part.mamba_expand * part.hidden_size // _HEAD_DIM


def _draw(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[-1]))
            else:  # of norms, biases, and what begins at zero, and so would hide what it is a factor of
                weight.add_(0.1 * torch.randn_like(weight))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
