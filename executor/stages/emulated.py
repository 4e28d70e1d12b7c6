"""A Stage that sleeps for the cost model's seconds: real ranks, real store, no arithmetic.

Ranks that share cores cannot show a bubble with a real model (an idle rank lends its core); sleeping ranks can. Claims
about schedules on a CPU machine are measured with this stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dynapipe_ext.batch.topology import ActivationFormat, TensorSpec
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.executor.instructions import Buffer, ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.transport.emulated import sleep_until


class EmulatedStage:
    """`costs_of(plan)` prices the plan's micro-batches; `make_tensor` builds what crosses boundaries: tensors of the
    announced shape, which are real work for a transport that carries them. `scale` stretches time. `exchange(plan)` is
    called in the middle of every forward and input gradient, where joined ranks meet."""

    def __init__(
        self,
        costs_of: Callable[[ExecutionPlan], MicroBatchCosts],
        activation_format: ActivationFormat,
        make_tensor: Callable[[TensorSpec], object],
        *,
        scale: float = 1.0,
        exchange: Callable[[ExecutionPlan], object] = lambda plan: None,
    ) -> None:
        self._exchange = exchange
        self._costs_of, self._format, self._make_tensor, self._scale = costs_of, activation_format, make_tensor, scale

    def start_step(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._costs = self._costs_of(plan)
        self._tensors = [tuple(self._make_tensor(spec) for spec in self._format.specs(m)) for m in plan.micro_batches]
        self._held: dict[tuple[int, int], int] = {}

    def load(self, micro_batch: int, batch: Batch) -> None: ...

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        self._sleep(int(self._costs.forward_ns[stage, micro_batch]), exchanges=True)
        if not self._plan.forward_only:
            self._held[stage, micro_batch] = int(self._costs.stored_bytes[stage, micro_batch])
        return self._tensors[micro_batch] if stage < self._plan.num_stages - 1 else ()

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        self._sleep(int(self._costs.backward_ns[stage, micro_batch]), exchanges=True)
        del self._held[stage, micro_batch]
        return self._tensors[micro_batch] if stage > 0 else ()

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        self._sleep(int(self._costs.input_ns[stage, micro_batch]), exchanges=True)
        return self._tensors[micro_batch] if stage > 0 else ()

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._sleep(int(self._costs.weight_ns[stage, micro_batch]))
        del self._held[stage, micro_batch]

    def finish_step(self) -> float:
        return 0.0

    def held_bytes(self) -> int:
        return sum(self._held.values())

    def link_s(self, buffer: Buffer) -> float:
        """How long a message of this step is on its way."""
        boundary = buffer.stage - (buffer.payload == "gradient")
        return int(self._costs.transfer_ns[boundary, buffer.micro_batch]) / 1e9 * self._scale

    def _sleep(self, duration_ns: int, *, exchanges: bool = False) -> None:
        start_s, duration_s = time.perf_counter(), duration_ns / 1e9 * self._scale
        if exchanges:
            sleep_until(start_s + duration_s / 2)
            self._exchange(self._plan)
        sleep_until(start_s + duration_s)
