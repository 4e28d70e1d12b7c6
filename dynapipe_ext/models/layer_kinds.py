"""Which layers of a model are made alike: of dense MLPs first, of experts then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from dynapipe_ext.errors import ConfigError

if TYPE_CHECKING:
    from dynapipe_ext.models.architecture import Architecture


@lru_cache(maxsize=64)
def layer_kinds(architecture: Architecture) -> tuple[tuple[Architecture, range], ...]:
    """Runs of layers of one make, from the first on: the model as if all of its layers were such, and which they are.

    Of an encoder-decoder one, of its encoder. Windows of attention in some layers make no kind: they change no weights.
    """
    a = architecture
    if not a.num_dense_layers:
        return ((a, range(a.num_layers)),)
    experts = replace(a, num_dense_layers=0, dense_ffn_hidden_size=0)
    dense = replace(
        experts,
        ffn_hidden_size=a.dense_ffn_hidden_size,
        num_experts=0,
        top_k=0,
        shared_ffn_hidden_size=0,
        shared_expert_gate=False,
        router_bias=False,
        router_num_groups=0,
        router_group_topk=0,
    )
    return ((dense, range(a.num_dense_layers)), (experts, range(a.num_dense_layers, a.num_layers)))


def kinds_of_stages(
    architecture: Architecture, layers_per_stage: Sequence[int]
) -> list[tuple[Architecture, tuple[int, ...]]]:
    """Each kind of layer with how many of it every stage has."""
    ends = list(accumulate(layers_per_stage))
    stages = [range(end - count, end) for end, count in zip(ends, layers_per_stage, strict=True)]
    return [
        (kind, tuple(max(0, min(own.stop, run.stop) - max(own.start, run.start)) for own in stages))
        for kind, run in layer_kinds(architecture)
    ]


def check_experts(a: Architecture) -> None:
    """Errors: ConfigError for sizes of experts, routers and dense layers that do not belong together."""
    if a.top_k and not a.num_experts:
        raise ConfigError(f"top_k {a.top_k} is of experts but num_experts is 0: give num_experts, or neither")
    if a.num_experts and not 1 <= a.top_k <= a.num_experts:
        raise ConfigError(f"top_k is {a.top_k} but must be 1 to num_experts {a.num_experts}")
    if (a.shared_ffn_hidden_size and not a.num_experts) or (a.shared_expert_gate and not a.shared_ffn_hidden_size):
        raise ConfigError(
            f"shared_ffn_hidden_size is {a.shared_ffn_hidden_size} and shared_expert_gate"
            f" {a.shared_expert_gate} with num_experts {a.num_experts}: a gate is of a shared expert, which"
            " is of a mixture"
        )
    dense, width = a.num_dense_layers, a.dense_ffn_hidden_size
    if not 0 <= dense < a.num_layers or (dense > 0) != (width > 0) or (dense and not a.num_experts):
        raise ConfigError(
            f"num_dense_layers is {dense} of {a.num_layers} layers, dense_ffn_hidden_size {width}, num_experts"
            f" {a.num_experts}: dense layers come before those of experts, and have a width of their own"
        )
    groups, taken = a.router_num_groups, a.router_group_topk
    if (groups or taken) and not (
        0 < taken < groups and a.num_experts % groups == 0 and a.top_k <= taken * (a.num_experts // groups)
    ):
        raise ConfigError(
            f"router_group_topk is {taken} of router_num_groups {groups}: it must be below it, and these be equal parts"
            f" of num_experts {a.num_experts} that hold top_k {a.top_k}; 0 and 0 where all experts may be taken"
        )
