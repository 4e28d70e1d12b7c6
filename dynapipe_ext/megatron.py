"""Inside Megatron's training loops: planned schedules and split backwards for scripts as they are.

`forward_backward_func` stands where `megatron.core.pipeline_parallel.get_forward_backward_func()` is called;
`installed()` puts it there; `python -m dynapipe_ext.megatron SCRIPT ARGUMENTS` runs a script with it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.executor.drop_in.arguments import add_arguments
    from dynapipe_ext.executor.drop_in.datasets import datasets_provider
    from dynapipe_ext.executor.drop_in.drop_in import ForwardBackward, forward_backward_func
    from dynapipe_ext.executor.drop_in.installed import installed
    from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps
    from dynapipe_ext.executor.drop_in.settings import DropInSettings

_HOMES = {
    "DropInSettings": "dynapipe_ext.executor.drop_in.settings",
    "ForwardBackward": "dynapipe_ext.executor.drop_in.drop_in",
    "PlannedSteps": "dynapipe_ext.executor.drop_in.planned_data",
    "add_arguments": "dynapipe_ext.executor.drop_in.arguments",
    "datasets_provider": "dynapipe_ext.executor.drop_in.datasets",
    "forward_backward_func": "dynapipe_ext.executor.drop_in.drop_in",
    "installed": "dynapipe_ext.executor.drop_in.installed",
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
    from dynapipe_ext.executor.drop_in.script import main
    from dynapipe_ext.launch.store import asked_store

    sys.exit(main(sys.argv[1:], asked_store))

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
