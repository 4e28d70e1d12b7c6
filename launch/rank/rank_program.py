"""One rank's process under torchrun: `torchrun … -m dynapipe_ext.launch.rank`, with the flags of `dynapipe train`.

Of all ranks that fail, the first prints its error in one line, after a traceback if it is a defect. Ranks that fail
because of it print nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from dynapipe_ext.errors import DynaPipeError, ExecutionError, LowMemoryError, in_one_line
from dynapipe_ext.executor.checkpoints.folder import checkpoints
from dynapipe_ext.executor.parent_death import end_with_parent, parent_of
from dynapipe_ext.executor.plans.channel import store_patience_s
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch.command_parser import CommandParser
from dynapipe_ext.launch.job.job_keys import UNSHARED_WARNING
from dynapipe_ext.launch.job.requested import JobRequest, add_arguments, refuse_done, requested_job
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS, is_unfinished
from dynapipe_ext.launch.job.terms import UnlikeRanksError
from dynapipe_ext.launch.processes.agent import recorded
from dynapipe_ext.launch.processes.cluster import (
    BUG_STATUS,
    USER_ERROR_STATUS,
    JobError,
    failure_status,
    set_process_title,
)
from dynapipe_ext.launch.processes.env import (
    RankEnv,
    agent_attempt,
    is_restart,
    job_secret,
    launcher,
    limit_threads,
    named_interface,
    rank_env,
    under_torchrun,
    use_interface,
)
from dynapipe_ext.launch.processes.network import interface_towards
from dynapipe_ext.launch.processes.signals import (
    ENDING,
    complete_streams,
    end_undisturbed,
    ending_signals_raise,
    outlive_readers,
    show_what_terminals_obey,
)
from dynapipe_ext.launch.rank.one_rank import place_of, rank_title, train_rank
from dynapipe_ext.launch.run.outcome import claimed
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import error_console

_ASK_S = 5.0  # for the others' failures: the agent, which knows of them, may be gone
_INTERRUPTED_STATUS = 130
_FREED_S, _LOOK_S = 30.0, 1.0  # for memory of ranks that were killed


def run_and_exit() -> NoReturn:
    """The program. A rank that fails leaves at once: with its peers gone, closing its process groups could hang."""
    complete_streams()
    show_what_terminals_obey()
    outlive_readers()
    _end_with_agent()
    limit_threads()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parsed(arguments)
    env: RankEnv | None = None
    try:
        with ending_signals_raise():
            env = rank_env()
            with _recorded(env), _telling(env):
                return _main(env, args)
    except JobError as error:
        return error.exit_status
    except DynaPipeError as error:  # no rank yet
        print(f"dynapipe: error: {in_one_line(error)}", file=sys.stderr)
        return failure_status(error)
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS


def _end_with_agent() -> None:
    """However torchrun ends, this rank does; where `dynapipe launch` started it, also if it had ended by now."""
    agent, launched = os.getppid(), launcher()
    end_with_parent(agent)
    if launched is not None and parent_of(agent) != launched.pid:
        os._exit(128 + signal.SIGKILL)


def _recorded(env: RankEnv) -> AbstractContextManager[None]:
    """Inside, the launcher of this node, if there is one, knows of this rank."""
    launched = launcher()
    return recorded(launched.records, int(agent_attempt() or 0), env.rank) if launched else nullcontext()


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Rank 0 alone shows the help and mistakes: all have the same arguments."""
    parser = CommandParser(prog="python -m dynapipe_ext.launch.rank", description=__doc__)
    add_arguments(parser)
    with ExitStack() as stack:
        if under_torchrun() and rank_env().rank:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        return parser.parse_args(arguments)


def _requested(env: RankEnv, args: argparse.Namespace) -> JobRequest:
    """As `requested_job`. Memory that earlier ranks of the job, or others, still hold is waited for."""
    secret, deadline_s = job_secret(), time.monotonic() + (_FREED_S if is_restart() else 0.0)
    while True:
        try:
            return requested_job(args, place_of(env) if env.rank == 0 else None, secret=secret)
        except LowMemoryError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_LOOK_S)


def _main(env: RankEnv, args: argparse.Namespace) -> int:
    request = _requested(env, args)
    config = request.config
    set_process_title(rank_title(env, config))
    tls_host = _settle_network(env, request.address)
    end_signals = ENDING  # torchrun passes Ctrl-C on, and that its terminal is gone
    if env.rank:
        return train_rank(env, request, end_signals=end_signals)
    overwrite = request.overwrite and request.resumed is None  # else it is what --output holds that may be lost
    if launcher() is not None and request.resumed is None and request.run_dir:
        resumed, overwrite = _to_go_on_with(Path(request.run_dir), config, compare=request.compare)
        request = replace(request, resumed=resumed)
    goes_on = launcher() is not None and (request.resumed is not None or overwrite)
    store_wait_s = store_patience_s(config.job.timeout_s) if goes_on else None
    console = error_console()
    if not request.secret and env.local_world_size < env.world_size:
        console.print(UNSHARED_WARNING, markup=False, soft_wrap=True)
    with (
        claimed(request, console, overwrite=overwrite, tls_host=tls_host, store_wait_s=store_wait_s) as request,
        _telling(env),  # before the store goes, and others fail for that
    ):
        return train_rank(env, request, end_signals=end_signals)


def _to_go_on_with(run_dir: Path, config: TrainConfig, *, compare: bool) -> tuple[Path | None, bool]:
    """What `dynapipe launch` does with a directory that holds a run which has not ended well: the checkpoint that it
    goes on from, or whether it begins anew over one that has saved nothing. Errors: ConfigError for one that is done.
    """
    saved = () if compare else checkpoints(run_dir / CHECKPOINTS)  # of what is compared nothing is saved
    if not saved:
        return None, is_unfinished(run_dir)
    if not config.run.epochs:
        refuse_done(saved[-1], config)
    print(f"going on from {saved[-1]}", file=sys.stderr, flush=True)
    return saved[-1], False


def _settle_network(env: RankEnv, store: StoreAddress | None) -> str | None:
    """Have gloo and NCCL take the interface on which ranks reach each other, unless the user chose; this machine's
    address on it, or None where all are on this machine."""
    if env.local_world_size == env.world_size:
        use_interface("lo")
        return None
    store_host = urlsplit(store.url).hostname if store else None
    name, own = interface_towards((host for host in (env.master_addr, store_host) if host), named_interface())
    if (variables_set := use_interface(name)) and env.local_rank == 0:
        print(f"network of rank {env.rank}'s machine: {name} ({', '.join(variables_set)})", file=sys.stderr)
    return own


@contextmanager
def _telling(env: RankEnv) -> Iterator[None]:
    """Errors become a JobError with the cause of the whole job's failure, which its rank has said."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        if isinstance(error, UnlikeRanksError):
            end_undisturbed()  # torchrun ends this rank, too, once the node that keeps its store has left
        status = failure_status(error)
        own_failure = f"rank {env.rank}: {in_one_line(error)}"
        may_pass = status != USER_ERROR_STATUS or (isinstance(error, LowMemoryError) and is_restart())
        cause, is_final = _first_failure(env, (own_failure, not may_pass))
        if cause == own_failure:
            if status == BUG_STATUS and launcher() is not None:  # else torchrun's summary has its calls
                print("".join(traceback.format_tb(error.__traceback__)), end="", file=sys.stderr)
            print(f"dynapipe: error: {own_failure}", file=sys.stderr, flush=True)
            _tell_torchrun(error, own_failure)
        if isinstance(error, UnlikeRanksError):
            error.leave_together()  # each has asked by now why the first rank failed
        raise JobError(own_failure, status, cause, is_final=is_final) from error


def _first_failure(env: RankEnv, own_failure: tuple[str, bool]) -> tuple[str, bool]:
    """Why the first rank failed, and whether every start would end so, by the store of torchrun's agent; `mine` where
    this is the first, or nobody knows."""
    attempt = agent_attempt()
    if attempt is None:
        return own_failure
    from torch._C._distributed_c10d import FileStore, TCPStore

    try:
        limit = timedelta(seconds=_ASK_S)
        if env.init_method.startswith(scheme := "file://"):
            store: Any = FileStore(env.init_method.removeprefix(scheme), env.world_size)
        else:
            store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=limit, wait_for_workers=False)
        key = f"dynapipe/failure/{attempt}"
        first: bytes = store.compare_set(key, "", json.dumps(own_failure))
    except RuntimeError:  # the agent has gone
        return own_failure
    cause, is_final = json.loads(first)
    return cause, is_final


def _tell_torchrun(error: Exception, cause: str) -> None:
    """For its summary, which shows the first failure: its cause, after the calls that led to it if it is a defect."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise ExecutionError(cause) from (None if isinstance(error, DynaPipeError) else error)
    except ExecutionError as final_error:
        get_error_handler().record_exception(final_error)
