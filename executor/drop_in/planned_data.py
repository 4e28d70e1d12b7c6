"""Data iterators that yield whole steps: the plan, and this replica's micro-batches in its order."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.batch.topology import ScheduleName, widths_of
from dynapipe_ext.data.batches import GlobalBatches, array_digest
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.drop_in.samples import SampleSource, megatron_arrays
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.loader import DynaPipeDataLoader, LoadedStep
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.collectives import gather_json
from dynapipe_ext.schedules.planner import Planner


class PlannedSteps:
    """An iterator over steps without end, epoch after epoch: `next` gives (micro_batches, plan).

    Each global batch has `batch_size` samples, in an order that depends on `seed` and epoch alone, so the step after
    `consumed_samples` of them is the same on any number of ranks; samples that do not fill the last batch of an epoch
    are in another order, and so mostly trained, in the next. `bind` says for which model, before the first `next`.
    Errors: ConfigError for a batch that the samples do not fill, and where `consumed_samples` is no multiple of it.
    """

    def __init__(
        self, source: SampleSource, *, batch_size: int, seed: int, consumed_samples: int = 0, forward_only: bool = False
    ) -> None:
        if consumed_samples % batch_size:
            raise ConfigError(
                f"{consumed_samples} samples were consumed, which is no multiple of the global batch of {batch_size}:"
                " go on with the global batch size that the run began with"
            )
        self._source, self._batch_size, self._seed = source, batch_size, seed
        self._lengths = as_length_array(source.lengths)
        self._num_steps = len(GlobalBatches(self._lengths, batch_size=batch_size, seed=seed, drop_last=True))
        self._next_step = consumed_samples // batch_size
        self.forward_only = forward_only
        self._steps: Generator[LoadedStep, None, None] | None = None

    def bind(self, pipeline: MegatronPipeline, settings: DropInSettings) -> str | None:
        """Plan for this model; once. The first time, what must be the same on all ranks for their plans to be; with a
        store, a collective call.

        Errors: ConfigError where the model cannot be planned for.
        """
        if self._steps is not None:
            return None
        planner = data_planner(pipeline, settings, forward_only=self.forward_only)
        self._steps = self._loaded(planner, pipeline, self._planner_processes(pipeline, settings))
        data = (array_digest(self._lengths), self._batch_size, self._seed, self._next_step)
        rules = (planner.memory_limit_bytes, planner.as_keywords(), settings.store, settings.timeout_s)
        widths = planner.allowed_widths
        return repr((data, planner.topology, widths, planner.costs.fingerprint(), rules))

    def close(self) -> None:
        """End the planner process, if there is one; no step comes after."""
        if self._steps is not None:
            self._steps.close()

    def __iter__(self) -> PlannedSteps:
        return self

    def __next__(self) -> LoadedStep:
        if self._steps is None:
            raise ConfigError("planned data were asked for a step by another schedule than the planned one")
        return next(self._steps)

    @property
    def last_lengths(self) -> Sequence[int]:
        """Positions of each sample of the last global batch, over all replicas."""
        epoch, step = divmod(self._next_step - 1, self._num_steps)
        batches = GlobalBatches(
            self._lengths, batch_size=self._batch_size, seed=self._seed, epoch=epoch, drop_last=True
        )
        lengths: list[int] = self._lengths[np.array(batches[step]), 0].tolist()
        return lengths

    def _planner_processes(self, pipeline: MegatronPipeline, settings: DropInSettings) -> dict[str, Any]:
        """What a loader needs to know of them. Evaluation plans in line: its steps are few, and far between."""
        if settings.store is None or self.forward_only:
            return {}
        namespace = gather_json(secrets.token_hex(8), pipeline.device)[0]  # the first rank's, on all
        delivery = PlanDelivery(namespace=namespace, timeout_s=settings.timeout_s)
        return {"num_workers": 1, "store": settings.store, "delivery": delivery}

    def _loaded(
        self, planner: Planner, pipeline: MegatronPipeline, processes: dict[str, Any]
    ) -> Generator[LoadedStep, None, None]:
        with DynaPipeDataLoader(  # on every stage: any may ask its iterator
            self._source,
            planner,
            collate_fn=megatron_arrays,
            batch_size=self._batch_size,
            drop_last=True,
            shuffle=True,
            seed=self._seed,
            coordinates=pipeline.coordinates,
            **processes,
        ) as loader:
            epoch, step = divmod(self._next_step, self._num_steps)
            loader.load_state_dict(
                loader.state_dict() | {"epoch": epoch, "step": step, "global_step": self._next_step, "order": None}
            )
            while True:
                for loaded in loader:
                    self._next_step += 1
                    yield loaded


def data_planner(pipeline: MegatronPipeline, settings: DropInSettings, *, forward_only: bool) -> Planner:
    """The same on every rank. Errors: ConfigError for a model whose bytes nobody has said."""
    if not pipeline.counts_memory:
        raise ConfigError(
            "micro-batches can only be cut for a model whose costs are known, which are counted for GPTModel alone:"
            " give costs in a script of your own, installed(costs=TokenCosts(…)), or leave planned data out"
        )
    schedule = _schedule(pipeline, settings)
    of_model = {
        "schedule": schedule,
        "pad_multiple": math.lcm(settings.pad_multiple, pipeline.pad_multiple),
        "split_backward": settings.split_backward and schedule == "adaptive",
        "replica_counts": "free" if schedule == "adaptive" else "equal",
        "recompute": pipeline.recompute or "auto",
    }
    is_chosen = settings.width == "auto" and pipeline.topology.dp > 1
    topology = pipeline.topology if settings.width == "auto" else pipeline.topology.at_width(settings.width)
    planner = Planner(
        topology,
        pipeline.costs,
        settings.limit_bytes if settings.limit_bytes is not None else pipeline.usable_bytes,
        **settings.as_keywords() | of_model,
        format=pipeline.activation_format,
        collectives=pipeline.replica_collectives,
        widths=widths_of(topology.dp) if is_chosen else (),
    )
    return replace(planner.for_forwards(), layout=settings.layout) if forward_only else planner


def _schedule(pipeline: MegatronPipeline, settings: DropInSettings) -> ScheduleName:
    """Where replicas meet inside micro-batches a published one, whose order is the same on all of them.

    Errors: ConfigError for what has no such order.
    """
    if not any(pipeline.replica_collectives.of_micro_batches):
        return "adaptive"
    if not pipeline.topology.placement:
        return "zb-h1" if settings.split_backward else "1f1b"
    if settings.split_backward:
        raise ConfigError(
            f"experts lie over replicas, which then need one order of micro-batches, but with virtual stages"
            f" ({pipeline.topology.placement_name}) split backwards have none: leave --dynapipe-split-backward out, or"
            " give one stage a rank"
        )
    return "interleaved-1f1b"


def batch_once(batch: Batch) -> Iterator[Batch]:
    """What a forward of one micro-batch reads. Errors: ConfigError where it asks for another."""
    yield batch
    raise ConfigError(
        "forward_step called next(data_iterator) twice for one planned micro-batch, which is one batch: call it once,"
        " or leave planned data out"
    )


def apart_from_replicas(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward_step_func` that may call no collective over replicas, whose planned micro-batches are others.

    The first one meets the other replicas' first, and ends; then all of them say so. In the model's forward those of
    DistributedDataParallel are free, which gathers parameters there. Errors: ConfigError, when it is called.
    """
    from megatron.core import parallel_state

    groups = [dist.group.WORLD, parallel_state.get_data_parallel_group()]
    of_ddp = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def forward_step(*arguments: Any, **keywords: Any) -> Any:
        with _without_collectives(groups):
            output, loss_func = forward_step_func(*arguments, **keywords)

        def watched(*values: Any, **others: Any) -> Any:
            with _without_collectives([*groups, of_ddp]):
                return loss_func(*values, **others)

        return output, loss_func and watched

    return forward_step


@contextmanager
def _without_collectives(groups: Sequence[Any]) -> Iterator[None]:
    before = _num_collectives(groups)
    yield
    if _num_collectives(groups) != before:
        raise ConfigError(
            "forward_step or its loss function called a collective over data parallel ranks, which run other planned"
            " micro-batches, and not as many: report a sum and its count, which the training loop adds up over them"
        )


def _num_collectives(groups: Sequence[Any]) -> list[int]:
    """That were called on each so far; none of a backend that is not torch's own, which does not count."""
    numbers = []
    for group in groups:
        with suppress(RuntimeError):
            numbers.append(group._get_sequence_number_for_group())
    return numbers


def planned_steps_in(data_iterator: Any) -> tuple[PlannedSteps, Any] | None:
    """The planned steps behind a data iterator (Megatron-LM wraps it for reruns; with virtual stages it is a list), and
    what to call `next` on; None for other data."""
    outer = data_iterator[0] if isinstance(data_iterator, list) and data_iterator else data_iterator
    inner = getattr(outer, "iterable", outer)
    return (inner, outer) if isinstance(inner, PlannedSteps) else None
