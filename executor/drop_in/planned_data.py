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

from dynapipe_ext.batch.micro_batches import as_length_array, round_up
from dynapipe_ext.batch.topology import list_cp_degrees
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatchRule, array_digest
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.drop_in.samples import SampleSource, megatron_arrays
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.loader import DynaPipeDataLoader, LoadedStep
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.plan_rules import ScheduleName


class PlannedSteps:
    """An iterator over steps without end, epoch after epoch: `next` gives (micro_batches, plan).

    Each global batch has `batch_size` samples, in an order that depends on `seed` and epoch alone, so the step after
    `consumed_samples` of them is the same on any number of ranks. Samples that do not fill the last batch of an epoch
    are left out of it; the next epoch has another order, and so it trains most of them. The first batches of an epoch
    have `first_sizes` samples instead. With `tokens_per_batch` a batch has as many samples as these tokens hold, and
    counts as `batch_size`. `in_order` takes samples in their own order. `bind` says for which model, before the first
    `next`. Errors: ConfigError for a batch that the samples do not fill, and where `consumed_samples` ends within one.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        batch_size: int,
        seed: int,
        consumed_samples: int = 0,
        forward_only: bool = False,
        first_sizes: Sequence[int] = (),
        tokens_per_batch: int | None = None,
        in_order: bool = False,
    ) -> None:
        self._next_step = steps_taken(consumed_samples, batch_size, first_sizes)
        self._source, self._batch_size = source, batch_size
        self._lengths = as_length_array(source.lengths)
        self._rule = GlobalBatchRule(
            batch_size=None if tokens_per_batch else batch_size,
            tokens_per_batch=tokens_per_batch,
            first_sizes=tuple(first_sizes),
            shuffle=not in_order,
            drop_last=True,
            seed=seed,
        )
        self._batches = self._rule.batches(self._lengths, 0)  # of the latest epoch that was asked for
        self.forward_only = forward_only
        self._steps: Generator[LoadedStep, None, None] | None = None
        self._loader: DynaPipeDataLoader | None = None

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self._batches)

    def bind(self, pipeline: MegatronPipeline, settings: DropInSettings) -> str | None:
        """Plan for this model; once. The first time, what must be the same on all ranks for their plans to be; with a
        store, a collective call.

        Errors: ConfigError where the model cannot be planned for.
        """
        if self._steps is not None:
            return None
        planner = self._planner(pipeline, settings)
        replicas = pipeline.topology.dp
        if self._rule.tokens_per_batch and (least := self._batches.least_samples) < replicas:
            raise ConfigError(
                f"a step of {self._rule.tokens_per_batch:,} tokens has {least} samples for {replicas} replicas, each of"
                " which needs one: raise --dynapipe-tokens-per-batch"
            )
        self._steps = self._loaded(planner, pipeline, self._planner_processes(pipeline, settings))
        data = (array_digest(self._lengths), self._batch_size, self._rule.to_json(), self._next_step)
        rules = (planner.memory_limit_bytes, planner.as_keywords(), settings.store, settings.timeout_s)
        widths = planner.allowed_widths
        return repr((data, planner.topology, widths, planner.costs.fingerprint(), rules))

    @property
    def longest(self) -> int:
        """Positions of the longest sample."""
        return int(self._lengths[:, 0].max())

    def plan_with(self, pipeline: MegatronPipeline, settings: DropInSettings) -> None:
        """Plan by the pipeline's costs from the next step on; all ranks after the same one."""
        if self._loader is not None:
            self._loader.plan_with(self._planner(pipeline, settings))

    def _planner(self, pipeline: MegatronPipeline, settings: DropInSettings) -> Planner:
        if pipeline.counts_memory:
            return data_planner(pipeline, settings, forward_only=self.forward_only)
        return cautious_planner(pipeline, settings, longest=self.longest, forward_only=self.forward_only)

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
        epoch, step = divmod(self._next_step - 1, len(self))
        if epoch != self._batches.epoch:
            self._batches = self._rule.batches(self._lengths, epoch)
        lengths: list[int] = self._lengths[np.array(self._batches[step]), 0].tolist()
        return lengths

    @property
    def last_count(self) -> int:
        """Samples of the last global batch as the training loop counts them."""
        return self._batch_size if self._rule.tokens_per_batch else len(self.last_lengths)

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
            batch_size=self._rule.batch_size,
            tokens_per_batch=self._rule.tokens_per_batch,
            first_sizes=self._rule.first_sizes,
            drop_last=self._rule.drop_last,
            shuffle=self._rule.shuffle,
            seed=self._rule.seed,
            coordinates=pipeline.coordinates,
            **processes,
        ) as loader:
            self._loader = loader
            epoch, step = divmod(self._next_step, len(self))
            loader.load_state_dict(
                loader.state_dict() | {"epoch": epoch, "step": step, "global_step": self._next_step, "order": None}
            )
            while True:
                for loaded in loader:
                    self._next_step += 1
                    yield loaded


def steps_taken(consumed_samples: int, batch_size: int, first_sizes: Sequence[int] = ()) -> int:
    """How many steps took the samples. Errors: ConfigError where they end within a step."""
    step, left = 0, consumed_samples
    while step < len(first_sizes) and left >= first_sizes[step]:
        left -= first_sizes[step]
        step += 1
    size = batch_size if step == len(first_sizes) else first_sizes[step]
    if left % size or (left and step < len(first_sizes)):
        raise ConfigError(
            f"{consumed_samples} samples were consumed, which is no multiple of the global batch of {size}: go on with"
            " the global batch size that the run began with"
        )
    return step + left // size


def data_planner(pipeline: MegatronPipeline, settings: DropInSettings, *, forward_only: bool) -> Planner:
    """The same on every rank. Errors: ConfigError for rules that do not go together."""
    schedule = _schedule(pipeline, settings)
    of_model = {
        "schedule": schedule,
        "pad_multiple": math.lcm(settings.pad_multiple, pipeline.pad_multiple),
        "split_backward": settings.split_backward and schedule == "adaptive",
        "replica_counts": "free" if schedule == "adaptive" else "equal",
        "recompute": pipeline.recompute or "auto",
        "noise": settings.noise if schedule == "adaptive" else 0.0,
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
        widths=list_cp_degrees(topology.dp) if is_chosen else (),
    )
    return replace(planner.for_forwards(), layout=settings.layout) if forward_only else planner


def cautious_planner(
    pipeline: MegatronPipeline, settings: DropInSettings, *, longest: int, forward_only: bool
) -> Planner:
    """For a model whose costs are unknown: micro-batches of no more tokens than the longest sample has, in 1F1B.
    Errors: as those of `data_planner`."""
    if pipeline.in_v:
        raise ConfigError(
            "this model's costs are not counted, and a V has no schedule to measure them by: give costs in a script of"
            " your own, installed(costs=TokenCosts(…)), or leave --dynapipe-placement out"
        )
    multiple = math.lcm(settings.pad_multiple, pipeline.pad_multiple)
    topology = pipeline.topology
    costs = TokenCosts(topology.num_stages, bytes_per_token=1, overhead_ns=0)
    planner = replace(
        data_planner(
            replace(pipeline, costs=costs, recompute=pipeline.recompute or "none"), settings, forward_only=False
        ),
        max_tokens=round_up(longest, multiple),
        schedule="interleaved-1f1b" if topology.placement else "1f1b",
        split_backward=False,
        replica_counts="equal",
        pieces="off",
        noise=0.0,
    )
    return replace(planner.for_forwards(), layout=settings.layout) if forward_only else planner


def replicas_meet(pipeline: MegatronPipeline, settings: DropInSettings) -> bool:
    """Whether replicas meet inside micro-batches. Experts that lie within blocks of a named width join none of them."""
    width = 1 if settings.width == "auto" else settings.width
    return any(pipeline.replica_collectives.at_width(width).of_micro_batches)


def _schedule(pipeline: MegatronPipeline, settings: DropInSettings) -> ScheduleName:
    """Where replicas meet inside micro-batches a published one, whose order is the same on all of them.

    Errors: ConfigError for what has no such order.
    """
    if not replicas_meet(pipeline, settings):
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
