"""Attention of packed rows within each document: one call of the best installed kernel, or torch's own, one call per
document.

Shapes: T positions of all documents end to end, (T, heads, D); fewer key and value heads are shared in groups.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

SDPA = "sdpa"
_SHARED_HEADS = "enable_gqa"  # torch 2.11 shares heads without being asked


@dataclass(frozen=True, slots=True, eq=False)
class VarlenKernel:
    """An attention function of an installed package: its module, and its names of the `arguments` that it has.

    `arguments`: flash-attn's name to its own; all are passed by name, since new versions insert arguments between old
    ones. `capabilities`: major compute capabilities that it runs on. `unbounded`: its value for a window side without a
    bound.
    """

    name: str
    module: str
    capabilities: range
    arguments: Mapping[str, str]
    function: str = "flash_attn_varlen_func"
    unbounded: int | None = -1


# Best first. Signatures read in flash-attn 2.8 (flash_attn_interface.py), 3 (hopper/flash_attn_interface.py), 4.0.0b36
# (cute/interface.py), torch 2.11 and 2.13 (nn/attention/varlen.py). Arguments are called as flash-attn calls them.
_FLASH = {
    name: name
    for name in (
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "window_size", "causal",
        "softcap", "deterministic",
    )
}  # fmt: skip
_TORCH = {
    "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
    "softmax_scale": "scale", "window_size": "window_size", _SHARED_HEADS: _SHARED_HEADS,
}  # fmt: skip
KERNELS = (
    VarlenKernel("flash-attn-3", "flash_attn_interface", range(9, 10), _FLASH),
    VarlenKernel("flash-attn-4", "flash_attn.cute", range(9, 13), _FLASH, unbounded=None),
    VarlenKernel("flash-attn-2", "flash_attn", range(8, 13), _FLASH | {"dropout_p": "dropout_p"}),
    VarlenKernel("torch-varlen", "torch.nn.attention.varlen", range(8, 13), _TORCH, function="varlen_attn"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMask:
    """The positions of its document that a position attends to, and how. `scale`: of scores (None: 1 / sqrt(D)).
    `is_causal`: to no later position. `window`: to `window` - 1 positions before it and, without causality, as many
    after it. `softcap`: above 0, scores are capped. `dropout`: the share of attention weights that is dropped.
    `is_deterministic`: gradients are bitwise identical in all runs. `has_sinks`: attention sinks, which no kernel here
    has."""

    scale: float | None = None
    is_causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    is_deterministic: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Lengths of documents end to end, and `sums`: their offsets from 0 on (`cu_seqlens`), int32, on the device."""

    lengths: Sequence[int]
    sums: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> DocumentOffsets:
        return cls(lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device))


def load_kernel(kernel: VarlenKernel) -> tuple[Callable[..., Any] | None, str]:
    """Return the kernel's function and ""; or None and the reason: its package is broken, or its version lacks
    arguments. The reason is "" if the package is not installed."""
    try:
        module = importlib.import_module(kernel.module)
        if not hasattr(module, kernel.function) and getattr(module, "__file__", None) is None:
            return None, ""  # a folder that another package made: flash-attn 4 is in that of flash-attn 2
        function = getattr(module, kernel.function)
        parameters = inspect.signature(function).parameters
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        packages = accumulate(kernel.module.split("."), "{}.{}".format)
        is_absent = isinstance(error, ModuleNotFoundError) and (error.name or "") in packages
        return None, "" if is_absent else f"broken: {' '.join(str(error).split())}"
    if lacking := [name for name in kernel.arguments.values() if name not in (_SHARED_HEADS, *parameters)]:
        return None, f"has no {', '.join(lacking)}"
    return function, ""


@cache
def _load_once(kernel: VarlenKernel) -> tuple[Callable[..., Any] | None, Mapping[str, str]]:
    """Return the kernel's function, and the arguments that its version has."""
    function, _ = load_kernel(kernel)
    parameters = inspect.signature(function).parameters if function else {}
    return function, {key: name for key, name in kernel.arguments.items() if name in parameters}


def pick_kernel(q_THD: torch.Tensor, rule: DocumentMask) -> VarlenKernel | None:
    """Return the best installed kernel for these tensors; None if torch is called, once per document."""
    if rule.has_sinks or not q_THD.is_cuda or q_THD.dtype not in (torch.float16, torch.bfloat16):
        return None
    major = torch.cuda.get_device_capability(q_THD.device)[0]
    wanted = {"dropout_p": rule.dropout, "softcap": rule.softcap, "deterministic": rule.is_deterministic}
    needed = {key for key, value in wanted.items() if value}
    for kernel in KERNELS:
        if major in kernel.capabilities and needed <= kernel.arguments.keys() and _load_once(kernel)[0] is not None:
            return kernel
    return None


def attend_by_kernel(
    kernel: VarlenKernel,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    borders: DocumentOffsets,
    rule: DocumentMask,
    *,
    keys: DocumentOffsets | None = None,
) -> torch.Tensor:
    """Return attention by one call of the kernel, (T, heads, D). `borders` are the offsets of queries, `keys` those of
    keys if documents have more keys than queries; a document's queries are then its last positions."""
    function, arguments = _load_once(kernel)
    assert function is not None
    keys = keys or borders
    back = kernel.unbounded if rule.window is None else rule.window - 1
    ahead = back
    if rule.is_causal:  # torch has no such argument, but a window without a right side
        ahead = 0 if rule.window is not None or "causal" not in arguments else kernel.unbounded
    values = {
        "cu_seqlens_q": borders.sums,
        "cu_seqlens_k": keys.sums,
        "max_seqlen_q": max(borders.lengths),
        "max_seqlen_k": max(keys.lengths),
        "softmax_scale": rule.scale,
        "window_size": (back, ahead),
        "causal": rule.is_causal,
        "dropout_p": rule.dropout,
        "softcap": rule.softcap,
        "deterministic": rule.is_deterministic,
        _SHARED_HEADS: q_THD.shape[1] != k_THD.shape[1],
    }
    out = function(q_THD, k_THD, v_THD, **{name: values[key] for key, name in arguments.items()})
    out_THD: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some also return the sums of the softmax
    return out_THD


def attend(
    q_BHSD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return torch's softmax(QK^T scale + mask)V, (B, heads, S, D). Keys and values of fewer heads are shared, or
    copied if no fused kernel shares them (on CUDA, in 32 bits or under a mask). Causal queries are the last."""
    if is_causal and q_BHSD.shape[2] < k_BHTD.shape[2]:
        mask, is_causal = causal_lower_right(q_BHSD.shape[2], k_BHTD.shape[2]), False
    groups = q_BHSD.shape[1] // k_BHTD.shape[1]
    is_fused = not q_BHSD.is_cuda or (mask is None and q_BHSD.dtype in (torch.float16, torch.bfloat16))
    if groups > 1 and not is_fused:
        k_BHTD, v_BHTD = (x.repeat_interleave(groups, dim=1) for x in (k_BHTD, v_BHTD))
    return F.scaled_dot_product_attention(
        q_BHSD,
        k_BHTD,
        v_BHTD,
        attn_mask=mask,
        is_causal=is_causal,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=groups > 1 and is_fused,
    )


def attend_documents(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    borders: DocumentOffsets,
    rule: DocumentMask,
    *,
    keys: DocumentOffsets | None = None,
) -> torch.Tensor:
    """Return attention within every document, (T, heads, D), by the best installed kernel; a soft cap needs a kernel.
    `borders` and `keys` as in `attend_by_kernel`; more keys than queries with a window only if attention is causal."""
    kernel = pick_kernel(q_THD, rule)
    if kernel is not None:
        return attend_by_kernel(kernel, q_THD, k_THD, v_THD, borders, rule, keys=keys)
    assert not rule.softcap
    both = (q_THD, borders), (k_THD, keys or borders), (v_THD, keys or borders)
    pieces = (torch.split(x.transpose(0, 1)[None], list(own.lengths), dim=2) for x, own in both)
    outputs = []
    for q_BHSD, k_BHSD, v_BHSD in zip(*pieces, strict=True):
        mask = _make_window_mask(q_BHSD.shape[2], k_BHSD.shape[2], rule.window, rule.is_causal, q_BHSD.device)
        is_causal = rule.is_causal and mask is None
        outputs.append(
            attend(q_BHSD, k_BHSD, v_BHSD, mask=mask, is_causal=is_causal, dropout=rule.dropout, scale=rule.scale)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _make_window_mask(
    num_queries: int, num_keys: int, window: int | None, is_causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Return the (S, T) mask of a document that is longer than its window, else None. Queries are the last
    positions."""
    if window is None or window >= num_keys:
        return None
    before = num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(before + 1 - window)
    return visible.tril(before + (0 if is_causal else window - 1))


def list_attention_kernels() -> tuple[str, ...]:
    """List the names of the kernels that can run packed rows in 16 bits on this device, best first. The last is torch's
    own attention, one call per document."""
    if not torch.cuda.is_available():
        return (SDPA,)
    major = torch.cuda.get_device_capability()[0]
    return (*(k.name for k in KERNELS if major in k.capabilities and _load_once(k)[0] is not None), SDPA)


def lacks_newer_kernels() -> bool:
    """Return whether the best kernel here is an older one than flash-attn 3 or 4, on a device (Hopper, Blackwell) that
    these were made for."""
    is_older = list_attention_kernels()[0] in ("flash-attn-2", "torch-varlen")
    return is_older and torch.cuda.get_device_capability()[0] >= 9
