"""Where a layer of a causal model is two: the place in its forward that nothing crosses but hidden states.

It is found by trial, whatever its modules are called. A layer adds to the hidden states what its modules return. So of
a layer whose modules from one place on return zeros, the states at that place come out; and of one whose modules before
it return zeros, the rest of the layer is what runs. Where the one after the other gives the layer's own bits, the layer
is cut there. Parallel attention and MLP have no such place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dynapipe_ext.executor.stages.transformers.layers import half_layer, hidden_states_of, with_hidden_states
from dynapipe_ext.executor.stages.transformers.twin import token_ids
from dynapipe_ext.models.layer_pattern import HalfModule
from dynapipe_ext.models.module_tree import num_weights


def derived_halves(twin: Any, layers: Sequence[Any]) -> tuple[HalfModule, ...]:
    """The modules of the halves of a small model's layers, in the order in which they run; empty where a layer cannot
    be cut, or layers differ in which half a name belongs to."""
    calls = [_LayerCall(layer) for layer in layers]
    with ExitStack() as stack, torch.no_grad():
        for call in calls:
            call.watch(stack)
        twin(input_ids=token_ids(twin, 5, seed=1), use_cache=False)
    with torch.no_grad():
        halves = [call.halves() for call in calls]
    named: dict[str, HalfModule] = {}
    for module in (module for own in halves for module in own):
        if named.setdefault(module.name, module) != module:
            return ()
    return tuple(named.values()) if all(halves) else ()


class _LayerCall:
    """One call of a layer, with what its modules returned."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._output: Any = None
        self._run: list[tuple[str, int]] = []  # its modules, and the values of the tuple that each returned

    def watch(self, stack: ExitStack) -> None:
        stack.callback(self._layer.register_forward_hook(self._returned, with_kwargs=True).remove)
        for name, module in self._layer.named_children():
            stack.callback(module.register_forward_hook(self._note(name)).remove)

    def _returned(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._args, self._kwargs, self._output = args, kwargs, hidden_states_of((output,), {})

    def _note(self, name: str) -> Any:
        def note(_module: Any, _inputs: Any, output: Any) -> None:
            self._run.append((name, len(output) if isinstance(output, tuple) else 0))

        return note

    def halves(self) -> list[HalfModule]:
        """Those of the only place where the layer is two; empty if there is none."""
        names = [name for name, _ in self._run]
        weights = {name: num_weights(module) for name, module in self._layer.named_children()}
        once = len({*names}) == len(names)
        if not once or any(weights[name] for name in weights.keys() - {*names}) or self._layer._parameters:
            return []
        for border in range(1, len(names)):
            if not sum(map(weights.__getitem__, names[:border])) or not sum(map(weights.__getitem__, names[border:])):
                continue
            modules = [
                HalfModule(name=name, half="attention" if place < border else "mlp", num_tupled=num_tupled)
                for place, (name, num_tupled) in enumerate(self._run)
            ]
            if self._is_cut_by(modules):
                return modules
        return []

    def _is_cut_by(self, modules: Sequence[HalfModule]) -> bool:
        args, kwargs = self._args, self._kwargs
        try:
            middle = hidden_states_of((half_layer(self._layer, "attention", modules)(*args, **kwargs),), {})
            args, kwargs = with_hidden_states(middle, args, kwargs)
            output = hidden_states_of((half_layer(self._layer, "mlp", modules)(*args, **kwargs),), {})
        except Exception:  # noqa: BLE001 (of the model's own code, whose modules take no zeros there)
            return False
        return torch.equal(output, self._output)
