"""A pipeline rank's parts of a causal model of transformers: out of a whole model, a checkpoint folder, or a seed.

From a folder or a configuration no rank ever holds more than its own parts: the whole model is described on torch's
meta device, cut, and only what is left gets memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from dynapipe_ext.errors import ConfigError, DataError, in_one_line
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.keyed_random import seed_of
from dynapipe_ext.executor.stages.transformers_layers import (
    PartPlace,
    StageEntry,
    StageExit,
    check_pattern,
    cut_in_place,
    cut_out,
    has_tied_ends,
    places_of,
)
from dynapipe_ext.models.layer_patterns import LayerPattern, pattern_of
from dynapipe_ext.topology import Topology


class TransformersPart(torch.nn.Module):
    """One stage of a causal model: (ids or hidden states, batch) -> hidden states or logits, (rows, length, width).

    `model` is a PreTrainedModel whose layers keep their numbers and names; adapters go into it
    (`part.model.add_adapter(…)`). `batch` holds "model_inputs", further arguments of its forward, and where layers
    draw random numbers "random_key", of which those of each layer are made. Training is the model's own mode.
    """

    def __init__(self, model: Any, place: PartPlace, pattern: LayerPattern) -> None:
        super().__init__()
        self.model, self.place, self.pattern = model, place, pattern
        self.training = model.training
        places = model.get_submodule(pattern.layers)
        self._entry, self._exit = places[0], places[len(places) - 1]
        self._key = ""
        self._call = model.__call__ if place.is_last else model.get_submodule(pattern.body).__call__
        for number in place.layers:
            layer = places[number]
            layer.register_forward_pre_hook(lambda _module, _inputs, name=f"layer {number}": self._seed(name))
            layer.register_forward_hook(self._check_output)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        place, draws = self.place, self.model.training and "random_key" in batch
        inputs = batch["model_inputs"] | {name: batch[name] for name in ("carried",) if name in batch}
        if place.is_first:
            inputs["input_ids"] = x
        else:
            assert isinstance(self._entry, StageEntry)
            inputs["inputs_embeds"] = self._entry.received = x
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=devices, enabled=draws):
            self._key = batch["random_key"] if draws else ""
            self._seed("embedding")
            output = self._call(use_cache=False, **inputs)
            self._key = ""
        if place.is_last:
            logits: torch.Tensor = output.logits
            return logits
        assert isinstance(self._exit, StageExit)
        return self._exit.take()

    def run_by(self, engine: torch.nn.Module) -> None:
        """Have `engine`, which wraps the whole model, run its forwards from now on: it gathers weights before them."""
        self._call = engine.__call__

    def recompute_layers(self, enabled: bool) -> None:
        """Whether layers keep their inputs alone from the next forward on. Errors: ConfigError where they cannot."""
        if enabled and not self.model.training:
            raise ConfigError("transformers recomputes layers in training mode alone: call train(), or plan without")
        places = self.model.get_submodule(self.pattern.layers)
        for number in self.place.layers:
            layer = places[number]
            if not hasattr(layer, "gradient_checkpointing"):
                if enabled:
                    raise ConfigError(f'{type(layer).__name__} cannot be recomputed: plan with recompute="none"')
                return
            layer.gradient_checkpointing = enabled
            layer._gradient_checkpointing_func = partial(self._checkpoint, f"layer {number}")

    def _checkpoint(self, layer: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Recomputation seeds as the forward did: the layer's hooks are outside of `call` or, in older versions,
        within, where they find no key by then."""
        key = self._key

        def run(*given: Any) -> Any:
            if key:
                torch.manual_seed(seed_of(key, layer))
            return call(*given)

        return torch.utils.checkpoint.checkpoint(run, *arguments, use_reentrant=False)

    def _seed(self, layer: str) -> None:
        if self._key:
            torch.manual_seed(seed_of(self._key, layer))

    def _check_output(self, layer: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) != self.pattern.returns_tuple:
            raise ConfigError(
                f"{type(layer).__name__} returns {type(output).__name__}: give its LayerPattern"
                f" returns_tuple={not self.pattern.returns_tuple}"
            )


def parts_of_model(
    model: Any, topology: Topology | None = None, pp_rank: int = 0, *, pattern: LayerPattern | None = None
) -> list[TransformersPart]:
    """This rank's parts of a whole PreTrainedModel, one a stage: its own layers and weights, not copies.

    Without a topology, the model in one part.

    Errors: ConfigError for a model that is no causal one of a known pattern, or that cannot be cut so.
    """
    pattern = pattern or pattern_of(model.config.model_type)
    check_pattern(model, pattern)
    places = places_of(topology or Topology(), len(model.get_submodule(pattern.layers)), pp_rank)
    return [TransformersPart(cut_out(model, pattern, place), place, pattern) for place in places]


def parts_of_folder(
    folder: str | Path,
    topology: Topology | None = None,
    pp_rank: int = 0,
    *,
    pattern: LayerPattern | None = None,
    **options: Any,
) -> list[TransformersPart]:
    """This rank's parts of a model that `save_pretrained` wrote, in training mode; only their weights are read.

    `options` are those of from_pretrained: dtype, attn_implementation. Errors as `parts_of_model`; DataError for a
    folder that lacks weights, has them in other shapes, or in files that cannot be read.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)

    def load(part_class: Any) -> Any:
        try:
            model, found = part_class.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True, **options
            )
        except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:  # as files have them that are cut
            raise DataError(
                f"{folder} has weights that cannot be read ({in_one_line(error)}): give the folder of a whole model"
            ) from error
        if lacking := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
            raise DataError(
                f"{folder} lacks weights of {type(model).__name__} or has them in other shapes: {', '.join(lacking)}:"
                " give the folder of a whole model"
            )
        head, embedding = (
            getattr(end(), "weight", None) for end in (model.get_output_embeddings, model.get_input_embeddings)
        )
        if has_tied_ends(model) and head is not None and head is not embedding:  # transformers would untie them
            raise DataError(
                f"{folder} has a head that differs from the embedding, to which its config.json ties it: correct"
                " tie_word_embeddings there, or give the files that belong to the model"
            )
        return model

    return _built(config, topology, pp_rank, pattern, load)


def parts_of_config(
    config: Any,
    topology: Topology | None = None,
    pp_rank: int = 0,
    *,
    seed: int,
    pattern: LayerPattern | None = None,
    **options: Any,
) -> list[TransformersPart]:
    """This rank's parts of a fresh model, in training mode, its weights as the family draws them.

    They are keyed by seed and module, so every topology starts from the same model. `config` may be the path of one.
    `options` and errors as `parts_of_folder`.
    """
    if isinstance(config, str | Path):
        config = transformers.AutoConfig.from_pretrained(config, local_files_only=True)

    def draw(part_class: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return part_class.from_pretrained(None, config=config, state_dict={}, **options)

    return _built(config, topology, pp_rank, pattern, draw, seed=seed)


def _built(
    config: Any,
    topology: Topology | None,
    pp_rank: int,
    pattern: LayerPattern | None,
    build: Callable[[Any], Any],
    *,
    seed: int | None = None,
) -> list[TransformersPart]:
    """Parts that `build` makes, each of a class that cuts itself before it has memory."""
    mapping: Mapping[Any, Any] = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ConfigError(f"transformers has no causal model for a {type(config).__name__}: give the config of one")
    pattern = pattern or pattern_of(config.model_type)
    parts = []
    with quietly():
        for place in places_of(topology or Topology(), config.get_text_config().num_hidden_layers, pp_rank):
            model = build(_part_class(mapping[type(config)], pattern, place, seed))
            for module in model.modules():
                vars(module).pop("_init_weights", None)  # drawn
            parts.append(TransformersPart(model.train(), place, pattern))
    first, last = parts[0], parts[-1]
    if first.place.is_first and last.place.is_last and first is not last and has_tied_ends(last.model):
        last.model.set_input_embeddings(first.model.get_input_embeddings())
        last.model.tie_weights()
    return parts


def _part_class(whole: Any, pattern: LayerPattern, place: PartPlace, seed: int | None) -> Any:
    """`whole`, cut to a stage as soon as it is made: from_pretrained then gives memory to that alone.

    With a seed, what each module draws is keyed by its name.
    """

    class Part(whole):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r".*",)

        def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
            super().__init__(config, *inputs, **kwargs)
            check_pattern(self, pattern)
            cut_in_place(self, pattern, place)
            if seed is not None:
                _key_draws(self, seed)

        def tie_weights(self, *arguments: Any, **kwargs: Any) -> Any:
            """The head, where it is here, is tied to the embedding beside it."""
            return super().tie_weights(*arguments, **kwargs) if place.is_last else None

    Part.__name__ = Part.__qualname__ = whole.__name__
    Part.__module__ = whole.__module__
    return Part


def _key_draws(model: Any, seed: int) -> None:
    """Before a module's first weights are drawn, seed by its name."""
    names = {module: name for name, module in model.named_modules()}

    def keyed(draw: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def seeded(module: torch.nn.Module) -> None:
            torch.manual_seed(seed_of(str(seed), names[module]))
            draw(module)

        return seeded

    for module in names:  # a model within the model draws for itself
        if isinstance(module, PreTrainedModel):
            module._init_weights = keyed(module._init_weights)  # type: ignore[method-assign]


@contextmanager
def quietly() -> Iterator[None]:
    """Without what transformers says of weights that other stages have, and of its progress with a part."""
    logging: Any = transformers.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
