"""How many texts a batch of inference may hold, from lengths and a count of bytes.

Texts go longest first, so that the first batch, of a size that is known to fit, has the highest peak. What a text costs
whatever its length (the cache of the tokens to come, logits) decides how far later batches may grow: counting prompt
tokens alone would overrun the first peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import ConfigError, DataError

IntArray = npt.NDArray[np.int64]

_MOST_OBSERVED = 1000  # peaks of the latest batches
_UNKNOWN_SHARE = 5  # one part in so many of the longest prompt's tokens
_SCORE_COPIES_BYTES = 32  # a vocabulary entry while a token is chosen: float32 copies, softmax, sorted with indices


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """The batch that the others are measured by: its texts, the tokens of its longest, and all tokens but padding."""

    num_texts: int
    longest: int
    tokens: int


class BatchMemory(Protocol):
    """What tells how many texts fit: counted bytes (`GenerationMemory`), or learned from measured peaks."""

    def sizes(
        self, first: FirstBatch, *, peak_fraction: float, threshold: float, most_texts: float
    ) -> Callable[[int], int]:
        """A function from the length that a batch is padded to, to the most texts it may have.

        Their peak is at most `peak_fraction` of the first batch's, but for a share `threshold` of the batches. As many
        texts as the first batch has are always allowed, more than `most_texts` never.
        """
        ...


@dataclass(frozen=True, slots=True)
class GenerationMemory:
    """Bytes of a batch above the weights: texts x (bytes_per_text + bytes_per_token x padded prompt length).

    For a peak that grows with the number of texts times a convex function h of the prompt length, the batches planned
    stay under the first peak if bytes_per_text is at least h(0) and bytes_per_token at most the mean slope of h: the
    chord lies above a convex curve. So `from_config` rounds the one up and the other down, and `calibrated` takes the
    slope from a measured peak. `observed` holds measured / predicted peaks of earlier runs, if there are any;
    `first_bytes` the first batch's measured peak, if the slope is not from that.
    """

    bytes_per_text: int
    bytes_per_token: int
    observed: tuple[float, ...] = ()
    first_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_text < 0 or self.bytes_per_token < 0 or self.bytes_per_text + self.bytes_per_token < 1:
            raise ConfigError(
                f"a text of {self.bytes_per_text} B and {self.bytes_per_token} B a token costs nothing or less: give"
                " positive bytes"
            )

    @classmethod
    def from_config(
        cls, config: Any, *, max_new_tokens: int, dtype_bytes: int, num_sequences: int = 1
    ) -> GenerationMemory:
        """Counted from a transformers config, for `max_new_tokens` with a KV cache and `num_sequences` beams a text.

        A text: the cache of its new tokens (and a copy of one layer's while it grows), logits and the copies that
        choosing a token makes, one layer's activations. A prompt token: its keys and values in every layer (of the
        cross-attention in an encoder-decoder, with the encoder's output).
        """
        if max_new_tokens < 0 or dtype_bytes < 1 or num_sequences < 1:
            raise ConfigError(
                f"max_new_tokens {max_new_tokens}, dtype_bytes {dtype_bytes} and num_sequences {num_sequences} must be"
                " at least 0, 1 and 1"
            )
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        hidden = _setting(text, "hidden_size", "d_model", "n_embd")
        heads = _setting(text, "num_attention_heads", "num_heads", "decoder_attention_heads", "n_head")
        layers = _setting(text, "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer")
        head_dim = _setting(text, "head_dim", "d_kv", default=hidden // heads)
        kv_heads = _setting(text, "num_key_value_heads", default=heads)
        inner = _setting(text, "intermediate_size", "d_ff", "decoder_ffn_dim", "n_inner", default=4 * hidden)
        vocabulary = _setting(text, "vocab_size")
        layer_token = 2 * kv_heads * head_dim * dtype_bytes
        per_text = (layers + 1) * layer_token * max_new_tokens + vocabulary * (dtype_bytes + _SCORE_COPIES_BYTES)
        per_text += (8 * hidden + 4 * inner) * dtype_bytes + 8 * 4 * max_new_tokens
        per_token = layers * layer_token
        if getattr(config, "is_encoder_decoder", False):
            per_token += hidden * dtype_bytes
        return cls(num_sequences * per_text, num_sequences * per_token)

    def text_bytes(self, prompt_len: int) -> int:
        """Bytes of one text in a batch padded to `prompt_len` tokens."""
        return max(1, self.bytes_per_text + self.bytes_per_token * prompt_len)

    def calibrated(self, num_texts: int, prompt_len: int, peak_bytes: int) -> GenerationMemory:
        """With the slope that explains a measured peak (above the weights) of one batch."""
        if num_texts < 1 or prompt_len < 1 or peak_bytes < 1:
            raise ConfigError(
                f"a peak of {peak_bytes} B for {num_texts} texts of {prompt_len} tokens cannot calibrate: measure a"
                " batch that allocates"
            )
        slope = (peak_bytes // num_texts - self.bytes_per_text) // prompt_len
        fewest = 0 if self.bytes_per_text else 1
        return replace(self, bytes_per_token=max(fewest, slope))

    def observing(self, num_texts: int, prompt_len: int, peak_bytes: int) -> GenerationMemory:
        """With one more measured peak among the `observed`, of which the latest thousand are kept."""
        ratio = peak_bytes / (num_texts * self.text_bytes(prompt_len))
        return replace(self, observed=(*self.observed, ratio)[-_MOST_OBSERVED:])

    def refined(self, num_texts: int, prompt_len: int, peak_bytes: int, *, first_bytes: int) -> GenerationMemory:
        """For texts no longer than `prompt_len`: observed and calibrated by this batch, beside the first one's peak.

        The chord of a convex curve to a nearer point lies lower.
        """
        seen = self.observing(num_texts, prompt_len, peak_bytes).calibrated(num_texts, prompt_len, peak_bytes)
        return replace(seen, first_bytes=first_bytes)

    def margin(self, threshold: float) -> float:
        """Factor on predicted peaks that at most a share `threshold` of the `observed` ones exceed, at least 1.

        The split-conformal quantile; the largest observed ratio where there are fewer than 1 / threshold of them.
        """
        if not self.observed:
            return 1.0
        rank = math.ceil((len(self.observed) + 1) * (1.0 - threshold))
        return max(1.0, sorted(self.observed)[min(rank, len(self.observed)) - 1])

    def sizes(
        self, first: FirstBatch, *, peak_fraction: float, threshold: float, most_texts: float
    ) -> Callable[[int], int]:
        """As in `BatchMemory`."""
        first_bytes = self.first_bytes or first.num_texts * self.text_bytes(first.longest)
        limit = peak_fraction * first_bytes / self.margin(threshold)
        return lambda prompt_len: int(max(first.num_texts, min(limit // self.text_bytes(prompt_len), most_texts)))


PROMPT_TOKENS = GenerationMemory(0, 1)  # counts padded prompt tokens alone: encoders, scoring


@dataclass(frozen=True, slots=True)
class UnmeasuredMemory:
    """Where no peak was measured and no model is known: a text costs what its prompt does and a fifth of the longest's.

    That fifth of the longest text's tokens stands for its new tokens, logits and activations. So no batch has more than
    six times the first one's texts, and its peak stays below as long as these need no more.
    """

    def sizes(
        self, first: FirstBatch, *, peak_fraction: float, threshold: float, most_texts: float
    ) -> Callable[[int], int]:
        """As in `BatchMemory`."""
        counted = GenerationMemory(first.longest, _UNKNOWN_SHARE)
        return counted.sizes(first, peak_fraction=peak_fraction, threshold=threshold, most_texts=most_texts)


UNMEASURED = UnmeasuredMemory()


def _setting(config: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    if default is None:
        raise ConfigError(
            f"{type(config).__name__} has none of {', '.join(names)}: give memory=GenerationMemory(bytes_per_text,"
            " bytes_per_token)"
        )
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceBatchRule:
    """How large a batch may be, beside the first one's `batch_size`.

    A batch's predicted peak is at most `peak_fraction` of the first one's, with probability 1 - `threshold` as far as
    the memory model's observed errors tell. `batch_size` itself is always allowed: it fitted longer texts. `growth` is
    the most texts a batch may have, in multiples of `batch_size`.
    """

    batch_size: int
    threshold: float = 0.025
    peak_fraction: float = 0.9
    growth: float = math.inf

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}: the first batch needs 1 text or more")
        if not 0.0 <= self.threshold < 1.0:
            raise ConfigError(f"threshold is {self.threshold}: a probability from 0 up to, not including, 1 is needed")
        if not 0.0 < self.peak_fraction <= 1.0:
            raise ConfigError(f"peak_fraction is {self.peak_fraction}: above 0 and up to 1 of the first batch's peak")
        if not self.growth >= 1.0:
            raise ConfigError(f"batches may grow to {self.growth} x batch_size: give 1 or more (inf for no bound)")

    def sizes(self, memory: BatchMemory, first_lengths: IntArray) -> Callable[[int], int]:
        """`memory.sizes` under this rule, from the lengths of the first batch's texts, the longest first."""
        return memory.sizes(
            FirstBatch(self.batch_size, int(first_lengths[0]), int(first_lengths.sum())),
            peak_fraction=self.peak_fraction,
            threshold=self.threshold,
            most_texts=math.inf if math.isinf(self.growth) else int(self.growth * self.batch_size),
        )

    def num_texts(self, memory: BatchMemory, longest: int, prompt_len: int) -> int:
        """Texts of a batch padded to `prompt_len`, when the longest text of all has `longest` tokens."""
        return self.sizes(memory, np.full(self.batch_size, longest))(prompt_len)


def plan_batches(
    lengths: npt.ArrayLike, rule: InferenceBatchRule, memory: BatchMemory = PROMPT_TOKENS
) -> list[IntArray]:
    """Indices of the texts of each batch, longest first: the fewest batches that the rule and the model allow.

    >>> rule = InferenceBatchRule(batch_size=2, peak_fraction=1.0)
    >>> [batch.tolist() for batch in plan_batches([3, 9, 1, 4, 8, 2, 4], rule)]
    [[1, 4], [3, 6, 0, 5], [2]]
    """
    table, order = longest_first(lengths)
    return list(batches_of(table, order, 0, lambda: memory, rule))


def longest_first(lengths: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Lengths as an array, and the indices of texts by falling length (by index where equal)."""
    table = np.asarray(lengths)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise DataError(f"lengths have shape {table.shape} and type {table.dtype}: a flat list of integers is needed")
    if table.size and table.min() < 1:
        raise DataError(f"text {int(table.argmin())} has {int(table.min())} tokens: leave empty texts out")
    table = table.astype(np.int64)
    return table, np.argsort(-table, kind="stable")


def with_a_padded_first(lengths: IntArray, order: IntArray, batch_size: int) -> IntArray:
    """The order, with the first batch's last text exchanged for the next shorter one if all have one length.

    Models drop a mask that masks nothing. Without padding, the first batch would not show what later ones need: a
    third of it, for T5 with sdpa.

    >>> with_a_padded_first(np.array([9, 9, 9, 7, 7]), np.arange(5), 2).tolist()
    [0, 3, 1, 2, 4]
    """
    sorted_lengths = lengths[order]
    shorter = int(np.searchsorted(-sorted_lengths, -sorted_lengths[0], side="right")) if len(order) else 0
    if not 2 <= batch_size <= shorter < len(order):
        return order
    last = batch_size - 1
    return np.concatenate([order[:last], order[shorter : shorter + 1], order[last:shorter], order[shorter + 1 :]])


def batches_of(
    lengths: IntArray, order: IntArray, start: int, memory: Callable[[], BatchMemory], rule: InferenceBatchRule
) -> Iterator[IntArray]:
    """Batches from place `start` in `order` on; `memory` is asked before each, and may change its answer."""
    counted: BatchMemory | None = None
    while start < len(order):
        size = rule.batch_size
        if start:
            if counted is not (now := memory()):
                counted, sizes = now, rule.sizes(now, lengths[order[: rule.batch_size]])
            size = sizes(int(lengths[order[start]]))
        yield order[start : start + size]
        start += size
