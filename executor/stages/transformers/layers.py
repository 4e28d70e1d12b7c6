"""Which layers the stages of a transformers model have, and what stands in the places of the others."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynapipe_ext.batch.topology import StageLayers, Topology, list_stage_layers, require_whole_layers
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.models.layer_pattern import Half, HalfModule


@dataclass(frozen=True, slots=True)
class PartPlace:
    """A stage of a cut model, and how many layers each stage has, whole or in halves."""

    stage: int
    layers_per_stage: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def _layers(self) -> StageLayers:
        return list_stage_layers(self.layers_per_stage)[self.stage]

    @property
    def layers(self) -> range:
        """Those of which it has a half or more, by their numbers in the whole model."""
        return self._layers.held

    def half_of(self, layer: int) -> Half | None:
        """The one half of a layer that it has; None where it has both."""
        own = self._layers
        if layer not in own.mlp:
            return "attention"
        return None if layer in own.attention else "mlp"

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


def places_of(topology: Topology, num_layers: int, pp_rank: int, *, halves: bool = False) -> list[PartPlace]:
    """The stages of a pipeline rank. `halves`: whether a stage may end within a layer.

    Errors: ConfigError for tensor parallelism and for stages without layers.
    """
    if topology.tp > 1:
        raise ConfigError(
            f"tp is {topology.tp} but models of transformers are not cut over tensor parallel ranks: give tp 1"
        )
    require_whole_vocabulary(topology, "a model of transformers")
    counts = topology.with_layers(num_layers).layers_per_stage
    if not halves:
        require_whole_layers(counts, "this model of transformers")
    if not min(counts):
        raise ConfigError(f"layers_per_stage is {counts} but each stage of a transformers model needs layers")
    return [PartPlace(stage, counts) for stage in topology.stages_of(pp_rank)]


_STATES = ("hidden_states", "x", "input", "inputs_embeds")  # what layers call them
_STATES_DIM = 3  # rows, length, width


class AbsentModule(torch.nn.Module):
    """In the place of a module that another stage has: hidden states pass unchanged, ids look up nothing.

    It keeps the plain attributes of that module and of its class, by which some models choose a layer's mask.
    """

    def __init__(self, like: torch.nn.Module, num_tupled: int = 0) -> None:
        """`num_tupled`: values of the tuple that it returns, the first the hidden states; 0: these alone."""
        super().__init__()
        for name, value in {**_of_class(type(like)), **vars(like)}.items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                setattr(self, name, value)
        self._num_tupled = num_tupled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passed = self._passed(hidden_states_of(args, kwargs))
        return (passed, *(None,) * (self._num_tupled - 1)) if self._num_tupled else passed

    def _passed(self, x: torch.Tensor | None) -> torch.Tensor:
        if x is None or not x.is_floating_point() or x.dim() < _STATES_DIM:  # ids, positions, a mask of rows
            return torch.zeros((), device=None if x is None else x.device)
        return x


def hidden_states_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The hidden states among a module's arguments, or in what it returned; None where there are none."""
    states = args[0] if args else next((kwargs[name] for name in _STATES if name in kwargs), None)
    return states[0] if isinstance(states, tuple) else states


def with_hidden_states(
    states: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with other hidden states."""
    if args:
        return (states, *args[1:]), dict(kwargs)
    return (), {**kwargs, next(name for name in _STATES if name in kwargs): states}


def _of_class(cls: type) -> dict[str, Any]:
    """What a family's own class and its bases say, without torch's."""
    own = [base for base in reversed(cls.__mro__) if issubclass(base, torch.nn.Module) and base is not torch.nn.Module]
    return {name: value for base in own for name, value in vars(base).items()}


class StageEntry(AbsentModule):
    """In the place of the first layer: whatever was done before it, on come the hidden states of the stage before."""

    received: torch.Tensor | None = None

    def _passed(self, x: torch.Tensor | None) -> torch.Tensor:
        assert self.received is not None
        received, self.received = self.received, None
        return received


class StageExit(AbsentModule):
    """In the place of the last layer: keeps the hidden states for the stage behind, whatever the model does next."""

    kept: torch.Tensor | None = None

    def _passed(self, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
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


class ZeroModule(AbsentModule):
    """In the place of a module in the other half of a layer: it adds nothing to the hidden states."""

    def _passed(self, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        return torch.zeros_like(x)


def half_layer(layer: Any, half: Half, modules: Sequence[HalfModule]) -> Any:
    """A layer with the modules of one half, and its weights; the layer itself stays whole."""
    own = with_own_modules(layer)
    for module in modules:
        if module.half != half and module.name in own._modules:
            own._modules[module.name] = ZeroModule(own._modules[module.name], module.num_tupled)
    return own


def as_entry(layer: Any) -> Any:
    """The layer, which takes what it `received` from the stage before in the place of the states that it is given.

    It does so before anything of the layer runs, so what is recomputed has it, too.
    """

    class Entry(type(layer)):  # type: ignore[misc]
        received: torch.Tensor | None = None

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            received, self.received = self.received, None
            args, kwargs = with_hidden_states(received, args, kwargs)
            return super().__call__(*args, **kwargs)

    return _of_renamed_class(layer, Entry)


def as_exit(layer: Any) -> Any:
    """The layer, which keeps the hidden states that it returns for the stage behind (`take`)."""

    class Exit(type(layer)):  # type: ignore[misc]
        kept: torch.Tensor | None = None
        take = StageExit.take

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            self.kept = hidden_states_of((output,), {})
            return output

    return _of_renamed_class(layer, Exit)


def _of_renamed_class(layer: Any, own: Any) -> Any:
    """The layer as one of the class `own`, which has the names of the layer's class."""
    own.__name__, own.__qualname__, own.__module__ = (
        getattr(type(layer), name) for name in ("__name__", "__qualname__", "__module__")
    )
    layer.__class__ = own
    return layer


def with_own_modules(module: Any) -> Any:
    """A shallow copy whose children can be replaced without a change to the original."""
    own = copy.copy(module)
    own._modules = dict(module._modules)
    return own


def remove(model: Any, paths: Any) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, AbsentModule(model.get_submodule(path)))


def key_of(model: Any, module: Any) -> str:
    """The name of a module's weight within the model."""
    return next((f"{name}.weight" for name, other in model.named_modules() if other is module), "")
