"""Modules of transformers on a device that runs our kernels: in one pass over memory what their own code does in many.

Most families have norms, gated activations and turned heads of the very same code. A module is taken by the digest of
its class's code; all others, and all modules on other devices, keep theirs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.stages.kernels import GatedActivation, gated_pair, turn_rows
from dynapipe_ext.executor.stages.replaced_forward import replace_forward

# Of weight x (x / root of the mean square) in float32, rounded before or after it is weighted.
_NORMS = frozenset({"0dcf5f011ba2ed45", "152131c0d8a8a799"})
_GATED_MLPS = frozenset({"aff9046952d1b312", "1e2a4e208155eb34"})  # down(activation(gate(x)) x up(x))
# Queries and keys, each times cosines and, its halves exchanged and the first negated, times sines.
_TURN, _TURNS = "apply_rotary_pos_emb", frozenset({"928b1b071cc104d5"})
_EXCHANGE, _EXCHANGES = "rotate_half", frozenset({"a68a16140f32af85"})
_ACTIVATIONS: dict[str, GatedActivation] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip


def compute_in_few_passes(model: torch.nn.Module) -> None:
    """Have those modules of a model that are known take the kernels from now on."""
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module):
            continue
        if (digest := code_digest(forward)) in _NORMS:
            replace_forward(module, _norm)
        elif digest in _GATED_MLPS and type(module.act_fn).__name__ in _ACTIVATIONS:
            replace_forward(module, _gated_mlp)
        elif (turning := _with_turns(forward)) is not None:
            replace_forward(module, turning)


@cache
def code_digest(function: Any) -> str:
    """Of a function's arguments and code, whatever comments and layout; empty where its source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    body = [line for line in tree.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return hashlib.sha256("\n".join([*names, *map(ast.unparse, body)]).encode()).hexdigest()[:16]


def _norm(self: Any, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
    if named or inputs[0].dtype != self.weight.dtype or not runs_kernels(inputs[0]):
        own: torch.Tensor = type(self).forward(self, *inputs, **named)
        return own
    return F.rms_norm(inputs[0], self.weight.shape, self.weight, self.variance_epsilon)


def _gated_mlp(self: Any, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
    output: torch.Tensor
    if named or not runs_kernels(inputs[0]):
        output = type(self).forward(self, *inputs, **named)
    else:
        gate, up = self.gate_proj(inputs[0]), self.up_proj(inputs[0])
        output = self.down_proj(gated_pair(gate, up, _ACTIVATIONS[type(self.act_fn).__name__]))
    return output


@cache
def _with_turns(forward: Any) -> FunctionType | None:
    """The forward of an attention module with our turn of queries and keys in the place of the known one; None where it
    has none."""
    if not isinstance(forward, FunctionType) or _TURN not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_TURN)
    if not isinstance(own, FunctionType) or code_digest(own) not in _TURNS:
        return None
    if code_digest(own.__globals__.get(_EXCHANGE)) not in _EXCHANGES:
        return None
    names = {**forward.__globals__, _TURN: _turned_by(own)}
    turning = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    turning.__kwdefaults__ = forward.__kwdefaults__
    return turning


def _turned_by(own: Callable[..., Any]) -> Callable[..., Any]:
    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        is_known = cos.dim() == 3 and q.dim() == k.dim() == 4 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if others or named or not is_known or not runs_kernels(q):
            return own(q, k, cos, sin, *others, **named)
        return turn_rows(q, cos, sin), turn_rows(k, cos, sin)

    return turned
