"""Megatron-LM's global state, where it is installed beside megatron-core, and the reports of loss functions on the last
pipeline rank, where its training loops read them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import send_json


def training_loop() -> Any:
    """Megatron-LM's module of that name, imported; None where megatron-core is alone.

    From 0.17 on, wheels of megatron-core have the loop, but not all packages that it imports. Where these are missing,
    scripts on megatron-core alone still run; in a script that uses the loop its own import fails.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return None
    try:
        return importlib.import_module("megatron.training.training")
    except ImportError:
        return None


def parsed_arguments() -> Any:
    """Megatron-LM's arguments once it has parsed them; None before, and in scripts that do not use its parser."""
    variables: Any = sys.modules.get("megatron.training.global_vars")
    return None if variables is None else variables._GLOBAL_ARGS


def rescale_router_losses(factor: float) -> None:
    """Those that this step's routers have added up for the log, which divides them by Megatron's own number of
    micro-batches."""
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for tracked in utils.get_moe_layer_wise_logging_tracker().values():
        tracked["values"] *= factor


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
    """The reports of the last stage's rank, on the last pipeline rank; an empty list on the others. Except in a V, this
    is one and the same rank. In a V this is a collective call of a pipeline's ranks.

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
