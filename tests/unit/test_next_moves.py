"""What to try next: changes that the planner predicts to be faster on a run's own batches, within its seconds."""

from __future__ import annotations

import argparse
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of, global_batches
from dynapipe_ext.launch.run.next_moves import _changes, next_moves
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.run_words import NextMove
from tests.support.steps import a_step

LENGTHS = as_length_array(np.random.default_rng(0).integers(8, 1000, 60).tolist())
TOPOLOGY = {"tp": 1, "pp": 2, "dp": 1}


def moves_of(
    *, num_steps: int = 2, cpu_s: Any = lambda: 0.0, vocab_size: int = 258, **tables: dict[str, Any]
) -> tuple[dict[str, NextMove], int]:
    config = TrainConfig().with_values(**{"topology": TOPOLOGY, "data": {"tokens_per_batch": 4096}, **tables})
    whole = SimpleNamespace(vocab_size=vocab_size, targets=None)
    data = SimpleNamespace(whole=whole, train=SimpleNamespace(lengths=LENGTHS))
    job: Any = SimpleNamespace(config=config, data=data, planning=SimpleNamespace(num_cores=None))
    costs = analytic_costs(config, architecture_of(config, vocab_size), flops_per_s=1e11, overhead_ns=0)
    assert len(global_batches(config, LENGTHS, 0, drop_last=False)) > num_steps
    moves, num_tried = next_moves(job, costs, [a_step(step) for step in range(num_steps)], cpu_s=cpu_s)
    assert [move.gain for move in moves] == sorted((move.gain for move in moves), reverse=True)
    return {move.flags: move for move in moves}, num_tried


def test_a_padded_table_is_told_to_pack_and_an_adaptive_one_to_place_or_split() -> None:
    padded, _ = moves_of(plan={"layout": "padded", "schedule": "gpipe"})
    assert padded["--layout packed"].gain > 0.01
    assert "--split-backward" not in padded  # which a table of whole backwards does not have
    packed, num_tried = moves_of()
    assert {"--placement v", "--split-backward"} & packed.keys()
    assert "--layout packed" not in packed
    assert num_tried == 7


def test_a_large_vocabulary_is_told_to_lie_over_the_ranks_with_the_embedding_if_they_are_one() -> None:
    plan = {"split_backward": True, "memory_limit_gb": 64.0}
    tied, _ = moves_of(vocab_size=128_000, plan=plan)
    apart, _ = moves_of(vocab_size=128_000, plan=plan, model={"tied_embeddings": False})
    spread, _ = moves_of(vocab_size=128_000, plan=plan, topology={**TOPOLOGY, "vocabulary_parallel": "both"})
    assert min(tied["--vocabulary-parallel both"].gain, apart["--vocabulary-parallel head"].gain) > 0.1
    assert not any("--vocabulary-parallel" in flags for flags in spread)


def test_what_a_run_has_already_or_cannot_have_is_not_told() -> None:
    split, _ = moves_of(plan={"split_backward": True}, topology={**TOPOLOGY, "placement": "v"})
    assert not {"--split-backward", "--placement v"} & split.keys()
    packed_rows, _ = moves_of(plan={"max_tokens": 1024, "layout": "packed"})
    assert "--layout packed" not in packed_rows


@pytest.mark.parametrize(("step_s", "most"), [(0.4, 4), (3.0, 0)])
def test_trials_end_with_their_seconds(step_s: float, most: int) -> None:
    moments = count()
    _, num_tried = moves_of(cpu_s=lambda: step_s * next(moments))
    assert num_tried <= most


def test_a_run_without_steps_has_nothing_to_be_planned_on() -> None:
    assert moves_of(num_steps=0) == ({}, 0)


def test_every_move_is_a_flag_of_train() -> None:
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    plan = {"layout": "padded", "max_tokens": 1024}
    changes = list(_changes(TrainConfig().with_values(topology=TOPOLOGY, plan=plan), tied_embeddings=True))
    assert len(changes) > 6
    for change in changes:
        values = vars(parser.parse_args(change.flags.split()))
        assert values[change.flags.split()[0].lstrip("-").replace("-", "_")]
