"""Expected seconds of measurements, estimated from those that were made, so that a limit in seconds holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynapipe_ext.batch.micro_batches import MicroBatch

_RUNS = 12  # forwards and backwards of a layer that a measurement has at least, those that count bytes among them
_LEAST_S = 1.5  # what short actions take, which are repeated


@dataclass(slots=True)
class MeasuringTime:
    """`most_s` seconds from `start_s` on, by `clock`. Ranks that measure together `agree` on what there is time for.
    `hidden_size` weighs a layer's products against its scores.
    """

    start_s: float
    most_s: float
    hidden_size: int
    agree: Callable[[bool], bool]
    clock: Callable[[], float] = time.monotonic
    _largest: dict[str, tuple[float, float]] = field(default_factory=dict)  # by what: work, seconds of a run
    _slower: dict[str, float] = field(default_factory=dict)  # by what: seconds taken over those expected

    def record(self, what: str, micro_batches: Sequence[MicroBatch], run_s: float, taken_s: float) -> None:
        """Record a measurement: it took `taken_s`, and one forward with its backward `run_s`."""
        self._slower[what] = max(self._slower.get(what, 1.0), taken_s / max(_LEAST_S, _RUNS * run_s))
        self._largest[what] = max(self._largest.get(what, (0.0, 0.0)), (self._work(micro_batches), run_s))

    def expect_s(self, what: str, micro_batches: Sequence[MicroBatch]) -> float:
        """Estimate seconds by the measurement of most work; 0 before the first one.

        >>> from dynapipe_ext.batch.micro_batches import SampleLength
        >>> row = lambda n: [MicroBatch((SampleLength(0, n),))]
        >>> spent = MeasuringTime(0.0, 100.0, 100, lambda answer: answer)
        >>> spent.record("layer", row(100), run_s=0.1, taken_s=3.0)
        >>> [round(spent.expect_s("layer", row(n)), 2) for n in (10, 100, 200)]
        [3.0, 3.0, 5.49]
        """
        if what not in self._largest:
            return 0.0
        most, run_s = self._largest[what]
        return self._slower[what] * max(_LEAST_S, _RUNS * run_s * self._work(micro_batches) / most)

    def has(self, expected_s: float, *, share: float = 1.0) -> bool:
        """Return whether there is time for a measurement of `expected_s` before this share of the limit is over."""
        return self.agree(self.clock() + expected_s < self.start_s + share * self.most_s)

    def _work(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return work in proportion to a layer's FLOPs: 12 h^2 per position, 2 h for each that it attends to."""
        rows = [(m, length) for m in micro_batches for length in (m.encoder_len, m.decoder_len)]
        return float(sum(m.rows * n * (6 * self.hidden_size + n + m.samples[0].start) for m, n in rows))
