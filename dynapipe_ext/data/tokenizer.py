"""Text to token ids and back without loss: byte-level BPE trained on the data at hand, or plain bytes.

Both read UTF-8 bytes, so they encode every text. The ids of the end of text (`eos`) and of the border between input and
target (`separator`) lie above the vocabulary of the text. No string encodes to them, so text cannot forge them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dynapipe_ext.errors import ConfigError, DataError, install_advice

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

FILE_NAME = "tokenizer.json"
_FORMAT = "dynapipe-tokenizer/1"
_NUM_SPECIAL = 2
MIN_BPE_VOCABULARY = 256 + _NUM_SPECIAL
_MOST_BPE_VOCABULARY = 1 << 24  # the library allocates all of them at once, and aborts where memory is short
_TRAINING_BYTES = 8 << 20
_TRAINING_TEXT_CHARACTERS = 16 << 10  # of each text, so that a few long documents do not decide the merges


class Tokenizer(Protocol):
    """What preparing and showing text needs. `vocab_size` counts the two special ids, which are its last ones."""

    @property
    def kind(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / max_token_bytes tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ids. Errors: DataError for half of a surrogate pair."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids, without special ids. An incomplete character becomes U+FFFD."""
        ...

    def as_json(self) -> str: ...


class BytesTokenizer:
    """One token for each byte of UTF-8; it needs no library and no training.

    >>> BytesTokenizer().encode(["hé"])
    [[104, 195, 169]]
    """

    kind = "bytes"
    vocab_size = MIN_BPE_VOCABULARY
    eos = 256
    separator = 257
    max_token_bytes = 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        _check_text(texts)
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in _in_vocabulary(tokens, self.vocab_size) if token < 256).decode(
            "utf-8", "replace"
        )

    def as_json(self) -> str:
        return json.dumps({"format": _FORMAT, "kind": self.kind})


class BpeTokenizer:
    """Byte-level BPE of the `tokenizers` library, with its two special ids kept outside of it."""

    kind = "bpe"

    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library
        to_byte = _byte_of_character()
        vocabulary = library.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * len(vocabulary)
        for token, index in vocabulary.items():
            self._bytes[index] = bytes(to_byte[character] for character in token)
        self.eos = len(vocabulary)
        self.separator = len(vocabulary) + 1
        self.vocab_size = len(vocabulary) + _NUM_SPECIAL
        self.max_token_bytes = max(map(len, self._bytes))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        _check_text(texts)
        return [encoded.ids for encoded in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        of_text = (token for token in _in_vocabulary(tokens, self.vocab_size) if token < self.eos)
        return b"".join(self._bytes[token] for token in of_text).decode("utf-8", "replace")

    def as_json(self) -> str:
        return json.dumps({"format": _FORMAT, "kind": self.kind, "model": json.loads(self._library.to_str())})


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """A BPE of at most `vocab_size` ids with the two special ones; equal texts give an equal BPE.

    Training sees a bounded number of bytes, spread evenly over all texts: whenever they exceed the bound, every second
    text is dropped, and from then on only every second of the following texts is taken. Small data can give fewer ids.

    Errors: ConfigError where `vocab_size` has no room for the 256 bytes or is beyond all vocabularies, and where the
    package `tokenizers` is missing.
    """
    if vocab_size < MIN_BPE_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size} but byte-level BPE needs at least {MIN_BPE_VOCABULARY} "
            '(256 bytes and 2 special ids): raise it or use tokenizer "bytes"'
        )
    if vocab_size > _MOST_BPE_VOCABULARY:
        raise ConfigError(f"vocab_size is {vocab_size} but must be at most {_MOST_BPE_VOCABULARY:,}: lower it")
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(_missing_library()) from None

    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - _NUM_SPECIAL,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(_spread(texts, _TRAINING_BYTES), trainer)
    return BpeTokenizer(library)


def _spread(texts: Iterable[str], max_bytes: int) -> list[str]:
    texts_taken: list[str] = []
    sizes: list[int] = []
    total_bytes, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        _check_text([text])
        texts_taken.append(text[:_TRAINING_TEXT_CHARACTERS])
        sizes.append(len(texts_taken[-1].encode("utf-8")))
        total_bytes += sizes[-1]
        while total_bytes > max_bytes and len(texts_taken) > 1:
            texts_taken, sizes, stride = texts_taken[::2], sizes[::2], stride * 2
            total_bytes = sum(sizes)
    return texts_taken


def _byte_of_character() -> dict[str, int]:
    """The byte behind each printable character of a byte-level BPE's vocabulary (Radford et al. 2019, sec. 2.2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _check_text(texts: Sequence[str]) -> None:
    for place, text in enumerate(texts):
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"text {place} holds half of a surrogate pair at character {error.start}: write whole characters"
                ) from None


def _in_vocabulary(tokens: Iterable[int], vocab_size: int) -> Iterable[int]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is outside of the vocabulary of {vocab_size}: use this data's own tokenizer"
            )
        yield int(token)


def _missing_library() -> str:
    return f"BPE needs the package tokenizers: {install_advice('train')}, or use tokenizer bytes"
