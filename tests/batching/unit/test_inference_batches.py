"""Batch sizes for inference: the fewest batches under a bound in bytes, and a loader that keeps every text."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batching.inference.batches import (
    PROMPT_TOKENS,
    UNMEASURED,
    GenerationMemory,
    InferenceBatchRule,
    plan_batches,
)
from dynapipe_ext.batching.inference.loader import DynamicBatchSampler, build_dynamic_batch_dataloader
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.partitions import partitions


class WordTokenizer:
    """One token a word, as the tokenizers of transformers are called."""

    pad_token = "[PAD]"

    def __call__(
        self,
        texts: list[str],
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        pad_to_multiple_of: int = 1,
    ) -> dict[str, Any]:
        import torch

        rows = [[len(word) for word in text.split()][: max_length if truncation else None] for text in texts]
        masks = [[1] * len(row) for row in rows]
        if padding:
            width = -(-max(map(len, rows)) // pad_to_multiple_of) * pad_to_multiple_of
            rows = [row + [0] * (width - len(row)) for row in rows]
            masks = [mask + [0] * (width - len(mask)) for mask in masks]
        if return_tensors == "pt":
            return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}
        return {"input_ids": rows, "attention_mask": masks}


def texts_of(lengths: list[int]) -> list[str]:
    return [" ".join(["word"] * length) for length in lengths]


def fewest(lengths: list[int], rule: InferenceBatchRule, memory: GenerationMemory) -> int:
    """Batches of the best of all groupings in which the longest texts are together in a first batch of its size."""
    order = sorted(lengths, reverse=True)
    longest = order[0]
    return 1 + min(
        len(groups)
        for groups in partitions(order[rule.batch_size :])
        if all(len(group) <= rule.num_texts(memory, longest, max(group)) for group in groups)
    )


RULES = st.builds(
    InferenceBatchRule,
    batch_size=st.integers(1, 3),
    peak_fraction=st.sampled_from([0.5, 0.9, 1.0]),
    growth=st.sampled_from([1.0, 2.0, math.inf]),
)
MEMORIES = st.builds(GenerationMemory, st.integers(0, 40), st.integers(1, 9))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), RULES, MEMORIES)
def test_no_grouping_of_the_texts_has_fewer_batches(
    lengths: list[int], rule: InferenceBatchRule, memory: GenerationMemory
) -> None:
    assert len(plan_batches(lengths, rule, memory)) == fewest(lengths, rule, memory)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), RULES, MEMORIES)
def test_each_text_is_in_one_batch_under_the_bound(
    lengths: list[int], rule: InferenceBatchRule, memory: GenerationMemory
) -> None:
    batches = plan_batches(lengths, rule, memory)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
    first_bytes = rule.batch_size * memory.text_bytes(max(lengths))
    assert len(batches[0]) == min(rule.batch_size, len(lengths))
    for batch in batches[1:]:
        num_bytes = len(batch) * memory.text_bytes(max(lengths[i] for i in batch))
        assert num_bytes <= first_bytes
        assert num_bytes <= rule.peak_fraction * first_bytes or len(batch) <= rule.batch_size
        assert len(batch) <= rule.growth * rule.batch_size


def test_a_hundred_thousand_texts_need_the_batches_of_the_token_budget_optimum() -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, 100_000).astype(int).clip(1, 512)
    order = np.sort(lengths)[::-1]
    budget, optimum, start = 16 * int(order[0]), 0, 0
    while start < len(order):
        start += budget // int(order[start])
        optimum += 1
    rule = InferenceBatchRule(batch_size=16, peak_fraction=1.0)
    assert len(plan_batches(lengths, rule)) == optimum
    capped = plan_batches(lengths, InferenceBatchRule(batch_size=16, peak_fraction=0.9))
    assert len(capped) <= 1.05 * optimum / 0.9


def test_what_a_text_costs_at_any_length_keeps_batches_small() -> None:
    lengths, rule = [100] * 4 + [10] * 1000, InferenceBatchRule(batch_size=4, peak_fraction=1.0)
    assert len(plan_batches(lengths, rule, PROMPT_TOKENS)[1]) == 40
    assert len(plan_batches(lengths, rule, GenerationMemory(100, 1))[1]) == 4 * 200 // 110


def decoder_config(**changes: Any) -> SimpleNamespace:
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "vocab_size": 1000,
    }
    return SimpleNamespace(**(settings | changes))


def test_a_prompt_token_costs_its_keys_and_values_and_a_text_at_least_those_of_its_new_tokens() -> None:
    memory = GenerationMemory.from_config(decoder_config(), max_new_tokens=10, dtype_bytes=2)
    cache = 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, width of a head, bytes
    assert memory.bytes_per_token == cache
    assert memory.bytes_per_text >= 10 * cache + 1000 * (2 + 4)
    beams = GenerationMemory.from_config(decoder_config(), max_new_tokens=10, dtype_bytes=2, num_sequences=3)
    assert (beams.bytes_per_text, beams.bytes_per_token) == (3 * memory.bytes_per_text, 3 * memory.bytes_per_token)
    longer = GenerationMemory.from_config(decoder_config(), max_new_tokens=11, dtype_bytes=2)
    assert longer.bytes_per_text - memory.bytes_per_text >= cache


def test_a_config_that_does_not_say_its_sizes_is_refused_with_the_way_round() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size: give memory=GenerationMemory"):
        GenerationMemory.from_config(decoder_config(vocab_size=None), max_new_tokens=1, dtype_bytes=2)


def test_calibration_explains_the_measured_peak_and_keeps_what_a_text_costs() -> None:
    memory = GenerationMemory(100, 1).calibrated(4, 50, 4 * (100 + 50 * 7))
    assert memory == GenerationMemory(100, 7)
    assert GenerationMemory(100, 1).calibrated(4, 50, 8).bytes_per_token == 0  # no slope: batches do not grow


@given(
    st.integers(0, 1000),
    st.integers(1, 50),
    st.integers(0, 5),
    st.integers(0, 500),
    st.lists(st.integers(1, 300), min_size=5, max_size=80),
)
def test_no_batch_is_above_the_first_peak_for_any_convex_cost_of_a_text(
    base: int, slope: int, square: int, spare: int, lengths: list[int]
) -> None:
    def cost(prompt_len: int) -> int:
        return base + slope * prompt_len + square * prompt_len**2

    rule, longest = InferenceBatchRule(batch_size=4, peak_fraction=1.0), max(lengths)
    counted = GenerationMemory(base + spare, slope)
    for memory in (counted, counted.calibrated(4, longest, 4 * cost(longest))):
        for batch in plan_batches(lengths, rule, memory):
            assert len(batch) * cost(max(lengths[i] for i in batch)) <= 4 * cost(longest)


def test_the_threshold_is_the_share_of_observed_peaks_above_the_bound() -> None:
    ratios = tuple(1.0 + 0.001 * place for place in range(199))
    memory = GenerationMemory(0, 1, observed=ratios)
    assert memory.margin(0.0) == ratios[-1]
    assert memory.margin(0.1) == ratios[179]
    for threshold in (0.01, 0.1, 0.5):
        assert sum(ratio > memory.margin(threshold) for ratio in ratios) <= threshold * (len(ratios) + 1)
    assert GenerationMemory(0, 1, observed=(0.5, 0.6)).margin(0.5) == 1.0
    strict, loose = (InferenceBatchRule(batch_size=100, threshold=t) for t in (0.01, 0.5))
    assert strict.num_texts(memory, 50, 10) < loose.num_texts(memory, 50, 10)


def test_the_loader_yields_tensors_texts_and_their_places() -> None:
    lengths = [3, 9, 1, 4, 8, 2, 4]
    texts = texts_of(lengths)
    loader = build_dynamic_batch_dataloader(texts, WordTokenizer(), 2, 6, num_workers=0, peak_fraction=1.0)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert [batch["indices"] for batch in batches] == [[1, 4], [3, 6], [0, 5, 2]]
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 6), (2, 4), (3, 3)]  # cut at 6 tokens
    for batch in batches:
        assert batch["texts"] == [texts[index] for index in batch["indices"]]
        assert batch["attention_mask"].sum(dim=1).tolist() == [min(6, lengths[i]) for i in batch["indices"]]


def test_lengths_given_spare_the_pass_over_the_texts_and_worker_processes_change_nothing() -> None:
    texts = texts_of([3, 9, 1, 4, 8, 2, 4])
    alone = [batch["indices"] for batch in build_dynamic_batch_dataloader(texts, WordTokenizer(), 2, 6, num_workers=0)]
    given_lengths = build_dynamic_batch_dataloader(
        texts, WordTokenizer(), 2, 6, num_workers=1, lengths=[3, 9, 1, 4, 8, 2, 4]
    )
    assert [batch["indices"] for batch in given_lengths] == alone


def test_a_range_given_bounds_the_batches_and_without_one_a_text_costs_a_fifth_of_the_longest_beside_its_tokens() -> (
    None
):
    texts = texts_of([50, 50, *[1] * 90])
    counted = {"num_workers": 0, "memory": PROMPT_TOKENS}
    unmeasured, bounded, free = (
        [len(batch["texts"]) for batch in build_dynamic_batch_dataloader(texts, WordTokenizer(), 2, 64, **given)]
        for given in ({"num_workers": 0}, {"num_workers": 0, "batch_end_range": 6.0}, counted)
    )
    assert (unmeasured, bounded, free) == ([2, *[9] * 10], [2, *[12] * 7, 6], [2, 90])
    assert (
        max(len(batch) for batch in plan_batches([500, *[1] * 90], InferenceBatchRule(batch_size=1), UNMEASURED)) <= 6
    )


def test_padding_to_a_multiple_counts_against_the_bound() -> None:
    texts = texts_of([16, 16, *[9] * 40])
    loader = build_dynamic_batch_dataloader(
        texts, WordTokenizer(), 2, 16, num_workers=0, peak_fraction=1.0, pad_to_multiple_of=8
    )
    assert {tuple(batch["input_ids"].shape) for batch in loader} == {(2, 16)}


def test_a_shuffle_keeps_the_batches_and_the_longest_first_and_follows_seed_and_epoch() -> None:
    lengths = np.random.default_rng(1).integers(1, 200, 500)
    rule = InferenceBatchRule(batch_size=4)
    plain = [tuple(batch) for batch in DynamicBatchSampler(lengths, rule)]
    sampler = DynamicBatchSampler(lengths, rule, shuffle=True, seed=5)
    first, again = [tuple(batch) for batch in sampler], [tuple(batch) for batch in sampler]
    sampler.set_epoch(1)
    second = [tuple(batch) for batch in sampler]
    assert first == again != second
    assert sorted(first) == sorted(second) == sorted(plain) != first
    assert first[0] == second[0] == plain[0]


def test_a_memory_model_put_in_while_batches_are_drawn_counts_from_the_next_one_on() -> None:
    sampler = DynamicBatchSampler([100] * 4 + [10] * 100, InferenceBatchRule(batch_size=4, peak_fraction=1.0))
    batches = iter(sampler)
    assert len(next(batches)) == 4
    sampler.memory = GenerationMemory(100, 1)
    assert len(next(batches)) == 4 * 200 // 110


def test_no_texts_make_no_batches() -> None:
    assert list(build_dynamic_batch_dataloader([], WordTokenizer(), 2, 6, num_workers=0)) == []


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"threshold": 1.0}, ConfigError, "threshold is 1.0"),
        ({"peak_fraction": 1.5}, ConfigError, "peak_fraction is 1.5"),
        ({"batch_end_range": 0.5}, ConfigError, "batch_end_range 0.5"),
        ({"steps": 0}, ConfigError, "steps 0"),
        ({"max_input_token_length": 0}, ConfigError, "max_input_token_length is 0"),
        ({"max_length": 5}, ConfigError, "max_length is 5"),
        ({"lengths": [1]}, DataError, "1 lengths were given for 3 texts"),
        ({"lengths": [1.0, 2.0, 3.0]}, DataError, "float64"),
        ({"texts": "one string"}, DataError, "one string"),
        ({"texts": iter(["a"])}, DataError, "texts is a list_iterator: give a list of strings"),
        ({"texts": ["a", None, "b"]}, DataError, "text 1 is None: give a string, or leave it out"),
        ({"texts": ["a", "", "b"]}, DataError, "text 1 has 0 tokens"),
        ({"tokenizer": SimpleNamespace(pad_token=None)}, ConfigError, "pad_token"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    settings = {"texts": ["a b", "c", "d e f"], "batch_size": 2, "max_input_token_length": 8, "num_workers": 0}
    with pytest.raises(error, match=says):
        build_dynamic_batch_dataloader(**{**settings, "tokenizer": WordTokenizer(), **changes})
