"""Batch samplers for any DataLoader: token batches of equal cost on all ranks, nothing dropped, resumable anywhere.

    sampler = DistributedTokenBatchSampler(lengths, max_tokens=32_768)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=...)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader: ...

torch is not imported here: a batch sampler is anything with `__iter__` and `__len__`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, as_length_array
from dynapipe_ext.batching.sampling.epoch_plan import (
    EpochPlan,
    Last,
    Objective,
    SamplerMetrics,
    StepRule,
    left_after,
    measure,
    plan_epoch,
    plan_left,
)
from dynapipe_ext.costs.model import CostModel, IntArray
from dynapipe_ext.data.batches import permutation, plain_numbers
from dynapipe_ext.errors import ConfigError, DataError, check_integer, short
from dynapipe_ext.reproducible import non_negative_least_squares

OverLong = Literal["refuse", "truncate"]
Share = Callable[[Callable[[], bytes]], bytes]  # calls its argument on one rank, returns what it gave on every rank

_FORMAT = "dynapipe-sampler/5"
_LARGEST_COST = 1 << 30  # of a sample, where coefficients are no integers
_LARGEST_SUM = 1 << 58


class DistributedTokenBatchSampler:
    """Lists of sample indices, one list a step, for one rank of `num_replicas`: at most `max_tokens` each.

    All ranks have the same number of steps and about the same cost in each. `objective` says what a batch costs:
    "tokens"; "quadratic", a L + b L^2 summed over samples with `coefficients` (a, b) (packed rows, attention inside
    documents; see `quadratic_coefficients`); or "padded", rows x longest, which then is what `max_tokens` bounds.
    Samples are taken in an order shuffled by (seed, epoch), `shuffle=False` keeps the given one; either way a sample
    stays within some steps of its place ("padded": within a window of some tens), but for a few that find room only
    elsewhere. But for "padded", a spread epoch has no more steps than multipack needs for the same order (what
    that drops makes one more where it fits nowhere). Its steps' mean lengths vary (standard deviation over mean) by at
    most 0.15, or 1.1 times what multipack's do. The cost that was asked is no less even than in a plan by the default
    coefficients.

    `last`: samples that do not fill a step are spread over all steps ("spread"), trained in a last step that repeats
    others ("pad"), or come first in the next epoch ("carry"); nothing is dropped. `over_long`: a sample above
    `max_tokens` is refused by name, or counts as cut to `max_tokens` ("truncate": `truncated` names them; the
    collator has to cut).

    `lengths`: (N,), or (N, 2) or (N, 3) as in `lengths.py` (both sides count). `num_replicas` and `rank` default to
    those of torch.distributed where it is in use, else to one rank. Every rank computes the same plan, a pure function
    of the arguments; `share` has one rank compute it for all (with torch: broadcast_object_list of the bytes) whenever
    the sampler is made, loads a state or is set to another epoch.

    Errors: ConfigError for settings, DataError for lengths and states, PlanError where a rank would get no sample.

    >>> sampler = DistributedTokenBatchSampler([3, 5, 2, 4], max_tokens=8, num_replicas=1, rank=0, shuffle=False)
    >>> len(sampler), list(sampler)
    (2, [[1, 2], [3, 0]])
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        objective: Objective = "quadratic",
        coefficients: tuple[float, float] = (0, 1),
        last: Last = "spread",
        over_long: OverLong = "refuse",
        shuffle: bool = True,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        num_replicas, rank = world(num_replicas, rank)
        for name, value, choices in (
            ("objective", objective, get_args(Objective)),
            ("last", last, get_args(Last)),
            ("over_long", over_long, get_args(OverLong)),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r} but must be one of {', '.join(choices)}")
        check_integer("max_tokens", max_tokens, least=1)
        check_integer("seed", seed, least=0, most=2**64 - 1)
        if not isinstance(shuffle, bool | np.bool_):
            raise ConfigError(f"shuffle is {short(shuffle)} but must be True or False")
        self.rank, self.seed, self.epoch = rank, int(seed), 0  # states hold plain values
        self._rule = StepRule(num_replicas=num_replicas, max_tokens=int(max_tokens), objective=objective, last=last)
        self._shuffle, self._share, self._coefficients = bool(shuffle), share, plain_pair(coefficients)
        self._tokens, self.truncated = _checked(lengths, max_tokens, over_long)
        self._costs = self._tokens if objective != "quadratic" else quadratic_costs(self._tokens, coefficients)
        capacity = num_replicas * max_tokens
        if last == "carry" and (total := int(self._tokens.sum())) < capacity:
            raise ConfigError(
                f"all {len(self._tokens)} samples have {total} tokens but a full step of {num_replicas} ranks has"
                f" {capacity}: an epoch would have no step; choose last='spread' or lower max_tokens"
            )
        self._carried: IntArray = np.zeros(0, np.int64)  # samples of the last epoch that come first in this one
        self._segments: tuple[tuple[int, int], ...] = ()  # (ranks, steps) of this epoch under other numbers of ranks
        self._fingerprint = ""
        self._start = self._next = 0  # steps of the plan before this iteration, and asked of it so far
        self._finished = False
        self._plan: EpochPlan
        self._plan_anew()

    def __len__(self) -> int:
        """Batches that an iteration begun now yields: all of the epoch, or after `load_state_dict` what is left."""
        return self._plan.num_steps - (0 if self._finished else self._start)

    def __iter__(self) -> Iterator[list[int]]:
        if self._finished:  # a second iteration of the same epoch is a whole one
            if self._segments:
                self._segments = ()
                self._plan_anew()
            self._start, self._finished = 0, False
        for step in range(self._start, self._plan.num_steps):
            self._next = step + 1
            yield self._plan.batch(step, self.rank)
        self._finished = True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; where the sampler is in this epoch already, stay (after a resume, say)."""
        check_integer("epoch", epoch, least=0)
        epoch = int(epoch)
        if epoch == self.epoch:
            return
        if self._rule.last == "carry":
            if epoch < self.epoch:
                self.epoch, self._carried, self._segments = 0, np.zeros(0, np.int64), ()
                self._plan_anew()
            while self.epoch < epoch:  # what is carried depends on all epochs before
                self._carried, self._segments = self._plan.rest, ()
                self.epoch += 1
                self._plan_anew()
        else:
            self.epoch, self._segments = epoch, ()
            self._plan_anew()

    @property
    def batch_size(self) -> None:
        """None: batches differ in size. Raises ConfigError where other ranks have batches of their own.

        accelerate asks for it when it is about to divide the batches over ranks, which would leave all but one in
        num_replicas untrained without a word.
        """
        if self._rule.num_replicas > 1:
            raise ConfigError(
                f"these batches are already those of rank {self.rank} of {self._rule.num_replicas} and have no fixed"
                " size: do not give their loader to accelerate's prepare(), use prepare_data_loader(loader, device,"
                " num_processes=1, process_index=0, put_on_device=True) of accelerate.data_loader"
            )

    @property
    def num_done(self) -> int:
        """Batches of this epoch that were trained before the iteration that begins now: not 0 after a resume."""
        return sum(steps for _, steps in self._segments) + self._start if not self._finished else 0

    @property
    def plan(self) -> EpochPlan:
        """The plan of all ranks of the epoch (after a change of ranks: of what was left of it)."""
        return self._plan

    def metrics(self) -> SamplerMetrics:
        """How well the plan is packed and balanced."""
        costs = None if self._rule.objective == "padded" else self._costs
        return measure(self._plan, self._tokens, costs, self._rule.max_tokens)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Where the sampler is, as plain values for JSON or a checkpoint; the same on every rank.

        `num_batches`: batches of this epoch that were trained. Give it where a DataLoader fetches ahead
        (workers), since the sampler itself can only count what was asked of it. Raises ConfigError for more than the
        epoch has.
        """
        before = sum(steps for _, steps in self._segments)
        if num_batches is not None:
            check_integer("num_batches", num_batches, least=0)
        steps = self._next if num_batches is None else int(num_batches) - before
        if not 0 <= steps <= self._plan.num_steps:
            raise ConfigError(
                f"num_batches is {num_batches} but in this epoch between {before} and"
                f" {before + self._plan.num_steps} batches can have been trained by now"
            )
        return {
            "format": _FORMAT,
            "fingerprint": self._identity(),
            "epoch": self.epoch,
            "carried": self._carried.tolist(),
            "segments": [list(segment) for segment in (*self._segments, (self._rule.num_replicas, steps))],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: the same batches under the same number of ranks, and under another
        one the samples that were left, planned anew (some repeated where they are too few for all ranks).

        Raises DataError for a state of other lengths, settings or seed.
        """
        check_format(state, _FORMAT)
        if missing := [name for name in ("fingerprint", "epoch", "carried", "segments") if name not in state]:
            raise DataError(f"the saved sampler has no {missing[0]}: give what state_dict returned")
        if state["fingerprint"] != self._identity():
            raise DataError(
                f"the state is of other lengths or settings (fingerprint {short(state['fingerprint'])[:12]}, here"
                f" {self._identity()[:12]}): give the sampler what it had, only num_replicas and rank may differ"
            )
        epoch, carried, segments = _read_place(state, len(self._tokens))
        start = segments.pop()[1] if segments and segments[-1][0] == self._rule.num_replicas else 0
        self.epoch, self._carried = epoch, np.array(carried, np.int64)
        self._segments = tuple(segment for segment in segments if segment[1])
        self._plan_anew()
        if start > self._plan.num_steps:
            raise DataError(f"the state is at step {start} but the epoch has {self._plan.num_steps}: it was changed")
        self._start = self._next = start

    def _plan_anew(self) -> None:
        self._start = self._next = 0
        self._finished = False
        if self._share is None:
            self._plan = self._computed()
        else:
            self._plan = EpochPlan.from_bytes(self._share(lambda: self._computed().to_bytes()))

    def _computed(self) -> EpochPlan:
        count = len(self._tokens)
        fresh = permutation(count, seed=self.seed, epoch=self.epoch) if self._shuffle else np.arange(count)
        order = np.concatenate([self._carried, fresh])
        if self._segments:
            order = left_after(
                order, self._tokens, self._costs, self._rule, self._segments, num_first=len(self._carried)
            )
            return plan_left(order, self._tokens, self._costs, self._rule)
        return plan_epoch(order, self._tokens, self._costs, self._rule, num_first=len(self._carried))

    def _identity(self) -> str:
        """Hash of everything but the ranks."""
        if not self._fingerprint:
            rule = [self._rule.max_tokens, self._rule.objective, self._rule.last, list(self._coefficients)]
            digest = hashlib.sha256(json.dumps([_FORMAT, rule, self.seed, self._shuffle]).encode())
            digest.update(np.ascontiguousarray(self._tokens, dtype="<i8").tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _read_place(state: Mapping[str, Any], num_samples: int) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Epoch, carried samples, and (ranks, steps) of the segments. Errors: DataError for what no state holds."""
    epoch, carried, segments = state["epoch"], state["carried"], state["segments"]
    for name, value in (("carried", carried), ("segments", segments)):
        if not isinstance(value, list | tuple):
            raise DataError(f"the saved sampler's {name} is {short(value)}: give what state_dict returned")
    try:
        check_integer("epoch", epoch, least=0)
        for sample in carried:
            check_integer("a carried sample", sample, least=0, most=num_samples - 1)
        for segment in segments:
            ranks, steps = segment
            check_integer("a segment's ranks", ranks, least=1)
            check_integer("a segment's steps", steps, least=0)
    except (ConfigError, TypeError, ValueError) as error:
        raise DataError(f"the saved sampler was changed ({error}): give what state_dict returned") from error
    return int(epoch), [int(sample) for sample in carried], [(int(ranks), int(steps)) for ranks, steps in segments]


def check_format(state: Any, form: str) -> None:
    """Errors: DataError for what is no state of that form."""
    state_format = state.get("format") if isinstance(state, Mapping) else state
    if state_format != form:
        raise DataError(f"the state has format {short(state_format)} but {form} is read here")


def world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and this one's, from torch.distributed where the process has loaded and begun it.

    Errors: ConfigError where a rank is needed and not known: all ranks would train on the same batches.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    available = distributed is not None and distributed.is_available()
    in_use = available and distributed.is_initialized()
    several = num_replicas is not None and num_replicas != 1
    if rank is None and not in_use and (several or (available and distributed.is_torchelastic_launched())):
        whose = f"of {num_replicas} ranks" if several else "under torchrun"
        raise ConfigError(
            f"which rank this is, {whose}, is not known: call torch.distributed.init_process_group first, or give"
            " num_replicas and rank"
        )
    if num_replicas is None:
        num_replicas = int(distributed.get_world_size()) if in_use else 1
    if rank is None:
        rank = int(distributed.get_rank()) if in_use else 0
    check_integer("num_replicas", num_replicas, least=1)
    check_integer("rank", rank, least=0, most=num_replicas - 1)
    return int(num_replicas), int(rank)


def _checked(lengths: npt.ArrayLike, max_tokens: int, over_long: OverLong) -> tuple[IntArray, IntArray]:
    """Tokens of each sample, none above `max_tokens`, and the samples that were above it."""
    try:
        raw = np.asarray(lengths)
    except ValueError:
        raw = as_length_array(lengths)  # which says what is wrong with them
    if raw.ndim == 1 and raw.size and np.issubdtype(raw.dtype, np.integer):
        tokens = raw.astype(np.int64)
    else:
        tokens = as_length_array(raw)[:, :2].sum(axis=1)
    if not len(tokens):
        raise DataError("there are no samples to form batches from: lengths is empty")
    if int(tokens.min()) < 1:
        sample = int(tokens.argmin())
        raise DataError(f"sample {sample} has {int(tokens[sample])} tokens but needs at least 1: leave it out")
    longer = np.flatnonzero(tokens > max_tokens)
    if len(longer) and over_long == "refuse":
        raise DataError(
            f"sample {int(longer[0])} has {int(tokens[longer[0]])} tokens but max_tokens is {max_tokens}"
            f" ({len(longer)} samples are longer, the longest has {int(tokens.max())}): raise max_tokens, or choose"
            " over_long='truncate' and cut them in the collator"
        )
    return np.minimum(tokens, max_tokens), longer


def plain_pair(coefficients: Any) -> tuple[float, float]:
    """Two numbers as Python's, which states hold. Errors: ConfigError for anything else."""
    try:
        a, b = plain_numbers(coefficients)
        float(a), float(b)
    except (TypeError, ValueError):
        raise ConfigError(f"coefficients are {short(coefficients)} but must be two numbers (a, b)") from None
    return a, b


def quadratic_costs(tokens: IntArray, coefficients: tuple[float, float]) -> IntArray:
    """a L + b L^2 as integers: exact for integer coefficients, else scaled to about nine digits.

    Raises ConfigError for negative coefficients, two zeros, or costs that overflow in sum.

    >>> quadratic_costs(np.array([2, 3]), (1, 2))
    array([10, 21])
    """
    a, b = plain_pair(coefficients)
    if not (0 <= a < float("inf") and 0 <= b < float("inf")) or a == b == 0:
        raise ConfigError(f"coefficients are ({a}, {b}) but must be finite, at least 0 and not both 0")
    longest = int(tokens.max(initial=1))
    exact = float(a).is_integer() and float(b).is_integer()
    if exact and (int(a) * longest + int(b) * longest**2) * len(tokens) < _LARGEST_SUM:
        return int(a) * tokens + int(b) * tokens * tokens
    scale = min(_LARGEST_COST, _LARGEST_SUM // len(tokens)) / (a * longest + b * longest**2)
    lengths = tokens.astype(np.float64)
    return np.maximum(np.rint(scale * (a * lengths + b * lengths * lengths)), 1).astype(np.int64)


def quadratic_coefficients(costs: CostModel, lengths: Sequence[int]) -> tuple[float, float]:
    """(a, b) of a L + b L^2 that fit a cost model's time of one sample of each length, all stages, both directions.

    The model may come from a shape (`AnalyticCosts`) or from measurements (`CostTable`). Least squares relative to the
    times; neither is below 0. Raises ConfigError for fewer than two different lengths.
    """
    chosen = sorted(set(lengths))
    if len(chosen) < 2:
        raise ConfigError(f"lengths are {list(lengths)}: two different ones are needed to fit two coefficients")
    samples = [MicroBatch((SampleLength(0, length, 0, length),), "padded") for length in chosen]
    priced = costs.evaluate(samples)
    time_ns = (priced.forward_ns + priced.backward_ns).sum(axis=0).astype(np.float64)
    size = np.array(chosen, np.float64)
    a, b = non_negative_least_squares(np.stack([size, size**2], axis=1), time_ns).tolist()
    return a, b
