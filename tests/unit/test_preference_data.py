"""What records of preferences become: two documents a sample, with TRL's tokens and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from dynapipe_ext.batch.micro_batches import MicroBatch, get_document_lengths, sample_lengths
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import DataError, DynaPipeError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.run_data import run_data, shown_forms
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.samples import sample_text
from tests.support.model_folders import write_lines, write_model_tokenizer

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (
    ("user", "how are you"), ("assistant", "I am fine"), ("assistant", "two and three is five")
))  # fmt: skip
CHAT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TEXT = {"prompt": "how are you ", "chosen": "I am fine", "rejected": "two and three is five"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_model_tokenizer(folder)
    return folder


def config_of(tokenizer: Path, records: Sequence[Mapping[str, Any]], folder: Path, **tables: Any) -> TrainConfig:
    path = write_lines(folder / "data.jsonl", records)
    tables = {"preferences": {"loss": "dpo"}, "model": {"max_seq_len": 128}} | tables
    data = {"path": str(path), "tokenizer": str(tokenizer)} | tables.pop("data", {})
    return TrainConfig.from_json({"data": data, "run": {"run_dir": str(folder / "run")}, **tables})


def prepared(*given: Any, **tables: Any) -> TokenDataset:
    return run_data(config_of(*given, **tables)).whole


def trl_documents(tokenizer: Any, record: Mapping[str, Any]) -> list[tuple[list[int], int]]:
    """(tokens, how many are the prompt's) of both answers, as DPOTrainer of TRL 1.16 makes them."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt_ids = tokenizer(prompt)["input_ids"]
        both = [tokenizer(prompt + record[name] + tokenizer.eos_token)["input_ids"] for name in ("chosen", "rejected")]
    else:
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        both = [tokenizer.apply_chat_template(prompt + record[name])["input_ids"] for name in ("chosen", "rejected")]
    alike = [next((i for i, (a, b) in enumerate(zip(prompt_ids, ids)) if a != b), len(prompt_ids)) for ids in both]  # noqa: B905
    return [(ids, min(alike)) for ids in both]


# Each is written otherwise, and means the record beside it.
FORMS = [
    (TEXT, TEXT),
    ({"chosen": "how are you I am", "rejected": "how are you you"},
     {"prompt": "how are you", "chosen": " I am", "rejected": " you"}),
    (CHAT, CHAT),
    ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT),
    ({"prompt": "how are you", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT),
    ({"prompt": "how are you", "chosen": [GOOD], "rejected": [BAD]}, CHAT),
    ({"conversations": [{"from": "human", "value": "how are you"}],
      "chosen": {"from": "gpt", "value": "I am fine"}, "rejected": {"from": "gpt", "value": "two and three is five"}},
     CHAT),
    ({"question": "how are you", "chosen": "I am fine", "rejected": "two and three is five"}, CHAT),
    ({"question": "how are you", "chosen": [GOOD], "rejected": [BAD]}, CHAT),
    ({"system": "be", "question": "how are you", "chosen": "I am fine", "rejected": "two and three is five"},
     CHAT | {"prompt": [{"role": "system", "content": "be"}, USER]}),
    ({"system": "be", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
     CHAT | {"prompt": [{"role": "system", "content": "be"}, USER]}),
    ({"instruction": "how are you", "input": "", "chosen": "I am fine", "rejected": "two and three is five"}, CHAT),
]  # fmt: skip


@pytest.mark.parametrize(("record", "meant"), FORMS)
def test_both_documents_and_their_targets_are_trls(record, meant, tokenizer: Path, tmp_path: Path):
    sample = prepared(tokenizer, [record, record], tmp_path)[1]
    known = transformers.AutoTokenizer.from_pretrained(tokenizer)
    parts = slice(sample.num_first), slice(sample.num_first, None)
    for part, (tokens, num_prompt) in zip(parts, trl_documents(known, meant), strict=True):
        assert sample.tokens[part].tolist() == tokens
        assert sample.is_target[part].tolist() == [place >= num_prompt for place in range(len(tokens))]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rows_have_both_documents_each_with_its_own_labels_positions_and_references(
    layout, tokenizer: Path, tmp_path: Path
):
    from dynapipe_ext.data.references import ReferencedPairs

    data = prepared(tokenizer, [CHAT, {"prompt": [USER], "chosen": [BAD], "rejected": [GOOD]}], tmp_path)
    documents = get_document_lengths(data.lengths)
    assert documents.tolist() == [documents[1, ::-1].tolist(), documents[0, ::-1].tolist()]
    pairs = ReferencedPairs(data, np.array([[-1.0, -2.0], [-3.0, -4.0]]))
    row = MicroBatch(tuple(sample_lengths(data.lengths)), layout, pad_multiple=8)
    batch = collate(row, [pairs[0], pairs[1]], loss_norm="samples")
    lengths = batch["document_lengths"]
    flat = {name: np.split(batch[name].reshape(-1), np.cumsum(lengths)[:-1]) for name in ("tokens", "labels")}
    flat |= {
        name: np.split(batch[name].reshape(-1), np.cumsum(lengths)[:-1]) for name in ("loss_weights", "position_ids")
    }
    for number, length in enumerate(documents.reshape(-1).tolist()):
        sample = data[number // 2]
        part = slice(sample.num_first) if number % 2 == 0 else slice(sample.num_first, None)
        tokens, targets = sample.tokens[part], sample.is_target[part]
        assert flat["tokens"][number][:length].tolist() == tokens[:-1].tolist()
        assert flat["labels"][number][:length].tolist() == tokens[1:].tolist()
        assert flat["loss_weights"][number][:length].tolist() == targets[1:].astype(float).tolist()
        assert flat["position_ids"][number][:length].tolist() == list(range(length))
    assert float(batch["loss_weights"].sum()) == data.lengths[:, 2].sum()
    assert batch["references"].tolist() == [[-1, -2], [-3, -4]]
    assert batch["pairs"].tolist() == [0, 1]


def test_each_document_is_bounded_alone_and_cut_at_its_end_where_that_is_asked_for(tokenizer: Path, tmp_path: Path):
    whole = prepared(tokenizer, [TEXT], tmp_path)
    longest = int(get_document_lengths(whole.lengths).max())
    assert prepared(tokenizer, [TEXT], tmp_path, model={"max_seq_len": longest}).num_truncated == 0
    shorter = {"model": {"max_seq_len": longest - 2}}
    with pytest.raises(DataError, match=f"line 1, rejected: the sample has {longest} tokens but max_seq_len"):
        prepared(tokenizer, [TEXT], tmp_path, **shorter)
    cut = prepared(tokenizer, [TEXT], tmp_path, data={"truncate": True}, **shorter)
    assert cut.num_truncated == 1
    assert cut[0].tokens.tolist() == whole[0].tokens[:-2].tolist()


def test_shown_samples_have_a_line_an_answer_and_the_form_is_named(tokenizer: Path, tmp_path: Path):
    config = config_of(tokenizer, [TEXT], tmp_path)
    data = run_data(config).whole
    assert sample_text(data[0], data.tokenizer()).plain == (
        "chosen: <s>how are you⟦ I am fine</s>⟧\nrejected: <s>how are you⟦ two and three is five</s>⟧"
    )
    assert shown_forms(config)[0].endswith("jsonl, pairs of a chosen and a rejected answer")


def test_data_prepared_ahead_are_the_same_and_are_for_preferences_alone(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = prepared(tokenizer, [TEXT, CHAT], tmp_path)
    command = ["preprocess", "--input", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "ahead")]
    command += ["--tokenizer", str(tokenizer), "--template", "preference", "--workers", "1"]
    assert cli.main(command) == 0
    capsys.readouterr()
    data = {"path": str(tmp_path / "ahead"), "tokenizer": str(tokenizer)}
    ahead = run_data(TrainConfig.from_json({"data": data, "preferences": {"loss": "simpo"}})).whole
    assert ahead.samples_fingerprint == own.samples_fingerprint
    with pytest.raises(DataError, match="holds pairs of a chosen and a rejected answer"):
        run_data(TrainConfig.from_json({"data": data}))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "how", "chosen": "are"}, "lacks 'rejected'"),
        ({"chosen": "how", "rejected": "you"}, "do not begin alike, so there is no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "do not begin alike, so there is no prompt"),
        ({"prompt": "how", "chosen": "are", "rejected": [BAD]}, "one of 'chosen' and 'rejected' is a text"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "assistant"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": 5}, "message 2 must be an object"),
        ({"prompt": 5, "chosen": "a", "rejected": "b"}, "field 'prompt' is a number but must be a string"),
    ],
)
def test_records_without_two_answers_to_a_prompt_are_refused_by_name(record, says, tokenizer: Path, tmp_path: Path):
    with pytest.raises(DataError, match=says) as caught:
        prepared(tokenizer, [TEXT, record], tmp_path)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"preferences": {"loss": ""}, "data": {"template": "preference"}}, "says of no loss"),
        ({"data": {"template": "chat"}}, "template is 'chat' but .* takes only 'preference'"),
        ({"plan": {"loss_norm": "tokens"}}, "loss_norm is 'tokens' but .* takes only 'samples'"),
        ({"plan": {"pieces": "auto"}}, "pieces is 'auto' but a pair of answers stays whole"),
        ({"plan": {"split_policy": "fixed-rows"}}, "split_policy is 'fixed-rows' but it does not keep pairs"),
        (
            {"model": {"num_decoder_layers": 2, "position": "relative"}},
            "no pairs are made of an encoder-decoder's samples",
        ),
        ({"preferences": {"loss": "orpo", "label_smoothing": 0.1}}, "label_smoothing is 0.1, which only dpo has"),
        ({"preferences": {"loss": "dpo", "gamma": 5.0}}, "gamma is 5, which only simpo has: leave it out"),
        ({"preferences": {"beta": 0.5}}, "describes a loss but loss is '', which learns from texts: set it"),
        (
            {"model": {"dropout": 0.1}},
            r"\[model\] dropout is 0\.1 but scores that are compared would be drawn anew at each step: leave",
        ),
        ({"preferences": {"loss": "kto"}}, "loss is 'kto': choose from"),
        ({"data": {"tokenizer": "bytes"}}, "read by a decoder-only model's own tokenizer"),
        ({"data": {"max_input_len": 5}}, "pairs of answers, which have no input and target sides"),
    ],
)
def test_what_does_not_go_with_preferences_is_refused_by_name(tables, says, tokenizer: Path, tmp_path: Path):
    with pytest.raises(DynaPipeError, match=says):
        prepared(tokenizer, [TEXT], tmp_path, **tables)
