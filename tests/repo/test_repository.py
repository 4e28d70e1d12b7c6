"""What is in the repository: its top level, the size of its files, the licence, the commands that people are told."""

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import LIMIT_S
from tests.support.pages import all_pages, readme_commands, table_commands
from tests.support.wings import WINGS

TOP_LEVEL = {
    "pyproject.toml",
    "dynapipe_ext",
    "schedules",
    "executor",
    "launch",
    "tests",
    "tools",
    "README.md",
    "LICENSE",
}
LONGEST_FILE_LINES = 800
LONGEST_FUNCTION_LINES = 50
# Of these a cut would read worse.
LONGER_FUNCTIONS = {
    "RankTrace.run in executor/proof.py",  # one loop over kinds of events, which is most of a proof's time
    "ForwardBackward.__call__ in executor/drop_in/drop_in.py",  # Megatron's fifteen keywords
    "Architecture.gpt in dynapipe_ext/models/architecture.py",  # eighteen keywords, each a field
}

# Commands of the README and of the guides, each with the test that runs it: as it stands (test_quickstart.py), or its
# kind, where it needs several machines or takes minutes.
README_TESTS = "tests/integration/test_quickstart.py"
PROFILED = "tests/integration/test_profile_command.py::test_a_model_is_measured_and_its_table_plans"
ESTIMATED = (
    "tests/estimate/integration/test_estimate_train.py::"
    "test_the_best_option_for_this_model_and_cluster_is_trained_within_its_memory"
)
CONVERTED = (
    "tests/checkpoint/integration/test_convert_formats.py::test_the_command_goes_there_with_uneven_stages_and_back"
)
LEARNED = (
    "tests/batching/integration/test_collect_memory.py::"
    "test_the_same_records_make_the_same_file_and_their_errors_are_printed"
)
LAUNCHED = "tests/integration/test_two_nodes.py::test_a_spare_replaces_a_lost_host_with_the_weights_of_a_clean_run"
COMPARED = "tests/unit/test_emulated_comparison.py"
AS_IT_STANDS = f"{README_TESTS}::test_commands_of_the_readme_run_as_they_stand"
# Of other programs, or that differ from a tested one in nothing that is run.
NOT_RUN = {
    "pip install '.[train]'",
    "dynapipe train --help",
    "torchrun … -m dynapipe_ext.launch.rank",
    "torchrun $TORCHRUN_ARGUMENTS pretrain_gpt.py $ARGUMENTS",
}
TESTED_COMMANDS = {
    "bash tests/run.sh": "tests/repo/test_repository.py::test_every_check_of_the_suite_is_run_by_one_command",
    "bash launch/quickstart.sh": f"{README_TESTS}::test_a_fresh_clone_trains_eight_ranks_with_one_command",
    "dynapipe doctor": AS_IT_STANDS,
    "dynapipe plan --lengths lengths.npy --pp 4 --dp 2": AS_IT_STANDS,
    "dynapipe plan --lengths lengths.npy --pieces auto": (
        "tests/unit/test_plan_command.py::test_long_samples_run_in_pieces_where_a_flag_or_a_file_says_so"
    ),
    "dynapipe plan --lengths lengths.npy --dp 8 --pieces auto --cp auto": (
        "tests/unit/test_plan_command.py::test_data_parallel_ranks_join_by_either_flag_or_as_the_step_needs"
    ),
    "dynapipe train --vocabulary-parallel head": (
        "tests/integration/test_train_vocabulary.py"
        "::test_a_run_ended_by_ctrl_c_goes_on_under_other_parts_to_the_losses_of_a_whole_head"
    ),
    "dynapipe train --cp 2": (
        "tests/integration/test_preferences_command.py::test_losses_and_rewards_are_those_of_a_plain_loop"
    ),
    "dynapipe train --model DIR --data preferences.jsonl --preferences dpo --output tuned --lr 1e-6 --show-samples 2": (
        "tests/integration/test_preferences_command.py::test_losses_and_rewards_are_those_of_a_plain_loop"
    ),
    "dynapipe replay DIR/step-000012.json": "tests/unit/test_replay.py::test_the_same_planner_plans_the_same",
    "dynapipe show-schedule zb-v --pp 4 --micro-batches 8 --html zb-v.html": (
        "tests/integration/test_schedule_command.py::test_the_command_of_the_readme_draws_and_writes_a_page"
    ),
    "dynapipe train --resume latest": (
        "tests/integration/test_resume_command.py::test_a_run_that_was_ended_killed_and_resumed_is_the_one_that_was_not"
    ),
    "dynapipe train --placement v": (
        "tests/integration/test_train_command.py::test_a_v_learns_what_a_line_learns_and_goes_on_as_one"
    ),
    "dynapipe train --eval-every 100 --eval-data held.jsonl": (
        "tests/integration/test_evaluation_command.py"
        "::test_validation_losses_are_those_of_one_process_and_training_keeps_its_bits"
    ),
    "dynapipe convert runs/latest/checkpoints mine --to hf": f"{README_TESTS}::test_what_was_trained_writes_on",
    "dynapipe train --deterministic": (
        "tests/integration/test_same_bits.py::test_a_run_of_one_rank_and_one_of_four_write_the_same_losses_and_norms"
    ),
    "dynapipe train --split-backward": AS_IT_STANDS,
    "dynapipe train --data my.jsonl --truncate": AS_IT_STANDS,
    "dynapipe train --config mine.toml": AS_IT_STANDS,
    "dynapipe train --tasks tasks.toml": (
        "tests/unit/test_tasks_file.py::test_train_and_preprocess_cut_the_sides_of_each_task_alike"
    ),
    "dynapipe train --data prepared": AS_IT_STANDS,
    "dynapipe train --architecture DIR --init-from DIR --tokenizer DIR --data my.jsonl": (
        "tests/integration/test_train_published.py::test_the_first_loss_is_that_of_transformers"
    ),
    "dynapipe train --model DIR --data chats.jsonl --output tuned --epochs 2 --lr 1e-5 --dtype bf16 --show-samples 3": (
        "tests/integration/test_fine_tuning.py::test_losses_and_the_saved_model_are_those_of_a_plain_loop"
    ),
    "dynapipe train --model DIR --data chats.jsonl --output tuned": (
        "tests/integration/test_fine_tuning.py::test_losses_and_the_saved_model_are_those_of_a_plain_loop"
    ),
    "dynapipe train --model DIR --data chats.jsonl --output tuned --lora --pp 2": (
        "tests/integration/test_lora_command.py"
        "::test_losses_and_the_saved_adapters_are_those_of_a_plain_loop_of_peft_on_any_ranks"
    ),
    "dynapipe train --model DIR --data chats.jsonl --output tuned --deepspeed ds_config.json --dp 2": (
        "tests/integration/test_deepspeed_command.py"
        "::test_losses_are_those_of_a_plain_loop_and_the_saved_model_is_the_trained_one"
    ),
    "dynapipe train --pieces auto": (
        "tests/integration/test_train_width.py::test_a_run_in_pieces_has_the_losses_of_one_with_whole_samples"
    ),
    "torchrun $TORCHRUN_ARGUMENTS -m dynapipe_ext.megatron pretrain_gpt.py $ARGUMENTS [--dynapipe-…]": (
        "tests/loops/integration/test_megatron_script.py::test_each_line_of_the_log_agrees_with_megatrons_own_schedule"
    ),
    "dynapipe compare runs/packed runs/padded --html both.html": (
        "tests/unit/test_compare_command.py::test_runs_of_other_settings_and_lengths_are_told_apart"
    ),
    "dynapipe flops runs/latest": AS_IT_STANDS,
    "dynapipe demo": f"{COMPARED}::test_the_demo_compares_without_a_run_and_writes_its_page",
    "dynapipe demo runs/latest": AS_IT_STANDS,
    "dynapipe preprocess --input corpus.jsonl --tokenizer bytes --output prepared": AS_IT_STANDS,
    "dynapipe estimate --model llama-2-70b --nodes 6 --gpus-per-node 4 --gpu-memory-gb 80": AS_IT_STANDS,
    "dynapipe estimate --model config.json --nodes 1 --gpus-per-node 4 --gpu-memory-gb 80"
    " --lengths lengths.npy --write best.toml": ESTIMATED,
    "dynapipe train --config best.toml": ESTIMATED,
    "dynapipe profile --config mine.toml --out costs.json": PROFILED,
    "dynapipe plan --lengths lengths.npy --costs costs.json": PROFILED,
    "dynapipe plan --lengths lengths.npy --pp 4 --split-backward --noise 0.2": (
        "tests/unit/test_plan_under_noise.py::test_the_flag_changes_the_order_that_plan_writes"
    ),
    "dynapipe convert SRC DST --to megatron --tp 2 --pp 2 --verify": CONVERTED,
    "dynapipe convert SRC DST --to hf": CONVERTED,
    "dynapipe collect-memory --model DIR --out records.jsonl": LEARNED,
    "dynapipe train-memory-model records.jsonl --out model.json": LEARNED,
    "dynapipe train --compare": (
        "tests/integration/test_train_command.py::"
        "test_compare_runs_the_usual_ways_beside_a_v_on_the_same_tokens_over_epochs_that_end_small"
    ),
    "torchrun … -m dynapipe_ext.megatron pretrain_gpt.py …": (
        "tests/loops/integration/test_megatron_script.py::test_each_line_of_the_log_agrees_with_megatrons_own_schedule"
    ),
    "dynapipe launch --config mine.toml --run-dir runs/mine": (
        "tests/unit/test_launch_command.py::test_on_one_machine_torchrun_starts_all_ranks_with_the_flags_of_train"
    ),
    "dynapipe launch --config mine.toml --hosts hosts.txt --run-dir runs/mine": LAUNCHED,
    "dynapipe launch --config mine.toml --run-dir runs/mine --hosts hosts.txt --store rediss://HOST:6379/0"
    " --secret-file ~/.store": LAUNCHED,
    "sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh --config mine.toml --run-dir runs/mine"
    " --store rediss://HOST:6379/0": (
        "tests/unit/test_nodes.py::test_the_slurm_script_starts_all_nodes_and_is_queued_again_once_all_have_saved"
    ),
}


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[str]:
    """Files that git tracks here."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("this is no git checkout")
    # A checkout that another user owns is refused by git unless told.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return [name for name in done.stdout.split("\0") if name and (root / name).exists()]


def test_the_top_level_holds_nothing_but_what_was_agreed(tracked: list[str]) -> None:
    tops = {name.partition("/")[0] for name in tracked}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def test_source_files_stay_short(tracked: list[str], root: Path) -> None:
    sources = [name for name in tracked if name.endswith((".py", ".cpp", ".hpp", ".js", ".sh"))]
    lengths = {name: len((root / name).read_text().splitlines()) for name in sources}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def test_functions_fit_a_screen(all_sources: Any) -> None:
    longer = set()
    for source in all_sources:
        for owner in ast.walk(ast.parse(source.file.read_text())):
            for node in owner.body if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef) else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    if (node.end_lineno or first) - first >= LONGEST_FUNCTION_LINES:
                        place = "" if isinstance(owner, ast.Module) else f"{owner.name}."
                        longer.add(f"{place}{node.name} in {source.path}")
    assert longer == LONGER_FUNCTIONS


def test_the_licence_is_the_whole_apache_licence(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    for section in range(1, 10):
        assert re.search(rf"^ +{section}\. [A-Z]", text, re.M), f"section {section} is missing"
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_command_of_the_readme_and_its_guides_is_tested(root: Path) -> None:
    """Those of blocks and tables; a command that tables name without arguments is none."""
    pages = {page: text for page, text in all_pages(root).items() if page == "README.md" or "/docs/" in page}
    pages.pop(".github/docs/configuration.md")
    told = {command for text in pages.values() for command in (*readme_commands(text), *table_commands(text))}
    told = {command for command in told if len(command.split()) > 2 or command in TESTED_COMMANDS} - NOT_RUN
    assert told - TESTED_COMMANDS.keys() == set(), "add each to TESTED_COMMANDS with the test that runs it"
    assert TESTED_COMMANDS.keys() - told == set(), "no page has these"


def test_one_version_is_declared_cited_and_described(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (root / ".github/CITATION.cff").read_text()
    described = re.findall(r"^## (\d.*)$", (root / ".github/CHANGELOG.md").read_text(), re.MULTILINE)
    assert described[0] == version


def test_the_test_of_every_readme_command_exists(root: Path) -> None:
    missing = []
    for command, test in TESTED_COMMANDS.items():
        file, _, name = test.partition("::")
        text = (root / file).read_text()
        if f"def {name}(" not in text or (test == AS_IT_STANDS and f'"{command}"' not in text):
            missing.append((command, test))
    assert missing == []


def test_every_check_of_the_suite_is_run_by_one_command(root: Path) -> None:
    assert "/tests/run.sh" in (root / ".ci/run").read_text()  # and so this test is a part of that run
    script = (root / "tests/run.sh").read_text()
    for tool in ("ruff check", "ruff format --check", "mypy", "pytest"):
        assert f"-m {tool}" in script


def test_every_folder_of_tests_is_in_one_suite(root: Path) -> None:
    """`tests/run.sh WING` runs the folder of that name, `training` all others."""
    script = (root / "tests/run.sh").read_text()
    (wings,) = re.findall(r"^ *([\w| ]+)\) set -- \"tests/\$1\"", script, re.MULTILINE)
    (others,) = re.findall(r"^ *training\) set -- tests/\{([\w,]+)\}", script, re.MULTILINE)
    with_tests = {file.relative_to(root / "tests").parts[0] for file in (root / "tests").rglob("test_*.py")}
    assert wings.replace(" ", "").split("|") == sorted(WINGS)
    assert sorted([*WINGS, *others.split(",")]) == sorted(with_tests)


def test_ci_builds_the_site_and_trains_by_every_file_of_a_release_on_every_python(root: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = {}
    for file in (root / ".github/workflows").glob("*.yml"):
        jobs |= yaml.safe_load(file.read_text())["jobs"]
    commands = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert "python -m tests.support.site" in commands["site"]
    assert "-m build --sdist" in commands["sdist"]
    assert "-m cibuildwheel" in commands["wheels"]
    metadata = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pythons = jobs["install"]["strategy"]["matrix"]["python"]
    assert pythons[0] == metadata["requires-python"].removeprefix(">=")
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
    assert jobs["install"]["strategy"]["matrix"]["from"] == ["whl", "tar.gz"]
    assert {*jobs["install"]["needs"]} == {"sdist", "wheels"}
    assert "install '$file[train]'".replace("'", '"') in commands["install"]
    for command in ("dynapipe demo", "dynapipe quickstart --steps 3"):
        assert command in commands["install"]
        assert f"`{command}`" in (root / ".github/docs/release.md").read_text()


def test_the_scripts_are_sound(root: Path) -> None:
    for script in ("launch/quickstart.sh", "launch/setup.sh", "tests/run.sh", ".ci/run"):
        subprocess.run(["bash", "-n", str(root / script)], check=True, timeout=LIMIT_S)
        text = (root / script).read_text()
        assert script == "launch/setup.sh" or "set -euo pipefail" in text, script  # setup.sh is sourced by the others
        assert (root / script).stat().st_mode & 0o100 or script == "launch/setup.sh", script


def test_the_walk_through_the_code_has_eight_files_that_hold_what_it_says(root: Path) -> None:
    text = (root / ".github/CONTRIBUTING.md").read_text()
    walk = text.partition("## Follow one micro-batch\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([^`]+)`: (.*)$", walk, re.M)
    assert 1 <= len(steps) <= 8
    for path, says in steps:
        source = (root / path).read_text()
        names = [name.rpartition(".")[2] for name in re.findall(r"`([A-Za-z_.]+)`", says)]
        assert [name for name in names if name not in source] == [], path


def test_paths_that_contributors_are_told_exist(tracked: list[str], root: Path) -> None:
    text = (root / ".github/CONTRIBUTING.md").read_text()
    paths = re.findall(r"`([\w.]*/[\w./]*|\w+\.(?:py|hpp|cpp|sh))`", text)  # whole, or as their folder names them
    files_and_folders = {f"/{place}" for name in tracked for place in (name, *Path(name).parents)}
    assert len(paths) > 40
    assert [
        path for path in paths if not any(place.endswith(f"/{path.rstrip('/')}") for place in files_and_folders)
    ] == []


def test_every_folder_says_what_lives_there(root: Path) -> None:
    folders = {
        file.parent
        for top in ("dynapipe_ext", "schedules", "executor", "tools", "launch")
        for file in (root / top).rglob("*.py")
    }
    silent = []
    for folder in sorted(folders):
        words = (folder / "__init__.py").read_text().partition('"""')[2].partition('"""')[0].split()
        if len(words) < 20:
            silent.append(folder.relative_to(root).as_posix())
    assert silent == []
