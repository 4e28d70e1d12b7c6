"""Generation batch by batch: a driver that loses no text, and splits what runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batching.inference.batches import GenerationMemory
from dynapipe_ext.batching.inference.loader import BatchTensors, DynamicBatchSampler, TextBatch
from dynapipe_ext.batching.inference.memory_model import LearnedMemory
from dynapipe_ext.batching.inference.memory_profiling import beams_of, measured_on, of_generation
from dynapipe_ext.errors import ConfigError, DataError, ExecutionError
from dynapipe_ext.evaluating import evaluating
from dynapipe_ext.peak_memory import MeasurePeak, cuda_peak, is_out_of_memory

_AHEAD = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # they try several tokens at once


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """New tokens of the texts `indices`, up to and with the end token, or the one at which `stopping_criteria` or
    `stop_strings` are met; measured peak of the batch, if it was measured.

    `num_splits`: times that the batch was halved, after running out of memory or because a smaller one had.
    """

    indices: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    peak_bytes: int | None = None
    num_splits: int = 0


def generate(model: Any, batches: Iterable[Any], *, max_new_tokens: int, **options: Any) -> list[list[int]]:
    """New tokens of every text in the texts' own order; options as in `generate_batches`."""
    tokens_of_text: dict[int, list[int]] = {}
    for batch in generate_batches(model, batches, max_new_tokens=max_new_tokens, **options):
        tokens_of_text.update(zip(batch.indices, map(list, batch.tokens), strict=True))
    return [tokens_of_text[index] for index in sorted(tokens_of_text)]


def generate_batches(
    model: Any,
    batches: Iterable[Any],
    *,
    max_new_tokens: int,
    measure: MeasurePeak | None = None,
    calibrate: bool = True,
    **generation: Any,
) -> Iterator[GeneratedBatch]:
    """`model.generate` of each batch of a loader, as they are done; `generation` goes to it.

    A loader from `build_dynamic_batch_dataloader` without a memory model gets the one counted from model.config. The
    first batch's measured peak then calibrates it, later ones refine it and tell its errors, which `threshold` goes by;
    batches count whose texts made all of `max_new_tokens`. Peaks are measured by torch's counters on CUDA, by `measure`
    elsewhere (`profiled_peak`, which is slow). A batch that runs out of memory is halved until it fits, and later ones
    as large are halved beforehand.

    Errors: ConfigError for a causal model with right padding, for stopping criteria beside several beams, or a learned
    memory model of another model, device or settings. DataError for a text without a token. ExecutionError, once all
    else is done, naming the texts that do not fit alone.
    """
    num_sequences = generation.get("num_return_sequences", of_generation(model, generation, "num_return_sequences"))
    if num_sequences not in (None, 1):
        raise ConfigError(f"num_return_sequences is {num_sequences}: one sequence a text is kept")
    if measure is None and model.device.type == "cuda":
        measure = partial(cuda_peak, model.device)
    driver = _Driver(model, max_new_tokens, measure, generation)
    sampler = getattr(batches, "batch_sampler", None)
    if not isinstance(sampler, DynamicBatchSampler):
        yield from _driven(driver, batches, None)
    else:
        with _memory_model_of(sampler, model, max_new_tokens, beams_of(model, generation)):
            yield from _driven(driver, batches, sampler if calibrate else None)
    if driver.too_large:
        named = ", ".join(f"{index} ({length} tokens)" for index, length in driver.too_large)
        raise ExecutionError(
            f"out of memory for these texts, each in a batch of its own: {named}; all others are done (generate_batches"
            " yields them): lower max_new_tokens or max_input_token_length"
        )


@contextmanager
def _memory_model_of(sampler: DynamicBatchSampler, model: Any, max_new_tokens: int, num_beams: int) -> Iterator[None]:
    """The sampler goes by its own memory model, or by one counted from the model's config. Errors: ConfigError."""
    memory, pad_first = sampler.memory, sampler.pad_first
    if isinstance(memory, LearnedMemory):
        memory.measured_on.check(measured_on(model, max_new_tokens=max_new_tokens, num_beams=num_beams))
    sampler.pad_first = True
    sampler.memory = memory or GenerationMemory.from_config(
        model.config,
        max_new_tokens=max_new_tokens,
        dtype_bytes=model.dtype.itemsize,
        num_sequences=num_beams,
    )
    try:
        yield
    finally:
        sampler.pad_first = pad_first
        sampler.memory = memory  # what was counted holds for this model and these settings alone


def _driven(driver: _Driver, batches: Iterable[Any], sampler: DynamicBatchSampler | None) -> Iterator[GeneratedBatch]:
    """Outputs batch by batch; what they measure goes to the sampler's memory model, if there is a sampler."""
    place, first_bytes, seen = 0, None, set[int]()
    for batch in batches:
        inputs = _inputs_of(batch)
        num_texts, prompt_len = inputs["input_ids"].shape
        indices = _numbers_of(batch, range(place, place + num_texts), seen)
        _refuse_empty(inputs, indices)
        done = driver.run(inputs, indices)
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


def _inputs_of(batch: Any) -> BatchTensors:
    """Errors: DataError for a batch without the tokens of its texts."""
    named = batch if isinstance(batch, Mapping) else {}
    inputs = {name: x for name, x in named.items() if isinstance(x, torch.Tensor) and name != "indices"}
    if "input_ids" not in inputs or inputs["input_ids"].ndim != 2:
        held = {name: tuple(x.shape) for name, x in inputs.items()} or type(batch).__name__
        raise DataError(f"a batch has {held}, but needs input_ids of (texts, positions): tokenize it, with padding")
    return inputs


def _refuse_empty(inputs: BatchTensors, indices: Sequence[int]) -> None:
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if empty := [index for index, of_text in zip(indices, mask, strict=True) if not of_text.any()]:
        raise DataError(f"text {empty[0]} has no token to go on from: leave it out, or begin texts with a BOS token")


def _numbers_of(batch: Any, usual: range, seen: set[int]) -> tuple[int, ...]:
    """Of the texts of a batch, which `seen` takes up. Errors: DataError for a number that another text has, too."""
    given = batch.indices if isinstance(batch, TextBatch) else batch.get("indices", usual)
    indices = tuple(map(int, given))
    if len(indices) != len(usual):
        raise DataError(f"a batch of {len(usual)} texts has {len(indices)} indices: give one a text")
    for index in indices:
        if index in seen:
            raise DataError(
                f"two texts have the number {index}, and one answer would be lost: give each its own in indices, in all"
                " batches or in none"
            )
        seen.add(index)
    return indices


def _has_padding(inputs: BatchTensors) -> bool:
    return "attention_mask" in inputs and not bool(inputs["attention_mask"].all())


class _Driver:
    """Runs batches, halving what does not fit; remembers how large that was, and the texts that never did."""

    def __init__(
        self, model: Any, max_new_tokens: int, measure: MeasurePeak | None, generation: Mapping[str, Any]
    ) -> None:
        self.model, self.max_new_tokens, self.measure = model, max_new_tokens, measure
        self.generation = dict(generation)
        self.too_large: list[tuple[int, int]] = []
        self._failed_positions: int | None = None
        end = generation.get("eos_token_id", of_generation(model, generation, "eos_token_id"))
        end = end.tolist() if isinstance(end, torch.Tensor) else end
        self._ends = set(end) if isinstance(end, list | tuple | set) else {end}
        self._criteria = [*(self.generation.pop("stopping_criteria", None) or ())]
        if strings := generation.get("stop_strings", of_generation(model, generation, "stop_strings")):
            self.generation["stop_strings"] = None  # transformers would stop by its own, and not say where
            if (tokenizer := generation.get("tokenizer")) is None:
                raise ConfigError(f"stop_strings is {strings!r} but no tokenizer says how tokens spell: give tokenizer")
            from transformers import StopStringCriteria

            self._criteria.append(StopStringCriteria(tokenizer, strings))
        ahead = ["num_beams"] if beams_of(model, generation) > 1 else []
        ahead += [name for name in _AHEAD if generation.get(name, of_generation(model, generation, name)) is not None]
        if self._criteria and ahead:
            raise ConfigError(
                f"{ahead[0]} beside stopping criteria: where they end an answer is not known then, so leave one out"
            )

    def run(self, inputs: BatchTensors, indices: tuple[int, ...]) -> GeneratedBatch:
        waiting, num_splits, peaks = [slice(0, len(indices))], 0, list[int]()
        tokens_of_text: dict[int, tuple[int, ...]] = {}
        while waiting:
            rows = waiting.pop()
            part = _part(inputs, rows)
            num_texts, prompt_len = part["input_ids"].shape
            positions = num_texts * (prompt_len + self.max_new_tokens)
            fits = num_texts == 1 or self._failed_positions is None or positions < self._failed_positions
            outcome = self._attempt(part) if fits else None
            if outcome is not None:
                tokens_of_text.update(zip(indices[rows], outcome[0], strict=True))
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
        done = tuple(index for index in indices if index in tokens_of_text)
        tokens = tuple(tokens_of_text[index] for index in done)
        return GeneratedBatch(indices=done, tokens=tokens, peak_bytes=max(peaks, default=None), num_splits=num_splits)

    def _attempt(self, inputs: BatchTensors) -> tuple[list[tuple[int, ...]], int | None] | None:
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

    def _generate(self, inputs: BatchTensors) -> list[tuple[int, ...]]:
        causal = not self.model.config.is_encoder_decoder
        mask = inputs.get("attention_mask")
        ends_in_padding = mask is not None and not bool(mask[:, -1].all())
        is_unmasked = mask is None and self._ends_in_pad(inputs["input_ids"])
        if causal and (ends_in_padding or is_unmasked):
            raise ConfigError(
                "prompts of a causal model are padded on the right, so it would go on from padding: set"
                ' tokenizer.padding_side = "left"'
            )
        if is_unmasked:
            raise ConfigError(
                "texts of a batch end in padding and no attention_mask says so, so the model would read it: give the"
                " tokenizer's attention_mask"
            )
        placed = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        with evaluating(self.model), torch.inference_mode():
            start = inputs["input_ids"].shape[1] if causal else self._decoder_start(inputs.get("decoder_input_ids"))
            stops = _FirstStops(self._criteria, start)
            criteria: dict[str, Any] = {"stopping_criteria": [stops]} if self._criteria else {}
            output = self.model.generate(**placed, max_new_tokens=self.max_new_tokens, **criteria, **self.generation)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        rows, ends = sequences[:, start:].tolist(), stops.of_rows
        return [self._until_end(row[:end]) for row, end in zip(rows, ends or [None] * len(rows), strict=True)]

    def _decoder_start(self, given: torch.Tensor | None) -> int:
        """Where a decoder's new tokens begin, behind those it is given: transformers puts its first before them."""
        first = self.generation.get(
            "decoder_start_token_id", of_generation(self.model, self.generation, "decoder_start_token_id")
        )
        first = getattr(self.model.config, "decoder_start_token_id", None) if first is None else first
        return 1 if given is None else given.shape[1] + all(token != first for token in given[:, 0].tolist())

    def _ends_in_pad(self, ids: torch.Tensor) -> bool:
        """Of prompts without a mask: whether some end in more padding than others."""
        pad = self.generation.get("pad_token_id", of_generation(self.model, self.generation, "pad_token_id"))
        num_trailing = (ids == pad).int().flip(1).cumprod(1).sum(1) if isinstance(pad, int) else torch.zeros(1)
        return bool(num_trailing.max() > num_trailing.min())

    def _until_end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        end = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tuple(tokens[:end])


class _FirstStops:
    """As one of transformers' stopping criteria: all of `criteria`, and at which new token of each row one of them was
    first met. Rows go on beside others that have not ended: what they are given from there on is no answer."""

    def __init__(self, criteria: Sequence[Callable[..., Any]], prompt_len: int) -> None:
        self._criteria, self._prompt_len = criteria, prompt_len
        self._first: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        length = input_ids.shape[1]
        if self._first is None:
            self._first = torch.zeros(len(input_ids), dtype=torch.long)
        is_met = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for criterion in self._criteria:
            is_met |= criterion(input_ids, scores, **keywords)
        self._first[is_met.cpu() & (self._first == 0)] = length - self._prompt_len
        return is_met

    @property
    def of_rows(self) -> list[int | None]:
        """Numbers of new tokens, with the one that met a criterion; None where none was met. Empty without criteria."""
        return [] if self._first is None else [first or None for first in self._first.tolist()]


def _part(inputs: BatchTensors, rows: slice) -> BatchTensors:
    """Some rows, without the columns that are padding in all of them."""
    num_texts, prompt_len = inputs["input_ids"].shape
    part = {name: x[rows] if x.ndim and x.shape[0] == num_texts else x for name, x in inputs.items()}
    if "attention_mask" not in part or rows.stop - rows.start == num_texts:
        return part
    used = part["attention_mask"].any(dim=0).nonzero().flatten().tolist() or [0]
    columns = slice(used[0], used[-1] + 1)
    of_prompt = {n for n, x in part.items() if x.ndim == 2 and x.shape[1] == prompt_len and "decoder" not in n}
    return {name: x[:, columns] if name in of_prompt else x for name, x in part.items()}
