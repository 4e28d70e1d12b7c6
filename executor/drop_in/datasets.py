"""Planned data in Megatron-LM's training loop: where it builds its data iterators, and where it counts its FLOPs."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.corpora import USES, DataArguments, Part, StepMaker, opened_parts
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps
from dynapipe_ext.executor.drop_in.refusals import check_planned_arguments
from dynapipe_ext.executor.drop_in.sample_streams import of_bounded_length

Sources = Sequence[Any]  # to train on, to validate on (one source, or a list of several), to test on


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
        several = [
            source if isinstance(source, list | tuple) and use == "validation" else [source]
            for use, source in zip(USES, sources, strict=True)
        ]
        for use, source in ((use, one) for use, ones in zip(USES, several, strict=True) for one in ones):
            if source is not None and not hasattr(source, "lengths"):
                raise ConfigError(
                    f"the {use} data set is a {type(source).__name__} without `lengths`: give an integer array with the"
                    " positions of each sample, or leave datasets_provider out for data of one length"
                )
        return sources


def datasets_provider(provider: Callable[..., Sources]) -> PlannedDatasets:
    """`provider` for `pretrain`, with its data sets cut into planned micro-batches; needs `installed`."""
    return PlannedDatasets(provider)


PlannedIterators = tuple[PlannedSteps | None, PlannedSteps | list[PlannedSteps] | None, PlannedSteps | None]


def planned_iterators(
    provider: Any, args: Any, data_arguments: DataArguments, training: Any, say: Callable[[str], None] = print
) -> PlannedIterators | None:
    """For training, validation (a list where there are several sets) and test; None where the script's data are
    Megatron's own. `training` is Megatron-LM's module of that name.

    `args` are Megatron-LM's: of the samples that they say were consumed, none comes again. Their do_train, do_valid
    and do_test are set, and with --full-validation eval_iters. Errors: ConfigError, DataError.
    """
    while isinstance(provider, functools.partial):
        provider = provider.func
    is_provided = isinstance(provider, PlannedDatasets)
    if not is_provided and not data_arguments.data:
        return None
    if is_provided and data_arguments.data:
        raise ConfigError("--dynapipe-data was given, but the script has a datasets_provider: leave one of them out")
    check_planned_arguments(args, from_path=not is_provided)
    parts: Sequence[Part | None]
    if is_provided:
        parts = _provided_parts(provider(training.get_train_valid_test_num_samples()))
    else:
        parts = opened_parts(data_arguments, args, training.get_tokenizer() if args.sft else None)
        check_training_part(parts, args)
    if not args.consumed_train_samples and args.iteration:  # a checkpoint that does not say, as Megatron-LM takes it
        args.consumed_train_samples = args.iteration * args.global_batch_size
    maker = StepMaker(
        args=args,
        data_arguments=data_arguments,
        num_samples=lambda: training.get_train_valid_test_num_samples(),
        say=say,
    )
    return _steps_of_uses(parts, maker)


def _provided_parts(sources: Sources) -> list[Part | None]:
    lists = [list(one) if isinstance(one, list | tuple) else [one] for one in sources]
    held = [tuple(source for source in ones if source is not None) for ones in lists]
    return [Part(ones, (None,) * len(ones)) if ones else None for ones in held]


def _steps_of_uses(parts: Sequence[Part | None], maker: StepMaker) -> PlannedIterators:
    train, valid, test = parts
    args = maker.args
    is_full, are_several = (
        bool(getattr(args, name, False)) for name in ("full_validation", "multiple_validation_sets")
    )
    uses_parts = args.eval_iters > 0 or is_full
    args.do_train = int(train is not None and not args.skip_train and args.train_iters > 0)
    args.do_valid = int(valid is not None and uses_parts)
    args.do_test = int(test is not None and uses_parts and not are_several)
    if test is not None and are_several:
        maker.say("the test data are left out: Megatron-LM has no test with --multiple-validation-sets")
    train_steps = maker.training(train) if train is not None and args.do_train else None
    valid_steps: PlannedSteps | list[PlannedSteps] | None = None
    if valid is not None and args.do_valid:
        if are_several:
            valid_steps = [maker.whole(Part((source,), (None,))) for source in valid.sources]
            args.eval_iters = [len(steps) for steps in valid_steps]
        elif is_full:
            valid_steps = maker.whole(valid)
            # Of one set Megatron-LM 0.16 loses the number of steps after the first time; this number it keeps.
            args.eval_iters, args.full_validation = len(valid_steps), False
        else:
            consumed = 0 if args.skip_train else args.consumed_valid_samples
            valid_steps = maker.evaluation(valid, "validation", consumed)
    test_steps = maker.evaluation(test, "test", 0) if test is not None and args.do_test else None
    return train_steps, valid_steps, test_steps


def check_data_at_start(data_arguments: DataArguments, args: Any) -> None:
    """Refuse data that Megatron-LM would refuse only once the model is built. It checks what is known by now: arguments
    may leave the global batch to the ranks, and conversations need the tokenizer. Errors: ConfigError, DataError."""
    data_arguments.check(args)
    if args.sft or not args.global_batch_size:
        return
    parts = opened_parts(data_arguments, args, None)
    check_training_part(parts, args)
    how = data_arguments.long_samples or "refuse"
    for use, part in zip(USES, parts, strict=True):
        for source in part.sources if part is not None and how == "refuse" else ():
            of_bounded_length(source, args.seq_length, long_samples=how, what=f"{use} data")


def check_training_part(parts: Sequence[Part | None], args: Any) -> None:
    """Errors: ConfigError for training data that do not fill one global batch."""
    size, needed = 0 if parts[0] is None else len(parts[0]), args.global_batch_size
    weights = [float(word) for word in (args.split or "1").replace("/", ",").split(",") if word.strip()]
    if args.skip_train or not weights[0] or size >= needed:
        return
    total = sum(len(part) for part in parts if part is not None)
    raise ConfigError(
        f"--split {args.split or '1'} leaves the training data {size:,} of {total:,} samples, fewer than a global batch"
        f" of {needed:,}: raise its weight, or lower --global-batch-size"
    )


def real_flops(original: Callable[[Any, int], float], steps: PlannedSteps, args: Any, batch_size: int) -> float:
    """Megatron-LM's count for each sample of the last global batch at its own length, for `batch_size` of them."""
    lengths = Counter(steps.last_lengths)
    total = 0.0
    for length, count in lengths.items():
        own = copy.copy(args)
        own.seq_length = length
        total += original(own, count)
    return total * batch_size / steps.last_count
