"""ms-swift's `megatron sft` and `megatron pt`: micro-batches by the planning call, steps by proven plans.

from dynapipe_ext.executor.loops import ms_swift

with ms_swift.planned_loop():
    megatron_sft_main(args)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops.running_model import RunningModel
from dynapipe_ext.megatron import installed

_ROWS = {"input_ids": 0, "labels": -100, "loss_scale": 0.0, "position_ids": 0}  # and what they are padded with
_OTHERS = {"seq_lens", "num_samples"}
SwiftBatch = dict[str, Any]


@contextmanager
def planned_loop(*, max_tokens: int = 0, **settings: Any) -> Iterator[None]:
    """Within: the samples of each step are packed anew by the planning call, each replica its own, in rows of their own
    lengths, where the loop's rows have no padding (`--padding_free`, its default, and `--packing`).

    A row has `max_tokens` at most, by default as many as the loop's own may have: micro_batch_size x seq_length. Rows
    that are padded, evaluation, and other trainers (DPO, GRPO, embeddings) keep the loop's cut. `settings` are those of
    `dynapipe_ext.megatron.installed`.
    """
    trainers: Any = importlib.import_module("swift.megatron.trainers.trainer")
    base: Any = importlib.import_module("swift.megatron.trainers.base")
    trainer_class = trainers.MegatronTrainer
    own_step = trainer_class.train_step

    def train_step(trainer: Any, data: Any) -> Any:
        if type(trainer) is not trainer_class or not trainer.args.padding_free or trainer.args.task_type != "causal_lm":
            return own_step(trainer, data)
        count, rows = _planned(trainer, data, max_tokens, base.get_padding_to(trainer.args) or 1)
        with replaced(trainer.args, num_microbatches=count):
            return own_step(trainer, rows)

    with ExitStack() as patches:
        patches.enter_context(installed(**settings))
        patches.enter_context(replaced(trainer_class, train_step=train_step))
        yield


def _planned(trainer: Any, data: Any, max_tokens: int, multiple: int) -> tuple[int, Any]:
    """How many micro-batches a step has, and they as the loop's iterators give them. Errors: ConfigError, PlanError."""
    args, chunks = trainer.args, trainer.wrapped_models
    _refuse_what_depends_on_the_plan(args)
    iterators = data if isinstance(data, list) else [data]
    read = [[next(iterator) for _ in range(args.num_microbatches)] for iterator in iterators]
    model = RunningModel.of(chunks)
    samples = [[sample for batch in batches for sample in _samples(batch)] for batches in read]
    lengths = [sample["input_ids"].numel() for sample in samples[0]]
    cap = max_tokens or args.micro_batch_size * args.seq_length
    rounds = args.pipeline_model_parallel_size if len(chunks) > 1 else 1
    groups = model.cut(lengths, cap // multiple * multiple, multiple=rounds)
    pads = {**_ROWS, "input_ids": trainer.template.tokenizer.pad_token_id}
    rows = [iter([_row([own[i] for i in group], multiple, pads) for group in groups]) for own in samples]
    return len(groups), rows if isinstance(data, list) else rows[0]


def _refuse_what_depends_on_the_plan(args: Any) -> None:
    if not args.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False, under which every micro-batch weighs the same and the loss depends on"
            " the plan: leave --calculate_per_token_loss out"
        )
    if args.context_parallel_size > 1:
        raise ConfigError(f"context_parallel_size is {args.context_parallel_size}: micro-batches are planned for 1")
    if args.enable_channel_loss:
        raise ConfigError(
            "enable_channel_loss has replicas meet in every micro-batch, of which each has its own number: leave it out"
        )


def _samples(batch: SwiftBatch) -> Iterator[SwiftBatch]:
    """Each sample of a row, without the padding at its end. Errors: ConfigError for images, sounds and the like."""
    names = [name for name in _ROWS if name in batch]
    if others := sorted(batch.keys() - _ROWS.keys() - _OTHERS - {"channel"}):
        raise ConfigError(f"a batch has {', '.join(others)}: rows of text alone are planned; call `installed` instead")
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()  # a packed sample may have several
    real = sum(batch["seq_lens"])
    ends = [start for start in starts if start < real] + [real]
    for first, end in pairwise(ends):
        yield {name: batch[name][0, first:end] for name in names}


def _row(samples: Sequence[SwiftBatch], multiple: int, pads: dict[str, Any]) -> SwiftBatch:
    """One micro-batch as the loop's own collator leaves it, padded to a `multiple`."""
    row = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    lengths = [sample["input_ids"].numel() for sample in samples]
    if padding := -sum(lengths) % multiple:
        row = {name: torch.nn.functional.pad(values, (0, padding), value=pads[name]) for name, values in row.items()}
    return {**{name: values[None] for name, values in row.items()}, "seq_lens": lengths}
