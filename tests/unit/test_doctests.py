"""Every example in a docstring does what it shows."""

import doctest
import importlib
from pathlib import Path
from typing import Any

OPTIONAL = {"torch", "megatron", "deepspeed", "transformers", "flash_attn", "tokenizers", "zstandard"}


def test_examples_of_docstrings_are_true(all_sources: Any, root: Path) -> None:
    told: list[str] = []
    named = [(source.path, source.module) for source in all_sources]
    for folder in ("repo", "support"):  # examples of tests, too
        paths = [file.relative_to(root) for file in sorted((root / "tests" / folder).glob("*.py"))]
        named += [(str(path), ".".join(path.with_suffix("").parts)) for path in paths]
    for path, name in named:
        if ">>>" not in (root / path).read_text():
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OPTIONAL:
                continue  # not installed here
            raise
        examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
        if not examples:
            told.append(f"{path} holds >>> but no example was found in it")
        for example in examples:
            doctest.DocTestRunner().run(example, out=told.append)
    assert not told, "".join(told)
