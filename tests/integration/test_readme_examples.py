"""The Python blocks of the README and its guides run as they stand, one after the other, and do what the text says."""

from __future__ import annotations

import contextlib
import io
import itertools
import re

import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - once, before ranks are forked

from dynapipe_ext import ActivationFormat, InlineHub, PipelineExecutor, TokenCosts, TorchStage
from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.transport.inline import InlineReductions
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S
from tests.support.pages import all_pages
from tests.support.pages import blocks as code_blocks


@pytest.fixture(scope="module")
def blocks(root):
    """Those of the library's page, and the sampler's."""
    found = [
        code_blocks((root / ".github/docs" / page).read_text(), "python") for page in ("library.md", "batching.md")
    ]
    assert [len(of_page) for of_page in found] == [6, 1]
    return [*found[0], *found[1]]


def test_every_python_block_of_the_pages_is_one_that_runs_here(root, blocks):
    """But what takes a trained model (test_quickstart.py) or a loop to run in: scripts for Megatron-LM's, which
    test_megatron_script.py runs, and calls that test_live_weights.py, test_foreign_loops.py and, of five loops,
    test_loops.py make."""
    others = {
        page: code_blocks(text, "python")
        for page, text in all_pages(root).items()
        if not page.endswith(("library.md", "batching.md"))
    }
    counts = {page: len(found) for page, found in others.items() if found}
    assert counts == {
        "README.md": 1,
        ".github/docs/megatron-lm.md": 1,
        ".github/docs/other-loops.md": 7,
        ".github/docs/pretrain.md": 1,
    }


def test_the_example_of_the_readme_prints_micro_batches_and_a_plan_at_or_above_its_bound(root):
    (block,) = code_blocks((root / "README.md").read_text(), "python")
    *batches, last = run(block, {}).splitlines()
    numbers = [float(n) for n in re.findall(r"\d+\.\d+", last)]
    assert 0 < numbers[1] <= numbers[0]
    lengths = sorted(int(n) for line in batches for n in re.findall(r"\d+", line.partition("[")[2]))
    assert lengths == sorted([12, 7, 350, 41, 9, 1024, 88, 16, 240, 5, 61, 130])
    assert {line.split()[0] for line in batches} == {"0", "1"}


def run(block, namespace):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block, "README.md", "exec"), namespace)
    return output.getvalue()


def test_the_planning_example_prints_a_plan_at_or_above_its_bound(blocks):
    numbers = [float(n) for n in re.findall(r"\d+\.\d+", run(blocks[0], {}))]
    assert 0 < numbers[1] <= numbers[0]
    assert 0 < numbers[2] <= 64


def test_the_example_for_another_loop_prints_every_sample_once_and_shares_of_one_loss(blocks):
    lines = run(blocks[5], {}).splitlines()
    assert sorted(int(n) for line in lines for n in re.findall(r"\d+", line[1 : line.index(")")])) == list(range(8))
    assert sum(float(line.split()[-4]) for line in lines) == pytest.approx(1, abs=0.005)
    assert len([line for line in blocks[5].splitlines() if line.strip()]) <= 15


def test_the_training_example_trains(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", run(blocks[1], {}))]
    assert len(losses) > 3
    assert losses[-1] < losses[0] - 0.1


def test_the_example_on_four_ranks_has_the_losses_of_the_same_script_on_one(blocks, tmp_path, monkeypatch, run_ranks):
    """Its first four steps, planned with little effort."""
    monkeypatch.chdir(tmp_path)
    exec(blocks[1].partition("model =")[0], {})  # writes the data

    def script(topology: str):
        block = blocks[2].replace("Topology(pp=2, dp=2)", topology)
        block = block.replace("in loader:", "in itertools.islice(loader, 4):").replace(
            "format=form", "format=form, effort=100"
        )

        def main(env):
            place = f"init_method={env.init_method!r}, rank={env.rank}, world_size={env.world_size}"
            return run(block.replace('"gloo"', f'"gloo", {place}'), {"itertools": itertools})

        return main

    (whole,) = run_ranks(1, script("Topology()"))
    first, *others = run_ranks(4, script("Topology(pp=2, dp=2)"))
    assert not any(others)
    expected, losses = ([float(x) for x in re.findall(r"loss (\d+\.\d+)", text)] for text in (whole, first))
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < losses[0] - 0.05


def test_the_deepspeed_example_trains_on_two_ranks(blocks, tmp_path, monkeypatch, run_ranks):
    """Its first three steps, planned with little effort."""
    monkeypatch.chdir(tmp_path)
    exec(blocks[1].partition("model =")[0], {})  # writes the data
    above = blocks[2].partition("optimizer =")[0].replace("Topology(pp=2, dp=2)", "Topology(dp=2)")
    block = blocks[3].replace("in loader:", "in itertools.islice(loader, 3):").replace("=form", "=form, effort=100")
    block = block.replace("engine.step()", "engine.step(); losses.append(loss)")

    def main(env):
        place = f"init_method={env.init_method!r}, rank={env.rank}, world_size={env.world_size}"
        namespace = {"itertools": itertools, "losses": []}
        env.export()
        run(above.replace('"gloo"', f'"gloo", {place}') + block + "dist.destroy_process_group()", namespace)
        return namespace["losses"]

    losses, same = run_ranks(2, main)
    assert losses == same
    assert losses[-1] < losses[0] - 0.01


def test_the_training_example_is_about_twenty_lines_and_the_stage_at_most_forty(blocks):
    code = [line for line in blocks[1].splitlines() if line.strip()]
    assert len(code) <= 27
    assert len([line for line in blocks[4].splitlines() if line.strip()]) <= 40


def test_the_samplers_example_prints_batches_within_their_cap(blocks):
    printed = [tuple(map(int, line.split())) for line in run(blocks[6], {}).splitlines()]
    assert printed
    assert all(count > 0 and tokens <= 2048 for count, tokens in printed)


def test_the_readmes_stage_gives_the_gradients_of_the_built_in_one_on_a_pipeline(blocks):
    namespace: dict = {}
    run(blocks[4], namespace)
    topology, form = Topology(pp=2), ActivationFormat(8, order="bsh")
    planner = Planner(topology, TokenCosts(2), 10**9, pad_multiple=1, format=form)
    samples = [SampleLength(i, n, target=n) for i, n in enumerate((3, 9, 4, 5))]
    torch.manual_seed(0)
    parts = {0: torch.nn.Embedding(16, 8), 1: torch.nn.Linear(8, 16)}

    def loss_sum(logits, batch):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    gradients, losses = [], []
    for make in (namespace["MyStage"], TorchStage):
        modules = {0: lambda x, batch: parts[0](x), 1: lambda x, batch: parts[1](x)}
        loss, gradient = train_once(make, modules, parts, loss_sum, planner, samples)
        losses.append(loss)
        gradients.append(gradient)
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] > 0
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.abs().sum() > 0


def train_once(make, modules, parts, loss_sum, planner, samples):
    import threading

    plans = prove_step(planner, samples, step=0).plans[0]
    hub, losses, parallel = InlineHub(timeout_s=LIMIT_S), {}, InlineReductions(Topology(pp=2), timeout_s=LIMIT_S)
    everything = torch.nn.ModuleDict({str(s): m for s, m in parts.items()})
    everything.zero_grad(set_to_none=True)

    def rank(pp_rank):
        own = {pp_rank: modules[pp_rank]}
        if make is TorchStage:
            stage = TorchStage(own, loss_sum, parameters=parts[pp_rank].parameters(), parallel=parallel)
        else:
            wrapped = torch.nn.Module()
            wrapped.forward = own[pp_rank]
            wrapped.part = parts[pp_rank]
            stage = make({pp_rank: wrapped}, loss_sum)
        plan = plans[pp_rank]
        batches = []
        for m in plan.micro_batches:
            tokens = torch.arange(m.rows * m.encoder_len).reshape(m.rows, m.encoder_len) % 16
            batches.append({"tokens": tokens, "labels": (tokens + 1) % 16})
        losses[pp_rank] = PipelineExecutor(stage, hub.transport(pp_rank)).execute(plan, batches)

    threads = [threading.Thread(target=rank, args=(p,)) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return losses[1], [p.grad.clone() for p in everything.parameters()]
