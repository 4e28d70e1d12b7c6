"""What Megatron-LM, where it is here beside megatron-core, keeps for its whole process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def training_loop() -> Any:
    """Megatron-LM's module of that name, imported; None where megatron-core is alone.

    Wheels of megatron-core have its loop from 0.17 on, but not all that it imports: where that is missing a script on
    megatron-core alone runs all the same, and one that uses the loop is told by its own import.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return None
    try:
        return importlib.import_module("megatron.training.training")
    except ImportError:
        return None


def parsed_arguments() -> Any:
    """Those of Megatron-LM once it has parsed them; None before, and for a script without."""
    variables: Any = sys.modules.get("megatron.training.global_vars")
    return None if variables is None else variables._GLOBAL_ARGS


def rescale_router_losses(factor: float) -> None:
    """Those that this step's routers have added up for the log, which divides them by Megatron's own number of
    micro-batches."""
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for tracked in utils.get_moe_layer_wise_logging_tracker().values():
        tracked["values"] *= factor
