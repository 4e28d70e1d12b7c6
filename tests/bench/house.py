"""What a reader has to hold in mind: lines by room, functions by length and arguments, circles of imports.

    python tests/bench/house.py [ROOT]

ROOT (default this repository) is any checkout of it. A room is a folder; its lines are those of its Python and C++
files. Lengths of functions are in lines, decorators and docstrings included. Circles count imports inside functions,
not those for type checking alone, and not the two facades (`dynapipe_ext/__init__.py`, `dynapipe_ext/megatron.py`).
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.import_graph import Graph, import_graphs, reached
from tests.support.wings import WINGS

TOPS = ("dynapipe_ext", "schedules", "executor", "tools", "launch")
FACADES = {"dynapipe_ext", "dynapipe_ext.megatron"}
LONG_LINES, MANY_ARGUMENTS = 50, 12


def module_of(path: Path) -> str:
    """
    >>> module_of(Path("schedules/search/__init__.py"))
    'dynapipe_ext.schedules.search'
    """
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "dynapipe_ext" else ["dynapipe_ext", *parts])


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that import each other, each sorted.

    >>> circles({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")})
    [['a', 'b', 'c']]
    """
    below = {module: reached(graph, [module]) for module in graph}
    sets = {tuple(sorted(other for other in below[module] if module in below[other])) for module in graph}
    return sorted(list(one) for one in sets if len(one) > 1)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    files = sorted(file for top in TOPS for file in (root / top).rglob("*") if file.suffix in (".py", ".cpp", ".hpp"))
    lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    sources: dict[str, Path] = {}
    functions: list[tuple[int, int, str]] = []
    for file in files:
        path = file.relative_to(root)
        text = file.read_text()
        lines[str(path.parent)] += text.count("\n")
        num_files[str(path.parent)] += 1
        if file.suffix != ".py":
            continue
        sources[module_of(path)] = file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                args = node.args
                count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
                functions.append((node.end_lineno - first + 1, count, f"{path}:{node.name}"))  # type: ignore[operator]
    for room in sorted(lines):
        print(f"{lines[room]:7,} lines {num_files[room]:4} files  {room}")
    in_wings = {
        name: sum(number for room, number in lines.items() if wing.holds(module_of(Path(room))))
        for name, wing in WINGS.items()
    }
    print(f"{sum(lines.values()):7,} lines in all")
    for name, number in in_wings.items():
        print(f"{number:7,} in the wing {name}")
    print(f"{sum(lines.values()) - sum(in_wings.values()):7,} outside them")
    lengths = sorted(length for length, _, _ in functions)
    print(
        f"{len(functions):,} functions: median {statistics.median(lengths):g} lines, longest {lengths[-1]},"
        f" {sum(length > LONG_LINES for length in lengths)} above {LONG_LINES} lines,"
        f" {sum(count >= MANY_ARGUMENTS for _, count, _ in functions)} with {MANY_ARGUMENTS} or more arguments"
    )
    for length, count, name in sorted(functions, reverse=True)[:10]:
        print(f"  {length} lines, {count} arguments: {name}")
    graph = import_graphs((module, file) for module, file in sources.items() if module not in FACADES).at_run_time
    every = circles(graph)
    print(f"{len(every)} circles of imports")
    for one in every:
        print("  " + ", ".join(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
