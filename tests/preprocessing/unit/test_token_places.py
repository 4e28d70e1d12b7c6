"""Which tokens belong to an answer, and which follow a prompt, under tokenizers of every make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dynapipe_ext.data.length_bounds import LengthBounds, TaskBounds
from dynapipe_ext.data.preprocessing.encoders import LibraryEncoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings, encode_block
from dynapipe_ext.data.preprocessing.inputs import Block
from dynapipe_ext.data.preprocessing.record_forms import RecordFields, Template
from dynapipe_ext.data.preprocessing.rendering import Rendered, Renderer
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.errors import DataError

SPECIAL = ("</s>", "<|u|>", "<|a|>", "<|e|>")
PLAIN = (
    "{% for m in messages %}<|{{ 'a' if m.role == 'assistant' else 'u' }}|>{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}<|u|>{{ m.content }}{% endif %}{% endfor %}"
)


def byte_level(*, trims: bool = False) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=trims)
    return library


def words() -> Tokenizer:
    """Its pre-tokenizer leaves out white space."""
    library = Tokenizer(models.WordLevel({"[UNK]": 0, "Yes": 1, "No": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


def sentencepiece(scheme: str) -> Tokenizer:
    """As Llama 2 and others have it: each text, or each part between special tokens, gets a blank before it."""
    merges = [("▁", "F"), ("▁F", "r"), ("▁Fr", "a"), ("▁", "P"), ("▁P", "a")]
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzAFPYN:.,"]
    vocabulary = {token: number for number, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    if scheme == "prepend":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    return library


def encoder(library: Tokenizer, template: str | None = None) -> FolderEncoder:
    library.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>", chat_template=template)
    eos = tokenizer.eos_token_id
    return FolderEncoder(tokenizer, {}, eos=eos, separator=None, specials="parse", add_special_tokens=False)


def render(tokenizer: FolderEncoder, record: Mapping[str, Any], kind: Template) -> Rendered:
    sample = Renderer.of(kind, RecordFields(), tokenizer, LengthBounds(None, False, TaskBounds())).render(
        record, "", ""
    )
    assert sample is not None
    return sample


@pytest.mark.parametrize("end", ["🙂", "你", "é", "!", " ", "\n\n"])
@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("library", [byte_level(), byte_level(trims=True), words(), sentencepiece("prepend")])
def test_all_tokens_of_an_answer_carry_loss_to_its_last_byte_and_none_behind(
    library: Tokenizer, template: str, end: str
) -> None:
    tokenizer = encoder(library, template)
    messages = [{"role": role, "content": text} for role, text in (("user", "No"), ("assistant", f"Yes{end}")) * 2]
    sample = render(tokenizer, {"messages": messages}, "chat")
    pairs = list(zip(sample.tokens, sample.is_target, strict=True))
    ends = "<|e|>" if template == PLAIN else ""
    (answer,) = tokenizer.encode([f"<|a|>Yes{end}{ends}"])  # behind a special token, as in the chat
    (question,) = tokenizer.encode(["<|u|>No<|e|>" if ends else "<|u|>No"])
    turn = [*((token, False) for token in [*question, answer[0]]), *((token, True) for token in answer[1:])]
    assert pairs == turn * 2 or pairs == [*turn * 2, (tokenizer.eos, True)]


PAIRS = [
    ("A: ", "Pa"),
    ("a Fr", "an"),
    ("A:", " Pa"),
    ("A", "\n Pa"),
    ("F", "é"),
    ("a ", " a"),
    ("", "Pa"),
    ("a", "你"),
]


@pytest.mark.parametrize(("prompt", "answer"), PAIRS)
@pytest.mark.parametrize(
    "library", [byte_level(), *(sentencepiece(scheme) for scheme in ("prepend", "first", "always"))]
)
def test_prompts_and_answers_decode_to_the_whole_text(library: Tokenizer, prompt: str, answer: str) -> None:
    """By a model's own tokenizer, and by one that reads pairs without a separator."""
    tokenizer = encoder(library)
    sample = render(tokenizer, {"input": prompt, "target": answer}, "prompt")
    file = LibraryEncoder(library, eos=tokenizer.eos)
    record = json.dumps({"input": prompt, "target": answer}).encode()
    block = Block("here", "jsonl", "line", 1, record, len(record))
    settings = EncodeSettings(target="dataset")
    tokens = np.frombuffer(encode_block(block, settings, file).streams["tokens"], settings.dtype(file))
    assert tokens.tolist() == sample.tokens
    assert tokenizer.decode(sample.tokens) == prompt + answer
    if prompt:
        (asked,) = tokenizer.encode([prompt])
        assert sample.tokens[: len(asked)] == asked
        assert sample.is_target.index(True) == len(asked)


def test_an_answer_that_no_tokens_continue_its_prompt_to_is_refused() -> None:
    library = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "ab": 3}, unk_token="[UNK]"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    with pytest.raises(DataError, match="no tokens of the answer 'b' continue its prompt to the whole text: begin"):
        render(encoder(library), {"input": "a", "target": "b"}, "prompt")
    assert render(encoder(library), {"input": "a", "target": " b"}, "prompt").tokens[:2] == [1, 2]
