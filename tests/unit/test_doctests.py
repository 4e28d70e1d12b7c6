"""Every example in a docstring does what it shows."""

import doctest
import importlib
from typing import Any

import pytest

OPTIONAL = {"torch", "megatron", "deepspeed", "transformers", "flash_attn", "tokenizers", "zstandard", "matplotlib"}


def test_examples_of_docstrings_are_true(source: Any) -> None:
    if ">>>" not in source.file.read_text():
        return
    try:
        module = importlib.import_module(source.module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0, "the file holds >>> but no example was found in it"
    assert outcome.failed == 0
