"""A Stage made of parts of a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import on_device
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Reductions
from dynapipe_ext.executor.stages.chunk_runner import HEAD_SLICE_KEY, Copies, PlainAccumulator, random_key
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined
from dynapipe_ext.executor.stages.position_losses import LossOfPairs, PositionLoss, weighted_sum
from dynapipe_ext.executor.stages.sliced_head import HiddenStates, losses_of_whole_logits
from dynapipe_ext.executor.stages.spread_attention import RowsOverRanks
from dynapipe_ext.executor.stages.torch_stage import LossFunction, MakeAccumulator, TorchStage, check_rows
from dynapipe_ext.executor.stages.transformers.part import TransformersPart


@dataclass(frozen=True, slots=True)
class LossOfLogits:
    """Cross-entropy of every position in float32, joined by `of_positions`: of whole logits, or of hidden states where
    the plan has the head in slices."""

    of_positions: PositionLoss = weighted_sum

    def __call__(self, output: torch.Tensor | HiddenStates, batch: Batch) -> torch.Tensor | LossOfPairs:
        labels = batch["labels"]
        if isinstance(output, HiddenStates):
            losses = output.losses(labels)
        else:
            losses = losses_of_whole_logits(output.flatten(0, 1), labels.flatten()).view_as(labels)
        return self.of_positions(losses, batch)


token_loss_sum = LossOfLogits()


class TransformersStage(TorchStage):
    """The parts of one pipeline rank, one a stage in their order, as `parts_of_model` and its neighbours give them.

    Rows are padded behind their samples, or packed with attention within each document; positions, borders, random
    numbers and recomputation follow from the plan: where it recomputes, be it core attention alone ("selective"), whole
    layers are recomputed, which keeps less than promised. Where stages of several ranks hold one weight, as head and
    embedding are, each has a copy, and all get the sum of its gradients. Frozen weights get none, and a split backward
    puts none off. T5 runs padded rows of pairs. All ranks of `parallel` make theirs at the same point. `measure_bytes`
    is TorchStage's.

    Errors: ConfigError and DataError for what would be trained wrongly, such as rows longer than the positions that
    the model has learned.
    """

    takes_pieces = True

    def __init__(
        self,
        parts: Sequence[TransformersPart],
        *,
        loss: LossFunction = token_loss_sum,
        accumulator: MakeAccumulator = PlainAccumulator,
        parallel: Reductions | None = None,
        measure_bytes: bool = False,
        joined: Joined = ALONE,
    ) -> None:
        self._parts = list(parts)
        if not self._parts or not all(isinstance(part, TransformersPart) for part in self._parts):
            raise ConfigError("TransformersStage takes a list of parts: give parts_of_model(model, topology, pp_rank)")
        if parallel is not None and (copies := _summed_copies(self._parts, parallel)):
            accumulator = partial(accumulator, copies=copies)
        options: dict[str, Any] = {"accumulator": accumulator, "parallel": parallel, "joined": joined}
        super().__init__(self._parts, loss, restarts_attention=True, measure_bytes=measure_bytes, **options)
        self._shares_rows = False
        self._takes_logits = not isinstance(loss, LossOfLogits)
        self._device = next(self._parts[0].parameters()).device

    def start_step(self, plan: ExecutionPlan) -> None:
        places = tuple(part.place.stage for part in self._parts), self._parts[0].place.num_stages
        if places != (plan.stages, plan.num_stages):
            raise ConfigError(
                f"pipeline rank {plan.pp_rank} runs stages {plan.stages} of {plan.num_stages} but has parts of stages"
                f" {places[0]} of {places[1]}: cut the model with the planner's topology"
            )
        for number, micro_batch in enumerate(plan.micro_batches):
            if fault := self._parts[0].fault(micro_batch):
                raise ConfigError(f"micro-batch {number} of step {plan.step}: {fault}")
        super().start_step(plan)
        if plan.width > 1 and not self._shares_rows:
            for part in self._parts:
                part.check_slices()
            self._shares_rows = True

    def load(self, micro_batch: int, batch: Batch) -> None:
        """Errors: DataError for tensors of another shape than planned, or padded on the left."""
        planned, name = self._plan.micro_batches[micro_batch], f"micro-batch {micro_batch}"
        check_rows(batch, planned, name, batch)
        for part in self._parts:
            batch = part.checked(batch, planned, name)
        inputs, joined = self._parts[0].model_inputs(planned), self._runner.joined_now
        if joined is not None:
            inputs = joined.slice_of(inputs) | {"joined": RowsOverRanks(joined)}
        moved = {k: on_device(v, self._device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        key = random_key(self._plan, micro_batch, joined)
        super().load(micro_batch, {**batch, "model_inputs": moved, "random_key": key})

    def _call(self, stage: int, micro_batch: int, batch: Batch, *inputs: torch.Tensor) -> Any:
        recompute = "none" if self._plan.forward_only else self._plan.micro_batches[micro_batch].layer_recompute
        if self._takes_logits:
            batch = {name: value for name, value in batch.items() if name != HEAD_SLICE_KEY}
        self._parts[self._plan.stages.index(stage)].recompute_layers(recompute in ("selective", "full"))
        return super()._call(stage, micro_batch, batch, *inputs)


def _summed_copies(parts: Sequence[TransformersPart], parallel: Reductions) -> Copies:
    """This rank's weights that other ranks hold, too, with the sums over those; all ranks make the sums at once."""
    own = {name: weight for part in parts for name, weight in part.shared.items()}
    copies = {}
    for name, stages in parts[0].holders.items():
        ranks = tuple(sorted({parallel.topology.stage_ranks[stage] for stage in stages}))
        if len(ranks) > 1:
            over_ranks = parallel.sum_over_pipeline(ranks)
            if name in own and own[name].requires_grad:  # on all of them, or on none
                copies[own[name]] = over_ranks
    return copies
