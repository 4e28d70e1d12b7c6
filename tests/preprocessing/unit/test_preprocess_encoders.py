import json

import pytest

from dynapipe_ext.data.preprocessing import encoders
from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json, gpt2_encoder, load_encoder
from dynapipe_ext.data.preprocessing.encoders import digest_of, lost_characters
from dynapipe_ext.data.tokenizer import BytesTokenizer, train_tokenizer
from dynapipe_ext.errors import ConfigError, DataError

library = pytest.importorskip("tokenizers")

TEXTS = ["hello world, hello there", " 12 apples\n\nand Größe 你好", "a <|endoftext|> b"]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE with END as id 0."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[END, "<s>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 9, trainer)
    return made


@pytest.fixture
def tokenizer_file(tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def plain(made, texts=TEXTS):
    return [encoded.ids for encoded in made.encode_batch(texts, add_special_tokens=False)]


def test_a_file_of_the_tokenizers_library_encodes_as_the_library_does(tokenizer_file, trained):
    encoder = load_encoder(tokenizer_file)
    assert encoder.encode(TEXTS) == plain(trained)
    assert encoder.eos == trained.token_to_id(END)  # the only end of text that it has
    assert encoder.separator is None
    assert encoder.vocab_size == trained.get_vocab_size()
    assert encoder.decode(encoder.encode(TEXTS[:1])[0]) == TEXTS[0]


def test_truncation_and_padding_that_a_file_asks_for_are_not_done(tmp_path, trained):
    made = library.Tokenizer.from_str(trained.to_str())
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "t.json"))
    assert load_encoder(tmp_path / "t.json").encode(TEXTS) == plain(trained)


def test_what_a_special_token_spelt_in_a_text_becomes_can_be_chosen(tokenizer_file, trained):
    end = trained.token_to_id(END)
    assert end in load_encoder(tokenizer_file, specials="parse").encode(TEXTS[2:])[0]
    as_text = load_encoder(tokenizer_file, specials="text")
    assert end not in as_text.encode(TEXTS[2:])[0]
    assert end not in encoder_from_json(as_text.as_json()).encode(TEXTS[2:])[0]


def test_tokens_can_be_named_and_a_wrong_name_lists_the_right_ones(tokenizer_file, trained):
    encoder = load_encoder(tokenizer_file, eos="<s>", separator=END)
    assert (encoder.eos, encoder.separator) == (trained.token_to_id("<s>"), trained.token_to_id(END))
    with pytest.raises(ConfigError, match=r"no token '</s>': .*'<\|endoftext\|>', '<s>'"):
        load_encoder(tokenizer_file, eos="</s>")


def test_the_end_of_text_comes_from_the_config_beside_a_file(tokenizer_file, trained):
    config = tokenizer_file.with_name("tokenizer_config.json")
    for eos in ("<s>", {"content": "<s>"}):
        config.write_text(json.dumps({"eos_token": eos}))
        assert load_encoder(tokenizer_file).eos == trained.token_to_id("<s>")


def test_what_a_template_puts_around_a_text_can_be_asked_for(tmp_path, trained):
    made = library.Tokenizer.from_str(trained.to_str())
    made.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "t.json"))
    assert load_encoder(tmp_path / "t.json").encode(["hello"]) == plain(trained, ["hello"])
    assert load_encoder(tmp_path / "t.json", add_special_tokens=True).encode(["hello"]) == [
        [1, *plain(trained, ["hello"])[0]]
    ]


def test_a_folder_of_transformers_encodes_as_transformers_does(tmp_path, trained):
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END)
    made.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.kind == "tokenizers"  # the same ids without transformers
    assert encoder.encode(TEXTS) == made(TEXTS, add_special_tokens=False)["input_ids"]
    assert encoder.eos == made.eos_token_id


def test_a_tokenizer_that_only_transformers_has_is_carried_with_its_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = transformers.ByT5Tokenizer()
    made.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.kind == "transformers"
    assert (encoder.eos, encoder.vocab_size) == (made.eos_token_id, len(made))
    for file in tmp_path.iterdir():
        file.unlink()
    again = encoder_from_json(encoder.as_json())
    assert again.encode(TEXTS) == made(TEXTS, add_special_tokens=False)["input_ids"]
    assert again.decode(again.encode(TEXTS[:1])[0]) == TEXTS[0]
    assert digest_of(again) == digest_of(encoder)


def test_a_carried_file_cannot_leave_its_folder(tmp_path):
    pytest.importorskip("transformers")
    record = {"format": encoders.FORMAT, "kind": "transformers", "files": {"../evil": ""}, "eos": 1}
    with pytest.raises(DataError, match="lies outside of its folder"):
        encoder_from_json(json.dumps(record))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match="holds no tokenizer that transformers can load"):
        load_encoder(tmp_path)


@pytest.fixture
def tiny_tiktoken(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258}
    made = tiktoken.Encoding("tiny", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={END: 259, "<|x|>": 260})
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["tiny"])
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": made}.__getitem__)
    return made


def test_an_encoding_of_tiktoken_is_found_by_name(tiny_tiktoken):
    encoder = load_encoder("tiny", separator="<|x|>")
    assert (encoder.eos, encoder.separator, encoder.vocab_size) == (259, 260, 261)
    assert encoder.encode(TEXTS[:2]) == [tiny_tiktoken.encode_ordinary(text) for text in TEXTS[:2]]
    assert encoder_from_json(encoder.as_json()).encode(["hello"]) == [[258, 111]]
    assert encoder.decode([258, 111, 259]) == "hello"


def test_tiktoken_refuses_a_special_token_in_a_text_until_it_is_said_what_it_is(tiny_tiktoken):
    with pytest.raises(DataError, match="--special-tokens text to take it as text, or parse"):
        load_encoder("tiny").encode(TEXTS)
    assert 259 in load_encoder("tiny", specials="parse").encode(TEXTS)[2]
    assert 259 not in load_encoder("tiny", specials="text").encode(TEXTS)[2]


def test_another_encoding_under_the_same_name_is_refused(tiny_tiktoken):
    record = json.loads(load_encoder("tiny").as_json()) | {"vocabulary": "0" * 64}
    with pytest.raises(DataError, match="is not the encoding that the data was made with"):
        encoder_from_json(json.dumps(record))


def test_gpt2s_two_files_encode_as_transformers_gpt2_does(tmp_path, trained):
    transformers = pytest.importorskip("transformers")
    model = json.loads(trained.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    encoder = gpt2_encoder(tmp_path / "vocab.json", tmp_path / "merges.txt")
    theirs = transformers.GPT2Tokenizer(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    assert encoder.encode(TEXTS[:2]) == theirs(TEXTS[:2], add_special_tokens=False)["input_ids"]
    assert encoder.eos == model["vocab"][END]
    assert encoder.eos not in encoder.encode(TEXTS[2:])[0]  # as Megatron's GPT2BPETokenizer has it
    parsing = gpt2_encoder(tmp_path / "vocab.json", tmp_path / "merges.txt", specials="parse")
    assert encoder.eos in parsing.encode(TEXTS[2:])[0]
    assert encoder_from_json(encoder.as_json()).encode(TEXTS) == encoder.encode(TEXTS)


def test_gpt2s_files_that_would_lose_text_or_do_not_match_are_refused(tmp_path, trained):
    model = json.loads(trained.to_str())["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\n")
    vocab.write_text(json.dumps({token: i for token, i in model["vocab"].items() if token != "a"}))
    with pytest.raises(DataError, match=r"lacks 1 of 256 bytes \('a' is the first\)"):
        gpt2_encoder(vocab, merges)
    merges.write_text("#version: 0.2\nqq zz\n")
    with pytest.raises(DataError, match="make no BPE"):
        gpt2_encoder(vocab, merges)
    with pytest.raises(DataError, match="cannot be read as a vocabulary"):
        gpt2_encoder(tmp_path / "none.json", merges)


def test_this_projects_own_tokenizers_load_by_name_file_and_folder(tmp_path):
    own = train_tokenizer(TEXTS, 300)
    (tmp_path / "tokenizer.json").write_text(own.as_json())
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        encoder = load_encoder(given)
        assert (encoder.kind, encoder.eos, encoder.separator) == ("bpe", own.eos, own.separator)
        assert encoder.encode(TEXTS) == own.encode(TEXTS)
    assert isinstance(load_encoder("bytes"), BytesTokenizer)
    with pytest.raises(ConfigError, match="has its own special tokens"):
        load_encoder("bytes", eos="x")


def test_what_is_no_tokenizer_is_refused_with_what_is(tmp_path):
    pytest.importorskip("tiktoken")
    (tmp_path / "t.json").write_text("{}")
    for given, kind, says in (
        (tmp_path / "t.json", DataError, "is no file of the tokenizers library"),
        (tmp_path / "none.json", DataError, "does not exist"),
        (
            "no_such_encoding",
            ConfigError,
            r"is no file, no folder and no encoding of tiktoken \(.*give a tokenizer.json",
        ),
    ):
        with pytest.raises(kind, match=says):
            load_encoder(given)
    with pytest.raises(DataError, match="unknown kind 'sentences'"):
        encoder_from_json(json.dumps({"format": encoders.FORMAT, "kind": "sentences"}))
    with pytest.raises(DataError, match="cannot be read"):
        encoder_from_json("{}")


def test_the_digest_changes_with_everything_that_ids_depend_on(tokenizer_file):
    made = [
        load_encoder(tokenizer_file),
        load_encoder(tokenizer_file, specials="text"),
        load_encoder(tokenizer_file, eos="<s>"),
        load_encoder(tokenizer_file, add_special_tokens=True),
        load_encoder("bytes"),
    ]
    assert len({digest_of(encoder) for encoder in made}) == len(made)
    assert digest_of(load_encoder(tokenizer_file)) == digest_of(made[0])


def test_a_tokenizer_that_drops_characters_unsaid_is_found_out(tmp_path, tokenizer_file):
    assert lost_characters(load_encoder(tokenizer_file)) == lost_characters(load_encoder("bytes")) == ""
    library.Tokenizer(library.models.BPE({"a": 0}, [])).save(str(tmp_path / "letters.json"))
    assert len(lost_characters(load_encoder(tmp_path / "letters.json"))) == 4
