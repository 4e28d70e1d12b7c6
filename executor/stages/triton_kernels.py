"""The kernels of `kernels.py` in Triton: one program a row, or a row's block of columns. No atomics: bits repeat."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(a, KIND: tl.constexpr):
    """Values of an activation, and its slopes."""
    if KIND == "silu":
        share = tl.sigmoid(a)
        value = a * share
        slope = share * (1.0 + a * (1.0 - share))
    elif KIND == "gelu_tanh":
        cubed = 0.044715 * a * a * a
        bent = 1.0 - 2.0 / (tl.exp(2.0 * 0.7978845608028654 * (a + cubed)) + 1.0)
        value = 0.5 * a * (1.0 + bent)
        slope = 0.5 * (1.0 + bent) + 0.5 * a * (1.0 - bent * bent) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * a * a)
    else:
        below = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
        value = a * below
        slope = below + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
    return value, slope


@triton.jit
def gated_kernel(gate, up, out, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up (N, F), rows `stride` apart: out (N, F) is the activated gate times up; `width` F."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(gate + row * stride + columns, mask=inside).to(tl.float32)
    ups = tl.load(up + row * stride + columns, mask=inside).to(tl.float32)
    value, _slope = _activated(gates, KIND)
    tl.store(out + row * width + columns, value * ups, mask=inside)


@triton.jit
def gated_backward_kernel(grad, gate, up, gate_grad, up_grad, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of gate and up, laid out as these are, of that of the output, (N, F)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(gate + row * stride + columns, mask=inside).to(tl.float32)
    ups = tl.load(up + row * stride + columns, mask=inside).to(tl.float32)
    own = tl.load(grad + row * width + columns, mask=inside).to(tl.float32)
    value, slope = _activated(gates, KIND)
    tl.store(gate_grad + row * stride + columns, own * ups * slope, mask=inside)
    tl.store(up_grad + row * stride + columns, own * value, mask=inside)


@triton.jit
def turned_kernel(
    x, cosines, sines, out, rows, x_position, x_row, x_head,
    heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """x (S, B, heads, D), of any strides but the last, which is 1: the first 2 `half` values of every head turned by
    its position's angles (S, 2 half), the rest as they are; out (S, B, heads, D) without gaps. BACK: the gradient."""
    program = tl.program_id(0).to(tl.int64)
    position, row = program // rows, program % rows
    pair = tl.arange(0, HALF)
    is_pair = pair < half
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    angle = position * 2 * half
    first_cos = tl.load(cosines + angle + first, mask=is_pair)
    second_cos = tl.load(cosines + angle + second, mask=is_pair)
    first_sin = tl.load(sines + angle + first, mask=is_pair)
    second_sin = tl.load(sines + angle + second, mask=is_pair)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        taken = x + position * x_position + row * x_row + head[:, None] * x_head
        given = out + (program * heads + head[:, None]) * width
        inside = (head < heads)[:, None] & is_pair[None, :]
        a = tl.load(taken + first[None, :], mask=inside).to(tl.float32)
        b = tl.load(taken + second[None, :], mask=inside).to(tl.float32)
        if BACK:
            tl.store(given + first[None, :], a * first_cos[None, :] + b * second_sin[None, :], mask=inside)
            tl.store(given + second[None, :], b * second_cos[None, :] - a * first_sin[None, :], mask=inside)
        else:
            tl.store(given + first[None, :], a * first_cos[None, :] - b * first_sin[None, :], mask=inside)
            tl.store(given + second[None, :], b * second_cos[None, :] + a * second_sin[None, :], mask=inside)
        if REST:
            rest = 2 * half + tl.arange(0, REST)
            is_rest = (head < heads)[:, None] & (rest < width)[None, :]
            tl.store(given + rest[None, :], tl.load(taken + rest[None, :], mask=is_rest), mask=is_rest)


@triton.jit
def softmax_stats_kernel(
    products,
    labels,
    stats,
    num_positions,
    num_rows: tl.constexpr,
    num_ids: tl.constexpr,
    first_id: tl.constexpr,
    scale: tl.constexpr,
    HAS_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits are the products (N, V) times `scale`; columns from `num_ids` on count as the lowest. Writes stats (3, N):
    the largest logit, the sum of exp(logit - largest), and the label's logit: 0 where the label is -100 or on another
    rank, NaN where all rows are here and it is not among them."""
    position = tl.program_id(0).to(tl.int64)
    row = products + position * num_rows
    most = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, num_rows, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < num_rows, other=-float("inf")).to(tl.float32) * scale
        values = tl.where((columns >= num_ids) & (columns < num_rows), -3.4028234663852886e38, values)
        larger = tl.maximum(most, tl.max(values, axis=0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(values - larger), axis=0)
        most = larger
    given = tl.load(labels + position)
    label = given - first_id
    is_here = (label >= 0) & (label < num_rows)
    target = tl.load(row + tl.where(is_here, label, 0)).to(tl.float32) * scale
    target = tl.where(label >= num_ids, -3.4028234663852886e38, target)
    absent = tl.where(given == -100, 0.0, float("nan")) if HAS_ALL else 0.0
    tl.store(stats + position, most)
    tl.store(stats + num_positions + position, total)
    tl.store(stats + 2 * num_positions + position, tl.where(is_here, target, absent))


@triton.jit
def softmax_backward_kernel(
    products,
    labels,
    most,
    sums,
    sums_grad,
    target_grad,
    num_rows: tl.constexpr,
    num_ids: tl.constexpr,
    first_id: tl.constexpr,
    scale: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of products (N, V), in their place; `sums_grad` is of the logarithms of `sums`."""
    position = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_rows
    place = products + position * num_rows + columns
    values = tl.load(place, mask=inside).to(tl.float32) * scale
    shares = tl.exp(values - tl.load(most + position)) / tl.load(sums + position)
    label = tl.load(labels + position) - first_id
    grads = shares * tl.load(sums_grad + position)
    grads += tl.where(columns == label, tl.load(target_grad + position), 0.0)
    tl.store(place, tl.where(columns < num_ids, grads * scale, 0.0), mask=inside)
