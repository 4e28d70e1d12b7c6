"""When a job starts again: after which pause, on which hosts, and when not. No test waits: the clock is a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.launch.processes import host_checks
from dynapipe_ext.launch.processes.agent import NodeEnd
from dynapipe_ext.launch.processes.host_checks import hosts_away
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.processes.nodes import Host
from dynapipe_ext.launch.processes.restarts import (
    GiveUp,
    RestartedJob,
    RestartLimits,
    Standing,
    StartAgain,
    Wait,
    WaitingClock,
    next_move,
    run_with_restarts,
)

A, B, C, D = HOSTS = tuple(Host(name) for name in "abcd")
LIMITS = RestartLimits(max_restarts=3, wait_for_hosts_s=100.0)


def standing(num_in_vain: int, waited_s: float, spares: str = "", away: str = "") -> Standing:
    """On hosts a and b."""
    by_name = {host.name: host for host in HOSTS}
    return Standing(
        num_in_vain=num_in_vain,
        waited_s=waited_s,
        hosts=(A, B),
        spares=tuple(by_name[name] for name in spares),
        away=frozenset(by_name[name] for name in away),
    )


@pytest.mark.parametrize(
    ("now", "move"),
    [
        # Pauses grow: 1, 4, 16 s; what is left of one is waited for.
        (standing(0, 0.0), Wait(1.0)),
        (standing(1, 1.5), Wait(2.5)),
        (standing(2, 0.0, away="b"), Wait(16.0)),
        (standing(0, 1.0), StartAgain((A, B))),
        (standing(3, 0.0), GiveUp()),
        (standing(3, 500.0, spares="c", away="b"), GiveUp()),
        # A host that is away is looked for, less and less often, up to the limit.
        (standing(0, 1.0, away="b"), Wait(1.0, (B,))),
        (standing(0, 8.0, away="ab"), Wait(8.0, (A, B))),
        (standing(0, 40.0, spares="c", away="b"), Wait(15.0, (B,))),
        (standing(0, 98.0, spares="c", away="b"), Wait(2.0, (B,))),
        (standing(0, 99.0, spares="c"), StartAgain((A, B), (C,))),  # it answers again
        # Then spares that answer take its place among the nodes; it may come back as a spare.
        (standing(0, 100.0, spares="c", away="b"), StartAgain((A, C), (B,), ((B, C),))),
        (standing(0, 100.0, spares="cd", away="ac"), StartAgain((D, B), (C, A), ((A, D),))),
        (standing(0, 100.0, spares="cd", away="ab"), StartAgain((C, D), (A, B), ((A, C), (B, D)))),
        (standing(0, 100.0, spares="c", away="bc"), GiveUp((B,))),
        (standing(0, 100.0, spares="c", away="ab"), GiveUp((A, B))),
        (standing(0, 100.0, away="b"), GiveUp((B,))),
        (standing(0, 1.0, spares="c", away="c"), StartAgain((A, B), (C,))),  # a spare that is away harms nobody
    ],
)
def test_the_next_move_follows_from_how_a_job_stands(now: Standing, move: Wait | StartAgain | GiveUp) -> None:
    assert next_move(now, LIMITS) == move


class Simulated:
    """A job whose attempts end as `ends` says: a status, and a number of checkpoints by then. `away_until_s`: until
    when a host does not answer."""

    def __init__(self, ends: list[tuple[int, int]], away_until_s: dict[Host, float] | None = None) -> None:
        self.ends, self.away_until_s = ends, away_until_s or {}
        self.now_s, self.saved = 0.0, 0
        self.starts: list[tuple[float, str]] = []

    def run(
        self, limits: RestartLimits = LIMITS, *, hosts: str = "ab", spares: str = "", num_steps: int = 99
    ) -> NodeEnd:
        by_name = {host.name: host for host in HOSTS}
        return run_with_restarts(
            RestartedJob(
                start=self.start,
                newest=lambda: Path(f"iter_{self.saved}") if self.saved else None,
                is_done=lambda newest: newest.name == f"iter_{num_steps}",
                away=lambda hosts: frozenset(host for host in hosts if self.away_until_s.get(host, 0.0) > self.now_s),
            ),
            limits,
            hosts=tuple(by_name[name] for name in hosts),
            spares=tuple(by_name[name] for name in spares),
            clock=WaitingClock(lambda: self.now_s, self.sleep),
        )

    def start(self, hosts: tuple[Host, ...]) -> NodeEnd:
        self.starts.append((self.now_s, "".join(host.name for host in hosts)))
        status, self.saved = self.ends[len(self.starts) - 1]
        return NodeEnd(status, "b was lost" if status == 75 else "")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("ends", "starts_s", "status"),
    [
        ([(0, 9)], [0], 0),
        ([(75, 4), (1, 4), (0, 9)], [0, 1, 5], 0),
        ([(75, 4)] * 4, [0, 1, 5, 21], 75),
        ([(75, 0)] * 4, [0, 1, 5, 21], 75),
        ([(75, 4), (75, 4), (75, 4), (75, 5), (75, 5), (0, 9)], [0, 1, 5, 21, 22, 26], 0),  # 5 is progress
        ([(75, 4), (2, 4)], [0, 1], 2),
        ([(143, 4)], [0], 143),
        ([(75, 99)], [0], 0),  # lost after the last step
    ],
)
def test_a_job_starts_again_as_often_as_it_may_in_a_row_without_progress_and_never_after_a_mistake(
    ends: list[tuple[int, int]], starts_s: list[float], status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Simulated(ends)
    assert job.run().status == status
    assert job.starts == [(at_s, "ab") for at_s in starts_s]
    said = capfd.readouterr().err
    assert said.count("; restart ") == len(starts_s) - 1
    if ends[0] == (75, 4):
        assert said.splitlines()[0] == "dynapipe launch: b was lost; restart 1 of 3 in 1 s, from iter_4"


def test_what_is_done_is_not_started_at_all(capfd: pytest.CaptureFixture[str]) -> None:
    job = Simulated([])
    job.saved = 99
    assert job.run() == NodeEnd(0)
    assert capfd.readouterr().err == "dynapipe launch: iter_99 has done all steps: nothing is left to do\n"


def test_a_link_that_is_gone_for_two_minutes_costs_one_restart(capfd: pytest.CaptureFixture[str]) -> None:
    job = Simulated([(75, 4), (0, 9)], {B: 120.0})
    assert job.run(RestartLimits(max_restarts=1, wait_for_hosts_s=600.0)) == NodeEnd(0)
    ((_, first), (again_s, second)) = job.starts
    assert (first, second) == ("ab", "ab")
    assert 120.0 <= again_s <= 135.0
    assert capfd.readouterr().err.splitlines() == [
        "dynapipe launch: b was lost; restart 1 of 1 in 1 s, from iter_4",
        "dynapipe launch: b has not answered for 1 s: waiting, for at most 599 s more",
        "dynapipe launch: b has not answered for 61 s: waiting, for at most 539 s more",
    ]


def test_a_host_that_stays_away_is_replaced_by_a_spare_and_serves_as_one_once_it_is_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = Simulated([(75, 4), (75, 5), (0, 9)], {B: 150.0})
    assert job.run(spares="c") == NodeEnd(0)
    job.away_until_s[C] = 1e9
    assert [hosts for _, hosts in job.starts] == ["ab", "ac", "ac"]
    assert "dynapipe launch: c takes the place of b, which stays away\n" in capfd.readouterr().err
    job = Simulated([(75, 4), (75, 5), (0, 9)], {B: 150.0, C: 0.0})
    job.start = lambda hosts, start=job.start: job.away_until_s.update({C: 1e9} if C in hosts else {}) or start(hosts)  # type: ignore[method-assign, misc]
    assert job.run(spares="c") == NodeEnd(0)
    assert [hosts for _, hosts in job.starts] == ["ab", "ac", "ab"]


@pytest.mark.parametrize(
    ("spares", "says"), [("", "there are no --spares"), ("c", "no spare host is left that answers")]
)
def test_a_job_whose_hosts_stay_away_ends_and_says_what_goes_on(spares: str, says: str) -> None:
    job = Simulated([(75, 4)], {B: 1e9, C: 1e9})
    end = job.run(spares=spares)
    assert (end.status, len(job.starts)) == (75, 1)
    assert end.cause.startswith(f"b has not answered for 100 s, and {says}: look there; the same command goes on")
    assert job.now_s == pytest.approx(100.0)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[dict[str, str]], list[str]]:
    """A shell that runs what it is told on this machine, after what is given for a host; `cut` ones cannot connect."""

    def made(before: dict[str, str]) -> list[str]:
        cases = "".join(f"{name}) {line};; " for name, line in before.items())
        (tmp_path / "into").write_text(f'#!/bin/sh\nname=$1; shift\ncase $name in {cases}esac\nexec "$@"\n')
        (tmp_path / "into").chmod(0o700)
        return [str(tmp_path / "into")]

    return made


DEAD, CUT, HANGS, BARE = "exit 255", "exit 75", "exec sleep 60", "exit 127"


@pytest.mark.parametrize(
    ("before", "away"),
    [
        ({}, ""),
        ({"b": DEAD}, "b"),
        ({"a": DEAD, "b": CUT, "c": CUT}, "a"),  # nobody can reach it
        ({"b": CUT}, "b"),
        ({"b": CUT, "c": CUT}, "a"),  # all others, so it is the first
        ({"b": CUT, "c": DEAD}, "bc"),  # of two hosts the other one
        ({"c": HANGS}, "c"),
        ({"b": BARE}, ""),  # the start says what is wrong there
    ],
)
def test_a_look_finds_hosts_that_do_not_answer_or_are_cut_off(
    before: dict[str, str],
    away: str,
    shell: Callable[[dict[str, str]], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if HANGS in before.values():
        monkeypatch.setattr(host_checks, "_ANSWER_S", 1.0)
    found = hosts_away(shell(before), (A, B, C), "127.0.0.1", free_port())
    assert "".join(sorted(host.name for host in found)) == away


def test_a_host_that_refuses_a_connection_is_there_and_one_without_a_way_to_it_is_not(
    shell: Callable[[dict[str, str]], list[str]],
) -> None:
    assert hosts_away(shell({}), (A, B), "127.0.0.1", free_port()) == frozenset()
    assert hosts_away(shell({}), (A, B), "255.255.255.255", 22) == frozenset({B})
    assert hosts_away(shell({}), (A, B), "nobody.invalid", 22) == frozenset()  # a mistake, which the start names
