"""What a job holds while its ranks run: its directory, and a store of its own where the user gave none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rich.console import Console

from dynapipe_ext.executor.plans.dump import forget_plans_ahead
from dynapipe_ext.launch.job.job_keys import JobKeys
from dynapipe_ext.launch.job.requested import JobRequest
from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.launch.run.outcome import keeping_what_ran
from dynapipe_ext.launch.store import RedisServer, greet_store


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
        if plan_dir := request.config.debug.plan_dir:
            stack.callback(forget_plans_ahead, plan_dir)  # where ranks were killed before they could
        stack.enter_context(keeping_what_ran(directory))
        yield replace(request, address=address, keys=keys, run_dir=str(directory.path))
