"""Several ranks on one GPU: what they learn beside one process on the CPU, and their memory beside their plans'.

All is as between devices but the transport, which goes through the host (`tests/support/staged_group.py`).
"""

from __future__ import annotations

import pytest
import torch

from tests.support.one_device import DTYPES, JOBS, NUM_STEPS, Found, peaks_on_one_device, steps_on_one_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU alone")

# Of a norm, and of a gradient's largest entry, by step; of a loss a tenth. bfloat16 has 8 bits. After an update,
# entries whose gradient is rounding noise have moved by Adam's full step.
LIMITS = {"float32": (2e-4, 1e-3), "bfloat16": (6e-2, 0.2)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return steps_on_one_device(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", JOBS)
def test_ranks_on_one_device_learn_what_one_process_learns_on_the_cpu(name: str, dtype: str, found: Found) -> None:
    job = JOBS[name]
    expected = found.alone[job.case.model]
    own = [of_rank[name, dtype] for of_rank in found.of_ranks if (name, dtype) in of_rank]
    assert len(own) == job.case.topology.world_size
    for rank, steps in enumerate(own):
        assert len(steps) == len(expected) == NUM_STEPS
        for step, (mine, wanted, limit) in enumerate(zip(steps, expected, LIMITS[dtype], strict=True)):
            place = f"rank {rank} step {step}"
            print(f"{place}: {mine.loss / wanted.loss - 1:.1e} {mine.norm / wanted.norm - 1:.1e} {mine.error:.1e}")
            assert mine.loss == pytest.approx(wanted.loss, rel=limit / 10), place
            assert mine.norm == pytest.approx(wanted.norm, rel=limit), place
            assert mine.error <= limit, place


def test_memory_of_each_rank_is_near_what_its_plan_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By costs that a run measures before it begins. Beside what these count, libraries take 32 MiB and more a rank."""
    for rank, peak in enumerate(peaks_on_one_device(tmp_path_factory.mktemp("peaks"))):
        ratio = peak.predicted_bytes / peak.allocated_bytes
        print(f"rank {rank}: predicted {peak.predicted_bytes}, allocated {peak.allocated_bytes} bytes, {ratio:.3f}")
        assert 0.8 <= ratio <= 1.25, f"rank {rank}"
