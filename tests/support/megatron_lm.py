"""Converted checkpoints in the real Megatron-LM (core_v0.16.1), where `../shared` of a checkout lends a copy of it.

Samples cannot be chosen from outside, so the data repeat one of them: whatever Megatron shuffles, each sample of a
batch is the same, and its loss is what transformers computes of it. The first step has a learning rate of 0, so the
first validation is of the weights as they were converted; the second, of what the second step made of them, is compared
with the checkpoint that this run saves, converted back from Megatron's arguments alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared"
MEGATRON_LM = SHARED / "data" / "megatron-lm-core_v0.16.1.tar.xz"
NEEDS = ("six", "regex", "sentencepiece", "megatron.core", "transformers")  # what it imports
VOCAB, LENGTH = 130, 64  # nothing is padded at TP2
TP, PP = 2, 2
TIMEOUT_S = 240
_TRAINING = f"""--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 1
--lr-decay-iters 2 --weight-decay 0 --eval-iters 1 --eval-interval 1 --log-interval 1 --save-interval 2
--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --seq-length {LENGTH}"""
_ON_A_CPU = """--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm --use-cpu-initialization
--attention-backend unfused --no-rope-fusion --disable-jit-fuser"""
# Saving starts a process for a queue, which needs nothing of the program; as it is, it would import Megatron-LM again.
SITE = """import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import multiprocessing.spawn
    multiprocessing.spawn._fixup_main_from_path = lambda path: None
"""
_COMMAND = 'source "$0/megatron_args.sh" && exec "$@" "${MEGATRON_ARGS[@]}" '


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one sample, in nats a token: validated by Megatron-LM, and computed by transformers, before and after."""

    converted: tuple[float, float]
    trained: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        return tuple(abs(megatron - ours) for megatron, ours in (self.converted, self.trained))  # type: ignore[return-value]


def checkout(folder: Path) -> Path:
    """A copy of Megatron-LM in `folder`."""
    with tarfile.open(MEGATRON_LM) as archive:
        archive.extractall(folder, filter="data")
    return folder


def train_converted(family: str, folder: Path, megatron_lm: Path, target: str = "megatron") -> Losses:
    """Convert a tiny model to `folder`/megatron, train it there in two steps, convert it back to `folder`/back."""
    import torch

    from dynapipe_ext.launch import cli
    from tests.support.checkpoints import saved, tiny

    model = tiny(family, vocab_size=VOCAB)
    source = saved(model, folder / "source")
    layout = ["--tp", str(TP), "--pp", str(PP), "--vocab-divisible-by", "1"]
    assert cli.main(["convert", str(source), str(folder / "megatron"), "--to", target, *layout, "--verify"]) == 0
    sample = torch.randint(0, VOCAB - 1, (LENGTH,), generator=torch.Generator().manual_seed(1))
    _write_data(folder / "data", sample.numpy())
    validated = _run(folder, megatron_lm)
    assert cli.main(["convert", str(folder / "saved"), str(folder / "back"), "--to", "hf", "--verify"]) == 0
    trained = type(model).from_pretrained(folder / "back", attn_implementation="eager")
    return Losses((validated[1], _loss(model, sample)), (validated[2], _loss(trained, sample)))


def _loss(model: Any, sample: Any) -> float:
    import torch

    with torch.no_grad():
        logits = model(sample[None]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.float(), sample.roll(-1)))


def _write_data(prefix: Path, sample: Any) -> None:
    import numpy as np

    from dynapipe_ext.data.indexed_dataset import bin_path, idx_path, token_dtype, write_index

    dtype = token_dtype(VOCAB)
    tokens = np.tile(sample, 40).astype(dtype)
    bin_path(prefix).write_bytes(tokens.tobytes())
    write_index(idx_path(prefix), dtype, np.array([len(tokens)]))


def _run(folder: Path, megatron_lm: Path) -> dict[int, float]:
    """Validation losses by iteration."""
    data = [word for part in ("train", "valid") for word in (f"--{part}-data-path", str(folder / "data"))]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TP * PP)]
    program = [*ranks, str(SHARED / "megatron_on_cpu.py"), str(megatron_lm), "pretrain_gpt.py"]
    options = [*_TRAINING.split(), *_ON_A_CPU.split(), *data, "--save", str(folder / "saved")]
    (folder / "sitecustomize.py").write_text(SITE)
    places = os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        ["bash", "-c", _COMMAND + " ".join(options), str(folder / "megatron"), *program],
        env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
    )
    found = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    return {int(iteration): float(loss) for iteration, loss in found}
