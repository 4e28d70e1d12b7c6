"""A vocabulary over pipeline ranks in settings, plans and the search for a placement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import gather_vocabulary, split_vocabulary
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.configured import configured_format, placed_stages, topology_of, variants, with_placement
from dynapipe_ext.launch.job.settled import SettledPlanning, placed_planning
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.placements import PlacementSearch
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.check.plan_file import read_plan_file

LENGTHS = [40, 300, 17, 90, 120, 64, 33, 250] * 2
MODEL = """
[model]
num_layers = 4
hidden_size = 64
num_heads = 4
ffn_hidden_size = 128
tied_embeddings = false
[data]
vocab_size = 4096
"""
SIZES = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=128,
    gated_mlp=False,
    vocab_size=4096,  # its head is worth ten layers
    max_seq_len=1024,
    tied_embeddings=False,
)


def configured(topology: dict[str, Any], **tables: dict[str, Any]) -> TrainConfig:
    model = {"tied_embeddings": False} | tables.pop("model", {})
    return TrainConfig().with_values(topology={"tp": 1, "pp": 2} | topology, model=model, **tables)


def planning(config: TrainConfig, costs: CostModel | None = None) -> SettledPlanning:
    topology = topology_of(config)
    counted = AnalyticCosts(SIZES, topology, flops_per_s=1e11, overhead_ns=1_000)
    return SettledPlanning(config=config, costs=costs or counted, topology=topology, is_of_config=costs is None)


def test_settings_name_the_layers_of_stages_of_layers_alone() -> None:
    config = configured({"vocabulary_parallel": "head", "layers_per_stage": (3, 1)})
    topology = topology_of(config)
    assert (topology.layers_per_stage, topology.placement, topology.vocabulary) == ((3, 1, 0), (0, 1, 0), "head")
    assert configured_format(config).first_head_stage == 1
    assert with_placement(config, topology).topology == replace(config.topology, placement="linear")
    v = configured({"vocabulary_parallel": "head", "placement": "v"})
    assert with_placement(v, topology_of(v)).topology.stages_per_rank == 2
    assert placed_stages(configured({"vocabulary_parallel": "auto"})) == Topology(pp=2, dp=2)


def test_usual_schedules_beside_ours_keep_the_vocabulary_whole() -> None:
    named = variants(configured({"vocabulary_parallel": "head"}), compare=True)
    own, *others = (topology_of(one.config).vocabulary for one in named)
    assert (own, {*others}) == ("head", {"whole"})


@pytest.mark.parametrize(
    ("topology", "tables", "refusal"),
    [
        ({"vocabulary_parallel": "head", "pp": 1}, {}, "is split over pipeline ranks, but pp is 1"),
        ({"vocabulary_parallel": "head"}, {"plan": {"schedule": "1f1b"}}, "schedule '1f1b' is for one stage a rank"),
        (
            {"vocabulary_parallel": "auto"},
            {"plan": {"schedule": "1f1b"}},
            "is 'auto', but schedule '1f1b' runs",
        ),
        (
            {"vocabulary_parallel": "auto", "layers_per_stage": (2, 2)},
            {},
            "vocabulary_parallel is 'auto', which chooses layers_per_stage",
        ),
        ({"vocabulary_parallel": "tail"}, {}, "vocabulary_parallel is 'tail'"),
        (
            {"vocabulary_parallel": "head"},
            {"model": {"num_decoder_layers": 4}},
            "a model with a decoder side keeps it whole",
        ),
    ],
)
def test_who_keeps_a_vocabulary_whole_says_so(
    topology: dict[str, Any], tables: dict[str, dict[str, Any]], refusal: str
) -> None:
    if "num_decoder_layers" in tables.get("model", {}):
        tables["model"] |= {"position": "relative", "norm": "rmsnorm", "bias": False}
    with pytest.raises(ConfigError) as refused:
        topology_of(configured(topology, **tables))
    assert refusal in str(refused.value)


def test_jobs_with_adapters_or_an_engine_keep_it_whole() -> None:
    config = configured({"vocabulary_parallel": "head"})
    others = {
        "a model with adapters keeps it whole": replace(config, lora=replace(config.lora, enabled=True)),
        "a DeepSpeed engine keeps it whole": replace(config, deepspeed=replace(config.deepspeed, config="ds.json")),
    }
    for refusal, other in others.items():
        with pytest.raises(ConfigError, match=refusal):
            topology_of(other)


def test_auto_takes_the_better_of_a_whole_head_and_one_over_all_ranks() -> None:
    """A head of ten layers is spread; where it costs next to nothing, the stages behind it only add overhead."""
    config = configured({"vocabulary_parallel": "auto", "placement": "linear"})
    batches = [sample_lengths(LENGTHS)]
    settled, trials = placed_planning(planning(config), lambda: batches)
    assert [one.topology.vocabulary for one in trials] == ["head", "whole"]
    assert settled.topology == trials[0].topology
    assert settled.config.topology.vocabulary_parallel == "head"
    assert topology_of(settled.config) == settled.topology
    small = planning(config)
    assert isinstance(small.costs, AnalyticCosts)
    cheap = replace(small.costs, architecture=replace(SIZES, vocab_size=32), overhead_ns=100_000)
    settled, trials = placed_planning(replace(small, costs=cheap), lambda: batches)
    assert [one.topology.vocabulary for one in trials] == ["whole", "head"]
    assert settled.config.topology.vocabulary_parallel == "whole"


def test_auto_tries_what_costs_and_the_run_allow() -> None:
    tied = replace(SIZES, tied_embeddings=True)
    config = configured({"vocabulary_parallel": "auto"})
    own = planning(config)
    assert isinstance(own.costs, AnalyticCosts)
    assert own.vocabularies == ("whole", "head")
    assert replace(own, costs=replace(own.costs, architecture=tied)).vocabularies == ("whole", "both")
    odd = replace(SIZES, vocab_size=4097)
    assert replace(own, costs=replace(own.costs, architecture=odd)).vocabularies == ("whole",)
    assert replace(own, costs=TokenCosts(2)).vocabularies == ("whole",)
    assert replace(own, config=replace(config, lora=replace(config.lora, enabled=True))).vocabularies == ("whole",)
    one_rank = planning(configured({"vocabulary_parallel": "auto", "pp": 1}))
    assert one_rank.vocabularies == ("whole",)
    assert planning(configured({"vocabulary_parallel": "head"})).vocabularies == ("head",)


def test_layers_move_between_stages_of_layers_alone() -> None:
    tried: list[Topology] = []

    def planner_over(topology: Topology) -> Planner:
        tried.append(topology)
        return Planner(topology, AnalyticCosts(SIZES, topology, flops_per_s=1e11), 60e9, effort=50)

    batches = [sample_lengths(LENGTHS)]
    search = PlacementSearch(
        Topology(pp=2), planner_over, lambda p, b: p.plan(b), 4, batches, halves=True, vocabularies=("head",)
    )
    search.list_trials(["linear", "v"])
    assert len({one.layers_per_stage for one in tried}) > 4
    for topology in tried:
        assert topology.vocabulary == "head"
        assert all(topology.layers_per_stage[stage] > 0 for stage in topology.layer_stages)
        assert sum(gather_vocabulary(topology).layers_per_stage) == 4


def test_plans_say_the_vocabulary_and_are_checked_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of `--vocabulary-parallel head` is sound to `check-plan` and reads back; a damaged one is not."""
    model, lengths, plan = tmp_path / "model.toml", tmp_path / "lengths.txt", tmp_path / "plan.json"
    model.write_text(MODEL)
    lengths.write_text("\n".join(map(str, LENGTHS)))
    given = ["--config", str(model), "--lengths", str(lengths), "--memory-limit-gb", "1"]
    batch = ["--tokens-per-batch", "2000", "--tp", "1", "--pp", "2", "--dp", "2"]
    assert cli.main(["plan", *given, *batch, "--vocabulary-parallel", "head", "--json", str(plan)]) == 0
    raw = json.loads(plan.read_text())
    assert raw["topology"]["vocabulary"] == "head"
    assert raw["topology"]["layers_per_stage"] == [2, 2, 0]
    assert cli.main(["check-plan", str(plan), *given]) == 0
    assert read_plan_file(plan).topology == split_vocabulary(Topology(tp=1, pp=2, dp=2), "head").with_layers(4)
    capsys.readouterr()
    del raw["topology"]["vocabulary"]  # no placement by name is (0, 1, 0)
    plan.write_text(json.dumps(raw))
    assert cli.main(["check-plan", str(plan), *given]) == 2
    raw["topology"]["vocabulary"] = 7
    plan.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="vocabulary is 7, expected str"):
        read_plan_file(plan)


def test_a_plan_of_a_whole_vocabulary_is_written_as_before() -> None:
    topology = Topology(pp=2).with_layers(4)
    planner = Planner(topology, AnalyticCosts(SIZES, topology, flops_per_s=1e11), 60e9, effort=20)
    plan = planner.plan(sample_lengths(LENGTHS))
    assert sorted(plan_json(plan, topology)["topology"]) == ["dp", "layers_per_stage", "pp", "tp"]


def test_an_estimate_spreads_what_it_is_asked_to(tmp_path: Path) -> None:
    """With its parts alike on all ranks layers are even, and what is written for `train` says so."""
    written, report = tmp_path / "best.toml", tmp_path / "estimate.json"
    asked = ["--model", "llama-3-8b", "--gpus-per-node", "8", "--tp", "2", "--pp", "4", "--placement", "linear"]
    asked += ["--length-distribution", "uniform:1024", "--plans", "2", "--zero", "0,1", "--offload", "none"]
    asked += ["--tokens-per-batch", "32768", "--effort", "20", "--recompute", "none"]
    arguments = ["estimate", *asked, "--vocabulary-parallel", "head", "--json", str(report), "--write", str(written)]
    assert cli.main(arguments) == 0
    option = json.loads(report.read_text())["options"][0]
    assert (option["vocabulary"], option["stages_per_rank"]) == ("head", 1)
    assert option["layers_per_stage"] == [8, 8, 8, 8, 0, 0, 0]
    assert topology_of(TrainConfig.read(written)).vocabulary == "head"
    assert cli.main(["estimate", *asked, "--vocabulary-parallel", "auto", "--json", str(report)]) == 0
    found = {one.get("vocabulary", "whole") for one in json.loads(report.read_text())["options"]}
    assert found == {"whole", "head"}
