"""What planned steps gained, as the log of a training loop says it."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.drop_in import gains as module
from dynapipe_ext.executor.drop_in.gains import ActionClock, GainLog, IntervalFigures, StepFigures, StockRows, log_gains
from dynapipe_ext.schedules.evaluation.simulate import simulate
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b

COSTS = TokenCosts(2, ns_per_token_squared=3)


def rows(**changes: Any) -> StockRows:
    sizes: dict[str, Any] = {"pp": 2, "dp": 2, "micro_batch_size": 2, "seq_len": 64, "recompute": "none"}
    return StockRows(costs=COSTS, **sizes | changes)


def one_f_one_b_s(count: int) -> float:
    """Of micro-batches of two rows of 64 on two ranks."""
    micro_batch = MicroBatch(tuple(SampleLength(i, 64, 0, 64) for i in range(2)))
    return simulate(interleaved_1f1b(2, count, 1), COSTS.evaluate([micro_batch] * count)).makespan_s


def test_stocks_micro_batches_have_a_row_a_sample_or_rows_that_are_full() -> None:
    lengths = [5] * 15 + [64]  # 139 positions: 3 rows of 64, where padded there are 16
    assert rows().padded_s(lengths) == one_f_one_b_s(4)  # of each of two replicas
    assert rows().packed_s(lengths) == one_f_one_b_s(1)
    assert rows(dp=1).packed_s([64] * 5) == one_f_one_b_s(3)  # the last row is empty, and runs

    class Refusing(TokenCosts):
        def evaluate(self, micro_batches: Any) -> Any:
            costs = super().evaluate(micro_batches)
            return costs.refuse(costs.forward_ns[0] >= 0)

    unknown = StockRows(costs=Refusing(2), pp=2, dp=1, micro_batch_size=1, seq_len=64, recompute="none")
    assert unknown.padded_s([5]) is None


def figures(predicted_s: float, bubble: float, busy_s: float, span_s: float) -> StepFigures:
    sizes = {"num_micro_batches": 6, "real_tokens": 90, "padded_tokens": 100}
    return StepFigures(**sizes, predicted_s=predicted_s, predicted_bubble=bubble, busy_s=busy_s, span_s=span_s)


def test_bubbles_are_idle_time_of_all_ranks_over_the_longest_ranks_time() -> None:
    """Two ranks, two steps: the second rank's replica is predicted shorter, and waits for the first."""
    first = [figures(2.0, 0.5, 1.0, 2.0), figures(2.0, 0.0, 2.0, 2.0)]
    second = [figures(1.0, 0.0, 0.5, 1.0), figures(2.0, 0.5, 1.0, 1.5)]
    found = IntervalFigures.of(first, [[step.of_rank for step in steps] for steps in (first, second)])
    assert (found.num_micro_batches, found.padding, found.predicted_s) == (6, pytest.approx(0.1), 2.0)
    assert found.predicted_bubble == pytest.approx(1 - (1 + 1 + 2 + 1) / (2 * 4))
    assert found.measured_bubble == pytest.approx(1 - (1 + 0.5 + 2 + 1) / (2 * 4))


def test_actions_are_timed_and_what_lies_between_them_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1.0, 2.0, 5.0, 5.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    clock = ActionClock(torch.device("cpu"))
    for label in ("0F0", "0B0"):
        with clock.action(label):
            pass
    assert clock.take() == (1.5, 4.5)
    assert clock.take() == (0.0, 0.0)


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars[f"{name} at {iteration}"] = value

    def log(self, scalars: dict[str, float], iteration: int) -> None:
        self.scalars |= {f"{name} at {iteration}": value for name, value in scalars.items()}


def test_each_interval_of_the_log_says_what_was_gained_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(module, "gather_json", lambda value, device: [value, value])
    gains = GainLog()
    pipeline: Any = Namespace(device=torch.device("cpu"), costs=COSTS, topology=Namespace(pp=2, dp=1), recompute=None)
    args = Namespace(micro_batch_size=2, seq_length=64, log_interval=2)
    tensorboard, wandb = Writer(), Writer()
    training = Namespace(
        training_log=lambda losses, iteration: "report",
        get_args=lambda: args,
        get_tensorboard_writer=lambda: tensorboard,
        get_wandb_writer=lambda: wandb,
    )
    log = log_gains(gains, training)
    for iteration in range(1, 6):
        prediction = Namespace(bubble_ratio=0.25)
        plan: Any = Namespace(
            num_micro_batches=(3,), real_tokens=40, padded_tokens=50, makespan_s=0.5, prediction=prediction
        )
        with gains.timed(plan, pipeline)("0F0"):
            pass
        gains.count([5] * 8, pipeline, args)
        assert log({}, iteration=iteration) == "report"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:3] for line in lines] == [
        [f"dynapipe: iteration {i}", "micro-batches a step: 3.0", "padding: 20.0%"] for i in (2, 4)
    ]
    assert "bubble: 25.0% predicted, " in lines[0]
    assert "measured (ranks share this machine's cores) | predicted step: 500.0 ms" in lines[0]
    stock = f"(simulated): {1e3 * one_f_one_b_s(4):.3g} ms padded, {1e3 * one_f_one_b_s(1):.3g} ms in full rows"
    assert lines[0].endswith(f"the same samples in stock's micro-batches under 1F1B {stock}")
    assert tensorboard.scalars["dynapipe/padding at 4"] == pytest.approx(0.2)
    assert tensorboard.scalars["dynapipe/step of stock, padded (s) at 2"] == one_f_one_b_s(4)
    assert tensorboard.scalars == wandb.scalars
    assert all(map(math.isfinite, tensorboard.scalars.values()))
    assert len(tensorboard.scalars) == 14
