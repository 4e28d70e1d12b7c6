"""Models that evaluate for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class ModuleWithModes(Protocol):
    """What evaluation needs of a torch module."""

    def train(self, mode: bool = True) -> Any: ...

    def modules(self) -> Iterator[Any]: ...


@contextmanager
def evaluating(*models: ModuleWithModes) -> Iterator[None]:
    """Within, models evaluate; behind it, each of their modules is in the mode that it was in."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.train(False)
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
