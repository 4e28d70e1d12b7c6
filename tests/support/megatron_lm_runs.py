"""Runs of Megatron-LM's unchanged scripts, each on forked ranks of one process that has imported Megatron-LM.

`python megatron_lm_runs.py TREE FOLDER` reads FOLDER/runs.json and writes what each rank printed to FOLDER/NAME.RANK;
`megatron_lm_runs` starts it. The tree is Megatron-LM's core_v0.16.1: `../shared` of a checkout lends a copy, or
DYNAPIPE_MEGATRON_LM names a clone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dynapipe_ext.executor.stages import megatron_cpu
from tests.support.megatron_lm_record import Record, Recorder
from tests.support.preloaded import keep_loaded

_BESIDE = [folder / "shared" for folder in Path(__file__).resolve().parents[3:5]]
SHARED = next((folder for folder in _BESIDE if (folder / "megatron_on_cpu.py").is_file()), _BESIDE[0])
ARCHIVE = SHARED / "data" / "megatron-lm-core_v0.16.1.tar.xz"
TREE_VARIABLE = "DYNAPIPE_MEGATRON_LM"
ABSENT = "no Megatron-LM: give DYNAPIPE_MEGATRON_LM=DIR, a clone at core_v0.16.1"
# A GPT that trains on a CPU in a second, on samples of one length.
_ARGUMENTS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 16 --train-iters 6 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 1
--lr-decay-iters 6 --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local
--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --use-cpu-initialization --log-interval 1 --eval-iters 1
--eval-interval 1000 --attention-dropout 0 --hidden-dropout 0 --use-mcore-models --attention-backend unfused
--no-rope-fusion --position-embedding-type rope --calculate-per-token-loss --ckpt-format torch_dist
--disable-jit-fuser --log-throughput"""
ARGUMENTS = _ARGUMENTS.split()


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """Less these options, each of which has one value."""
    dropped = {i for name in options for i, word in enumerate(arguments) if word == f"--{name}"}
    return [word for i, word in enumerate(arguments) if not {i, i - 1} & dropped]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a script of Megatron-LM: as it is, or by `python -m dynapipe_ext.megatron` with `planned`, whose planned
    micro-batches run by Megatron's own 1F1B with `by_1f1b`."""

    name: str
    num_ranks: int
    arguments: Sequence[str] = field(default_factory=list)
    planned: bool = True
    script: str = "pretrain_gpt.py"
    by_1f1b: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run's ranks printed, each with its exit status, what the log of all says of each iteration, and what each
    rank's training came to (see `megatron_lm_record`)."""

    status: int
    printed: tuple[str, ...]
    records: tuple[Record, ...]

    @property
    def log(self) -> str:
        return "\n".join(self.printed)

    def column(self, name: str) -> list[float]:
        """A column of the iterations' log lines."""
        lines = [line for line in self.log.splitlines() if " iteration " in line and "elapsed" in line]
        return [float(re.search(rf"{re.escape(name)}: +(\S+)", line)[1]) for line in lines]  # type: ignore[index]

    @property
    def tflops(self) -> list[float]:
        """What Megatron-LM counts of each iteration, on all ranks, as its throughput says."""
        tflops_per_s, times_ms = self.records[-1]["tflops_per_s"], self.column("elapsed time per iteration (ms)")
        return [len(self.records) * one * time_ms / 1e3 for one, time_ms in zip(tflops_per_s, times_ms, strict=True)]

    @property
    def losses(self) -> list[float]:
        return self.column("lm loss")

    @property
    def validated(self) -> list[float]:
        return [float(loss) for loss in re.findall(r"lm loss value: (\S+)", self.log)]


def missing() -> str:
    """Why these runs cannot be had here; empty where they can."""
    has_tree = os.environ.get(TREE_VARIABLE) or ARCHIVE.is_file()
    return "" if has_tree and (SHARED / "megatron_on_cpu.py").is_file() else ABSENT


def tree(folder: Path) -> Path:
    """Megatron-LM: the user's, or a copy in `folder`."""
    if given := os.environ.get(TREE_VARIABLE):
        return Path(given).resolve()
    import tarfile

    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def megatron_lm_runs(runs: Sequence[Run], folder: Path, *, timeout_s: float) -> dict[str, Ran]:
    """By name; runs that fail have their status."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    places = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    runner = subprocess.Popen(
        [sys.executable, __file__, str(tree(folder / "megatron-lm")), str(folder)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        said, _ = runner.communicate(timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGKILL)
    assert runner.returncode == 0, said[-6000:]
    ran = {}
    for run in runs:
        printed = tuple((folder / f"{run.name}.{rank}").read_text() for rank in range(run.num_ranks))
        statuses = [int((folder / f"{run.name}.{rank}.status").read_text()) for rank in range(run.num_ranks)]
        records = tuple(torch.load(folder / f"{run.name}.{rank}.pt") for rank in range(run.num_ranks))
        ran[run.name] = Ran(max(statuses), printed, records)
    return ran


def _place(megatron_lm: Path, script: str) -> str:
    """Of a script of Megatron-LM's, or of one beside this file."""
    own = Path(__file__).with_name(script)
    return str(own if own.is_file() else megatron_lm / script)


def _read_docstrings_once() -> None:
    """Of the classes that Megatron-LM makes its arguments of: it parses their files to say help, a second a rank."""
    factory = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read, known = factory._get_field_docstrings, {}

    def remembered(self: typing.Any, kind: type) -> typing.Any:
        if kind not in known:
            known[kind] = read(self, kind)
        return known[kind]

    factory._get_field_docstrings = remembered
    arguments = importlib.import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def main() -> None:
    megatron_lm, folder = map(Path, sys.argv[1:])
    spec = importlib.util.spec_from_file_location("megatron_on_cpu", SHARED / "megatron_on_cpu.py")
    assert spec
    assert spec.loader
    on_cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_cpu)
    if importlib.util.find_spec("six") is None:  # of which tokenizers ask only this
        sys.modules["six"] = types.ModuleType("six")
        sys.modules["six"].PY3 = True  # type: ignore[attr-defined]
    if not hasattr(typing, "override"):  # Megatron-LM from 0.18 on is for Python 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    runs = [Run(**run) for run in json.loads((folder / "runs.json").read_text())]
    with megatron_cpu.triton_named():
        on_cpu.prepare(megatron_lm)
        for script in {run.script for run in runs}:
            runpy.run_path(_place(megatron_lm, script), run_name="imported")  # once, for all ranks
    from dynapipe_ext.executor.drop_in import drop_in
    from dynapipe_ext.executor.drop_in import script as planned
    from dynapipe_ext.launch.processes.cluster import run_local
    from dynapipe_ext.launch.processes.env import RankEnv
    from tests.support.megatron_lm_1f1b import run_by_1f1b
    from tests.support.megatron_saves import keep_results_in_rank

    keep_results_in_rank()
    _read_docstrings_once()
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(routers).setdefault("te_general_gemm", None)  # which stock routers ask for without Transformer Engine, too
    recorder = Recorder(importlib.import_module("megatron.training.training"))
    keep_loaded()
    for run in runs:

        def rank_main(env: RankEnv, run: Run = run) -> int:
            env.export()
            status = 1
            place = folder / f"{run.name}.{env.rank}"
            with place.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                try:
                    path = _place(megatron_lm, run.script)
                    if run.by_1f1b:
                        drop_in.ForwardBackward._run_planned = run_by_1f1b  # type: ignore[method-assign]
                    if run.planned:
                        status = planned.main([path, *run.arguments])
                    else:
                        sys.argv = [path, *run.arguments]
                        runpy.run_path(path, run_name="__main__")
                        status = 0
                except SystemExit as error:
                    status = error.code if isinstance(error.code, int) else int(bool(error.code))
                except Exception:  # noqa: BLE001 - it is in the rank's file, and its status says so
                    traceback.print_exc()
                if writer := importlib.import_module("megatron.training.global_vars").get_tensorboard_writer():
                    writer.flush()  # a forked rank ends without what the interpreter does at its end
                sys.stdout.flush()
                sys.stderr.flush()
            Path(f"{place}.status").write_text(str(status))
            recorder.save(Path(f"{place}.pt"))
            return 0

        run_local(rank_main, run.num_ranks, timeout_s=240)


if __name__ == "__main__":
    main()
