"""Tokenizers of any make behind one protocol, each as one JSON text: what other processes and the dataset get."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Protocol
from unicodedata import normalize

from dynapipe_ext.errors import ConfigError, DataError, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

Specials = Literal["parse", "text"]
FORMAT = "dynapipe-tokenizer/1"
GPT2_END = "<|endoftext|>"
_RARE = "ж한𠮷🧿"
_MOST_GROWTH = 256
_ANCHORS = ("\n", ".", "0", "a")


class Encoder(Protocol):
    """What turns texts into ids. `vocab_size` is above every id; `eos` ends a text, `separator` an input, if any."""

    @property
    def kind(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def separator(self) -> int | None: ...

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Ids of each text. Errors: DataError for a text that the tokenizer refuses."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...
    def as_json(self) -> str: ...


class LibraryEncoder:
    """A tokenizer of the `tokenizers` library, without the truncation and padding that its file may ask for."""

    kind = "tokenizers"

    def __init__(
        self,
        library: LibraryTokenizer,
        *,
        eos: int | None,
        separator: int | None = None,
        specials: Specials = "parse",
        add_special_tokens: bool = False,
    ) -> None:
        self._library = library
        check_expansion(library)
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = specials == "text"
        self.eos, self.separator = eos, separator
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1
        self._specials: Specials = specials
        self._add_special_tokens = add_special_tokens

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=self._add_special_tokens)
        return [one.ids for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._library.decode(list(tokens), skip_special_tokens=True))

    def as_json(self) -> str:
        return _json(
            self,
            model=json.loads(self._library.to_str()),
            specials=self._specials,
            add_special_tokens=self._add_special_tokens,
        )


def check_expansion(library: LibraryTokenizer) -> None:
    """Check that a normalizer makes no long text of a short one: a file may say that each letter is a million others.
    Raises DataError."""
    if library.normalizer is None:
        return
    growth, added = _growth(json.loads(library.normalizer.__getstate__()))
    if max(growth, added) > _MOST_GROWTH:
        raise DataError(
            f"the tokenizer's normalizer writes up to {max(growth, added):,.0f} characters for one, more than"
            f" {_MOST_GROWTH}: give one that does not lengthen texts"
        )


def _growth(normalizer: Mapping[str, Any]) -> tuple[float, float]:
    """How many characters a normalizer may write for each one, and for the beginning of a text."""
    match normalizer.get("type"):
        case "Sequence":
            growth, added = 1.0, 0.0
            for part in normalizer["normalizers"]:
                own_growth, own_added = _growth(part)
                growth, added = growth * own_growth, added * own_growth + own_added
            return growth, added
        case "Replace":
            pattern = normalizer["pattern"].get("String")  # a regular expression may fit between any two characters
            length = len(normalizer["content"])
            return (max(1.0, length / max(1, len(pattern))) if pattern is not None else 1.0 + length), 0.0
        case "Prepend":
            return 1.0, float(len(normalizer["prepend"]))
    return 1.0, 0.0


class TiktokenEncoder:
    """An encoding of tiktoken, by name. Without a choice of `specials` a text that spells one is refused."""

    kind = "tiktoken"

    def __init__(
        self, name: str, *, eos: str | int | None = None, separator: str | int | None = None, specials: Specials | None
    ) -> None:
        import tiktoken

        self._name, self._specials = name, specials
        self._library = tiktoken.get_encoding(name)
        self.vocab_size = self._library.n_vocab
        if eos is None:
            eos = self._library.eot_token if GPT2_END in self._library.special_tokens_set else None
        self.eos = self._id(eos)
        self.separator = self._id(separator)

    def _id(self, token: str | int | None) -> int | None:
        if token is None or isinstance(token, int):
            return token
        try:
            return self._library.encode_single_token(token)
        except KeyError:
            raise no_such_token(token, sorted(self._library.special_tokens_set)) from None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        match self._specials:
            case "text":
                return [self._library.encode_ordinary(text) for text in texts]
            case "parse":
                return [self._library.encode(text, allowed_special="all") for text in texts]
        try:
            return [self._library.encode(text) for text in texts]
        except ValueError:
            raise DataError(
                "the text spells a special token: say --special-tokens text to take it as text, or parse to take it"
                " as the token"
            ) from None

    def decode(self, tokens: Iterable[int]) -> str:
        ends = {self.eos, self.separator}
        return self._library.decode([token for token in tokens if token not in ends])

    def as_json(self) -> str:
        digest = hashlib.sha256()
        for token in self._library.token_byte_values():
            digest.update(len(token).to_bytes(4, "little") + token)
        specials = sorted(self._library.special_tokens_set)
        return _json(self, name=self._name, specials=self._specials, vocabulary=digest.hexdigest(), special=specials)


def with_separator(encoder: Encoder) -> Encoder:
    """The encoder with a token behind inputs: its own, or else the end of text, as T5's inputs have it."""
    if encoder.separator is not None:
        return encoder
    own: Any = copy(encoder)
    own.separator = encoder.eos
    return own  # type: ignore[no-any-return]


class TextCoder(Protocol):
    """The two directions of an `Encoder`."""

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


def encode_answers(
    coder: TextCoder, prompts: Sequence[str], answers: Sequence[str], wheres: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """Return for each pair the ids of the prompt, and those of the answer that follow it.

    The answer has the ids that follow the prompt's in the whole text. If a token spans both, the answer is encoded
    apart, since the prompt must have the ids that the model will be prompted with. Many tokenizers put a blank before
    a text of its own; then it is encoded behind another text, whose ids are removed. In any case the ids of both
    decode to the whole text.

    Raises DataError that begins with the pair's entry of `wheres` if no ids do.
    """
    wholes = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    encoded = [list(ids) for ids in coder.encode([*prompts, *wholes, *answers])]
    size, pairs = len(wholes), list[tuple[list[int], list[int]]]()
    for place, (answer, where) in enumerate(zip(answers, wheres, strict=True)):
        of_prompt, whole, apart = encoded[place::size]
        if prompts[place]:
            if whole[: len(of_prompt)] == of_prompt:
                apart = whole[len(of_prompt) :]
            elif (found := _continuing(coder, of_prompt, whole, [apart, *_anchored(coder, answer)])) is None:
                raise DataError(
                    f"{where}: no tokens of the answer {short(answer)} continue its prompt to the whole text: begin the"
                    " answer with a space, or give a tokenizer of bytes"
                )
            else:
                apart = found
        pairs.append((of_prompt, apart))
    return pairs


def _continuing(
    coder: TextCoder, prompt: Sequence[int], whole: Sequence[int], candidates: Iterable[list[int]]
) -> list[int] | None:
    text = normalize("NFC", coder.decode(whole))
    return next((ids for ids in candidates if normalize("NFC", coder.decode([*prompt, *ids])) == text), None)


def _anchored(coder: TextCoder, text: str) -> Iterator[list[int]]:
    """The ids of a text behind each of a few others that end where a token ends."""
    for anchor in _ANCHORS:
        before, whole = (list(ids) for ids in coder.encode([anchor, anchor + text]))
        if whole[: len(before)] == before:
            yield whole[len(before) :]


def digest_of(encoder: Encoder) -> str:
    """sha256 of all that its ids depend on, the version of its library too."""
    return hashlib.sha256(f"{_library_version(encoder.kind)}/{encoder.as_json()}".encode()).hexdigest()


def lost_characters(encoder: Encoder) -> str:
    """Those of a few rare characters that become no token at all: a tokenizer that knows no bytes may drop text."""
    ids = encoder.encode(list(_RARE))
    return "".join(character for character, tokens in zip(_RARE, ids, strict=True) if not tokens)


def _json(encoder: Encoder, **fields: object) -> str:
    own = {"format": FORMAT, "kind": encoder.kind, "eos": encoder.eos, "separator": encoder.separator}
    return json.dumps(own | fields)


def no_such_token(token: str, special: Sequence[str]) -> ConfigError:
    shown = ", ".join(map(repr, special[:9])) or "none"
    return ConfigError(f"the tokenizer has no token {short(token)}: name one it has (its special tokens: {shown})")


def _library_version(kind: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    package = {"bpe": "tokenizers", "bytes": "dynapipe-ext"}.get(kind, kind)
    try:
        return f"{package} {version(package)}" if kind != "bytes" else "bytes"
    except PackageNotFoundError:
        return package
