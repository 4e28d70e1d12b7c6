"""What joined ranks take for their exchanges, and a layer on slices of a row, on these devices and as the executor runs
them: the same calls over gloo and NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, repeat, takewhile
from operator import mul

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.costs.measured_blocks import BlockTimes
from dynapipe_ext.executor.measuring.profiling import LayerProfiler, Ranks
from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks, join_ranks
from dynapipe_ext.models.architecture import Architecture

_LEAST_BYTES, _RATIO, _LEAST_SIZES = 4096, 4, 3
_ROW_VALUES = 128  # of each row that goes to a rank: as many as a head has
_REPEATS = 7
_SECONDS_EACH = 0.5  # exchanges that take longer are not made larger still
_LIMIT_S = 300.0  # of an exchange: a rank that is gone is named then


class BlockProfiler:
    """Measures blocks of some widths, one width after the other; all blocks of a width exchange at once, as in a run.

    Its ranks are tensor and data parallel ones, of which all call the same methods and get the same answers.
    torch.distributed must not be initialised before, and is not afterwards. `joined` are the blocks of each width.
    """

    def __init__(
        self, model: Architecture, widths: Sequence[int], *, dtype: str, device: torch.device, ranks: Ranks
    ) -> None:
        self._layers = LayerProfiler(model, dtype=dtype, device=device, ranks=ranks)
        self._dtype, self._device, self._ranks, self._widths = getattr(torch, dtype), device, ranks, widths
        self._exit = ExitStack()

    def __enter__(self) -> BlockProfiler:
        self._exit.enter_context(self._layers)
        topology = self._ranks.topology
        self._joined = join_ranks(topology, self._ranks.rank, self._widths, self._device, timeout_s=_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def row_in_time(self, multiple: int, most_positions: int) -> int:
        """The longest row, of a multiple of positions and at most so many, that a layer computes in some tenths of a
        second; longer ones are not needed to tell slices from whole rows."""
        longest = multiple
        for length in takewhile(lambda n: n <= most_positions, accumulate(repeat(_RATIO), mul, initial=multiple)):
            row = MicroBatch((SampleLength(0, length),), "packed")
            measured = self._layers.measure("layer", row)
            if measured is None:
                break
            longest = length
            if measured.forward_s + measured.backward_s > _SECONDS_EACH / 2:
                break
        return longest

    def measure(self, width: int, num_positions: int, *, most_bytes: int, go_on: Callable[[], bool]) -> BlockTimes:
        """Of a row of so many positions; of exchanges of up to `most_bytes` to a rank, fewer where `go_on` says so."""
        joined = self._joined[width]
        row = MicroBatch((SampleLength(0, num_positions),), "packed")
        whole = self._layers.measure("layer", row)
        assert whole is not None, "a row that has been chosen because it fits"
        even_s, gathered_s = (
            self._exchanges(joined, most_bytes, go_on, is_gathered=gathered) for gathered in (False, True)
        )
        return BlockTimes(
            even_s=even_s,
            gathered_s=gathered_s,
            whole_s=whole.forward_s + whole.backward_s,
            slice_s=self._layers.seconds_on_slices(joined, row),
        )

    def _exchanges(
        self, joined: JoinedRanks, most_bytes: int, go_on: Callable[[], bool], *, is_gathered: bool
    ) -> tuple[tuple[int, float], ...]:
        """Seconds after the bytes that a rank receives from the others."""
        seconds: dict[int, float] = {}
        for num_bytes in accumulate(repeat(_RATIO), mul, initial=_LEAST_BYTES):
            row_bytes = _ROW_VALUES * self._dtype.itemsize
            num_rows = max(1, num_bytes // row_bytes // (joined.width - 1))  # from each rank
            own = torch.randn((num_rows * (1 if is_gathered else joined.width), _ROW_VALUES), device=self._device)
            own = own.to(self._dtype)
            times = [self._seconds(joined, own, num_rows, is_gathered) for _ in range(1 + _REPEATS)]
            seconds[(joined.width - 1) * num_rows * row_bytes] = statistics.median(times[1:])
            enough = len(seconds) >= _LEAST_SIZES and (num_bytes >= most_bytes or times[-1] > _SECONDS_EACH)
            if not self._layers.agree(not enough and (len(seconds) < _LEAST_SIZES or go_on())):
                return tuple(seconds.items())
        raise AssertionError("sizes have no end")

    def _seconds(self, joined: JoinedRanks, own: torch.Tensor, num_rows: int, is_gathered: bool) -> float:
        """Of one exchange, the longest over ranks, which begin together: seconds that pass, as it is waited for."""
        parts = [num_rows] * joined.width
        dist.barrier()
        self._wait()
        start_s = time.perf_counter()
        joined.exchange(own.repeat(joined.width, 1) if is_gathered else own, parts, parts)
        self._wait()
        spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=self._device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
