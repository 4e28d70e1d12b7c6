"""`dynapipe train --preferences` beside a plain loop of torch and transformers, one pair at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.launch.job.run_data import run_data
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_train_command import report_of
from tests.support.given_costs import write_costs
from tests.support.model_folders import VOCABULARY, model_folder, write_chat_preferences, write_preferences
from tests.support.preloaded import Preloaded

BATCH, PAIRS, BETA = 4, 24, 0.3
LR, LEAST = 2e-4, 2e-5


@dataclass(frozen=True)
class Case:
    """What is learned by which loss, of what data, on which ranks."""

    loss: str
    write: Callable[..., Path]
    ranks: tuple[str, ...]
    options: tuple[str, ...] = ()
    family: str = "llama"

    @property
    def steps(self) -> int:
        """Of one case as many as TRL's losses are promised for, of the others fewer."""
        return 20 if self.loss == "dpo" and self.write is write_preferences else 8

    @property
    def name(self) -> str:
        return "-".join((self.loss, *self.ranks, *self.options)).replace("--", "").replace("/", "")


TRANSFORMERS = ("--backend", "transformers")
CASES = [
    Case("dpo", write_preferences, ("--tp", "2", "--pp", "2", "--vocabulary-parallel", "head")),
    Case("dpo", write_chat_preferences, ("--pp", "2", "--placement", "v"), (*TRANSFORMERS, "--layout", "padded")),
    Case(
        "ipo",
        write_chat_preferences,
        ("--pp", "2", "--dp", "2", "--context-parallel", "2", "--placement", "v", "--split-backward"),
    ),
    Case("orpo", write_chat_preferences, ("--dp", "2", "--context-parallel", "2"), TRANSFORMERS),
    Case("simpo", write_preferences, ("--pp", "2"), TRANSFORMERS),
]


@pytest.fixture(scope="module")
def trained(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, data and run of each case, by its name."""
    root = tmp_path_factory.mktemp("preferences")
    for case in CASES:
        folder = root / case.name
        model_folder(case.family, folder / "model", num_hidden_layers=4)
        case.write(folder / "data.jsonl", PAIRS)
        preloaded_transformers.train(*given(case, folder), cwd=folder)
    return root


def given(case: Case, folder: Path) -> list[str]:
    backend = case.options[1] if "--backend" in case.options else "auto"
    named = {"architecture": str(folder / "model"), "backend": backend}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, folder / "costs.json")
    flags = ["--model", "model", "--data", "data.jsonl", "--preferences", case.loss, "--beta", str(BETA)]
    flags += ["--run-dir", "run", "--costs", "costs.json", "--memory-limit-gb", "1", "--strict", *case.options]
    flags += ["--steps", str(case.steps), "--batch-size", str(BATCH), "--num-workers", "0", "--weight-decay", "0"]
    flags += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "linear", "--warmup", "0"]
    ranks = {"--tp": "1", "--pp": "1", "--dp": "1"} | {
        flag: value
        for flag, value in zip(case.ranks, case.ranks[1:], strict=False)
        if flag in ("--tp", "--pp", "--dp", "--context-parallel")
    }
    others = [
        word for word in case.ranks if word in ("--placement", "v", "--split-backward", "--vocabulary-parallel", "head")
    ]
    return [*flags, *(word for pair in ranks.items() for word in pair), *others]


def log_probabilities(model: Any, tokens: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Of the target tokens of one document, (targets,)."""
    logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].double()
    chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return chosen[is_target[1:]]


def answers_of(model: Any, pair: Any) -> list[torch.Tensor]:
    tokens, targets = torch.from_numpy(pair.tokens), torch.from_numpy(np.array(pair.is_target))
    parts = slice(pair.num_first), slice(pair.num_first, None)
    return [log_probabilities(model, tokens[part], targets[part]) for part in parts]


def loss_and_rewards(loss: str, p: list[torch.Tensor], r: list[torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
    """Of a pair by its answers' log probabilities, and the reference's; the papers' formulas, written once more."""
    ratios = [a.sum() - b.sum() for a, b in zip(p, r, strict=True)]
    means = [a.mean() for a in p]
    match loss:
        case "dpo":
            return -logsigmoid(BETA * (ratios[0] - ratios[1])), [float(BETA * x) for x in ratios]
        case "ipo":
            chosen, rejected = (ratio / len(a) for ratio, a in zip(ratios, p, strict=True))
            return (chosen - rejected - 1 / (2 * BETA)) ** 2, [float(BETA * x) for x in ratios]
        case "orpo":
            odds = [mean.exp() / (1 - mean.exp()) for mean in means]
            return -means[0] - BETA * logsigmoid((odds[0] / odds[1]).log()), [float(BETA * x) for x in means]
        case _:
            return -logsigmoid(BETA * means[0] - BETA * means[1] - 1.0), [float(BETA * x) for x in means]


def plain_loop(case: Case, model: Any, pairs: list[Any]) -> Iterator[tuple[float, list[list[float]]]]:
    """(loss, rewards of its pairs) of each step."""
    with torch.no_grad():
        references = [answers_of(model, pair) for pair in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(case.steps):
        epoch, place = divmod(step, -(-len(pairs) // BATCH))
        batch = GlobalBatches(np.ones(len(pairs), np.int64), batch_size=BATCH, seed=0, epoch=epoch)[place]
        optimizer.param_groups[0]["lr"] = LR + (LEAST - LR) * (step + 1) / case.steps
        total, rewards = 0.0, []
        for index in batch:
            of_pair, reward = loss_and_rewards(case.loss, answers_of(model, pairs[index]), references[index])
            (of_pair / len(batch)).backward()
            total += float(of_pair.detach()) / len(batch)
            rewards.append(reward)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total, rewards


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_rewards_are_those_of_a_plain_loop(case: Case, trained: Path, monkeypatch: pytest.MonkeyPatch):
    folder = trained / case.name
    monkeypatch.chdir(folder)
    data = run_data(TrainConfig.read("run/config.toml"))
    pairs = [data.train[i] for i in range(len(data.train))]
    model = transformers.AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
    steps = list(plain_loop(case, model, pairs))
    report = report_of(Path("run"))
    assert report["losses"] == pytest.approx([loss for loss, _ in steps], rel=1e-5)
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()[1:]]
    for line, (_, rewards) in zip(lines, steps, strict=True):
        chosen, rejected = np.array(rewards).T
        learned = line["preferences"]
        assert learned["chosen_reward"] == pytest.approx(chosen.mean(), rel=1e-4, abs=2e-5)
        assert learned["margin"] == pytest.approx((chosen - rejected).mean(), rel=1e-4, abs=2e-5)
        if np.abs(chosen - rejected).min() > 1e-4:
            assert learned["accuracy"] == (chosen > rejected).mean()
    assert report["preferences"][-1]["margin"] > report["preferences"][0]["margin"]
    assert "What to try next" in Path("run/index.html").read_text()


SETTINGS = """
[preferences]
loss = "dpo"
[topology]
tp = 1
dp = 1
pp = {pp}
[data]
path = "data.jsonl"
tokenizer = "model"
tokens_per_batch = 0
batch_size = 6
num_workers = 0
[model]
architecture = "model"
init_from = "model"
backend = "transformers"
max_seq_len = 128
[plan]
split_policy = "packed-balanced"
max_tokens = 256
costs = "costs.json"
[optimizer]
deterministic = true
lr_schedule = "constant"
[eval]
every = 4
fraction = 0.25
[run]
steps = 8
"""


@pytest.fixture(scope="module")
def adapted(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of adapters: `alone/run` on one rank, `split/run` on two, and `split/again`, resumed."""
    root = tmp_path_factory.mktemp("adapters")
    model_folder("llama", root / "model", num_hidden_layers=4)
    write_preferences(root / "data.jsonl", PAIRS)
    named = {"architecture": str(root / "model"), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, root / "costs.json")
    for name, pp in (("alone", 1), ("split", 2)):
        (root / f"{name}.toml").write_text(SETTINGS.format(pp=pp))
        flags = ["--config", f"{name}.toml", "--run-dir", f"{name}/run", "--lora", "--save-every", "4"]
        said = preloaded_transformers.train(*flags, cwd=root)
        assert said.count("references: log probabilities of") == 2  # of the training and of the held-out part
    shutil.copytree(root / "split/run", root / "split/again")
    shutil.rmtree(root / "split/again/checkpoints/iter_0000008")
    said = preloaded_transformers.train("--resume", "split/again", cwd=root)
    assert "references: log probabilities" not in said
    return root


def test_adapters_learn_the_same_bits_on_any_stages_and_resumed_with_the_references_that_were_kept(adapted: Path):
    alone, split, again = (report_of(adapted / run) for run in ("alone/run", "split/run", "split/again"))
    assert alone["losses"] == split["losses"] == again["losses"]
    assert alone["preferences"] == split["preferences"] == again["preferences"]
    assert alone["evaluations"][-1]["loss"] == split["evaluations"][-1]["loss"] == again["evaluations"][-1]["loss"]
    assert alone["losses"][0] == pytest.approx(math.log(2), abs=1e-6)  # nothing is learned yet
    assert alone["losses"][-1] < alone["losses"][0]
    kept = [np.load(file) for file in sorted((adapted / "split/references").glob("*.npy"))]
    assert [len(one) for one in kept] in ([6, 18], [18, 6])


def test_references_are_those_of_the_base_model(adapted: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(adapted)
    data = run_data(TrainConfig.read("split/run/config.toml"))
    model = transformers.AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
    (kept,) = (one for file in Path("split/references").glob("*.npy") if len(one := np.load(file)) == 18)
    with torch.no_grad():
        sums = [[float(p.sum()) for p in answers_of(model, data.train[index])] for index in range(18)]
    np.testing.assert_allclose(kept, sums, rtol=1e-6)
