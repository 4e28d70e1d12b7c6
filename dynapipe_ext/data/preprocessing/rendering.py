"""The records of a block, and how a template renders them to tokens and targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, assert_never

from dynapipe_ext.data.examples import lacking, parse_object, string_field
from dynapipe_ext.data.length_bounds import LengthBounds
from dynapipe_ext.data.preprocessing.inputs import Block
from dynapipe_ext.errors import ConfigError, DataError, short

TextRecord = Mapping[str, object]


def records(block: Block, *, text_key: str) -> Iterator[tuple[str, TextRecord]]:
    """(place, record) for every record of the block. A record of a text file has the single field `text_key`.

    Blank lines are no records; they separate the paragraphs of a text.

    Errors: DataError naming file and line for text that is not UTF-8, and for a line that is not a JSON object.
    """
    match block.form:
        case "jsonl":
            for number, line in enumerate(_lines(block.payload), block.first):
                if line.strip():
                    where = f"{block.file}, line {number}"
                    yield where, parse_object(line, where=where)
        case "text":
            for where, text in _texts(block):
                yield where, {text_key: _decoded(text, where)}
        case "parquet":
            yield from _rows(block)


def _lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def _texts(block: Block) -> Iterator[tuple[str, bytes]]:
    if block.unit == "document":
        if block.payload.strip():
            yield block.file, block.payload
        return
    lines = [line.removesuffix(b"\r") for line in _lines(block.payload)]
    if block.unit == "line":
        for number, line in enumerate(lines, block.first):
            if line.strip():
                yield f"{block.file}, line {number}", line
        return
    start = 0
    for place, line in enumerate([*lines, b""]):
        if line.strip():
            continue
        if place > start:
            yield f"{block.file}, line {block.first + start}", b"\n".join(lines[start:place])
        start = place + 1


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8: convert the file to UTF-8"
        ) from None


def _rows(block: Block) -> Iterator[tuple[str, TextRecord]]:
    import pyarrow

    number = block.first
    with pyarrow.ipc.open_stream(block.payload) as reader:
        for batch in reader:
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError as error:
                last = number + batch.num_rows - 1
                raise DataError(
                    f"{block.file}, rows {number} to {last}: a text is not UTF-8 ({error.reason}): "
                    "write the file again with UTF-8 strings"
                ) from None
            for row in rows:
                yield f"{block.file}, row {number}", row
                number += 1


Template = Literal["chat", "prompt", "text"]
MESSAGES, CONVERSATIONS, TOOLS, TASK = "messages", "conversations", "tools", "task"
CHAT_FIELDS = frozenset((MESSAGES, CONVERSATIONS, TOOLS, TASK, "system"))
# The usual names of the fields of a prompt and its response.
PAIRS = (("input", "target"), ("prompt", "response"), ("prompt", "completion"), ("inputs", "targets"))
# Other names of such fields, which Alpaca's records have beside their text.
PROMPT_FIELDS = ("instruction", "prompt", "question", "input", "inputs")
ANSWER_FIELDS = ("output", "response", "completion", "answer", "target", "targets")
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_LOSS_SWITCHES = ("weight", "train")  # fields of a message in other formats
_ROLES_KEPT = (
    "system",
    "user",
    "tool",
)  # a template may drop none of their words; of an assistant it may drop reasoning


class ModelTokenizer(Protocol):
    """What templates need of a model's own tokenizer. `FolderEncoder` describes each method."""

    @property
    def eos(self) -> int | None: ...
    @property
    def start(self) -> list[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def marks_generation(self) -> bool: ...
    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...
    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, answer_next: bool = False
    ) -> str: ...
    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[list[int], list[bool]]: ...
    def encode_places(self, text: str) -> tuple[list[int], list[int]]: ...
    def is_special(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecordFields:
    """The names of the fields of a record. Without a pair every record is a text, whatever other fields it has."""

    pair: tuple[str, str] | None = PAIRS[0]
    text: str = "text"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The tokens of a sample, whether each is a target, and whether some were cut off."""

    tokens: list[int]
    is_target: list[bool]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders records to samples within `bounds`; longer ones are cut or refused."""

    template: Template
    fields: RecordFields
    tokenizer: ModelTokenizer
    bounds: LengthBounds
    start: tuple[int, ...]

    @classmethod
    def of(cls, template: Template, fields: RecordFields, tokenizer: ModelTokenizer, bounds: LengthBounds) -> Renderer:
        """Errors: DataError for chats without a chat template; ConfigError for bounds on the sides of chats, which have
        no sides."""
        if template == "chat" and bounds.tasks.bind:
            raise ConfigError(
                "the records are chats, which have no input and target sides: leave out max_input_len and"
                " max_target_len, and bound them by max_seq_len"
            )
        if template == "chat" and not tokenizer.has_chat_template:
            raise DataError(
                "the records are chats, but the tokenizer has no chat template: give a folder that has one"
                " (chat_template.jinja), by --tokenizer, or records of prompt and response"
            )
        return cls(template, fields, tokenizer, bounds, tuple(tokenizer.start))

    def render(self, record: Mapping[str, object], where: str, task: str) -> Rendered | None:
        """The sample of a record, None for an empty one. Errors: DataError that begins with `where` for a record that
        does not fit the template or is too long."""
        match self.template:
            case "chat":
                return self._chat(record, where)
            case "prompt":
                return self._prompt(record, where, task)
            case "text":
                (text,) = _strings(record, (self.fields.text,), where)
                return self._ended([], list(self.tokenizer.encode([text])[0]), where, task)
            case _:
                assert_never(self.template)

    def _prompt(self, record: Mapping[str, object], where: str, task: str) -> Rendered | None:
        """The response has the tokens that follow the prompt's in the whole text. Where a token spans both, the
        response is encoded alone: the prompt must have the tokens that the model will be prompted with."""
        assert self.fields.pair is not None
        prompt, response = _strings(record, self.fields.pair, where)
        of_prompt, whole, alone = (list(ids) for ids in self.tokenizer.encode([prompt, prompt + response, response]))
        is_prefix = whole[: len(of_prompt)] == of_prompt
        return self._ended(of_prompt, whole[len(of_prompt) :] if is_prefix else alone, where, task)

    def _ended(self, prompt: list[int], target: list[int], where: str, task: str) -> Rendered | None:
        """The sample between START and END. It is cut first at the prompt's start, then at the target's end."""
        prompt, target = (self._bare(prompt), target) if prompt else (prompt, self._bare(target))
        if not prompt and not target:
            return None
        assert self.tokenizer.eos is not None
        if not target or target[-1] != self.tokenizer.eos:
            target = [*target, self.tokenizer.eos]
        num_input, num_target = self._kept(len(prompt), len(target), where, task, num_beside=len(self.start))
        cut = (num_input, num_target) != (len(prompt), len(target))
        tokens = [*self.start, *prompt[len(prompt) - num_input :], *target[:num_target]]
        # The very first token follows nothing, so it cannot be a label.
        is_target = [i >= max(1, len(tokens) - num_target) for i in range(len(tokens))]
        return _with_targets(Rendered(tokens, is_target, cut), where)

    def _bare(self, tokens: list[int]) -> list[int]:
        """The tokens without START."""
        num_start = len(self.start)
        return tokens[num_start:] if tuple(tokens[:num_start]) == self.start else tokens

    def _chat(self, record: Mapping[str, object], where: str) -> Rendered:
        messages = _messages(record, where)
        tools = record.get(TOOLS)
        if tools is not None and not isinstance(tools, list):
            raise DataError(f"{where}: field {TOOLS!r} must be a list of the tools' descriptions, or left out")
        try:
            if self.tokenizer.marks_generation:
                tokens, is_target = self.tokenizer.render_marked(messages, tools)
                self._check_kept(messages, tools, self.tokenizer.render(messages, tools), where)
            else:
                tokens, is_target = self._assistant_turns(messages, tools, where)
        except DataError as error:
            if str(error).startswith(where):
                raise
            raise self._refused(messages, tools, where, error) from error
        if not any(is_target):
            raise DataError(
                f"{where}: the chat template marks nothing of this chat as the assistant's: see its generation blocks"
            )
        _, num_kept = self._kept(0, len(tokens), where)
        return _with_targets(
            Rendered(tokens[:num_kept], [False, *is_target[1:num_kept]], num_kept < len(tokens)), where
        )

    def _assistant_turns(
        self, messages: list[Mapping[str, Any]], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[bool]]:
        """Tokens and targets of a chat whose template does not mark answers.

        The template renders the chat up to the start and up to the end of each answer; the difference is the answer. A
        token belongs to the turn of its last character. An answer without a special token at its end gets END.
        """
        whole = self.tokenizer.render(messages, tools)
        self._check_kept(messages, tools, whole, where)
        spans = []
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            before = self.tokenizer.render(messages[: number - 1], tools, answer_next=True)
            upto = self.tokenizer.render(messages[:number], tools)
            if not (whole.startswith(before) and whole.startswith(upto) and len(before) < len(upto)):
                raise DataError(
                    f"{where}: the chat template writes message {number} in another way once more messages follow, so"
                    " the assistant's words in it cannot be found: mark them in the template by {% generation %}, or"
                    " give chats of one answer each"
                )
            spans.append((len(before), len(upto)))
        tokens, ends = self.tokenizer.encode_places(whole)
        is_target = [any(start < end <= stop for start, stop in spans) for end in ends]
        start, stop = spans[-1]
        answer = [token for token, end in zip(tokens, ends, strict=True) if start < end <= stop]
        if stop == len(whole) and not any(map(self.tokenizer.is_special, answer)):
            assert self.tokenizer.eos is not None
            return [*tokens, self.tokenizer.eos], [*is_target, True]
        return tokens, is_target

    def _check_kept(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, whole: str, where: str
    ) -> None:
        """Errors: DataError where the rendered text lacks words of a message, a tool or a call."""
        for number, message in enumerate(messages, 1):
            content, role = message.get("content"), message["role"]
            if role in _ROLES_KEPT and isinstance(content, str) and not _is_in(content.strip(), whole):
                raise DataError(
                    f"{where}: the chat template leaves out message {number}, of role {role!r}: {_NO_ROLE[role]}"
                )
            if not all(_is_in(name, whole) for name in _function_names(message.get("tool_calls"))):
                raise DataError(
                    f"{where}: the chat template leaves out the tool_calls of message {number}: {_NO_ROLE['tool']}"
                )
        if not all(_is_in(name, whole) for name in _function_names(tools)):
            raise DataError(f"{where}: the chat template leaves out the {TOOLS}: {_NO_ROLE['tool']}")

    def _refused(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, where: str, error: DataError
    ) -> DataError:
        """The error for a chat that the template refuses; it names the system role where that is the reason."""
        others = [message for message in messages if message["role"] != "system"]
        advice = "change the messages, or give another tokenizer's folder"
        if others and len(others) < len(messages):
            try:
                self.tokenizer.render(others, tools)
                return DataError(f"{where}: the chat template has no system role ({error}): {_NO_ROLE['system']}")
            except DataError:
                pass
        return DataError(f"{where}: {error}: {advice}")

    def _kept(
        self, num_input: int, num_target: int, where: str, task: str = "", *, num_beside: int = 0
    ) -> tuple[int, int]:
        return self.bounds.kept(
            task, num_beside=num_beside, num_input=num_input, num_target=num_target, where=f"{where}: the sample"
        )


def _is_in(words: str, whole: str) -> bool:
    """Whether the text has these words, as they are or as JSON, which templates write for tools."""
    return words in whole or json.dumps(words, ensure_ascii=False)[1:-1] in whole


def _function_names(described: Any) -> list[str]:
    """The names of tools or of calls, each described by {"function": {"name", …}} or by the inner object."""
    functions = [entry.get("function", entry) for entry in described or () if isinstance(entry, dict)]
    return [entry["name"] for entry in functions if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


_NO_ROLE = {
    "system": "put its words into the first user message, or give a template that has one",
    "user": "give a template that has all of them",
    "tool": "give a template that has tools, or leave them out of the data",
}


def template_of(record: Mapping[str, object], named: RecordFields, where: str) -> tuple[Template, RecordFields]:
    """The template that fits a record by its fields, and these fields.

    Where `named` has no pair the record is a text. Where `named` has the default pair, any pair of `PAIRS` will do.

    Errors: DataError for a record that fits no template.
    """
    if named.pair is None:
        if named.text in record:
            return "text", named
        raise lacking(record, [named.text], where=where, fields="name a field that it has, or leave out --text-key")
    pairs = (named.pair,) if named.pair != PAIRS[0] else PAIRS
    if is_chat(record):
        return "chat", named
    for pair in pairs:
        if all(name in record for name in pair):
            return "prompt", RecordFields(pair, named.text)
    if named.text in record:
        return "text", named
    kinds = [MESSAGES, *(" and ".join(pair) for pair in pairs), named.text]
    raise lacking(
        record,
        [named.text],
        where=where,
        fields=f"give one of {'; '.join(kinds)}, or name yours with --input-key and --target-key, or --text-key",
    )


def unread_pair(record: Mapping[str, object]) -> tuple[str, ...]:
    """The fields of a record's prompt and answer; empty where it lacks one of them.

    >>> unread_pair({"instruction": "add", "input": "1 1", "output": "2", "text": "add 1 1: 2"})
    ('instruction', 'input', 'output')
    """
    prompt, answer = ([name for name in names if name in record] for names in (PROMPT_FIELDS, ANSWER_FIELDS))
    return (*prompt, *answer) if prompt and answer else ()


def is_chat(record: Mapping[str, object]) -> bool:
    return MESSAGES in record or CONVERSATIONS in record


def _strings(record: Mapping[str, object], names: tuple[str, ...], where: str) -> list[str]:
    if missing := [name for name in names if name not in record]:
        raise lacking(record, missing, where=where, fields="all records of the data must be of one kind")
    return [string_field(record, name, where=where) for name in names]


def _messages(record: Mapping[str, object], where: str) -> list[Mapping[str, Any]]:
    """The messages of a chat. Errors: DataError for anything that is not a chat."""
    if not is_chat(record):
        raise lacking(record, [MESSAGES], where=where, fields="all records of the data must be of one kind")
    messages = record[MESSAGES] if MESSAGES in record else _as_messages(record, where)
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: field {MESSAGES!r} must be a list of {{"role", "content"}}, at least one')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{where}: message {number} must be an object with a "role", like "user"')
        if message["role"] == "assistant" and (
            switches := [f"{name} {message[name]!r}" for name in _LOSS_SWITCHES if message.get(name) not in (None, 1)]
        ):
            raise DataError(
                f"{where}: message {number} has {switches[0]}, but loss falls on every answer: leave that out to train"
                " on it, or give it a role that is not trained on"
            )
        if message.get("content") is None and (message.get("tool_calls") or message["role"] == "tool"):
            continue
        if "content" not in message:
            raise DataError(f"{where}: message {number}, of role {message['role']!r}, lacks 'content': give its text")
        string_field(message, "content", where=f"{where}, message {number}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to train on: remove it")
    return messages


def _as_messages(record: Mapping[str, object], where: str) -> object:
    """ShareGPT's turns, {"from", "value"} each, as messages; a list that is not of turns is returned unchanged."""
    if record.get("system"):
        raise DataError(f"{where}: field 'system' stands beside {CONVERSATIONS!r}: make it the first turn of these")
    turns = record[CONVERSATIONS]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" not in turn for turn in turns):
        return turns
    for number, turn in enumerate(turns, 1):
        if turn.get("from") not in _SPEAKERS or "value" not in turn:
            raise DataError(
                f"{where}: turn {number} of {CONVERSATIONS!r} is from {short(turn.get('from'))}: known are"
                f' {", ".join(_SPEAKERS)}, with a "value" each; write others as {MESSAGES!r} of "role" and "content"'
            )
    return [
        {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}
        | {name: turn[name] for name in _LOSS_SWITCHES if name in turn}
        for turn in turns
    ]


def _with_targets(rendered: Rendered, where: str) -> Rendered:
    if any(rendered.is_target):
        return rendered
    raise DataError(
        f"{where}: nothing is left to train on within max_seq_len: raise it with --max-seq-len, or remove the record"
    )


def first_target(is_target: Sequence[bool]) -> int:
    """
    >>> first_target([False, False, True, False])
    2
    """
    return list(is_target).index(True)
