"""Long samples in pieces: which micro-batches of a replica carry one sample between them.

A sample X cut along its positions into X0 .. X(n-1) runs as n micro-batches with attention "carried": each piece
attends to the keys and values of the earlier ones, which the stage keeps. On every stage forwards go from the first
piece to the last, and input gradients (B, or I where backwards are split) from the last to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynapipe_ext.errors import ConfigError, PlanError, short
from dynapipe_ext.plan import MicroBatch, Pieces

# Of a cut sample: the positions of its pieces among a replica's micro-batches, first piece first.
Chain = tuple[int, ...]


def chains(micro_batches: Sequence[MicroBatch]) -> tuple[Chain, ...]:
    """The chains of a replica's micro-batches, by the injection order of their first pieces; () without pieces.

    Errors: PlanError for a carried micro-batch that is padded or whose later documents are pieces too, and for pieces
    that do not follow one another from position 0 (of which one is missing, say because it went to another replica).
    """
    found: dict[int, list[int]] = {}
    for position, micro_batch in enumerate(micro_batches):
        if micro_batch.attention != "carried":
            continue
        first, *others = micro_batch.samples
        if micro_batch.layout != "packed" or any(other.start for other in others):
            raise PlanError(
                f"micro-batch {position} carries a piece of sample {first.index} but is {micro_batch.layout} or holds a"
                " second piece: a piece is the first document of a packed row, before whole samples"
            )
        found.setdefault(first.index, []).append(position)
    for index, positions in found.items():
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
    return tuple(tuple(positions) for positions in sorted(found.values(), key=lambda positions: positions[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a micro-batch carries of a cut sample: its `number`-th piece, from 1 to `count`; positions up to `end` - 1.

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


def carried_pieces(micro_batches: Sequence[MicroBatch]) -> dict[int, Piece]:
    """What each micro-batch of a replica carries of a cut sample, by its position; a sample in one piece is not cut.

    Errors: PlanError as chains.
    """
    found = {}
    for chain in chains(micro_batches):
        for number, position in enumerate(chain, 1):
            piece = micro_batches[position].samples[0]
            end = piece.start + piece.encoder
            found[position] = Piece(sample=piece.index, number=number, count=len(chain), start=piece.start, end=end)
    return {position: piece for position, piece in found.items() if piece.count > 1}


@dataclass(frozen=True, slots=True)
class PieceNeighbours:
    """What a piece comes after on every stage, by micro-batch: its forward after that of the piece `before` it, and its
    input gradient (B or I) after that of the piece `behind` it, whose gradients of its keys and values it needs.

    >>> order = PieceNeighbours.of([(0, 2, 3)])
    >>> order.before, order.behind
    ({2: 0, 3: 2}, {0: 2, 2: 3})
    """

    before: Mapping[int, int]
    behind: Mapping[int, int]

    @classmethod
    def of(cls, chains: Sequence[Chain]) -> PieceNeighbours:
        links = [link for chain in chains for link in pairwise(chain)]
        return cls({later: earlier for earlier, later in links}, dict(links))


def pieces_of(text: str) -> Pieces:
    """What a flag says: off, auto or the tokens of a piece. Errors: ConfigError.

    >>> pieces_of("auto"), pieces_of("4096")
    ('auto', 4096)
    """
    if text == "off":
        return "off"
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigError(f"pieces is {short(text)} but must be off, auto or the tokens of a piece, like 8192")
    return int(text)
