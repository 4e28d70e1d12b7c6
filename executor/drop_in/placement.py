"""A V of stages in Megatron-LM's own loop, whose words (layouts of stages, first and last rank) know interleaved ones.

With two stages a rank, the second of rank p is an interleaved model's second of rank pp - 1 - p. So while that chunk is
built, fed, run or saved, Megatron's state names rank pp - 1 - p, and Megatron makes the chunk that the V needs here.

    stage   0 1 2 3        rank 0: stages 0 and 3, the second as on rank 1
    rank    0 1 1 0        rank 1: stages 1 and 2, the second as on rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dynapipe_ext.errors import ConfigError


def check_placement(args: Any) -> None:
    """Refuse, by Megatron-LM's arguments, what cannot lie in a V. Errors: ConfigError."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    num_chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if layout is None:
        raise ConfigError(
            "placement is v but pipeline_model_parallel_layout is not given, which says the layers of the stages that"
            ' are laid on ranks down and back up: give two stages a rank, such as "Et|t|t|tL" on two'
        )
    if num_chunks != 2:
        raise ConfigError(
            f"placement is v but pipeline_model_parallel_layout {str(layout)!r} has {num_chunks or 1} stages a rank:"
            " give 2"
        )
    if not getattr(args, "untie_embeddings_and_output_weights", False):
        raise ConfigError(
            "placement is v, whose first and last stage share a rank, but Megatron-LM sums the gradients of a tied"
            " embedding's two copies over the first and the last rank: give --untie-embeddings-and-output-weights, or"
            " leave --dynapipe-placement out"
        )
    if num_ahead := getattr(args, "mtp_num_layers", None):
        raise ConfigError(
            f"placement is v with mtp_num_layers {num_ahead}, for which Megatron-LM copies the embedding to the last"
            " rank, as it does a tied one: leave --mtp-num-layers out, or --dynapipe-placement"
        )
    if (getattr(args, "save", None) or getattr(args, "load", None)) and args.ckpt_format != "torch_dist":
        raise ConfigError(
            f"ckpt_format is {args.ckpt_format!r} with placement v, but only torch_dist names layers by their place in"
            " the model: give --ckpt-format torch_dist"
        )


@contextmanager
def as_interleaved(chunk: int | None) -> Iterator[None]:
    """Within: Megatron's state has this process on the rank where an interleaved model has a V's chunk of this rank."""
    from megatron.core import parallel_state

    if not chunk:
        yield
        return
    rank, pp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    parallel_state.set_pipeline_model_parallel_rank(pp - 1 - rank)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(rank)


def placed(provider: Callable[..., Any]) -> Callable[..., Any]:
    """Of a `model_provider`: one whose chunks are those of a V."""

    def provide(*arguments: Any, vp_stage: int | None = None, **keywords: Any) -> Any:
        from megatron.core import parallel_state

        with as_interleaved(vp_stage):
            rank, pp = (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_world_size(),
            )
            ends = {
                "pre_process": (rank, vp_stage) == (0, 0),
                "post_process": (rank, vp_stage) == (pp - 1, 1),
            }
            model = provider(*arguments, **keywords | ends, vp_stage=vp_stage)
        model.sharded_state_dict = partial(_as_interleaved_call, vp_stage, model.sharded_state_dict)
        return model

    return provide


def _as_interleaved_call(chunk: int | None, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with as_interleaved(chunk):
        return function(*arguments, **keywords)
