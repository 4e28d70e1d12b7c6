"""Models of the published families: windows of attention, and topologies that are refused before Megatron is asked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.megatron.core_attention import WindowAttention
from dynapipe_ext.executor.stages.megatron.model import build_model
from dynapipe_ext.models.architecture import Architecture

WINDOW = 7
LENGTHS = (1, 6, 7, 8, 14, 15, 30)
LLAMA = Architecture(
    family="llama", num_layers=4, hidden_size=96, num_heads=12, num_query_groups=3, head_dim=8, ffn_hidden_size=48,
    vocab_size=11, max_seq_len=16, tied_embeddings=False,
)  # fmt: skip
T5 = replace(LLAMA, family="t5", num_query_groups=12, num_decoder_layers=4, position="relative")


def attention() -> WindowAttention:
    return WindowAttention(
        SimpleNamespace(attention_dropout=0.0, deterministic_mode=False, window_size=(WINDOW - 1, 0)), 1
    )


def tensors(length: int, rows: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((length, rows, heads, 8) for heads in (4, 2, 2))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition: position i attends to i - 6 .. i; queries share key heads in pairs."""
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < WINDOW))
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_give_what_a_dense_mask_gives_and_its_gradients(length: int) -> None:
    given, wanted = (tensors(length) for _ in range(2))
    output, expected = attention()(*given), dense(*wanted)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for result in (output, expected):
        result.sin().sum().backward()
    for one, two in zip(given, wanted, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-12)


def test_documents_of_a_packed_row_have_windows_of_their_own() -> None:
    rows = [tensors(length, rows=1) for length in LENGTHS]
    packed = SimpleNamespace(document_lengths=LENGTHS)
    output = attention()(*(torch.cat(parts).squeeze(1) for parts in zip(*rows, strict=True)), packed_seq_params=packed)
    torch.testing.assert_close(output, torch.cat([dense(*row) for row in rows]).squeeze(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "topology", "says"),
    [
        (T5, Topology(pp=2, layers_per_stage=(1, 2)), r"\(1, 2\) must sum to the model's 8 layers"),
        (LLAMA, Topology(tp=8), "num_heads 12 must be a multiple of tp 8"),
        (LLAMA, Topology(tp=3), "tp is 3 but must divide 128"),
        (replace(LLAMA, ffn_hidden_size=50), Topology(tp=4), "ffn_hidden_size 50 must be a multiple of tp 4"),
        (LLAMA, Topology(tp=2), "num_query_groups 3 must divide tp 2 or be a multiple of it"),
        (LLAMA, Topology(pp=2, layers_per_stage=(1, 2)), r"\(1, 2\) must sum to the model's 4 layers"),
    ],
)
def test_what_cannot_be_cut_over_a_topology_is_refused_by_name(
    architecture: Architecture, topology: Topology, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        build_model(architecture, topology, 0, None, seed=None, device=torch.device("cpu"))
