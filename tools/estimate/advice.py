"""What would make a model train on a cluster where nothing fits, or only with more memory than hosts usually have."""

from __future__ import annotations

from collections.abc import Iterator

from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, RECIPES
from dynapipe_ext.tools.estimate.ranking import Estimate

_GB = 1e9
_STATES_SHARE = 0.8  # of a device's memory, so that activations have some


def advice(found: Estimate) -> Iterator[str]:
    """Lines with figures: more devices, smaller states, fewer trained parameters. None where an option is realistic."""
    cluster, question = found.question.cluster, found.question
    if found.options and found.options[0].host_bytes_per_node <= cluster.usual_host_bytes:
        return
    room = _STATES_SHARE * cluster.limit_bytes
    of_states = sum(BYTES_PER_PARAMETER[question.states_recipe])
    nodes = _nodes(found, of_states, room)
    if nodes > cluster.nodes:
        yield f"{nodes:,} nodes would hold the states of ZeRO 3 without offload in {_STATES_SHARE:.0%} of their devices"
    for recipe in RECIPES if question.precision != "fp32" else ():
        num_bytes = sum(BYTES_PER_PARAMETER[recipe])
        if (
            "fp32" not in (recipe, question.precision)
            and num_bytes < of_states
            and (fewer := _nodes(found, num_bytes, room)) < nodes
        ):
            yield f"--states {recipe} keeps {num_bytes} bytes a parameter instead of {of_states}: {fewer:,} nodes"
    too_long = not found.options and "the longest sample does not fit even alone" in found.dropped.counts
    if too_long and max(question.limits.cp) == 1:
        yield "--cp 2,4,8 divides every sample over ranks (elsewhere: dynapipe train has no context parallelism)"
    weights = BYTES_PER_PARAMETER[question.states_recipe][0]
    share = weights * found.num_parameters / cluster.world_size
    if share <= room:
        yield (
            f"LoRA (dynapipe train --lora) keeps little but the weights, {share / _GB:,.1f} GB of a device"
            + " under --pp or ZeRO 3" * (cluster.world_size > 1)
        )
    else:
        yield f"the weights alone are {share / _GB:,.1f} GB of a device: LoRA would not help, more devices would"


def _nodes(found: Estimate, bytes_per_parameter: int, room: float) -> int:
    of_a_node = room * found.question.cluster.gpus_per_node
    return -(-bytes_per_parameter * found.num_parameters // int(of_a_node))
