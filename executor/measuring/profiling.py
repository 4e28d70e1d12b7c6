"""Seconds and bytes of a model's layers and head, action by action, on this device and as the executor runs them.

A Megatron stage of two layers (one for bytes), and one of the head alone, stand by themselves in one process, or in as
many as share tensor-parallel layers: F, B, I and W are those of training, without transfers.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.costs.surface import Measured, ModelPart
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.stages.megatron import MegatronStage, wrap_ddp
from dynapipe_ext.executor.stages.megatron_model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.inference.memory_profiling import is_out_of_memory, measure_on
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.schedules.step_plan import Prediction
from dynapipe_ext.topology import Topology

_NUM_LAYERS = 2
_LAYERS_STAGE, _HEAD_STAGE = 1, 2  # of a pipeline of three, whose first holds the embedding
_MOST_REPEATS, _LEAST_REPEATS = 9, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The tensor-parallel ranks that measure together, and this one of them."""

    rank: int
    tp: int
    init_method: str
    sequence_parallel: bool


class LayerProfiler:
    """Measures micro-batches one by one. torch.distributed must not be initialised before, and is not afterwards.

    All ranks call the same methods and get the same answers: of times and bytes the largest over ranks.
    `seconds_each`: how long one measurement of an action may take altogether; short actions are repeated in it.
    """

    def __init__(
        self,
        model: Architecture,
        *,
        dtype: str,
        device: torch.device,
        ranks: Ranks,
        seconds_each: float = 0.5,
    ) -> None:
        self._model, self._dtype, self._device, self._seconds_each = model, dtype, device, seconds_each
        self._ranks, self._topology = ranks, Topology(tp=ranks.tp)
        self._measure = measure_on(device)
        self._exit = ExitStack()

    def __enter__(self) -> LayerProfiler:
        dist.init_process_group(
            process_group_backend(self._device),
            init_method=self._ranks.init_method,
            rank=self._ranks.rank,
            world_size=self._ranks.tp,
        )
        self._exit.callback(dist.destroy_process_group)
        initialize_parallel(self._topology, seed=0)
        self._exit.callback(destroy_parallel)
        self._stages = {
            "layers": self._stage(_LAYERS_STAGE, _NUM_LAYERS),
            "one layer": self._stage(_LAYERS_STAGE, 1),
            "head": self._stage(_HEAD_STAGE, 0),
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def measure(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None:
        """Of one layer, or of the head; None where it does not fit on a device. With `bytes_only` times are 0."""
        mine = self._alone(part, micro_batch, bytes_only=bytes_only)
        if self._ranks.tp == 1:
            return mine
        numbers = [math.inf] * len(fields(Measured)) if mine is None else [float(x) for x in astuple(mine)]
        largest = self._agreed(numbers)
        if math.isinf(largest[0]):
            return None
        forward_s, backward_s, input_s, weight_s, stored, peak = largest
        return Measured(forward_s, backward_s, input_s, weight_s, int(stored), int(peak))

    def agree(self, answer: bool) -> bool:
        """True where all ranks say so."""
        return answer if self._ranks.tp == 1 else not self._agreed([float(not answer)])[0]

    def _agreed(self, numbers: list[float]) -> list[float]:
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [float(x) for x in shared.tolist()]

    def _alone(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool) -> Measured | None:
        try:
            return self._measured(part, micro_batch, bytes_only=bytes_only)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _measured(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool) -> Measured:
        layers = _NUM_LAYERS if part == "layer" else 1
        timed = self._stages["layers" if part == "layer" else "head"]
        alone = self._stages["one layer" if part == "layer" else "head"]
        stored = self._stored_bytes(timed, micro_batch)
        if part == "layer":
            stored -= self._stored_bytes(alone, micro_batch)
        whole, split = [0.0, 0.0], [0.0, 0.0, 0.0]
        if not bytes_only:
            whole, split = (self._seconds(timed, micro_batch, split=flag) for flag in (False, True))
        peak = max(self._peak_bytes(alone, micro_batch, split=split) for split in (False, True))
        return Measured(
            forward_s=whole[0] / layers,
            backward_s=whole[1] / layers,
            input_s=split[1] / layers,
            weight_s=split[2] / layers,
            stored_bytes=stored,
            peak_bytes=max(peak, stored),
        )

    def _stage(self, pp_rank: int, num_layers: int) -> MegatronStage:
        layers, ranks = max(1, num_layers), self._ranks
        topology = Topology(tp=ranks.tp, pp=3, layers_per_stage=(1, layers, 1))
        config = transformer_config(
            replace(self._model, num_layers=layers),
            self._topology,
            dtype=self._dtype,
            sequence_parallel=ranks.sequence_parallel,
        )
        pipeline = replace(self._model, num_layers=layers + 2)
        model = build_model(pipeline, topology, pp_rank, config, seed=0, device=self._device)
        if not num_layers:
            model.decoder.layers = torch.nn.ModuleList()  # type: ignore[union-attr]
        return MegatronStage([wrap_ddp(model, config)])

    def _inputs(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """A random hidden state (sequence, rows, hidden), and the batch that goes with it."""
        rows, length = micro_batch.rows, micro_batch.encoder_len
        dtype = getattr(torch, self._dtype)
        shards = self._ranks.tp if self._ranks.sequence_parallel else 1
        x_SBH = torch.randn((length // shards, rows, self._model.hidden_size), dtype=dtype, device=self._device)
        tokens = torch.zeros((rows, length), dtype=torch.long, device=self._device)
        batch: dict[str, Any] = {
            "tokens": tokens,
            "labels": tokens,
            "loss_weights": torch.ones((rows, length), device=self._device),
            "position_ids": torch.arange(length, device=self._device).expand(rows, -1),
        }
        if micro_batch.layout == "packed":
            lengths = [s.encoder for s in micro_batch.samples]
            if pad := length - sum(lengths):
                lengths.append(pad)
            batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        return x_SBH, batch

    def _start(self, stage: MegatronStage, micro_batch: MicroBatch, *, count_bytes: bool) -> tuple[int, torch.Tensor]:
        """(stage number, its input); the stage has loaded micro-batch 0."""
        number = _LAYERS_STAGE if stage is not self._stages["head"] else _HEAD_STAGE
        x_SBH, batch = self._inputs(micro_batch)
        stage.count_bytes(count_bytes)
        stage.start_step(_plan(micro_batch, number))
        stage.load(0, batch)
        return number, x_SBH

    def _stored_bytes(self, stage: MegatronStage, micro_batch: MicroBatch) -> int:
        number, x_SBH = self._start(stage, micro_batch, count_bytes=True)
        stage.forward(number, 0, (x_SBH,))
        return stage.held_bytes()

    def _peak_bytes(self, stage: MegatronStage, micro_batch: MicroBatch, *, split: bool) -> int:
        """Above what is held before F, the received input and output gradient included."""

        def run() -> None:
            number, x_SBH = self._start(stage, micro_batch, count_bytes=False)
            self._forward_backward(stage, number, x_SBH, split=split)

        return self._measure(run)[1]

    def _forward_backward(
        self, stage: MegatronStage, number: int, x_SBH: torch.Tensor, *, split: bool
    ) -> tuple[float, ...]:
        """Seconds of F and B, or of F, I and W."""
        output_grads = () if number == _HEAD_STAGE else (torch.ones_like(x_SBH),)
        clock = self._clock
        start_s = clock()
        stage.forward(number, 0, (x_SBH,))
        forward_s = clock()
        if not split:
            stage.backward(number, 0, output_grads)
            return forward_s - start_s, clock() - forward_s
        stage.backward_input(number, 0, output_grads)
        input_s = clock()
        stage.backward_weight(number, 0)
        return forward_s - start_s, input_s - forward_s, clock() - input_s

    def _seconds(self, stage: MegatronStage, micro_batch: MicroBatch, *, split: bool) -> list[float]:
        """Medians over repetitions, as many as fit into the time for one; the first is a warm-up."""
        runs: list[tuple[float, ...]] = []
        spent_s = 0.0
        while True:
            done, room_s = len(runs) - 1, self._seconds_each - spent_s
            wanted = done < 1 or (done < _LEAST_REPEATS and room_s > -3 * self._seconds_each)
            if not self.agree(wanted or (done < _MOST_REPEATS and room_s > 0)):
                break
            number, x_SBH = self._start(stage, micro_batch, count_bytes=False)
            runs.append(self._forward_backward(stage, number, x_SBH, split=split))
            spent_s += sum(runs[-1])
        return [statistics.median(column) for column in zip(*runs[1:], strict=True)]

    @property
    def _clock(self) -> Callable[[], float]:
        """CPU seconds on a CPU, where ranks share cores."""
        if self._device.type != "cuda":
            return time.process_time

        def synchronised() -> float:
            torch.cuda.synchronize(self._device)
            return time.perf_counter()

        return synchronised


def _plan(micro_batch: MicroBatch, stage: int) -> ExecutionPlan:
    """Of a step with this micro-batch alone, as far as a stage looks at it."""
    return ExecutionPlan(
        step=0,
        dp_rank=0,
        pp_rank=stage,
        stage_ranks=(0, 1, 2),
        micro_batches=(micro_batch,),
        instructions=(),
        prediction=Prediction(makespan_ns=0, lower_bound_ns=0, peak_bytes=(0, 0, 0), bubble_ratio=0.0),
        loss_norm="tokens",
        loss_divisor=max(1, micro_batch.padded_tokens),
        real_tokens=micro_batch.real_tokens,
        padded_tokens=micro_batch.padded_tokens,
        num_micro_batches=(1,),
        seed=0,
    )
