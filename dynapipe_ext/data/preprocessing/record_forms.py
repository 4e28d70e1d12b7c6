"""The forms of records of training data. Each becomes a chat, a prompt with its answer, or a text; where a run learns
preferences, a prompt with two answers (`preference_records.py`).

{"messages": [{"role", "content"}], "system", "tools"}       a chat, under one of the names `CHATS`
{"conversations": [{"from", "value"}], "system", "tools"}    a chat, as ShareGPT writes it
{"prompt": [messages], "completion": [messages]}             a chat of which only the completion is trained on
{"instruction", "input", "output"}                           an instruction: a chat where a template is for chats
{"question", "answer"} and the other `INSTRUCTIONS`          the same
{"input", "target"} and the other `PAIRS`                    a prompt and its answer
{"text"}                                                     a text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynapipe_ext.data.examples import (
    PREFERENCE,
    Example,
    RepeatedKeyError,
    json_type,
    lacking,
    parsed_json,
    string_field,
)
from dynapipe_ext.errors import DataError, short

Template = Literal["chat", "prompt", "text", "preference"]
LossOn = Literal["answers", "last-answer"]
MESSAGES, CONVERSATIONS, TOOLS, TASK = "messages", "conversations", "tools", "task"
CHATS = (MESSAGES, CONVERSATIONS, "conversation", "dialogue", "dialog", "chat", "turns")
INSTRUCTION, CONTEXTS, SYSTEMS, HISTORY = "instruction", ("input", "context"), ("system", "system_prompt"), "history"
# The usual names of the fields of a question and its answer, which are a chat where a template is for chats.
INSTRUCTIONS = (
    (INSTRUCTION, "output"),
    (INSTRUCTION, "response"),
    (INSTRUCTION, "answer"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("problem", "answer"),
    ("prompt", "answer"),
    ("prompt", "output"),
    ("input", "output"),
    ("input", "response"),
    ("input", "answer"),
)
# Those, and the names of a text and its continuation, which come first.
PAIRS = (("input", "target"), ("prompt", "response"), ("prompt", "completion"), ("inputs", "targets"), *INSTRUCTIONS)
LABEL = "label"  # beside a completion: whether it is a good one, as KTO learns from
# Names of such fields in general: where a record has some beside those that are read, that is said.
PROMPT_FIELDS = (INSTRUCTION, "prompt", "question", "query", "problem", "input", "inputs")
ANSWER_FIELDS = ("output", "response", "completion", "answer", "solution", "target", "targets")
CHAT_FIELDS = frozenset((*CHATS, TOOLS, TASK, *SYSTEMS, HISTORY, *CONTEXTS, "prompt", "completion"))
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_ROLES = {name: role for name, role in _SPEAKERS.items() if role in ("user", "assistant", "system")} | {
    "tool": "tool",
    "function": "tool",  # of OpenAI's older form, with "function_call" for one call
}
_LOSS_SWITCHES = ("weight", "train")  # fields of a message that say whether loss falls on it


@dataclass(frozen=True, slots=True)
class RecordFields:
    """The names of the fields of a record. Without a pair every record is a text, whatever other fields it has.

    The pair of an instruction (`is_instruction`) may have more beside it: its input, a system prompt, a history.
    Every pair of `INSTRUCTIONS` that was not named is one.
    """

    pair: tuple[str, str] | None = PAIRS[0]
    text: str = "text"
    is_instruction: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as chat templates take them, whether loss falls on each, and the descriptions of tools, if any."""

    messages: list[Mapping[str, Any]]
    is_trained: tuple[bool, ...]
    tools: list[Any] | None

    @property
    def answers(self) -> list[bool]:
        """Whether loss falls on each answer."""
        pairs = zip(self.messages, self.is_trained, strict=True)
        return [is_trained for message, is_trained in pairs if message["role"] == "assistant"]


def template_of(
    record: Mapping[str, object], named_fields: RecordFields, where: str, *, instructions_as_chats: bool = False
) -> tuple[Template, RecordFields]:
    """The template that fits a record by its fields, and these fields.

    Where `named` has no pair the record is a text. Where `named` has the default pair, any pair of `PAIRS` will do.

    Errors: DataError for a record that fits no template, and for an answer that is marked as good or bad, unless its
    fields are named.
    """
    if named_fields.pair is None:
        if named_fields.text in record:
            return "text", named_fields
        raise lacking(
            record, [named_fields.text], where=where, fields="name a field that it has, or leave out --fields"
        )
    pairs = (named_fields.pair,) if named_fields.pair != PAIRS[0] else PAIRS
    if named_fields.pair == PAIRS[0] and "completion" in record and str(record.get(LABEL)).lower() in ("true", "false"):
        raise DataError(
            f"{where}: unpaired preference data: {LABEL!r} says whether the completion is a good one, but loss would"
            " fall on bad ones, too: leave these out, and the field, or name --fields prompt completion"
            " to train on all"
        )
    if is_chat(record):
        return "chat", named_fields
    for pair in pairs:
        if all(name in record for name in pair):
            is_instruction = pair in INSTRUCTIONS and named_fields.pair == PAIRS[0]  # a pair that is named is just that
            fields = RecordFields(pair, named_fields.text, is_instruction)
            _refuse_no_texts(record, pair, where)
            if not is_instruction and named_fields.pair == PAIRS[0]:
                _refuse_parts_of_chats(record, pair, where)
            return ("chat" if is_instruction and instructions_as_chats else "prompt"), fields
    if named_fields.text in record:
        return "text", named_fields
    if is_message(record):
        raise DataError(
            f"{where}: the record is one message of a chat: put all messages of a chat into one record,"
            f' {{"{MESSAGES}": [messages]}}, or into a list of their own'
        )
    usual = (*PAIRS[:4], (INSTRUCTION, "output"), ("question", "answer")) if named_fields.pair == PAIRS[0] else pairs
    kinds = [MESSAGES, *(" and ".join(pair) for pair in usual), named_fields.text]
    raise lacking(
        record,
        [named_fields.text],
        where=where,
        fields=f"give one of {'; '.join(kinds)}, or name yours with --fields",
    )


def _refuse_no_texts(record: Mapping[str, object], pair: tuple[str, str], where: str) -> None:
    """Errors: DataError where a pair of fields holds a list beside a string, or lists or objects alone."""
    kinds = [json_type(record[name]) for name in pair]
    if sorted(kinds) == ["a list", "a string"]:
        raise DataError(
            f"{where}: {pair[0]!r} is {kinds[0]} and {pair[1]!r} {kinds[1]}: write both as text, or both as"
            ' lists of {"role", "content"}'
        )
    if all(isinstance(record[name], list | dict) for name in pair):
        raise DataError(
            f"{where}: {pair[0]!r} and {pair[1]!r} are {json_type(record[pair[0]])} each, as a whole table has"
            f" its columns: write an object for each row, with strings, or chats as {MESSAGES!r}"
        )


def columns_of(template: Template | None, fields: RecordFields) -> frozenset[str]:
    """The fields of a record that are read."""
    pair = fields.pair or ()
    if template == "preference":
        return CHAT_FIELDS | frozenset(pair) | PREFERENCE | frozenset(PROMPT_FIELDS)
    if template == "chat":
        return CHAT_FIELDS | frozenset(pair)
    beside = (*CONTEXTS, *SYSTEMS, HISTORY) if fields.is_instruction else ()
    return frozenset((fields.text, *pair, TASK, *beside))


def unread_fields(record: Mapping[str, object], template: Template, fields: RecordFields) -> tuple[str, ...]:
    """The fields of a record that hold its words, too, and are not read: of a text its prompt and answer, of an
    instruction its text and other answers.

    >>> alpaca = {"instruction": "add", "input": "1 1", "output": "2", "text": "add 1 1: 2"}
    >>> unread_fields(alpaca, "prompt", RecordFields(("instruction", "output"), is_instruction=True))
    ('text',)
    >>> unread_fields({"question": "1 1", "answer": "2", "text": "1 1: 2"}, "text", RecordFields())
    ('question', 'answer')
    >>> numina = {"problem": "1 + 1", "solution": "It is 2.", "answer": "2"}
    >>> unread_fields(numina, "prompt", RecordFields(("problem", "solution"), is_instruction=True))
    ('answer',)
    """
    if template == "text":
        prompt, answer = ([name for name in names if name in record] for names in (PROMPT_FIELDS, ANSWER_FIELDS))
        return (*prompt, *answer) if prompt and answer else ()
    if not fields.is_instruction:
        return ()
    names_read = (*(fields.pair or ()), *CONTEXTS)
    others = (name for name in (*ANSWER_FIELDS, fields.text) if name not in names_read)
    return tuple(name for name in others if isinstance(record.get(name), str) and record[name])


def is_chat(record: Mapping[str, object]) -> bool:
    is_split = isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list)
    return chat_field(record) is not None or is_split


def chat_field(record: Mapping[str, object]) -> str | None:
    """The field that has a chat's messages: one of the first two names, or another of `CHATS` if it is a list.

    >>> chat_field({"messages": None, "chat": "a text"}), chat_field({"chat": []}), chat_field({"chat": "a text"})
    ('messages', 'chat', None)
    """
    names = [name for name in CHATS if name in record and (name in CHATS[:2] or isinstance(record[name], list))]
    return next((name for name in names if record[name] is not None), names[0] if names else None)


def is_message(value: object) -> bool:
    """Whether it is a message of a chat: an object with a "role" or, as ShareGPT has it, a "from"."""
    return isinstance(value, Mapping) and any(isinstance(value.get(name), str) for name in ("role", "from"))


def _refuse_parts_of_chats(record: Mapping[str, object], pair: tuple[str, str], where: str) -> None:
    """Errors: DataError for what a text and its continuation have no place for."""
    if beside := [name for name in (*SYSTEMS, HISTORY) if record.get(name)]:
        raise DataError(
            f"{where}: field {beside[0]!r} is part of a chat, but {pair[0]!r} and {pair[1]!r} are a text and its"
            f" continuation: rename them to 'instruction' and 'output', write {MESSAGES!r}, or name them by --fields"
            f" to leave {beside[0]!r} out"
        )


def example_of(record: Mapping[str, object], fields: RecordFields, *, where: str) -> Example:
    """The example in a record: its prompt and answer where it has both, else its text as target. Errors: DataError."""
    if fields.pair is not None and all(name in record for name in fields.pair):
        prompt, target = prompt_and_answer(record, fields, where)
    elif fields.text in record:
        prompt, target = "", string_field(record, fields.text, where=where)
    elif fields.pair is None:
        raise lacking(record, [fields.text], where=where, fields="all records must have the field named by --fields")
    else:
        advice = f'all must be of one kind, {{"{fields.pair[0]}", "{fields.pair[1]}"}} or {{"{fields.text}"}}'
        raise lacking(record, [name for name in fields.pair if name not in record], where=where, fields=advice)
    task = string_field(record, TASK, where=where) if TASK in record else "unnamed"
    return Example(task, prompt, target, place=where)


def prompt_and_answer(record: Mapping[str, object], fields: RecordFields, where: str) -> tuple[str, str]:
    """An instruction's prompt has headings, so that a model of plain text sees where its answer begins.

    >>> alpaca = {"instruction": "add", "input": "1 1", "output": "2"}
    >>> print(prompt_and_answer(alpaca, RecordFields(("instruction", "output"), is_instruction=True), "")[0])
    ### Instruction:
    add
    <BLANKLINE>
    ### Input:
    1 1
    <BLANKLINE>
    ### Response:
    <BLANKLINE>
    """
    assert fields.pair is not None
    prompt, answer = strings(record, fields.pair, where)
    if not fields.is_instruction:
        return prompt, answer
    for name in (*SYSTEMS, HISTORY):
        if record.get(name):
            raise DataError(
                f"{where}: field {name!r} is part of a chat: give a tokenizer with a chat template, or leave it out"
            )
    context = _context(record, fields.pair, where)
    parts = [("Instruction", prompt), *([("Input", context)] if context else []), ("Response", "")]
    return "\n\n".join(f"### {heading}:\n{words}" for heading, words in parts), answer


def strings(record: Mapping[str, object], names: Sequence[str], where: str) -> list[str]:
    """The texts in the fields `names`. Errors: DataError for a record that lacks one."""
    if missing := [name for name in names if name not in record]:
        raise lacking(record, missing, where=where, fields="all records of the data must be of one kind")
    return [string_field(record, name, where=where) for name in names]


def chat_of(record: Mapping[str, object], fields: RecordFields, where: str, *, loss_on: LossOn = "answers") -> Chat:
    """The chat in a record. Errors: DataError for anything that is not a chat, or has no answer to train on."""
    messages, num_context = _messages(record, fields, where)
    chat = [_message(message, number, where) for number, message in enumerate(messages, 1)]
    if not any(message["role"] == "assistant" for message in chat[num_context:]):
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to train on: remove it")
    is_trained = [_is_trained(message, number, where) for number, message in enumerate(messages, 1)]
    is_trained = [trained and place >= num_context for place, trained in enumerate(is_trained)]
    if not any(is_trained):
        raise DataError(f"{where}: no answer of it is to be trained on ({_switches()} of all are 0): remove it")
    if loss_on == "last-answer":
        last = max(place for place, trained in enumerate(is_trained) if trained)
        is_trained = [place == last for place in range(len(chat))]
    return Chat(chat, tuple(is_trained), _tools(record, where))


def _messages(record: Mapping[str, object], fields: RecordFields, where: str) -> tuple[list[Any], int]:
    """The messages of a record as they are written, but for names of speakers, and how many are no completion."""
    messages: object
    field, num_context = chat_field(record), 0
    if field is not None:
        messages = record[field]
        if isinstance(messages, str):  # as tables without lists have them
            messages = _parsed(messages, f"{where}: field {field!r}")
    elif is_chat(record):
        prompt, completion = record["prompt"], record["completion"]
        assert isinstance(prompt, list)
        assert isinstance(completion, list)
        messages, num_context = [*prompt, *completion], len(prompt)
    elif fields.pair is not None and fields.is_instruction:
        return _instruction(record, fields.pair, where), 0
    else:
        raise lacking(record, [MESSAGES], where=where, fields="all records of the data must be of one kind")
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: field {field or MESSAGES!r} must be a list of {{"role", "content"}}, at least one')
    if all(isinstance(message, dict) and "role" not in message for message in messages):
        messages = [_turn(turn, number, field or "prompt", where) for number, turn in enumerate(messages, 1)]
    messages = [_as_usual(message) for message in messages]
    if system := _system(record, where):
        if isinstance(messages[0], dict) and messages[0].get("role") == "system":
            name = next(name for name in SYSTEMS if record.get(name))
            raise DataError(f"{where}: field {name!r} stands beside a first turn of the system: keep one of them")
        return [{"role": "system", "content": system}, *messages], num_context + bool(num_context)
    return messages, num_context


def _as_usual(message: Any) -> Any:
    """The message, from "assistant" where its role is another name for that, and likewise of others, with its call
    among `tool_calls`."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return message
    usual = message | {"role": _ROLES.get(role.lower(), role)}
    if (call := usual.pop("function_call", None)) and not usual.get("tool_calls"):
        usual["tool_calls"] = [{"type": "function", "function": call}]
    return usual


def _system(record: Mapping[str, object], where: str) -> str:
    """The system prompt that stands beside a chat or an instruction. Errors: DataError for two of them."""
    names = [name for name in SYSTEMS if record.get(name)]
    if len(names) > 1:
        raise DataError(f"{where}: it has both {names[0]!r} and {names[1]!r}: keep one")
    return string_field(record, names[0], where=where) if names else ""


def _message(message: object, number: int, where: str) -> Mapping[str, Any]:
    """The message without the switches of its loss, and with its parts of text joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{where}: message {number} must be an object with a "role", like "user"')
    fields = {name: value for name, value in message.items() if value is not None and name not in _LOSS_SWITCHES}
    if message.get("content") is None and (message.get("tool_calls") or message["role"] == "tool"):
        return fields | ({"content": None} if "content" in message else {})
    if "content" not in message:
        raise DataError(f"{where}: message {number}, of role {message['role']!r}, lacks 'content': give its text")
    if isinstance(parts := message["content"], list):
        fields["content"] = "".join(_part(part, number, where) for part in parts)
    else:
        string_field(message, "content", where=f"{where}, message {number}")
    return fields


def _part(part: object, number: int, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
        return string_field(part, "text", where=f"{where}, message {number}")
    kind = part.get("type") if isinstance(part, dict) else json_type(part)
    raise DataError(f"{where}: message {number} has content of type {short(kind)}: give parts of type 'text' alone")


def _is_trained(message: Mapping[str, Any], number: int, where: str) -> bool:
    is_answer = bool(message["role"] == "assistant")
    for name in _LOSS_SWITCHES:
        if (switch := message.get(name)) is None:
            continue
        if switch not in (0, 1):
            raise DataError(f"{where}: message {number} has {name} {short(switch)}: give 0 or 1, or leave it out")
        if switch and not is_answer:
            raise DataError(
                f"{where}: message {number}, of role {message['role']!r}, has {name} {switch!r}, but loss falls on"
                " answers alone: leave that out"
            )
        if not switch:
            return False
    return is_answer


def _switches() -> str:
    return " or ".join(map(repr, _LOSS_SWITCHES))


def _instruction(record: Mapping[str, object], pair: tuple[str, str], where: str) -> list[Mapping[str, Any]]:
    """An instruction as a chat: system prompt, earlier questions with their answers, the instruction, the answer."""
    instruction, answer = strings(record, pair, where)
    messages: list[Mapping[str, Any]] = []
    if system := _system(record, where):
        messages.append({"role": "system", "content": system})
    history = record.get(HISTORY) or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError(f"{where}: field {HISTORY!r} must be a list of [question, answer]")
    for question, earlier in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": earlier}]
    context = _context(record, pair, where)
    question = f"{instruction}\n{context}" if context else instruction
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _context(record: Mapping[str, object], pair: tuple[str, str], where: str) -> str:
    """What an instruction is about. Errors: DataError for two of them."""
    contexts = [name for name in CONTEXTS if name not in pair and record.get(name)]
    if len(contexts) > 1:
        raise DataError(f"{where}: both {contexts[0]!r} and {contexts[1]!r} stand beside {pair[0]!r}: keep one")
    return string_field(record, contexts[0], where=where) if contexts else ""


def _turn(turn: Mapping[str, Any], number: int, field: str, where: str) -> dict[str, Any]:
    """One of ShareGPT's turns, {"from", "value"}, as a message."""
    speaker = turn.get("from")
    role = speaker.lower() if isinstance(speaker, str) else ""
    if role not in _SPEAKERS or "value" not in turn:
        raise DataError(
            f"{where}: turn {number} of {field!r} is from {short(speaker)}: known are"
            f' {", ".join(_SPEAKERS)}, with a "value" each; write others as {MESSAGES!r} of "role" and "content"'
        )
    switches = {name: turn[name] for name in _LOSS_SWITCHES if name in turn}
    if role == "function_call":
        calls = _parsed(turn["value"], f"{where}: turn {number}, a function_call,")
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and "name" in call for call in calls):
            raise DataError(f'{where}: turn {number}, a function_call, must be {{"name", "arguments"}} as JSON')
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]} | switches
    return {"role": _SPEAKERS[role], "content": turn["value"]} | switches


def _tools(record: Mapping[str, object], where: str) -> list[Any] | None:
    tools = record.get(TOOLS)
    if isinstance(tools, str):
        tools = _parsed(tools, f"{where}: field {TOOLS!r}") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: field {TOOLS!r} must be a list of the tools' descriptions, or left out")
    return tools or None


def _parsed(text: object, what: str) -> object:
    """Errors: DataError, which begins with `what`, for text that is not JSON."""
    try:
        return parsed_json(text) if isinstance(text, str) else text
    except RepeatedKeyError as error:
        raise DataError(f"{what}: {error}: keep one of the two") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error}): write the object, or its JSON as a string") from None
