"""What `dynapipe plan` shows, what ranks get and what the trace simulates are one step, also where limits are tight."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from dynapipe_ext.batch.micro_batches import MicroBatch, as_length_array, sample_lengths
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.data.batches import GlobalBatchRule, StepPosition
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans.channel import StorePlanSource
from dynapipe_ext.executor.plans.planner_process import PlanPublisher, describe_planner, planner_of
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.address import Keys
from dynapipe_ext.executor.store.opening import MemoryStore
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job import configured as job
from dynapipe_ext.launch.job.configured import batches_to_place
from dynapipe_ext.launch.job.settled import SettledPlanning, placed_planning
from dynapipe_ext.launch.run import outcome
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Trace

BATCH_SIZE, NUM_STEPS = 20, 3
PLACES = [StepPosition(0, step, step) for step in range(NUM_STEPS)]
_drawn = 8 + np.random.default_rng(0).lognormal(4, 1, BATCH_SIZE * NUM_STEPS)
LENGTHS = as_length_array(np.minimum(120, _drawn).astype(int))
RANKS = [(dp_rank, pp_rank) for dp_rank in range(2) for pp_rank in range(2)]
KEYS, KEY = Keys("topic/1"), b"k" * 32

CONFIG = """
[topology]
tp = 1
pp = 2
dp = 2
[model]
num_layers = 8
hidden_size = 64
ffn_hidden_size = 256
max_seq_len = 512
[data]
tokens_per_batch = 0
batch_size = {batch_size}
[plan]
layout = "padded"
effort = 300
memory_limit_gb = {limit_gb}
costs = "{costs}"
"""


ENCODER_DECODER = """
[topology]
tp = 1
pp = 2
dp = 1
placement = {placement}
[model]
num_layers = 6
num_decoder_layers = 2
position = "relative"
hidden_size = 64
ffn_hidden_size = 256
[data]
tokens_per_batch = 0
batch_size = 8
[plan]
layout = "padded"
effort = 50
"""


class LengthsAlone:
    """A dataset of which no sample is read."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainConfig, AnalyticCosts]:
    """A job whose ranks have half of the memory that its activations would like; a message is 1 % of those."""
    folder = tmp_path_factory.mktemp("tight")
    path, costs_path = folder / "job.toml", folder / "costs.json"

    def written(limit_gb: float) -> TrainConfig:
        path.write_text(CONFIG.format(batch_size=BATCH_SIZE, limit_gb=limit_gb, costs=costs_path))
        return TrainConfig.read(path)

    config = written(1.0)
    costs = job.analytic_costs(config, job.architecture_of(config, 256), flops_per_s=1e10, overhead_ns=20_000)
    costs_path.write_text(json.dumps(cost_model_to_json(costs)))
    samples = sample_lengths(LENGTHS, range(BATCH_SIZE))
    static_bytes, roomy = int(costs.states.device.total.max()), planner_from(config, costs).plan(samples)
    return path, written((static_bytes + (roomy.peak_bytes - static_bytes) // 2) / 1e9), costs


def planner_from(config: TrainConfig, costs: AnalyticCosts) -> Planner:
    return job.make_planner(config, costs)


def in_line(config: TrainConfig, costs: AnalyticCosts, dp_rank: int, pp_rank: int) -> list[ExecutionPlan]:
    at = job.topology_of(config).coordinates(dp_rank + 2 * pp_rank)
    assert (at.dp_rank, at.pp_rank) == (dp_rank, pp_rank)
    planner = planner_from(config, costs)
    with DynaPipeDataLoader(
        LengthsAlone(), planner, batch_size=BATCH_SIZE, shuffle=True, coordinates=at, needs_data=False
    ) as loader:
        return [plan for _, plan in loader]


def through_a_store(config: TrainConfig, costs: AnalyticCosts) -> dict[tuple[int, int], list[ExecutionPlan]]:
    """As a planner process makes, signs and publishes them, and each rank takes its own."""
    store, planner = MemoryStore(), planner_of(json.loads(json.dumps(describe_planner(planner_from(config, costs)))))
    batches = GlobalBatchRule(batch_size=BATCH_SIZE, shuffle=True).batches(LENGTHS, 0)
    places = [(place, batches[place.step]) for place in PLACES]
    PlanPublisher(
        store=store,
        keys=KEYS,
        plan_key=KEY,
        planner=planner,
        lengths=LENGTHS,
        worker=0,
        num_workers=1,
        ahead=NUM_STEPS,
    ).publish(places)
    sources = {
        (dp, pp): StorePlanSource(store, KEYS, KEY, dp_rank=dp, pp_rank=pp, num_planners=1, timeout_s=1)
        for dp, pp in RANKS
    }
    return {rank: [source.plan(place) for place in PLACES] for rank, source in sources.items()}


def simulated(config: TrainConfig, costs: AnalyticCosts, step: int) -> Trace:
    figures: Any = SimpleNamespace(step=step, epoch=0, epoch_step=step)
    dataset: Any = LengthsAlone()
    return outcome._simulated(config, costs, dataset.lengths, figures, None)


def told(micro_batches: tuple[MicroBatch, ...]) -> list[Any]:
    return [[[s.index for s in m.samples], m.rows, m.encoder_len, m.recompute] for m in micro_batches]


def shown(path: Path, step: int) -> list[dict[str, Any]]:
    np.save(path.with_name("lengths.npy"), LENGTHS)
    target = path.with_name("plan.json")
    arguments = ["--config", str(path), "--lengths", str(path.with_name("lengths.npy")), "--step", str(step)]
    assert cli.main(["plan", *arguments, "--json", str(target)]) == 0
    assert cli.main(["check-plan", str(target), *arguments[:4]]) == 0
    replicas: list[dict[str, Any]] = json.loads(target.read_text())["replicas"]
    return replicas


def test_what_is_shown_is_what_ranks_get_and_what_the_trace_simulates_under_a_tight_limit(
    tight: tuple[Path, TrainConfig, AnalyticCosts], capsys: pytest.CaptureFixture[str]
) -> None:
    path, config, costs = tight
    plans = through_a_store(config, costs)
    assert all(in_line(config, costs, *rank) == plans[rank] for rank in [(0, 0), (1, 1)])
    replanned = 0
    for step in range(NUM_STEPS):
        trace, replicas = simulated(config, costs, step), shown(path, step)
        for rank in RANKS:
            replica, plan = replicas[rank[0]], plans[rank][step]
            fields = ("samples", "rows", "encoder_len", "recompute")
            assert told(plan.micro_batches) == [[m[name] for name in fields] for m in replica["micro_batches"]]
            predicted = replica["predicted"]
            assert plan.prediction.makespan_ns / 1e9 == predicted["makespan_s"]
            assert plan.prediction.lower_bound_ns / 1e9 == predicted["lower_bound_s"]
            both = zip(predicted["peak_bytes"], predicted["in_flight_bytes"], strict=True)
            assert plan.prediction.peak_bytes == tuple(map(sum, both))
            assert plan.peak_bytes <= config.plan.memory_limit_bytes
            labels = [span.label for span in trace.by_rank()[rank[0] + 2 * rank[1]]]
            assert labels == replica["schedule"]["stages"][rank[1]]
        assert round(trace.makespan_s * 1e9) == max(plans[rank][step].prediction.makespan_ns for rank in RANKS)
        planner = planner_from(config, costs)
        samples = [s for plan in (plans[0, 0][step], plans[1, 0][step]) for m in plan.micro_batches for s in m.samples]
        first = planner.plan(sorted(samples, key=lambda sample: sample.index), step=step)
        replanned += first.batch.replicas[0].micro_batches != plans[0, 0][step].micro_batches
    assert replanned  # or nothing was tight


def test_placements_are_judged_by_steps_that_ranks_would_run(tight: tuple[Path, TrainConfig, AnalyticCosts]) -> None:
    _, config, costs = tight
    limit_gb = 0.62 * config.plan.memory_limit_gb  # less than is tight: `auto` chooses stages that need less
    auto = config.with_values(topology={"placement": "auto"}, plan={"effort": 20, "memory_limit_gb": limit_gb})
    planning = SettledPlanning(config=auto, costs=costs, topology=job.topology_of(auto))
    planning, trials = placed_planning(planning, partial(batches_to_place, auto, LENGTHS))
    settled, placed = planning.config, planning.costs
    planner, batches = planner_from(settled, placed), GlobalBatchRule(batch_size=BATCH_SIZE, shuffle=True)
    planned = [sample_lengths(LENGTHS, batch) for batch in batches.batches(LENGTHS, 0)]
    steps = [prove_step(planner, samples, step=0).step_plan.makespan_s for samples in planned]
    assert trials[0].makespan_s == sum(steps)
    assert sum(steps) != sum(planner.plan(samples).makespan_s for samples in planned)  # or nothing was tight


def test_messages_of_a_placement_that_was_found_are_those_of_the_same_one_named(tmp_path: Path) -> None:
    """Its decoder begins on the third of four stages; of two stages, one per rank, it would on the second."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(5, 200, (16, 2)))

    def in_flight(placement: str) -> tuple[list[int], list[Any]]:
        path, target = tmp_path / "job.toml", tmp_path / "plan.json"
        path.write_text(ENCODER_DECODER.format(placement=placement))
        arguments = ["--config", str(path), "--lengths", str(tmp_path / "lengths.npy"), "--json", str(target)]
        assert cli.main(["plan", *arguments]) == 0
        (replica,) = json.loads(target.read_text())["replicas"]
        return replica["schedule"]["placement"], replica["predicted"]["in_flight_bytes"]

    found, named = in_flight('"auto"'), in_flight('"v"\nlayers_per_stage = [3, 2, 2, 1]')
    assert found == named
    assert found[0] == [0, 1, 1, 0]


def test_a_plan_that_ranks_would_refuse_is_refused_in_the_same_words(
    tight: tuple[Path, TrainConfig, AnalyticCosts], capsys: pytest.CaptureFixture[str]
) -> None:
    path, config, costs = tight
    samples = sample_lengths(LENGTHS, GlobalBatchRule(batch_size=BATCH_SIZE, shuffle=True).batches(LENGTHS, 0)[0])
    least = next(  # room for the batch, but for no buffer
        limit
        for limit in range(int(costs.states.device.total.max()), config.plan.memory_limit_bytes, 20_000)
        if _fits(planner_from(config.with_values(plan={"memory_limit_gb": limit / 1e9}), costs), samples)
    )
    np.save(path.with_name("lengths.npy"), LENGTHS)
    flags = ["--config", str(path), "--lengths", str(path.with_name("lengths.npy")), "--step", "0"]
    with pytest.raises(PlanError) as refusal:
        in_line(config.with_values(plan={"memory_limit_gb": least / 1e9}), costs, 0, 0)
    assert cli.main(["plan", *flags, "--memory-limit-gb", str(least / 1e9)]) == 2
    assert str(refusal.value) in capsys.readouterr().err


def _fits(planner: Planner, samples: Any) -> bool:
    try:
        planner.plan(samples)
    except PlanError:
        return False
    return True
