"""Planned data in Megatron-LM's training loop: where it builds its data iterators, and where it counts its FLOPs."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps
from dynapipe_ext.executor.drop_in.refusals import check_planned_arguments
from dynapipe_ext.executor.drop_in.samples import SampleSource, check_longest, open_samples, split_source

Sources = Sequence[SampleSource | None]  # to train on, to validate on, to test on
_USES = ("training", "validation", "test")


class PlannedDatasets:
    """A `train_valid_test_datasets_provider` whose data sets, of samples of uneven length, are planned.

    `provider(numbers of samples)` returns three sources or None each, as a provider of Megatron-LM's does: anything
    with `lengths` whose samples are TokenSample or mappings with tokens and labels (`SampleSource`).
    """

    is_distributed = True  # every rank plans, so every rank needs the lengths

    def __init__(self, provider: Callable[..., Sources]) -> None:
        self._provider = provider

    def __call__(self, num_samples: Sequence[int], vp_stage: int | None = None) -> Sources:
        sources = self._provider(num_samples)
        for use, source in zip(_USES, sources, strict=True):
            if source is not None and not hasattr(source, "lengths"):
                raise ConfigError(
                    f"the {use} data set is a {type(source).__name__} without `lengths`: give an integer array with the"
                    " positions of each sample, or leave datasets_provider out for data of one length"
                )
        return sources


def datasets_provider(provider: Callable[..., Sources]) -> PlannedDatasets:
    """`provider` for `pretrain`, with its data sets cut into planned micro-batches; needs `installed`."""
    return PlannedDatasets(provider)


def planned_iterators(
    provider: Any, args: Any, path: str | None, training: Any
) -> tuple[PlannedSteps | None, ...] | None:
    """For training, validation and test; None where the script's data are Megatron's own. `training` is Megatron-LM's
    module of that name.

    `args` are Megatron-LM's: of the samples that they say were consumed, none comes again. Their do_train, do_valid
    and do_test are set. Errors: ConfigError, DataError.
    """
    while isinstance(provider, functools.partial):
        provider = provider.func
    if not isinstance(provider, PlannedDatasets):
        if path is None:
            return None
        sources: Sources = split_source(_opened(path, args, training), args.split)
    elif path is not None:
        raise ConfigError("--dynapipe-data was given, but the script has a datasets_provider: leave one of them out")
    else:
        sources = provider(training.get_train_valid_test_num_samples())
    check_planned_arguments(args, from_path=path is not None)
    if path is not None:
        check_parts(sources, args)
    train, valid, test = sources
    if not args.consumed_train_samples and args.iteration:  # a checkpoint that does not say, as Megatron-LM takes it
        args.consumed_train_samples = args.iteration * args.global_batch_size
    consumed_valid_samples = 0 if args.skip_train else args.consumed_valid_samples
    args.do_train = int(train is not None and not args.skip_train and args.train_iters > 0)
    args.do_valid = int(valid is not None and args.eval_iters > 0)
    args.do_test = int(test is not None and args.eval_iters > 0)
    return (
        _steps(train, args, "training", args.consumed_train_samples) if args.do_train else None,
        _steps(valid, args, "validation", consumed_valid_samples, forward_only=True) if args.do_valid else None,
        _steps(test, args, "test", 0, forward_only=True) if args.do_test else None,
    )


def check_data_at_start(path: str, args: Any) -> None:
    """What Megatron-LM would find only once the model is built, as far as its arguments say enough by now: they may
    leave the global batch to the ranks, and conversations need its tokenizer. Errors: ConfigError, DataError."""
    if args.sft or not args.global_batch_size:
        return
    check_parts(split_source(open_samples(path, max_positions=args.seq_length), args.split), args)


def check_parts(sources: Sources, args: Any) -> None:
    """Errors: ConfigError naming a part by --split that is used and does not fill one global batch."""
    weights = [float(word) for word in (args.split or "1").replace("/", ",").split(",") if word.strip()]
    total = sum(len(source) for source in sources if source is not None)
    uses_part = (not args.skip_train, args.eval_iters > 0, args.eval_iters > 0)
    for use, source, weight, is_used in zip(_USES, sources, [*weights, 0.0, 0.0][:3], uses_part, strict=True):
        own_size = getattr(args, "eval_global_batch_size", None) if use != "training" else None
        needed, size = own_size or args.global_batch_size, 0 if source is None else len(source)
        is_left_out = source is None and use != "training"  # as stock leaves out a part that rounds to nothing
        if not (is_used and weight) or size >= needed or is_left_out:
            continue
        instead = "lower --global-batch-size" if use == "training" else "give it the weight 0, or --eval-iters 0"
        raise ConfigError(
            f"--split {args.split or '1'} leaves the {use} data {size:,} of {total:,} samples, fewer than a global"
            f" batch of {needed:,}: raise its weight, or {instead}"
        )


def real_flops(original: Callable[[Any, int], float], steps: PlannedSteps, args: Any, batch_size: int) -> float:
    """Megatron-LM's count for each sample of the last global batch at its own length, for `batch_size` of them."""
    lengths = Counter(steps.last_lengths)
    total = 0.0
    for length, count in lengths.items():
        own = copy.copy(args)
        own.seq_length = length
        total += original(own, count)
    return total * batch_size / lengths.total()


def _opened(path: str, args: Any, training: Any) -> SampleSource:
    tokenizer = training.get_tokenizer() if args.sft else None
    source = open_samples(path, tokenizer=tokenizer, max_positions=args.seq_length, sft=args.sft)
    vocab_size = getattr(source, "vocab_size", 0)
    if vocab_size > args.padded_vocab_size:  # tensor parallel ranks would embed the others as zeros, and say nothing
        raise DataError(
            f"{path} has tokens of a vocabulary of {vocab_size}, but the model's has {args.padded_vocab_size}: give the"
            " tokenizer (or --vocab-size) that it was prepared with"
        )
    return source


def _steps(
    source: SampleSource | None, args: Any, use: str, consumed_samples: int, *, forward_only: bool = False
) -> PlannedSteps:
    assert source is not None
    check_longest(source, args.seq_length, what=f"{use} data")
    own_size = getattr(args, "eval_global_batch_size", None) if forward_only else None  # from 0.18 on
    try:
        return PlannedSteps(
            source,
            batch_size=own_size or args.global_batch_size,
            seed=args.seed,
            consumed_samples=consumed_samples,
            forward_only=forward_only,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{use} data of {len(source)} samples: {error} (or change --split or --eval-iters)"
        ) from error
