"""Batch generation with real small transformers models: same tokens, peaks under the first one, no text lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dynapipe_ext.batching.inference.batches import PROMPT_TOKENS, GenerationMemory
from dynapipe_ext.batching.inference.generation import GeneratedBatch, generate, generate_batches
from dynapipe_ext.batching.inference.loader import build_dynamic_batch_dataloader
from dynapipe_ext.batching.inference.memory_profiling import beams_of
from dynapipe_ext.errors import ConfigError, DataError, ExecutionError
from dynapipe_ext.peak_memory import is_out_of_memory

pytest.importorskip("transformers")

WORDS = 95  # beside padding and the end token
NEW_TOKENS = 6


def tokenizer(padding_side: str = "left") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[END]": 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[END]", padding_side=padding_side
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,  # so that texts differ in what they continue with
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS + 2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        initializer_factor=2.0,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def texts_of(lengths: list[int], seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in generator.integers(0, WORDS, length)) for length in lengths]


def loader_of(texts: list[str], batch_size: int, padding_side: str = "left", **settings: Any) -> Any:
    return build_dynamic_batch_dataloader(texts, tokenizer(padding_side), batch_size, 128, num_workers=0, **settings)


def alone(model: Any, texts: list[str], **generation: Any) -> list[list[int]]:
    """New tokens of each text from a call of its own, up to and with the end token."""
    found = []
    for text in texts:
        inputs = tokenizer()([text], return_tensors="pt")
        with torch.inference_mode():
            row = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **generation)[0].tolist()
        row = row[1:] if model.config.is_encoder_decoder else row[inputs["input_ids"].shape[1] :]
        found.append(row[: row.index(1) + 1] if 1 in row else row)
    return found


def profiled_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most bytes above those at its start, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = np.array([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())], np.int64)
    return result, int(changes.cumsum().max())


MIXED = [40, 3, 17, 1, 60, 8, 8, 25, 33, 2, 5, 12, 57, 9, 21, 4]


@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (t5, "right")])
def test_batches_generate_the_tokens_of_one_text_at_a_time_in_the_texts_own_order(build: Any, side: str) -> None:
    model, texts = build(), texts_of(MIXED)
    loader = loader_of(texts, 2, side, shuffle=True)
    outputs = generate(model, loader, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert outputs == alone(model, texts)
    assert len({tuple(tokens) for tokens in outputs}) > 4  # not all alike, so a wrong order shows
    assert len(loader) < len(texts) // 2


def peaks_of(model: Any, loader: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Texts and measured peak of each batch."""
    options = {"eos_token_id": WORDS + 5, "measure": profiled_peak, "max_new_tokens": 12} | options  # no early end
    batches = list(generate_batches(model, loader, do_sample=False, **options))
    return [len(batch.indices) for batch in batches], [batch.peak_bytes or 0 for batch in batches]


@pytest.fixture(scope="module")
def spread_texts() -> list[str]:
    return texts_of([100, 98, *[50] * 6, *[24] * 8, *[6] * 12, *[1] * 40])


@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (t5, "right")])
def test_no_batch_has_a_higher_measured_peak_than_the_first(build: Any, side: str, spread_texts: list[str]) -> None:
    model, num_batches = build(), []
    for calibrate in (False, True):
        loader = loader_of(spread_texts, 2, side, peak_fraction=1.0)
        sizes, peaks = peaks_of(model, loader, calibrate=calibrate)
        assert max(peaks[1:]) <= peaks[0]
        assert sum(sizes) == len(spread_texts)
        assert max(sizes) >= 4  # batches do grow
        num_batches.append(len(sizes))
    assert num_batches[1] < num_batches[0]  # the first peak tells more than the config


def test_counting_prompt_tokens_alone_would_overrun_the_first_peak() -> None:
    texts = texts_of([100, 100, *[1] * 60])
    for memory, overrun in ((PROMPT_TOKENS, True), (None, False)):
        loader = loader_of(texts, 2, peak_fraction=1.0, memory=memory)
        _, peaks = peaks_of(llama(), loader, max_new_tokens=24)
        assert (max(peaks[1:]) > peaks[0]) is overrun


@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (t5, "right")])
def test_a_loop_of_ones_own_stays_under_the_first_peak_and_its_batches_are_what_generate_takes(
    build: Any, side: str
) -> None:
    model, peaks = build(), []
    loader = loader_of(texts_of([100, 100, *[50] * 5, *[1] * 60]), 2, side)
    for batch in loader:
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": WORDS + 5}
        peaks.append(
            profiled_peak(lambda batch=batch, options=options: model.generate(**batch.to("cpu"), **options))[1]
        )
    assert max(peaks[1:]) <= peaks[0]
    assert len(peaks) < 11


def test_beam_search_over_batches_finds_what_it_finds_for_one_text_at_a_time() -> None:
    model, texts = llama(), texts_of(MIXED)
    outputs = generate(model, loader_of(texts, 2), max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=3)
    assert outputs == alone(model, texts, num_beams=3)


class SmallDevice:
    """Runs calls as `measure` does, but has room for a number of padded prompt positions only."""

    def __init__(self, model: Any, most_positions: int) -> None:
        self.most_positions, self.num_failures = most_positions, 0
        self._generate, model.generate = model.generate, self.generate
        self._last_failed: Callable[[], torch.Tensor | None] = lambda: None

    def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> Any:
        assert self._last_failed() is None, "the tensors of the call that failed are still held"
        if input_ids.numel() > self.most_positions:
            self.num_failures += 1
            activations = torch.zeros(8)
            self._last_failed = weakref.ref(activations)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return self._generate(input_ids=input_ids, **settings)


@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (t5, "right")])
def test_a_batch_that_runs_out_of_memory_is_halved_until_it_fits_and_no_text_is_lost(build: Any, side: str) -> None:
    model, texts = build(), texts_of(MIXED)
    expected = alone(model, texts)
    device = SmallDevice(model, most_positions=100)
    loader = loader_of(texts, 4, side, memory=PROMPT_TOKENS)
    batches = list(generate_batches(model, loader, max_new_tokens=NEW_TOKENS, do_sample=False))
    found = {i: list(tokens) for batch in batches for i, tokens in zip(batch.indices, batch.tokens, strict=True)}
    assert [found[i] for i in range(len(texts))] == expected
    assert device.num_failures > 0
    assert sum(batch.num_splits for batch in batches) > device.num_failures  # the others were halved without trying


def test_a_text_too_large_alone_is_named_when_all_others_are_done() -> None:
    model, texts = llama(), texts_of(MIXED)
    expected = alone(model, texts)
    SmallDevice(model, most_positions=58)
    loader = loader_of(texts, 4)
    done: list[GeneratedBatch] = []
    with pytest.raises(ExecutionError, match=r"own: 4 \(60 tokens\); all others are done"):
        done.extend(generate_batches(model, loader, max_new_tokens=NEW_TOKENS, do_sample=False))
    found = {i: list(tokens) for batch in done for i, tokens in zip(batch.indices, batch.tokens, strict=True)}
    assert found == {i: tokens for i, tokens in enumerate(expected) if i != 4}


def test_other_errors_of_a_model_are_not_taken_for_a_lack_of_memory() -> None:
    loader = loader_of(texts_of([3, 9]), 2, return_token_type_ids=True)  # which the model does not take
    with pytest.raises(ValueError, match="token_type_ids"):
        generate(llama(), loader, max_new_tokens=2)

    def broken(call: Callable[[], Any]) -> tuple[Any, int]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(llama(), loader_of(texts_of([3, 9]), 2), max_new_tokens=2, measure=broken)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_right_padding_is_refused_for_a_causal_model() -> None:
    loader = loader_of(texts_of([3, 9]), 2, "right")
    with pytest.raises(ConfigError, match='padding_side = "left"'):
        generate(llama(), loader, max_new_tokens=2)


def test_right_padding_without_a_mask_is_refused_for_a_causal_model() -> None:
    model = llama()
    model.generation_config.pad_token_id = 0
    batch = tokenizer("right")(texts_of([3, 9]), padding=True, return_tensors="pt")
    with pytest.raises(ConfigError, match='padding_side = "left"'):
        generate(model, [{"input_ids": batch["input_ids"]}], max_new_tokens=2)


def test_padding_that_no_mask_tells_an_encoder_of_is_refused() -> None:
    batch = tokenizer("right")(texts_of([3, 9]), padding=True, return_tensors="pt")
    with pytest.raises(ConfigError, match="end in padding and no attention_mask says so"):
        generate(t5(), [{"input_ids": batch["input_ids"]}], max_new_tokens=2)
    assert generate(t5(), [dict(batch)], max_new_tokens=2)


def test_two_texts_of_one_number_are_refused() -> None:
    batch = dict(tokenizer()(texts_of([3, 3]), padding=True, return_tensors="pt"))
    for batches in ([batch, {**batch, "indices": [1, 2]}], [{**batch, "indices": torch.tensor([7, 7])}]):
        with pytest.raises(DataError, match=r"two texts have the number [17], and one answer would be lost"):
            generate(llama(), batches, max_new_tokens=2)
    with pytest.raises(DataError, match="a batch of 2 texts has 1 indices"):
        generate(llama(), [{**batch, "indices": [1]}], max_new_tokens=2)


@pytest.mark.parametrize("end", [1, None])
def test_answers_end_where_a_criterion_is_met_whatever_the_other_texts_of_the_batch(end: int | None) -> None:
    model, texts = llama(), texts_of([3, 9, 5, 4, 6, 2, 7, 5])
    answers = alone(model, texts, eos_token_id=None)
    places = [place for place, answer in enumerate(answers) if len(answer) > 3]
    assert len(places) > 2  # else nothing goes on beside what has stopped
    word = next(token for place in places for token in answers[place][1:3] if token >= 12)  # of two digits: in no other
    spelled = tokenizer()
    spelled.add_tokens(["abcdef"])  # transformers spells each token behind it

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == word

    expected = [answer[: answer.index(word) + 1] if word in answer else answer for answer in answers]
    if end is not None:
        expected = [answer[: answer.index(end) + 1] if end in answer else answer for answer in expected]
    assert len({len(answer) for answer in expected}) > 1
    for words in ({"stopping_criteria": [criterion]}, {"stop_strings": [spelled.decode([word])], "tokenizer": spelled}):
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": end, "pad_token_id": 0, **words}
        assert generate(model, loader_of(texts, 4), **options) == expected
        assert generate(model, loader_of(texts, 4), **options, assistant_model=None) == expected
        for more in ({"num_beams": 2}, {"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
            with pytest.raises(ConfigError, match=f"{next(iter(more))} beside stopping criteria"):
                generate(model, loader_of(texts, 4), **options, **more)
    with pytest.raises(ConfigError, match="no tokenizer says how tokens spell"):
        generate(model, loader_of(texts, 4), max_new_tokens=2, stop_strings=["w5"])


def test_the_stop_strings_in_force_are_those_of_the_call_then_of_its_configuration_then_of_the_model() -> None:
    from transformers import GenerationConfig

    model, texts, spelled = llama(), texts_of([3, 9, 5, 4]), tokenizer()
    spelled.add_tokens(["abcdef"])
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0, "tokenizer": spelled}
    answers = generate(model, loader_of(texts, 1), **options)
    words = [token for answer in answers for token in answer[1:4] if token >= 12]
    mine, other = words[0], next(word for word in words if word != words[0])

    def expected(word: int) -> list[list[int]]:
        return [answer[: answer.index(word) + 1] if word in answer else answer for answer in answers]

    of_mine, of_other = spelled.decode([mine]), spelled.decode([other])
    model.generation_config.stop_strings = [of_other]
    assert generate(model, loader_of(texts, 4), **options) == expected(other)
    assert generate(model, loader_of(texts, 4), **options, stop_strings=[of_mine]) == expected(mine)
    assert generate(model, loader_of(texts, 4), **options, stop_strings=None) == answers
    passed = GenerationConfig(stop_strings=[of_mine])
    assert generate(model, loader_of(texts, 4), **options, generation_config=passed) == expected(mine)
    assert generate(model, loader_of(texts, 4), **options, generation_config=GenerationConfig()) == expected(other)


def test_tokens_that_a_decoder_is_given_are_not_new_ones() -> None:
    model, batch = t5(), dict(tokenizer("right")(texts_of([3, 2]), padding=True, return_tensors="pt"))
    for given in ([[0, 5, 6]] * 2, [[5, 6]] * 2):  # with its first token, or the model puts that before
        begun = torch.tensor(given)
        whole = model.generate(**batch, decoder_input_ids=begun, max_new_tokens=4)
        expected = [[token for token in row if token] for row in whole[:, 3:].tolist()]
        small = t5()
        SmallDevice(small, 5)  # room for one text at a time
        for device in (model, small):
            assert generate(device, [{**batch, "decoder_input_ids": begun}], max_new_tokens=4) == expected


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "text 1 has no",
        ),
        ({"input_ids": torch.ones(1, 0).long()}, "text 0 has no token"),
        ({"inputs_embeds": torch.ones(1, 2, 32)}, r"a batch has .*inputs_embeds.* but needs input_ids"),
        ({"input_ids": torch.ones(3).long()}, r"a batch has .*\(3,\).* but needs input_ids of \(texts, positions\)"),
        (torch.ones(2, 3).long(), "a batch has Tensor, but needs input_ids"),
    ],
)
def test_a_batch_without_tokens_to_go_on_from_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        generate(llama(), [batch], max_new_tokens=2)


def test_several_sequences_a_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_return_sequences is 2"):
        generate(llama(), [], max_new_tokens=2, num_return_sequences=2)


def test_a_configuration_that_is_passed_says_where_answers_end() -> None:
    from transformers import GenerationConfig

    model, texts = llama(), texts_of([3, 9, 4])
    model.generation_config.eos_token_id = None
    frozen = model.model.layers[0].eval()
    model.train()
    frozen.eval()
    expected = alone(model, texts)
    passed = GenerationConfig(eos_token_id=torch.tensor([1]), pad_token_id=0, do_sample=False)
    assert generate(model, loader_of(texts, 3), max_new_tokens=NEW_TOKENS, generation_config=passed) == expected
    assert not frozen.training
    assert model.training
    assert beams_of(model, {"generation_config": GenerationConfig(num_beams=4)}) == 4
    several = GenerationConfig(num_beams=2, num_return_sequences=2)
    with pytest.raises(ConfigError, match="num_return_sequences is 2"):
        generate(model, [], max_new_tokens=2, generation_config=several)


def test_a_configuration_that_is_passed_leaves_the_models_end_where_it_has_none() -> None:
    from transformers import GenerationConfig

    model, texts = llama(), texts_of([3, 9, 5, 4])
    model.generation_config.eos_token_id = None
    word = generate(model, loader_of(texts, 4), max_new_tokens=NEW_TOKENS, pad_token_id=0)[0][2]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = word, 0
    expected = generate(model, loader_of(texts, 1), max_new_tokens=NEW_TOKENS)
    assert len({len(answer) for answer in expected}) > 1
    passed = GenerationConfig(top_k=5)
    assert generate(model, loader_of(texts, 4), max_new_tokens=NEW_TOKENS, generation_config=passed) == expected


def test_a_column_of_a_table_is_read_by_places() -> None:
    class Column:
        """Read by labels, iterated by places."""

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[str]:
            return iter(texts)

        def __getitem__(self, label: int) -> str:
            return texts[(label + 1) % 3]

    model, texts = llama(), texts_of([5, 2, 9])
    column: Any = Column()
    assert generate(model, loader_of(column, 2), max_new_tokens=NEW_TOKENS, do_sample=False) == alone(model, texts)
    with pytest.raises(DataError, match="texts is a dict: give a list of strings"):
        loader_of({0: "a"}, 2)  # type: ignore[arg-type]


def test_batches_of_any_other_loader_are_taken_and_numbered_as_they_come() -> None:
    model, texts = llama(), texts_of([5, 9, 2, 7])
    batches = [tokenizer()(texts[i : i + 2], padding=True, return_tensors="pt") for i in (0, 2)]
    assert generate(model, batches, max_new_tokens=NEW_TOKENS, do_sample=False) == alone(model, texts)


def test_the_counted_memory_model_is_of_one_call_and_a_given_one_stays() -> None:
    model, own = llama(), GenerationMemory(5, 1)
    for memory in (None, own):
        loader = loader_of(texts_of([5, 9, 2, 7]), 2, memory=memory)
        generate(model, loader, max_new_tokens=2, eos_token_id=WORDS + 5, measure=profiled_peak)
        assert loader.batch_sampler.memory is memory
