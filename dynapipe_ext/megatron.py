"""Inside Megatron's training loops: planned schedules and split backwards for scripts as they are.

`forward_backward_func` stands where `megatron.core.pipeline_parallel.get_forward_backward_func()` is called;
`installed()` puts it there; `python -m dynapipe_ext.megatron SCRIPT ARGUMENTS` runs a script with it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.executor.megatron.arguments import add_arguments
    from dynapipe_ext.executor.megatron.datasets import datasets_provider
    from dynapipe_ext.executor.megatron.drop_in import DropInSettings, ForwardBackward, forward_backward_func
    from dynapipe_ext.executor.megatron.installed import installed
    from dynapipe_ext.executor.megatron.planned_data import PlannedSteps

_HOMES = {
    "DropInSettings": "dynapipe_ext.executor.megatron.drop_in",
    "ForwardBackward": "dynapipe_ext.executor.megatron.drop_in",
    "PlannedSteps": "dynapipe_ext.executor.megatron.planned_data",
    "add_arguments": "dynapipe_ext.executor.megatron.arguments",
    "datasets_provider": "dynapipe_ext.executor.megatron.datasets",
    "forward_backward_func": "dynapipe_ext.executor.megatron.drop_in",
    "installed": "dynapipe_ext.executor.megatron.installed",
}

__all__ = [
    "DropInSettings",
    "ForwardBackward",
    "PlannedSteps",
    "add_arguments",
    "datasets_provider",
    "forward_backward_func",
    "installed",
]

if __name__ == "__main__":
    from dynapipe_ext.executor.megatron.script import main

    sys.exit(main(sys.argv[1:]))

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
