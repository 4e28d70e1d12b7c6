"""A run's directory: claimed with its store; settings and costs at its start; report, page and timelines at its end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from rich.console import Console

from dynapipe_ext.batch.micro_batches import LengthArray, find_pieces, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adapters import find_adapter_share
from dynapipe_ext.costs.interchange import run_costs_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import DynaPipeError, in_one_line
from dynapipe_ext.executor.checkpoints.folder import checkpoints, read_manifest
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.executor.plans.dump import forget_plans_ahead
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch.job.configured import Variant, global_batches, make_planner, topology_of
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.requested import JobRequest
from dynapipe_ext.launch.job.run_costs import RunCosts
from dynapipe_ext.launch.job.run_data import RunData
from dynapipe_ext.launch.job.run_directory import (
    CHECKPOINTS,
    RunDirectory,
    clear_run,
    forget_fitted,
    is_in_use,
    is_unreported,
    link,
    point_latest_at,
)
from dynapipe_ext.launch.job.saved_settings import find_untrusted, read_saved_settings
from dynapipe_ext.launch.job.settled import SettledJob
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.launch.processes.env import launcher, under_torchrun
from dynapipe_ext.launch.run.next_moves import next_moves
from dynapipe_ext.launch.run.page import write_page
from dynapipe_ext.launch.store import RedisServer, greet_store
from dynapipe_ext.settings.tables import PlanSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span, Trace, merge
from dynapipe_ext.tools.account.report import RunFacts, StoreInfo, shared_cores_note
from dynapipe_ext.tools.account.report_tables import compare_table, summary_table
from dynapipe_ext.tools.account.run_events import (
    EVENTS_FILE,
    VariantLabel,
    note,
    read_events,
    report_of,
    resume_events,
    start_events,
)
from dynapipe_ext.tools.account.run_series import RunSoFar
from dynapipe_ext.tools.console import VisibleConsole, counted, error_console
from dynapipe_ext.tools.files import toml_of, write_atomic
from dynapipe_ext.tools.show.run_page import PAGE_FILE
from dynapipe_ext.tools.show.run_words import next_moves_table
from dynapipe_ext.tools.show.timeline import TraceRecord, write_chrome_trace, write_trace_file

Spans = Mapping[int, Sequence[Span]]  # by the step's number from 0; seconds from the first start on any rank

_LAUNCH = "dynapipe launch"


def run_facts(job: SettledJob, store: StoreInfo, *, device: str, device_bytes: int, num_cores: int) -> RunFacts:
    """What is known of a run before its first step; `device` is "cpu" or an accelerator's name."""
    config, topology = job.config, job.topology
    model = asdict(config.model) | {"vocab_size": job.data.whole.vocab_size}
    if config.lora.enabled and config.model.described is not None:
        model["trained_share"] = find_adapter_share(config.lora, config.model.described)
    return RunFacts(
        topology=topology,
        device=device if device != "cpu" else f"cpu ({platform.machine()}, {counted(num_cores, 'core')})",
        device_bytes=device_bytes,
        num_cores=num_cores,
        seed=config.run.seed,
        loss_norm=config.plan.loss_norm,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        oversubscribed=device == "cpu" and topology.world_size > num_cores,
        store=store,
        versions=versions(),
        model=model,
    )


def begin_run(job: SettledJob, facts: RunFacts, chosen: Sequence[Variant]) -> None:
    """Fill a claimed directory with what the run starts from, in the place of an overwritten run."""
    run_dir, config = job.run_dir, job.config
    costs_json = run_costs_to_json(job.planning.costs, job.planning.num_cores)
    clear_run(run_dir)
    write_settings(job)
    # With --costs, this file makes another run, and `dynapipe plan`, plan exactly as this one does.
    write_atomic(run_dir / "costs.json", json.dumps(costs_json) + "\n")
    _link_data(run_dir, job.data)
    start_events(run_dir / EVENTS_FILE, facts, list(map(_label, chosen)), num_steps=config.run.steps)
    note(run_dir, "begun", 0, f"{counted(facts.topology.world_size, 'rank')}, {facts.device}")
    point_latest_at(run_dir)


def write_settings(job: SettledJob) -> None:
    """Those that `--resume` reads: of a run that goes on once nothing can refuse them any more."""
    text = toml_of(job.config.to_json(), "The settings of this run, defaults included.")
    write_atomic(job.run_dir / "config.toml", text)


def _label(variant: Variant) -> VariantLabel:
    return VariantLabel(variant.name, variant.config.plan.layout, variant.config.plan.schedule)


def resume_run(job: SettledJob, facts: RunFacts, chosen: Sequence[Variant], step: int) -> RunSoFar:
    """Make a directory one of a run that goes on after `step` steps: what came later is run again. Returns the run as
    it then stands. Its settings stay those of before until the checkpoint is taken (`write_settings`)."""
    run_dir, config = job.run_dir, job.config
    if (run_dir / "data").is_symlink() or not (run_dir / "data").exists():  # else a copy that holds the data itself
        _link_data(run_dir, job.data)  # it may have been moved
    forget_fitted(run_dir, step)
    path = run_dir / EVENTS_FILE
    events, num_lost = resume_events(path, step, facts, _label(chosen[0]), num_steps=config.run.steps)
    if num_lost:
        print(f"note: {path} was cut or damaged: the losses of steps 1 to {num_lost} are lost", file=sys.stderr)
    other_loss = _other_loss(job)
    note(run_dir, "resumed", step, f"{counted(facts.topology.world_size, 'rank')}, {facts.device}{other_loss}")
    if other_loss:
        print(f"note: goes on after step {step}{other_loss}: do not compare the two", file=sys.stderr, flush=True)
    point_latest_at(run_dir)
    return RunSoFar.of(events)


def _other_loss(job: SettledJob) -> str:
    """Which loss a run that goes on learns by, where that was another one before."""
    now = job.config.preferences.loss
    before = (
        now if job.resumed is None else read_manifest(job.resumed).run.settings.get("preferences", {}).get("loss", "")
    )
    return "" if before == now else f", by the loss {now or 'of texts'} instead of {before or 'that of texts'}"


def _link_data(run_dir: Path, data: RunData) -> None:
    link(run_dir / "data", Path(os.path.relpath(data.whole.directory.resolve(), run_dir.resolve())))


def write_outcome(job: SettledJob, costs: RunCosts, spans: Sequence[Spans]) -> None:
    """Write the files of a finished run and print the tables. `spans` are those of the configured run, by rank."""
    run_dir, config, data = job.run_dir, job.config, job.data
    events = read_events(run_dir / EVENTS_FILE)
    (_, steps), facts = events.variants[0], events.facts
    shared_cores = facts.num_cores if facts.oversubscribed else None
    report = report_of(events, unfinished=None)
    traced = [done for done in steps if any(done.step in rank for rank in spans)]
    simulated = {
        done.step: _simulated(config, costs.at(done.step), data.train.lengths, done, shared_cores) for done in traced
    }
    record = _write_traces(run_dir, config.plan, facts.topology, spans, simulated, shared_cores)
    note(run_dir, "ended", len(steps), "all steps are done")
    moves, num_tried = next_moves(job, costs.now, steps)
    write_page(run_dir, RunSoFar.of(events), record=record, moves=moves if num_tried else None, num_tried=num_tried)
    report.write(run_dir / "report.json")  # the last: by it a run has ended
    console = VisibleConsole()
    console.print(summary_table(report))
    if report.compare:
        console.print(compare_table(report))
    if moves:
        console.print(next_moves_table(moves, num_tried))
    console.print(f"the page of the run: {run_dir / PAGE_FILE}", markup=False, highlight=False, soft_wrap=True)


def write_unfinished(run_dir: Path, reason: str, command: str) -> None:
    """Write the report and the page of a run that ended early, and print which of its steps are saved. `command` is the
    command line that resumes it."""
    events = read_events(run_dir / EVENTS_FILE)
    report = report_of(events, unfinished=reason)
    with _where_there_is_room():
        report.write(run_dir / "report.json")
        note(run_dir, "ended", report.result.first_step + report.steps, f"early: {reason}")
        write_page(run_dir, RunSoFar.of(events), unfinished=reason)
    ending_line = f"{report.steps} of {counted(events.num_steps, 'step')} ran: what is known of them is in {run_dir}"
    saved = _saved_line(run_dir, "" if report.compare else command)
    error_console().print(f"{ending_line}\n{saved}", markup=False, soft_wrap=True)


def _saved_line(run_dir: Path, command: str) -> str:
    """The newest checkpoint, and what goes on from it."""
    saved = checkpoints(run_dir / CHECKPOINTS)
    if not saved:
        return "nothing was saved"
    if not command:
        return f"saved: {saved[-1]}"
    words = ["--resume", str(run_dir)]
    if (config := read_saved_settings(run_dir)) is not None:
        words += [word for flag, value in find_untrusted(config, run_dir).items() for word in (flag, value)]
    return f"saved: {saved[-1]}; to go on: {command} {shlex.join(words)}"


def report_what_ran(run_dir: Path, reason: str) -> None:
    """Report a run whose own rank 0 could not, because it was killed: its events are newer than its report. Where it
    still runs, under another launcher, nothing is changed."""
    if (run_dir / EVENTS_FILE).exists() and not is_in_use(run_dir) and is_unreported(run_dir):
        _report_early_end(run_dir, reason, _LAUNCH)


@contextmanager
def keeping_what_ran(directory: RunDirectory) -> Iterator[None]:
    """Inside, a run that ends early for whatever reason leaves its report, with the reason in it."""
    try:
        yield
    except BaseException as error:
        if directory.has_begun:
            _report_early_end(directory.path, reason_of(error), _own_command())
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            print("dynapipe: ended before the first step: nothing was saved; give the command again", file=sys.stderr)
        raise


def _own_command() -> str:
    """The command that has started this run."""
    if launcher() is not None:
        return _LAUNCH
    return "torchrun … -m dynapipe_ext.launch.rank" if under_torchrun() else "dynapipe train"


def _report_early_end(run_dir: Path, reason: str, command: str) -> None:
    with _where_there_is_room():
        write_unfinished(run_dir, reason, command)


@contextmanager
def _where_there_is_room() -> Iterator[None]:
    """What cannot be reported within is said: a full disk may be the cause of that, and of the run's end before it."""
    try:
        yield
    except DynaPipeError as error:
        print(f"dynapipe: the report could not be written: {error}", file=sys.stderr)


def reason_of(error: BaseException) -> str:
    """Why a run ended early, for its report."""
    match error:
        case KeyboardInterrupt() | SystemExit(code=130):
            return "interrupted (Ctrl-C)"
        case SystemExit(code=int(code)) if code > 128:
            return f"ended by a signal ({signal.Signals(code - 128).name})"
        case JobError():
            return error.cause
        case _:
            return in_one_line(error)


def _write_traces(
    run_dir: Path,
    plan: PlanSettings,
    topology: Topology,
    spans: Sequence[Spans],
    simulated: Mapping[int, Trace],
    shared_cores: int | None,
) -> TraceRecord:
    measured = tuple(
        merge((Trace(tuple(rank.get(step, ()))) for rank in spans), f"step {step + 1}").with_pieces_of(planned)
        for step, planned in simulated.items()
    )
    names = {}
    for rank in range(topology.world_size):
        me = topology.coordinates(rank)
        names[rank] = f"dp{me.dp_rank} pp{me.pp_rank} tp{me.tp_rank}"
    notes = page_notes(topology.world_size, shared_cores)
    record = TraceRecord(
        measured=measured,
        simulated=tuple(simulated.values()),
        title=f"Pipeline timeline, TP{topology.tp} x PP{topology.pp} x DP{topology.dp}",
        subtitle=f"{plan.layout} layout, {plan.schedule} schedule; simulated above measured",
        notes=notes,
        rank_names=names,
    )
    write_trace_file(run_dir / "trace.json", record)
    write_chrome_trace(run_dir / "trace.chrome.json", [*record.measured, *record.simulated])
    return record


def page_notes(world_size: int, shared_cores: int | None) -> tuple[str, ...]:
    """What readers of the timeline must know; `shared_cores` is None where every rank has a core of its own."""
    if shared_cores is None:
        return ()
    return (shared_cores_note(world_size, shared_cores),)


def _simulated(
    config: TrainConfig,
    costs: CostModel,
    lengths: LengthArray,
    step: StepDone,
    shared_cores: int | None,
) -> Trace:
    """The step proven again (it is a pure function of lengths and settings) and simulated on all ranks."""
    topology = topology_of(config)
    batches = global_batches(config, lengths, step.epoch, drop_last=config.data.drop_last)
    samples = sample_lengths(lengths, batches[step.epoch_step])
    plan = prove_step(make_planner(config, costs, shared_cores), samples, step=step.step).step_plan
    traces = []
    for replica, trace in zip(plan.batch.replicas, plan.traces, strict=True):
        shapes = [(m.rows, m.encoder_len, m.decoder_len) for m in replica.micro_batches]
        trace = trace.with_shapes(shapes).with_pieces(find_pieces(replica.micro_batches))
        first = replica.dp_rank * plan.batch.width
        for tp_rank, dp_rank in product(range(topology.tp), range(first, first + plan.batch.width)):
            ranks = [topology.rank(tp_rank=tp_rank, pp_rank=p, dp_rank=dp_rank) for p in range(topology.pp)]
            traces.append(trace.on_ranks(ranks))
    return merge(traces, f"step {step.step + 1}")


def versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in ("dynapipe-ext", "torch", "megatron-core", "numpy", "redis"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class TracedSpans:
    """A listener that keeps one rank's spans of the traced steps."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[Span, ...]] = {}

    def step_done(self, done: StepDone) -> None:
        if done.spans:
            self.spans[done.step] = done.spans

    def close(self) -> None: ...


def spans_to_bytes(spans: Spans) -> bytes:
    return json.dumps({step: [asdict(span) for span in of] for step, of in spans.items()}).encode()


def spans_from_bytes(data: bytes) -> Spans:
    raw = json.loads(data)
    return {int(step): [Span(**{**span, "shape": tuple(span["shape"])}) for span in of] for step, of in raw.items()}


@contextmanager
def claimed(
    request: JobRequest,
    console: Console,
    *,
    overwrite: bool,
    tls_host: str | None = None,
    store_wait_s: float | None = None,
) -> Iterator[JobRequest]:
    """Inside, the request's store answers, its keys are made and its directory is its own; a run that ends early leaves
    its report.

    A store that the job starts is on this machine, over TLS where ranks on others reach it by `tls_host`. `overwrite`:
    the run that the directory holds may be lost. `store_wait_s`: how long a store that has served this run may take to
    answer (None: it is refused if it is away). Errors: StoreError and ConfigError, before the directory is made.
    """
    with ExitStack() as stack:
        address, keys = request.address, JobKeys.begun(request.secret)
        if address is None:
            binary = request.config.job.redis_server or None
            server = stack.enter_context(RedisServer(binary=binary, tls_host=tls_host, password=keys.store_password))
            address = server.address
            place = f"at {address}" if tls_host else "on a unix socket"
            console.print(f"store: embedded {server.name} {server.version} {place}", markup=False, soft_wrap=True)
        else:
            greet_store(address, store_wait_s)  # refused here, once, rather than by every rank
        directory = RunDirectory(request.run_dir, overwrite=overwrite, resume=request.resumed is not None)
        stack.enter_context(directory)
        if plan_dir := request.config.run.plan_dir:
            stack.callback(forget_plans_ahead, plan_dir)  # where ranks were killed before they could
        stack.enter_context(keeping_what_ran(directory))
        yield replace(request, address=address, keys=keys, run_dir=str(directory.path))
