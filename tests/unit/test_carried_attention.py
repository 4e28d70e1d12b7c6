"""A piece's attention to the earlier pieces of its sample: exact, without joins, refused out of turn."""

from __future__ import annotations

import itertools
import sys
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, sample_pieces
from dynapipe_ext.batch.packed_attention import KERNELS
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.carried_keys import CarriedKeys, PieceOrder
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.actions import Kind
from tests.support.pieces import pieced_replicas, random_legal_schedule
from tests.support.tiny_models import samples_of

megatron_cpu.install()
from dynapipe_ext.executor.stages.megatron import core_attention  # noqa: E402
from dynapipe_ext.executor.stages.megatron.core_attention import CoreAttention, DocumentAttention, WindowAttention  # noqa: E402
from dynapipe_ext.executor.stages.megatron.stage import packed_parameters  # noqa: E402

CPU, HEADS, WIDTH = torch.device("cpu"), (4, 2, 2), 8  # of queries, keys and values


class Capped(CoreAttention):
    softcap = 2.0


def attention(kind: type[DocumentAttention] = DocumentAttention) -> DocumentAttention:
    return kind(SimpleNamespace(attention_dropout=0.0, window_size=(3, 0), deterministic_mode=False), 1)


def plan_of(lengths: list[int], shorts: list[int], *, forward_only: bool = False) -> Any:
    """Sample 0 in pieces of so many positions, behind each a whole document unless its length is 0."""
    rows = []
    for number, (start, length, short) in enumerate(
        zip(itertools.accumulate(lengths, initial=0), lengths, shorts, strict=False)
    ):
        behind = (SampleLength(number + 1, short),) if short else ()
        rows.append(MicroBatch((SampleLength(0, length, start=start), *behind), "packed", attention="carried"))
    return SimpleNamespace(micro_batches=tuple(rows), forward_only=forward_only)


def tensors(length: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(length, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for heads in HEADS]


@settings(max_examples=15)
@given(st.data())
def test_pieces_attend_and_learn_as_the_whole_sample_does(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    shorts = data.draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    kind, atol = data.draw(st.sampled_from(((DocumentAttention, 1e-12), (Capped, 1e-6))))  # its softmax is in float32
    core = attention(kind)
    generator = torch.Generator().manual_seed(sum(lengths))
    plan, whole = plan_of(lengths, shorts), tensors(sum(lengths), generator)
    documents = [tensors(short, generator) for short in shorts]
    given_q, *_ = weights = [x.clone().requires_grad_() for x in whole]
    output = core(*weights, packed_seq_params=packed_parameters([sum(lengths)], CPU))
    output_grads = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    output.backward(output_grads)

    keys, live = CarriedKeys(plan), []
    for m, (start, length, short) in enumerate(
        zip(itertools.accumulate(lengths, initial=0), lengths, shorts, strict=False)
    ):
        here = slice(start, start + length)
        own = [torch.cat([x[here], y]).requires_grad_() for x, y in zip(whole, documents[m], strict=True)]
        with keys.forward(0, m) as piece:
            packed = packed_parameters([length, short] if short else [length], CPU, piece)
            out = core(*own, packed_seq_params=packed)
        torch.testing.assert_close(out[:length], output[here], rtol=0, atol=atol)
        alone = [x.clone().requires_grad_() for x in documents[m]]
        if short:
            expected = core(*alone, packed_seq_params=packed_parameters([short], CPU))
            torch.testing.assert_close(out[length:], expected, rtol=0, atol=atol)
            expected.sin().sum().backward()
        live.append((own, out, here, length, alone))
    buffers = 2 * sum(lengths) * HEADS[1] * WIDTH * 8
    assert keys.num_bytes() == buffers
    for m in reversed(range(len(lengths))):
        own, out, here, length, alone = live[m]
        with keys.backward(0, m):
            torch.autograd.backward((out[:length], out[length:].sin().sum()), (output_grads[here], torch.ones(())))
        for mine, theirs, apart in zip(own, weights, alone, strict=True):
            torch.testing.assert_close(mine.grad[:length], theirs.grad[here], rtol=0, atol=atol)
            if shorts[m]:
                torch.testing.assert_close(mine.grad[length:], apart.grad, rtol=0, atol=atol)
    assert keys.num_bytes() == 0
    assert not keys.storages
    assert given_q.grad is not None


def test_gradients_of_keys_are_summed_in_float32() -> None:
    """In bfloat16 the sum of 64 gradients, each rounded, would lose what a sum rounded once does not."""
    plan = plan_of([4] * 64, [0] * 64)
    keys, generator = CarriedKeys(plan), torch.Generator().manual_seed(0)
    own = [[x.requires_grad_() for x in tensors(4, generator, torch.bfloat16)[1:]] for _ in range(64)]
    joined = []
    for m, (k, v) in enumerate(own):
        with keys.forward(0, m) as piece:
            assert piece is not None
            joined.append(piece.join("layer", k, v))
    given = [torch.randn(joined[m][0].shape, generator=generator).bfloat16() for m in range(64)]
    for m in reversed(range(64)):
        with keys.backward(0, m):
            torch.autograd.backward(joined[m], (given[m], given[m]))
    exact = torch.stack([grad[:4].double() for grad in given]).sum(dim=0)
    for x in own[0]:
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad.double(), exact, rtol=2**-8, atol=1e-5)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """What flash-attn 2.1 to 2.8 promises: documents by their borders, a causal mask aligned to the last key."""
    assert causal
    assert dropout_p == 0.0
    assert q.shape[1] % k.shape[1] == 0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    queries, documents = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(queries), max(documents))
    assert (len(q), len(k), len(v)) == (sum(queries), sum(documents), sum(documents))
    seen.append((q, k, v, queries, documents))
    outputs = []
    for qs, ks, vs in zip(q.split(queries), k.split(documents), v.split(documents), strict=True):
        ks, vs = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (ks, vs))
        scale = softmax_scale or q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        mask = torch.ones(len(qs), len(ks), dtype=torch.bool).tril(len(ks) - len(qs))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), vs))
    return torch.cat(outputs)


seen: list[tuple[Any, ...]] = []


def test_flash_attention_is_asked_for_longer_keys_than_queries_and_is_given_views(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    kernel = KERNELS[2]
    seen.clear()
    lengths, shorts, generator = [5, 3, 4], [2, 0, 3], torch.Generator().manual_seed(0)
    plan = plan_of(lengths, shorts)
    rows = [tensors(length + short, generator) for length, short in zip(lengths, shorts, strict=True)]
    outputs: list[list[torch.Tensor]] = []
    for found in (kernel, None):
        monkeypatch.setattr(core_attention, "pick_kernel", lambda *_, found=found: found)
        core = attention()
        keys, outs, inputs = CarriedKeys(plan), [], [[x.clone().requires_grad_() for x in row] for row in rows]
        for m, (length, short) in enumerate(zip(lengths, shorts, strict=True)):
            with keys.forward(0, m) as piece:
                packed = packed_parameters([length, short] if short else [length], CPU, piece)
                outs.append(core(*inputs[m], packed_seq_params=packed))
        for m in (2, 1, 0):
            with keys.backward(0, m):
                outs[m].sin().sum().backward()
        outputs.append([*outs, *(x.grad for row in inputs for x in row)])  # type: ignore[misc]
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert [(queries, keys) for *_, queries, keys in seen] == [
        ([5], [5]),
        ([2], [2]),
        ([3], [8]),
        ([4], [12]),
        ([3], [3]),
    ]
    first, _, second, third, _ = seen
    assert first[1].data_ptr() == second[1].data_ptr() == third[1].data_ptr()  # keys: the one buffer's beginning
    assert first[2].data_ptr() == second[2].data_ptr() == third[2].data_ptr()


def test_keys_of_an_evaluation_go_with_its_last_piece() -> None:
    keys = CarriedKeys(plan_of([3, 2], [0, 0], forward_only=True))
    for m, held in enumerate((2 * 5 * 2 * WIDTH * 8, 0)):
        with torch.no_grad(), keys.forward(0, m) as piece:
            assert piece is not None
            piece.join("layer", *tensors(piece.length, torch.Generator())[1:])
        assert keys.num_bytes() == held


def breaks_the_rules(program: Any, own_chains: Any, gradient: Kind) -> bool:
    """By their definition: forwards ascending, input gradients descending, and all forwards before them."""
    for stage, chain in itertools.product({action.stage for action in program}, own_chains):
        place = {(a.kind, a.micro_batch): i for i, a in enumerate(program) if a.stage == stage}
        forwards = [place[Kind.FORWARD, m] for m in chain]
        gradients = [place[gradient, m] for m in reversed(chain)]
        if sorted(forwards) != forwards or sorted(gradients) != gradients or max(forwards) > min(gradients):
            return True
    return False


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_refuses_every_swap_that_takes_a_piece_out_of_turn_and_no_other(split: bool) -> None:
    gradient = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
    refused = allowed = 0
    for seed in range(10):
        random = Random(seed)
        topology = Topology(pp=2, placement=(0, 1, 1, 0)) if seed % 2 else Topology(pp=2)
        (rows,) = pieced_replicas(samples_of((3, 12, 37, 20, 9)), 1, "none", random)
        for program in random_legal_schedule(topology, rows, random, split=split).ranks:
            for one, other in itertools.combinations(range(len(program)), 2):
                swapped = list(program)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                order = PieceOrder(rows)
                try:
                    for action in swapped:
                        if action.kind is Kind.FORWARD:
                            order.run("forward", action.stage, action.micro_batch)
                        elif action.kind is gradient:
                            order.run("input gradient", action.stage, action.micro_batch)
                    fault = ""
                except ExecutionError as error:
                    fault = str(error)
                assert bool(fault) == breaks_the_rules(swapped, sample_pieces(rows), gradient), fault
                refused, allowed = refused + bool(fault), allowed + (not fault)
    assert refused > 100
    assert allowed > 100


def test_a_refusal_names_sample_stage_and_the_piece_that_is_due() -> None:
    order = PieceOrder(plan_of([3, 2, 4], [0, 0, 0]).micro_batches)
    order.run("forward", 1, 0)
    with pytest.raises(
        ExecutionError,
        match=r"stage 1 was to run the forward of piece 3 of sample 0 \(micro-batch 2\), but the forward of piece 2",
    ):
        order.run("forward", 1, 2)
    for m in (1, 2):
        order.run("forward", 1, m)
    with pytest.raises(ExecutionError, match=r"input gradient of piece 1 of .* but the input gradient of piece 3"):
        order.run("input gradient", 1, 0)


SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_query_groups": 2, "head_dim": 8, "ffn_hidden_size": 32,
    "vocab_size": 64, "max_seq_len": 64, "tied_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "fault"),
    [
        (Architecture(family="llama", **SIZES), ""),
        (Architecture(family="mixtral", num_experts=4, top_k=2, **SIZES), ""),
        (Architecture(family="gemma2", sliding_window=32, full_attention_every=2, **SIZES), "has attention windows"),
        (Architecture(family="t5", num_decoder_layers=2, position="relative", **SIZES), "encoder-decoder"),
        (Architecture(family="transformers", **SIZES), "transformers computes the model"),
    ],
)  # fmt: skip
def test_a_model_says_whether_its_samples_can_be_cut(architecture: Architecture, fault: str) -> None:
    assert (fault in architecture.pieces_fault) if fault else not architecture.pieces_fault


def test_windows_do_not_carry() -> None:
    assert not attention(WindowAttention).carries
