"""A whole head, half layers and a head over the pipeline ranks, planned beside one another.

    python tests/bench/spread.py [--tables ../shared] [--models NAME …] [--pp N …] [--machine TEXT]

Counted models, 64k tokens a replica of public lengths cut at 2,048, packed rows, simulated. "whole": whole layers where
they leave the busiest rank the least work; "half": the same in halves; "head": that, and the head over all ranks. The
limit is 30 GB above the states of even layers. `over_even`: makespan over all work of the plan / ranks (of the whole
head's costs, for all ways); `busiest`: the busiest rank's work over the mean.

With `--tables`, GPT batches with reference plans on published A100 layer costs: of the room between the reference and
the bound of even layers, one stage a rank, the share that plans with embedding and head over all ranks close, on the
placement that is best for the batches (plans.py has the others). These plans are judged, in the judge's form.
Writes results/spread.json, of which it keeps the rows of models and ranks that are not named.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from contenders import provenance
from judged import CASES, MEMORY_GB, Bench, Case, samples_of
from proven import planned_step

from dynapipe_ext.batch.micro_batches import SampleLength, sample_lengths
from dynapipe_ext.batch.topology import PlacementName, Topology, place_stages
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.data.shipped_lengths import SOURCE, shipped_lengths
from dynapipe_ext.errors import PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

FORMAT, RESULT = "dynapipe-spread/1", Path(__file__).parent / "results" / "spread.json"
TOKENS, LONGEST, ROOM_BYTES = 65_536, 2048, 30e9
WAYS = ("whole", "half", "head")


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    architecture: Architecture
    tp: int


MODELS = (
    Model("Llama 3 8B", preset("llama-3-8b"), 2),
    Model("Gemma 2 9B, head of its own", replace(preset("gemma-2-9b"), tied_embeddings=False), 2),
    Model("Llama 3 70B", preset("llama-3-70b"), 8),
)


def rank_work(costs: CostModel, topology: Topology, samples: Sequence[SampleLength]) -> np.ndarray:
    """Nanoseconds of every pipeline rank with all samples as one padded row each."""
    rows = costs.evaluate_shapes(np.ones(len(samples), int), [sample.encoder for sample in samples])
    work = (rows.forward_ns + rows.backward_ns).sum(axis=1)
    total: np.ndarray = np.bincount(topology.stage_ranks, weights=work, minlength=topology.pp)
    return total


def balanced(costs: CostModel, topology: Topology, samples: Sequence[SampleLength], step: float) -> Topology:
    """Layers moved from the busiest rank to the idlest, `step` at a time, for as long as the busiest have less."""
    while True:
        work = rank_work(costs.with_topology(topology)[0], topology, samples)
        layers = list(topology.layers_per_stage)
        giver = max(topology.stages_of(int(work.argmax())), key=lambda stage: layers[stage])
        taker = topology.stages_of(int(work.argmin()))[0]
        if layers[giver] <= step:
            return topology
        layers[giver], layers[taker] = layers[giver] - step, layers[taker] + step
        moved = replace(topology, layers_per_stage=tuple(layers))
        if sorted(rank_work(costs.with_topology(moved)[0], moved, samples), reverse=True) >= sorted(work, reverse=True):
            return topology
        topology = moved


def placed(way: str, costs: CostModel, even: Topology, samples: Sequence[SampleLength]) -> Topology:
    match way:
        case "head":
            return balanced(costs, split_vocabulary(even, "head"), samples, 0.5)
        case "half":
            return balanced(costs, balanced(costs, even, samples, 1), samples, 0.5)
        case _:
            return balanced(costs, even, samples, 1)


def work_ns(plan: StepPlan) -> int:
    return sum(int((one.forward_ns + one.backward_ns).sum()) for one in plan.costs)


def counted_rows(
    models: Sequence[Model], ranks: Sequence[int], samples: Sequence[SampleLength]
) -> Iterator[dict[str, Any]]:
    placements: tuple[PlacementName, ...] = ("linear", "v")
    for model, pp, name, split in product(models, ranks, placements, (False, True)):
        if len(place_stages(name, pp)) <= model.architecture.num_layers:
            yield from counted_ways(model, pp, name, split, samples)


def counted_ways(
    model: Model, pp: int, name: PlacementName, split: bool, samples: Sequence[SampleLength]
) -> Iterator[dict[str, Any]]:
    """One model on one placement, each way planned once."""
    placement = () if name == "linear" else place_stages(name, pp)
    even = Topology(tp=model.tp, pp=pp, placement=placement).with_layers(model.architecture.num_layers)
    costs = AnalyticCosts(
        model.architecture.padded(), even, flops_per_s=400e12, split_backward=split, sequence_parallel=True
    )
    limit_bytes = max(sum(int(costs.states.device.total[s]) for s in even.stages_of(rank)) for rank in range(pp))
    for way in WAYS:
        topology = placed(way, costs, even, samples)
        planner = Planner(
            topology, costs.with_topology(topology)[0], limit_bytes + ROOM_BYTES, split_backward=split, layout="packed",
            pad_multiple=model.tp,
        )  # fmt: skip
        row: dict[str, Any] = {"model": model.name, "pp": pp, "placement": name, "split": split, "way": way}
        row["busiest"] = float(rank_work(planner.costs, topology, samples).max() * pp
                               / rank_work(planner.costs, topology, samples).sum())  # fmt: skip
        try:
            plan = planned_step(planner, samples).step_plan
        except PlanError as error:
            yield row | {"refused": str(error)}
            continue
        whole = costs.evaluate(plan.batch.micro_batches)
        even_ns = int((whole.forward_ns + whole.backward_ns).sum()) / pp
        yield row | {
            "layers": list(topology.layers_per_stage),
            "makespan_s": plan.makespan_s,
            "over_even": plan.makespan_ns / even_ns,
            "over_own_work": plan.makespan_ns * pp / work_ns(plan),
            "over_bound": plan.makespan_s / plan.lower_bound_s,
            "micro_batches": len(plan.batch.micro_batches),
        }


def table_rows(shared: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Shares of the room, means over the batches of a file, of a vocabulary over all ranks: layers are even beside it.
    Of each file's best placement the plans are judged."""
    bench = Bench(shared, scratch, 1)
    for case in CASES:
        if case.closed is None:  # pairs, whose stages keep the head whole
            continue
        for split in (False, True):
            planner = Planner(
                case.topology, bench.costs(case), MEMORY_GB * 10**9, pad_multiple=1, split_backward=split
            )  # fmt: skip
            batches = [samples_of(case, batch) for batch in bench.batches(case)]
            spread = [spread_planner(case, planner, name) for name in get_args(PlacementName)]
            plans = [[planned_step(one, samples).step_plan for samples in batches] for one in spread]
            least = min(range(len(spread)), key=lambda k: sum(plan.makespan_ns for plan in plans[k]))
            whole = [plan_json(planned_step(planner, samples).step_plan, planner.topology) for samples in batches]
            bounds_s = [judged(bench, case, i, plan)["batch_bound_s"] for i, plan in enumerate(whole)]
            yield table_row(bench, case, spread[least].topology, split, plans[least], bounds_s)


def spread_planner(case: Case, planner: Planner, name: PlacementName) -> Planner:
    placement = () if name == "linear" else place_stages(name, case.topology.pp)
    topology = split_vocabulary(replace(case.topology, placement=placement).with_layers(case.layers), "both")
    return replace(planner, topology=topology, costs=planner.costs.with_topology(topology)[0])


def table_row(
    bench: Bench, case: Case, topology: Topology, split: bool, plans: Sequence[StepPlan], bounds_s: Sequence[float]
) -> dict[str, Any]:
    shares, distances, simulated = [], [], []
    for index, (batch, plan, bound_s) in enumerate(zip(bench.batches(case), plans, bounds_s, strict=True)):
        verdict = judged(bench, case, index, judged_form(plan_json(plan, topology), topology))
        reference_s = max(batch["makespan_ms"]) / 1e3
        assert verdict["valid"], verdict["errors"]
        shares.append((reference_s - verdict["makespan_s"]) / (reference_s - bound_s))
        distances.append(plan.makespan_ns * topology.pp * topology.dp / work_ns(plan))
        simulated.append(plan.makespan_s / verdict["makespan_s"])
    return {
        "case": case.name,
        "split": split,
        "placement": topology.placement_name,
        "room_closed": statistics.fmean(shares),
        "over_own_work": statistics.fmean(distances),
        "simulated_over_judged": max(simulated),
    }


def judged(bench: Bench, case: Case, index: int, plan: dict[str, Any]) -> dict[str, Any]:
    path = bench.scratch / "plan.json"
    path.write_text(json.dumps(plan))
    return bench.judge(case, index, path)


def judged_form(plan: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """A plan with the vocabulary over its ranks as the judge numbers its stages: those of layers, and behind them a
    part of the head on each rank, at once and not in a chain. Parts of an embedding take no time there."""
    held = slice(topology.layer_stages.start, topology.layer_stages.stop)
    ranks, last = topology.stage_ranks[held.start :], held.stop - held.start - 1

    def actions(name: str) -> list[str]:
        stage_text, kind, m = re.fullmatch(r"(\d+)([FBIW])(\d+)", name).groups()  # type: ignore[union-attr]
        stage = int(stage_text) - held.start
        if stage < last:
            return [f"{stage}{kind}{m}"] if stage >= 0 else []
        part = f"{last + 1 + ranks[stage]}{kind}{m}"
        own = [f"{stage}{kind}{m}"] if stage == last else []
        return [*own, part] if kind == "F" else [part, *own]

    layers = plan["topology"]["layers_per_stage"][held]
    shape = {name: value for name, value in plan["topology"].items() if name != "vocabulary"}
    replicas = []
    for replica in plan["replicas"]:
        schedule = {
            **replica["schedule"],
            "stages": [[one for name in rank for one in actions(name)] for rank in replica["schedule"]["stages"]],
            "placement": list(topology.stage_ranks[held]),
        }
        replicas.append({**replica, "schedule": schedule})
    return {**plan, "topology": {**shape, "layers_per_stage": layers, "head": "spread"}, "replicas": replicas}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="folder above data/reference_plans and data/a100_layer_costs")
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS], help="that are planned")
    parser.add_argument("--pp", nargs="*", type=int, default=[4, 8, 16])
    parser.add_argument("--machine", default="", help="what to call this machine")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"counted": [], "tables": []}
    result |= {"format": FORMAT, **provenance(args.machine), "lengths": f"{SOURCE}, cut at {LONGEST}", "tokens": TOKENS}
    drawn = shipped_lengths(TOKENS, most=LONGEST)[:, 0]
    samples = sample_lengths(drawn[: int(np.searchsorted(np.cumsum(drawn), TOKENS))].tolist())
    kept = [row for row in result["counted"] if row["model"] not in args.models or row["pp"] not in args.pp]
    result["counted"] = kept
    for row in counted_rows([model for model in MODELS if model.name in args.models], args.pp, samples):
        result["counted"].append(shown(row))
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if args.tables:
        with tempfile.TemporaryDirectory() as scratch:
            result["tables"] = list(map(shown, table_rows(args.tables, Path(scratch))))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def shown(row: dict[str, Any]) -> dict[str, Any]:
    print(" ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in row.items() if k != "layers"), flush=True)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
