"""Plans are the same to the byte on every machine and compiler: digests of proven steps, next to this file.

    python -m tests.golden.test_plan_digests --write

A digest covers the plan's micro-batches, order and predictions, and the signed instructions of all ranks. A change of
the search that is meant to change plans writes the file again, and its commit says what plans gained or lost.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.wire import encode_all
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner

DIGESTS = Path(__file__).parent / "digests.json"
_KEY = bytes(32)
_FORMAT = ActivationFormat(4096, "bfloat16")
_EFFORT = 400


def digest_of(planner: Planner, samples: list[SampleLength]) -> str:
    proven = prove_step(planner, samples, step=3)
    plans = [plan for replica in proven.plans for plan in replica]
    digest = hashlib.sha256()
    for encoded in encode_all(plans, _KEY, contexts=[b"plan"] * len(plans)):
        digest.update(encoded)
    return digest.hexdigest()[:16]


@cache
def lengths(count: int, *, longest: int = 2048) -> tuple[int, ...]:
    """Lengths of many tasks: most short, few long. Integer arithmetic only, so that no library's `exp` decides them."""
    draws = np.random.default_rng(7).integers(0, 1 << 16, count)
    return tuple(8 + int(draw**4 * (longest - 8) >> 64) for draw in map(int, draws))


def _topology(name: str, **sizes: int) -> Topology:
    placement = () if name == "linear" else place_stages(name, 4)
    return Topology(**({"pp": 4, "dp": 2} | sizes), placement=placement)


def _tokens(topology: Topology) -> CostModel:
    return TokenCosts(
        topology.num_stages,
        ns_per_token=18_000,
        ns_per_token_squared=2.0,
        overhead_ns=3_000_000,
        bytes_per_token=2_000_000,
        static_bytes=8_000_000_000,
        transfer_ns_per_token=300,
    )


def _analytic(topology: Topology, **changes: Any) -> AnalyticCosts:
    return AnalyticCosts(
        preset("llama-2-7b"), topology, flops_per_s=350e12, overhead_ns=100_000, layer_overhead_ns=60_000, **changes
    )


_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"split_backward": True},
    {"replica_counts": "equal", "max_tokens": 2500},
    {"max_tokens": 2500},
    {"num_cores": 2},
    {"noise": 0.2},
    {"seed": 7, "loss_norm": "samples"},
)


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    samples = sample_lengths(list(lengths(120)))

    def case(planner: Planner, samples: list[SampleLength] = samples) -> Callable[[], str]:
        return lambda: digest_of(planner, samples)

    for name in ("linear", "interleaved", "v"):
        topology = _topology(name)
        base = Planner(
            topology, _tokens(topology), 36e9, effort=_EFFORT, format=_FORMAT, collectives=ReplicaCollectives()
        )
        for layout in ("padded", "packed"):
            for changes in _CHANGES if name == "linear" else _CHANGES[:3]:
                yield f"{name} {layout} {changes}", case(replace(base, layout=layout, **changes))
        yield f"{name} forward only", case(base.for_forwards())
    topology = _topology("linear")
    base = Planner(topology, _tokens(topology), 60e9, effort=_EFFORT, format=_FORMAT, collectives=ReplicaCollectives())
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        yield f"schedule {schedule}", case(replace(base, schedule=schedule, replica_counts="equal"))
    for rule in ("dynapipe", "batch-max", "packed-balanced"):
        layout: Any = "packed" if rule.startswith("packed") else "padded"
        yield f"rule {rule}", case(replace(base, split_policy=rule, layout=layout, max_tokens=4096))
    for name in ("linear", "v"):
        topology = _topology(name, tp=2)
        for layout in ("padded", "packed"):
            for changes in ({"recompute": "auto"}, {"recompute": "none", "split_backward": True}):
                planner = Planner(
                    topology, _analytic(topology), 60e9, layout=layout, effort=_EFFORT, format=_FORMAT, **changes
                )
                yield f"llama {name} {layout} {changes}", case(planner)
    topology = _topology("linear", tp=2)
    tight = Planner(topology, _analytic(topology), 22e9, effort=_EFFORT, format=_FORMAT)
    yield "llama recomputes", case(tight)
    long = sample_lengths([*lengths(60), 30_000, 9_000])
    for pieces in (1024, "auto"):
        planner = replace(tight, memory_limit_bytes=60e9, layout="packed", pieces=pieces)
        yield f"llama pieces {pieces}", case(planner, long)
    many = Planner(
        Topology(pp=2, dp=24), _tokens(Topology(pp=2)), 36e9, effort=_EFFORT, format=_FORMAT,
        collectives=ReplicaCollectives(),
    )  # fmt: skip
    yield "many replicas", case(many, sample_lengths(list(lengths(1200))))
    pairs = sample_lengths([(n, 1 + n // 7) for n in lengths(80)])
    for name in ("linear", "v"):
        topology = _topology(name, tp=2)
        costs = AnalyticCosts(preset("t5-11b"), topology, flops_per_s=350e12, overhead_ns=0, layer_overhead_ns=60_000)
        for split in (False, True):
            form = ActivationFormat(1024, "bfloat16", first_decoder_stage=topology.num_stages // 2)
            planner = Planner(
                topology, costs, 140e9, split_backward=split, effort=_EFFORT, format=form,
                collectives=ReplicaCollectives(),
            )  # fmt: skip
            yield f"t5 {name} split={split}", case(planner, pairs)


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_recorded_one(name: str) -> None:
    assert CASES[name]() == json.loads(DIGESTS.read_text())[name]


def test_every_recorded_plan_is_made() -> None:
    assert json.loads(DIGESTS.read_text()).keys() == CASES.keys()


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    DIGESTS.write_text(json.dumps({name: digest() for name, digest in CASES.items()}, indent=1) + "\n")
