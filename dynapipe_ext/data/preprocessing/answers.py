"""Where the answers of a chat lie in its text, whatever its chat template.

A chat is rendered again with a sentinel in the place of one answer. What stands before the sentinel and after it is
what the template writes around that answer:

    <|im_start|>user Hi<|im_end|> <|im_start|>assistant SENTINEL<|im_end|> <|im_start|>user …
                                  └ header ┘            └ end ┘

The header ends where the prompt for an answer ends. An answer's end is what still stands after it where it is the last
message, up to a border of special tokens. Loss falls on all between header and what follows the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dynapipe_ext.errors import DataError

Messages = Sequence[Mapping[str, Any]]
SENTINEL = "\ue0f0answer\ue0f1"
_MARKER = re.compile(r"<[|｜]?[^<>\s]{1,40}[|｜]?>")  # the look of special tokens, also of those that a tokenizer lacks
_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")  # what prompts for an answer may begin for it
# Headers that the model itself writes, as training templates of TRL 1.16 have it: of DeepSeek, GPT-OSS and their like.
_WRITTEN_HEADERS = re.compile(
    r"(<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|(?<=<\|im_start\|>assistant)\n)$"
)
_NEWLINE_IS_WRITTEN = re.compile(r"message\.content %\}\s*\{\{- '\\n' \+ message\.content")  # Qwen2.5
# Parts of published templates that leave out earlier thoughts, or all, and what keeps them: (sign of the template, the
# part, its replacement). Without them an answer would be trained on that the model does not give.
_KEPT_THOUGHTS = (
    ("ns.last_query_index", "loop.index0 > ns.last_query_index", "true"),
    ("ns.last_query_index", "loop.last or (not loop.last and reasoning_content)", "true"),
    (
        "system_prompt='') %}",  # DeepSeek-R1's distilled models; V3 has more in its namespace
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
    ),
)


@lru_cache(maxsize=16)
def training_template(template: str) -> str:
    """The chat template with which a model is trained: as published, but that it keeps the thoughts of all answers."""
    for sign, part, replacement in _KEPT_THOUGHTS:
        if sign in template:
            template = template.replace(part, replacement)
    return template


def writes_newline(template: str) -> bool:
    """Whether the template writes the line's end after an answer's header together with the answer."""
    return bool(_NEWLINE_IS_WRITTEN.search(template))


def answer_spans(
    render: Callable[[Messages, bool], str], messages: Messages, *, newline_is_written: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The chat's text, and the first and the last character (excluded) of what loss falls on, for each answer.

    `render(…, True)` ends with the prompt for an answer. Where the template writes no end of a last answer, the text
    ends with the special token with which the next message would begin, if it has one.

    Errors: DataError that says why an answer cannot be found; those of `render`.
    """
    whole, spans, has_end = render(messages, False), [], True
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop, has_end = _span(render, messages, number, whole, newline_is_written=newline_is_written)
            spans.append((start, stop))
    if messages[-1]["role"] == "assistant" and not has_end:
        end = _next_marker(render, messages)
        spans[-1] = spans[-1][0], spans[-1][1] + len(end)
        whole += end
    return whole, spans


def _span(
    render: Callable[[Messages, bool], str], messages: Messages, number: int, whole: str, *, newline_is_written: bool
) -> tuple[int, int, bool]:
    """The span of an answer, and whether special tokens stand behind its words."""
    earlier, later = messages[:number], messages[number + 1 :]
    answer, (before, after) = _around(render, messages, number)
    start = _border(before, _num_common(render(earlier, True), before))
    if thought := _THOUGHT.search(before[:start]):
        start = thought.start()
    header = _WRITTEN_HEADERS.search(before[:start])
    if header and (newline_is_written or header.group() != "\n"):
        start = header.start()
    end = len(after)
    if later:
        _, last = _parts(render([*earlier, answer], False), number)
        end = _border(after, _num_common(last, after))
        next_marker = _MARKER.search(after)
        if next_marker and not _MARKER.search(after[:end]) and (not last.strip() or _MARKER.search(last)):
            end = next_marker.end()  # the end is written otherwise where messages follow, or is their beginning
    if not (whole.startswith(before[:start]) and whole.endswith(after[end:])):
        raise DataError(f"the chat template writes other messages anew for other words in message {number + 1}")
    stop = len(whole) - len(after) + end
    return start, len(whole[:stop].rstrip(" ")), bool(_MARKER.search(after[:end]))


def _around(
    render: Callable[[Messages, bool], str], messages: Messages, number: int
) -> tuple[Mapping[str, Any], tuple[str, str]]:
    """The message that is a sentinel alone, and what is written around it.

    Where results of tools must follow their calls, the message keeps these; where words beside calls are left out, the
    sentinel is the arguments of a call.
    """
    calls = messages[number].get("tool_calls")
    plain: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
    answers = [plain]
    if calls and isinstance(calls[0].get("function"), Mapping):
        call = {**calls[0], "function": {**calls[0]["function"], "arguments": SENTINEL}}
        answers += [plain | {"tool_calls": calls}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    refusal = None
    for answer in answers:
        try:
            return answer, _parts(render([*messages[:number], answer, *messages[number + 1 :]], False), number)
        except DataError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _num_common(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisection: comparing slices is quick
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _parts(text: str, number: int) -> tuple[str, str]:
    before, sentinel, after = text.partition(SENTINEL)
    if not sentinel or SENTINEL in after:
        raise DataError(f"the chat template leaves out the words of message {number + 1}, or writes them twice")
    return before, after


def _border(text: str, place: int) -> int:
    """`place`, or the beginning of the special token that it would cut."""
    for marker in _MARKER.finditer(text):
        if marker.start() < place < marker.end():
            return marker.start()
    return place


def _next_marker(render: Callable[[Messages, bool], str], messages: Messages) -> str:
    """The special token with which a user's message after the last answer would begin; empty where there is none."""
    answer, question = {"role": "assistant", "content": SENTINEL}, {"role": "user", "content": "?"}
    try:
        _, after = _parts(render([*messages[:-1], answer, question], False), len(messages) - 1)
    except DataError:
        return ""
    marker = _MARKER.match(after)
    return marker.group() if marker else ""


def as_parts(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages with texts as lists of one part, for templates of models that also read pictures."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def with_text_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages with the arguments of calls as JSON, as published programs of models return them."""

    def of_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if arguments is None or isinstance(arguments, str):
            return call
        written = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {**call, "function": written} if "function" in call else written

    return [
        {**message, "tool_calls": [of_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
