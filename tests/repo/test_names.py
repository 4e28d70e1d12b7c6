"""One name, one thing: what is public has a name that nothing else in the package has."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

# What every module of a kind has, called as module.name: there the module is half of the name.
OF_EVERY = {
    "main": "programs",
    "add_arguments": "commands",
    "run": "commands",
    "open_checkpoint": "checkpoint formats",
    "planned_loop": "adapters of loops",
}


def public_things(path: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Name, identity and place of each public class, function and type alias; equal aliases are one thing."""
    for node in ast.parse(text).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                thing = f"{path}:{node.lineno}"  # itself alone
            case ast.Assign(targets=[ast.Name(id=name)]) if name != name.upper() and name[:1].isupper():
                thing = ast.unparse(node.value)
            case _:
                continue
        if not name.startswith("_"):
            yield name, thing, f"{path}:{node.lineno}"


def test_no_public_name_is_given_to_two_things(all_sources: Any) -> None:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for source in all_sources:
        for name, thing, place in public_things(source.path, source.file.read_text()):
            found[name][thing] = place
    twice = {name: places for name, places in found.items() if len(places) > 1 and name not in OF_EVERY}
    assert not twice, "\n".join(f"{name}: {', '.join(sorted(twice[name].values()))}" for name in sorted(twice))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("class Ab: ...\nclass Ab: ...", 2),
        ("def f(): ...\nasync def f(): ...", 2),
        ("Ab = list[int]\nAb = list[int]", 1),
        ("Ab = list[int]\nAb = list[str]", 2),
        ("Ab = list[int]\nclass Ab: ...", 2),
        ("class _Ab: ...\nLIMIT = 1\nname = 2", 0),
    ],
)
def test_things_are_told_apart(text: str, count: int) -> None:
    assert len({thing for _, thing, _ in public_things("a.py", text)}) == count
