"""`dynapipe plan`: lengths of every form in, a plan on the screen and in a file out; no torch, no ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FittedTimes, TimeCorrection, adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands.plan_inputs import read_lengths
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.show.plan import list_orders
from tests.support.limits import LIMIT_S
from tests.support.measured import measured_csv

LENGTHS = [40, 300, 17, 90, 120, 64, 33, 250]
SMALL = ["--tp", "1", "--pp", "2", "--dp", "2"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS, np.int64))
    return str(path)


def plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def planned(path: Path) -> dict[str, Any]:
    """The plan in a file, which must be one that the reader proves to run."""
    assert list_orders(read_plan_file(path))
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


def samples(raw: dict[str, Any]) -> list[int]:
    return sorted(s for replica in raw["replicas"] for m in replica["micro_batches"] for s in m["samples"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command leaves."""
    assert plan(*arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("dynapipe: error: ")
    assert text.count("\n") == 1
    return text


def test_a_plan_is_shown_with_shapes_certificate_and_timeline(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--lengths", lengths, *SMALL, "--layout", "padded") == 0
    text = capsys.readouterr().out
    assert f"8 samples, {sum(LENGTHS):,} tokens" in text
    assert "default rates (50 GFLOP/s" in text
    for words in ("Replica 1: padded", "rows x length", "makespan", "lower bound", "gap to the bound", "bubble"):
        assert words in text
    for words in ("padding efficiency", "peak bytes of pipeline rank 1", "in flight at most", "planning took"):
        assert words in text
    timeline = [line for line in text.splitlines() if line.startswith(("0 |", "1 |"))]
    assert len(timeline) == 4  # two pipeline ranks in each of two replicas
    assert timeline[0].startswith("0 |0")
    assert "\x1b" not in text  # no colours in a pipe


def test_the_certificate_is_shown_and_written(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert plan("--lengths", lengths, *SMALL, "--layout", "padded", "--json", str(target)) == 0
    shown = capsys.readouterr().out
    rows = (
        "busiest rank's work",
        "longest chain",
        "preemptive",
        "bytes x time",
        "any plan of this batch",
        "above that",
    )
    for words in ("Certificate: nothing ends before", *rows):
        assert words in shown
    raw = planned(target)
    makespan_s = max(replica["predicted"]["makespan_s"] for replica in raw["replicas"])
    assert 0 < raw["batch_bound_s"] <= makespan_s
    for replica in raw["replicas"]:
        bounds = replica["predicted"]["bounds"]
        assert set(bounds) == {"stage_s", "chain_s", "heads_tails_s", "byte_time_s"}
        assert 0 < max(bounds.values()) <= replica["predicted"]["makespan_s"]
        assert max(bounds["stage_s"], bounds["chain_s"]) <= bounds["heads_tails_s"]
    assert plan("--show", str(target)) == 0
    again = capsys.readouterr().out
    assert shown[shown.index("Certificate") : shown.index("as JSON in")] == again[again.index("Certificate") :]


def test_a_reader_of_the_output_that_has_gone_takes_no_file_with_it(lengths: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", "plan", "--lengths", lengths, *SMALL]
    with os.fdopen(writer, "w") as closed:
        subprocess.run(
            [*command, "--json", str(target)], stdout=closed, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        )
    assert samples(planned(target)) == list(range(len(LENGTHS)))


def test_the_json_file_trains_every_sample_once(lengths: str, tmp_path: Path) -> None:
    for layout in ("padded", "packed"):
        target = tmp_path / f"{layout}.json"
        assert plan("--lengths", lengths, *SMALL, "--layout", layout, "--json", str(target)) == 0
        raw = planned(target)
        assert samples(raw) == list(range(len(LENGTHS)))
        assert {m["layout"] for replica in raw["replicas"] for m in replica["micro_batches"]} == {layout}
        assert (raw["topology"]["tp"], raw["topology"]["pp"], raw["topology"]["dp"]) == (1, 2, 2)


def test_the_same_arguments_write_the_same_bytes(lengths: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert plan("--lengths", lengths, *SMALL, "--json", str(tmp_path / name)) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_step_is_the_global_batch_that_training_would_take(lengths: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    for size, number in (("tokens-per-batch", 400), ("batch-size", 3)):
        batches = GlobalBatches(np.array(LENGTHS), **{size.replace("-", "_"): number}, seed=5)
        for step, batch in enumerate(batches):
            arguments = ["--lengths", lengths, f"--{size}", str(number), "--seed", "5", "--step", str(step)]
            assert plan(*arguments, *SMALL, "--json", str(target)) == 0
            assert samples(planned(target)) == sorted(batch)


def test_samples_that_a_run_would_hold_out_are_planned_and_said(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("[eval]\nfraction = 0.25\nevery = 5\n")
    (tmp_path / "batches.json").write_text(json.dumps([{"lengths": [[one, 0] for one in LENGTHS]}]))
    for source, is_said in (["--lengths", lengths], True), (["--batch", str(tmp_path / "batches.json")], False):
        assert plan(*source, *SMALL, "--config", str(tmp_path / "mine.toml")) == 0
        text = capsys.readouterr().out
        assert (
            "lengths: a run holds out [eval] fraction 0.25 of them, so its steps have other samples" in text
        ) == is_said


def test_a_placement_is_planned_proven_and_written(lengths: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert plan("--lengths", lengths, *SMALL, "--placement", "v", "--effort", "50", "--json", str(target)) == 0
    raw = planned(target)
    assert [replica["schedule"]["placement"] for replica in raw["replicas"]] == [[0, 1, 1, 0]] * 2
    assert samples(raw) == list(range(len(LENGTHS)))


def test_auto_shows_what_every_placement_gives_and_takes_the_best(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    flags = ["--placement", "auto", "--effort", "100", "--json", str(target)]
    assert plan("--lengths", lengths, *SMALL, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if any(name in line for name in ("linear", "interleaved,", "v, "))]
    assert len(shown) == 3
    found = max(replica["predicted"]["makespan_s"] for replica in planned(target)["replicas"])
    assert f"{1e3 * found:.1f} ms" in shown[0]


def test_costs_of_fixed_stages_cannot_be_placed_anew(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(TokenCosts(num_stages=2))))
    flags = ["--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1", "--hidden-size", "8", "--pp", "2"]
    text = refused(capsys, "--lengths", lengths, *flags, "--placement", "auto")
    assert "TokenCosts price stages as they are" in text


def test_placements_are_compared_by_the_costs_before_a_fit_which_holds_for_one_of_them_alone(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = AnalyticCosts(replace(preset("gpt2"), num_layers=4), Topology(pp=2).with_layers(4), flops_per_s=1e12)
    fitted = adjust(counted, fitted=FittedTimes(({"F": TimeCorrection(0.1), "B": TimeCorrection(0.1)},) * 2))
    trials, makespans = [], []
    for name, costs in (("counted", counted), ("fitted", fitted)):
        (tmp_path / f"{name}.json").write_text(json.dumps(cost_model_to_json(costs)))
        target = tmp_path / f"{name}-plan.json"
        flags = ["--costs", str(tmp_path / f"{name}.json"), "--memory-limit-gb", "100", "--pp", "2", "--effort", "10"]
        assert plan("--lengths", lengths, *flags, "--placement", "auto", "--json", str(target)) == 0
        lines = capsys.readouterr().out.splitlines()
        trials.append([line for line in lines if line.lstrip("│ ").startswith(("linear", "interleaved,", "v, "))])
        makespans.append(max(replica["predicted"]["makespan_s"] for replica in planned(target)["replicas"]))
    assert len(trials[0]) == 3
    assert trials[0] == trials[1]
    is_fitted = "linear" in trials[0][0] and "2,2" in trials[0][0]
    assert makespans[1] == pytest.approx((0.1 if is_fitted else 1.0) * makespans[0], rel=0.2)


def test_long_samples_run_in_pieces_where_a_flag_or_a_file_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "long.npy", np.array([9000, 40, 300, 17, 2600, 64]))
    asked = ["--lengths", str(tmp_path / "long.npy"), *SMALL, "--tokens-per-batch", "20000", "--memory-limit-gb", "40"]
    (tmp_path / "pieces.toml").write_text('[model]\nmax_seq_len = 16384\n[plan]\npieces = "auto"\n')
    (tmp_path / "whole.toml").write_text("[model]\nmax_seq_len = 16384\n")
    found = {}
    for name, more in (
        ("off", ["--config", str(tmp_path / "whole.toml")]),
        ("auto", ["--config", str(tmp_path / "pieces.toml")]),
        ("2048", ["--config", str(tmp_path / "whole.toml"), "--pieces", "2048"]),
    ):
        path = tmp_path / f"{name}.json"
        assert plan(*asked, *more, "--json", str(path)) == 0
        found[name] = planned(path)
        carried = [m for r in found[name]["replicas"] for m in r["micro_batches"] if "carried" in m]
        assert bool(carried) == (name != "off")
    longest_s = {name: max(r["predicted"]["makespan_s"] for r in raw["replicas"]) for name, raw in found.items()}
    assert longest_s["auto"] < longest_s["off"]
    capsys.readouterr()
    judge = ["check-plan", str(tmp_path / "auto.json"), "--config", str(tmp_path / "whole.toml")]
    judge += ["--lengths", str(tmp_path / "long.npy"), "--memory-limit-gb", "40"]
    assert cli.main(judge) == 0, capsys.readouterr().out
    assert "choose from off, auto, or a whole number" in refused(capsys, *asked, "--pieces", "some")


def test_a_written_plan_can_be_shown_again(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert plan("--lengths", lengths, *SMALL, "--json", str(target)) == 0
    first = capsys.readouterr().out
    assert plan("--show", str(target)) == 0
    again = capsys.readouterr().out
    # Word by word: how long planning took, which the first output alone says, widens its column.
    rows = [line.split() for line in first.splitlines() if "makespan" in line or "peak bytes" in line]
    assert rows
    assert all(row in [line.split() for line in again.splitlines()] for row in rows)
    assert "0: 0F0" in again
    target.write_text('{"format": "dynapipe-plan/9"}')
    assert "dynapipe-plan/1" in refused(capsys, "--show", str(target))


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("5\n9\n", [[5, 0, 5], [9, 0, 9]]),
        ("5 2\n\n9 3\n", [[5, 2, 2], [9, 3, 3]]),
    ],
)
def test_a_text_of_lengths_is_read(tmp_path: Path, text: str, table: list[list[int]]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert read_lengths(path).tolist() == table


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_arrays_of_one_two_and_three_columns_are_read(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "lengths.npy"
    array = np.array([[7, 3, 2], [8, 4, 3]])[:, :columns]
    np.save(path, array[:, 0] if columns == 1 else array)
    wanted = {1: [[7, 0, 7], [8, 0, 8]], 2: [[7, 3, 3], [8, 4, 4]], 3: [[7, 3, 2], [8, 4, 3]]}
    assert read_lengths(path).tolist() == wanted[columns]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "5\nfive\n", "line 2 is 'five'"),
        ("a.txt", "5\n-5\n", "line 2 is '-5'"),
        ("a.txt", "9" * 5000, "line 1 is '9{36}... but must be one length"),
        ("a.txt", "1 2 3\n", "line 1 is '1 2 3'"),
        ("a.txt", "5\n5 2\n", "one and of two lengths"),
        ("a.txt", "\n", "has no lengths"),
        ("a.txt", "0\n", "sample 0"),
        ("a.npy", "no array", "cannot be read as lengths"),
        ("a.npy", None, "No such file"),
    ],
)
def test_lengths_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value)


def test_an_array_of_numbers_with_fractions_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([1.5]))
    with pytest.raises(DataError, match=r"lengths\.npy: lengths have dtype float64"):
        read_lengths(tmp_path / "lengths.npy")


def test_two_lengths_become_one_row_of_a_decoder_only_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.txt").write_text("30 10\n9 90\n50 2\n")
    arguments = ["--lengths", str(tmp_path / "pairs.txt"), *SMALL, "--truncate", "60", "--pad-multiple", "1"]
    assert plan(*arguments, "--layout", "padded", "--json", str(tmp_path / "plan.json")) == 0
    text = capsys.readouterr().out
    assert "joined to one row" in text
    assert "1 of 3 cut at 60" in text
    assert f"{40 + 60 + 52} tokens" in text
    raw = planned(tmp_path / "plan.json")
    assert {m["decoder_len"] for replica in raw["replicas"] for m in replica["micro_batches"]} == {0}


@pytest.mark.parametrize(
    ("model", "extra", "needs"),
    [
        ("gpt_6.7b", (-1, 0), [(29, 0), (1, 0), (99, 0), (59, 0)]),
        ("t5_11b", (0, 2), [(30, 12), (1, 11), (100, 2), (60, 7)]),
    ],
)
def test_a_measured_batch_is_planned_with_its_extra_positions(
    tmp_path: Path, model: str, extra: tuple[int, int], needs: list[tuple[int, int]]
) -> None:
    decoder = model == "t5_11b"
    measured_csv(tmp_path, model, decoder=decoder)
    pairs = [[30, 10 * decoder], [1, 9 * decoder], [100, 0], [60, 5 * decoder]]
    (tmp_path / "batches.json").write_text(json.dumps([{"lengths": [[5, 5]]}, {"lengths": pairs}]))
    command = f"--model {model} --layers 4 --index 1 --tp 1 --pp 2 --dp 1 --memory-limit-gb 36 --layout padded".split()
    files = ["--costs", str(tmp_path), "--batch", str(tmp_path / "batches.json"), "--json", str(tmp_path / "plan.json")]
    assert plan(*command, *files, "--extra", *map(str, extra)) == 0
    raw = planned(tmp_path / "plan.json")
    assert samples(raw) == [0, 1, 2, 3]
    for m in raw["replicas"][0]["micro_batches"]:
        # Rows of measured tables are as long as their longest sample: nothing is rounded up.
        assert (m["encoder_len"], m["decoder_len"]) == tuple(
            max(needs[s][side] for s in m["samples"]) for side in (0, 1)
        )
    (tmp_path / "run.toml").write_text("[plan]\npad_multiple = 4\n")
    assert plan(*command, *files, "--extra", *map(str, extra), "--config", str(tmp_path / "run.toml")) == 0
    assert all(m["encoder_len"] % 4 == 0 for m in planned(tmp_path / "plan.json")["replicas"][0]["micro_batches"])


def test_a_cost_file_brings_its_own_topology(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(cost_model_to_json(TokenCosts(num_stages=3, transfer_bytes_per_token=16))))
    arguments = ["--lengths", lengths, "--costs", str(costs), "--memory-limit-gb", "1"]
    assert plan(*arguments, "--json", str(tmp_path / "plan.json")) == 0
    assert planned(tmp_path / "plan.json")["topology"]["pp"] == 3
    assert plan(*arguments, "--context-parallel", "auto", "--json", str(tmp_path / "plan.json")) == 0
    assert planned(tmp_path / "plan.json")["topology"]["pp"] == 3
    capsys.readouterr()
    assert plan(*arguments) == 0
    assert f"TokenCosts from {costs}" in capsys.readouterr().out
    assert "3 stages but the topology has 2" in refused(capsys, *arguments, *SMALL)
    costs.write_text("[]")
    assert "give a cost model written as JSON" in refused(capsys, *arguments)
    costs.write_text("{}")
    assert "kind None" in refused(capsys, *arguments)


def test_messages_are_as_large_as_the_costs_or_a_flag_say_and_never_none(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, target = tmp_path / "costs.json", tmp_path / "plan.json"
    arguments = ["--lengths", lengths, "--costs", str(costs), "--memory-limit-gb", "1", "--json", str(target)]
    costs.write_text(json.dumps(cost_model_to_json(TokenCosts(2))))
    assert "how large the messages between ranks are" in refused(capsys, *arguments)
    assert "--hidden-size is 0 but must be 1 to" in refused(capsys, *arguments, "--hidden-size", "0")
    in_flight = []
    for bytes_per_token, flags in ((0, ["--hidden-size", "8"]), (32, [])):  # in float32, the configured dtype
        costs.write_text(json.dumps(cost_model_to_json(TokenCosts(2, transfer_bytes_per_token=bytes_per_token))))
        assert plan(*arguments, *flags) == 0
        in_flight.append([replica["predicted"]["in_flight_bytes"] for replica in planned(target)["replicas"]])
    assert in_flight[0] == in_flight[1]
    assert min(num_bytes for replica in in_flight[0] for num_bytes in replica) > 0


def test_planning_needs_no_torch(lengths: str) -> None:
    script = (
        "import sys\nfrom dynapipe_ext.launch import cli\n"
        f"assert cli.main(['plan', '--lengths', {lengths!r}]) == 0\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'redis', 'megatron'})"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert output.stdout.splitlines()[-1] == "set()"


def test_a_plan_has_the_same_bytes_under_other_hash_seeds_and_numbers_of_threads(tmp_path: Path) -> None:
    measured_csv(tmp_path, "gpt_6.7b", decoder=False)
    sizes = [[1 + 37 * i % 311, 0] for i in range(24)]
    (tmp_path / "batches.json").write_text(json.dumps([{"lengths": sizes}]))
    shape = [
        "--model",
        "gpt_6.7b",
        "--layers",
        "4",
        "--tp",
        "1",
        "--pp",
        "2",
        "--dp",
        "2",
        "--memory-limit-gb",
        "36",
        "--layout",
        "padded",
        "--effort",
        "300",
    ]
    files = ["--costs", str(tmp_path), "--batch", str(tmp_path / "batches.json")]
    runs = []
    for number in ("1", "2"):
        command = [sys.executable, "-m", "dynapipe_ext.launch.cli", "plan", *shape, *files]
        runs.append(
            subprocess.Popen(
                [*command, "--json", str(tmp_path / f"{number}.json")],
                env={**os.environ, "PYTHONHASHSEED": number, "OMP_NUM_THREADS": number},
                stdout=subprocess.DEVNULL,
            )
        )
    assert [run.wait(timeout=LIMIT_S) for run in runs] == [0, 0]
    one, other = ((tmp_path / f"{number}.json").read_bytes() for number in ("1", "2"))
    assert one == other
    assert samples(json.loads(one)) == list(range(len(sizes)))


@pytest.mark.parametrize("flag", ["--context-parallel", "--cp"])
def test_data_parallel_ranks_join_by_either_flag_or_as_the_step_needs(
    flag: str, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    common = ["--lengths", lengths, *SMALL, "--layout", "packed", "--effort", "50"]
    assert plan(*common, flag, "2", "--json", str(file)) == 0
    assert "width: 2 of 2 data parallel ranks are one replica" in capsys.readouterr().out
    assert (planned(file)["topology"]["width"], len(planned(file)["replicas"])) == (2, 1)
    assert cli.main(["check-plan", str(file), "--lengths", lengths]) == 0
    assert "is valid" in capsys.readouterr().out
    if flag == "--context-parallel":
        assert plan(*common, flag, "auto") == 0
        assert "of every row, of 1, 2" in " ".join(capsys.readouterr().out.split())
    for width in ("3", "4"):
        assert f"[topology] context_parallel is {width} but must be a power of two that divides dp 2" in refused(
            capsys, *common, flag, width
        )
