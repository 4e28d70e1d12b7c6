"""What tests of conversion share: a tiny model as transformers saves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import saved, tensors_in, tiny


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("model") / "source", tokenizer=True)


@pytest.fixture(scope="session")
def wanted(origin: Path) -> dict[str, torch.Tensor]:
    return tensors_in(origin)
