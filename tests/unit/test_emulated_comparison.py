"""The usual ways and ours run on emulated ranks; what `demo` and `quickstart` say of them is what was executed."""

from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.data.shipped_lengths import shipped_lengths
from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.emulated_step import emulated_step
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.emulated import EmulatedStage
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands import demo, quickstart, train
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    global_batches,
    make_planner,
)
from dynapipe_ext.launch.run import emulated
from dynapipe_ext.launch.run.emulated import PlannedJob, emulated_comparison
from dynapipe_ext.schedules.rivals import list_rivals
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Trace
from dynapipe_ext.tools.show.comparison import Comparison
from dynapipe_ext.tools.show.comparison_page import write_comparison_page
from tests.support.listeners import listeners_seen

LETTERS: dict[type, str] = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest step sleeps for 0.3 s, and is measured however late its ranks wake."""
    monkeypatch.setattr(emulated, "_LEAST_S", 0.3)
    monkeypatch.setattr(emulated, "_MOST_S", 0.3)
    monkeypatch.setattr(emulated, "_MOST_LATE", 100.0)


def quickstart_job(root: Path) -> PlannedJob:
    """That of the shipped file, with counted costs instead of measured ones."""
    config = TrainConfig.read(root / "launch/configs/quickstart.toml")
    costs = analytic_costs(config, architecture_of(config, 1024), flops_per_s=4e10, overhead_ns=3_000_000)
    lengths = shipped_lengths(2000, most=600)
    return PlannedJob(config=config, costs=costs, lengths=lengths, samples_from="samples", costs_from="costs")


def test_emulated_ranks_run_the_proven_programs_and_take_no_less_than_counted(root: Path) -> None:
    job = quickstart_job(root)
    planner = make_planner(job.config, job.costs)
    proven = prove_step(planner, sample_lengths(job.lengths[:60]), step=0)
    traces = emulated_step(proven, scale=0.5)
    assert max(span.end_s for trace in traces for span in trace.spans) >= 0.99 * proven.step_plan.makespan_s
    assert min(span.start_s for trace in traces for span in trace.spans) == 0
    for trace, plans, costs in zip(traces, proven.plans, proven.step_plan.costs, strict=True):
        assert {span.label[1] for span in trace.spans} >= {"F", "I", "W"}  # it splits, on a V of 8 stages
        assert {plan.stage_ranks for plan in plans} == {(0, 1, 2, 3, 3, 2, 1, 0)}
        counted = {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}
        for plan, spans in zip(plans, trace.by_rank().values(), strict=True):
            order = [f"{i.stage}{LETTERS[type(i)]}{i.micro_batch}" for i in plan.instructions if type(i) in LETTERS]
            assert [span.label for span in spans] == order
            assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(spans))
            for span in spans:
                stage, letter, micro_batch = re.split("([FBIW])", span.label)
                assert span.duration_s >= counted[letter][int(stage), int(micro_batch)] / 1e9 - 1e-6


@pytest.mark.parametrize("error", [ExecutionError("broken on purpose"), ZeroDivisionError("broken on purpose")])
def test_a_rank_that_fails_is_named_and_nobody_waits_for_it_for_ever(
    error: Exception, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every rank in its last actions, for which no other rank waits."""
    job = quickstart_job(root)
    proven = prove_step(make_planner(job.config, job.costs), sample_lengths(job.lengths[:20]), step=0)

    def breaks(*_: Any) -> None:
        raise error

    monkeypatch.setattr(EmulatedStage, "backward_weight", breaks)
    monkeypatch.setattr("dynapipe_ext.executor.emulated_step._SLACK_S", 0.5)
    with pytest.raises(type(error), match="broken on purpose"):
        emulated_step(proven, scale=0.01)


def test_the_shipped_run_pipelines_several_micro_batches_and_beats_every_rival_as_planned(
    root: Path, hasty: None
) -> None:
    """Real ranks share 2 cores, emulated ones share none."""
    job = quickstart_job(root)
    batches = global_batches(job.config, job.lengths, 0, drop_last=False)
    real = make_planner(job.config, job.costs, 2).plan(sample_lengths(job.lengths, batches[0]), step=0)
    assert min(len(replica.micro_batches) for replica in real.batch.replicas) >= 4
    comparison = emulated_comparison(job, num_batches=2)
    assert [way.name for way in comparison.ways] == [*(rival.name for rival in list_rivals(4)), "ours"]
    *rivals, ours = (way.predicted_s for way in comparison.ways)
    assert ours < min(rivals)
    assert not comparison.misfits
    for way in comparison.ways:
        assert way.step_s >= 0.99 * way.predicted_s
        for step, index in zip(way.steps, range(2), strict=True):  # the same samples in every way
            planned = [s.index for m in step.proven.step_plan.batch.micro_batches for s in m.samples]
            assert sorted(planned) == sorted(batches[index])


def test_a_rival_that_does_not_fit_is_left_out_with_its_reason_and_the_gain_is_over_the_best_that_does(
    root: Path, hasty: None
) -> None:
    """Three layers make no two stages per rank, and under the lower limit ours holds fewer micro-batches than 1F1B."""
    job = quickstart_job(root)
    linear = job.config.with_values(topology={"placement": "linear", "pp": 2}, model={"num_layers": 3})
    costs = analytic_costs(linear, architecture_of(linear, 1024), flops_per_s=4e10, overhead_ns=3_000_000)
    few_layers = replace(job, config=linear, costs=costs)
    comparison = emulated_comparison(few_layers, num_batches=1)
    assert [way.name for way in comparison.ways] == ["packed 1F1B", "ours"]
    reason = "3 layers cannot fill 4 stages: lower pp or add layers"
    assert comparison.misfits == {"packed interleaved 1F1B": reason, "packed ZB-V": reason}
    result = comparison.simulated().result  # whatever the machine does meanwhile
    assert "% less time than the best rival, packed 1F1B: ours " in result
    assert f"; packed ZB-V left out: {reason}" in result
    tight = linear.with_values(plan={"memory_limit_gb": 0.016})
    comparison = emulated_comparison(replace(few_layers, config=tight), num_batches=1)
    for way in comparison.ways:
        assert max(step.proven.peak_bytes for step in way.steps) <= tight.plan.memory_limit_bytes
    assert re.match(
        r"replica 0: 1f1b needs \d+ B on pipeline rank 0 but the limit is", comparison.misfits["packed 1F1B"]
    )
    assert ", no rival fits, so there is none to compare with: ours " in comparison.result


def test_a_machine_too_busy_to_measure_shows_the_planned_seconds_and_says_so(
    root: Path, hasty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "_MOST_LATE", 0.1)
    slept = emulated_step

    def late(proven: Any, *, scale: float) -> Any:
        return [
            Trace(tuple(replace(span, end_s=1.5 * span.end_s) for span in t.spans)) for t in slept(proven, scale=scale)
        ]

    monkeypatch.setattr(emulated, "emulated_step", late)
    comparison = emulated_comparison(quickstart_job(root), num_batches=1)
    assert comparison.late is not None
    assert comparison.late >= 0.49
    assert re.match(
        r"simulated, as this machine is too busy to measure: 8 emulated ranks .* up to \d+ % longer", comparison.how
    )
    for way in comparison.ways:
        assert way.step_s == pytest.approx(way.predicted_s)
        assert way.idle_ratio == pytest.approx(way.steps[0].proven.step_plan.bubble_ratio)
    (tmp_path / "index.html").write_text("<ul></ul><!-- files -->")  # of a run beside it
    write_comparison_page(tmp_path / "emulated.html", comparison)
    assert comparison.how[1:].replace("'", "&#x27;") in (tmp_path / "emulated.html").read_text()
    assert 'href="index.html"' in (tmp_path / "emulated.html").read_text()
    assert 'href="emulated.html"' in (tmp_path / "index.html").read_text()


def test_padding_to_the_longest_is_that_of_one_length_for_all() -> None:
    lengths = np.array([[3, 2, 5], [16, 1, 17], [2, 0, 2]])
    comparison = Comparison(
        ways=(),
        topology=None,
        batches=(lengths,),
        pad_multiple=8,
        samples="",
        costs="",
        scale=1,  # type: ignore[arg-type]
    )
    assert comparison.padded_ratio == pytest.approx(1 - 24 / (3 * 24))


def test_the_demo_compares_without_a_run_and_writes_its_page(
    hasty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with listeners_seen() as listeners:
        assert cli.main(["demo"]) == 0
    assert listeners == set()
    how, result, where = capsys.readouterr().out.splitlines()
    assert "8 emulated ranks (PP4 x DP2)" in how
    assert "times as slowly" in how
    assert "nothing is computed" in how
    said = re.fullmatch(
        r"the same samples, (?:\S+ % (?:less|MORE)|as much) time (?:than|as) the best rival, packed .*: ours (\S+) s,"
        r" packed 1F1B (\S+) s, packed interleaved 1F1B (\S+) s, packed ZB-V (\S+) s per step; padding (?:.* %, ){3}"
        r".* % \(.* % if all were padded to the longest\)",
        result,
    )
    assert said
    assert where == "page: runs/emulated.html"
    page = (tmp_path / "runs/emulated.html").read_text()
    assert result[1:] in page
    assert how[1:].replace("'", "&#x27;") in page
    assert all(f"<td>{figure} s</td>" in page for figure in said.groups())
    assert page.count('class="head"') == 4
    assert page.count('class="row"') == 4 * 8
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs nothing from elsewhere


def test_a_run_is_compared_by_its_own_settings_costs_and_samples(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs/none holds no run, as it has no config\.toml: name a run's directory"):
        demo.job_of_run(Path("runs/none"))
    job = quickstart_job(root)
    for table, fault in (
        ({"topology": {"pp": 1, "placement": ""}}, "pp is 1, so there is no pipeline"),
        ({"model": {"num_decoder_layers": 2}}, "an encoder-decoder's samples are not packed"),
        ({"preferences": {"loss": "dpo"}}, "pairs of answers are not packed"),
    ):
        config = job.config.with_values(**table)
        other = PlannedJob(config=config, costs=job.costs, lengths=job.lengths, samples_from="", costs_from="")
        with pytest.raises(ConfigError, match=fault):
            emulated_comparison(other)


@pytest.mark.parametrize(
    ("devices", "flags", "degrees"),
    [
        (0, [], None),
        (1, [], (1, 1, 1)),
        (2, [], (1, 2, 1)),
        (3, [], (1, 2, 1)),
        (4, [], (1, 2, 2)),
        (7, [], (1, 2, 2)),
        (8, [], None),
        (16, [], None),
        (4, ["--pp", "4"], None),
        (4, ["--config", "mine.toml"], None),
        (4, ["--resume", "latest"], None),
    ],
)
def test_ranks_that_nobody_counted_are_as_many_as_the_devices(
    devices: int,
    flags: list[str],
    degrees: tuple[int, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "sizes_of_devices", lambda visible: (80 << 30,) * devices)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(flags)
    train.take_devices(args)
    said = capsys.readouterr().err
    if degrees is None:
        assert (args.tp, args.dp, said) == (None, None, "")
    else:
        assert (args.tp, args.pp, args.dp) == degrees
        assert f"GPU{'s'[: devices > 1]} here: " in said
        assert f"TP{args.tp} x PP{args.pp} x DP{args.dp}) instead of 8" in said


def test_a_run_without_a_pipeline_is_compared_on_the_shipped_one(root: Path) -> None:
    job = quickstart_job(root)
    alone = PlannedJob(
        config=job.config.with_values(topology={"pp": 1, "dp": 1, "placement": ""}),
        costs=job.costs,
        lengths=job.lengths,
        samples_from="",
        costs_from="",
    )
    assert quickstart._with_pipeline(alone, job.config).config.topology == job.config.topology
