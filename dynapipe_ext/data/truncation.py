"""The token sequence of an example, and the bound on its length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.data.length_bounds import LengthBounds
from dynapipe_ext.data.reading import Example
from dynapipe_ext.data.tokenizer import Tokenizer
from dynapipe_ext.errors import DataError

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
