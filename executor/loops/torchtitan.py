"""torchtitan's pipelines, and others of torch.distributed.pipelining: `TorchStage` over their model parts.

from dynapipe_ext.executor.loops import torchtitan

with torchtitan.planned_loop():
    trainer.train()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import gather_json, rank_device
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.schedules.search.optimizer import NO_LIMIT_BYTES, optimize
from dynapipe_ext.schedules.step_plan import plan_of_schedule

_EFFORT = 500
_NS_A_TOKEN = 1_000  # only ratios matter
RowsPositions = tuple[int, int]


@contextmanager
def planned_loop(*, split_backward: bool = False) -> Iterator[None]:
    """Within: trainers build a `PlannedSchedule` in the place of the schedule that their configuration names, whose
    placement of stages they keep. Parts wrapped in FSDP are refused: their collectives run in every backward."""
    pipeline: Any = importlib.import_module("torchtitan.distributed.pipeline_parallel")

    def build(*, stages: Sequence[Any], loss_fn: Callable[..., Any], **_: Any) -> PlannedSchedule:
        def scalar(*arguments: Any, **keywords: Any) -> torch.Tensor:
            loss: torch.Tensor = loss_fn(*arguments, **keywords)[0]
            return loss

        hidden_size = stages[0].submod.config.dim
        return PlannedSchedule(stages, scalar, hidden_size=hidden_size, split_backward=split_backward)

    with replaced(pipeline, _build_pipeline_schedule=build):
        yield


class PlannedSchedule:
    """What steps the `stages` of a rank, whose `submod` are its model parts; made on all ranks at the same point.

    `loss_fn(output, target, **loss_kwargs)` is a sum, divided as the loop wants. Micro-batches may have other numbers
    of rows and positions each, told by what every stage is given: no message says a shape. Stages hand on tensors of
    the type of the first stage's first weight.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        loss_fn: Callable[..., torch.Tensor],
        *,
        hidden_size: int,
        split_backward: bool = False,
    ) -> None:
        by_stage = stages[0].stage_index_to_group_rank
        ranks = tuple(by_stage[stage] for stage in range(len(by_stage)))
        pp = max(ranks) + 1
        self._topology = Topology(pp=pp, dp=dist.get_world_size() // pp, placement=ranks if len(ranks) > pp else ())
        weights = {stage.stage_index: next(stage.submod.parameters(), None) for stage in stages}
        own = rank_device(torch.cuda.current_device() if torch.cuda.is_available() else 0)  # of parts without weights
        device = next((w.device for w in weights.values() if w is not None), own)
        self._format = ActivationFormat(hidden_size, _first_type(weights, device), order="bsh")
        self._loss_fn, self._split = loss_fn, split_backward
        self._parallel = ParallelContext(self._topology, device=device)
        self._parts = [stage.submod for stage in stages]
        self._stage = TorchStage(
            {stage.stage_index: _PartOfBatch(stage.submod) for stage in stages}, self._loss, parallel=self._parallel
        )
        self._executor = PipelineExecutor(self._stage, self._parallel.transport)

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[torch.Tensor] | None = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Forwards and backwards of ready-cut micro-batches; gradients, summed over replicas, add up to those there
        are. Each replica may have another number of micro-batches.

        Errors: ConfigError for micro-batches that do not tell their shape on this rank, for other numbers of them on
        ranks of one replica, or asked outputs.
        """
        if return_outputs:
            raise ConfigError("return_outputs is True but no outputs are kept: leave it out, and take losses")
        entries = [*_entries(arg_mbs, kwarg_mbs, target_mbs)]
        shapes = tuple(_shape(one) for one in entries)
        plan = plan_of_shapes(shapes, self._topology, self._format, self._parallel.coordinates, split=self._split)
        plan = replace(plan, num_micro_batches=self._counts(len(entries)))
        batches = [{**one, "loss_kwargs": loss_kwargs or {}, "divisor": plan.loss_divisor} for one in entries]
        weights = {p: p.grad for part in self._parts for p in part.parameters() if p.requires_grad}  # parts share some
        self._executor.execute(plan, batches)
        for parameter, gradient in weights.items():
            if gradient is None:
                continue
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if losses is not None:
            losses[:] = [torch.tensor(loss) for _, loss in sorted(self._stage.losses().items())]

    def _counts(self, own: int) -> tuple[int, ...]:
        """Return how many micro-batches each replica has; all ranks ask at one point."""
        topology = self._topology
        if topology.dp == 1:
            return (own,)
        of_replicas: dict[int, set[int]] = {}
        for rank, (count,) in enumerate(gather_json([own], self._parallel.device)):
            of_replicas.setdefault(topology.coordinates(rank).dp_rank, set()).add(count)
        for dp_rank, counts in of_replicas.items():
            if len(counts) > 1:
                raise ConfigError(
                    f"pipeline ranks of replica {dp_rank} were given {sorted(counts)} micro-batches, but run the same"
                    " ones: give all of them the same number"
                )
        return tuple(counts.pop() for _, counts in sorted(of_replicas.items()))

    def _loss(self, output: Any, batch: Any) -> torch.Tensor:
        """What a step divides by its divisor, which this one already has."""
        loss: torch.Tensor = self._loss_fn(output, batch["target"], **batch["loss_kwargs"]) * batch["divisor"]
        return loss


def _first_type(weights: Mapping[int, torch.Tensor | None], device: torch.device) -> str:
    """That of the first stage's first weight, where it has one: all ranks call this with the `weights` of theirs.
    Errors: ConfigError, on all, where no stage has any."""
    own = [[stage, str(w.dtype).removeprefix("torch.")] for stage, w in weights.items() if w is not None]
    types = sorted(tuple(one) for of_rank in gather_json(own, device) for one in of_rank)
    if not types:
        raise ConfigError("no model part has a weight, so what stages exchange has no type: give parts with weights")
    return str(types[0][1])


class _PartOfBatch(torch.nn.Module):
    """A part of the model that takes its keywords from the batch."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor, batch: Any) -> Any:
        return self.part(x, **batch["keywords"])


def _entries(args: Any, keywords: Any, targets: Any) -> Iterator[dict[str, Any]]:
    """What a schedule's `step` is given, by micro-batch."""
    for i in range(len(args or keywords or targets or ())):
        own = args[i] if args else ()
        entry = {"keywords": keywords[i] if keywords else {}, "target": targets[i] if targets else None}
        yield {**entry, "tokens": own[0]} if own else entry


def _shape(entry: dict[str, Any]) -> RowsPositions:
    for tensor in (entry.get("tokens"), entry["keywords"].get("positions"), entry["target"]):
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[0]), int(tensor.shape[1])
    raise ConfigError(
        "a stage between the first and the last is given nothing that tells a micro-batch's shape: give positions, of"
        " rows x positions, in kwarg_mbs"
    )


def plan_of_shapes(
    shapes: tuple[RowsPositions, ...],
    topology: Topology,
    activation_format: ActivationFormat,
    place: Coordinates,
    *,
    split: bool,
) -> ExecutionPlan:
    """The proven plan of the rank at `place`, of micro-batches that the loop has cut, by their shapes alone. Replicas
    run their own: none meets another before the end of a step."""
    lengths = iter(range(sum(rows for rows, _ in shapes)))
    micro_batches = tuple(
        MicroBatch(tuple(SampleLength(next(lengths), length, 0, length) for _ in range(rows)), recompute="none")
        for rows, length in shapes
    )
    costs = TokenCosts(topology.num_stages, ns_per_token=_NS_A_TOKEN).evaluate(micro_batches)
    schedule = optimize(
        costs, memory_limit_bytes=NO_LIMIT_BYTES, split=split, effort=_EFFORT, stage_ranks=topology.stage_ranks
    )
    proven = prove(plan_of_schedule(schedule, micro_batches, costs), activation_format, ReplicaCollectives())
    return replace(proven.plans[0][place.pp_rank], dp_rank=place.dp_rank)
