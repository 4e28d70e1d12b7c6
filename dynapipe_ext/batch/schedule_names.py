"""Names of schedules, and the placements under which they run."""

from __future__ import annotations

from typing import Literal

from dynapipe_ext.batch.topology import PlacementName, Topology
from dynapipe_ext.errors import ConfigError

ScheduleName = Literal["adaptive", "1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "cyclic"]
# Every backward as I and W, asked for or not.
SPLIT_SCHEDULES: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", "zb-v", "v-half")


def own_placement(schedule: ScheduleName) -> PlacementName:
    """The placement under which a schedule runs where none is named.

    >>> own_placement("zb-v"), own_placement("adaptive")
    ('v', 'linear')
    """
    match schedule:
        case "interleaved-1f1b":
            return "interleaved"
        case "zb-v" | "v-half":
            return "v"
        case _:
            return "linear"


def check_placed(schedule: ScheduleName, topology: Topology, where: str = "") -> None:
    """Refuse stages on other ranks than the schedule has them; the adaptive one takes any. Errors: ConfigError."""
    placement, needed = topology.placement_name, own_placement(schedule)
    if schedule == "adaptive":
        return
    match needed:
        case "linear":
            is_placed, stages = placement == needed, "one stage a rank"
        case "interleaved":
            is_placed, stages = topology.is_interleaved, "interleaved stages"
        case "v":
            is_placed, stages = placement == "v, 2 stages a rank", "two stages a rank in a V"
    if not is_placed:
        raise ConfigError(
            f"{where}schedule {schedule!r} is for {stages}, but the placement is {topology.stage_ranks} ({placement}):"
            f" take placement {needed!r}, or the adaptive schedule, which runs under any"
        )


def check_fill_waits(fill_waits: bool, schedule: ScheduleName, split_backward: bool, where: str = "") -> None:
    """Refuse to fill waits where there is nothing to fill them with. Errors: ConfigError."""
    if fill_waits and not (split_backward if schedule == "adaptive" else schedule in SPLIT_SCHEDULES):
        raise ConfigError(
            f"{where}fill_waits needs weight gradients (W) of their own, but schedule {schedule!r} with split_backward"
            f" {split_backward} has none: take the adaptive schedule with split_backward, or one of"
            f" {', '.join(SPLIT_SCHEDULES)}"
        )
