"""The planned data that a run's arguments name: opened, and made into steps for training, validation and test."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.drop_in.conversations import HostShare, kept_conversations
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps, steps_taken
from dynapipe_ext.executor.drop_in.sample_streams import (
    LongSamples,
    SampleStream,
    end_to_end,
    growing,
    mixture,
    of_bounded_length,
    parse_mixture,
)
from dynapipe_ext.executor.drop_in.samples import SampleSource, open_samples, split_source

USES = ("training", "validation", "test")


@dataclass(frozen=True, slots=True)
class Part:
    """The data of one use: sources that are mixed by their weights, or where these are None by their numbers of
    samples."""

    sources: tuple[SampleSource, ...]
    weights: tuple[float | None, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def shares(self) -> list[float]:
        return [
            float(len(source)) if weight is None else weight
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArguments:
    """The arguments of a run about its planned data. Without `long_samples`, conversations are truncated, as
    Megatron-LM does, and other samples that are too long are refused."""

    data: tuple[str, ...] = ()
    valid_data: tuple[str, ...] = ()
    long_samples: LongSamples | None = None
    tokens_per_batch: int | None = None

    def check(self, args: Any) -> None:
        """Errors: ConfigError for what does not go together."""
        if self.valid_data and not self.data:
            raise ConfigError("--dynapipe-valid-data goes with --dynapipe-data: give both, or leave it out")
        if self.valid_data and args.split is not None:
            raise ConfigError(
                f"--split is {args.split} but --dynapipe-valid-data says what to validate on: leave one of them out"
            )
        if self.tokens_per_batch is not None and getattr(args, "rampup_batch_size", None) is not None:
            raise ConfigError(
                f"--dynapipe-tokens-per-batch is {self.tokens_per_batch} with --rampup-batch-size, which counts"
                " samples: leave one of them out"
            )


def opened_parts(data_arguments: DataArguments, args: Any, tokenizer: Any) -> tuple[Part | None, ...]:
    """Of training, validation and test: the corpora that the arguments name, each divided by `--split`. With
    `--dynapipe-valid-data` those of `--dynapipe-data` are all for training. Errors: ConfigError, DataError."""
    corpora = [(weight, _opened(path, args, tokenizer)) for weight, path in parse_mixture(data_arguments.data)]
    divided = [(weight, split_source(source, args.split)) for weight, source in corpora]
    parts = [_part([(weight, sources[use]) for weight, sources in divided]) for use in range(len(USES))]
    if data_arguments.valid_data:
        validation = parse_mixture(data_arguments.valid_data)
        parts[1] = _part([(weight, _opened(path, args, tokenizer)) for weight, path in validation])
    return tuple(parts)


def _part(corpora: Sequence[tuple[float | None, SampleSource | None]]) -> Part | None:
    present = [(weight, source) for weight, source in corpora if source is not None]
    return Part(tuple(source for _, source in present), tuple(weight for weight, _ in present)) if present else None


def _opened(path: str, args: Any, tokenizer: Any) -> SampleSource:
    source: SampleSource
    if args.sft:
        is_nccl = "nccl" in dist.get_backend()
        device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        share = HostShare.of_ranks(socket.gethostname(), dist.get_rank(), lambda value: gather_json(value, device))
        cache = getattr(args, "data_cache_path", None)
        kept_in = Path(cache) if cache else Path(path).with_name(f".{Path(path).name}.tokens")
        source = kept_conversations(path, tokenizer, kept_in=kept_in, share=share)
    else:
        source = open_samples(path)
    vocab_size, padded = getattr(source, "vocab_size", 0), getattr(args, "padded_vocab_size", None)
    if padded and vocab_size > padded:  # tensor parallel ranks would embed the others as zeros, and say nothing
        raise DataError(
            f"{path} has tokens of a vocabulary of {vocab_size}, but the model's has {padded}: give the tokenizer (or"
            " --vocab-size) that it was prepared with"
        )
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMaker:
    """Makes the steps of each use from its part. `num_samples` are Megatron-LM's numbers of samples of a run's
    validation and tests; `say` is called with what became of the data."""

    args: Any
    data_arguments: DataArguments
    num_samples: Callable[[], Sequence[Any]]
    say: Callable[[str], None]

    def training(self, part: Part) -> PlannedSteps:
        args, tokens = self.args, self.data_arguments.tokens_per_batch
        part = self._bounded(part, USES[0])
        sizes = ramp_sizes(args)
        consumed = args.consumed_train_samples
        common: dict[str, Any] = {"batch_size": args.global_batch_size, "seed": args.seed}
        if len(part.sources) == 1 and not sizes and tokens is None:
            return PlannedSteps(part.sources[0], **common, consumed_samples=consumed)
        common |= {"first_sizes": sizes, "tokens_per_batch": tokens, "in_order": True, "consumed_samples": consumed}
        num_steps = max(args.train_iters, steps_taken(consumed, args.global_batch_size, sizes) + 1)
        if tokens is None:
            count = sum(sizes[:num_steps]) + args.global_batch_size * max(0, num_steps - len(sizes))
            return PlannedSteps(self._mixed(part, max(count, sum(sizes))), **common)
        mean = sum(as_length_array(source.lengths)[:, 0].sum() for source in part.sources) / len(part)
        stream = growing(
            lambda count: self._mixed(part, count),
            lambda one: len(_by_tokens(one, tokens)) - 1,
            first=math.ceil(num_steps * tokens / mean) + 1,
            least=num_steps,
        )
        self.say(
            f"steps have at most {tokens:,} tokens of samples; --global-batch-size {args.global_batch_size} is what the"
            " loop counts of a step"
        )
        return PlannedSteps(stream, **common)

    def evaluation(self, part: Part, use: str, consumed: int) -> PlannedSteps:
        """Samples over and over: mixed by their weights, and repeated where they do not fill a global batch."""
        part, size = self._bounded(part, use), self._eval_size
        common: dict[str, Any] = {"batch_size": size, "seed": self.args.seed, "forward_only": True}
        if len(part.sources) == 1 and len(part) >= size:
            return PlannedSteps(part.sources[0], **common, consumed_samples=consumed)
        if len(part.sources) == 1:
            self.say(f"the {use} data are {len(part):,} samples, fewer than a global batch of {size:,}: they repeat")
            count = math.lcm(len(part), size)
        else:
            num_asked = self.num_samples()[USES.index(use)] or len(part)
            count = -(-max(num_asked, size) // size) * size
        return PlannedSteps(self._mixed(part, count), **common, in_order=True, consumed_samples=consumed)

    def whole(self, part: Part) -> PlannedSteps:
        """Every sample once, in steps of about one size, again and again. Errors: DataError."""
        part = self._bounded(part, USES[1])
        replicas = self.args.data_parallel_size
        if len(part) < replicas:
            raise DataError(
                f"a validation set has {len(part)} samples for {replicas} replicas: leave --full-validation out, which"
                " takes each once"
            )
        num_steps = -(-len(part) // self._eval_size)
        sizes = tuple(len(part) // num_steps + (step < len(part) % num_steps) for step in range(num_steps))
        return PlannedSteps(
            end_to_end(part.sources),
            batch_size=self._eval_size,
            seed=self.args.seed,
            forward_only=True,
            first_sizes=sizes,
            in_order=True,
        )

    @property
    def _eval_size(self) -> int:
        return int(getattr(self.args, "eval_global_batch_size", None) or self.args.global_batch_size)  # from 0.18 on

    def _mixed(self, part: Part, count: int) -> SampleStream:
        return mixture(part.sources, part.shares, seed=self.args.seed, count=count)

    def _bounded(self, part: Part, use: str) -> Part:
        is_sft = getattr(self.args, "sft", False)
        how = self.data_arguments.long_samples or ("truncate" if is_sft else "refuse")
        most = self.args.seq_length
        if is_sft and how == "truncate":
            most -= 1  # SFTDataset keeps --seq-length tokens, of which the first is no label
        sources = []
        for number, source in enumerate(part.sources):
            what = f"{use} data" if len(part.sources) == 1 else f"{use} data {number}"
            bounded, note = of_bounded_length(source, most, long_samples=how, what=what)
            if note:
                self.say(note)
            sources.append(bounded)
        return Part(tuple(sources), part.weights)


def _by_tokens(source: SampleSource, tokens_per_batch: int) -> GlobalBatches:
    return GlobalBatches(as_length_array(source.lengths), tokens_per_batch=tokens_per_batch, seed=0, shuffle=False)


def ramp_sizes(args: Any) -> tuple[int, ...]:
    """Samples of each of a run's first steps, while `--rampup-batch-size` has them grow, by Megatron's own count."""
    if getattr(args, "rampup_batch_size", None) is None:
        return ()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, ramp_samples = map(int, args.rampup_batch_size)
    calculator: Any = RampupBatchsizeNumMicroBatchesCalculator(
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
        -1,  # of no rank, which says nothing
        start,
        increment,
        ramp_samples,
    )
    sizes: list[int] = []
    while sum(sizes) <= ramp_samples:
        calculator.update(sum(sizes), consistency_check=False)
        sizes.append(cast(int, calculator.get_current_running_global_batch_size()))
    return tuple(sizes)
