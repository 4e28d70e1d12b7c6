"""The order of a training run's steps: what every rank and every planner process derives alone, and alike."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.lengths import LengthArray

SampleOrder = npt.NDArray[np.int64]  # shape (num_samples,): the sample indices of an epoch as a sampler gave them

STATE_FORMAT = "dynapipe-loader/1"
_STATE_TYPES: Mapping[str, type | UnionType] = {
    "epoch": int,
    "step": int,
    "global_step": int,
    "lengths": str,
    "rule": Mapping,
    "order": str | None,
}
_MISSING = object()


@dataclass(frozen=True, slots=True, order=True)
class StepPosition:
    """A global batch: `step` counts within its epoch, `global_step` the optimizer steps of the whole run before it."""

    epoch: int = 0
    step: int = 0
    global_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchRule:
    """How an epoch becomes global batches; exactly one of the two sizes is given. See `GlobalBatches`."""

    batch_size: int | None = None
    tokens_per_batch: int | None = None
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0

    def batches(self, lengths: LengthArray, epoch: int, order: SampleOrder | None = None) -> GlobalBatches:
        return GlobalBatches(
            lengths,
            batch_size=self.batch_size,
            tokens_per_batch=self.tokens_per_batch,
            seed=self.seed,
            epoch=epoch,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            order=order,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_positions(
    rule: GlobalBatchRule, lengths: LengthArray, start: StepPosition, order: SampleOrder | None = None
) -> Iterator[tuple[StepPosition, tuple[int, ...]]]:
    """Every place from `start` on with its sample indices: epoch after epoch without end, or the one epoch of `order`.

    >>> start = StepPosition(epoch=4, step=1, global_step=9)
    >>> steps = step_positions(GlobalBatchRule(batch_size=2), np.array([[5, 0, 5]] * 3), start)
    >>> [next(steps) for _ in range(2)]
    [(StepPosition(epoch=4, step=1, global_step=9), (2,)), (StepPosition(epoch=5, step=0, global_step=10), (0, 1))]
    """
    place = start
    while True:
        batches = rule.batches(lengths, place.epoch, order)
        for step in range(place.step, len(batches)):
            yield StepPosition(place.epoch, step, place.global_step + step - place.step), batches[step]
        place = following_epoch(place, len(batches))
        if order is not None:
            return


def following_epoch(place: StepPosition, num_steps: int) -> StepPosition:
    """The first place after the epoch of `place`, whose epoch has `num_steps` steps."""
    return StepPosition(place.epoch + 1, 0, place.global_step + num_steps - place.step)


def order_of(sampler: Iterable[int], epoch: int) -> SampleOrder:
    """All indices that a sampler gives for an epoch; it is told the epoch if it has torch's `set_epoch`."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    try:
        return np.fromiter((operator.index(index) for index in sampler), np.int64)
    except TypeError as error:
        raise DataError(f"the sampler must give single sample indices, not batches of them: {error}") from None


def array_digest(array: npt.NDArray[np.int64]) -> str:
    """Hash of the values and their shape, equal on all machines."""
    header = f"{array.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()


def check_state(state: Mapping[str, Any]) -> None:
    """Errors: DataError for what is no state of a loader, naming the key that is missing or of another type."""
    told = state.get("format") if isinstance(state, Mapping) else state
    if told != STATE_FORMAT:
        raise DataError(f"loader state has format {short(told)} but {STATE_FORMAT!r} is read here")
    for name, kind in _STATE_TYPES.items():
        value = state.get(name, _MISSING)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            found = "missing" if value is _MISSING else short(value)
            raise DataError(
                f"{name} of the loader's state is {found}: it is not as state_dict() gave it, so load another"
                " checkpoint, or start the loader anew without its state"
            )
