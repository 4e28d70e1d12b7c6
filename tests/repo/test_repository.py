"""What is in the repository: its top level, the size of its files, the licence, the commands that people are told."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
LONGEST_FILE_LINES = 400

# Commands of the README, each with the test that runs it. A command is a line of a ```bash block, its comment cut off.
TESTED_COMMANDS = {
    "bash tests/run.sh": "the suite itself",
    "bash launch/quickstart.sh": "tests/integration (the default run) and test_the_scripts_are_sound",
    "dynapipe doctor": "tests/unit/test_cli.py",
}


def readme_commands(text: str) -> list[str]:
    """Command lines of a Markdown text's ```bash blocks: continued lines joined, comments and blank lines left out.

    >>> readme_commands("```bash\\nrun --a \\\\\\n  --b  # why\\n\\n# note\\n```\\n```python\\nx\\n```")
    ['run --a --b']
    """
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if command:
                commands.append(command)
    return commands


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[str]:
    """Files that git tracks here."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("this is no git checkout")
    # A checkout that another user owns is refused by git unless told.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [name for name in done.stdout.split("\0") if name and (root / name).exists()]


def test_the_top_level_holds_nothing_but_what_was_agreed(tracked: list[str]) -> None:
    tops = {name.partition("/")[0] for name in tracked}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def test_python_files_stay_short(tracked: list[str], root: Path) -> None:
    lengths = {name: len((root / name).read_text().splitlines()) for name in tracked if name.endswith(".py")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def test_the_licence_is_the_whole_apache_licence(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    for section in range(1, 10):
        assert re.search(rf"^ +{section}\. [A-Z]", text, re.M), f"section {section} is missing"
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_command_of_the_readme_is_tested(root: Path) -> None:
    untested = set(readme_commands((root / "README.md").read_text())) - set(TESTED_COMMANDS)
    assert untested == set(), "add each to TESTED_COMMANDS with the test that runs it"


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "launch/setup.sh", "tests/run.sh", ".ci/run"])
def test_the_scripts_are_sound(root: Path, script: str) -> None:
    subprocess.run(["bash", "-n", str(root / script)], check=True, timeout=60)
    text = (root / script).read_text()
    assert script == "launch/setup.sh" or "set -euo pipefail" in text  # setup.sh is sourced by the others
    assert (root / script).stat().st_mode & 0o100 or script == "launch/setup.sh"
