"""Where a causal model can be cut into stages, read off its modules and off one forward of a few tokens.

The layers are a list of as many modules as the configuration says. What runs before the first of them belongs to the
first stage, what runs behind the last to the last stage, and what no text runs through (the tower of images) is idle.
That a model cut so is the same model is for `cut_proof` to prove.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.transformers.layers import key_of
from dynapipe_ext.executor.stages.transformers.twin import token_ids
from dynapipe_ext.models.layer_pattern import LayerPattern
from dynapipe_ext.models.module_tree import layer_list


def derived_pattern(twin: Any) -> LayerPattern:
    """The pattern of a small model, which holds of every size of it. Errors: ConfigError where there is none."""
    path, layers = layer_list(twin)
    outer = list(_modules_around(twin, path))
    order = _Order(layers, [module for _, module in outer])
    loss = order.watched(lambda: twin(input_ids=token_ids(twin, 5, seed=1), use_cache=False).logits.square().sum())
    twin.zero_grad()
    loss.backward()
    first, last, idle = [], [], []
    for name, module in outer:
        weights = list(module.parameters())
        draws = isinstance(module, torch.nn.Dropout)
        match order.place_of(module):
            case "first" if weights or draws:
                first.append(name)
            case "last" if weights or draws:
                last.append(name)
            case "idle" if weights and all(weight.grad is None for weight in weights):
                idle.append(name)
    twin.zero_grad()
    is_tupled, num_returned = order.returned(twin)
    return LayerPattern(
        layers=path,
        first=tuple(first),
        last=tuple(last),
        returns_tuple=is_tupled,
        num_returned=num_returned,
        idle=tuple(idle),
    )


def _modules_around(model: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The largest modules that hold neither the list of that path nor the embedding, nor lie in the list."""
    embedding = key_of(model, model.get_input_embeddings()).removesuffix(".weight")

    def below(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if any(inner.startswith(f"{full}.") for inner in (path, embedding)):
                yield from below(f"{full}.", child)
            elif full != path:
                yield full, child

    return below("", model)


class _Order:
    """When modules run: before the first layer, behind the last, both, or never."""

    def __init__(self, layers: Any, modules: list[Any]) -> None:
        self._layers, self._modules = layers, modules
        self._num_run = 0
        self._seen: dict[Any, set[str]] = {module: set() for module in modules}
        self._outputs: set[tuple[bool, int]] = set()

    def watched(self, call: Any) -> Any:
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_hook(self._ran).remove)
            for outer in self._modules:
                for module in outer.modules():
                    stack.callback(module.register_forward_pre_hook(self._note(outer)).remove)
            return call()

    def _note(self, outer: Any) -> Any:
        def note(*_: Any) -> None:
            self._seen[outer].add("first" if not self._num_run else "last")
            if 0 < self._num_run < len(self._layers):
                self._seen[outer].add("between")

        return note

    def _ran(self, _layer: Any, _inputs: Any, output: Any) -> None:
        self._num_run += 1
        self._outputs.add((isinstance(output, tuple), len(output) if isinstance(output, tuple) else 1))

    def place_of(self, module: Any) -> str:
        seen = self._seen[module]
        return "idle" if not seen else seen.copy().pop() if len(seen) == 1 else "both"

    def returned(self, model: Any) -> tuple[bool, int]:
        """Errors: ConfigError for layers that did not run once each, or do not return alike."""
        name = type(model).__name__
        if self._num_run != len(self._layers):
            raise ConfigError(
                f"{name} ran {self._num_run} layers where its list has {len(self._layers)}: only models that run each"
                " of their layers once can be cut"
            )
        if len(self._outputs) > 1:
            raise ConfigError(f"the layers of {name} do not return alike, so that it cannot be cut into stages")
        return self._outputs.copy().pop()
