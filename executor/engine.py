"""Runs a rank's instructions: takes buffers from one stage call to the next and to the transport.

In order, or, where it is told how to see arrivals, with weight gradients run while a transfer is waited for: the next W
of the plan whose I has run. The W keep their order among each other, and no other instruction moves, so transfers,
buffers and sums of gradients are those of the plan (`filling` has the proof that nothing else changes for the worse).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import assert_never

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    ExecutionPlan,
    Forward,
    Instruction,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.executor.protocols import Batch, Pending, Recorder, Stage, Tensors, Transport
from dynapipe_ext.timeline import Span


class PipelineExecutor:
    """Executes plans on one pipeline rank.

    `rank` labels recorded spans (default: the plan's pipeline rank). `clock` returns seconds; on an accelerator a
    recording run passes a clock that synchronises first. Two executors fit in one process.

    `arrived` says of a transfer whether it has ended, without blocking (`WatchedTransport.arrived`); with it, waits are
    filled with weight gradients, which must then join no collective over replicas (ZeRO-2 and 3 do). It pays with plans
    of `lower(fill_waits=True)`. On an accelerator, where actions are only queued, it must first wait for the work that
    is queued: else every transfer looks late.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        *,
        recorder: Recorder | None = None,
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        arrived: Callable[[Pending], bool] | None = None,
    ) -> None:
        self._stage = stage
        self._transport = transport
        self._recorder = recorder
        self._rank = rank
        self._clock = clock
        self._arrived = arrived

    def execute(self, plan: ExecutionPlan, micro_batches: Sequence[Batch]) -> float:
        """Run one step and return the loss of the global batch; gradients are then complete and reduced.

        `micro_batches[i]` holds the tensors of `plan.micro_batches[i]`. Raises ExecutionError when a peer is late.
        """
        if len(micro_batches) != len(plan.micro_batches):
            raise ExecutionError(
                f"step {plan.step}: {len(micro_batches)} batches were given for {len(plan.micro_batches)} micro-batches"
            )
        self._stage.start_step(plan)
        self._run(plan, micro_batches)
        return self._stage.finish_step()

    def _run(self, plan: ExecutionPlan, micro_batches: Sequence[Batch]) -> None:
        stage, transport, last = self._stage, self._transport, plan.num_stages - 1
        buffers: dict[Buffer, Tensors] = {}
        sends: dict[Buffer, Pending] = {}
        receives: dict[Buffer, Pending] = {}
        weights = _Weights(plan.instructions)
        for instruction in plan.instructions:
            start_s, start_cpu_s = self._clock(), time.thread_time()
            match instruction:
                case Load(micro_batch):
                    stage.load(micro_batch, micro_batches[micro_batch])
                case Forward(s, m):
                    inputs = buffers.pop(Buffer("activation", s - 1, m)) if s > 0 else ()
                    outputs = stage.forward(s, m, inputs)
                    del inputs
                    if s < last:
                        buffers[Buffer("activation", s, m)] = outputs
                    self._record(plan, f"{s}F{m}", m, start_s, start_cpu_s)
                case Backward(s, m) | BackwardInput(s, m):
                    whole = isinstance(instruction, Backward)
                    output_grads = buffers.pop(Buffer("gradient", s + 1, m)) if s < last else ()
                    input_grads = (stage.backward if whole else stage.backward_input)(s, m, output_grads)
                    del output_grads
                    if s > 0:
                        buffers[Buffer("gradient", s, m)] = input_grads
                    self._record(plan, f"{s}{'B' if whole else 'I'}{m}", m, start_s, start_cpu_s)
                    weights.ready.add((s, m))
                case BackwardWeight():
                    if weights.due():
                        self._weight(plan, instruction)
                case Send(buffer):
                    sends[buffer] = transport.send(instruction, buffers.pop(buffer))
                case Recv(buffer):
                    receives[buffer] = transport.recv(instruction)
                case WaitSend(buffer):
                    self._wait(plan, sends.pop(buffer), weights)
                case WaitRecv(buffer):
                    buffers[buffer] = self._wait(plan, receives.pop(buffer), weights)
                case _:
                    assert_never(instruction)
        if buffers or sends or receives:
            left = [str(buffer) for buffer in (*buffers, *sends, *receives)]
            raise ExecutionError(
                f"step {plan.step}: the plan left buffers behind: {left[:5]}; verify plans before running"
            )

    def _wait(self, plan: ExecutionPlan, pending: Pending, weights: _Weights) -> Tensors:
        """What a transfer brings; until it has ended, weight gradients run if they may."""
        while self._arrived is not None and not self._arrived(pending):
            weight = weights.take()
            if weight is None:
                break
            self._weight(plan, weight)
        return pending.wait()

    def _weight(self, plan: ExecutionPlan, weight: BackwardWeight) -> None:
        start_s, start_cpu_s = self._clock(), time.thread_time()
        self._stage.backward_weight(weight.stage, weight.micro_batch)
        self._record(plan, f"{weight.stage}W{weight.micro_batch}", weight.micro_batch, start_s, start_cpu_s)

    def _record(self, plan: ExecutionPlan, label: str, micro_batch: int, start_s: float, start_cpu_s: float) -> None:
        if self._recorder is None:
            return
        shape = plan.micro_batches[micro_batch]
        self._recorder.record(
            Span(
                rank=plan.pp_rank if self._rank is None else self._rank,
                label=label,
                start_s=start_s,
                end_s=self._clock(),
                cpu_s=time.thread_time() - start_cpu_s,
                num_bytes=self._stage.held_bytes(),
                shape=(shape.rows, shape.encoder_len, shape.decoder_len),
            )
        )


class _Weights:
    """The weight gradients of a plan, run as a prefix of their order; those before `taken` have run."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.ready: set[tuple[int, int]] = set()  # (stage, micro-batch) whose I has run
        self._order = [instruction for instruction in instructions if isinstance(instruction, BackwardWeight)]
        self._taken = self._passed = 0

    def take(self) -> BackwardWeight | None:
        """The next one, if its I has run: it counts as run."""
        if self._taken == len(self._order):
            return None
        weight = self._order[self._taken]
        if (weight.stage, weight.micro_batch) not in self.ready:
            return None
        self._taken += 1
        return weight

    def due(self) -> bool:
        """Whether the one at this place of the plan has yet to run: it then counts as run."""
        self._passed += 1
        if self._passed <= self._taken:
            return False
        self._taken += 1
        return True
