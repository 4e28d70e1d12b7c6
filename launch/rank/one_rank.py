"""One rank of a job, from its settled value to its last step: forked by `dynapipe train`, or started by torchrun.

What ranks must agree on (costs, the store's address) comes from rank 0 over the job's own process group. The keys are
made on every rank, of a secret that all have already (`launch/job/job_keys.py`).
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, PlanError, named_collectives
from dynapipe_ext.executor.checkpoints.folder import read_manifest
from dynapipe_ext.executor.events import Listener, StepDone
from dynapipe_ext.executor.free_memory import Room
from dynapipe_ext.executor.plans.channel import store_patience_s
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.launch.job.configured import Variant, placed_stages, topology_of, unfit_rivals, variants
from dynapipe_ext.launch.job.job_keys import JobKeys, tag_of_secret
from dynapipe_ext.launch.job.model_folder import configured_cut
from dynapipe_ext.launch.job.requested import JobRequest
from dynapipe_ext.launch.job.room import Place
from dynapipe_ext.launch.job.run_costs import RunCosts, settle_costs
from dynapipe_ext.launch.job.run_data import PREPARE_LIMIT_S, RunData, run_data
from dynapipe_ext.launch.job.settled import SettledJob, peers_job, settled_job
from dynapipe_ext.launch.job.terms import SECRET, terms_of, terms_of_data
from dynapipe_ext.launch.processes.env import (
    RankEnv,
    keep_cublas_deterministic,
    limit_threads,
    num_cores,
    own_device,
    visible_devices,
)
from dynapipe_ext.launch.rank.rank_log import RankLog, rank_log, shown, written
from dynapipe_ext.launch.run.outcome import (
    Spans,
    TracedSpans,
    begin_run,
    resume_run,
    run_facts,
    spans_from_bytes,
    spans_to_bytes,
    write_outcome,
)
from dynapipe_ext.launch.run.page import LivePage
from dynapipe_ext.launch.run.trained_model import keep_model_files, write_trained_model
from dynapipe_ext.models.layer_pattern import ProvenCut
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import StoreInfo
from dynapipe_ext.tools.account.run_series import RunSoFar
from dynapipe_ext.tools.console import error_console, say_loading

if TYPE_CHECKING:  # they import torch, one of them Megatron
    from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks
    from dynapipe_ext.executor.transport.torch_p2p import Groups
    from dynapipe_ext.launch.rank.meeting import Meeting
    from dynapipe_ext.launch.rank.variant_run import RankContext

EndSignals = tuple[signal.Signals, ...]


def train_rank(env: RankEnv, job: SettledJob | JobRequest, *, end_signals: EndSignals = (signal.SIGUSR1,)) -> int:
    """Train as one rank of a job, which keeps a log where the settings ask for one; returns 0. Errors are raised.

    Of a job that is only requested, all ranks compare what they request, and rank 0 settles it; its request has a
    directory and a store. `end_signals` ask a rank to save and end.
    """
    with rank_log(job.config.run, env) as log:
        return _train(env, job, end_signals, log)


def _train(env: RankEnv, job: SettledJob | JobRequest, end_signals: EndSignals, log: RankLog | None) -> int:
    if env.rank == 0:
        say_loading("torch", "megatron-core")
    import torch.distributed as dist

    from dynapipe_ext.launch.rank.meeting import Meeting

    timeout_s = job.config.job.timeout_s
    meeting = Meeting(env, limit_s=max(timeout_s, PREPARE_LIMIT_S), silent_s=timeout_s)
    if isinstance(job, JobRequest):
        job = _requested_by_all(env, meeting, job)
    config = job.config
    topology_of(config).check_num_ranks(env.world_size)  # on all ranks, before they connect
    device = _prepared_device(env, config)
    if env.rank == 0 and isinstance(job, JobRequest):
        job = settled_job(job, _RanksMachine(env, device), error_console())
    meeting.arrive("meeting of all ranks")
    meeting.connect(device, timeout_s=timeout_s)  # from here on nobody may be silent for longer
    # A rank that fails keeps its process groups until it has said why: others fail once they are closed.
    with ExitStack() as stack:
        context = _context(env, meeting, job, device, end_signals, log, stack)
        spans = _run(context)
        with named_collectives("end of the job"):
            dist.barrier()
    dist.destroy_process_group()
    job = context.job
    if env.rank == 0:  # alone, so that what goes wrong here is said once
        write_outcome(job, context.costs, spans)
        if line := write_trained_model(job.config, job.run_dir, overwrite=job.overwrite):
            print(line)
    return 0


def _requested_by_all(env: RankEnv, meeting: Meeting, request: JobRequest) -> JobRequest:
    """What all ranks request alike, with the memory that the least of them has.

    Errors: ConfigError on all ranks for secrets, settings, files, packages or devices that differ between them.
    """
    from dynapipe_ext.executor.device import rank_device

    config = request.config
    reads_files = env.local_rank == 0  # for its machine
    terms = {SECRET: tag_of_secret(request.secret), "the kind of device": rank_device(env.local_rank).type}
    terms |= terms_of(config, compare=request.compare, reads_files=reads_files)
    own_gb = config.plan.memory_limit_gb
    least = meeting.agree("comparison of nodes", terms, {"memory_limit_gb": own_gb}, is_part=not reads_files)
    if env.rank == 0 and least["memory_limit_gb"] < own_gb:
        print(
            f"memory_limit_gb: {least['memory_limit_gb']:g}, the least of all ranks ({own_gb:g} here)", file=sys.stderr
        )
    return replace(request, config=config.with_values(plan=least))


def _prepared_device(env: RankEnv, config: TrainConfig) -> Any:
    """The rank's device, with torch as the settings have it."""
    warnings.filterwarnings("ignore", module="megatron")
    import torch

    from dynapipe_ext.executor.device import compute_deterministically

    torch.set_num_threads(limit_threads())
    if config.optimizer.deterministic:
        keep_cublas_deterministic()
        compute_deterministically()
    device = own_device(env.local_rank)
    if device.type == "cuda" and config.job.strict:
        raise ConfigError("[job] strict moves CPU tensors over gloo: leave it out on accelerators")
    return device


def place_of(env: RankEnv) -> Place:
    """The machine of a rank, as all are taken to be alike."""
    return Place(room=Room.here(visible_devices()), num_ranks=env.local_world_size)


@dataclass(frozen=True, slots=True)
class _RanksMachine:
    """The machines of a job by one of its ranks, all taken to be alike."""

    env: RankEnv
    device: Any

    def place(self) -> Place:
        return place_of(self.env)

    def num_cores(self) -> int | None:
        if self.device.type != "cpu":
            return None
        return num_cores() * self.env.world_size // self.env.local_world_size

    def proven_cut(self, config: TrainConfig) -> ProvenCut:
        return configured_cut(config)

    def measured_costs(self, config: TrainConfig, vocab_size: int) -> CostModel:
        return settle_costs(config, vocab_size)


def _context(
    env: RankEnv,
    meeting: Meeting,
    job: SettledJob | JobRequest,
    device: Any,
    end_signals: EndSignals,
    log: RankLog | None,
    stack: ExitStack,
) -> RankContext:
    """What this rank runs variants with, once all are connected: the job as rank 0 has settled it, store and groups."""
    from dynapipe_ext.executor.checkpoints.saving import EndRequest
    from dynapipe_ext.launch.rank.variant_run import RankContext, clock_offset_s, node_of

    job = _job_of_rank(env, meeting, job, device, stack)
    config, patience_s = job.config, store_patience_s(job.config.job.timeout_s)
    store = open_store(job.address, namespace=job.keys.namespace, connect_s=patience_s, reconnect_s=patience_s)
    stack.callback(store.close)
    groups, joined = _process_groups(env, job, device)
    return RankContext(
        rank=env.rank,
        job=job,
        costs=RunCosts(job.planning.costs),
        store=store,
        groups=groups,
        joined=joined,
        device=device,
        clock_offset_s=clock_offset_s(env.local_world_size == env.world_size, device),
        node=node_of(env.rank, starts=env.local_rank == 0, device=device),
        end_request=EndRequest(config.checkpoint.grace_s),
        end_signals=end_signals,
        log=log,
    )


def _job_of_rank(
    env: RankEnv, meeting: Meeting, job: SettledJob | JobRequest, device: Any, stack: ExitStack
) -> SettledJob:
    """The job as rank 0 has settled it, with this rank's data. Rank 0's keys are shared while the stack is open."""
    from dynapipe_ext.launch.rank.variant_run import broadcast_bytes

    settled = b""
    if env.rank == 0:
        assert isinstance(job, SettledJob)
        keys = stack.enter_context(job.keys.for_peers(on_one_machine=env.local_world_size == env.world_size))
        settled = json.dumps(job.to_json() | {"keys": keys}).encode()
    shared = json.loads(broadcast_bytes(settled, "what rank 0 has settled", device))
    data = _data(env, meeting, job)
    if isinstance(job, SettledJob):
        return job
    return peers_job(job, shared, JobKeys.from_rank_0(shared["keys"], job.secret), data)


def _process_groups(env: RankEnv, job: SettledJob, device: Any) -> tuple[Groups, dict[int, JoinedRanks]]:
    """Those of pipelines, for every placement of the job's variants, and this rank's block of every width above 1."""
    from dynapipe_ext.executor.stages.joined_ranks import join_ranks
    from dynapipe_ext.executor.stages.megatron.model import initialize_parallel
    from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
    from dynapipe_ext.launch.rank.variant_run import variant_planner

    groups: Groups = {}
    joined: dict[int, JoinedRanks] = {}
    config, timeout_s = job.config, job.config.job.timeout_s
    ways = [one.config for one in variants(config, compare=job.compare)]
    widths = {width for one in ways for width in variant_planner(job, job.planning.costs, one).allowed_widths}
    with named_collectives("making of process groups"):
        initialize_parallel(job.topology, config.run.seed, timeout_s=timeout_s, architecture=job.architecture)
        for placed in dict.fromkeys(map(placed_stages, ways)):
            groups |= make_pipeline_groups(placed, env.rank, timeout_s=timeout_s)
        if max(widths) > 1:
            joined = join_ranks(job.topology, env.rank, widths, device, timeout_s=timeout_s)
    return groups, joined


def _data(env: RankEnv, meeting: Meeting, job: SettledJob | JobRequest) -> RunData:
    """The data of this rank. A settled job has them already. Else rank 0 has prepared them by now; then the first rank
    of every other node prepares them (on a shared file system they exist already), and the other ranks open these. All
    ranks must have the same samples."""
    meeting.arrive("preparation of the data by rank 0")
    data = job.data if isinstance(job, SettledJob) else None
    if data is None and env.local_rank == 0:
        data = run_data(job.config)
    meeting.arrive("preparation of the data on every node")
    data = data or run_data(job.config, verifies=False)  # this machine's first rank has done that
    meeting.agree("comparison of the data", terms_of_data(data))
    meeting.close()
    return data


def _run(context: RankContext) -> list[Spans]:
    """Run the variants. Returns on rank 0 the spans of all ranks in the first variant, elsewhere none."""
    import torch.distributed as dist

    from dynapipe_ext.launch.rank.variant_run import bytes_on_first

    job = context.job
    chosen = variants(job.config, compare=job.compare)
    if job.compare and context.rank == 0:
        for name, reason in unfit_rivals(job.config).items():
            print(f"not compared: {name}: {reason}", file=sys.stderr, flush=True)
    first_step = 0 if job.resumed is None else read_manifest(job.resumed).run.step
    so_far = _fill_run_directory(context, chosen, first_step) if context.rank == 0 else None
    outlasting = _Kept(TracedSpans(), LivePage(job.run_dir, so_far), first_step)
    for turn in turns(len(chosen), context.device.type):
        with ExitStack() as listening:
            running = [
                listening.enter_context(closing(_steps(context, chosen, index, turn, listening, outlasting)))
                for index in turn
            ]
            for _ in zip_longest(*running):  # a step of each in turn
                pass
        with named_collectives("end of the steps"):
            dist.barrier()
    gathered = bytes_on_first(spans_to_bytes(outlasting.traced.spans), "traced actions of all ranks", context.device)
    return [spans_from_bytes(data) for data in gathered]


def _fill_run_directory(context: RankContext, chosen: Sequence[Variant], first_step: int) -> RunSoFar | None:
    """What a run that goes on has done before; None of a new one."""
    from dynapipe_ext.executor.device import device_bytes, device_name

    job, device = context.job, context.device
    store = context.store.info()
    facts = run_facts(
        job,
        StoreInfo(store["server"], store["version"]),
        device=device_name(device),
        device_bytes=device_bytes(device),
        num_cores=job.planning.num_cores or num_cores(),
    )
    if job.resumed is None:
        begin_run(job, facts, chosen)
        if job.config.model.described is not None:
            keep_model_files(job.config, job.run_dir)
        return None
    return resume_run(job, facts, chosen, first_step)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What stays of the steps of all variants, which go on after `first_step` steps."""

    traced: TracedSpans
    page: LivePage
    first_step: int


def _steps(
    context: RankContext,
    chosen: Sequence[Variant],
    index: int,
    turn: Sequence[int],
    listening: ExitStack,
    outlasting: _Kept,
) -> Generator[StepDone, None, None]:
    """The steps of a variant that is run beside others of its turn, with those who listen until all have ended."""
    from dynapipe_ext.launch.rank.variant_run import run_variant

    config = context.job.config
    listeners: list[Listener] = [] if index else [outlasting.traced]
    if context.rank == 0:
        listeners += written(config, outlasting.page, chosen[index], index)
        if index == turn[0]:
            listeners.append(shown(config, [chosen[i].name for i in turn if i], outlasting.first_step))
    for listener in listeners:
        listening.callback(listener.close)
    namespace = f"{context.store.namespace}/{index}"
    steps = run_variant(context, chosen[index], namespace, listeners, is_compared=index > 0)
    return _while_planned(steps, context, chosen[index].name) if index else steps


def _while_planned(
    steps: Generator[StepDone, None, None], context: RankContext, name: str
) -> Generator[StepDone, None, None]:
    """Yield the steps of what the run is compared with until it has no plan within the memory limit, which ends it on
    all ranks at the same step; the run itself continues."""
    count = 0
    try:
        for done in steps:
            count += 1
            yield done
    except PlanError as error:
        if context.rank == 0:
            print(f"{name} ends before step {count + 1}, as it has no plan: {error}", file=sys.stderr, flush=True)


def turns(num_variants: int, device_type: str) -> list[list[int]]:
    """Which variants run at once, a step of each in turn, so that what else the machine does meets all alike. A device
    holds the states of one alone: there they follow one another.

    >>> turns(3, "cpu"), turns(3, "cuda")
    ([[0, 1, 2]], [[0], [1], [2]])
    """
    every = range(num_variants)
    return [list(every)] if device_type == "cpu" else [[index] for index in every]


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
