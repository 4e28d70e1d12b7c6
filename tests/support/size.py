"""Lines and tokens of the packages, as `tests/repo/budget.toml` counts them.

    python -m tests.support.size [--write]

Lines are those of Python and C++ files. Tokens are Python's, without comments, docstrings and layout; words and signs
in C++. `--write` lowers the numbers of the budget to what is there now; it raises none.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = ROOT / "tests" / "repo" / "budget.toml"
_SUFFIXES = (".py", ".cpp", ".hpp")
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip
_HAVE_DOCSTRINGS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Size:
    lines: int
    tokens: int

    def __add__(self, other: Size) -> Size:
        return Size(self.lines + other.lines, self.tokens + other.tokens)


def size_of_source(text: str, suffix: str) -> Size:
    '''Return the lines and tokens of a source file.

    >>> size_of_source('"""About this."""\\nx = 1  # one\\n', ".py")
    Size(lines=2, tokens=3)
    '''
    if suffix != ".py":
        return Size(text.count("\n"), len(re.findall(r"\w+|[^\w\s]", text)))
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    counted = [
        token
        for token in tokens
        if token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start in docstrings)
    ]
    return Size(text.count("\n"), len(counted))


def sizes_of_packages(packages: list[str]) -> dict[str, Size]:
    """Return the size of every package: a folder with all below it, less the packages that lie in it."""
    sizes = dict.fromkeys(packages, Size(0, 0))
    for top in {package.partition("/")[0] for package in packages}:
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix in _SUFFIXES and "__pycache__" not in file.parts:
                path = file.relative_to(ROOT).as_posix()
                package = max((one for one in packages if path.startswith(f"{one}/")), key=len)
                sizes[package] += size_of_source(file.read_text(encoding="utf-8"), file.suffix)
    return sizes


def main() -> int:
    packages = tomllib.loads(BUDGET.read_text())["packages"]
    sizes, text = sizes_of_packages(list(packages)), BUDGET.read_text()
    for name, recorded in packages.items():
        size = sizes[name]
        print(f"{name:28} {size.lines:7,} lines {size.tokens:8,} tokens, budget {recorded['budget']:6,} lines")
        if "--write" in sys.argv:
            lines, tokens = min(size.lines, recorded["lines"]), min(size.tokens, recorded["tokens"])
            before = f'"{name}" = {{ lines = {recorded["lines"]}, tokens = {recorded["tokens"]},'
            assert before in text, f"{name} is not written as this writes it"
            text = text.replace(before, f'"{name}" = {{ lines = {lines}, tokens = {tokens},')
    if "--write" in sys.argv:
        BUDGET.write_text(text)
    total = sum(sizes.values(), Size(0, 0))
    print(f"{'in all':28} {total.lines:7,} lines {total.tokens:8,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
