"""Megatron-LM's unchanged pretrain_gpt.py by `python -m dynapipe_ext.megatron`, beside itself without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.data.dataset import TokenDataset, prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.executor.drop_in.refusals import (
    UNSUPPORTED_ARGUMENTS,
    UNSUPPORTED_BESIDE_DATA,
    UNSUPPORTED_DATA,
)
from tests.support.megatron_lm_record import apart, grad_norms, losses
from tests.support.megatron_lm_runs import ARGUMENTS, Ran, Run, megatron_lm_runs, missing, without

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# By Adam's own epsilon the biases of keys, whose gradients are hardly more than rounding, would go where rounding does.
MOCK = [*ARGUMENTS, "--mock-data", "--train-iters", "3", "--adam-eps", "1e-6"]
_BY_ITERATIONS = ("train-iters", "lr-warmup-iters", "lr-decay-iters")
_RAMPED = "--rampup-batch-size 8 8 24 --train-samples 56 --lr-warmup-samples 8 --lr-decay-samples 56"  # 3 x 8, 2 x 16
RAMPED = [*without(MOCK, *_BY_ITERATIONS), *_RAMPED.split()]
_UNEVEN = "--seq-length 96 --max-position-embeddings 96 --vocab-size 257 --split 80,10,10"
UNTIED = ["--untie-embeddings-and-output-weights"]  # as stages in a V must be
UNEVEN = [*ARGUMENTS, *UNTIED, *_UNEVEN.split(), "--train-iters", "10"]
_IN_SAMPLES = "--train-samples 160 --lr-warmup-samples 16 --lr-decay-samples 96"  # UNEVEN's, by batches of 16
IN_SAMPLES = [*without(UNEVEN, *_BY_ITERATIONS), *_IN_SAMPLES.split()]
PP = ["--pipeline-model-parallel-size", "2"]
_TP = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"  # times TP
TP_PP = [*PP, *_TP.split()]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
OTHERWISE = [*[word for word in RAMPED if word != "--calculate-per-token-loss"], "--dataloader-type", "external"]
SPLIT = ["--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]
VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1"]
V = ["--pipeline-model-parallel-layout", "Et|t|t|tL", "--dynapipe-placement", "v"]
_GO_ON = "--ckpt-step 6 --eval-iters 0"
_RESUME = "--train-iters 20 --exit-interval 10 --ckpt-step 9 --eval-iters 0 --no-load-optim --no-load-rng"
STOCK = {"mock": "mock, stock", "packed": "uneven, stock", "v": "uneven, stock"}

LATER = {"dataloader_save", "dataloader_inter_document_masking"}  # of multimodal scripts alone, and of 0.19
NUM_STEPS = {"mock": 3, "packed": 10, "v": 10}  # the epoch of 8 steps ends within
WIDTHS = {"lm loss": 1e-5, "grad norm": 2e-3, "learning rate": 0, "consumed samples": 0}


def runs(data: str, folder: Path) -> tuple[Run, ...]:
    planned, padded, saved = ["--dynapipe-data", data], ["--padded-data", data], str(folder / "saved")
    figures, theirs = (["--tensorboard-dir", str(folder / name)] for name in ("figures", "stock figures"))
    midway = ["--save", str(folder / "midway"), "--save-interval", "6"]
    v = [*UNEVEN, *planned, *PP, *V, *OVERLAP, *SPLIT]
    return (
        Run("mock, stock", 2, [*MOCK, *UNTIED, *PP], planned=False),
        Run("mock", 4, [*MOCK, *UNTIED, *TP_PP, *V, "--rerun-mode", "disabled"]),
        Run("uneven, stock", 2, [*UNEVEN, *PP, *padded, *theirs], False, "pretrain_padded.py"),
        Run("packed", 4, [*IN_SAMPLES, *planned, *TP_PP, *VIRTUAL, "--dynapipe-layout", "packed", *figures, *midway]),
        Run("went on", 2, [*IN_SAMPLES, *planned, *PP, *_GO_ON.split(), "--load", midway[1]]),
        Run("v", 4, [*v, "--save", saved, "--save-interval", "9"]),
        Run("resumed", 2, [*UNEVEN, *PP, "--load", saved, *_RESUME.split(), *padded], False, "pretrain_five_lines.py"),
        Run("otherwise, stock", 1, OTHERWISE, planned=False, script="pretrain_otherwise.py"),
        Run("otherwise", 2, [*OTHERWISE, *PP], script="pretrain_otherwise.py"),
        Run("core alone", 2, ["0.1"], script="core_alone.py"),
        Run("cp2", 1, [*MOCK, "--context-parallel-size", "2"]),
        Run("help", 1, ["--help"]),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    data: Path = tmp_path_factory.mktemp("uneven") / "data"
    prepare(lambda: generate_examples(num_samples=160, seed=0), data, tokenizer="bytes", max_seq_len=96, truncate=True)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("megatron-lm")
    return folder


@pytest.fixture(scope="module")
def ran(data: Path, folder: Path) -> dict[str, Ran]:
    return megatron_lm_runs(runs(str(data), folder), folder, timeout_s=560)


@pytest.mark.parametrize("name", STOCK)
def test_each_line_of_the_log_agrees_with_megatrons_own_schedule(ran: dict[str, Ran], name: str) -> None:
    ours, theirs = ran[name], ran[STOCK[name]]
    assert ours.status == theirs.status == 0, ours.log[-3000:] + theirs.log[-3000:]
    assert len(ours.losses) == NUM_STEPS[name]
    for column, width in WIDTHS.items():
        assert ours.column(column) == pytest.approx(theirs.column(column), abs=width)
    assert ours.validated == pytest.approx(theirs.validated, abs=1e-5)
    assert len(ours.validated) == 2
    assert "dynapipe: " in ours.log
    assert "dynapipe: " not in theirs.log


@pytest.mark.parametrize("name", STOCK)
def test_losses_gradient_norms_and_final_weights_agree_with_megatrons_own_schedule(
    ran: dict[str, Ran], name: str
) -> None:
    found = apart(ran[name].records, ran[STOCK[name]].records)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5, found


def test_tensorboard_has_the_figures_that_it_has_without(ran: dict[str, Ran], folder: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = []
    for name in ("figures", "stock figures"):
        events = accumulators.EventAccumulator(str(folder / name)).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("dynapipe/")]  # what was gained
        scalars = ((tag, one) for tag in tags for one in events.Scalars(tag))
        found.append(sorted((tag, one.step, one.value) for tag, one in scalars))  # of a step there may be two, anyhow
    ours, theirs = ([(tag, step) for tag, step, _ in one] for one in found)
    steps, samples = {("lm loss", i + 1) for i in range(10)}, {("lm loss vs samples", 16 * (i + 1)) for i in range(10)}
    assert ours == theirs
    assert {*ours} >= steps | samples | {("batch-size", 10), ("lm loss validation", 10)}
    values = [[value for _, _, value in one] for one in found]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_throughput_counts_each_sample_at_its_own_length(ran: dict[str, Ran], data: Path) -> None:
    assert "throughput per GPU" in ran["packed"].log
    assert ran["mock"].tflops == pytest.approx(ran["mock, stock"].tflops, rel=2e-3)  # times have one decimal
    shares = TokenDataset.open(data).lengths[:, 0] / 96  # of all samples; most are in one epoch of training
    for name in ("packed", "v"):
        share = sum(ran[name].tflops) / sum(ran["uneven, stock"].tflops)
        assert (shares**2).mean() < share < 1.05 * shares.mean()


def test_scripts_of_another_kind_train_as_they_do_without(ran: dict[str, Ran]) -> None:
    """A loss of the older kind with metrics of its own, by iterators that are no DataLoaders; batches that ramp up."""
    stock, ours = ran["otherwise, stock"], ran["otherwise"]
    assert stock.status == ours.status == 0, stock.log[-3000:] + ours.log[-3000:]
    found = apart(ours.records, stock.records)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5, found
    for metric in ("largest", "loss of even tokens", "learning rate", "global batch size", "consumed samples"):
        assert ours.column(metric) == pytest.approx(stock.column(metric), rel=1e-5)
    assert ours.column("global batch size") == [8, 8, 8, 16, 16]


def test_a_script_on_megatron_core_alone_runs_its_virtual_stages_by_a_plan(ran: dict[str, Ran]) -> None:
    assert ran["core alone"].status == 0, ran["core alone"].log[-3000:]
    assert len(re.findall(r"ForwardBackward step \d: \d\.\d+", ran["core alone"].log)) == 4


def test_a_run_goes_on_at_the_sample_after_those_of_its_checkpoint(ran: dict[str, Ran]) -> None:
    """In mid-epoch and on other ranks, to its exit interval, in a script with data of its own; without the distributed
    optimizer, whose state Megatron-LM cannot load on a CPU."""
    assert ran["resumed"].status == 0, ran["resumed"].log[-3000:]
    for column in ("lm loss", "grad norm", "consumed samples"):
        (last,) = ran["resumed"].column(column)
        assert last == pytest.approx(ran["uneven, stock"].column(column)[-1], abs=WIDTHS[column])


def test_a_run_goes_on_on_other_ranks_as_if_it_had_not_stopped(ran: dict[str, Ran]) -> None:
    """Of a run's second step the log says the mean of two losses, so those of the steps themselves are compared."""
    ours, theirs = ran["went on"], ran["uneven, stock"]
    assert ours.status == 0, ours.log[-3000:]
    for found in (losses, grad_norms):
        assert found(ours.records) == pytest.approx(found(theirs.records)[6:], rel=1e-5)
    for column in ("consumed samples", "learning rate"):
        assert ours.column(column) == theirs.column(column)[6:]


def test_what_cannot_go_together_ends_the_start_with_one_line(ran: dict[str, Ran]) -> None:
    assert ran["cp2"].status == 2
    assert ran["cp2"].log.splitlines()[-1].startswith("dynapipe: context_parallel_size is 2")


@pytest.fixture
def help_text(ran: dict[str, Ran]) -> str:
    if "unsupported format character" in ran["help"].log:
        pytest.skip("this Megatron-LM cannot print its own help, by a percent sign in it")
    assert ran["help"].status == 0
    return ran["help"].log


def test_the_arguments_are_in_the_help_of_the_script(help_text: str) -> None:
    for name in ("costs", "data", "layout", "memory-limit-gb", "split-backward"):
        assert f"--dynapipe-{name}" in help_text


def test_what_is_refused_has_the_name_of_an_argument(help_text: str) -> None:
    for name in {*UNSUPPORTED_ARGUMENTS, *UNSUPPORTED_DATA, *UNSUPPORTED_BESIDE_DATA} - LATER:
        assert f"--{name.replace('_', '-')}" in help_text
