"""`dynapipe train --model DIR --data FILE --output DIR` beside a plain loop of transformers, one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.data.pairs import PairSample
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.launch.job.model_folder import load_initial_weights
from dynapipe_ext.launch.job.own_outputs import note_output
from dynapipe_ext.launch.job.requested import refuse_output
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.run.trained_model import write_trained_model
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.settings.tables import OptimizerSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.checkpoint import carried_files, recognise
from tests.integration.test_train_command import report_of
from tests.support.checkpoints import differences, saved, tensors_in, tiny
from tests.support.given_costs import write_costs
from tests.support.model_folders import VOCABULARY, model_folder, write_chats, write_pairs, write_texts
from tests.support.preloaded import Preloaded

STEPS, BATCH, SAMPLES, DECAY = 7, 4, 20, 0.1
LR, LEAST, WARMUP = 2e-3, 2e-4, 2


@dataclass(frozen=True)
class Case:
    """A family, the ranks it is trained on, and the kind of its data."""

    family: str
    ranks: tuple[int, int, int]
    write: Callable[..., Path]
    schedule: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.family}-tp{self.ranks[0]}-pp{self.ranks[1]}-dp{self.ranks[2]}"


# Every family once, every kind of data twice; ranks alone, along each axis, and along all.
CASES = [
    Case("llama", (1, 2, 1), write_chats, "cosine", ("--placement", "v")),
    Case("mistral", (2, 1, 1), write_pairs, "linear"),
    Case("mixtral", (1, 1, 1), write_texts, "wsd"),
    Case("qwen2", (2, 1, 1), write_texts, "constant"),
    Case("qwen3", (2, 1, 2), write_chats, "cosine"),
    Case("gpt2", (1, 2, 1), write_pairs, "linear", ("--split-backward",)),
]


@pytest.fixture(scope="module")
def trained(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, data, run and trained model of each case, by its name."""
    root = tmp_path_factory.mktemp("fine-tuning")
    for case in CASES:
        folder = root / case.name
        names = ("n_layer", "layer_norm_epsilon") if case.family == "gpt2" else ("num_hidden_layers", "rms_norm_eps")
        sizes = dict(zip(names, (4 if "v" in case.flags else 2, 0.03), strict=True))  # a default would show
        model = model_folder(case.family, folder / "model", **sizes)
        data = case.write(folder / "data.jsonl", SAMPLES)
        config = TrainConfig().with_values(model={"architecture": str(model)}, topology={"tp": 1, "pp": 1, "dp": 1})
        write_costs(config, VOCABULARY, folder / "costs.json")
        ranks = [word for flag, n in zip(("--tp", "--pp", "--dp"), case.ranks, strict=True) for word in (flag, str(n))]
        given = ["--model", str(model), "--data", str(data), "--output", str(folder / "trained"), *ranks, *case.flags]
        given += ["--run-dir", str(folder / "run"), "--costs", str(folder / "costs.json"), "--strict"]
        given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--num-workers", "0", "--memory-limit-gb", "1"]
        given += ["--lr", str(LR), "--min-lr", str(LEAST), "--weight-decay", str(DECAY)]
        given += ["--lr-schedule", case.schedule, "--warmup", "0.3", "--betas", "0.9,0.95"]
        preloaded_transformers.train(*given, "--eval-fraction", "0.2", "--eval-every", str(STEPS))
    return root


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    is_target: torch.Tensor


def samples_of(run: Path) -> tuple[list[Sample], list[Sample]]:
    """What the run trained on and what it held out, as its own split says."""
    from dynapipe_ext.launch.job.run_data import run_data

    config = TrainConfig.read(run / "config.toml")
    data = run_data(config.with_values(data={"path": str(run / "data")}))
    assert data.held_out is not None

    def samples(part: Any) -> list[Sample]:
        return [sample_of(part[i]) for i in range(len(part))]

    return samples(data.train), samples(data.held_out)


def sample_of(prepared: Any) -> Sample:
    return Sample(torch.from_numpy(prepared.tokens), torch.from_numpy(np.array(prepared.is_target)))


def loss_sum(model: Any, sample: Sample) -> torch.Tensor:
    logits = model(input_ids=sample.tokens[None, :-1], use_cache=False).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits, sample.tokens[1:], reduction="none")
    return losses[sample.is_target[1:]].sum()


def num_targets(samples: list[Sample]) -> int:
    return int(sum(sample.is_target[1:].sum() for sample in samples))


def pair_loss(model: Any, pair: PairSample) -> torch.Tensor:
    """Of an encoder-decoder, its sum over a target."""
    source, labels = torch.from_numpy(pair.source)[None], torch.from_numpy(pair.labels)
    logits = model(input_ids=source, labels=labels[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def pair_targets(pairs: list[PairSample]) -> int:
    return sum(len(pair.labels) for pair in pairs)


def rate(schedule: str, step: int) -> float:
    """The learning rate of a step, from 1, as the field has these schedules."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done, last_tenth = (step - WARMUP) / (STEPS - WARMUP), max(0, step - 0.9 * STEPS) / (0.1 * STEPS)
    parts = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "wsd": 1 - last_tenth, "constant": 1}
    return LEAST + (LR - LEAST) * parts[schedule]


def plain_losses(
    model: Any,
    samples: Sequence[Any],
    batches: Iterator[list[int]],
    schedule: str,
    *,
    loss_of: Callable[[Any, Any], torch.Tensor] = loss_sum,
    targets_of: Callable[[list[Any]], int] = num_targets,
) -> list[float]:
    """The losses of a training loop without anything of this project."""
    names = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    decayed = [p for name, p in model.named_parameters() if name in names]
    others = [p for name, p in model.named_parameters() if name not in names]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(schedule, step)
        divisor, total = targets_of([samples[i] for i in batch]), 0.0
        for index in batch:
            loss = loss_of(model, samples[index]) / divisor
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def global_batches(num_samples: int) -> Iterator[list[int]]:
    epoch, left = 0, STEPS
    while left:
        batches = GlobalBatches(np.ones(num_samples, np.int64), batch_size=BATCH, seed=0, epoch=epoch)
        for step in range(min(left, len(batches))):
            yield list(batches[step])
        left -= min(left, len(batches))
        epoch += 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_the_saved_model_are_those_of_a_plain_loop(case: Case, trained: Path) -> None:
    """All steps, then the validation loss of the weights, then the folder: loaded by transformers, and bit for bit."""
    folder = trained / case.name
    report, (train, held_out) = report_of(folder / "run"), samples_of(folder / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    losses = plain_losses(model, train, global_batches(len(train)), case.schedule)
    assert report["losses"] == pytest.approx(losses, rel=1e-5)
    assert report["losses"][-1] < 0.9 * report["losses"][0]

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "trained", attn_implementation="eager")
    with torch.no_grad():
        total = sum(float(loss_sum(saved, sample)) for sample in held_out)
        tokens = held_out[0].tokens[None]
        torch.testing.assert_close(saved(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-4)
    assert report["evaluations"][-1]["loss"] == pytest.approx(total / num_targets(held_out), rel=1e-6)

    checkpoint = folder / "run" / "checkpoints" / f"iter_{STEPS:07d}"
    reader = recognise(checkpoint)[0].open(checkpoint)
    assert {file.name: file.read_bytes() for file in reader.files} == {
        file.name: file.read_bytes() for file in carried_files(folder / "model")
    }
    held = {name: t for group in tensor_groups(reader.architecture) for name, t in reader.read(group, "weight").items()}
    assert not differences(tensors_in(folder / "trained"), held)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "trained")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(folder / "model").chat_template
    assert math.isfinite(total)
    assert (folder / "trained" / "generation_config.json").is_file()


def test_the_model_may_be_left_in_the_place_of_an_old_one_and_through_a_link(trained: Path, tmp_path: Path) -> None:
    run = trained / CASES[4].name / "run"
    config = TrainConfig.read(run / "config.toml")
    link, place = tmp_path / "link", tmp_path / "disk" / "out"
    link.symlink_to(place)
    config = config.with_values(checkpoint={"output": str(link)})
    place.mkdir(parents=True)
    (place / "notes").write_text("old")
    line = write_trained_model(config, run, overwrite=True)
    assert line == f"the model after step {STEPS} is in {link} (hf)"
    assert [path.name for path in place.parent.iterdir()] == ["out"]
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link"}
    assert not (place / "notes").exists()
    reader, wanted = (recognise(at)[0].open(at) for at in (place, run / "checkpoints" / f"iter_{STEPS:07d}"))
    for group in tensor_groups(wanted.architecture):
        assert not differences(reader.read(group, "weight"), wanted.read(group, "weight"))
    assert {"tokenizer.json", "config.json"} <= {path.name for path in place.rglob("*")}


def test_a_model_whose_place_was_taken_meanwhile_is_whole_beside_it(trained: Path, tmp_path: Path) -> None:
    run = trained / CASES[1].name / "run"
    config = TrainConfig.read(run / "config.toml").with_values(checkpoint={"output": str(tmp_path / "out")})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    with pytest.raises(DataError, match=r"out cannot be put in place .*: the model is whole in .*\.out\.written"):
        write_trained_model(config, run, overwrite=False)
    assert (tmp_path / "out" / "notes").exists()
    assert tensors_in(tmp_path / ".out.written")


def test_a_run_replaces_the_output_that_it_wrote_itself_and_no_other(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.symlink_to(trained / CASES[1].name / "run")
    config = TrainConfig.read(run / "config.toml").with_values(checkpoint={"output": str(tmp_path / "out")})
    for _ in range(2):
        line = write_trained_model(config, run, overwrite=False)
        refuse_output(config, str(run), overwrite=False)
    assert line == f"the model after step {STEPS} is in {tmp_path / 'out'} (hf)"
    with pytest.raises(ConfigError, match="out holds something: choose another folder, or lose that by --overwrite"):
        refuse_output(config, str(tmp_path / "another"), overwrite=False)
    (tmp_path / "next").mkdir()
    for _ in range(2):
        note_output(run, str(tmp_path / "out"), tmp_path / "next")  # and then it was killed
    refuse_output(config, str(run), overwrite=False)
    (tmp_path / "out" / "notes").mkdir()
    with pytest.raises(ConfigError, match="out holds something: choose another folder, or lose that by --overwrite"):
        refuse_output(config, str(run), overwrite=False)
    with pytest.raises(DataError, match=r"out cannot be put in place"):
        write_trained_model(config, run, overwrite=False)


def test_a_wider_checkpoint_is_rounded_to_the_weights_and_whole_in_their_masters(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    folder = saved(tiny("llama"), tmp_path / "model")
    architecture, _ = read_model(str(folder))

    def loads(env: RankEnv) -> bool:
        megatron_cpu.install()
        from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_parallel, transformer_config
        from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
        from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp

        torch.distributed.init_process_group("gloo", init_method=env.init_method, rank=0, world_size=1)
        initialize_parallel(Topology(), 0)
        cpu = torch.device("cpu")

        def loaded(dtype: Any) -> tuple[Any, Any]:
            config = transformer_config(architecture, Topology(), dtype=dtype)
            model = build_model(architecture, Topology(), 0, config, seed=None, device=cpu)
            load_initial_weights(model, str(folder), architecture)
            return model, config

        given = list(loaded("float32")[0].parameters())
        same = [not torch.equal(given[0], given[0].bfloat16().float())]
        for distributed in (False, True):
            model, config = loaded("bfloat16")
            chunks = [wrap_ddp(model, config, distributed_optimizer=distributed)]
            MegatronOptimizer(chunks, config, OptimizerSettings(distributed=distributed), num_steps=1)
            for weight, whole in zip(model.parameters(), given, strict=True):
                same += [torch.equal(weight, whole.bfloat16()), torch.equal(weight.main_param.view(-1), whole.view(-1))]
        torch.distributed.destroy_process_group()
        return all(same)

    assert run_ranks(1, loads) == [True]
