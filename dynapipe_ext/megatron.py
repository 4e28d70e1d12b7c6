"""Inside Megatron's training loops: variable micro-batches, planned schedules and split backwards for scripts as they
are.

`forward_backward_func` stands where `megatron.core.pipeline_parallel.get_forward_backward_func()` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.executor.megatron.drop_in import DropInSettings, ForwardBackward, forward_backward_func

_HOMES = {
    "DropInSettings": "dynapipe_ext.executor.megatron.drop_in",
    "ForwardBackward": "dynapipe_ext.executor.megatron.drop_in",
    "forward_backward_func": "dynapipe_ext.executor.megatron.drop_in",
}

__all__ = ["DropInSettings", "ForwardBackward", "forward_backward_func"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
