"""Walls: no circles of imports, and wings that are entered by their doors alone."""

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.import_graph import Graph, ImportGraphs, circle, import_graphs, reached
from tests.support.wings import CHECKPOINT, WINGS, Wing

# They offer names of every layer above them, so what they import is no dependency of theirs.
FACADES = {"dynapipe_ext", "dynapipe_ext.megatron"}
# Folders whose own files are words that the rooms in them share, or join these rooms. Others import one way only.
SHARED_FOLDERS = {
    "dynapipe_ext",
    "dynapipe_ext.data",
    "dynapipe_ext.executor",
    "dynapipe_ext.schedules",
    "dynapipe_ext.tools.checkpoint",
}


def wall_faults(graph: Graph, wing: Wing) -> list[str]:
    """Imports through a wing's wall that are not among those agreed."""
    faults = []
    for module, imported in graph.items():
        for name in imported:
            if wing.holds(module) and not wing.holds(name):
                agreed = any(fnmatch.fnmatch(name, pattern) for pattern in wing.needs)
            elif wing.holds(name) and not wing.holds(module):
                agreed = module in wing.owners or (module in wing.visitors and name in wing.doors)
            else:
                continue
            if not agreed:
                faults.append(f"{module} imports {name}")
    return sorted(faults)


def arrows_between_rooms(graph: Graph, rooms: Mapping[str, str]) -> Graph:
    """Which rooms import which, by the room of each module; without arrows between a shared folder and a room in it."""
    arrows: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for name in imported:
            one, other = rooms[module], rooms[name]
            parents = {one: other.rpartition(".")[0], other: one.rpartition(".")[0]}
            if one != other and not any(a in SHARED_FOLDERS and parent == a for a, parent in parents.items()):
                arrows.setdefault(one, set()).add(other)
    return {room: frozenset(others) for room, others in arrows.items()}


@pytest.fixture(scope="module")
def rooms(all_sources: Any) -> dict[str, str]:
    """The room of each module: its folder, by name."""
    folders = {source.module: source.module for source in all_sources if source.file.name == "__init__.py"}
    return {source.module: source.module.rpartition(".")[0] for source in all_sources} | folders


@pytest.fixture(scope="module")
def graphs(all_sources: Any) -> ImportGraphs:
    return import_graphs((source.module, source.file) for source in all_sources)


def test_no_modules_import_each_other_in_a_circle(graphs: ImportGraphs) -> None:
    inner = {module: imported for module, imported in graphs.at_run_time.items() if module not in FACADES}
    assert " → ".join(circle(inner)) == ""


def test_no_rooms_import_each_other_in_a_circle(graphs: ImportGraphs, rooms: dict[str, str]) -> None:
    inner = {module: imported for module, imported in graphs.with_types.items() if module not in FACADES}
    assert " → ".join(circle(arrows_between_rooms(inner, rooms))) == ""


def test_a_circle_of_rooms_is_found_though_no_modules_are_in_one() -> None:
    rooms = {"a.x": "a", "a.y": "a", "b.x": "b", "b.c.x": "b.c"}
    graph = {"a.x": frozenset({"b.x"}), "b.c.x": frozenset({"a.y", "b.x"})}
    assert circle(arrows_between_rooms(graph, rooms)) == []
    assert circle(arrows_between_rooms(graph | {"b.x": frozenset({"b.c.x"})}, rooms)) != []


def test_every_import_names_a_module_that_is_there(root: Path, all_sources: Any) -> None:
    """Of tests, too: most of them run only after a change has landed."""
    modules = {source.module for source in all_sources} | {"dynapipe_ext._core"}
    files = [source.file for source in all_sources] + sorted((root / "tests").rglob("*.py"))
    gone = [
        f"{file.relative_to(root)} imports {name}"
        for file in files
        for name in re.findall(r"^ *from (dynapipe_ext[\w.]*) import", file.read_text(), re.MULTILINE)
        if name not in modules
    ]
    assert gone == []


@pytest.mark.parametrize("wing", WINGS.values(), ids=WINGS.keys())
def test_a_wing_is_entered_by_its_doors_and_needs_little_from_outside(wing: Wing, graphs: ImportGraphs) -> None:
    assert wall_faults(graphs.with_types, wing) == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("dynapipe_ext.executor.engine", "dynapipe_ext.tools.checkpoint"),
        ("dynapipe_ext.launch.job.model_folder", "dynapipe_ext.tools.checkpoint.converter"),
        ("dynapipe_ext.tools.checkpoint.journal", "dynapipe_ext.schedules.planner"),
    ],
)
def test_what_breaks_a_wall_is_found(module: str, imported: str) -> None:
    assert wall_faults({module: frozenset({imported})}, CHECKPOINT) == [f"{module} imports {imported}"]


def test_no_wing_imports_another(graphs: ImportGraphs) -> None:
    pairs = [
        f"{module} imports {name}"
        for module, imported in graphs.with_types.items()
        for name in imported
        for one in WINGS.values()
        for other in WINGS.values()
        if one is not other and one.holds(module) and other.holds(name)
    ]
    assert pairs == []


@pytest.mark.parametrize("wing", ["batching", "estimate", "loops"])
def test_training_reaches_nothing_of_a_wing(wing: str, graphs: ImportGraphs) -> None:
    inner = {module: names for module, names in graphs.at_run_time.items() if module not in FACADES}
    ranks = [module for module in inner if module.startswith("dynapipe_ext.launch.rank.")]
    assert len(ranks) > 5
    assert [module for module in reached(inner, ranks) if WINGS[wing].holds(module)] == []
