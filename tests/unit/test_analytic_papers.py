"""The analytic model against figures that papers and model cards print."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

VOCAB = 51200


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> Architecture:
    return Architecture.gpt(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_query_groups=num_heads,
        ffn_hidden_size=4 * hidden_size,
        gated_mlp=False,
        vocab_size=VOCAB,
        max_seq_len=2048,
        tied_embeddings=True,
    )


GPT3, MT_NLG, GPT_22B = gpt(96, 12288, 96), gpt(105, 20480, 128), gpt(48, 6144, 64)
MIXTRAL = Architecture.gpt(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    gated_mlp=True,
    vocab_size=32000,
    max_seq_len=32768,
    tied_embeddings=False,
    position="rope",
    norm="rmsnorm",
    bias=False,
    num_experts=8,
    top_k=2,
)
ONE = MicroBatch((SampleLength(0, 2048),))


def bare(shape: Architecture, topology: Topology | None = None, **more: Any) -> AnalyticCosts:
    """One FLOP a nanosecond and no overhead, so that times are FLOPs."""
    return AnalyticCosts(
        shape, topology or Topology(), **{"flops_per_s": 1e9, "overhead_ns": 0, "flash": False, **more}
    )


@pytest.mark.parametrize(
    ("num_heads", "hidden_size", "num_layers", "billions"),
    [
        (24, 2304, 24, 1.7), (32, 3072, 30, 3.6), (32, 4096, 36, 7.5), (48, 6144, 40, 18.4), (64, 8192, 48, 39.1),
        (80, 10240, 60, 76.1), (96, 12288, 80, 145.6), (128, 16384, 96, 310.1), (128, 20480, 105, 529.6),
        (160, 25600, 128, 1008.0),
    ],
)  # fmt: skip
def test_parameters_are_those_of_narayanan_et_al_table_1(
    num_heads: int, hidden_size: int, num_layers: int, billions: float
) -> None:
    (count,) = count_parameters(gpt(num_layers, hidden_size, num_heads), Topology()).total
    assert round(count / 1e9, 1) == billions


def test_gpt_3_has_174_6_billion_parameters_and_mixtral_46_7() -> None:
    assert count_parameters(GPT3, Topology()).total == (174_615_846_912,)
    assert count_parameters(MIXTRAL, Topology()).total == (46_702_792_704,)


@pytest.mark.parametrize(("shape", "scores"), [(GPT3, 80), (MT_NLG, 64), (GPT_22B, 320 / 3)])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
def test_activations_of_a_layer_are_those_of_korthikanti_et_al_table_2(
    shape: Architecture, scores: float, tp: int, sequence_parallel: bool
) -> None:
    """s b h (34 + 5 a s / h), (10 + 24 / t + 5 a s / (h t)) and (34 + 5 a s / h) / t; 5 a s / h is 80 for GPT-3."""
    topology = Topology(tp=tp, pp=2, layers_per_stage=(1, shape.num_layers - 1))
    model = bare(shape, topology, dropout=True, sequence_parallel=sequence_parallel)
    stored = model.evaluate([ONE]).stored_bytes[0, 0]
    values = (34 + scores) / tp if sequence_parallel else 10 + (24 + scores) / tp
    assert stored == round(2048 * shape.hidden_size * values)


@pytest.mark.parametrize(("shape", "share"), [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_selective_recomputation_saves_what_korthikanti_et_al_say(shape: Architecture, share: float) -> None:
    """70 % of the activations of GPT-3 and 65 % of MT-NLG's (2022, sec. 5)."""
    topology = Topology(tp=8, pp=2, layers_per_stage=(1, shape.num_layers - 1))
    kinds = [ONE, MicroBatch(ONE.samples, recompute="selective")]
    none, selective = bare(shape, topology, dropout=True, sequence_parallel=True).evaluate(kinds).stored_bytes[0]
    assert round(1 - selective / none, 2) == share


def test_flash_attention_stores_no_scores() -> None:
    """Without it 5 a s / h values of every position; with it one fp32 number a head and position."""
    topology = Topology(pp=2, layers_per_stage=(1, 95))
    long = MicroBatch((SampleLength(0, 1024),))
    for flash, scores in ((False, 5 * 96 * 1024 * 1024), (True, 4 * 96 * 1024)):
        stored = bare(GPT3, topology, dropout=True, flash=flash).evaluate([long]).stored_bytes[0, 0]
        assert stored == 34 * 1024 * 12288 + scores


def test_full_recomputation_of_gpt_3_takes_the_flops_of_narayanan_et_al() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) an iteration (2021, eq. 3), which makes 300 billion tokens 34 days on 1024
    devices at 140 TFLOP/s (sec. 5.1, there by 8 T P / n X)."""
    costs = bare(GPT3).evaluate([MicroBatch(ONE.samples, recompute="full")])
    flops = int((costs.forward_ns + costs.backward_ns)[0, 0])
    s, layers, h = 2048, 96, 12288
    # 96 V / 16 = 6: forward and backward of the head, which is not recomputed.
    assert flops == 96 * s * layers * h * h + 16 * layers * s * s * h + 6 * s * h * VOCAB
    days = flops / s * 300e9 / (1024 * 140e12) / 86_400
    assert days == pytest.approx(34, rel=0.03)


def test_a_mixtral_token_takes_two_flops_of_each_of_its_12_9_billion_active_weights() -> None:
    matmul = bare(MIXTRAL).evaluate([MicroBatch((SampleLength(0, 1),))]).weight_ns[0, 0]
    embedding, norms = 32000 * 4096, 65 * 4096
    assert matmul == 2 * (12_879_925_248 - embedding - norms)


def test_a_mixtral_layer_stores_its_dispatched_rows_and_two_experts_work() -> None:
    """Bytes a token by hand, bf16 with flash attention: norms, qkv and router inputs 4 x 8192; q, k, v and context
    20480; gate, value and fc2's input of two experts 172032; dispatched rows 16384; router 32; log-sum-exp 128."""
    model = bare(MIXTRAL, Topology(pp=2, layers_per_stage=(1, 31)), flash=True)
    stored = model.evaluate([MicroBatch((SampleLength(0, 10),))]).stored_bytes[0, 0]
    assert stored == 10 * (4 * 8192 + 20480 + 172032 + 16384 + 32 + 128)


def test_a_capacity_is_what_experts_compute_whether_tokens_fill_it_or_not() -> None:
    def rows(capacity_factor: float) -> int:
        shape = Architecture.gpt(
            num_layers=1,
            hidden_size=64,
            num_heads=4,
            num_query_groups=4,
            ffn_hidden_size=256,
            gated_mlp=False,
            vocab_size=512,
            max_seq_len=128,
            tied_embeddings=True,
            num_experts=8,
            top_k=2,
        )
        flops = (
            bare(shape, capacity_factor=capacity_factor).evaluate([MicroBatch((SampleLength(0, 10),))]).weight_ns[0, 0]
        )
        rest = 2 * 10 * (4 * 64 * 64 + 8 * 64 + 512 * 64)
        return int(flops - rest) // (2 * 2 * 64 * 256)

    assert [rows(factor) for factor in (0.0, 1.0, 1.25, 2.0, 0.4)] == [20, 24, 32, 40, 8]


def test_expert_parallel_ranks_hold_their_share_of_experts_and_divide_states_over_the_copies_left() -> None:
    experts = 32 * 8 * 3 * 4096 * 14336
    one, eight = (int(count_parameters(MIXTRAL, Topology(dp=8), ep).total.sum()) for ep in (1, 8))
    assert one - eight == experts * 7 // 8
    model = AnalyticCosts(MIXTRAL, Topology(dp=8), ep=4, zero_stage=1)
    rest = 46_702_792_704 - experts
    assert model.states.device.optimizer.tolist() == [12 * rest // 8 + 12 * (experts // 4) // 2]


def test_expert_parallelism_leaves_the_work_of_evenly_loaded_ranks_alone() -> None:
    alone, shared = (AnalyticCosts(MIXTRAL, Topology(dp=8), ep=ep).evaluate([ONE]) for ep in (1, 8))
    assert alone.forward_ns.tolist() == shared.forward_ns.tolist()
    assert alone.stored_bytes.tolist() == shared.stored_bytes.tolist()


def test_packed_documents_attend_and_store_scores_within_themselves() -> None:
    samples = tuple(SampleLength(i, n) for i, n in enumerate((512, 1024, 512)))
    model = bare(GPT3, Topology(pp=2, layers_per_stage=(1, 95)), dropout=True)
    document, row = (MicroBatch(samples, "packed", attention=kind) for kind in ("document", "row"))  # type: ignore[arg-type]
    costs = model.evaluate([document, row])
    squares = 512**2 + 1024**2 + 512**2
    assert int(costs.stored_bytes[0, 1] - costs.stored_bytes[0, 0]) == 5 * 96 * (2048**2 - squares)
    assert int(costs.forward_ns[0, 1] - costs.forward_ns[0, 0]) == 4 * 12288 * (2048**2 - squares)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep": 3}, "ep is 3"),
        ({"ep": 16}, "divide dp 8"),
        ({"zero_stage": 5}, "zero_stage is 5 but must be one of"),
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0 with num_experts 8"),
    ],
)
def test_expert_and_zero_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnalyticCosts(MIXTRAL, Topology(dp=8), **settings)
