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
from collections.abc import Iterator
from pathlib import Path

TOPS = ("dynapipe_ext", "schedules", "executor", "tools", "launch")
WINGS = ("dynapipe_ext/batching", "dynapipe_ext/sampling", "dynapipe_ext/inference", "dynapipe_ext/packing",
         "tools/checkpoint")  # fmt: skip
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


def imports_of(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Modules of this project that a module imports, but for type checking alone."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        waiting += ast.iter_child_nodes(node)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, each sorted: strongly connected components of more than one module.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    [['a', 'b', 'c']]
    """

    def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for module in edges.get(waiting.pop(), set()) - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    backward: dict[str, set[str]] = {}
    for module, targets in imports.items():
        for target in targets:
            backward.setdefault(target, set()).add(module)
    found = {tuple(sorted(reached(m, imports) & reached(m, backward))) for m in imports}
    return sorted(list(one) for one in found if len(one) > 1)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    files = sorted(file for top in TOPS for file in (root / top).rglob("*") if file.suffix in (".py", ".cpp", ".hpp"))
    lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    trees: dict[str, ast.Module] = {}
    functions: list[tuple[int, int, str]] = []
    for file in files:
        path = file.relative_to(root)
        text = file.read_text()
        lines[str(path.parent)] += text.count("\n")
        num_files[str(path.parent)] += 1
        if file.suffix != ".py":
            continue
        trees[module_of(path)] = tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                args = node.args
                count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
                functions.append((node.end_lineno - first + 1, count, f"{path}:{node.name}"))  # type: ignore[operator]
    for room in sorted(lines):
        print(f"{lines[room]:7,} lines {num_files[room]:4} files  {room}")
    in_wings = sum(number for room, number in lines.items() if room.startswith(WINGS))
    print(
        f"{sum(lines.values()):7,} lines in all, of which {in_wings:,} in the wings: {sum(lines.values()) - in_wings:,}"
    )
    lengths = sorted(length for length, _, _ in functions)
    print(
        f"{len(functions):,} functions: median {statistics.median(lengths):g} lines, longest {lengths[-1]},"
        f" {sum(length > LONG_LINES for length in lengths)} above {LONG_LINES} lines,"
        f" {sum(count >= MANY_ARGUMENTS for _, count, _ in functions)} with {MANY_ARGUMENTS} or more arguments"
    )
    for length, count, name in sorted(functions, reverse=True)[:10]:
        print(f"  {length} lines, {count} arguments: {name}")
    modules = set(trees)
    imports = {
        module: {one for one in imports_of(tree, modules) if one in modules and one not in FACADES | {module}}
        for module, tree in trees.items()
        if module not in FACADES
    }
    every = circles(imports)
    print(f"{len(every)} circles of imports")
    for one in every:
        print("  " + ", ".join(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
