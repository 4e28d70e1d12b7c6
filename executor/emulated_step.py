"""A proven step on emulated ranks: threads that run its programs and sleep for the seconds that its costs count.

The programs, their interpreter and the order of all transfers are those of a real run. There is no arithmetic, and
messages are short. So the step shows the bubble that ranks with a device each would have, which real ranks that share
cores cannot show. No torch, no store, no processes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial

from dynapipe_ext.batch.topology import ActivationFormat, TensorSpec
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import DynaPipeError, ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import ProvenStep
from dynapipe_ext.executor.stages.emulated import EmulatedStage
from dynapipe_ext.executor.transport.emulated import EmulatedLinks
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.timeline import Span, Trace

_SLACK_S = 60.0  # beyond the step's own time, before a rank that waits gives up


def emulated_step(proven: ProvenStep, *, scale: float = 1.0) -> tuple[Trace, ...]:
    """What the pipeline ranks of each replica did, in seconds from the first start on any rank.

    Ranks sleep `scale` times as long as the costs count; the trace is in counted seconds again, so that what the
    machine adds to each action weighs less the larger the scale is. Tensor parallel ranks do alike: one stands for all.

    Errors: ExecutionError if a rank fails, or waits for longer than a step can last; a defect is raised as it is.
    """
    ranks, failures = _ranks(proven, scale), list[Exception]()
    together = threading.Barrier(len(ranks))
    threads = [threading.Thread(target=rank.run, args=(together, failures), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:  # the other ranks have waited for the first one
        if not isinstance(failures[0], DynaPipeError | threading.BrokenBarrierError):
            raise failures[0]
        raise ExecutionError(f"an emulated rank failed: {failures[0]}") from failures[0]
    start_s = min(span.start_s for rank in ranks for span in rank.spans)
    return tuple(
        Trace(
            tuple(
                replace(span, start_s=(span.start_s - start_s) / scale, end_s=(span.end_s - start_s) / scale)
                for rank in ranks
                if rank.plan.dp_rank == replica[0].dp_rank
                for span in rank.spans
            )
        )
        for replica in proven.plans
    )


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A pipeline rank of one replica; it records its own spans."""

    plan: ExecutionPlan
    stage: EmulatedStage
    transport: EmulatedLinks
    spans: list[Span] = field(default_factory=list)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def run(self, together: threading.Barrier, failures: list[Exception]) -> None:
        executor = PipelineExecutor(self.stage, self.transport, recorder=self)
        try:
            together.wait(_SLACK_S)
            executor.execute(self.plan, [{}] * len(self.plan.micro_batches))
        except Exception as error:  # noqa: BLE001 - the thread ends with it, and nobody else would hear of it
            failures.append(error)


def _ranks(proven: ProvenStep, scale: float) -> list[_Rank]:
    ranks = []
    for costs, replica in zip(proven.step_plan.costs, proven.plans, strict=True):
        hub = InlineHub(timeout_s=_SLACK_S + 2 * scale * proven.step_plan.makespan_s)
        for plan in replica:
            stage = EmulatedStage(partial(_same, costs), _NO_FORMAT, _nothing, scale=scale)
            transport = EmulatedLinks(hub.transport(plan.pp_rank), stage.link_s, _stamp)
            ranks.append(_Rank(plan=plan, stage=stage, transport=transport))
    return ranks


_NO_FORMAT = ActivationFormat(1)  # of messages whose content nobody carries


def _same(costs: MicroBatchCosts, plan: ExecutionPlan) -> MicroBatchCosts:
    return costs


def _nothing(spec: TensorSpec) -> None: ...


def _stamp(arrival_s: float) -> list[float]:
    """A message of one number, as a list: it may be read like a tensor."""
    return [arrival_s]
