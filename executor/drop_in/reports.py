"""What loss functions reported, on the rank where Megatron's training loops look for it: the last of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.megatron_lm import parsed_arguments
from dynapipe_ext.executor.stages.collectives import send_json


def check_collects(topology: Topology, collect_non_loss_data: bool) -> None:
    """Errors: ConfigError where what is collected would have to travel, of which nothing is known."""
    if collect_non_loss_data and topology.stage_ranks[-1] != topology.pp - 1:
        raise ConfigError(
            f"collect_non_loss_data is True, but under placement {topology.placement_name} the last stage is on"
            f" pipeline rank {topology.stage_ranks[-1]}, not on the last: leave --dynapipe-placement out"
        )


def check_collects_planned(collect_non_loss_data: bool) -> None:
    """Errors: ConfigError where one rank would take a step of planned data that others do not."""
    if collect_non_loss_data and parsed_arguments() is not None and dist.get_world_size() > 1:
        raise ConfigError(
            "collect_non_loss_data is True, which Megatron-LM asks of the last rank alone (process_non_loss_data_func);"
            " its planned data would run ahead of the others': give non_loss_data_func, which all ranks call"
        )


def of_global_batch(reports: list[Any]) -> list[Any]:
    """One report for all, of every replica's micro-batches: pairs (sum, count) added up, single values' mean.

    Megatron-LM's evaluation under --sft takes means of micro-batches, then their mean, which would depend on the plan.
    A collective call of the replicas whose rank has reports.
    """
    if not reports:
        return reports
    from megatron.core import parallel_state

    whole = {}
    for name in reports[0]:
        values = torch.stack([report[name].detach().float().view(-1) for report in reports])
        if values.shape[1] == 1:
            whole[name] = values.mean(dim=0)
            continue
        whole[name] = values.sum(dim=0)
        dist.all_reduce(whole[name], group=parallel_state.get_data_parallel_group())
    return [whole]


def sent_to_last_rank(reports: list[Any], topology: Topology, here: Coordinates, device: torch.device) -> list[Any]:
    """The reports of the rank with the last stage, on the last pipeline rank (elsewhere none); there they are already,
    save in a V, where this is a collective call of a pipeline's ranks.

    Errors: ConfigError for reports that are no tensors.
    """
    from megatron.core import parallel_state

    if topology.stage_ranks[-1] == topology.pp - 1:
        return reports
    source = topology.rank(tp_rank=here.tp_rank, pp_rank=topology.stage_ranks[-1], dp_rank=here.dp_rank)
    written = [{name: _written(name, value) for name, value in report.items()} for report in reports]
    sent = send_json(written, source, parallel_state.get_pipeline_model_parallel_group(), device)
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
