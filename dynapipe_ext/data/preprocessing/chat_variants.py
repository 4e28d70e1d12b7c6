"""The spellings of a chat that templates take: contents as text or as lists of parts, arguments of calls as objects or
as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
THOUGHT_END = "</think>"


def spellings(messages: Messages) -> Iterator[Messages]:
    """The messages as most templates read them, then as others do: with contents as parts, with arguments as text, and
    with null or an empty text for the content of a message that is calls alone.

    Arguments that are JSON text, as published programs of models return them, are objects first: most templates write
    text that they are given as a string within JSON. Fields that are null are left out first: many templates write the
    word None, but know of fields that are not there.
    """
    chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
    yield from _spellings(chat)
    if any("content" not in message for message in chat):
        for empty in (None, ""):
            yield from _spellings([{"content": empty, **message} for message in chat])


def _spellings(messages: Messages) -> Iterator[Messages]:
    with_objects, with_text = _with_arguments(messages, argument_object), _with_arguments(messages, _as_text)
    yield with_objects
    yield as_parts(with_objects)
    if with_text != with_objects:
        yield with_text
        yield as_parts(with_text)


def keeps_words(text: str, messages: Messages) -> bool:
    """Whether a chat's text has the last line of each message, which may lack a thought, and no arguments of a call as
    Python writes them."""
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    plain = [message.get("content") for message in messages if not message.get("tool_calls")]
    said = [text.rpartition(THOUGHT_END)[2].strip() for text in plain if isinstance(text, str)]
    ends = [text.splitlines()[-1].strip() for text in said if text]
    calls = [argument_object(call_arguments(call)) for message in messages for call in message.get("tool_calls") or ()]
    as_python = [str(one) for one in calls if one and isinstance(one, Mapping)]
    return all(is_in(end, text) for end in ends) and not any(
        words in text and not any(words in content for content in texts) for words in as_python
    )


def is_in(words: str, whole: str) -> bool:
    """Whether the text has these words, as they are or as JSON, which templates write for tools."""
    return words in whole or json.dumps(words, ensure_ascii=False)[1:-1] in whole


def as_parts(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages with texts as lists of one part, for templates of models that also read pictures."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_arguments(messages: Messages, write: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
    return [
        {**message, "tool_calls": [with_arguments(call, write(call_arguments(call))) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_arguments(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    """The call with these arguments, where it has any."""
    if call_arguments(call) is None:
        return call
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def with_function_name(described: Any, rename: Callable[[str], str]) -> Any:
    """A tool or a call with another name of its function, where it has one."""
    if not isinstance(described, Mapping):
        return described
    if isinstance(described.get("function"), Mapping):
        return {**described, "function": with_function_name(described["function"], rename)}
    return {**described, "name": rename(described["name"])} if isinstance(described.get("name"), str) else described


def call_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function.get("arguments") if isinstance(function, Mapping) else None


def argument_object(arguments: Any) -> Any:
    """
    >>> argument_object('{"place": "Rome"}'), argument_object("Rome")
    ({'place': 'Rome'}, 'Rome')
    """
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if arguments is None or isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
