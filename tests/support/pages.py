"""The README and the pages beside it: where they lie, and what a reader finds in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def all_pages(root: Path) -> dict[str, str]:
    """Their text by their path: the README, the guides, and what contributors read."""
    files = [root / "README.md", *sorted((root / ".github").glob("*.md")), *guides(root)]
    return {file.relative_to(root).as_posix(): file.read_text() for file in files}


def guides(root: Path) -> list[Path]:
    return sorted((root / ".github" / "docs").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a language.

    >>> blocks("```python\\nx = 1\\n```\\n```bash\\nls\\n```\\n", "bash")
    ['ls\\n']
    """
    return [code for name, code in _FENCE.findall(text) if name == language]


def prose(text: str) -> str:
    """The text without its code blocks."""
    return _FENCE.sub("", text)


def readme_commands(text: str) -> list[str]:
    """Command lines of a Markdown text's ```bash blocks: continued lines joined, comments and blank lines left out.

    >>> readme_commands("```bash\\nrun --a \\\\\\n  --b  # why\\n\\n# note\\n```\\n```python\\nx\\n```")
    ['run --a --b']
    """
    commands = []
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if command:
                commands.append(command)
    return commands


def table_commands(text: str) -> list[str]:
    """Inline code of a Markdown text's tables that starts with `dynapipe` or `torchrun`.

    >>> table_commands("| a | `dynapipe plan --x 1` (`--y`), `torchrun -m a` |\\n| `dynapipe` | and `dynapipeline b` |")
    ['dynapipe plan --x 1', 'torchrun -m a']
    """
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`((?:dynapipe|torchrun) [^`]+)`", row)]


def inline_commands(text: str) -> list[str]:
    """Inline code anywhere that is a command line of `dynapipe`.

    >>> inline_commands("say `dynapipe plan --x` or `dynapipe_ext`")
    ['dynapipe plan --x']
    """
    return re.findall(r"`(dynapipe [^`\n]+)`", prose(text))


def words(text: str) -> int:
    """What is set off by blanks and holds a letter or a figure: tables, code and addresses count, rules do not.

    >>> words("| `a b` | [c](d.md) |\\n|---|---|\\n- 1.5 s")
    5
    """
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def anchors(text: str) -> set[str]:
    """The names by which headings are linked to, as GitHub makes them.

    >>> sorted(anchors("# A `b`: c-d\\n## A `b`: c-d\\n### [run]\\n"))
    ['a-b-c-d', 'a-b-c-d-1', 'run']
    """
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.M):
        bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", bare.lower()).strip().replace(" ", "-")
        count = sum(1 for known in found if known == name or re.fullmatch(rf"{re.escape(name)}-\d+", known))
        found.add(f"{name}-{count}" if count else name)
    return found


def broken_links(pages: dict[str, str], root: Path) -> Iterator[str]:
    """Relative links to no file, or to no heading of a page."""
    for page, text in pages.items():
        for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(text))):
            if re.match(r"\w+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (root / page).parent / path if path else root / page
            if not file.exists():
                yield f"{page}: {target}"
            elif anchor and anchor not in anchors(file.read_text()):
                yield f"{page}: {target} names no heading"
