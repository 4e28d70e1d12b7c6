"""Quantised weights as the plain ones that they stand for: FP8 with scales of blocks (DeepSeek-V3), MXFP4 (GPT-OSS).

    X: float8;  X_scale_inv: a scale for every block of X, or one for all of X          ──► X: value x scale
    X_blocks: bytes of two e2m1 values;  X_scales: exponents of 2 (e8m0), one in 32 values  ──► X: value x 2^exponent,
                                                                                            its last two axes swapped

Products are computed in float32 and rounded to bfloat16. Values are read as they are asked for: memory of the result,
of what is stored, and of a few megabytes between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor

WRITTEN_AS = torch.bfloat16
_DEFAULT_BLOCK = (128, 128)  # DeepSeek-V3's
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_OF_ACTIVATIONS = (".activation_scale", ".input_scale")  # of static quantisation: no weights
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CHUNK_VALUES = 1 << 22
# e2m1 by its four bits: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, table 5).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_VALUES_PER_SCALE = 32


class ReadableTensor(Protocol):
    """A tensor that is read when it is asked for."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> torch.Tensor:
        """All values, contiguous, on the CPU."""


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """FP8 values with one scale for all, or one a block of `block` rows and columns; the last ones may be cut."""

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return WRITTEN_AS

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def fault(self) -> str:
        """Why values and scales do not belong together; empty where they do."""
        if self.values.dtype not in _FLOAT8:
            return f"stored as {self.values.dtype}, not as float8, beside its scales"
        if self.scales.size == 1:
            return ""
        if len(self.shape) < 2:
            return f"{list(self.shape)} with scales {list(self.scales.shape)}: blocks need rows and columns"
        blocks = tuple(-(-length // side) for length, side in zip(self.shape[-2:], self.block, strict=True))
        expected = (*self.shape[:-2], *blocks)
        return "" if self.scales.shape == expected else f"has scales {list(self.scales.shape)}, not {list(expected)}"

    def read(self) -> torch.Tensor:
        """Errors: DataError where the file is shorter or cannot be read."""
        scales = self.scales.read().to(torch.float32)
        whole = torch.empty(self.shape, dtype=self.dtype)
        if self.scales.size == 1:
            self._scale_rows(whole, scales.reshape(()))
            return whole
        matrices = whole.view(-1, *self.shape[-2:])
        rows, columns = self.shape[-2:]
        by_matrix = scales.view(len(matrices), *scales.shape[-2:])
        values = self.values.read().view(-1, rows, columns)
        step = self.block[0] * max(1, _CHUNK_VALUES // (self.block[0] * columns))
        for matrix, stored, of_blocks in zip(matrices, values, by_matrix, strict=True):
            wide = of_blocks.repeat_interleave(self.block[1], dim=1)[:, :columns]
            for row in range(0, rows, step):
                end = min(rows, row + step)
                first, last = row // self.block[0], -(-end // self.block[0])
                factors = wide[first:last].repeat_interleave(self.block[0], dim=0)[: end - row]
                matrix[row:end] = stored[row:end].to(torch.float32) * factors
        return whole

    def _scale_rows(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        step = max(1, _CHUNK_VALUES // max(1, math.prod(self.shape[1:])))
        for row in range(0, self.shape[0], step):
            end = min(self.shape[0], row + step)
            whole[row:end] = self.values.read_rows(row, end).to(torch.float32) * scale


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """MXFP4 values of experts' matrices: blocks (experts, outputs, groups, 16), scales (experts, outputs, groups).

    Read as (experts, inputs, outputs), which is how GPT-OSS computes with them.
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def dtype(self) -> torch.dtype:
        return WRITTEN_AS

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * _VALUES_PER_SCALE, outputs

    @property
    def fault(self) -> str:
        """Why blocks and scales do not belong together; empty where they do."""
        if self.blocks.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            return f"stored as {self.blocks.dtype} with scales {self.scales.dtype}, not as uint8 both"
        half = _VALUES_PER_SCALE // 2
        if len(self.blocks.shape) != 4 or self.blocks.shape != (*self.scales.shape, half):
            return f"has blocks {list(self.blocks.shape)} and scales {list(self.scales.shape)}, not [..., {half}] more"
        return ""

    def read(self) -> torch.Tensor:
        """Errors: DataError where a file is shorter or cannot be read."""
        pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])  # the low half comes first
        experts, inputs, outputs = self.shape
        whole = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, _CHUNK_VALUES // inputs)
        for expert in range(experts):
            blocks = self.blocks.read_rows(expert, expert + 1)[0]
            exponents = self.scales.read_rows(expert, expert + 1)[0].to(torch.int32) - _E8M0_BIAS
            for row in range(0, outputs, step):
                end = min(outputs, row + step)
                values = pairs.index_select(0, blocks[row:end].reshape(-1).to(torch.int32))
                scaled = torch.ldexp(values.view(end - row, -1, _VALUES_PER_SCALE), exponents[row:end, :, None])
                whole[expert, :, row:end] = scaled.view(end - row, inputs).t()
        return whole


def dequantised(
    stored: Mapping[str, StoredTensor], quantisation: Mapping[str, Any], where: Path
) -> tuple[dict[str, ReadableTensor], list[str], tuple[str, ...]]:
    """The tensors by the names of the plain model, what is wrong with them, and what is to be said of them.

    `quantisation` is config.json's, of a method that `read_config` takes. Errors: DataError for blocks of no size.
    """
    tensors: dict[str, ReadableTensor] = dict(stored)
    block = _block(quantisation.get("weight_block_size"), where)
    made: dict[str, ScaledTensor | PackedTensor] = {}
    for name, tensor in stored.items():
        whole = name.removesuffix(_SCALE)
        if whole != name and whole in stored:
            made[whole] = ScaledTensor(stored[whole], tensor, block)
        whole = name.removesuffix(_BLOCKS)
        if whole != name and whole + _SCALES in stored:
            made[whole] = PackedTensor(tensor, stored[whole + _SCALES])
    faults = [f"{name} {one.fault}" for name, one in made.items() if one.fault]
    for name, one in made.items():
        for suffix in (_SCALE,) if isinstance(one, ScaledTensor) else (_BLOCKS, _SCALES):
            del tensors[name + suffix]
        if not one.fault:
            tensors[name] = one
    unused = [name for name in tensors if name.endswith(_OF_ACTIVATIONS)]
    for name in unused:
        del tensors[name]
    dtype = str(WRITTEN_AS).removeprefix("torch.")
    notices = [f"{len(made)} tensors of quant_method {quantisation.get('quant_method')} are read as {dtype}"]
    if unused:
        notices.append(f"{len(unused)} scales of activations are left out: a {dtype} model has none")
    return tensors, faults, tuple(notices)


def _block(sides: object, where: Path) -> tuple[int, int]:
    """Rows and columns that share a scale. Errors: DataError."""
    if sides is None:
        return _DEFAULT_BLOCK
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return sides[0], sides[1]
    raise DataError(f"{where}: weight_block_size is {short(sides)}: it must be two integers above 0, like [128, 128]")
