"""FLOPs of a training step: what the model needs for its real tokens, and what devices execute for them.

One multiplication with its addition is 2 FLOPs; norms, activation functions, softmax and embeddings count nothing, as
in Narayanan et al. 2021 (arXiv 2104.04473, appendix) whose equation 3 these sums equal for uniform lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    HEAD_SLICE,
    RECOMPUTES,
    MicroBatch,
    Recompute,
    recompute_of_layers,
    slices_head,
)
from dynapipe_ext.models.architecture import Architecture, layer_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a position attends to at most in some of all `layers`: `window` positions, or those of its `chunk` (0: all).

    >>> Sight(window=3).pairs(8), Sight(chunk=3).pairs(8), Sight().pairs(8)
    (24, 22, 64)
    """

    window: int = 0
    chunk: int = 0
    layers: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, architecture: Architecture) -> Sight:
        a = architecture
        if a.attention_chunk:
            return cls(chunk=a.attention_chunk, layers=(sum(map(a.turns, range(a.num_layers))), a.num_layers))
        return cls(window=a.sliding_window, layers=(a.num_window_layers, a.num_layers))

    def pairs(self, length: int) -> int:
        """Of queries and keys in such a layer."""
        if self.chunk:
            return (length // self.chunk) * self.chunk**2 + (length % self.chunk) ** 2
        return length * min(length, self.window or length)


@dataclass(frozen=True, slots=True)
class Positions:
    """Counts of positions, and of the pairs that attention computes. Squares are sums of length^2 over sequences that
    attend to themselves, `cross` sums of decoder x encoder length. Decoder-only models count under `encoder`.
    """

    encoder: int = 0
    decoder: int = 0
    encoder_squares: int = 0
    decoder_squares: int = 0
    cross: int = 0

    def __add__(self, other: Positions) -> Positions:
        return Positions(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Positions)))

    @property
    def total(self) -> int:
        return self.encoder + self.decoder

    @classmethod
    def of_rows(cls, encoder: int, decoder: int = 0, rows: int = 1, *, sight: Sight = Sight()) -> Positions:
        """Positions of `rows` rows of one length; squares are the mean over layers, rounded down."""
        some, layers = sight.layers
        squares = rows * (some * sight.pairs(encoder) + (layers - some) * encoder**2) // layers
        return cls(rows * encoder, rows * decoder, squares, rows * decoder**2, rows * encoder * decoder)

    @classmethod
    def of_samples(cls, lengths: Iterable[tuple[int, int]], *, sight: Sight = Sight()) -> Positions:
        """Positions of samples by (encoder, decoder) lengths; each sample attends to itself alone."""
        positions = (cls.of_rows(e, d, sight=sight) for e, d in lengths)
        return sum(positions, cls())


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step: `real` positions by document, and all `executed` positions, with padding, by recomputation."""

    real: Positions = field(default_factory=Positions)
    executed: Mapping[Recompute, Positions] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        executed = {
            kind: self.executed.get(kind, Positions()) + other.executed.get(kind, Positions())
            for kind in ALL_RECOMPUTES
            if kind in self.executed or kind in other.executed
        }
        return Work(self.real + other.real, executed)

    @property
    def all_executed(self) -> Positions:
        return sum(self.executed.values(), Positions())

    def to_json(self) -> dict[str, Any]:
        return {
            "real": asdict(self.real),
            "executed": {
                kind: asdict(self.executed.get(kind, Positions()))
                for kind in ALL_RECOMPUTES
                if kind in RECOMPUTES or kind in self.executed  # as files had them before heads came in slices
            },
        }

    def numbers(self) -> list[int]:
        """The work as a list of integers of fixed length, so that ranks can gather it."""
        parts = [self.real, *(self.executed.get(kind, Positions()) for kind in ALL_RECOMPUTES)]
        return [getattr(part, f.name) for part in parts for f in fields(Positions)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Work:
        width = len(fields(Positions))
        real, *executed = (Positions(*numbers[i : i + width]) for i in range(0, len(numbers), width))
        return cls(real, {kind: p for kind, p in zip(ALL_RECOMPUTES, executed, strict=True) if p != Positions()})


def work_of(micro_batches: Iterable[MicroBatch]) -> Work:
    """The work of these micro-batches. A padded row attends over all its positions, a packed row document by document
    with its padding as one more document."""
    total = Work()
    for m in micro_batches:
        real = Positions.of_samples(_documents(m))
        if m.layout == "packed" and m.attention == "document":
            executed = real + Positions.of_rows(m.encoder_len - real.encoder, m.decoder_len - real.decoder)
        else:
            executed = Positions.of_rows(m.encoder_len, m.decoder_len, m.rows)
        # A head of few positions is computed whole, whatever the plan allows.
        kind = m.recompute if m.head_positions > HEAD_SLICE else m.layer_recompute
        total = total + Work(real, {kind: executed})
    return total


def _documents(m: MicroBatch) -> Iterable[tuple[int, int]]:
    """(encoder, decoder) lengths of what attends to itself alone."""
    if m.decoder_len:
        return [(s.encoder, s.decoder) for s in m.samples]
    return [(length, 0) for length in m.documents]


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one forward: the layers' matrix products, attention's two products, and the LM head."""

    layers: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        return self.layers + self.attention + self.head


def forward_flops(architecture: Architecture, positions: Positions, *, causal: bool = False) -> ForwardFlops:
    """FLOPs of a forward over these positions.

    With `causal` attention counts half where a mask hides the other half: not in an encoder, not across to it. A token
    counts the experts that it takes and their router, the shared expert once, and its gate.
    """
    a, half = architecture, 2 if causal else 1
    head, p = 2 * a.hidden_size * a.vocab_size, positions
    per_square = 2 * (a.query_size + a.attended_size)
    if not a.num_decoder_layers:
        return ForwardFlops(
            layers=2 * sum(len(layers) * _with_gates(kind) for kind, layers in layer_kinds(a)) * p.encoder,
            attention=a.num_layers * per_square * p.encoder_squares // half,
            head=head * p.encoder,
        )
    layer, queries = _with_gates(a), a.hidden_size * a.query_size
    keys, output = a.hidden_size * 2 * a.kv_size, queries
    cross = 2 * (queries + output) * p.decoder + 2 * keys * p.encoder
    return ForwardFlops(
        layers=a.num_layers * 2 * layer * p.encoder + a.num_decoder_layers * (2 * layer * p.decoder + cross),
        attention=a.num_layers * per_square * p.encoder_squares
        + a.num_decoder_layers * per_square * (p.decoder_squares // half + p.cross),
        head=head * p.decoder,
    )


def layer_weights(a: Architecture) -> int:
    """Weights that a token meets in one layer, without routers and gates; all layers of `a` must be alike."""
    return a.attention_parameters + (a.top_k or 1) * a.mlp_parameters + a.shared_parameters


def _with_gates(a: Architecture) -> int:
    return layer_weights(a) + a.hidden_size * (a.num_experts + int(a.shared_expert_gate))


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of forward and backward of a step. `model` counts real tokens by document, `attention` and `head` are parts
    of it. `padding` is what padded positions add, `recompute` the forwards that run again.
    """

    model: int
    padding: int
    recompute: int
    attention: int = 0
    head: int = 0

    @property
    def executed(self) -> int:
        return self.model + self.padding + self.recompute


def step_flops(
    architecture: Architecture, work: Work, *, causal: bool = False, trained_share: float = 1.0
) -> StepFlops:
    """FLOPs of a step. A backward costs two forwards; one of them makes the weight gradients of `trained_share` of the
    weights. Recomputation runs forwards again: of stages, of layers ("full") or of attention, and of heads in slices.
    """

    def of_step(positions: Positions) -> tuple[int, int, int]:
        forward = forward_flops(architecture, positions, causal=causal)
        whole = trained_share == 1  # then integers stay exact
        layers, head = (
            3 * part if whole else 2 * part + round(trained_share * part) for part in (forward.layers, forward.head)
        )
        return layers + 3 * forward.attention + head, 3 * forward.attention, head

    model, attention, head = of_step(work.real)
    executed, *_ = of_step(work.all_executed)
    again = 0
    for kind, positions in work.executed.items():
        forward = forward_flops(architecture, positions, causal=causal)
        of_layers = forward.layers + forward.attention
        of_kind = {"none": 0, "selective": forward.attention, "full": of_layers, "stage": forward.total}
        again += of_kind[recompute_of_layers(kind)] + (forward.head if slices_head(kind) else 0)
    return StepFlops(model, executed - model, again, attention, head)
