"""What autograd keeps is counted, and goes with the graph."""

from __future__ import annotations

import gc
import weakref

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
