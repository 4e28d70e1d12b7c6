"""Every example in a docstring does what it shows."""

import doctest
import importlib
from typing import Any

OPTIONAL = {"torch", "megatron", "deepspeed", "transformers", "flash_attn", "tokenizers", "zstandard", "matplotlib"}


def test_examples_of_docstrings_are_true(all_sources: Any) -> None:
    told: list[str] = []
    for source in all_sources:
        if ">>>" not in source.file.read_text():
            continue
        try:
            module = importlib.import_module(source.module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OPTIONAL:
                continue  # not installed here
            raise
        examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
        if not examples:
            told.append(f"{source.path} holds >>> but no example was found in it")
        for example in examples:
            doctest.DocTestRunner().run(example, out=told.append)
    assert not told, "".join(told)
