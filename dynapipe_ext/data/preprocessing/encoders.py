"""Tokenizers of any make behind one protocol, each as one JSON text: what other processes and the dataset get.

bytes, bpe            this project's own (dynapipe_ext.data.tokenizer)
FILE.json             a file of the `tokenizers` library
FOLDER                a transformers tokenizer, or data prepared earlier
NAME                  an encoding of tiktoken
vocab.json merges.txt GPT-2's byte-level BPE, as Megatron takes it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dynapipe_ext.data.tokenizer import FILE_NAME, BpeTokenizer, BytesTokenizer
from dynapipe_ext.errors import ConfigError, DataError, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

Specials = Literal["parse", "text"]
FORMAT = "dynapipe-tokenizer/1"
GPT2_END = "<|endoftext|>"
# Taken as the end of text where a file does not say, and has exactly one of them.
_KNOWN_ENDS = (GPT2_END, "</s>", "<|end_of_text|>", "<eos>", "<|endofprompt|>", "[EOS]")
_RARE = "ж한𠮷🧿"


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
            raise _no_such_token(token, sorted(self._library.special_tokens_set)) from None

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


def load_encoder(
    given: str | Path,
    *,
    eos: str | None = None,
    separator: str | None = None,
    specials: Specials | None = None,
    add_special_tokens: bool = False,
) -> Encoder:
    """The tokenizer that a name or path means (see the module); "bpe" is trained, not loaded.

    `eos` and `separator` name tokens of its vocabulary; without `eos` it is the one that the tokenizer itself declares.
    `specials` says whether a special token spelt in a text is that token or text; by default it is as the library has
    it: a token for `tokenizers` and transformers, refused by tiktoken.

    Errors: ConfigError for a name that means nothing, a token that is not in the vocabulary, or a missing package;
    DataError for a file that is not a tokenizer.
    """
    path = Path(given)
    if str(given) == "bytes":
        _refuse_choices(given, eos, separator, specials, add_special_tokens)
        return BytesTokenizer()
    if path.is_dir():
        if is_own(path / FILE_NAME):
            _refuse_choices(given, eos, separator, specials, add_special_tokens)
            return encoder_from_json((path / FILE_NAME).read_text(encoding="utf-8"))
        from dynapipe_ext.data.preprocessing.transformers_encoder import load_folder

        return load_folder(path, eos=eos, separator=separator, specials=specials, add_special_tokens=add_special_tokens)
    if path.is_file():
        if is_own(path):
            _refuse_choices(given, eos, separator, specials, add_special_tokens)
            return encoder_from_json(path.read_text(encoding="utf-8"))
        return library_encoder(
            _read_library(path),
            eos=eos or _declared_end(path),
            separator=separator,
            specials=specials,
            add_special_tokens=add_special_tokens,
        )
    if add_special_tokens:
        raise ConfigError(f"--add-special-tokens needs a tokenizer file or folder, and {str(given)!r} is none")
    return _tiktoken(str(given), eos, separator, specials)


def with_separator(encoder: Encoder) -> Encoder:
    """The encoder with a token behind inputs: its own, or else the end of text, as T5's inputs have it."""
    if encoder.separator is not None:
        return encoder
    own: Any = copy(encoder)
    own.separator = encoder.eos
    return own  # type: ignore[no-any-return]


def gpt2_encoder(vocab_file: str | Path, merge_file: str | Path, **choices: Any) -> LibraryEncoder:
    """GPT-2's byte-level BPE out of `vocab.json` and `merges.txt`; its end of text is "<|endoftext|>".

    Text that spells "<|endoftext|>" stays text, as with Megatron's GPT2BPETokenizer, unless `specials` is "parse".

    Errors: DataError for files that are not those, or whose vocabulary lacks a byte (it would vanish from texts).
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{vocab_file} cannot be read as a vocabulary ({error}): give GPT-2's vocab.json") from None
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself, whatever is wrong)
        raise DataError(f"{vocab_file} and {merge_file} make no BPE ({error}): give files of one BPE") from None
    lost = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary))
    if lost:
        raise DataError(f"{vocab_file} lacks {len(lost)} of 256 bytes ({lost[0]!r} is the first): they would vanish")
    library = LibraryTokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    if choices.get("specials") == "parse" and GPT2_END in vocabulary:
        library.add_special_tokens([AddedToken(GPT2_END, normalized=False)])
    return library_encoder(library, **choices)


def library_encoder(
    library: LibraryTokenizer,
    *,
    eos: str | None = None,
    separator: str | None = None,
    specials: Specials | None = None,
    add_special_tokens: bool = False,
) -> LibraryEncoder:
    """An encoder of a `tokenizers` object; tokens are given by their names."""
    if eos is None:
        known = [token for token in _KNOWN_ENDS if library.token_to_id(token) is not None]
        eos = known[0] if len(known) == 1 else None
    return LibraryEncoder(
        library,
        eos=_named(library, eos),
        separator=_named(library, separator),
        specials=specials or "parse",
        add_special_tokens=add_special_tokens,
    )


def encoder_from_json(text: str) -> Encoder:
    """The encoder whose `as_json` gave this. Errors: DataError for anything else; ConfigError for a missing package."""
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise DataError(f"a tokenizer has format {short(record['format'])} but {FORMAT!r} is needed")
        match record["kind"]:
            case "bytes":
                return BytesTokenizer()
            case "bpe":
                return BpeTokenizer(_library_from(record["model"]))
            case "tokenizers":
                return LibraryEncoder(
                    _library_from(record["model"]),
                    eos=record["eos"],
                    separator=record["separator"],
                    specials=record["specials"],
                    add_special_tokens=record["add_special_tokens"],
                )
            case "tiktoken":
                encoder = TiktokenEncoder(
                    record["name"], eos=record["eos"], separator=record["separator"], specials=record["specials"]
                )
                if json.loads(encoder.as_json()) != record:
                    raise DataError(
                        f"tiktoken's {record['name']!r} is not the encoding that the data was made with: install the"
                        " same one"
                    )
                return encoder
            case "transformers":
                from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder

                return FolderEncoder.from_record(record)
            case kind:
                raise DataError(f"a tokenizer has the unknown kind {short(kind)}: prepare the data again")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"a tokenizer cannot be read ({error!r}): prepare the data again") from None


def digest_of(encoder: Encoder) -> str:
    """sha256 of all that its ids depend on, the version of its library too."""
    return hashlib.sha256(f"{_library_version(encoder.kind)}/{encoder.as_json()}".encode()).hexdigest()


def lost_characters(encoder: Encoder) -> str:
    """Those of a few rare characters that become no token at all: a tokenizer that knows no bytes may drop text."""
    ids = encoder.encode(list(_RARE))
    return "".join(character for character, found in zip(_RARE, ids, strict=True) if not found)


def is_own(path: Path) -> bool:
    """Whether a file is a tokenizer in this project's own format."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("format") == FORMAT


def _json(encoder: Encoder, **fields: object) -> str:
    own = {"format": FORMAT, "kind": encoder.kind, "eos": encoder.eos, "separator": encoder.separator}
    return json.dumps(own | fields)


def _library_from(model: Mapping[str, object]) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer

    return LibraryTokenizer.from_str(json.dumps(model))


def _read_library(path: Path) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        return LibraryTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself, whatever is wrong)
        raise DataError(f"{path} is no file of the tokenizers library ({error}): give its tokenizer.json") from None


def _declared_end(path: Path) -> str | None:
    """The end of text that a tokenizer_config.json beside the file names."""
    try:
        config = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    token = config.get("eos_token") if isinstance(config, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _named(library: LibraryTokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    found = library.token_to_id(token)
    if found is None:
        special = [added.content for added in library.get_added_tokens_decoder().values() if added.special]
        raise _no_such_token(token, special)
    return int(found)


def _no_such_token(token: str, special: Sequence[str]) -> ConfigError:
    shown = ", ".join(map(repr, special[:9])) or "none"
    return ConfigError(f"the tokenizer has no token {short(token)}: name one it has (its special tokens: {shown})")


def _tiktoken(name: str, eos: str | None, separator: str | None, specials: Specials | None) -> TiktokenEncoder:
    sorts = "a tokenizer.json, a folder of transformers, an encoding of tiktoken, bytes or bpe"
    if "/" in name or name.endswith(".json"):
        raise DataError(f"the tokenizer {name!r} does not exist: give {sorts}")
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(
            f"{name!r} is no file; to look it up as an encoding needs the package tiktoken:"
            ' pip install "dynapipe-ext[data]"'
        ) from None
    if name not in tiktoken.list_encoding_names():
        raise ConfigError(
            f"the tokenizer {name!r} is no file, no folder and no encoding of tiktoken"
            f" ({', '.join(tiktoken.list_encoding_names())}): give {sorts}"
        )
    try:
        return TiktokenEncoder(name, eos=eos, separator=separator, specials=specials)
    except OSError as error:  # requests' own errors are OSErrors, too
        raise ConfigError(
            f"the encoding {name!r} is not on this machine and cannot be fetched ({type(error).__name__}): put its file"
            " into tiktoken's cache"
        ) from None


def _refuse_choices(given: str | Path, *choices: object) -> None:
    if any(choices):
        raise ConfigError(
            f"the tokenizer {str(given)!r} has its own special tokens, which no text can spell: leave out --eod-token,"
            " --separator, --special-tokens and --add-special-tokens"
        )


def _library_version(kind: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    package = {"bpe": "tokenizers", "bytes": "dynapipe-ext"}.get(kind, kind)
    try:
        return f"{package} {version(package)}" if kind != "bytes" else "bytes"
    except PackageNotFoundError:
        return package
