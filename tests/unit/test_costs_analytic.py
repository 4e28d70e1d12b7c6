"""The analytic model against published parameter counts and formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adapters import price_adapters
from dynapipe_ext.costs.analytic import AnalyticCosts, MeasuredAdapters
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.settings.tables import LinearLayer, LoraSettings

GPT2 = Architecture.gpt(
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    num_query_groups=12,
    ffn_hidden_size=3072,
    gated_mlp=False,
    vocab_size=50257,
    max_seq_len=1024,
    tied_embeddings=True,
)
LLAMA = {"position": "rope", "norm": "rmsnorm", "bias": False}
LLAMA2_7B = Architecture.gpt(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=32,
    ffn_hidden_size=11008,
    gated_mlp=True,
    vocab_size=32000,
    max_seq_len=4096,
    tied_embeddings=False,
    **LLAMA,
)  # type: ignore[arg-type]
LLAMA2_70B = Architecture.gpt(
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_query_groups=8,
    ffn_hidden_size=28672,
    gated_mlp=True,
    vocab_size=32000,
    max_seq_len=4096,
    tied_embeddings=False,
    **LLAMA,
)  # type: ignore[arg-type]
SMALL = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=256,
    gated_mlp=False,
    vocab_size=512,
    max_seq_len=128,
    tied_embeddings=True,
)

OF_THREE = replace(SMALL, num_heads=12, num_query_groups=3, head_dim=16)


def padded(rows: int, length: int, **more: Any) -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), **more)


@pytest.mark.parametrize(
    ("shape", "published"), [(GPT2, 124_439_808), (LLAMA2_7B, 6_738_415_616), (LLAMA2_70B, 68_976_648_192)]
)
def test_parameters_equal_the_published_counts(shape: Architecture, published: int) -> None:
    assert count_parameters(shape, Topology()).total == (published,)


def test_pipeline_stages_add_up_to_the_model_and_tied_embeddings_add_one_copy() -> None:
    assert sum(count_parameters(LLAMA2_70B, Topology(pp=8)).total) == 68_976_648_192
    assert sum(count_parameters(GPT2, Topology(pp=4)).total) == 124_439_808 + 50257 * 768


def test_tensor_parallel_ranks_copy_norms_late_biases_and_positions_only() -> None:
    shape = replace(GPT2, vocab_size=50304)
    one, two = (sum(count_parameters(shape, Topology(tp=tp)).total) for tp in (1, 2))
    copied = 12 * (4 * 768 + 2 * 768) + 2 * 768 + 1024 * 768
    assert 2 * two - one == copied


def test_uneven_stages_hold_their_own_layers() -> None:
    counts = count_parameters(SMALL, Topology(pp=3, layers_per_stage=(2, 1, 1))).total
    layer = count_parameters(replace(SMALL, num_layers=5), Topology()).total[0]
    layer -= count_parameters(SMALL, Topology()).total[0]
    assert counts.tolist() == [2 * layer + 512 * 64 + 128 * 64, layer, layer + 2 * 64 + 512 * 64]


def bare(shape: Architecture = SMALL, topology: Topology | None = None, **more: Any) -> AnalyticCosts:
    """One FLOP a nanosecond and no overhead, so that times are FLOPs."""
    settings = {"flops_per_s": 1e9, "overhead_ns": 0, "flash": False, **more}
    return AnalyticCosts(shape, topology or Topology(), **settings)


def test_forward_flops_are_those_of_narayanan_et_al() -> None:
    """24 b s h^2 + 4 b s^2 h a layer and 2 b s h V for the head (2021, appendix); backward is twice that."""
    shape = replace(SMALL, num_query_groups=4)
    b, s, h, v, layers = 3, 32, 64, 512, 4
    costs = bare(shape).evaluate([padded(b, s)])
    expected = layers * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * v
    assert costs.forward_ns.tolist() == [[expected]]
    assert costs.backward_ns.tolist() == [[2 * expected]]
    assert costs.weight_ns.tolist() == [[expected - layers * 4 * b * s**2 * h]]


def test_recomputation_adds_the_layers_or_their_core_attention_to_the_backward() -> None:
    b, s = 2, 16
    kinds = [padded(b, s, recompute=kind) for kind in ("none", "selective", "full")]
    backward = bare().evaluate(kinds).backward_ns[0]
    attention = 4 * 4 * b * s**2 * 64
    assert backward[1] - backward[0] == attention
    assert backward[2] - backward[0] == attention + 4 * 2 * (SMALL.attention_parameters + SMALL.mlp_parameters) * b * s


def test_causal_flash_attention_does_half_the_work() -> None:
    full, half = (bare(flash=flash).evaluate([padded(1, 64)]).forward_ns[0, 0] for flash in (False, True))
    assert full - half == 4 * 2 * 64**2 * 64


def test_only_the_last_stage_pays_for_the_head() -> None:
    forward = bare(topology=Topology(pp=4)).evaluate([padded(1, 8)]).forward_ns[:, 0]
    assert len(set(forward[:3])) == 1
    assert forward[3] - forward[0] == 2 * 8 * 64 * 512


def test_packed_documents_cost_what_padded_rows_of_their_length_cost_and_whole_rows_more() -> None:
    model = bare(topology=Topology(pp=2))
    samples = tuple(SampleLength(i, 16) for i in range(4))
    rows, packed = MicroBatch(samples), MicroBatch(samples, "packed")
    whole = MicroBatch(samples, "packed", attention="row")
    costs = model.evaluate([rows, packed, whole])
    assert costs.forward_ns[:, 0].tolist() == costs.forward_ns[:, 1].tolist()
    assert costs.stored_bytes[:, 0].tolist() == costs.stored_bytes[:, 1].tolist()
    assert (costs.forward_ns[:, 2] - costs.forward_ns[:, 1]).tolist() == [2 * 4 * 64 * (64**2 - 4 * 16**2)] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_stored_bytes_are_those_of_korthikanti_et_al(tp: int) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)) a layer, s b h (34 + 5 a s / h) / t under sequence parallelism; selective
    recomputation drops the 5 a s / h, full keeps 2 (2022, eq. 2-6). The first of two stages has layers only."""
    shape, b, s, h, a = replace(SMALL, num_query_groups=4), 2, 32, 64, 4
    kinds = [padded(b, s, recompute=kind) for kind in ("none", "selective", "full")]

    def stored(*, sequence_parallel: bool) -> list[int]:
        topology = Topology(tp=tp, pp=2, layers_per_stage=(1, 3))
        model = bare(shape, topology, dropout=True, sequence_parallel=sequence_parallel)
        return [int(x) for x in model.evaluate(kinds).stored_bytes[0]]

    scores = 5 * a * s * s * b // tp
    assert stored(sequence_parallel=False) == [
        s * b * h * (10 + 24 // tp) + scores,
        s * b * h * (10 + 24 // tp),
        2 * s * b * h,
    ]
    assert stored(sequence_parallel=True) == [
        s * b * h * 34 // tp + scores,
        s * b * h * 34 // tp,
        2 * s * b * h // tp,
    ]


def test_fp32_values_store_twice_the_bytes_of_bf16() -> None:
    def stored(width: int) -> np.ndarray[Any, Any]:
        model = bare(topology=Topology(pp=2), activation_bytes_per_value=width)
        return model.evaluate([padded(1, 16)]).stored_bytes[0]

    assert stored(4).tolist() == (2 * stored(2)).tolist()


def test_last_stage_holds_fp32_logits() -> None:
    stored = bare(topology=Topology(pp=2)).evaluate([padded(1, 16)]).stored_bytes[:, 0]
    assert stored[1] - stored[0] == 16 * (4 * 512 + 2 * 2 * 64)


def test_full_recomputation_needs_a_whole_layer_while_it_runs() -> None:
    model = bare(topology=Topology(pp=4))
    none, full = model.evaluate([padded(1, 32), padded(1, 32, recompute="full")]).take([0, 1]).working_bytes[0]
    stored = model.evaluate([padded(1, 32)]).stored_bytes[0, 0]
    assert full - none == stored - 2 * 32 * 64


def test_states_are_18_bytes_a_parameter_or_6_and_12_over_dp() -> None:
    count = count_parameters(SMALL, Topology()).total[0]
    assert bare(topology=Topology(dp=4)).states.device.total.tolist() == [18 * count]
    assert bare(topology=Topology(dp=4), distributed_optimizer=True).states.device.total.tolist() == [
        6 * count + 3 * count
    ]
    assert bare(param_bytes=4).states.device.total.tolist() == [16 * count]


def test_transfers_take_latency_and_bytes_over_bandwidth_and_none_within_a_rank() -> None:
    link = {"bandwidth_bytes_per_s": 1e9, "latency_ns": 100}
    costs = bare(topology=Topology(pp=2, placement=(0, 1, 1, 0)), **link).evaluate([padded(2, 8)])
    sent = 2 * 8 * 64 * 2
    assert costs.transfer_bytes[:, 0].tolist() == [sent] * 3
    assert costs.transfer_ns[:, 0].tolist() == [100 + sent, 0, 100 + sent]


def test_shapes_as_arrays_cost_what_micro_batches_cost() -> None:
    model = AnalyticCosts(SMALL, Topology(pp=2))
    shapes = [(1, 1), (3, 17), (5, 128)]
    for kind in ("none", "selective", "full"):
        one = model.evaluate([padded(r, n, recompute=kind) for r, n in shapes])
        two = model.evaluate_shapes([r for r, _ in shapes], [n for _, n in shapes], 0, kind)  # type: ignore[arg-type]
        for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes", "transfer_ns"):
            assert getattr(one, name).tolist() == getattr(two, name).tolist()


def test_rows_beyond_the_learned_positions_are_refused() -> None:
    model = AnalyticCosts(SMALL, Topology())
    with pytest.raises(PlanError, match=r"129 positions .* 128 learned"):
        model.evaluate([padded(1, 129)])
    assert model.evaluate_shapes([1, 1], [128, 129]).forward_ns[0].tolist()[1] == INFEASIBLE
    model.evaluate([MicroBatch(tuple(SampleLength(i, 100) for i in range(3)), "packed")])  # positions restart


def test_encoder_decoder_shapes_are_refused() -> None:
    with pytest.raises(PlanError, match="decoder-only"):
        AnalyticCosts(SMALL, Topology()).evaluate([MicroBatch((SampleLength(0, 4, 4),))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": Topology(tp=4), "architecture": OF_THREE}, "num_query_groups 3 must divide tp 4"),
        ({"topology": Topology(pp=5)}, "4 layers cannot fill 5 stages"),
        ({"flops_per_s": 0.0}, "flops_per_s"),
        ({"param_bytes": 3}, "must be one of 2, 4"),
        ({"latency_ns": -1}, "latency_ns is -1 but must be 0 to"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(AnalyticCosts(SMALL, Topology()), **change)


def test_json_round_trip_keeps_the_fingerprint_and_every_setting_changes_it() -> None:
    model = AnalyticCosts(SMALL, Topology(pp=2, dp=2, layers_per_stage=(3, 1)))
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(model))))
    assert again == model
    assert again.fingerprint() == model.fingerprint()
    changes: list[dict[str, Any]] = [
        {"flops_per_s": 1e12}, {"overhead_ns": 1}, {"bandwidth_bytes_per_s": 1.0}, {"latency_ns": 1}, {"flash": False},
        {"activation_bytes_per_value": 4}, {"param_bytes": 4}, {"sequence_parallel": True}, {"dropout": True},
        {"distributed_optimizer": True}, {"topology": Topology(pp=2)},
        {"architecture": replace(SMALL, vocab_size=1024)}, {"offload": "optimizer"}, {"adapters": "beside q_proj"},
        {"measured_adapters": MeasuredAdapters("beside q_proj", 0.5, 0.9)},
    ]  # fmt: skip
    assert len({replace(model, **change).fingerprint() for change in changes} | {model.fingerprint()}) == 16


def test_bytes_under_adapters_are_the_measured_ones_where_these_train_and_no_others() -> None:
    whole = replace(bare(topology=Topology(pp=2)), layer_bytes_factor=1.5, head_bytes_factor=1.2)
    measured = replace(whole, measured_adapters=MeasuredAdapters("beside q_proj", 0.5, 0.9))
    adapted = replace(measured, adapters="beside q_proj")
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(adapted))))
    assert again == adapted
    batch = [padded(2, 32), padded(2, 32, recompute="full")]
    for other in (measured, replace(measured, adapters="beside v_proj")):
        assert other.evaluate(batch).stored_bytes.tolist() == whole.evaluate(batch).stored_bytes.tolist()
        assert not other.facts.measured_adapters
    assert adapted.facts.measured_adapters
    plain = bare(topology=Topology(pp=2)).evaluate(batch).stored_bytes
    kept_inputs = 2 * 2 * 2 * 32 * 64  # of two layers, whole, however little they store else
    stored = adapted.evaluate(batch).stored_bytes
    assert stored[0].tolist() == [-(-plain[0, 0] // 2), kept_inputs]
    head = adapted.count_head_bytes(batch)
    assert head[0].tolist() == [0, 0]
    assert head[1].tolist() == np.ceil(0.9 * (plain[1] - plain[0])).tolist()
    assert (stored[1] - head[1]).tolist() == stored[0].tolist()


def test_measured_adapters_are_not_counted_once_more() -> None:
    lora = LoraSettings(enabled=True, described=(LinearLayer("q_proj", 64, 64),))
    base = bare()
    for measured, num_bytes in ((MeasuredAdapters(lora.stored_as, 1.0, 1.0), 0), (None, 4 * 2 * 8 * 32)):
        counted = replace(base, adapters=lora.stored_as, measured_adapters=measured)
        costs = price_adapters(counted, lora, SMALL, Topology(), recipe="megatron").evaluate([padded(1, 32)])
        assert (costs.stored_bytes - base.evaluate([padded(1, 32)]).stored_bytes).tolist() == [[num_bytes]]


def test_full_recomputation_leaves_nothing_to_put_off() -> None:
    costs = bare().evaluate([padded(2, 16), padded(2, 16, recompute="selective"), padded(2, 16, recompute="full")])
    assert (costs.weight_ns[0, 0], costs.weight_ns[0, 2]) == (costs.weight_ns[0, 1], 0)
    assert costs.weight_ns[0, 0] > 0


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_what_i_keeps_until_w_is_stored_where_backwards_are_split(tp: int, sequence_parallel: bool) -> None:
    """Inputs (h, h / tp, h, f / tp) and output gradients ((h + 2 kv) / tp, h, 2f / tp, h) of a layer's four products.

    Without sequence parallelism that is what the forward stores (Korthikanti et al. 2022, sec. 4), but for the
    attention's own; with it, inputs are kept gathered and output gradients come gathered.
    """
    shape = replace(SMALL, gated_mlp=True, num_layers=2)
    one = padded(2, 16, recompute="selective")
    h, f, kv, tokens = 64, 256, 32, 32
    kept = 2 * tokens * (4 * h + (h + f + h + 2 * kv + 2 * f) // tp)
    topology = Topology(tp=tp, pp=2)
    plain = bare(shape, topology, sequence_parallel=sequence_parallel)
    split = replace(plain, split_backward=True)
    assert split.evaluate([one]).stored_bytes[0, 0] == kept
    assert plain.evaluate([one]).stored_bytes[0, 0] == kept - sequence_parallel * 2 * tokens * 2 * h
    again = [padded(2, 16, recompute="full")]
    assert split.evaluate(again).stored_bytes[0, 0] == plain.evaluate(again).stored_bytes[0, 0]


@pytest.mark.parametrize(("zero_stage", "value_bytes"), [(1, 0), (2, 4), (3, 2 + 4)])
def test_an_end_s_table_is_held_whole_while_zero_uses_it(zero_stage: int, value_bytes: int) -> None:
    """Gradients from stage 2 on, weights in stage 3; of a rank's half of the rows, which outweigh a layer."""
    costs = AnalyticCosts(replace(SMALL, vocab_size=10**6), Topology(tp=2, pp=3, dp=2, layers_per_stage=(1, 2, 1)))
    batch = [MicroBatch((SampleLength(0, 8),))]
    plain, sharded = (replace(costs, zero_stage=stage).evaluate(batch).working_bytes for stage in (0, zero_stage))
    whole = (sharded - plain)[:, 0].tolist()
    assert whole[0] == whole[2] == 10**6 * SMALL.hidden_size // 2 * value_bytes
    assert whole[1] * 100 <= whole[0]
