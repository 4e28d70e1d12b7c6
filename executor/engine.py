"""Runs a rank's instructions: takes buffers from one stage call to the next and to the transport."""

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
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        *,
        recorder: Recorder | None = None,
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stage = stage
        self._transport = transport
        self._recorder = recorder
        self._rank = rank
        self._clock = clock

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
                case BackwardWeight(s, m):
                    stage.backward_weight(s, m)
                    self._record(plan, f"{s}W{m}", m, start_s, start_cpu_s)
                case Send(buffer):
                    sends[buffer] = transport.send(instruction, buffers.pop(buffer))
                case Recv(buffer):
                    receives[buffer] = transport.recv(instruction)
                case WaitSend(buffer):
                    sends.pop(buffer).wait()
                case WaitRecv(buffer):
                    buffers[buffer] = receives.pop(buffer).wait()
                case _:
                    assert_never(instruction)
        if buffers or sends or receives:
            left = [str(buffer) for buffer in (*buffers, *sends, *receives)]
            raise ExecutionError(
                f"step {plan.step}: the plan left buffers behind: {left[:5]}; verify plans before running"
            )

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
