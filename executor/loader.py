"""A rank's steps: its plan and the tensors of its micro-batches, read ahead, from any position of the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, MicroBatch, as_length_array, sample_lengths
from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.data.batches import (
    STATE_FORMAT,
    GlobalBatches,
    GlobalBatchRule,
    SampleOrder,
    StepPosition,
    array_digest,
    check_state,
    collate,
    document_lengths,
    following_epoch,
    order_of,
    plain_numbers,
)
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.data.pairs import collate_pairs, pair_borders
from dynapipe_ext.errors import ConfigError, DataError, check_integer, short
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.plans.channel import PlanChannel, PlanDelivery
from dynapipe_ext.executor.plans.dump import DumpingPlanner, forget_plans_ahead
from dynapipe_ext.executor.protocols import Batch, Store
from dynapipe_ext.executor.proven_step import ProvenStep, StepPlanner, prove_step
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.settings.declared import list_settings
from dynapipe_ext.settings.tables import DataSettings

_SLICE_S = 0.5  # how late Ctrl-C may be noticed that comes as a wait begins: Python looks for it only around one


@dataclass(frozen=True, slots=True)
class ReadStep:
    """One step, ready; the times bound the interval in which the reader waited for its plan."""

    micro_batches: list[Batch]
    plan: ExecutionPlan
    plan_asked_s: float
    planned_s: float


class PlanSource(Protocol):
    """Gives one rank its plans, in the order of the run."""

    def plan(self, place: StepPosition) -> ExecutionPlan:
        """This rank's plan. Raises PlanError where planning failed, StoreError where the plan does not come."""
        ...

    def close(self) -> None:
        """End a `plan` that waits in another thread."""
        ...


class InlinePlanSource:
    """Plans here and now; `proven` gives the step of a place, of all ranks."""

    def __init__(self, proven: Callable[[StepPosition], ProvenStep], *, dp_rank: int, pp_rank: int) -> None:
        self._proven = proven
        self._dp_rank, self._pp_rank = dp_rank, pp_rank

    def plan(self, place: StepPosition) -> ExecutionPlan:
        return self._proven(place).plan_of(self._dp_rank, self._pp_rank)

    def close(self) -> None: ...


def read_ahead(
    read: Callable[[StepPosition], ReadStep], places: Sequence[StepPosition], source: PlanSource
) -> Generator[ReadStep, None, None]:
    """`read(place)` for each place, the next one in a thread while the consumer works on the current one."""
    with ThreadPoolExecutor(1, thread_name_prefix="dynapipe-loader") as pool:
        try:  # Ctrl-C may already come while the thread starts
            pending = pool.submit(read, places[0])
            for following in places[1:]:
                item = _awaited(pending)
                pending = pool.submit(read, following)
                yield item
            yield _awaited(pending)
        finally:
            source.close()  # else leaving the pool would wait for a plan that nobody wants any more


def _awaited(pending: Future[ReadStep]) -> ReadStep:
    while not wait([pending], _SLICE_S).done:
        pass
    return pending.result()


LoadedStep = tuple[list[Batch], ExecutionPlan]
Collate = Callable[[MicroBatch, Sequence[Any]], Mapping[str, Any]]


class Dataset(Protocol):
    """Random access to samples, and the lengths of all of them: (N,), (N, 2) or (N, 3).

    A loader's state tells one that has a `samples_fingerprint`, a text that changes with any sample, from others of the
    same lengths.
    """

    @property
    def lengths(self) -> npt.NDArray[np.integer[Any]]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DynaPipeDataLoader:
    """Iterating yields `(micro_batches, plan)` for each step of one epoch; the next iteration is the next epoch.

    `micro_batches` has one dictionary of torch tensors for each micro-batch of this replica, in the plan's order, made
    by `collate_fn(micro_batch, samples)` (default: `collate`, of pairs `collate_pairs`).
    Arguments that torch's DataLoader has mean the same; these are new or differ:

    planner: plans a global batch; equal on all ranks. batch_size | tokens_per_batch: size of a global batch over all
    replicas; first_sizes: the samples of an epoch's first batches instead. seed: of the shuffle. sampler: indices of
    the whole epoch, the same on all ranks (`set_epoch` is called if it has it). coordinates: the place of this rank
    (default: from torch.distributed). needs_data=False (ranks without embedding or loss): no sample is read, and packed
    micro-batches have `cu_seqlens` only.
    num_workers: planner processes of a node; 0 plans in line. Others need a store: the address of a Redis-compatible
    one, or an open Store. delivery: how their plans reach the ranks, with the limit of waiting for one.

    `exposed_planning_s` sums the seconds in which the consumer waited for planning. Close it, or use it as a context
    manager, to stop the planners; they take the plans that nobody has read with them, so rank 0 closes once no other
    rank needs another step.

    Errors: ConfigError for settings that cannot work; PlanError, StoreError and DataError come out of the iteration.
    """

    def __init__(
        self,
        dataset: Dataset,
        planner: StepPlanner,
        *,
        collate_fn: Collate | None = None,
        sampler: Iterable[int] | None = None,
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        first_sizes: Sequence[int] = (),
        pin_memory: bool = False,
        drop_last: bool = False,
        shuffle: bool | None = None,
        seed: int = 0,
        coordinates: Coordinates | None = None,
        needs_data: bool = True,
        num_workers: int = 0,
        store: str | StoreAddress | Store | None = None,
        delivery: PlanDelivery = PlanDelivery(),  # noqa: B008 (frozen)
    ) -> None:
        _refuse_types(collate_fn, shuffle, num_workers)
        _refuse_together(sampler, shuffle, num_workers, delivery)
        self.dataset, self.planner = dataset, planner
        self.exposed_planning_s = 0.0
        self._lengths = _lengths_of(dataset)
        self._identity = {"lengths": array_digest(self._lengths), "data": _fingerprint_of(dataset)}
        batch_size, tokens_per_batch, seed = plain_numbers((batch_size, tokens_per_batch, seed))
        self._rule = GlobalBatchRule(
            batch_size=batch_size,
            tokens_per_batch=tokens_per_batch,
            first_sizes=plain_numbers(first_sizes),
            shuffle=bool(shuffle),
            drop_last=bool(drop_last),
            seed=seed,
        )
        self._sampler, self._collate_fn = sampler, collate_fn
        self._pin_memory, self._needs_data = pin_memory, needs_data
        self._coordinates = coordinates or _own_coordinates(planner.topology)
        self._place = StepPosition()
        self._resumed = False
        self._resumed_order: str | None = None
        self._epoch_cache: tuple[int, GlobalBatches, SampleOrder | None] | None = None
        self._pass: Generator[LoadedStep, None, None] | None = None
        if sampler is None:
            self._batches(0)  # refuses settings that cannot work before anything is started
        self._channel: PlanChannel | None = None
        if num_workers:
            plans = planner, self._rule, self._lengths, self._coordinates
            self._channel = PlanChannel(*plans, store=store, num_workers=num_workers, delivery=delivery)

    def __len__(self) -> int:
        """Global batches in the current epoch (before and after an iteration: in the next one)."""
        return len(self._batches(self._place.epoch)[0])

    def __iter__(self) -> Iterator[LoadedStep]:
        if self._pass is not None:
            self._pass.close()
        if self._place.step and not self._resumed:  # the last iteration was left half-way
            self._place = StepPosition(self._place.epoch + 1, 0, self._place.global_step)
        self._resumed = False
        batches, order = self._batches(self._place.epoch)
        self._check_resumed_order(order)
        if self._place.step >= len(batches):
            raise DataError(
                f"step {self._place.step} is outside of the {len(batches)} steps of epoch {self._place.epoch}"
            )
        self._pass = self._steps(batches, self._source(batches, order))
        return self._pass

    @property
    def epoch(self) -> int:
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; after load_state_dict, its own epoch goes on where it stopped."""
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch} but must be at least 0")
        if not (self._resumed and epoch == self._place.epoch):
            self._place = StepPosition(epoch, 0, self._place.global_step)
            self._resumed = False

    def num_samples(self, epoch: int, step: int) -> int:
        """Samples of a global batch, over all replicas."""
        return len(self._batches(epoch)[0][step])

    def state_dict(self) -> dict[str, Any]:
        """Where the next step stands, and what must be the same for it to be the same step. Plain values only.

        The planner is not part of it: a run may go on with another topology, with the same global batches.
        """
        _, order = self._batches(self._place.epoch) if self._place.step else (None, None)
        return {
            "format": STATE_FORMAT,
            "epoch": self._place.epoch,
            "step": self._place.step,
            "global_step": self._place.global_step,
            **self._identity,
            "rule": self._rule.to_json(),
            "order": None if order is None else array_digest(order),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly after the last step that was yielded when `state` was taken.

        Raises DataError, naming what differs, for a state of other data or settings.
        """
        check_state(state)
        ours = {**self._identity, **self._rule.to_json()}
        their_rule = GlobalBatchRule.from_json(state["rule"]).to_json()
        theirs = {"lengths": state["lengths"], "data": state.get("data"), **their_rule}
        for name in {**ours, **theirs}:
            value, unknown = ours.get(name), name == "data" and None in (ours[name], theirs[name])
            if theirs.get(name) != value and not unknown:
                raise DataError(
                    f"the saved loader has {name} {theirs.get(name)!r} but this one has {value!r}: resume with the same"
                    " data and settings, or start the loader anew without its state"
                )
        self._place = StepPosition(state["epoch"], state["step"], state["global_step"])
        self._resumed, self._resumed_order = True, state["order"]
        self._epoch_cache = None

    def plan_with(self, planner: StepPlanner) -> None:
        """Plan with another planner from the next step on. All ranks call it after the same step.

        The iteration under way ends, and the next one goes on after the last step. Where planner
        processes plan, they are started anew, which takes about a second; what the old ones had planned goes with them.
        """
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        self.planner, self._resumed = planner, True
        if self._channel is not None:
            self._channel.plan_with(planner)

    def close(self) -> None:
        """End the iteration under way, the planner processes, and the connection to a store this loader opened."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        if self._channel is not None:
            self._channel.close()
        if isinstance(self.planner, DumpingPlanner):
            forget_plans_ahead(self.planner.directory)

    def __enter__(self) -> DynaPipeDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _batches(self, epoch: int) -> tuple[GlobalBatches, SampleOrder | None]:
        """The epoch's global batches; kept, since a sampler may give another order when it is asked again."""
        if self._epoch_cache is None or self._epoch_cache[0] != epoch:
            order = None if self._sampler is None else order_of(self._sampler, epoch)
            self._epoch_cache = (epoch, self._rule.batches(self._lengths, epoch, order), order)
        return self._epoch_cache[1:]

    def _check_resumed_order(self, order: SampleOrder | None) -> None:
        resumed_order, self._resumed_order = self._resumed_order, None
        if resumed_order is not None and self._place.step and (order is None or array_digest(order) != resumed_order):
            raise DataError(
                f"the sampler gives another order for epoch {self._place.epoch} than when the state was saved: seed it"
                " by the epoch"
            )

    def _source(self, batches: GlobalBatches, order: SampleOrder | None) -> PlanSource:
        if self._channel is not None:
            return self._channel.source(self._place, order)

        def proven(place: StepPosition) -> ProvenStep:
            samples = sample_lengths(self._lengths, batches[place.step])
            return prove_step(self.planner, samples, step=place.global_step)

        return InlinePlanSource(proven, dp_rank=self._coordinates.dp_rank, pp_rank=self._coordinates.pp_rank)

    def _steps(self, batches: GlobalBatches, source: PlanSource) -> Generator[LoadedStep, None, None]:
        first = self._place
        places = [
            StepPosition(first.epoch, step, first.global_step + step - first.step)
            for step in range(first.step, len(batches))
        ]

        def read(place: StepPosition) -> ReadStep:
            return self._read(place, batches, source)

        items = (read(place) for place in places) if self._channel is None else read_ahead(read, places, source)
        with closing(items):
            for place in places:
                asked_s = time.monotonic()
                try:
                    item = next(items)
                except Exception:
                    self._show_plan(place)  # it is the first thing to look at
                    raise
                exposed_s = min(time.monotonic(), item.planned_s) - max(asked_s, item.plan_asked_s)
                self.exposed_planning_s += max(0.0, exposed_s)
                is_last = place.step + 1 == len(batches)
                self._place = (
                    following_epoch(place, len(batches))
                    if is_last
                    else StepPosition(place.epoch, place.step + 1, place.global_step + 1)
                )
                if self._channel is not None:
                    self._channel.reached(self._place)
                self._show_plan(place)
                yield item.micro_batches, item.plan

    def _show_plan(self, place: StepPosition) -> None:
        """Of a step that is to run now, or would be, had it not failed."""
        if isinstance(self.planner, DumpingPlanner):
            self.planner.begins(place.global_step)

    def _read(self, place: StepPosition, batches: GlobalBatches, source: PlanSource) -> ReadStep:
        plan_asked_s = time.monotonic()
        plan = source.plan(place)
        planned_s, own = time.monotonic(), set(batches[place.step])
        for sample in (sample for micro_batch in plan.micro_batches for sample in micro_batch.samples):
            if sample.index not in own:
                raise DataError(
                    f"the plan of step {place.step} of epoch {place.epoch} has sample {sample.index}, which is not in"
                    " this rank's global batch: all ranks must use the same data, sampler order and settings"
                )
        micro_batches = [self._tensors(micro_batch, plan) for micro_batch in plan.micro_batches]
        return ReadStep(micro_batches, plan, plan_asked_s, planned_s)

    def _tensors(self, micro_batch: MicroBatch, plan: ExecutionPlan) -> Batch:
        arrays: Mapping[str, Any]
        if not self._needs_data:
            arrays = _borders(micro_batch)
        else:
            samples = [self.dataset[sample.index] for sample in micro_batch.samples]
            if self._collate_fn is not None:
                arrays = self._collate_fn(micro_batch, samples)
                if not isinstance(arrays, Mapping):
                    raise DataError(f"collate_fn gave {type(arrays).__name__}: it must map names to tensors or arrays")
            elif micro_batch.decoder_len:
                arrays = collate_pairs(micro_batch, samples, loss_norm=plan.loss_norm)
            else:
                self._check_whole(micro_batch, samples)
                arrays = collate(micro_batch, samples, loss_norm=plan.loss_norm)
        return _to_torch(arrays, pin_memory=self._pin_memory)

    def _check_whole(self, micro_batch: MicroBatch, samples: Iterable[TokenSample]) -> None:
        """Refuse samples that are longer than their planned lengths: the rest would never be trained."""
        for planned, sample in zip(micro_batch.samples, samples, strict=True):
            if not hasattr(sample, "positions"):
                raise DataError(
                    f"the dataset gives {type(sample).__name__} for sample {planned.index} but tensors are made of a"
                    " TokenSample (dynapipe_ext.data.dataset): give those, or collate_fn=f(micro_batch, samples)"
                )
            most = int(self._lengths[planned.index, 0])
            if sample.positions > most:
                raise DataError(
                    f"sample {planned.index} has {sample.positions} positions but the dataset's `lengths` say {most}:"
                    " the rest would never be trained; give the number of tokens less one, or shorter samples"
                )


def _refuse_types(collate_fn: object, shuffle: object, num_workers: object) -> None:
    """Errors: ConfigError for what is no function, no bool or no number of processes."""
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn is {short(collate_fn)} but must be a function (micro_batch, samples)")
    if shuffle is not None and not isinstance(shuffle, bool | np.bool_):
        raise ConfigError(f"shuffle is {short(shuffle)} but must be True, False or None")
    check_integer("num_workers", num_workers, least=0, most=int(list_settings(DataSettings)["num_workers"].at_most))


def _refuse_together(
    sampler: Iterable[int] | None, shuffle: bool | None, num_workers: int, delivery: PlanDelivery
) -> None:
    """Errors: ConfigError for settings of a loader that do not go together."""
    if sampler is not None and shuffle:
        raise ConfigError("sampler and shuffle=True were both given: the sampler decides the order, leave out shuffle")
    if num_workers < 0 or (num_workers and delivery.prefetch_steps < 2):
        raise ConfigError(
            f"num_workers is {num_workers} and prefetch_steps is {delivery.prefetch_steps} but must be at least 0 and 2"
        )


def _lengths_of(dataset: Dataset) -> LengthArray:
    """Errors: ConfigError for a data set without lengths; DataError for lengths that are not those of its samples."""
    if not hasattr(dataset, "lengths"):
        raise ConfigError(
            f"dataset {type(dataset).__name__} has no attribute `lengths`: give it an integer array of shape (N,)"
            " or (N, 3) with the positions (encoder, decoder, target tokens) of each sample"
        )
    lengths = as_length_array(dataset.lengths)
    if len(dataset) != len(lengths):
        raise DataError(f"dataset has {len(dataset)} samples but {len(lengths)} lengths: prepare the data again")
    return lengths


def _fingerprint_of(dataset: Dataset) -> str | None:
    fingerprint = getattr(dataset, "samples_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def _borders(micro_batch: MicroBatch) -> Mapping[str, Any]:
    """What a stage without embedding and loss needs, from the plan alone."""
    if micro_batch.decoder_len:
        return pair_borders(micro_batch)
    if micro_batch.layout == "padded":
        return {}
    return {"cu_seqlens": np.cumsum((0, *document_lengths(micro_batch))).astype(np.int32)}


def _to_torch(arrays: Mapping[str, Any], *, pin_memory: bool) -> Batch:
    import torch

    tensors = {name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
    if pin_memory and torch.cuda.is_available():  # as torch's loader: else there is nothing to pin for
        return {name: t.pin_memory() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}
    return tensors


def _own_coordinates(topology: Topology) -> Coordinates:
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size == topology.world_size:
        return topology.coordinates(dist.get_rank() if size > 1 else 0)
    raise ConfigError(
        f"the topology has {topology.world_size} ranks but torch.distributed knows of {size}: make them agree, calling"
        " init_process_group first, or pass coordinates=topology.coordinates(rank)"
    )
