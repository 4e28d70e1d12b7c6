"""Which modules of the package import which, read from their source: imports inside functions count, too."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class ImportGraphs:
    """What each module imports: when it runs, and with what only type checkers read."""

    at_run_time: Graph
    with_types: Graph


def import_graphs(files: Iterable[tuple[str, Path]]) -> ImportGraphs:
    """The imports of modules, each a name and its file, among themselves."""
    trees = {module: ast.parse(file.read_text()) for module, file in files}
    imports = {module: [*_imported(tree, trees.keys())] for module, tree in trees.items()}
    return ImportGraphs(
        {module: frozenset(name for name, runs in pairs if runs) - {module} for module, pairs in imports.items()},
        {module: frozenset(name for name, _ in pairs) - {module} for module, pairs in imports.items()},
    )


def _imported(tree: ast.AST, modules: Collection[str], runs: bool = True) -> Iterator[tuple[str, bool]]:
    """Every module that is imported, and whether that happens when the code runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _imported(node, modules, False)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, runs) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module), runs
        elif not isinstance(node, ast.expr):
            yield from _imported(node, modules, runs)


def circle(graph: Graph) -> list[str]:
    """The modules of one circle in order, the first again at the end; nothing where there is none.

    >>> circle({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b")})
    ['b', 'c', 'b']
    """
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        ahead = [iter([start])]
        while ahead:
            module = next(ahead[-1], None)
            if module is None:
                ahead.pop()
                if path:
                    done.add(path.pop())
            elif module in path:
                return [*path[path.index(module) :], module]
            elif module not in done:
                path.append(module)
                ahead.append(iter(sorted(graph.get(module, ()))))
    return []


def reached(graph: Graph, start: Iterable[str]) -> set[str]:
    """All modules that these import, directly or through others, and themselves.

    >>> sorted(reached({"a": frozenset("b"), "b": frozenset("c"), "d": frozenset("a")}, "a"))
    ['a', 'b', 'c']
    """
    seen: set[str] = set()
    ahead = [*start]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += graph.get(module, ())
    return seen
