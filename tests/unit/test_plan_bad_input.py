"""What `dynapipe plan` is given and cannot use: one line that names it, and exit status 2."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.launch import cli
from dynapipe_ext.models.named_models import preset

LENGTHS = [40, 300, 17, 90, 120, 64, 33, 250]
SMALL = ["--tp", "1", "--pp", "2", "--dp", "2"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS, np.int64))
    return str(path)


def plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command leaves."""
    assert plan(*arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("dynapipe: error: ")
    assert text.count("\n") == 1
    assert len(text) < 600
    return text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--split-backward", "--schedule", "gpipe"],
            "split_backward goes with the adaptive schedule, not with 'gpipe'",
        ),
        (["--step", "99"], "--step is 99 but"),
        (["--step", "-1"], "1 global batch: give 0 to 0"),
        (["--index", "1"], "use --step with --lengths"),
        (["--tokens-per-batch", "299"], "sample 1 has 300 tokens but tokens_per_batch is 299"),
        (["--model", "gpt_6.7b"], "name it with --costs DIR"),
        (["--costs", "/nowhere.json", "--memory-limit-gb", "0.001"], "/nowhere.json cannot be read"),
        (["--costs", "."], "say which --model NAME"),
        (["--truncate", "0"], "--truncate is 0"),
        (["--pp", "9"], "4 layers cannot fill 9 stages"),
        (["--tp", "3"], "tp is 3 but does not divide"),
        (["--memory-limit-gb", "1e-06"], "B"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        *(
            (["--extra", enc, "0"], "--extra ENC is " + enc[:37])
            for enc in ("9223372036854775807", "-9223372036854775808", "9" * 60)
        ),
        (["--extra", "2147483647", "0"], "has 2147483687 and 0 positions but a side has at most 2^31"),
        (["--extra", "0", "5"], "--extra DEC is 5 but there is no decoder side to add it to: give 0, or add it to ENC"),
        (["--hidden-size", "32"], "--hidden-size is 32 but the model has 128: leave it out"),
        (["--truncate", "9" * 30], "--truncate is 999999"),
        (["--memory-limit-gb", "1e27"], "memory_limit_gb is 1e+27 but must be at least 1e-09 and at most"),
        (
            ["--memory-limit-gb", "1e-12"],
            "memory_limit_gb is 1e-12 but must be at least 1e-09",
        ),
        (["--memory-limit-gb", "1e300"], "memory_limit_gb is 1e+300"),
        (["--effort", "9" * 23], "effort is " + "9" * 23 + " but must be at least 0 and at most 1,000,000,000"),
        (["--pad-multiple", "9" * 23], "pad_multiple is 999"),
        (["--dp", "1000000000"], "dp is 1000000000 but must be at least 1 and at most 65,536"),
        (["--json", "/proc/plan.json"], "/proc/plan.json cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(
    lengths: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, "--lengths", lengths, *arguments)


def test_a_flag_that_says_other_than_the_costs_is_refused(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A width needs replicas, which costs of a pipeline alone do not bring."""
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(TokenCosts(2, transfer_bytes_per_token=32))))
    arguments = ["--lengths", lengths, "--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1"]
    for flag, value, says in (
        ("--context-parallel", "2", "context_parallel is 2 but must be a power of two that divides dp 1"),
        ("--hidden-size", "8", "--hidden-size is 8 but the costs have 16: leave it out"),
        ("--extra", "0 1", "--extra DEC is 1 but there is no decoder side"),
    ):
        assert says in refused(capsys, *arguments, flag, *value.split())
    assert plan(*arguments, "--hidden-size", "16", "--context-parallel", "auto") == 0
    counted = AnalyticCosts(preset("gpt2"), Topology(pp=2, dp=4), flops_per_s=1e12)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(counted)))
    capsys.readouterr()
    assert plan(*arguments[:-1], "100", "--context-parallel", "auto", "--effort", "10") == 0
    assert "of 4 data parallel ranks are one replica, each with a slice of every row, of 1, 2, 4" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_plan_is_shown_without_flags_that_would_change_it(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "plan.json")
    assert plan("--lengths", lengths, *SMALL, "--json", target) == 0
    text = refused(capsys, "--show", target, "--effort", "5", "--pp=2")
    assert f"--show {target} shows a plan as it is, and --effort, --pp would change one: leave out either" in text
    assert plan(f"--show={target}", "--json") == 0


def test_a_batch_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batches.json"
    for content, says in (
        ("[", "is not JSON (line 1"),
        ("{}", "holds dict"),
        ("[]", "holds 0 batches but --index is 0"),
        ('[{"length": []}]', 'needs "lengths"'),
        ('[{"lengths": [[1, -1]]}]', 'needs "lengths"'),
        ('[{"lengths": [[0, 1]]}]', "sample 0"),
        ('[{"lengths": [[4294967296, 1]]}]', "sample 0 has 4294967296 and 1 positions"),
        ('[{"lengths": [[%s, 1]]}]' % ("9" * 30), "object"),
        ('[{"lengths": [[%s, 1]]}]' % ("9" * 5000), "a number too long to be read"),
        ("[" * 100_000, "nests lists or objects too deep"),
    ):
        path.write_text(content)
        text = refused(capsys, "--batch", str(path))
        assert says in text
        assert str(path) in text or "4294967296" in content
    assert "not by step or size" in refused(capsys, "--batch", str(path), "--step", "1")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--lengths", "a", "--batch", "b"], ["--lengths", "a", "--tokens-per-batch", "1", "--batch-size", "1"]],
    ids=["no source", "two sources", "two sizes"],
)
def test_choices_that_exclude_one_another_are_refused_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments)
    assert caught.value.code == 2
    assert "usage: dynapipe plan" in capsys.readouterr().err


def test_json_that_nests_too_deep_is_one_line_for_every_reader(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(TokenCosts(2))))
    costs = ["--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1"]
    for command in (
        ["plan", "--lengths", lengths, "--costs", str(deep), "--memory-limit-gb", "0.001"],
        ["plan", "--show", str(deep)],
        ["check-plan", str(deep), *costs],
        ["show-schedule", str(deep)],
    ):
        assert cli.main(command) == 2
        text = capsys.readouterr().err
        assert "too deep to be read" in text
        assert text.count("\n") == 1


def test_a_plan_whose_seconds_are_no_numbers_is_not_shown(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    assert plan("--lengths", lengths, *SMALL, "--json", str(target)) == 0
    raw = json.loads(target.read_text())
    raw["replicas"][0]["predicted"]["bounds"]["chain_s"] = float("nan")
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    assert "chain is not a number" in refused(capsys, "--show", str(target))


def test_a_plan_without_a_peak_of_every_rank_is_not_shown(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    assert plan("--lengths", lengths, *SMALL, "--json", str(target)) == 0
    raw = json.loads(target.read_text())
    raw["replicas"][1]["predicted"]["peak_bytes"].pop()
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    assert f"{target}: replica 1 has peak_bytes of 1 ranks but pp is 2" in refused(capsys, "--show", str(target))


def test_a_plan_that_cuts_samples_is_not_written(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """dynapipe-plan/1 names samples; pieces of one would look like the sample twice."""
    (tmp_path / "job.toml").write_text('[plan]\nsplit_policy = "fixed-rows"\nmax_tokens = 64\nlayout = "packed"\n')
    arguments = ["--lengths", lengths, *SMALL, "--config", str(tmp_path / "job.toml")]
    assert plan(*arguments) == 0
    capsys.readouterr()
    target = tmp_path / "plan.json"
    text = refused(capsys, *arguments, "--json", str(target))
    assert re.search(r"cuts sample \d+ into pieces, which dynapipe-plan/1 cannot hold", text)
    assert json.loads(target.read_text()).keys() == {"error", "status"}
