"""`dynapipe launch`: a job under torchrun, on one machine or many, that restarts from its last checkpoint.

an attempt: torchrun on each node ─► ranks ─► all end well, or the first failure ends the rest ─► the next attempt
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.executor.checkpoints.folder import checkpoints
from dynapipe_ext.launch.command_parser import ending, flag_of, refuse_below
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.launch.job.requested import is_done, refuse_settings, store_and_secret
from dynapipe_ext.launch.job.run_data import missing_file, refuse_missing_file
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS, begin_anew, new_run_directory, run_to_resume
from dynapipe_ext.launch.processes.agent import (
    TAKEN_STATUS,
    NodeEnd,
    NodePlace,
    Order,
    run_agent,
    torchrun_command,
)
from dynapipe_ext.launch.processes.cluster import LOST_STATUS, JobError, say_at_once
from dynapipe_ext.launch.processes.env import (
    debug_settings,
    job_secret,
    kv_store_url,
    limit_threads,
    named_interface,
    node_variables,
    slurm_place,
)
from dynapipe_ext.launch.processes.host_checks import hosts_away
from dynapipe_ext.launch.processes.network import holder_of_port, interface_towards, refuse_unknown_host
from dynapipe_ext.launch.processes.nodes import (
    FOLLOW_FLAG,
    Host,
    Nodes,
    OrdersOfStdin,
    RayNodes,
    ShellNodes,
    read_hosts,
    run_on_nodes,
    shell_line,
)
from dynapipe_ext.launch.processes.restarts import RestartedJob, RestartLimits, run_with_restarts
from dynapipe_ext.launch.processes.signals import outlive_readers
from dynapipe_ext.launch.run.outcome import reason_of, report_what_ran
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, note

_EPILOG = """examples:
  dynapipe launch --config mine.toml
  dynapipe launch --config mine.toml --hosts hosts.txt --store rediss://host:6379/0 --secret-file ~/.store-password
  dynapipe launch --config mine.toml --nnodes 2 --rdzv-endpoint host:29400 --store rediss://host:6379/0
  dynapipe launch --config mine.toml --hosts hosts.txt --dry-run
"""
_PORT = 29400  # torchrun's own for c10d
_FREE_PORTS = range(20000, 30000)  # below those that systems give to outgoing connections
_MOST_PLACES = 5
_WAIT_S = 600.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
# It ends when a host is lost.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=8"


def _shell(args: argparse.Namespace) -> list[str]:
    """The words of the command that runs another on a host."""
    return shlex.split(args.ssh or _SSH)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    requested.add_arguments(parser)
    parser.epilog = ending(
        _EPILOG, requested.TRAINING_STATUSES | {LOST_STATUS: "ranks were lost: the same command goes on"}
    )
    _add_launch_flags(parser.add_argument_group("nodes"))


def _add_launch_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that `dynapipe train` lacks. Those with torchrun's names have torchrun's meaning."""
    parser.add_argument("--nnodes", type=int, metavar="N", help="machines of the job (default: 1)")
    parser.add_argument(
        "--node-rank", type=int, metavar="N", help="of this machine, from 0, that of the endpoint (default: by names)"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST[:PORT]",
        help=f"where the nodes meet (default: the first of --hosts at a free port; of nodes started by hand: {_PORT})",
    )
    parser.add_argument(
        "--rdzv-id", metavar="ID", help="of the job (default: a new one; of nodes started by hand: made of --run-dir)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="most restarts from the last checkpoint"
    )
    parser.add_argument(
        "--hosts", metavar="FILE", help="start all nodes from here: a host a line, then slots=N if it has few"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="the last N hosts replace others that stay away"
    )
    parser.add_argument(
        "--wait-for-hosts",
        type=_seconds,
        metavar="DURATION",
        help="that do not answer when all start again, as 90s, 10m or 2h (default: 10m)",
    )
    parser.add_argument("--ssh", metavar="COMMAND", help=f"runs `COMMAND HOST sh -s` on a host (default: {_SSH})")
    parser.add_argument("--ray", action="store_true", help="start all from here, on --nnodes nodes of a Ray cluster")
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a running cluster, or auto (default: a new local one)"
    )
    parser.add_argument(FOLLOW_FLAG, action="store_true", help="end when standard input ends")
    parser.add_argument("--dry-run", action="store_true", help="print every command, and start nothing")


StartOnHosts = Callable[[tuple[Host, ...], bool], NodeEnd]  # on hosts; whether ranks of the job have run before


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """What all attempts share. `words` are flags of `dynapipe train`. `hosts` is empty where torchrun starts here, or
    where Ray chooses `place.num_nodes` nodes; `spares` are hosts that may take the place of one of them."""

    config: TrainConfig
    words: tuple[str, ...]
    place: NodePlace
    hosts: tuple[Host, ...]
    spares: tuple[Host, ...] = ()

    def node_command(self, place: NodePlace) -> list[str]:
        """The command that starts the launcher of one of several nodes, on that node."""
        words = [sys.executable, "-m", "dynapipe_ext.launch.cli", "launch", "--nnodes", str(place.num_nodes)]
        words += ["--node-rank", str(place.node_rank), "--rdzv-endpoint", place.rdzv_endpoint]
        words += ["--rdzv-id", place.rdzv_id, "--max-restarts", "0", FOLLOW_FLAG]
        return [*words, *self.words]

    def places(self, first_address: str) -> list[NodePlace]:
        """The places of all nodes, which meet at the first one by default. By another job's port or id nodes would join
        that job, so each call has its own."""
        port = secrets.choice(_FREE_PORTS)
        endpoint = self.place.rdzv_endpoint or _with_port(first_address, port)
        same = replace(self.place, rdzv_endpoint=endpoint, rdzv_id=f"{self.place.rdzv_id}-{secrets.token_hex(4)}")
        return [replace(same, node_rank=i) for i in range(self.place.num_nodes)]


def run(args: argparse.Namespace) -> int:
    limit_threads()
    config = requested.config_from(args)
    job = _job(args, config)
    from_here = bool(job.hosts) or args.ray
    by_hand = job.place.num_nodes > 1 and not from_here  # people start the other nodes, so torchrun counts restarts
    if args.dry_run or from_here:
        if fault := missing_file(config):
            say_at_once(f"dynapipe launch: warning: {fault}: it must be on every node")
    else:
        refuse_missing_file(config)
    if args.dry_run:
        print("\n".join(_commands(args, job, by_hand)))
        return 0
    run_dir, job = _with_run_directory(args, job, by_hand)
    outlive_readers()

    try:
        start = partial(_run_from_here, args, job) if from_here else _agent_starter(args, job, by_hand)
        limits = RestartLimits(
            max_restarts=0 if by_hand else args.max_restarts,
            wait_for_hosts_s=_WAIT_S if args.wait_for_hosts is None else args.wait_for_hosts,
        )
        restarted = _restarted(args, job, run_dir, start)
        end = run_with_restarts(restarted, limits, hosts=job.hosts, spares=job.spares)
        if end.status:
            raise JobError(end.cause, end.status)
    except BaseException as error:
        if not args.follow_stdin:  # else the process that started this one reports
            report_what_ran(run_dir, reason_of(error) or "ranks failed: the log says why")
        if isinstance(error, JobError) and not error.cause:  # a rank has printed it
            return error.exit_status
        raise
    finally:
        if not (job.config.run.run_dir or args.resume):
            with suppress(OSError):
                run_dir.rmdir()  # if it is empty, since nothing has begun
    return 0


def _agent_starter(args: argparse.Namespace, job: LaunchedJob, by_hand: bool) -> StartOnHosts:
    """A function that runs torchrun here once. Errors: ConfigError or StoreError now, once, instead of on every
    rank."""
    launched = job_secret()
    _, shared = store_and_secret(args, launched)
    if job.place.num_nodes > 1:
        refuse_unknown_host(_host_of(job.place.rdzv_endpoint))
        if job.place.node_rank == 0:
            _refuse_taken_port(job.place.rdzv_endpoint, follows=args.follow_stdin)
    place = replace(job.place, local_addr=_local_address(job.place))
    command = torchrun_command(place, args.max_restarts if by_hand else 0, job.words)
    secret = launched or (secrets.token_hex(32) if job.place.num_nodes == 1 else shared)

    def start(_: tuple[Host, ...], is_restart: bool) -> NodeEnd:
        order: Callable[[], Order] = OrdersOfStdin() if args.follow_stdin else lambda: ""
        limits = {"timeout_s": job.config.job.timeout_s, "grace_s": job.config.checkpoint.grace_s}
        return run_agent(command, secret=secret, order=order, is_restart=is_restart, **limits)

    return start


def _refuse_taken_port(endpoint: str, *, follows: bool) -> None:
    """Errors: ConfigError where the first node, this one, cannot have the port at which all meet; JobError where this
    launcher follows another, which may choose another port."""
    port = int(endpoint.rpartition(":")[2])
    if holder := holder_of_port(port):
        fault = f"nodes would meet at {endpoint}, but {holder} has that port on this machine"
        if follows:
            raise JobError(fault, TAKEN_STATUS)
        raise ConfigError(f"{fault}: give another by --rdzv-endpoint HOST:PORT on every node")


def _restarted(args: argparse.Namespace, job: LaunchedJob, run_dir: Path, start: StartOnHosts) -> RestartedJob:
    num_starts = count()

    def newest() -> Path | None:
        return next(reversed(checkpoints(run_dir / CHECKPOINTS)), None)

    def has_all_steps(newest: Path) -> bool:  # the number of steps in epochs is unknown before the data are read
        return not (args.compare or job.config.run.epochs) and is_done(newest, job.config)

    def away(hosts: tuple[Host, ...]) -> frozenset[Host]:
        if not hosts:
            return frozenset()
        endpoint = job.place.rdzv_endpoint or _with_port(hosts[0].name.rpartition("@")[2], _FREE_PORTS[-1])
        return hosts_away(_shell(args), hosts, _host_of(endpoint), int(endpoint.rpartition(":")[2]))

    def start_or_again(hosts: tuple[Host, ...]) -> NodeEnd:
        end = start(hosts, next(num_starts) > 0)
        if end.may_restart and (run_dir / EVENTS_FILE).exists():
            with suppress(DataError):  # a full disk is no reason not to restart
                note(run_dir, "fault", None, end.cause or f"ranks failed (exit status {end.status})")
        return end

    return RestartedJob(start=start_or_again, newest=newest, is_done=has_all_steps, away=away)


def _job(args: argparse.Namespace, config: TrainConfig) -> LaunchedJob:
    """The job of a command line. Errors: ConfigError for what torchrun or every rank would refuse later."""
    refuse_settings(config, compare=args.compare)
    hosts, spares = _hosts_and_spares(args)
    if args.ray and (hosts or args.node_rank is not None):
        raise ConfigError("--ray finds its nodes itself: leave out --hosts and --node-rank")
    if hosts and (args.node_rank is not None or args.nnodes not in (None, 1, len(hosts))):
        raise ConfigError(f"--hosts names {len(hosts)} hosts and starts all: leave out --nnodes and --node-rank")
    num_nodes = len(hosts) or (1 if args.nnodes is None else args.nnodes)
    world_size = topology_of(config).world_size
    if num_nodes < 1 or world_size % num_nodes:
        raise ConfigError(
            f"{world_size} ranks (tp x pp x dp) do not spread evenly over {num_nodes} nodes: change one of them"
        )
    num_ranks = world_size // num_nodes
    if small := [host for host in (*hosts, *spares) if host.slots is not None and host.slots < num_ranks]:
        raise ConfigError(f"{small[0].name} has {small[0].slots} slots but {num_ranks} ranks: name more hosts")
    if args.node_rank is not None and not 0 <= args.node_rank < num_nodes:
        raise ConfigError(f"--node-rank is {args.node_rank} but must be in 0..{num_nodes - 1}")
    refuse_below(args, 0, "max_restarts")
    if num_nodes > 1 and not (args.rdzv_endpoint or hosts or args.ray):
        raise ConfigError(f"{num_nodes} nodes must meet somewhere: give --rdzv-endpoint HOST:PORT, or --hosts FILE")
    if args.ray_address and not args.ray:
        raise ConfigError(f"--ray-address {args.ray_address} names a Ray cluster: add --ray, or leave it out")
    if num_nodes > 1 and not (config.run.run_dir or args.resume):
        raise ConfigError(f"{num_nodes} nodes need one directory that all of them see: give it as --run-dir DIR")
    launch_flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_launch_flags(launch_flags)
    from_here = bool(hosts) or args.ray
    agreed = _Agreed(_PORT, "dynapipe") if from_here else _agreed(args, args.resume or config.run.run_dir)
    place = NodePlace(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        node_rank=args.node_rank,
        rdzv_endpoint=_with_port(args.rdzv_endpoint, agreed.port) if args.rdzv_endpoint else "",
        rdzv_id=args.rdzv_id or agreed.job_id,
    )
    _refuse_unused(args)
    words = (*_flags_of_variables(args), *launch_flags.parse_known_args(args.words)[1])
    return LaunchedJob(config=config, words=words, place=place, hosts=hosts, spares=spares)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Errors: ConfigError for flags of several nodes where nothing says how many, and for those of a file of hosts
    without one."""
    if args.hosts:
        return
    of_nodes = {"rdzv_endpoint": args.rdzv_endpoint, "rdzv_id": args.rdzv_id}
    for name, value in of_nodes.items():
        if value and args.nnodes is None:  # `--nnodes 1` says it, as scripts for any number do
            raise ConfigError(
                f"{flag_of(name)} {value} is for several nodes that meet, but --nnodes is 1: add --nnodes N, or leave"
                " it out"
            )
    for name in ("ssh", "wait_for_hosts"):
        if (value := getattr(args, name)) is not None:
            given = f"{value:g}" if name == "wait_for_hosts" else value
            raise ConfigError(f"{flag_of(name)} {given} is for the hosts of a file: add --hosts FILE, or leave it out")


def _hosts_and_spares(args: argparse.Namespace) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """The hosts to start on, and those that may take their places. Errors: ConfigError."""
    if not args.hosts:
        if args.spares:
            raise ConfigError(
                f"--spares {args.spares} are the last hosts of a file: give it by --hosts, or leave it out"
            )
        return (), ()
    hosts = read_hosts(Path(args.hosts))
    if not 0 <= args.spares < len(hosts):
        raise ConfigError(
            f"--spares is {args.spares} but must be in 0..{len(hosts) - 1}: {args.hosts} names {len(hosts)} hosts"
        )
    return hosts[: len(hosts) - args.spares], hosts[len(hosts) - args.spares :]


def _seconds(text: str) -> float:
    """A duration in seconds, minutes or hours.

    >>> _seconds("90"), _seconds("90s"), _seconds("1.5m"), _seconds("2h")
    (90.0, 90.0, 90.0, 7200.0)
    """
    number = text.removesuffix(text[-1:]) if text[-1:] in _UNITS_S else text
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", number):
        raise argparse.ArgumentTypeError(f"{short(text)} is no duration: write seconds, or 90s, 10m or 2h")
    return float(number) * _UNITS_S.get(text[-1:], 1)


def _flags_of_variables(args: argparse.Namespace) -> list[str]:
    """Flags, which reach all nodes, for this process's variables of the store and of debugging."""
    store = None if args.store else kv_store_url(tls=not args.insecure_store)
    settings = debug_settings() | ({"store": store} if store else {})
    return [word for name, value in settings.items() for word in (flag_of(name), value)]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """The port and the id on which the nodes of a job agree by themselves."""

    port: int
    job_id: str


def _agreed(args: argparse.Namespace, run_dir: str) -> _Agreed:
    """Made of Slurm's step where all nodes are in it; where each has a step of its own, of the Slurm job and the run's
    directory; else of the directory alone. Errors: ConfigError where Slurm's job has fewer nodes."""
    of_run = hashlib.sha256(os.path.abspath(run_dir).encode()).hexdigest()[:8]
    slurm = slurm_place()
    if slurm is None or args.nnodes in (None, 1):
        return _Agreed(_PORT, f"dynapipe-{of_run}")
    if 0 < slurm.job_nodes < args.nnodes and not (args.rdzv_id and ":" in args.rdzv_endpoint):
        raise ConfigError(
            f"--nnodes is {args.nnodes} but the Slurm job {slurm.job} has {slurm.job_nodes} nodes, so others would meet"
            " elsewhere: give --rdzv-endpoint HOST:PORT and --rdzv-id, the same on every node"
        )
    shared = f"{slurm.job}.{slurm.step}" if slurm.step_nodes not in range(1, args.nnodes) else f"{slurm.job}-{of_run}"
    return _Agreed(_FREE_PORTS[zlib.crc32(shared.encode()) % len(_FREE_PORTS)], f"slurm-{shared}")


def _with_port(endpoint: str, port: int = _PORT) -> str:
    """The endpoint, at `port` where it names none. Errors: ConfigError for a missing host or an invalid port.

    >>> _with_port("host"), _with_port("host:1234"), _with_port("fe80::1"), _with_port("[fe80::1]:1234")
    ('host:29400', 'host:1234', '[fe80::1]:29400', '[fe80::1]:1234')
    """
    if endpoint.count(":") > 1 and not endpoint.startswith("["):
        endpoint = f"[{endpoint}]"
    if ":" not in endpoint or endpoint.endswith("]"):
        endpoint = f"{endpoint}:{port}"
    host, _, port_text = endpoint.rpartition(":")
    if not (host and port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 1 << 16):
        raise ConfigError(f"--rdzv-endpoint is {short(endpoint)} but must be HOST or HOST:PORT, the port in 1..65535")
    return endpoint


def _with_run_directory(args: argparse.Namespace, job: LaunchedJob, by_hand: bool) -> tuple[Path, LaunchedJob]:
    """The run's directory, which all attempts share, and the job with a flag for it."""
    if args.resume:
        return run_to_resume(args.resume), job
    if not job.config.run.run_dir:
        run_dir = new_run_directory()
        return run_dir, replace(job, words=(*job.words, "--run-dir", str(run_dir)))
    run_dir = Path(job.config.run.run_dir)
    if args.overwrite and not args.follow_stdin:  # once, not in every attempt
        if by_hand:
            raise ConfigError(f"nodes that are started one by one cannot agree who removes {run_dir}: remove it first")
        begin_anew(run_dir)
    return run_dir, job


def _local_address(place: NodePlace) -> str:
    """The address at which other nodes reach this one; empty without other nodes, or where several are possible."""
    if place.num_nodes == 1:
        return ""
    with suppress(ConfigError):
        return interface_towards([_host_of(place.rdzv_endpoint)], named_interface())[1]
    return ""


def _host_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _run_from_here(args: argparse.Namespace, job: LaunchedJob, hosts: tuple[Host, ...], is_restart: bool) -> NodeEnd:
    """Run all nodes once, on these hosts or where Ray has room. Where their port is taken, they meet at another, unless
    the user chose it."""
    nodes: Nodes
    for _ in range(1 if job.place.rdzv_endpoint else _MOST_PLACES):
        if args.ray:
            nodes = RayNodes(job.place.num_nodes, job.place.num_ranks, args.ray_address)
        else:
            nodes = ShellNodes(_shell(args), hosts)
        variables, places = (
            node_variables(secrets.token_hex(32), is_restart=is_restart),
            job.places(nodes.first_address),
        )
        lines = [shell_line(job.node_command(place), Path.cwd(), variables) for place in places]
        end = run_on_nodes(nodes, lines, job.config.checkpoint.grace_s)
        if end.status != TAKEN_STATUS:
            return end
    raise ConfigError(f"{end.cause or 'the first node has no port for the nodes'}: give a free one by --rdzv-endpoint")


def _commands(args: argparse.Namespace, job: LaunchedJob, by_hand: bool) -> Sequence[str]:
    """Every command of the job as a line of shell; commands that a node runs itself are indented."""
    if not (job.hosts or args.ray):
        place = replace(job.place, local_addr=_local_address(job.place))
        return [shlex.join(torchrun_command(place, args.max_restarts if by_hand else 0, job.words))]
    commands = []
    names = [host.name for host in job.hosts] or [f"ray-node-{i}" for i in range(job.place.num_nodes)]
    for name, place in zip(names, job.places(names[0].rpartition("@")[2]), strict=True):
        line = shell_line(job.node_command(place), Path.cwd())
        shell = [*_shell(args), name, "sh", "-s"] if job.hosts else ["sh", "-s"]
        commands += [f"{shlex.join(shell)} <<< {shlex.quote(line)}"]
        commands += [f"    {shlex.join(torchrun_command(place, 0, job.words))}"]
    return commands
