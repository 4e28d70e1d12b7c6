"""How long samples may be, and the token sequence of an example within these bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynapipe_ext.data.examples import Example
from dynapipe_ext.data.tokenizer import Tokenizer
from dynapipe_ext.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class SideBounds:
    """The largest numbers of tokens of an input and of a target; 0: any number.

    An input is everything before the first target token, with the tokens that the tokenizer adds. The encoder of an
    encoder-decoder reads it. A target ends with the end of text.
    """

    input: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True)
class TaskBounds:
    """The bounds of both sides: for each task in `named`, and for all `others`."""

    others: SideBounds = SideBounds()
    named: Mapping[str, SideBounds] = field(default_factory=dict)

    def __iter__(self) -> Iterator[SideBounds]:
        return iter((self.others, *self.named.values()))

    @property
    def bind(self) -> bool:
        """Whether any side of any task has a bound."""
        return any(sides != SideBounds() for sides in self)

    def of(self, task: str) -> SideBounds:
        return self.named.get(task, self.others)


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Bounds of a sample: `max_seq_len` positions (n + 1 tokens are n positions; None: any number), and `tasks` for its
    sides. A longer sample is cut with `truncate`, else refused.
    """

    max_seq_len: int | None = None
    truncate: bool = False
    tasks: TaskBounds = TaskBounds()

    def kept_lengths(
        self, task: str, *, num_beside: int, num_input: int, num_target: int, where: str
    ) -> tuple[int, int]:
        """(tokens of the input's end, tokens of the target's start) that a sample keeps.

        `num_beside` other tokens of the input always stay. First each side is cut to its own bound. Then the input, and
        after it the target, are cut until the sample has at most `max_seq_len` positions.

        >>> bounds = LengthBounds(6, True, TaskBounds(SideBounds(input=6, target=3)))
        >>> bounds.kept_lengths("copy", num_beside=1, num_input=9, num_target=4, where="line 1: sample 0")
        (3, 3)

        Errors: DataError that begins with `where` for a longer sample without `truncate`; ConfigError for an input
        bound below `num_beside`.
        """
        sides = self.tasks.of(task)
        if 0 < sides.input < num_beside:
            raise ConfigError(
                f"{where} has {num_beside} tokens beside its input but max_input_len is {sides.input}: raise it"
            )
        num_input_kept = min(num_input, sides.input - num_beside) if sides.input else num_input
        num_target_kept = min(num_target, sides.target) if sides.target else num_target
        if not self.truncate and num_input_kept < num_input:
            raise _too_long(where, num_beside + num_input, "input ", "max_input_len", sides.input)
        if not self.truncate and num_target_kept < num_target:
            raise _too_long(where, num_target, "target ", "max_target_len", sides.target)
        positions = num_beside + num_input_kept + num_target_kept - 1
        if self.max_seq_len is None or positions <= self.max_seq_len:
            return num_input_kept, num_target_kept
        if not self.truncate:
            raise _too_long(where, positions, "", "max_seq_len", self.max_seq_len)
        from_input = min(num_input_kept, positions - self.max_seq_len)
        return num_input_kept - from_input, max(0, num_target_kept - (positions - self.max_seq_len - from_input))


def _too_long(where: str, num_tokens: int, side: str, bound: str, most: int) -> DataError:
    return DataError(
        f"{where} has {num_tokens} {side}tokens but {bound} is {most}: pass --truncate or raise {bound} to at least"
        f" {num_tokens}"
    )


# Byte-level BPE first splits text by a pattern. In none of its pieces does white space follow another character, and it
# looks ahead but never back. So white space after a letter or digit begins a piece, and cutting the text there changes
# no token on either side. Only ASCII, since engines disagree on the classes of other characters.
_SAFE_BORDER = re.compile(r"(?<=[A-Za-z0-9])(?=[ \n])")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Input tokens, separator, target tokens, eos; `first_target` is the place of the first target token."""

    tokens: list[int]
    first_target: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Truncation:
    """Encodes examples within `bounds`; longer ones are cut or refused."""

    tokenizer: Tokenizer
    bounds: LengthBounds

    def encode(self, examples: Sequence[Example], *, first_index: int) -> list[TokenSequence]:
        """The sequences of consecutive examples, beginning with sample `first_index`.

        Errors: DataError naming the first sample that is empty, or too long and not to be cut.
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
        num_input, num_target = self.bounds.kept_lengths(
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
        """A very long text without the far end that would be cut anyway, which saves time.

        n characters are at least n bytes, and so at least n / max_token_bytes tokens: more than max_seq_len remain.
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
