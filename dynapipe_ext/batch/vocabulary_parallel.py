"""Topologies whose embedding and output head are split over pipeline ranks, in chains of stages."""

from __future__ import annotations

from dataclasses import replace

from dynapipe_ext.batch.topology import Topology, Vocabulary
from dynapipe_ext.errors import ConfigError


def split_vocabulary(topology: Topology, vocabulary: Vocabulary) -> Topology:
    """Return the topology with its vocabulary split over all pipeline ranks. The output head is on a chain of stages:
    the last one, then new ones on the other ranks. For "both" a chain of new embedding stages ends in the first stage.
    A chain goes up or down the ranks, between neighbours if the layers end on the first or the last rank.

    Raises ConfigError for one pipeline rank, and for a topology whose vocabulary is split already.

    >>> split_vocabulary(Topology(pp=3), "head").placement
    (0, 1, 2, 1, 0)
    >>> split_vocabulary(Topology(pp=3, placement=(0, 1, 2, 2, 1, 0)), "both").placement
    (2, 1, 0, 1, 2, 2, 1, 0, 1, 2)
    """
    if vocabulary == "whole":
        return topology
    if topology.vocabulary != "whole":
        raise ConfigError(f"the vocabulary of this topology is already split ({topology.vocabulary}): give layers")
    ranks, layers = topology.stage_ranks, topology.layers_per_stage
    head = _list_other_ranks(topology.pp, ranks[-1])
    embedding = _list_other_ranks(topology.pp, ranks[0])[::-1] if vocabulary == "both" else ()
    if layers:
        layers = (0,) * len(embedding) + layers + (0,) * len(head)
    return replace(topology, placement=embedding + ranks + head, layers_per_stage=layers, vocabulary=vocabulary)


def gather_vocabulary(topology: Topology) -> Topology:
    """Return only the stages with layers, embedding and output head unsplit: the inverse of `split_vocabulary`.

    >>> gather_vocabulary(split_vocabulary(Topology(pp=3), "both"))
    Topology(tp=1, pp=3, dp=1, layers_per_stage=(), placement=(), width=1, vocabulary='whole')
    """
    held = slice(topology.layer_stages.start, topology.layer_stages.stop)
    ranks, layers = topology.stage_ranks[held], topology.layers_per_stage[held]
    placement = () if ranks == tuple(range(topology.pp)) else ranks
    return replace(topology, placement=placement, layers_per_stage=layers, vocabulary="whole")


def require_whole_vocabulary(topology: Topology, who: str) -> None:
    """Raise ConfigError, with `who` as its subject, if the vocabulary is split over pipeline ranks."""
    if topology.vocabulary != "whole":
        raise ConfigError(
            f"vocabulary {topology.vocabulary!r} is split over pipeline ranks, which {who} does not support: use"
            " vocabulary 'whole'"
        )


def _list_other_ranks(pp: int, rank: int) -> tuple[int, ...]:
    """Return all but one rank in the order of a chain that begins next to it."""
    others = (one for one in range(pp) if one != rank)
    return tuple(sorted(others, reverse=rank == pp - 1))
