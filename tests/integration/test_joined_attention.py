"""Attention of joined ranks is that of one process over whole rows, in float64, and its gradients are, too.

Heads divide the ranks, are shared by them, or neither; key heads are fewer, and not always a divisor of the parts.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.megatron.attention_variants import with_sinks
from dynapipe_ext.executor.stages.megatron.core_attention import DocumentAttention, WindowAttention
from dynapipe_ext.executor.stages.spread_attention import query_sets
from tests.support.limits import LIMIT_S

NUM_RANKS, WIDTH = 4, 8
CONFIG = SimpleNamespace(
    attention_dropout=0.0,
    deterministic_mode=False,
    window_size=(4, 0),
    kv_channels=WIDTH,
    num_attention_heads=4,
    tensor_model_parallel_size=1,
)
HEADS = ((8, 2), (4, 1), (2, 1), (1, 1), (12, 6))
DOCUMENTS = ((5, 1, 17, 9), (1,) * 32)
KINDS: dict[str, Any] = {
    "documents": DocumentAttention,
    "windows": WindowAttention,
    "sinks": with_sinks(DocumentAttention),
}


def attended(core: Any, tensors: list[torch.Tensor], out_grad: torch.Tensor, packed: Any) -> list[torch.Tensor]:
    """The output, and gradients of queries, keys and values."""
    own = [(x if packed is None else x.squeeze(1)).clone().requires_grad_() for x in tensors]
    out = core(*own, packed_seq_params=packed)
    out.backward(out_grad.view_as(out))
    return [out.detach(), *(x.grad for x in own)]


def errors(env: Any) -> dict[tuple[Any, ...], float]:
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=NUM_RANKS)
    joined = join_ranks(Topology(dp=NUM_RANKS), env.rank, (2, 4), torch.device("cpu"), timeout_s=LIMIT_S)
    found = {}
    for kind, width, (heads, key_heads), documents in product(KINDS, (2, 4), HEADS, (None, *DOCUMENTS)):
        if kind == "sinks" and heads != CONFIG.num_attention_heads:
            continue
        torch.manual_seed(1)
        num_rows = 3 if documents is None else 1
        tensors = [torch.randn(32, num_rows, n, WIDTH, dtype=torch.float64) for n in (heads, key_heads, key_heads)]
        out_grad = torch.randn(32, num_rows, heads * WIDTH, dtype=torch.float64)
        packed = None if documents is None else SimpleNamespace(document_lengths=documents, carried=None)
        core = KINDS[kind](CONFIG, 1)
        for parameter in core.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
        whole = attended(core, tensors, out_grad, packed)
        sinks = [parameter.grad.clone() for parameter in core.parameters()]
        core.zero_grad()
        core.joined = joined[width]
        own = core.joined.span(32)
        at = slice(own.start, own.stop)
        slices = attended(core, [x[at] for x in tensors], out_grad[at], packed)
        differences = [(a[at] - b).abs().max() for a, b in zip(whole, slices, strict=True)]
        for parameter, of_whole in zip(core.parameters(), sinks, strict=True):
            dist.all_reduce(parameter.grad, group=core.joined.group)
            differences.append((parameter.grad - of_whole).abs().max())
        found[kind, width, heads, key_heads, documents] = float(max(differences))
    dist.destroy_process_group()
    return found


def test_outputs_and_gradients_of_slices_are_those_of_whole_rows(run_ranks):
    for of_rank in run_ranks(NUM_RANKS, errors):
        assert len(of_rank) == 2 * (2 * len(HEADS) + 1) * 3
        assert max(of_rank.values()) <= 1e-12, max(of_rank, key=of_rank.__getitem__)


def test_shared_queries_have_even_causal_work_and_each_is_in_one_set():
    for lengths, num_sets in product(((1024,), (640, 384), (64,) * 16), (2, 4)):
        sets = query_sets(lengths, num_sets)
        work = [sum((s.end - s.begin) * (s.begin + s.end + 1 - 2 * s.first) // 2 for s in spans) for spans in sets]
        assert max(work) <= 1.01 * min(work)
        queries = sorted(place for spans in sets for s in spans for place in range(s.begin, s.end))
        assert queries == list(range(sum(lengths)))
