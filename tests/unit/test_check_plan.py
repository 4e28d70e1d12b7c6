"""`dynapipe check-plan`: sound plans pass; damaged ones and overstated claims are refused, each for its reason."""

from __future__ import annotations

import ast
import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.launch import cli
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.check import check_plan
from dynapipe_ext.tools.check.plan_file import BOUNDS, ShapeFile
from tests.support.limits import LIMIT_S

SHARED = Path(__file__).resolve().parents[3] / "shared"
PAIRS = {"gpt_6.7b": [[30, 0], [200, 0], [77, 0], [55, 0], [120, 0], [9, 0], [300, 0], [41, 0]],
         "t5_11b": [[30, 12], [200, 60], [77, 5], [55, 31], [120, 18], [9, 70]]}  # fmt: skip
EXTRA = {"gpt_6.7b": ("-1", "0"), "t5_11b": ("0", "2")}
Raw = dict[str, Any]


def measured_csv(folder: Path, model: str) -> None:
    """Tables in the measured form, uneven enough that no two sizes cost alike."""
    layers = ("encoder", "decoder", "postprocess") if model == "t5_11b" else ("encoder", "postprocess")
    time: list[list[object]] = [
        ["tp", "recompute", "layer", "pass", "micro_batch_size", "encoder_len", "decoder_len", "ms"]
    ]
    memory: list[list[object]] = [[*time[0][:3], "kind", *time[0][4:7], "mb"]]
    for recompute, again in (("none", 2.0), ("selective", 2.4), ("full", 3.1)):
        for layer in layers:
            decoder = (16, 128) if layer == "decoder" else (0,)
            for rows, enc, dec in itertools.product((1, 4, 16), (16, 128, 512), decoder):
                tokens = rows * (enc + dec)
                for name, factor in (("forward", 1.0), ("backward", again)):
                    ms = 0.2 + factor * (1e-3 * tokens + 1e-6 * rows * enc**2)
                    time.append([1, recompute, layer, name, rows, enc, dec, ms])
                if layer != "postprocess":
                    memory.append([1, recompute, layer, "stored", rows, enc, dec, tokens / again])
                    memory.append([1, recompute, layer, "peak", rows, enc, dec, 1.5 * tokens])
    sizes: list[list[object]] = [["tp", "recompute", "layer", "mb"]]
    sizes += [[1, "none", name, 10] for name in ("embedding", *layers[:-1])]
    for suffix, rows_of in (("time_ms", time), ("activation_mb", memory), ("parameters_mb", sizes)):
        with (folder / f"{model}_{suffix}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows_of)


def given(folder: Path, model: str, **other: str) -> list[str]:
    """The flags that plan and check-plan have in common."""
    flags = {"--costs": str(folder), "--model": model, "--layers": "4", "--memory-limit-gb": "20"}
    flags |= {"--batch": str(folder / "batches.json"), "--index": "1", **other}
    return [word for pair in flags.items() for word in pair] + ["--extra", *EXTRA[model]]


HALVES = ("--split-backward", "--layers-per-stage", "2.5,1.5")  # and half layers
PLANNED = [("gpt_6.7b", HALVES), *itertools.product(("gpt_6.7b", "t5_11b"), ((), ("--split-backward",)))]


def made(folder: Path, model: str, *more: str, dp: int = 2) -> Raw:
    """A plan by `dynapipe plan`, with the tables and the batch beside it."""
    measured_csv(folder, model)
    (folder / "batches.json").write_text(json.dumps([{"lengths": [[5, 5]]}, {"lengths": PAIRS[model]}]))
    size = ["--tp", "1", "--pp", "2", "--dp", str(dp), "--layout", "padded"]
    target = folder / "plan.json"
    assert cli.main(["plan", *given(folder, model), *size, *more, "--json", str(target)]) == 0
    raw: Raw = json.loads(target.read_text())
    return raw


def checked(folder: Path, raw: Raw, model: str, capsys: pytest.CaptureFixture[str], **other: str) -> tuple[int, Raw]:
    """Exit status and verdict."""
    (folder / "again.json").write_text(json.dumps(raw))
    capsys.readouterr()
    status = cli.main(["check-plan", str(folder / "again.json"), *given(folder, model, **other), "--json"])
    verdict: Raw = json.loads(capsys.readouterr().out)
    return status, verdict


@pytest.mark.parametrize(("model", "more"), PLANNED, ids=str)
def test_a_plan_is_found_to_be_what_it_claims(
    model: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = made(tmp_path, model, *more)
    status, verdict = checked(tmp_path, raw, model, capsys)
    assert (status, verdict["valid"], verdict["faults"]) == (0, True, [])
    assert 0 < verdict["batch_bound_s"] <= verdict["bound_s"] <= verdict["makespan_s"]
    assert verdict["gap"] == verdict["makespan_s"] / verdict["bound_s"] - 1
    named = {figure["what"] for figure in verdict["figures"] if figure["claimed"] is not None}
    assert named >= {*(f"{name} bound" for name in BOUNDS), "makespan", "bound of every plan", "lower bound"}
    for figure in verdict["figures"]:
        assert figure["claimed"] == pytest.approx(figure["found"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("model", "more"), PLANNED, ids=str)
def test_the_check_agrees_with_an_independent_judge(
    model: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = SHARED / "judge_plan.py"
    if not judge.exists():
        pytest.skip("there is no judge beside the repository")
    raw = made(tmp_path, model, *more)
    _, verdict = checked(tmp_path, raw, model, capsys)
    judged = judgement(judge, tmp_path / "plan.json", given(tmp_path, model))
    assert judged["valid"]
    assert verdict["makespan_s"] == pytest.approx(judged["makespan_s"], abs=2e-6)
    assert verdict["batch_bound_s"] >= judged["batch_bound_s"] - 2e-6
    if not more:  # of split backwards the judge leaves out the last W
        assert verdict["batch_bound_s"] == pytest.approx(judged["batch_bound_s"], abs=2e-6)
    peaks = [figure["found"] / 1e6 for figure in verdict["figures"] if figure["what"].startswith("peak")]
    assert peaks == pytest.approx([peak for replica in judged["replicas"] for peak in replica["peak_mb"]], abs=0.06)
    raw["replicas"][0]["schedule"]["stages"][0].reverse()
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    assert not judgement(judge, tmp_path / "plan.json", given(tmp_path, model))["valid"]
    assert checked(tmp_path, raw, model, capsys)[0] == 1


def judgement(judge: Path, plan: Path, flags: list[str]) -> Raw:
    """What the judge says, who takes the limit in 10^6 bytes."""
    at = flags.index("--memory-limit-gb")
    flags = [*flags[:at], "--memory-mb", str(1000 * int(flags[at + 1])), *flags[at + 2 :]]
    done = subprocess.run(
        [sys.executable, str(judge), *flags, "--plan", str(plan)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode < 2, done.stderr
    line: Raw = json.loads(done.stdout)
    return line


def _swap_samples(raw: Raw) -> None:
    """A short and a long sample change places between micro-batches of unequal lengths."""
    every = [m for replica in raw["replicas"] for m in replica["micro_batches"]]
    short, long = min(every, key=lambda m: m["encoder_len"]), max(every, key=lambda m: m["encoder_len"])
    longest = next(s for s in long["samples"] if PAIRS["gpt_6.7b"][s][0] - 1 == long["encoder_len"])
    other = short["samples"][0]
    short["samples"][0], long["samples"][long["samples"].index(longest)] = longest, other


def _first(raw: Raw) -> Raw:
    replica: Raw = raw["replicas"][0]
    return replica


def _claim(*path: str | int, factor: float) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        place: Any = raw
        for step in path[:-1]:
            place = place[step]
        value = place[path[-1]] * factor
        place[path[-1]] = round(value) if isinstance(place[path[-1]], int) else value

    return change


def _deadlock(raw: Raw) -> None:
    """Rank 1 asks for the last forward before it gives the first gradient back; rank 0 waits for that gradient."""
    stages = _first(raw)["schedule"]["stages"]
    last = f"1F{len(_first(raw)['micro_batches']) - 1}"
    stages[1].remove(last)
    stages[1].insert(0, last)
    stages[0][:] = [f"0{kind}{m}" for m in range(len(_first(raw)["micro_batches"])) for kind in "FB"]


PREDICTED = ("replicas", 0, "predicted")
MUTATIONS: dict[str, tuple[Callable[[Raw], None], str]] = {
    "a sample dropped": (lambda raw: _first(raw)["micro_batches"][0]["samples"].pop(), "is in no micro-batch"),
    "a sample twice": (
        lambda raw: _first(raw)["micro_batches"][0]["samples"].append(
            raw["replicas"][1]["micro_batches"][0]["samples"][0]
        ),
        "is used 2 times",
    ),
    "a sample of another batch": (
        lambda raw: _first(raw)["micro_batches"][0]["samples"].__setitem__(0, 99),
        "sample 99 is not in the batch",
    ),
    "a sample that is none": (
        lambda raw: _first(raw)["micro_batches"][0]["samples"].__setitem__(0, -1),
        "sample -1 is no index",
    ),
    "rows too short": (_swap_samples, "too short for sample"),
    "a row more": (
        lambda raw: _first(raw)["micro_batches"][0].__setitem__("rows", 5),
        "cannot be for",
    ),
    "a row of less than nothing": (
        lambda raw: _first(raw)["micro_batches"][0].__setitem__("encoder_len", -1),
        "x (-1 + 0)",
    ),
    "unknown recomputation": (
        lambda raw: _first(raw)["micro_batches"][0].__setitem__("recompute", "some"),
        "recompute 'some' cannot be",
    ),
    "outside the table": (
        lambda raw: _first(raw)["micro_batches"][0].__setitem__("encoder_len", 513),
        "refuses to extrapolate",
    ),
    "an action dropped": (lambda raw: _first(raw)["schedule"]["stages"][1].pop(), "it must run F and B"),
    "an action doubled": (
        lambda raw: _first(raw)["schedule"]["stages"][0].append("0B0"),
        "micro-batch 0 runs FBB on stage 0",
    ),
    "backward first": (lambda raw: _first(raw)["schedule"]["stages"][1].reverse(), "runs BF on stage 1"),
    "an action of another rank": (
        lambda raw: _first(raw)["schedule"]["stages"][0].__setitem__(0, "1F0"),
        "rank 0: '1F0' is no action",
    ),
    "an action that is none": (
        lambda raw: _first(raw)["schedule"]["stages"][0].__setitem__(0, "0G0"),
        "'0G0' is no action",
    ),
    "a circular wait": (_deadlock, "deadlock, waiting for ever at rank 0"),
    "makespan too short": (_claim(*PREDICTED, "makespan_s", factor=0.99), "the makespan is claimed to be"),
    "makespan too long": (_claim(*PREDICTED, "makespan_s", factor=1.01), "the makespan is claimed to be"),
    "makespan no number": (_claim(*PREDICTED, "makespan_s", factor=float("nan")), "the makespan is claimed to be nan"),
    "lower bound raised": (_claim(*PREDICTED, "lower_bound_s", factor=1.02), "the lower bound is claimed to be"),
    "lower bound lowered": (_claim(*PREDICTED, "lower_bound_s", factor=0.9), "the lower bound is claimed to be"),
    **{
        f"{name} raised": (_claim(*PREDICTED, "bounds", f"{name}_s", factor=1.01), f"the {name} bound is claimed to be")
        for name in BOUNDS
    },
    "batch bound raised": (_claim("batch_bound_s", factor=1.001), "the batch bound is claimed to be"),
    "free batch bound raised": (_claim("free_batch_bound_s", factor=1.001), "the free batch bound is claimed to be"),
    "batch bound no number": (_claim("batch_bound_s", factor=float("nan")), "the batch bound is claimed to be nan"),
    "a peak lowered": (_claim(*PREDICTED, "peak_bytes", 1, factor=0.9), "pipeline rank 1 is claimed to need"),
    "bytes in flight lowered": (
        _claim(*PREDICTED, "in_flight_bytes", 1, factor=0.5),
        "pipeline rank 1 is claimed to have",
    ),
    "bytes in flight left out": (
        lambda raw: _first(raw)["predicted"]["in_flight_bytes"].pop(),
        "bytes in flight of 1 ranks are claimed",
    ),
    "a peak left out": (lambda raw: _first(raw)["predicted"]["peak_bytes"].pop(), "peaks of 1 ranks are claimed"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Raw]:
    folder = tmp_path_factory.mktemp("sound")
    return folder, made(folder, "gpt_6.7b")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_damaged_plan_is_refused_for_its_reason(
    name: str, sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, raw = sound
    raw = json.loads(json.dumps(raw))
    change, reason = MUTATIONS[name]
    change(raw)
    status, verdict = checked(folder, raw, "gpt_6.7b", capsys)
    assert status == 1
    assert not verdict["valid"]
    assert any(reason in fault for fault in verdict["faults"]), verdict["faults"]


@pytest.mark.parametrize("other", [0, 1], ids=["in a replica", "between replicas"])
def test_whole_micro_batches_may_change_places_where_the_claims_still_hold(
    other: int, sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same samples train, in the same rows: `test_exact_sums_of_the_same_micro_batches_have_the_same_bits_on_every_
    placement` has the gradients."""
    folder, raw = sound
    raw = json.loads(json.dumps(raw))
    a, b = raw["replicas"][0]["micro_batches"], raw["replicas"][other]["micro_batches"]
    assert a[0] != b[-1]
    a[0], b[-1] = b[-1], a[0]
    status, verdict = checked(folder, raw, "gpt_6.7b", capsys)
    assert status == 1
    assert all("claimed" in fault for fault in verdict["faults"]), verdict["faults"]
    found = {(figure["where"], figure["what"]): figure["found"] for figure in verdict["figures"]}
    for number, replica in enumerate(raw["replicas"]):
        replica["predicted"] = {
            "makespan_s": found[f"replica {number}", "makespan"],
            "lower_bound_s": found[f"replica {number}", "lower bound"],
            "peak_bytes": [found[f"replica {number}", f"peak bytes of pipeline rank {rank}"] for rank in range(2)],
        }
    assert checked(folder, raw, "gpt_6.7b", capsys)[0] == 0
    b[-1] = a[0]  # a copy in the place of another is no exchange
    assert checked(folder, raw, "gpt_6.7b", capsys)[0] == 1


def test_a_plan_above_the_limit_is_refused(sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]) -> None:
    folder, raw = sound
    peak = max(peak for replica in raw["replicas"] for peak in replica["predicted"]["peak_bytes"])
    status, verdict = checked(folder, raw, "gpt_6.7b", capsys, **{"--memory-limit-gb": str((peak - 1) / 1e9)})
    assert status == 1
    assert any(f"needs {peak} B at its peak but the limit is" in fault for fault in verdict["faults"])


def test_claims_that_are_left_out_are_shown_as_such(
    sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, raw = sound
    raw = json.loads(json.dumps(raw))
    del raw["batch_bound_s"]
    for replica in raw["replicas"]:
        del replica["predicted"]["bounds"], replica["predicted"]["in_flight_bytes"]
    status, verdict = checked(folder, raw, "gpt_6.7b", capsys)
    assert status == 0
    unclaimed = [figure for figure in verdict["figures"] if figure["claimed"] is None]
    assert len(unclaimed) == 1 + (len(BOUNDS) + 2) * len(raw["replicas"])
    assert all(figure["found"] > 0 for figure in unclaimed)


def test_without_lengths_the_bound_of_the_batch_goes_unchecked(
    sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = sound
    flags = ["--costs", str(folder), "--model", "gpt_6.7b", "--layers", "4", "--memory-limit-gb", "20", "--json"]
    capsys.readouterr()
    assert cli.main(["check-plan", str(folder / "plan.json"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["batch_bound_s"] is None


def test_the_verdict_is_a_plain_table_in_a_pipe(sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]) -> None:
    folder, raw = sound
    capsys.readouterr()
    assert cli.main(["check-plan", str(folder / "plan.json"), *given(folder, "gpt_6.7b")]) == 0
    text = capsys.readouterr().out
    for words in ("The plan is valid", "claimed", "found", "byte time bound", "gap to the bound of every plan"):
        assert words in text
    assert "\x1b" not in text
    raw = json.loads(json.dumps(raw))
    raw["replicas"][0]["micro_batches"][0]["samples"] = list(range(100, 130))
    (folder / "again.json").write_text(json.dumps(raw))
    assert cli.main(["check-plan", str(folder / "again.json"), *given(folder, "gpt_6.7b")]) == 1
    text = capsys.readouterr().out
    assert "The plan is not valid" in text
    assert text.count("fault: ") == 20
    assert "more: --json has them all" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.pop("topology"), "has no field 'topology'"),
        (lambda raw: raw.__setitem__("format", "dynapipe-plan/9"), "'dynapipe-plan/1' is needed"),
        (lambda raw: raw["topology"].__setitem__("dp", 3), "needs each of 0..dp-1 once"),
        (lambda raw: raw["topology"].__setitem__("pp", 0), "pp is 0"),
        (lambda raw: raw["topology"].__setitem__("tp", 0), "tp is 0 but must be at least 1"),
        (lambda raw: raw["topology"].__setitem__("tp", "1" * 5000), "tp is '" + "1" * 36 + "..., expected int"),
        (lambda raw: raw.__setitem__("replicas", []), "the replicas have dp_rank [] but dp 2 needs each of 0..dp-1"),
        (lambda raw: raw.__setitem__("replicas", {}), "replicas is {}, expected list"),
        (lambda raw: _first(raw)["micro_batches"][0].__setitem__("samples", ["a"]), "samples[0] is 'a', expected int"),
        (lambda raw: _first(raw)["schedule"].__setitem__("placement", "V"), "placement is 'V', expected list"),
        (
            lambda raw: raw["topology"].__setitem__("pp", 3),
            "topology pp is 3 but replica 0 has lists of 2 pipeline ranks",
        ),
        *(
            (lambda raw, name=name, value=value: raw["topology"].__setitem__(name, value), says)
            for value in (10**9, 10**12)
            for name, says in (("dp", "each of 0..dp-1 once"), ("pp", "has lists of 2"), ("tp", "at most 65,536"))
        ),
        (lambda raw: _first(raw)["predicted"].__setitem__("peak_bytes", [1, 10**400]), "peak_bytes[1] is 1000000000"),
        (lambda raw: _first(raw)["predicted"].__setitem__("makespan_s", 10**400), "makespan_s is 1000000000"),
        (lambda raw: _first(raw)["predicted"].__setitem__("makespan_s", 1e300), "makespan_s is 1e+300 but must lie"),
        (lambda raw: _first(raw)["predicted"].__setitem__("lower_bound_s", float("inf")), "lower_bound_s is inf but"),
        (lambda raw: _first(raw)["micro_batches"][0].__setitem__("encoder_len", 10**30), "encoder_len is 1000000000"),
        (lambda raw: _first(raw)["micro_batches"][0].__setitem__("encoder_len", 2**40), "must lie within"),
        (lambda raw: raw.__setitem__("sead", 1), "has unknown 'sead': known are batch_bound_s, format,"),
        (lambda raw: raw["topology"].__setitem__("placement", [0, 1]), "topology has unknown 'placement'"),
        (lambda raw: _first(raw).__setitem__("microbatches", []), "replicas[0] has unknown 'microbatches'"),
        (lambda raw: _first(raw)["schedule"].__setitem__("placment", []), "schedule has unknown 'placment'"),
        (lambda raw: _first(raw)["predicted"].__setitem__("bubble", 0), "predicted has unknown 'bubble'"),
        (lambda raw: _first(raw)["predicted"]["bounds"].__setitem__("any_s", 0), "bounds has unknown 'any_s'"),
        (lambda raw: _first(raw)["micro_batches"][0].__setitem__("attention", "row"), "has unknown 'attention'"),
        (lambda raw: raw["replicas"][1].__setitem__("dp_rank", 0), "the replicas have dp_rank [0, 0]"),
        (lambda raw: raw["replicas"][0]["predicted"].pop("makespan_s"), "has no field 'makespan_s'"),
        (lambda raw: raw["replicas"][0]["schedule"].__setitem__("stages", [["0F0"], [7]]), "stages[1] is 7"),
        (lambda raw: raw["replicas"][0]["schedule"].__setitem__("placement", [1, 0]), "place stages differently"),
        (lambda raw: raw["replicas"][0]["micro_batches"][0].__setitem__("rows", "2"), "rows is '2', expected int"),
        (lambda raw: raw["topology"].__setitem__("tp", 2), "not at 2"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_status_2(
    change: Callable[[Raw], None], says: str, sound: tuple[Path, Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, raw = sound
    raw = json.loads(json.dumps(raw))
    change(raw)
    (folder / "again.json").write_text(json.dumps(raw))
    capsys.readouterr()
    assert cli.main(["check-plan", str(folder / "again.json"), *given(folder, "gpt_6.7b")]) == 2
    text = capsys.readouterr().err
    assert says in text
    assert text.count("\n") == 1
    assert len(text) < 600


def test_packed_plans_of_a_lengths_file_are_checked_with_its_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([40, 300, 17, 90, 120, 64, 33, 250, 81, 12]))
    (tmp_path / "costs.json").write_text(
        json.dumps(cost_model_to_json(TokenCosts(2, ns_per_token_squared=2.0, overhead_ns=9000)))
    )
    flags = ["--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "0.01", "--hidden-size", "8"]
    lengths = ["--lengths", str(tmp_path / "lengths.npy")]
    size = ["--tokens-per-batch", "700", "--pp", "2", "--dp", "2", "--layout", "packed"]
    target = tmp_path / "plan.json"
    assert cli.main(["plan", *lengths, *flags, *size, "--step", "0", "--json", str(target)]) == 0
    capsys.readouterr()
    assert cli.main(["check-plan", str(target), *lengths, *flags, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["batch_bound_s"] is not None
    for more, says in (
        ([], "cannot be priced without their documents' lengths"),
        (
            ["--extra", "1", "0"],
            "--extra changes lengths, but there are none: give --lengths FILE, or leave --extra out",
        ),
        (["--truncate"], "--truncate changes lengths, but there are none"),
        (["--index", "0"], "--index 0 picks a global batch of --batch FILE: give it, or leave --index out"),
        ([*lengths, "--index", "1"], "--index 1 picks a global batch of --batch FILE"),
    ):
        assert cli.main(["check-plan", str(target), *flags, *more]) == 2
        assert says in capsys.readouterr().err
    raw = json.loads(target.read_text())
    raw["replicas"][0]["micro_batches"][0]["encoder_len"] -= 8
    target.write_text(json.dumps(raw))
    assert cli.main(["check-plan", str(target), *lengths, *flags, "--json"]) == 1
    assert "does not follow from documents" in json.loads(capsys.readouterr().out)["faults"][0]


def test_the_check_shares_no_code_with_what_makes_plans(all_sources: Any) -> None:
    files = {source.module: source.file for source in all_sources}
    reached, todo = set[str](), ["dynapipe_ext.tools.check.check_plan"]
    while todo:
        module = todo.pop()
        if module in reached or module not in files or module == "dynapipe_ext":  # the facade imports on demand
            continue
        reached.add(module)
        for node in ast.walk(ast.parse(files[module].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert "dynapipe_ext.tools.check.recomputed_bounds" in reached
    assert not [
        module for module in reached if module.startswith(("dynapipe_ext.schedules", "dynapipe_ext.partitioning"))
    ]


SHAPE = Architecture.gpt(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=128,
    gated_mlp=False,
    vocab_size=256,
    max_seq_len=4096,
    tied_embeddings=True,
)


def test_a_plan_whose_buffers_in_flight_take_it_above_the_limit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = made(tmp_path, "gpt_6.7b")
    predicted = [replica["predicted"] for replica in raw["replicas"]]
    pairs = [pair for one in predicted for pair in zip(one["peak_bytes"], one["in_flight_bytes"], strict=True)]
    whole = max(peak + in_flight for peak, in_flight in pairs)
    assert whole > max(peak for peak, _ in pairs)
    for limit, count in ((whole, 0), (whole - 1, 1)):
        _, verdict = checked(tmp_path, raw, "gpt_6.7b", capsys, **{"--memory-limit-gb": str(limit / 1e9)})
        over = f"needs {whole} B at its peak with buffers in flight but the limit is {limit} B"
        assert sum(over in fault for fault in verdict["faults"]) == count
        assert not any("at its peak but the limit" in fault for fault in verdict["faults"])


def test_replicas_that_meet_inside_micro_batches_must_agree_in_a_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The costs of a run under ZeRO stage 3 say so; the plan was made for another."""
    shape, topology = SHAPE, Topology(pp=2, dp=2)
    np.save(tmp_path / "lengths.npy", np.array([400, 30, 20, 70, 310, 50, 44]))
    flags = ["--lengths", str(tmp_path / "lengths.npy"), "--memory-limit-gb", "1", "--costs"]
    for stage in (1, 3):
        costs = AnalyticCosts(shape, topology, 1e9, 0, zero_stage=stage)  # type: ignore[arg-type]
        (tmp_path / f"zero{stage}.json").write_text(json.dumps(cost_model_to_json(costs)))
    target = str(tmp_path / "plan.json")
    size = ["--batch-size", "7", "--layout", "padded", "--step", "0"]
    assert cli.main(["plan", *flags, str(tmp_path / "zero1.json"), *size, "--json", target]) == 0
    counts = {len(replica["micro_batches"]) for replica in json.loads(Path(target).read_text())["replicas"]}
    assert len(counts) == 2
    capsys.readouterr()
    assert cli.main(["check-plan", target, *flags, str(tmp_path / "zero1.json"), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["check-plan", target, *flags, str(tmp_path / "zero3.json"), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any('replica_counts = "equal"' in fault for fault in faults)
    assert cli.main(["plan", *flags, str(tmp_path / "zero3.json"), *size]) == 2
    assert 'replica_counts = "equal"' in capsys.readouterr().err  # in the words of the ranks


def test_a_long_text_in_place_of_an_action_is_not_echoed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_text("40\n300\n17\n")
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(TokenCosts(2, transfer_bytes_per_token=16))))
    costs = ["--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1"]
    target = tmp_path / "plan.json"
    assert (
        cli.main(
            ["plan", "--lengths", str(tmp_path / "lengths.txt"), *costs, "--layout", "padded", "--json", str(target)]
        )
        == 0
    )
    raw = json.loads(target.read_text())
    raw["replicas"][0]["schedule"]["stages"][0][0] = "1" * 5000
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    arguments = ["--lengths", str(tmp_path / "lengths.txt"), *costs, "--layout", "padded"]
    assert cli.main(["plan", *arguments, "--json", str(target)]) == 0
    raw = json.loads(target.read_text())
    raw["replicas"][0]["schedule"]["stages"][0][0] = "1" * 5000
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    assert cli.main(["check-plan", str(target), *costs, "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert "rank 0: '" + "1" * 36 + "... is no action" in faults[0]
    for command in (["plan", "--show"], ["show-schedule"]):
        assert cli.main([*command, str(target)]) == 2
        text = capsys.readouterr().err
        assert "action '" + "1" * 36 + "... is not of the form" in text
        assert len(text) < 300


def test_the_row_of_long_packed_documents_is_checked_at_once() -> None:
    """By the divisors of both lengths: there are 2^31 numbers that a row could be rounded up to."""
    row = {"samples": (0,), "layout": "packed", "rows": 1, "recompute": "none"}
    need = {0: (2**31 - 5, 2**30 - 5)}
    packed = check_plan._packed(ShapeFile(**row, encoder_len=2**31, decoder_len=2**30), need)
    assert packed is not None
    assert (packed.encoder_len, packed.decoder_len, packed.pad_multiple) == (2**31, 2**30, 8)
    assert check_plan._packed(ShapeFile(**row, encoder_len=2**31, decoder_len=2**30 + 1), need) is None


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024])
def test_divisors_are_all_there_in_order(number: int) -> None:
    assert check_plan._divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
