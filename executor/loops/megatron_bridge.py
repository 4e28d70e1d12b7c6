"""Megatron-Bridge's fine-tuning: micro-batches by the planning call, steps by proven plans.

from dynapipe_ext.executor.loops import megatron_bridge

with megatron_bridge.planned_loop():
    finetune(config, forward_step)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops.running_model import RunningModel
from dynapipe_ext.megatron import installed

_ROWS = ("tokens", "labels", "loss_mask", "position_ids")  # of a batch: tensors of rows x positions
BridgeBatch = dict[str, Any]


@contextmanager
def planned_loop(*, max_tokens: int = 0, **settings: Any) -> Iterator[None]:
    """Within: the documents of each step's packed rows are packed anew by the planning call, each replica its own, in
    rows of their own lengths without padding.

    A row has `max_tokens` at most, by default as many as the loop's own packs. Batches that are not packed, and
    evaluation, keep the loop's rows. `settings` are those of `dynapipe_ext.megatron.installed`.
    """
    train: Any = importlib.import_module("megatron.bridge.training.train")
    finetuning: Any = importlib.import_module("megatron.bridge.data.finetuning")
    own_step, own_split = train.train_step, finetuning.prepare_finetuning_batch
    steps: list[_Step] = []

    def train_step(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, state: Any, groups: Any, function: Any
    ) -> Any:
        steps.append(_Step(RunningModel.of(model, groups), max_tokens or _packed(state.cfg), state.cfg))
        try:
            return own_step(
                forward_step, data, model, optimizer, scheduler, state, groups, steps[-1].counting(function)
            )
        finally:
            steps.pop()

    def prepare_finetuning_batch(data_iterator: Any, *others: Any, **keywords: Any) -> tuple[Iterator[Any], int]:
        if not steps or not _packed(steps[-1].config):
            return own_split(data_iterator, *others, **keywords)  # type: ignore[no-any-return]
        return iter(steps[-1].cut(next(data_iterator))), 1

    with ExitStack() as patches:
        patches.enter_context(installed(**settings))
        patches.enter_context(replaced(train, train_step=train_step))
        patches.enter_context(replaced(finetuning, prepare_finetuning_batch=prepare_finetuning_batch))
        yield


def _packed(config: Any) -> int:
    """The positions of the loop's own packs; 0 for none."""
    specs = getattr(config.dataset, "packed_sequence_specs", None)
    return max(0, specs.packed_sequence_size) if specs is not None else 0


@dataclass(slots=True)
class _Step:
    """A call of the loop's `train_step`."""

    model: RunningModel
    max_tokens: int
    config: Any
    count: int = 0  # of micro-batches, where they were cut here

    def cut(self, batch: BridgeBatch) -> list[BridgeBatch]:
        """The documents of a replica's rows as micro-batches. Errors: PlanError, ConfigError."""
        transformer = self.model.config
        if not transformer.calculate_per_token_loss:
            raise ConfigError(
                "calculate_per_token_loss is False, under which every micro-batch weighs the same and the loss depends"
                " on the plan: give model.calculate_per_token_loss=True and ddp.average_in_collective=False"
            )
        if "cu_seqlens_unpadded" in batch:
            raise ConfigError("pad_seq_to_mult is above 1, which is for context parallelism: leave it at 1")
        transformer.variable_seq_lengths = True
        documents = [*_documents(batch)]
        lengths = [document["tokens"].numel() for document in documents]
        groups = self.model.cut(lengths, self.max_tokens)
        self.count = len(groups)
        return [_row([documents[i] for i in group], self.model.row_multiple) for group in groups]

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The forward-backward function, told how many micro-batches there are."""

        def forward_backward(*, num_microbatches: int, **keywords: Any) -> Any:
            return function(num_microbatches=self.count or num_microbatches, **keywords)

        return forward_backward


def _documents(batch: BridgeBatch) -> Iterator[BridgeBatch]:
    """Each document of packed rows, without the padding at a row's end."""
    for row, real in enumerate(batch["token_count"]):
        ends = batch["cu_seqlens"][row, : int(batch["cu_seqlens_argmin"][row])].tolist()
        for first, end in pairwise(ends):
            if first < min(end, real):
                yield {name: batch[name][row, first:end] for name in _ROWS}


def _row(documents: list[BridgeBatch], multiple: int) -> BridgeBatch:
    """One micro-batch as the loop's own collation leaves it: a row of documents, padded to a `multiple` by one more."""
    row = {name: torch.cat([document[name] for document in documents]) for name in _ROWS}
    lengths = [document["tokens"].numel() for document in documents]
    if padding := -sum(lengths) % multiple:
        row = {name: torch.nn.functional.pad(values, (0, padding)) for name, values in row.items()}
        lengths.append(padding)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        **{name: values[None] for name, values in row.items()},
        "attention_mask": torch.ones(1, dtype=torch.int64),
        "cu_seqlens": torch.cat([ends, ends.new_full((1,), -1)])[None],
        "cu_seqlens_argmin": torch.tensor([[len(ends)]]),
        "max_seqlen": torch.tensor([[max(lengths)]], dtype=torch.int32),
        "token_count": [sum(lengths)],
    }
