"""Batch inference: a DataLoader of batches as large as the first one proved possible, and a driver that loses no text.

loader = build_dynamic_batch_dataloader(texts, tokenizer, batch_size=16, max_input_token_length=512)
outputs = generate(model, loader, max_new_tokens=64)        # new tokens of each text, in the order of `texts`
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from dynapipe_ext.errors import ConfigError, DataError, ExecutionError
from dynapipe_ext.inference.batches import (
    PROMPT_TOKENS,
    UNMEASURED,
    BatchMemory,
    BatchRule,
    GenerationMemory,
    IntArray,
    batches_of,
    longest_first,
    with_a_padded_first,
)
from dynapipe_ext.inference.memory_model import LearnedMemory
from dynapipe_ext.inference.memory_profiling import Measure, beams_of, cuda_peak, is_out_of_memory, measured_on

Tensors = dict[str, torch.Tensor]


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
        rule: BatchRule,
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
    the longest texts; the others follow `BatchRule`: a batch's peak exceeds 90 % (`peak_fraction`) of the first one's
    with probability `threshold` at most, by what the memory model's errors tell.

    `memory_model`: a file of `dynapipe train-memory-model`, learned from measured peaks. Without it, and without
    `memory`, `generate` puts in bytes counted from the model's config; in a loop of your own, which the loader knows
    nothing of, batches grow to six times `batch_size` at most (`UnmeasuredMemory`).

    `batch_start_range` to `batch_end_range` are the factors of batch_size among which dynabatch tries `steps`. Here
    sizes are computed, as the largest that fits, so no step is lost between two of them. A `batch_end_range` that is
    given is the most texts of a batch over batch_size, 6.0 as any other, and without a memory model prompt tokens alone
    count below it; left out, memory alone is the bound. No batch but the last is smaller than batch_size.

    `lengths` (tokens of each text) spares the pass that counts them.
    """
    if isinstance(texts, str):
        raise DataError("texts is one string: give a list of strings")
    if max_input_token_length < 1:
        raise ConfigError(f"max_input_token_length is {max_input_token_length}: 1 token or more is needed")
    if batch_start_range > batch_end_range or batch_start_range <= 0 or steps < 1 or num_workers < 0:
        raise ConfigError(
            f"batch_start_range {batch_start_range}, batch_end_range {batch_end_range}, steps {steps} and num_workers"
            f" {num_workers} must be positive, the range ascending"
        )
    if getattr(tokenizer, "pad_token", "") is None:
        raise ConfigError("the tokenizer has no pad_token: set tokenizer.pad_token = tokenizer.eos_token")
    if tokenizer_kwargs.get("max_length", max_input_token_length) != max_input_token_length:
        raise ConfigError(
            f"max_length is {tokenizer_kwargs['max_length']} but max_input_token_length is {max_input_token_length}:"
            " give one of them"
        )
    settings = {"padding": True, "truncation": True, "return_tensors": "pt"} | tokenizer_kwargs
    settings["max_length"] = max_input_token_length
    if lengths is None:
        lengths = _token_counts(texts, tokenizer, settings)
    table = np.minimum(np.asarray(lengths), max_input_token_length)
    if len(table) != len(texts):
        raise DataError(f"{len(table)} lengths were given for {len(texts)} texts: give one a text")
    multiple = int(tokenizer_kwargs.get("pad_to_multiple_of") or 1)
    growth = math.inf if isinstance(batch_end_range, _Unset) else max(1.0, batch_end_range)
    rule = BatchRule(batch_size=batch_size, threshold=threshold, peak_fraction=peak_fraction, growth=growth)
    if memory_model is not None:
        if memory is not None:
            raise ConfigError("memory and memory_model are both given: batches follow one of them")
        memory = memory_model if isinstance(memory_model, LearnedMemory) else LearnedMemory.read(memory_model)
    sampler = DynamicBatchSampler(-(-table // multiple) * multiple, rule, memory=memory, shuffle=shuffle, seed=seed)
    dataset: Any = _Texts(texts)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=partial(_collate, tokenizer=tokenizer, settings=settings),
        num_workers=min(num_workers, os.cpu_count() or 1),
    )


def _token_counts(texts: Sequence[str], tokenizer: Any, settings: Mapping[str, Any]) -> IntArray:
    counting = {k: v for k, v in settings.items() if k not in ("return_tensors", "pad_to_multiple_of")}
    counting["padding"] = False
    counts: list[int] = []
    for start in range(0, len(texts), _LENGTHS_AT_ONCE):
        counts += map(len, tokenizer(list(texts[start : start + _LENGTHS_AT_ONCE]), **counting)["input_ids"])
    return np.array(counts, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """New tokens of the texts `indices`, up to and with the end token; measured peak of the batch, if it was measured.

    `num_splits`: times that the batch was halved, after running out of memory or because a smaller one had.
    """

    indices: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    peak_bytes: int | None = None
    num_splits: int = 0


def generate(model: Any, batches: Iterable[Any], *, max_new_tokens: int, **options: Any) -> list[list[int]]:
    """New tokens of every text in the texts' own order; options as in `generate_batches`."""
    found: dict[int, list[int]] = {}
    for batch in generate_batches(model, batches, max_new_tokens=max_new_tokens, **options):
        found.update(zip(batch.indices, map(list, batch.tokens), strict=True))
    return [found[index] for index in sorted(found)]


def generate_batches(
    model: Any,
    batches: Iterable[Any],
    *,
    max_new_tokens: int,
    measure: Measure | None = None,
    calibrate: bool = True,
    **generation: Any,
) -> Iterator[GeneratedBatch]:
    """`model.generate` of each batch of a loader, as they are done; `generation` goes to it.

    A loader from `build_dynamic_batch_dataloader` without a memory model gets the one counted from model.config. The
    first batch's measured peak then calibrates it, later ones refine it and tell its errors, which `threshold` goes by;
    batches count whose texts made all of `max_new_tokens`. Peaks are measured by torch's counters on CUDA, by `measure`
    elsewhere (`profiled_peak`, which is slow). A batch that runs out of memory is halved until it fits, and later ones
    as large are halved beforehand.

    Errors: ConfigError for a causal model with right padding, or a learned memory model of another model, device or
    settings. ExecutionError, once all else is done, naming the texts that do not fit alone.
    """
    if generation.get("num_return_sequences", 1) != 1:
        raise ConfigError(f"num_return_sequences is {generation['num_return_sequences']}: one sequence a text is kept")
    if measure is None and model.device.type == "cuda":
        measure = partial(cuda_peak, model.device)
    driver = _Driver(model, max_new_tokens, measure, generation)
    sampler = getattr(batches, "batch_sampler", None)
    if not isinstance(sampler, DynamicBatchSampler):
        yield from _driven(driver, batches, None)
    else:
        given, pad_first = sampler.memory, sampler.pad_first
        num_beams = beams_of(model, generation)
        if isinstance(given, LearnedMemory):
            given.measured_on.check(measured_on(model, max_new_tokens=max_new_tokens, num_beams=num_beams))
        sampler.pad_first = True
        sampler.memory = given or GenerationMemory.from_config(
            model.config,
            max_new_tokens=max_new_tokens,
            dtype_bytes=model.dtype.itemsize,
            num_sequences=num_beams,
        )
        try:
            yield from _driven(driver, batches, sampler if calibrate else None)
        finally:
            sampler.pad_first = pad_first
            sampler.memory = given  # what was counted holds for this model and these settings alone
    if driver.too_large:
        named = ", ".join(f"{index} ({length} tokens)" for index, length in driver.too_large)
        raise ExecutionError(
            f"out of memory for these texts, each in a batch of its own: {named}; all others are done (generate_batches"
            " yields them): lower max_new_tokens or max_input_token_length"
        )


def _driven(driver: _Driver, batches: Iterable[Any], sampler: DynamicBatchSampler | None) -> Iterator[GeneratedBatch]:
    """Outputs batch by batch; what they measure goes to the sampler's memory model, if there is a sampler."""
    place, first_bytes = 0, None
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        num_texts, prompt_len = inputs["input_ids"].shape
        indices = (
            batch.indices if isinstance(batch, TextBatch) else batch.get("indices", range(place, place + num_texts))
        )
        done = driver.run(inputs, tuple(indices))
        whole = not done.num_splits and max(map(len, done.tokens), default=0) == driver.max_new_tokens
        memory = sampler.memory if sampler is not None else None
        if whole and done.peak_bytes and sampler is not None and isinstance(memory, GenerationMemory):
            shape = num_texts, prompt_len, done.peak_bytes
            if place == 0:
                first_bytes, memory = done.peak_bytes, memory.calibrated(*shape)
            elif first_bytes is None or not _has_padding(inputs):  # which shows less than a padded batch needs
                memory = memory.observing(*shape)
            else:
                memory = memory.refined(*shape, first_bytes=first_bytes)
            sampler.memory = memory
        place += num_texts
        yield done


def _has_padding(inputs: Tensors) -> bool:
    return "attention_mask" in inputs and not bool(inputs["attention_mask"].all())


class _Driver:
    """Runs batches, halving what does not fit; remembers how large that was, and the texts that never did."""

    def __init__(self, model: Any, max_new_tokens: int, measure: Measure | None, generation: Mapping[str, Any]) -> None:
        self.model, self.max_new_tokens, self.measure, self.generation = model, max_new_tokens, measure, generation
        self.too_large: list[tuple[int, int]] = []
        self._failed_positions: int | None = None
        end = generation.get("eos_token_id", getattr(model.generation_config, "eos_token_id", None))
        self._ends = set(end) if isinstance(end, list | tuple | set) else {end}

    def run(self, inputs: Tensors, indices: tuple[int, ...]) -> GeneratedBatch:
        waiting, num_splits, peaks = [slice(0, len(indices))], 0, list[int]()
        found: dict[int, tuple[int, ...]] = {}
        while waiting:
            rows = waiting.pop()
            part = _part(inputs, rows)
            num_texts, prompt_len = part["input_ids"].shape
            positions = num_texts * (prompt_len + self.max_new_tokens)
            fits = num_texts == 1 or self._failed_positions is None or positions < self._failed_positions
            outcome = self._attempt(part) if fits else None
            if outcome is not None:
                found.update(zip(indices[rows], outcome[0], strict=True))
                peaks += [] if outcome[1] is None else [outcome[1]]
                continue
            if fits:
                self._failed_positions = min(positions, self._failed_positions or positions)
            if num_texts == 1:
                self.too_large.append((indices[rows.start], prompt_len))
                continue
            middle = (rows.start + rows.stop) // 2
            waiting += [slice(middle, rows.stop), slice(rows.start, middle)]
            num_splits += 1
        kept = tuple(index for index in indices if index in found)
        tokens = tuple(found[index] for index in kept)
        return GeneratedBatch(indices=kept, tokens=tokens, peak_bytes=max(peaks, default=None), num_splits=num_splits)

    def _attempt(self, inputs: Tensors) -> tuple[list[tuple[int, ...]], int | None] | None:
        """New tokens and peak, or None out of memory: the failed call's frames are gone by then, and their tensors."""
        try:
            if self.measure is None:
                return self._generate(inputs), None
            return self.measure(partial(self._generate, inputs))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _generate(self, inputs: Tensors) -> list[tuple[int, ...]]:
        causal = not self.model.config.is_encoder_decoder
        mask = inputs.get("attention_mask")
        if causal and mask is not None and not bool(mask[:, -1].all()):
            raise ConfigError(
                "prompts of a causal model are padded on the right, so it would go on from padding: set"
                ' tokenizer.padding_side = "left"'
            )
        placed = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                output = self.model.generate(**placed, max_new_tokens=self.max_new_tokens, **self.generation)
        finally:
            self.model.train(was_training)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        start = inputs["input_ids"].shape[1] if causal else 1
        return [self._until_end(row) for row in sequences[:, start:].tolist()]

    def _until_end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        end = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tuple(tokens[:end])


def _part(inputs: Tensors, rows: slice) -> Tensors:
    """Some rows, without the columns that are padding in all of them."""
    num_texts, prompt_len = inputs["input_ids"].shape
    part = {name: x[rows] if x.ndim and x.shape[0] == num_texts else x for name, x in inputs.items()}
    if "attention_mask" not in part or rows.stop - rows.start == num_texts:
        return part
    used = part["attention_mask"].any(dim=0).nonzero().flatten().tolist() or [0]
    columns = slice(used[0], used[-1] + 1)
    return {name: x[:, columns] if x.ndim == 2 and x.shape[1] == prompt_len else x for name, x in part.items()}
