"""What users of Megatron-LM have runs by its unchanged pretrain_gpt.py: mixtures, long documents, batches that ramp up,
several validation sets, experts in some layers, conversations; and its log says what was gained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.data.dataset import TokenDataset, prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.executor.drop_in.conversations import HostShare, kept_conversations
from dynapipe_ext.launch.store import RedisServer
from tests.support.megatron_lm_record import apart, losses
from tests.support.megatron_lm_runs import ARGUMENTS, Ran, Run, megatron_lm_runs, missing, without
from tests.support.pretrain_chats import ByteChats
from tests.support.store_loaders import redis_at

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

_BY_ITERATIONS = ("train-iters", "lr-warmup-iters", "lr-decay-iters")
_SIZES = "--seq-length 64 --max-position-embeddings 64 --vocab-size 257 --adam-eps 1e-6"
MODEL = [*ARGUMENTS, *_SIZES.split(), "--untie-embeddings-and-output-weights"]
_RAMPED = "--rampup-batch-size 8 8 24 --train-samples 56 --lr-warmup-samples 8 --lr-decay-samples 56"  # 3 x 8, 2 x 16
RAMPED = [*without(MODEL, *_BY_ITERATIONS), *_RAMPED.split(), "--eval-iters", "2"]
_EXPERTS = """--train-iters 3 --num-experts 4 --moe-layer-freq ([0,1]*2) --moe-router-topk 2 --disable-bias-linear
--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 48
--dynapipe-tokens-per-batch 400 --dynapipe-long-samples truncate"""
EXPERTS = [*MODEL, *_EXPERTS.split()]
CHATS = [*MODEL, "--train-iters", "2"]
SHORTER = ["--seq-length", "63"]  # of its 64 tokens the first of a cut conversation is no label
TRUNCATED = ["--dynapipe-long-samples", "truncate"]
FULL = ["--full-validation"]


def corpora(folder: Path) -> dict[str, str]:
    """Paths by name; documents have up to 200 positions, of which a model takes 64."""
    found = {}
    for name, count in (("a", 40), ("b", 60), ("v", 32), ("w", 5)):
        examples = [*generate_examples(num_samples=count, seed=ord(name))]
        longest = 200 if name in "ab" else 64
        found[name] = str(folder / name)
        prepare(
            lambda examples=examples: examples, folder / name, tokenizer="bytes", max_seq_len=longest, truncate=True
        )  # type: ignore[misc]
    return found


def write_chats(path: Path) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(150):
            messages = [
                {"role": "user", "content": f"{i}? "},
                {"role": "assistant", "content": "ab " * rng.integers(1, 30)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("megatron-lm-users")
    return folder


@pytest.fixture(scope="module")
def ran_beside_a_store(folder: Path) -> tuple[dict[str, Ran], int]:
    """The runs, and how many commands the store of one of them has had."""
    data = corpora(folder)
    chats = folder / "chats.jsonl"
    write_chats(chats)
    kept = kept_conversations(chats, ByteChats(), kept_in=folder / "kept before", share=HostShare())
    mixed = ["0.3", data["a"], "0.7", data["b"]]
    stock = ["--mixed-data", *mixed, "--mixed-valid-data", data["v"]]
    planned = ["--dynapipe-data", *mixed, "--dynapipe-long-samples", "chunk", "--dynapipe-layout", "packed"]
    two_sets = ["--dynapipe-valid-data", data["v"], data["w"], *FULL, "--multiple-validation-sets"]
    some, pp = ["--dynapipe-data", data["a"], data["b"]], ["--pipeline-model-parallel-size", "2"]
    with RedisServer() as server:
        place = folder / "store"
        place.touch(0o600)
        place.write_text(server.address.url.replace("://", f"://:{server.address.password}@", 1) + "\n")
        beside = ["--dynapipe-store", str(place), "--tensorboard-dir", str(folder / "figures")]
        runs = (
            Run("mixed, stock", 1, [*RAMPED, *stock], False, "pretrain_mixed.py"),
            Run("mixed", 2, [*RAMPED, *planned, *two_sets, *beside]),
            Run("experts", 2, [*EXPERTS, *some, *pp, "--dynapipe-valid-data", data["w"]]),
            Run("experts, one rank", 1, [*EXPERTS, *some, *FULL, "--dynapipe-valid-data", data["v"], data["w"]]),
            Run("chats", 2, [*CHATS, "--sft", "--dynapipe-data", str(chats)], script="pretrain_chats.py"),
            Run("kept", 1, [*CHATS, *SHORTER, "--dynapipe-data", str(kept.directory), *TRUNCATED]),
        )
        found = megatron_lm_runs(runs, folder, timeout_s=560)
        num_commands = redis_at(server.address).info("stats")["total_commands_processed"]
    return found, num_commands


@pytest.fixture(scope="module")
def ran(ran_beside_a_store: tuple[dict[str, Ran], int]) -> dict[str, Ran]:
    return ran_beside_a_store[0]


def test_a_ramped_up_mixture_of_long_documents_trains_as_megatrons_own_schedule_on_its_padded_rows(
    ran: dict[str, Ran],
) -> None:
    ours, theirs = ran["mixed"], ran["mixed, stock"]
    assert ours.status == theirs.status == 0, ours.log[-5000:] + theirs.log[-3000:]
    found = apart(ours.records, theirs.records)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5, found
    assert ours.column("global batch size") == theirs.column("global batch size") == [8, 8, 8, 16, 16]
    for column in ("learning rate", "consumed samples"):
        assert ours.column(column) == theirs.column(column)
    assert re.search(
        r"dynapipe: training data 0: \d+ samples of more than 64 positions are cut into \d+ samples", ours.log
    )


def test_validation_sets_are_validated_in_full_one_by_one(ran: dict[str, Ran]) -> None:
    first, second = ran["mixed"].validated
    assert first == pytest.approx(ran["mixed, stock"].validated[0], abs=1e-5)
    assert second != first
    assert "validation-1 loss at iteration 5 on validation set" in ran["mixed"].log
    assert "Evaluating on 48 samples" in ran["experts, one rank"].log  # 37 in three steps, then never again
    assert len(ran["experts, one rank"].validated) == 1


def test_plans_come_from_the_store_that_a_file_names_and_its_password_is_not_said(
    ran_beside_a_store: tuple[dict[str, Ran], int], folder: Path
) -> None:
    ran, num_commands = ran_beside_a_store
    password = re.search(r":([^:@/]+)@", (folder / "store").read_text())
    assert password
    assert password[1] not in ran["mixed"].log
    assert num_commands > 5 * 2  # a plan a step and rank, at least


def test_experts_in_every_other_layer_train_by_steps_of_tokens_over_stages_as_on_one_rank(
    ran: dict[str, Ran],
) -> None:
    ours, alone = ran["experts"], ran["experts, one rank"]
    assert ours.status == alone.status == 0, ours.log[-5000:] + alone.log[-5000:]
    assert losses(ours.records) == pytest.approx(losses(alone.records), rel=1e-5)
    assert ours.column("consumed samples") == [16, 32, 48]
    assert "steps have at most 400 tokens of samples" in ours.log
    assert "the validation data are 5 samples, fewer than a global batch of 16: they repeat" in ours.log


def test_conversations_are_tokenized_by_all_ranks_together_into_a_folder_that_trains_alike(
    ran: dict[str, Ran], folder: Path
) -> None:
    ours, theirs = ran["chats"], ran["kept"]
    assert ours.status == theirs.status == 0, ours.log[-5000:] + theirs.log[-3000:]
    assert losses(ours.records) == pytest.approx(losses(theirs.records), rel=1e-5)
    (kept,) = (folder / ".chats.jsonl.tokens").iterdir()
    (before,) = (folder / "kept before").iterdir()
    assert TokenDataset.open(kept).fingerprint == TokenDataset.open(before).fingerprint
    assert "samples of more than 63 positions are truncated" in ours.log


def test_the_log_and_tensorboard_say_what_was_gained(ran: dict[str, Ran], folder: Path) -> None:
    lines = [line for line in ran["mixed"].log.splitlines() if line.startswith("dynapipe: iteration")]
    assert [int(line.split()[2]) for line in lines] == [1, 2, 3, 4, 5]
    number = r"([\d.,]+)"
    line = re.compile(
        rf"dynapipe: iteration \d+ \| micro-batches a step: {number} \| padding: {number}% \| bubble: {number}%"
        rf" predicted, {number}% measured \(ranks share this machine's cores\) \| predicted step: {number} ms"
        r" \| the same samples in stock's micro-batches under 1F1B \(simulated\):"
        rf" {number} ms padded, {number} ms in full rows"
    )
    matches = [line.fullmatch(text) for text in lines]
    found = [tuple(float(one.replace(",", "")) for one in match.groups()) for match in matches if match]
    assert len(found) == len(lines)
    for micro_batches, padding, predicted, measured, step_ms, padded_ms, full_ms in found:
        assert micro_batches >= 2
        assert max(padding, predicted, measured) < 100
        assert 0 < step_ms <= padded_ms
        assert full_ms <= padded_ms
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder / "figures")).Reload()
    padding = [(one.step, round(one.value, 3)) for one in events.Scalars("dynapipe/padding")]
    assert padding == [(step, pytest.approx(row[1] / 100, abs=6e-4)) for step, row in enumerate(found, 1)]
    assert len(events.Scalars("dynapipe/step of stock, padded (s)")) == 5
