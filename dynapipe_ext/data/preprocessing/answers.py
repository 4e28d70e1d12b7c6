"""Where the answers of a chat lie in its text, whatever its chat template.

A chat is rendered again with a sentinel in the place of one answer. What stands before the sentinel and after it is
what the template writes around that answer:

    <|im_start|>user Hi<|im_end|> <|im_start|>assistant SENTINEL<|im_end|> <|im_start|>user …
                                  └ header ┘            └ end ┘

The header ends where the prompt for an answer ends. An answer's end is what still stands after it where it is the last
message, up to a border of special tokens. Loss falls on all between header and what follows the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.preprocessing.chat_variants import Messages, is_in, with_arguments
from dynapipe_ext.data.preprocessing.chat_words import words_of_calls
from dynapipe_ext.errors import DataError

SENTINEL, _NEXT = "\ue0f0answer\ue0f1", "\ue0f0next\ue0f1"
_QUESTION = {"role": "user", "content": "?"}
_MARKER = re.compile(r"<[|｜]?[^<>\s]{1,40}[|｜]?>")  # the look of special tokens, also of those that a tokenizer lacks
_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")  # what prompts for an answer may begin for it
# Headers that the model itself writes, as training templates of TRL 1.16 have it: of DeepSeek, GPT-OSS and their like.
_WRITTEN_HEADERS = re.compile(
    r"(<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|(?<=<\|im_start\|>assistant)\n)$"
)
_NEWLINE_IS_WRITTEN = re.compile(r"message\.content %\}\s*\{\{- '\\n' \+ message\.content")  # Qwen2.5
# Parts of published templates that leave out thoughts: (sign of the template, the part, what keeps the thoughts of all
# answers, what keeps those of the last message). Without them an answer would be trained on that the model does not
# give.
_KEPT_THOUGHTS = (
    ("ns.last_query_index", "loop.index0 > ns.last_query_index", "true", "loop.index0 > ns.last_query_index"),
    (
        "ns.last_query_index",
        "loop.last or (not loop.last and reasoning_content)",
        "true",
        "loop.last or (not loop.last and reasoning_content)",
    ),
    (
        "system_prompt='') %}",  # DeepSeek-R1's distilled models; V3 has more in its namespace
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
        "{% if '</think>' in content and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}",
    ),
)


@lru_cache(maxsize=16)
def training_template(template: str, *, only_last: bool = False) -> str:
    """The chat template with which a model is trained: as published, but that it keeps the thoughts of all answers, or
    only of the last message. There the context stays what inference shows, without the thoughts of earlier answers."""
    for sign, part, of_all, of_last in _KEPT_THOUGHTS:
        if sign in template:
            template = template.replace(part, of_last if only_last else of_all)
    return template


def writes_newline(template: str) -> bool:
    """Whether the template writes the line's end after an answer's header together with the answer."""
    return bool(_NEWLINE_IS_WRITTEN.search(template))


def answer_spans(
    render: Callable[[Messages, bool], str],
    messages: Messages,
    whole: str,
    places: Sequence[Sequence[int]],
    *,
    newline_is_written: bool,
) -> tuple[str, list[tuple[int, int]]]:
    """The chat's text, and the first and the last character (excluded) of what loss falls on, for each answer.

    `whole` is `render(messages, False)`; `render(…, True)` ends with the prompt for an answer. `places` are those of
    the words of each message in `whole` (`find_words`). Where the template writes no end of a last answer, the text
    ends with the special token with which the next message would begin, if it has one.

    Errors: DataError that says why an answer cannot be found; those of `render`.
    """
    spans, has_end = [], True
    finder = _Finder(render, messages, whole, newline_is_written, places)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop, has_end = finder.span(number)
            spans.append((start, stop))
    if messages[-1]["role"] == "assistant" and not has_end:
        end = _next_marker(render, messages)
        spans[-1] = spans[-1][0], spans[-1][1] + len(end)
        whole += end
    return whole, spans


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The tokens of a text, and of each the first character and the one behind its last."""

    ids: list[int]
    firsts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> PlacedTokens:
        """A token without a character is a blank that its tokenizer leaves out of `offsets`: the one before it."""
        firsts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        return cls(list(ids), np.minimum(firsts, ends - 1), ends)

    def overlap(self, spans: Iterable[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        """Return for each token whether it has a character of one of the spans, which follow one another."""
        starts, stops = np.array([span for span in spans if span[0] < span[1]], np.int64).reshape(-1, 2).T
        if not len(starts):
            return np.zeros(len(self.ids), np.bool_)
        number = np.searchsorted(starts, self.ends) - 1  # of the spans that begin before a token's end, the last
        return (number >= 0) & (self.firsts < stops[number])


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the answers of one chat; `places` are those of the words of each message in its text."""

    render: Callable[[Messages, bool], str]
    messages: Messages
    whole: str
    newline_is_written: bool
    places: Sequence[Sequence[int]]

    def span(self, number: int) -> tuple[int, int, bool]:
        """The span of an answer, and whether special tokens stand behind its words.

        The sentinel is the answer's words; where a template leaves these out beside calls, or writes a call's result
        before them, an argument of its first call.
        """
        refusal = None
        for answer in _with_sentinel(self.messages[number]):
            try:
                start, stop, has_end = self._around(number, answer)
                self._check(number, start, stop)
                return start, stop, has_end
            except DataError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _around(self, number: int, answer: Mapping[str, Any]) -> tuple[int, int, bool]:
        changed = [*self.messages[:number], answer, *self.messages[number + 1 :]]
        before, after = _parts(self.render(changed, False), number)
        start, end = self._start(number, answer, before), self._end(number, answer, after)
        if not (self.whole.startswith(before[:start]) and self.whole.endswith(after[end:])):
            raise DataError(f"the chat template writes other messages anew for other words in message {number + 1}")
        stop = len(self.whole) - len(after) + end
        has_end = self._is_ended(number, after[:end])
        return start, len(self.whole[:stop].rstrip(" ")), has_end

    def _check(self, number: int, start: int, stop: int) -> None:
        """Errors: DataError where the span lacks words of its answer, or has those of another message."""
        for other, places in enumerate(self.places):
            if other != number and any(start <= place < stop for place in places):
                raise DataError(f"the chat template writes message {other + 1} within message {number + 1}")
        if not all(start <= place < stop for place in self.places[number]):
            raise DataError(f"the chat template writes the words of message {number + 1} apart from its calls")
        for words in words_of_calls(self.messages[number].get("tool_calls")):
            if not is_in(words, self.whole[start:stop]):
                raise DataError(
                    f"the chat template leaves out {words[:40]!r} of the tool_calls of message {number + 1}"
                )

    def _start(self, number: int, answer: Mapping[str, Any], before: str) -> int:
        """The place where the header ends. Usually the text begins with the prompt for the answer, which ends there.
        Some templates write tools, a later system message or earlier answers in another way when more messages follow.
        Then the header is that of the chat that ends with this answer, or else what the prompt adds to the chat before
        it."""
        earlier = self.messages[:number]
        try:
            prompt = self.render(earlier, True)
        except DataError:  # many templates want a question
            earlier = [*earlier, _QUESTION]
            prompt = self.render(earlier, True)
        if len(earlier) == number and before.startswith(prompt):
            return self._without_header(before, len(prompt))
        alone, _ = _parts(self.render([*earlier, answer], False), len(earlier))
        if alone.startswith(prompt):
            own = alone[self._without_header(alone, len(prompt)) :]
            if before.endswith(own):
                return len(before) - len(own)
        return self._without_header(before, self._header_end(number, prompt, self.render(earlier, False), before))

    def _header_end(self, number: int, prompt: str, unprompted: str, before: str) -> int:
        """Where the header ends that the prompt adds, or as much of it as stands behind the message before."""
        header = prompt[len(unprompted) :] if prompt.startswith(unprompted) else ""
        places = self.places[number - 1] if number else [0]
        for length in range(len(header), 0, -1):
            if _border(header, length) == length:
                place = before.find(header[:length], places[-1]) if places else before.rfind(header[:length])
                if place >= 0:
                    return place + length
        shared = _num_common(prompt, before)
        if number and shared > max(places, default=0):
            return shared
        raise DataError(f"the chat template does not say where message {number + 1} begins")

    def _without_header(self, before: str, place: int) -> int:
        """The place, or where what the model writes before it begins: a thought's beginning, or its own header."""
        start = _border(before, place)
        if thought := _THOUGHT.search(before[:start]):
            start = thought.start()
        header = _WRITTEN_HEADERS.search(before[:start])
        if header and (self.newline_is_written or header.group() != "\n"):
            start = header.start()
        return start

    def _end(self, number: int, answer: Mapping[str, Any], after: str) -> int:
        """The length of what ends the answer."""
        upto, later = [*self.messages[:number], answer], self.messages[number + 1 :]
        if not later:
            marker = _MARKER.search(after)
            if marker is None or not after[marker.end() :].strip():
                return len(after)
            try:
                _, following = _parts(self.render([*upto, _QUESTION], False), number)
            except DataError:
                return len(after)
            end = _border(after, _num_common(after, following))
            return _before_prompt(after[:end]) if self._prompts_anyway(upto, after, end) else len(after)
        _, last = _parts(self.render(upto, False), number)
        end = _border(after, _num_common(last, after))
        if self._prompts_anyway(upto, last, end):
            return _before_prompt(after[:end])
        if self.messages[number].get("tool_calls") and _MARKER.sub("", last[end:]).strip():
            raise DataError(f"the chat template writes calls of message {number + 1} otherwise where messages follow")
        if not self._is_ended(number, after[:end]) and (not last.strip() or _MARKER.search(last)):
            # the end is written otherwise where messages follow, or is their beginning
            gap = self._gap(upto, later[0], after)
            next_marker = _MARKER.search(gap, end)
            if next_marker and not (self.messages[number].get("tool_calls") and gap[end : next_marker.start()].strip()):
                return next_marker.end()
        return end

    def _is_ended(self, number: int, end: str) -> bool:
        """Whether special tokens end an answer; tags behind calls may be the calls' own, and end none."""
        markers = _MARKER.findall(end)
        if not markers or not self.messages[number].get("tool_calls") or re.search("[|｜]", markers[-1]):
            return bool(markers)
        plain = {"role": "assistant", "content": SENTINEL}
        try:
            return bool(_MARKER.search(_parts(self.render([*self.messages[:number], plain], False), number)[1]))
        except DataError:
            return True

    def _prompts_anyway(self, upto: Messages, last: str, end: int) -> bool:
        """Whether the template writes the beginning of another answer behind a last one, asked for or not."""
        if not last[end:].strip() or not _MARKER.search(last[:end]):
            return False
        try:
            return _parts(self.render(upto, True), len(upto) - 1)[1].startswith(last)
        except DataError:
            return False

    def _gap(self, upto: Messages, following: Mapping[str, Any], after: str) -> str:
        """What stands between the answer and the words of the next message."""
        try:
            text = self.render([*upto, {**following, "content": _NEXT}], False)
        except DataError:
            return ""
        gap, found, _ = _parts(text, len(upto) - 1)[1].partition(_NEXT)
        return gap if found and after.startswith(gap) else ""


def _with_sentinel(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The answer with the sentinel in the place of its words, of an argument of its first call, or alone."""
    yield {**message, "content": SENTINEL}
    calls = message.get("tool_calls")
    if calls and isinstance(calls[0], Mapping):
        function = calls[0].get("function", calls[0])
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, Mapping) and arguments:
            one = {**arguments, next(iter(arguments)): SENTINEL}
            yield {**message, "tool_calls": [with_arguments(calls[0], one), *calls[1:]]}
        yield {**message, "tool_calls": [with_arguments(calls[0], SENTINEL), *calls[1:]]}
    yield {"role": "assistant", "content": SENTINEL}


def _before_prompt(end: str) -> int:
    """How much of an answer's end and of what every message begins with is the end: of several special tokens all but
    the last where that is the beginning."""
    markers = list(_MARKER.finditer(end))
    if len(markers) > 1 and markers[-1].end() == len(end):
        return markers[-1].start()
    stop = markers[-1].end()
    return stop + len(end[stop:]) - len(end[stop:].lstrip())


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
    """The special token with which a user's message after the last answer, or a result of its calls, would begin; empty
    where there is none."""
    answer, following = {"role": "assistant", "content": SENTINEL}, _QUESTION
    if calls := messages[-1].get("tool_calls"):
        following = {"role": "tool", "tool_call_id": calls[0].get("id"), "content": "?"}
    try:
        _, after = _parts(render([*messages[:-1], answer, following], False), len(messages) - 1)
    except DataError:
        return ""
    marker = _MARKER.match(after)
    return marker.group() if marker else ""
