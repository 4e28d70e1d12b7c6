"""One run on one rank: model, loader and loop joined, and its traced actions."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.pairs import PairDataset
from dynapipe_ext.data.sample_selection import describe_samples, weighted_files
from dynapipe_ext.errors import DataError, NoRoomError, named_collectives
from dynapipe_ext.executor.checkpoints.folder import (
    RunState,
    bytes_of_checkpoint,
    is_validated_anew,
    lacks_room,
    least_validation_loss,
    read_manifest,
)
from dynapipe_ext.executor.checkpoints.saving import EndRequest, PeriodicCheckpoints, RunProgress
from dynapipe_ext.executor.device import gather_bytes, gather_json, most_of_ranks, send_bytes
from dynapipe_ext.executor.drift import CostWatch
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.events import EvalDone, Listener, RankFigures, StepDone
from dynapipe_ext.executor.loader import Dataset, DynaPipeDataLoader
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.plans.dump import DumpingPlanner
from dynapipe_ext.executor.protocols import Recorder, Store, Transport
from dynapipe_ext.executor.stages.joined_ranks import Joined
from dynapipe_ext.executor.stages.position_losses import PositionLoss, weighted_sum
from dynapipe_ext.executor.stages.preference_loss import PreferenceLoss
from dynapipe_ext.executor.training_loop import (
    LoopHooks,
    LoopSettings,
    PeriodicEvaluation,
    SpanRecorder,
    StepExecutors,
    train_steps,
)
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import Groups, TorchP2PTransport
from dynapipe_ext.launch.job.configured import Variant, architecture_of, topology_of, training_rule
from dynapipe_ext.launch.job.run_costs import RunCosts, write_fitted_costs
from dynapipe_ext.launch.job.run_data import validated_on
from dynapipe_ext.launch.job.run_directory import checkpoints_line
from dynapipe_ext.launch.job.settled import SettledJob
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.rank.built_model import BuiltModel
from dynapipe_ext.launch.rank.rank_log import LoggingRecorder, RankLog
from dynapipe_ext.launch.rank.references import ReferencePass
from dynapipe_ext.launch.run.outcome import write_settings
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.run_events import EventsFile, note
from dynapipe_ext.tools.console import seconds

_TRACED_STEPS = 3  # the last ones, which the run's page draws


@dataclass(frozen=True, slots=True)
class NodeOfRank:
    """Which of a job's nodes a rank is on, and whether it is the one that starts the node's planners."""

    rank: int
    num_nodes: int
    starts_planners: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank shares between the runs of a job. `end_signals` ask it to save and end."""

    rank: int
    job: SettledJob
    costs: RunCosts
    store: Store
    groups: Groups
    joined: Joined
    device: torch.device
    clock_offset_s: float
    node: NodeOfRank
    end_request: EndRequest
    end_signals: tuple[signal.Signals, ...]
    log: RankLog | None = None


def run_variant(
    context: RankContext, variant: Variant, namespace: str, listeners: Sequence[Listener], *, is_compared: bool
) -> Generator[StepDone, None, None]:
    """Run one variant step by step; every rank of the job calls this alike, but with its own rank and listeners.

    `namespace` is its own in the store. The job's own run begins with fresh weights, or those of the checkpoint that it
    goes on from; one that `is_compared` with it begins anew, and is neither saved nor evaluated.
    """
    config, device, job = variant.config, context.device, context.job
    run = config.run
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    architecture, loss = architecture_of(config, job.data.whole.vocab_size), _loss_of(config)
    transport = _transport(context, variant)
    built = _built(context, config, architecture, loss, _joined(context, transport))
    planner = variant_planner(job, context.costs.now, config)
    log = None if context.log is None else replace(context.log, variant=variant.name)
    listeners = listeners if log is None else [*listeners, log]
    evaluate: Callable[[int], EvalDone | None] = _never
    stops: Callable[[Mapping[str, Any], str], None] = _never
    with ExitStack() as stack:
        stack.callback(transport.close)
        load = _loader_of(context, config)
        data, held_out_data = _datasets(context, config, built, loss, PipelineExecutor(built.stage, transport))
        loader = stack.enter_context(_training_loader(context, config, load, planner, namespace, data))
        if not is_compared:
            validated = validated_on(config, job.data.held_out)
            if held_out_data is not None:
                # Planned in line: the planner processes are training's, and its next plans wait for nothing.
                held_out = stack.enter_context(load(held_out_data, planner.for_forwards()))
                evaluate = _evaluation(context, built, held_out, transport, validated)
            unwritten = next((one.catch_up for one in listeners if isinstance(one, EventsFile)), lambda: None)
            checkpoints = _saving(context, built, loader, validated, unwritten)
            listeners, stops = [*listeners, checkpoints], checkpoints.save_last
            stack.callback(checkpoints.close)
            stack.enter_context(context.end_request.listening(context.end_signals))
        yield from train_steps(
            loader,
            _executors(context, config, built, transport, log),
            built.optimizer,
            LoopSettings(num_steps=run.steps, log_every=run.log_every, traced_steps=_TRACED_STEPS),
            listeners,
            replace(
                _hooks(context, config, built, log),
                evaluate=evaluate,
                stops=stops,
                watch=_cost_watch(context, config, planner, loader, is_compared=is_compared),
            ),
        )


def _hooks(context: RankContext, config: TrainConfig, built: BuiltModel, log: RankLog | None) -> LoopHooks:
    """What the loop of any variant calls on this rank."""
    data, paths = context.job.data, [file.path for file in weighted_files(config.data.mixture)]
    me = topology_of(config).coordinates(context.rank)
    return LoopHooks(
        gather=partial(_gather, device=context.device),
        own_bytes=partial(_own_bytes, built, context.device),
        counts_work=lambda plan: me.pp_rank == me.tp_rank == me.dp_rank % plan.width == 0,
        micro_batch_losses=built.stage.losses,
        preferences=built.stage.preferences,
        describe_samples=partial(describe_samples, data.whole, data.train.indices, paths),
        begins=log.step_begins if log is not None else lambda plan: None,
    )


def _never(*_: object) -> None:
    """In the place of an evaluation, or of a save."""


def variant_planner(job: SettledJob, costs: CostModel, config: TrainConfig) -> Planner:
    """A variant's planner, with the current costs."""
    planning, topology = replace(job.planning, costs=costs), topology_of(config)
    if topology != planning.topology:
        planning = replace(planning, costs=planning.costs.with_topology(topology)[0], topology=topology)
    return replace(planning, config=config).planner


def _dumping(context: RankContext, config: TrainConfig, planner: Planner) -> Planner | DumpingPlanner:
    """The planner; it also writes a file of each plan where the settings ask for it, on one rank alone where ranks plan
    in line."""
    dumps = config.run.plan_dir and (config.data.num_workers or context.rank == 0)
    return DumpingPlanner(planner, config.run.plan_dir) if dumps else planner


def _evaluation(
    context: RankContext, built: BuiltModel, held_out: DynaPipeDataLoader, transport: Transport, validated: str
) -> PeriodicEvaluation:
    config = context.job.config

    def is_ending(step: int) -> bool:
        with named_collectives(f"step {step}, whether the evaluation goes on"):
            ends = bool(most_of_ranks(context.end_request.signal is not None, context.device))
        if ends and context.rank == 0:
            say_at_once(f"validation: none after step {step + 1}, since the run was asked to end")
        return ends

    return PeriodicEvaluation(
        PipelineExecutor(built.stage, transport),
        held_out,
        built.modules,
        config.eval,
        num_steps=config.run.steps,
        validated_on=validated,
        is_ending=is_ending,
    )


def _loader_of(context: RankContext, config: TrainConfig) -> Callable[..., DynaPipeDataLoader]:
    """A function that makes a loader of this rank from a data set and a planner."""
    topology, architecture = topology_of(config), architecture_of(config, context.job.data.whole.vocab_size)
    me, rule = topology.coordinates(context.rank), training_rule(config)
    embeddings, heads = lay_out(architecture.num_layers, architecture.total_layers, topology).find_holders()
    return partial(
        DynaPipeDataLoader,
        batch_size=rule.batch_size,
        tokens_per_batch=rule.tokens_per_batch,
        shuffle=rule.shuffle,
        seed=rule.seed,
        coordinates=me,
        pin_memory=context.device.type == "cuda",
        needs_data=not (embeddings | heads).isdisjoint(topology.stages_of(me.pp_rank)),
    )


def _training_loader(
    context: RankContext,
    config: TrainConfig,
    load: Callable[..., DynaPipeDataLoader],
    planner: Planner,
    namespace: str,
    data: Dataset,
) -> DynaPipeDataLoader:
    return load(
        data,
        _dumping(context, config, planner),
        drop_last=config.data.drop_last,
        num_workers=config.data.num_workers,
        store=context.store,
        delivery=PlanDelivery(
            namespace=namespace,
            plan_key=context.job.keys.plan_key,
            timeout_s=config.job.timeout_s,
            node_rank=context.node.rank,
            num_nodes=context.node.num_nodes,
            starts_planners=context.node.starts_planners,
        ),
    )


def _executors(
    context: RankContext, config: TrainConfig, built: BuiltModel, transport: Transport, log: RankLog | None
) -> StepExecutors:
    """Those of plain and of traced steps: spans on an accelerator need synchronisation, which takes overlap away."""
    device, recorder = context.device, SpanRecorder(context.clock_offset_s)
    logs_actions = log is not None and config.run.log_level == "debug"
    recorded: Recorder = LoggingRecorder(recorder, log) if log is not None and logs_actions else recorder
    recording = PipelineExecutor(built.stage, transport, recorder=recorded, rank=context.rank, clock=_clock(device))
    records_all = logs_actions or device.type == "cpu"
    plain = recording if records_all else PipelineExecutor(built.stage, transport)
    return StepExecutors(plain=plain, traced=recording, recorder=recorder)


def _cost_watch(
    context: RankContext, config: TrainConfig, planner: Planner, loader: DynaPipeDataLoader, *, is_compared: bool
) -> CostWatch:
    """The watch that compares measured times with the plan's and, where the settings adapt costs, has later steps
    planned with fitted ones."""

    def adopt(step: int, adapted: CostModel) -> None:
        context.costs.adopt(step, adapted)
        if not is_compared and context.rank == 0:
            write_fitted_costs(context.job.run_dir, step, adapted, context.job.planning.num_cores)
        loader.plan_with(_dumping(context, config, replace(planner, costs=adapted)))

    return CostWatch(
        planner.costs,
        in_cpu_s=planner.shared_cores is not None,
        adapts=config.plan.adapt_costs and not is_compared,
        gather=partial(bytes_on_first, device=context.device),
        share=partial(broadcast_bytes, device=context.device),
        adopt=adopt,
    )


def _loss_of(config: TrainConfig) -> PositionLoss:
    return PreferenceLoss(config.preferences) if config.preferences.loss else weighted_sum


def _datasets(
    context: RankContext, config: TrainConfig, built: BuiltModel, loss: PositionLoss, executor: PipelineExecutor
) -> tuple[Dataset, Dataset | None]:
    """The data that the run trains on, and those that it is evaluated on; with references where the loss compares pairs
    of answers with them. The model must still have its first weights."""
    data = context.job.data
    if not isinstance(loss, PreferenceLoss) or not loss.settings.needs_references:
        return data.train, data.held_out
    forwards = ReferencePass(
        config=config,
        architecture=architecture_of(config, data.whole.vocab_size),
        built=built,
        loss=loss,
        load=_loader_of(context, config),
        planner=variant_planner(context.job, context.costs.now, config),
        executor=executor,
        rank=context.rank,
        device=context.device,
    )
    assert not isinstance(data.train, PairDataset)  # an encoder-decoder's, of which no preferences are learned
    assert not isinstance(data.held_out, PairDataset)
    return forwards.of(data.train), None if data.held_out is None else forwards.of(data.held_out)


@named_collectives("making of the model")
def _built(
    context: RankContext, config: TrainConfig, architecture: Architecture, loss: PositionLoss, joined: Joined
) -> BuiltModel:
    """This rank's part of the model, of the framework that a variant's settings name."""
    device = context.device
    if config.deepspeed.config:
        from dynapipe_ext.launch.rank.deepspeed_run import build_deepspeed

        return build_deepspeed(config, architecture, device, of_positions=loss)
    if config.model.uses_transformers:
        from dynapipe_ext.launch.rank.transformers_run import build_transformers

        return build_transformers(config, architecture, device, of_positions=loss, joined=joined)
    from dynapipe_ext.launch.rank.megatron_run import build_megatron  # its CUDA calls are settled by now

    return build_megatron(config, architecture, context.rank, device, of_positions=loss, joined=joined)


def _least_loss_so_far(context: RankContext, validated: str) -> float:
    """The least validation loss before this resume, of the same data and kind of loss; infinite for a new run. It
    decides which checkpoint is the best."""
    job = context.job
    if job.resumed is None or not job.config.checkpoint.keep_best:
        return math.inf
    if context.rank == 0 and is_validated_anew(job.checkpoints, validated):
        say_at_once("validation: on other data or by another loss than before, so the best counts anew from here")
    return least_validation_loss(job.checkpoints, validated)


def _saving(
    context: RankContext,
    built: BuiltModel,
    loader: DynaPipeDataLoader,
    validated: str,
    unwritten: Callable[[], NoRoomError | None],
) -> PeriodicCheckpoints:
    """The listener that saves the run; where it goes on from a checkpoint, all is first put back from there.
    `validated` names what its evaluations are of; `unwritten` as of `PeriodicCheckpoints`."""
    job, config, is_first = context.job, context.job.config, context.rank == 0
    least_loss = _least_loss_so_far(context, validated)  # before the saver puts the folder in order
    progress = _put_back(context, built, loader)

    def state(done: StepDone, progress: RunProgress) -> RunState:
        return RunState(
            step=done.number,
            num_samples=progress.num_samples,
            loader=loader.state_dict(),
            model=built.description,
            settings=config.to_json(),
            costs=cost_model_to_json(context.costs.now),
            costs_fingerprint=context.costs.now.fingerprint(),
            recent_losses=progress.recent_losses,
            validation_loss=done.evaluation.loss if done.evaluation else None,
            validated_on=validated,
            first_weights=job.first_weights,
        )

    num_bytes = bytes_of_checkpoint(_num_trained(context, built), config.model.dtype, config.deepspeed.num_moments)
    say: Callable[[str], object] = say_at_once if is_first else lambda text: None
    say(checkpoints_line(config.checkpoint, job.run_dir, num_bytes))
    return PeriodicCheckpoints(
        built.saver(job.checkpoints, num_bytes),
        config.checkpoint,
        state,
        context.end_request,
        num_steps=config.run.steps,
        num_samples=lambda done: loader.num_samples(done.epoch, done.epoch_step),
        progress=progress,
        least_validation_loss=least_loss,
        lacks_room=partial(lacks_room, job.checkpoints, num_bytes) if is_first else None,
        say=say,
        unwritten=unwritten,
        saved=partial(_note_save, job.run_dir) if is_first else lambda done, took_s: None,
    )


def _put_back(context: RankContext, built: BuiltModel, loader: DynaPipeDataLoader) -> RunProgress:
    """Load the checkpoint that the run resumes from, if any; returns how far the run is."""
    job = context.job
    if job.resumed is None:
        return RunProgress()
    if context.rank == 0 and not read_manifest(job.resumed).checksums:
        say_at_once(f"{job.resumed} was saved without checksums: damage to its files would not be noticed")
    run = built.restore(job.resumed)
    loader.load_state_dict(run.loader)
    if context.rank == 0:
        write_settings(job)
    return RunProgress(run.num_samples, run.recent_losses)


def _note_save(run_dir: Path, done: StepDone, took_s: float) -> None:
    with suppress(DataError):  # the checkpoint is there
        note(run_dir, "save", done.number, f"a checkpoint; training waited {seconds(took_s)} for it")


@named_collectives("bytes of a checkpoint")
def _num_trained(context: RankContext, built: BuiltModel) -> int:
    """Parameters of the whole model that train."""
    is_first_replica = topology_of(context.job.config).coordinates(context.rank).dp_rank == 0
    number = torch.tensor([built.num_trained * is_first_replica], dtype=torch.int64, device=context.device)
    dist.all_reduce(number)
    return int(number)


def _own_bytes(built: BuiltModel, device: torch.device, activation_bytes: int) -> int:
    """The most bytes that this rank held. On a CPU they are not measured: there it is the sum of weights, states and
    activations."""
    if device.type == "cpu":
        return built.held_bytes() + activation_bytes
    return torch.cuda.max_memory_allocated(device)


def _gather(figures: RankFigures, name: str, device: torch.device) -> list[RankFigures]:
    """Every rank's figures, in rank order."""
    numbers = torch.tensor(figures.numbers(), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    with named_collectives(name):
        dist.all_gather(everyone, numbers)
    return [RankFigures.from_numbers(rank.tolist()) for rank in everyone]


@named_collectives("places of ranks on nodes")
def node_of(rank: int, *, starts: bool, device: torch.device) -> NodeOfRank:
    """A rank's node, where ranks of a node follow one another and the first of each `starts` its planners."""
    firsts = gather_json(starts, device)
    return NodeOfRank(sum(firsts[: rank + 1]) - 1, sum(firsts), starts)


@named_collectives("comparison of clocks")
def clock_offset_s(one_machine: bool, device: torch.device) -> float:
    """Seconds to subtract from this rank's clock to get rank 0's: 0 on one machine, else the difference at a common
    barrier."""
    if one_machine:
        return 0.0
    dist.barrier()
    own_clock = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
    clock_of_first = own_clock.clone()
    dist.broadcast(clock_of_first, src=0)
    return float(own_clock - clock_of_first)


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds; on an accelerator once its work is done, so that a span ends when its action does."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def _joined(context: RankContext, transport: Transport) -> Joined:
    """The ranks that plans may join, whose collectives take their turn among the transfers of a strict transport."""
    if not isinstance(transport, StrictTransport):
        return context.joined
    return {width: joined.taking_turns(transport.in_turn) for width, joined in context.joined.items()}


def _transport(context: RankContext, variant: Variant) -> Transport:
    config, device = variant.config, context.device
    topology, job = topology_of(config), config.job
    if job.strict:
        return StrictTransport(topology, context.rank, context.groups, timeout_s=job.timeout_s)
    return TorchP2PTransport(topology, context.rank, context.groups, device=device, timeout_s=job.timeout_s)


def broadcast_bytes(data: bytes, what: str, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank, over the job's own process group: what the store must not hold. `what` names them
    in errors."""
    with named_collectives(what):
        return send_bytes(data, device)


def bytes_on_first(data: bytes, what: str, device: torch.device) -> list[bytes]:
    """Every rank's bytes on rank 0, in rank order, over the job's own process group; nothing on the others. `what`
    names them in errors."""
    with named_collectives(what):
        return gather_bytes(data, device, to_first=True)
