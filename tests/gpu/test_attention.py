"""Every kernel of packed attention that is here, beside the definition in float64: values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from dynapipe_ext.batch.packed_attention import (
    KERNELS,
    SDPA,
    DocumentMask,
    DocumentOffsets,
    attend_by_kernel,
    attend_documents,
    list_attention_kernels,
)
from tests.support.documents import by_definition, packed_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels run on a GPU alone")

LENGTHS = (129, 1, 700, 64, 2)
RULES = {
    "causal": DocumentMask(),
    "window": DocumentMask(window=50, scale=0.1),
    "both ways": DocumentMask(is_causal=False),
    "capped": DocumentMask(softcap=5.0),
    "deterministic": DocumentMask(is_deterministic=True),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("name", [*(kernel.name for kernel in KERNELS), SDPA])
def test_values_and_gradients_are_those_of_the_definition(name: str, groups: int, rule: DocumentMask) -> None:
    if name not in list_attention_kernels():
        pytest.skip(f"{name} is not here")
    kernel = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if rule.softcap and (kernel is None or "softcap" not in kernel.arguments):
        pytest.skip(f"{name} caps no scores")
    if rule.is_deterministic and kernel is not None and "deterministic" not in kernel.arguments:
        pytest.skip(f"{name} has no deterministic mode")
    device = torch.device("cuda")
    tensors = packed_tensors(8, groups, 64, lengths=LENGTHS, dtype=torch.bfloat16, device=device)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    borders = DocumentOffsets.of(LENGTHS, device)
    back = math.inf if rule.window is None else rule.window - 1
    expected = by_definition(
        *exact[:3],
        borders.sums.tolist(),
        scale=rule.scale,
        back=back,
        ahead=0 if rule.is_causal else back,
        softcap=rule.softcap,
    )
    if kernel is None:
        single = [x.detach().float().requires_grad_() for x in tensors]  # no kernel takes 32 bits
        out, inputs = attend_documents(*single[:3], borders, rule), single
    else:
        out, inputs = attend_by_kernel(kernel, *tensors[:3], borders, rule), tensors
    found = (out, *torch.autograd.grad((out * inputs[3]).sum(), inputs[:3]))
    wanted = (expected, *torch.autograd.grad((expected * exact[3]).sum(), exact[:3]))
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).abs().max() / theirs.abs().max()) < 2e-2
