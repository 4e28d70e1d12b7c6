import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.data.examples import Example, generate_examples
from dynapipe_ext.data.length_bounds import LengthBounds, Truncation
from dynapipe_ext.data.tokenizer import BytesTokenizer, train_tokenizer

KINDS = pytest.mark.parametrize("kind", ["bytes", "bpe"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Pieces around which a careless cut would change the tokens.
PIECES = [
    " ",
    "  ",
    "\n",
    " \n",
    "\t",
    "\r\n",
    "the",
    "anna",
    "sun ",
    "'s",
    "'",
    "9",
    "42",
    ".",
    "é",
    "e\u0301",
    "\x1c",
]
PIECES += ["\u00a0", "\u2028", "漢字", "🙂", "-----", "x" * 30]
WORDS = [" sun", " moon", " anna", " the", "\n\n\n", "   ", " \n\n"]
LONG = st.one_of(
    st.lists(st.sampled_from(PIECES + WORDS), max_size=120),
    st.lists(st.sampled_from(WORDS), min_size=30, max_size=120),
    # One piece, merged from its left: where it begins decides the tokens at its end.
    st.builds(lambda character, count: [character] * count, st.sampled_from("x\n -"), st.integers(0, 1500)),
).map("".join)


@functools.cache
def tokenizer_of(kind):
    if kind == "bytes":
        return BytesTokenizer()
    texts = [t for e in generate_examples(num_samples=100, seed=0) for t in (e.input, e.target)]
    draw = random.Random(0)  # with runs of white space and marks among them, so that these have tokens of their own
    texts += ["".join(draw.choices(PIECES + WORDS, k=20)) for _ in range(500)]
    return train_tokenizer(texts, 500)


@KINDS
@given(text=TEXT)
def test_decode_of_encode_is_the_text(kind, text):
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode([text])[0]
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size - 2 for token in tokens)
    assert len(tokens) * tokenizer.max_token_bytes >= len(text)


@KINDS
@given(texts=st.lists(TEXT, max_size=5))
def test_a_text_has_the_same_tokens_alone_and_in_a_batch(kind, texts):
    tokenizer = tokenizer_of(kind)
    assert tokenizer.encode(texts) == [tokenizer.encode([text])[0] for text in texts]


@KINDS
@given(prompt=LONG, target=LONG, max_seq_len=st.integers(1, 12))
def test_cutting_text_before_encoding_gives_the_tokens_of_cutting_after(kind, prompt, target, max_seq_len):
    if prompt or target:
        check_against_cutting_tokens(tokenizer_of(kind), prompt, target, max_seq_len)


@KINDS
@pytest.mark.parametrize("character", "x\n -")
def test_a_run_of_one_character_has_the_tokens_of_the_whole_run(kind, character):
    for count in range(1000, 1040):
        check_against_cutting_tokens(tokenizer_of(kind), character * count, "sun", 12)
        check_against_cutting_tokens(tokenizer_of(kind), "", character * count, 12)


def check_against_cutting_tokens(tokenizer, prompt, target, max_seq_len):
    (got,) = Truncation(tokenizer, LengthBounds(max_seq_len, True)).encode(
        [Example("t", prompt, target)], first_index=0
    )

    prompt_tokens, target_tokens = tokenizer.encode([prompt, target])
    whole = [*prompt_tokens, tokenizer.separator, *target_tokens, tokenizer.eos]
    excess = max(0, len(whole) - 1 - max_seq_len)
    from_input = min(excess, len(prompt_tokens))
    assert got.tokens == whole[from_input:][: max_seq_len + 1]
    assert got.first_target == len(prompt_tokens) - from_input + 1
    assert got.truncated == (excess > 0)
    assert 1 <= got.first_target < len(got.tokens)
