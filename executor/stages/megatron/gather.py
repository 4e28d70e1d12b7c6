"""Whole weights out of a running Megatron model: gathered over tensor parallel ranks, handed down the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.collectives import gather_json, named_collectives

Receivers = Literal["all", "first"]  # every rank, or the first of tensor, pipeline and data parallel ranks alone


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """The part of a weight that each tensor parallel rank of a pipeline rank has; `dtype` is torch's name."""

    pp_rank: int
    dtype: str
    shape: tuple[int, ...]


class WeightGatherer:
    """Gives weights of a model that is spread over ranks, whole, one at a time.

    `held`: this rank's, by their names in the whole model; `places` those of all. A collective of every rank, as is
    `whole`, which all ranks call for the same weights in the same order. Errors: ConfigError under expert parallelism;
    ExecutionError where another rank is late or gone.
    """

    def __init__(self, held: Mapping[str, torch.Tensor], receivers: Receivers) -> None:
        from megatron.core import parallel_state

        if (ep := parallel_state.get_expert_model_parallel_world_size()) > 1:
            raise ConfigError(f"experts lie on {ep} ranks (expert parallelism), over which weights are not gathered")
        self._tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self._pp_group: Any = parallel_state.get_pipeline_model_parallel_group()
        is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        self._takes_part = receivers == "all" or is_first_replica
        self._passes_on = receivers == "all" or self._tp_group.rank() == 0
        self._is_receiver = receivers == "all" or (
            is_first_replica and self._tp_group.rank() == 0 and self._pp_group.rank() == 0
        )
        self._held = held
        self._device = next(iter(held.values())).device if held else torch.get_default_device()
        self.places = self._exchange()

    def _exchange(self) -> dict[str, HeldWeight]:
        own_specs = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in self._held.items()}
        with named_collectives("exchange of names of weights"):
            rows = gather_json(own_specs, self._device)
        places: dict[str, HeldWeight] = {}
        for pp_rank, rank in enumerate(dist.get_process_group_ranks(self._pp_group)):
            for name, (dtype, *shape) in rows[rank].items():
                places.setdefault(name, HeldWeight(pp_rank, dtype, tuple(shape)))
        return places

    def whole_shape(self, name: str, tp_dim: int | None) -> tuple[int, ...]:
        shape = list(self.places[name].shape)
        if tp_dim is not None:
            shape[tp_dim] *= self._tp_group.size()
        return tuple(shape)

    def whole(self, name: str, *, tp_dim: int | None, tp_parts: int) -> torch.Tensor | None:
        """A copy of a weight, on the device of the others; None on a rank that receives none.

        `tp_dim`: along which ranks cut it (None: all have it whole), after a split into `tp_parts`.
        """
        if not self._takes_part:
            return None
        place = self.places[name]
        is_here = place.pp_rank == self._pp_group.rank()
        with named_collectives(f"gathering {name}"):
            if is_here:
                tensor = self._gathered(self._held[name].detach(), tp_dim, tp_parts)
            elif self._passes_on:
                dtype = getattr(torch, place.dtype)
                tensor = torch.empty(self.whole_shape(name, tp_dim), dtype=dtype, device=self._device)
            else:
                return None
            if self._pp_group.size() > 1 and self._passes_on:
                dist.broadcast(tensor, dist.get_global_rank(self._pp_group, place.pp_rank), group=self._pp_group)
        return tensor if self._is_receiver else None

    def _gathered(self, part: torch.Tensor, tp_dim: int | None, tp_parts: int) -> torch.Tensor:
        if tp_dim is None or self._tp_group.size() == 1:
            return part.clone(memory_format=torch.contiguous_format)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._tp_group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._tp_group)
        pieces = [one.chunk(tp_parts, tp_dim) for one in parts]
        return torch.cat([of_rank[i] for i in range(tp_parts) for of_rank in pieces], dim=tp_dim)
