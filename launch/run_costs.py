"""The costs that a run plans with: a file's, those of the run that it goes on from, or measured on this device."""

from __future__ import annotations

import warnings
from pathlib import Path

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.abilities import over_topology, recounted
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.manifest import read_manifest
from dynapipe_ext.launch.job import architecture_of, configured_costs, read_costs, topology_of
from dynapipe_ext.topology import Topology


def resumed_costs(checkpoint: Path | None) -> CostModel | None:
    """Those that a run to go on with has planned with, measured or not."""
    return None if checkpoint is None else read_manifest(checkpoint).run.cost_model()


def settle_costs(config: TrainConfig, vocab_size: int, saved: CostModel | None = None) -> CostModel:
    """The cost file that the settings name, or those `saved` by the run that goes on, or the model measured on this
    device. Needs an idle torch.distributed."""
    architecture = architecture_of(config, vocab_size)
    if config.plan.costs or saved is not None:
        where = config.plan.costs or "the checkpoint"

        def configured(counted: AnalyticCosts) -> AnalyticCosts:
            if counted.architecture != architecture.padded():
                raise ConfigError(
                    f"the costs in {where} are those of another model ({counted.architecture}), not of the configured"
                    f" one ({architecture.padded()}): leave them out to measure this machine"
                )
            return configured_costs(config, counted)

        if config.plan.costs:
            return recounted(read_costs(config.plan.costs, topology_of(config))[0], configured)
        assert saved is not None
        return recounted(over_topology(saved, topology_of(config))[0], configured)
    warnings.filterwarnings("ignore", module="megatron")
    from dynapipe_ext.executor.device import rank_device
    from dynapipe_ext.executor.measuring.rate import measure_rate

    rate = measure_rate(architecture, dtype=config.model.dtype, device=rank_device(0), layout=config.plan.layout)
    measured = AnalyticCosts(
        architecture.padded(),
        Topology(),
        flops_per_s=rate.flops_per_s,
        overhead_ns=0,
        layer_overhead_ns=rate.layer_overhead_ns,
        layer_bytes_factor=rate.layer_bytes_factor,
        head_bytes_factor=rate.head_bytes_factor,
    )
    return configured_costs(config, measured)
