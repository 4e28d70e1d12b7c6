"""The direction of imports, and the few files at the rim that may touch heavy or ambient things."""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.support.limits import LIMIT_S

LAYERS = ("dynapipe_ext", "schedules", "executor", "tools", "launch")

# Facades re-export from every layer above them; nothing else may.
FACADES = {"dynapipe_ext/__init__.py", "dynapipe_ext/megatron.py"}

# Which files (patterns) may import each of these, at the top or inside a function.
RIM = {
    "torch": (
        "dynapipe_ext/batching/inference/generation.py",  # the driver of generate()
        "dynapipe_ext/batching/inference/loader.py",  # a DataLoader, and the driver of generate()
        "dynapipe_ext/batching/inference/memory_profiling.py",  # measures peaks of the user's model
        "dynapipe_ext/batching/packing/*.py",  # tensors of transformers models; packing is numpy
        "dynapipe_ext/batch/*_attention.py",
        "dynapipe_ext/megatron.py",
        "dynapipe_ext/models/module_tree.py",  # models without memory, on its meta device
        "dynapipe_ext/peak_memory.py",
        "executor/stages/accumulator.py",
        "executor/checkpoints/megatron*.py",  # a rank's tensors, through megatron-core's dist_checkpointing
        "executor/checkpoints/saving.py",
        "executor/checkpoints/deepspeed*.py",
        "executor/checkpoints/transformers*.py",
        "executor/device.py",
        "executor/stages/chunk_runner.py",
        "executor/loader.py",
        "executor/drop_in/*.py",  # inside Megatron's own loops
        "executor/loops/*.py",  # inside other loops
        "executor/measuring/rate.py",  # it times the user's model
        "executor/measuring/transformers_layers.py",
        "executor/measuring/profiling.py",  # so does this one
        "executor/measuring/exchanges.py",  # and its ranks' exchanges
        "executor/measuring/profiler_ranges.py",
        "executor/stages/carried_keys.py",
        "executor/stages/deepspeed/*.py",
        "executor/stages/guarded_optimizer.py",
        "executor/stages/joined_ranks.py",
        "executor/stages/kernels.py",
        "executor/stages/megatron/*.py",
        "executor/stages/megatron_cpu.py",
        "executor/stages/position_losses.py",
        "executor/stages/preference_loss.py",
        "executor/stages/sliced_head.py",
        "executor/stages/split_linear.py",
        "executor/stages/spread_head.py",
        "executor/stages/spread_attention.py",
        "executor/stages/torch_stage.py",
        "executor/stages/transformers/*.py",
        "executor/stages/weight_decay.py",
        "executor/transport/torch_p2p.py",
        "executor/transport/parallel_context.py",
        "executor/transport/strict.py",
        "launch/commands/doctor.py",
        "launch/commands/profile_model.py",  # the name of the device
        "launch/rank/deepspeed_run.py",
        "launch/rank/megatron_run.py",
        "launch/rank/transformers_run.py",
        "launch/megatron_core.py",  # a training script to copy from
        "launch/processes/rendezvous.py",  # what that uses
        "launch/processes/torchrun.py",  # its agent
        "launch/rank/meeting.py",  # torch's store, and the process group of all ranks
        "launch/rank/references.py",
        "launch/rank/variant_run.py",
        "launch/rank/one_rank.py",
        "launch/rank/rank_program.py",  # the store of torchrun's agent, and its record of failures
        "tools/checkpoint/*.py",
    ),
    "redis": ("executor/store/redis.py", "launch/commands/doctor.py"),
    "megatron": (
        "dynapipe_ext/megatron.py",
        "executor/checkpoints/megatron*.py",
        "executor/drop_in/*.py",
        "executor/loops/running_model.py",
        "executor/loops/megatron_bridge.py",
        "executor/stages/guarded_optimizer.py",  # its schedule of learning rates
        "executor/stages/megatron/*.py",
        "executor/stages/megatron_cpu.py",
        "launch/megatron_core.py",
    ),
    "deepspeed": ("executor/stages/deepspeed/*.py",),
    "transformers": (
        "dynapipe_ext/batching/inference/generation.py",  # its stopping criterion of strings
        "dynapipe_ext/batching/inference/memory_profiling.py",  # builds the user's model
        "dynapipe_ext/data/preprocessing/transformers_encoder.py",  # tokenizers that only it can load
        "dynapipe_ext/batch/document_attention.py",  # registers an attention that keeps documents apart
        "dynapipe_ext/batching/packing/check.py",  # builds a small twin of the user's model
        "dynapipe_ext/models/module_tree.py",  # the modules of any of its models
        "executor/stages/transformers/*.py",
    ),
    "verl": ("executor/loops/verl.py",),
    "torchtitan": ("executor/loops/torchtitan.py",),
    "swift": ("executor/loops/ms_swift.py",),
    "slime": ("executor/loops/slime.py",),
    "peft": ("executor/stages/transformers/adapters.py",),
    "flash_attn": ("dynapipe_ext/batch/packed_attention.py",),
}
ENVIRONMENT = "launch/processes/env.py"
AMBIENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}

# Planning processes start with these: each must import without what only trainers have.
LIGHT = (
    "dynapipe_ext",
    "dynapipe_ext.batch.micro_batches",
    "dynapipe_ext.schedules.planner",
    "dynapipe_ext.schedules.search.optimizer",
    "dynapipe_ext.executor.instructions",
    "dynapipe_ext.executor.proof",
    "dynapipe_ext.executor.wire",
    "dynapipe_ext.executor.engine",
    "dynapipe_ext.launch.cli",
    "dynapipe_ext.launch.subcommands",
    "dynapipe_ext.launch.processes.cluster",
)
HEAVY = ("torch", "redis", "megatron", "deepspeed", "transformers")

# What plans and measured costs depend on: BLAS, LAPACK and vector libraries round by the processor.
FITTING = (
    "dynapipe_ext/costs/*",
    "dynapipe_ext/batching/inference/memory_*",
    "dynapipe_ext/batching/sampling/*",
    "dynapipe_ext/partitioning/*",
    "executor/measuring/*",
    "schedules/*",
    "tools/estimate/*",
)
BY_PROCESSOR = (
    {"linalg", "dot", "vdot", "inner", "matmul", "tensordot", "einsum", "polyfit", "power", "float_power", "cbrt"}
    | {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "hypot", "logaddexp"}
)  # fmt: skip


def imported_names(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every module name that is imported, by statement or by importlib with a literal, with its line."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def layer(module: str) -> str:
    """The layer that a module's full name lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[1:] else "dynapipe_ext"


def faults(path: str, text: str) -> list[str]:
    """What a source file (path below the root) does against the rules."""
    nodes = list(ast.walk(ast.parse(text)))
    own = LAYERS.index(path.partition("/")[0])
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"{path}:{node.lineno}: relative import: use the full name dynapipe_ext.…")
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            found.append(f"{path}:{node.lineno}: star import: name what you take")
        if isinstance(node, ast.Attribute) and node.attr in AMBIENT and path != ENVIRONMENT:
            dotted = ast.unparse(node)
            if dotted == f"os.{node.attr}":
                found.append(f"{path}:{node.lineno}: {dotted} is used in {ENVIRONMENT} alone: take an argument")
    for name, line in imported_names(nodes):
        top = name.partition(".")[0]
        if top in LAYERS[1:]:
            found.append(f"{path}:{line}: import dynapipe_ext.{name}, not {name}: it would load a second copy")
        if top == "dynapipe_ext" and path not in FACADES and LAYERS.index(layer(name)) > own:
            found.append(f"{path}:{line}: {LAYERS[own]} must not import {name} of a layer to its right")
        if top in RIM and not any(fnmatch.fnmatch(path, pattern) for pattern in RIM[top]):
            found.append(f"{path}:{line}: {top} is imported at the rim only: see RIM in tests/repo/test_layers.py")
        if name in {f"os.{one}" for one in AMBIENT} and path != ENVIRONMENT:
            found.append(f"{path}:{line}: {name} is used in {ENVIRONMENT} alone: take an argument")
    return sorted({*found, *rounding_faults(path, nodes)})


def rounding_faults(path: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Arithmetic whose last bits the processor decides, where a plan or a fit may depend on it."""
    if not any(fnmatch.fnmatch(path, pattern) for pattern in FITTING):
        return
    for node in nodes:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            yield f"{path}:{node.lineno}: @ rounds by the processor: use dynapipe_ext.reproducible.product"
        elif (
            isinstance(node, ast.Attribute) and node.attr in BY_PROCESSOR and ast.unparse(node.value) in ("np", "numpy")
        ):
            yield f"{path}:{node.lineno}: np.{node.attr} rounds by the processor: use dynapipe_ext.reproducible"


def name_faults(path: str) -> list[str]:
    """What is wrong with a module's name."""
    parts = PurePosixPath(path).with_suffix("").parts[1:]
    found = [f"{path}: {part!r} says nothing about what is inside" for part in parts if part in VAGUE]
    # Run as a script, a file's folder comes first on the path: its neighbours hide the standard library's modules.
    if parts and parts[-1] in sys.stdlib_module_names - {"__init__", "__main__"}:
        found.append(f"{path}: {parts[-1]!r} is a module of the standard library: choose another name")
    return found


def test_every_module_keeps_to_its_layer_and_the_rim(all_sources: Any) -> None:
    assert [fault for source in all_sources for fault in faults(source.path, source.file.read_text())] == []


def test_every_module_has_a_telling_name_of_its_own(all_sources: Any) -> None:
    assert [fault for source in all_sources for fault in name_faults(source.path)] == []


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        ("schedules/search/dispatch.py", "from dynapipe_ext.executor.wire import encode", "layer to its right"),
        ("dynapipe_ext/batch/micro_batches.py", "from dynapipe_ext import schedules", "layer to its right"),
        (
            "dynapipe_ext/batch/micro_batches.py",
            "def f():\n    import dynapipe_ext.launch.cli",
            "layer to its right",
        ),
        ("executor/engine.py", "from .wire import encode", "relative import"),
        ("executor/engine.py", "from dynapipe_ext.executor.wire import *", "star import"),
        ("launch/rank/one_rank.py", "import tools.estimate", "second copy"),
        ("executor/engine.py", "def f():\n    import torch.nn", "rim only"),
        ("executor/engine.py", "import importlib\nimportlib.import_module('torch')", "rim only"),
        ("executor/loader.py", "import redis", "rim only"),
        ("launch/rank/one_rank.py", "import os\nx = os.environ['A']", "launch/processes/env.py alone"),
        ("launch/rank/one_rank.py", "from os import getenv", "launch/processes/env.py alone"),
        ("dynapipe_ext/costs/grid.py", "x = a @ b", "@ rounds"),
        ("schedules/planner.py", "import numpy as np\nx = np.linalg.solve(a, b)", "np.linalg rounds"),
    ],
)
def test_each_rule_finds_its_offence(path: str, text: str, says: str) -> None:
    assert any(says in fault for fault in faults(path, text)), faults(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("launch/cli.py", "from dynapipe_ext.schedules.search.dispatch import best"),
        ("dynapipe_ext/__init__.py", "from dynapipe_ext.executor.engine import PipelineExecutor"),
        ("executor/stages/megatron/stage.py", "import torch\nfrom megatron.core import parallel_state"),
        ("launch/processes/env.py", "import os\nx = os.environ"),
        ("executor/stages/split_linear.py", "x = a @ b"),
    ],
)
def test_what_is_allowed_is_no_offence(path: str, text: str) -> None:
    assert faults(path, text) == []


def test_bad_names_are_found() -> None:
    assert name_faults("executor/utils.py")
    assert name_faults("tools/profile.py")
    assert not name_faults("executor/wire.py")


def test_planning_loads_nothing_that_only_trainers_have() -> None:
    script = f"""
import importlib, os, sys
import numpy
for module in {LIGHT!r}:  # each in a fresh process, but for numpy
    if os.fork() == 0:
        importlib.import_module(module)
        for name in {HEAVY!r}:
            if name in sys.modules:
                print(module, "loads", name, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
