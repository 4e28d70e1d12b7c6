"""Variable micro-batches, pipeline schedules and an instruction executor for 3D-parallel training.

The names below load on first use, so that planning processes never import torch. Everything else is imported from the
module that defines it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.batch.micro_batches import MicroBatch
    from dynapipe_ext.batch.topology import ActivationFormat, Topology
    from dynapipe_ext.costs.analytic import AnalyticCosts
    from dynapipe_ext.costs.table import CostTable
    from dynapipe_ext.costs.tokens import TokenCosts
    from dynapipe_ext.errors import DynaPipeError
    from dynapipe_ext.executor.engine import PipelineExecutor
    from dynapipe_ext.executor.instructions import ExecutionPlan
    from dynapipe_ext.executor.loader import DynaPipeDataLoader
    from dynapipe_ext.executor.plans.channel import PlanDelivery
    from dynapipe_ext.executor.stages.torch_stage import TorchStage
    from dynapipe_ext.executor.transport.inline import InlineHub
    from dynapipe_ext.executor.transport.parallel_context import ParallelContext
    from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport
    from dynapipe_ext.models.architecture import Architecture
    from dynapipe_ext.schedules.planner import Planner
    from dynapipe_ext.schedules.planning_call import plan_micro_batches

_HOMES = {
    "ActivationFormat": "dynapipe_ext.batch.topology",
    "AnalyticCosts": "dynapipe_ext.costs.analytic",
    "Architecture": "dynapipe_ext.models.architecture",
    "CostTable": "dynapipe_ext.costs.table",
    "DynaPipeDataLoader": "dynapipe_ext.executor.loader",
    "DynaPipeError": "dynapipe_ext.errors",
    "ExecutionPlan": "dynapipe_ext.executor.instructions",
    "InlineHub": "dynapipe_ext.executor.transport.inline",
    "MicroBatch": "dynapipe_ext.batch.micro_batches",
    "ParallelContext": "dynapipe_ext.executor.transport.parallel_context",
    "PipelineExecutor": "dynapipe_ext.executor.engine",
    "PlanDelivery": "dynapipe_ext.executor.plans.channel",
    "Planner": "dynapipe_ext.schedules.planner",
    "TokenCosts": "dynapipe_ext.costs.tokens",
    "Topology": "dynapipe_ext.batch.topology",
    "TorchP2PTransport": "dynapipe_ext.executor.transport.torch_p2p",
    "TorchStage": "dynapipe_ext.executor.stages.torch_stage",
    "plan_micro_batches": "dynapipe_ext.schedules.planning_call",
}

__all__ = [
    "ActivationFormat",
    "AnalyticCosts",
    "Architecture",
    "CostTable",
    "DynaPipeDataLoader",
    "DynaPipeError",
    "ExecutionPlan",
    "InlineHub",
    "MicroBatch",
    "ParallelContext",
    "PipelineExecutor",
    "PlanDelivery",
    "Planner",
    "TokenCosts",
    "Topology",
    "TorchP2PTransport",
    "TorchStage",
    "plan_micro_batches",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
