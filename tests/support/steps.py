"""Steps that some run might have done."""

from __future__ import annotations

from typing import Any

from dynapipe_ext.executor.events import AllRanks, DriftingShape, StepDone
from dynapipe_ext.models.flops import Positions, Work


def all_ranks(num_steps: int = 1, bubble_ratio: float | None = 0.25) -> AllRanks:
    return AllRanks(
        num_steps=num_steps,
        makespan_s=0.4,
        bubble_ratio=bubble_ratio,
        cpu_s=1.5 * num_steps,
        work=Work(Positions(900 * num_steps), {"full": Positions(1000 * num_steps, 0, 7)}),
        predicted_makespan_s=0.3,
        predicted_bubble_ratio=0.2,
        predicted_peak_bytes=(50, 70),
        peak_bytes=(40, 60),
        exposed_planning_s=0.125,
        furthest_off=DriftingShape(1, "B", (4, 512, 0), 0.3, 0.1),
    )


def a_step(step: int, *, bubble_ratio: float | None = None, gathered: int = 1, **changes: Any) -> StepDone:
    """Step `step` (from 0) of 1,000 positions in a second; `gathered` is how many steps all ranks' sums are of."""
    given: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "epoch_step": step,
        "loss": 2.0 / (1 + step),
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "real_tokens": 900,
        "padded_tokens": 1000,
        "num_micro_batches": (2, 3),
        "step_s": 1.0,
        "executed_s": 0.75,
        "cpu_s": 0.5,
        "peak_bytes": 40,
        "predicted_makespan_s": 0.3,
        "predicted_bubble_ratio": 0.2,
        "predicted_peak_bytes": 50,
        "all_ranks": all_ranks(gathered, bubble_ratio) if gathered else None,
    }
    return StepDone(**(given | changes))
