"""The rank program: `torchrun --nproc-per-node 8 -m dynapipe_ext.launch.train --config FILE --store redis://…`.

`dynapipe train` forks its ranks into the same `run_rank`. What ranks must agree on (costs, the key that signs plans,
the store's address) comes from rank 0 over the job's own process group, so no secret passes through the store.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.core import active_core
from dynapipe_ext.costs.abilities import recounted
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import ConfigError, DynaPipeError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.launch.env import RankEnv, limit_threads, rank_env, store_password
from dynapipe_ext.launch.job import (
    Variant,
    architecture_of,
    check_batches,
    check_fits,
    configured_costs,
    data_folder,
    prepare_data,
    read_costs,
    topology_of,
    variants,
)
from dynapipe_ext.launch.redis_server import RedisServer
from dynapipe_ext.tools.json_file import write_atomic
from dynapipe_ext.tools.progress import WorkProgress
from dynapipe_ext.topology import Topology

# How long ranks wait for rank 0 to tokenize the data and to measure costs; rank 0's own failure ends the job at once.
_PREPARE_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What `dynapipe train` has settled before it forks ranks; under torchrun rank 0 settles it."""

    config: TrainConfig
    compare: bool
    address: StoreAddress | None = None
    costs: CostModel | None = None


def run_rank(env: RankEnv, job: Job) -> int:
    """Train as one rank of a job; returns 0. Errors are raised."""
    warnings.filterwarnings("ignore", module="megatron")
    import torch
    import torch.distributed as dist

    from dynapipe_ext.executor.device import process_group_backend, rank_device

    config = job.config
    topology = topology_of(config)
    if env.world_size != topology.world_size:
        raise ConfigError(
            f"{env.world_size} ranks were started but tp {topology.tp} x pp {topology.pp} x dp {topology.dp} needs"
            f" {topology.world_size}: change --nproc-per-node or the topology"
        )
    torch.set_num_threads(limit_threads())
    device = rank_device(env.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.job.strict:
            raise ConfigError("[job] strict moves CPU tensors over gloo: leave it out on accelerators")
    costs = job.costs
    if costs is None and env.rank == 0:
        print(ranks_line(topology), file=sys.stderr)
        costs = settle_costs(config, prepare_data(config).vocab_size)
    dist.init_process_group(
        process_group_backend(device),
        init_method=env.init_method,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=max(config.job.timeout_s, _PREPARE_LIMIT_S)),
    )
    try:
        with ExitStack() as stack:
            _run(env, job, costs, device, stack)
            dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _run(env: RankEnv, job: Job, costs: CostModel | None, device: Any, stack: ExitStack) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from dynapipe_ext.executor.stages.megatron_model import initialize_parallel
    from dynapipe_ext.executor.transport.groups import make_pipeline_groups
    from dynapipe_ext.launch.training_loop import (
        RankContext,
        RankFigures,
        broadcast_bytes,
        clock_offset_s,
        num_cores,
        train,
    )

    config, topology = job.config, topology_of(job.config)
    settled = b""
    if env.rank == 0:
        address = job.address or _embedded_store(env, config, stack)
        assert costs is not None
        priced = cost_model_to_json(costs)
        # With --costs, this file makes another run plan exactly as this one does.
        write_atomic(Path(config.run.run_dir) / "costs.json", json.dumps(priced) + "\n")
        settled = json.dumps(
            {
                "url": address.url,
                "password": address.password,
                "plan_key": secrets.token_hex(32),
                "namespace": f"run-{secrets.token_hex(8)}",
                "costs": priced,
            }
        ).encode()
    shared = json.loads(broadcast_bytes(settled, device))
    dataset = _dataset(env, config)
    agreed = cost_model_from_json(shared["costs"])
    if job.costs is None:  # dynapipe train has checked this before it forked the ranks
        check_batches(config, dataset.lengths)
        check_fits(config, agreed, dataset.lengths)
    _set_pg_timeout(timedelta(seconds=config.job.timeout_s))  # from here on nobody may be silent for longer
    store = open_store(StoreAddress(shared["url"], shared["password"]), namespace=shared["namespace"])
    stack.callback(store.close)
    initialize_parallel(topology, config.run.seed, timeout_s=config.job.timeout_s)
    context = RankContext(
        rank=env.rank,
        config=config,
        dataset=dataset,
        costs=agreed,
        store=store,
        plan_key=bytes.fromhex(shared["plan_key"]),
        namespace=shared["namespace"],
        groups=make_pipeline_groups(topology, env.rank, timeout_s=config.job.timeout_s),
        device=device,
        clock_offset_s=clock_offset_s(env.local_world_size == env.world_size, device),
    )
    runs: list[tuple[Variant, Any, list[RankFigures]]] = []
    for index, variant in enumerate(variants(config, compare=job.compare)):
        steps, mine = train(context, variant, index)
        key = f"figures/{index}"
        store.put(f"{key}/{env.rank}", mine.encode())
        if env.rank == 0:
            everyone = [store.get(f"{key}/{rank}", config.job.timeout_s) for rank in range(topology.world_size)]
            runs.append((variant, steps, [RankFigures.decode(figures) for figures in everyone]))
            store.delete(*(f"{key}/{rank}" for rank in range(topology.world_size)))
        dist.barrier()
    if env.rank == 0:
        from dynapipe_ext.launch.outcome import VariantFigures, write_outcome
        from dynapipe_ext.tools.account.report import StoreInfo

        info = store.info()
        write_outcome(
            config,
            context.costs,
            dataset,
            [VariantFigures(*run) for run in runs],
            store=StoreInfo(info["server"], info["version"]),
            device=str(device) if device.type == "cpu" else _device_name(device),
            num_cores=num_cores(),
        )


def ranks_line(topology: Topology) -> str:
    """What a job says when it starts: its ranks, and the core that plans for them."""
    core = active_core()
    slower = "" if core == "native" else " (slower than the native one: see dynapipe doctor)"
    ranks = f"ranks: {topology.world_size} (TP{topology.tp} x PP{topology.pp} x DP{topology.dp})"
    return f"{ranks}, plans by the {core} core{slower}"


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _embedded_store(env: RankEnv, config: TrainConfig, stack: ExitStack) -> StoreAddress:
    """The store of a torchrun job that was given none: on this machine, so only where all ranks are."""
    if env.local_world_size != env.world_size:
        raise ConfigError(
            f"{env.world_size} ranks on several machines need a store that all can reach:"
            " pass --store redis://host:port (password in DYNAPIPE_STORE_PASSWORD)"
        )
    return stack.enter_context(RedisServer(binary=config.job.redis_server or None)).address


def _dataset(env: RankEnv, config: TrainConfig) -> TokenDataset:
    """Rank 0 prepares the data, then the first rank of every other node (a shared file system finds it done)."""
    import torch.distributed as dist

    folder = data_folder(config)
    if env.rank == 0:
        prepare_data(config)
    dist.barrier()
    if env.local_rank == 0 and env.rank != 0:
        prepare_data(config)
    dist.barrier()
    return TokenDataset.open(folder)


def settle_costs(config: TrainConfig, vocab_size: int) -> CostModel:
    """The cost file that the settings name, or the model measured on this device. Needs an idle torch.distributed."""
    architecture = architecture_of(config, vocab_size)
    if config.plan.costs:

        def configured(counted: AnalyticCosts) -> AnalyticCosts:
            if counted.architecture != architecture.padded():
                raise ConfigError(
                    f"the costs in {config.plan.costs} are those of another model ({counted.architecture}), not of the"
                    f" configured one ({architecture.padded()}): leave them out to measure this machine"
                )
            return configured_costs(config, counted)

        return recounted(read_costs(config.plan.costs, topology_of(config))[0], configured)
    warnings.filterwarnings("ignore", module="megatron")
    from dynapipe_ext.executor.device import rank_device
    from dynapipe_ext.executor.measuring.rate import measure_rate

    rate = measure_rate(architecture, dtype=config.model.dtype, device=rank_device(0))
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


def data_progress(config: TrainConfig, *, enabled: bool) -> tuple[WorkProgress, Callable[[int], None]]:
    """A progress display for `prepare_data` and the function that feeds it with samples done so far."""
    total = None if config.data.path else config.data.num_samples
    progress, done = WorkProgress("tokenizing", total, enabled=enabled), 0

    def advance(samples: int) -> None:
        nonlocal done
        progress.advance(samples - done)
        done = samples

    return progress, advance


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dynapipe_ext.launch.train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="settings in TOML")
    parser.add_argument("--store", metavar="URL", help="redis://, rediss:// or unix://; default: embedded (one node)")
    parser.add_argument("--compare", action="store_true", help="run the usual ways beside the configured one")
    args = parser.parse_args(arguments)
    try:
        env = rank_env()
        address = store_address(args.store) if args.store else None
        return run_rank(env, Job(TrainConfig.read(args.config), args.compare, address))
    except DynaPipeError as error:
        print(f"dynapipe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def store_address(url: str) -> StoreAddress:
    """The user's own store; its password comes from the environment rather than the command line, which others see."""
    address = StoreAddress.parse(url, store_password())
    if address.password and address.password in url:
        print(
            "dynapipe: the store's password is visible in the process list: pass it in DYNAPIPE_STORE_PASSWORD",
            file=sys.stderr,
        )
    return address


if __name__ == "__main__":
    limit_threads()
    sys.exit(main())
