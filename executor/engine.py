"""Runs a rank's instructions: takes buffers from one stage call to the next and to the transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import assert_never

from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Computation,
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

_Act = Callable[[Computation, Tensors], Tensors]


class PipelineExecutor:
    """Executes plans on one pipeline rank.

    `rank` labels recorded spans and errors (default: the plan's pipeline rank). `clock` returns seconds and is read
    around recorded actions only; on an accelerator a recording run passes a clock that synchronises first. `ranges`
    gives the context in which an action runs, by its label (`profiler_ranges`). Two executors fit in one process.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        *,
        recorder: Recorder | None = None,
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranges: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._stage = stage
        self._transport = transport
        self._recorder = recorder
        self._rank = rank
        self._clock = clock
        self._ranges = ranges

    def execute(self, plan: ExecutionPlan, micro_batches: Sequence[Batch]) -> float:
        """Run one step and return the loss of the global batch; gradients are then complete and reduced.

        `micro_batches[i]` holds the tensors of `plan.micro_batches[i]`. Raises ExecutionError when a peer is late over
        gloo; over NCCL torch's watchdog then ends the process (SIGABRT, after the group's time limit). Raises
        ExecutionError, too, for every step after one that raised, whatever it raised: what ranks sent each other in it
        may still arrive.
        What an instruction raises carries a note that says which one, where, and on what.
        """
        if not isinstance(plan, ExecutionPlan):
            raise ConfigError(
                f"the plan is of type {type(plan).__name__}: call execute(plan, micro_batches) with a loader's"
            )
        if len(micro_batches) != len(plan.micro_batches):
            raise ExecutionError(
                f"step {plan.step}: {len(micro_batches)} batches were given for {len(plan.micro_batches)} micro-batches"
            )
        if self._transport.failed_step:
            raise ExecutionError(
                f"{self._transport.failed_step} failed, and what was sent in it may still arrive: make a new"
                " ParallelContext (or InlineHub), and with it new stages and executors on all ranks"
            )
        try:
            self._stage.start_step(plan)
            self._run(plan, micro_batches)
            return self._stage.finish_step()
        except BaseException as error:
            self._transport.failed_step = f"step {plan.step} ({type(error).__name__})"
            raise

    def _run(self, plan: ExecutionPlan, micro_batches: Sequence[Batch]) -> None:
        stage, transport, last = self._stage, self._transport, plan.num_stages - 1
        act = self._compute if self._recorder is None and self._ranges is None else partial(self._seen, plan)
        buffers: dict[Buffer, Tensors] = {}
        sends: dict[Buffer, Pending] = {}
        receives: dict[Buffer, Pending] = {}
        for instruction in plan.instructions:
            try:
                match instruction:
                    case Load(micro_batch):
                        stage.load(micro_batch, micro_batches[micro_batch])
                    case Forward(s, m):
                        inputs = buffers.pop(Buffer("activation", s - 1, m)) if s > 0 else ()
                        outputs = act(instruction, inputs)
                        del inputs
                        if s < last:
                            buffers[Buffer("activation", s, m)] = outputs
                    case Backward(s, m) | BackwardInput(s, m):
                        output_grads = buffers.pop(Buffer("gradient", s + 1, m)) if s < last else ()
                        input_grads = act(instruction, output_grads)
                        del output_grads
                        if s > 0:
                            buffers[Buffer("gradient", s, m)] = input_grads
                    case BackwardWeight():
                        act(instruction, ())
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
            except Exception as error:
                error.add_note(self._place(plan, instruction))
                raise
        if buffers or sends or receives:
            left = [str(buffer) for buffer in (*buffers, *sends, *receives)]
            raise ExecutionError(
                f"step {plan.step}: the plan left buffers behind: {left[:5]}; verify plans before running"
            )

    def _seen(self, plan: ExecutionPlan, action: Computation, tensors: Tensors) -> Tensors:
        """What the stage makes of `tensors`, seen by the recorder and within a range."""
        label = str(action)
        with nullcontext() if self._ranges is None else self._ranges(label):
            if self._recorder is None:
                return self._compute(action, tensors)
            start_s, start_cpu_s = self._clock(), time.thread_time()
            made = self._compute(action, tensors)
            shape = plan.micro_batches[action.micro_batch]
            self._recorder.record(
                Span(
                    rank=self._rank_in(plan),
                    label=label,
                    start_s=start_s,
                    end_s=self._clock(),
                    cpu_s=time.thread_time() - start_cpu_s,
                    num_bytes=self._stage.held_bytes(),
                    shape=(shape.rows, shape.encoder_len, shape.decoder_len),
                )
            )
            return made

    def _compute(self, action: Computation, tensors: Tensors) -> Tensors:
        match action:
            case Forward(s, m):
                return self._stage.forward(s, m, tensors)
            case Backward(s, m):
                return self._stage.backward(s, m, tensors)
            case BackwardInput(s, m):
                return self._stage.backward_input(s, m, tensors)
            case BackwardWeight(s, m):
                self._stage.backward_weight(s, m)
                return ()
            case _:
                assert_never(action)

    def _rank_in(self, plan: ExecutionPlan) -> int:
        return plan.pp_rank if self._rank is None else self._rank

    def _place(self, plan: ExecutionPlan, instruction: Instruction) -> str:
        """Where an instruction failed, for the note on its error."""
        where = (
            f"on rank {self._rank_in(plan)} (pipeline rank {plan.pp_rank} of replica {plan.dp_rank}), step {plan.step},"
            f" {instruction}"
        )
        match instruction:
            case Send(buffer) | Recv(buffer) | WaitSend(buffer) | WaitRecv(buffer):
                number = buffer.micro_batch
            case _:
                number = instruction.micro_batch
        m, peak_bytes = plan.micro_batches[number], plan.prediction.peak_bytes[plan.pp_rank]
        lengths = f"{m.encoder_len} + {m.decoder_len}" if m.decoder_len else f"{m.encoder_len}"
        return (
            f"{where}: micro-batch {number} of {m.rows} rows x {lengths} tokens, {m.layout}, recomputation"
            f" {m.recompute}; predicted peak of this rank {peak_bytes} bytes"
        )
