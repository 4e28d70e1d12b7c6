"""`dynapipe collect-memory` and `train-memory-model` on real small models, and batches planned by what they learned."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.batching.inference.batches import GenerationMemory
from dynapipe_ext.batching.inference.generation import generate, generate_batches
from dynapipe_ext.batching.inference.loader import build_dynamic_batch_dataloader
from dynapipe_ext.batching.inference.memory_model import LearnedMemory
from dynapipe_ext.batching.inference.memory_profiling import load_model, measured_on
from dynapipe_ext.batching.inference.memory_records import read_records
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands import collect_memory as collect_memory_command
from dynapipe_ext.peak_memory import profiled_peak

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

WORDS, NEW_TOKENS, BATCHES = 95, 3, 60
SETTINGS = ("--device", "cpu", "--generate", str(NEW_TOKENS), "--max-length", "64", "--max-rows", "96")
SETTINGS += ("--max-tokens", "640", "--batches", str(BATCHES))


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, T5Config

    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None}
        return LlamaConfig(vocab_size=WORDS + 2, eos_token_id=1, pad_token_id=0, **(sizes | changes))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5Config(vocab_size=WORDS + 2, eos_token_id=1, pad_token_id=0, **(sizes | changes))


def model_of(kind: str, **changes: Any) -> Any:
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    torch.manual_seed(0)
    return {"llama": LlamaForCausalLM, "t5": T5ForConditionalGeneration}[kind](config_of(kind, **changes)).eval()


def tokenizer(kind: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[END]": 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    side = "left" if kind == "llama" else "right"
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[END]", padding_side=side)


def texts_of(lengths: list[int]) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(f"w{i}" for i in generator.integers(0, WORDS, length)) for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of each kind, and records and a memory model of it."""
    place: Path = tmp_path_factory.mktemp("memory")
    for kind in ("llama", "t5"):
        config_of(kind).save_pretrained(place / kind)
    return place


def shown_by(arguments: list[str]) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], Path]:
    """The memory model of a kind, collected and trained once by the commands."""

    def get(kind: str) -> Path:
        out = folder / f"{kind}.model.json"
        if not out.exists():
            found = folder / f"{kind}.jsonl"
            assert cli.main(["collect-memory", "--model", str(folder / kind), *SETTINGS, "--out", str(found)]) == 0
            shown = shown_by(["train-memory-model", str(found), "--out", str(out), "--json"])
            (folder / f"{kind}.shown").write_text(shown)
        return out

    return get


LENGTHS = {
    "mixed": [60, 58, 50, 50, *[33] * 8, *[17, 16, 15, 14] * 4, *[5, 4, 3] * 12, *[1] * 40],
    "cut to one length": [90, 80, 75, 70, 66, 65, 64, 64, 63, *[40, 37, 31] * 3, *[9] * 20, *[2, 3] * 20],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_no_batch_of_a_learned_or_a_counted_model_has_a_higher_measured_peak_than_the_first(
    kind: str, lengths: list[int], trained: Callable[[str], Path]
) -> None:
    model, texts = model_of(kind), texts_of(lengths)
    for settings in ({"memory_model": trained(kind)}, {}):
        loader = build_dynamic_batch_dataloader(texts, tokenizer(kind), 4, 64, num_workers=0, **settings)
        options = {"measure": profiled_peak, "eos_token_id": WORDS + 5, "do_sample": False}
        batches = list(generate_batches(model, loader, max_new_tokens=NEW_TOKENS, **options))
        first, *others = (batch.peak_bytes or 0 for batch in batches)
        assert max(others) <= first
        grown = [batch.peak_bytes or 0 for batch in batches[1:] if len(batch.indices) > 4]
        assert max(grown) <= 0.93 * first
        assert sorted(i for batch in batches for i in batch.indices) == list(range(len(texts)))
        order, start, optimum = sorted((min(n, 64) for n in lengths), reverse=True), 4, 1
        while start < len(order):
            start += max(4, int(0.9 * 4 * order[0] / order[start]))
            optimum += 1
        if settings:
            assert len(batches) <= optimum + 2  # the token budget: texts of one token cost more than a token here
            assert max(len(batch.indices) for batch in batches) > 12


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_held_out_errors_are_small(kind: str, folder: Path, trained: Callable[[str], Path]) -> None:
    trained(kind)
    summary = json.loads((folder / f"{kind}.shown").read_text())
    assert summary["median_error"] < 0.05
    assert summary["num_records"] == BATCHES
    assert [one["threshold"] for one in summary["coverage"]] == [0.01, 0.025, 0.05, 0.1, 0.2]
    for one in summary["coverage"]:
        assert one["above_limit"] <= 2 * one["threshold"] + 0.05


def test_the_same_records_make_the_same_file_and_their_errors_are_printed(
    folder: Path, trained: Callable[[str], Path]
) -> None:
    out, again = trained("llama"), folder / "llama.again.json"
    shown = shown_by(["train-memory-model", str(folder / "llama.jsonl"), "--out", str(again)])
    for words in (f"{BATCHES} batches, 0 of them out of memory", "median error", "2.5 %", "chosen batches above 90 %"):
        assert words in shown
    assert again.read_text() == out.read_text()


def test_a_model_of_weights_is_measured_as_its_config_is(folder: Path, trained: Callable[[str], Path]) -> None:
    saved = folder / "llama-weights"
    model_of("llama").save_pretrained(saved)
    found = measured_on(load_model(saved, device="cpu"), max_new_tokens=NEW_TOKENS, num_beams=1)
    assert found.same_series(LearnedMemory.read(trained("llama")).measured_on) == []
    for changes in ({"num_attention_heads": 8}, {"intermediate_size": 49}, {"use_cache": False}):
        other = measured_on(model_of("llama", **changes), max_new_tokens=NEW_TOKENS, num_beams=1)
        assert other.fingerprint != found.fingerprint


def test_a_memory_model_of_another_model_or_of_fewer_new_tokens_is_refused_by_generate(
    trained: Callable[[str], Path],
) -> None:
    texts = texts_of([9, 5, 3])
    loader = build_dynamic_batch_dataloader(texts, tokenizer("llama"), 2, 64, num_workers=0, memory_model=trained("t5"))
    with pytest.raises(ConfigError, match=r"model llama, .* \(measured: t5"):
        generate(model_of("llama"), loader, max_new_tokens=2)
    loader = build_dynamic_batch_dataloader(
        texts, tokenizer("llama"), 2, 64, num_workers=0, memory_model=trained("llama")
    )
    with pytest.raises(ConfigError, match="max_new_tokens 9"):
        generate(model_of("llama"), loader, max_new_tokens=9)
    with pytest.raises(ConfigError, match="num_beams 2"):
        generate(model_of("llama"), loader, max_new_tokens=2, num_beams=2)
    outputs = generate(model_of("llama"), loader, max_new_tokens=2, do_sample=False)
    assert list(map(len, outputs)) == [2, 2, 2]


def few(model: Path, out: Path, *more: str) -> list[str]:
    return ["collect-memory", "--model", str(model), *SETTINGS, "--batches", "12", "--out", str(out), *more]


def test_an_interrupted_series_keeps_what_it_measured_and_goes_on_to_the_same_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(collect_memory_command.WorkProgress):
        count = 0

        def advance(self, amount: int = 1) -> None:
            self.count += 1
            if self.count == 5:
                raise KeyboardInterrupt

    out, whole = folder / "stopped.jsonl", folder / "whole.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(collect_memory_command, "WorkProgress", Stopped)
        assert cli.main(few(folder / "llama" / "config.json", out)) == 130
    assert "5 batches of 12 are in" in capsys.readouterr().out
    assert len(read_records(out).records) == 5
    assert cli.main(few(folder / "llama" / "config.json", out)) == 0
    assert "12 batches of 12 are in" in capsys.readouterr().out
    assert cli.main(few(folder / "llama", whole)) == 0
    assert [one.shape for one in read_records(out).records] == [one.shape for one in read_records(whole).records]
    assert cli.main(few(folder / "llama", out, "--generate", "2")) == 2
    assert "max_new_tokens 3, not max_new_tokens 2: choose another file" in capsys.readouterr().err
    assert len(read_records(out).records) == 12


def test_a_peak_above_the_limit_is_a_record_out_of_memory_and_nothing_larger_is_tried(folder: Path) -> None:
    out = folder / "limited.jsonl"
    assert cli.main(few(folder / "llama", out, "--memory-limit-gb", "0.0001", "--shapes", "random")) == 0
    found = read_records(out).records
    lost = [one for one in found if one.peak_bytes is None]
    assert lost
    assert len(lost) < len(found)
    assert {one.limit_bytes for one in lost} == {100_000}
    assert all(one.peak_bytes is None or one.peak_bytes <= 100_000 for one in found)
    for place, one in enumerate(found):
        earlier = [other for other in found[:place] if other.peak_bytes is None]
        assert not any(one.rows >= other.rows and one.longest >= other.longest for other in earlier)


def test_a_real_lack_of_memory_is_a_record_and_any_other_error_is_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaForCausalLM

    real = LlamaForCausalLM.generate

    def small_device(self: Any, *, input_ids: torch.Tensor, **settings: Any) -> Any:
        if input_ids.numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return real(self, input_ids=input_ids, **settings)

    monkeypatch.setattr(LlamaForCausalLM, "generate", small_device)
    out = folder / "small.jsonl"
    assert cli.main(few(folder / "llama", out)) == 0
    found = read_records(out).records
    assert {one.rows * one.longest > 100 for one in found if one.peak_bytes is None} == {True}
    assert {one.rows * one.longest > 100 for one in found if one.peak_bytes is not None} == {False}
    assert all((one.limit_bytes or 0) > 0 for one in found if one.peak_bytes is None)

    def broken(self: Any, **settings: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(LlamaForCausalLM, "generate", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        cli.main(few(folder / "llama", folder / "broken.jsonl"))


def test_one_forward_pass_is_measured_without_new_tokens(folder: Path) -> None:
    out = folder / "forward.jsonl"
    assert cli.main(few(folder / "llama", out, "--generate", "0")) == 0
    found = read_records(out)
    assert found.measured_on.max_new_tokens == 0
    logits = 4 * (WORDS + 2)
    assert all((one.peak_bytes or 0) >= one.rows * one.longest * logits for one in found.records)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--model", "."), ". is no folder with a config.json"),
        (("--generate", "-1"), "-1 new tokens cannot be made"),
        (("--generate", "100"), "prompts of 64 tokens and 100 new ones are more than the "),
        (("--max-tokens", "63"), "max_tokens is 63, less than one text of max_length 64"),
        (("--batches", "0"), "num_batches is 0"),
        (("--memory-limit-gb", "0"), "--memory-limit-gb is 0 but"),
        (("--beams", "0"), "--beams is 0"),
        (("--seed", "-1"), "--seed is -1"),
    ],
)
def test_settings_that_cannot_work_end_with_one_line(
    changes: tuple[str, ...], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "never.jsonl"
    assert cli.main(few(folder / "llama", out, *changes)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_too_few_records_and_wrong_files_end_with_one_line_and_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, out = folder / "few.jsonl", folder / "few.model.json"
    assert cli.main(few(folder / "llama", records, "--batches", "3")) == 0
    capsys.readouterr()
    assert cli.main(["train-memory-model", str(records), "--out", str(out)]) == 2
    assert "3 batches that fitted are too few: 50 are needed, so collect 47 more" in capsys.readouterr().err
    assert cli.main(["train-memory-model", str(folder / "llama" / "config.json"), "--out", str(out)]) == 2
    assert not out.exists()
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text('{"model_type": "no-such-model"}')
    assert cli.main(few(folder / "bad", folder / "never.jsonl")) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    (folder / "code").mkdir()
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "code" / "config.json").write_text(json.dumps(code))
    (folder / "code" / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nraise SystemExit(0)\n")
    assert cli.main(few(folder / "code", folder / "never.jsonl")) == 2
    assert not (folder / "ran").exists()  # no code that comes with a model is run


def test_a_pickled_checkpoint_is_not_read(folder: Path) -> None:
    import pickle

    place = folder / "pickled"
    config_of("llama").save_pretrained(place)
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(object()))
    assert load_model(place, device="cpu").config.model_type == "llama"  # weights at random
    (place / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_model(place, device="cpu")


def test_measured_peaks_make_the_batches_of_counted_bytes_follow_the_threshold() -> None:
    sizes: dict[float, list[int]] = {}
    for factor in (1.0, 2.0):

        def measured(call: Any, factor: float = factor) -> tuple[Any, int]:
            """Short texts take `factor` times the bytes that the first batch lets expect."""
            rows, longest = call.args[0]["input_ids"].shape
            return call(), int(rows * (1e6 + 1e5 * longest) * (factor if longest < 20 else 1.0))

        texts = texts_of([60, 59, 58, 57, *[10] * 120])
        memory = GenerationMemory(1_000_000, 1)
        loader = build_dynamic_batch_dataloader(texts, tokenizer("llama"), 4, 64, num_workers=0, memory=memory)
        options = {"eos_token_id": WORDS + 5, "do_sample": False, "measure": measured}
        batches = list(generate_batches(model_of("llama"), loader, max_new_tokens=1, **options))
        sizes[factor] = [len(batch.indices) for batch in batches]
        assert sum(sizes[factor]) == len(texts)
    room = int(0.9 * 4 * (1e6 + 60e5) // (1e6 + 10e5))
    assert sizes[1.0][:3] == [4, room, room]
    assert sizes[2.0][:3] == [4, room, room // 2]  # the second batch has shown it
