"""`dynapipe train` on pairs: a published T5 learns what transformers says it learns, on any topology, and goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.pairs import PairDataset
from dynapipe_ext.data.sample_selection import hold_out
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_train_command import report_of
from tests.support.checkpoints import saved, tiny
from tests.support.given_costs import write_costs
from tests.support.preloaded import Preloaded

VOCABULARY, SAMPLES = 300, 24
SETTINGS = """
[run]
steps = 2
[topology]
tp = 2
pp = 2
dp = 1
layers_per_stage = [5, 3]
[model]
max_seq_len = 160
[data]
truncate = true
tokens_per_batch = 0
batch_size = {samples}
num_workers = 0
[plan]
costs = "{folder}/costs.json"
[optimizer]
lr = 1e-3
min_lr = 1e-4
[eval]
every = 2
fraction = 0.25
[job]
timeout_s = 480
strict = true
"""


def write_pairs(folder: Path, model: Path) -> None:
    """Pairs of unequal lengths, and the tokenizer that was made from them: inputs end as targets do, by </s>."""
    examples = list(generate_examples(num_samples=SAMPLES, seed=3, families=["copy", "sort", "add"]))
    lines = [{"input": e.input[:90], "target": e.target[:40]} for e in examples]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    library.train_from_iterator([e.input + e.target for e in examples], trainer)
    library.save(str(model / "tokenizer.json"))


def loss_of(model: Any, pairs: PairDataset) -> float:
    """The mean over target tokens, one pair at a time, as transformers computes it."""
    total, count = 0.0, 0
    for i in range(len(pairs)):
        source, labels = (torch.from_numpy(x) for x in (pairs[i].source, pairs[i].labels))
        with torch.no_grad():
            logits = model(input_ids=source[None], labels=labels[None], use_cache=False).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    return total / count


def test_a_published_t5_trains_as_transformers_computes_it_and_is_converted_back(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    """The first loss is that of the folder's weights; the validation loss and, after a resumption in a V, the next
    training loss are those of the weights that the checkpoint converts to."""
    # A large epsilon shows in the loss; a default in its place would not.
    model = tiny("t5", vocab_size=VOCABULARY, layer_norm_epsilon=0.03, num_decoder_layers=4)
    folder = saved(model, tmp_path / "model")
    write_pairs(tmp_path, folder)
    settings = tmp_path / "run.toml"
    settings.write_text(SETTINGS.format(folder=tmp_path, samples=SAMPLES * 3 // 4))
    config = TrainConfig.read(settings).with_values(model={"architecture": str(folder)})
    assert topology_of(config).layers_per_stage == (5, 3)
    write_costs(config, 290, tmp_path / "costs.json")
    flags = ["--architecture", str(folder), "--init-from", str(folder), "--tokenizer", str(folder / "tokenizer.json")]
    flags += ["--data", str(tmp_path / "pairs.jsonl"), "--run-dir", str(tmp_path / "run")]
    preloaded.train("--config", str(settings), *flags)
    train, held_out = (
        PairDataset.of(part) for part in hold_out(TokenDataset.open(tmp_path / "run" / "data"), 0.25, seed=0)
    )
    report = report_of(tmp_path / "run")
    assert report["losses"][0] == pytest.approx(loss_of(model, train), abs=1e-5)

    assert main(["convert", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "trained"), "--to", "hf"]) == 0
    trained = type(model).from_pretrained(tmp_path / "trained", attn_implementation="eager")
    assert report["evaluations"][0]["loss"] == pytest.approx(loss_of(trained, held_out), abs=1e-5)
    go_on = ["--resume", str(tmp_path / "run"), "--steps", "3", "--tp", "1", "--placement", "v", "--layout", "padded"]
    preloaded.train(*go_on, "--split-backward")
    assert report_of(tmp_path / "run")["losses"][2] == pytest.approx(loss_of(trained, train), abs=1e-5)
    assert main(["convert", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "again"), "--to", "hf"]) == 0
