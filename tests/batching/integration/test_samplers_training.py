"""Fine-tuning with the sampler on several ranks, by the loops that its package shows, equals one process.

The oracle runs every sample alone, one after the other, and divides the sum of losses of a step by its target tokens. A
step on the ranks adds the same numbers in another order and from rows of another shape: gradients in float32 then agree
to some 1e-6 of the largest entry of their parameter. SGD keeps such differences small from step to step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dynapipe_ext.batching.sampling
from dynapipe_ext.batching.packing import PackingCollator
from dynapipe_ext.batching.packing.collator import IGNORED
from dynapipe_ext.batching.packing.dynamicat import SUPERVISED, PaddingSide, limited, loss_weight, make_record, padded
from dynapipe_ext.batching.sampling import DistributedTokenBatchSampler
from dynapipe_ext.errors import ConfigError
from tests.support.rank_jobs import in_turn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.support.limits import LIMIT_S

NUM_SAMPLES, MAX_TOKENS, WORDS, LR = 40, 110, 64, 0.1
STOP = 6  # batches until a job is stopped, in its second epoch
TOLERANCE = 2e-5  # of the largest entry of a parameter's gradient; a batch weighted by samples is off by 1e-1
LIMIT = timedelta(seconds=LIMIT_S)


def features_of() -> list[dict[str, list[int]]]:
    """Records of 4 to 50 tokens; prompts of random length carry no loss."""
    rng = np.random.default_rng(0)
    sizes = zip(rng.integers(2, 20, NUM_SAMPLES), np.minimum(2 + rng.exponential(8, NUM_SAMPLES), 30), strict=True)
    drawn = [(rng.integers(0, WORDS, int(a)).tolist(), rng.integers(0, WORDS, int(b)).tolist()) for a, b in sizes]
    return [make_record({"prompt": prompt, "response": response}, SUPERVISED) for prompt, response in drawn]


FEATURES = features_of()
LENGTHS = [len(feature["input_ids"]) for feature in FEATURES]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, **sizes))


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **quiet))


def example(title: str) -> str:
    """The indented code in the docstring of `batching.sampling` below the paragraph that starts with `title`."""
    lines = (dynapipe_ext.batching.sampling.__doc__ or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    start = next(number for number in range(start, len(lines)) if lines[number].startswith("    "))
    stop = next((n for n in range(start, len(lines)) if lines[n] and not lines[n].startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[start:stop]))


class RecordingSGD(torch.optim.SGD):
    """Keeps each step's gradients."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=LR, momentum=0.9)
        self.gradients: list[list[Any]] = []

    def step(self, closure: Any = None) -> Any:
        self.gradients.append([p.grad.clone().numpy() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def alone(model: Any, optimizer: RecordingSGD, samples: Sequence[int]) -> float:
    """One step of one process: each sample alone, unpacked, unpadded. Returns the mean loss over target tokens."""
    total = torch.zeros(())
    targets = sum(sum(FEATURES[i]["loss_mask"][1:]) for i in samples)
    for i in samples:
        tokens = torch.tensor(FEATURES[i]["input_ids"])
        carries = torch.tensor(FEATURES[i]["loss_mask"][1:], dtype=torch.bool)
        logits = model(tokens[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits[carries], tokens[1:][carries], reduction="sum") / targets
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


Steps = tuple[tuple[int, ...], ...]


def steps_of(plan: Any) -> Steps:
    """Samples of each step over all ranks."""
    ranks = range(plan.num_replicas)
    return tuple(tuple(i for r in ranks for i in plan.batch(step, r)) for step in range(plan.num_steps))


@functools.cache
def one_process(make: Callable[[], Any], steps: Steps) -> tuple[list[float], list[Any], list[Any]]:
    model = make()
    optimizer = RecordingSGD(model)
    losses = [alone(model, optimizer, samples) for samples in steps]
    return losses, optimizer.gradients, [p.detach().numpy() for p in model.parameters()]


def worst(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest difference of an entry relative to the largest of its array."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-12) for a, b in pairs)


def agree(ranks: Sequence[Any], expected: tuple[list[float], list[Any], list[Any]]) -> None:
    """Every rank's gradients of every step and weights, and the sum over ranks of the losses, are the oracle's."""
    losses, gradients, weights = expected
    for rank in ranks:
        assert len(rank["gradients"]) == len(gradients)
        for found, wanted in zip(rank["gradients"], gradients, strict=True):
            assert worst(found, wanted) < TOLERANCE
        assert worst(rank["weights"], weights) < TOLERANCE
    assert np.mean([rank["losses"] for rank in ranks], axis=0) == pytest.approx(losses, rel=1e-5)


def ddp_rank(make: Callable[[], Any], *, num_epochs: int, stop_after: int | None = None, checkpoint: Any = None) -> Any:
    """The DDP loop of the docstring, stopped after some batches; `checkpoint` is what it saved."""
    model = make()
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    optimizer = RecordingSGD(model)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses: list[float] = []
    ddp = DistributedDataParallel(model)
    ddp.register_forward_hook(lambda module, arguments, output: losses.append(float(output.loss)))
    saved: dict[str, Any] = {}

    class StopError(Exception):
        pass

    def save(state: Any) -> None:
        saved.update(sampler=json.loads(json.dumps(state)), model=model.state_dict(), optimizer=optimizer.state_dict())
        if stop_after is not None and len(losses) == stop_after:
            raise StopError

    names = {
        "DataLoader": DataLoader,
        "DistributedTokenBatchSampler": DistributedTokenBatchSampler,
        "PackingCollator": PackingCollator,
        "torch": torch,
        "device": "cpu",
        "lengths": LENGTHS,
        "features": FEATURES,
        "max_tokens": MAX_TOKENS,
        "num_epochs": num_epochs,
        "state": checkpoint and checkpoint["sampler"],
        "model": ddp,
        "optimizer": optimizer,
        "save": save,
    }
    with contextlib.suppress(StopError):
        exec(example("DDP"), names)
    weights = [p.detach().numpy() for p in model.parameters()]
    return {"losses": losses, "gradients": optimizer.gradients, "weights": weights, "saved": saved}


def joined(env: Any) -> None:
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size, timeout=LIMIT)


def ended(result: Any) -> Any:
    """`result`, out of the group. What used the group must be gone: gloo may wait for ever where it outlives it."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("make", [llama, gpt2])
def test_two_ddp_ranks_train_as_one_process_does_over_two_epochs(run_ranks: Any, make: Callable[[], Any]) -> None:
    def rank(env: Any) -> Any:
        joined(env)
        return ended(ddp_rank(make, num_epochs=2))

    sampler = DistributedTokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, num_replicas=2, rank=0)
    steps = steps_of(sampler.plan)
    sampler.set_epoch(1)
    steps += steps_of(sampler.plan)
    assert Counter(i for step in steps for i in step) == Counter(2 * list(range(NUM_SAMPLES)))
    agree(run_ranks(2, rank), one_process(make, steps))


@pytest.fixture(scope="module")
def saved() -> Any:
    """What two ranks had saved when they were stopped."""

    def stopped(env: Any) -> Any:
        joined(env)
        return ended(ddp_rank(llama, num_epochs=2, stop_after=STOP))

    return in_turn({"stopped": (2, stopped)})["stopped"][0]["saved"]


@pytest.mark.parametrize("later", [1, 3])
def test_a_job_stopped_in_mid_epoch_goes_on_under_another_number_of_ranks(
    run_ranks: Any, saved: Any, later: int
) -> None:
    """Its workers had fetched batches that were not trained: they are trained after the restart, and none twice."""

    def second(env: Any) -> Any:
        joined(env)
        return ended(ddp_rank(llama, num_epochs=2, checkpoint=saved))

    sampler = DistributedTokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, num_replicas=2, rank=0)
    steps = steps_of(sampler.plan)
    sampler.set_epoch(1)
    steps = (steps + steps_of(sampler.plan))[:STOP]
    assert sampler.plan.num_steps < STOP < 2 * sampler.plan.num_steps - 1
    resumed = DistributedTokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, num_replicas=later, rank=0)
    resumed.load_state_dict(saved["sampler"])
    rest = steps_of(resumed.plan)
    assert Counter(i for step in steps + rest for i in step) == Counter(2 * list(range(NUM_SAMPLES)))

    losses, gradients, weights = one_process(llama, steps + rest)
    agree(run_ranks(later, second), (losses[STOP:], gradients[STOP:], weights))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_varying_size_weighted_by_their_targets_train_as_samples_alone_do(side: PaddingSide) -> None:
    model = llama()
    optimizer = RecordingSGD(model)
    losses = []
    steps = tuple(range(17)), tuple(range(17, NUM_SAMPLES))
    for step in steps:
        batches = [[step[i] for i in batch] for batch in limited([LENGTHS[i] for i in step], MAX_TOKENS)]
        assert len({len(batch) for batch in batches}) > 2, "batches are to differ in size"
        targets = [sum(sum(FEATURES[i]["loss_mask"][1:]) for i in batch) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, targets, strict=True):
            ids, mask = padded([FEATURES[i]["input_ids"] for i in batch], side=side)
            carries, _ = padded([[0, *FEATURES[i]["loss_mask"][1:]] for i in batch], side=side)
            loss = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                position_ids=torch.from_numpy((mask.cumsum(axis=1) - 1).clip(min=0)),
                labels=torch.from_numpy(np.where(carries, ids, IGNORED)),
            ).loss * loss_weight(count, sum(targets))
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": losses,
        "gradients": optimizer.gradients,
        "weights": [p.detach().numpy() for p in model.parameters()],
    }
    agree([found], one_process(llama, steps))


def accelerate_rank(number: int) -> Any:
    """The loop with accelerate of the docstring."""
    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = RecordingSGD(model)
    losses: list[float] = []
    model.register_forward_hook(lambda module, arguments, output: losses.append(float(output.loss)))
    names = {
        "DataLoader": DataLoader,
        "DistributedTokenBatchSampler": DistributedTokenBatchSampler,
        "PackingCollator": PackingCollator,
        "prepare_data_loader": prepare_data_loader,
        "accelerator": accelerator,
        "lengths": LENGTHS,
        "features": FEATURES,
        "max_tokens": MAX_TOKENS,
        "num_epochs": 2,
        "model": model,
        "optimizer": optimizer,
    }
    exec(example("accelerate"), names)
    twice = DataLoader(FEATURES, batch_sampler=names["sampler"], collate_fn=PackingCollator())  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=f"already those of rank {number} of 2 .* do not give their loader"):
        accelerator.prepare(twice)
    weights = [p.detach().numpy() for p in model.parameters()]
    return {"losses": losses, "gradients": optimizer.gradients, "weights": weights}


def test_accelerate_trains_as_one_process_does_and_cannot_divide_the_batches_twice(run_ranks: Any) -> None:
    def rank(env: Any) -> Any:
        env.export()
        return ended(accelerate_rank(env.rank))

    sampler = DistributedTokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, num_replicas=2, rank=0)
    steps = steps_of(sampler.plan)
    sampler.set_epoch(1)
    agree(run_ranks(2, rank), one_process(llama, steps + steps_of(sampler.plan)))


def trainer_rank(folder: str, *, resumed: bool = False) -> Any:
    """The Trainer of the docstring; it saves after `STOP` steps, and goes on from there if it is `resumed`."""
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", num_train_epochs=2, max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to=[], save_steps=STOP, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    names = {
        "Trainer": Trainer,
        "DataLoader": DataLoader,
        "DistributedTokenBatchSampler": DistributedTokenBatchSampler,
        "prepare_data_loader": prepare_data_loader,
        "lengths": LENGTHS,
        "max_tokens": MAX_TOKENS,
    }
    exec(example("The Trainer"), names)
    model = llama()
    optimizer = RecordingSGD(model)
    losses: list[float] = []  # the Trainer doubles them for DDP's mean after the forward
    model.register_forward_hook(lambda module, arguments, output: losses.append(2 * float(output.loss)))
    trainer = names["PackedTrainer"](  # type: ignore[operator]
        model=model,
        args=arguments,
        train_dataset=FEATURES,
        data_collator=PackingCollator(),
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STOP}" if resumed else None)
    weights = [p.detach().numpy() for p in model.parameters()]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "logged": logged, "gradients": optimizer.gradients, "weights": weights}


def test_the_trainer_of_transformers_trains_and_resumes_as_one_process_does(run_ranks: Any, tmp_path: Path) -> None:
    def rank(env: Any) -> Any:
        env.export()
        return ended(trainer_rank(str(tmp_path / "out")))

    def resumed(env: Any) -> Any:
        env.export()
        return ended(trainer_rank(str(tmp_path / "out"), resumed=True))

    sampler = DistributedTokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, num_replicas=2, rank=0)
    steps = steps_of(sampler.plan)
    sampler.set_epoch(1)
    losses, gradients, weights = one_process(llama, steps + steps_of(sampler.plan))
    ranks = run_ranks(2, rank)
    agree(ranks, (losses, gradients, weights))
    assert ranks[0]["logged"] == pytest.approx(losses, abs=1e-3)
    agree(run_ranks(2, resumed), (losses[STOP:], gradients[STOP:], weights))
