"""Where layers and ranks live: tensor x pipeline x data parallelism in Megatron's rank order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from dynapipe_ext.errors import ConfigError, short

_MOST_OF_A_DEGREE = 1 << 20
PlacementName = Literal["linear", "interleaved", "v"]


def placement_of(name: PlacementName, pp: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Pipeline rank of every stage under a named placement; `stages_per_rank` defaults to 1 for linear, else to 2.

    interleaved: round after round down the ranks (Narayanan et al. 2021, sec. 2.2); v: down and back up in turns, so
    that the first and the last stage share a rank (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    >>> placement_of("interleaved", 3), placement_of("v", 3)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))

    Errors: ConfigError for a name, or a number of stages a rank, that does not make this placement.
    """
    if name not in get_args(PlacementName):
        raise ConfigError(f"placement is {name!r} but must be one of {', '.join(get_args(PlacementName))}")
    down = tuple(range(pp))
    rounds = stages_per_rank if stages_per_rank is not None else 1 if name == "linear" else 2
    match name:
        case "linear":
            if rounds != 1:
                raise ConfigError(f"placement linear has 1 stage a rank, not {rounds}: take interleaved or v")
            return down
        case "interleaved":
            if pp < 2 or rounds < 2:
                raise ConfigError(
                    f"placement interleaved of {rounds} stages on each of {pp} ranks: it needs 2 or more of both"
                )
            return down * rounds
        case "v":
            if pp < 2 or rounds < 2 or rounds % 2:
                raise ConfigError(
                    f"placement v of {rounds} stages on each of {pp} ranks: it needs 2 ranks or more and an even number"
                    " of stages on each"
                )
            return (down + down[::-1]) * (rounds // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place. `pp_rank` is the pipeline rank, not a stage (a rank may hold several stages)."""

    tp_rank: int
    pp_rank: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Degrees of parallelism, the stages and their placement on pipeline ranks.

    Ranks are laid out in Megatron's order tp-dp-pp: tensor parallel neighbours are adjacent ranks.
    `layers_per_stage` may be uneven; `placement[stage]` is the pipeline rank that holds it (empty: stage s on rank s).

    >>> Topology(tp=2, pp=2, dp=2).coordinates(5)
    Coordinates(tp_rank=1, pp_rank=1, dp_rank=0)
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] = ()
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r} but must be an integer of at least 1")
            if value > _MOST_OF_A_DEGREE:
                raise ConfigError(f"{name} is {short(value)} but must be at most {_MOST_OF_A_DEGREE:,}")
        if self.placement and set(self.placement) != set(range(self.pp)):
            raise ConfigError(f"placement {self.placement} must use every pipeline rank 0..{self.pp - 1} at least once")
        if self.layers_per_stage and len(self.layers_per_stage) != self.num_stages:
            raise ConfigError(
                f"layers_per_stage has {len(self.layers_per_stage)} entries for {self.num_stages} stages: give one each"
            )
        if any(n < 0 for n in self.layers_per_stage):
            raise ConfigError(f"layers_per_stage {self.layers_per_stage} has a negative count")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        return len(self.placement) or self.pp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        return self.placement or tuple(range(self.pp))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in their order: that of its model chunks.

        >>> Topology(pp=2, placement=(0, 1, 1, 0)).stages_of(0)
        (0, 3)
        """
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank)

    @property
    def placement_name(self) -> str:
        """The name under which `placement_of` makes this placement, with the stages a rank; "custom" for others.

        >>> Topology(pp=2, placement=(0, 1, 1, 0)).placement_name
        'v, 2 stages a rank'
        """
        ranks = self.stage_ranks
        if ranks == tuple(range(self.pp)):
            return "linear"
        rounds, rest = divmod(len(ranks), self.pp)
        if not rest and ranks == tuple(range(self.pp)) * rounds:
            return f"interleaved, {rounds} stages a rank"
        if not rest and rounds % 2 == 0 and ranks == placement_of("v", self.pp, rounds):
            return f"v, {rounds} stages a rank"
        return "custom"

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            size = f"tp {self.tp} x pp {self.pp} x dp {self.dp}"
            raise ConfigError(f"rank {rank} is outside 0..{self.world_size - 1} of {size}")
        outer, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(outer, self.dp)
        return Coordinates(tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank)

    def rank(self, *, tp_rank: int, pp_rank: int, dp_rank: int) -> int:
        return tp_rank + self.tp * (dp_rank + self.dp * pp_rank)

    def with_layers(self, num_layers: int) -> Topology:
        """The same topology with `layers_per_stage` filled in evenly: layer i of T lies on stage i * S // T.

        >>> Topology(pp=4).with_layers(10).layers_per_stage
        (3, 2, 3, 2)
        """
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != num_layers:
                raise ConfigError(
                    f"layers_per_stage {self.layers_per_stage} sums to {sum(self.layers_per_stage)}"
                    f" but the model has {num_layers} layers"
                )
            return self
        num_stages = self.num_stages
        if num_layers < num_stages:
            raise ConfigError(f"{num_layers} layers cannot fill {num_stages} stages: lower pp or add layers")
        first = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]  # layers of a stage and after
        layers = tuple(end - begin for begin, end in pairwise(first))
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp, layers_per_stage=layers, placement=self.placement)
