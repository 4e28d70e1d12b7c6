"""Steps on a GPU: losses and gradients beside those of the CPU, bits that repeat, and a host that never waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.executor.device import compute_deterministically
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.transport.inline import InlineHub
from tests.gpu.steps import CASES, EXPERT_CASES, EXPERTS, Case, alone, batches_of, learned, megatron_stage, plan_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU alone")

# Of a gradient's largest entry. bfloat16 has 8 bits, and three layers of them lie between a gradient and its loss.
TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Case -> loss and gradients in float32 on the CPU."""
    file = tmp_path_factory.mktemp("cpu") / "steps.pt"
    command = [sys.executable, "-m", "tests.gpu.steps", str(file)]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=Path(__file__).parents[2])
    found: dict[str, dict[str, torch.Tensor]] = torch.load(file)
    return found


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    place = torch.device("cuda", 0)
    torch.cuda.set_device(place)
    with alone(place):
        yield place


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stage(request: pytest.FixtureRequest, device: torch.device) -> tuple[str, Any, Any]:
    return request.param, *megatron_stage(request.param, device)


def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference of any entry, relative to the largest of its tensor, and of which."""
    assert found.keys() == wanted.keys()
    return max(
        (float((found[name] - x).abs().max() / x.abs().max().clamp(min=1e-12)), name) for name, x in wanted.items()
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_cpu(case: Case, stage: Any, expected: Any) -> None:
    dtype, own, ddp = stage
    error, name = worst(learned(own, ddp, case), expected[str(case)])
    print(f"{dtype} {case}: {error:.1e} ({name})")
    assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_learn_what_they_learn_on_the_cpu(dtype: str, device: torch.device, expected: Any) -> None:
    own, ddp = megatron_stage(dtype, device, shape=EXPERTS)
    for case in EXPERT_CASES:
        found, wanted = learned(own, ddp, case), expected[f"experts, {case}"]
        if dtype == "float32":
            error, name = worst(found, wanted)
            assert error < TOLERANCE[dtype], name
            continue
        # Rounded, some tokens go to another expert, whose gradient then differs by more than rounding.
        assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-2)
        mine, theirs = (torch.cat([one[name].flatten() for name in sorted(wanted)]) for one in (found, wanted))
        assert float(torch.cosine_similarity(mine, theirs, dim=0)) > 0.95


@pytest.mark.parametrize("case", [c for c in CASES if not c.pieces], ids=str)
def test_no_action_makes_the_host_wait_for_the_device(case: Case, stage: Any) -> None:
    """So that kernels of the next action are queued while those of this one run."""
    dtype, own, _ = stage
    if dtype == "float32":
        pytest.skip("trained in 16 bits")
    plan = plan_of(case)
    batches = batches_of(plan, pinned=True)
    executor = PipelineExecutor(own, InlineHub().transport(0))
    executor.execute(plan, batches)  # what is made once may wait
    own.start_step(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor._run(plan, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    own.finish_step()


def test_deterministic_steps_have_the_same_bits_twice(device: torch.device) -> None:
    compute_deterministically()
    try:
        own, ddp = megatron_stage("bfloat16", device, deterministic=True)
        for case in CASES:
            first, second = (learned(own, ddp, case) for _ in range(2))
            assert all(torch.equal(x, second[name]) for name, x in first.items()), case
    finally:
        torch.use_deterministic_algorithms(False)
