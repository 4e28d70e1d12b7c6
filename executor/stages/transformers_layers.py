"""Where causal models of transformers keep what a pipeline cuts, and how one stage's share is cut out.

Masks, windows, rotary angles and scales are computed by the model's own forward, on every stage alike: what other
stages have leaves a place in which hidden states pass through, so every layer keeps its number and its name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.models.layer_patterns import LayerPattern
from dynapipe_ext.topology import Topology


@dataclass(frozen=True, slots=True)
class PartPlace:
    """A stage of a cut model: its number, that of all stages, and the layers that it has."""

    stage: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


def places_of(topology: Topology, num_layers: int, pp_rank: int) -> list[PartPlace]:
    """The stages of a pipeline rank. Errors: ConfigError for tensor parallelism and for stages without layers."""
    if topology.tp > 1:
        raise ConfigError(
            f"tp is {topology.tp} but models of transformers are not cut over tensor parallel ranks: give tp 1"
        )
    counts = topology.with_layers(num_layers).layers_per_stage
    if min(counts) < 1:
        raise ConfigError(f"layers_per_stage is {counts} but each stage of a transformers model needs a layer or more")
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [
        PartPlace(stage, len(counts), range(firsts[stage], firsts[stage] + counts[stage]))
        for stage in topology.stages_of(pp_rank)
    ]


def check_pattern(model: Any, pattern: LayerPattern) -> None:
    """Errors: ConfigError where the model is no causal model of that pattern, or cannot be cut without a change."""
    config, name = model.config, type(model).__name__
    for path in (pattern.layers, *pattern.first, *pattern.last):
        if path not in dict(model.named_modules()):
            raise ConfigError(f"{name} has no module {path!r}: give the LayerPattern that names its own")
    if not isinstance(model.get_submodule(pattern.layers), torch.nn.ModuleList):
        raise ConfigError(f"{pattern.layers!r} of {name} is no list of layers: give the LayerPattern that names it")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{name} has no language model head: give a causal model (AutoModelForCausalLM)")
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"output_router_logits of {name} adds a loss of all routers together, which no stage sees: set it to False"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{name} attends in both directions, so that padding would be seen: a causal model is needed")
    ends = {_key_of(model, end()) for end in (model.get_input_embeddings, model.get_output_embeddings)}
    if others := {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()} - ends:
        raise ConfigError(
            f"{name} ties weights other than head and embedding ({', '.join(sorted(others))}): it cannot be cut"
        )


def has_tied_ends(model: Any) -> bool:
    """Whether the head's weight is that of the embedding, in the whole model and so in its parts."""
    return bool(model._tied_weights_keys and model.config.get_text_config().tie_word_embeddings)


def cut_in_place(model: Any, pattern: LayerPattern, place: PartPlace) -> None:
    """Leave a model what its stage needs. The last stage keeps a tied embedding for its head."""
    layers = model.get_submodule(pattern.layers)
    tied = has_tied_ends(model)
    embedding = _key_of(model, model.get_input_embeddings()).removesuffix(".weight")
    for number, layer in enumerate(layers):
        if number not in place.layers:
            layers[number] = AbsentModule(layer, pattern.returns_tuple)
    if not place.is_first:
        layers[0] = StageEntry(layers[0], pattern.returns_tuple)
        _remove(model, [path for path in pattern.first if not (tied and place.is_last and path == embedding)])
    if not place.is_last:
        layers[len(layers) - 1] = StageExit(layers[len(layers) - 1], pattern.returns_tuple)
        _remove(model, pattern.last)
        model.all_tied_weights_keys = {}


def cut_out(model: Any, pattern: LayerPattern, place: PartPlace) -> Any:
    """A stage's share as a model of its own, with the very layers and weights of `model`, which stays whole."""
    own = _with_own_modules(model)
    for path in {*pattern.first, *pattern.last, pattern.layers + "."}:
        parent = own
        for name in path.split(".")[:-1]:
            setattr(parent, name, _with_own_modules(getattr(parent, name)))
            parent = getattr(parent, name)
    cut_in_place(own, pattern, place)
    return own


class AbsentModule(torch.nn.Module):
    """In the place of a module that another stage has: hidden states pass unchanged, ids look up nothing.

    It keeps the plain attributes of that module, by which some models choose a layer's mask.
    """

    def __init__(self, like: torch.nn.Module, returns_tuple: bool = False) -> None:
        super().__init__()
        for name, value in vars(like).items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                setattr(self, name, value)
        self._returns_tuple = returns_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (self._passed(x),) if self._returns_tuple else self._passed(x)

    def _passed(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_floating_point() else x.new_zeros((), dtype=torch.float32)


class StageEntry(AbsentModule):
    """In the place of the first layer: whatever was done before it, on come the hidden states of the stage before."""

    received: torch.Tensor | None = None

    def _passed(self, x: torch.Tensor) -> torch.Tensor:
        assert self.received is not None
        received, self.received = self.received, None
        return received


class StageExit(AbsentModule):
    """In the place of the last layer: keeps the hidden states for the stage behind, whatever the model does next."""

    kept: torch.Tensor | None = None

    def _passed(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x
        return x

    def take(self) -> torch.Tensor:
        """What came, once. Errors: ExecutionError where nothing did."""
        kept, self.kept = self.kept, None
        if kept is None:
            raise ExecutionError(
                "the model's forward did not run its last layer: give the LayerPattern that names its layers"
            )
        return kept


def _with_own_modules(module: Any) -> Any:
    """A shallow copy whose children can be replaced without a change to the original."""
    own = copy.copy(module)
    own._modules = dict(module._modules)
    return own


def _remove(model: Any, paths: Any) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, AbsentModule(model.get_submodule(path)))


def _key_of(model: Any, module: Any) -> str:
    """The name of a module's weight within the model."""
    return next((f"{name}.weight" for name, other in model.named_modules() if other is module), "")
