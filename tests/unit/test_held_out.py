"""What a run holds out for evaluation: a part of its data, or data of their own by the same tokenizer."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.data.dataset import TokenDataset, prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.sample_selection import describe_samples, format_ranges, hold_out
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.launch.job.run_data import check_data, run_data
from dynapipe_ext.settings.train_config import TrainConfig


def prepared(folder: Path, tokenizer: str = "bytes", seed: int = 0) -> TokenDataset:
    return prepare(
        lambda: generate_examples(num_samples=40, seed=seed, families=["copy", "sort"]),
        folder,
        tokenizer="bpe" if tokenizer == "bpe" else "bytes",
        vocab_size=300,
        max_seq_len=512,
        truncate=True,
    )


def test_each_sample_is_trained_or_held_out_as_the_seed_draws_and_reads_as_in_the_whole(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "tokens")
    train, held = hold_out(whole, 0.25, seed=1)
    assert (len(train), len(held)) == (30, 10)
    assert sorted([*train.indices, *held.indices]) == list(range(40))
    assert hold_out(whole, 0.25, seed=1)[1].indices.tolist() == held.indices.tolist()
    assert hold_out(whole, 0.25, seed=2)[1].indices.tolist() != held.indices.tolist()
    for part in (train, held):
        for index, number in enumerate(part.indices):
            sample, same = part[index], whole[int(number)]
            assert (sample.index, sample.tokens.tolist(), sample.first_target) == (
                index,
                same.tokens.tolist(),
                same.first_target,
            )
            assert part.lengths[index].tolist() == [sample.positions, 0, sample.target]
    with pytest.raises(IndexError, match="sample 10 is outside of the 10"):
        held[10]


@pytest.mark.parametrize("weights", [("", ""), ("=0.8", "=0.2")])
def test_a_loss_that_is_not_finite_names_all_samples_as_records_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[str, str]
) -> None:
    """With a part held out and, with weights, records of one file several times an epoch."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 12), ("b", 30)):
        Path(f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(count)))
    files = {"mixture": tuple(f"{name}.jsonl{weight}" for name, weight in zip("ab", weights, strict=True))}
    data = run_data(TrainConfig().with_values(data=files | {"tokenizer": "bytes"}, eval={"every": 1, "fraction": 0.2}))
    texts = [data.whole.tokenizer().decode(data.train[i].tokens) for i in range(len(data.train))]
    chosen = [
        i for i, text in enumerate(texts) if text in ("a 7", "b 3", "b 4", "b 5", "b 29", *map("a {}".format, range(4)))
    ]
    place = next(i for i, text in enumerate(texts) if text == texts[chosen[-1]])

    def check(lengths: object, *, forwards_alone: bool) -> None:
        raise PlanError(f"sample {place} with 3 tokens cannot be priced: cut it")

    with pytest.raises(PlanError, match=rf"^sample {texts[place][2:]} of file 2 with 3 tokens cannot be priced"):
        check_data(data, check)
    plan: Any = SimpleNamespace(
        dp_rank=1, micro_batches=[SimpleNamespace(samples=[SampleLength(i, 1) for i in reversed(chosen)])]
    )
    names = partial(describe_samples, data.whole, data.train.indices, ["a.jsonl", "b.jsonl"])
    (fault,) = ExecutedStep(plan, math.nan, {0: math.nan}, names).loss_faults()
    records: dict[str, list[int]] = {"a": [], "b": []}
    for text in {texts[i] for i in chosen}:
        records[text[0]].append(int(text[2:]))
    shown = "; ".join(f"{format_ranges(own)} of {name}.jsonl" for name, own in records.items())
    assert fault == f"the loss of micro-batch 0 of replica 1 (samples {shown}) is nan"
    assert len(chosen) > 5


@pytest.mark.parametrize(("fraction", "held"), [(0.01, 0), (0.99, 40)])
def test_a_part_that_leaves_one_side_empty_is_refused(tmp_path: Path, fraction: float, held: int) -> None:
    with pytest.raises(ConfigError, match=f"of 40 samples holds out {held}, but must leave at least one"):
        hold_out(prepared(tmp_path / "tokens"), fraction, seed=0)


def test_held_out_text_is_tokenized_once_with_the_trained_tokenizer_and_other_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held.jsonl").write_text('{"input": "sort 3 1 2", "target": "1 2 3"}\n')
    config = TrainConfig().with_values(
        data={"num_samples": 50, "vocab_size": 300, "truncate": True}, eval={"every": 1, "path": "held.jsonl"}
    )
    data = run_data(config)
    whole = data.whole
    assert data.train is whole
    assert isinstance(data.held_out, TokenDataset)
    assert data.held_out.tokenizer().as_json() == whole.tokenizer().as_json()
    end = [whole.tokenizer().eos]
    assert whole.tokenizer().decode(data.held_out[0].tokens[data.held_out[0].first_target :]) == "1 2 3"
    assert data.held_out[0].tokens[-1:].tolist() == end == whole[0].tokens[-1:].tolist()
    again = run_data(config).held_out
    assert isinstance(again, TokenDataset)
    assert again.directory == data.held_out.directory
    for name, tokenizer in (("other", "bytes"), ("another", "bpe")):
        prepared(tmp_path / name, tokenizer, seed=9)
        with pytest.raises(DataError, match=f"{name} was prepared with another tokenizer than"):
            run_data(config.with_values(eval={"path": name}))

    def check(lengths: object, *, forwards_alone: bool) -> None:
        assert forwards_alone is (lengths is not whole.lengths)
        if lengths is not whole.lengths:
            raise DataError("sample 0 is too long: cut it")

    with pytest.raises(DataError, match=r"\[eval\] of the held-out data, sample 0 is too long: cut it"):
        check_data(data, check)
