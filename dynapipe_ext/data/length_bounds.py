"""How long samples may be, and for themselves their inputs and targets, by their task; what is longer is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
