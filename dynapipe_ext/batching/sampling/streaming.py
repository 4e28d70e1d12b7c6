"""Token batches of equal cost from a stream whose lengths are not known beforehand, a window at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from dynapipe_ext.batching.sampling.epoch_plan import EpochPlan, Objective, StepRule, left_after, plan_left
from dynapipe_ext.batching.sampling.samplers import check_format, plain_pair, quadratic_costs, world
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import ConfigError, DataError, check_integer, short

_FORMAT = "dynapipe-stream/3"

Sample = TypeVar("Sample")


class StreamingTokenBatches(Generic[Sample]):
    """Lists of samples for one rank, at most `max_tokens` each, from `open_stream()`, which every rank reads alike.

    Samples are taken until about `window_steps` steps are full; these are planned like an epoch of
    `DistributedTokenBatchSampler` with `last="carry"`, and what is left comes first in the next window. The last window
    is spread, so that nothing is dropped; where its samples are fewer than the ranks some are repeated. All ranks have
    the same number of steps; there is no `len()`, since nobody knows it. A window of more steps is more even and holds
    more samples in memory.

    `open_stream` gives the samples from the start, in the same order each time; `length_of(sample)` its tokens. The
    other arguments are those of `DistributedTokenBatchSampler`. An iteration goes on where the last one stopped; once
    the stream has ended the next one is a whole one.
    Raises DataError for a stream of no samples, and for a sample without tokens or above `max_tokens`, by its number in
    the stream; ConfigError in one of several workers of a DataLoader, each of which would give every sample.

    >>> stream = StreamingTokenBatches(lambda: ["aa", "bbbb", "cc"], len, max_tokens=4, num_replicas=2, rank=0)
    >>> list(stream)
    [['bbbb']]
    """

    def __init__(
        self,
        open_stream: Callable[[], Iterable[Sample]],
        length_of: Callable[[Sample], int],
        *,
        max_tokens: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        objective: Objective = "quadratic",
        coefficients: tuple[float, float] = (0, 1),
        window_steps: int = 8,
    ) -> None:
        num_replicas, rank = world(num_replicas, rank)
        if not callable(open_stream) or not callable(length_of):
            raise ConfigError(
                f"open_stream is {short(open_stream)} and length_of {short(length_of)} but both must be functions: give"
                " lambda: iter(samples), and len"
            )
        check_integer("max_tokens", max_tokens, least=1)
        check_integer("window_steps", window_steps, least=1)
        if objective not in get_args(Objective):
            raise ConfigError(f"objective is {objective!r} but must be one of {', '.join(get_args(Objective))}")
        self._open_stream, self._length_of = open_stream, length_of
        self._rule = StepRule(num_replicas=num_replicas, max_tokens=max_tokens, objective=objective, last="carry")
        self._rank, self._window_steps, self._coefficients = rank, window_steps, coefficients
        self._settings: dict[str, Any] = {"max_tokens": int(max_tokens), "window_steps": int(window_steps)}
        self._settings["objective"] = objective
        if objective == "quadratic":
            self._settings["coefficients"] = list(plain_pair(coefficients))
        self._pending: list[int] = []  # numbers of samples that were read before the window and not used
        self._read = 0  # samples of the stream read before the window
        self._segments: list[tuple[int, int, int]] = []  # (ranks, samples read in all, steps done) of this window
        self._ended = False

    def __iter__(self) -> Iterator[list[Sample]]:
        _refuse_several_workers()
        if self._ended:
            self._pending, self._read, self._segments, self._ended = [], 0, [], False
        stream = enumerate(self._open_stream())
        held: dict[int, Sample] = {}
        wanted = set(self._pending)
        for number, sample in islice(stream, self._read):
            if number in wanted:
                held[number] = sample
        while True:
            ended = self._fill(held, stream)
            numbers = np.array(sorted(held), np.int64)
            if not len(numbers):
                if not self._segments[-1][1]:
                    raise DataError(
                        "open_stream gave no samples: it must open the stream anew, from its start, whenever it is"
                        " called (lambda: iter(samples))"
                    )
                break
            plan, start = self._plan(numbers, held, ended)
            for step in range(start, plan.num_steps):
                self._segments[-1] = (*self._segments[-1][:2], step + 1)
                yield [held[int(numbers[place])] for place in plan.batch(step, self._rank)]
            self._pending = numbers[plan.rest].tolist()
            self._read, self._segments = self._segments[-1][1], []
            held = {number: held[number] for number in self._pending}
            if ended:
                break
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as plain values; the same on every rank."""
        segments = [list(segment) for segment in self._segments]
        place = {"pending": list(self._pending), "read": self._read, "segments": segments}
        return {"format": _FORMAT, "settings": dict(self._settings), **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same or another number of ranks. Raises DataError, naming what
        differs, for a state of other settings; those of earlier versions do not say theirs."""
        check_format(state, _FORMAT)
        if missing := [name for name in ("pending", "read", "segments") if name not in state]:
            raise DataError(f"the saved stream has no {missing[0]}: give what state_dict returned")
        theirs = state.get("settings", self._settings)
        for name in sorted({*theirs, *self._settings}):
            if theirs.get(name) != self._settings.get(name):
                raise DataError(
                    f"the saved stream has {name} {theirs.get(name)!r} but this one has {self._settings.get(name)!r}:"
                    " go on with the same settings, of which the number of ranks is none, or start the stream anew"
                )
        self._pending, self._read = [int(number) for number in state["pending"]], int(state["read"])
        self._segments = [(int(ranks), int(read), int(steps)) for ranks, read, steps in state["segments"]]
        self._ended = False

    def _fill(self, held: dict[int, Sample], stream: Iterator[tuple[int, Sample]]) -> bool:
        """Read until the window is full, or as far as it was when the state was taken; whether the stream ended."""
        until = self._segments[-1][1] if self._segments else 0
        room = self._window_steps * self._rule.num_replicas * self._rule.max_tokens
        tokens = sum(int(self._length_of(sample)) for sample in held.values())
        read = self._read
        while read < until or (not until and tokens < room):
            numbered = next(stream, None)
            if numbered is None:
                break
            number, sample = numbered
            length = self._length_of(sample)
            if not isinstance(length, Integral) or not 1 <= length <= self._rule.max_tokens:
                raise DataError(
                    f"sample {number} of the stream has {short(length)} tokens but 1 to max_tokens"
                    f" {self._rule.max_tokens} are possible: leave it out, cut it, or raise max_tokens"
                )
            held[number] = sample
            tokens, read = tokens + int(length), number + 1
        ended = read < until or (not until and tokens < room)
        if until and read == until:  # was it the last window when the state was taken?
            ended = tokens < self._window_steps * self._segments[0][0] * self._rule.max_tokens
        if not self._segments or self._segments[-1][0] != self._rule.num_replicas:
            self._segments.append((self._rule.num_replicas, read, 0))
        return ended

    def _plan(self, numbers: IntArray, held: Mapping[int, Sample], ended: bool) -> tuple[EpochPlan, int]:
        tokens = np.array([self._length_of(held[int(number)]) for number in numbers], np.int64)
        costs = quadratic_costs(tokens, self._coefficients) if self._rule.objective == "quadratic" else tokens
        rule = replace(self._rule, last="spread" if ended else "carry")
        before = [(ranks, steps) for ranks, _, steps in self._segments[:-1]]
        num_first = len(self._pending)
        order = left_after(np.arange(len(numbers), dtype=np.int64), tokens, costs, rule, before, num_first=num_first)
        return plan_left(order, tokens, costs, rule, num_first=0 if before else num_first), self._segments[-1][2]


def _refuse_several_workers() -> None:
    """Errors: ConfigError where this process is one of a DataLoader's workers."""
    loading: Any = sys.modules.get("torch.utils.data")
    worker = None if loading is None else loading.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise ConfigError(
            f"a DataLoader with num_workers {worker.num_workers} would give every sample {worker.num_workers} times:"
            " take num_workers 0 or 1, or iterate the batches yourself"
        )
