"""`dynapipe train` on published models: from a checkpoint of any layout, the first loss is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_train_command import report_of
from tests.support.checkpoints import saved, tensors_in, tiny
from tests.support.given_costs import write_costs
from tests.support.preloaded import Preloaded

VOCABULARY, SAMPLES = 300, 30
SETTINGS = """
[run]
steps = {steps}
[topology]
tp = 2
pp = 2
dp = 1
layers_per_stage = [1, 3]
sequence_parallel = {sequence_parallel}
[data]
truncate = true
tokens_per_batch = 0
batch_size = {samples}
num_workers = 0
[plan]
costs = "{folder}/costs.json"
[job]
timeout_s = 480
strict = true
"""


def write_data(folder: Path, model: Path) -> None:
    """Samples of unequal lengths, and the tokenizer that was made from them."""
    examples = list(generate_examples(num_samples=SAMPLES, seed=3, families=["copy", "sort", "add"]))
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"input": e.input[:60], "target": e.target[:60]}) + "\n" for e in examples)
    )
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    library.train_from_iterator([e.input + e.target for e in examples], trainer)
    library.save(str(model / "tokenizer.json"))


def loss_of(model: Any, dataset: TokenDataset) -> float:
    """The mean over target tokens, one sample at a time."""
    total, count = 0.0, 0
    for i in range(len(dataset)):
        sample = dataset[i]
        tokens = torch.from_numpy(sample.tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].double()
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")[sample.first_target - 1 :]
        total, count = total + float(losses.sum()), count + len(losses)
    return total / count


@pytest.mark.parametrize(
    ("family", "converted"),
    [
        ("gpt2", None),
        ("gemma3_text", ["--tp", "2", "--pp", "1"]),
        ("deepseek_v3", None),
        ("gpt_oss", ["--tp", "1", "--pp", "2"]),
        ("llama4_text", ["--tp", "2", "--pp", "2"]),
    ],
)
def test_the_first_loss_is_that_of_transformers(
    preloaded: Preloaded, family: str, converted: list[str] | None, tmp_path: Path
) -> None:
    """Two by two ranks with uneven stages, packed rows, from the Hub's folder or one in Megatron's form. Dense layers
    before experts, sinks, and key heads learn whatever ranks share them. The other families: test_fine_tuning.py, and
    test_family_logits.py for ranks that no command starts."""
    # A large epsilon shows in the loss; a default in its place would not.
    shared = {"num_key_value_heads": 1} if family == "gemma3_text" else {}  # one key head for two ranks, as in 3 1B
    model = tiny(family, vocab_size=VOCABULARY, rms_norm_eps=0.03, **shared)
    num_steps = 3 if family in ("gemma3_text", "deepseek_v3", "gpt_oss") else 1
    has_experts = family in ("deepseek_v3", "gpt_oss", "llama4_text")
    folder = saved(model, tmp_path / "model")
    weights = folder
    if converted:
        weights = tmp_path / "megatron"
        assert main(["convert", str(folder), str(weights), "--to", "megatron", *converted]) == 0
    write_data(tmp_path, folder)
    settings = tmp_path / "run.toml"
    parallel = str(has_experts).lower()
    settings.write_text(SETTINGS.format(steps=num_steps, folder=tmp_path, samples=SAMPLES, sequence_parallel=parallel))
    config = TrainConfig.read(settings).with_values(model={"architecture": str(folder)})
    assert topology_of(config).layers_per_stage == (1, 3)
    write_costs(config, 290, tmp_path / "costs.json")
    flags = ["--architecture", str(folder), "--init-from", str(weights), "--tokenizer", str(folder / "tokenizer.json")]
    flags += ["--data", str(tmp_path / "data.jsonl")]
    preloaded.train("--config", str(settings), *flags, "--run-dir", str(tmp_path / "run"))
    dataset = TokenDataset.open(tmp_path / "run" / "data")
    assert len(np.unique(dataset.lengths[:, 0])) > 5
    losses = report_of(tmp_path / "run")["losses"]
    assert losses[0] == pytest.approx(loss_of(model, dataset), abs=1e-5)
    if num_steps > 1:
        plain = tmp_path / "plain.toml"
        text = settings.read_text().replace("layers_per_stage = [1, 3]\n", "")
        plain.write_text(text.replace("sequence_parallel = true", "sequence_parallel = false"))
        alone = ["--run-dir", str(tmp_path / "alone"), "--tp", "1", "--pp", "1", "--dp", "2"]
        preloaded.train("--config", str(plain), *flags, *alone)
        assert losses == pytest.approx(report_of(tmp_path / "alone")["losses"], abs=1e-5)
        assert losses[2] < losses[0]
    if family == "deepseek_v3":
        checkpoint, back = tmp_path / "run" / "checkpoints", tmp_path / "back"
        assert main(["convert", str(checkpoint), str(back), "--to", "hf", "--verify"]) == 0
        given, found = tensors_in(folder), tensors_in(back)
        assert found.keys() == given.keys()
        kept = {name for name in given if torch.equal(found[name], given[name])}
        assert kept == {name for name in given if name.endswith("e_score_correction_bias")}  # the rest has learnt
