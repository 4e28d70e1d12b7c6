"""How many files a reader enters: those in which a function runs, from lengths to a finished step.

    python tests/bench/files_entered.py [--show]

plan      lengths to a proven step: analytic costs of a named model, planner, proof and instructions
library   a step of `PipelineExecutor` in one process: dataset, planner, loader, stage and executor of the README
train     `dynapipe train` with its own model: the command and its ranks until the first step has run
model     `dynapipe train --model FOLDER`: the same with a folder of transformers
A file is entered where one of its functions is called; what runs as it is imported does not count. With --show, the
files by folder. Prints one line a walk.
"""

from __future__ import annotations

import argparse
import inspect
import mmap
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("dynapipe_ext", "schedules", "executor", "tools", "launch")


class Entered:
    """Writes each file on entering it, in this process and in those that it forks, until a step has run in any."""

    def __init__(self, log: Path) -> None:
        self._fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._done = mmap.mmap(-1, 1)
        self._seen: set[str] = set()
        self._roots = tuple(f"{ROOT / room}{os.sep}" for room in ROOMS)
        self.log = log

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self._done[0]:
            return
        code = frame.f_code
        path = code.co_filename
        if event == "return" and code.co_name == "execute" and path.endswith("executor/engine.py"):
            self._done[0] = 1
        elif event == "call" and path not in self._seen and path.startswith(self._roots):
            if not code.co_flags & inspect.CO_OPTIMIZED or self._is_imported(frame):
                return  # a module, the body of a class, or what these call
            self._seen.add(path)
            os.write(self._fd, f"{os.path.relpath(path, ROOT)}\n".encode())

    def _is_imported(self, frame: FrameType) -> bool:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name != "<module>":
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename.startswith(self._roots)

    def files(self) -> list[str]:
        return sorted(set(self.log.read_text().split()))


def traced(work: Callable[[], None], log: Path) -> list[str]:
    entered = Entered(log)
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        work()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered.files()


def plan(scratch: Path) -> Callable[[], None]:
    from dynapipe_ext import ActivationFormat, AnalyticCosts, Planner, Topology
    from dynapipe_ext.batch.micro_batches import sample_lengths
    from dynapipe_ext.executor.proven_step import prove_step
    from dynapipe_ext.models.named_models import preset

    architecture = preset("llama-2-7b")

    def planning() -> None:
        topology = Topology(tp=2, pp=4, dp=2)
        costs = AnalyticCosts(architecture, topology, flops_per_s=150e12)
        planner = Planner(
            topology, costs, 60e9, format=ActivationFormat(architecture.hidden_size), effort=2000,
            split_backward=True, layout="packed", pieces="auto",
        )  # fmt: skip
        prove_step(planner, sample_lengths([40 * (1 + i * i // 8) for i in range(64)]), step=0)

    return planning


def library(scratch: Path) -> Callable[[], None]:
    import torch

    from dynapipe_ext import (
        ActivationFormat,
        DynaPipeDataLoader,
        InlineHub,
        PipelineExecutor,
        Planner,
        TokenCosts,
        Topology,
        TorchStage,
    )
    from dynapipe_ext.data.dataset import prepare
    from dynapipe_ext.data.examples import generate_examples

    dataset = prepare(
        lambda: generate_examples(num_samples=300, seed=0, families=["copy", "sort"]), scratch / "data",
        tokenizer="bytes", max_seq_len=1024, truncate=True,
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Embedding(dataset.vocab_size, 16), torch.nn.Linear(16, dataset.vocab_size))

    def loss_sum(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses * batch["loss_weights"].flatten()).sum()

    def step() -> None:
        planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, format=ActivationFormat(16))
        executor = PipelineExecutor(TorchStage(model, loss_sum), InlineHub().transport(0))
        for micro_batches, plan in DynaPipeDataLoader(dataset, planner, tokens_per_batch=4096, shuffle=True):
            executor.execute(plan, micro_batches)
            return

    return step


def command(*arguments: str) -> Callable[[], None]:
    from dynapipe_ext.launch.cli import main

    return lambda: sys.exit(main(["train", *arguments]))


def train(scratch: Path) -> Callable[[], None]:
    return command("--steps", "1", "--run-dir", str(scratch / "run"))


def model(scratch: Path) -> Callable[[], None]:
    sys.path.insert(0, str(ROOT))
    from tests.support.model_folders import model_folder, write_chats

    folder, chats = model_folder("llama", scratch / "model"), write_chats(scratch / "chats.jsonl", 40)
    arguments = ("--model", str(folder), "--data", str(chats), "--steps", "1", "--pp", "2")
    return command(*arguments, "--run-dir", str(scratch / "run"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("walks", nargs="*", default=["plan", "library", "train", "model"])
    args = parser.parse_args()
    sys.path.remove(str(Path(__file__).parent))  # in which megatron.py lies
    for name in args.walks:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            child = os.fork()
            if child == 0:
                work = {"plan": plan, "library": library, "train": train, "model": model}[name](scratch)
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                traced(work, scratch / "entered")
                os._exit(0)
            os.waitpid(child, 0)
            files = sorted(set((scratch / "entered").read_text().split()))
        print(f"{name}: {len(files)} files", flush=True)
        if args.show:
            for room, number in sorted(Counter(str(Path(file).parent) for file in files).items()):
                print(f"  {room} {number}: {', '.join(Path(f).stem for f in files if str(Path(f).parent) == room)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
