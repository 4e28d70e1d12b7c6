"""Attention of packed rows, each document alone: one call by the best installed kernel, else torch's own, one call a
document.

Shapes: T positions of all documents end to end, (T, heads, D); fewer key and value heads are shared in groups.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

SDPA = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """An attention function of an installed package: its module, and the names of its arguments beside q, k and v.

    "" stands for an argument that the function does not have. All are passed by name, since new versions insert
    arguments between old ones. `capabilities`: the major compute capabilities of the devices it runs on. `unbounded`:
    the value for a window side without a bound. `shares_heads`: the argument that lets key and value heads be fewer,
    which some versions need.
    """

    name: str
    module: str
    function: str = "flash_attn_varlen_func"
    capabilities: range
    borders: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k")
    longest: tuple[str, str] = ("max_seqlen_q", "max_seqlen_k")
    scale: str = "softmax_scale"
    causal: str = "causal"
    dropout: str = ""
    softcap: str = "softcap"
    deterministic: str = "deterministic"
    shares_heads: str = ""
    unbounded: int | None = -1

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments that this package passes."""
        named = (self.scale, "window_size", self.causal, self.dropout, self.softcap, self.deterministic)
        return (*self.borders, *self.longest, *filter(None, named))


# Best first. Signatures read in flash-attn 2.8 (flash_attn_interface.py), 3 (hopper/flash_attn_interface.py), 4.0.0b36
# (cute/interface.py), torch 2.11 and 2.13 (nn/attention/varlen.py; 2.11 shares heads without being asked).
KERNELS = (
    VarlenKernel(name="flash-attn-3", module="flash_attn_interface", capabilities=range(9, 10)),
    VarlenKernel(name="flash-attn-4", module="flash_attn.cute", capabilities=range(9, 13), unbounded=None),
    VarlenKernel(name="flash-attn-2", module="flash_attn", capabilities=range(8, 13), dropout="dropout_p"),
    VarlenKernel(
        name="torch-varlen",
        module="torch.nn.attention.varlen",
        function="varlen_attn",
        capabilities=range(8, 13),
        borders=("cu_seq_q", "cu_seq_k"),
        longest=("max_q", "max_k"),
        scale="scale",
        causal="",  # a window without a right side
        softcap="",
        deterministic="",
        shares_heads="enable_gqa",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRule:
    """What a position sees of its document: those before it (`is_causal`), the last `window` of them and, without
    causality, as many behind. `softcap` above 0 caps scores, `dropout` is of their shares. `is_deterministic`:
    gradients have the same bits in every run; `has_sinks`: scores of no position, which no kernel here takes."""

    scale: float | None = None
    is_causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    is_deterministic: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Borders:
    """Of documents end to end: their lengths, and on the device their sums from 0 on, int32."""

    lengths: Sequence[int]
    sums: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Borders:
        return cls(lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device))


def load_kernel(kernel: VarlenKernel) -> tuple[Callable[..., Any] | None, str]:
    """The kernel's function, or None and the reason: the package is broken, or its version has other arguments. The
    reason is empty where the package is not installed."""
    try:
        module = importlib.import_module(kernel.module)
        if not hasattr(module, kernel.function) and getattr(module, "__file__", None) is None:
            return None, ""  # a folder that another package made: flash-attn 4 lies in that of flash-attn 2
        function = getattr(module, kernel.function)
        parameters = inspect.signature(function).parameters
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "") in _prefixes(kernel.module)
        return None, "" if absent else f"broken: {' '.join(str(error).split())}"
    if lacking := [name for name in kernel.arguments if name not in parameters]:
        return None, f"has no {', '.join(lacking)}"
    return function, ""


def _prefixes(module: str) -> list[str]:
    return list(accumulate(module.split("."), "{}.{}".format))


@cache
def _loaded(kernel: VarlenKernel) -> Callable[..., Any] | None:
    function, _ = load_kernel(kernel)
    if function is None or not kernel.shares_heads or kernel.shares_heads in inspect.signature(function).parameters:
        return function
    return lambda *tensors, **named: function(*tensors, **{k: v for k, v in named.items() if k != kernel.shares_heads})


def kernel_for(q_THD: torch.Tensor, rule: DocumentRule) -> VarlenKernel | None:
    """The best installed kernel for these tensors; None where torch is called instead, once a document."""
    if rule.has_sinks or not q_THD.is_cuda or q_THD.dtype not in (torch.float16, torch.bfloat16):
        return None
    major = torch.cuda.get_device_capability(q_THD.device)[0]
    for kernel in KERNELS:
        needs = (rule.dropout, rule.softcap, rule.is_deterministic)
        arguments = (kernel.dropout, kernel.softcap, kernel.deterministic)
        lacks = any(want and not argument for want, argument in zip(needs, arguments, strict=True))
        if major in kernel.capabilities and not lacks and _loaded(kernel) is not None:
            return kernel
    return None


def attend_by_kernel(
    kernel: VarlenKernel,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    borders: Borders,
    rule: DocumentRule,
    *,
    keys: Borders | None = None,
) -> torch.Tensor:
    """What one call of the kernel gives, (T, heads, D). `keys` are their borders where a document has more of them than
    queries, which are then the last."""
    function = _loaded(kernel)
    assert function is not None
    back = kernel.unbounded if rule.window is None else rule.window - 1
    ahead = back
    if rule.is_causal:
        ahead = 0 if rule.window is not None or not kernel.causal else kernel.unbounded
    both = borders, keys or borders
    keywords: dict[str, Any] = dict(zip(kernel.borders, (one.sums for one in both), strict=True))
    keywords |= dict(zip(kernel.longest, (max(one.lengths) for one in both), strict=True))
    keywords |= {kernel.scale: rule.scale, "window_size": (back, ahead), kernel.causal: rule.is_causal}
    keywords |= {
        kernel.dropout: rule.dropout,
        kernel.softcap: rule.softcap,
        kernel.deterministic: rule.is_deterministic,
    }
    keywords |= {kernel.shares_heads: q_THD.shape[1] != k_THD.shape[1]}
    keywords.pop("", None)
    out = function(q_THD, k_THD, v_THD, **keywords)
    out_THD: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some give the sums of the softmax as well
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
    """torch's softmax(QK^T scale + mask)V; keys and values of fewer heads are shared, or copied where no fused kernel
    shares them (on CUDA, in 32 bits or under a mask). Causal queries are the last of the keys, where these are more."""
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
    borders: Borders,
    rule: DocumentRule,
    *,
    keys: Borders | None = None,
) -> torch.Tensor:
    """Of every document alone, (T, heads, D), by the best kernel that is here. A soft cap takes one that has it. `keys`
    as in `attend_by_kernel`; beside a window where attention is causal."""
    kernel = kernel_for(q_THD, rule)
    if kernel is not None:
        return attend_by_kernel(kernel, q_THD, k_THD, v_THD, borders, rule, keys=keys)
    assert not rule.softcap
    both = (q_THD, borders), (k_THD, keys or borders), (v_THD, keys or borders)
    pieces = (torch.split(x.transpose(0, 1)[None], list(own.lengths), dim=2) for x, own in both)
    outputs = []
    for q_BHSD, k_BHSD, v_BHSD in zip(*pieces, strict=True):
        mask = _window_mask(q_BHSD.shape[2], k_BHSD.shape[2], rule.window, rule.is_causal, q_BHSD.device)
        is_causal = rule.is_causal and mask is None
        outputs.append(
            attend(q_BHSD, k_BHSD, v_BHSD, mask=mask, is_causal=is_causal, dropout=rule.dropout, scale=rule.scale)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _window_mask(
    num_queries: int, num_keys: int, window: int | None, is_causal: bool, device: torch.device
) -> torch.Tensor | None:
    """(S, T), true where a position may look, for a document longer than its window; None where no mask is needed.
    Queries are the last of the keys."""
    if window is None or window >= num_keys:
        return None
    before = num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(before + 1 - window)
    return visible.tril(before + (0 if is_causal else window - 1))


def attention_kernels() -> tuple[str, ...]:
    """What packed rows run on here, best first, in 16 bits; the last is torch's, one call a document."""
    if not torch.cuda.is_available():
        return (SDPA,)
    major = torch.cuda.get_device_capability()[0]
    return (*(k.name for k in KERNELS if major in k.capabilities and _loaded(k) is not None), SDPA)


def lacks_newer_kernels() -> bool:
    """Whether this device is of a generation (Hopper, Blackwell) that flash-attn 3 or 4 was made for, and neither is
    here."""
    is_older = attention_kernels()[0] in ("flash-attn-2", "torch-varlen")
    return is_older and torch.cuda.get_device_capability()[0] >= 9
