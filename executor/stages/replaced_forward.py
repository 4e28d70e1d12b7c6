"""A module's forward by a function of ours: a copy of the module computes with its own weights, and a saved one is as
its class has it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_MARK = "_dynapipe_forward"


def replace_forward(module: Any, function: Callable[..., Any]) -> None:
    """Have calls of this module, and of no other, run `function(module, …)`."""
    named = FunctionType(
        function.__code__, function.__globals__, "forward", function.__defaults__, function.__closure__
    )
    named.__kwdefaults__ = function.__kwdefaults__
    setattr(named, _MARK, True)
    module.forward = MethodType(named, module)  # pickled by its name, which then is the class's


def forward_of(module: Any) -> Callable[..., Any]:
    """What calls of this module run now, as a function of the module too: its class's, or what replaced that."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward  # type: ignore[no-any-return]
    if isinstance(own, MethodType):
        return own.__func__
    return lambda _, *arguments, **options: own(*arguments, **options)


def has_other_forward(module: Any) -> bool:
    """Whether someone else has replaced the forward of this module alone."""
    own = vars(module).get("forward")
    function = getattr(own, "__func__", None)
    return own is not None and function is not type(module).forward and not hasattr(function, _MARK)
