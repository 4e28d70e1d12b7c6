"""The README is short; links, commands, flags, messages and generated parts of it and of the guides are true."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import configuration_page, families_page, site
from tests.support.pages import (
    all_pages,
    anchors,
    broken_links,
    guides,
    inline_commands,
    prose,
    readme_commands,
    table_commands,
    words,
)

MOST_WORDS, MOST_WORDS_A_LINE, MOST_WORDS_A_CELL = 1800, 60, 20
MOST_LIBRARY_LINES = 15
SOURCES = ("dynapipe_ext", "schedules", "executor", "tools", "launch")
# Flags of other programs, of Megatron-LM and of benches, which the pages name.
FOREIGN = {"--nproc-per-node", "--nodelist", "--gpus-per-node", "--use-checkpoint-args", "--local-dir", "--shared"}


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    return configuration_page.parsers()


def test_the_readme_is_short(readme: str) -> None:
    assert words(readme) <= MOST_WORDS


def test_no_line_or_cell_of_the_readme_is_long(readme: str) -> None:
    lines = prose(readme).splitlines()
    text = [line for line in lines if not line.startswith("|")]
    assert [line for line in text if words(line) > MOST_WORDS_A_LINE] == []
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if words(cell) > MOST_WORDS_A_CELL] == []


def test_a_picture_stands_before_the_first_section_of_the_readme(readme: str, root: Path) -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", readme.partition("\n## ")[0])
    drawn = (root / picture).read_text()
    assert "prefers-color-scheme:dark" in drawn


def test_no_relative_link_is_broken(root: Path) -> None:
    assert list(broken_links(all_pages(root), root)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# Some `heading`\n")
    text = "[a](there.md) [b](there.md#some-heading) [c](gone.md) [d](there.md#gone) [e](https://example.org) `[f](x)`"
    found = list(broken_links({"page.md": text}, tmp_path))
    assert [line.split()[1] for line in found] == ["gone.md", "there.md#gone"]
    assert anchors("# Some `heading`\n") == {"some-heading"}


def test_the_links_of_the_site_hold_in_its_one_folder(tmp_path: Path, root: Path) -> None:
    """As they are before mkdocs makes the reference of them, a page a package and a section a public module."""
    (tmp_path / "api").mkdir()
    pages = dict([*site.texts(), *site.reference()])
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    for picture in (root / ".github").glob("*.svg"):
        (tmp_path / picture.name).touch()
    assert list(broken_links(pages, tmp_path)) == []
    assert "::: dynapipe_ext.schedules.planner\n" in pages["api/dynapipe_ext.schedules.md"]
    assert not [page for page in pages if "._" in page]


def test_the_index_lists_every_guide(root: Path) -> None:
    index = (root / ".github/docs/README.md").read_text()
    assert {file.name for file in guides(root)} - {"README.md"} == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


def test_every_command_line_of_the_pages_parses(root: Path, parsers: dict[str, argparse.ArgumentParser]) -> None:
    """By the parser of its subcommand."""
    parsed = 0
    for page, text in all_pages(root).items():
        if (page != "README.md" and "/docs/" not in page) or page.endswith("configuration.md"):
            continue  # written for others; generated
        for command in {*readme_commands(text), *table_commands(text), *inline_commands(text)}:
            program, *arguments = shlex.split(command)
            if program != "dynapipe" or "…" in command or not arguments or arguments[0] == "COMMAND":
                continue
            assert arguments[0] in parsers, f"{page}: {command}"
            if len(arguments) == 1:  # the name of a command, in a sentence
                continue
            try:
                parsers[arguments[0]].parse_args(arguments[1:])
            except SystemExit as ended:
                if ended.code:  # --help ends well
                    pytest.fail(f"{page}: {command}")
            parsed += 1
    assert parsed > 30


def test_every_flag_that_the_pages_name_exists(root: Path, parsers: dict[str, argparse.ArgumentParser]) -> None:
    known = {flag for parser in parsers.values() for flag in parser._option_string_actions} | FOREIGN
    unknown = {}
    for page in (root / "README.md", *guides(root)):
        if page.name in ("megatron-lm.md", "configuration.md"):  # of Megatron-LM; generated
            continue
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", prose(page.read_text())))
        if flags - known:
            unknown[page.name] = flags - known
    assert unknown == {}


def test_the_page_of_settings_is_made_of_their_declarations() -> None:
    said = configuration_page.PAGE.read_text()
    assert said == configuration_page.page(), "write it again: python -m tests.support.configuration_page"


def test_the_figures_of_the_readme_and_of_the_results_are_those_of_the_result_files(root: Path) -> None:
    headlines = bench(root, "headlines")
    for page, name, block in headlines.blocks():
        said = page.read_text()
        assert said == headlines.written(said, name, block), "write them again: python tests/bench/headlines.py --write"
    assert len(headlines.headlines().splitlines()) == 2 + 5


def test_the_picture_of_the_readme_has_the_figures_of_its_workload(root: Path) -> None:
    headlines = bench(root, "headlines")
    heads = re.findall(r'class="head">([^<]*)', (root / ".github" / "packed.svg").read_text())
    assert heads == headlines.picture_heads(), "draw it again: python tests/bench/workload.py --costs DIR --shared DIR"


def bench(root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, root / "tests" / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_say_how_to_run_every_bench(root: Path) -> None:
    page = (root / ".github/docs/results.md").read_text()
    scripts = [file for file in (root / "tests/bench").glob("*.py") if '__name__ == "__main__"' in file.read_text()]
    assert [file.name for file in scripts if f"tests/bench/{file.name}" not in page] == []


def test_every_message_that_the_page_of_errors_quotes_is_one_of_the_source(root: Path) -> None:
    quoted = re.findall(r"^> (.+)$", (root / ".github/docs/errors.md").read_text(), re.M)
    source = "\n".join(file.read_text() for folder in SOURCES for file in (root / folder).rglob("*.py"))
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # strings that stand one below the other
    assert len(quoted) > 30
    parts = {part.strip() for message in quoted for part in message.split("…") if part.strip(" :,")}
    assert sorted(part for part in parts if part not in joined) == []


def test_the_example_of_the_readme_has_fifteen_lines_at_most(readme: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(block.splitlines()) <= MOST_LIBRARY_LINES


def test_the_table_of_families_is_that_of_their_declaration() -> None:
    written = families_page.PAGE.read_text()
    assert written == families_page.page(), "write it again: python -m tests.support.families_page"
