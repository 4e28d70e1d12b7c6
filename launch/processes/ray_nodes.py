"""The nodes of a job on a Ray cluster: a placement group of one bundle a node, with an actor that runs the node's line.

Actors end with the process that made them, and what they run with them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dynapipe_ext.errors import ConfigError, ExecutionError
from dynapipe_ext.executor.parent_death import before_exec
from dynapipe_ext.launch.processes.agent import LOST_STATUS
from dynapipe_ext.launch.processes.nodes import SAVE_ORDER, exit_status

_PLACE_S = 60.0
_ANSWER_S = 30.0
_END_S = 5.0


class RayNodes:
    """`num_nodes` different nodes of the cluster at `address` ("auto": the one of this machine; None starts one here,
    unless Ray is connected already), each with room for `num_ranks`: as many GPUs where the cluster has any, else CPUs.

    Errors: ConfigError without the package, where the address does not answer, or where there is no such room.
    """

    def __init__(self, num_nodes: int, num_ranks: int, address: str | None) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError:
            raise ConfigError('--ray needs Ray: pip install "dynapipe-ext[ray]"') from None
        self._ray: Any = ray
        if not self._ray.is_initialized():
            options = {"include_dashboard": False} if address is None else {"address": address}
            try:
                self._ray.init(logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or "this machine"
                raise ConfigError(f"Ray does not start at {where} ({error}): check --ray-address") from None
        room = {"CPU": 1, "GPU": num_ranks} if self._ray.cluster_resources().get("GPU") else {"CPU": num_ranks}
        self._group = self._ray.util.placement_group([room] * num_nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(_PLACE_S):
            self._ray.util.remove_placement_group(self._group)
            wanted = " and ".join(f"{number} {kind}" for kind, number in room.items())
            raise ConfigError(
                f"the Ray cluster has no {num_nodes} nodes with {wanted} each that are free: look at `ray status`, or"
                " ask for fewer"
            )
        actor = self._ray.remote(NodeActor)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=room["CPU"],
                num_gpus=room.get("GPU", 0),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},  # else all CPUs of the actor a rank
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i),
            ).remote()
            for i in range(num_nodes)
        ]
        self._ended: dict[str, int] = {}

    @property
    def first_address(self) -> str:
        try:
            return str(self._ray.get(self._actors[0].address.remote(), timeout=_PLACE_S))
        except self._ray.exceptions.RayError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise ExecutionError(f"the first node does not answer ({reason}): look at `ray status`") from error

    def start(self, lines: Sequence[str]) -> None:
        for actor, line in zip(self._actors, lines, strict=True):
            actor.start.remote(line)  # `ended` tells of those that cannot

    def ended(self, wait_s: float) -> Mapping[str, int]:
        time.sleep(wait_s)
        for name, actor in self._named():
            if name not in self._ended:
                try:
                    code = self._ray.get(actor.poll.remote(), timeout=_ANSWER_S)
                except self._ray.exceptions.RayError:  # the actor has gone, or its node
                    code = LOST_STATUS
                if code is not None:
                    self._ended[name] = exit_status(code)
        return self._ended

    def save(self) -> None:
        for _, actor in self._named():
            actor.tell.remote(SAVE_ORDER)

    def close(self) -> None:
        for _, actor in self._named():
            actor.close.remote()
        deadline_s = time.monotonic() + _END_S
        while len(self.ended(_END_S / 50)) < len(self._actors) and time.monotonic() < deadline_s:
            pass
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"Ray node {i}", actor) for i, actor in enumerate(self._actors)]


class NodeActor:
    """On a node: a shell that runs what it is given, with an input that stays open until `close`."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(["sh", "-s"], stdin=subprocess.PIPE, preexec_fn=before_exec())

    def address(self) -> str:
        from ray import util

        services: Any = util
        return str(services.get_node_ip_address())

    def start(self, line: str) -> None:
        self.tell(f"{line}\n".encode())

    def tell(self, words: bytes) -> None:
        assert self._shell.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self._shell.stdin.write(words)
            self._shell.stdin.flush()

    def poll(self) -> int | None:
        return self._shell.poll()

    def close(self) -> None:
        assert self._shell.stdin is not None
        with suppress(BrokenPipeError):
            self._shell.stdin.close()
