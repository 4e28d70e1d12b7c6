"""Checkpoints of real megatron-core ranks are read whole, and those written here are loaded by real ranks, bit for bit.

Gradients are drawn by name and step, so a model that is trained on any topology has the same weights and moments: what
one process holds is the truth for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import write_config
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint import converter
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CARRIED_FOLDER
from dynapipe_ext.tools.checkpoint.megatron import dist as megatron_dist
from dynapipe_ext.tools.checkpoint.megatron import legacy as megatron_legacy
from dynapipe_ext.tools.checkpoint.megatron.names import megatron_tensors, to_megatron
from dynapipe_ext.tools.checkpoint.megatron.state import RNG_NOTICE
from tests.support.megatron_training import ITERATION, SAMPLES, STEPS, Case, Job, Local, Training, on_ranks, saving


def read_whole(reader: CheckpointReader) -> Local:
    """All tensors under Megatron's names."""
    reader.check()
    found: Local = {}
    for kind in reader.kinds:
        for group in tensor_groups(reader.architecture):
            tensors = to_megatron(reader.architecture, group, reader.read(group, kind))
            found.setdefault(kind, {}).update(tensors)
    return found


def same(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], a: Architecture) -> list[str]:
    """Names in which `found` differs from the truth, whose vocabulary is padded."""
    tensors = {t.name: t for group in tensor_groups(a) for t in megatron_tensors(a, group)}
    wrong = sorted(name for name in found.keys() ^ truth.keys() if not tensors[name].is_added)
    for name in found.keys() & truth.keys():
        wanted = truth[name][: tensors[name].shape[0]]
        if found[name].dtype != wanted.dtype or not torch.equal(found[name], wanted):
            wrong.append(name)
    return wrong


SAVED = [
    Case("qwen2", Topology(tp=2, pp=2, layers_per_stage=(1, 3))),
    Case("llama-tied", Topology(pp=2), dtype="float32"),
    Case("qwen3", Topology(tp=2, dp=2), distributed=True),
    Case("mixtral", Topology(tp=2), metadata=(("singleton_local_shards", True),)),
    Case("mixtral", Topology(dp=2), distributed=True),
    Case("gpt2", Topology(tp=2, pp=2)),
    Case("t5", Topology(tp=2)),
    Case("llama-one-key", Topology(tp=2)),
    Case("mixtral", Topology(dp=2), dtype="float32", ep=2),
]


KINDS = sorted({(case.variant, case.dtype) for case in SAVED})


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, str], Local]:
    """What one process holds after the training, by variant and dtype."""
    jobs = [(Case(variant, dtype=dtype), saving(None)) for variant, dtype in KINDS]
    return dict(zip(KINDS, (held for (held,) in on_ranks(jobs)), strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """Checkpoints of both layouts that Megatron's ranks have written, by case."""
    folder = tmp_path_factory.mktemp("saved")
    places = {case: folder / str(case) for case in SAVED}
    on_ranks([(case, saving(place)) for case, place in places.items()])
    for case, place in places.items():
        if case.variant == "t5":  # Megatron's arguments cannot say all of it
            for written in place.iterdir():
                (written / CARRIED_FOLDER).mkdir()
                (written / CARRIED_FOLDER / "config.json").write_text(json.dumps(write_config(case.architecture)))
    return places


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_what_megatron_saved_is_read_whole(
    case: Case, truths: dict[tuple[str, str], Local], saved: dict[Case, Path]
) -> None:
    truth = truths[case.variant, case.dtype]
    readers: list[Any] = [megatron_dist.open_checkpoint(saved[case] / "dist")]
    if case.has_legacy:
        readers.append(megatron_legacy.open_checkpoint(saved[case] / "legacy"))
    for reader in readers:
        found = read_whole(reader)
        assert set(found) >= set(truth), reader.notices
        for kind in found.keys() & truth.keys():
            assert same(found[kind], truth[kind], case.architecture) == [], kind
        assert reader.state is not None
        assert (reader.state.iteration, reader.state.optimizer_step) == (ITERATION, STEPS)
        assert reader.megatron.progress == {"num_floating_point_operations_so_far": 12.5}
        assert reader.state.consumed_samples == reader.state.scheduler["num_steps"] == SAMPLES


@pytest.mark.parametrize("case", [SAVED[i] for i in (0, 1, 4, 6)], ids=str)
def test_each_layout_gives_the_other_all_that_it_holds(
    case: Case, truths: dict[tuple[str, str], Local], saved: dict[Case, Path], tmp_path: Path
) -> None:
    first = WriterOptions(tp=2, pp=1 if case.variant == "t5" else 4)
    converter.convert(converter.prepare_conversion(saved[case] / "dist", tmp_path / "1", "megatron-legacy", first))
    converter.convert(
        converter.prepare_conversion(tmp_path / "1", tmp_path / "2", "megatron", WriterOptions(tp=4, pp=2))
    )
    found, truth = read_whole(megatron_dist.open_checkpoint(tmp_path / "2")), truths[case.variant, case.dtype]
    assert set(found) >= set(truth)
    assert {kind: same(found[kind], truth[kind], case.architecture) for kind in truth} == {kind: [] for kind in truth}


# How each of them is written: the case whose checkpoint is converted, the format, the case that loads it.
LOADED = [
    (SAVED[0], "megatron", Case("qwen2", Topology())),
    (SAVED[0], "megatron-legacy", Case("qwen2", Topology(pp=4))),
    (SAVED[1], "megatron-legacy", Case("llama-tied", Topology(tp=2, pp=2, layers_per_stage=(3, 1)), dtype="float32")),
    (SAVED[1], "megatron", Case("llama-tied", Topology(dp=2), dtype="float32", distributed=True)),
    (SAVED[3], "megatron", Case("mixtral", Topology(pp=2), distributed=True)),
    (SAVED[4], "megatron-legacy", Case("mixtral", Topology(tp=2))),
    (SAVED[5], "megatron-legacy", Case("gpt2", Topology(tp=2, pp=2))),
    (SAVED[6], "megatron", Case("t5", Topology(tp=2))),
    (SAVED[7], "megatron-legacy", Case("llama-one-key", Topology(tp=4))),
    (SAVED[3], "megatron", Case("mixtral", Topology(dp=2), ep=2)),
    (SAVED[8], "megatron", Case("mixtral", Topology(tp=2, dp=2), dtype="float32", distributed=True, ep=2)),
]


def continuing(root: Path, target: str) -> Callable[[Training], tuple[Local, Local, Local, Local, list[float]]]:
    """What a rank that goes on where the others stopped holds before and after a step more, and what it holds then that
    has loaded what was converted; learning rates of the latter before that step."""

    def run(training: Training) -> tuple[Local, Local, Local, Local, list[float]]:
        before = saving(None)(training)
        training.step(STEPS + 1)
        after = training.held()
        training.forget()
        load = training.load_dist if target == "megatron" else training.load_legacy
        load(root)
        held = training.held()
        rates = [group["lr"] for group in training.optimizer.param_groups]
        training.step(STEPS + 1)
        return before, after, held, training.held(), rates

    return run


@pytest.fixture(scope="module")
def continued(saved: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """For each of LOADED what `continuing` gives on its ranks."""
    folder = tmp_path_factory.mktemp("converted")
    jobs: list[Job] = []
    for i, (source, target, case) in enumerate(LOADED):
        t = case.topology
        options = WriterOptions(tp=t.tp, pp=t.pp, ep=case.ep, layers_per_stage=t.layers_per_stage)
        place = saved[source] / ("legacy" if i % 2 and source.has_legacy else "dist")
        outcome = converter.convert(converter.prepare_conversion(place, folder / str(i), target, options))
        assert RNG_NOTICE in outcome.notices
        assert not any("optimizer" in notice for notice in outcome.notices)
        jobs.append((case, continuing(folder / str(i), target)))
    return on_ranks(jobs)


@pytest.mark.parametrize("i", range(len(LOADED)), ids=[f"{s}-to-{t}-{c}" for s, t, c in LOADED])
def test_ranks_load_what_was_converted_and_train_on(i: int, continued: list[list[Any]]) -> None:
    for before, after, held, later, rates in continued[i]:
        for when, found, wanted in (("loaded", held, before), ("a step later", later, after)):
            assert found.keys() == wanted.keys()
            for kind in wanted:
                assert found[kind].keys() == wanted[kind].keys()
                wrong = [n for n in wanted[kind] if not torch.equal(found[kind][n], wanted[kind][n])]
                assert wrong == [], (when, kind)
        assert all(rate > 0 for rate in rates)
