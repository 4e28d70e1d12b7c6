"""Whole weights out of a running Megatron model: gathered over tensor and expert parallel ranks, handed down the
pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from dynapipe_ext.errors import named_collectives
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.stages.megatron.head import part_of

Receivers = Literal["all", "first"]  # every rank, or the first of tensor, pipeline and data parallel ranks alone


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """The part of a weight that one rank has: where that rank stands, and torch's name of the weight's `dtype`.

    Of the ranks that hold parts of a weight of this name it is the first. Those beside it, along tensor parallel ranks,
    have parts of the same shape; those of other replicas the same part. Of rows that are divided over pipeline ranks
    the first `num_parts` pipeline ranks have one each, of that shape and in their order.
    """

    pp_rank: int
    ep_rank: int
    dtype: str
    shape: tuple[int, ...]
    num_parts: int = 1


def exchange_places(held: Mapping[str, torch.Tensor]) -> dict[str, HeldWeight]:
    """Where each weight of the model lies, by its name; a collective of every rank. `held`: this rank's parts."""
    from megatron.core import parallel_state

    own_place = [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()]
    own_specs = {name: [_num_parts(t), str(t.dtype).removeprefix("torch."), *t.shape] for name, t in held.items()}
    with named_collectives("exchange of names of weights"):
        rows = gather_json([own_place, own_specs], device_of(held))
    places: dict[str, HeldWeight] = {}
    for (pp_rank, ep_rank), specs in sorted(rows, key=lambda row: row[0]):
        for name, (num_parts, dtype, *shape) in specs.items():
            places.setdefault(name, HeldWeight(pp_rank, ep_rank, dtype, tuple(shape), num_parts))
    return places


def _num_parts(weight: torch.Tensor) -> int:
    part = part_of(weight)
    return 1 if part is None else part[1]


def device_of(held: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(held.values())).device if held else torch.get_default_device()


def ranks_that_cut(*, of_experts: bool) -> Any:
    """The group of this rank and those beside it that cut its weights. Experts may be cut over others."""
    from megatron.core import parallel_state

    if of_experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def first_expert(num_experts: int) -> int:
    """The number in a layer of the first expert that this rank holds, of so many over expert parallel ranks."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_model_parallel_world_size()
    return int(num_experts // ranks * parallel_state.get_expert_model_parallel_rank())


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the ranks beside one another cut a weight."""

    name: str
    tp_dim: int | None
    tp_parts: int
    of_experts: bool


class WeightGatherer:
    """Gives weights of a model that is spread over ranks, whole, one at a time.

    `held`: this rank's, by their names in the whole model; `places` those of all (`exchange_places`). All ranks call
    `whole` for the same weights in the same order. Errors: ExecutionError where another rank is late or gone.
    """

    def __init__(
        self, held: Mapping[str, torch.Tensor], places: Mapping[str, HeldWeight], receivers: Receivers
    ) -> None:
        from megatron.core import parallel_state

        self._held, self.places, self._device = held, places, device_of(held)
        self._pp_group: Any = parallel_state.get_pipeline_model_parallel_group()
        self._ep_group: Any = parallel_state.get_expert_model_parallel_group()
        self._all_receive = receivers == "all"
        # By whether a weight is of experts: whether this rank is of the first replica. Of each stage the first rank is.
        self._is_first_replica = {
            False: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            True: parallel_state.get_expert_data_parallel_rank() == 0,
        }
        is_first = self._is_first_replica[False] and ranks_that_cut(of_experts=False).rank() == 0
        self._passes_on = self._all_receive or is_first
        self._is_receiver = self._all_receive or (is_first and self._pp_group.rank() == 0)

    def whole(self, name: str, *, tp_dim: int | None, tp_parts: int, of_experts: bool) -> torch.Tensor | None:
        """A copy of a weight, on the device of the others; None on a rank that receives none.

        `tp_dim`: along which ranks cut it (None: all have it whole), after a split into `tp_parts`.
        """
        if not self._all_receive and not self._is_first_replica[of_experts]:
            return None
        place = self.places[name]
        with named_collectives(f"gathering {name}"):
            cut = _Cut(name, tp_dim, tp_parts, of_experts)
            parts = [self._part(cut, place.pp_rank + part, place.ep_rank) for part in range(place.num_parts)]
        if not self._is_receiver:
            return None
        whole = [part for part in parts if part is not None]
        return whole[0] if len(whole) == 1 else torch.cat(whole)

    def _part(self, cut: _Cut, pp_rank: int, ep_rank: int) -> torch.Tensor | None:
        """What one pipeline rank has of a weight, over those beside it; for receivers, and on the way to them."""
        tensor = None
        if pp_rank == self._pp_group.rank():
            cut_by = ranks_that_cut(of_experts=cut.of_experts)
            if cut.name in self._held:
                tensor = _gathered(self._held[cut.name].detach(), cut.tp_dim, cut.tp_parts, cut_by)
            if cut.of_experts and self._ep_group.size() > 1 and (self._all_receive or cut_by.rank() == 0):
                tensor = self._broadcast(tensor, cut, self._ep_group, ep_rank)
        if self._pp_group.size() > 1 and self._passes_on:
            tensor = self._broadcast(tensor, cut, self._pp_group, pp_rank)
        return tensor

    def _broadcast(self, tensor: torch.Tensor | None, cut: _Cut, group: Any, source: int) -> torch.Tensor:
        if tensor is None:
            place = replace(self.places[cut.name], num_parts=1)
            shape = whole_shape(place, cut.tp_dim, of_experts=cut.of_experts)
            tensor = torch.empty(shape, dtype=getattr(torch, place.dtype), device=self._device)
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
        return tensor


def whole_shape(place: HeldWeight, tp_dim: int | None, *, of_experts: bool) -> tuple[int, ...]:
    """Of a weight whose parts lie along `tp_dim` (None: it is whole on every rank)."""
    shape = list(place.shape)
    shape[:1] = [rows * place.num_parts for rows in shape[:1]]
    if tp_dim is not None:
        shape[tp_dim] *= ranks_that_cut(of_experts=of_experts).size()
    return tuple(shape)


def _gathered(part: torch.Tensor, tp_dim: int | None, tp_parts: int, group: Any) -> torch.Tensor:
    if tp_dim is None or group.size() == 1:
        return part.clone(memory_format=torch.contiguous_format)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    pieces = [one.chunk(tp_parts, tp_dim) for one in parts]
    return torch.cat([of_rank[i] for i in range(tp_parts) for of_rank in pieces], dim=tp_dim)
