"""The tokenizer that a name, a path or a JSON text means.

bytes, bpe            this project's own (dynapipe_ext.data.tokenizer)
FILE.json             a file of the `tokenizers` library
FOLDER                a transformers tokenizer, or data prepared earlier
NAME                  an encoding of tiktoken
vocab.json merges.txt GPT-2's byte-level BPE, as Megatron takes it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynapipe_ext.data.preprocessing.encoders import (
    FORMAT,
    GPT2_END,
    Encoder,
    LibraryEncoder,
    Specials,
    TiktokenEncoder,
    no_such_token,
)
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder, load_folder
from dynapipe_ext.data.tokenizer import FILE_NAME, BpeTokenizer, BytesTokenizer
from dynapipe_ext.errors import ConfigError, DataError, install_advice, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

# Taken as the end of text where a file does not say, and has exactly one of them.
_KNOWN_ENDS = (GPT2_END, "</s>", "<|end_of_text|>", "<eos>", "<|endofprompt|>", "[EOS]")


def load_encoder(
    name_or_path: str | Path,
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
    path = Path(name_or_path)
    if str(name_or_path) == "bytes":
        _refuse_choices(name_or_path, eos, separator, specials, add_special_tokens)
        return BytesTokenizer()
    if path.is_dir():
        if is_own(path / FILE_NAME):
            _refuse_choices(name_or_path, eos, separator, specials, add_special_tokens)
            return encoder_from_json((path / FILE_NAME).read_text(encoding="utf-8"))
        return load_folder(path, eos=eos, separator=separator, specials=specials, add_special_tokens=add_special_tokens)
    if path.is_file():
        if is_own(path):
            _refuse_choices(name_or_path, eos, separator, specials, add_special_tokens)
            return encoder_from_json(path.read_text(encoding="utf-8"))
        return library_encoder(
            _read_library(path),
            eos=eos or _declared_end(path),
            separator=separator,
            specials=specials,
            add_special_tokens=add_special_tokens,
        )
    if add_special_tokens:
        raise ConfigError(f"--add-special-tokens needs a tokenizer file or folder, and {str(name_or_path)!r} is none")
    return _tiktoken(str(name_or_path), eos, separator, specials)


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
    gaps = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary))
    if gaps:
        raise DataError(f"{vocab_file} lacks {len(gaps)} of 256 bytes ({gaps[0]!r} is the first): they would vanish")
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
        usual_ends = [token for token in _KNOWN_ENDS if library.token_to_id(token) is not None]
        eos = usual_ends[0] if len(usual_ends) == 1 else None
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
                return FolderEncoder.from_record(record)
            case kind:
                raise DataError(f"a tokenizer has the unknown kind {short(kind)}: prepare the data again")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"a tokenizer cannot be read ({error!r}): prepare the data again") from None


def is_own(path: Path) -> bool:
    """Whether a file is a tokenizer in this project's own format."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("format") == FORMAT


def _library_from(model: Mapping[str, object]) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        return LibraryTokenizer.from_str(json.dumps(model))
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself, whatever is wrong)
        raise DataError(f"a tokenizer cannot be read ({str(error)[:100]}): prepare the data again") from None


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
    token_id = library.token_to_id(token)
    if token_id is None:
        special = [added.content for added in library.get_added_tokens_decoder().values() if added.special]
        raise no_such_token(token, special)
    return int(token_id)


def _tiktoken(name: str, eos: str | None, separator: str | None, specials: Specials | None) -> TiktokenEncoder:
    sorts = "a tokenizer.json, a folder of transformers, an encoding of tiktoken, bytes or bpe"
    if "/" in name or name.endswith(".json"):
        raise DataError(f"the tokenizer {name!r} does not exist: give {sorts}")
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(
            f"{name!r} is no file; to look it up as an encoding needs the package tiktoken: {install_advice('data')}"
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


def _refuse_choices(name_or_path: str | Path, *choices: object) -> None:
    if any(choices):
        raise ConfigError(
            f"the tokenizer {str(name_or_path)!r} has its own special tokens, which no text can spell: leave out"
            " --eod-token, --separator, --special-tokens and --add-special-tokens"
        )
