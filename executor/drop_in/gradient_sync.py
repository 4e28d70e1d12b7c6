"""When a training loop's gradients are reduced: once a step, after its last backward, in one order on every replica.

Megatron's schedules let the last micro-batch's backward start the reduction of each bucket as it comes (overlap). Plans
of replicas differ, and so would the order in which their ranks come to the buckets, which then wait for each other for
ever. So all backwards run within `no_sync`; then each chunk, the first first, starts all its buckets in Megatron's
order, and `finalize_model_grads_func` waits for them. Buckets still travel side by side, none beside a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.stages.chunk_runner import GradientAccumulator


class StepGradients(GradientAccumulator):
    """GradientAccumulator of a model in a Megatron training loop, which itself zeroes the buffers before a step.

    A context manager around the step: gradients are not synchronised within until `reduce`.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: Any,
        groups: Any,
        *,
        force_all_reduce: bool = False,
        in_v: bool = False,
    ) -> None:
        """`groups` are the loop's ProcessGroupCollection. `in_v` the last stage's count of tokens is told to all ranks
        of its pipeline; else it is where Megatron looks for it, on the last."""
        self._chunks, self._config, self._groups = chunks, config, groups
        self._force_all_reduce, self._in_v = force_all_reduce, in_v
        self._unsynchronised = ExitStack()
        self._num_tokens = torch.zeros((), dtype=torch.int, device=_device(chunks))

    def __enter__(self) -> StepGradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unsynchronised.close()

    def count_tokens(self, num_tokens: torch.Tensor) -> None:
        """Take in the number of target tokens of one micro-batch, as its loss function counted them."""
        self._num_tokens += num_tokens

    def begin(self, plan: ExecutionPlan) -> None:
        no_sync = self._config.no_sync_func
        for enter in no_sync if isinstance(no_sync, list) else [no_sync] * (no_sync is not None):
            self._unsynchronised.enter_context(enter())
        for chunk in self._chunks:
            if _overlaps(chunk):
                self._unsynchronised.enter_context(_as_without_overlap(chunk.ddp_config))
        if len(self._chunks) > 1:  # as Megatron's interleaved schedule, which alone calls it
            for chunk, start in zip(
                self._chunks, functions_of_chunks(self._config.param_sync_func, self._chunks), strict=False
            ):
                start(chunk.parameters())

    def add(self) -> None: ...

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        if (main_grad := getattr(weight, "main_grad", None)) is not None:
            main_grad.add_(gradient)
        else:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def reduce(self) -> None:
        self._unsynchronised.close()
        for chunk, start in zip(self._chunks, self._starts(), strict=False):
            start(chunk.parameters())
        if self._config.finalize_model_grads_func is not None:
            if self._in_v:
                dist.all_reduce(self._num_tokens, group=self._groups.pp)
            num_tokens = self._num_tokens if self._config.calculate_per_token_loss else None
            self._config.finalize_model_grads_func(
                list(self._chunks), num_tokens, pg_collection=self._groups, force_all_reduce=self._force_all_reduce
            )

    def _starts(self) -> list[Callable[..., Any]]:
        """What starts each chunk's reduction before it is waited for. Where backwards start it in stock schedules, of
        one chunk on the first stage's rank, `grad_sync_func` is not called by them either."""
        if self._force_all_reduce:
            return [partial(_start_all_reduces, chunk) for chunk in self._chunks]
        own_starts = [_own_start(chunk) for chunk in self._chunks] if self._config.no_sync_func is not None else []
        configured_starts = functions_of_chunks(self._config.grad_sync_func, self._chunks)
        by_backwards = len(self._chunks) == 1 and self._groups.pp.rank() == 0 and hasattr(self._chunks[0], "ddp_config")
        return own_starts if own_starts and (by_backwards or not configured_starts) else configured_starts


def _overlaps(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))


def _own_start(chunk: Any) -> Callable[..., Any]:
    """The chunk's own start; nothing for a DDP without overlap, which reduces while it is waited for and would reduce
    twice."""
    if hasattr(chunk, "ddp_config") and not _overlaps(chunk):
        return lambda _: None
    start: Callable[..., Any] = chunk.start_grad_sync
    return start


def _start_all_reduces(chunk: Any, _: Any) -> None:
    """As `start_grad_sync`, which takes no `force_all_reduce`. Without overlap `finish_grad_sync` takes it, and starts
    them itself."""
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups) if _overlaps(chunk) else ():
        group.start_grad_sync(force_all_reduce=True)


@contextmanager
def _as_without_overlap(ddp_config: Any) -> Iterator[None]:
    """Within: DDP's hooks add up gradients as usual. They do not start a reduction, and do not require gradients that a
    split backward computes later."""
    ddp_config.overlap_grad_reduce = False
    try:
        yield
    finally:
        ddp_config.overlap_grad_reduce = True


def functions_of_chunks(functions: Any, chunks: Sequence[Any]) -> list[Callable[..., Any]]:
    """A configuration's function, one for all chunks or a list of one each, as a list; empty for None."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions] * len(chunks)


def check_sync(chunks: Sequence[Any], config: Any) -> None:
    """Refuse what would reduce gradients in the order of the plan, or never. Errors: ConfigError."""
    for chunk in chunks:
        if _overlaps(chunk) and config.no_sync_func is None:
            raise ConfigError(
                "overlap_grad_reduce is on but config.no_sync_func is None: each micro-batch would reduce its gradients"
                " by itself; set config.no_sync_func = model.no_sync (a list, one a chunk, with virtual stages)"
            )
        if config.no_sync_func is not None and config.grad_sync_func is None and not hasattr(chunk, "start_grad_sync"):
            raise ConfigError(
                f"config.no_sync_func is set but a {type(chunk).__name__} starts its reduction in backwards alone,"
                " which a plan orders: wrap chunks in megatron-core's DistributedDataParallel, or set"
                " config.grad_sync_func"
            )


def _device(chunks: Sequence[Any]) -> torch.device:
    parameter = next((parameter for chunk in chunks for parameter in chunk.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device
