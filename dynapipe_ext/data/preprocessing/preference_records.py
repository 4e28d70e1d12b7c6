"""Records of preference data: a prompt with two answers to it, of which people chose one and rejected the other.

{"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}              texts
{"chosen": TEXT, "rejected": TEXT}                              texts that begin alike: with the prompt
{"prompt": [messages], "chosen": [messages], "rejected": …}     a chat, and two ways in which it goes on
{"chosen": [messages], "rejected": [messages]}                  two chats that begin alike: with the prompt
{"conversations": [turns], "chosen": {turn}, "rejected": …}     ShareGPT's chat, and two ways in which it goes on
{"instruction", "input", "chosen": TEXT, "rejected": TEXT}      an instruction and two answers; so of "question" and
                                                                other names of one

As TRL's DPOTrainer and LLaMA-Factory take them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynapipe_ext.data.examples import PREFERENCE, lacking, string_field
from dynapipe_ext.data.preprocessing.record_forms import (
    CONTEXTS,
    CONVERSATIONS,
    HISTORY,
    PROMPT_FIELDS,
    SYSTEMS,
    TOOLS,
    RecordFields,
    chat_of,
    prompt_and_answer,
)
from dynapipe_ext.errors import DataError

CHOSEN, REJECTED, _PROMPT = "chosen", "rejected", "prompt"
_ANSWERS = (CHOSEN, REJECTED)
_OUTPUT = "output"
_QUESTIONS = tuple(name for name in PROMPT_FIELDS if name != _PROMPT)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TextPreference:
    """A prompt and two answers that follow it."""

    prompt: str
    answers: tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatPreference:
    """The messages of a prompt, and two lists of messages that follow them."""

    prompt: Messages
    answers: tuple[Messages, Messages]
    tools: list[Any] | None

    def chats(self) -> tuple[Messages, Messages]:
        """Both whole chats."""
        chosen, rejected = self.answers
        return [*self.prompt, *chosen], [*self.prompt, *rejected]


def preference_of(
    record: Mapping[str, object], where: str, *, instructions_as_chats: bool
) -> TextPreference | ChatPreference:
    """What a record prefers to what. Errors: DataError for a record that is no preference, or whose answers have no
    prompt or are no answers."""
    if missing := sorted(PREFERENCE - record.keys()):
        raise lacking(record, missing, where=where, fields="all records must have a chosen and a rejected answer")
    answers = [record[name] for name in _ANSWERS]
    if all(isinstance(answer, str) for answer in answers):
        if (question := _question(record)) is not None:
            return _of_instruction(record, question, where, instructions_as_chats=instructions_as_chats)
        return _of_texts(record, where)
    if any(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: one of {CHOSEN!r} and {REJECTED!r} is a text and the other is not: give two alike")
    return _of_chats(record, where)


def _question(record: Mapping[str, object]) -> str | None:
    """The field of what was asked, where that is not the prompt itself."""
    if record.get(_PROMPT) is not None:
        return None
    return next((name for name in _QUESTIONS if isinstance(record.get(name), str)), None)


def _of_texts(record: Mapping[str, object], where: str) -> TextPreference:
    chosen, rejected = (string_field(record, name, where=where) for name in _ANSWERS)
    if beside := [name for name in (*SYSTEMS, HISTORY) if record.get(name)]:
        raise DataError(
            f"{where}: field {beside[0]!r} is part of a chat, but prompt and answers are text: rename the prompt to"
            " 'instruction', write lists of messages, or leave it out"
        )
    if record.get(_PROMPT) is not None:
        return TextPreference(string_field(record, _PROMPT, where=where), (chosen, rejected))
    size = num_alike(chosen, rejected)
    if size and chosen[size - 1 : size] == " ":  # a word keeps the blank before it
        size -= 1
    if not size:
        raise DataError(f"{where}: {CHOSEN!r} and {REJECTED!r} do not begin alike, so there is no prompt: give one")
    return TextPreference(chosen[:size], (chosen[size:], rejected[size:]))


def _of_instruction(
    record: Mapping[str, object], question: str, where: str, *, instructions_as_chats: bool
) -> TextPreference | ChatPreference:
    fields = RecordFields((question, _OUTPUT), is_instruction=True)
    beside = {name: record[name] for name in (question, *CONTEXTS, *SYSTEMS, HISTORY, TOOLS) if name in record}
    both = [{**beside, _OUTPUT: record[name]} for name in _ANSWERS]
    if instructions_as_chats:
        chats = [chat_of(one, fields, where) for one in both]
        chosen, rejected = ([chat.messages[-1]] for chat in chats)
        return ChatPreference(chats[0].messages[:-1], (chosen, rejected), chats[0].tools)
    (prompt, chosen_text), (_, rejected_text) = (prompt_and_answer(one, fields, where) for one in both)
    return TextPreference(prompt, (chosen_text, rejected_text))


def _of_chats(record: Mapping[str, object], where: str) -> ChatPreference:
    """By `chat_of`, which knows what messages and turns are made of, once for each answer."""
    rest = {name: value for name, value in record.items() if name not in (*_ANSWERS, _PROMPT)}
    answers: list[list[Any]] = [one if isinstance(one := record[name], list) else [one] for name in _ANSWERS]
    if CONVERSATIONS in record:
        turns = record[CONVERSATIONS]
        if not isinstance(turns, list):
            raise DataError(f"{where}: field {CONVERSATIONS!r} must be a list of turns")
        both = [{**rest, CONVERSATIONS: [*turns, *_like(turns, answer)]} for answer in answers]
        has_prompt = bool(turns)
    else:
        prompt = _prompt_messages(record, answers, where)
        both = [{**rest, "messages": [*prompt, *answer]} for answer in answers]
        has_prompt = bool(prompt)
    first, second = (chat_of(one, RecordFields(), where) for one in both)
    num_prompt = len(first.messages) - len(answers[0]) if has_prompt else num_alike(first.messages, second.messages)
    for name, chat in zip(_ANSWERS, (first, second), strict=True):
        if not any(message["role"] == "assistant" for message in chat.messages[num_prompt:]):
            raise DataError(f"{where}: {name!r} has no message of the role 'assistant' behind what both begin with")
    if not num_prompt:
        raise DataError(f"{where}: {CHOSEN!r} and {REJECTED!r} do not begin alike, so there is no prompt: give one")
    chosen, rejected = first.messages[num_prompt:], second.messages[num_prompt:]
    return ChatPreference(first.messages[:num_prompt], (chosen, rejected), first.tools)


def _prompt_messages(record: Mapping[str, object], answers: Sequence[Any], where: str) -> list[Any]:
    """Messages of the prompt; none where both answers begin with them."""
    prompt = record.get(_PROMPT)
    if isinstance(prompt, list):
        return prompt
    name = _question(record) or (None if prompt is None else _PROMPT)
    if name is None or num_alike(*answers):
        return []
    return [{"role": "user", "content": string_field(record, name, where=where)}]


def _like(turns: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
    """An answer's messages, as turns where the prompt is of turns."""
    of_turns = turns and isinstance(turns[0], dict) and "from" in turns[0]
    if not of_turns:
        return list(answer)
    renamed = {"role": "from", "content": "value"}
    return [
        {renamed.get(name, name): value for name, value in message.items()} if isinstance(message, dict) else message
        for message in answer
    ]


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many places are equal from the first on.

    >>> num_alike("prompt a", "prompt b"), num_alike([1], [2])
    (7, 0)
    """
    places = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(places) if a != b), min(len(one), len(other)))
