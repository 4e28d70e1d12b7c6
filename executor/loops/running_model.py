"""A loop's running Megatron model as the planning call needs it: its ranks and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.drop_in.pipeline import counted_architecture, expert_ranks
from dynapipe_ext.executor.loops.counts import MicroBatchSamples, in_count
from dynapipe_ext.executor.stages.megatron.stage import unwrapped
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planning_call import plan_micro_batches

_NS_A_TOKEN = 1_000  # of models that are not counted: only ratios matter


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """One replica of a model. `topology` has no replicas: loops hand each its samples."""

    topology: Topology
    costs: Architecture | TokenCosts
    replicas: Any  # the process group over them where they meet inside micro-batches, at experts; else None
    row_multiple: int  # of positions in a row
    config: Any  # its TransformerConfig

    @classmethod
    def of(cls, chunks: Sequence[Any], groups: Any = None) -> RunningModel:
        """`groups` are the loop's ProcessGroupCollection; without, Megatron's own."""
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import get_model_config

        groups = ProcessGroupCollection.use_mpu_process_groups() if groups is None else groups
        config = get_model_config(chunks[0])
        tp, pp = groups.tp.size(), groups.pp.size()
        return cls(
            topology=Topology(tp=tp, pp=pp),
            costs=counted_architecture(unwrapped(chunks[0]), config) or TokenCosts(pp, ns_per_token=_NS_A_TOKEN),
            replicas=groups.dp if config.num_moe_experts and expert_ranks(groups) > tp else None,
            row_multiple=tp if config.sequence_parallel else 1,
            config=config,
        )

    def cut(
        self, lengths: Sequence[int], max_tokens: int, *, forward_only: bool = False, multiple: int = 1
    ) -> MicroBatchSamples:
        """The samples of every micro-batch of this replica, in order of entry; their number a multiple of `multiple`.

        Forwards alone are cut like the step of the same samples. Where experts lie over replicas all have as many, and
        this is a collective call. Errors: PlanError for a sample above `max_tokens`, by name.
        """
        planned = plan_micro_batches(lengths, self.topology, self.costs, max_tokens=max_tokens)
        plan = planned.forwards() if forward_only else planned.plan
        groups = [[sample.index for sample in m.samples] for m in plan.batch.replicas[0].micro_batches]
        count = -(-len(groups) // multiple) * multiple
        if self.replicas is not None:
            most = torch.tensor([count], device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.replicas)
            count = int(most)
        return in_count(groups, lengths, count)
