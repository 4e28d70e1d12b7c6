"""What Megatron-LM, where it is here beside megatron-core, keeps for its whole process."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def has_training_loop() -> bool:
    """Whether Megatron-LM is here, not megatron-core alone."""
    return importlib.util.find_spec("megatron.training") is not None


def parsed_arguments() -> Any:
    """Those of Megatron-LM once it has parsed them; None before, and for a script without."""
    if not has_training_loop():
        return None
    variables: Any = importlib.import_module("megatron.training.global_vars")
    return variables._GLOBAL_ARGS


def rescale_router_losses(factor: float) -> None:
    """Those that this step's routers have added up for the log, which divides them by Megatron's own number of
    micro-batches."""
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for tracked in utils.get_moe_layer_wise_logging_tracker().values():
        tracked["values"] *= factor
