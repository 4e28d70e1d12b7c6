"""When a job that lost ranks starts again, and on which hosts.

an attempt ends ─► Standing ─► next_move ─► Wait (then look again), StartAgain or GiveUp
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from dynapipe_ext.launch.processes.agent import NodeEnd
from dynapipe_ext.launch.processes.cluster import LOST_STATUS, say_at_once
from dynapipe_ext.launch.processes.nodes import Host

_PAUSE_S, _PAUSE_FACTOR, _MOST_PAUSE_S = 1.0, 4, 60.0
_LOOK_S, _MOST_LOOK_S = 1.0, 15.0  # between looks at hosts that are away
_SAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """`max_restarts`: in a row without a newer checkpoint. `wait_for_hosts_s`: for hosts that do not answer."""

    max_restarts: int
    wait_for_hosts_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job stands `waited_s` after its ranks were lost. `num_in_vain`: restarts since its newest checkpoint.

    `hosts` are those of the last attempt, `spares` may take their places. `away`: those of both that did not answer the
    last look. All are empty where one machine, or Ray, has the ranks.
    """

    num_in_vain: int
    waited_s: float
    hosts: tuple[Host, ...] = ()
    spares: tuple[Host, ...] = ()
    away: frozenset[Host] = frozenset()


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again after `seconds`; `away` are the hosts that are waited for, if any."""

    seconds: float
    away: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start on `hosts`, with `spares` left; `replaced` are pairs of a host that is away and the one in its place."""

    hosts: tuple[Host, ...] = ()
    spares: tuple[Host, ...] = ()
    replaced: tuple[tuple[Host, Host], ...] = ()


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`away` are the hosts for which nothing is left to do; empty where the restarts are used up."""

    away: tuple[Host, ...] = ()


def pause_s(num_in_vain: int) -> float:
    """Seconds before the next restart: what one fault has broken may need time to come back.

    >>> [pause_s(number) for number in range(5)]
    [1.0, 4.0, 16.0, 60.0, 60.0]
    """
    return float(min(_MOST_PAUSE_S, _PAUSE_S * _PAUSE_FACTOR ** min(num_in_vain, 9)))


def next_move(now: Standing, limits: RestartLimits) -> Wait | StartAgain | GiveUp:
    """A host that stays away is replaced by the first spare that answers, in its place among the nodes."""
    if now.num_in_vain >= limits.max_restarts:
        return GiveUp()
    if (remaining_s := pause_s(now.num_in_vain) - now.waited_s) > 0:
        return Wait(remaining_s)
    away = tuple(host for host in now.hosts if host in now.away)
    if (remaining_s := limits.wait_for_hosts_s - now.waited_s) > 0 and away:
        return Wait(min(_MOST_LOOK_S, max(_LOOK_S, now.waited_s), remaining_s), away)
    answering = [host for host in now.spares if host not in now.away]
    if len(answering) < len(away):
        return GiveUp(away)
    places = dict(zip(away, answering, strict=False))
    left = tuple(host for host in now.spares if host not in places.values())
    return StartAgain(tuple(places.get(host, host) for host in now.hosts), (*left, *away), tuple(places.items()))


@dataclass(frozen=True, slots=True)
class WaitingClock:
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedJob:
    """What is started again.

    `start` runs an attempt on hosts. `newest` is the last checkpoint; `is_done`: it has all steps. `away` looks which
    of some hosts do not answer.
    """

    start: Callable[[tuple[Host, ...]], NodeEnd]
    newest: Callable[[], Path | None]
    is_done: Callable[[Path], bool]
    away: Callable[[tuple[Host, ...]], frozenset[Host]] = lambda hosts: frozenset()


def run_with_restarts(
    job: RestartedJob,
    limits: RestartLimits,
    *,
    hosts: tuple[Host, ...] = (),
    spares: tuple[Host, ...] = (),
    clock: WaitingClock | None = None,
) -> NodeEnd:
    """How a job ends, which starts again until all ends well or another start would not help.

    Where its newest checkpoint has all steps, a rank, or an earlier launcher, was lost after the last one: nothing is
    left to do.
    """
    clock, now = clock or WaitingClock(), Standing(num_in_vain=0, waited_s=0.0, hosts=hosts, spares=spares)
    newest = job.newest()
    while True:
        if newest and job.is_done(newest):
            say_at_once(f"dynapipe launch: {newest} has done all steps: nothing is left to do")
            return NodeEnd(0)
        end = job.start(now.hosts)
        if not end.may_restart:
            return end
        saved, newest = newest, job.newest()
        if newest and job.is_done(newest):
            continue
        now = replace(now, num_in_vain=now.num_in_vain if newest == saved else 0, waited_s=0.0, away=frozenset())
        _say_restart(end, now, limits, newest)
        match _after_waits(job, now, limits, clock):
            case GiveUp(away=()):
                return end
            case GiveUp(away):
                return NodeEnd(LOST_STATUS, _given_up(away, limits, bool(spares)))
            case StartAgain(next_hosts, next_spares, replaced):
                for host, spare in replaced:
                    say_at_once(f"dynapipe launch: {spare.name} takes the place of {host.name}, which stays away")
                now = replace(now, num_in_vain=now.num_in_vain + 1, hosts=next_hosts, spares=next_spares)
            case never:
                assert_never(never)


def _after_waits(job: RestartedJob, now: Standing, limits: RestartLimits, clock: WaitingClock) -> StartAgain | GiveUp:
    begun_s, said_s = clock.now_s(), -_SAY_S
    while isinstance(move := next_move(now, limits), Wait):
        if move.away and now.waited_s - said_s >= _SAY_S:
            said_s = now.waited_s
            say_at_once(
                f"dynapipe launch: {_names(move.away)} not answered for {now.waited_s:.0f} s: waiting, for at most"
                f" {limits.wait_for_hosts_s - now.waited_s:.0f} s more"
            )
        clock.sleep(move.seconds)
        away = job.away((*now.hosts, *now.spares))
        now = replace(now, waited_s=clock.now_s() - begun_s, away=away)
    return move


def _say_restart(end: NodeEnd, now: Standing, limits: RestartLimits, newest: Path | None) -> None:
    if now.num_in_vain < limits.max_restarts:
        where = f"from {newest}" if newest else "from the first step on: nothing has been saved"
        why = end.cause or f"ranks failed (exit status {end.status}, see above)"
        number = f"restart {now.num_in_vain + 1} of {limits.max_restarts}"
        say_at_once(f"dynapipe launch: {why}; {number} in {pause_s(now.num_in_vain):g} s, {where}")


def _given_up(away: tuple[Host, ...], limits: RestartLimits, has_spares: bool) -> str:
    spares = "no spare host is left that answers" if has_spares else "there are no --spares"
    return (
        f"{_names(away)} not answered for {limits.wait_for_hosts_s:g} s, and {spares}: look there; the same command"
        " goes on, and --wait-for-hosts waits longer"
    )


def _names(hosts: Iterable[Host]) -> str:
    names = [host.name for host in hosts]
    return f"{', '.join(names)} {'have' if len(names) > 1 else 'has'}"
