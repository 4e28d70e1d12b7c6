"""`dynapipe preprocess` and a run that reads text itself make the same tokens, and a run refuses others."""

import shutil

import numpy as np
import pytest

pytest.importorskip("transformers")

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.preprocessing.workers import InlineWorkers
from dynapipe_ext.errors import DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.commands import preprocess as preprocess_command
from dynapipe_ext.launch.job.run_data import run_data
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.model_folders import write_chats, write_lines, write_model_tokenizer, write_pairs, write_texts

BEGIN = 0  # <s>, which the tokenizer puts before a text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder, as far as tokens depend on it."""
    made = tmp_path_factory.mktemp("model")
    write_model_tokenizer(made)
    (made / "config.json").write_text('{"model_type": "llama"}')
    return made


@pytest.fixture
def here(monkeypatch):
    """Text is encoded in this process, which has imported what that takes."""
    monkeypatch.setattr(
        preprocess_command, "ProcessWorkers", lambda settings, encoder, *_: InlineWorkers(settings, encoder)
    )


def preprocessed(tmp_path, *arguments, name="prepared"):
    assert cli.main(["preprocess", "--workers", "1", "--output", str(tmp_path / name), *map(str, arguments)]) == 0
    return tmp_path / name


def trained_on(tmp_path, path, tokenizer, **data):
    """The data of a run on a file, or on a folder that was prepared."""
    settings = {
        "data": {"path": str(path), "tokenizer": str(tokenizer)} | data,
        "run": {"run_dir": str(tmp_path / "r" / "a")},
    }
    return run_data(TrainConfig().with_values(**settings)).whole


def named_fields(path, count):
    return write_lines(path, [{"q": f"how are {place} you", "a": "fine", "text": "?"} for place in range(count)])


@pytest.mark.parametrize(
    ("written", "flags", "data", "begins"),
    [
        (write_chats, (), {}, False),
        (write_chats, ("--template", "chat"), {"template": "chat"}, False),
        (write_pairs, (), {}, True),
        (write_texts, (), {}, True),
        (named_fields, ("--fields", "q", "a"), {"fields": ["q", "a"]}, True),
        (named_fields, ("--template", "text", "--fields", "q"), {"template": "text", "fields": ["q"]}, True),
        (named_fields, ("--json-keys", "a"), {"template": "text", "fields": ["a"]}, True),
    ],
)
def test_text_prepared_by_a_models_folder_is_what_a_run_makes_of_it(
    tmp_path, folder, here, written, flags, data, begins
):
    path = written(tmp_path / "d.jsonl", 30)
    raw = trained_on(tmp_path, path, folder, **data)
    prepared = trained_on(
        tmp_path, preprocessed(tmp_path, "--input", path, "--tokenizer", folder, *flags), folder, **data
    )
    np.testing.assert_array_equal(prepared.tokens, raw.tokens)
    np.testing.assert_array_equal(prepared.lengths, raw.lengths)
    assert (prepared.targets is None) == (written is not write_chats)
    assert prepared.fingerprint == raw.fingerprint  # targets and tasks, too
    assert all(prepared[place].tokens[0] == BEGIN for place in range(30)) == begins


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer.json"])
def test_pairs_by_another_tokenizer_are_what_a_run_makes_of_them(tmp_path, folder, here, tokenizer):
    tokenizer = folder / tokenizer if tokenizer != "bytes" else tokenizer
    path = write_pairs(tmp_path / "d.jsonl", 9)
    raw = trained_on(tmp_path, path, tokenizer)
    prepared = trained_on(tmp_path, preprocessed(tmp_path, "--input", path, "--tokenizer", tokenizer), tokenizer)
    assert prepared.fingerprint == raw.fingerprint
    assert prepared.template is None


def test_an_encoder_decoders_folder_ends_inputs_as_a_run_does(tmp_path, folder, here):
    t5 = shutil.copytree(folder, tmp_path / "t5")
    (t5 / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    path = write_pairs(tmp_path / "d.jsonl", 9)
    config = TrainConfig().with_values(
        model={"num_decoder_layers": 4},
        data={"path": str(path), "tokenizer": str(t5)},
        run={"run_dir": str(tmp_path / "r" / "a")},
    )
    prepared = preprocessed(tmp_path, "--input", path, "--tokenizer", t5)
    assert TokenDataset.open(prepared).fingerprint == run_data(config).whole.fingerprint
    assert len(run_data(config.with_values(data={"path": str(prepared)})).whole) == 9


def test_a_run_refuses_tokens_of_another_tokenizer_or_template_and_takes_those_of_a_copy(tmp_path, folder, here):
    path, other = write_pairs(tmp_path / "d.jsonl", 9), tmp_path / "other"
    write_model_tokenizer(other, starts=False)
    for name, flags in {
        "a": (other,),
        "b": (folder, "--special-tokens", "text"),
        "c": (folder / "tokenizer.json",),
    }.items():
        prepared = preprocessed(tmp_path, "--input", path, "--tokenizer", *flags, name=name)
        with pytest.raises(DataError, match=f"{prepared} was prepared by another tokenizer than {folder}"):
            trained_on(tmp_path, prepared, folder)
    prepared = preprocessed(tmp_path, "--input", path, "--tokenizer", folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text('{"model_type": "llama", "vocab_size": 320}')
    assert len(trained_on(tmp_path, prepared, copy)) == 9
    with pytest.raises(DataError, match=r"by the template prompt and \[data\] template is chat"):
        trained_on(tmp_path, prepared, folder, template="chat")


@pytest.mark.parametrize("tokenizer", ["bytes", "folder"])
def test_a_run_refuses_tokens_of_other_fields_than_it_names(tmp_path, folder, here, tokenizer):
    path, tokenizer = named_fields(tmp_path / "d.jsonl", 9), folder if tokenizer == "folder" else tokenizer
    for name, own, others in (("pairs", ["q", "a"], (["text"], ["q", "text"])), ("texts", ["q"], (["a"], ["q", "a"]))):
        prepared = preprocessed(tmp_path, "--input", path, "--tokenizer", tokenizer, "--fields", *own, name=name)
        assert len(trained_on(tmp_path, prepared, tokenizer, fields=own)) == 9
        for other in others:
            with pytest.raises(DataError, match=r"was made of the fields? 'q'.* and \[data\] names"):
                trained_on(tmp_path, prepared, tokenizer, fields=other)


def test_empty_records_are_left_out_or_refused(tmp_path, folder, here, capsys):
    path = write_lines(tmp_path / "d.jsonl", [{"text": "hello"}, {"text": ""}, {"text": "two"}])
    given = ("--input", path, "--tokenizer", folder)
    assert cli.main(["preprocess", *map(str, given), "--output", str(tmp_path / "out")]) == 2
    assert "d.jsonl, line 2: the record is empty (nothing to train on)" in capsys.readouterr().err
    assert len(TokenDataset.open(preprocessed(tmp_path, *given, "--skip-empty"))) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tokenizer", "bytes", "--template", "text"), "--template text is how a decoder-only model's own tokenizer"),
        (("--tokenizer", "bytes", "--fields", "q", "a", "b"), "name prompt and response, or only a text"),
        (("--tokenizer", "bytes", "--json-keys", "q", "--fields", "a"), "--json-keys reads plain text, whatever"),
        (("--tokenizer", "bytes", "--output-prefix", "x", "--template", "text"), "--template is for samples"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    output = () if "--output-prefix" in flags else ("--output", "out")
    assert cli.main(["preprocess", "--input", str(named_fields(tmp_path / "d.jsonl", 2)), *output, *flags]) == 2
    assert says in capsys.readouterr().err
