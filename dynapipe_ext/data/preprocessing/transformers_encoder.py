"""Tokenizers of transformers out of a folder: by their `tokenizers` object where they have one, else by themselves."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynapipe_ext.data.preprocessing.encoders import FORMAT, LibraryEncoder, Specials
from dynapipe_ext.errors import ConfigError, DataError

_MOST_FILE_BYTES = 256 << 20
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".vocab")
_PROBE = "The 12,345 quick  brown\tfox\n\n  jumped. Größe — 你好, مرحبا! <s></s><|endoftext|> e\u0301 \U0001f600 x_y=1;"


class FolderEncoder:
    """A tokenizer without a `tokenizers` object (SentencePiece, ByT5, ...), called as transformers calls it."""

    kind = "transformers"

    def __init__(
        self,
        tokenizer: Any,
        files: Mapping[str, str],
        *,
        eos: int | None,
        separator: int | None,
        specials: Specials,
        add_special_tokens: bool,
    ) -> None:
        self._tokenizer, self._files = tokenizer, dict(files)
        self.eos, self.separator = eos, separator
        self.vocab_size = max(len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values()))
        self._specials: Specials = specials
        self._add_special_tokens = add_special_tokens

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return _called(self._tokenizer, texts, self._specials, self._add_special_tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def as_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "kind": self.kind,
                "eos": self.eos,
                "separator": self.separator,
                "specials": self._specials,
                "add_special_tokens": self._add_special_tokens,
                "files": self._files,
            }
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> FolderEncoder:
        """The encoder that `as_json` described, from the files inside."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in record["files"].items():
                if Path(name).name != name:
                    raise DataError(f"a tokenizer has a file named {name!r}, which lies outside of its folder")
                (Path(folder) / name).write_bytes(base64.b64decode(content))
            tokenizer = _load(Path(folder))
        return cls(
            tokenizer,
            record["files"],
            eos=record["eos"],
            separator=record["separator"],
            specials=record["specials"],
            add_special_tokens=record["add_special_tokens"],
        )


def load_folder(
    folder: Path,
    *,
    eos: str | None,
    separator: str | None,
    specials: Specials | None,
    add_special_tokens: bool,
) -> LibraryEncoder | FolderEncoder:
    """The tokenizer in a folder that `save_pretrained` wrote. Code in the folder is never run.

    Errors: ConfigError for a token it lacks; DataError for a folder without a tokenizer that transformers can load.
    """
    tokenizer = _load(folder)
    chosen: Specials = specials or "parse"
    eos_id = tokenizer.eos_token_id if eos is None else _id(tokenizer, eos)
    separator_id = None if separator is None else _id(tokenizer, separator)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and tokenizer.is_fast:
        from tokenizers import Tokenizer as LibraryTokenizer

        encoder = LibraryEncoder(
            LibraryTokenizer.from_str(backend.to_str()),
            eos=eos_id,
            separator=separator_id,
            specials=chosen,
            add_special_tokens=add_special_tokens,
        )
        # Some classes do more than their `tokenizers` object: those are called themselves.
        if encoder.encode([_PROBE]) == _called(tokenizer, [_PROBE], chosen, add_special_tokens):
            return encoder
    return FolderEncoder(
        tokenizer,
        _files(folder),
        eos=eos_id,
        separator=separator_id,
        specials=chosen,
        add_special_tokens=add_special_tokens,
    )


def _called(tokenizer: Any, texts: Sequence[str], specials: Specials, add_special_tokens: bool) -> list[list[int]]:
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        split_special_tokens=specials == "text",
        return_attention_mask=False,
        truncation=False,
        padding=False,
        verbose=False,  # it would warn of texts longer than one model's rows
    )
    return [list(ids) for ids in encoded["input_ids"]]


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f'{folder} is a folder, whose tokenizer needs transformers: pip install "dynapipe-ext[transformers]"'
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  (whatever its many backends raise means the same)
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({type(error).__name__}: {str(error)[:200]}): give"
            " a folder that save_pretrained wrote"
        ) from None


def _id(tokenizer: Any, token: str) -> int:
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ConfigError(
            f"the tokenizer has no token {token!r}: name one it has (its special tokens:"
            f" {', '.join(map(repr, tokenizer.all_special_tokens[:9])) or 'none'})"
        )
    return int(found)


def _files(folder: Path) -> dict[str, str]:
    """The small files of a folder, as base64: a tokenizer is made of some of them."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.stat().st_size <= _MOST_FILE_BYTES:
            found[path.name] = base64.b64encode(path.read_bytes()).decode()
    return found
