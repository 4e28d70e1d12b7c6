"""Which shapes an accelerator is timed on, and what a device with less memory does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynapipe_ext.executor.measuring import rate
from dynapipe_ext.models.architecture import Architecture

CPU = torch.device("cpu")


def shape(max_seq_len: int) -> Architecture:
    return Architecture.gpt(
        num_layers=1,
        hidden_size=8,
        num_heads=1,
        num_query_groups=1,
        ffn_hidden_size=8,
        gated_mlp=False,
        tied_embeddings=True,
        vocab_size=8,
        max_seq_len=max_seq_len,
    )


def test_shapes_of_an_accelerator_have_as_many_positions_in_shorter_rows() -> None:
    assert rate._large_shapes(shape(8192)) == [(4, 1024), (16, 512), (8, 1024), (8, 2048), (4, 4096)]
    assert rate._large_shapes(shape(1024)) == [(4, 1024), (16, 512), (8, 1024), (16, 1024)]
    assert rate._large_shapes(shape(64)) == [(64, 64), (128, 64), (256, 64)]


def times(monkeypatch: pytest.MonkeyPatch, fits: int, error: Exception) -> list[float]:
    """Of five shapes, of which so many fit."""
    weight = torch.nn.Linear(2, 2)

    def timed(model: Any, rows: int, *_: Any) -> float:
        weight.weight.grad = torch.ones(2, 2)
        if rows > fits:
            raise error
        weight.weight.grad = None
        return float(rows)

    monkeypatch.setattr(rate, "_forward_backward_s", timed)
    shapes = [(rows, 8) for rows in range(1, 6)]
    seconds = rate._seconds_of(weight, shapes, "packed", CPU, lambda doing: None)
    assert weight.weight.grad is None
    return list(seconds)


def test_shapes_that_do_not_fit_are_left_out_and_two_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert times(monkeypatch, 5, full) == [1, 2, 3, 4, 5]
    assert times(monkeypatch, 2, full) == [1, 2]
    with pytest.raises(torch.OutOfMemoryError):
        times(monkeypatch, 1, full)
    with pytest.raises(RuntimeError, match="an index"):
        times(monkeypatch, 3, RuntimeError("an index is out of bounds"))
