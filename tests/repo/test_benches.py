"""Benches time proven steps only: whatever a bench states of a step comes from `tests/bench/proven.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# Why a bench may plan or simulate by itself. None of them states the seconds of a step that is neither proven nor run.
EXEMPT = {
    "contenders.py": "tries placements, whose steps are planned again and proven",
    "dynamic_cp.py": "a model of another way of training, which no plan of ours can say; its pages name it so",
    "emulation.py": "runs proven steps",
    "gpu.py": "measures steps that have run",
    "grid.py": "schedules of bare costs, which it proves (prove_schedule)",
    "loops.py": "micro-batches that a loop has run",
    "noise.py": "draws times for proven steps, and dispatches at run time",
    "peers.py": "builds the peers' steps, and proves them",
    "plans.py": "times planning; each plan is proven before it is judged",
    "proven.py": "proves",
    "same_plans.py": "digests of plans",
    "scale.py": "times planning and proof apart",
    "under_noise.py": "draws times for proven steps",
    "verify.py": "times the proof",
}
NO_PLANNERS = {"keys.plan", "_KEYS.plan", "source.plan"}  # names in the store, and what a rank reads there
SIMULATES = {"makespan_ns", "last_end_ns", "simulate", "simulate_ns", "predicted"}


def planning_calls(text: str) -> set[str]:
    """What a script calls to plan or simulate a step without proving it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr == "plan":
                found |= {f"{ast.unparse(called.value)}.plan"} - NO_PLANNERS
            if isinstance(called, ast.Name) and called.id in SIMULATES:
                found.add(called.id)
    return found


@pytest.mark.parametrize(
    "planned", ["planner.plan(samples)", "Planner(t, c, 1).plan(l).makespan_s", "simulate_ns(s, c)"]
)
def test_a_bench_that_plans_by_itself_is_found(planned: str) -> None:
    assert planning_calls(planned)
    assert not planning_calls("planned_step(planner, samples).step_plan.makespan_s")


def test_benches_time_proven_steps_only(root: Path) -> None:
    benches = root / "tests" / "bench"
    planning = {path.name: planning_calls(path.read_text()) for path in benches.glob("*.py")}
    unproven = {name: calls for name, calls in planning.items() if calls and name not in EXEMPT}
    assert unproven == {}, "plan and prove with tests/bench/proven.py"
    assert EXEMPT.keys() <= planning.keys()
