"""How a template renders records to tokens and targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

import numpy as np

from dynapipe_ext.data.length_bounds import LengthBounds
from dynapipe_ext.data.preprocessing.answers import PlacedTokens, answer_spans
from dynapipe_ext.data.preprocessing.chat_words import ADVICE, find_words
from dynapipe_ext.data.preprocessing.encoders import encode_answers
from dynapipe_ext.data.preprocessing.preference_records import (
    CHOSEN,
    REJECTED,
    ChatPreference,
    TextPreference,
    num_alike,
    preference_of,
)
from dynapipe_ext.data.preprocessing.record_forms import (
    Chat,
    LossOn,
    RecordFields,
    Template,
    chat_of,
    prompt_and_answer,
    strings,
)
from dynapipe_ext.errors import ConfigError, DataError


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
    @property
    def writes_newline(self) -> bool: ...
    def for_last_message(self) -> ModelTokenizer: ...
    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...
    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, answer_next: bool = False
    ) -> str: ...
    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[list[int], list[bool]]: ...
    def encode_places(self, text: str) -> PlacedTokens: ...
    def is_special(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """The tokens of a sample, whether each is a target, and whether some were cut off. Of a pair of documents, the
    first `num_first` tokens are the first one's."""

    tokens: list[int]
    is_target: list[bool]
    truncated: bool = False
    num_first: int = 0


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders records to samples within `bounds`; longer ones are cut or refused."""

    template: Template
    fields: RecordFields
    tokenizer: ModelTokenizer
    bounds: LengthBounds
    start: tuple[int, ...]
    loss_on: LossOn = "answers"

    @classmethod
    def of(
        cls,
        template: Template,
        fields: RecordFields,
        tokenizer: ModelTokenizer,
        bounds: LengthBounds,
        loss_on: LossOn = "answers",
    ) -> Renderer:
        """Errors: DataError for chats without a chat template; ConfigError for bounds on sides that the records do
        not have."""
        if template in ("chat", "preference") and bounds.tasks.bind:
            kind = "chats" if template == "chat" else "pairs of answers"
            raise ConfigError(
                f"the records are {kind}, which have no input and target sides: leave out max_input_len and"
                " max_target_len, and bound them by max_seq_len"
            )
        if template == "text" and any(sides.input for sides in bounds.tasks):
            raise ConfigError(
                "the records are plain texts, which have no input: leave out max_input_len, and bound them by"
                " max_target_len or max_seq_len"
            )
        if template == "chat" and not tokenizer.has_chat_template:
            raise DataError(
                "the records are chats, but the tokenizer has no chat template: give a folder that has one"
                " (chat_template.jinja), by --tokenizer, or records of prompt and response"
            )
        return cls(template, fields, tokenizer, bounds, tuple(tokenizer.start), loss_on)

    def render(self, record: Mapping[str, object], where: str, task: str) -> Rendered | None:
        """The sample of a record, None for an empty one. Errors: DataError that begins with `where` for a record that
        does not fit the template or is too long."""
        match self.template:
            case "chat":
                chat = chat_of(record, self.fields, where, loss_on=self.loss_on)
                is_last = not any(chat.is_trained[:-1])
                return (self._for_last_message() if is_last else self)._chat(chat, where)
            case "preference":
                return self._for_last_message()._preference(record, where)
            case "prompt":
                return self._prompt(record, where, task)
            case "text":
                (text,) = strings(record, (self.fields.text,), where)
                return self._ended([], list(self.tokenizer.encode([text])[0]), where, task)
            case _:
                assert_never(self.template)

    def _prompt(self, record: Mapping[str, object], where: str, task: str) -> Rendered | None:
        prompt, answer = prompt_and_answer(record, self.fields, where)
        ((of_prompt, of_answer),) = encode_answers(self.tokenizer, [prompt], [answer], [where])
        return self._ended(of_prompt, of_answer, where, task)

    def _ended(self, prompt: list[int], target: list[int], where: str, task: str) -> Rendered | None:
        """The sample between START and END. It is cut first at the prompt's start, then at the target's end."""
        prompt, target = (self._bare(prompt), target) if prompt else (prompt, self._bare(target))
        if not prompt and not target:
            return None
        assert self.tokenizer.eos is not None
        if not target or target[-1] != self.tokenizer.eos:
            target = [*target, self.tokenizer.eos]
        num_input, num_target = self._kept_lengths(len(prompt), len(target), where, task, num_beside=len(self.start))
        cut = (num_input, num_target) != (len(prompt), len(target))
        tokens = [*self.start, *prompt[len(prompt) - num_input :], *target[:num_target]]
        # The very first token follows nothing, so it cannot be a label.
        is_target = [i >= max(1, len(tokens) - num_target) for i in range(len(tokens))]
        return _with_targets(Rendered(tokens, is_target, cut), where)

    def _bare(self, tokens: list[int]) -> list[int]:
        """The tokens without START."""
        num_start = len(self.start)
        return tokens[num_start:] if tuple(tokens[:num_start]) == self.start else tokens

    def _for_last_message(self) -> Renderer:
        return replace(self, tokenizer=self.tokenizer.for_last_message())

    def _chat(self, chat: Chat, where: str) -> Rendered:
        try:
            whole = self.tokenizer.render(chat.messages, chat.tools)
        except DataError as error:
            raise self._refused(chat, where, error) from error
        places = self._word_places(chat, whole, where)
        try:
            if self.tokenizer.marks_generation:
                tokens, is_target = self._marked(chat, where)
            else:
                tokens, is_target = self._targets_by_spans(chat, whole, places)
        except DataError as error:
            if str(error).startswith(where):
                raise
            raise DataError(f"{where}: {error}: {_CHANGE}") from error
        if not any(is_target):
            raise DataError(
                f"{where}: the chat template marks nothing of this chat as the assistant's: see its generation blocks"
            )
        _, num_kept = self._kept_lengths(0, len(tokens), where)
        return _with_targets(
            Rendered(tokens[:num_kept], [False, *is_target[1:num_kept]], num_kept < len(tokens)), where
        )

    def _word_places(self, chat: Chat, whole: str, where: str) -> list[list[int]]:
        """`find_words` of the chat. Raises DataError that begins with `where`."""
        try:
            return find_words(self.tokenizer.render, chat.messages, chat.tools, whole, chat.is_trained)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _preference(self, record: Mapping[str, object], where: str) -> Rendered:
        """Both documents, prompt and answer each, one behind the other. Loss falls on what follows the longest common
        beginning of the prompt's tokens and both documents', as TRL's DPOTrainer has it."""
        preference = preference_of(record, where, instructions_as_chats=self.tokenizer.has_chat_template)
        match preference:
            case TextPreference(prompt=prompt, answers=answers):
                texts = [prompt, *(prompt + answer for answer in answers)]
                prompt_ids, *documents = ([*self.start, *self._bare(list(ids))] for ids in self.tokenizer.encode(texts))
                documents = [self._with_end(tokens) for tokens in documents]
            case ChatPreference():
                prompt_ids, *documents = self._preferred_chats(preference, where)
            case _:
                assert_never(preference)
        num_prompt = min(num_alike(prompt_ids, tokens) for tokens in documents)
        first, second = (
            self._kept_document(tokens, max(1, num_prompt), f"{where}, {name}")
            for tokens, name in zip(documents, (CHOSEN, REJECTED), strict=True)
        )
        return Rendered(
            [*first.tokens, *second.tokens],
            [*first.is_target, *second.is_target],
            first.truncated or second.truncated,
            num_first=len(first.tokens),
        )

    def _preferred_chats(self, preference: ChatPreference, where: str) -> list[list[int]]:
        """Tokens of the prompt with what begins an answer, and of both chats."""
        if not self.tokenizer.has_chat_template:
            raise DataError(
                f"{where}: the answers are messages, but the tokenizer has no chat template: give a folder that has one"
                " (chat_template.jinja), by --tokenizer, or answers of text"
            )
        try:
            texts = [self.tokenizer.render(preference.prompt, preference.tools, answer_next=True)]
            for messages in preference.chats():
                texts.append(self.tokenizer.render(messages, preference.tools))
                is_trained = tuple(place >= len(preference.prompt) for place in range(len(messages)))
                self._word_places(Chat(list(messages), is_trained, preference.tools), texts[-1], where)
        except DataError as error:
            if str(error).startswith(where):
                raise
            raise DataError(f"{where}: {error}: {_CHANGE}") from error
        return [self.tokenizer.encode_places(text).ids for text in texts]

    def _with_end(self, tokens: list[int]) -> list[int]:
        assert self.tokenizer.eos is not None
        return tokens if tokens and tokens[-1] == self.tokenizer.eos else [*tokens, self.tokenizer.eos]

    def _kept_document(self, tokens: list[int], num_prompt: int, where: str) -> Rendered:
        _, num_kept = self._kept_lengths(0, len(tokens), where)
        is_target = [place >= num_prompt for place in range(num_kept)]
        return _with_targets(Rendered(tokens[:num_kept], is_target, num_kept < len(tokens)), where)

    def _marked(self, chat: Chat, where: str) -> tuple[list[int], list[bool]]:
        """Tokens and targets of a chat whose template marks answers itself."""
        tokens, is_target = self.tokenizer.render_marked(chat.messages, chat.tools)
        answers = chat.answers
        if all(answers):
            return tokens, is_target
        starts = [place for place, target in enumerate(is_target) if target and not (place and is_target[place - 1])]
        if len(starts) != len(answers):
            raise DataError(
                f"{where}: the chat template marks {len(starts)} stretches for {len(answers)} answers, so the answers"
                " that are not to be trained on cannot be found: train on all of them"
            )
        of_answer = np.cumsum([place in set(starts) for place in range(len(tokens))]) - 1
        return tokens, [target and answers[of_answer[place]] for place, target in enumerate(is_target)]

    def _targets_by_spans(
        self, chat: Chat, whole: str, places: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[bool]]:
        """Tokens and targets of a chat whose template does not mark answers.

        A token belongs to the span that it overlaps. A last answer without a special token at its end gets END.
        """

        def render(messages: Sequence[Mapping[str, Any]], answer_next: bool) -> str:
            return self.tokenizer.render(messages, chat.tools, answer_next=answer_next)

        newline_is_written = self.tokenizer.writes_newline
        whole, spans = answer_spans(render, chat.messages, whole, places, newline_is_written=newline_is_written)
        tokens = self.tokenizer.encode_places(whole)
        is_target = tokens.overlap(span for span, trained in zip(spans, chat.answers, strict=True) if trained).tolist()
        answer = np.array(tokens.ids)[tokens.overlap(spans[-1:])]
        if spans[-1][1] == len(whole) and not any(map(self.tokenizer.is_special, answer.tolist())):
            assert self.tokenizer.eos is not None
            return [*tokens.ids, self.tokenizer.eos], [*is_target, chat.answers[-1]]
        return tokens.ids, is_target

    def _refused(self, chat: Chat, where: str, error: DataError) -> DataError:
        """The error for a chat that the template refuses; it names the system role where that is the reason."""
        others = [message for message in chat.messages if message["role"] != "system"]
        if others and len(others) < len(chat.messages):
            try:
                self.tokenizer.render(others, chat.tools)
                return DataError(f"{where}: the chat template has no system role ({error}): {ADVICE['system']}")
            except DataError:
                pass
        return DataError(f"{where}: {error}: {_CHANGE}")

    def _kept_lengths(
        self, num_input: int, num_target: int, where: str, task: str = "", *, num_beside: int = 0
    ) -> tuple[int, int]:
        return self.bounds.kept_lengths(
            task, num_beside=num_beside, num_input=num_input, num_target=num_target, where=f"{where}: the sample"
        )


_CHANGE = "change the messages, or give another tokenizer's folder"


def _with_targets(rendered: Rendered, where: str) -> Rendered:
    if any(rendered.is_target):
        return rendered
    if rendered.truncated:
        raise DataError(
            f"{where}: nothing is left to train on within max_seq_len: raise it with --max-seq-len, or remove the"
            " record"
        )
    raise DataError(
        f"{where}: nothing to train on: loss can fall on no first token, which follows nothing, and the answer has no"
        " other: put a message before it, give it words, or remove the record"
    )


def first_target(is_target: Sequence[bool]) -> int:
    """
    >>> first_target([False, False, True, False])
    2
    """
    return list(is_target).index(True)
