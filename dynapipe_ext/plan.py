"""A global batch as variable micro-batches: what runs together, in which layout, on which replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength

Layout = Literal["padded", "packed"]
# What a backward computes again: nothing; core attention; each layer, from its input; or the whole stage, from its
# input, of which nothing else is then kept.
Recompute = Literal["none", "selective", "full", "stage"]
# Packed rows: attention restarts at each document; or goes over the whole row; or restarts, and the first document, a
# piece of a long sample, attends to the earlier pieces as well (`dynapipe_ext/pieces.py`).
Attention = Literal["document", "row", "carried"]
Pieces = Literal["off", "auto"] | int  # of long samples: how many tokens a piece has
LossNorm = Literal["tokens", "samples"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
LAYER_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # that differ within layers


def round_up(length: int, multiple: int) -> int:
    """
    >>> [round_up(n, 8) for n in (0, 1, 8, 9)]
    [0, 8, 8, 16]
    """
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that run together, in row order.

    padded: one row a sample, every row `encoder_len` positions. packed: documents end to end in one row whose length is
    the sum of theirs. Both are rounded up to `pad_multiple`. `min_len` forces a longer row (fixed-size rules).
    """

    samples: tuple[SampleLength, ...]
    layout: Layout = "padded"
    recompute: Recompute = "none"
    attention: Attention = "document"
    pad_multiple: int = 1
    min_len: int = 0
    encoder_len: int = field(init=False, repr=False, compare=False)  # of a row; it follows from the samples, but
    decoder_len: int = field(init=False, repr=False, compare=False)  # planning asks ten times for what is found once

    def __post_init__(self) -> None:
        decoder = [s.decoder for s in self.samples]
        object.__setattr__(self, "encoder_len", self._row_len([s.encoder for s in self.samples]))
        object.__setattr__(self, "decoder_len", self._row_len(decoder) if any(decoder) else 0)

    @property
    def rows(self) -> int:
        return len(self.samples) if self.layout == "padded" else 1

    @property
    def real_tokens(self) -> int:
        """Model input positions that are not padding."""
        return sum(s.tokens for s in self.samples)

    @property
    def padded_tokens(self) -> int:
        return self.rows * (self.encoder_len + self.decoder_len)

    @property
    def target_tokens(self) -> int:
        return sum(s.target for s in self.samples)

    def _row_len(self, lengths: list[int]) -> int:
        longest = max(lengths, default=0) if self.layout == "padded" else sum(lengths)
        return round_up(max(longest, self.min_len), self.pad_multiple)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The micro-batches of one data-parallel replica, in injection order."""

    dp_rank: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchPlan:
    """One optimizer step: the micro-batches of all replicas and what the loss is divided by."""

    step: int
    replicas: tuple[ReplicaPlan, ...]
    loss_norm: LossNorm = "tokens"
    seed: int = 0

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return tuple(m for replica in self.replicas for m in replica.micro_batches)

    @property
    def target_tokens(self) -> int:
        """Global number of target tokens (the loss divisor under loss_norm "tokens")."""
        return sum(m.target_tokens for m in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Distinct samples (the loss divisor under loss_norm "samples"); pieces of one sample count once."""
        return len({s.index for m in self.micro_batches for s in m.samples})

    @property
    def real_tokens(self) -> int:
        return sum(m.real_tokens for m in self.micro_batches)

    @property
    def padded_tokens(self) -> int:
        return sum(m.padded_tokens for m in self.micro_batches)

    @property
    def padding_efficiency(self) -> float:
        """Real over padded tokens."""
        return self.real_tokens / max(1, self.padded_tokens)


def check_cover(plan: GlobalBatchPlan, samples: Iterable[SampleLength]) -> None:
    """Refuse a plan that does not train every sample exactly once (pieces of a cut sample must tile it)."""
    wanted = {s.index: s for s in samples}
    planned = [sample for micro_batch in plan.micro_batches for sample in micro_batch.samples]
    is_whole = len(planned) == len(wanted) and {s.index: s.start for s in planned} == dict.fromkeys(wanted, 0)
    if is_whole and all(wanted[s.index] is s for s in planned):
        return  # each as it was given
    pieces: dict[int, list[SampleLength]] = {}
    for sample in planned:
        pieces.setdefault(sample.index, []).append(sample)
    if missing := sorted(wanted.keys() - pieces.keys()):
        raise PlanError(f"the plan of step {plan.step} leaves out samples {missing[:9]} ({len(missing)} in all)")
    if extra := sorted(pieces.keys() - wanted.keys()):
        raise PlanError(f"the plan of step {plan.step} has samples {extra[:9]} that are not in the batch")
    for index, parts in pieces.items():
        whole = wanted[index]
        if len(parts) == 1 and not parts[0].start:
            part = parts[0]
            if part is whole:
                continue
            if (part.encoder, part.decoder, part.target) == (whole.encoder, whole.decoder, whole.target):
                continue
        end = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start != end:
                fault = "twice" if part.start < end else "with a gap"
                raise PlanError(f"sample {index} is trained {fault} at position {part.start}")
            end += part.encoder
        totals = Counter(encoder=end, decoder=sum(p.decoder for p in parts), target=sum(p.target for p in parts))
        if totals != Counter(encoder=whole.encoder, decoder=whole.decoder, target=whole.target):
            raise PlanError(f"sample {index} is planned with {dict(totals)} but has {whole}")
