"""Nodes that one launcher starts: host files, shells in the place of ssh and srun, and what becomes of all of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.processes.agent import NodeEnd
from dynapipe_ext.launch.processes.nodes import Host, OrdersOfStdin, ShellNodes, read_hosts, run_on_nodes, shell_line
from dynapipe_ext.launch.processes.signals import ending_signals_raise
from tests.support.limits import LIMIT_S

HOSTS = (Host("a"), Host("me@b"), Host("c"))


def shell(folder: Path, name: str, text: str) -> Path:
    place = folder / name
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o700)
    return place


@pytest.fixture
def nodes(tmp_path: Path) -> ShellNodes:
    """Three nodes that are this machine; each runs what it is told in a folder of its own name."""
    return ShellNodes(
        [str(shell(tmp_path, "into", f'mkdir {tmp_path}/$1 && cd {tmp_path}/$1; shift; exec "$@"'))], HOSTS
    )


def test_a_host_file_has_a_name_a_line_and_what_fits_there(tmp_path: Path) -> None:
    for mark in ("", "\ufeff"):  # a byte order mark is in no name
        (tmp_path / "hosts").write_text(mark + "node0 slots=8\n\nme@node1  # as me\n# and no more\n")
        assert read_hosts(tmp_path / "hosts") == (Host("node0", 8), Host("me@node1"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host"),
        ("a\nb 8", "line 2 is 'b 8' but must be a host's name"),
        ("a slots=0", "line 1 is 'a slots=0'"),
        ("a slots=2 b", "line 1"),
        ("-oProxyCommand=x", "line 1"),
        ("a\na", "line 2 names a again"),
    ],
)
def test_a_wrong_line_of_a_host_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hosts(tmp_path / "nothere")


def after(name: str, text: str) -> str:
    """What a node runs that ends once another one has made a file."""
    return f"while [ ! -e ../{name} ]; do sleep 0.05; done; {text}"


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ((0, 0, 0), NodeEnd(0)),
        ((0, 75, 75), NodeEnd(75, "me@b ended with exit status 75, c ended with exit status 75")),
        ((0, (75, "x was killed"), 75), NodeEnd(75, "x was killed")),
        (((75, "peer is gone"), (2, "no such key"), (75, "late")), NodeEnd(2, "no such key")),  # for which others end
        (((2, "no such file"),) * 3, NodeEnd(2, "no such file")),  # once, though all say it
        ((75, 127, 75), NodeEnd(2, "me@b: folder or Python of this job cannot be used there (see above): the same")),
        (((75, "a"), (75, "b"), (75, "c")), NodeEnd(75, "a; b; c")),
        (((75, "a\ndynapipe: error: b"), (75, "c"), (75, "d")), NodeEnd(75, "a; b; c")),  # and the last by itself
        ((138, 138, 143), NodeEnd(143)),
    ],
)
def test_a_job_ends_as_the_node_that_explains_the_others_and_in_its_words(
    ends: Sequence[int | tuple[int, str]], end: NodeEnd, nodes: ShellNodes, capfd: pytest.CaptureFixture[str]
) -> None:
    """What else nodes say is printed as it comes. They speak in turn."""
    lines, others = [], []
    for number, (way, host) in enumerate(zip(ends, HOSTS, strict=True)):
        status, error = way if isinstance(way, tuple) else (way, "")
        unnamed = [f"dynapipe launch: {host.name}: {text}" for text in error.split("\ndynapipe: error: ") if text]
        others += [line for line in unnamed if line.partition(": ")[2].partition(": ")[2] not in end.cause.split("; ")]
        error = f"printf '%s\\n' {shlex.quote('dynapipe: error: ' + error)} >&2; " if error else ""
        in_turn = after(f"said-{number - 1}", error) if number and error else error
        lines.append(f"echo {host.name} in ${{PWD##*/}} >&2; {in_turn}touch ../said-{number}; exit {status}")
    reached = run_on_nodes(nodes, lines, 5.0)
    assert (reached.status, reached.cause[: len(end.cause) or None]) == (end.status, end.cause)
    said = capfd.readouterr().err
    assert sorted(said.splitlines()) == sorted([f"{host.name} in {host.name}" for host in HOSTS] + others)


@pytest.mark.parametrize(
    ("ways", "end"),
    [
        (  # a host that is lost, of which the others know consequences alone
            ("exit 255", after("ended", "say connection closed; exit 1"), after("ended", "say peer is gone; exit 75")),
            (75, ["a ended with exit status 255", "connection closed", "peer is gone"]),
        ),
        (  # a defect, after which a host is given up
            ("say defect; exit 1", after("ended", "exit 255"), after("ended", "exit 75")),
            (1, ["defect", "me@b ended with exit status 255"]),
        ),
    ],
)
def test_the_cause_of_a_job_begins_with_what_came_first(
    ways: Sequence[str], end: tuple[int, list[str]], nodes: ShellNodes, tmp_path: Path
) -> None:
    class Watched(ShellNodes):
        def ended(self, wait_s: float) -> Mapping[str, int]:
            ended = super().ended(wait_s)
            if "a" in ended:
                (tmp_path / "ended").touch()
            return ended

    say = "say() { echo dynapipe: error: $* >&2; }; "
    reached = run_on_nodes(Watched(nodes._shell, HOSTS), [say + way for way in ways], 5.0)
    assert reached.status == end[0]
    assert reached.cause.split("; ")[0] == end[1][0]
    assert sorted(reached.cause.split("; ")) == sorted(end[1])


def test_what_a_node_says_while_it_is_ended_is_not_lost(
    nodes: ShellNodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own error may come later than that of another node, and need not end its line."""
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._TELL_S", 0.2)
    late = "cat > order; printf 'dynapipe: error: no such key' >&2; exit 2"
    early = "echo dynapipe: error: peer is gone >&2; exit 75"
    assert run_on_nodes(nodes, [late, early, "cat > order"], 5.0) == NodeEnd(75, "peer is gone; no such key")
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._TELL_S", 60.0)
    refused = ShellNodes(nodes._shell[:1], (Host("d"), Host("e")))
    lines = ["echo dynapipe: error: peer is gone >&2; exit 75", "sleep 0.5; echo dynapipe: error: no key >&2; exit 2"]
    assert run_on_nodes(refused, lines, 5.0) == NodeEnd(2, "no key")
    assert capfd.readouterr().err == "dynapipe launch: d: peer is gone\n"


def test_a_node_without_the_jobs_folder_or_python_is_a_mistake(nodes: ShellNodes, tmp_path: Path) -> None:
    """In every shell: where `cd` fails, some end with 1 and others with 2."""
    fits, no_folder = shell_line(["true"], tmp_path), shell_line(["true"], tmp_path / "nowhere")
    assert run_on_nodes(nodes, [fits, no_folder, fits], 5.0).cause.startswith("me@b: folder or Python of this job")


def test_when_a_node_has_failed_the_input_of_the_others_ends_and_they_with_it(
    nodes: ShellNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._TELL_S", 0.2)
    lines = ["cat > order; echo over > end", "kill -9 $$", "cat; sleep 60"]
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._END_S", 0.5)  # the last one does not follow its input
    assert run_on_nodes(nodes, lines, 5.0) == NodeEnd(75, "me@b ended with exit status 137")
    assert ((tmp_path / "a" / "order").read_text(), (tmp_path / "a" / "end").read_text()) == ("", "over\n")


@pytest.mark.parametrize(("first", "ending"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_asks_to_save_is_passed_on_to_every_node(
    first: signal.Signals, ending: type[BaseException], nodes: ShellNodes, tmp_path: Path
) -> None:
    number = first

    class Signalled(ShellNodes):
        def ended(self, wait_s: float) -> Mapping[str, int]:
            nonlocal number
            if len(list(tmp_path.glob("*/began"))) == 3:
                os.kill(os.getpid(), number)
                number = signal.SIGTERM  # the second one, while they save, is for nobody
            return super().ended(wait_s)

    signalled = Signalled(nodes._shell, HOSTS)
    with pytest.raises(ending) as caught, ending_signals_raise():
        run_on_nodes(signalled, ["exec sh -c 'touch began; read order; echo $order > order'"] * 3, 5.0)
    assert getattr(caught.value, "code", 143) == 143
    assert [(tmp_path / host.name / "order").read_text() for host in HOSTS] == ["save\n"] * 3


def test_a_signal_that_asks_for_stacks_is_passed_on_and_the_job_goes_on(nodes: ShellNodes, tmp_path: Path) -> None:
    signals = [signal.SIGUSR2]

    class Signalled(ShellNodes):
        def ended(self, wait_s: float) -> Mapping[str, int]:
            if signals and len(list(tmp_path.glob("*/began"))) == 3:
                os.kill(os.getpid(), signals.pop())
            return super().ended(wait_s)

    signalled = Signalled(nodes._shell, HOSTS)
    with ending_signals_raise():
        end = run_on_nodes(signalled, ["exec sh -c 'touch began; read order; echo $order > order'"] * 3, 5.0)
    assert end == NodeEnd(0)
    assert [(tmp_path / host.name / "order").read_text() for host in HOSTS] == ["stacks\n"] * 3


def test_orders_on_standard_input_come_one_at_a_time_whatever_reads_they_arrive_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        next_order, orders = OrdersOfStdin(), []
        for words in (b"sta", b"cks\nsave\nst", b"range\n", b""):
            os.write(writer, words)
            orders += [next_order(), next_order()]
        os.close(writer)
        assert [*orders, next_order(), next_order()] == ["", "", "stacks", "save", "", "", "", "", "end", "end"]


@pytest.mark.parametrize(
    ("names", "says"),
    [({}, "this is no job of Slurm: start it by sbatch"), ({"SLURM_JOB_NODELIST": "n1"}, "scontrol is not in PATH")],
)
def test_the_slurm_script_says_what_it_misses(names: dict[str, str], says: str, root: Path) -> None:
    job = subprocess.run(
        ["/bin/bash", root / "launch" / "slurm.sh"], env=names | {"PATH": ""}, capture_output=True, timeout=LIMIT_S
    )
    assert job.returncode == 2
    assert says in job.stderr.decode()


def test_the_slurm_script_starts_all_nodes_and_is_queued_again_once_all_have_saved(tmp_path: Path, root: Path) -> None:
    script = root / "launch" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=LIMIT_S)
    shell(tmp_path, "scontrol", f'[ "$1" = show ] && printf "n1\\nn2\\n" || echo "$@" > {tmp_path}/queued')
    shell(
        tmp_path,
        "dynapipe",
        f'echo "$@" > {tmp_path}/arguments; cp "$3" {tmp_path}/hosts\n'
        f"trap 'kill $waiting; exit 138' USR1; sleep 60 & waiting=$!; touch {tmp_path}/began; wait",
    )
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", script, "--config", "my settings.toml"], env={**os.environ, **slurm})
    deadline_s = time.monotonic() + LIMIT_S
    while not (tmp_path / "began").exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT_S) == 138
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert read_hosts(tmp_path / "hosts") == (Host("n1"), Host("n2"))
    said = (tmp_path / "arguments").read_text()
    assert said.endswith(
        " --ssh srun --overlap --cpu-bind=none --nodes 1 --ntasks 1 --nodelist --config my settings.toml\n"
    )
    srun = shell(tmp_path, "srun", 'while [ "$1" != --nodelist ]; do shift; done; shift 2; exec "$@"')
    words = said.partition("--ssh srun ")[2].partition(" --config")[0].split()
    assert run_on_nodes(ShellNodes([str(srun), *words], HOSTS[:2]), ["exit 0", "exit 2"], 5.0) == NodeEnd(2)
