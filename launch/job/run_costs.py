"""The costs that a run plans with, and tables of other models refused."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynapipe_ext.batch.micro_batches import round_up
from dynapipe_ext.costs.adjustments import adjust, find_fitted_times
from dynapipe_ext.costs.analytic import AnalyticCosts, MeasuredAdapters
from dynapipe_ext.costs.interchange import read_cost_file, run_costs_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.folder import read_manifest
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    configured_costs,
    topology_of,
)
from dynapipe_ext.launch.job.model_folder import part_options
from dynapipe_ext.launch.job.run_directory import fitted_costs_file
from dynapipe_ext.launch.processes.cluster import ended_if_silent
from dynapipe_ext.launch.processes.env import own_device
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE, Architecture
from dynapipe_ext.models.module_tree import read_transformers_config
from dynapipe_ext.settings.tables import LoraSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.files import write_atomic

if TYPE_CHECKING:
    from dynapipe_ext.executor.measuring.rate import LayersToMeasure

# What seconds and bytes of layers follow from, by the names of `Architecture`.
_SIZES = (
    "num_layers", "num_decoder_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size",
    "gated_mlp", "num_experts", "top_k", "shared_ffn_hidden_size", "sliding_window", "full_attention_every",
)  # fmt: skip


def refuse_table_of_other_model(costs: CostModel, config: TrainConfig, architecture: Architecture, where: str) -> None:
    """Refuse a table of other layers, weights or states than those of `config`, or of a smaller head.

    A larger head is accepted: it counts too much, which is safe. A table that does not name its model is judged by what
    it was made of. Errors: ConfigError.
    """
    measured = costs.facts.measured_sizes
    expected_sizes = {name: getattr(architecture, name) for name in _SIZES} | {"dtype": config.model.dtype}
    other = [
        f"{name} {measured[name]}, not {value}"
        for name, value in expected_sizes.items()
        if measured.get(name, value) != value
    ]
    ids, needed = measured.get("vocab_size", architecture.vocab_size), architecture.vocab_size
    if round_up(ids, VOCAB_MULTIPLE) < round_up(needed, VOCAB_MULTIPLE):
        other.append(f"vocab_size {ids}, not {needed} (with a tokenizer of your own, [data] vocab_size says it)")
    if other:
        raise ConfigError(
            f"the cost table {where} is of another model than the configured one: it has {'; '.join(other)}: measure"
            " this one (dynapipe profile), or leave the table out"
        )
    divides = config.optimizer.distributed or config.deepspeed.zero_stage or config.lora.enabled
    if costs.facts.sharded_state_bytes and config.topology.dp > 1 and not divides:
        raise ConfigError(
            f"the cost table {where} divides optimizer states over replicas and this run does not: set [optimizer]"
            " distributed, or measure without --distributed-optimizer"
        )


class RunCosts:
    """What a run plans with: one cost model, or several where it adapts them, each from a step (from 0) on."""

    def __init__(self, costs: CostModel) -> None:
        self._models = [(0, costs)]

    @property
    def now(self) -> CostModel:
        return self._models[-1][1]

    def adopt(self, step: int, costs: CostModel) -> None:
        self._models.append((step, costs))

    def at(self, step: int) -> CostModel:
        """Those with which the plan numbered `step` was made."""
        return next(costs for first, costs in reversed(self._models) if first <= step)


def write_fitted_costs(run_dir: Path, number: int, costs: CostModel, num_cores: int | None) -> None:
    """Keep the costs that hold after `number` steps, as `--costs` and `dynapipe plan` take them."""
    write_atomic(fitted_costs_file(run_dir, number), json.dumps(run_costs_to_json(costs, num_cores)) + "\n")


def resumed_costs(checkpoint: Path | None) -> CostModel | None:
    """Those that a run to go on with has planned with, measured or not."""
    return None if checkpoint is None else read_manifest(checkpoint).run.cost_model()


def settle_costs(config: TrainConfig, vocab_size: int, saved: CostModel | None = None) -> CostModel:
    """The costs of a run: of the file that the settings name; or those `saved` by the run that goes on, even if it has
    fitted the file's anew; or measured with the model on this device. Needs an idle torch.distributed."""
    architecture = architecture_of(config, vocab_size)
    if config.plan.costs or saved is not None:
        where, on_host = config.plan.costs or "the checkpoint", _is_on_host(config)
        costs_of_file = None
        if config.plan.costs:
            file_costs = adjust(read_cost_file(config.plan.costs), frozen=None)  # the settings say what trains
            refuse_table_of_other_model(file_costs, config, architecture, config.plan.costs)
            costs_of_file = costs_of_settings(config, file_costs, where, vocab_size=vocab_size, on_host=on_host)
        if saved is None or (costs_of_file is not None and not find_fitted_times(saved)):
            assert costs_of_file is not None
            return costs_of_file
        counted_anew = adjust(saved, frozen=None)  # of what trains: by the settings
        placed = costs_of_settings(config, counted_anew, where, vocab_size=vocab_size, on_host=on_host)
        if find_fitted_times(saved) and not find_fitted_times(placed):
            print("the costs that the run has fitted are of other stages: it starts from those before", file=sys.stderr)
        is_fitted_to_file = bool(find_fitted_times(placed)) and costs_of_file == adjust(placed, fitted=None)
        return placed if costs_of_file is None or is_fitted_to_file else costs_of_file
    warnings.filterwarnings("ignore", module="megatron")
    from dynapipe_ext.executor.measuring.rate import measure_rate, measure_stored

    move = "look there, or allow more by [job] timeout_s, or give costs (dynapipe profile)"
    measured_adapters = None
    with ended_if_silent(config.job.timeout_s, move) as sign:
        layers = _layers_to_measure(config, architecture)
        rate = measure_rate(layers, dtype=config.model.dtype, layout=config.plan.layout, sign=sign)
        if config.lora.enabled:
            adapted = _layers_to_measure(config, architecture, adapters=config.lora)
            stored = measure_stored(adapted, dtype=config.model.dtype, flash=rate.flash, sign=sign)
            measured_adapters = MeasuredAdapters(config.lora.stored_as, stored.of_layers, stored.of_rest)
    counted = analytic_costs(config, architecture, flops_per_s=rate.flops_per_s, overhead_ns=0)
    counted = kept_on_host(counted) if _is_on_host(config) else counted
    measured: dict[str, Any] = {
        "layer_overhead_ns": rate.layer_overhead_ns,
        "layer_bytes_factor": rate.layer_bytes_factor,
        "head_bytes_factor": rate.head_bytes_factor,
    }
    measured |= {"measured_adapters": measured_adapters} if measured_adapters else {}
    return replace(counted, **measured | ({} if rate.flash else {"flash": False}))


def _layers_to_measure(
    config: TrainConfig, architecture: Architecture, adapters: LoraSettings | None = None
) -> LayersToMeasure:
    """Those of the backend that trains the model, on this process's device; with adapters, which alone train."""
    from dynapipe_ext.executor.measuring.rate import MegatronLayers

    device, model = own_device(0), config.model
    architecture = replace(architecture, max_seq_len=min(architecture.max_seq_len, model.max_seq_len))
    if not model.uses_transformers:
        return MegatronLayers(architecture, model.dtype, device)
    from dynapipe_ext.executor.measuring.transformers_layers import TransformersLayers

    options = part_options(config, shares_rows=config.topology.context_parallel != 1)
    return TransformersLayers(
        read_transformers_config(model.architecture),
        architecture,
        model.dtype,
        device,
        layouts=(config.plan.layout,),
        pattern=options.pop("pattern", None),
        options=options,
        dropout=model.dropout,
        adapters=adapters,
    )


def costs_of_settings(
    config: TrainConfig, costs: CostModel, where: str, *, vocab_size: int | None, on_host: bool
) -> CostModel:
    """The costs of a file over the configured topology, with the counted parts as the settings have them.

    Where the settings leave the vocabulary to the data, `vocab_size` is its size; None: the file's. Errors: ConfigError
    for counted costs of another model.
    """

    def configured(counted: AnalyticCosts) -> AnalyticCosts:
        ids = counted.architecture.vocab_size if vocab_size is None else vocab_size
        architecture = architecture_of(config, ids).padded()
        if counted.architecture != architecture:
            raise ConfigError(
                f"the costs in {where} are those of another model ({counted.architecture}), not of the configured"
                f" one ({architecture}): leave them out to measure this machine"
            )
        settled = configured_costs(config, counted)
        return kept_on_host(settled) if on_host else settled

    return costs.with_topology(topology_of(config))[0].change_analytic(configured)


def kept_on_host(costs: AnalyticCosts) -> AnalyticCosts:
    """Without what an engine offloads, as ranks that compute on the host keep it."""
    unmoved: dict[str, Any] = {} if costs.facts.has_decoder else {"offload": "none"}
    return replace(costs, **unmoved)


def _is_on_host(config: TrainConfig) -> bool:
    """Whether ranks compute where an engine would offload to; asked where something is to be offloaded."""
    if config.deepspeed.offload == "none":
        return False
    from dynapipe_ext.executor.device import rank_device

    return rank_device(0).type == "cpu"
