"""Seconds and bytes of a model's layers and head, action by action, on this device and as the executor runs them.

A Megatron stage of two layers (one for bytes), of an encoder-decoder one of either side, and one of the head alone
stand by themselves in one process, or in as many as share tensor-parallel layers: F, B, I and W are those of training,
without transfers.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeVar, assert_never

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, slices_head
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.surface import QUANTITIES, Measured, ModelPart
from dynapipe_ext.data.pairs import pair_borders
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.instructions import BackwardInput, ExecutionPlan
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined, JoinedRanks
from dynapipe_ext.executor.stages.megatron.model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, wrap_ddp
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.peak_memory import is_out_of_memory, measure_on
from dynapipe_ext.schedules.step_plan import Prediction

_NUM_LAYERS = 2
_SECONDS_EACH = 0.5  # one measurement of an action may take altogether; short actions are repeated in it
# Stages of a side: its layers that are measured are the middle one's, without embedding, final norm and head.
_STAGES_OF_SIDE, _MIDDLE = 3, 1
_MOST_REPEATS, _LEAST_REPEATS = 9, 3
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartStages:
    """What one part is measured on: of layers a stage of `_NUM_LAYERS` and one of a single layer, of the head one."""

    number: int  # in the pipeline
    timed: MegatronStage
    alone: MegatronStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The tensor-parallel ranks that measure together, and this one of them; with `dp` as many data parallel ranks."""

    rank: int
    tp: int
    init_method: str
    sequence_parallel: bool
    dp: int = 1

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, dp=self.dp)


class LayerProfiler:
    """Measures micro-batches one by one. torch.distributed must not be initialised before, and is not afterwards.

    All ranks call the same methods and get the same answers: of times and bytes the largest over ranks.
    """

    def __init__(self, model: Architecture, *, dtype: str, device: torch.device, ranks: Ranks) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._ranks, self._topology = ranks, ranks.topology
        self._num_sides = 2 if model.num_decoder_layers else 1
        self._measure = measure_on(device)
        self._exit = ExitStack()

    def __enter__(self) -> LayerProfiler:
        dist.init_process_group(
            process_group_backend(self._device),
            init_method=self._ranks.init_method,
            rank=self._ranks.rank,
            world_size=self._topology.world_size,
        )
        self._exit.callback(dist.destroy_process_group)
        initialize_parallel(self._topology, seed=0)
        self._exit.callback(destroy_parallel)
        layers: tuple[ModelPart, ...] = ("encoder", "decoder") if self._num_sides == 2 else ("layer",)
        self._parts: dict[ModelPart, _PartStages] = {}
        for side, part in enumerate(layers):
            number = side * _STAGES_OF_SIDE + _MIDDLE
            timed, alone = (self._stage(number, count) for count in (_NUM_LAYERS, 1))
            self._parts[part] = _PartStages(number=number, timed=timed, alone=alone)
        head = self._stage(self._num_stages - 1, 0)
        self._parts["head"] = _PartStages(number=self._num_stages - 1, timed=head, alone=head)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def measure(self, part: ModelPart, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured | None:
        """Of one layer, or of the head; None where it does not fit on a device. With `bytes_only` times are 0.

        Padded rows of an encoder are measured with a mask of padding, as nearly all are in training. Several
        micro-batches are the pieces of a sample: all forwards and then all backwards.
        """
        mine = self._unless_too_large(partial(self._measured, part, micro_batches, bytes_only=bytes_only))
        if self._topology.world_size == 1:
            return mine
        numbers = [math.inf] * (len(QUANTITIES) + 2 * len(micro_batches))
        if mine is not None:
            *totals, each_s = astuple(mine)
            numbers = [*map(float, totals), *each_s]
        numbers = self._agreed(numbers)
        if math.isinf(numbers[0]):
            return None
        forward_s, backward_s, input_s, weight_s, stored, peak, *each_s = numbers
        return Measured(forward_s, backward_s, input_s, weight_s, int(stored), int(peak), tuple(each_s))

    def agree(self, answer: bool) -> bool:
        """True where all ranks say so."""
        return answer if self._topology.world_size == 1 else not self._agreed([float(not answer)])[0]

    def _agreed(self, numbers: list[float]) -> list[float]:
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [float(x) for x in shared.tolist()]

    def _unless_too_large(self, measure: Callable[[], _Found]) -> _Found | None:
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _measured(self, part: ModelPart, micro_batches: Sequence[MicroBatch], *, bytes_only: bool) -> Measured:
        stages, count = self._parts[part], len(micro_batches)
        layers = 1 if part == "head" else _NUM_LAYERS
        stored = self._stored_bytes(part, stages.timed, micro_batches)
        if part != "head":
            stored -= self._stored_bytes(part, stages.alone, micro_batches)
        ways = (False, True) if count == 1 else (False,)  # pieces have no split backward
        peak = max(self._peak_bytes(part, micro_batches, split=split) for split in ways)
        seconds = [[0.0] * (2 + split) * count for split in (False, True)]
        for way in () if bytes_only else ways:
            each = self._medians(partial(self._seconds, part, stages.timed, micro_batches, split=way))
            seconds[way] = [s / layers for s in each]
        whole, split = seconds
        return Measured(
            forward_s=sum(whole[:count]),
            backward_s=sum(whole[count:]),
            input_s=split[1],
            weight_s=0.0 if slices_head(micro_batches[0].recompute) and part == "head" else split[2],
            stored_bytes=stored,
            peak_bytes=max(peak, stored),
            each_s=tuple(whole),
        )

    @property
    def _num_stages(self) -> int:
        return self._num_sides * _STAGES_OF_SIDE

    def _of_layers(self, count: int) -> Architecture:
        """The model with so many layers on every side."""
        return replace(self._model, num_layers=count, num_decoder_layers=count * (self._num_sides - 1))

    def _stage(self, number: int, num_layers: int, joined: Joined = ALONE) -> MegatronStage:
        layers, ranks = max(1, num_layers), self._ranks
        around = (1, layers, 1) * self._num_sides
        topology = Topology(tp=ranks.tp, pp=self._num_stages, layers_per_stage=around)
        config = transformer_config(
            self._of_layers(layers), self._topology, dtype=self._dtype, sequence_parallel=ranks.sequence_parallel
        )
        model = build_model(self._of_layers(layers + 2), topology, number, config, seed=0, device=self._device)
        if not num_layers:
            model.decoder.layers = torch.nn.ModuleList()  # type: ignore[union-attr]
        if self._num_sides == 1:
            return MegatronStage([wrap_ddp(model, config)], joined=joined)
        from dynapipe_ext.executor.stages.megatron.t5 import t5_stage

        return t5_stage([wrap_ddp(model, config)])

    def _hidden(self, part: ModelPart, micro_batch: MicroBatch, width: int) -> tuple[torch.Tensor, ...]:
        """Random hidden states (sequence, rows, hidden) as the part receives them on one of `width` joined ranks; of an
        encoder's output, which the head gets and does not read, no position.
        """
        encoder, decoder = micro_batch.encoder_len, micro_batch.decoder_len
        match part:
            case "layer" | "encoder":
                lengths = [encoder]
            case "decoder":
                lengths = [encoder, decoder]
            case "head":
                lengths = [0, decoder] if self._num_sides == 2 else [encoder]
            case _:
                assert_never(part)
        dtype = getattr(torch, self._dtype)
        shards = width * (self._ranks.tp if self._ranks.sequence_parallel else 1)
        sizes = [(length // shards, micro_batch.rows, self._model.hidden_size) for length in lengths]
        return tuple(torch.randn(size, dtype=dtype, device=self._device) for size in sizes)

    def _batch(self, micro_batch: MicroBatch) -> dict[str, Any]:
        rows, length = micro_batch.rows, micro_batch.encoder_len
        if self._num_sides == 2:
            labels = torch.zeros((rows, micro_batch.decoder_len), dtype=torch.long, device=self._device)
            pair: dict[str, Any] = {"labels": labels, "loss_weights": torch.ones_like(labels, dtype=torch.float32)}
            if micro_batch.layout == "packed":
                return pair | pair_borders(micro_batch)
            return pair | {"encoder_padding": torch.zeros((rows, length), dtype=torch.bool, device=self._device)}
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
        return batch

    def _start(
        self,
        part: ModelPart,
        stage: MegatronStage,
        micro_batches: Sequence[MicroBatch],
        *,
        count_bytes: bool,
        width: int = 1,
    ) -> list[tuple[torch.Tensor, ...]]:
        """What the stage receives of each micro-batch; it has loaded them."""
        inputs = [self._hidden(part, micro_batch, width) for micro_batch in micro_batches]
        stage.count_bytes(count_bytes)
        stage.start_step(_plan(micro_batches, self._parts[part].number, self._num_stages, width))
        for number, micro_batch in enumerate(micro_batches):
            stage.load(number, self._batch(micro_batch))
        return inputs

    def _stored_bytes(self, part: ModelPart, stage: MegatronStage, micro_batches: Sequence[MicroBatch]) -> int:
        for number, inputs in enumerate(self._start(part, stage, micro_batches, count_bytes=True)):
            stage.forward(self._parts[part].number, number, inputs)
        held = stage.held_bytes()
        stage.start_step(_plan(micro_batches, self._parts[part].number, self._num_stages))  # what it holds goes now
        return held

    def _peak_bytes(self, part: ModelPart, micro_batches: Sequence[MicroBatch], *, split: bool) -> int:
        """Above what is held before F: with the received input and output gradient, without the encoder's output."""
        passing = 0

        def run() -> None:
            nonlocal passing
            stage = self._parts[part].alone
            inputs = self._start(part, stage, micro_batches, count_bytes=False)
            passing = sum(x.nbytes for received in inputs for x in received[:-1])
            self._run(part, stage, inputs, split=split)

        return self._measure(run)[1] - passing

    def _seconds(
        self, part: ModelPart, stage: MegatronStage, micro_batches: Sequence[MicroBatch], *, split: bool
    ) -> list[float]:
        return self._run(part, stage, self._start(part, stage, micro_batches, count_bytes=False), split=split)

    def _run(
        self, part: ModelPart, stage: MegatronStage, inputs: Sequence[tuple[torch.Tensor, ...]], *, split: bool
    ) -> list[float]:
        """Seconds of every F, then of every B, in the order of positions; or of F, I and W."""
        number, clock, order = self._parts[part].number, self._clock, range(len(inputs))

        def timed(action: Callable[..., object], micro_batch: int, *received: tuple[torch.Tensor, ...]) -> float:
            start_s = clock()
            action(number, micro_batch, *received)
            return clock() - start_s

        def output_grads(micro_batch: int) -> tuple[torch.Tensor, ...]:
            return () if part == "head" else tuple(torch.ones_like(x) for x in inputs[micro_batch])

        grads = output_grads(order[-1])  # that of the first backward: what is received counts as held from F on
        forward_s = [timed(stage.forward, m, inputs[m]) for m in order]
        if split:
            return [*forward_s, timed(stage.backward_input, 0, grads), timed(stage.backward_weight, 0)]
        backward_s = []
        for m in reversed(order):
            backward_s.append(timed(stage.backward, m, grads))
            grads = output_grads(m - 1) if m else ()
        return forward_s + backward_s[::-1]

    def seconds_on_slices(self, joined: JoinedRanks, micro_batch: MicroBatch) -> float:
        """Of F and B of a layer on one of these ranks, without their exchanges: medians, the largest over ranks."""
        spent_s = 0.0

        def timed(_what: str, _group: Any, run: Callable[[], None]) -> None:
            nonlocal spent_s
            start_s = self._clock()
            run()
            spent_s += self._clock() - start_s

        joined = joined.taking_turns(timed)
        stage = self._stage(self._parts["layer"].number, _NUM_LAYERS, {joined.width: joined})

        def run() -> list[float]:
            nonlocal spent_s
            inputs = self._start("layer", stage, [micro_batch], count_bytes=False, width=joined.width)
            spent_s = 0.0
            return [sum(self._run("layer", stage, inputs, split=False)) - spent_s]

        return self._agreed(self._medians(run))[0] / _NUM_LAYERS

    def _medians(self, run: Callable[[], Sequence[float]]) -> list[float]:
        """Of every action's seconds over repetitions, as many as fit into the time for one; the first is a warm-up."""
        runs: list[Sequence[float]] = []
        spent_s = 0.0
        while True:
            done, room_s = len(runs) - 1, _SECONDS_EACH - spent_s
            goes_on = done < 1 or (done < _LEAST_REPEATS and room_s > -3 * _SECONDS_EACH)
            if not self.agree(goes_on or (done < _MOST_REPEATS and room_s > 0)):
                break
            runs.append(run())
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


def _plan(micro_batches: Sequence[MicroBatch], stage: int, num_stages: int, width: int = 1) -> ExecutionPlan:
    """Of a step with these micro-batches alone, as far as a stage looks at it."""
    padded_tokens = sum(m.padded_tokens for m in micro_batches)
    return ExecutionPlan(
        step=0,
        dp_rank=0,
        pp_rank=stage,
        stage_ranks=tuple(range(num_stages)),
        micro_batches=tuple(micro_batches),
        instructions=tuple(BackwardInput(stage, number) for number in range(len(micro_batches))),  # as some are split
        prediction=Prediction(makespan_ns=0, lower_bound_ns=0, peak_bytes=(0, 0, 0), bubble_ratio=0.0),
        loss_norm="tokens",
        loss_weight=padded_tokens,
        real_tokens=sum(m.real_tokens for m in micro_batches),
        padded_tokens=padded_tokens,
        num_micro_batches=(len(micro_batches),),
        seed=0,
        width=width,
    )
