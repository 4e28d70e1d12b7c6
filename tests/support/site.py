"""The guides and an API reference as a site of static pages.

    pip install mkdocs==1.6.1 "mkdocstrings[python]==1.0.8" mkdocstrings-python==2.0.11
    python -m tests.support.site          writes build/site; a broken link or reference ends it with status 1

The reference is made of docstrings without importing anything: a page a folder, a section a module.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES, SOURCES = ROOT / "build" / "pages", ROOT / "build" / "typing"
FOLDERS = ("dynapipe_ext", "schedules", "executor", "tools", "launch")


def texts() -> Iterator[tuple[str, str]]:
    """The guides and what contributors read, by file name, with links that hold where all lie in one folder."""
    for file in (*(ROOT / ".github" / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md")):
        yield file.name, in_one_folder(file.read_text())


def in_one_folder(text: str) -> str:
    """
    >>> in_one_folder("[a](../A.md#b) ![p](../p.svg) [s](../../tests/s.py) [c](c.md) [d](docs/d.md)")
    '[a](A.md#b) ![p](p.svg) s [c](c.md) [d](d.md)'
    """
    text = re.sub(r"(?<!!)\[([^\]]*)\]\(\.\./\.\./[^)]*\)", r"\1", text)  # files of the repository are no pages
    return re.sub(r"\]\((?:\.\./|docs/)", "](", text)


def reference() -> Iterator[tuple[str, str]]:
    """A page for each folder of the package that has public names, and one that lists them."""
    rows = []
    for name, modules in sorted(by_package().items()):
        yield f"api/{name}.md", "\n\n".join([f"# {name}", *(f"::: {module}" for module in modules)]) + "\n"
        rows.append(f"| [{name}](api/{name}.md) | {trade(name)} |")
    yield "api.md", "\n".join(["# API reference", "", "| package | what |", "|---|---|", *rows]) + "\n"


def by_package() -> Mapping[str, list[str]]:
    """The public modules of each package, by their names when installed."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "dynapipe_ext" else ("dynapipe_ext", *parts)
            if not any(part.startswith("_") for part in parts):
                found.setdefault(".".join(parts[:-1]), []).append(".".join(parts))
    return found


def trade(package: str) -> str:
    """The first sentence of a package's docstring."""
    parts = package.split(".")
    folder = ROOT.joinpath(*(parts[1:] if len(parts) > 1 and parts[1] in FOLDERS else parts))
    said = " ".join((ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split())
    return said.partition(". ")[0].rstrip(".").replace("|", "\\|")


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "api").mkdir(parents=True)
    for name, text in (*texts(), *reference()):
        (PAGES / name).write_text(text, encoding="utf-8")
    for picture in (ROOT / ".github").glob("*.svg"):
        shutil.copy(picture, PAGES)
    installed = SOURCES / "dynapipe_ext"
    installed.mkdir(parents=True, exist_ok=True)
    for part in (*(ROOT / "dynapipe_ext").iterdir(), *(ROOT / folder for folder in FOLDERS[1:])):
        link = installed / part.name
        if not link.is_symlink():
            link.symlink_to(part)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / ".github" / "mkdocs.yml")]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
