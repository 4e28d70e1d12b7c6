"""What a checkpoint says of itself, which of several stays, and what is refused, by name."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.durable_files import checksum_of
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.folder import (
    MANIFEST,
    Manifest,
    RunState,
    SavedTensor,
    StoredChunk,
    read_manifest,
    refuse_other_model,
)
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS
from dynapipe_ext.launch.job.saved_settings import describe_losses, read_saved_settings
from dynapipe_ext.models.named_models import preset
from tests.support.saved_manifests import edit_manifest

COSTS = TokenCosts(num_stages=2, ns_per_token=7)


def state(step: int, losses: tuple[float, ...] = (2.5, 1.25)) -> RunState:
    return RunState(
        step=step,
        num_samples=step * 8,
        loader={"epoch": 0, "step": step},
        model={"hidden_size": 32, "dtype": "float32"},
        settings={"run": {"seed": 5}},
        costs=cost_model_to_json(COSTS),
        costs_fingerprint=COSTS.fingerprint(),
        recent_losses=losses,
    )


def manifest_of(run: RunState) -> Manifest:
    chunk = StoredChunk((0, 2), (3, 2), "__0_0.distcp", 0, 4)
    return Manifest(
        run=run,
        optimizer=OptimizerPlace(run.step - 1, {"num_steps": run.step, "max_lr": 0.1 + 0.2}),
        versions={"torch": "2.13.0"},
        files={"__0_0.distcp": 4},
        checksums={"__0_0.distcp": checksum_of([b"1234"])},
        tensors={"weight": SavedTensor("bfloat16", (3, 4), (chunk,))},
    )


def saved(root: Path, step: int, losses: tuple[float, ...] = (1.0,)) -> Path:
    part = folders.begin(root, step)
    (part / "__0_0.distcp").write_bytes(b"1234")
    return folders.publish(part, manifest_of(state(step, losses)))


@pytest.mark.parametrize(
    ("settings", "is_whole"),
    [
        ("context_parallel = 2\n", True),  # written by a run that was resumed since
        ("width = 2\nstages_per_rank = 0\n", True),
        ("", False),
    ],
)
def test_a_config_is_cut_if_it_lacks_what_its_checkpoint_has_under_todays_names(
    settings: str, is_whole: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(f"[topology]\n{settings}")
    part = folders.begin(tmp_path / CHECKPOINTS, 3)
    (part / "__0_0.distcp").write_bytes(b"1234")
    old = {"topology": {"width": 2, "stages_per_rank": 0}}
    newest = folders.publish(part, manifest_of(replace(state(3), settings=old)))
    lost = [f"{tmp_path / 'config.toml'} was cut, as by a crash: the settings of {newest} take its place"]
    assert describe_losses(tmp_path) == ([] if is_whole else lost)
    resumed = read_saved_settings(tmp_path)
    assert resumed is not None
    assert resumed.topology.context_parallel == 2


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    wanted = manifest_of(state(7, (2.5, 0.1 + 0.2)))
    assert Manifest.decode(wanted.encode(), "here") == wanted
    assert wanted.run.cost_model() == COSTS
    named = manifest_of(replace(state(7), validated_on="held out", first_weights="a base"))
    assert Manifest.decode(named.encode(), "here") == named
    oldest = {
        name: value
        for name, value in json.loads(named.encode()).items()
        if name not in ("validated_on", "first_weights", "checksum", "checksums")
    }
    assert Manifest.decode(json.dumps(oldest).encode(), "here") == replace(manifest_of(state(7)), checksums={})
    older = manifest_of(state(7, (9.0,) * 30 + (1.0,) * 10)).encode()  # a version that saved the losses of all steps
    assert Manifest.decode(older, "here").run.recent_losses == (1.0,) * 10
    skipped = Manifest.decode(manifest_of(state(7, (2.5, math.nan, 0.5))).encode(), "here").run
    assert math.isnan(skipped.recent_losses[1])
    assert skipped.score == (True, 1.5)


def test_the_newest_complete_checkpoint_is_the_latest_and_the_pointer_names_it(tmp_path: Path) -> None:
    for step in (9, 30, 100):
        saved(tmp_path / "root", step)
    folders.begin(tmp_path / "root", 200)  # never completed
    assert folders.latest(tmp_path / "root").name == "iter_0000100"
    assert (tmp_path / "root" / folders.POINTER).read_text() == "100"
    with pytest.raises(DataError, match="holds no complete checkpoint"):
        folders.latest(tmp_path / "nowhere")


def test_of_a_save_that_was_killed_the_old_checkpoint_comes_back_and_nothing_else_stays(tmp_path: Path) -> None:
    """Killed between the two renames: the old one is set aside, the new one has no name yet."""
    folder = saved(tmp_path, 3)
    folder.rename(tmp_path / f".{folder.name}{folders._OLD}")
    folders.begin(tmp_path, 3)
    folders.begin(tmp_path, 4)
    folders.tidy(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {folder.name, folders.POINTER}
    assert folders.latest(tmp_path) == folder


def test_all_that_a_checkpoint_holds_is_on_the_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int | str] = []  # inodes that reached the disk, and names that appeared
    sync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    folder = saved(tmp_path, 3)
    appears = events.index(folder.name)
    assert {one.stat().st_ino for one in (folder, *folder.iterdir())} <= set(events[:appears])
    assert tmp_path.stat().st_ino in events[appears:]
    pointer = tmp_path / folders.POINTER
    assert pointer.stat().st_ino in events[: events.index(pointer.name)]


@pytest.mark.parametrize(
    ("last", "best", "kept"),
    [(0, False, [1, 2, 3, 4]), (2, False, [3, 4]), (2, True, [2, 3, 4]), (1, True, [2, 4]), (9, True, [1, 2, 3, 4])],
)
def test_the_last_ones_and_the_best_stay(last: int, best: bool, kept: list[int], tmp_path: Path) -> None:
    for step, loss in ((1, 4.0), (2, 1.0), (3, 2.0), (4, 3.0)):
        saved(tmp_path, step, (loss,))
    folders.retain(tmp_path, last=last, best=best)
    assert [read_manifest(folder).run.step for folder in folders.checkpoints(tmp_path)] == kept


def test_a_validation_loss_judges_before_any_training_loss_and_comes_back(tmp_path: Path) -> None:
    for step, validation_loss in ((1, 4.0), (2, 3.0), (3, None), (4, math.nan), (5, None)):
        part = folders.begin(tmp_path, step)
        (part / "__0_0.distcp").write_bytes(b"1234")
        run = replace(state(step, (1.0 / step,)), validation_loss=validation_loss)
        folders.publish(part, manifest_of(run))
    assert [read_manifest(folder).run.validation_loss for folder in folders.checkpoints(tmp_path)] == [
        *(4.0, 3.0),
        *(None, None, None),
    ]
    folders.retain(tmp_path, last=1, best=True)
    assert [read_manifest(folder).run.step for folder in folders.checkpoints(tmp_path)] == [2, 5]


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([("a", 1.0), ("b", 5.0), ("b", 4.0), ("b", None)], 3),  # other data are harder
        ([("a", 5.0), ("b", 1.0), ("b", 2.0), ("b", None)], 2),
        ([("a", 2.0), ("a", 1.0), ("b", None), ("", None)], 2),  # nothing was validated since
        ([("", 1.0), ("b", 5.0), ("b", 4.0), ("b", None)], 1),  # of older versions
        ([("a", 1.0), ("b", math.inf), ("b", None), ("b", None)], 1),
    ],
)
def test_validation_losses_of_other_data_are_not_compared(
    evaluations: list[tuple[str, float | None]], best: int, tmp_path: Path
) -> None:
    for step, (validated_on, loss) in enumerate(evaluations, 1):
        part = folders.begin(tmp_path, step)
        (part / "__0_0.distcp").write_bytes(b"1234")
        run = replace(state(step, (9.0 - step,)), validation_loss=loss, validated_on=validated_on)
        folders.publish(part, manifest_of(run))
    assert read_manifest(folders.best(tmp_path)).run.step == best
    newest = evaluations[-1][0]
    losses = [loss for on, loss in evaluations if loss is not None and math.isfinite(loss) and newest in ("", on)]
    losses += [loss for on, loss in evaluations if not on and loss is not None]
    assert folders.least_validation_loss(tmp_path, newest) == min(losses, default=math.inf)
    assert folders.is_validated_anew(tmp_path, "b") == (evaluations[0][0] == "a")
    folders.retain(tmp_path, last=1, best=True)
    assert [read_manifest(folder).run.step for folder in folders.checkpoints(tmp_path)] == [best, 4]


def edited(root: Path, **fields: Any) -> Path:
    folder = saved(root, 3)
    edit_manifest(folder, **fields)
    return folder


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": "dynapipe-checkpoint/2"}, "has format 'dynapipe-checkpoint/2' but 'dynapipe-checkpoint/1' is read"),
        ({"step": "3"}, "step is '3', expected int"),
        ({"loader": None}, "loader is None, expected dict"),
        ({"tensors": {"weight": ["float32"]}}, "is damaged"),
        ({"files": {"../../etc/passwd": 4}}, "outside of its folder"),
        ({"files": {"gone.distcp": 4}}, "gone.distcp is missing but was saved with 4"),
        ({"files": {"__0_0.distcp": 5}}, "has 4 bytes but was saved with 5"),
    ],
)
def test_what_is_strange_is_refused_by_name(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, **fields)
    with pytest.raises(DataError) as refused:
        read_manifest(folder)
    assert says in str(refused.value)
    assert str(folder) in str(refused.value)


def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    data = (folder / MANIFEST).read_bytes()
    assert read_manifest(folder) == manifest_of(state(3, (1.0,)))
    for place in range(len(data)):
        with pytest.raises(DataError):
            Manifest.decode(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :], "here")
    manifest = manifest_of(state(3))
    assert folders.find_damaged(folder, manifest, manifest.files) == ""
    (folder / "__0_0.distcp").write_bytes(b"1235")
    assert f"{folder / '__0_0.distcp'} is damaged" in folders.find_damaged(folder, manifest, manifest.files)
    by_others = replace(manifest, checksums={"__0_0.distcp": "xxh3:0"})
    assert "cannot be checked" in folders.find_damaged(folder, by_others, by_others.files)


def test_a_folder_of_another_program_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    (folder / MANIFEST).unlink()
    with pytest.raises(DataError, match="is no checkpoint of dynapipe"):
        read_manifest(folder)


def test_another_model_is_refused_size_by_size(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hidden_size 32 where 64 is configured"):
        refuse_other_model({"hidden_size": 32, "num_layers": 4}, {"hidden_size": 64, "num_layers": 4}, tmp_path)


def test_costs_that_are_not_those_of_the_run_are_refused(tmp_path: Path) -> None:
    other = cost_model_to_json(TokenCosts(num_stages=2, ns_per_token=8))
    with pytest.raises(DataError, match="plans would differ"):
        read_manifest(edited(tmp_path, costs=other)).run.cost_model()


def test_the_model_of_a_checkpoint_by_another_version_is_the_same_where_they_differ_in_defaults_alone() -> None:
    """Older versions wrote every value that they knew, and did not know the later ones."""
    a = preset("llama-3.2-1b")
    now = a.to_json() | {"dtype": "float32"}
    older = json.loads(json.dumps(asdict(a) | {"dtype": "float32"}))
    del older["dense_layers"], older["attention_chunk"]
    for saved, configured in ((older, now), (now, older), (json.loads(json.dumps(now)), now)):
        refuse_other_model(saved, configured, Path("iter_1"))
    mixed = replace(preset("mixtral-8x7b"), dense_layers=(1, 3), dense_ffn_hidden_size=64)
    described = mixed.to_json()
    refuse_other_model(json.loads(json.dumps(described)), described, Path("iter_1"))
    with pytest.raises(DataError, match=r"dense_layers \(1, 3\) where \(1,\) is configured"):
        refuse_other_model(described, replace(mixed, dense_layers=(1,)).to_json(), Path("iter_1"))
    with pytest.raises(DataError, match="attention_chunk 64 where None is configured"):
        refuse_other_model({**older, "attention_chunk": 64}, now, Path("iter_1"))
