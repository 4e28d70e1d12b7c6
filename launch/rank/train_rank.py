"""What a rank does, forked by `dynapipe train` or started by torchrun (`launch/rank/rank_program.py`).

What ranks must agree on (costs, the key that signs plans, the store's address) comes from rank 0 over the job's own
process group, so no secret passes through the store.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.core import active_core
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.executor.events import Listener
from dynapipe_ext.executor.plans.channel import store_patience_s
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.launch.env import RankEnv, keep_cublas_deterministic, limit_threads, num_cores
from dynapipe_ext.launch.job.job import (
    architecture_of,
    check_batches,
    check_fits,
    placed_stages,
    settled_steps,
    topology_of,
    variants,
)
from dynapipe_ext.launch.job.model_folder import (
    adapters_line,
    dropout_line,
    prediction_line,
    refuse_unsupported,
    widened_line,
)
from dynapipe_ext.launch.job.placement import batches_to_place, followed_placement, trials_table
from dynapipe_ext.launch.job.run_costs import RunCosts, resumed_costs, settle_costs
from dynapipe_ext.launch.job.run_data import (
    PREPARE_LIMIT_S,
    RunData,
    check_data,
    data_lines,
    refuse_other_data,
    refuse_pieces,
    run_data,
)
from dynapipe_ext.launch.job.settled import SettledPlanning, placed_planning
from dynapipe_ext.launch.rank.rank_log import RankLog, rank_log, shown, written
from dynapipe_ext.launch.rank.traced_spans import Spans, TracedSpans, spans_from_bytes, spans_to_bytes
from dynapipe_ext.launch.run.outcome import begin_run, is_unfinished, resume_run, run_facts, write_outcome
from dynapipe_ext.launch.run.run_directory import CHECKPOINTS
from dynapipe_ext.launch.run.trained_model import keep_model_files, write_trained_model
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import StoreInfo
from dynapipe_ext.tools.console import say_loading, show
from dynapipe_ext.tools.progress import WorkProgress
from dynapipe_ext.tools.show.samples import sample_text
from dynapipe_ext.tools.wording import counted

if TYPE_CHECKING:  # they import torch, one of them Megatron
    from dynapipe_ext.launch.rank.meeting import Meeting
    from dynapipe_ext.launch.rank.variant_run import RankContext


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What `dynapipe train` has settled before it forks ranks; under torchrun rank 0 settles it.

    `data` are read once, so that all forked ranks train on the same, whatever becomes of the files meanwhile.
    `run_dir` is the directory that rank 0 fills; its owner has claimed it, and holds it for as long as the ranks run.
    `resumed` is the checkpoint to go on from. `end_signals` ask a rank to save and end. `overwrite`: the trained model
    may take the place of what its folder holds. `num_shown`: samples to print, where the rank prepares the data.
    """

    config: TrainConfig
    compare: bool
    run_dir: Path
    address: StoreAddress | None = None
    costs: CostModel | None = None
    data: RunData | None = None
    resumed: Path | None = None
    end_signals: tuple[signal.Signals, ...] = (signal.SIGUSR1,)
    overwrite: bool = False
    num_shown: int = 0


def train_rank(env: RankEnv, job: TrainingJob) -> int:
    """Train as one rank of a job, which keeps a log where the settings ask for one; returns 0. Errors are raised."""
    with rank_log(job.config.debug, env) as log:
        return _train(env, job, log)


def _train(env: RankEnv, job: TrainingJob, log: RankLog | None) -> int:
    warnings.filterwarnings("ignore", module="megatron")
    if env.rank == 0:
        say_loading("torch", "megatron-core")
    import torch
    import torch.distributed as dist

    from dynapipe_ext.executor.device import compute_deterministically, rank_device
    from dynapipe_ext.launch.rank.meeting import Meeting

    config = job.config
    refuse_unsupported(config)
    topology = topology_of(config)
    variants(config, compare=job.compare)  # refused on all ranks before they meet
    if env.world_size != topology.world_size:
        raise ConfigError(
            f"{env.world_size} ranks were started but tp {topology.tp} x pp {topology.pp} x dp {topology.dp} needs"
            f" {topology.world_size}: change --nproc-per-node or the topology"
        )
    torch.set_num_threads(limit_threads())
    if config.optimizer.deterministic:
        keep_cublas_deterministic()
        compute_deterministically()
    device = rank_device(env.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.job.strict:
            raise ConfigError("[job] strict moves CPU tensors over gloo: leave it out on accelerators")
    costs = job.costs
    timeout_s = config.job.timeout_s
    meeting = Meeting(env, limit_s=max(timeout_s, PREPARE_LIMIT_S), silent_s=timeout_s)
    if costs is None and env.rank == 0:
        said = [
            ranks_line(topology),
            followed_placement(config),
            adapters_line(config),
            widened_line(config),
            dropout_line(config),
        ]
        said.append(prediction_line(config.model.architecture))
        print("\n".join(line for line in said if line), file=sys.stderr)
        progress, advance = data_progress(config)
        with progress:
            data = run_data(config, advance)
        print("\n".join(data_lines(data)), file=sys.stderr)
        show_samples(data.whole, job.num_shown, Console(stderr=True, highlight=False))
        costs = settle_costs(config, data.whole.vocab_size, resumed_costs(job.resumed))
        planning = SettledPlanning(
            config=config, costs=costs, topology=topology_of(config), num_cores=job_cores(env, device)
        )
        planning, trials = placed_planning(planning, partial(batches_to_place, config, data.train.lengths))
        config, costs = planning.config, planning.costs
        job = replace(job, config=config, data=data)
        if trials:
            show(trials_table(trials), console=Console(stderr=True, highlight=False))
    meeting.arrive("meeting of all ranks")
    meeting.connect(device, timeout_s=timeout_s)  # from here on nobody may be silent for longer
    # A rank that fails keeps its process groups until it has said why: others fail once they are closed.
    with ExitStack() as stack:
        context, spans = _run(env, meeting, job, costs, device, log, stack)
        with named_collectives("end of the job"):
            dist.barrier()
    dist.destroy_process_group()
    if env.rank == 0:  # alone, so that what goes wrong here is said once
        write_outcome(job.run_dir, context.config, context.costs, context.data, spans)
        if output := context.config.checkpoint.output:
            step = write_trained_model(context.config, job.run_dir, overwrite=job.overwrite)
            print(f"the model after step {step} is in {output} ({config.checkpoint.save_format})")
    return 0


def _run(
    env: RankEnv,
    meeting: Meeting,
    job: TrainingJob,
    costs: CostModel | None,
    device: Any,
    log: RankLog | None,
    stack: ExitStack,
) -> tuple[RankContext, list[Spans]]:
    """Runs the variants; what rank 0 gets back with the rank's context are the spans of all ranks in the first one."""
    import torch.distributed as dist

    from dynapipe_ext.executor.checkpoints.saving import EndRequest
    from dynapipe_ext.executor.device import device_bytes, device_name
    from dynapipe_ext.executor.stages.megatron.model import initialize_parallel
    from dynapipe_ext.executor.transport.torch_p2p import Groups, make_pipeline_groups
    from dynapipe_ext.launch.rank.variant_run import (
        RankContext,
        RunCheckpoints,
        broadcast_bytes,
        clock_offset_s,
        gather_bytes,
        node_of,
        run_variant,
    )

    config, settled = job.config, b""
    if env.rank == 0:
        address = job.address
        assert costs is not None
        assert address is not None
        assert job.data is not None
        settled = json.dumps(
            {
                "store": address.to_json(),
                "plan_key": secrets.token_hex(32),
                "namespace": f"run-{secrets.token_hex(8)}",
                "costs": cost_model_to_json(costs),
                "data": job.data.fingerprint,
                "topology": config.to_json()["topology"],
                "num_cores": job_cores(env, device),
                "checkpoints": str((job.run_dir / CHECKPOINTS).resolve()),
                "resumed": str(job.resumed.resolve()) if job.resumed else "",
            }
        ).encode()
    shared = json.loads(broadcast_bytes(settled, "what rank 0 has settled", device))
    config = replace(config, topology=TrainConfig.from_json({"topology": shared["topology"]}).topology)
    topology = topology_of(config)
    data = _data(env, meeting, config, job.data)
    if data.fingerprint != shared["data"]:
        raise DataError(f"{data.whole.directory} holds other data than rank 0's: have the same files on every node")
    refuse_pieces(config, data, compare=job.compare)
    config = settled_steps(config, data.train.lengths)
    if job.resumed is not None:
        refuse_done(job.resumed, config)
    agreed = cost_model_from_json(shared["costs"])
    if job.costs is None:  # dynapipe train has checked this before it forked the ranks
        if job.resumed is not None:
            refuse_other_data(job.resumed, config, data)
        check_data(data, lambda lengths: check_batches(config, lengths))
        check_data(data, lambda lengths: check_fits(config, agreed, lengths))
    patience_s = store_patience_s(config.job.timeout_s)
    address = StoreAddress.from_json(shared["store"])
    store = open_store(address, namespace=shared["namespace"], connect_s=patience_s, reconnect_s=patience_s)
    stack.callback(store.close)
    architecture = architecture_of(config, data.whole.vocab_size)
    chosen, traced = variants(config, compare=job.compare), TracedSpans()
    groups: Groups = {}
    with named_collectives("making of process groups"):
        initialize_parallel(topology, config.run.seed, timeout_s=config.job.timeout_s, architecture=architecture)
        for placed in dict.fromkeys(placed_stages(variant.config) for variant in chosen):
            groups |= make_pipeline_groups(placed, env.rank, timeout_s=config.job.timeout_s)
    context = RankContext(
        rank=env.rank,
        config=config,
        data=data,
        costs=RunCosts(agreed),
        store=store,
        plan_key=bytes.fromhex(shared["plan_key"]),
        namespace=shared["namespace"],
        groups=groups,
        device=device,
        clock_offset_s=clock_offset_s(env.local_world_size == env.world_size, device),
        num_cores=shared["num_cores"],
        node=node_of(env.rank, starts=env.local_rank == 0, device=device),
        log=log,
    )
    resumed = Path(shared["resumed"]) if shared["resumed"] else None
    first_step = 0 if resumed is None else read_manifest(resumed).run.step
    if env.rank == 0:
        told, name = store.info(), device_name(device)
        info = StoreInfo(told["server"], told["version"])
        cores = context.num_cores or num_cores()
        facts = run_facts(config, data.whole, info, device=name, device_bytes=device_bytes(device), num_cores=cores)
        if job.resumed is None:
            begin_run(job.run_dir, config, data, agreed, context.num_cores, facts, chosen)
            keep_model_files(config, job.run_dir)
        else:
            resume_run(job.run_dir, config, data, facts, first_step)
    request = EndRequest(config.checkpoint.grace_s)
    checkpoints = RunCheckpoints(Path(shared["checkpoints"]), resumed, request, job.end_signals)
    for turn in turns(len(chosen), device.type):
        with ExitStack() as listening:
            running = []
            for index in turn:
                listeners: list[Listener] = [] if index else [traced]
                if env.rank == 0:
                    listeners += written(config, job.run_dir, chosen[index], index)
                    if index == turn[0]:
                        listeners.append(shown(config, [chosen[i].name for i in turn if i], first_step))
                for listener in listeners:
                    listening.callback(listener.close)
                steps = run_variant(
                    context,
                    chosen[index],
                    f"{context.namespace}/{index}",
                    listeners,
                    None if index else checkpoints,
                )
                running.append(listening.enter_context(closing(steps)))
            for _ in zip_longest(*running):  # a step of each in turn
                pass
        with named_collectives("end of the steps"):
            dist.barrier()
    gathered = gather_bytes(spans_to_bytes(traced.spans), "traced actions of all ranks", device)
    return context, [spans_from_bytes(data) for data in gathered]


def turns(num_variants: int, device_type: str) -> list[list[int]]:
    """Which variants run at once, a step of each in turn, so that what else the machine does meets all alike. A device
    holds the states of one alone: there they follow one another.

    >>> turns(3, "cpu"), turns(3, "cuda")
    ([[0, 1, 2]], [[0], [1], [2]])
    """
    every = range(num_variants)
    return [list(every)] if device_type == "cpu" else [[index] for index in every]


def show_samples(dataset: TokenDataset, number: int, console: Console) -> None:
    """Print what the first samples have become, what carries loss in colour."""
    for index in range(min(number, len(dataset))):
        console.print(f"sample {index}:", sample_text(dataset[index], dataset.tokenizer()), soft_wrap=True)


def ranks_line(topology: Topology) -> str:
    """What a job says when it starts: its ranks, and the core that plans for them."""
    core = active_core()
    slower = "" if core == "native" else " (slower than the native one: see dynapipe doctor)"
    ranks = f"ranks: {topology.world_size} (TP{topology.tp} x PP{topology.pp} x DP{topology.dp})"
    return f"{ranks}, plans by the {core} core{slower}"


def job_cores(env: RankEnv, device: Any) -> int | None:
    """The cores of all ranks of a job on machines like this one; None on accelerators, of which each rank has one."""
    return None if device.type != "cpu" else num_cores() * env.world_size // env.local_world_size


def _data(env: RankEnv, meeting: Meeting, config: TrainConfig, settled: RunData | None) -> RunData:
    """What was settled before ranks met; else rank 0 has prepared it by now, then the first rank of every other node
    does (a shared file system finds it done), and the others open that."""
    meeting.arrive("preparation of the data by rank 0")
    if settled is None and env.local_rank == 0:
        settled = run_data(config)
    meeting.arrive("preparation of the data on every node")
    meeting.close()
    return settled or run_data(config)


def data_progress(config: TrainConfig) -> tuple[WorkProgress, Callable[[int], None]]:
    """A progress display for `run_data` and the function that feeds it with samples done so far."""
    total = None if config.data.path or config.data.mixture else config.data.num_samples
    progress, done = WorkProgress("tokenizing", total), 0

    def advance(samples: int) -> None:
        nonlocal done
        progress.advance(samples - done)
        done = samples

    return progress, advance


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
    """Errors: ConfigError where a checkpoint has done all the steps of the settings, and what follows them is done."""
    done = read_manifest(newest).run.step
    if done > config.run.steps or is_done(newest, config):
        raise ConfigError(
            f"{newest} has done {counted(done, 'step')} and steps is {config.run.steps}: raise --steps to go on"
        )


def is_done(newest: Path, config: TrainConfig) -> bool:
    """Whether a checkpoint has done just the steps of the settings, its run has said so, and `output` is made."""
    output = config.checkpoint.output
    only_ends = is_unfinished(newest.parents[1]) or (output and not Path(output).exists())
    return read_manifest(newest).run.step == config.run.steps and not only_ends


def rank_title(env: RankEnv, config: TrainConfig) -> str:
    """What `ps` shows of a rank: its number, and its place in the job.

    >>> place = RankEnv(rank=3, world_size=8, local_rank=3, local_world_size=8, master_addr="", master_port=0)
    >>> rank_title(place, TrainConfig())
    'rank 3 of 8: dynapipe train dp1 pp0 tp1'
    """
    topology, title = topology_of(config), f"rank {env.rank} of {env.world_size}: dynapipe train"
    if env.world_size != topology.world_size:  # refused later
        return title
    me = topology.coordinates(env.rank)
    return f"{title} dp{me.dp_rank} pp{me.pp_rank} tp{me.tp_rank}"
