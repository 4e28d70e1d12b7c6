"""What cannot go together, refused by name before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError

# Settings of a TransformerConfig that another schedule than Megatron's own cannot follow, and what to do instead.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_size": ((1,), "give 1: sequences that are cut over ranks are not supported"),
    "hybrid_context_parallel": ((False,), "leave it out: sequences that are cut over ranks are not supported"),
    "enable_cuda_graph": ((False,), "leave it out: a graph fixes the shapes that a plan changes"),
    "external_cuda_graph": ((False,), "leave it out: a graph fixes the shapes that a plan changes"),
    "cuda_graph_impl": (("none",), 'give "none": a graph fixes the order that a plan decides'),
    "overlap_moe_expert_parallel_comm": ((False,), "leave it out: it runs forwards and backwards in its own order"),
    "delay_wgrad_compute": ((False,), "leave it out, and split backwards by split_backward"),
    "defer_embedding_wgrad_compute": ((False,), "leave it out, and split backwards by split_backward"),
    "num_microbatches_with_partial_activation_checkpoints": (
        (),
        "leave it out: it follows the number of micro-batches in flight of Megatron's own schedule",
    ),
    "fine_grained_activation_offloading": ((False,), "leave it out: it follows the order of Megatron's own schedule"),
    "cpu_offloading": ((False,), "leave it out: it follows the order of Megatron's own schedule"),
}


def check_config(config: Any, chunks: Sequence[Any]) -> None:
    """Errors: ConfigError, naming the setting, its value and the next move."""
    for name, (fine, move) in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value not in fine:
            raise ConfigError(f"{name} is {value!r}, which planned schedules do not support: {move}")
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) or "FSDP" in type(chunk).__name__:
            raise ConfigError(
                "the model is sharded by FSDP, whose gathers follow the order of micro-batches: use Megatron's"
                " DistributedDataParallel with the distributed optimizer"
            )


def check_call(
    *,
    num_microbatches: int,
    adjust_tensor_shapes_fn: Callable[..., Any] | None,
    p2p_communicator: Any,
    pg_collection: Any,
) -> None:
    """Refuse arguments of a forward-backward function that would otherwise have no effect. Errors: ConfigError."""
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches} but must be at least 1")
    given = {
        "adjust_tensor_shapes_fn": (adjust_tensor_shapes_fn, "hidden states travel in the shapes of the plan"),
        "p2p_communicator": (p2p_communicator, "transfers run over process groups of this package"),
        "pg_collection": (pg_collection, "process groups are those of megatron.core.parallel_state"),
    }
    for name, (value, reason) in given.items():
        if value is not None:
            raise ConfigError(f"{name} was given, but {reason}: leave it out")
