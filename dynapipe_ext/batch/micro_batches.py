"""The parts of a global batch: lengths of samples, pieces of long samples, micro-batches, and plans of all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from dynapipe_ext.errors import DataError, PlanError, short

# Shape (num_samples, 3), or (num_samples, 4) for pairs of documents: see `as_length_array`.
LengthArray = npt.NDArray[np.int64]
MOST_POSITIONS = 1 << 31  # of a sample's side
_INTEGERS = (int, np.integer)
_PAIR_COLUMNS = 4  # of a LengthArray
_FIRST, _START = attrgetter("first"), attrgetter("start")


@dataclass(frozen=True, slots=True)
class SampleLength:
    """Lengths of one sample, or of one piece of a long sample, in model input positions without padding.

    `index`: the sample's number. `encoder`: positions of the encoder side, or of a decoder-only model; `decoder`: of
    the decoder side. `target`: positions that carry loss. `start`: the first position of a piece in its sample; 0 for
    whole samples. A pair of documents that stay in one micro-batch (a chosen and a rejected answer) is one sample:
    `first` positions belong to its first document. `first` 0: the sample is one document.
    """

    index: int
    encoder: int
    decoder: int = 0
    target: int = 0
    start: int = 0
    first: int = 0

    @property
    def documents(self) -> tuple[int, ...]:
        """Encoder positions of each document of the sample: one number, or two for a pair.

        >>> SampleLength(0, 9).documents, SampleLength(0, 9, first=4).documents
        ((9,), (4, 5))
        """
        return (self.first, self.encoder - self.first) if self.first else (self.encoder,)

    @property
    def tokens(self) -> int:
        """Number of real tokens, without padding: encoder plus decoder positions."""
        return self.encoder + self.decoder


def sample_lengths(lengths: LengthArray | Sequence[int], indices: Iterable[int] | None = None) -> list[SampleLength]:
    """Return a SampleLength for each row of `lengths`, or only for the rows `indices`. Integers mean decoder-only
    samples in which every position is a target. Raises DataError as `as_length_array` does.

    >>> sample_lengths([5, 9])[1]
    SampleLength(index=1, encoder=9, decoder=0, target=9, start=0, first=0)
    """
    table = as_length_array(lengths)
    chosen = range(len(table)) if indices is None else indices
    rows = ((int(i), *table[i].tolist()) for i in chosen)
    return [SampleLength(i, encoder, decoder, target, 0, *first) for i, encoder, decoder, target, *first in rows]


def as_length_array(lengths: npt.ArrayLike) -> LengthArray:
    """Return lengths as int64, (num_samples, 3): encoder positions, decoder positions, target positions.

    Accepts (N,): encoder positions, all of them targets; (N, 2): both sides, the decoder's positions being targets (the
    encoder's if the decoder has 0); (N, 3). Pairs of documents, (N, 4), stay: the last column is the length of the
    first document. Raises DataError for other arrays, negative lengths, an empty encoder side, more targets than
    positions, and a pair with an empty document or a decoder side.
    """
    try:
        raw = np.asarray(lengths)
    except ValueError:
        raise DataError("lengths differ in their number of columns: give one, two or three for every sample") from None
    if raw.size and not np.issubdtype(raw.dtype, np.integer):
        raise DataError(f"lengths have dtype {raw.dtype} but must be integers")
    if raw.ndim == 1:
        raw = np.stack([raw, np.zeros_like(raw), raw], axis=1)
    elif raw.ndim == 2 and raw.shape[1] == 2:
        raw = np.concatenate([raw, np.where(raw[:, 1:] > 0, raw[:, 1:], raw[:, :1])], axis=1)
    if raw.ndim != 2 or raw.shape[1] not in (3, _PAIR_COLUMNS):
        raise DataError(f"lengths have shape {raw.shape}: expected (N,), (N, 2) or (N, 3), or (N, 4) for pairs")
    if raw.size and int(raw.max()) > np.iinfo(np.int64).max:
        raise DataError(f"lengths go up to {raw.max()} but are at most 2^63 - 1: give tokens of a sample")
    table = raw.astype(np.int64)
    columns = "encoder, decoder, targets"
    rules = {
        "none may be negative": (table < 0).any(axis=1),
        "the first must be at least 1": table[:, 0] < 1,
        "there are at most as many targets as positions": table[:, 2] > table[:, 0] + table[:, 1],
    }
    if table.shape[1] == _PAIR_COLUMNS:
        columns += ", first document of the encoder side"
        rules["the first document must be within the encoder side"] = (table[:, 3] < 1) | (table[:, 3] >= table[:, 0])
        rules["a pair of documents has no decoder side"] = table[:, 1] > 0
    for rule, bad in rules.items():
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise DataError(f"sample {i} has lengths {table[i].tolist()} ({columns}), but {rule}: leave it out")
    return table


def get_document_lengths(lengths: LengthArray) -> LengthArray:
    """Return the encoder positions of each sample's documents: (num_samples, 1), or (num_samples, 2) for pairs."""
    if lengths.shape[1] < _PAIR_COLUMNS:
        return lengths[:, :1]
    return np.stack([lengths[:, 3], lengths[:, 0] - lengths[:, 3]], axis=1)


def as_samples(lengths: Sequence[SampleLength] | Sequence[int] | LengthArray) -> list[SampleLength]:
    """Return checked samples, or one for each row of lengths. Raises DataError for the first bad sample."""
    is_list = isinstance(lengths, Sequence) and not isinstance(lengths, str | bytes)
    if not is_list and hasattr(lengths, "__array__") and getattr(lengths, "ndim", False):
        lengths = np.asarray(lengths)  # of torch or pandas
    elif not is_list:
        raise DataError(f"lengths are {short(lengths)} but must be a list of SampleLength or of integers, or an array")
    if not len(lengths) or not isinstance(lengths[0], SampleLength):
        return sample_lengths(cast(LengthArray, lengths))
    samples = list(cast("Sequence[SampleLength]", lengths))
    for s in samples:
        if not isinstance(s, SampleLength):
            raise DataError(f"{short(s)} is among samples but is not a SampleLength: give only those")
        counts = (s.index, s.encoder, s.decoder, s.target, s.start, s.first)
        if not (
            all(isinstance(count, _INTEGERS) and count >= 0 for count in counts)
            and 1 <= s.encoder <= MOST_POSITIONS
            and s.decoder <= MOST_POSITIONS
            and s.target <= s.tokens
            and (not s.first or (s.first < s.encoder and not s.decoder and not s.start))
        ):
            raise DataError(
                f"a sample is (index, encoder, decoder, target, start, first) = ({', '.join(map(short, counts))}): give"
                " integers, 1 <= encoder <= 2^31, decoder <= 2^31, target <= their sum, first only in a"
                " whole decoder-only sample"
            )
    return samples


Layout = Literal["padded", "packed"]
# What a backward recomputes: nothing; core attention; each layer, from its input; or the whole stage, from its input,
# of which nothing else is then kept. With "head" also the last stage's head and loss, a slice of HEAD_SLICE positions
# at a time, so that no more logits exist at once, in forwards or backwards.
Recompute = Literal["none", "selective", "full", "stage", "head", "head+selective", "head+full", "head+stage"]
HEAD_SLICE = 1024
Attention = Literal["document", "row", "carried"]  # of packed rows: see `MicroBatch`
Pieces = Literal["off", "auto"] | int  # of long samples: how many tokens a piece has
LossNorm = Literal["tokens", "samples"]
ALL_RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
RECOMPUTES: tuple[Recompute, ...] = ALL_RECOMPUTES[:4]  # with whole logits
LAYER_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # that differ within layers
_WITHOUT_STAGE: Mapping[Recompute, Recompute] = {"stage": "none", "head+stage": "head"}
_BODY: Mapping[Recompute, Recompute] = dict(zip(ALL_RECOMPUTES, (*RECOMPUTES, *RECOMPUTES), strict=True))


def slices_head(recompute: Recompute) -> bool:
    """Return whether a mode computes the output head and the loss in slices of positions, and again in backwards."""
    return recompute not in RECOMPUTES


def recompute_of_layers(recompute: Recompute) -> Recompute:
    """Return the recomputation mode of the layers: the mode without "head".

    >>> [recompute_of_layers(kind) for kind in ("full", "head", "head+full")]
    ['full', 'none', 'full']
    """
    return _BODY[recompute]


def with_sliced_head(kinds: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """Return these recomputation modes with the output head computed in slices ("head").

    >>> with_sliced_head(("none", "full"))
    ('head', 'head+full')
    """
    return tuple(kind for kind in ALL_RECOMPUTES if slices_head(kind) and _BODY[kind] in kinds)


def without_stage(recompute: Recompute) -> Recompute:
    """Return the mode without "stage": if the whole stage is recomputed, its layers recompute nothing by themselves.

    >>> [without_stage(kind) for kind in ("full", "stage", "head+stage", "head+full")]
    ['full', 'none', 'head', 'head+full']
    """
    return _WITHOUT_STAGE.get(recompute, recompute)


def round_up(length: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `length`.

    >>> [round_up(n, 8) for n in (0, 1, 8, 9)]
    [0, 8, 8, 16]
    """
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that run through the pipeline together, in row order.

    `layout` "padded": one row per document (a pair has two); "packed": one row, documents end to end. All rows have
    `encoder_len` and `decoder_len` positions, at least `min_len`, rounded up to `pad_multiple`. `recompute`: what
    backwards compute again. `attention` of packed rows: within each "document"; over the "row"; or "carried": like
    "document", and the first document, a piece, attends to the earlier pieces of its sample, too.
    """

    samples: tuple[SampleLength, ...]
    layout: Layout = "padded"
    recompute: Recompute = "none"
    attention: Attention = "document"
    pad_multiple: int = 1
    min_len: int = 0
    documents: tuple[int, ...] = field(init=False, repr=False, compare=False)  # encoder positions, in row order
    encoder_len: int = field(init=False, repr=False, compare=False)  # of a row; these follow from the samples, but
    decoder_len: int = field(init=False, repr=False, compare=False)  # planning asks ten times for each of them

    def __post_init__(self) -> None:
        samples = self.samples
        if len(samples) == 1 and not samples[0].first and not samples[0].decoder:  # nearly all rows that are tried
            documents, decoder = [samples[0].encoder], []
        else:
            pairs = any(map(_FIRST, samples))
            documents = [n for s in samples for n in s.documents] if pairs else [s.encoder for s in samples]
            decoder = [s.decoder for s in samples]
        object.__setattr__(self, "documents", tuple(documents))
        object.__setattr__(self, "encoder_len", self._round_row(documents))
        object.__setattr__(self, "decoder_len", self._round_row(decoder) if any(decoder) else 0)

    def with_recompute(self, recompute: Recompute) -> MicroBatch:
        """Return this micro-batch under another recomputation mode; `dataclasses.replace` takes four times as long."""
        return MicroBatch(self.samples, self.layout, recompute, self.attention, self.pad_multiple, self.min_len)

    @property
    def adds_weights_in_input_backward(self) -> bool:
        """Whether I also computes all weight gradients: if W did, recomputed activations would be held until W."""
        return self.layer_recompute in ("full", "stage")

    @property
    def layer_recompute(self) -> Recompute:
        """The recomputation mode of the layers: `recompute` without "head"."""
        return _BODY[self.recompute]

    @property
    def head_positions(self) -> int:
        """Number of positions for which the last stage computes logits, padding included."""
        return self.rows * (self.decoder_len or self.encoder_len)

    @property
    def rows(self) -> int:
        return len(self.documents) if self.layout == "padded" else 1

    @property
    def real_tokens(self) -> int:
        """Number of model input positions that are not padding."""
        return sum(s.tokens for s in self.samples)

    @property
    def padded_tokens(self) -> int:
        return self.rows * (self.encoder_len + self.decoder_len)

    @property
    def target_tokens(self) -> int:
        return sum(s.target for s in self.samples)

    def _round_row(self, lengths: list[int]) -> int:
        longest = max(lengths, default=0) if self.layout == "padded" else sum(lengths)
        return round_up(longest if longest > self.min_len else self.min_len, self.pad_multiple)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The micro-batches of one replica, in injection order. `dp_rank` is the index of the replica in the step. If
    replicas are context-parallel groups, it counts groups, not data parallel ranks."""

    dp_rank: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchPlan:
    """One optimizer step: the micro-batches of all replicas. `loss_norm`: the loss is divided by the step's target
    "tokens" or "samples". `width`: the number of data parallel ranks of each replica, its context-parallel degree."""

    step: int
    replicas: tuple[ReplicaPlan, ...]
    loss_norm: LossNorm = "tokens"
    seed: int = 0
    width: int = 1

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return tuple(m for replica in self.replicas for m in replica.micro_batches)

    @property
    def target_tokens(self) -> int:
        """Number of target tokens of all replicas: the divisor of the loss if `loss_norm` is "tokens"."""
        return sum(m.target_tokens for m in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Number of samples; one in pieces counts once. The divisor of the loss if `loss_norm` is "samples"."""
        return len({s.index for m in self.micro_batches for s in m.samples})

    @property
    def real_tokens(self) -> int:
        return sum(m.real_tokens for m in self.micro_batches)

    @property
    def padded_tokens(self) -> int:
        return sum(m.padded_tokens for m in self.micro_batches)

    @property
    def padding_efficiency(self) -> float:
        """Real tokens divided by all positions (real tokens and padding)."""
        return self.real_tokens / max(1, self.padded_tokens)


def check_cover(plan: GlobalBatchPlan, samples: Iterable[SampleLength]) -> None:
    """Raise PlanError unless the plan trains every sample once: whole, or in pieces without gap or overlap."""
    whole_samples = {s.index: s for s in samples}
    pieces: dict[int, list[SampleLength]] = {}
    for sample in chain.from_iterable(m.samples for m in plan.micro_batches):
        pieces.setdefault(sample.index, []).append(sample)
    if missing := sorted(whole_samples.keys() - pieces.keys()):
        raise PlanError(f"the plan of step {plan.step} leaves out samples {missing[:9]} ({len(missing)} in all)")
    if extra := sorted(pieces.keys() - whole_samples.keys()):
        raise PlanError(f"the plan of step {plan.step} has samples {extra[:9]} that are not in the batch")
    for index, parts in pieces.items():
        whole = whole_samples[index]
        if len(parts) == 1 and parts[0] is whole:
            continue
        end = 0
        for part in sorted(parts, key=_START):
            if part.start != end:
                fault = "twice" if part.start < end else "with a gap"
                raise PlanError(f"sample {index} is trained {fault} at position {part.start}")
            end += part.encoder
        planned = (end, sum(p.decoder for p in parts), sum(p.target for p in parts), *{p.first for p in parts})
        if planned != (whole.encoder, whole.decoder, whole.target, whole.first) or (whole.first and len(parts) > 1):
            raise PlanError(f"sample {index} is planned as {parts} but is {whole}")


# The pieces of one sample: their positions among a replica's micro-batches, first piece first.
SamplePieces = tuple[int, ...]


def sample_pieces(micro_batches: Sequence[MicroBatch]) -> tuple[SamplePieces, ...]:
    """Return, for each sample in pieces, the indices of its micro-batches in the replica, first piece first. Samples
    are in the injection order of their first pieces.

    Raises PlanError for a padded piece, or two pieces in one micro-batch. Also for pieces that do not follow one
    another from position 0: one is missing, or is on another replica.
    """
    positions_of: dict[int, list[int]] = {}
    for position, micro_batch in enumerate(micro_batches):
        if micro_batch.attention != "carried":
            continue
        first, *others = micro_batch.samples
        if micro_batch.layout != "packed" or any(other.start for other in others):
            raise PlanError(
                f"micro-batch {position} carries a piece of sample {first.index} but is {micro_batch.layout} or holds a"
                " second piece: a piece is the first document of a packed row, before whole samples"
            )
        positions_of.setdefault(first.index, []).append(position)
    for index, positions in positions_of.items():
        positions.sort(key=lambda position: micro_batches[position].samples[0].start)
        end = 0
        for position in positions:
            piece = micro_batches[position].samples[0]
            if piece.start != end:
                raise PlanError(
                    f"micro-batch {position} carries sample {index} from position {piece.start} but the pieces before"
                    f" it on this replica end at {end}: all pieces of a sample run on one replica, each once"
                )
            end += piece.encoder
    return tuple(map(tuple, sorted(positions_of.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a cut sample, the `number`-th from 1 to `count`: its positions `start` to `end` - 1.

    >>> str(Piece(sample=17, number=3, count=16, start=8192, end=12288))
    'sample 17, piece 3 of 16, tokens 8192-12287'
    """

    sample: int
    number: int
    count: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"sample {self.sample}, piece {self.number} of {self.count}, tokens {self.start}-{self.end - 1}"


def find_pieces(micro_batches: Sequence[MicroBatch]) -> dict[int, Piece]:
    """Return the pieces of long samples, by the index of their micro-batch in the replica; a sample in only one piece
    is left out. Raises PlanError as `sample_pieces` does."""
    pieces: dict[int, Piece] = {}
    for positions in sample_pieces(micro_batches):
        for number, position in enumerate(positions, 1) if len(positions) > 1 else ():
            s = micro_batches[position].samples[0]
            pieces[position] = Piece(
                sample=s.index, number=number, count=len(positions), start=s.start, end=s.start + s.encoder
            )
    return pieces


@dataclass(frozen=True, slots=True)
class PieceNeighbours:
    """The neighbours of a micro-batch's piece: micro-batches with the previous (`before`) and next piece (`behind`).

    On every stage the forward of a piece runs after that of the previous piece. Its input gradient (B or I) runs after
    that of the next piece, from which it needs the gradients of its keys and values.

    >>> order = PieceNeighbours.from_pieces([(0, 2, 3)])
    >>> order.before, order.behind
    ({2: 0, 3: 2}, {0: 2, 2: 3})
    """

    before: Mapping[int, int]
    behind: Mapping[int, int]

    @classmethod
    def from_pieces(cls, sample_pieces: Sequence[SamplePieces]) -> PieceNeighbours:
        links = [link for pieces in sample_pieces for link in pairwise(pieces)]
        return cls({later: earlier for earlier, later in links}, dict(links))


def make_length_error(positions: int) -> PlanError:
    """Return the error for a micro-batch of `positions` positions whose time in ns exceeds 64 bits."""
    return PlanError(
        f"a micro-batch of {positions} positions takes longer than 64 bits of nanoseconds count: lower max_tokens, or"
        " truncate samples"
    )
