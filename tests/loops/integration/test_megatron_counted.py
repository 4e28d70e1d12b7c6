"""What the drop-in counts of models with latent attention and of layers of two kinds is what Megatron builds, and their
steps of planned data run."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.drop_in.drop_in import ForwardBackward
from dynapipe_ext.executor.drop_in.measured_costs import StageRow, costs_of_rows
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline, _counted, _has_counted_parameters
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps, data_planner
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_parallel, transformer_config
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.models.huggingface import read_config
from tests.support.megatron_loops import LENGTH, VOCAB, forward_step
from tests.support.published_models import ranks

LLAMA = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = {
    "model_type": "deepseek_v3", "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"model_type": "qwen3_moe", "head_dim": 8, **EXPERTS},
    "latent, a dense layer first": {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1},
    "latent, whole queries, two dense layers": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2},
}  # fmt: skip
# By model the numbers of its layers without experts, as --moe-layer-freq has them: [1, 0, 1, 0], and none with experts.
PATTERNS = {"experts in every other layer": (1, 3)}
MODELS["experts in every other layer"] = {**MODELS["experts"], "model_type": "qwen3_moe"}


class Samples:
    """Of 1 to 16 positions."""

    lengths = np.stack([1 + np.arange(8) % LENGTH, 0 * np.arange(8), 1 + np.arange(8) % LENGTH], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        return TokenSample(index, np.arange(self.lengths[index, 0] + 1) % VOCAB, 1)


def counted(_rank: int) -> dict[str, tuple[AnalyticCosts | None, int, float]]:
    """By model its counted costs, the parameters that Megatron has built, and the loss of a step of planned data."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType

    initialize_parallel(Topology(), 0)
    found = {}
    for name, sizes in MODELS.items():
        architecture, topology = read_config(LLAMA | sizes, name), Topology(layers_per_stage=(4,))
        if dense := PATTERNS.get(name, ()):
            architecture = replace(architecture, dense_layers=dense, dense_ffn_hidden_size=LLAMA["intermediate_size"])
        config = transformer_config(architecture, topology, dtype="float32")
        if dense:
            config.moe_layer_freq = [int(layer not in dense) for layer in range(config.num_layers)]
        model: Any = build_model(architecture, topology, 0, config, seed=0, device=torch.device("cpu"))
        costs, built = _counted(model, config, topology, 1), sum(p.numel() for p in model.parameters())
        model.model_type = ModelType.encoder_or_decoder
        config.finalize_model_grads_func = finalize_model_grads
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        steps = PlannedSteps(Samples(), batch_size=8, seed=0)
        shape = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2}
        reports = ForwardBackward(DropInSettings())(
            forward_step_func=forward_step, data_iterator=steps, model=chunk, **shape
        )
        steps.close()
        loss, tokens = torch.stack([report["lm loss"] for report in reports]).sum(dim=0).tolist()
        found[name] = costs, built, loss / tokens
    return found


def stepped(is_counted: bool) -> list[tuple[float, int, bool]]:
    """Of each step of two replicas of an experts' model its loss, its replica's micro-batches, and whether its costs
    were known; `is_counted` or of a class whose costs nobody counts."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType

    topology = Topology(dp=2, layers_per_stage=(4,))
    architecture = read_config(LLAMA | MODELS["experts"], "experts")
    config = transformer_config(architecture, topology, dtype="float32")
    model: Any = build_model(architecture, topology, 0, config, seed=0, device=torch.device("cpu"))
    if not is_counted:
        model.__class__ = type("HybridModel", (type(model),), {})
    model.model_type = ModelType.encoder_or_decoder
    config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    steps, run = PlannedSteps(Samples(), batch_size=8, seed=0), ForwardBackward(DropInSettings())
    found = []
    for _ in range(4):
        chunk.zero_grad_buffer()
        shape = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2}
        reports = run(forward_step_func=forward_step, data_iterator=steps, model=chunk, **shape)
        sums = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(sums)
        loss, tokens = sums.tolist()
        found.append((loss / tokens, len(reports), run._models[chunk].pipeline.counts_memory))
    steps.close()
    return found


def measured(_rank: int) -> tuple[list[tuple[float, int, bool]], list[tuple[float, int, bool]], str]:
    initialize_parallel(Topology(dp=2), 0)
    said = io.StringIO()
    with redirect_stdout(said):
        return stepped(True), stepped(False), said.getvalue()


def test_a_model_that_is_not_counted_is_measured_in_its_second_step_and_planned_from_its_third(tmp_path: Path) -> None:
    for rank, (counted_steps, steps, said) in enumerate(ranks(2, tmp_path, measured)):
        assert [loss for loss, *_ in steps] == pytest.approx([loss for loss, *_ in counted_steps], rel=1e-5)
        assert [known for *_, known in counted_steps] == [True] * 4
        assert [known for *_, known in steps] == [False, True, True, True]  # after the step
        assert all(count > steps[2][1] for _, count, _ in steps[:2])  # then small samples join
        assert ("this model's costs are not counted: 2 steps run under 1F1B" in said) == (rank == 0)


def test_costs_are_those_of_the_rows_that_were_measured() -> None:
    """Two stages, the second twice as slow, whose attention keeps scores: bytes grow with squares."""
    shapes = [(1, 8), (2, 8), (1, 32), (3, 16), (1, 64)]
    rows = [
        StageRow(
            stage,
            count * length,
            count * length**2,
            (1 + stage) * (5e-5 + 2e-6 * count * length + 3e-8 * count * length**2),
            (1 + stage) * 2 * (5e-5 + 2e-6 * count * length + 3e-8 * count * length**2),
            100 * count * length + 4 * count * length**2,
        )
        for stage in range(2)
        for count, length in shapes
    ]
    costs = costs_of_rows(rows, 2, longest=100, static_bytes=7)
    assert costs.ns_per_token == pytest.approx(4000, abs=2)
    assert costs.ns_per_token_squared == pytest.approx(60, rel=1e-3)
    assert costs.overhead_ns == pytest.approx(100_000, rel=1e-3)
    assert costs.backward_ratio == pytest.approx(2)
    assert costs.stage_scale == pytest.approx((0.5, 1))
    assert (costs.bytes_per_token, costs.static_bytes) == (500, 7)  # 100 + 4 x 100


def test_layers_that_were_built_otherwise_are_not_counted() -> None:
    architecture = read_config(LLAMA | MODELS["experts"], "experts")
    costs = AnalyticCosts(architecture, Topology(pp=2, layers_per_stage=(2, 2)))
    built = count_parameters(architecture, costs.topology, 1).total.tolist()
    assert _has_counted_parameters(costs, built)
    assert not _has_counted_parameters(costs, [built[0], built[1] * 1.1])


def test_counted_parameters_are_those_that_megatron_builds_and_planned_data_have_a_planner(tmp_path: Path) -> None:
    (found,) = ranks(1, tmp_path, counted)
    for name, (costs, built, loss) in found.items():
        assert costs is not None, name
        norms = 0 if name.startswith("latent") else 4 * 2 * 8  # of queries and keys, which are not counted
        assert int(count_parameters(costs.architecture, costs.topology, 1).total.sum()) + norms == built, name
        pipeline = MegatronPipeline(
            topology=costs.topology,
            coordinates=costs.topology.coordinates(0),
            transport=InlineHub().transport(0),
            activation_format=ActivationFormat(32),
            costs=costs,
            counts_memory=True,
            recompute=None,
            pad_multiple=1,
            replica_collectives=ReplicaCollectives(),
            device=torch.device("cpu"),
            usable_bytes=1 << 30,
        )
        samples = [SampleLength(i, length, 0, length) for i, length in enumerate((9, 60, 31, 4))]
        plan = data_planner(pipeline, DropInSettings(), forward_only=False).plan(samples)
        assert 16 * built < plan.peak_bytes < 1 << 30
        assert loss == pytest.approx(math.log(LLAMA["vocab_size"]), abs=0.5), name  # of weights as they are drawn
