"""Costs that a run of a model of transformers measures: of transformers' own layers, whatever kinds they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.chunk_runner import ChunkRunner
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.stages.transformers.twin import with_layers
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.job.configured import make_planner
from dynapipe_ext.launch.job.model_folder import part_options
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.checkpoints import tiny

VOCABULARY = 320
# With one kind of layers, four or one; windows and whole attention; experts behind layers without; learned positions.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 4, "max_position_embeddings": 128}),
    "one layer": ("llama", {"num_hidden_layers": 1, "max_position_embeddings": 128}),
    "gemma3_text": ("gemma3_text", {"max_position_embeddings": 128}),
    "deepseek_v3": ("deepseek_v3", {"max_position_embeddings": 128}),
    "gpt2": ("gpt2", {"n_positions": 128}),
}


def most_stored_bytes(monkeypatch: pytest.MonkeyPatch, stage: TransformersStage, plan: Any) -> int:
    """While a step runs."""
    most, forward = [0], ChunkRunner.forward

    def counted(runner: ChunkRunner, *arguments: Any) -> Any:
        outputs = forward(runner, *arguments)
        most.append(runner.held_bytes())
        return outputs

    monkeypatch.setattr(ChunkRunner, "forward", counted)
    batches = []
    for micro_batch in plan.micro_batches:
        samples = [TokenSample(s.index, np.full(s.encoder + 1, 5), 1) for s in micro_batch.samples]
        arrays = collate(micro_batch, samples)
        batches.append({name: torch.from_numpy(array) for name, array in arrays.items()})
    PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches)
    return max(most)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("named", FAMILIES)
def test_stored_bytes_of_a_step_are_those_that_its_plan_says(
    named: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = FAMILIES[named]
    tiny(family, vocab_size=VOCABULARY, **changes).config.save_pretrained(tmp_path)
    config = TrainConfig().with_values(
        model={"architecture": str(tmp_path), "backend": "transformers", "max_seq_len": 128},
        topology={"tp": 1, "pp": 1, "dp": 1},
        plan={"layout": layout, "recompute": "none"},
    )
    costs = settle_costs(config, VOCABULARY)
    samples = [SampleLength(index, length, 0, length) for index, length in enumerate((128, 97, 60, 41, 33, 17, 8, 5))]
    plan = prove_step(make_planner(config, costs), samples, step=0).plans[0][0]
    stage = TransformersStage(parts_of_config(tmp_path, seed=0, **part_options(config)), measure_bytes=True)
    predicted = max(int(costs.evaluate([m]).stored_bytes.sum()) for m in plan.micro_batches)
    measured = most_stored_bytes(monkeypatch, stage, plan)
    assert 0.98 * measured <= predicted <= 1.4 * measured


def test_capped_scores_of_whole_rows_are_counted_as_squares(tmp_path: Path) -> None:
    """Of eager attention, whose scores no factor of what grows with positions tells."""
    tiny("gemma2", vocab_size=VOCABULARY, max_position_embeddings=1024).config.save_pretrained(tmp_path)
    config = TrainConfig().with_values(
        model={"architecture": str(tmp_path), "backend": "transformers", "max_seq_len": 1024},
        topology={"tp": 1, "pp": 1, "dp": 1},
        plan={"layout": "padded"},
    )
    costs = settle_costs(config, VOCABULARY)
    assert isinstance(costs, AnalyticCosts)
    assert not costs.flash
    short, long = (costs.evaluate([MicroBatch((SampleLength(0, n),))]).stored_bytes.sum() for n in (128, 1024))
    assert long > 12 * short


def test_lists_that_have_as_many_numbers_as_layers_by_chance_stay_whole() -> None:
    config = transformers.FalconH1Config(num_hidden_layers=2)
    small = with_layers(config, 1)
    assert small.num_hidden_layers == 1
    assert list(small.mlp_multipliers) == list(config.mlp_multipliers)
    hybrid = transformers.Gemma3TextConfig(num_hidden_layers=6)
    assert len(with_layers(hybrid, 3).layer_types) == 3
