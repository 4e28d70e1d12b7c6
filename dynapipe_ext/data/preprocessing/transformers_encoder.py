"""Tokenizers of transformers out of a folder: by their `tokenizers` object where they have one, else by themselves.

A model's own tokenizer (`load_model_tokenizer`) keeps all of its folder: its chat template, what it puts before a text.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import date, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dynapipe_ext.data.preprocessing.answers import PlacedTokens, training_template, writes_newline
from dynapipe_ext.data.preprocessing.chat_variants import keeps_words, spellings
from dynapipe_ext.data.preprocessing.encoders import FORMAT, LibraryEncoder, Specials, check_expansion
from dynapipe_ext.data.preprocessing.template_limits import in_template_limits
from dynapipe_ext.errors import ConfigError, DataError, install_advice, short

_MOST_FILE_BYTES = 256 << 20
_OTHER_PLACES = ("/dev/shm", "/tmp")
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".vocab")
_NOW = "strftime_now"  # the function by which a template asks for the date
_NOW_CALL = re.compile(rf"{_NOW}\(\s*(?:format\s*=\s*)?(['\"])((?:(?!\1)[^\\])*)\1\s*\)")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what a template puts around the turns that carry loss
_PROBE = "The 12,345 quick  brown\tfox\n\n  jumped. Größe — 你好, مرحبا! <s></s><|endoftext|> e\u0301 \U0001f600 x_y=1;"


class FolderEncoder:
    """A folder's tokenizer, called as transformers calls it, with what it does to whole texts and to chats."""

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
        template_date: str = "",
    ) -> None:
        self._tokenizer, self._files = tokenizer, dict(files)
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            check_expansion(backend)
        self.template_date = template_date
        self.eos, self.separator = eos, separator
        self.vocab_size = max(len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values()))
        self._specials: Specials = specials
        self._add_special_tokens = add_special_tokens
        self._only_last = False

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
                **({"template_date": self.template_date} if self.template_date else {}),
            }
        )

    @property
    def behaviour(self) -> str:
        """All that its tokens depend on, as text; other files of the folder leave it as it is."""
        specials, start = [self._specials, self._add_special_tokens], self.start
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        words = self._files if backend is None else backend.to_str()
        ends = [self.eos, self.separator, start]
        return json.dumps([type(self._tokenizer).__name__, words, self._tokenizer.chat_template, ends, specials])

    @property
    def start(self) -> list[int]:
        """What the tokenizer puts before a text by itself: mostly its beginning of text, or nothing."""
        (bare,), (whole,) = (_called(self._tokenizer, ["a"], self._specials, added) for added in (False, True))
        places = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        return whole[: places[0]] if places else []

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template itself says which of its text an assistant wrote."""
        return bool(_GENERATION.search(self._template(None)))

    @property
    def writes_newline(self) -> bool:
        """`answers.writes_newline` of the chat template."""
        return writes_newline(self._template(None))

    @property
    def prints_date(self) -> bool:
        """Whether the chat template asks what day it is."""
        return _NOW in str(self._tokenizer.chat_template)

    def with_template_date(self, template_date: str) -> FolderEncoder:
        """The same tokenizer, whose chat template takes every day for this one (YYYY-MM-DD), so that equal chats become
        equal tokens on each. Errors: ConfigError for another text."""
        try:
            date.fromisoformat(template_date)
        except ValueError:
            raise ConfigError(f"template_date is {template_date!r}: give a day as YYYY-MM-DD") from None
        own = copy(self)
        own.template_date = template_date
        return own

    def for_last_message(self) -> FolderEncoder:
        """The same tokenizer for chats of which only the last message is trained on (`training_template`)."""
        own = copy(self)
        own._only_last = True
        return own

    def _template(self, tools: Sequence[Any] | None) -> str:
        template = training_template(str(self._tokenizer.get_chat_template(tools=tools)), only_last=self._only_last)
        return _dated(template, self.template_date) if _NOW in template else template

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, answer_next: bool = False
    ) -> str:
        """The chat as text; `answer_next` ends it where the assistant begins. Errors: DataError, as the template's."""
        return self._applied(messages, tools, add_generation_prompt=answer_next)[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[list[int], list[bool]]:
        """Ids of a chat and which of them the template marks as the assistant's. Errors: as those of `render`."""
        text, spans = self._applied(messages, tools, return_assistant_tokens_mask=True)
        tokens = self.encode_places(text)
        return tokens.ids, tokens.overlap(spans).tolist()

    def _applied(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **choices: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat's text, and the spans that the template itself marks as the assistant's, if that is a choice.

        The first variant of the chat that the template writes without loss is taken, else the first that it writes.
        The template alone is under limits: a tokenizer that lacks memory would end the process.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        special = self._tokenizer.special_tokens_map
        template, refusal, lossy = self._template(tools), None, None
        for chat in spellings(messages):
            render = partial(
                render_jinja_template,
                conversations=[chat],
                tools=tools,
                chat_template=template,
                **choices,
                **special,
            )
            try:
                (text,), spans = in_template_limits(render)
            except Exception as error:  # noqa: BLE001  (a template may raise anything)
                refusal = refusal or error
                continue
            applied = str(text), [(int(start), int(stop)) for start, stop in (spans or [[]])[0]]
            if keeps_words(applied[0], messages):
                return applied
            lossy = lossy or applied
        if lossy is None:
            raise DataError(f"the chat template refuses the messages ({refusal})") from refusal
        return lossy

    def encode_places(self, text: str) -> PlacedTokens:
        """The tokens of a text with their places in it. Errors: DataError where these are not known."""
        if not self._tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not say which characters a token is of, so turns of a chat cannot be told apart:"
                " save it with a tokenizer.json, or mark the turns in its chat template by {% generation %}"
            )
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        return PlacedTokens.of(encoded["input_ids"], encoded["offset_mapping"])

    def is_special(self, token: int) -> bool:
        added = self._tokenizer.added_tokens_decoder.get(token)
        return token in self._tokenizer.all_special_ids or (added is not None and bool(added.special))

    def spell(self, tokens: Iterable[int]) -> str:
        """The text of ids with the special ones spelt out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> FolderEncoder:
        """The encoder that `as_json` described, from the files inside."""
        with tempfile.TemporaryDirectory(prefix="dynapipe-tokenizer-", dir=_temporary_place()) as folder:
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
            template_date=str(record.get("template_date", "")),
        )


@lru_cache(maxsize=16)
def _dated(template: str, day: str) -> str:
    """The chat template with the date of a day in the place of its calls for today's. Errors: DataError for a call
    whose form of the date is not written out, and so for calls without a day."""

    def written(call: re.Match[str]) -> str:
        return json.dumps(datetime.fromisoformat(day).strftime(call[2]))

    dated = _NOW_CALL.sub(written, template) if day else template
    if call := re.search(rf"{_NOW}\s*\(", dated):
        raise DataError(
            f"the chat template asks for the date by {short(dated[call.start() :][:40])}, which cannot be fixed: write"
            f" {_NOW}('%Y-%m-%d') in it, for example, or the date itself"
        )
    return dated


def _temporary_place() -> str:
    """Where temporary files go. The working directory, which tempfile takes where it can write to no other place, is
    the user's. Errors: DataError."""
    for place in (tempfile.gettempdir(), *_OTHER_PLACES):
        if os.access(place, os.W_OK | os.X_OK) and Path(place).resolve() != Path.cwd():
            return place
    raise DataError("no place for temporary files can be written to, and a tokenizer needs one: set TMPDIR to one")


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


def load_model_tokenizer(folder: Path) -> FolderEncoder:
    """The tokenizer of a model's folder, to train that model with. Code in the folder is never run.

    Errors: DataError for a folder without a tokenizer that transformers can load, or one that ends no text.
    """
    tokenizer = _load(folder)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{folder} has a tokenizer that does not say which token ends a text: name it as eos_token in its"
            " tokenizer_config.json"
        )
    return FolderEncoder(
        tokenizer,
        _files(folder),
        eos=tokenizer.eos_token_id,
        separator=None,
        specials="parse",
        add_special_tokens=False,
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
            f"{folder} is a folder, whose tokenizer needs transformers: {install_advice('transformers')}"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  (whatever its many backends raise means the same)
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({type(error).__name__}: {str(error)[:200]}): give"
            " a folder that save_pretrained wrote"
        ) from None


def _id(tokenizer: Any, token: str) -> int:
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ConfigError(
            f"the tokenizer has no token {token!r}: name one it has (its special tokens:"
            f" {', '.join(map(repr, tokenizer.all_special_tokens[:9])) or 'none'})"
        )
    return int(token_id)


def _files(folder: Path) -> dict[str, str]:
    """The small files of a folder, as base64: a tokenizer is made of some of them."""
    contents = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _SUFFIXES and path.stat().st_size <= _MOST_FILE_BYTES:
            contents[path.name] = base64.b64encode(path.read_bytes()).decode()
    return contents
