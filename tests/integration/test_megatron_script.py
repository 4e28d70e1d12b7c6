"""Megatron-LM's unchanged pretrain_gpt.py by `python -m dynapipe_ext.megatron`, beside itself without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.data.dataset import prepare
from dynapipe_ext.data.generation import generate_examples
from dynapipe_ext.executor.megatron.refusals import UNSUPPORTED_ARGUMENTS, UNSUPPORTED_DATA
from tests.support.megatron_lm_record import apart
from tests.support.megatron_lm_runs import ARGUMENTS, Ran, Run, megatron_lm_runs, missing, without

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MOCK = [*ARGUMENTS, "--mock-data", "--train-iters", "5"]
_UNEVEN = "--seq-length 96 --max-position-embeddings 96 --vocab-size 257 --split 80,10,10"
UNEVEN = [*ARGUMENTS, *_UNEVEN.split(), "--train-iters", "10"]
_IN_SAMPLES = "--train-samples 160 --lr-warmup-samples 16 --lr-decay-samples 96"  # UNEVEN's, by batches of 16
IN_SAMPLES = [*without(UNEVEN, "train-iters", "lr-warmup-iters", "lr-decay-iters"), *_IN_SAMPLES.split()]
PP = ["--pipeline-model-parallel-size", "2"]
_TP = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"  # times TP
TP_PP = [*PP, *_TP.split()]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
SPLIT = ["--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]
VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1"]
_RESUME = "--train-iters 20 --exit-interval 10 --ckpt-step 9 --eval-iters 0 --no-load-optim --no-load-rng"
STOCK = {"mock": "mock, stock", "packed": "uneven, stock", "virtual stages": "uneven, stock"}

NUM_STEPS = {"mock": 5, "packed": 10, "virtual stages": 10}  # the epoch of 8 steps ends within
WIDTHS = {"lm loss": 1e-5, "grad norm": 2e-3, "learning rate": 0, "consumed samples": 0}


def runs(data: str, saved: str) -> tuple[Run, ...]:
    planned = ["--dynapipe-data", data]
    virtual = [*UNEVEN, *planned, *PP, *VIRTUAL, *OVERLAP, *SPLIT]
    return (
        Run("mock, stock", 2, [*MOCK, *PP], planned=False),
        Run("mock", 4, [*MOCK, *TP_PP]),
        Run("uneven, stock", 2, [*UNEVEN, *PP, "--padded-data", data], planned=False, script="pretrain_padded.py"),
        Run("packed", 4, [*IN_SAMPLES, *planned, *TP_PP, "--dynapipe-layout", "packed"]),
        Run("virtual stages", 4, [*virtual, "--save", saved, "--save-interval", "9"]),
        Run("resumed", 2, [*UNEVEN, *planned, *PP, "--load", saved, *_RESUME.split()]),
        Run("cp2", 1, [*MOCK, "--context-parallel-size", "2"]),
        Run("help", 1, ["--help"]),
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: Any) -> dict[str, Ran]:
    folder: Path = tmp_path_factory.mktemp("megatron-lm")
    data = folder / "data"
    prepare(lambda: generate_examples(num_samples=160, seed=0), data, tokenizer="bytes", max_seq_len=96, truncate=True)
    return megatron_lm_runs(runs(str(data), str(folder / "saved")), folder, timeout_s=560)


@pytest.mark.timeout(600)
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


def test_a_run_goes_on_at_the_sample_after_those_of_its_checkpoint(ran: dict[str, Ran]) -> None:
    """In mid-epoch and on other ranks, to its exit interval; without the optimizer, whose state Megatron-LM cannot load
    on a CPU."""
    assert ran["resumed"].status == 0, ran["resumed"].log[-3000:]
    for column in ("lm loss", "grad norm", "consumed samples"):
        (last,) = ran["resumed"].column(column)
        assert last == pytest.approx(ran["uneven, stock"].column(column)[-1], abs=WIDTHS[column])


def test_what_cannot_go_together_ends_the_start_with_one_line(ran: dict[str, Ran]) -> None:
    assert ran["cp2"].status == 2
    assert ran["cp2"].log.splitlines()[-1].startswith("dynapipe: context_parallel_size is 2")


def test_the_arguments_are_in_the_help_of_the_script(ran: dict[str, Ran]) -> None:
    assert ran["help"].status == 0
    for name in ("costs", "data", "layout", "memory-limit-gb", "split-backward"):
        assert f"--dynapipe-{name}" in ran["help"].log


def test_what_is_refused_has_the_name_of_an_argument(ran: dict[str, Ran]) -> None:
    for name in {*UNSUPPORTED_ARGUMENTS, *UNSUPPORTED_DATA} - {"dataloader_save"}:  # of its multimodal scripts alone
        assert f"--{name.replace('_', '-')}" in ran["help"].log
