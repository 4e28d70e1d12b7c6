"""Expected seconds of a measurement, estimated from earlier ones, so that all of them end within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.surface import Measure, Measured, ModelPart

_RUNS = 12  # forwards and backwards of a layer that a measurement has at least, those that count bytes among them
_LEAST_S = 1.5  # what short actions take, which are repeated


@dataclass(slots=True)
class TimedDevice:
    """A `device` that is measured for at most `most_s` seconds from `start_s` on, by `clock`. `agree(answer)`: whether
    all ranks that measure together answer True. `hidden_size` is the model's: expected times weigh matrix products
    against attention scores by it."""

    device: Measure
    hidden_size: int = 1
    start_s: float = 0.0
    most_s: float = math.inf
    agree: Callable[[bool], bool] = bool
    clock: Callable[[], float] = time.monotonic
    _largest: dict[ModelPart, tuple[float, float]] = field(default_factory=dict)  # work, seconds of a run
    _slower: dict[ModelPart, float] = field(default_factory=dict)  # seconds taken over those expected

    def __call__(self, part: ModelPart, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured | None:
        """Measure as `device` does. Note the seconds of one F + B, and of the entire measurement, for `expect_s`."""
        start_s = self.clock()
        measured = self.device(part, *micro_batches, bytes_only=bytes_only)
        if measured and not bytes_only:
            run_s, taken_s = measured.forward_s + measured.backward_s, self.clock() - start_s
            self._slower[part] = max(self._slower.get(part, 1.0), taken_s / max(_LEAST_S, _RUNS * run_s))
            self._largest[part] = max(self._largest.get(part, (0.0, 0.0)), (self._count_work(micro_batches), run_s))
        return measured

    def expect_s(self, part: ModelPart, *micro_batches: MicroBatch) -> float:
        """Return the expected seconds of a measurement, from this part's one with the most work; 0 if there is none."""
        if part not in self._largest:
            return 0.0
        most, run_s = self._largest[part]
        return self._slower[part] * max(_LEAST_S, _RUNS * run_s * self._count_work(micro_batches) / most)

    def has_time(self, expected_s: float, share: float = 1.0) -> bool:
        """Return whether all ranks expect a measurement of `expected_s` to end within `share` (1: all) of the time."""
        return self.agree(self.clock() + expected_s < self.start_s + share * self.most_s)

    def _count_work(self, micro_batches: tuple[MicroBatch, ...]) -> float:
        """Return work in proportion to a layer's FLOPs: 12 h^2 per position, 2 h for each that it attends to."""
        rows = [(m, length) for m in micro_batches for length in (m.encoder_len, m.decoder_len)]
        return float(sum(m.rows * n * (6 * self.hidden_size + n + m.samples[0].start) for m, n in rows))
