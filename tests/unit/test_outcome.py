"""What a run leaves says which order its predicted timeline has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.launch.run.outcome import _other_loss, keeping_what_ran, page_notes


@pytest.mark.parametrize(("error", "says"), [(KeyboardInterrupt(), True), (SystemExit(143), True), (OSError(), False)])
def test_a_run_that_is_ended_before_its_first_step_says_that_nothing_was_saved(
    error: BaseException, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), RunDirectory(str(tmp_path / "run")) as directory, keeping_what_ran(directory):
        raise error
    assert ("ended before the first step: nothing was saved" in capsys.readouterr().err) == says


@pytest.mark.parametrize(("cores", "count"), [(None, 0), (2, 1)])
def test_the_page_says_where_ranks_share_cores(cores: int | None, count: int) -> None:
    assert len(page_notes(8, cores)) == count


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("dpo", "dpo", ""),
        ("dpo", "ipo", ", by the loss ipo instead of dpo"),
        ("", "orpo", ", by the loss orpo instead of that of texts"),
    ],
)
def test_a_run_that_goes_on_by_another_loss_says_so(
    before: Any, now: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = SimpleNamespace(run=SimpleNamespace(settings={"preferences": {"loss": before}}))
    monkeypatch.setattr("dynapipe_ext.launch.run.outcome.read_manifest", lambda folder: manifest)
    config = SimpleNamespace(preferences=SimpleNamespace(loss=now))
    job: Any = SimpleNamespace(config=config, resumed=Path("saved"))
    assert _other_loss(job) == words
