"""What the benchmarks compare: the same batches, costs and memory limit, and one planner setting a column."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias, get_args

from dynapipe_ext.batch.micro_batches import round_up, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, PlacementName, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.errors import DataError, DynaPipeError, PlanError
from dynapipe_ext.executor.proven_step import ProvenStep, prove_step
from dynapipe_ext.launch.job.configured import layers_to_place
from dynapipe_ext.schedules.placements import PlacementSearch, SampledBatches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals
from dynapipe_ext.settings.plan_rules import own_placement

TOPOLOGY = Topology(tp=1, pp=4, dp=2)
INTERLEAVED, V = (replace(TOPOLOGY, placement=place_stages(name, 4)) for name in ("interleaved", "v"))
MEMORY_LIMIT_BYTES = 36e9
FEW_BYTES, REAL_BYTES = ActivationFormat(4), ActivationFormat(4096, "bfloat16")  # of messages: a token's, GPT 6.7B's
TWO_NODES = Links(intra=Link(0, 600e9), inter=Link(10_000, 25e9), ranks_per_node=4)  # PP4 x DP2: ranks 1 and 2 part
RIVALS = {rival.name: rival for rival in list_rivals(TOPOLOGY.pp)}
EVEN, PLACED = "ours, packed, V, split", "ours, packed, placed, split"
COLUMNS = {
    "padding": "padding to the batch maximum, 1F1B",
    **{name: name for name in RIVALS},
    "dynapipe": "DynaPipe's rule",
    "ours": "ours, one stage per rank, full backwards, padded",
    EVEN: "ours, `--layout packed --placement v --split-backward`: even layers in a V, as ZB-V has them",
    PLACED: "ours, `--layout packed --placement auto --split-backward`",
}
Costs: TypeAlias = CostTable | TokenCosts


@dataclass(frozen=True, slots=True)
class Batch:
    """The lengths of one global batch; `reference` is what DynaPipe's own planner made of it, where that is known."""

    lengths: tuple[int, ...]
    reference: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def cost_model(directory: Path | None, topology: Topology = TOPOLOGY, *, apart: bool = False) -> tuple[Costs, str]:
    """GPT 6.7B on the measured A100 table of a directory, or a made-up model; and what to call it.

    With `apart` ranks are on TWO_NODES; the made-up model's messages take no time.
    """
    if directory is not None:
        table = CostTable.read_a100(directory, "gpt_6.7b", topology=topology, num_layers=32)
        return replace(table, links=TWO_NODES if apart else None), "GPT 6.7B, measured A100 layer costs"
    shared = topology.num_stages // topology.pp  # stages that a rank's layers are spread over
    costs = TokenCosts(
        topology.num_stages,
        ns_per_token=18_000 // shared,
        ns_per_token_squared=2.0 / shared,
        overhead_ns=3_000_000 // shared,
        bytes_per_token=2_000_000 // shared,
        static_bytes=16_000_000_000 // shared,
    )
    return costs, "made-up costs (TokenCosts)"


def read_batches(shared: Path | None, tokens: int, *, limit: int = 0) -> tuple[list[Batch], str]:
    """Global batches of about `tokens` real tokens: those of the reference plans, else drawn by our own generator."""
    if shared is None:
        return list(_drawn(tokens, limit or 4)), "lengths in bytes of the project's own generator"
    path = shared / "data" / "reference_plans" / f"gpt_{tokens // 1024}k.json"
    try:
        found = json.loads(path.read_text())
        batches = [Batch(tuple(encoder for encoder, _ in raw["lengths"]), raw) for raw in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__} {error}): give --shared the folder above data/"
        ) from error
    return batches[: limit or None], "lengths of multi-task text (see the reference plans), cut at 2048"


def _drawn(tokens: int, count: int) -> Iterator[Batch]:
    examples = generate_examples(num_samples=count * tokens, seed=0)
    for _ in range(count):
        lengths: list[int] = []
        while sum(lengths) < tokens:
            example = next(examples)
            lengths.append(min(2048, len(f"{example.input}{example.target}".encode())))
        yield Batch(tuple(lengths))


def settings(column: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Planner settings of a column; of several, the fastest plan counts: a rule that leaves a size open is at its best.

    In addition to the columns: whole rows; DynaPipe's split under 1F1B in natural order, and under its cyclic order;
    ours under 1F1B in natural order, with split backwards, under the zero-bubble schedules, in a V, and placed. Those
    with several stages per rank go with `topology_for`.
    """
    if column in RIVALS:
        return [RIVALS[column].rules]
    longest = round_up(max(lengths), 8)
    match column:
        case "padding":
            return [{"split_policy": "batch-max", "schedule": "1f1b"}]
        case "whole rows":
            rows = dict.fromkeys(max(longest, n) for n in (2048, 4096, 8192))
            return [
                {"split_policy": "fixed-rows", "layout": "packed", "schedule": "1f1b", "max_tokens": n} for n in rows
            ]
        case "dynapipe":
            return [{"split_policy": "dynapipe", "schedule": "adaptive"}]
        case "DynaPipe's split, cyclic":
            return [{"split_policy": "dynapipe", "schedule": "cyclic"}]
        case "DynaPipe's split, 1F1B":
            return [{"split_policy": "dynapipe", "schedule": "1f1b"}]
        case "ours, 1F1B":
            return [{"schedule": "1f1b"}]
        case "ours, ZB-H1" | "ours, ZB-H2" | "ours, ZB-V" | "ours, V-Half":
            return [{"schedule": column.removeprefix("ours, ").lower()}]
        case _:
            own, *words = column.split(", ")
            if own != "ours" or not {*words} <= {"packed", "V", "placed", "split"}:
                raise ValueError(column)
            layout = "packed" if "packed" in words else "padded"
            return [{"schedule": "adaptive", "layout": layout, "split_backward": "split" in words}]


def topology_for(column: str, costs: Costs, batches: Sequence[Batch]) -> Topology:
    """TOPOLOGY with the stages of a column on its ranks, for the placed ones as `--placement auto` takes them for the
    batches; costs that cannot be placed get a V."""
    words = column.split(", ")
    if column in RIVALS:
        name = own_placement(RIVALS[column].schedule)
        return {"linear": TOPOLOGY, "interleaved": INTERLEAVED, "v": V}[name]
    if "placed" in words and not isinstance(costs, TokenCosts):
        (options,) = settings(column, batches[0].lengths)
        planner = _planner(TOPOLOGY, costs, MEMORY_LIMIT_BYTES, FEW_BYTES, options)
        sampled = [sample_lengths(batch.lengths) for batch in batches]
        return best_topology(planner, sampled)
    return V if {"V", "placed", "ZB-V", "V-Half"} & {*words} else TOPOLOGY


def best_topology(planner: Planner, batches: SampledBatches) -> Topology:
    """What `--placement auto` takes for these batches, layers in halves where costs price them; each is planned without
    buffers in flight."""

    def over(topology: Topology) -> Planner:
        return replace(planner, topology=topology, costs=planner.costs.with_topology(topology)[0])

    search = PlacementSearch(
        planner.topology,
        over,
        lambda planner, samples: planner.plan(samples),
        layers_to_place(planner.costs),
        batches,
        halves=planner.costs.facts.prices_halves,
    )
    return search.list_trials(get_args(PlacementName))[0].topology


def best_step(
    column: str,
    costs: Costs,
    lengths: Sequence[int],
    *,
    topology: Topology = TOPOLOGY,
    limit_bytes: float = MEMORY_LIMIT_BYTES,
    messages: ActivationFormat = FEW_BYTES,
) -> tuple[ProvenStep, Planner, float]:
    """Return the column's proven step, the planner that made it, and the CPU seconds of planning and proving it.

    Raises PlanError if nothing of the column fits the limits, VerificationError for a step that would not end.
    """
    start_s, best, refusal = time.process_time(), None, None
    for options in settings(column, lengths):
        planner = _planner(topology, costs, limit_bytes, messages, options)
        try:
            proven = prove_step(planner, sample_lengths(lengths), step=0)
        except PlanError as error:
            refusal = refusal or error
            continue
        if best is None or proven.step_plan.makespan_s < best[0].step_plan.makespan_s:
            best = (proven, planner)
    if best is None:
        assert refusal is not None
        raise refusal
    return (*best, time.process_time() - start_s)


def _planner(
    topology: Topology, costs: Costs, limit_bytes: float, messages: ActivationFormat, options: Mapping[str, Any]
) -> Planner:
    return Planner(topology, costs, limit_bytes, format=messages, collectives=ReplicaCollectives(), **options)


def measured_to_file(
    parser: ArgumentParser, measure: Callable[[Namespace], dict[str, Any]], text: Callable[[dict[str, Any]], str]
) -> int:
    """A bench's exit status: what it measures by its arguments goes to the file `output`, and as text to the screen."""
    args = parser.parse_args()
    try:
        result = measure(args)
    except DynaPipeError as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    return 0


def provenance(machine: str) -> dict[str, Any]:
    """Where and with what a result was made."""
    versions = {"python": platform.python_version()}
    for package in ("dynapipe-ext", "numpy", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    name = machine or f"{len(os.sched_getaffinity(0))}-core {platform.machine()}"
    return {
        "machine": name,
        "date": date.today().isoformat(),
        "versions": versions,
        "commit": commit.stdout.strip() or None,
    }
