"""Digests of the plans that the benches make: whether a change of the code left every plan equal to the byte.

    python tests/bench/same_plans.py [--shared DIR] [--write] [--only TEXT]

Cases: the judged batches (plans.py: ours, split, placed), whole steps with encoded instructions (scale.py), long tails
(long.py: whole and in pieces), plans by each rule and schedule (contenders.py), forwards alone, adapters, ZeRO,
encoder-decoders, ranks that share cores and fitted costs. A digest is of the plan's JSON, and of the signed bytes of
all ranks' instructions where a step is proven. Compares with results/same_plans.json, or writes it with --write. Exit
status 1 where a plan is another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import long
import scale
from contenders import INTERLEAVED, MEMORY_LIMIT_BYTES, REAL_BYTES, TOPOLOGY, V, cost_model, read_batches, settings
from judged import CASES, Bench, samples_of
from plans import placed, planner_of

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.adjustments import FrozenWeights, adjust, list_times
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.fitting import MeasuredAction, fit_times
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import DynaPipeError, PlanError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.wire import encode_all
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

RESULT = Path(__file__).parent / "results" / "same_plans.json"
_KEY = bytes(32)


def digest_of_plan(planner: Planner, samples: Sequence[SampleLength]) -> str:
    try:
        plan = planner.plan(samples)
    except DynaPipeError as error:
        return f"refused: {error}"
    return hashlib.sha256(text_of_plan(plan, planner).encode()).hexdigest()[:16]


def text_of_plan(plan: StepPlan, planner: Planner) -> str:
    """The plan's JSON; of what that format cannot hold, the micro-batches, orders and times."""
    try:
        return json.dumps(plan_json(plan, planner.topology))
    except PlanError:
        samples = [[(m.samples, m.rows, m.recompute) for m in one.micro_batches] for one in plan.batch.replicas]
        orders = [[[str(action) for action in rank] for rank in one.ranks] for one in plan.schedules]
        return repr((samples, orders, plan.makespan_s))


def digest_of_step(planner: Planner, samples: Sequence[SampleLength]) -> str:
    """Of the plan as it is proven, and of all ranks' instructions."""
    try:
        proven = prove_step(planner, samples, step=3)
    except DynaPipeError as error:
        return f"refused: {error}"
    digest = hashlib.sha256(text_of_plan(proven.step_plan, planner).encode())
    every = [plan for replica in proven.plans for plan in replica]
    for one in encode_all(every, _KEY, contexts=[b"plan"] * len(every)):
        digest.update(one)
    return digest.hexdigest()[:16]


def cases(shared: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    bench = Bench(shared, scratch, 1)
    for case in CASES:
        batches = bench.batches(case)
        for split in (False, True):
            planner = planner_of(case, bench.costs(case), split=split)
            for index, batch in enumerate(batches[:3]):
                samples = samples_of(case, batch)
                yield f"{case.name} {index} split={split}", partial(digest_of_plan, planner, samples)
                yield (
                    f"{case.name} {index} split={split} placed",
                    lambda p=planner, s=samples, b=batches, c=case: digest_of_plan(placed(p, b[:2], c), s),
                )
    for one in scale.cases(shared):
        yield f"scale {one.name}", partial(digest_of_step, one.planner, one.samples)
    for case in long.cases(shared):
        if case.dp == 2 and case.data in ("tail", "one", "shared"):
            samples = long.lengths(case, shared)
            for pieces in ("off", "auto"):
                planner = Planner(case.costs.topology, case.costs, long.LIMIT_BYTES, layout="packed", pieces=pieces)
                yield f"long {case.model} {case.data} {pieces}", partial(digest_of_plan, planner, samples)
    yield from rules(shared)
    yield from counted(shared)


def rules(shared: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    batch = read_batches(shared, 65_536, limit=1)[0][0]
    samples = sample_lengths(list(batch.lengths))
    for name, topology in (("linear", TOPOLOGY), ("interleaved", INTERLEAVED), ("v", V)):
        measured, _ = cost_model(shared / "data" / "a100_layer_costs", topology)
        tokens, _ = cost_model(None, topology)
        for kind, costs in (("table", measured), ("tokens", tokens)):
            base = Planner(topology, costs, MEMORY_LIMIT_BYTES, format=REAL_BYTES, collectives=ReplicaCollectives())
            for layout in ("padded", "packed"):
                for changes in (
                    {},
                    {"split_backward": True},
                    {"max_tokens": 4096},
                    {"replica_counts": "equal"},
                    {"num_cores": 2},
                    {"recompute": "full"},
                    {"seed": 7, "effort": 500, "loss_norm": "samples"},
                ):
                    said = ", ".join(f"{key}={value}" for key, value in changes.items())
                    planner = replace(base, layout=layout, **changes)
                    yield f"{kind} {name} {layout} {said}", partial(digest_of_step, planner, samples)
            yield f"{kind} {name} forwards", partial(digest_of_step, base.for_forwards(), samples)
            yield (
                f"{kind} {name} forwards packed",
                partial(digest_of_step, replace(base, layout="packed").for_forwards(), samples),
            )
        if name == "linear":
            base = Planner(topology, measured, MEMORY_LIMIT_BYTES, format=REAL_BYTES, collectives=ReplicaCollectives())
            for column in ("padding", "packed 1F1B", "whole rows", "dynapipe"):
                for number, chosen in enumerate(settings(column, [s.encoder for s in samples])):
                    yield f"rule {column} {number}", partial(digest_of_plan, replace(base, **chosen), samples)
            for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
                yield f"schedule {schedule}", partial(digest_of_plan, replace(base, schedule=schedule), samples)


def counted(shared: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Models without measured tables, over what a run may be: adapters, ZeRO, encoder-decoders, exact sums."""
    lengths = scale._many(shared)
    samples, few = lengths[:400], lengths[:60]
    for pp, placement in ((4, "linear"), (4, "v")):
        topology = Topology(tp=2, pp=pp, dp=2, placement=() if placement == "linear" else place_stages(placement, pp))
        dense = AnalyticCosts(
            preset("llama-2-7b"), topology, flops_per_s=350e12, overhead_ns=100_000, layer_overhead_ns=60_000,
            sequence_parallel=True,
        )  # fmt: skip
        form = ActivationFormat(4096, "bfloat16", sequence_shards=2)
        limit = 60 * 10**9
        for name, costs in (
            ("dense", dense),
            ("exact", replace(dense, exact_sums=True)),
            ("zero 2", replace(dense, zero_stage=2)),
            ("zero 3", replace(dense, zero_stage=3)),
            ("unfused", replace(dense, flash=False)),
            ("frozen", adjust(dense, frozen=FrozenWeights((0.1,) * topology.num_stages))),
            ("fitted", fit_times(dense, fitted_actions(dense, topology.num_stages))),
        ):
            for layout in ("padded", "packed"):
                for changes in ({}, {"split_backward": True}, {"pieces": 1024, "layout": "packed"}):
                    planner = Planner(topology, costs, limit, format=form, **({"layout": layout} | changes))
                    yield f"counted {placement} {name} {layout} {changes}", partial(digest_of_step, planner, samples)
                    yield (
                        f"counted {placement} {name} {layout} {changes} tight",
                        partial(digest_of_step, replace(planner, memory_limit_bytes=36e9), few),
                    )
    pairs = sample_lengths([(s.encoder, 1 + s.encoder // 7) for s in samples])
    for name, placement in (("linear", ()), ("v", place_stages("v", 4))):
        topology = Topology(tp=2, pp=4, dp=2, placement=placement)
        costs = AnalyticCosts(preset("t5-11b"), topology, flops_per_s=350e12, overhead_ns=0, layer_overhead_ns=60_000)
        for layout in ("padded", "packed"):
            for split in (False, True):
                planner = Planner(topology, costs, 140e9, layout=layout, split_backward=split)
                yield f"encoder-decoder {name} {layout} split={split}", partial(digest_of_plan, planner, pairs)
    tokens = TokenCosts(4)
    for layout in ("padded", "packed"):
        planner = Planner(TOPOLOGY, tokens, 1e12, layout=layout, format=REAL_BYTES, collectives=ReplicaCollectives())
        yield f"tokens default {layout}", partial(digest_of_step, planner, few)


def fitted_actions(costs: CostModel, num_stages: int) -> list[MeasuredAction]:
    """Actions that took 1.1 to 1.4 times what the costs say, more on later stages."""
    samples = sample_lengths([200 + 37 * i for i in range(16)])
    priced = costs.evaluate(micro_batches := [MicroBatch((sample,), "padded") for sample in samples])
    found = []
    for stage in range(num_stages):
        for letter, times in list_times(priced).items():
            for m, one in enumerate(micro_batches):
                tokens, squares = count_positions(one)
                base_ns = int(times[stage, m])
                shape = (one.rows, one.encoder_len, one.decoder_len)
                measured_ns = base_ns * (11 + stage % 4) // 10
                found.append(
                    MeasuredAction(stage, letter, "none", shape, tokens, squares, base_ns, base_ns, measured_ns)
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=scale.SHARED)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    made: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, digest in cases(args.shared, Path(scratch)):
            if args.only in name:
                made[name] = digest()
                if not args.write and before.get(name) != made[name]:
                    print(f"{name}: {before.get(name)} before, {made[name]} now", flush=True)
    if args.write:
        RESULT.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    other = sum(before.get(name) != digest for name, digest in made.items())
    print(f"{len(made)} plans, {'written' if args.write else f'{other} are others'}")
    return 0 if args.write else int(other > 0)


if __name__ == "__main__":
    sys.exit(main())
