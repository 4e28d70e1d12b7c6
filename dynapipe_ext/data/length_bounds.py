"""How long samples may be, and the token sequence of an example within these bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynapipe_ext.data.examples import Example
from dynapipe_ext.data.tokenizer import Tokenizer
from dynapipe_ext.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class SideBounds:
    """The most tokens of an input, and of a target; 0: any number.

    An input is all before the first target token, what the tokenizer puts before or behind it included: what the
    encoder of an encoder-decoder reads. A target ends with the end of text.
    """

    input: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True)
class TaskBounds:
    """The bounds of the sides of each task that is named, and of all `others`."""

    others: SideBounds = SideBounds()
    named: Mapping[str, SideBounds] = field(default_factory=dict)

    @property
    def bind(self) -> bool:
        """Whether any side of any task has a bound."""
        return any(sides != SideBounds() for sides in (self.others, *self.named.values()))

    def of(self, task: str) -> SideBounds:
        return self.named.get(task, self.others)


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """At most `max_seq_len` positions (a sample of n + 1 tokens has n; None: any number), and `tasks` of its sides.

    A longer sample is cut with `truncate`, else refused.
    """

    max_seq_len: int | None = None
    truncate: bool = False
    tasks: TaskBounds = TaskBounds()

    def kept(self, task: str, *, num_beside: int, num_input: int, num_target: int, where: str) -> tuple[int, int]:
        """(how many of the last input tokens, of the first target tokens) a sample keeps beside `num_beside` others of
        its input, which always stay: each side is cut to its own bound, then the input, then the target to the whole's.

        >>> bounds = LengthBounds(6, True, TaskBounds(SideBounds(input=6, target=3)))
        >>> bounds.kept("copy", num_beside=1, num_input=9, num_target=4, where="line 1: sample 0")
        (3, 3)

        Errors: DataError, opening with `where`, for what is too long without `truncate`; ConfigError for an input bound
        that what always stays exceeds.
        """
        sides = self.tasks.of(task)
        if 0 < sides.input < num_beside:
            raise ConfigError(
                f"{where} has {num_beside} tokens beside its input but max_input_len is {sides.input}: raise it"
            )
        kept_input = min(num_input, sides.input - num_beside) if sides.input else num_input
        kept_target = min(num_target, sides.target) if sides.target else num_target
        if not self.truncate and kept_input < num_input:
            raise _too_long(where, num_beside + num_input, "input ", "max_input_len", sides.input)
        if not self.truncate and kept_target < num_target:
            raise _too_long(where, num_target, "target ", "max_target_len", sides.target)
        positions = num_beside + kept_input + kept_target - 1
        if self.max_seq_len is None or positions <= self.max_seq_len:
            return kept_input, kept_target
        if not self.truncate:
            raise _too_long(where, positions, "", "max_seq_len", self.max_seq_len)
        from_input = min(kept_input, positions - self.max_seq_len)
        return kept_input - from_input, max(0, kept_target - (positions - self.max_seq_len - from_input))


def _too_long(where: str, num_tokens: int, side: str, bound: str, most: int) -> DataError:
    return DataError(
        f"{where} has {num_tokens} {side}tokens but {bound} is {most}: pass --truncate or raise {bound} to at least"
        f" {num_tokens}"
    )


# Byte-level BPE first splits text by a pattern in which no piece has white space behind anything else, and which looks
# ahead but never back. So a border before white space that follows a letter or digit is a border of pieces, and the
# tokens on either side of it are the same as in the whole text. ASCII alone, where all engines agree on the classes.
_SAFE_BORDER = re.compile(r"(?<=[A-Za-z0-9])(?=[ \n])")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Input tokens, separator, target tokens, eos; `first_target` is the place of the first target token."""

    tokens: list[int]
    first_target: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Truncation:
    """Encodes examples within `bounds`: refuses or cuts what is longer."""

    tokenizer: Tokenizer
    bounds: LengthBounds

    def encode(self, examples: Sequence[Example], *, first_index: int) -> list[TokenSequence]:
        """Sequences of consecutive examples, the first of which is sample `first_index`.

        Errors: DataError naming the first sample that is empty, or too long where it is not cut.
        """
        for place, example in enumerate(examples):
            if not example.input and not example.target:
                number = first_index + place
                raise DataError(
                    f"{example.where}sample {number} (task {example.task!r}) is empty: remove it or fill it"
                )
        inputs = [self._shorten(example.input, keep_end=True) for example in examples]
        targets = [self._shorten(example.target, keep_end=False) for example in examples]
        encoded = self.tokenizer.encode(inputs + targets)
        return [
            self._join(example, encoded[place], encoded[len(examples) + place], index=first_index + place)
            for place, example in enumerate(examples)
        ]

    def _join(self, example: Example, prompt: list[int], target: list[int], *, index: int) -> TokenSequence:
        target = [*target, self.tokenizer.eos]
        num_input, num_target = self.bounds.kept(
            example.task,
            num_beside=1,
            num_input=len(prompt),
            num_target=len(target),
            where=f"{example.where}sample {index} (task {example.task!r})",
        )
        cut = (num_input, num_target) != (len(prompt), len(target))
        tokens = [*prompt[len(prompt) - num_input :], self.tokenizer.separator, *target[:num_target]]
        return TokenSequence(tokens, num_input + 1, truncated=cut)

    def _shorten(self, text: str, *, keep_end: bool) -> str:
        """A text that surely exceeds the bound without the far end that would be cut anyway: a saving of time alone.

        n characters are at least n bytes, so at least n / max_token_bytes tokens: more than max_seq_len remain.
        """
        if self.bounds.max_seq_len is None or not self.bounds.truncate:
            return text
        enough = (self.bounds.max_seq_len + 2) * self.tokenizer.max_token_bytes
        if len(text) <= enough:
            return text
        if self.tokenizer.kind == "bytes":
            return text[-enough:] if keep_end else text[:enough]
        if not keep_end:
            border = _SAFE_BORDER.search(text, enough)
            return text[: border.start()] if border else text
        window = max(0, len(text) - 2 * enough)
        borders = [border.start() for border in _SAFE_BORDER.finditer(text, window, len(text) - enough)]
        return text[borders[-1] :] if borders else text
