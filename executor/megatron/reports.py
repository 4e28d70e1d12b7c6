"""What loss functions reported, on the rank where Megatron's training loops look for it: the last of the pipeline."""

from __future__ import annotations

from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.collectives import send_json
from dynapipe_ext.topology import Coordinates, Topology


def check_collects(topology: Topology, collect_non_loss_data: bool) -> None:
    """Errors: ConfigError where what is collected would have to travel, of which nothing is known."""
    if collect_non_loss_data and topology.stage_ranks[-1] != topology.pp - 1:
        raise ConfigError(
            f"collect_non_loss_data is True, but under placement {topology.placement_name} the last stage is on"
            f" pipeline rank {topology.stage_ranks[-1]}, not on the last: leave --dynapipe-placement out"
        )


def sent_to_last_rank(reports: list[Any], topology: Topology, here: Coordinates, device: torch.device) -> list[Any]:
    """The reports of the rank with the last stage, on the last pipeline rank (elsewhere none); there they are already,
    save in a V, where this is a collective call of a pipeline's ranks.

    Errors: ConfigError for reports that are no tensors.
    """
    from megatron.core import parallel_state

    if topology.stage_ranks[-1] == topology.pp - 1:
        return reports
    source = topology.rank(tp_rank=here.tp_rank, pp_rank=topology.stage_ranks[-1], dp_rank=here.dp_rank)
    told = [{name: _written(name, value) for name, value in report.items()} for report in reports]
    sent = send_json(told, source, parallel_state.get_pipeline_model_parallel_group(), device)
    if here.pp_rank != topology.pp - 1:
        return []
    return [{name: _read(dtype, values, device) for name, (dtype, values) in report.items()} for report in sent]


def _written(name: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"the loss function reports {name!r} as a {type(value).__name__}, which does not reach the last pipeline"
            " rank in a V: report tensors, or leave --dynapipe-placement out"
        )
    return str(value.dtype).removeprefix("torch."), value.tolist()


def _read(dtype: str, values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype), device=device)
