"""What recomputing whole stages costs, in every cost model: one more forward, and the bytes of the input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import Strategy, estimate_costs
from dynapipe_ext.costs.grid import INFEASIBLE, Grid
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import preset

T5 = Architecture.t5(
    num_layers=4, num_decoder_layers=4, hidden_size=64, num_heads=4, ffn_hidden_size=128, gated_mlp=True,
    vocab_size=512, max_seq_len=128, tied_embeddings=True,
)  # fmt: skip
LLAMA = preset("llama-3-8b")


def measured() -> CostTable:
    """One layer and the head at four shapes, backwards and their bytes included."""
    shapes = [(rows, length) for rows in (1, 4) for length in (16, 64)]

    def grid(unit: float) -> Grid:
        names = ("forward_ms", "backward_ms", "stored_mb", "peak_mb", "weight_ms")
        columns = {name: {s: n * unit * s[0] * s[1] for s in shapes} for n, name in enumerate(names, 1)}
        return Grid.from_points(columns)

    grids = {("none", "encoder"): grid(0.01), ("none", "postprocess"): grid(0.02)}
    sizes = {"encoder": 1e6, "embedding": 1e6}
    return CostTable(
        grids=grids, parameter_bytes=sizes, hidden_size=64, num_layers=4, topology=Topology(pp=2),
        packed_bytes={"none": 1.0},
    )  # fmt: skip


def on_a_cluster(device: str) -> CostModel:
    strategy = Strategy(topology=Topology(tp=2, pp=4), sequence_parallel=True)
    cluster = Cluster.from_device(DEVICES[device], gpus_per_node=8)
    return estimate_costs(LLAMA, cluster, strategy, precision="bf16", recipe="megatron")


MODELS: dict[str, CostModel] = {
    "counted": AnalyticCosts(LLAMA, Topology(tp=2, pp=4), sequence_parallel=True, head_bytes_factor=1.2),
    "tokens": TokenCosts(3, ns_per_token_squared=2, transfer_bytes_per_token=8),
    "measured": measured(),
    "pairs": AnalyticCosts(
        T5, Topology(tp=2, pp=4), flops_per_s=1e12, overhead_ns=0, layer_bytes_factor=1.3, split_backward=True,
        sequence_parallel=True,
    ),
    "on GPUs": on_a_cluster("a100"),
    "on CPUs": on_a_cluster("cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["counted", "pairs", "on GPUs", "on CPUs"])
def test_logits_are_stored_unless_the_last_stage_is_recomputed(name) -> None:
    samples = (SampleLength(0, 24, 8 * (name == "pairs")),)
    none, stage = (
        MODELS[name].count_head_bytes([MicroBatch(samples, recompute=kind)])[-1] for kind in ("none", "stage")
    )
    assert none > stage == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_that_is_recomputed_keeps_its_input_and_needs_the_rest_and_a_forward_in_its_backward(name) -> None:
    costs = MODELS[name]
    samples = tuple(SampleLength(i, 24, 8 * (name == "pairs")) for i in range(3))
    alone = [MicroBatch(samples, recompute=kind) for kind in ("none", "stage")]
    packed = [MicroBatch(samples, "packed", kind) for kind in ("none", "stage")]
    for none, stage in ((costs.evaluate([m]) for m in pair) for pair in (alone, packed)):
        assert (stage.forward_ns == none.forward_ns).all()
        assert np.abs(stage.backward_ns - none.backward_ns - none.forward_ns).max() <= 1
        assert not stage.weight_ns.any()
        assert not stage.stored_bytes[0].any()
        assert (stage.stored_bytes[1:] == none.transfer_bytes).all()
        assert (stage.stored_bytes + stage.working_bytes == none.stored_bytes + none.working_bytes).all()
    mixed = costs.evaluate([*alone, *packed])
    for m, one in enumerate([*alone, *packed]):
        assert (mixed.take([m]).stored_bytes == costs.evaluate([one]).stored_bytes).all()
    shapes = costs.evaluate_shapes([3], [24], [samples[0].decoder], "stage")
    assert (shapes.backward_ns == costs.evaluate(alone[1:]).backward_ns).all()


def test_a_measured_head_needs_on_the_last_stage_what_it_needed_while_it_ran() -> None:
    """A point's layer needs 0.01 MB a token over what it stores, its head 0.02."""
    costs = measured().evaluate([MicroBatch((SampleLength(0, length),)) for length in (16, 64)])
    assert costs.working_bytes.tolist() == [[160_000, 640_000], [320_000, 1_280_000]]


def test_tables_whose_peaks_are_of_forwards_alone_know_no_stage_that_is_recomputed() -> None:
    table = replace(measured(), working_in="F")
    assert (table.evaluate_shapes([1], [16], 0, "stage").forward_ns >= INFEASIBLE).all()
    assert (table.evaluate_shapes([1], [16], 0, "none").forward_ns < INFEASIBLE).all()
