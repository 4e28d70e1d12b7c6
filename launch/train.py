"""The rank program: `torchrun --nproc-per-node 8 -m dynapipe_ext.launch.train --config FILE --store redis://…`.

`dynapipe train` forks its ranks into the same `train_rank`. What ranks must agree on (costs, the key that signs plans,
the store's address) comes from rank 0 over the job's own process group, so no secret passes through the store.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.core import active_core
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import ConfigError, DynaPipeError, ExecutionError, in_one_line
from dynapipe_ext.executor.checkpoints.folder import latest
from dynapipe_ext.executor.checkpoints.manifest import read_manifest
from dynapipe_ext.executor.checkpoints.periodic import EndRequest
from dynapipe_ext.executor.events import Listener
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.launch.cluster import BUG_STATUS, USER_ERROR_STATUS
from dynapipe_ext.launch.env import RankEnv, limit_threads, rank_env, store_password
from dynapipe_ext.launch.job import (
    check_batches,
    check_fits,
    settled_steps,
    topology_of,
    variants,
)
from dynapipe_ext.launch.listeners import listeners_of, require_loggers
from dynapipe_ext.launch.outcome import begin_run, keeping_what_ran, resume_run, run_facts, write_outcome
from dynapipe_ext.launch.placement import settled_placement, trials_table
from dynapipe_ext.launch.redis_server import RedisServer
from dynapipe_ext.launch.run_costs import resumed_costs, settle_costs
from dynapipe_ext.launch.run_data import (
    PREPARE_LIMIT_S,
    RunData,
    check_data,
    data_folder,
    prepare_data,
    refuse_pieces,
    run_data,
)
from dynapipe_ext.launch.run_directory import CHECKPOINTS, RunDirectory, run_to_resume
from dynapipe_ext.launch.signals import ending_signals_raise
from dynapipe_ext.launch.traced_spans import Spans, TracedSpans, give_spans, take_spans
from dynapipe_ext.launch.trained_model import refuse_output, write_trained_model
from dynapipe_ext.launch.transformers_settings import refuse_unsupported
from dynapipe_ext.tools.account.report import StoreInfo
from dynapipe_ext.tools.console import show
from dynapipe_ext.tools.progress import WorkProgress
from dynapipe_ext.topology import Topology

if TYPE_CHECKING:  # it imports torch and Megatron
    from dynapipe_ext.launch.variant_run import RankContext


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What `dynapipe train` has settled before it forks ranks; under torchrun rank 0 settles it.

    `run_dir` is the directory that rank 0 fills; its owner has claimed it, and holds it for as long as the ranks run.
    `resumed` is the checkpoint to go on from. `end_signals` ask a rank to save and end. `overwrite`: the trained model
    may take the place of what its folder holds.
    """

    config: TrainConfig
    compare: bool
    run_dir: Path
    address: StoreAddress | None = None
    costs: CostModel | None = None
    resumed: Path | None = None
    end_signals: tuple[signal.Signals, ...] = (signal.SIGUSR1,)
    overwrite: bool = False


def train_rank(env: RankEnv, job: TrainingJob) -> int:
    """Train as one rank of a job; returns 0. Errors are raised."""
    warnings.filterwarnings("ignore", module="megatron")
    import torch
    import torch.distributed as dist

    from dynapipe_ext.executor.device import process_group_backend, rank_device

    config = job.config
    refuse_unsupported(config, resumes=job.resumed is not None)
    topology = topology_of(config)
    variants(config, compare=job.compare)  # refused on all ranks before they meet
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
        dataset = prepare_data(config)
        costs = settle_costs(config, dataset.vocab_size, resumed_costs(job.resumed))
        config, costs, trials = settled_placement(config, costs, dataset.lengths)
        job = replace(job, config=config)
        if trials:
            show(trials_table(trials), console=Console(stderr=True, highlight=False))
    dist.init_process_group(
        process_group_backend(device),
        init_method=env.init_method,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=max(config.job.timeout_s, PREPARE_LIMIT_S)),
    )
    try:
        with ExitStack() as stack:
            context, spans = _run(env, job, costs, device, stack)
            dist.barrier()
    finally:
        dist.destroy_process_group()
    if env.rank == 0:  # alone, so that what goes wrong here is said once
        write_outcome(
            job.run_dir, context.config, context.costs, context.data, variants(config, compare=False)[0], spans
        )
        if output := context.config.checkpoint.output:
            step = write_trained_model(context.config, job.run_dir, overwrite=job.overwrite)
            print(f"the model after step {step} is in {output} ({config.checkpoint.save_format})")
    return 0


def _run(
    env: RankEnv, job: TrainingJob, costs: CostModel | None, device: Any, stack: ExitStack
) -> tuple[RankContext, list[Spans]]:
    """Runs the variants; what rank 0 gets back with the rank's context are the spans of all ranks in the first one."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from dynapipe_ext.executor.stages.megatron_model import initialize_parallel
    from dynapipe_ext.executor.transport.groups import make_pipeline_groups
    from dynapipe_ext.launch.variant_run import (
        RankContext,
        RunCheckpoints,
        broadcast_bytes,
        clock_offset_s,
        num_cores,
        run_variant,
    )

    config, settled = job.config, b""
    if env.rank == 0:
        address = job.address or _embedded_store(env, config, stack)
        assert costs is not None
        settled = json.dumps(
            {
                "url": address.url,
                "password": address.password,
                "plan_key": secrets.token_hex(32),
                "namespace": f"run-{secrets.token_hex(8)}",
                "costs": cost_model_to_json(costs),
                "topology": config.to_json()["topology"],
                "checkpoints": str((job.run_dir / CHECKPOINTS).resolve()),
                "resumed": str(job.resumed.resolve()) if job.resumed else "",
            }
        ).encode()
    shared = json.loads(broadcast_bytes(settled, device))
    config = replace(config, topology=TrainConfig.from_json({"topology": shared["topology"]}).topology)
    topology = topology_of(config)
    data = _data(env, config)
    refuse_pieces(config, data, compare=job.compare)
    config = settled_steps(config, data.train.lengths)
    if job.resumed is not None:
        refuse_done(job.resumed, config)
    agreed = cost_model_from_json(shared["costs"])
    if job.costs is None:  # dynapipe train has checked this before it forked the ranks
        check_data(data, lambda lengths: check_batches(config, lengths))
        check_data(data, lambda lengths: check_fits(config, agreed, lengths))
    _set_pg_timeout(timedelta(seconds=config.job.timeout_s))  # from here on nobody may be silent for longer
    store = open_store(StoreAddress(shared["url"], shared["password"]), namespace=shared["namespace"])
    stack.callback(store.close)
    initialize_parallel(topology, config.run.seed, timeout_s=config.job.timeout_s)
    context = RankContext(
        rank=env.rank,
        config=config,
        data=data,
        costs=agreed,
        store=store,
        plan_key=bytes.fromhex(shared["plan_key"]),
        namespace=shared["namespace"],
        groups=make_pipeline_groups(topology, env.rank, timeout_s=config.job.timeout_s),
        device=device,
        clock_offset_s=clock_offset_s(env.local_world_size == env.world_size, device),
    )
    resumed = Path(shared["resumed"]) if shared["resumed"] else None
    first_step = 0 if resumed is None else read_manifest(resumed).run.step
    chosen, traced = variants(config, compare=job.compare), TracedSpans()
    if env.rank == 0:
        told, name = store.info(), "cpu" if device.type == "cpu" else _device_name(device)
        info = StoreInfo(told["server"], told["version"])
        facts = run_facts(config, data.whole, info, device=name, num_cores=num_cores())
        if job.resumed is None:
            begin_run(job.run_dir, config, agreed, facts, chosen)
        else:
            resume_run(job.run_dir, config, facts, first_step)
    request = EndRequest(config.checkpoint.grace_s)
    checkpoints = RunCheckpoints(Path(shared["checkpoints"]), resumed, request, job.end_signals)
    for index, variant in enumerate(chosen):
        with ExitStack() as listening:
            listeners: list[Listener] = [] if index else [traced]
            if env.rank == 0:
                listeners += listeners_of(config, job.run_dir, variant, index, first_step)
            for listener in listeners:
                listening.callback(listener.close)
            run_variant(context, variant, f"{context.namespace}/{index}", listeners, None if index else checkpoints)
        dist.barrier()
    give_spans(store, env.rank, traced.spans)
    dist.barrier()
    return context, take_spans(store, topology.world_size, config.job.timeout_s) if env.rank == 0 else []


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


def _data(env: RankEnv, config: TrainConfig) -> RunData:
    """Rank 0 prepares the data, then the first rank of every other node (a shared file system finds it done)."""
    import torch.distributed as dist

    folder = data_folder(config)
    if env.rank == 0:
        run_data(config, prepare_data(config))
    dist.barrier()
    if env.local_rank == 0 and env.rank != 0:
        run_data(config, prepare_data(config))
    dist.barrier()
    return run_data(config, TokenDataset.open(folder))


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
    parser.add_argument("--overwrite", action="store_true", help="lose the run and the model that are there")
    parser.add_argument(
        "--resume", metavar="RUN_DIR", help='go on from its newest checkpoint; "latest": the newest run'
    )
    args = parser.parse_args(arguments)
    env: RankEnv | None = None
    try:
        with ending_signals_raise():
            env = rank_env()
            return _main(env, args)
    except Exception as error:  # noqa: BLE001 - the last frame of the process
        cause = (f"rank {env.rank}: " if env else "") + in_one_line(error)
        print(f"dynapipe: error: {cause}", file=sys.stderr)
        if env:
            _tell_torchrun(error, cause)
        return USER_ERROR_STATUS if isinstance(error, DynaPipeError) else BUG_STATUS
    except KeyboardInterrupt:
        return 130


def _tell_torchrun(error: Exception, cause: str) -> None:
    """For its summary, which shows the first failure: its cause, after the calls that led to it if it is a defect."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise ExecutionError(cause) from (None if isinstance(error, DynaPipeError) else error)
    except ExecutionError as told:
        get_error_handler().record_exception(told)


def _main(env: RankEnv, args: argparse.Namespace) -> int:
    address = store_address(args.store) if args.store else None
    config = TrainConfig.read(args.config)
    require_loggers(config)
    refuse_output(config, overwrite=args.overwrite)
    run_dir, resumed = config.run.run_dir, None
    if args.resume:
        run_dir = str(run_to_resume(args.resume))
        resumed = to_go_on_from(Path(run_dir), config, compare=args.compare, overwrite=args.overwrite)
    asked = (signal.SIGTERM, signal.SIGUSR1)
    if env.rank:
        return train_rank(env, TrainingJob(config, args.compare, Path(), address, resumed=resumed, end_signals=asked))
    with (
        RunDirectory(run_dir, overwrite=args.overwrite and not args.resume, resume=bool(args.resume)) as directory,
        keeping_what_ran(directory),
    ):
        job = TrainingJob(
            config, args.compare, directory.path, address, resumed=resumed, end_signals=asked, overwrite=args.overwrite
        )
        return train_rank(env, job)


def to_go_on_from(run_dir: Path, config: TrainConfig, *, compare: bool, overwrite: bool) -> Path:
    """The newest checkpoint of a run. Errors: ConfigError where the settings leave it nothing to do."""
    overwrite = overwrite and not config.checkpoint.output  # what that holds may be lost
    if compare or overwrite:
        raise ConfigError(f"--resume goes on with {run_dir}: leave out {'--compare' if compare else '--overwrite'}")
    newest = latest(run_dir / CHECKPOINTS)
    if not config.run.epochs:
        refuse_done(newest, config)
    return newest


def refuse_done(newest: Path, config: TrainConfig) -> None:
    """Errors: ConfigError where a checkpoint has done all the steps of the settings."""
    done = read_manifest(newest).run.step
    if done >= config.run.steps:
        raise ConfigError(f"{newest} has done {done} steps and steps is {config.run.steps}: raise --steps to go on")


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
