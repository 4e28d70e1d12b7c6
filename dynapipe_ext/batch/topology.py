"""Ranks, the placement of stages on them, and the tensors that ranks send to one another or reduce together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, get_args

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.errors import ConfigError, check_integer, settle_field_types, short

_MOST_OF_A_DEGREE = 1 << 20
PlacementName = Literal["linear", "interleaved", "v"]
Vocabulary = Literal["whole", "head", "both"]  # its parts that are split over pipeline ranks


def place_stages(name: PlacementName, pp: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Return the pipeline rank of each stage under a named placement; `stages_per_rank` None: 1 if linear, else 2.

    linear: stage s on rank s. interleaved: down the ranks, round after round (Narayanan et al. 2021, sec. 2.2). v: down
    and back up in turns, so that the first and the last stage share a rank (Qi et al. 2024, "Pipeline Parallelism with
    Controllable Memory"). Raises ConfigError for an unknown name, or stages per rank that the placement cannot have.

    >>> place_stages("interleaved", 3), place_stages("v", 3)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    if name not in get_args(PlacementName):
        raise ConfigError(f"placement is {name!r} but must be one of {', '.join(get_args(PlacementName))}")
    rounds = stages_per_rank if stages_per_rank is not None else 1 if name == "linear" else 2
    fits = rounds == 1 if name == "linear" else min(pp, rounds) > 1 and (name == "interleaved" or rounds % 2 == 0)
    if not fits:
        raise ConfigError(
            f"placement {name} of {rounds} stages on each of {pp} ranks: linear has 1 stage per rank, interleaved 2 or"
            " more, v an even number, and the latter two need 2 ranks or more"
        )
    down = tuple(range(pp))
    return (down + down[::-1]) * (rounds // 2) if name == "v" else down * rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A process's tensor parallel, pipeline and data parallel rank. A pipeline rank may hold several stages."""

    tp_rank: int
    pp_rank: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Numbers (from 0) of one stage's layers: those whose `attention` and those whose `mlp` it computes.

    Both are equal for stages that end between layers. A stage that ends inside a layer, between attention and MLP, has
    its attention, and the next stage its MLP. Messages are hidden states in both cases.
    """

    attention: range
    mlp: range

    @property
    def whole(self) -> range:
        """The layers of which the stage has both halves."""
        return range(self.attention.start, max(self.attention.start, self.mlp.stop))

    @property
    def held(self) -> range:
        """The layers of which the stage has one half or both."""
        return range(self.mlp.start if self.mlp else self.attention.start, self.attention.stop)

    @property
    def attention_half(self) -> range:
        """The one layer of which the stage has only the attention; an empty range if there is none."""
        return range(max(self.mlp.stop, self.attention.start), self.attention.stop)

    @property
    def mlp_half(self) -> range:
        """The one layer of which the stage has only the MLP; an empty range if there is none."""
        return range(self.mlp.start, min(self.attention.start, self.mlp.stop))


def list_stage_layers(layers_per_stage: Sequence[float]) -> tuple[StageLayers, ...]:
    """Return the layers of each stage; `layers_per_stage` are their numbers, whole or ending in .5.

    >>> for stage in list_stage_layers((1.5, 1, 0.5)):
    ...     print(stage.attention, stage.mlp, list(stage.whole))
    range(0, 2) range(0, 1) [0]
    range(2, 3) range(1, 2) []
    range(3, 3) range(2, 3) []
    """
    ends = [int(2 * end) for end in accumulate(layers_per_stage, initial=0)]  # in halves: attention, MLP, attention, …
    return tuple(
        StageLayers(range((begin + 1) // 2, (end + 1) // 2), range(begin // 2, end // 2))
        for begin, end in pairwise(ends)
    )


def require_whole_layers(layers_per_stage: Sequence[float], who: str) -> tuple[int, ...]:
    """Return layers per stage as integers. Raises ConfigError, with `who` as its subject, for half layers.

    >>> require_whole_layers((3, 5), "this model")
    (3, 5)
    """
    if any(count != int(count) for count in layers_per_stage):
        raise ConfigError(
            f"layers_per_stage {tuple(layers_per_stage)} cuts a layer between attention and MLP, which {who} does not"
            " support: give whole numbers"
        )
    return tuple(map(int, layers_per_stage))


@dataclass(frozen=True, slots=True)
class Topology:
    """Degrees of parallelism (`tp`, `pp`, `dp`), the stages and their placement on pipeline ranks.

    Ranks are numbered in Megatron's order tp-dp-pp: tensor parallel neighbours are adjacent. `placement[stage]` is the
    pipeline rank of a stage (empty: stage s on rank s). `layers_per_stage` (empty: not known) may be uneven, and half
    layers: a stage with 8.5 begins or ends between attention and MLP. Whole numbers are int, others float.

    `width` is the context-parallel degree, a power of two: this many neighbouring data parallel ranks are a group. They
    run one program on the same micro-batches, each on its slice of every row's positions. So `dp` ranks make
    `num_replicas` replicas. The degree of a step may differ.

    With `vocabulary` "head" each pipeline rank holds an equal share of the output head's rows, in a chain of stages:
    the last one with layers, then stages without layers on the other ranks. With "both" the embedding is split, too:
    its chain, one stage per rank, ends in the first stage with layers. `split_vocabulary` makes both.

    >>> Topology(tp=2, pp=2, dp=2).coordinates(5)
    Coordinates(tp_rank=1, pp_rank=1, dp_rank=0)
    """

    LATER_FIELDS: ClassVar = ("width", "vocabulary")  # older files do not have them (`dynapipe_ext/costs/codec.py`)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_stage: tuple[float, ...] = ()
    placement: tuple[int, ...] = ()
    width: int = 1
    vocabulary: Vocabulary = "whole"

    def __post_init__(self) -> None:
        settle_field_types(self)
        for name in ("tp", "pp", "dp", "width"):
            if not 1 <= (value := getattr(self, name)) <= _MOST_OF_A_DEGREE:
                raise ConfigError(
                    f"{name} is {short(value)} but must be an integer of at least 1, and at most {_MOST_OF_A_DEGREE:,}"
                )
        if self.width not in list_cp_degrees(self.dp):
            fitting = ", ".join(map(str, list_cp_degrees(self.dp)))
            raise ConfigError(
                f"width {self.width} must be a power of two that divides dp {self.dp}: give one of {fitting}"
            )
        if self.placement and set(self.placement) != set(range(self.pp)):
            raise ConfigError(f"placement {self.placement} must use every pipeline rank 0..{self.pp - 1} at least once")
        if self.layers_per_stage and len(self.layers_per_stage) != self.num_stages:
            of = f"stages of placement {short(self.placement)}" if self.placement else "stages"
            raise ConfigError(
                f"layers_per_stage {short(tuple(self.layers_per_stage))} has {len(self.layers_per_stage)} entries for"
                f" {self.num_stages} {of}: give one each"
            )
        object.__setattr__(self, "layers_per_stage", check_layer_counts(self.layers_per_stage))
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        """Raise ConfigError for chains of another form than `split_vocabulary` makes."""
        if self.vocabulary == "whole":
            return
        problem, layers, held = "", self.layers_per_stage, self.layer_stages
        chains = [[self.stage_ranks[i] for i in stages] for stages in (self.embedding_stages, self.head_stages) if held]
        if self.pp < 2:
            problem = f"is split over pipeline ranks, but pp is {self.pp}: give 2 or more, or leave it whole"
        elif not held or any(len(chain) > 1 and sorted(chain) != list(range(self.pp)) for chain in chains):
            problem = f"needs a chain of a stage per rank on each side that is split: not placement {self.stage_ranks}"
        elif any(count for stage, count in enumerate(layers) if stage not in held):
            problem = f"has layers only on stages {held.start}..{held.stop - 1}: not layers_per_stage {layers}"
        if problem:
            raise ConfigError(f"vocabulary {self.vocabulary!r} {problem} (`split_vocabulary` makes such topologies)")

    @property
    def head_stages(self) -> range:
        """The stages that hold a part of the output head, in order; the first of them has the final norm.

        >>> from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
        >>> split_vocabulary(Topology(pp=3), "head").head_stages, Topology(pp=3).head_stages
        (range(2, 5), range(2, 3))
        """
        return range(self.num_stages - (self.pp if self.vocabulary != "whole" else 1), self.num_stages)

    @property
    def first_head_stage(self) -> int | None:
        """The first stage with a part of a split output head (see `ActivationFormat`); None if it is not split."""
        return None if self.vocabulary == "whole" else self.head_stages.start

    @property
    def embedding_stages(self) -> range:
        """The stages that hold a part of the embedding, in their order."""
        return range(self.pp if self.vocabulary == "both" else 1)

    @property
    def layer_stages(self) -> range:
        """The stages that may hold layers: from the last embedding stage to the first stage of the output head."""
        return range(self.embedding_stages.stop - 1, self.head_stages.start + 1)

    def vocabulary_part(self, stage: int) -> int:
        """Return the number of the part that a stage holds: its pipeline rank, or 0 of an unsplit vocabulary.

        Part k of pp begins at row k V / pp. Raises ConfigError for a stage that holds no part.
        """
        chains = [stages for stages in (self.embedding_stages, self.head_stages) if stage in stages]
        if not chains:
            raise ConfigError(f"stage {stage} of {self.num_stages} holds no part of the vocabulary")
        return self.stage_ranks[stage] if any(len(stages) > 1 for stages in chains) else 0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError if `num_ranks` is not `world_size`."""
        if num_ranks != self.world_size:
            raise ConfigError(
                f"{num_ranks} ranks were started but tp {self.tp} x pp {self.pp} x dp {self.dp} needs"
                f" {self.world_size}: change --nproc-per-node or the topology"
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas, `dp` / `width`: context-parallel groups, each with micro-batches of its own."""
        return self.dp // self.width

    def at_width(self, width: int) -> Topology:
        """Return this topology at context-parallel degree `width`. Raises ConfigError if that does not fit `dp`."""
        return self if width == self.width else replace(self, width=width)

    @property
    def num_stages(self) -> int:
        return len(self.placement) or self.pp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage, by the stage's index."""
        return self.placement or tuple(range(self.pp))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank in the order of its model chunks.

        >>> Topology(pp=2, placement=(0, 1, 1, 0)).stages_of(0)
        (0, 3)
        """
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank)

    @property
    def placement_name(self) -> str:
        """The placement in words: its name for `place_stages` (or "custom"), stages with layers per rank, vocabulary.

        >>> Topology(pp=2, placement=(0, 1, 1, 0)).placement_name
        'v, 2 stages a rank'
        """
        ranks = self.stage_ranks[self.layer_stages.start : self.layer_stages.stop]
        rounds, rest = divmod(len(ranks), self.pp)
        name = "custom"
        if ranks == tuple(range(self.pp)):
            name = "linear"
        elif not rest and ranks == tuple(range(self.pp)) * rounds:
            name = f"interleaved, {rounds} stages a rank"
        elif not rest and rounds % 2 == 0 and ranks == place_stages("v", self.pp, rounds):
            name = f"v, {rounds} stages a rank"
        return name + {"whole": "", "head": ", head spread", "both": ", vocabulary spread"}[self.vocabulary]

    @property
    def is_interleaved(self) -> bool:
        """Whether ranks have several stages in rounds, as interleaved 1F1B needs, and an unsplit vocabulary."""
        return self.vocabulary == "whole" and self.placement_name.startswith("interleaved")

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            size = f"tp {self.tp} x pp {self.pp} x dp {self.dp}"
            raise ConfigError(f"rank {rank} is outside 0..{self.world_size - 1} of {size}")
        outer, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(outer, self.dp)
        return Coordinates(tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank)

    def rank(self, *, tp_rank: int, pp_rank: int, dp_rank: int) -> int:
        return tp_rank + self.tp * (dp_rank + self.dp * pp_rank)

    @property
    def has_half_layers(self) -> bool:
        return any(isinstance(count, float) for count in self.layers_per_stage)

    @property
    def stage_layers(self) -> tuple[StageLayers, ...]:
        """The layers of every stage; an empty tuple without `layers_per_stage`."""
        return list_stage_layers(self.layers_per_stage)

    def with_layers(self, num_layers: int) -> Topology:
        """Return the topology with `layers_per_stage` filled in evenly: layer i is on stage i * S // `num_layers` of
        the S that may hold layers. Raises ConfigError for fewer layers, or if `layers_per_stage` has another sum.

        >>> Topology(pp=4).with_layers(10).layers_per_stage
        (3, 2, 3, 2)
        >>> from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
        >>> split_vocabulary(Topology(pp=3), "both").with_layers(10).layers_per_stage
        (0, 0, 4, 3, 3, 0, 0)
        """
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != num_layers:
                raise ConfigError(
                    f"layers_per_stage {self.layers_per_stage} sums to {sum(self.layers_per_stage)}"
                    f" but the model has {num_layers} layers"
                )
            return self
        stages = self.layer_stages
        num_stages = len(stages)
        if num_layers < num_stages:
            raise ConfigError(f"{num_layers} layers cannot fill {num_stages} stages: lower pp or add layers")
        first = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]  # layer of each stage
        layers = tuple(end - begin for begin, end in pairwise(first))
        outside = (0,) * stages.start, (0,) * (self.num_stages - stages.stop)
        return replace(self, layers_per_stage=outside[0] + layers + outside[1])


def list_cp_degrees(dp: int) -> tuple[int, ...]:
    """List the context-parallel degrees that `dp` allows: the powers of two that divide it, from 1 on.

    >>> list_cp_degrees(12)
    (1, 2, 4)
    """
    return tuple(1 << i for i in range((dp & -dp).bit_length()))


def check_layer_counts(counts: Sequence[float]) -> tuple[float, ...]:
    """Return numbers of layers, whole ones as int, halves as float. Raises ConfigError for any other number."""
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < math.inf or count * 2 % 1:
            raise ConfigError(
                f"layers_per_stage {short(tuple(counts))} has {short(count)}: give numbers of layers of at least 0, in"
                " halves, like 8 or 8.5"
            )
    return tuple(int(count) if count == int(count) else float(count) for count in counts)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}
DTYPE_OF_WIDTH = {2: "bfloat16", 4: "float32"}  # if only the bytes of a value are known


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (torch's name) of one tensor.

    >>> TensorSpec((2, 8, 4), "bfloat16").num_bytes
    128
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The tensors by which a micro-batch's hidden states are sent from stage to stage; `dtype` is theirs.

    `order` "sbh" is Megatron's (sequence, rows, `hidden_size`), "bsh" that of plain torch models. Each rank holds 1 /
    `sequence_shards` of the sequence: tensor parallel ranks divide it under sequence parallelism, and ranks of a
    context-parallel group do. From `first_decoder_stage` on (None: no decoder), stages send hidden states of both
    sides.

    Stages from `first_head_stage` on hold parts of a split output head (None: unsplit). They also send two numbers per
    position: the log of the sum of exponentials over all parts so far, and the target's logit or 0. Each rank has 1 /
    `position_shards` of the positions: ranks of a context-parallel group divide them, tensor parallel ranks do not.
    """

    hidden_size: int
    dtype: str = "float32"
    order: Literal["sbh", "bsh"] = "sbh"
    sequence_shards: int = 1
    first_decoder_stage: int | None = None
    first_head_stage: int | None = None
    position_shards: int = 1
    LATER_FIELDS: ClassVar = ("first_head_stage", "position_shards")

    def __post_init__(self) -> None:
        for name in ("hidden_size", "sequence_shards", "position_shards"):
            check_integer(name, getattr(self, name), least=1)
        for name, value, choices in ("dtype", self.dtype, tuple(DTYPE_BYTES)), ("order", self.order, ("sbh", "bsh")):
            if value not in choices:
                raise ConfigError(f"{name} is {short(value)}: choose from {', '.join(choices)}")

    def at_width(self, width: int) -> ActivationFormat:
        """Return the format at context-parallel degree `width`, made from degree 1: ranks send slices of positions.

        >>> ActivationFormat(8, sequence_shards=2).at_width(4).sequence_shards
        8
        """
        shards, positions = self.sequence_shards * width, self.position_shards * width
        return replace(self, sequence_shards=shards, position_shards=positions)

    @property
    def changing_stages(self) -> tuple[int, ...]:
        """The stages from which on messages have more tensors: the first decoder and the first head stage."""
        stages = (self.first_decoder_stage, self.first_head_stage)
        return tuple(sorted({stage for stage in stages if stage}))

    def specs(self, micro_batch: MicroBatch, boundary: int = 0) -> tuple[TensorSpec, ...]:
        """Return shapes and dtypes of a message between stages `boundary` and `boundary` + 1, in either direction.

        Raises ConfigError for a micro-batch with a decoder side if `first_decoder_stage` is None.
        """
        if micro_batch.decoder_len and self.first_decoder_stage is None:
            raise ConfigError(
                f"a micro-batch has decoder length {micro_batch.decoder_len} but the activation format is that of a"
                " decoder-only model: give first_decoder_stage"
            )
        has_decoder = self.first_decoder_stage is not None and boundary >= self.first_decoder_stage
        sides = (micro_batch.encoder_len, micro_batch.decoder_len) if has_decoder else (micro_batch.encoder_len,)

        def make_shape(seq_len: int) -> tuple[int, int]:
            return (seq_len, micro_batch.rows) if self.order == "sbh" else (micro_batch.rows, seq_len)

        specs = tuple(
            TensorSpec((*make_shape(seq_len // self.sequence_shards), self.hidden_size), self.dtype)
            for seq_len in sides
        )
        if self.first_head_stage is None or boundary < self.first_head_stage:
            return specs
        of_head = make_shape(sides[-1] // self.position_shards)
        return *specs, *[TensorSpec(of_head, "float64" if self.dtype == "float64" else "float32")] * 2


ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "weights", "all"]
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
_EXPERTS = "expert all-to-all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCollectives:
    """Names of the collectives that a rank issues together with the ranks that hold the same stages in other replicas.

    `inside`: issued by each F, B and I (gathers of sharded weights, all-to-all of experts). `with_gradients`: by each B
    and W (gradients scattered as they come). `at_end`: once per step. `ep`: number of neighbouring data parallel ranks
    that share experts. The defaults reduce gradients once per step: DDP, or ZeRO stage 1.
    """

    inside: tuple[str, ...] = ()
    with_gradients: tuple[str, ...] = ()
    at_end: tuple[str, ...] = ("gradient reduction",)
    ep: int = 1
    LATER_FIELDS: ClassVar = ("ep",)

    @classmethod
    def of_zero(cls, zero_stage: int, *, ep: int = 1) -> ReplicaCollectives:
        """Return the collectives of a ZeRO stage: from 2 on gradients are scattered as they come, at 3 weights are
        gathered (Rajbhandari et al. 2020, sec. 5). If `ep` data parallel ranks share experts, they exchange tokens.

        >>> ReplicaCollectives.of_zero(3).inside, ReplicaCollectives.of_zero(1) == ReplicaCollectives()
        (('weight gather',), True)
        """
        return cls(
            inside=("weight gather",) * (zero_stage == 3) + (_EXPERTS,) * (ep > 1),
            with_gradients=("gradient scatter",) * (zero_stage >= 2),
            ep=ep,
        )

    def at_width(self, width: int) -> ReplicaCollectives:
        """Return the collectives at context-parallel degree `width`. Ranks of one group run one program, so experts
        that only they share involve no other replica.

        >>> [ReplicaCollectives.of_zero(1, ep=4).at_width(width).inside for width in (2, 4)]
        [('expert all-to-all',), ()]
        """
        if not 1 < self.ep <= width:
            return self
        return replace(self, inside=tuple(name for name in self.inside if name != _EXPERTS), ep=1)

    @property
    def of_micro_batches(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`inside` and `with_gradients`, which follow the order of micro-batches: all replicas must share it."""
        return self.inside, self.with_gradients

    def __str__(self) -> str:
        """Describe the collectives.

        >>> str(ReplicaCollectives.of_zero(2))
        'gradient scatter with each backward, gradient reduction at the end'
        """
        described = [f"{name} inside micro-batches" for name in self.inside]
        described += [f"{name} with each backward" for name in self.with_gradients]
        described += [f"{name} at the end" for name in self.at_end]
        return ", ".join(described) or "nothing"
