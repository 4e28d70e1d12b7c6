"""A pipeline rank's parts of a model of transformers: out of a whole model, a checkpoint folder, or a seed.

From a folder or a configuration no rank ever holds more than its own parts (of a T5, at first, embedding and head): the
whole model is described on torch's meta device, cut, and only what is left gets memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, DataError, in_one_line
from dynapipe_ext.executor.stages.chunk_runner import seed_of, seed_torch
from dynapipe_ext.executor.stages.transformers.causal import CausalCut, has_tied_ends
from dynapipe_ext.executor.stages.transformers.cut_proof import proven_cut
from dynapipe_ext.executor.stages.transformers.layers import AbsentModule, PartPlace, remove
from dynapipe_ext.executor.stages.transformers.part import ModelCut, TransformersPart, cut_out, hold_shared_once
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.executor.stages.transformers.t5 import T5Cut
from dynapipe_ext.models.layer_pattern import LayerPattern, ProvenCut
from dynapipe_ext.models.module_tree import causal_class, read_transformers_config, set_dropout
from dynapipe_ext.models.named_models import refuse_other_pairs
from dynapipe_ext.peak_memory import is_out_of_memory


def parts_of_model(
    model: Any, topology: Topology | None = None, pp_rank: int = 0, *, pattern: LayerPattern | None = None
) -> list[TransformersPart]:
    """This rank's parts of a whole PreTrainedModel, one a stage: its own layers and weights, not copies.

    Without a topology, the model in one part. Without a pattern it is derived and proven (`cut_proof`); one that is
    named is taken as it is.

    Errors: ConfigError for a model that is neither causal nor a T5, or that cannot be cut so.
    """
    head, embedding = (
        getattr(end(), "weight", None) for end in (model.get_output_embeddings, model.get_input_embeddings)
    )
    cut: ModelCut
    if _has_pairs(model.config, pattern):
        cut = T5Cut(head is embedding)
    else:
        cut = CausalCut(pattern or proven_cut(type(model), model.config, [_attention_of(model)]).pattern)
    cut.check(model)
    return [cut_out(cut, model, place) for place in cut.places(model.config, topology or Topology(), pp_rank)]


def parts_of_folder(
    folder: str | Path,
    topology: Topology | None = None,
    pp_rank: int = 0,
    *,
    pattern: LayerPattern | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> list[TransformersPart]:
    """This rank's parts of a model that `save_pretrained` wrote, in training mode; only their weights are read.

    All dropout has the rate `dropout`, whatever the folder's config.json says of it; saved parts say that again.
    `options` are those of from_pretrained: dtype, attn_implementation. Errors as `parts_of_model`; DataError for a
    folder that lacks weights, has them in other shapes, or in files that cannot be read.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)

    load = partial(_loaded, folder, config, options)
    whole = model_class(config, pattern)
    if _has_pairs(config, pattern):
        cut = T5Cut(_is_tied(load, whole))
        parts = _built(whole, config, topology, pp_rank, cut, load, dropout=dropout)
        for part in parts:
            part.model.config.tie_word_embeddings = cut.tied  # which transformers says of every T5, and saves
        return parts
    causal = _causal_cut(whole, config, pattern, options)
    load = partial(load, idle=causal.pattern.idle)
    parts = _built(whole, config, topology, pp_rank, causal, load, dropout=dropout)
    for model in (part.model for part in parts):
        head, embedding = (
            getattr(end(), "weight", None) for end in (model.get_output_embeddings, model.get_input_embeddings)
        )
        if has_tied_ends(model) and head is not None and head is not embedding:  # transformers would untie them
            raise DataError(
                f"{folder} has a head that differs from the embedding, to which its config.json ties it: correct"
                " tie_word_embeddings there, or give the files that belong to the model"
            )
    return parts


def _loaded(
    folder: str | Path, config: Any, options: Mapping[str, Any], part_class: Any, *, idle: Sequence[str] = ()
) -> Any:
    """A part with its weights, those of `idle` modules as the folder has them. Errors: DataError; ConfigError where
    they need more memory than there is."""
    if idle:  # read as float32, whatever the others are
        float32_names = getattr(part_class, "_keep_in_fp32_modules_strict", None) or ()
        part_class._keep_in_fp32_modules_strict = [*float32_names, *(name + "." for name in idle)]
    try:
        model, loading = part_class.from_pretrained(
            folder, config=config, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, RuntimeError, SafetensorError, UnpicklingError, MemoryError) as error:  # of files that are cut
        if is_out_of_memory(error):
            raise ConfigError(
                f"the memory of this rank is too small for its part of {folder} ({in_one_line(error)}): raise pp,"
                " or take another machine"
            ) from error
        raise DataError(
            f"{folder} has weights that cannot be read ({in_one_line(error)}): give the folder of a whole model"
        ) from error
    if lacking := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise DataError(
            f"{folder} lacks weights of {type(model).__name__} or has them in other shapes: {', '.join(lacking)}:"
            " give the folder of a whole model"
        )
    if idle and (dtype := options.get("dtype")) in (torch.float16, torch.bfloat16):
        _narrow_without_loss([model.get_submodule(name) for name in idle], dtype)
    return model


def _narrow_without_loss(modules: Sequence[Any], dtype: torch.dtype) -> None:
    """Have all weights and buffers of the modules in a type of 16 bits, unless that would round one of them."""
    values = [value for module in modules for value in module.state_dict().values() if value.is_floating_point()]
    if all(torch.equal(value.to(dtype).to(value.dtype), value) for value in values):
        for module in modules:
            module.to(dtype)


def parts_of_config(
    config: Any,
    topology: Topology | None = None,
    pp_rank: int = 0,
    *,
    seed: int,
    pattern: LayerPattern | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> list[TransformersPart]:
    """This rank's parts of a fresh model, in training mode, its weights as the family draws them.

    They are keyed by seed and module, so every topology starts from the same model. `config` may be the path of one.
    `dropout`, `options` and errors as `parts_of_folder`.
    """
    if isinstance(config, str | Path):
        config = transformers.AutoConfig.from_pretrained(config, local_files_only=True)

    def draw(part_class: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return part_class.from_pretrained(None, config=config, state_dict={}, **options)

    whole = model_class(config, pattern)
    if _has_pairs(config, pattern):
        raise ConfigError(
            f"a {config.model_type} that transformers computes begins with weights: give a folder that has them, or"
            " have megatron-core draw and compute it"
        )
    cut = _causal_cut(whole, config, pattern, options)
    return _built(whole, config, topology, pp_rank, cut, draw, dropout=dropout, seed=seed)


def _has_pairs(config: Any, pattern: LayerPattern | None) -> bool:
    """Errors: ConfigError for an encoder-decoder that nobody knows to cut."""
    if pattern is None and getattr(config, "is_encoder_decoder", False):
        refuse_other_pairs(config.model_type)
        return True
    return False


def _causal_cut(whole: Any, config: Any, pattern: LayerPattern | None, options: Mapping[str, Any]) -> CausalCut:
    """By the pattern that is named, else by the one that is proven for the attention that parts will have."""
    return CausalCut(pattern or proven_cut(whole, config, [options.get("attn_implementation")]).pattern)


def _attention_of(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def _is_tied(load: Callable[[Any], Any], whole: Any) -> bool:
    """Whether the head of an encoder-decoder is its embedding, as transformers takes its files: by both alone."""

    def leave_ends(model: Any) -> None:
        remove(model, ["encoder", "decoder"])
        model.all_tied_weights_keys = {"lm_head.weight": "shared.weight"}

    with quietly():
        model = load(_part_class(whole, leave_ends))
    return model.lm_head.weight is model.shared.weight


def model_class(config: Any, pattern: LayerPattern | None) -> Any:
    """The class of the whole model that a configuration describes. Errors: ConfigError."""
    if not _has_pairs(config, pattern):
        return causal_class(config)
    mapping: Mapping[Any, Any] = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ConfigError(f"transformers has no model for a {type(config).__name__}: give the config of one")
    return mapping[type(config)]


def proven_cut_of_folder(folder: str | Path, pattern: LayerPattern | None = None) -> ProvenCut:
    """How the model in a folder, or described by a config.json, is cut. Errors: ConfigError."""
    config = read_transformers_config(folder)
    return proven_cut(model_class(config, pattern), config, pattern=pattern)


def _built(
    whole: Any,
    config: Any,
    topology: Topology | None,
    pp_rank: int,
    cut: ModelCut,
    build: Callable[[Any], Any],
    *,
    dropout: float,
    seed: int | None = None,
) -> list[TransformersPart]:
    """Parts that `build` makes, each of a class that cuts itself before it has memory. What the class itself does not
    train stays so: from_pretrained makes weights anew, and all of them train."""
    parts, untrained = [], set[str]()

    def leave(place: PartPlace, model: Any) -> None:
        cut.check(model)
        cut.in_place(model, place)
        untrained.update(name for name, weight in model.named_parameters() if not weight.requires_grad)
        if seed is not None:
            _key_draws(model, seed)

    with quietly():
        for place in cut.places(config, topology or Topology(), pp_rank):
            model = build(_part_class(whole, partial(leave, place), dropout))
            for module in model.modules():
                vars(module).pop("_init_weights", None)  # drawn
            for name, weight in model.named_parameters():
                weight.requires_grad_(weight.requires_grad and name not in untrained)
            part = cut.part(model.train(), place)
            part.loaded_dropout = model.loaded_dropout
            parts.append(part)
    hold_shared_once(parts)
    return parts


def _part_class(whole: Any, leave: Callable[[Any], None], dropout: float = 0.0) -> Any:
    """`whole`, cut as soon as it is made to what `leave` leaves: from_pretrained then gives memory to that alone. It
    keeps the rates that its configuration had before that got `dropout`."""

    class Part(whole):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r".*",)

        def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
            before = set_dropout(config, dropout)
            super().__init__(config, *inputs, **kwargs)
            self.loaded_dropout = before
            for module in self.modules() if not dropout else ():
                if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # of a rate in the family's code
                    module.p = 0.0
            _draw_own_alone(self)
            leave(self)

        def tie_weights(self, *arguments: Any, **kwargs: Any) -> Any:
            """Of the weights that are one in the whole model, those that are here."""
            return super().tie_weights(*arguments, **kwargs | {"recompute_mapping": False})

    Part.__name__ = Part.__qualname__ = whole.__name__
    Part.__module__ = whole.__module__
    return Part


def _draw_own_alone(model: Any) -> None:
    """Have the model, and models within it, draw what the family does but for children that another stage has."""

    def alone(draw: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def drawn(module: torch.nn.Module) -> None:
            try:
                with _own_layers(module):
                    draw(module)
            except AttributeError:
                if not any(isinstance(child, AbsentModule) for child in module.children()):
                    raise

        return drawn

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._init_weights = alone(module._init_weights)


@contextmanager
def _own_layers(module: Any) -> Iterator[None]:
    """For a while the lists of a module's children hold only those that are here, so that what it does to each of its
    layers reaches all of these (Falcon H1's model sets a buffer in every layer)."""
    lists = {name: child for name, child in module.named_children() if isinstance(child, torch.nn.ModuleList)}
    cut = {name: layers for name, layers in lists.items() if any(isinstance(one, AbsentModule) for one in layers)}
    for name, layers in cut.items():
        module._modules[name] = torch.nn.ModuleList(one for one in layers if not isinstance(one, AbsentModule))
    try:
        yield
    finally:
        module._modules.update(cut)


def _key_draws(model: Any, seed: int) -> None:
    """Before a module's first weights are drawn, seed by its name."""
    names = {module: name for name, module in model.named_modules()}

    def keyed(draw: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def seeded(module: torch.nn.Module) -> None:
            seed_torch(seed_of(str(seed), names[module]))
            draw(module)

        return seeded

    for module in names:  # a model within the model draws for itself
        if isinstance(module, PreTrainedModel):
            module._init_weights = keyed(module._init_weights)
