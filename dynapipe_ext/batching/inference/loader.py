"""Batch inference: a DataLoader of batches as large as the first one proved possible.

loader = build_dynamic_batch_dataloader(texts, tokenizer, batch_size=16, max_input_token_length=512)
outputs = generate(model, loader, max_new_tokens=64)  # (`generation`) new tokens of each text, in order of `texts`
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from dynapipe_ext.batching.inference.batches import (
    PROMPT_TOKENS,
    UNMEASURED,
    BatchMemory,
    InferenceBatchRule,
    IntArray,
    batches_of,
    longest_first,
    with_a_padded_first,
)
from dynapipe_ext.batching.inference.memory_model import LearnedMemory
from dynapipe_ext.errors import ConfigError, DataError, short

BatchTensors = dict[str, torch.Tensor]


class _Unset(float):
    """A default that a caller's own equal number can be told from."""


_END_OF_RANGE = _Unset(6.0)
_LENGTHS_AT_ONCE = 4096  # texts that are tokenized together to be measured: bounds the memory of their tokens


class DynamicBatchSampler(Sampler[list[int]]):
    """Batches of indices for a DataLoader; sizes are decided as batches are drawn: a new memory model counts at once.

    With `shuffle`, whole batches come in an order drawn from seed and epoch, the longest one first all the same. With
    `pad_first` the first batch has some padding wherever it can (`with_a_padded_first`): for a model whose peak counts.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        rule: InferenceBatchRule,
        *,
        memory: BatchMemory | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths, self._order = longest_first(lengths)
        self.rule, self.memory, self.shuffle, self.seed, self.epoch = rule, memory, shuffle, seed, 0
        self.pad_first = isinstance(memory, LearnedMemory)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next shuffle is drawn from."""
        self.epoch = epoch

    def _memory(self) -> BatchMemory:
        return self.memory or (UNMEASURED if math.isinf(self.rule.growth) else PROMPT_TOKENS)

    def _batches(self) -> Iterator[IntArray]:
        order = self._order
        if self.pad_first:
            order = with_a_padded_first(self.lengths, order, self.rule.batch_size)
        return batches_of(self.lengths, order, 0, self._memory, self.rule)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        if self.shuffle:
            planned = list(batches)
            later = 1 + np.random.default_rng((self.seed, self.epoch)).permutation(max(0, len(planned) - 1))
            batches = iter([planned[int(i)] for i in (0, *later)] if planned else [])
        return (batch.tolist() for batch in batches)

    def __len__(self) -> int:
        """Batches of a whole pass with the memory model of now."""
        return sum(1 for _ in self._batches())


class _Texts:
    """A map-style dataset of (index, text)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, self.texts[index]


class TextBatch(dict[str, Any]):
    """What the tokenizer gave, as `model.generate(**batch)` takes it, and beside that the texts and their places.

    `batch["texts"]` and `batch["indices"]` are there too, but not among the keys.
    """

    texts: list[str]
    indices: list[int]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], texts: list[str], indices: list[int]) -> TextBatch:
        """The tokenizer's `inputs` of these texts."""
        batch = cls(inputs)
        batch.texts, batch.indices = texts, indices
        return batch

    def __missing__(self, name: str) -> Any:
        if name in ("texts", "indices"):
            return getattr(self, name)
        raise KeyError(name)

    def to(self, device: torch.device | str) -> TextBatch:
        """The same with its tensors on a device."""
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in self.items()}
        return TextBatch.of(moved, self.texts, self.indices)


def _collate(items: Sequence[tuple[int, str]], *, tokenizer: Any, settings: Mapping[str, Any]) -> TextBatch:
    texts = [text for _, text in items]
    return TextBatch.of(tokenizer(texts, **settings), texts, [index for index, _ in items])


def build_dynamic_batch_dataloader(
    texts: Sequence[str],
    tokenizer: Any,
    batch_size: int,
    max_input_token_length: int,
    threshold: float = 0.025,
    shuffle: bool = False,
    num_workers: int = 4,
    batch_start_range: float = 1.0,
    batch_end_range: float = _END_OF_RANGE,
    steps: int = 50,
    *,
    memory_model: str | Path | LearnedMemory | None = None,
    memory: BatchMemory | None = None,
    peak_fraction: float = 0.9,
    seed: int = 0,
    lengths: npt.ArrayLike | None = None,
    **tokenizer_kwargs: Any,
) -> DataLoader[Any]:
    """A DataLoader of `TextBatch`: the tokenizer's tensors, their texts and places in `texts`, longest texts first.

    Texts are truncated to `max_input_token_length`. `batch_size` is the first batch's, the largest that is known to fit
    the longest texts; the others follow `InferenceBatchRule`: a batch's peak exceeds 90 % (`peak_fraction`) of the
    first one's with probability `threshold` at most, by what the memory model's errors tell.

    `memory_model`: a file of `dynapipe train-memory-model`, learned from measured peaks. Without it, and without
    `memory`, `generate` puts in bytes counted from the model's config; in a loop of your own, which the loader knows
    nothing of, batches grow to six times `batch_size` at most (`UnmeasuredMemory`).

    `batch_start_range` to `batch_end_range` are the factors of batch_size among which dynabatch tries `steps`. Here
    sizes are computed, as the largest that fits, so no step is lost between two of them. A `batch_end_range` that is
    given is the most texts of a batch over batch_size, 6.0 as any other, and without a memory model prompt tokens alone
    count below it; left out, memory alone is the bound. No batch but the last is smaller than batch_size.

    `lengths` (tokens of each text) spares the pass that counts them.
    """
    texts = _listed(texts)
    _refuse_numbers(max_input_token_length, (batch_start_range, batch_end_range), steps, num_workers)
    settings = _tokenizer_settings(tokenizer, max_input_token_length, tokenizer_kwargs)
    counts = _token_counts(texts, tokenizer, settings) if lengths is None else np.asarray(lengths)
    padded_lengths = _padded(counts, len(texts), max_input_token_length, tokenizer_kwargs)
    growth = math.inf if isinstance(batch_end_range, _Unset) else max(1.0, batch_end_range)
    rule = InferenceBatchRule(batch_size=batch_size, threshold=threshold, peak_fraction=peak_fraction, growth=growth)
    if memory_model is not None:
        memory = _learned(memory_model, memory)
    sampler = DynamicBatchSampler(padded_lengths, rule, memory=memory, shuffle=shuffle, seed=seed)
    dataset: Any = _Texts(texts)
    collate = partial(_collate, tokenizer=tokenizer, settings=settings)
    num_workers = min(num_workers, os.cpu_count() or 1)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers)


def _padded(counts: npt.NDArray[Any], num_texts: int, most: int, settings: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Tokens of each text, cut at `most` and padded as a tokenizer of these settings does. Errors: DataError."""
    if len(counts) != num_texts:
        raise DataError(f"{len(counts)} lengths were given for {num_texts} texts: give one a text")
    multiple = int(settings.get("pad_to_multiple_of") or 1)
    padded: npt.NDArray[Any] = -(-np.minimum(counts, most) // multiple) * multiple
    return padded


def _refuse_numbers(most_tokens: int, growth: tuple[float, float], steps: int, num_workers: int) -> None:
    """Errors: ConfigError for numbers that cannot be; `growth`: the least and most factor of the batch size."""
    if most_tokens < 1:
        raise ConfigError(f"max_input_token_length is {most_tokens}: 1 token or more is needed")
    least, most = growth
    if least > most or least <= 0 or steps < 1 or num_workers < 0:
        raise ConfigError(
            f"batch_start_range {least}, batch_end_range {most}, steps {steps} and num_workers"
            f" {num_workers} must be positive, the range ascending"
        )


def _listed(texts: Iterable[str]) -> Sequence[str]:
    """Texts by their places, as a column of a table, which has labels, is not. Errors: DataError for other things."""
    if isinstance(texts, str | Mapping | Set) or not hasattr(texts, "__len__"):
        what = "one string" if isinstance(texts, str) else f"a {type(texts).__name__}"
        raise DataError(f"texts is {what}: give a list of strings")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {index} is {short(text)}: give a string, or leave it out")
    return texts if isinstance(texts, Sequence) else list(texts)


def _tokenizer_settings(tokenizer: Any, max_length: int, own_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the tokenizer's calls. Errors: ConfigError where it cannot pad, or has two lengths to cut at."""
    if getattr(tokenizer, "pad_token", "") is None:
        raise ConfigError("the tokenizer has no pad_token: set tokenizer.pad_token = tokenizer.eos_token")
    if own_settings.get("max_length", max_length) != max_length:
        raise ConfigError(
            f"max_length is {own_settings['max_length']} but max_input_token_length is {max_length}: give one of them"
        )
    return {"padding": True, "truncation": True, "return_tensors": "pt", **own_settings, "max_length": max_length}


def _learned(model: str | Path | LearnedMemory, memory: BatchMemory | None) -> LearnedMemory:
    """A memory model, read where it is a file. Errors: ConfigError where batches have another memory to follow."""
    if memory is not None:
        raise ConfigError("memory and memory_model are both given: batches follow one of them")
    return model if isinstance(model, LearnedMemory) else LearnedMemory.read(model)


def _token_counts(texts: Sequence[str], tokenizer: Any, settings: Mapping[str, Any]) -> IntArray:
    counting = {k: v for k, v in settings.items() if k not in ("return_tensors", "pad_to_multiple_of")}
    counting["padding"] = False
    counts: list[int] = []
    for start in range(0, len(texts), _LENGTHS_AT_ONCE):
        counts += map(len, tokenizer(list(texts[start : start + _LENGTHS_AT_ONCE]), **counting)["input_ids"])
    return np.array(counts, np.int64)
