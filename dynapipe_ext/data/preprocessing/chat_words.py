"""Whether the text of a chat has every word of its messages, and at which places.

A chat is rendered again with a character of its own before each word:

    {"role": "user", "content": "how are"}   →   <|im_start|>user ①how ②are<|im_end|>

The template must write the same text but for these characters, and it must write all of them. So a word that also
occurs elsewhere cannot stand in for one that the template leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynapipe_ext.data.preprocessing.chat_variants import (
    THOUGHT_END,
    Messages,
    argument_object,
    call_arguments,
    is_in,
    with_arguments,
    with_function_name,
)
from dynapipe_ext.errors import DataError, short

WordPart = Literal["content", "thought", "arguments", "name", "tools"]
Choose = Callable[[Sequence[re.Match[str]], str], Sequence[re.Match[str]]]

_FIRST_MARK, _LAST_MARK = 0xF0000, 0x10FFFD  # two planes of characters for private use
_MARKS = re.compile("([\U000f0000-\U0010fffd])")
# Templates look for tags, which must stay whole: words are of the second group.
_WORDS = re.compile(r"(<[^<>\s]{1,40}>)|([^\s<]{1,24}|<)")
_THOUGHTS = ("reasoning_content", "thinking")  # fields of a message
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')  # of JSON; a key is followed by a colon
_WORDS_OF_STRING = re.compile(r"(\\(?:u[0-9a-fA-F]{4}|.))|([^\s\\]{1,24})")
_LOOKED_AT = ("system", "developer", "name", "tools")  # not marked for a template that looks at them
_WRITTEN_OTHERWISE = ("arguments", "thought")  # nor these for one that writes them as escapes, for example
ADVICE = {  # by role, if a template leaves out words
    "system": "put its words into the first user message, or give a template that has one",
    "user": "give a template that has all of them",
    "tool": "give a template that has tools, or leave them out of the data",
    "assistant": "give a template that writes all of it, or leave that out of the data",
}
_NO_THOUGHT = "remove it, train on the last answer only (--loss-on last-answer), or take a template that writes it"


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a message, or of the tools. A template may leave out those that are optional."""

    message: int
    part: WordPart
    text: str
    is_optional: bool


class _Marker:
    """Puts a character of its own before each word that `choose` takes, by the role of a content or the part of
    another text; `words` says before which. It `skips` some if `choose` does, or if no character is left."""

    def __init__(self, choose: Choose, used: str) -> None:
        taken = set(_MARKS.findall(used))
        self._marks = (mark for mark in map(chr, range(_FIRST_MARK, _LAST_MARK + 1)) if mark not in taken)
        self._choose = choose
        self.words: dict[str, _Word] = {}
        self.skips = False

    def message(self, number: int, message: Mapping[str, Any], is_trained: bool) -> Mapping[str, Any]:
        """The message with marks. Thoughts of an answer that is not trained on are optional: many templates leave out
        earlier ones."""
        marked, role = dict(message), str(message["role"])
        is_optional = role == "assistant" and not is_trained
        if isinstance(content := message.get("content"), str):
            num_optional = content.rfind(THOUGHT_END) if is_optional else 0
            marked["content"] = self._text(number, "content", content, role, num_optional)
        thoughts = {name: message[name] for name in _THOUGHTS if isinstance(message.get(name), str)}
        texts = {
            text: self._text(number, "thought", text, role, len(text) if is_optional else 0)
            for text in thoughts.values()
        }
        marked |= {name: texts[text] for name, text in thoughts.items()}  # a template reads one of both names
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(number, call, role) for call in calls]
        return marked

    def tools(self, tools: Sequence[Any] | None) -> Sequence[Any] | None:
        return tools and [with_function_name(tool, lambda name: self._text(-1, "tools", name, "")) for tool in tools]

    def _call(self, number: int, call: Any, role: str) -> Any:
        if not isinstance(call, Mapping):
            return call
        call = with_function_name(call, lambda name: self._text(number, "name", name, role))
        arguments = call_arguments(call)
        if isinstance(arguments, str) and isinstance(argument_object(arguments), Mapping):
            # the text stays as it is, but for its strings
            return with_arguments(call, _STRING.sub(lambda string: self._string(number, string, role), arguments))
        return with_arguments(call, self._value(number, arguments, role))

    def _value(self, number: int, value: Any, role: str) -> Any:
        match value:
            case str():
                return self._text(number, "arguments", value, role)
            case Mapping():
                return {name: self._value(number, one, role) for name, one in value.items()}
            case list():
                return [self._value(number, one, role) for one in value]
        return value

    def _string(self, number: int, string: re.Match[str], role: str) -> str:
        if string[2]:
            return string[0]
        return f'"{self._text(number, "arguments", string[1], role, expression=_WORDS_OF_STRING)}"'

    def _text(
        self,
        message: int,
        part: WordPart,
        text: str,
        role: str,
        num_optional: int = 0,
        expression: re.Pattern[str] = _WORDS,
    ) -> str:
        """The text with marks; its first `num_optional` characters are."""
        found = list(expression.finditer(text))
        words = [word for word in found if word.lastindex == 2] or found
        chosen, pieces, end = self._choose(words, role if part == "content" else part), [], 0
        self.skips = self.skips or len(chosen) < len(words)
        for word in chosen:
            mark = next(self._marks, "")
            self.skips = self.skips or not mark
            if mark:
                self.words[mark] = _Word(message, part, word[0], word.start() < num_optional)
            pieces += [text[end : word.start()], mark]
            end = word.start()
        return "".join([*pieces, text[end:]])


def _inner(words: Sequence[re.Match[str]], kind: str) -> Sequence[re.Match[str]]:
    """All but the first, for templates that look at the beginnings of texts, or for words of systems."""
    return [] if kind in _LOOKED_AT else words[1:] or words


def _middle(words: Sequence[re.Match[str]], kind: str) -> Sequence[re.Match[str]]:
    """One near the middle; of answers near the end, as templates may drop thoughts."""
    if kind in (*_LOOKED_AT, *_WRITTEN_OTHERWISE) or not words:
        return []
    place = len(words) * 7 // 8 if kind == "assistant" else len(words) // 2
    return [words[min(place, len(words) - 1)]]


_CHOICES: tuple[Choose, ...] = (lambda words, _: words, _inner, _middle)


def find_words(
    render: Callable[[Messages, Sequence[Any] | None], str],
    messages: Messages,
    tools: Sequence[Any] | None,
    whole: str,
    is_trained: Sequence[bool],
) -> list[list[int]]:
    """Return for each message the places in `whole` of the words of its content, thought and arguments of calls.

    `whole` is `render(messages, tools)`. Thoughts of answers that are not trained on may be missing.

    Raises DataError if the template leaves out other words, or writes messages otherwise by their words.
    """
    for choose in _CHOICES:
        marker = _Marker(choose, whole)
        pairs = enumerate(zip(messages, is_trained, strict=True))
        marked = [marker.message(number, message, trained) for number, (message, trained) in pairs]
        try:
            text = render(marked, marker.tools(tools))
        except DataError:  # of a template that looks at words
            continue
        places, plain = _places(text, marker.words)
        if plain != whole:
            continue
        for mark, word in marker.words.items():
            if mark not in places and not word.is_optional:
                raise _left_out(word, messages)
        if marker.skips:
            _check_contained(messages, tools, whole, is_trained)
        of_messages: list[list[int]] = [[] for _ in messages]
        for mark, where in places.items():
            if marker.words[mark].part not in ("name", "tools"):
                of_messages[marker.words[mark].message] += where
        return [sorted(where) for where in of_messages]
    _check_contained(messages, tools, whole, is_trained)
    raise DataError(
        "the chat template writes messages otherwise by their words, so answers cannot be told apart: change the"
        " messages, or give another tokenizer's folder"
    )


def _places(text: str, words: Mapping[str, _Word]) -> tuple[dict[str, list[int]], str]:
    """Where each mark is in the text, and the text without them."""
    places: dict[str, list[int]] = {}
    pieces, length = list[str](), 0
    for piece in _MARKS.split(text):
        if piece in words:
            places.setdefault(piece, []).append(length)
            continue
        pieces.append(piece)
        length += len(piece)
    return places, "".join(pieces)


def _check_contained(messages: Messages, tools: Sequence[Any] | None, whole: str, is_trained: Sequence[bool]) -> None:
    """Check that the text has the words of messages and tools at some place. Raises DataError."""
    for number, (message, trained) in enumerate(zip(messages, is_trained, strict=True)):
        for part, words in _stretches(message, trained):
            if not is_in(words, whole):
                raise _left_out(_Word(number, part, words, False), messages)
    for name in function_names(tools):
        if not is_in(name, whole):
            raise _left_out(_Word(-1, "tools", name, False), messages)


def _stretches(message: Mapping[str, Any], is_trained: bool) -> Iterator[tuple[WordPart, str]]:
    has_thoughts = is_trained or message["role"] != "assistant"
    if isinstance(content := message.get("content"), str):
        thought, _, words = content.rpartition(THOUGHT_END)
        yield "content", words.strip()
        if has_thoughts:
            yield "content", thought.strip().removeprefix("<think>").strip()
    thoughts = [message[name] for name in _THOUGHTS if isinstance(message.get(name), str)]
    if has_thoughts and thoughts:
        yield "thought", thoughts[0].strip()
    for words in words_of_calls(message.get("tool_calls")):
        yield "arguments", words


def _left_out(word: _Word, messages: Messages) -> DataError:
    """The error for a word that the template does not write."""
    if word.part == "tools":
        return DataError(f"the chat template leaves out the tools: {ADVICE['tool']}")
    place, role = f"message {word.message + 1}", str(messages[word.message]["role"])
    if word.part in ("arguments", "name"):
        return DataError(f"the chat template leaves out the tool_calls of {place}: {ADVICE['tool']}")
    if word.part == "thought":
        return DataError(f"the chat template leaves out the thought of {place} (reasoning_content): {_NO_THOUGHT}")
    content = str(messages[word.message]["content"])
    if role == "assistant" and word.text in content.rpartition(THOUGHT_END)[0]:
        what = f"the thought of {place} ({short(word.text)} before {THOUGHT_END})"
        return DataError(f"the chat template leaves out {what}: {_NO_THOUGHT}")
    advice = ADVICE.get(role, "use a role that it has, such as 'system', or give a template that has this one")
    what = f"the words of {place}" if role == "assistant" else place
    return DataError(f"the chat template leaves out {what}, of role {role!r} ({short(word.text)}): {advice}")


def function_names(described: Any) -> list[str]:
    """The names of tools or of calls, each described by {"function": {"name", …}} or by the inner object."""
    functions = [entry.get("function", entry) for entry in described or () if isinstance(entry, dict)]
    return [entry["name"] for entry in functions if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


def words_of_calls(calls: Any) -> list[str]:
    """The names of calls and the texts among their arguments."""
    objects = [argument_object(call_arguments(call)) for call in calls or ()]
    values = [value for one in objects if isinstance(one, Mapping) for value in one.values()]
    return [*function_names(calls), *(value.strip() for value in values if isinstance(value, str))]
