"""What autograd keeps is counted, and goes with the graph."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from dynapipe_ext.executor.stages.chunk_runner import StoredBytes


def test_a_graph_that_is_dropped_before_its_backward_takes_what_was_counted_with_it() -> None:
    stored, x = StoredBytes(), torch.ones(4, requires_grad=True)
    with stored.counting():
        y = x.exp()  # keeps its own output
    assert stored.num_bytes == 16
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(gradient, y.detach())
    seen = weakref.ref(y)
    del y
    gc.collect()
    assert seen() is None


def test_what_was_changed_in_place_after_it_was_saved_is_refused_as_without_counting() -> None:
    stored, x = StoredBytes(), torch.ones(4, requires_grad=True)
    with stored.counting():
        y = x.exp()
    y.detach().add_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(4,\) .* was changed in place .* version is 1, not 0"):
        y.sum().backward()
