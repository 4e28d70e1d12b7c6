"""What does not fit the memory here is refused before anything is built, and the flags that are named do fit."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.errors import LowMemoryError, PlanError
from dynapipe_ext.executor import free_memory
from dynapipe_ext.executor.checkpoints.folder import bytes_of_checkpoint
from dynapipe_ext.executor.free_memory import Room, free_bytes, most_free_bytes, sizes_of_devices
from dynapipe_ext.launch.job import model_folder, requested
from dynapipe_ext.launch.job.requested import requested_job
from dynapipe_ext.launch.job.room import Place, refuse_no_room
from dynapipe_ext.settings.tables import count_moments
from dynapipe_ext.settings.train_config import TrainConfig
from tests.unit.test_model_flags import LLAMA

GB = 10**9
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
NUM_8B = 8_030_261_248
LENGTHS = as_length_array([30, 2000, 9])
A_HOST, FOUR_GPUS = Room(free_bytes=23 * GB), Room(free_bytes=200 * GB, device_bytes=(80 * GB,) * 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 8B whose weights are a header and a hole."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA_8B))
    with (made / "model.safetensors").open("wb") as file:
        file.truncate(16 * GB)
    return made


def arguments(words: Sequence[str | Path]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    return parser.parse_args([*map(str, words)])


def settings(monkeypatch: pytest.MonkeyPatch, room: Room, words: Sequence[str | Path]) -> TrainConfig:
    monkeypatch.setattr(model_folder.Room, "here", lambda visible: room)
    return requested.config_from(arguments([*words, "--tokenizer", "bytes"]))


def refusal(config: TrainConfig, room: Room, lengths: Any = LENGTHS) -> str:
    with pytest.raises(PlanError) as refused:
        refuse_no_room(config, Place(room=room), lengths)
    return str(refused.value)


@pytest.mark.parametrize("weights", ["a hole", "none"])
def test_a_model_far_too_large_is_refused_at_once_without_its_weights(
    weights: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = ["--from-scratch"] if weights == "none" else []
    if scratch:
        (folder / "model.safetensors").unlink()
    monkeypatch.setattr(model_folder.Room, "here", lambda visible: A_HOST)
    args = arguments(["--model", folder, "--tokenizer", "bytes", *scratch])
    tracemalloc.start()
    start_s = time.process_time()
    with pytest.raises(PlanError, match=r"states of 1 rank here take 128\.5 GB, but 23\.0 GB are free here: ") as e:
        requested_job(args, Place(room=A_HOST))
    taken_s, (_, peak_bytes) = time.process_time() - start_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken_s < 2
    assert peak_bytes < 100e6
    there_are_weights = "here fits --lora --dtype bf16 (16.1 GB); " in str(e.value)
    assert there_are_weights is (weights == "a hole")
    assert f"`dynapipe estimate --model {folder}` says what other machines need" in str(e.value)


@pytest.mark.parametrize("words", [[], ["--pp", "4"], ["--tp", "2", "--pp", "2"], ["--dtype", "bf16"]], ids=" ".join)
def test_a_model_that_just_fits_is_let_through_and_one_whose_states_do_not_is_refused(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host, which ranks share: 16 bytes a parameter in float32, 18 in bfloat16."""
    config = settings(monkeypatch, A_HOST, ["--model", folder, *words])
    copies = 4096 * 65 if "--tp" in words else 0  # norms, of which each tensor parallel rank has its own
    states = (18 if "bf16" in words else 16) * (NUM_8B + copies)
    refuse_no_room(config, Place(room=Room(free_bytes=int(1.01 * states))))
    refusal(config, Room(free_bytes=states - 1), None)


def test_replicas_and_the_longest_sample_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = settings(monkeypatch, A_HOST, ["--model", folder])
    two = settings(monkeypatch, A_HOST, ["--model", folder, "--dp", "2"])
    exactly = Room(free_bytes=16 * NUM_8B + 2 * GB)
    refuse_no_room(one, Place(room=exactly), as_length_array([30]))
    assert "of 1 rank here and a micro-batch of the longest sample (8,000 tokens) take" in refusal(
        one, exactly, as_length_array([30, 8000])
    )
    assert "of 2 ranks here take 257.0 GB" in refusal(two, exactly, None)
    refuse_no_room(two, Place(room=exactly, num_ranks=1), as_length_array([30]))  # the other is on another machine
    pieces = settings(monkeypatch, A_HOST, ["--model", folder, "--pieces", "512"])
    refuse_no_room(pieces, Place(room=exactly), as_length_array([30, 8000]))


ROOMS = {
    "a host": A_HOST,
    "a small host": Room(free_bytes=12 * GB),
    "a large host": Room(free_bytes=200 * GB),
    "four GPUs": FOUR_GPUS,
    "two small GPUs": Room(free_bytes=200 * GB, device_bytes=(24 * GB,) * 2),
    "a small GPU": Room(free_bytes=23 * GB, device_bytes=(24 * GB,)),
}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("words", [[], ["--dp", "2"], ["--dtype", "bf16"], ["--lora"]], ids=" ".join)
def test_flags_that_are_named_fit_when_they_are_given(
    words: list[str], room: Room, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the memory limit that such a command has by default."""
    given = ["--model", folder, *words]
    try:
        refuse_no_room(settings(monkeypatch, room, given), Place(room=room), LENGTHS)
        return
    except PlanError as refused:
        said = str(refused)
    if "nothing would fit here" in said:
        return
    ways = re.sub(r" \([\d.]+ GB\)", "", said.partition("here fits ")[2].partition("; `dynapipe")[0]).split("; or ")
    assert ways
    for way in ways:
        flags, _, engine = way.partition("--deepspeed FILE with ")
        if engine:
            (tmp_path / "ds.json").write_text(engine)
            flags += f"--deepspeed {tmp_path / 'ds.json'}"
        config = settings(monkeypatch, room, [*given, *shlex.split(flags)])
        requested.refuse_settings(config, compare=False)
        refuse_no_room(config, Place(room=room), LENGTHS)


@pytest.mark.parametrize(
    ("optimizer", "num_moments"),
    [(None, 2), ("AdamW", 2), ("Adagrad", 1), ("SGD", 0), ({"type": "sgd", "params": {"momentum": 0.9}}, 1)],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "other_bytes"), [("float32", 8), ("bfloat16", 12)])
def test_states_are_those_of_the_optimizer_that_the_deepspeed_file_names(
    optimizer: Any, num_moments: int, dtype: str, other_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside weights and gradients; with 16-bit weights a master and an fp32 copy of gradients."""
    engine: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer}
    if isinstance(optimizer, str):
        engine = {"optimizer": {"type": optimizer}}
    (folder.parent / "ds.json").write_text(json.dumps(engine))
    words = ["--model", folder, "--deepspeed", folder.parent / "ds.json", "--dtype", dtype]
    config = settings(monkeypatch, Room(free_bytes=10**12), words)
    num_bytes = (other_bytes + 4 * num_moments) * NUM_8B
    named = re.search(r"take ([\d.]+) GB, but", refusal(config, Room(free_bytes=GB), lengths=None))
    assert named
    assert float(named[1]) == pytest.approx(num_bytes / 1e9, abs=0.1), "beside one token's activations"
    refuse_no_room(config, Place(room=Room(free_bytes=num_bytes + 2 * GB)))
    assert bytes_of_checkpoint(1000, dtype, config.deepspeed.num_moments) == 1000 * (
        (4 if dtype == "float32" else 6) + 4 * num_moments
    )


@pytest.mark.parametrize(
    ("made", "kind", "options"),
    [
        (torch.optim.AdamW, "AdamW", {}),
        (torch.optim.Adam, "Adam", {"amsgrad": True}),
        (torch.optim.Adagrad, "Adagrad", {}),
        (torch.optim.SGD, "SGD", {}),
        (torch.optim.SGD, "SGD", {"momentum": 0.9}),
    ],
)
def test_moments_are_as_many_as_the_optimizer_keeps(made: Any, kind: str, options: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = made([weight], lr=0.1, **options)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if torch.is_tensor(value))
    assert kept // 100 == count_moments(kind, options)
    assert count_moments("SGD", {"momentum": "auto"}) == 0, "DeepSpeed's default"


def test_held_out_samples_take_what_forwards_alone_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training they keep activations until B, here of all layers; in evaluation these go as they are used."""
    room = Room(free_bytes=145 * GB)
    config = settings(monkeypatch, room, ["--model", folder]).with_values(plan={"recompute": "none"})
    lengths = as_length_array([8000])
    assert "a micro-batch of the longest sample (8,000 tokens)" in refusal(config, room, lengths)
    refuse_no_room(config, Place(room=room), lengths, forwards_alone=True)
    pieces = config.with_values(plan={"pieces": 1024})
    refuse_no_room(pieces, Place(room=room), lengths)
    with pytest.raises(PlanError, match="a micro-batch of the longest sample"):  # which are not for forwards
        refuse_no_room(pieces, Place(room=Room(free_bytes=129 * GB)), lengths, forwards_alone=True)


def test_what_fits_is_named_by_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {}
    for name, room in ROOMS.items():
        try:
            refuse_no_room(settings(monkeypatch, room, ["--model", folder]), Place(room=room), LENGTHS)
            named[name] = "as it is"
        except PlanError as refused:
            said = str(refused)
            named[name] = (
                re.sub(r" \([\d.]+ GB\)", "", said.partition(": ")[2].removeprefix("here fits "))
                .partition("`")[0]
                .rstrip(":; ")
            )
    offloads = '"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}'
    offloading = f'{{"zero_optimization": {{"stage": 3, {offloads}}}}}'
    assert named == {
        "a host": "--lora --dtype bf16",
        "a small host": "nothing would fit here",
        "a large host": "as it is",
        "four GPUs": "--tp 1 --pp 2 --dp 1; or --lora",
        "two small GPUs": f"--deepspeed FILE with {offloading}; or --lora --tp 1 --pp 2 --dp 1",
        "a small GPU": "--lora --dtype bf16",
    }


def test_free_memory_is_that_of_the_tightest_control_group(tmp_path: Path) -> None:
    def group(path: str, **files: object) -> None:
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000000 kB\nMemAvailable:   1000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/x\n2:cpuset,memory:/a/b\n0::/job/step\n")
    assert (free_bytes(tmp_path), most_free_bytes(tmp_path)) == (1_024_000_000, 2_048_000_000)
    group("job", max=900_000_000, current=200_000_000, stat="anon 1\ninactive_file 50000000")
    group("job/step", max="max", current=1)
    assert (free_bytes(tmp_path), most_free_bytes(tmp_path)) == (750_000_000, 900_000_000)
    group("memory/a", limit_in_bytes=500_000_000, usage_in_bytes=100_000_000, stat="total_inactive_file 1000")
    assert free_bytes(tmp_path) == 400_001_000
    group("memory/a/b", limit_in_bytes=10, usage_in_bytes=100, stat="")
    assert free_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("visible", "gibibytes"), [(None, [80, 40]), ("", []), ("1", [40]), ("0,1", [80, 40]), ("GPU-b", [40]), ("7", [])]
)
def test_devices_are_those_that_ranks_may_use(
    visible: str | None, gibibytes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, 81920'\necho '1, GPU-bb, 40960'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sizes_of_devices(visible) == tuple(size << 30 for size in gibibytes)
    assert Room.here(visible).device_bytes == sizes_of_devices(visible)
    assert free_memory.usable_bytes(min(sizes_of_devices("0"))) == 9 * (80 << 30) // 10
    assert np.isclose(Room(free_bytes=80).of_a_rank(4), 20)


def test_ranks_of_one_machine_share_its_memory_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default each plans with its part, by the number that torchrun has started here."""
    words = ["--model", folder, "--dp", "8"]
    shares = {}
    for here in ("", "2", "8", "16"):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, "8") if here else monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        shares[here] = settings(monkeypatch, Room(free_bytes=800 * GB), words).plan.memory_limit_gb
    assert shares == {"": 90.0, "2": 360.0, "8": 90.0, "16": 90.0}


def test_memory_that_others_hold_may_come_back_and_what_the_machine_lacks_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(monkeypatch, A_HOST, ["--model", folder])
    for most, passes in ((129, True), (128, False)):
        with pytest.raises(PlanError) as refused:
            refuse_no_room(config, Place(room=Room(free_bytes=23 * GB, most_bytes=most * GB)))
        assert isinstance(refused.value, LowMemoryError) is passes
    on_devices = Room(free_bytes=23 * GB, most_bytes=999 * GB, device_bytes=(24 * GB,))
    with pytest.raises(PlanError) as refused:
        refuse_no_room(config, Place(room=on_devices))
    assert not isinstance(refused.value, LowMemoryError)
