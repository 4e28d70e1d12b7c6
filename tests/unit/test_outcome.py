"""What a run leaves says which order its predicted timeline has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.launch.run.outcome import _other_loss, filled_trace, keeping_what_ran, page_notes
from dynapipe_ext.schedules.judge.filling import filling_makespan_ns, with_room_to_fill
from dynapipe_ext.schedules.judge.simulate import peak_bytes, simulate
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.tables.published import published_schedule

SIZES = (400, 30, 220, 90, 310, 15, 120, 60)
MICRO_BATCHES = [MicroBatch((sample,)) for sample in sample_lengths(SIZES)]
COSTS = TokenCosts(4, ns_per_token_squared=20, transfer_ns_per_token=300, stage_scale=(1.0, 0.8, 1.1, 1.3))


def test_the_predicted_timeline_of_ranks_that_fill_their_waits_is_theirs() -> None:
    schedule, costs = published_schedule("zb-h1", 4, len(SIZES)), COSTS.evaluate(MICRO_BATCHES)
    trace = filled_trace(schedule, costs)
    promised = with_room_to_fill(schedule, costs)
    assert round(trace.makespan_s * 1e9) == filling_makespan_ns(promised, costs)
    assert trace.name == schedule.name
    moved = 0
    for rank, actions in enumerate(schedule.ranks):
        spans = trace.by_rank()[rank]
        assert sorted(span.label for span in spans) == sorted(map(str, actions))
        assert max(span.num_bytes for span in spans) <= peak_bytes(schedule, costs)[rank]
        moved += [span.label for span in spans] != [str(action) for action in actions]
    assert moved


@pytest.mark.parametrize(("error", "says"), [(KeyboardInterrupt(), True), (SystemExit(143), True), (OSError(), False)])
def test_a_run_that_is_ended_before_its_first_step_says_that_nothing_was_saved(
    error: BaseException, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), RunDirectory(str(tmp_path / "run")) as directory, keeping_what_ran(directory):
        raise error
    assert ("ended before the first step: nothing was saved" in capsys.readouterr().err) == says


def test_whole_backwards_have_nothing_to_fill_waits_with() -> None:
    schedule, costs = one_f_one_b(4, len(SIZES)), COSTS.evaluate(MICRO_BATCHES)
    assert filled_trace(schedule, costs) == simulate(schedule, costs)


@pytest.mark.parametrize(("cores", "fill", "count"), [(None, True, 0), (None, False, 0), (2, False, 1), (2, True, 2)])
def test_the_page_says_where_filled_waits_are_not_simulated(cores: int | None, fill: bool, count: int) -> None:
    notes = page_notes(8, cores, fill_waits=fill)
    assert len(notes) == count
    assert any("The simulated timeline does not" in note for note in notes) == (count == 2)


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
