import itertools
import json
import subprocess
import sys

import pytest

from dynapipe_ext.data import tokenizer as tokenizer_module
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json
from dynapipe_ext.data.tokenizer import BytesTokenizer, train_tokenizer
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.limits import LIMIT_S

HARD = [
    "",
    " ",
    "\n\n  \t x",
    "naïve façade 🙂👩‍👩‍👧 漢字 \u0000\u001f\u2028\ufeff",
    "<|endoftext|> [SEP] </s> Ġword Ċ",
    "don't I'll we've\r\n\r\nend ",
    "e\u0301 \u00e9",
]


def texts():
    return [t for e in generate_examples(num_samples=400, seed=0) for t in (e.input, e.target)]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(texts(), 400)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return BytesTokenizer() if request.param == "bytes" else bpe


def test_decoding_gives_every_text_back(tokenizer):
    assert [tokenizer.decode(t) for t in tokenizer.encode(HARD)] == HARD


def test_special_ids_are_the_last_two_and_no_text_makes_them(tokenizer):
    assert {tokenizer.eos, tokenizer.separator} == {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1}
    used = set(itertools.chain(*tokenizer.encode([*HARD, *texts()])))
    assert max(used) < tokenizer.vocab_size - 2
    assert tokenizer.decode([104, tokenizer.separator, tokenizer.eos]) == tokenizer.decode([104])


def test_no_token_is_longer_than_max_token_bytes(tokenizer):
    for text, tokens in zip(texts(), tokenizer.encode(texts()), strict=True):
        assert len(tokens) * tokenizer.max_token_bytes >= len(text.encode())


def test_its_json_keeps_the_tokens(tokenizer):
    loaded = encoder_from_json(tokenizer.as_json())
    assert (loaded.kind, loaded.vocab_size, loaded.eos, loaded.separator) == (
        (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos, tokenizer.separator)
    )
    assert loaded.encode(HARD + texts()) == tokenizer.encode(HARD + texts())
    assert loaded.as_json() == tokenizer.as_json()


def test_bpe_is_shorter_than_bytes_and_no_larger_than_asked_for(bpe):
    assert bpe.vocab_size == 400
    assert sum(map(len, bpe.encode(texts()))) < 0.5 * sum(map(len, BytesTokenizer().encode(texts())))
    assert train_tokenizer(["ab"], 5000).vocab_size == tokenizer_module.MIN_BPE_VOCABULARY


def test_training_is_the_same_in_another_process_with_one_thread(bpe):
    program = (
        "from dynapipe_ext.data.examples import generate_examples as g\n"
        "from dynapipe_ext.data.tokenizer import train_tokenizer\n"
        "t = [t for e in g(num_samples=400, seed=0) for t in (e.input, e.target)]\n"
        "print(train_tokenizer(t, 400).as_json())\n"
    )
    environment = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "17", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert json.loads(result.stdout) == json.loads(bpe.as_json())


def test_training_reads_a_bounded_number_of_bytes_from_all_of_the_data():
    kept = tokenizer_module._spread((f"{i:010}" for i in range(100_000)), 5_000)
    numbers = list(map(int, kept))
    assert sum(map(len, kept)) <= 5_000
    assert len(kept) >= 200
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    assert len(steps) == 1
    assert numbers[0] == 0
    assert 100_000 - numbers[-1] <= steps.pop()


def test_one_long_text_does_not_fill_the_training_data():
    kept = tokenizer_module._spread(["x" * 10_000_000, "y"], 1 << 20)
    assert [t[0] for t in kept] == ["x", "y"]


def test_a_vocabulary_below_the_bytes_or_beyond_all_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 257 but byte-level BPE needs at least 258"):
        train_tokenizer(["a"], 257)
    with pytest.raises(ConfigError, match="vocab_size is 99999999999 but must be at most 16,777,216: lower it"):
        train_tokenizer(["a"], 99999999999)


def test_half_of_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(DataError, match="text 1 holds half of a surrogate pair at character 2"):
        tokenizer.encode(["fine", "ab\ud83d"])


def test_ids_outside_of_the_vocabulary_are_refused(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"token {token} is outside of the vocabulary"):
            tokenizer.decode([token])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "dynapipe-tokenizer/1", "kind": "sentencepiece"}', '{"format": "other/1"}']
)
def test_json_that_is_no_tokenizer_is_refused(content):
    with pytest.raises(DataError):
        encoder_from_json(content)
