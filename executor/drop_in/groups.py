"""The process groups of a call: those that the loop gives, else Megatron's own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dynapipe_ext.errors import ConfigError

_NEEDED = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")  # what Megatron's schedules ask of a collection


def groups_of_call(pg_collection: Any, p2p_communicator: Any) -> Any:
    """A ProcessGroupCollection: the one given, else that of megatron.core.parallel_state.

    Of a communicator its group is taken, which must be the collection's; tensors travel over groups of this package. As
    with Megatron's schedules, with several stages both are given, or none. Errors: ConfigError.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if pg_collection is None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
    else:
        for name in _NEEDED:
            if not hasattr(pg_collection, name):
                raise ConfigError(
                    f"pg_collection is a {type(pg_collection).__name__} without {name}: give a ProcessGroupCollection"
                    f" with {', '.join(_NEEDED)}"
                )
        groups = pg_collection
    if groups.pp.size() == 1:
        return groups  # nothing is sent
    if (pg_collection is None) != (p2p_communicator is None):
        alone, missing = ("pg_collection", "p2p_communicator")[:: 1 if p2p_communicator is None else -1]
        raise ConfigError(f"{alone} was given without {missing}: give both, or none")
    if p2p_communicator is not None:
        _check_communicator(p2p_communicator, groups.pp)
    return groups


def ranks_in_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    """The ranks of the groups in which this one computes, sends and reduces."""
    return tuple(
        tuple(dist.get_process_group_ranks(group)) for group in (groups.tp, groups.pp, groups.cp, groups.dp_cp)
    )


def _check_communicator(communicator: Any, pp_group: Any) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    if type(communicator) is not P2PCommunicator:
        raise ConfigError(
            f"p2p_communicator is a {type(communicator).__name__}, whose transfers a plan does not follow: give"
            " megatron-core's own P2PCommunicator"
        )
    sending, holding = (dist.get_process_group_ranks(group) for group in (communicator.pp_group, pp_group))
    if sending != holding:
        raise ConfigError(
            f"p2p_communicator sends among ranks {sending} but pg_collection.pp holds {holding}: make it of that group"
        )
